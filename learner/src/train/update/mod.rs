//! The updates of one step from audited groups.
//!
//! Groups pass one after the other, so memory is bounded by one group; the denominators are those of
//! a whole update, so that the parts add up to it, whichever rank computes them. With one update a step, one pass scores, examines
//! and learns. Where there are several (`num_iterations`, `num_mini_batches`), or a value head must
//! speak first, a pass before them finds the old log-probabilities, the reference's and the values.
//! A step in which no group has a gradient (all rewards equal, no KL term, no bonus, no value head)
//! leaves everything as it is.
//!
//! What an older policy sampled is scored under that policy too, in a pass before the updates: by it the
//! ids are examined, and their importance weights follow from it.
//!
//! The first pass also examines the sampled ids (rung 9 of the audit): nothing is changed before every
//! episode that the step learns from has passed.

mod parts;
mod pass;

use policy::{
    model::{Adapter, Decoder, ModelError},
    score::{AdamWSettings, Gradients, Optimizer, ValueHead},
    vision::PromptImages,
};
use protocol::{Digest, Episode, Sampling};
use serde::Serialize;
use terminal::Failure;

pub(crate) use self::pass::wide;
use self::{
    parts::{gathered, parts, refusals},
    pass::{Pass, Seen, Sums},
};
use crate::{
    advantage::{gae, whiten},
    audit::{Reason, sampling::SamplingEvidence},
    loss::{Denominator, LossError, StepTotals},
    ranks::{Ranks, gradients::summed},
    recipe::{AlgorithmSettings, OptimizerSettings, TrainingSettings},
};

/// What an update is made with.
#[derive(Clone, Copy, Debug)]
pub struct UpdateSettings {
    /// Surrogate, ratio, clips, KL term, entropy bonus, value head, and how many updates.
    pub algorithm: AlgorithmSettings,
    /// Read by Dr. GRPO.
    pub max_completion_length: u32,
    /// The temperature that was sampled at: log-probabilities are those at this temperature, as in TRL.
    pub temperature: f32,
    /// Compute activations again in backward.
    pub checkpointing: bool,
    /// How the ids were sampled, where they shall be examined.
    pub examine: Option<Sampling>,
    /// Learning rates of policy and value head.
    pub learning_rates: (f64, f64),
    /// The step's number: it decides which groups make a mini-batch.
    pub step: u64,
    /// Bound of the importance weights of what an older policy sampled.
    pub importance_cap: f64,
}

impl UpdateSettings {
    /// Those of step `step` (from 0) of a recipe, without examining how ids were sampled.
    #[allow(clippy::cast_possible_truncation, reason = "sampled at this f32 temperature")]
    pub fn of(training: &TrainingSettings, step: u64) -> Self {
        Self {
            algorithm: training.algorithm,
            max_completion_length: training.max_completion_length,
            temperature: training.sampling.temperature as f32,
            checkpointing: training.gradient_checkpointing,
            examine: None,
            learning_rates: training.learning_rates_at(step),
            step,
            importance_cap: training.importance_sampling_cap,
        }
    }

    /// Whether a pass goes before the updates.
    fn looks_first(&self, groups: &[UpdateGroup<'_>]) -> bool {
        let AlgorithmSettings { num_iterations, num_mini_batches, value, .. } = self.algorithm;
        let older = groups.iter().any(|group| group.behaviour.is_some());
        num_iterations > 1 || num_mini_batches > 1 || value.is_some() || older
    }
}

/// A value head with its optimizer.
#[derive(Clone)]
pub struct Critic {
    /// The head.
    pub head: ValueHead,
    /// Its optimizer.
    pub optimizer: Optimizer,
}

impl Critic {
    /// A fresh one; none where the recipe has none.
    pub fn of(training: &TrainingSettings, decoder: &Decoder) -> Option<Self> {
        training.algorithm.value.map(|_| Self {
            head: ValueHead::zeros(decoder),
            optimizer: adamw(&training.optimizer),
        })
    }
}

/// What learns, and what stays as it is meanwhile.
pub struct Student<'a> {
    /// The base.
    pub decoder: &'a Decoder,
    /// The policy that the KL term holds to; the base where absent.
    pub reference: Option<&'a Adapter>,
    /// The policy.
    pub adapter: &'a mut Adapter,
    /// Its optimizer.
    pub optimizer: &'a mut Optimizer,
    /// The value head, where the settings have one.
    pub critic: Option<&'a mut Critic>,
}

