//! Rounds that train nothing: held-out tasks, and episodes whose sampling is examined.

use std::ops::Range;

use terminal::{Failure, Progress};

use super::{
    online::Learner,
    record::{Evaluated, evaluated},
    watcher::Watcher,
};
use crate::{
    audit::sampling::{SamplingEvidence, device_kind, examine},
    curriculum::{TaskOrder, evaluation_group},
    files::{EpisodeContext, RunDirectory},
    leases::GroupOrder,
};

impl Learner {
    /// Whether the recipe wants an evaluation before anything else is done.
    pub fn evaluation_due(&self) -> bool {
        let Some(evaluation) = &self.plan.recipe.evaluation else { return false };
        let last = self.plan.recipe.training.max_steps;
        let between = self.step.min(last - 1).checked_div(evaluation.every).unwrap_or_default();
        self.rounds < 1 + between + u32::from(self.step == last)
    }

    /// Success on the held-out tasks; nothing where the recipe has none.
    ///
    /// # Errors
    /// As [`super::collect::Collector::collect`].
    pub fn evaluate(
        &mut self,
        mut files: Option<&mut RunDirectory>,
        progress: &Progress,
    ) -> Result<Option<Evaluated>, Failure> {
        let Some(evaluation) = self.plan.recipe.evaluation.clone() else { return Ok(None) };
        let round = self.rounds;
        let (sampling, generations) =
            (evaluation.sampling.to_sampling(), evaluation.num_generations);
        let orders: Vec<(u64, GroupOrder)> = (0..)
            .zip(&self.plan.eval)
            .map(|(index, row)| {
                let group = evaluation_group(round, index);
                (group, self.order(row, group, sampling, generations))
            })
            .collect();
        let numbers: Vec<u64> = orders.iter().map(|(group, _)| *group).collect();
        let mut watcher = Watcher {
            files: files.as_deref_mut(),
            progress,
            position: u64::from(self.step),
            what: "evaluating".into(),
            ordered: orders.len() * generations as usize,
        };
        // Those of a learner that ended in the middle are there already.
        let fresh = orders.into_iter().filter(|(group, _)| !self.collector.knows(*group));
        self.collector.order(fresh.collect(), &mut watcher)?;
        let groups = self.collector.collect(&numbers, &mut watcher)?;
        self.collector.confirm(&groups);
        self.rounds += 1;
        let step = self.step;
        let context = EpisodeContext { step, policy_step: step, advantages: None, sampling: &[] };
        for group in &groups {
            if let Some(files) = files.as_deref_mut() {
                files.episodes(&group.rollouts, &context).map_err(Failure::fault)?;
            }
        }
        let evaluated = evaluated(&groups);
        self.before.get_or_insert(evaluated);
        self.after = Some(evaluated);
        if let Some(files) = files {
            let record = serde_json::json!({"evaluation": evaluated, "step": self.step});
            files.metrics(&record).map_err(Failure::fault)?;
            self.collector.metrics().scalars(&record);
            let base = self.base_model();
            files
                .keep_best(self.step, self.policy_files(&base), &evaluated)
                .map_err(Failure::fault)?;
            self.commit(files)?;
        }
        let milestones = evaluated
            .milestone_reward
            .map_or_else(String::new, |it| format!(", milestone reward {it:.3}"));
        progress.note(&format!(
            "step {}: success {:.3}, reward {:.3}{milestones} on {} held-out episodes",
            self.step, evaluated.success, evaluated.reward, evaluated.episodes
        ));
        progress.record("evaluation", &evaluated);
        Ok(Some(evaluated))
    }

    /// Plays the training groups of these numbers as the policy is now, trains on none of them, and
    /// examines how their ids were sampled: evidence and the actor's kind of device, by episode.
    ///
    /// # Errors
    /// As [`super::collect::Collector::collect`]; a failing device.
    pub fn examine(
        &mut self,
        groups: Range<u64>,
        order: &mut TaskOrder,
        progress: &Progress,
    ) -> Result<Vec<(String, SamplingEvidence)>, Failure> {
        let settings = self.plan.recipe.training;
        let position = groups.start * u64::from(settings.num_generations);
        let orders = self.training_orders(groups.clone(), order);
        let numbers: Vec<u64> = groups.collect();
        let mut watcher = Watcher {
            files: None,
            progress,
            position,
            what: "calibrating".into(),
            ordered: numbers.len() * settings.num_generations as usize,
        };
        self.collector.order(orders, &mut watcher)?;
        let groups = self.collector.collect(&numbers, &mut watcher)?;
        self.collector.confirm(&groups);
        let mut found = Vec::new();
        for group in &groups {
            let episodes: Vec<_> = group.rollouts.iter().map(|it| &it.episode).collect();
            let (adapter, images) = (Some(&self.adapter), self.plan.images.as_ref());
            let ids = examine(&self.decoder, adapter, images, settings.sampling(), &episodes)
                .map_err(Failure::fault)?;
            for (source, ids) in group.sources.iter().zip(&ids) {
                found.push((device_kind(&source.device).to_owned(), SamplingEvidence::of(ids)));
            }
        }
        Ok(found)
    }
}
