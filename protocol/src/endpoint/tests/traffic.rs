//! What an admitted actor and its learner do with each other.

use tokio::time::{Instant, sleep, timeout};

use super::*;
use crate::{
    AckOutcome, AdapterManifest, Assembly, EpisodeId, Fetch, FetchError, FromActor, FromLearner,
    LeaseAttempt,
    frame::{self, CHUNK_LEN, Kind},
    wire,
};

async fn next_episode(link: &mut ActorLink) -> (EpisodeId, Vec<u8>) {
    loop {
        if let FromActor::Episode { id, body } = link.recv().await.expect("a live link") {
            return (id, body);
        }
    }
}

async fn ack(link: &ActorLink, episode: EpisodeId, outcome: AckOutcome) {
    link.sender().send(FromLearner::Ack { episode, outcome }).await.expect("a live link");
}

/// Waits for the actor's link to have seen `count` acknowledgements.
async fn acks(link: &mut LearnerLink, count: usize) -> Vec<AckOutcome> {
    let mut seen = Vec::new();
    while seen.len() < count {
        if let FromLearner::Ack { outcome, .. } = link.recv().await.expect("a live link") {
            seen.push(outcome);
        }
    }
    seen
}

#[tokio::test]
async fn a_group_is_granted_played_and_acknowledged() {
    let mut learner = learner();
    let (actor, mut theirs, mut ours) = learner.pair().await;
    let to_learner = theirs.sender();
    let to_actor = ours.sender();

    to_learner.ready(4).await.expect("live");
    assert_eq!(ours.recv().await, Ok(FromActor::Ready { free: 4, received: 0 }));
    assert_eq!(to_actor.credit(), 4);

    let leases = group(7, 4);
    to_actor.send(FromLearner::Grant(leases.clone())).await.expect("live");
    assert_eq!(to_actor.credit(), 0);
    assert_eq!(theirs.recv().await, Ok(FromLearner::Grant(leases.clone())));

    let mut sent = Vec::new();
    for lease in &leases[..3] {
        sent.push(to_learner.submit(episode(lease).encode().expect("sound")).expect("short"));
    }
    assert_eq!(actor.unacknowledged(), 3);
    for (lease, sent) in leases.iter().zip(&sent) {
        let (id, body) = next_episode(&mut ours).await;
        assert_eq!((id, EpisodeId::of_body(&body)), (*sent, *sent), "in the order of submission");
        assert_eq!(Episode::decode(&body), Ok(episode(lease)));
        ack(&ours, id, AckOutcome::Stored).await;
    }
    assert_eq!(acks(&mut theirs, 3).await, vec![AckOutcome::Stored; 3]);
    assert_eq!(actor.unacknowledged(), 0);

    let last = LeaseAttempt::from(&leases[3]);
    assert_eq!(to_actor.outstanding(), [last]);
    to_learner.lease_failed(last, "the environment\nwent away").await.expect("live");
    let reason = "the environment went away".to_owned();
    assert_eq!(ours.recv().await, Ok(FromActor::LeaseFailed { lease: last, reason }));
    assert!(to_actor.outstanding().is_empty());

    to_learner.ready(4).await.expect("live");
    assert_eq!(ours.recv().await, Ok(FromActor::Ready { free: 4, received: 4 }));
    assert_eq!(to_actor.credit(), 4, "leases of the past are not counted twice");
}

#[tokio::test]
async fn what_was_not_acknowledged_is_sent_again_and_duplicates_are_acknowledged_again() {
    let mut learner = learner();
    let (actor, theirs, mut ours) = learner.pair().await;
    let leases = group(1, 2);
    let bodies: Vec<Vec<u8>> = leases.iter().map(|l| episode(l).encode().expect("sound")).collect();
    for body in &bodies {
        theirs.sender().submit(body.clone()).expect("short");
    }
    let first = next_episode(&mut ours).await;
    let second = next_episode(&mut ours).await;
    // The learner has stored both; its acknowledgements are lost with the link.
    drop(ours);
    drop(theirs);
    let (again, mut ours) = tokio::join!(actor.connect(hello()), learner.joined());
    let mut theirs = again.expect("welcome back");
    assert_eq!(actor.unacknowledged(), 2);
    assert_eq!(next_episode(&mut ours).await, first);
    assert_eq!(next_episode(&mut ours).await, second);
    ack(&ours, first.0, AckOutcome::Duplicate).await;
    let rejected = AckOutcome::Rejected { reason: "lease: not granted".to_owned() };
    ack(&ours, second.0, rejected.clone()).await;
    assert_eq!(acks(&mut theirs, 2).await, [AckOutcome::Duplicate, rejected]);
    assert_eq!((actor.unacknowledged(), actor.unacknowledged_bytes()), (0, 0));
}

