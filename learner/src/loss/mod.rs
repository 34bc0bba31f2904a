//! The policy loss: plain arithmetic on log-probabilities, in 64-bit floats.
//!
//! For token t of rollout i with advantage A, ratio `r = exp(logp - logp_old)` and
//! `d = logp_ref - logp`:
//!
//! ```text
//! l(i, t) = -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) + beta (exp(d) - d - 1)
//! loss    = sum over i, t of weight(i) l(i, t)
//! ```
//!
//! The last term is Schulman's k3 estimate of the KL divergence. What distinguishes GRPO, Dr. GRPO
//! and DAPO is the weight alone, and [`Denominator`] is the one place where it is decided. It is made
//! from the totals of the whole optimizer step, over micro-batches and ranks, so that the losses and
//! gradients of the parts add up to those of the whole.
//!
//! Sources: GRPO arXiv 2402.03300, Dr. GRPO 2503.20783, DAPO 2503.14476 (token denominator and
//! clip-higher); k3 from "Approximating KL divergence", 2020.

mod denominator;

pub use denominator::{Denominator, LossType, StepTotals};

/// What the loss needs to know besides the rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossConfig {
    /// Lower clip: ratios below `1 - epsilon` count as that.
    pub epsilon: f64,
    /// Upper clip: ratios above `1 + epsilon_high` count as that.
    pub epsilon_high: f64,
    /// Weight of the KL term; 0 leaves it out.
    pub beta: f64,
}

/// One rollout's scored tokens: the sampled ids, in order. All columns are equally long.
#[derive(Clone, Copy, Debug)]
pub struct LossRow<'a> {
    /// Log-probabilities under the policy that is trained. Nats.
    pub logp: &'a [f64],
    /// Under the policy before this step's first update; the same values where there is one update a
    /// step.
    pub logp_old: &'a [f64],
    /// Under the reference policy; needed where `beta` is not 0.
    pub logp_ref: Option<&'a [f64]>,
    /// Which tokens count; all where absent.
    pub mask: Option<&'a [bool]>,
    /// Entropy of each token's distribution, where known: only passed on to the statistics.
    pub entropy: Option<&'a [f64]>,
    /// The rollout's advantage.
    pub advantage: f64,
}

impl LossRow<'_> {
    /// How many of its tokens count.
    pub fn tokens(&self) -> usize {
        match self.mask {
            None => self.logp.len(),
            Some(mask) => mask.iter().filter(|counts| **counts).count(),
        }
    }
}

/// The loss of some rows of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Loss {
    /// Their share of the step's loss.
    pub value: f64,
    /// Their share of the KL term, `beta` included.
    pub kl_value: f64,
    /// dL/dlogp: a row a rollout, a value a token; 0 where the mask is off.
    pub gradient: Vec<Vec<f64>>,
    /// Sums for the step's metrics.
    pub stats: LossStats,
}

/// Sums over counted tokens; [`merge`](Self::merge) those of a step's parts, then read the means.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LossStats {
    /// Tokens that count.
    pub tokens: u64,
    /// Tokens whose ratio was clipped from below (the advantage is negative).
    pub clipped_low: u64,
    /// Tokens whose ratio was clipped from above (the advantage is positive).
    pub clipped_high: u64,
    /// Sum of the ratios.
    pub ratio: f64,
    /// Largest ratio.
    pub ratio_max: f64,
    /// Sum of the k3 terms, without `beta`.
    pub k3: f64,
    /// Tokens with a k3 term.
    pub k3_tokens: u64,
    /// Sum of the entropies, nats.
    pub entropy: f64,
    /// Tokens with an entropy.
    pub entropy_tokens: u64,
}

impl LossStats {
    /// Adds the sums of another part of the step.
    pub fn merge(&mut self, other: &Self) {
        self.tokens += other.tokens;
        self.clipped_low += other.clipped_low;
        self.clipped_high += other.clipped_high;
        self.ratio += other.ratio;
        self.ratio_max = self.ratio_max.max(other.ratio_max);
        self.k3 += other.k3;
        self.k3_tokens += other.k3_tokens;
        self.entropy += other.entropy;
        self.entropy_tokens += other.entropy_tokens;
    }

    /// Share of tokens whose ratio was clipped.
    pub fn clip_fraction(&self) -> f64 {
        mean((self.clipped_low + self.clipped_high) as f64, self.tokens).unwrap_or_default()
    }

    /// Mean ratio; 1 where the policy has not moved.
    pub fn mean_ratio(&self) -> Option<f64> {
        mean(self.ratio, self.tokens)
    }

    /// Mean k3 estimate of the KL divergence from the reference, nats a token.
    pub fn mean_k3(&self) -> Option<f64> {
        mean(self.k3, self.k3_tokens)
    }

    /// Mean entropy, nats a token.
    pub fn mean_entropy(&self) -> Option<f64> {
        mean(self.entropy, self.entropy_tokens)
    }
}

