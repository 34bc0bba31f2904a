//! Admitted peers that break the protocol: each is closed with one bounded line, and an honest actor
//! beside them goes on.

use bytes::Bytes;
use quinn::{Connection, RecvStream, SendStream};

use super::*;
use crate::{
    AckOutcome, FromActor, FromLearner, Join, PROTOCOL_VERSION,
    admission::{self, Binding},
    frame::{self, HEADER_LEN, Header, Kind},
    tls, wire,
};

/// Joins like an actor and hands out the bare streams.
pub(super) async fn intruder(join: &Join) -> (Connection, SendStream, RecvStream) {
    let (connection, send, recv, _) = late_intruder(join, Duration::ZERO).await;
    (connection, send, recv)
}

/// The same with its identity.
pub(super) async fn intruder_with_key(
    join: &Join,
) -> (Connection, SendStream, RecvStream, Identity) {
    late_intruder(join, Duration::ZERO).await
}

/// The end of its preamble comes that much after its bytes.
async fn late_intruder(
    join: &Join,
    late: Duration,
) -> (Connection, SendStream, RecvStream, Identity) {
    let endpoint = quinn::Endpoint::client(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a port");
    let identity = Identity::generate().expect("made");
    let crypto = tls::client(Some(&identity), tls::Pinned::new(join.learner)).expect("a client");
    let mut client = quinn::ClientConfig::new(Arc::new(crypto));
    client.transport_config(socket::transport(&times(), socket::Side::Actor));
    let learner = SocketAddr::from(([127, 0, 0, 1], join.port));
    let connecting = endpoint.connect_with(client, learner, "rollcall").expect("an address");
    let connection = connecting.await.expect("TLS");
    let binding = Binding::of(&connection, &identity.fingerprint()).expect("exported");
    let preamble = admission::preamble(PROTOCOL_VERSION, &binding.prove(&join.secret));
    let mut first = connection.open_uni().await.expect("one stream");
    first.write_all(&preamble).await.expect("room");
    tokio::time::sleep(late).await;
    first.finish().expect("open");
    let (mut send, recv) = connection.open_bi().await.expect("proven");
    let body = wire::encode_hello(&hello()).expect("sound");
    send.write_all(&frame::encode(Kind::Hello, &body).expect("short")).await.expect("room");
    (connection, send, recv, identity)
}

async fn expect_violation(connection: &Connection, word: &str) {
    let closed: LinkError = connection.closed().await.into();
    let LinkError::Closed { code: CloseCode::Violation, reason } = closed else {
        panic!("closed by {closed}, not for {word}");
    };
    assert!(reason.contains(word), "{reason:?} does not speak of {word:?}");
    assert!(reason.len() <= wire::MAX_LINE_BYTES && !reason.contains('\n'), "{reason:?}");
}

fn ready() -> Vec<u8> {
    let (kind, body) =
        wire::encode_from_actor(&FromActor::Ready { free: 1, received: 0 }).expect("sound");
    frame::encode(kind, &body).expect("short")
}

#[tokio::test]
async fn hostile_bytes_end_their_own_link_only() {
    let mut learner = learner();
    let (_actor, mut honest, mut ours) = learner.pair().await;
    let join = learner.endpoint.join("127.0.0.1").expect("bound");
    let flipped = |at: usize| {
        let mut bytes = ready();
        bytes[at] ^= 0x40;
        bytes
    };
    let nonsense = frame::encode(Kind::Ready, &[0xff; 12]).expect("short");
    let trailing = frame::encode(Kind::Ready, &[0; 13]).expect("short");
    let long = Header { kind: Kind::Ready, len: u32::MAX as usize, digest: Digest([0; 32]) };
    let hello_again =
        frame::encode(Kind::Hello, &wire::encode_hello(&hello()).expect("sound")).expect("short");
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (b"\x00\x01\x02\x03".to_vec(), "magic"),
        (flipped(4), "version"),
        (flipped(6), "kind"),
        (flipped(20), "hashes"),
        (flipped(HEADER_LEN), "hashes"),
        (long.to_bytes().to_vec(), "limit"),
        (nonsense, "free"),
        (trailing, "1 bytes follow"),
        (frame::encode(Kind::Episode, &[1; 64]).expect("short"), "channel"),
        (frame::encode(Kind::Welcome, &[1; 64]).expect("short"), "channel"),
        (hello_again, "a second time"),
    ];
    for (bytes, word) in cases {
        let ((connection, mut send, _recv), mut theirs) =
            tokio::join!(intruder(&join), learner.joined());
        send.write_all(&bytes).await.expect("room");
        let (error, ()) = tokio::join!(theirs.recv(), expect_violation(&connection, word));
        let error = error.expect_err("a violation");
        assert!(matches!(error, LinkError::Violation(_)), "{error}");
    }
    // The honest actor never noticed.
    let lease = group(1, 1).remove(0);
    let id = honest.sender().submit(episode(&lease).encode().expect("sound")).expect("short");
    assert!(matches!(ours.recv().await, Ok(FromActor::Episode { id: got, .. }) if got == id));
    let ack = FromLearner::Ack { episode: id, outcome: AckOutcome::Stored };
    ours.sender().send(ack.clone()).await.expect("live");
    assert_eq!(honest.recv().await, Ok(ack));
}

