//! One optimizer step from audited groups.
//!
//! Groups pass one after the other, so memory is bounded by one group; the denominators are those of
//! the whole step, so that the parts add up to it. A step in which no group has a gradient (all
//! rewards equal, no KL term) leaves adapter and optimizer as they are.
//!
//! The same pass examines the sampled ids (rung 9 of the audit): nothing is changed before every
//! episode that the step learns from has passed.

use policy::{
    model::{Adapter, Decoder, ModelError},
    score::{AdamWSettings, Gradients, Optimizer, ScoreConfig, Trainable, forward, log_probs},
    vision::PromptImages,
};
use protocol::{Episode, Sampling};
use serde::Serialize;

use crate::{
    audit::{
        Reason,
        sampling::{SamplingEvidence, deviations},
    },
    group_batch::group_batch,
    loss::{
        Aggregation, Denominator, LossConfig, LossError, LossRow, LossStats, StepTotals,
        policy_loss,
    },
    recipe::{OptimizerSettings, TrainingSettings},
};

/// Padded ids of one forward pass; a group that has more is scored in parts.
const FORWARD_IDS: usize = 32_768;

/// What an update is made with.
#[derive(Clone, Copy, Debug)]
pub struct UpdateSettings {
    /// Surrogate, ratio, clips, KL term and entropy bonus.
    pub loss: LossConfig,
    /// Which denominators.
    pub aggregation: Aggregation,
    /// Read by Dr. GRPO.
    pub max_completion_length: u32,
    /// The temperature that was sampled at: log-probabilities are those at this temperature, as in TRL.
    pub temperature: f32,
    /// Compute activations again in backward.
    pub checkpointing: bool,
    /// How the ids were sampled, where they shall be examined.
    pub examine: Option<Sampling>,
}

impl UpdateSettings {
    /// Those of a recipe, without examining how ids were sampled.
    #[allow(clippy::cast_possible_truncation, reason = "sampled at this f32 temperature")]
    pub fn of(training: &TrainingSettings) -> Self {
        Self {
            loss: training.loss(),
            aggregation: training.loss_type.aggregation(),
            max_completion_length: training.max_completion_length,
            temperature: training.sampling.temperature as f32,
            checkpointing: training.gradient_checkpointing,
            examine: None,
        }
    }
}

/// The audited rollouts of one group.
#[derive(Clone, Debug)]
pub struct UpdateGroup<'a> {
    /// Rollouts of one prompt.
    pub episodes: Vec<&'a Episode>,
    /// One a rollout.
    pub advantages: Vec<f64>,
    /// What the checkpoint makes of the prompt's images, where it may have some.
    pub images: Option<&'a PromptImages>,
}

/// Decides on the evidence about one rollout, given by group and place in the group: an error refuses
/// it.
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

/// What an update did.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct UpdateReport {
    /// The loss.
    pub loss: f64,
    /// Norm of the gradient before clipping; 0 where nothing was updated.
    pub grad_norm: f64,
    /// Mean k3 estimate of the KL divergence from the base, nats a token; absent without KL term.
    pub kl: Option<f64>,
    /// Share of tokens whose ratio was clipped.
    pub clip_fraction: f64,
    /// Mean entropy of the scored positions, nats.
    pub entropy: Option<f64>,
    /// Mean absolute difference between the log-probabilities of learner and sampler; absent where
    /// truncation or the temperature make them different quantities.
    pub logp_gap: Option<f64>,
    /// Ids that went through the model, the prompts of groups once.
    pub tokens: u64,
    /// Whether the optimizer made a step.
    pub stepped: bool,
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

/// Sums over the parts of a step.
#[derive(Default)]
struct Sums {
    loss: f64,
    stats: LossStats,
    gap: f64,
    gap_tokens: u64,
    ids: u64,
    gradients: Option<Gradients>,
    refused: Vec<Refusal>,
}