/// The audited rollouts of one group.
#[derive(Clone, Debug)]
pub struct UpdateGroup<'a> {
    /// Rollouts of one prompt.
    pub episodes: Vec<&'a Episode>,
    /// Their training rewards. Read where a value head gives the advantages.
    pub rewards: Vec<f64>,
    /// One a rollout.
    pub advantages: Vec<f64>,
    /// What the checkpoint makes of the prompt's images, where it may have some.
    pub images: Option<&'a PromptImages>,
    /// The policy that sampled them, where it is not the student's as it is now.
    pub behaviour: Option<&'a Adapter>,
}

/// Decides on the evidence about one rollout, given by group and place in the group: an error refuses
/// it. Rank 0's is asked.
pub type Verdict<'a> = dyn FnMut(usize, usize, &SamplingEvidence) -> Result<(), Reason> + 'a;

/// How an update ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// The step was made.
    Updated(UpdateReport),
    /// Rollouts were refused on the evidence of the scoring pass. Nothing was changed.
    Refused(Vec<Refusal>),
}

/// A rollout that was refused.
#[derive(Clone, Debug, PartialEq)]
pub struct Refusal {
    /// Place of its group in the step.
    pub group: usize,
    /// Its place in the group.
    pub row: usize,
    /// Why.
    pub reason: Reason,
}

/// What the updates of a step did: means over them.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct UpdateReport {
    /// The loss, the value loss left out.
    pub loss: f64,
    /// Norm of the policy's gradient before clipping; 0 where nothing was updated.
    pub grad_norm: f64,
    /// Mean estimate of the KL divergence from the reference, nats a token; absent without KL term.
    pub kl: Option<f64>,
    /// Estimate of how far the policy moved from the one that sampled, nats a token: the mean of
    /// `r - 1 - ln r` over token ratios r.
    pub approx_kl: f64,
    /// Share of ratios that were clipped.
    #[serde(rename = "clip_ratio/region_mean")]
    pub clip_fraction: f64,
    /// Share that was clipped from below.
    #[serde(rename = "clip_ratio/low_mean")]
    pub clip_fraction_low: f64,
    /// Share that was clipped from above.
    #[serde(rename = "clip_ratio/high_mean")]
    pub clip_fraction_high: f64,
    /// Share that the dual clip cut; absent without one.
    #[serde(rename = "clip_ratio/dual_mean", skip_serializing_if = "Option::is_none")]
    pub clip_fraction_dual: Option<f64>,
    /// Mean entropy of the scored positions, nats.
    pub entropy: Option<f64>,
    /// Mean absolute difference between the log-probabilities of learner and sampler; absent where
    /// truncation or the temperature make them different quantities.
    pub logp_gap: Option<f64>,
    /// What the value head did, where there is one.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub value: Option<ValueReport>,
    /// The importance weights of what older policies sampled, where there was any.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub importance: Option<ImportanceReport>,
    /// Ids that went through the model, the prompts of groups once a pass.
    pub tokens: u64,
    /// Updates that the optimizer made.
    pub updates: u32,
    /// Whether it made one.
    pub stepped: bool,
}

/// Importance weights of sampled ids.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct ImportanceReport {
    /// Their mean.
    pub importance_mean: f64,
    /// Share of them that the cap cut.
    pub importance_capped: f64,
}

/// What the updates of a value head did: means over them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct ValueReport {
    /// Mean value loss a token, without its weight.
    pub value_loss: f64,
    /// Share of tokens whose value was clipped.
    pub value_clip_fraction: f64,
    /// Share of the returns' variance that the values before the step explain; absent where the returns
    /// do not vary.
    pub explained_variance: Option<f64>,
    /// Norm of the head's gradient before clipping.
    pub value_grad_norm: f64,
}