#[tokio::test]
async fn every_actor_has_all_its_streams_however_its_preamble_arrived() {
    let mut learner = learner();
    let join = learner.endpoint.join("127.0.0.1").expect("bound");
    for late in [Duration::ZERO, Duration::from_millis(200)] {
        let ((connection, _send, _recv, _), _theirs) =
            tokio::join!(late_intruder(&join, late), learner.joined());
        let mut held = Vec::new();
        for open in 0..8 {
            let stream = tokio::time::timeout(times().frame, connection.open_uni()).await;
            held.push(stream.unwrap_or_else(|_| panic!("{open} streams only")).expect("live"));
        }
    }
}

#[tokio::test]
async fn hostile_episode_and_fetch_streams_end_the_link() {
    let mut learner = learner();
    let join = learner.endpoint.join("127.0.0.1").expect("bound");
    let long = Header { kind: Kind::Episode, len: 64 << 20, digest: Digest([0; 32]) };
    let two = [frame::encode(Kind::Episode, b"a"), frame::encode(Kind::Episode, b"b")]
        .map(|frame| frame.expect("short"))
        .concat();
    let cut = frame::encode(Kind::Episode, b"abc").expect("short");
    let episodes: Vec<(&[u8], &str)> = vec![
        (b"junk", "magic"),
        (&[], "before its frame"),
        (&cut[..cut.len() - 1], "inside a frame"),
        (&two, "after its one frame"),
    ];
    let long = long.to_bytes();
    for (bytes, word) in episodes.into_iter().chain([(long.as_slice(), "limit")]) {
        let ((connection, _send, _recv), mut theirs) =
            tokio::join!(intruder(&join), learner.joined());
        let mut stream = connection.open_uni().await.expect("admitted");
        stream.write_all(bytes).await.expect("room");
        stream.finish().expect("open");
        let (error, ()) = tokio::join!(theirs.recv(), expect_violation(&connection, word));
        assert!(matches!(error, Err(LinkError::Violation(_))), "{error:?}");
    }
    for (bytes, word) in [(ready(), "channel"), (b"RCL1xxxxxxxxxxx".to_vec(), "version")] {
        let ((connection, _send, _recv), mut theirs) =
            tokio::join!(intruder(&join), learner.joined());
        let (mut ask, _answer) = connection.open_bi().await.expect("admitted");
        ask.write_all(&bytes).await.expect("room");
        ask.finish().expect("open");
        let (error, ()) = tokio::join!(theirs.recv(), expect_violation(&connection, word));
        assert!(matches!(error, Err(LinkError::Violation(_))), "{error:?}");
    }
}

#[tokio::test]
async fn a_frame_that_drips_is_cut_off() {
    let mut learner = learner_with(|config| config.link.frame = SHORT);
    let join = learner.endpoint.join("127.0.0.1").expect("bound");
    let ((connection, mut send, _recv), mut theirs) =
        tokio::join!(intruder(&join), learner.joined());
    let drip = async {
        for byte in ready() {
            if send.write_all(&[byte]).await.is_err() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let (error, (), ()) =
        tokio::join!(theirs.recv(), drip, expect_violation(&connection, "within 1 s"));
    assert!(matches!(error, Err(LinkError::Violation(_))), "{error:?}");
}

#[tokio::test]
async fn an_actor_that_is_not_listened_to_is_held_back_not_buffered() {
    let mut learner = learner();
    let join = learner.endpoint.join("127.0.0.1").expect("bound");
    let ((connection, _send, _recv), mut theirs) = tokio::join!(intruder(&join), learner.joined());
    // 16 MiB each; the learner's program receives none of them.
    let body = Bytes::from(vec![0x55; Kind::Episode.cap()]);
    let header = Header::of(Kind::Episode, &body).expect("at the cap");
    let mut written = 0_usize;
    let flood = async {
        loop {
            let mut stream = connection.open_uni().await.expect("live");
            stream::write_frame(&mut stream, header, body.clone()).await.expect("live");
            stream.finish().expect("open");
            written += 1;
        }
    };
    let _ = tokio::time::timeout(Duration::from_secs(4), flood).await;
    assert!((1..=6).contains(&written), "{written} episodes of 16 MiB were taken");
    // What waits is still good.
    assert!(matches!(theirs.recv().await, Ok(FromActor::Episode { .. })));
}

#[tokio::test]
async fn an_actor_that_does_not_listen_loses_its_link_instead_of_filling_a_queue() {
    let mut learner = learner_with(|config| config.link.frame = SHORT);
    let join = learner.endpoint.join("127.0.0.1").expect("bound");
    let ((connection, _send, _recv), theirs) = tokio::join!(intruder(&join), learner.joined());
    let mut leases = group(1, 2);
    leases.iter_mut().for_each(|lease| lease.task.prompt = "x".repeat(250_000));
    let mut sent = 0;
    let error = loop {
        match theirs.sender().send(FromLearner::Grant(leases.clone())).await {
            Ok(()) => sent += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, LinkError::Violation(_)), "{error}");
    assert!(sent < 300, "{sent} grants were queued");
    expect_violation(&connection, "does not read").await;
}