#[tokio::test]
async fn ten_megabytes_of_adapter_arrive_in_verified_chunks() {
    let mut learner = learner();
    let (_actor, mut theirs, mut ours) = learner.pair().await;
    let bytes: Vec<u8> = (0..10_000_000_u32).map(|i| (i ^ (i >> 8)) as u8).collect();
    let base = model().weights;
    let manifest = AdapterManifest::build(5, &base, &bytes).expect("an adapter");
    learner.shelf.put(manifest.clone(), bytes.clone());
    ours.sender().send(FromLearner::Announce(manifest.clone())).await.expect("live");
    let Ok(FromLearner::Announce(announced)) = theirs.recv().await else { panic!("announced") };
    assert_eq!(announced, manifest);

    let mut assembly = Assembly::new(announced).expect("sound");
    assembly.put(1, &bytes[CHUNK_LEN..2 * CHUNK_LEN]).expect("from an earlier attempt");
    let began = Instant::now();
    theirs.sender().fetch(&mut assembly).await.expect("served");
    println!("10 MB less one chunk in {:?}", began.elapsed());
    assert_eq!(assembly.finish().expect("whole"), bytes);

    theirs.sender().holding(manifest.policy).await.expect("live");
    assert_eq!(ours.recv().await, Ok(FromActor::Holding { policy: manifest.policy }));
    assert!(ours.sender().holds(&manifest.policy));

    learner.shelf.retain(|_| false);
    let mut late = Assembly::new(manifest.clone()).expect("sound");
    let gone = theirs.sender().fetch(&mut late).await;
    assert_eq!(gone, Err(FetchError::Gone(manifest.policy)));
    theirs.sender().ready(1).await.expect("the link is unharmed");
    assert!(matches!(ours.recv().await, Ok(FromActor::Ready { .. })));
}

/// Two adapters of `chunks` chunks that differ a little.
fn neighbours(chunks: usize) -> [Vec<u8>; 2] {
    let first: Vec<u8> = (0..CHUNK_LEN * chunks).map(|at| (at / 5 % 241) as u8).collect();
    let second = first.iter().enumerate().map(|(at, byte)| byte ^ u8::from(at % 61 == 0)).collect();
    [first, second]
}

#[tokio::test]
async fn an_actor_with_the_earlier_adapter_fetches_differences_and_one_without_fetches_all() {
    let mut learner = learner();
    let (_actor, theirs, _ours) = learner.pair().await;
    let [first, second] = neighbours(3);
    let build = |step, bytes: &[u8]| {
        AdapterManifest::build(step, &model().weights, bytes).expect("an adapter")
    };
    let earlier = learner.shelf.put(build(1, &first), first.clone());
    assert_eq!(earlier.delta, None);
    let manifest = learner.shelf.put(build(2, &second), second.clone());
    assert!(manifest.delta.is_some());
    // Only deltas are asked for: the whole chunks are not there at all.
    let (all, with) = (manifest.bytes, manifest.transfer_bytes().0);
    assert!(with * 20 < all, "{with} of {all}");
    let mut assembly = Assembly::new(manifest.clone())
        .expect("sound")
        .with_base(&earlier.policy, first.clone().into());
    let before = theirs.received_bytes();
    theirs.sender().fetch(&mut assembly).await.expect("served");
    let received = theirs.received_bytes() - before;
    assert!(received < all / 10, "{received} bytes for deltas of {with}");
    assert_eq!(assembly.finish().expect("whole"), second);

    let mut assembly = Assembly::new(manifest.clone()).expect("sound");
    theirs.sender().fetch(&mut assembly).await.expect("served");
    assert_eq!(assembly.finish().expect("whole"), second);

    // An update that changed nothing has the same chunks under a later step.
    let later = learner.shelf.put(build(3, &second), second.clone());
    assert_eq!(later, AdapterManifest { step: 3, ..manifest.clone() });
    learner.shelf.retain(|held| held.step == 3);
    let mut assembly = Assembly::new(manifest.clone()).expect("sound");
    theirs.sender().fetch(&mut assembly).await.expect("served");

    // The learner serves no deltas of this one: the chunks come whole.
    learner.shelf.retain(|_| false);
    learner.shelf.put(build(2, &second), second.clone());
    let mut assembly =
        Assembly::new(manifest).expect("sound").with_base(&earlier.policy, first.into());
    theirs.sender().fetch(&mut assembly).await.expect("served");
    assert_eq!(assembly.finish().expect("whole"), second);
}

