//! What the evidence amounts to, step by step and evaluation by evaluation.

use std::collections::{BTreeMap, BTreeSet};

use protocol::PolicyDigest;

use super::episodes::calls;
use crate::{audit::Audited, curriculum::evaluation_round, files::GroupRecord};

/// Sums over the episodes of one step, or of one evaluation.
#[derive(Clone, Debug, Default)]
pub(super) struct Tally {
    pub(super) episodes: u64,
    pub(super) rewards: f64,
    /// By milestones alone, where the recipe names that protocol.
    pub(super) milestone_rewards: Option<f64>,
    pub(super) successes: u64,
    pub(super) groups: u64,
    pub(super) stds: f64,
    pub(super) mixed: u64,
    pub(super) stream_tokens: u64,
    pub(super) sampled_tokens: u64,
    pub(super) malformed: u64,
    pub(super) calls: u64,
    pub(super) policy: Option<PolicyDigest>,
    /// Optimizer steps behind the policy.
    pub(super) step: u64,
    /// Whether a group lacks rollouts: its sums are not those of the run.
    pub(super) broken: bool,
}

impl Tally {
    /// A share of the episodes, or mean over them.
    pub(super) fn mean(&self, sum: f64) -> f64 {
        sum / self.episodes.max(1) as f64
    }

    /// Share of the calls that were malformed.
    pub(super) fn malformed_share(&self) -> f64 {
        self.malformed as f64 / self.calls.max(1) as f64
    }
}

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Tallies {
    /// By step, from 0.
    pub(super) steps: BTreeMap<u64, Tally>,
    /// By round.
    pub(super) rounds: BTreeMap<u32, Tally>,
    /// Tasks that were trained on.
    pub(super) tasks: BTreeSet<String>,
    /// Groups that were trained on.
    pub(super) groups: Vec<GroupRecord>,
}

impl Tallies {
    /// Whether any group lacks rollouts.
    pub(super) fn broken(&self) -> bool {
        self.steps.values().chain(self.rounds.values()).any(|it| it.broken)
    }

    /// Adds the audited rollouts of a group that stands in the evidence at `step`; `whole` is whether
    /// they are all of it.
    pub(super) fn add(&mut self, group: u64, step: u64, rollouts: &[&Audited], whole: bool) {
        let round = evaluation_round(group);
        let tally = match round {
            Some(round) => self.rounds.entry(round).or_default(),
            None => self.steps.entry(step).or_default(),
        };
        tally.broken |= !whole;
        let Some(first) = rollouts.first() else { return };
        tally.policy = Some(first.episode.policy);
        tally.step = step;
        for it in rollouts {
            tally.episodes += 1;
            tally.rewards += it.reward.training_reward;
            if let Some(reward) = it.reward.milestone_reward() {
                *tally.milestone_rewards.get_or_insert(0.0) += reward;
            }
            tally.successes += u64::from(it.reward.strict_success);
            tally.stream_tokens += it.episode.tokens.len() as u64;
            tally.sampled_tokens += it.policy_audit.assistant_tokens as u64;
            let (malformed, all) = calls(it);
            tally.malformed += malformed;
            tally.calls += all;
        }
        let Some(record) = GroupRecord::of(step, rollouts) else { return };
        tally.groups += 1;
        tally.stds += record.reward_std;
        tally.mixed += u64::from(record.reward_std > 0.0);
        if round.is_none() {
            self.tasks.insert(record.task_id.clone());
            self.groups.push(record);
        }
    }
}