/// Why an update failed. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum UpdateError {
    /// The model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The loss.
    #[error("the loss of this step cannot be computed: {0}")]
    Loss(#[from] LossError),
    /// Another rank.
    #[error("{0}")]
    Rank(#[from] Failure),
}

impl From<UpdateError> for Failure {
    fn from(error: UpdateError) -> Self {
        match error {
            UpdateError::Rank(failure) => failure,
            error => Self::fault(error),
        }
    }
}

/// AdamW as a recipe describes it.
#[allow(clippy::cast_possible_truncation, reason = "the optimizer's constants are f32")]
pub fn adamw(settings: &OptimizerSettings) -> Optimizer {
    Optimizer::new(AdamWSettings {
        betas: (settings.adam_beta1 as f32, settings.adam_beta2 as f32),
        eps: settings.adam_epsilon as f32,
        weight_decay: settings.weight_decay as f32,
        max_grad_norm: (settings.max_grad_norm > 0.0).then_some(settings.max_grad_norm),
    })
}

/// Makes the updates of one step with the gradients of `groups`, unless `verdict` refuses one of their
/// rollouts. A group that has no gradient is neither scored nor examined. All ranks know all groups, and
/// each computes a part of them.
///
/// # Errors
/// A loss or gradient that is not finite, a failing device or rank; nothing was changed.
pub fn update(
    student: Student<'_>,
    settings: &UpdateSettings,
    groups: &[UpdateGroup<'_>],
    verdict: &mut Verdict<'_>,
    ranks: &mut Ranks,
) -> Result<Outcome, UpdateError> {
    let Student { decoder, reference, adapter, optimizer, critic } = student;
    denominator(settings, groups, &all(groups))?;
    let learns = |at: &usize| {
        groups.get(*at).is_some_and(|group| settings.algorithm.has_gradient(&group.advantages))
    };
    let mut adapting = Adapting {
        adapter: adapter.clone(),
        optimizer: optimizer.clone(),
        critic: critic.as_deref().cloned(),
    };
    let mut sums = Sums::default();
    let mut seen: Vec<Vec<Seen>> = vec![Vec::new(); groups.len()];
    let looks_first = settings.looks_first(groups);
    if looks_first {
        let batch: Vec<usize> = all(groups).into_iter().filter(learns).collect();
        let parts = parts(groups, &batch, ranks.world());
        let mut found = Vec::new();
        for part in parts.get(ranks.rank()).into_iter().flatten() {
            let pass = adapting.pass(decoder, reference, settings);
            found.extend(pass.look(groups, part, &mut sums)?);
        }
        let (refused, any) = refusals(ranks, &sums.examined, verdict)?;
        if any {
            return Ok(Outcome::Refused(refused));
        }
        seen = gathered(ranks, &parts, found, groups, settings)?;
        judge_by_values(settings, groups, &mut seen);
    }
    for iteration in 0..settings.algorithm.num_iterations {
        for mut batch in mini_batches(settings, iteration, groups.len()) {
            // A mini-batch of groups without any token has nothing to say.
            let Ok(denominator) = denominator(settings, groups, &batch) else { continue };
            batch.retain(learns);
            let parts = parts(groups, &batch, ranks.world());
            for part in parts.get(ranks.rank()).into_iter().flatten() {
                let known = seen.get(part.group).and_then(|it| it.get(part.rows.clone()));
                let pass = adapting.pass(decoder, reference, settings);
                pass.learn(groups, part, known.unwrap_or_default(), &denominator, &mut sums)?;
            }
            if !looks_first {
                let (refused, any) = refusals(ranks, &sums.examined, verdict)?;
                if any {
                    return Ok(Outcome::Refused(refused));
                }
            }
            adapting.step(settings, &mut sums, ranks)?;
        }
    }
    sums.over_ranks(ranks)?;
    *adapter = adapting.adapter;
    *optimizer = adapting.optimizer;
    if let (Some(critic), Some(adapted)) = (critic, adapting.critic) {
        *critic = adapted;
    }
    Ok(Outcome::Updated(sums.report(settings)))
}

/// Copies that the updates work on, so that a failure leaves the originals as they are.
struct Adapting {
    adapter: Adapter,
    optimizer: Optimizer,
    critic: Option<Critic>,
}

impl Adapting {
    fn pass<'a>(
        &'a self,
        decoder: &'a Decoder,
        reference: Option<&'a Adapter>,
        settings: &'a UpdateSettings,
    ) -> Pass<'a> {
        let head = self.critic.as_ref().map(|critic| &critic.head);
        Pass { decoder, adapter: &self.adapter, reference, head, settings }
    }

    /// One update with the gradients so far, those of all ranks.
    fn step(
        &mut self,
        settings: &UpdateSettings,
        sums: &mut Sums,
        ranks: &mut Ranks,
    ) -> Result<(), UpdateError> {
        let mut gradients = sums.gradients.take();
        let mut own = gradients.as_mut().map(Gradients::take_value_head);
        gradients = summed(ranks, gradients, &mut self.adapter)?;
        if let Some(critic) = &mut self.critic {
            own = summed(ranks, own, &mut critic.head)?;
        }
        let Some(gradients) = gradients else { return Ok(()) };
        let (rate, value_rate) = settings.learning_rates;
        let norm = self.optimizer.step(rate, &mut self.adapter, gradients)?;
        sums.grad_norm += norm;
        sums.updates += 1;
        sums.moved += u32::from(norm > 0.0);
        if let (Some(critic), Some(own)) = (&mut self.critic, own) {
            sums.value_grad_norm += critic.optimizer.step(value_rate, &mut critic.head, own)?;
        }
        self.agree(ranks)
    }

    /// All ranks hold the same policy.
    fn agree(&self, ranks: &mut Ranks) -> Result<(), UpdateError> {
        if ranks.world() == 1 {
            return Ok(());
        }
        ranks.agree("adapter", Digest::of(&self.adapter.to_safetensors()?))?;
        if let Some(critic) = &self.critic {
            ranks.agree("value head", Digest::of(&critic.head.to_safetensors()?))?;
        }
        Ok(())
    }
}