#[tokio::test]
async fn actors_that_take_nothing_hold_back_nobody_and_keep_no_adapter_in_memory() {
    let mut learner = learner_with(|config| config.max_serving = 2);
    let join = learner.endpoint.join("127.0.0.1").expect("bound");
    let [bytes, newer] = neighbours(2);
    let manifest = AdapterManifest::build(1, &model().weights, &bytes).expect("an adapter");
    let served = bytes::Bytes::from(bytes.clone());
    learner.shelf.put(manifest.clone(), served.clone());
    // Three ask for eight chunks each and read none of them.
    let mut laggards = Vec::new();
    for _ in 0..3 {
        let (laggard, ours) = tokio::join!(hostile::intruder(&join), learner.joined());
        let mut streams = Vec::new();
        for _ in 0..8 {
            let fetch = Fetch { policy: manifest.policy, chunk: 0, delta: false };
            let body = wire::encode_fetch(&fetch).expect("sound");
            let (mut ask, answer) = laggard.0.open_bi().await.expect("admitted");
            ask.write_all(&frame::encode(Kind::Fetch, &body).expect("short")).await.expect("room");
            ask.finish().expect("open");
            streams.push((ask, answer));
        }
        laggards.push((laggard, streams, ours));
    }
    let (_actor, theirs, _ours) = learner.pair().await;
    let began = Instant::now();
    let mut assembly = Assembly::new(manifest.clone()).expect("sound");
    theirs.sender().fetch(&mut assembly).await.expect("served");
    assert_eq!(assembly.finish().expect("whole"), bytes);
    // Each of the three has both places for a second, twice at most, and then none.
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());

    // A newer adapter: the older one leaves memory though nobody took it.
    let newer_manifest = AdapterManifest::build(2, &model().weights, &newer).expect("sound");
    learner.shelf.put(newer_manifest, newer);
    learner.shelf.retain(|held| held.step == 2);
    while !served.is_unique() {
        sleep(Duration::from_millis(10)).await;
    }
    for (_, streams, _) in &mut laggards {
        let (_, answer) = streams.first_mut().expect("eight");
        let reset = answer.read_to_end(usize::MAX).await.expect_err("cut off");
        assert!(matches!(reset, quinn::ReadToEndError::Read(quinn::ReadError::Reset(_))));
    }
}

#[tokio::test]
async fn an_adapter_that_is_not_what_was_announced_is_not_taken() {
    let mut learner = learner();
    let (_actor, theirs, _ours) = learner.pair().await;
    let bytes = vec![1; CHUNK_LEN + 1];
    let manifest = AdapterManifest::build(5, &model().weights, &bytes).expect("an adapter");
    let other = AdapterManifest::build(5, &model().weights, &[2; 9]).expect("an adapter");
    learner.shelf.put(AdapterManifest { chunks: other.chunks, ..manifest.clone() }, bytes);
    let mut assembly = Assembly::new(manifest).expect("sound");
    let error = theirs.sender().fetch(&mut assembly).await.expect_err("wrong bytes");
    assert!(!error.to_string().contains('\n'), "{error}");
    assert!(!assembly.is_complete());
}

#[tokio::test]
async fn a_peer_that_dies_is_noticed_and_its_leases_are_known() {
    let mut learner = learner();
    let (_actor, theirs, mut ours) = learner.pair().await;
    ours.sender().send(FromLearner::Grant(group(3, 2))).await.expect("live");
    drop(theirs);
    let error = ours.recv().await.expect_err("gone");
    assert!(matches!(error, LinkError::Closed { code: CloseCode::Done, .. }), "{error}");
    assert_eq!(ours.sender().outstanding().len(), 2);
    let to_actor = ours.sender();
    let send = to_actor.send(FromLearner::Revoke(Vec::new()));
    // Sending into a dead link fails at the latest once its queue is gone.
    let _ = timeout(Duration::from_secs(1), send).await.expect("no hang");

    let (_actor, mut theirs, ours) = learner.pair().await;
    drop(ours);
    let error = theirs.recv().await.expect_err("gone");
    assert!(matches!(error, LinkError::Closed { code: CloseCode::GoingAway, .. }), "{error}");
    assert!(error.may_retry());
}

#[tokio::test]
async fn a_peer_that_falls_silent_is_noticed_within_the_idle_time() {
    let mut learner = learner_with(|config| config.link.idle = 2 * SHORT);
    let join = learner.endpoint.join("127.0.0.1").expect("bound");
    // The actor lives in a runtime of its own that is stopped dead: no close is sent.
    let runtime = tokio::runtime::Runtime::new().expect("threads");
    let other = ActorEndpoint::new(join, Identity::generate().expect("made"), times());
    let (link, mut ours) =
        tokio::join!(runtime.spawn(async move { other.connect(hello()).await }), learner.joined());
    let link = link.expect("no panic").expect("welcome");
    runtime.shutdown_background();
    let began = Instant::now();
    let error = ours.recv().await.expect_err("silent");
    assert_eq!(error, LinkError::TimedOut);
    assert!(began.elapsed() < times().idle, "{:?}", began.elapsed());
    // Dropping needs the runtime's clock no more.
    drop(link);
}

