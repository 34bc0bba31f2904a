//! What a token weighs in the loss: the only place where losses divide.

use serde::{Deserialize, Serialize};

use super::{LossError, LossRow};

/// Which loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossType {
    /// The mean over rollouts of the mean over each rollout's tokens.
    #[default]
    Grpo,
    /// The sum over tokens, divided by rollouts times `max_completion_length`: no length bias.
    DrGrpo,
    /// The mean over all tokens of the step.
    Dapo,
}

/// What a whole optimizer step holds, over all of its micro-batches and ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepTotals {
    /// Rollouts with at least one token that counts.
    pub rollouts: u64,
    /// Tokens that count.
    pub tokens: u64,
}

impl StepTotals {
    /// The totals of some rows; those of a step's parts are added up.
    pub fn of(rows: &[LossRow<'_>]) -> Self {
        rows.iter().map(LossRow::tokens).fold(Self::default(), Self::with)
    }

    /// Counts one more rollout of so many tokens.
    pub fn with(self, tokens: usize) -> Self {
        Self {
            rollouts: self.rollouts + u64::from(tokens > 0),
            tokens: self.tokens + tokens as u64,
        }
    }

    /// Adds the totals of another part.
    pub fn plus(self, other: Self) -> Self {
        Self { rollouts: self.rollouts + other.rollouts, tokens: self.tokens + other.tokens }
    }
}

/// Gives each token of a step its weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Denominator {
    loss_type: LossType,
    totals: StepTotals,
    max_completion_length: u32,
}

impl Denominator {
    /// The denominators of a step with these totals. `max_completion_length` is read by
    /// [`LossType::DrGrpo`] only.
    ///
    /// # Errors
    /// Nothing in the step counts.
    pub fn new(
        loss_type: LossType,
        totals: StepTotals,
        max_completion_length: u32,
    ) -> Result<Self, LossError> {
        if totals.tokens == 0 || totals.rollouts == 0 || max_completion_length == 0 {
            return Err(LossError::Empty);
        }
        Ok(Self { loss_type, totals, max_completion_length })
    }

    /// The weight of each counted token of a rollout that has `tokens` of them.
    pub fn weight(&self, tokens: usize) -> f64 {
        if tokens == 0 {
            return 0.0;
        }
        let rollouts = self.totals.rollouts as f64;
        match self.loss_type {
            LossType::Grpo => 1.0 / (rollouts * tokens as f64),
            LossType::DrGrpo => 1.0 / (rollouts * f64::from(self.max_completion_length)),
            LossType::Dapo => 1.0 / self.totals.tokens as f64,
        }
    }
}
