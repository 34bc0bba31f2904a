//! One step of the online loop: collect audited groups, learn from them, publish the new policy.

use std::{collections::BTreeMap, time::Instant};

use terminal::{Failure, Progress};

use super::{
    collect::CollectedGroup,
    follow::share_update,
    online::Learner,
    record::{SamplingSummary, StepRecord, evaluated},
    update::{Outcome, Refusal, Student, UpdateGroup, UpdateReport, UpdateSettings, update},
    watcher::Watcher,
};
use crate::{
    advantage::GroupAdvantages,
    audit::{
        Reason,
        sampling::{Flagged, SamplingEvidence, SamplingMode, device_kind},
    },
    curriculum::TaskOrder,
    files::{EpisodeContext, RunDirectory},
};

/// What came of trying a step.
enum Attempt {
    Made(Made),
    Refused(Vec<Refusal>),
}

/// A step that was made, by group.
struct Made {
    advantages: Vec<GroupAdvantages>,
    flags: Vec<Vec<Option<Flagged>>>,
    learning_rate: f64,
    report: UpdateReport,
}

impl Learner {
    pub(super) fn one_step(
        &mut self,
        order: &mut TaskOrder,
        files: &mut RunDirectory,
        progress: &Progress,
    ) -> Result<StepRecord, Failure> {
        let settings = self.plan.recipe.training;
        let started = Instant::now();
        let per_step = u64::from(settings.groups_per_step());
        let first = u64::from(self.step) * per_step;
        let orders = self.training_orders(first..first + per_step, order);
        let mut watcher = Watcher {
            files: Some(&mut *files),
            progress,
            position: u64::from(self.step),
            what: format!("step {}", self.step + 1),
        };
        let mut groups = self.collector.collect(orders, &mut watcher)?;
        let mut rollout_seconds = started.elapsed().as_secs_f64();
        let (updating, attempt) = loop {
            if groups.is_empty() {
                return Err(Failure::Fault(format!(
                    "step {}: every group was dropped; see rejected/ and the actors' messages",
                    self.step + 1
                )));
            }
            let updating = Instant::now();
            match self.try_step(&groups)? {
                Attempt::Made(attempt) => break (updating, attempt),
                Attempt::Refused(refusals) => {
                    let again = Instant::now();
                    groups = self.play_again(groups, refusals, &mut watcher)?;
                    rollout_seconds += again.elapsed().as_secs_f64();
                }
            }
        };
        self.collector.confirm(&groups);
        let Made { advantages, flags, learning_rate, report } = attempt;
        let sampled_by = self.policy;
        self.step += 1;
        self.publish(Some(&mut *files))?;
        let update_seconds = updating.elapsed().as_secs_f64();
        for ((group, advantages), sampling) in groups.iter().zip(&advantages).zip(&flags) {
            let advantages = Some(advantages.advantages.as_slice());
            let context = EpisodeContext { step: self.step - 1, advantages, sampling };
            files.episodes(&group.rollouts, &context).map_err(Failure::fault)?;
        }

        let all = evaluated(&groups);
        let sampled: usize = groups
            .iter()
            .flat_map(|g| &g.rollouts)
            .map(|it| it.policy_audit.assistant_tokens)
            .sum();
        let count = advantages.len() as f64;
        Ok(StepRecord {
            step: self.step,
            reward: all.reward,
            milestone_reward: all.milestone_reward,
            reward_std: advantages.iter().map(|it| it.std).sum::<f64>() / count,
            success: all.success,
            mixed_groups: advantages.iter().filter(|it| it.mixed()).count() as f64 / count,
            learning_rate,
            staleness: 0,
            episodes: all.episodes,
            stream_tokens: groups
                .iter()
                .flat_map(|group| &group.rollouts)
                .map(|it| it.episode.tokens.len() as u64)
                .sum(),
            completion_tokens: sampled as f64 / all.episodes.max(1) as f64,
            malformed: all.malformed,
            seconds: started.elapsed().as_secs_f64(),
            rollout_seconds,
            update_seconds,
            rollout_tokens_per_second: sampled as f64 / rollout_seconds,
            update_tokens_per_second: report.tokens as f64 / update_seconds,
            policy: sampled_by,
            sampling: SamplingSummary::of(flags.iter().flatten().flatten()),
            update: report,
        })
    }