#[tokio::test]
async fn a_quiet_link_stays_up() {
    let mut learner = learner_with(|config| config.link.idle = 2 * SHORT);
    let (_actor, theirs, mut ours) = learner.pair().await;
    sleep(3 * SHORT).await;
    theirs.sender().ready(1).await.expect("live");
    assert!(ours.recv().await.is_ok());
}

#[tokio::test]
async fn the_end_of_the_run_reaches_the_actor_and_both_sides_close() {
    let mut learner = learner();
    let (_actor, mut theirs, ours) = learner.pair().await;
    let finishing = ours.finish("200 steps made");
    let leaving = async {
        let message = theirs.recv().await;
        theirs.close().await;
        message
    };
    let began = Instant::now();
    let ((), message) = tokio::join!(finishing, leaving);
    assert_eq!(message, Ok(FromLearner::Finish { reason: "200 steps made".to_owned() }));
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
}

#[tokio::test]
async fn a_learner_that_stops_with_its_run_finishes_its_actors_too() {
    let mut learner = learner();
    let (_actor, mut theirs, _ours) = learner.pair().await;
    learner.endpoint.shutdown(CloseCode::Finished, "interrupted").await;
    let reason = "interrupted".to_owned();
    assert_eq!(theirs.recv().await, Ok(FromLearner::Finish { reason }));
    assert!(matches!(theirs.recv().await, Err(LinkError::Closed { .. })));
}

#[tokio::test]
async fn a_leaving_actor_gives_its_leases_back() {
    let mut learner = learner();
    let (_actor, mut theirs, mut ours) = learner.pair().await;
    let leases = group(9, 3);
    ours.sender().send(FromLearner::Grant(leases.clone())).await.expect("live");
    assert!(matches!(theirs.recv().await, Ok(FromLearner::Grant(_))));
    theirs.sender().drain().await.expect("live");
    assert_eq!(ours.recv().await, Ok(FromActor::Drain));
    assert!(ours.sender().is_draining() && ours.sender().credit() == 0);
    let returned: Vec<LeaseAttempt> = leases.iter().map(LeaseAttempt::from).collect();
    let heard = async {
        let message = ours.recv().await;
        let outstanding = ours.sender().outstanding();
        drop(ours);
        (message, outstanding)
    };
    let ((), (message, outstanding)) = tokio::join!(theirs.leave(returned.clone()), heard);
    assert_eq!(message, Ok(FromActor::Leave { returned }));
    assert!(outstanding.is_empty());
}

#[tokio::test]
async fn an_actor_learns_at_once_that_its_learner_was_killed_and_started_again() {
    let identity = Identity::generate().expect("made");
    let secret = Secret::generate().expect("made");
    let (first, again) = (identity.clone(), identity);
    // The first learner lives in a runtime of its own that is stopped dead: no close is sent.
    let runtime = tokio::runtime::Runtime::new().expect("threads");
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").expect("a port");
    let addr = socket.local_addr().expect("bound");
    drop(socket);
    let config = || {
        let admission = Admission { model: model(), welcome: welcome() };
        let mut config = LearnerConfig::new(admission, Arc::new(AdapterShelf::default()));
        config.link = times();
        config.link.idle = Duration::from_secs(60);
        config
    };
    let (their_secret, their_config) = (secret.clone(), config());
    let learner = runtime.spawn(async move {
        LearnerEndpoint::bind(addr, &first, their_secret, their_config).expect("the port")
    });
    let mut killed = learner.await.expect("no panic");
    let join = killed.join("127.0.0.1").expect("bound");
    let link = LinkConfig { idle: Duration::from_secs(60), ..times() };
    let actor = ActorEndpoint::new(join, Identity::generate().expect("made"), link);
    let (theirs, arrival) = tokio::join!(actor.connect(hello()), killed.accept());
    let mut theirs = theirs.expect("welcome");
    let killing = std::thread::spawn(move || runtime.shutdown_timeout(Duration::from_secs(5)));
    killing.join().expect("stopped");
    // Nothing runs there any more: this only frees the port.
    drop((arrival, killed));

    let again = LearnerEndpoint::bind(addr, &again, secret, config());
    let mut learner = again.expect("the port is free again");
    let began = Instant::now();
    let error = theirs.recv().await.expect_err("another process");
    assert_eq!(error, LinkError::Reset);
    assert!(error.may_retry() && began.elapsed() < times().idle, "{:?}", began.elapsed());
    let (back, _ours) = tokio::join!(actor.connect(hello()), learner.accept());
    back.expect("welcome back");
}
