//! A learner to measure with.

use std::{net::SocketAddr, sync::Arc};

use protocol::{
    AdapterShelf, Admission, ComputeDtype, Digest, Episode, EpisodeEnd, FinishReason, Identity,
    LearnerConfig, LearnerEndpoint, LeaseId, ModelDigests, OnMalformed, PolicyDigest, RunId,
    RunSettings, Secret, Span, Welcome,
};

pub(crate) type Failure = Box<dyn std::error::Error + Send + Sync>;

pub(crate) fn admission() -> Admission {
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
                max_completion_length: 4096,
                max_tool_calling_iterations: 8,
                on_malformed: OnMalformed::Observe,
                lora: "{}".to_owned(),
                compute_dtype: ComputeDtype::F32,
            },
        },
    }
}

/// An episode of `tokens` ids, half of them sampled.
pub(crate) fn episode(lease: LeaseId, tokens: u32) -> Episode {
    let policy = PolicyDigest(Digest::of(b"policy"));
    let ids: Vec<u32> = (tokens / 2..tokens).collect();
    let logps: Vec<f32> = ids.iter().map(|id| -1.0 / (*id as f32 + 1.0)).collect();
    Episode {
        run: admission().welcome.run,
        lease,
        task: "task".to_owned(),
        seed: lease.group,
        policy,
        reset_text: "Guess a number.".to_owned(),
        reset_images: Vec::new(),
        tokens: (0..tokens).collect(),
        loss_mask: (0..tokens).map(|i| u8::from(i >= tokens / 2)).collect(),
        spans: vec![Span {
            offset: tokens / 2,
            ids,
            logp_raw: logps.clone(),
            logp_sampling: logps,
            finish: FinishReason::Stop,
            policy,
            context: Digest::of(b"context"),
        }],
        trace: Vec::new(),
        trace_head: Digest::of(b"head"),
        end: EpisodeEnd::NoCall,
        reward: 1.0,
        images: Vec::new(),
    }
}

pub(crate) fn learner(shelf: Arc<AdapterShelf>) -> Result<LearnerEndpoint, Failure> {
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let config = LearnerConfig::new(admission(), shelf);
    Ok(LearnerEndpoint::bind(any, &Identity::generate()?, Secret::generate()?, config)?)
}

/// Of this process, all threads, user and system. In hundredths of a second on Linux; 0 elsewhere.
pub(crate) fn cpu_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after_name = text.rsplit(')').next().unwrap_or_default();
    let mut fields = after_name.split_whitespace().skip(11);
    let mut ticks = || fields.next().and_then(|it| it.parse::<f64>().ok()).unwrap_or_default();
    (ticks() + ticks()) / 100.0
}

pub(crate) fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied().unwrap_or_default()
}
