//! Leases: what the learner asks of an actor.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{NoiseKey, PolicyDigest, RunId};

/// One rollout slot of a run. A lost lease is issued again under the same id, so that it gives the
/// same episode wherever it is played.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LeaseId {
    /// Group: the rollouts of one task and seed under one policy.
    pub group: u64,
    /// Index inside the group, from 0.
    pub generation: u32,
}

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.group, self.generation)
    }
}

/// Which part of the data a task belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Split {
    /// Learned from.
    Train,
    /// Held out: scored, never learned from.
    Eval,
}

/// A dataset row as the actor needs it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Task {
    /// Unique row id.
    pub id: String,
    /// The user's message. Untrusted text.
    pub prompt: String,
    /// The row's `task` object as compact JSON text. Untrusted fields.
    pub fields: String,
    /// Train or eval.
    pub split: Split,
}

/// How the next token is chosen, in Hugging Face's order: temperature, top-k, top-p, min-p.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// Divides the logits. 0 means greedy: argmax, no noise.
    pub temperature: f32,
    /// Keep the k largest logits; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set whose probability reaches p; 1 keeps all.
    pub top_p: f32,
    /// Drop ids below `min_p` times the largest probability; 0 drops none.
    pub min_p: f32,
}

/// The right and duty to play one rollout. Ends submitted, failed or expired.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Lease {
    /// The run that it belongs to.
    pub run: RunId,
    /// Group and generation.
    pub id: LeaseId,
    /// How often this id was issued before. Not part of the episode.
    pub attempt: u32,
    /// What to play.
    pub task: Task,
    /// Seed of the environment's reset.
    pub seed: u64,
    /// Key of the sampling noise.
    pub noise_key: NoiseKey,
    /// The policy that must play it.
    pub policy: PolicyDigest,
    /// Sampling settings.
    pub sampling: Sampling,
    /// Milliseconds from receipt after which the learner counts it as expired.
    pub deadline_ms: u64,
}
