//! Both ends of a session against each other, without sockets.

use std::collections::{BTreeSet, VecDeque};

use bytes::Bytes;
use proptest::prelude::*;

use super::*;
use crate::{
    AckOutcome, ComputeDtype, Digest, EpisodeId, FromActor, FromLearner, Hello, Lease,
    LeaseAttempt, LeaseId, ModelDigests, NoiseKey, OnMalformed, PolicyDigest, RefusalCode, RunId,
    RunSettings, Sampling, Split, Task, Welcome,
    frame::Frame,
    wire::{self, bounds::MAX_HELD},
};

fn admission() -> Admission {
    let digest = |text: &str| Digest::of(text.as_bytes());
    Admission {
        model: ModelDigests {
            weights: digest("weights"),
            tokenizer: digest("tokenizer"),
            template: digest("template"),
        },
        welcome: Welcome {
            run: RunId(digest("run")),
            settings: RunSettings {
                environment: "{}".to_owned(),
                system: None,
                chat_template_kwargs: "{}".to_owned(),
                max_completion_length: 64,
                max_tool_calling_iterations: 2,
                on_malformed: OnMalformed::Observe,
                lora: "{}".to_owned(),
                compute_dtype: ComputeDtype::F32,
            },
        },
    }
}

fn hello() -> Hello {
    Hello::new(admission().model, "cpu", 4)
}

fn frame(kind: Kind, body: Vec<u8>) -> Frame {
    Frame { kind, digest: Digest::of(&body), body }
}

fn hello_frame() -> Frame {
    frame(Kind::Hello, wire::encode_hello(&hello()).expect("sound"))
}

fn welcome_frame() -> Frame {
    frame(Kind::Welcome, wire::encode_welcome(&admission().welcome).expect("sound"))
}

fn from_actor(message: &FromActor) -> Frame {
    let (kind, body) = wire::encode_from_actor(message).expect("sound");
    frame(kind, body)
}

fn from_learner(message: &FromLearner) -> Frame {
    let (kind, body) = wire::encode_from_learner(message).expect("sound");
    frame(kind, body)
}

fn lease(group: u64, generation: u32, attempt: u32) -> Lease {
    let run = admission().welcome.run;
    let id = LeaseId { group, generation };
    Lease {
        run,
        id,
        attempt,
        task: Task {
            id: "t".to_owned(),
            prompt: String::new(),
            fields: "{}".to_owned(),
            split: Split::Train,
        },
        seed: 0,
        noise_key: NoiseKey::derive(&run, id),
        policy: PolicyDigest(Digest::of(b"policy")),
        sampling: Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 },
        deadline_ms: 1000,
    }
}

/// The front of an episode's body, which is all that a session looks at, and something that makes
/// it unique.
fn body(lease: &Lease) -> Vec<u8> {
    let mut body = 1_u16.to_le_bytes().to_vec();
    body.extend_from_slice(&lease.run.0.0);
    body.extend_from_slice(&lease.id.group.to_le_bytes());
    body.extend_from_slice(&lease.id.generation.to_le_bytes());
    body.extend_from_slice(b"the rest");
    body
}

fn admitted() -> LearnerSession {
    let mut session = LearnerSession::new();
    assert_eq!(session.receive(hello_frame()), Ok(LearnerEvent::Hello(hello())));
    session.admit(&hello());
    session
}

fn welcomed() -> (ActorSession, u64) {
    let mut session = ActorSession::new();
    let epoch = session.connect();
    let event = session.receive(epoch, welcome_frame());
    assert_eq!(event, Ok(ActorEvent::Welcome(admission().welcome)));
    (session, epoch)
}

fn unexpected<T: std::fmt::Debug>(result: Result<T, Violation>) {
    assert!(matches!(result, Err(Violation::Unexpected { .. })), "{result:?}");
}

type Change = fn(&mut Hello);

#[test]
fn an_actor_must_fit_in_version_weights_tokenizer_and_template() {
    let admission = admission();
    assert_eq!(admission.judge(&hello()), Ok(()));
    let cases: [(RefusalCode, Change); 4] = [
        (RefusalCode::ProtocolVersion, |h| h.protocol = 9),
        (RefusalCode::Weights, |h| h.model.weights = Digest::of(b"other")),
        (RefusalCode::Tokenizer, |h| h.model.tokenizer = Digest::of(b"other")),
        (RefusalCode::Template, |h| h.model.template = Digest::of(b"other")),
    ];
    for (code, change) in cases {
        let mut hello = hello();
        change(&mut hello);
        let refused = admission.judge(&hello).expect_err("does not fit");
        assert_eq!(refused.code, code);
        assert!(refused.expected != refused.got && !refused.message.contains('\n'));
        let frame = frame(Kind::Refused, wire::encode_refused(&refused).expect("sound"));
        let mut actor = ActorSession::new();
        let epoch = actor.connect();
        assert_eq!(actor.receive(epoch, frame), Ok(ActorEvent::Refused(refused)));
        assert!(!actor.is_established());
    }
}

