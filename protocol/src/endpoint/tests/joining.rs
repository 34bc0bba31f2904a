//! Who gets in and who does not, and what each is told.

use std::collections::BTreeSet;

use quinn::{ClientConfig, Endpoint};
use tokio::time::Instant;

use super::*;
use crate::{
    ConnectError, Join, PROTOCOL_VERSION, RefusalCode,
    admission::{self, Binding},
    tls,
};

#[tokio::test]
async fn an_actor_with_the_right_string_and_checkpoint_joins() {
    let mut learner = learner();
    let (actor, theirs, ours) = learner.pair().await;
    assert_eq!(ours.actor, actor.identity().actor_id());
    assert_eq!(*ours.hello, hello());
    assert_eq!(*theirs.welcome(), welcome());
}

#[tokio::test]
async fn another_learner_at_the_address_is_recognised() {
    let mut learner = learner();
    let mut join = learner.endpoint.join("127.0.0.1").expect("bound");
    join.learner = Digest::of(b"the learner that the actor wants");
    let actor = ActorEndpoint::new(join, Identity::generate().expect("randomness"), times());
    let (error, failure) = tokio::join!(actor.connect(hello()), learner.refused());
    let error = error.expect_err("wrong pin");
    assert!(matches!(error, ConnectError::WrongLearner { .. }), "{error}");
    assert!(error.to_string().contains("use the join string"), "{error}");
    assert!(!error.may_retry());
    assert!(matches!(failure, JoinFailure::Link(_)), "{failure}");
}

#[tokio::test]
async fn a_wrong_secret_is_refused_and_says_what_to_do() {
    let mut learner = learner();
    let join = learner.endpoint.join("127.0.0.1").expect("bound");
    learner.endpoint.set_secret(Secret::generate().expect("randomness"));
    let actor = ActorEndpoint::new(join, Identity::generate().expect("randomness"), times());
    let (error, failure) = tokio::join!(actor.connect(hello()), learner.refused());
    let error = error.expect_err("wrong secret");
    assert!(matches!(error, ConnectError::WrongSecret { .. }), "{error}");
    assert!(error.to_string().contains("printed last"), "{error}");
    assert_eq!(failure, JoinFailure::Proof);
}

