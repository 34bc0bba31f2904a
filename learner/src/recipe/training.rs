//! The `training` section of an online recipe.

use policy::episode_script::EpisodeLimits;
use protocol::{ComputeDtype, OnMalformed, Sampling};
use serde::Serialize;

use super::{
    OptimizerSettings, RecipeError,
    sampling::SamplingSettings,
    section::{Bounds, Section},
};
use crate::{
    advantage::ScaleRewards,
    loss::{Aggregation, LossConfig},
};

/// What happens to a lease whose episode the audit rejects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FailurePolicy {
    /// The run stops, with a record of the failure.
    Abort,
    /// The lease is issued again, a bounded number of times; then its group is dropped. Both counted.
    Drop,
    /// The same, and an actor with `audit.quarantine_after` rejections is cut off.
    Quarantine,
}

/// Which loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LossType {
    /// The mean over rollouts of the mean over each rollout's tokens.
    Grpo,
    /// The sum over tokens, divided by rollouts times `max_completion_length`.
    DrGrpo,
    /// The mean over all tokens of the step.
    Dapo,
}

impl LossType {
    /// Its denominators.
    pub fn aggregation(self) -> Aggregation {
        match self {
            Self::Grpo => Aggregation::SeqMeanTokenMean,
            Self::DrGrpo => Aggregation::SeqMeanTokenSumNorm,
            Self::Dapo => Aggregation::TokenMean,
        }
    }
}

/// How a run is trained. Field names are TRL's where it has them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TrainingSettings {
    /// Optimizer steps, 1 to 1,000,000. Default 32.
    pub max_steps: u32,
    /// Rollouts of a group, 2 to 1,024. Default 4.
    pub num_generations: u32,
    /// Rollouts of a micro-batch: a multiple of `num_generations`, to 65,536. Default: one group.
    pub per_device_train_batch_size: u32,
    /// Micro-batches of an optimizer step, 1 to 1,024. Default 1.
    pub gradient_accumulation_steps: u32,
    /// Ids after the prompt, sampled and external together, 1 to 262,144. Default 768.
    pub max_completion_length: u32,
    /// Tool rounds, 1 to 1,024; one more generation is allowed. Default 3.
    pub max_tool_calling_iterations: u32,
    /// Temperature, top-k, top-p and min-p.
    #[serde(flatten)]
    pub sampling: SamplingSettings,
    /// Weight of the KL term, 0 to 100. Default 0.02.
    pub beta: f64,
    /// Lower clip of the ratio, above 0, below 1. Default 0.2.
    pub epsilon: f64,
    /// Upper clip of the ratio, above 0 to 100. Default: `epsilon`.
    pub epsilon_high: f64,
    /// Which loss. Default `grpo`.
    pub loss_type: LossType,
    /// How advantages are scaled. Default `group`.
    pub scale_rewards: ScaleRewards,
    /// Optimizer and schedule. Default learning rate 1e-5.
    #[serde(flatten)]
    pub optimizer: OptimizerSettings,
    /// Updates on the same rollouts; 1 is what there is.
    pub num_iterations: u32,
    /// Recompute activations in the backward pass: less memory, more time. Default true.
    pub gradient_checkpointing: bool,
    /// Number format of the forward passes, `f32` or `bf16`. Default `f32`.
    pub compute_dtype: ComputeDtype,
    /// What a malformed tool call does. Default `observe`.
    pub on_malformed: OnMalformed,
    /// What a rejected episode does. Default `abort`.
    pub failure_policy: FailurePolicy,
}

const KEYS: [&str; 28] = [
    "max_steps",
    "num_generations",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "max_completion_length",
    "max_tool_calling_iterations",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "beta",
    "epsilon",
    "epsilon_high",
    "loss_type",
    "scale_rewards",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "num_iterations",
    "gradient_checkpointing",
    "compute_dtype",
    "on_malformed",
    "failure_policy",
];