/// Makes one step with the gradient of `groups`, unless `verdict` refuses one of their rollouts. A
/// group that has no gradient (all rewards equal, no KL term) is neither scored nor examined.
///
/// # Errors
/// A loss or gradient that is not finite, or a failing device; nothing was changed.
pub fn update(
    decoder: &Decoder,
    adapter: &mut Adapter,
    optimizer: &mut Optimizer,
    settings: &UpdateSettings,
    learning_rate: f64,
    groups: &[UpdateGroup<'_>],
    verdict: &mut Verdict<'_>,
) -> Result<Outcome, UpdateError> {
    let totals = groups
        .iter()
        .flat_map(|group| &group.episodes)
        .map(|episode| episode.spans.iter().map(|span| span.ids.len()).sum::<usize>())
        .fold(StepTotals::default(), StepTotals::with);
    let denominator =
        Denominator::new(settings.aggregation, totals, settings.max_completion_length)?;
    let mut sums = Sums::default();
    for (at, group) in groups.iter().enumerate() {
        if settings.loss.beta == 0.0 && group.advantages.iter().all(|advantage| *advantage == 0.0) {
            continue;
        }
        let mut first = 0;
        for part in parts(group) {
            let mut judge = |row: usize, evidence: &SamplingEvidence| {
                verdict(at, first + row, evidence).map_err(|reason| Refusal {
                    group: at,
                    row: first + row,
                    reason,
                })
            };
            part_gradient(decoder, adapter, settings, &denominator, &part, &mut judge, &mut sums)?;
            first += part.episodes.len();
        }
    }
    if !sums.refused.is_empty() {
        return Ok(Outcome::Refused(sums.refused));
    }
    let grad_norm = match sums.gradients {
        Some(gradients) => optimizer.step(learning_rate, adapter, gradients)?,
        None => 0.0,
    };
    Ok(Outcome::Updated(UpdateReport {
        loss: sums.loss,
        grad_norm,
        kl: sums.stats.mean_kl(),
        clip_fraction: sums.stats.clip_fraction(),
        entropy: sums.stats.mean_entropy(),
        logp_gap: (sums.gap_tokens > 0).then(|| sums.gap / sums.gap_tokens as f64),
        tokens: sums.ids,
        stepped: grad_norm > 0.0,
    }))
}

/// Splits a group so that one forward pass stays within [`FORWARD_IDS`].
fn parts<'a>(group: &UpdateGroup<'a>) -> Vec<UpdateGroup<'a>> {
    let longest = group.episodes.iter().map(|e| e.tokens.len()).max().unwrap_or(0);
    let rows = (FORWARD_IDS / longest.max(1)).max(1);
    group
        .episodes
        .chunks(rows)
        .zip(group.advantages.chunks(rows))
        .map(|(episodes, advantages)| UpdateGroup {
            episodes: episodes.to_vec(),
            advantages: advantages.to_vec(),
            images: group.images,
        })
        .collect()
}

fn part_gradient(
    decoder: &Decoder,
    adapter: &Adapter,
    settings: &UpdateSettings,
    denominator: &Denominator,
    part: &UpdateGroup<'_>,
    judge: &mut dyn FnMut(usize, &SamplingEvidence) -> Result<(), Refusal>,
    sums: &mut Sums,
) -> Result<(), UpdateError> {
    let batch = group_batch(&part.episodes, part.images)?;
    let config = ScoreConfig {
        temperature: settings.temperature,
        checkpointing: settings.checkpointing,
        entropy: true,
        examine: settings.examine,
        ..ScoreConfig::default()
    };
    sums.ids += (batch.prefix.len() + batch.rows.iter().map(|r| r.ids.len()).sum::<usize>()) as u64;
    // Before the tape, which holds the activations.
    let reference = if settings.loss.beta == 0.0 || !sums.refused.is_empty() {
        None
    } else {
        let plain = ScoreConfig { entropy: false, examine: None, ..config };
        Some(wide(&log_probs(decoder, None, &batch, &plain)?.log_probs))
    };
    let tape = forward(decoder, Some(adapter), Trainable::Adapter, &batch, &config)?;
    for (row, tokens) in tape.scores().evidence.iter().flatten().enumerate() {
        let Some(episode) = part.episodes.get(row) else { continue };
        if let Err(refusal) = judge(row, &SamplingEvidence::of(&deviations(episode, tokens))) {
            sums.refused.push(refusal);
        }
    }
    if !sums.refused.is_empty() {
        // The rest of the step is scored to find whatever else must be refused, and for nothing else.
        return Ok(());
    }
    let logp = wide(tape.log_probs());
    let entropies = tape.scores().entropies.as_deref().map(wide);
    let rows: Vec<LossRow<'_>> = logp
        .iter()
        .enumerate()
        .map(|(row, logp)| LossRow {
            logp,
            logp_old: logp,
            logp_ref: reference.as_ref().and_then(|rows| rows.get(row)).map(Vec::as_slice),
            mask: None,
            entropy: entropies.as_ref().and_then(|rows| rows.get(row)).map(Vec::as_slice),
            advantage: part.advantages.get(row).copied().unwrap_or_default().into(),
        })
        .collect();
    let loss = policy_loss(&settings.loss, denominator, &rows)?;
    if settings.temperature == 1.0 {
        for (episode, logp) in part.episodes.iter().zip(&logp) {
            let sampled = episode.spans.iter().flat_map(|span| &span.logp_raw);
            for (ours, theirs) in logp.iter().zip(sampled) {
                sums.gap += (ours - f64::from(*theirs)).abs();
                sums.gap_tokens += 1;
            }
        }
    }
    sums.loss += loss.value;
    sums.stats.merge(&loss.stats);
    let gradients = tape.backward(&narrow(&loss.gradient))?;
    match &mut sums.gradients {
        None => sums.gradients = Some(gradients),
        Some(sum) => sum.add(gradients),
    }
    Ok(())
}

/// Log-probabilities as the loss takes them.
pub(crate) fn wide(rows: &[Vec<f32>]) -> Vec<Vec<f64>> {
    rows.iter().map(|row| row.iter().copied().map(f64::from).collect()).collect()
}

#[allow(clippy::cast_possible_truncation, reason = "gradients enter the model in f32")]
fn narrow(rows: &[Vec<f64>]) -> Vec<Vec<f32>> {
    rows.iter().map(|row| row.iter().map(|value| *value as f32).collect()).collect()
}
