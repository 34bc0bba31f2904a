//! What a loss is made of: surrogate, ratio, KL estimator and their constants.

use serde::{Deserialize, Serialize};

/// What a ratio does to an advantage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Surrogate {
    /// PPO: the smaller of the free and the clipped product.
    #[default]
    Clipped,
    /// CISPO: the ratio, bounded from above by `epsilon_high` itself, is a constant weight of the
    /// log-probability, so that no token loses its gradient.
    Cispo,
}

/// What the new and the old policy are compared by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ratio {
    /// Each token by itself: `exp(logp - logp_old)`.
    #[default]
    Token,
    /// GSPO: one ratio a rollout, `exp` of the mean of its tokens' `logp - logp_old`.
    SequenceMean,
    /// One ratio a rollout, `exp` of their sum: the ratio of the whole sequence's probabilities.
    SequenceProduct,
}

impl Ratio {
    /// Whether a rollout has one ratio.
    pub fn is_sequence(self) -> bool {
        self != Self::Token
    }
}

/// Schulman's estimators of the KL divergence from the reference, by `d = logp - logp_ref`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlEstimator {
    /// `d`. Unbiased; as a term of a loss its expected gradient is 0 under the policy that sampled.
    K1,
    /// `d² / 2`.
    K2,
    /// `exp(-d) - 1 + d`.
    #[default]
    K3,
}

impl KlEstimator {
    /// The estimate and its derivative by `logp`.
    pub fn of(self, logp: f64, reference: f64) -> (f64, f64) {
        let gap = reference - logp;
        match self {
            Self::K1 => (-gap, 1.0),
            Self::K2 => (0.5 * gap * gap, -gap),
            Self::K3 => (gap.exp_m1() - gap, -gap.exp_m1()),
        }
    }
}

/// What the loss needs to know besides the rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossConfig {
    /// What a ratio does to an advantage.
    pub surrogate: Surrogate,
    /// What is compared.
    pub ratio: Ratio,
    /// Lower clip: ratios below `1 - epsilon` count as that. Not read by [`Surrogate::Cispo`].
    pub epsilon: f64,
    /// Upper clip: ratios above `1 + epsilon_high` count as that. Under [`Surrogate::Cispo`] ratios
    /// above `epsilon_high` itself.
    pub epsilon_high: f64,
    /// Dual clip: where the advantage is negative, ratios above `delta` count as that and have no
    /// gradient. Above `1 + epsilon_high`. Not read by [`Surrogate::Cispo`].
    pub delta: Option<f64>,
    /// Weight of the KL term; 0 leaves it out.
    pub beta: f64,
    /// Its estimator.
    pub kl_estimator: KlEstimator,
    /// Weight of the entropy bonus; 0 leaves it out.
    pub entropy_coef: f64,
}

impl Default for LossConfig {
    /// PPO's clip of 0.2 on tokens, without KL term and bonus.
    fn default() -> Self {
        Self {
            surrogate: Surrogate::default(),
            ratio: Ratio::default(),
            epsilon: 0.2,
            epsilon_high: 0.2,
            delta: None,
            beta: 0.0,
            kl_estimator: KlEstimator::default(),
            entropy_coef: 0.0,
        }
    }
}
