//! Adapters reach an actor: the newest first, as differences, over lost links, and again after failures.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use actor::{adapters::Adapters, metrics::Metrics};
use protocol::{
    ActorEndpoint, ActorLink, AdapterManifest, AdapterShelf, Admission, Arrival, ComputeDtype,
    Digest, Hello, Identity, LearnerConfig, LearnerEndpoint, LearnerLink, LinkConfig, ModelDigests,
    OnMalformed, RunId, RunSettings, Secret, Welcome, frame::CHUNK_LEN,
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
                max_tool_calling_iterations: 1,
                on_malformed: OnMalformed::End,
                lora: "{}".to_owned(),
                compute_dtype: ComputeDtype::F32,
            },
        },
    }
}

struct Sides {
    learner: LearnerEndpoint,
    shelf: Arc<AdapterShelf>,
    actor: ActorEndpoint,
}

fn sides() -> Sides {
    let shelf = Arc::new(AdapterShelf::default());
    let config = LearnerConfig::new(admission(), shelf.clone());
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let identity = Identity::generate().expect("made");
    let secret = Secret::generate().expect("made");
    let learner = LearnerEndpoint::bind(any, &identity, secret, config).expect("a port");
    let join = learner.join("127.0.0.1").expect("bound");
    let link = LinkConfig { fetch_parallel: 1, ..LinkConfig::default() };
    let actor = ActorEndpoint::new(join, Identity::generate().expect("made"), link);
    Sides { learner, shelf, actor }
}

impl Sides {
    async fn link(&mut self) -> (LearnerLink, ActorLink) {
        let hello = Hello::new(admission().model, "cpu", 1);
        let (theirs, ours) = tokio::join!(self.actor.connect(hello), self.learner.accept());
        let Some(Arrival::Joined(ours)) = ours else { panic!("not joined: {ours:?}") };
        (theirs.expect("welcome"), ours)
    }

    /// Serves an adapter of `chunks` chunks, a little different at each step.
    fn publish(&self, step: u8, chunks: usize) -> (AdapterManifest, Vec<u8>) {
        let bytes: Vec<u8> = (0..CHUNK_LEN * chunks)
            .map(|at| (at / 7 % 249) as u8 ^ if at % 89 == 0 { step } else { 0 })
            .collect();
        let weights = admission().model.weights;
        let manifest = AdapterManifest::build(step.into(), &weights, &bytes).expect("an adapter");
        (self.shelf.put(manifest, bytes.clone()), bytes)
    }
}

fn fetched(metrics: &Metrics, form: &str) -> f64 {
    let series = format!("rollcall_actor_fetched_bytes_total{{form=\"{form}\"}} ");
    let text = metrics.render();
    let line = text.lines().find_map(|line| line.strip_prefix(&series)).unwrap_or("0");
    line.parse().expect("a number")
}

#[tokio::test]
async fn the_newest_wins_and_arrives_as_a_difference_to_the_last() {
    let mut sides = sides();
    let (theirs, _ours) = sides.link().await;
    let (sender, metrics) = (theirs.sender(), Metrics::default());
    let mut adapters = Adapters::new(admission().model.weights, metrics.clone());
    let (first, bytes) = sides.publish(1, 3);
    adapters.announced(first.clone(), &sender).await.expect("sound");
    assert_eq!(adapters.arrived(&sender).await, (first.policy, bytes.into()));
    assert_eq!(fetched(&metrics, "delta"), 0.0);

    // Two more are announced before anything of them arrives: only the last one is fetched.
    let (second, _) = sides.publish(2, 3);
    let (third, bytes) = sides.publish(3, 3);
    adapters.announced(second, &sender).await.expect("sound");
    adapters.announced(third.clone(), &sender).await.expect("sound");
    assert_eq!(adapters.arrived(&sender).await, (third.policy, bytes.into()));

    let (fourth, bytes) = sides.publish(4, 3);
    let (with, without) = fourth.transfer_bytes();
    let before = (fetched(&metrics, "delta"), fetched(&metrics, "whole"));
    adapters.announced(fourth.clone(), &sender).await.expect("sound");
    assert_eq!(adapters.arrived(&sender).await, (fourth.policy, bytes.into()));
    assert!(with * 10 < without, "{with} of {without}");
    assert_eq!(fetched(&metrics, "delta") - before.0, with as f64);
    assert_eq!(fetched(&metrics, "whole"), before.1);

    let foreign = AdapterManifest::build(9, &Digest::of(b"other weights"), b"x").expect("sound");
    assert!(adapters.announced(foreign, &sender).await.is_err());
}

