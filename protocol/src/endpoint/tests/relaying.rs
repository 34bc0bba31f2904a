//! Adapters that go from actor to actor: what the learner still sends, and what happens to an actor whose
//! parent lies, is silent, dies, or is shut out.

use bytes::Bytes;
use tokio::time::{Instant, sleep, timeout};

use super::*;
use crate::{
    AdapterManifest, Assembly, FromLearner, Join,
    frame::{CHUNK_LEN, Kind},
    tls,
};

/// An actor that fetches what is announced, as the program does.
struct Player {
    endpoint: ActorEndpoint,
    link: LearnerLink,
    ours: ActorLink,
}

fn relay_at(learner: &Learner, config: LinkConfig) -> ActorEndpoint {
    let join = learner.endpoint.join("127.0.0.1").expect("bound");
    let actor = ActorEndpoint::new(join, Identity::generate().expect("randomness"), config);
    actor.with_relay(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a free port")
}

impl Learner {
    async fn player(&mut self, endpoint: ActorEndpoint) -> Player {
        let (theirs, ours) = tokio::join!(endpoint.connect(hello()), self.joined());
        Player { endpoint, link: theirs.expect("welcome"), ours }
    }

    fn publish(&self, step: u64, bytes: &[u8]) -> AdapterManifest {
        let manifest = AdapterManifest::build(step, &model().weights, bytes).expect("an adapter");
        self.shelf.put(manifest, bytes.to_vec())
    }
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < Duration::from_secs(60), "{what}");
        sleep(Duration::from_millis(5)).await;
    }
}

impl Player {
    /// Announces an adapter to this actor, which fetches all of it.
    async fn fetch(
        &mut self,
        manifest: &AdapterManifest,
        base: Option<(&AdapterManifest, &[u8])>,
    ) -> Vec<u8> {
        self.ours.sender().send(FromLearner::Announce(manifest.clone())).await.expect("live");
        let Ok(FromLearner::Announce(manifest)) = self.link.recv().await else {
            panic!("not announced")
        };
        let mut assembly = Assembly::new(manifest.clone()).expect("sound");
        if let Some((base, bytes)) = base {
            assembly = assembly.with_base(&base.policy, Bytes::copy_from_slice(bytes));
        }
        let sender = self.link.sender();
        // What the learner says meanwhile is heard, as in the program.
        tokio::select! {
            fetched = sender.fetch(&mut assembly) => fetched.expect("served"),
            said = async { loop { self.link.recv().await.expect("live"); } } => said,
        }
        let bytes = Bytes::from(assembly.finish().expect("whole"));
        sender.fetched(&manifest.policy, &bytes);
        bytes.to_vec()
    }

    /// Hears what learner and actor have to say of each other's peers, until both have gone.
    async fn hear(&mut self) {
        tokio::join!(async { while self.link.recv().await.is_ok() {} }, async {
            while self.ours.recv().await.is_ok() {}
        },);
    }
}

/// Lets all of them hear until something holds.
async fn hear_until(players: &mut [Player], what: &str, holds: impl FnMut() -> bool) {
    let hearing = side_by_side(players.iter_mut().map(Player::hear).collect());
    tokio::select! {
        () = until(what, holds) => {}
        () = async { drop(hearing.await); std::future::pending().await } => {}
    }
}

/// A moment in which nothing is to change.
async fn hear_a_while(players: &mut [Player]) {
    let began = Instant::now();
    hear_until(players, "time", || began.elapsed() > Duration::from_millis(200)).await;
}

/// Waits until so many children are let in.
async fn meet(players: &mut [Player], children: usize) {
    let relays: Vec<_> = players.iter().filter_map(|it| it.endpoint.relay()).collect();
    let relays: Vec<_> = relays.into_iter().map(Relay::shared).collect();
    let live = || relays.iter().map(|relay| relay.live()).sum::<usize>() == children;
    hear_until(players, "the children", live).await;
}

fn adapter(chunks: usize, salt: u8) -> Vec<u8> {
    let bytes = 0..CHUNK_LEN * chunks + 77;
    bytes.map(|at| (at / 7 % 251) as u8 ^ if at % 83 == 0 { salt } else { 0 }).collect()
}

/// A learner of fan-out 1 with a relay, and an actor below it.
async fn one_below_another(
    learner: &mut Learner,
    parent: LinkConfig,
    child: LinkConfig,
) -> [Player; 2] {
    let relay = relay_at(learner, parent);
    let parent = learner.player(relay).await;
    let join = learner.endpoint.join("127.0.0.1").expect("bound");
    let child = ActorEndpoint::new(join, Identity::generate().expect("made"), child);
    let child = learner.player(child).await;
    let mut pair = [parent, child];
    meet(&mut pair, 1).await;
    pair
}

