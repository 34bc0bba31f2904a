//! What a step or an evaluation amounts to, as metrics and as lines for people.

use protocol::{CallKind, PolicyDigest};
use serde::{Deserialize, Serialize};

use super::{intake::CollectedGroup, update::UpdateReport};
use crate::audit::sampling::Flagged;

/// How well the policy does on held-out tasks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluated {
    /// Share of episodes with strict success.
    pub success: f64,
    /// Mean training reward.
    pub reward: f64,
    /// Mean reward by milestones alone, where the recipe names that protocol.
    pub milestone_reward: Option<f64>,
    /// Episodes.
    pub episodes: usize,
    /// Share of the tool calls that were malformed.
    pub malformed: f64,
}

/// One optimizer step, as it stands in `metrics.jsonl`.
#[derive(Clone, Debug, Serialize)]
pub struct StepRecord {
    /// From 1.
    pub step: u32,
    /// Mean training reward.
    pub reward: f64,
    /// Mean reward by milestones alone, where the recipe names that protocol.
    pub milestone_reward: Option<f64>,
    /// Population standard deviation of the rewards inside groups, mean over groups.
    pub reward_std: f64,
    /// Share of episodes with strict success.
    pub success: f64,
    /// Share of groups whose rewards differ.
    pub mixed_groups: f64,
    /// The update.
    #[serde(flatten)]
    pub update: UpdateReport,
    /// Learning rate of the update.
    pub learning_rate: f64,
    /// Updates between the policy that sampled and the one that was trained.
    pub staleness: u32,
    /// Episodes of the step.
    pub episodes: usize,
    /// Ids of all its streams, each prompt counted once an episode.
    pub stream_tokens: u64,
    /// Mean sampled ids of an episode.
    pub completion_tokens: f64,
    /// Share of the tool calls that were malformed.
    pub malformed: f64,
    /// Seconds of the whole step.
    pub seconds: f64,
    /// Of these, until all groups were in and audited.
    pub rollout_seconds: f64,
    /// Of these, for scoring, backward and optimizer.
    pub update_seconds: f64,
    /// Sampled ids a second of the rollout.
    pub rollout_tokens_per_second: f64,
    /// Ids through the model a second of the update, prompts of groups once.
    pub update_tokens_per_second: f64,
    /// Digest of the policy that sampled.
    pub policy: PolicyDigest,
    /// What the scoring pass found out about how the ids were sampled; absent where it did not look.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sampling: Option<SamplingSummary>,
}

/// The sampling evidence of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct SamplingSummary {
    /// Episodes that were examined: those of groups with a gradient.
    pub episodes: usize,
    /// Of these, the ones that break a bound.
    pub flagged: usize,
    /// Their sampled ids.
    pub tokens: usize,
    /// Of these, the ids that honest sampling on this device would not have given.
    pub unexplained: usize,
    /// The largest deficit of an id, in units of logit / T.
    pub deficit_max: f64,
    /// The largest mean deficit of an episode.
    pub deficit_mean: f64,
    /// The largest log-probability gap of an id, nats.
    pub logp_gap_max: f64,
    /// The largest mean log-probability gap of an episode, nats.
    pub logp_gap_mean: f64,
}

impl SamplingSummary {
    /// Of these episodes; nothing of none.
    pub fn of<'a>(flags: impl Iterator<Item = &'a Flagged>) -> Option<Self> {
        flags.fold(None, |sum, Flagged { evidence, reason }| {
            let sum = sum.unwrap_or(Self::default());
            Some(Self {
                episodes: sum.episodes + 1,
                flagged: sum.flagged + usize::from(reason.is_some()),
                tokens: sum.tokens + evidence.tokens,
                unexplained: sum.unexplained + evidence.unexplained,
                deficit_max: sum.deficit_max.max(evidence.deficit_max),
                deficit_mean: sum.deficit_mean.max(evidence.deficit_mean),
                logp_gap_max: sum.logp_gap_max.max(evidence.logp_gap_max),
                logp_gap_mean: sum.logp_gap_mean.max(evidence.logp_gap_mean),
            })
        })
    }
}

/// The results of some groups.
pub fn evaluated(groups: &[CollectedGroup]) -> Evaluated {
    let all: Vec<_> = groups.iter().flat_map(|group| &group.rollouts).collect();
    let count = all.len().max(1) as f64;
    let rows =
        all.iter().flat_map(|it| &it.episode.trace).filter(|row| row.kind != CallKind::Answer);
    let malformed = rows.clone().filter(|row| row.kind == CallKind::Malformed).count() as f64;
    let milestone_rewards: Option<Vec<f64>> =
        all.iter().map(|it| it.reward.milestone_reward()).collect();
    Evaluated {
        success: all.iter().filter(|it| it.reward.strict_success).count() as f64 / count,
        reward: all.iter().map(|it| it.reward.training_reward).sum::<f64>() / count,
        milestone_reward: milestone_rewards.map(|all| all.iter().sum::<f64>() / count),
        episodes: all.len(),
        malformed: malformed / rows.count().max(1) as f64,
    }
}

/// A step for people.
pub fn line(record: &StepRecord, total: u32) -> String {
    let kl = record.update.kl.map_or_else(|| "-".into(), |kl| format!("{kl:.4}"));
    let milestones =
        record.milestone_reward.map_or_else(String::new, |it| format!("  milestones {it:.3}"));
    format!(
        "step {}/{total}  reward {:.3}{milestones}  success {:.3}  kl {kl}  clip {:.3}  grad {:.3}  staleness {}  rollout {:.0} tok/s  update {:.0} tok/s  {:.2} s",
        record.step,
        record.reward,
        record.success,
        record.update.clip_fraction,
        record.update.grad_norm,
        record.staleness,
        record.rollout_tokens_per_second,
        record.update_tokens_per_second,
        record.seconds,
    )
}