impl TrainingSettings {
    /// The section's keys, as [`Section::section`] takes them.
    pub(super) const KEYS: &'static [&'static str] = &KEYS;

    pub(super) fn read(section: &Section<'_>) -> Result<Self, RecipeError> {
        let num_generations = section.u32("num_generations", Some(4), 2..=1024)?;
        let per_device_train_batch_size = section.u32(
            "per_device_train_batch_size",
            Some(num_generations),
            num_generations..=65_536,
        )?;
        if !per_device_train_batch_size.is_multiple_of(num_generations) {
            return Err(RecipeError::conflict(
                &section.at("per_device_train_batch_size"),
                format!("{per_device_train_batch_size} rollouts are no whole number of groups"),
                format!("use a multiple of training.num_generations ({num_generations})"),
            ));
        }
        let num_iterations = section.u32("num_iterations", Some(1), 1..=1)?;
        let epsilon = section.f64("epsilon", 0.2, Bounds::above(0.0, 0.999_999))?;
        Ok(Self {
            max_steps: section.u32("max_steps", Some(32), 1..=1_000_000)?,
            num_generations,
            per_device_train_batch_size,
            gradient_accumulation_steps: section.u32(
                "gradient_accumulation_steps",
                Some(1),
                1..=1024,
            )?,
            max_completion_length: section.u32("max_completion_length", Some(768), 1..=262_144)?,
            max_tool_calling_iterations: section.u32(
                "max_tool_calling_iterations",
                Some(3),
                1..=1024,
            )?,
            sampling: SamplingSettings::read(section, SamplingSettings::TRAINING, false)?,
            beta: section.f64("beta", 0.02, Bounds::closed(0.0, 100.0))?,
            epsilon,
            epsilon_high: section.f64("epsilon_high", epsilon, Bounds::above(0.0, 100.0))?,
            loss_type: section.choice(
                "loss_type",
                LossType::Grpo,
                &[
                    ("grpo", LossType::Grpo),
                    ("dr_grpo", LossType::DrGrpo),
                    ("dapo", LossType::Dapo),
                ],
            )?,
            scale_rewards: section.choice(
                "scale_rewards",
                ScaleRewards::Group,
                &[("group", ScaleRewards::Group), ("none", ScaleRewards::None)],
            )?,
            optimizer: OptimizerSettings::read(section, 1e-5)?,
            num_iterations,
            gradient_checkpointing: section.bool("gradient_checkpointing", true)?,
            compute_dtype: section.choice(
                "compute_dtype",
                ComputeDtype::F32,
                &[("f32", ComputeDtype::F32), ("bf16", ComputeDtype::Bf16)],
            )?,
            on_malformed: section.choice(
                "on_malformed",
                OnMalformed::Observe,
                &[("observe", OnMalformed::Observe), ("end", OnMalformed::End)],
            )?,
            failure_policy: section.choice(
                "failure_policy",
                FailurePolicy::Abort,
                &[
                    ("abort", FailurePolicy::Abort),
                    ("drop", FailurePolicy::Drop),
                    ("quarantine", FailurePolicy::Quarantine),
                ],
            )?,
        })
    }

    /// Groups of an optimizer step.
    pub fn groups_per_step(&self) -> u32 {
        // A batch is at least one group, and both factors are small.
        (self.per_device_train_batch_size / self.num_generations.max(1))
            .saturating_mul(self.gradient_accumulation_steps)
    }

    /// The limits of its episodes.
    pub fn episode_limits(&self) -> EpisodeLimits {
        EpisodeLimits {
            max_tool_rounds: self.max_tool_calling_iterations,
            max_completion: self.max_completion_length,
            on_malformed: self.on_malformed,
        }
    }

    /// How its rollouts are sampled.
    pub fn sampling(&self) -> Sampling {
        self.sampling.to_sampling()
    }

    /// What its loss needs to know.
    pub fn loss(&self) -> LossConfig {
        LossConfig {
            epsilon: self.epsilon,
            epsilon_high: self.epsilon_high,
            beta: self.beta,
            ..LossConfig::default()
        }
    }
}