fn star_of_one() -> Learner {
    learner_with(|config| config.relay_fanout = 1)
}

#[tokio::test]
async fn the_learner_sends_each_chunk_to_its_fan_out_and_actors_send_the_rest() {
    let mut learner = learner_with(|config| config.relay_fanout = 2);
    let mut players = Vec::new();
    for _ in 0..7 {
        let relay = relay_at(&learner, times());
        players.push(learner.player(relay).await);
    }
    meet(&mut players, 5).await;
    let first = adapter(3, 0);
    let manifest = learner.publish(1, &first);
    let fetched = players.iter_mut().map(|player| player.fetch(&manifest, None));
    for bytes in side_by_side(fetched.collect()).await {
        assert_eq!(bytes, first);
    }
    let served = learner.endpoint.served();
    let all = first.len() as u64;
    until("the last acknowledgement", || served.whole() == 2 * all).await;
    assert_eq!(learner.endpoint.relays(), RelayCounts { relayed: 5, failures: 0 });

    // The next one goes the same way as differences.
    let second = adapter(3, 1);
    let next = learner.publish(2, &second);
    let (with, _) = next.transfer_bytes();
    assert!(with * 10 < all, "{with} of {all}");
    let base = Some((&manifest, first.as_slice()));
    let fetched = players.iter_mut().map(|player| player.fetch(&next, base));
    for bytes in side_by_side(fetched.collect()).await {
        assert_eq!(bytes, second);
    }
    let deltas = next.delta.as_ref().expect("a little different").chunks.iter().flatten();
    let deltas: u64 = deltas.map(|delta| u64::from(delta.bytes)).sum();
    until("the last acknowledgement", || {
        (served.delta(), served.whole()) == (2 * deltas, 2 * (all + with - deltas))
    })
    .await;
    let relayed = |player: &Player| player.endpoint.taken_from_actors();
    let taken: Vec<u64> = players.iter().map(relayed).filter(|bytes| *bytes > 0).collect();
    assert_eq!(taken, [all + with; 5]);
    let passed = |player: &Player| {
        let served = player.endpoint.relay().expect("listens").served();
        served.delta() + served.whole()
    };
    until("the last acknowledgement", || {
        players.iter().map(passed).sum::<u64>() == 5 * (all + with)
    })
    .await;
}

/// The child says that its parent failed, and is left to the learner.
async fn failed(learner: &Learner, child: Player) {
    let told = RelayCounts { relayed: 0, failures: 1 };
    hear_until(&mut [child], "the report", || learner.endpoint.relays() == told).await;
}

type Lie = fn(&mut Vec<Option<Bytes>>, &mut bool);

/// Runs them side by side on this task.
async fn side_by_side<F: Future>(futures: Vec<F>) -> Vec<F::Output> {
    let mut waiting: Vec<_> = futures.into_iter().map(Box::pin).collect();
    let mut done: Vec<Option<F::Output>> = waiting.iter().map(|_| None).collect();
    std::future::poll_fn(|cx| {
        for (future, done) in waiting.iter_mut().zip(&mut done) {
            if done.is_none()
                && let std::task::Poll::Ready(output) = future.as_mut().poll(cx)
            {
                *done = Some(output);
            }
        }
        match done.iter().all(Option::is_some) {
            true => std::task::Poll::Ready(()),
            false => std::task::Poll::Pending,
        }
    })
    .await;
    done.into_iter().flatten().collect()
}

#[tokio::test]
async fn a_parent_that_lies_is_found_out_and_the_learner_names_no_liar_again() {
    let flip_a_byte = |chunks: &mut Vec<Option<Bytes>>, _: &mut bool| {
        let mut chunk = chunks[1].take().expect("held").to_vec();
        chunk[1000] ^= 1;
        chunks[1] = Some(chunk.into());
    };
    let swap_chunks = |chunks: &mut Vec<Option<Bytes>>, _: &mut bool| chunks.swap(0, 1);
    let lies: [Lie; 2] = [flip_a_byte, swap_chunks];
    for lie in lies {
        let mut learner = star_of_one();
        let [mut parent, mut child] = one_below_another(&mut learner, times(), times()).await;
        let bytes = adapter(3, 0);
        let manifest = learner.publish(1, &bytes);
        assert_eq!(parent.fetch(&manifest, None).await, bytes);
        parent.endpoint.relay().expect("listens").shared().shelf.tamper(lie);
        assert_eq!(child.fetch(&manifest, None).await, bytes);
        failed(&learner, child).await;
    }
}