/// Turns the values that the first pass found into advantages and returns.
fn judge_by_values(settings: &UpdateSettings, groups: &[UpdateGroup<'_>], seen: &mut [Vec<Seen>]) {
    let Some(value) = settings.algorithm.value else { return };
    let learns = |group: &UpdateGroup<'_>| settings.algorithm.has_gradient(&group.advantages);
    for (group, rows) in groups.iter().zip(&mut *seen).filter(|(group, _)| learns(group)) {
        for (row, reward) in rows.iter_mut().zip(&group.rewards) {
            row.judged = Some(gae(*reward, &row.values, value.gamma, value.lam));
        }
    }
    whiten(seen.iter_mut().flatten().filter_map(|row| row.judged.as_mut()));
}

fn all(groups: &[UpdateGroup<'_>]) -> Vec<usize> {
    (0..groups.len()).collect()
}

/// The denominators of an update on these groups.
fn denominator(
    settings: &UpdateSettings,
    groups: &[UpdateGroup<'_>],
    batch: &[usize],
) -> Result<Denominator, LossError> {
    let totals = batch
        .iter()
        .filter_map(|at| groups.get(*at))
        .flat_map(|group| &group.episodes)
        .map(|episode| episode.spans.iter().map(|span| span.ids.len()).sum::<usize>())
        .fold(StepTotals::default(), StepTotals::with);
    let aggregation = settings.algorithm.aggregation();
    Denominator::new(aggregation, totals, settings.max_completion_length)
}

/// Which groups each update of an iteration learns from: all in order, or shuffled and dealt out in
/// equal parts.
fn mini_batches(settings: &UpdateSettings, iteration: u32, groups: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..groups).collect();
    let parts = settings.algorithm.num_mini_batches as usize;
    if parts > 1 {
        let step = settings.step;
        order.sort_by_cached_key(|at| Digest::of(format!("{step} {iteration} {at}").as_bytes()));
    }
    // Of groups that were dropped on the way the last mini-batches have fewer.
    order.chunks(groups.div_ceil(parts).max(1)).map(<[usize]>::to_vec).collect()
}