#[test]
fn nothing_is_heard_before_the_hello_nor_a_second_hello_nor_after_the_good_bye() {
    let mut session = LearnerSession::new();
    unexpected(session.receive(from_actor(&FromActor::Drain)));
    let mut session = LearnerSession::new();
    session.receive(hello_frame()).expect("first");
    unexpected(session.receive(from_actor(&FromActor::Drain)));
    let mut session = admitted();
    unexpected(session.receive(hello_frame()));
    let leave = from_actor(&FromActor::Leave { returned: Vec::new() });
    session.receive(leave.clone()).expect("a good-bye");
    unexpected(session.receive(leave));
}

#[test]
fn a_learner_says_one_welcome_first_and_nothing_after_the_end() {
    let finish = from_learner(&FromLearner::Finish { reason: "done".to_owned() });
    let mut actor = ActorSession::new();
    let epoch = actor.connect();
    unexpected(actor.receive(epoch, finish.clone()));
    let (mut actor, epoch) = welcomed();
    unexpected(actor.receive(epoch, welcome_frame()));
    actor.receive(epoch, finish.clone()).expect("the end");
    unexpected(actor.receive(epoch, finish));
}

#[test]
fn an_older_connection_changes_nothing_any_more() {
    let (mut actor, old) = welcomed();
    let id = actor.submit(Bytes::from(body(&lease(1, 0, 0)))).expect("short");
    let new = actor.connect();
    assert_eq!(actor.next_to_send(new), None, "nothing before the welcome");
    actor.receive(new, welcome_frame()).expect("welcome");
    unexpected(actor.receive(old, from_learner(&FromLearner::Grant(vec![lease(1, 0, 0)]))));
    assert_eq!(actor.next_to_send(old), None);
    actor.disconnect(old);
    assert!(actor.is_established());
    assert_eq!(actor.next_to_send(new).expect("sent again").0, id);
    assert_eq!(actor.ready(3), FromActor::Ready { free: 3, received: 0 });
}

#[test]
fn credit_counts_leases_that_are_on_their_way() {
    let mut learner = admitted();
    let ready = |free, received| from_actor(&FromActor::Ready { free, received });
    assert_eq!(learner.credit(), 0);
    learner.receive(ready(4, 0)).expect("sound");
    assert_eq!(learner.credit(), 4);
    learner.sending(&FromLearner::Grant(vec![lease(1, 0, 0), lease(1, 1, 0), lease(1, 2, 0)]));
    assert_eq!(learner.credit(), 1);
    // This was said before the grant arrived there: it is no new room.
    learner.receive(ready(4, 0)).expect("sound");
    assert_eq!(learner.credit(), 1);
    learner.receive(ready(1, 3)).expect("sound");
    assert_eq!(learner.credit(), 1);
    // A group may be granted whole beyond the credit.
    learner.sending(&FromLearner::Grant((0..8).map(|g| lease(2, g, 0)).collect()));
    assert_eq!(learner.credit(), 0);
    // An actor that claims more than was granted gains nothing by it.
    learner.receive(ready(2, u64::MAX)).expect("sound");
    assert_eq!(learner.credit(), 2);
    learner.receive(from_actor(&FromActor::Drain)).expect("sound");
    assert_eq!((learner.credit(), learner.is_draining()), (0, true));
}

#[test]
fn a_lease_is_outstanding_until_answered_failed_returned_or_revoked() {
    let mut learner = admitted();
    let leases: Vec<Lease> = (0..5).map(|generation| lease(1, generation, 1)).collect();
    let attempt = |i: usize| LeaseAttempt::from(&leases[i]);
    learner.sending(&FromLearner::Grant(leases.clone()));
    let answer = FromActor::Episode { id: EpisodeId(Digest([0; 32])), body: body(&leases[0]) };
    learner.receive(from_actor(&answer)).expect("sound");
    let failed = FromActor::LeaseFailed { lease: attempt(1), reason: "gone".to_owned() };
    learner.receive(from_actor(&failed)).expect("sound");
    learner.sending(&FromLearner::Revoke(vec![attempt(2)]));
    // A word about an older attempt does not end the newer one.
    let older = LeaseAttempt { attempt: 0, ..attempt(3) };
    let failed = FromActor::LeaseFailed { lease: older, reason: "gone".to_owned() };
    learner.receive(from_actor(&failed)).expect("sound");
    assert_eq!(learner.outstanding().collect::<Vec<_>>(), [attempt(3), attempt(4)]);
    let leave = FromActor::Leave { returned: vec![attempt(3)] };
    learner.receive(from_actor(&leave)).expect("sound");
    assert_eq!(learner.outstanding().collect::<Vec<_>>(), [attempt(4)]);
}

