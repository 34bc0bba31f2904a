//! What a step's loss says besides its value: sums that the parts of a step add up.

use super::{LossConfig, Surrogate};

/// Sums over what counts; [`merge`](Self::merge) those of a step's parts, then read the means.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LossStats {
    /// Rollouts with a token that counts.
    pub rollouts: u64,
    /// Tokens that count.
    pub tokens: u64,
    /// Ratios: one a token, or one a rollout.
    pub ratios: u64,
    /// Ratios that were clipped from below (the advantage is negative).
    pub clipped_low: u64,
    /// Ratios that were clipped from above (the advantage is positive).
    pub clipped_high: u64,
    /// Ratios that the dual clip cut (the advantage is negative).
    pub clipped_dual: u64,
    /// Ratios outside of the clip's range, whatever the advantage.
    pub outside: u64,
    /// Sum of the ratios.
    pub ratio: f64,
    /// Sum over tokens of `r - 1 - ln r` for the token's own ratio r.
    pub approx_kl: f64,
    /// Sum of the KL estimates against the reference, without `beta`.
    pub kl: f64,
    /// Tokens with such an estimate.
    pub kl_tokens: u64,
    /// Sum of the entropies, nats.
    pub entropy: f64,
    /// Tokens with an entropy.
    pub entropy_tokens: u64,
}

impl LossStats {
    /// Adds the sums of another part of the step.
    pub fn merge(&mut self, other: &Self) {
        self.rollouts += other.rollouts;
        self.tokens += other.tokens;
        self.ratios += other.ratios;
        self.clipped_low += other.clipped_low;
        self.clipped_high += other.clipped_high;
        self.clipped_dual += other.clipped_dual;
        self.outside += other.outside;
        self.ratio += other.ratio;
        self.approx_kl += other.approx_kl;
        self.kl += other.kl;
        self.kl_tokens += other.kl_tokens;
        self.entropy += other.entropy;
        self.entropy_tokens += other.entropy_tokens;
    }

    /// How many numbers it consists of.
    pub(crate) const NUMBERS: usize = 13;

    /// All of its sums, to be added up over ranks.
    pub(crate) fn to_numbers(self) -> [f64; Self::NUMBERS] {
        [
            self.rollouts as f64,
            self.tokens as f64,
            self.ratios as f64,
            self.clipped_low as f64,
            self.clipped_high as f64,
            self.clipped_dual as f64,
            self.outside as f64,
            self.ratio,
            self.approx_kl,
            self.kl,
            self.kl_tokens as f64,
            self.entropy,
            self.entropy_tokens as f64,
        ]
    }

    /// The same back.
    pub(crate) fn from_numbers(numbers: &[f64]) -> Self {
        let at = |place: usize| numbers.get(place).copied().unwrap_or_default();
        let count = |place: usize| at(place) as u64;
        Self {
            rollouts: count(0),
            tokens: count(1),
            ratios: count(2),
            clipped_low: count(3),
            clipped_high: count(4),
            clipped_dual: count(5),
            outside: count(6),
            ratio: at(7),
            approx_kl: at(8),
            kl: at(9),
            kl_tokens: count(10),
            entropy: at(11),
            entropy_tokens: count(12),
        }
    }

    /// Counts a ratio.
    pub(super) fn ratio(&mut self, config: &LossConfig, ratio: f64) {
        let outside = match config.surrogate {
            Surrogate::Clipped => 1.0 - ratio > config.epsilon || ratio - 1.0 > config.epsilon_high,
            Surrogate::Cispo => ratio > config.epsilon_high,
        };
        self.ratios += 1;
        self.outside += u64::from(outside);
        self.ratio += ratio;
    }

    /// Share of ratios that were clipped, the dual clip left out: TRL's `clip_ratio/region_mean`.
    pub fn clip_fraction(&self) -> f64 {
        mean((self.clipped_low + self.clipped_high) as f64, self.ratios).unwrap_or_default()
    }

    /// Share of ratios clipped from below.
    pub fn clip_fraction_low(&self) -> f64 {
        mean(self.clipped_low as f64, self.ratios).unwrap_or_default()
    }

    /// Share of ratios clipped from above.
    pub fn clip_fraction_high(&self) -> f64 {
        mean(self.clipped_high as f64, self.ratios).unwrap_or_default()
    }

    /// Share of ratios that the dual clip cut.
    pub fn clip_fraction_dual(&self) -> f64 {
        mean(self.clipped_dual as f64, self.ratios).unwrap_or_default()
    }

    /// Share of ratios outside of the clip's range, whatever the advantage.
    pub fn outside_fraction(&self) -> f64 {
        mean(self.outside as f64, self.ratios).unwrap_or_default()
    }

    /// Mean ratio; 1 where the policy has not moved.
    pub fn mean_ratio(&self) -> Option<f64> {
        mean(self.ratio, self.ratios)
    }

    /// Estimate of the KL divergence of the old policy from the new one, nats a token.
    pub fn mean_approx_kl(&self) -> Option<f64> {
        mean(self.approx_kl, self.tokens)
    }

    /// Mean KL estimate against the reference, nats a token.
    pub fn mean_kl(&self) -> Option<f64> {
        mean(self.kl, self.kl_tokens)
    }

    /// Mean over rollouts of the sum of their KL estimates against the reference, nats.
    pub fn mean_rollout_kl(&self) -> Option<f64> {
        (self.kl_tokens > 0).then(|| mean(self.kl, self.rollouts)).flatten()
    }

    /// Mean entropy, nats a token.
    pub fn mean_entropy(&self) -> Option<f64> {
        mean(self.entropy, self.entropy_tokens)
    }
}

fn mean(sum: f64, count: u64) -> Option<f64> {
    (count > 0).then(|| sum / count as f64)
}