fn mean(sum: f64, count: u64) -> Option<f64> {
    (count > 0).then(|| sum / count as f64)
}

/// Rows that have no loss. `row` counts from 0.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum LossError {
    /// Columns of unequal length.
    #[error("row {row}: {column} has {found} values for {expected} tokens")]
    Column {
        /// The row.
        row: usize,
        /// The column.
        column: &'static str,
        /// Its length.
        found: usize,
        /// The length of `logp`.
        expected: usize,
    },
    /// `beta` without reference log-probabilities.
    #[error("row {row}: beta is not 0, and the reference log-probabilities are missing")]
    NoReference {
        /// The row.
        row: usize,
    },
    /// NaN, infinite, or so far apart that a ratio overflows.
    #[error("row {row}, token {token}: {what} is not finite")]
    NotFinite {
        /// The row.
        row: usize,
        /// The token's index in the row.
        token: usize,
        /// What it is.
        what: &'static str,
    },
    /// Nothing in the step counts.
    #[error("no token of the step counts: nothing to train on")]
    Empty,
}

/// The loss of `rows`, their share of the step that `denominator` speaks for, and its gradient.
///
/// # Errors
/// Columns that do not fit each other, or values that are not finite.
pub fn policy_loss(
    config: &LossConfig,
    denominator: &Denominator,
    rows: &[LossRow<'_>],
) -> Result<Loss, LossError> {
    let mut loss = Loss {
        value: 0.0,
        kl_value: 0.0,
        gradient: Vec::with_capacity(rows.len()),
        stats: LossStats::default(),
    };
    for (index, row) in rows.iter().enumerate() {
        check_columns(config, index, row)?;
        let weight = denominator.weight(row.tokens());
        let gradient = row_loss(config, weight, index, row, &mut loss)?;
        loss.gradient.push(gradient);
    }
    Ok(loss)
}

fn check_columns(config: &LossConfig, row: usize, it: &LossRow<'_>) -> Result<(), LossError> {
    let expected = it.logp.len();
    let columns = [
        ("logp_old", Some(it.logp_old.len())),
        ("logp_ref", it.logp_ref.map(<[f64]>::len)),
        ("mask", it.mask.map(<[bool]>::len)),
        ("entropy", it.entropy.map(<[f64]>::len)),
    ];
    for (column, found) in columns {
        if let Some(found) = found.filter(|found| *found != expected) {
            return Err(LossError::Column { row, column, found, expected });
        }
    }
    if config.beta != 0.0 && it.logp_ref.is_none() {
        return Err(LossError::NoReference { row });
    }
    Ok(())
}

fn row_loss(
    config: &LossConfig,
    weight: f64,
    index: usize,
    row: &LossRow<'_>,
    loss: &mut Loss,
) -> Result<Vec<f64>, LossError> {
    let mut gradient = vec![0.0; row.logp.len()];
    let references = row.logp_ref.map(|column| column.iter());
    let mut references = references.into_iter().flatten();
    let tokens = row.logp.iter().zip(row.logp_old).zip(&mut gradient).enumerate();
    for (token, ((logp, logp_old), slope)) in tokens {
        let reference = references.next();
        if row.mask.is_some_and(|mask| mask.get(token) != Some(&true)) {
            continue;
        }
        let finite = |what, value: f64| {
            let error = LossError::NotFinite { row: index, token, what };
            if value.is_finite() { Ok(value) } else { Err(error) }
        };
        let ratio = finite("the ratio", (logp - logp_old).exp())?;
        let clipped = ratio.max(1.0 - config.epsilon).min(1.0 + config.epsilon_high);
        let (free, bound) = (ratio * row.advantage, clipped * row.advantage);
        let stats = &mut loss.stats;
        let mut value = -free.min(bound);
        let mut slope_value = 0.0;
        if free <= bound {
            slope_value = -free;
        } else if row.advantage > 0.0 {
            stats.clipped_high += 1;
        } else {
            stats.clipped_low += 1;
        }
        stats.tokens += 1;
        stats.ratio += ratio;
        stats.ratio_max = stats.ratio_max.max(ratio);
        if let Some(reference) = reference {
            let gap = reference - logp;
            let k3 = finite("the KL term", gap.exp_m1() - gap)?;
            stats.k3 += k3;
            stats.k3_tokens += 1;
            value += config.beta * k3;
            slope_value -= config.beta * gap.exp_m1();
            loss.kl_value += weight * config.beta * k3;
        }
        if let Some(entropy) = row.entropy.and_then(|column| column.get(token)) {
            stats.entropy += entropy;
            stats.entropy_tokens += 1;
        }
        loss.value += weight * finite("the loss", value)?;
        *slope = weight * finite("the gradient", slope_value)?;
    }
    Ok(gradient)
}

#[cfg(test)]
mod tests;
