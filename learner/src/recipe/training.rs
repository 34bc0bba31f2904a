//! The `training` section of an online recipe.

use policy::episode_script::EpisodeLimits;
use protocol::{ComputeDtype, OnMalformed, Sampling};
use serde::Serialize;

use super::{
    AlgorithmSettings, OptimizerSettings, RecipeError,
    sampling::SamplingSettings,
    section::{Bounds, Section},
};
use crate::advantage::{AdvantageError, GroupAdvantages, relative_advantages};

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
    /// What rollouts teach.
    #[serde(flatten)]
    pub algorithm: AlgorithmSettings,
    /// Optimizer and schedule. Default learning rate 1e-5.
    #[serde(flatten)]
    pub optimizer: OptimizerSettings,
    /// Recompute activations in the backward pass: less memory, more time. Default true.
    pub gradient_checkpointing: bool,
    /// Number format of the forward passes, `f32` or `bf16`. Default `f32`.
    pub compute_dtype: ComputeDtype,
    /// What a malformed tool call does. Default `observe`.
    pub on_malformed: OnMalformed,
    /// What a rejected episode does. Default `abort`.
    pub failure_policy: FailurePolicy,
    /// Updates that the policy of an episode may be behind, 0 to 64. Default 0: every episode is sampled
    /// by the policy that learns from it.
    #[serde(skip_serializing_if = "is_zero")]
    pub staleness: u32,
    /// Bound of the importance weights of episodes that are behind, 1 to 1,000. Default 2.
    #[serde(skip_serializing_if = "is_default_cap")]
    pub importance_sampling_cap: f64,
}

/// As TRL's and verl's.
pub(super) const IMPORTANCE_SAMPLING_CAP: f64 = 2.0;

fn is_zero(staleness: &u32) -> bool {
    *staleness == 0
}

fn is_default_cap(cap: &f64) -> bool {
    cap.to_bits() == IMPORTANCE_SAMPLING_CAP.to_bits()
}

const OWN_KEYS: [&str; 24] = [
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
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "gradient_checkpointing",
    "compute_dtype",
    "on_malformed",
    "failure_policy",
    "staleness",
    "importance_sampling_cap",
];

const KEYS: [&str; OWN_KEYS.len() + AlgorithmSettings::KEYS.len()] = {
    let mut all = [""; OWN_KEYS.len() + AlgorithmSettings::KEYS.len()];
    let (own, rest) = all.split_at_mut(OWN_KEYS.len());
    own.copy_from_slice(&OWN_KEYS);
    rest.copy_from_slice(&AlgorithmSettings::KEYS);
    all
};

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
        let settings = Self {
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
            algorithm: AlgorithmSettings::read(section)?,
            optimizer: OptimizerSettings::read(section, 1e-5)?,
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
            staleness: section.u32("staleness", Some(0), 0..=64)?,
            importance_sampling_cap: section.f64(
                "importance_sampling_cap",
                IMPORTANCE_SAMPLING_CAP,
                Bounds::closed(1.0, 1000.0),
            )?,
        };
        if section.value("importance_sampling_cap").is_some() && settings.staleness == 0 {
            return Err(RecipeError::conflict(
                &section.at("importance_sampling_cap"),
                "no episode is behind where training.staleness is 0",
                "remove it or set training.staleness",
            ));
        }
        let (groups, parts) = (settings.groups_per_step(), settings.algorithm.num_mini_batches);
        if !groups.is_multiple_of(parts) {
            return Err(RecipeError::conflict(
                &section.at("num_mini_batches"),
                format!("a step's {groups} groups are not divided by {parts}"),
                "use a divisor of them, or another batch",
            ));
        }
        Ok(settings)
    }

    /// Groups of an optimizer step.
    pub fn groups_per_step(&self) -> u32 {
        // A batch is at least one group, and both factors are small.
        (self.per_device_train_batch_size / self.num_generations.max(1))
            .saturating_mul(self.gradient_accumulation_steps)
    }

    /// The optimizer steps behind the policy that plays the groups of step `step` (from 0).
    pub fn played_at(&self, step: u64) -> u64 {
        step.saturating_sub(u64::from(self.staleness))
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

    /// The advantages of one group's rewards. Where a value head gives tokens theirs, these only say
    /// how the rollouts did beside each other.
    ///
    /// # Errors
    /// As [`relative_advantages`].
    pub fn advantages(&self, rewards: &[f64]) -> Result<GroupAdvantages, AdvantageError> {
        relative_advantages(rewards, self.algorithm.baseline(), self.algorithm.scale_rewards)
    }

    /// Learning rates of policy and value head (0 without one) in step `step` (from 0).
    pub fn learning_rates_at(&self, step: u64) -> (f64, f64) {
        let total = u64::from(self.max_steps);
        let value = self.algorithm.value.map_or(0.0, |value| value.learning_rate);
        let value = OptimizerSettings { learning_rate: value, ..self.optimizer };
        (self.optimizer.learning_rate_at(step, total), value.learning_rate_at(step, total))
    }
}