#[tokio::test]
async fn a_parent_that_is_silent_costs_its_patience_and_one_that_has_nothing_costs_nothing() {
    let mut learner = star_of_one();
    let child = LinkConfig { relay: SHORT, ..times() };
    let [mut parent, mut child] = one_below_another(&mut learner, times(), child).await;
    let bytes = adapter(3, 0);
    let manifest = learner.publish(1, &bytes);
    assert_eq!(parent.fetch(&manifest, None).await, bytes);
    // It has one chunk no more, and says that it comes.
    parent.endpoint.relay().expect("listens").shared().shelf.tamper(|chunks, coming| {
        chunks[2] = None;
        *coming = true;
    });
    assert_eq!(child.fetch(&manifest, None).await, bytes);
    failed(&learner, child).await;

    let mut learner = star_of_one();
    let [mut parent, mut child] = one_below_another(&mut learner, times(), times()).await;
    let manifest = learner.publish(1, &bytes);
    assert_eq!(parent.fetch(&manifest, None).await, bytes);
    parent.endpoint.relay().expect("listens").shared().shelf.tamper(|chunks, _| chunks[2] = None);
    let began = Instant::now();
    assert_eq!(child.fetch(&manifest, None).await, bytes);
    assert!(began.elapsed() < times().relay, "{:?}", began.elapsed());
    // That is no failure.
    let mut pair = [parent, child];
    hear_a_while(&mut pair).await;
    assert_eq!(learner.endpoint.relays(), RelayCounts { relayed: 1, failures: 0 });
}

