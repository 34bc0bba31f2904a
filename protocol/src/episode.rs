//! Episodes: what an actor answers a lease with.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Digest, LeaseId, PolicyDigest, RunId, TraceRow};

/// Why a generation call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// The model sampled an end-of-turn id, which is the span's last id.
    Stop,
    /// The token budget ran out. Nothing of a cut turn is executed.
    Length,
}

/// Why an episode ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EpisodeEnd {
    /// The environment said that it is done.
    Done,
    /// The policy made a turn without a tool call.
    NoCall,
    /// The last allowed turn was made; its calls were not executed.
    Turns,
    /// The token budget ran out.
    Length,
    /// A malformed call ended it, where the run asks for that.
    Malformed,
}

impl fmt::Display for EpisodeEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Done => "done",
            Self::NoCall => "no_call",
            Self::Turns => "turns",
            Self::Length => "length",
            Self::Malformed => "malformed",
        })
    }
}

/// The ids of one generation call. All columns have the length of `ids`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// Index of the first id in the episode's stream.
    pub offset: u32,
    /// Sampled ids, as sampled, the end-of-turn id included.
    pub ids: Vec<u32>,
    /// log softmax(logits) of each sampled id, at temperature 1 and untruncated. Nats.
    pub logp_raw: Vec<f32>,
    /// Log-probability of each sampled id under the distribution that was sampled from: after
    /// temperature and truncation, renormalised. Nats.
    pub logp_sampling: Vec<f32>,
    /// Why it ended.
    pub finish: FinishReason,
    /// The policy that sampled it.
    pub policy: PolicyDigest,
    /// SHA-256 of the ids that the engine was conditioned on, each as four little-endian bytes.
    pub context: Digest,
}

/// One rollout: the token stream, what of it was sampled, and what the tools answered.
///
/// Nothing in it depends on who played it or when, so equal rollouts have equal ids.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Episode {
    /// The run of its lease.
    pub run: RunId,
    /// The lease that it answers.
    pub lease: LeaseId,
    /// The task's id.
    pub task: String,
    /// The seed that the environment was reset with.
    pub seed: u64,
    /// The policy that played it.
    pub policy: PolicyDigest,
    /// What the environment's reset said to the policy; empty when it said nothing.
    pub reset_text: String,
    /// The whole stream: prompt, sampled ids and external ids in the order that the model saw them.
    pub tokens: Vec<u32>,
    /// 1 where the id was sampled, 0 elsewhere; as long as `tokens`.
    pub loss_mask: Vec<u8>,
    /// The generation calls, in order.
    pub spans: Vec<Span>,
    /// The tool calls, in order.
    pub trace: Vec<TraceRow>,
    /// Chain value after the last row (of the reset, where there is no row).
    pub trace_head: Digest,
    /// Why it ended.
    pub end: EpisodeEnd,
    /// The environment's score as the actor saw it. Never used: the learner recomputes it.
    pub reward: f64,
}
