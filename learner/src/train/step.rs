//! One step of the online loop: collect audited groups, learn from them, publish the new policy.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use policy::model::Adapter;
use protocol::PolicyDigest;
use terminal::{Failure, Progress};

use super::{
    follow::share_update,
    intake::CollectedGroup,
    online::{Learner, Recent},
    record::{Completions, SamplingSummary, StepRecord, Traffic, evaluated},
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

/// How long the coordinator waits for events before it looks at the update again.
const PATIENCE: Duration = Duration::from_millis(2);

/// The policy that played a group.
fn policy_of(group: &CollectedGroup) -> Option<PolicyDigest> {
    group.rollouts.first().map(|it| it.episode.policy)
}

/// The adapter that played a group, where it is not the newest.
fn behaviour<'a>(recent: &'a VecDeque<Recent>, group: &CollectedGroup) -> Option<&'a Adapter> {
    let played = policy_of(group)?;
    if recent.back().is_some_and(|newest| newest.manifest.policy == played) {
        return None;
    }
    recent.iter().find(|it| it.manifest.policy == played).map(|it| &it.adapter)
}

/// What came of trying a step.
enum Attempt {
    Made(Box<Made>),
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
        let ahead = self.step.saturating_add(settings.staleness).saturating_add(1);
        let ahead = u64::from(ahead.min(settings.max_steps)) * per_step;
        let orders = self.training_orders(first..ahead, order);
        let numbers: Vec<u64> = (first..first + per_step).collect();
        let mut watcher = Watcher {
            files: Some(&mut *files),
            progress,
            position: u64::from(self.step),
            what: format!("step {}", self.step + 1),
            ordered: numbers.len() * settings.num_generations as usize,
        };
        self.collector.order(orders, &mut watcher)?;
        let groups = self.collector.collect(&numbers, &mut watcher)?;
        let mut groups = self.collector.drop_stale(groups, &mut watcher)?;
        let mut rollout_seconds = started.elapsed().as_secs_f64();
        let (updating, attempt) = loop {
            if groups.is_empty() {
                return Err(Failure::Fault(format!(
                    "step {}: every group was dropped; see rejected/ and the actors' messages",
                    self.step + 1
                )));
            }
            let updating = Instant::now();
            match self.try_step(&groups, &mut watcher)? {
                Attempt::Made(attempt) => break (updating, attempt),
                Attempt::Refused(refusals) => {
                    let again = Instant::now();
                    groups = self.play_again(groups, refusals, &mut watcher)?;
                    rollout_seconds += again.elapsed().as_secs_f64();
                }
            }
        };
        self.collector.confirm(&groups);
        let Made { advantages, flags, learning_rate, report } = *attempt;
        let played: Vec<u64> = groups.iter().map(|group| self.played_at(group)).collect();
        let sampled_by = groups.first().and_then(policy_of).unwrap_or_else(|| self.policy());
        let oldest = played.iter().min().copied().unwrap_or_default();
        let staleness = u64::from(self.step).saturating_sub(oldest);
        self.step += 1;
        let broadcasting = Instant::now();
        let newest = self.broadcast()?;
        files.policy(&newest.manifest, &newest.bytes).map_err(Failure::fault)?;
        let broadcast_seconds = broadcasting.elapsed().as_secs_f64();
        let update_seconds = updating.elapsed().as_secs_f64();
        let each = groups.iter().zip(&advantages).zip(&flags).zip(&played);
        for (((group, advantages), sampling), policy_step) in each {
            let context = EpisodeContext {
                step: self.step - 1,
                policy_step: u32::try_from(*policy_step).unwrap_or(u32::MAX),
                advantages: Some(advantages.advantages.as_slice()),
                sampling,
            };
            files.episodes(&group.rollouts, &context).map_err(Failure::fault)?;
        }

