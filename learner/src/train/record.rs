//! What a step or an evaluation amounts to, as metrics and as lines for people.

use std::collections::BTreeMap;

use protocol::{CallKind, EpisodeEnd, PolicyDigest};
use serde::{Deserialize, Serialize};

use super::{
    intake::{CollectCounts, CollectedGroup},
    update::UpdateReport,
};
use crate::audit::{RungName, sampling::Flagged};

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
    /// How long they are.
    #[serde(flatten)]
    pub completions: Completions,
    /// Share of the tool calls that were malformed.
    pub malformed: f64,
    /// Seconds of the whole step, the commit left out.
    #[serde(rename = "step_time")]
    pub seconds: f64,
    /// Of these, until all groups were in and audited.
    pub rollout_seconds: f64,
    /// Of these, for scoring, backward, optimizer, and making and keeping the new adapter.
    pub update_seconds: f64,
    /// Of the update's, for making and keeping the new adapter.
    pub broadcast_seconds: f64,
    /// Seconds that the audit's threads worked since the step before, beside everything else.
    pub audit_seconds: f64,
    /// Sampled ids a second of the rollout.
    pub rollout_tokens_per_second: f64,
    /// Ids through the model a second of the update, prompts of groups once.
    pub update_tokens_per_second: f64,
    /// Digest of the policy that sampled.
    pub policy: PolicyDigest,
    /// What the scoring pass found out about how the ids were sampled; absent where it did not look.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sampling: Option<SamplingSummary>,
    /// Who was there and what came in, since the run began.
    #[serde(flatten)]
    pub traffic: Traffic,
}

/// How long the episodes of a step are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Completions {
    /// Mean sampled ids of an episode.
    #[serde(rename = "completions/mean_length")]
    pub mean_length: f64,
    /// The fewest.
    #[serde(rename = "completions/min_length")]
    pub min_length: usize,
    /// The most.
    #[serde(rename = "completions/max_length")]
    pub max_length: usize,
    /// Share of episodes whose token budget ran out.
    #[serde(rename = "completions/clipped_ratio")]
    pub clipped_ratio: f64,
    /// Mean turns of an episode.
    pub turns: f64,
}

impl Completions {
    /// Of some episodes.
    pub fn of(groups: &[CollectedGroup]) -> Self {
        let rollouts = || groups.iter().flat_map(|group| &group.rollouts);
        let lengths = || rollouts().map(|it| it.policy_audit.assistant_tokens);
        let count = rollouts().count().max(1) as f64;
        let clipped = rollouts().filter(|it| it.episode.end == EpisodeEnd::Length).count();
        Self {
            mean_length: lengths().sum::<usize>() as f64 / count,
            min_length: lengths().min().unwrap_or_default(),
            max_length: lengths().max().unwrap_or_default(),
            clipped_ratio: clipped as f64 / count,
            turns: rollouts().map(|it| it.episode.spans.len()).sum::<usize>() as f64 / count,
        }
    }
}

/// Who plays, and what became of what was played.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Traffic {
    /// Actors that are connected.
    pub actors: usize,
    /// Episodes of the step by the short name of the actor that played them.
    pub episodes_by_actor: BTreeMap<String, u64>,
    /// What became of leases, since the run began.
    pub leases: CollectCounts,
    /// Episodes that the audit refused, by rung, since the run began.
    pub rejections: BTreeMap<String, u64>,
}

impl Traffic {
    /// Of a step's groups; `refused` is the manifest's count of refusals by reason.
    pub fn of(
        groups: &[CollectedGroup],
        actors: usize,
        leases: CollectCounts,
        refused: &BTreeMap<String, u64>,
    ) -> Self {
        let mut this = Self { actors, leases, ..Self::default() };
        for source in groups.iter().flat_map(|group| &group.sources) {
            *this.episodes_by_actor.entry(source.actor.0.short()).or_default() += 1;
        }
        for (code, count) in refused {
            let rung = RungName::of(code).map_or("unknown", RungName::name);
            *this.rejections.entry(rung.to_owned()).or_default() += count;
        }
        this
    }
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