#[tokio::test]
async fn a_parent_that_dies_in_the_middle_leaves_its_child_the_learner() {
    let mut learner = learner_with(|config| {
        config.relay_fanout = 1;
        // The learner does not notice before the child is done.
        config.link.idle = Duration::from_secs(60);
    });
    let join = learner.endpoint.join("127.0.0.1").expect("bound");
    // The parent lives in a runtime of its own that is stopped dead: no close is sent.
    let runtime = tokio::runtime::Runtime::new().expect("threads");
    let at = join.clone();
    let (announce, announced) = tokio::sync::oneshot::channel();
    let (started, start) = tokio::sync::oneshot::channel();
    runtime.spawn(async move {
        let config = LinkConfig { fetch_parallel: 1, ..times() };
        let actor = ActorEndpoint::new(at, Identity::generate().expect("made"), config);
        let actor = actor.with_relay(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a port");
        let mut link = actor.connect(hello()).await.expect("welcome");
        let (sender, relay) = (link.sender(), actor.relay().expect("listens"));
        started.send((relay.served(), relay.shared())).ok().expect("heard");
        let fetching = async {
            let mut assembly = Assembly::new(announced.await.expect("said")).expect("sound");
            sender.fetch(&mut assembly).await
        };
        let hearing = async { while link.recv().await.is_ok() {} };
        let _ = tokio::join!(fetching, hearing);
    });
    let ours = learner.joined().await;
    let (served, relay) = start.await.expect("started");
    let config = LinkConfig { idle: Duration::from_secs(10), ..times() };
    let child = ActorEndpoint::new(join, Identity::generate().expect("made"), config);
    let mut child = learner.player(child).await;
    hear_until(std::slice::from_mut(&mut child), "the child", || relay.live() == 1).await;

    let bytes = adapter(24, 0);
    let manifest = learner.publish(1, &bytes);
    announce.send(manifest.clone()).expect("alive");
    // As soon as something of it came through.
    let mut runtime = Some(runtime);
    let killing = async {
        until("a first chunk", || served.whole() > 0).await;
        runtime.take().expect("once").shutdown_background();
    };
    let (fetched, ()) = tokio::join!(child.fetch(&manifest, None), killing);
    assert_eq!(fetched, bytes);
    assert!(child.endpoint.taken_from_actors() > 0);
    failed(&learner, child).await;
    drop(ours);
}

#[tokio::test]
async fn parents_that_drain_leave_or_are_shut_out_are_replaced() {
    for case in ["drains", "leaves", "revoked"] {
        let mut learner = star_of_one();
        let [parent, mut child] = one_below_another(&mut learner, times(), times()).await;
        let bytes = adapter(1, 0);
        let manifest = learner.publish(1, &bytes);
        assert_eq!(child.fetch(&manifest, None).await, bytes, "the parent never heard of it");
        let before = child.endpoint.taken_from_actors();
        assert_eq!(before, 0);
        let mut players = vec![child];
        match case {
            "drains" => parent.link.sender().drain().await.expect("live"),
            "revoked" => learner.endpoint.revoke(parent.endpoint.identity().actor_id()),
            _ => {}
        }
        match case {
            "leaves" => drop(parent),
            _ => players.push(parent),
        }
        hear_until(&mut players, case, || learner.endpoint.relays().relayed == 0).await;
        let mut child = players.swap_remove(0);
        let again = adapter(1, 9);
        let manifest = learner.publish(2, &again);
        assert_eq!(child.fetch(&manifest, None).await, again, "{case}");
        assert_eq!(child.endpoint.taken_from_actors(), 0);
    }
}

/// Connects to a relay's port as somebody.
async fn knock(
    port: u16,
    fingerprint: Digest,
    identity: Option<&Identity>,
) -> Result<quinn::Connection, quinn::ConnectionError> {
    let endpoint = quinn::Endpoint::client(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a port");
    let crypto = tls::client(identity, tls::Pinned::new(fingerprint)).expect("a client");
    let mut client = quinn::ClientConfig::new(Arc::new(crypto));
    client.transport_config(socket::transport(&times(), socket::Side::Actor));
    let relay = SocketAddr::from(([127, 0, 0, 1], port));
    endpoint.connect_with(client, relay, "rollcall").expect("an address").await
}

#[tokio::test]
async fn strangers_at_a_relay_get_no_stream_and_hold_no_child_back() {
    let mut learner = star_of_one();
    let [mut parent, mut child] = one_below_another(&mut learner, times(), times()).await;
    let relay = parent.endpoint.relay().expect("listens").local_addr().port();
    let fingerprint = parent.endpoint.identity().fingerprint();
    let bytes = adapter(2, 0);
    let manifest = learner.publish(1, &bytes);
    assert_eq!(parent.fetch(&manifest, None).await, bytes);

    let stranger = Identity::generate().expect("made");
    let connection = knock(relay, fingerprint, Some(&stranger)).await.expect("TLS");
    let asking = timeout(SHORT, connection.open_bi()).await;
    assert!(!matches!(asking, Ok(Ok(_))), "a stranger has a stream");
    let asking = timeout(SHORT, connection.open_uni()).await;
    assert!(!matches!(asking, Ok(Ok(_))), "a stranger has a stream");
    let closed = LinkError::from(connection.closed().await);
    assert!(matches!(closed, LinkError::Closed { code: CloseCode::Refused, .. }), "{closed}");
    // Without a certificate; the other side says so after the handshake.
    let nobody = match knock(relay, fingerprint, None).await {
        Ok(connection) => connection.closed().await,
        Err(error) => error,
    };
    assert!(matches!(nobody, quinn::ConnectionError::ConnectionClosed(_)), "{nobody}");
    // Whoever tries too often from one address is not heard any more; who is in stays in.
    let mut tries = Vec::new();
    for _ in 0..40 {
        tries.push(knock(relay, fingerprint, Some(&stranger)));
    }
    let _ = timeout(Duration::from_secs(30), side_by_side(tries)).await;
    assert_eq!(child.fetch(&manifest, None).await, bytes);
    assert_eq!(child.endpoint.taken_from_actors(), bytes.len() as u64);
    assert_eq!(learner.endpoint.relays(), RelayCounts { relayed: 1, failures: 0 });
}

#[tokio::test]
async fn a_child_that_breaks_the_protocol_loses_its_relay_only() {
    let mut learner = star_of_one();
    let relay = relay_at(&learner, times());
    let parent = learner.player(relay).await;
    let join: Join = learner.endpoint.join("127.0.0.1").expect("bound");
    let ((connection, _send, _recv, identity), _ours) =
        tokio::join!(hostile::intruder_with_key(&join), learner.joined());
    let mut parent = [parent];
    let relay = parent[0].endpoint.relay().expect("listens").shared();
    hear_until(&mut parent, "its name", || relay.named() == 1).await;
    let [parent] = parent;
    let port = parent.endpoint.relay().expect("listens").local_addr().port();
    let fingerprint = parent.endpoint.identity().fingerprint();
    for bytes in [
        b"GET / HTTP/1.1\r\n".to_vec(),
        crate::frame::encode(Kind::Chunk, b"mine").expect("short"),
        crate::frame::encode(Kind::Fetch, &[0xff; 99]).expect("short"),
    ] {
        let relay = knock(port, fingerprint, Some(&identity)).await.expect("named");
        let (mut send, _recv) = relay.open_bi().await.expect("a stream");
        send.write_all(&bytes).await.expect("room");
        let _ = send.finish();
        let closed = LinkError::from(relay.closed().await);
        assert!(matches!(closed, LinkError::Closed { code: CloseCode::Violation, .. }), "{closed}");
    }
    assert!(connection.close_reason().is_none());
}

#[test]
fn a_port_that_is_taken_is_said_in_one_line() {
    let runtime = tokio::runtime::Runtime::new().expect("threads");
    let _inside = runtime.enter();
    let taken = std::net::UdpSocket::bind("127.0.0.1:0").expect("a port");
    let addr = taken.local_addr().expect("bound");
    let learner = learner();
    let actor = learner.actor().with_relay(addr).expect_err("taken");
    let text = actor.to_string();
    assert!(text.contains("the port is in use") && !text.contains('\n'), "{text}");
}