#[tokio::test]
async fn an_older_adapter_that_leases_wait_for_is_fetched_after_the_newest() {
    let mut sides = sides();
    let (theirs, _ours) = sides.link().await;
    let (sender, metrics) = (theirs.sender(), Metrics::default());
    let mut adapters = Adapters::new(admission().model.weights, metrics);
    let (old, old_bytes) = sides.publish(1, 2);
    let (new, new_bytes) = sides.publish(2, 2);
    adapters.awaited(old.policy, &sender).expect("sound");
    adapters.announced(old.clone(), &sender).await.expect("sound");
    adapters.announced(new.clone(), &sender).await.expect("sound");
    let first = adapters.arrived(&sender).await;
    let second = adapters.arrived(&sender).await;
    assert_eq!(first, (new.policy, new_bytes.into()));
    assert_eq!(second, (old.policy, old_bytes.into()));
}

#[tokio::test]
async fn an_older_adapter_is_fetched_when_leases_name_it_after_the_newest_has_come() {
    let mut sides = sides();
    let (theirs, _ours) = sides.link().await;
    let (sender, metrics) = (theirs.sender(), Metrics::default());
    let mut adapters = Adapters::new(admission().model.weights, metrics);
    let (old, old_bytes) = sides.publish(1, 2);
    let (new, new_bytes) = sides.publish(2, 2);
    // As a learner announces to an actor that joins: what leases may name, the newest last.
    adapters.announced(old.clone(), &sender).await.expect("sound");
    adapters.announced(new.clone(), &sender).await.expect("sound");
    assert_eq!(adapters.arrived(&sender).await, (new.policy, new_bytes.clone().into()));
    adapters.awaited(old.policy, &sender).expect("sound");
    assert_eq!(adapters.arrived(&sender).await, (old.policy, old_bytes.into()));
    // The policy that came last is there already.
    adapters.awaited(old.policy, &sender).expect("sound");
    assert_eq!(adapters.arrived(&sender).await.0, old.policy);
    // One that was forgotten meanwhile comes once more.
    adapters.awaited(new.policy, &sender).expect("sound");
    assert_eq!(adapters.arrived(&sender).await, (new.policy, new_bytes.into()));
}

#[tokio::test]
async fn a_lost_link_costs_only_the_chunks_that_are_missing_and_a_failure_is_tried_again() {
    let mut sides = sides();
    let (theirs, ours) = sides.link().await;
    let metrics = Metrics::default();
    let mut adapters = Adapters::new(admission().model.weights, metrics.clone());
    let (manifest, bytes) = sides.publish(1, 24);
    adapters.announced(manifest.clone(), &theirs.sender()).await.expect("sound");
    // One chunk at a time: some of it arrives before the link is cut.
    let served = sides.learner.served();
    while served.whole() < 4 * CHUNK_LEN as u64 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    drop((theirs, ours));
    adapters.stop().await;
    let taken = served.whole();
    assert!(taken < manifest.bytes, "all of it arrived before the cut");

    let (theirs, _ours) = sides.link().await;
    let sender = theirs.sender();
    sides.shelf.retain(|_| false);
    adapters.announced(manifest.clone(), &sender).await.expect("sound");
    // Nothing is served; then it is again, and nobody announces it anew.
    let began = Instant::now();
    let tried = tokio::time::timeout(Duration::from_millis(300), adapters.arrived(&sender)).await;
    assert!(tried.is_err());
    sides.shelf.put(manifest.clone(), bytes.clone());
    let arrived = adapters.arrived(&sender).await;
    assert_eq!(arrived, (manifest.policy, bytes.into()));
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    let again = served.whole() + CHUNK_LEN as u64 - taken;
    assert!(again < manifest.bytes - 2 * CHUNK_LEN as u64, "{again} bytes for the rest");
}