#[test]
fn held_policies_are_remembered_within_bounds() {
    let mut learner = admitted();
    let policy = |i: usize| PolicyDigest(Digest::of(&i.to_le_bytes()));
    for i in 0..MAX_HELD + 10 {
        let holding = FromActor::Holding { policy: policy(i) };
        learner.receive(from_actor(&holding)).expect("sound");
        assert!(learner.holds(&policy(i)));
    }
    assert!(!learner.holds(&policy(0)) && learner.holds(&policy(20)));
}

#[test]
fn an_episode_longer_than_a_frame_is_refused_before_it_blocks_the_outbox() {
    let (mut actor, _) = welcomed();
    let long = Bytes::from(vec![0; Kind::Episode.cap() + 1]);
    assert!(actor.submit(long).is_err());
    assert!(actor.outbox().is_empty());
}

/// One learner and one actor whose connection breaks at arbitrary instants, losing what is on its
/// way, while the learner's store survives.
#[derive(Default)]
struct World {
    actor: ActorSession,
    epoch: u64,
    learner: Option<LearnerSession>,
    to_learner: VecDeque<Frame>,
    to_actor: VecDeque<Frame>,
    stored: BTreeSet<EpisodeId>,
    counted: usize,
    submitted: BTreeSet<EpisodeId>,
}

impl World {
    fn reconnect(&mut self) {
        self.cut();
        self.epoch = self.actor.connect();
        let mut learner = LearnerSession::new();
        learner.receive(hello_frame()).expect("hello");
        learner.admit(&hello());
        self.learner = Some(learner);
        self.actor.receive(self.epoch, welcome_frame()).expect("welcome");
    }

    fn cut(&mut self) {
        self.to_learner.clear();
        self.to_actor.clear();
        self.learner = None;
        self.actor.disconnect(self.epoch);
    }

    fn submit(&mut self, n: u64) {
        let id = self.actor.submit(Bytes::from(body(&lease(n, 0, 0)))).expect("short");
        self.submitted.insert(id);
    }

    /// The actor's network sends one more.
    fn send(&mut self) {
        if let Some((id, body)) = self.actor.next_to_send(self.epoch) {
            let message = FromActor::Episode { id, body: body.to_vec() };
            self.to_learner.push_back(from_actor(&message));
        }
    }

    /// The learner takes one message, stores first and acknowledges then.
    fn ingest(&mut self) {
        let Some(learner) = &mut self.learner else { return };
        let Some(frame) = self.to_learner.pop_front() else { return };
        let event = learner.receive(frame).expect("sound");
        let LearnerEvent::Message(FromActor::Episode { id, .. }) = event else { return };
        let outcome = if self.stored.insert(id) {
            self.counted += 1;
            AckOutcome::Stored
        } else {
            AckOutcome::Duplicate
        };
        let ack = FromLearner::Ack { episode: id, outcome };
        learner.sending(&ack);
        self.to_actor.push_back(from_learner(&ack));
    }

    fn hear(&mut self) {
        if let Some(frame) = self.to_actor.pop_front() {
            self.actor.receive(self.epoch, frame).expect("sound");
        }
    }
}

proptest! {
    #[test]
    fn every_episode_is_counted_exactly_once_however_often_the_link_breaks(
        steps in proptest::collection::vec(0_u8..6, 0..200),
    ) {
        let mut world = World::default();
        for (n, step) in steps.into_iter().enumerate() {
            match step {
                0 => world.submit(n as u64),
                1 => world.send(),
                2 => world.ingest(),
                3 => world.hear(),
                4 => world.reconnect(),
                _ => world.cut(),
            }
            // What the actor forgot, the learner has.
            let waiting: BTreeSet<EpisodeId> = world.actor.outbox().waiting().collect();
            prop_assert!(world.submitted.difference(&waiting).all(|id| world.stored.contains(id)));
        }
        world.reconnect();
        while !world.actor.outbox().is_empty() {
            world.send();
            world.ingest();
            world.hear();
        }
        prop_assert_eq!(&world.stored, &world.submitted);
        prop_assert_eq!(world.counted, world.submitted.len());
        prop_assert_eq!(world.learner.map(|learner| learner.unanswered()), Some(0));
    }
}
