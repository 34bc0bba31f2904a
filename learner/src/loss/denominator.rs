//! What a token and a rollout weigh in the loss: the only place where losses divide.

use serde::{Deserialize, Serialize};

use super::{LossError, LossRow};

/// How a step's terms become one number: verl's `loss_agg_mode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Aggregation {
    /// GRPO, GSPO: the mean over rollouts of the mean over each rollout's tokens.
    #[default]
    SeqMeanTokenMean,
    /// Dr. GRPO: the sum over tokens, divided by rollouts times `max_completion_length`: no length
    /// bias.
    SeqMeanTokenSumNorm,
    /// DAPO, CISPO, PPO: the mean over all tokens of the step.
    TokenMean,
    /// RLOO and PPO on rows: the mean over rollouts of the sum over each rollout's tokens, in which a
    /// ratio of the whole sequence counts once.
    SeqMeanTokenSum,
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

/// What the parts of one rollout weigh.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Weights {
    /// A term of one of its tokens.
    pub token: f64,
    /// A term of the rollout as a whole, as that of a sequence ratio.
    pub rollout: f64,
}

/// Gives each part of a step its weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Denominator {
    aggregation: Aggregation,
    totals: StepTotals,
    max_completion_length: u32,
}

impl Denominator {
    /// The denominators of a step with these totals. `max_completion_length` is read by
    /// [`Aggregation::SeqMeanTokenSumNorm`] only.
    ///
    /// # Errors
    /// Nothing in the step counts.
    pub fn new(
        aggregation: Aggregation,
        totals: StepTotals,
        max_completion_length: u32,
    ) -> Result<Self, LossError> {
        if totals.tokens == 0 || totals.rollouts == 0 || max_completion_length == 0 {
            return Err(LossError::Empty);
        }
        Ok(Self { aggregation, totals, max_completion_length })
    }

    /// The weights of a rollout that has `tokens` counted tokens. A sequence's term weighs as much as
    /// if each token had it (TRL's broadcast), except where tokens are summed: there it counts once.
    pub fn weights(&self, tokens: usize) -> Weights {
        if tokens == 0 {
            return Weights::default();
        }
        let (rollouts, count) = (self.totals.rollouts as f64, tokens as f64);
        match self.aggregation {
            Aggregation::SeqMeanTokenMean => {
                Weights { token: 1.0 / (rollouts * count), rollout: 1.0 / rollouts }
            }
            Aggregation::SeqMeanTokenSumNorm => {
                let all = rollouts * f64::from(self.max_completion_length);
                Weights { token: 1.0 / all, rollout: count / all }
            }
            Aggregation::TokenMean => {
                let all = self.totals.tokens as f64;
                Weights { token: 1.0 / all, rollout: count / all }
            }
            Aggregation::SeqMeanTokenSum => {
                Weights { token: 1.0 / rollouts, rollout: 1.0 / rollouts }
            }
        }
    }

    /// What a token weighs in means over the step's tokens, whatever the aggregation: of the entropy
    /// bonus and the value loss.
    pub fn per_token(&self) -> f64 {
        1.0 / self.totals.tokens as f64
    }
}