/// A client of our own making: with or without a certificate, and any opening bytes.
async fn raw(
    join: &Join,
    identity: Option<&Identity>,
) -> Result<quinn::Connection, quinn::ConnectionError> {
    let endpoint = Endpoint::client(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a port");
    let crypto = tls::client(identity, tls::Pinned::new(join.learner)).expect("a client");
    let mut client = ClientConfig::new(Arc::new(crypto));
    client.transport_config(socket::transport(&times(), socket::Side::Actor));
    let learner = SocketAddr::from(([127, 0, 0, 1], join.port));
    endpoint.connect_with(client, learner, "rollcall").expect("an address").await
}

/// Opens with `bytes` and returns how the learner closes.
async fn open_with(connection: &quinn::Connection, bytes: &[u8]) -> LinkError {
    let mut stream = connection.open_uni().await.expect("one stream is allowed");
    stream.write_all(bytes).await.expect("room");
    stream.finish().expect("open");
    connection.closed().await.into()
}

#[tokio::test]
async fn a_client_without_a_certificate_is_refused_by_tls() {
    let mut learner = learner();
    let join = learner.endpoint.join("127.0.0.1").expect("bound");
    let attempt = async {
        match raw(&join, None).await {
            Ok(connection) => connection.closed().await,
            Err(error) => error,
        }
    };
    let (error, failure) = tokio::join!(attempt, learner.refused());
    assert_eq!(close::tls_alert(&error), Some(116), "{error}");
    assert_eq!(failure, JoinFailure::NoCertificate);
    assert!(failure.to_string().contains("no client certificate"));
}

#[tokio::test]
async fn a_proof_made_for_another_key_or_session_is_refused() {
    let mut learner = learner();
    let join = learner.endpoint.join("127.0.0.1").expect("bound");
    let (mallory, alice) =
        (Identity::generate().expect("made"), Identity::generate().expect("made"));
    let connection = raw(&join, Some(&mallory)).await.expect("TLS lets any key in");
    let binding = Binding::of(&connection, &alice.fingerprint()).expect("exported");
    let foreign = admission::preamble(PROTOCOL_VERSION, &binding.prove(&join.secret));
    let (closed, failure) = tokio::join!(open_with(&connection, &foreign), learner.refused());
    assert!(matches!(closed, LinkError::Closed { code: CloseCode::Proof, .. }), "{closed}");
    assert_eq!(failure, JoinFailure::Proof);

    // A proof that held once, in another session of the same key.
    let first = raw(&join, Some(&mallory)).await.expect("TLS lets any key in");
    let binding = Binding::of(&first, &mallory.fingerprint()).expect("exported");
    let replayed = admission::preamble(PROTOCOL_VERSION, &binding.prove(&join.secret));
    let second = raw(&join, Some(&mallory)).await.expect("TLS lets any key in");
    let (closed, failure) = tokio::join!(open_with(&second, &replayed), learner.refused());
    assert!(matches!(closed, LinkError::Closed { code: CloseCode::Proof, .. }), "{closed}");
    assert_eq!(failure, JoinFailure::Proof);
}

#[tokio::test]
async fn another_version_is_told_both_versions_whatever_follows() {
    let mut learner = learner();
    let join = learner.endpoint.join("127.0.0.1").expect("bound");
    let identity = Identity::generate().expect("made");
    let connection = raw(&join, Some(&identity)).await.expect("TLS lets any key in");
    // Another version may have a longer or shorter preamble after the version.
    let bytes = [b"RCLJ".as_slice(), &777_u16.to_le_bytes()].concat();
    let (closed, failure) = tokio::join!(open_with(&connection, &bytes), learner.refused());
    let LinkError::Closed { code: CloseCode::Version, reason } = closed else {
        panic!("closed by {closed}");
    };
    let said = format!("actor speaks 777, the learner {}", PROTOCOL_VERSION);
    assert!(reason.contains(&said), "{reason}");
    assert!(reason.contains("install the same release"), "{reason}");
    assert_eq!(failure, JoinFailure::Version(777));
}

#[tokio::test]
async fn bytes_that_are_no_preamble_are_turned_away() {
    let mut learner = learner();
    let join = learner.endpoint.join("127.0.0.1").expect("bound");
    let identity = Identity::generate().expect("made");
    for bytes in [b"GET / HTTP/1.1\r\n\r\n".as_slice(), b"RC", b""] {
        let connection = raw(&join, Some(&identity)).await.expect("TLS lets any key in");
        let (closed, failure) = tokio::join!(open_with(&connection, bytes), learner.refused());
        assert!(matches!(closed, LinkError::Closed { code: CloseCode::Violation, .. }), "{closed}");
        assert_eq!(failure, JoinFailure::Preamble);
    }
}

#[tokio::test]
async fn a_peer_that_proves_nothing_is_dropped_in_time_and_has_no_room_meanwhile() {
    let mut learner = learner_with(|config| config.link.join = SHORT);
    let join = learner.endpoint.join("127.0.0.1").expect("bound");
    let identity = Identity::generate().expect("made");
    let connection = raw(&join, Some(&identity)).await.expect("TLS lets any key in");
    let began = Instant::now();
    let mut stream = connection.open_uni().await.expect("one stream is allowed");
    let wait = Duration::from_millis(300);
    let second = tokio::time::timeout(wait, connection.open_uni()).await;
    assert!(second.is_err(), "a second one-way stream was allowed");
    let both_ways = tokio::time::timeout(wait, connection.open_bi()).await;
    assert!(both_ways.is_err(), "a two-way stream was allowed");
    stream.write_all(b"RCL").await.expect("three bytes fit");
    assert_eq!(learner.refused().await, JoinFailure::Slow(1));
    let closed: LinkError = connection.closed().await.into();
    assert!(matches!(closed, LinkError::Closed { code: CloseCode::Slow, .. }), "{closed}");
    assert!(began.elapsed() < times().join);
}

type Field = fn(&mut ModelDigests) -> &mut Digest;

#[tokio::test]
async fn another_checkpoint_is_refused_with_both_digests() {
    let cases: [(RefusalCode, &str, Field); 3] = [
        (RefusalCode::Weights, "weights", |m| &mut m.weights),
        (RefusalCode::Tokenizer, "tokenizer", |m| &mut m.tokenizer),
        (RefusalCode::Template, "chat template", |m| &mut m.template),
    ];
    let mut learner = learner();
    for (code, word, field) in cases {
        let actor = learner.actor();
        let mut other = hello();
        *field(&mut other.model) = Digest::of(b"other");
        let (error, failure) = tokio::join!(actor.connect(other), learner.refused());
        let error = error.expect_err("another checkpoint");
        let ConnectError::Refused(refused) = &error else { panic!("{error}") };
        assert_eq!((refused.code, &refused.got), (code, &Digest::of(b"other").to_string()));
        assert_eq!(refused.expected, field(&mut model()).to_string());
        assert!(error.to_string().contains(word), "{error}");
        assert!(error.to_string().contains("copy of the learner's checkpoint"), "{error}");
        assert!(matches!(failure, JoinFailure::Refused(_)), "{failure}");
    }
}

#[tokio::test]
async fn a_full_learner_refuses_one_more_and_an_actor_may_come_back() {
    let mut learner = learner_with(|config| config.max_actors = 1);
    let (first, _theirs, _ours) = learner.pair().await;
    let second = learner.actor();
    let (error, _) = tokio::join!(second.connect(hello()), learner.refused());
    let error = error.expect_err("full");
    assert!(error.may_retry() && error.to_string().contains("later"), "{error}");
    // The one that is in replaces its own link.
    let (again, _link) = tokio::join!(first.connect(hello()), learner.joined());
    again.expect("the same identity");
}

#[tokio::test]
async fn an_actor_that_is_shut_out_stays_out() {
    let mut learner = learner();
    let (actor, mut theirs, _ours) = learner.pair().await;
    learner.endpoint.revoke(actor.identity().actor_id());
    let error = theirs.recv().await.expect_err("shut out");
    assert!(matches!(error, LinkError::Closed { code: CloseCode::Revoked, .. }), "{error}");
    assert!(!error.may_retry());
    let (error, failure) = tokio::join!(actor.connect(hello()), learner.refused());
    assert!(!error.expect_err("still out").may_retry());
    assert_eq!(failure, JoinFailure::Revoked);
}

#[tokio::test]
async fn a_list_of_revoked_actors_cuts_them_off_and_lets_them_in_again_when_it_is_mended() {
    let mut learner = learner();
    let (actor, mut theirs, ours) = learner.pair().await;
    let (_other, bystander, mut working) = learner.pair().await;
    learner.endpoint.set_revoked([actor.identity().actor_id()].into());
    let error = theirs.recv().await.expect_err("shut out");
    assert!(matches!(error, LinkError::Closed { code: CloseCode::Revoked, .. }), "{error}");
    drop(ours);
    let (error, failure) = tokio::join!(actor.connect(hello()), learner.refused());
    assert!(!error.expect_err("still out").may_retry());
    assert_eq!(failure, JoinFailure::Revoked);
    bystander.sender().ready(1).await.expect("live");
    assert!(working.recv().await.is_ok());
    learner.endpoint.set_revoked(BTreeSet::new());
    let (again, _link) = tokio::join!(actor.connect(hello()), learner.joined());
    again.expect("let in again");
}

#[tokio::test]
async fn a_new_secret_keeps_strangers_out_and_lets_who_is_at_work_come_back() {
    let mut learner = learner();
    let (actor, theirs, mut ours) = learner.pair().await;
    let old = learner.endpoint.join("127.0.0.1").expect("bound");
    learner.endpoint.set_secret(Secret::generate().expect("randomness"));
    // The link stays, and so does the place.
    theirs.sender().ready(1).await.expect("live");
    assert!(ours.recv().await.is_ok());
    drop((theirs, ours));
    let (again, _link) = tokio::join!(actor.connect(hello()), learner.joined());
    let _theirs = again.expect("it joined before");
    let stranger = ActorEndpoint::new(old, Identity::generate().expect("made"), times());
    let (error, failure) = tokio::join!(stranger.connect(hello()), learner.refused());
    assert!(matches!(error, Err(ConnectError::WrongSecret { .. })), "{error:?}");
    assert_eq!(failure, JoinFailure::Proof);
    let newcomer = learner.actor();
    let (link, _ours) = tokio::join!(newcomer.connect(hello()), learner.joined());
    link.expect("with the new string");
}

#[tokio::test]
async fn an_address_that_keeps_failing_is_refused_unheard_until_time_has_passed() {
    let mut learner = learner_with(|config| {
        config.failures = 3;
        config.forgiven = 2 * SHORT;
    });
    let (_actor, working, mut ours) = learner.pair().await;
    let mut wrong = learner.endpoint.join("127.0.0.1").expect("bound");
    wrong.secret = Secret::generate().expect("randomness");
    let guesser = ActorEndpoint::new(wrong, Identity::generate().expect("made"), times());
    for _ in 0..3 {
        let (error, failure) = tokio::join!(guesser.connect(hello()), learner.refused());
        assert!(matches!(error, Err(ConnectError::WrongSecret { .. })), "{error:?}");
        assert_eq!(failure, JoinFailure::Proof);
    }
    let honest = learner.actor();
    let (error, failure) = tokio::join!(honest.connect(hello()), learner.refused());
    assert_eq!(failure, JoinFailure::Failures);
    let error = error.expect_err("from the same address");
    assert!(error.may_retry(), "{error}");
    // Who is in does not notice, and the address is forgiven.
    working.sender().ready(1).await.expect("live");
    assert!(ours.recv().await.is_ok());
    tokio::time::sleep(3 * SHORT).await;
    let (link, _ours) = tokio::join!(honest.connect(hello()), learner.joined());
    link.expect("forgiven");
}

#[tokio::test]
async fn a_port_in_use_and_a_host_without_address_have_their_own_lines() {
    let learner = learner();
    let taken = learner.endpoint.local_addr().expect("bound");
    let admission = Admission { model: model(), welcome: welcome() };
    let config = LearnerConfig::new(admission, Arc::new(AdapterShelf::default()));
    let identity = Identity::generate().expect("made");
    let secret = Secret::generate().expect("made");
    let error = LearnerEndpoint::bind(taken, &identity, secret, config).expect_err("taken");
    assert!(matches!(error, BindError::InUse(addr) if addr == taken), "{error}");
    assert!(error.to_string().contains("port is in use"), "{error}");

    let mut join = learner.endpoint.join("127.0.0.1").expect("bound");
    join.host = "no-such-host.invalid".to_owned();
    let actor = ActorEndpoint::new(join.clone(), Identity::generate().expect("made"), times());
    let error = actor.connect(hello()).await.expect_err("no such host");
    assert!(matches!(error, ConnectError::Unresolvable { .. }), "{error}");
    assert!(error.to_string().contains("no-such-host.invalid"), "{error}");

    let nobody = std::net::UdpSocket::bind("127.0.0.1:0").expect("a port");
    join.host = "127.0.0.1".to_owned();
    join.port = nobody.local_addr().expect("bound").port();
    let config = LinkConfig { reach: Duration::from_millis(300), ..times() };
    let actor = ActorEndpoint::new(join, Identity::generate().expect("made"), config);
    let error = actor.connect(hello()).await.expect_err("nobody there");
    assert!(matches!(error, ConnectError::NoAnswer { .. }), "{error}");
    assert!(error.may_retry() && error.to_string().contains("is the learner running"), "{error}");
}

#[tokio::test]
async fn under_load_an_actor_shows_its_address_first_and_joins() {
    let mut learner = learner_with(|config| config.retry_from = 0);
    let (_actor, theirs, mut ours) = learner.pair().await;
    theirs.sender().ready(1).await.expect("live");
    assert!(ours.recv().await.is_ok());
}

#[tokio::test]
async fn strangers_who_only_connect_are_bounded_and_an_actor_gets_in_after_them() {
    let mut learner = learner_with(|config| {
        config.max_joining = 8;
        config.link.join = Duration::from_secs(3);
    });
    let (_first, working, mut ours) = learner.pair().await;
    let join = learner.endpoint.join("127.0.0.1").expect("bound");
    let stranger = Identity::generate().expect("made");
    let mut held = Vec::new();
    let mut turned_away = 0;
    for _ in 0..20 {
        match raw(&join, Some(&stranger)).await {
            Ok(connection) => held.push(connection),
            Err(_) => turned_away += 1,
        }
    }
    assert!(held.len() <= 8 && turned_away >= 12, "{} held", held.len());
    // Whoever works goes on meanwhile.
    working.sender().ready(1).await.expect("live");
    assert!(ours.recv().await.is_ok());
    // A newcomer is told to come back, and gets in when the strangers' time is up.
    let actor = learner.actor();
    let error = actor.connect(hello()).await.expect_err("too many at once");
    assert!(error.may_retry(), "{error}");
    tokio::time::sleep(Duration::from_millis(3200)).await;
    let (link, ours) = tokio::join!(actor.connect(hello()), async {
        loop {
            if let Some(Arrival::Joined(link)) = learner.endpoint.accept().await {
                break link;
            }
        }
    });
    link.expect("room again");
    assert_eq!(ours.actor, actor.identity().actor_id());
}

/// A learner of our own making that lets TLS through and then does as it likes.
fn fake_learner(identity: &Identity) -> Endpoint {
    let server =
        quinn::ServerConfig::with_crypto(Arc::new(tls::server(identity).expect("an identity")));
    Endpoint::server(server, SocketAddr::from(([127, 0, 0, 1], 0))).expect("a port")
}

fn actor_of(fake: &Endpoint, identity: &Identity, reach: Duration) -> ActorEndpoint {
    let join = Join {
        host: "127.0.0.1".to_owned(),
        port: fake.local_addr().expect("bound").port(),
        learner: identity.fingerprint(),
        secret: Secret::generate().expect("made"),
    };
    let config = LinkConfig { reach, ..times() };
    ActorEndpoint::new(join, Identity::generate().expect("made"), config)
}

#[tokio::test]
async fn a_learner_of_another_version_is_understood() {
    let identity = Identity::generate().expect("made");
    let fake = fake_learner(&identity);
    let actor = actor_of(&fake, &identity, times().reach);
    let serve = async {
        let connection = fake.accept().await.expect("asked").await.expect("TLS");
        let _preamble = connection.accept_uni().await.expect("the first stream");
        let text = "protocol version: the actor speaks 1, the learner 2:\n\x1b[2Jinstall \u{fffd}";
        connection.close(quinn::VarInt::from_u32(1), text.as_bytes());
        connection.closed().await
    };
    let (error, _) = tokio::join!(actor.connect(hello()), serve);
    let error = error.expect_err("another version");
    assert!(matches!(error, ConnectError::Version(_)), "{error}");
    assert!(error.to_string().contains("the learner 2"), "{error}");
    assert!(!error.to_string().chars().any(char::is_control), "a learner's words reach a terminal");
    assert!(!error.may_retry());
}

#[tokio::test]
async fn a_learner_that_says_nothing_or_nonsense_does_not_hold_its_actor() {
    let identity = Identity::generate().expect("made");
    let fake = fake_learner(&identity);
    let actor = actor_of(&fake, &identity, SHORT);
    let silent = async {
        let connection = fake.accept().await.expect("asked").await.expect("TLS");
        connection.closed().await
    };
    let began = Instant::now();
    let (error, _) = tokio::join!(actor.connect(hello()), silent);
    assert!(matches!(error, Err(ConnectError::NoAnswer { .. })), "{error:?}");
    assert!(began.elapsed() < times().reach);

    let actor = actor_of(&fake, &identity, times().reach);
    let nonsense = async {
        let connection = fake.accept().await.expect("asked").await.expect("TLS");
        let (mut send, _recv) = connection.accept_bi().await.expect("the control stream");
        send.write_all(&[0x66; 100]).await.expect("room");
        connection.closed().await
    };
    let (error, closed) = tokio::join!(actor.connect(hello()), nonsense);
    assert!(matches!(error, Err(ConnectError::Link { .. })), "{error:?}");
    let closed = LinkError::from(closed);
    assert!(matches!(closed, LinkError::Closed { code: CloseCode::Violation, .. }), "{closed}");
}
