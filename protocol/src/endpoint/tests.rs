//! Links over real loopback UDP, both ends in one process.

mod hostile;
mod joining;
mod relaying;
mod traffic;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use super::*;
use crate::{
    Admission, ComputeDtype, Digest, Episode, EpisodeEnd, FinishReason, Hello, Identity, Lease,
    LeaseId, ModelDigests, NoiseKey, OnMalformed, PolicyDigest, RunId, RunSettings, Sampling,
    Secret, Span, Split, Task, Welcome,
};

fn model() -> ModelDigests {
    ModelDigests {
        weights: Digest::of(b"weights"),
        tokenizer: Digest::of(b"tokenizer"),
        template: Digest::of(b"template"),
    }
}

fn welcome() -> Welcome {
    Welcome {
        run: RunId(Digest::of(b"run")),
        settings: RunSettings {
            environment: r#"{"name":"guess"}"#.to_owned(),
            system: None,
            chat_template_kwargs: "{}".to_owned(),
            max_completion_length: 256,
            max_tool_calling_iterations: 3,
            on_malformed: OnMalformed::Observe,
            lora: "{}".to_owned(),
            compute_dtype: ComputeDtype::F32,
        },
    }
}

fn hello() -> Hello {
    Hello::new(model(), "cpu", 4)
}

/// Times that a busy machine keeps. A test that waits for one shortens that one.
fn times() -> LinkConfig {
    LinkConfig {
        keep_alive: Duration::from_millis(200),
        idle: Duration::from_secs(20),
        join: Duration::from_secs(10),
        reach: Duration::from_secs(20),
        frame: Duration::from_secs(20),
        ..LinkConfig::default()
    }
}

/// Short enough to wait for.
const SHORT: Duration = Duration::from_secs(1);

struct Learner {
    endpoint: LearnerEndpoint,
    shelf: Arc<AdapterShelf>,
}

fn learner() -> Learner {
    learner_with(|_| {})
}

fn learner_with(adjust: impl FnOnce(&mut LearnerConfig)) -> Learner {
    let shelf = Arc::new(AdapterShelf::default());
    let admission = Admission { model: model(), welcome: welcome() };
    let mut config = LearnerConfig::new(admission, shelf.clone());
    config.link = times();
    adjust(&mut config);
    let identity = Identity::generate().expect("randomness");
    let secret = Secret::generate().expect("randomness");
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let endpoint = LearnerEndpoint::bind(any, &identity, secret, config).expect("a free port");
    Learner { endpoint, shelf }
}

impl Learner {
    fn actor(&self) -> ActorEndpoint {
        let join = self.endpoint.join("127.0.0.1").expect("bound");
        ActorEndpoint::new(join, Identity::generate().expect("randomness"), times())
    }

    async fn joined(&mut self) -> ActorLink {
        match self.endpoint.accept().await.expect("listening") {
            Arrival::Joined(link) => link,
            Arrival::Refused { failure, .. } => panic!("not let in: {failure}"),
        }
    }

    async fn refused(&mut self) -> JoinFailure {
        match self.endpoint.accept().await.expect("listening") {
            Arrival::Joined(link) => panic!("let in: {link:?}"),
            Arrival::Refused { failure, .. } => failure,
        }
    }

    /// One actor with its link, both ends.
    async fn pair(&mut self) -> (ActorEndpoint, LearnerLink, ActorLink) {
        let actor = self.actor();
        let (theirs, ours) = tokio::join!(actor.connect(hello()), self.joined());
        (actor, theirs.expect("welcome"), ours)
    }
}

fn group(group: u64, size: u32) -> Vec<Lease> {
    let run = welcome().run;
    (0..size)
        .map(|generation| {
            let id = LeaseId { group, generation };
            Lease {
                run,
                id,
                attempt: 0,
                task: Task {
                    id: format!("task-{group}"),
                    prompt: "guess".to_owned(),
                    fields: "{}".to_owned(),
                    split: Split::Train,
                },
                seed: group,
                noise_key: NoiseKey::derive(&run, id),
                policy: PolicyDigest(Digest::of(b"policy")),
                sampling: Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 },
                deadline_ms: 60_000,
            }
        })
        .collect()
}

fn episode(lease: &Lease) -> Episode {
    Episode {
        run: lease.run,
        lease: lease.id,
        task: lease.task.id.clone(),
        seed: lease.seed,
        policy: lease.policy,
        reset_text: "1 to 10".to_owned(),
        reset_images: Vec::new(),
        tokens: vec![1, 2, 3, 4],
        loss_mask: vec![0, 0, 1, 1],
        spans: vec![Span {
            offset: 2,
            ids: vec![3, 4],
            logp_raw: vec![-0.5, -0.25],
            logp_sampling: vec![-0.5, -0.25],
            finish: FinishReason::Stop,
            policy: lease.policy,
            context: Digest::of(b"context"),
        }],
        trace: Vec::new(),
        trace_head: Digest::of(b"head"),
        end: EpisodeEnd::NoCall,
        reward: 0.0,
        images: Vec::new(),
    }
}