        let all = evaluated(&groups);
        let sampled: usize = groups
            .iter()
            .flat_map(|g| &g.rollouts)
            .map(|it| it.policy_audit.assistant_tokens)
            .sum();
        let count = advantages.len() as f64;
        let audited = self.collector.audited();
        let audit_seconds = (audited - std::mem::replace(&mut self.audited, audited)).as_secs_f64();
        let record = StepRecord {
            step: self.step,
            reward: all.reward,
            milestone_reward: all.milestone_reward,
            reward_std: advantages.iter().map(|it| it.std).sum::<f64>() / count,
            success: all.success,
            mixed_groups: advantages.iter().filter(|it| it.mixed()).count() as f64 / count,
            learning_rate,
            staleness: u32::try_from(staleness).unwrap_or(u32::MAX),
            episodes: all.episodes,
            stream_tokens: groups
                .iter()
                .flat_map(|group| &group.rollouts)
                .map(|it| it.episode.tokens.len() as u64)
                .sum(),
            completions: Completions::of(&groups),
            malformed: all.malformed,
            seconds: started.elapsed().as_secs_f64(),
            rollout_seconds,
            update_seconds,
            broadcast_seconds,
            audit_seconds,
            rollout_tokens_per_second: sampled as f64 / rollout_seconds,
            update_tokens_per_second: report.tokens as f64 / update_seconds,
            policy: sampled_by,
            sampling: SamplingSummary::of(flags.iter().flatten().flatten()),
            traffic: Traffic::of(
                &groups,
                self.collector.actors(),
                self.collector.counts(),
                &files.progress().rejections,
            ),
            update: report,
        };
        files.step(&record, record.update.grad_norm).map_err(Failure::fault)?;
        let metrics = self.collector.metrics();
        metrics.step(u64::from(record.step), sampled as u64, record.update.tokens);
        metrics.scalars(&serde_json::to_value(&record).map_err(Failure::fault)?);
        for (group, policy_step) in groups.iter().zip(&played) {
            let behind = u64::from(self.step - 1).saturating_sub(*policy_step);
            group.rollouts.iter().for_each(|_| metrics.staleness(behind));
        }
        metrics.journal(files.journal_bytes());
        self.seconds += started.elapsed().as_secs_f64();
        self.commit(files)?;
        // Nobody plays a policy, and no group is ordered under it, before its step is committed.
        self.publish(newest);
        Ok(record)
    }

    /// The optimizer steps behind the policy that played a group.
    fn played_at(&self, group: &CollectedGroup) -> u64 {
        let played = policy_of(group);
        let policy = self.recent.iter().rev().find(|it| Some(it.manifest.policy) == played);
        policy.map_or(u64::from(self.step), |it| it.manifest.step)
    }

    /// Makes one optimizer step, unless the sampling evidence of a rollout forbids it. What comes in
    /// meanwhile is attended to.
    fn try_step(
        &mut self,
        groups: &[CollectedGroup],
        watcher: &mut Watcher<'_>,
    ) -> Result<Attempt, Failure> {
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
        let recent = &self.recent;
        let update_groups: Vec<UpdateGroup<'_>> = groups
            .iter()
            .zip(rewards)
            .zip(&advantages)
            .map(|((group, rewards), advantages)| UpdateGroup {
                episodes: group.rollouts.iter().map(|it| &it.episode).collect(),
                rewards,
                advantages: advantages.advantages.clone(),
                images: self.plan.images.as_ref(),
                behaviour: behaviour(recent, group),
            })
            .collect();
        let update_settings = UpdateSettings {
            examine: (self.judge.mode != SamplingMode::Off).then(|| settings.sampling()),
            ..UpdateSettings::of(&settings, u64::from(self.step))
        };
        let learning_rate = update_settings.learning_rates.0;
        let newest = u64::from(self.step);
        let behind: Vec<u64> =
            groups.iter().map(|group| newest.saturating_sub(self.played_at(group))).collect();
        let (judge, ranks) = (&self.judge, &mut self.ranks);
        let student = Student {
            decoder: &self.decoder,
            reference: self.reference.as_ref(),
            adapter: &mut self.adapter,
            optimizer: &mut self.optimizer,
            critic: self.critic.as_mut(),
        };
        let work = || {
            let mut flags: Vec<Vec<Option<Flagged>>> =
                groups.iter().map(|group| vec![None; group.rollouts.len()]).collect();
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
            let (settings, groups) = (&update_settings, &update_groups);
            share_update(ranks, settings, groups, &behind)?;
            let outcome = update(student, settings, groups, &mut verdict, ranks)?;
            Ok::<_, Failure>((outcome, flags))
        };
        let collector = &mut self.collector;
        let worked = thread::scope(|scope| {
            let (said, done) = mpsc::channel();
            thread::Builder::new().name("update".into()).spawn_scoped(scope, move || {
                // Nobody listens only where the run is ending.
                let _ = said.send(work());
            })?;
            loop {
                match done.try_recv() {
                    Ok(worked) => return Ok(Ok(worked)),
                    Err(mpsc::TryRecvError::Disconnected) => {
                        return Ok(Err(Failure::Fault("the update ended without a word".into())));
                    }
                    Err(mpsc::TryRecvError::Empty) => {}
                }
                if let Err(failure) = collector.attend(PATIENCE, watcher) {
                    return Ok(Err(failure));
                }
            }
        });
        let worked = worked.map_err(|error: std::io::Error| Failure::fault(error))??;
        let (outcome, flags) = worked?;
        Ok(match outcome {
            Outcome::Refused(refusals) => Attempt::Refused(refusals),
            Outcome::Updated(report) => {
                Attempt::Made(Box::new(Made { advantages, flags, learning_rate, report }))
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
        let mut again = Vec::new();
        for (at, group) in groups.into_iter().enumerate() {
            match refused.get(&at) {
                None => kept.push(group),
                Some(refused) => {
                    again.push(group.group);
                    self.collector.refuse_collected(group, refused, watcher)?;
                }
            }
        }
        kept.extend(self.collector.collect(&again, watcher)?);
        kept.sort_by_key(|group| group.group);
        Ok(kept)
    }
}