    /// Makes one optimizer step, unless the sampling evidence of a rollout forbids it.
    fn try_step(&mut self, groups: &[CollectedGroup]) -> Result<Attempt, Failure> {
        let settings = self.plan.recipe.training;
        let rewards: Vec<Vec<f64>> = groups
            .iter()
            .map(|group| group.rollouts.iter().map(|it| it.reward.training_reward).collect())
            .collect();
        let advantages = rewards
            .iter()
            .map(|rewards| settings.advantages(rewards))
            .collect::<Result<Vec<_>, _>>()
            .map_err(Failure::fault)?;
        let update_groups: Vec<UpdateGroup<'_>> = groups
            .iter()
            .zip(rewards)
            .zip(&advantages)
            .map(|((group, rewards), advantages)| UpdateGroup {
                episodes: group.rollouts.iter().map(|it| &it.episode).collect(),
                rewards,
                advantages: advantages.advantages.clone(),
                images: self.plan.images.as_ref(),
            })
            .collect();
        let update_settings = UpdateSettings {
            examine: (self.judge.mode != SamplingMode::Off).then(|| settings.sampling()),
            ..UpdateSettings::of(&settings, u64::from(self.step))
        };
        let learning_rate = update_settings.learning_rates.0;
        let mut flags: Vec<Vec<Option<Flagged>>> =
            groups.iter().map(|group| vec![None; group.rollouts.len()]).collect();
        let judge = &self.judge;
        let mut verdict = |group: usize, row: usize, evidence: &SamplingEvidence| {
            let device = groups.get(group).and_then(|it| it.sources.get(row));
            let device = device.map_or("", |source| source.device.as_str());
            let flagged = judge.judge(device_kind(device), *evidence);
            let refused = judge.refuses(&flagged);
            if let Some(place) = flags.get_mut(group).and_then(|it| it.get_mut(row)) {
                *place = Some(flagged);
            }
            refused.map_or(Ok(()), Err)
        };
        share_update(&mut self.ranks, &update_settings, &update_groups)?;
        let outcome = update(
            Student {
                decoder: &self.decoder,
                reference: self.reference.as_ref(),
                adapter: &mut self.adapter,
                optimizer: &mut self.optimizer,
                critic: self.critic.as_mut(),
            },
            &update_settings,
            &update_groups,
            &mut verdict,
            &mut self.ranks,
        )?;
        Ok(match outcome {
            Outcome::Refused(refusals) => Attempt::Refused(refusals),
            Outcome::Updated(report) => {
                Attempt::Made(Made { advantages, flags, learning_rate, report })
            }
        })
    }

    /// Refuses rollouts, and waits until their groups are complete again, or dropped.
    fn play_again(
        &mut self,
        groups: Vec<CollectedGroup>,
        refusals: Vec<Refusal>,
        watcher: &mut Watcher<'_>,
    ) -> Result<Vec<CollectedGroup>, Failure> {
        let mut refused: BTreeMap<usize, BTreeMap<usize, Reason>> = BTreeMap::new();
        for Refusal { group, row, reason } in refusals {
            refused.entry(group).or_default().insert(row, reason);
        }
        let mut kept = Vec::with_capacity(groups.len());
        for (at, group) in groups.into_iter().enumerate() {
            match refused.get(&at) {
                None => kept.push(group),
                Some(refused) => self.collector.refuse_collected(group, refused, watcher)?,
            }
        }
        kept.extend(self.collector.collect(Vec::new(), watcher)?);
        kept.sort_by_key(|group| group.group);
        Ok(kept)
    }
}
