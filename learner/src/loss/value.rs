//! The value head's loss: how far its values are from the returns.

use super::{Denominator, LossError, finite};

/// What the value loss needs to know. Names and defaults are those of TRL's PPO.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ValueConfig {
    /// Weight of the loss.
    pub vf_coef: f64,
    /// How far a value may move from the old one and still be counted better for it.
    pub cliprange_value: Option<f64>,
}

/// One rollout's values at its scored tokens. All columns are equally long.
#[derive(Clone, Copy, Debug)]
pub struct ValueRow<'a> {
    /// Values under the head that is trained.
    pub values: &'a [f64],
    /// Under the head before the step's first update.
    pub values_old: &'a [f64],
    /// What the values should be.
    pub returns: &'a [f64],
}

/// The value loss of some rows of a step: their share of the step's.
#[derive(Clone, Debug, PartialEq)]
pub struct ValueLoss {
    /// The loss, `vf_coef` included.
    pub value: f64,
    /// Its derivative by each value.
    pub gradient: Vec<Vec<f64>>,
    /// Sums for the step's metrics.
    pub stats: ValueStats,
}

/// Sums over tokens; [`merge`](Self::merge) those of a step's parts, then read the means.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ValueStats {
    /// Tokens.
    pub tokens: u64,
    /// Tokens whose clipped value is the worse one.
    pub clipped: u64,
    /// Sum of the losses, without `vf_coef`.
    pub loss: f64,
    /// Sums of returns and of their squares.
    pub returns: [f64; 2],
    /// Sums of returns less old values, and of the squares of that.
    pub residuals: [f64; 2],
}

impl ValueStats {
    /// Adds the sums of another part of the step.
    pub fn merge(&mut self, other: &Self) {
        self.tokens += other.tokens;
        self.clipped += other.clipped;
        self.loss += other.loss;
        for i in 0..2 {
            self.returns[i] += other.returns[i];
            self.residuals[i] += other.residuals[i];
        }
    }

    /// All of its sums, to be added up over ranks.
    pub(crate) fn to_numbers(self) -> [f64; 7] {
        let [returns, squares] = self.returns;
        let [residuals, rest] = self.residuals;
        let (tokens, clipped) = (self.tokens as f64, self.clipped as f64);
        [tokens, clipped, self.loss, returns, squares, residuals, rest]
    }

    /// The same back.
    pub(crate) fn from_numbers(numbers: &[f64]) -> Self {
        let at = |place: usize| numbers.get(place).copied().unwrap_or_default();
        Self {
            tokens: at(0) as u64,
            clipped: at(1) as u64,
            loss: at(2),
            returns: [at(3), at(4)],
            residuals: [at(5), at(6)],
        }
    }

    /// Mean loss a token, without `vf_coef`.
    pub fn mean_loss(&self) -> Option<f64> {
        self.mean(self.loss)
    }

    /// Share of tokens whose clipped value is the worse one.
    pub fn clip_fraction(&self) -> Option<f64> {
        self.mean(self.clipped as f64)
    }

    /// Share of the returns' variance that the old values explain: 1 is all of it, below 0 is worse
    /// than a constant. Absent where the returns do not vary.
    pub fn explained_variance(&self) -> Option<f64> {
        let variance = |[sum, squares]: [f64; 2]| {
            Some(self.mean(squares)? - self.mean(sum)?.powi(2)).filter(|it| *it > 0.0)
        };
        let returns = variance(self.returns)?;
        // What is left of equal numbers by rounding is no variance.
        let floor = 1e-12 * self.mean(self.returns[1])?;
        (returns > floor).then(|| 1.0 - variance(self.residuals).unwrap_or(0.0) / returns)
    }

    fn mean(&self, sum: f64) -> Option<f64> {
        (self.tokens > 0).then(|| sum / self.tokens as f64)
    }
}

/// The loss of `rows` for values V of tokens with returns R and old values V°, over all tokens of the
/// step that `denominator` speaks for:
///
/// ```text
/// vf_coef mean of max((V - R)², (clip(V, V° - cliprange, V° + cliprange) - R)²) / 2
/// ```
///
/// # Errors
/// Columns of unequal length, or values that are not finite.
pub fn value_loss(
    config: &ValueConfig,
    denominator: &Denominator,
    rows: &[ValueRow<'_>],
) -> Result<ValueLoss, LossError> {
    let weight = config.vf_coef * denominator.per_token();
    let range = config.cliprange_value.unwrap_or(f64::INFINITY);
    let mut stats = ValueStats::default();
    let mut gradient = Vec::with_capacity(rows.len());
    for (index, row) in rows.iter().enumerate() {
        let expected = row.values.len();
        for (column, found) in
            [("values_old", row.values_old.len()), ("returns", row.returns.len())]
        {
            if found != expected {
                return Err(LossError::Column { row: index, column, found, expected });
            }
        }
        let mut slopes = Vec::with_capacity(expected);
        let targets = row.values_old.iter().zip(row.returns);
        for (token, (value, (old, target))) in row.values.iter().zip(targets).enumerate() {
            let free = value - target;
            let bound = value.max(old - range).min(old + range) - target;
            let cut = bound * bound > free * free;
            let worse = if cut { bound } else { free };
            stats.tokens += 1;
            stats.clipped += u64::from(cut);
            stats.loss += finite(0.5 * worse * worse, "the value loss", index, token)?;
            for (sums, term) in
                [(&mut stats.returns, *target), (&mut stats.residuals, target - old)]
            {
                sums[0] += term;
                sums[1] += term * term;
            }
            slopes.push(if cut { 0.0 } else { weight * free });
        }
        gradient.push(slopes);
    }
    Ok(ValueLoss { value: weight * stats.loss, gradient, stats })
}
