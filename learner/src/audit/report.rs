//! What was checked of an episode, as the evidence keeps it.

use protocol::{Digest, Episode, FinishReason, PolicyDigest};
use serde::{Deserialize, Serialize};

/// The audit's account of one accepted episode.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PolicyAudit {
    /// Ids of the prompt.
    pub prompt_tokens: usize,
    /// Sampled ids: those that are trained on.
    pub assistant_tokens: usize,
    /// External ids after the prompt.
    pub external_tokens: usize,
    /// The generation calls.
    pub sampled_spans: Vec<SpanReport>,
    /// Prompt, spans, contexts, external ids and mask are the learner's own.
    pub sampled_token_equality_verified: bool,
    /// The trace's calls are those of the sampled ids.
    pub calls_verified: bool,
    /// The trace's chain holds.
    pub chain_verified: bool,
    /// The environment was played again and gave the same trace; false for recorded environments.
    pub replay_verified: bool,
    /// The reward was recomputed.
    pub reward_verified: bool,
}

/// One generation call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SpanReport {
    /// Index of its first id in the stream.
    pub offset: u32,
    /// How many ids.
    pub tokens: usize,
    /// Why it ended.
    pub finish: FinishReason,
    /// The policy.
    pub policy: PolicyDigest,
    /// Digest of the context.
    pub context: Digest,
}

impl PolicyAudit {
    /// The account of an episode that passed.
    pub(super) fn of(episode: &Episode, prompt_tokens: usize, replayed: bool) -> Self {
        let sampled_spans: Vec<SpanReport> = episode
            .spans
            .iter()
            .map(|span| SpanReport {
                offset: span.offset,
                tokens: span.ids.len(),
                finish: span.finish,
                policy: span.policy,
                context: span.context,
            })
            .collect();
        let assistant_tokens = sampled_spans.iter().map(|span| span.tokens).sum();
        let known = prompt_tokens.saturating_add(assistant_tokens);
        Self {
            prompt_tokens,
            assistant_tokens,
            external_tokens: episode.tokens.len().saturating_sub(known),
            sampled_spans,
            sampled_token_equality_verified: true,
            calls_verified: true,
            chain_verified: true,
            replay_verified: replayed,
            reward_verified: true,
        }
    }
}
