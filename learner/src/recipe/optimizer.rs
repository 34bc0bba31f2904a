//! Settings of AdamW and of the learning rate's schedule, shared by every kind of training.

use serde::Serialize;

use super::{
    RecipeError,
    section::{Bounds, Section},
};

/// How the learning rate falls after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LrScheduler {
    /// Not at all.
    Constant,
    /// In a straight line to 0 at the end.
    Linear,
    /// Along half a cosine to 0 at the end.
    Cosine,
    /// Along half a cosine over the whole run, which the warm-up multiplies: its updates are on the
    /// cosine already.
    #[serde(rename = "warmup_cosine")]
    WarmupCosine,
}

/// AdamW, gradient clipping and the schedule.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct OptimizerSettings {
    /// Peak learning rate, 0 to 1. 0 trains nothing: for soak tests.
    pub learning_rate: f64,
    /// How it changes over the run. Default `linear`.
    pub lr_scheduler_type: LrScheduler,
    /// Updates over which it rises, 0 to 1,000,000. Default 0.
    pub warmup_steps: u32,
    /// Decoupled weight decay, 0 to 1. Default 0; of rows 0.01.
    pub weight_decay: f64,
    /// Decay of the first moment, 0 to 0.9999. Default 0.9.
    pub adam_beta1: f64,
    /// Decay of the second moment, 0 to 0.999999. Default 0.999.
    pub adam_beta2: f64,
    /// Added to the root of the second moment, above 0 to 1. Default 1e-8.
    pub adam_epsilon: f64,
    /// Largest norm of the whole gradient, 0 to 1e6; 0 clips nothing. Default 1.
    pub max_grad_norm: f64,
}

impl OptimizerSettings {
    /// As online training and conversations have it: a straight line without warm-up, no decay.
    pub(super) fn read(
        section: &Section<'_>,
        default_learning_rate: f64,
    ) -> Result<Self, RecipeError> {
        Self::read_or(section, default_learning_rate, LrScheduler::Linear, 0, 0.0)
    }

    /// As the row trainers of the field have it: PyTorch's AdamW with its decay of 0.01.
    pub(super) fn read_for_rows(
        section: &Section<'_>,
        default_learning_rate: f64,
        default_scheduler: LrScheduler,
        default_warmup: u32,
    ) -> Result<Self, RecipeError> {
        Self::read_or(section, default_learning_rate, default_scheduler, default_warmup, 0.01)
    }

    fn read_or(
        section: &Section<'_>,
        default_learning_rate: f64,
        default_scheduler: LrScheduler,
        default_warmup: u32,
        default_decay: f64,
    ) -> Result<Self, RecipeError> {
        Ok(Self {
            learning_rate: section.f64(
                "learning_rate",
                default_learning_rate,
                Bounds::closed(0.0, 1.0),
            )?,
            lr_scheduler_type: section.choice(
                "lr_scheduler_type",
                default_scheduler,
                &[
                    ("constant", LrScheduler::Constant),
                    ("linear", LrScheduler::Linear),
                    ("cosine", LrScheduler::Cosine),
                    ("warmup_cosine", LrScheduler::WarmupCosine),
                ],
            )?,
            warmup_steps: section.u32("warmup_steps", Some(default_warmup), 0..=1_000_000)?,
            weight_decay: section.f64("weight_decay", default_decay, Bounds::closed(0.0, 1.0))?,
            adam_beta1: section.f64("adam_beta1", 0.9, Bounds::closed(0.0, 0.9999))?,
            adam_beta2: section.f64("adam_beta2", 0.999, Bounds::closed(0.0, 0.999_999))?,
            adam_epsilon: section.f64("adam_epsilon", 1e-8, Bounds::above(0.0, 1.0))?,
            max_grad_norm: section.f64("max_grad_norm", 1.0, Bounds::closed(0.0, 1e6))?,
        })
    }

    /// The learning rate of update `step` (from 0) of `total`.
    ///
    /// Warm-up: `(step + 1) / warmup_steps` of the peak, so that no update is idle. After it the
    /// schedule runs over what is left of `total`, from the peak towards 0 as in transformers. Only
    /// [`LrScheduler::WarmupCosine`] runs over all of `total`, times the warm-up.
    pub fn learning_rate_at(&self, step: u64, total: u64) -> f64 {
        let warmup = u64::from(self.warmup_steps);
        let half_cosine = |progress: f64| 0.5 * (1.0 + (std::f64::consts::PI * progress).cos());
        let rise = if step < warmup { (step + 1) as f64 / warmup as f64 } else { 1.0 };
        if self.lr_scheduler_type == LrScheduler::WarmupCosine {
            let progress = (step as f64 / total.max(1) as f64).min(1.0);
            return self.learning_rate * rise * half_cosine(progress);
        }
        if step < warmup {
            return self.learning_rate * rise;
        }
        let left = total.saturating_sub(warmup).max(1);
        let progress = ((step - warmup) as f64 / left as f64).min(1.0);
        self.learning_rate
            * match self.lr_scheduler_type {
                LrScheduler::Constant => 1.0,
                LrScheduler::Linear => 1.0 - progress,
                LrScheduler::Cosine | LrScheduler::WarmupCosine => half_cosine(progress),
            }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const KEYS: [&str; 8] = [
        "learning_rate",
        "lr_scheduler_type",
        "warmup_steps",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "max_grad_norm",
    ];

    fn rates(settings: serde_json::Value, total: u64) -> Vec<f64> {
        let section = Section::new("training", &settings, &KEYS).expect("keys");
        let settings = OptimizerSettings::read(&section, 1.0).expect("valid");
        (0..total).map(|step| settings.learning_rate_at(step, total)).collect()
    }

    #[test]
    fn schedules_rise_over_the_warm_up_and_fall_over_the_rest() {
        assert_eq!(rates(json!({"lr_scheduler_type": "constant"}), 3), [1.0; 3]);
        assert_eq!(rates(json!({}), 4), [1.0, 0.75, 0.5, 0.25]);
        assert_eq!(rates(json!({"warmup_steps": 2}), 4), [0.5, 1.0, 1.0, 0.5]);
        let cosine = rates(json!({"lr_scheduler_type": "cosine"}), 2);
        assert!((cosine[0] - 1.0).abs() < 1e-12 && (cosine[1] - 0.5).abs() < 1e-12);
    }

    /// `min(1, (update + 1) / 10) * 0.5 * (1 + cos(pi * update / total))`, as the row trainer has it.
    #[test]
    fn the_cosine_of_rows_runs_over_the_warm_up_too() {
        let settings = json!({"lr_scheduler_type": "warmup_cosine", "warmup_steps": 10});
        for (update, rate) in rates(settings, 25).into_iter().enumerate() {
            let update = update as f64;
            let cosine = 0.5 * (1.0 + (std::f64::consts::PI * update / 25.0).cos());
            assert!((rate - ((update + 1.0) / 10.0).min(1.0) * cosine).abs() < 1e-15);
        }
    }

    #[test]
    fn a_warm_up_longer_than_the_run_never_divides_by_zero() {
        let rates = rates(json!({"warmup_steps": 10}), 3);
        assert_eq!(rates, [0.1, 0.2, 0.3]);
    }
}
