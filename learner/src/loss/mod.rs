//! The policy loss: plain arithmetic on log-probabilities, in 64-bit floats.
//!
//! For token t of rollout i with advantage A, `q = logp - logp_old` and a ratio r, which is `exp(q)`
//! of the token, `exp(mean q)` of the rollout (GSPO) or `exp(sum q)` of the rollout:
//!
//! ```text
//! clipped:  l = -min(min(r, delta) A, clip(r, 1 - epsilon, 1 + epsilon_high) A)
//! CISPO:    l = -stop_gradient(min(r, epsilon_high)) A logp
//! loss    = sum of weight l  +  beta sum over i, t of weight(i) kl(i, t)
//!           -  entropy_coef mean over all tokens of the entropy
//! ```
//!
//! With importance weights w (of tokens that an older policy sampled) each token's `l` is multiplied by
//! its w, and a sequence's by the mean of its tokens' w; the KL term and the bonus are not.
//!
//! What else distinguishes the algorithms is the weight alone, and [`Denominator`] is the one place
//! where it is decided. It is made from the totals of the whole optimizer step, over micro-batches and
//! ranks, so that the losses and gradients of the parts add up to those of the whole.
//!
//! `delta` is TRL's (INTELLECT-2's two-sided clip); verl's `clip_ratio_c` is the same number, as both
//! act only where A is negative and r is large, and give `delta |A|` there.
//!
//! Sources: PPO arXiv 1707.06347, GRPO 2402.03300, Dr. GRPO 2503.20783, DAPO 2503.14476 (token
//! denominator and clip-higher), GSPO 2507.18071, CISPO 2506.13585, RLOO 2402.14740, dual clip
//! 1912.09729; k1, k2 and k3 from "Approximating KL divergence", 2020.

mod config;
mod denominator;
mod stats;
mod value;

pub use config::{KlEstimator, LossConfig, Ratio, Surrogate};
pub use denominator::{Aggregation, Denominator, StepTotals, Weights};
pub use stats::LossStats;
pub use value::{ValueConfig, ValueLoss, ValueRow, ValueStats, value_loss};

/// What a rollout was worth.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Advantage<'a> {
    /// The same for each of its tokens.
    Rollout(f64),
    /// One a token. Not for sequence ratios.
    Tokens(&'a [f64]),
}

impl From<f64> for Advantage<'_> {
    fn from(value: f64) -> Self {
        Self::Rollout(value)
    }
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
    /// Entropy of each token's distribution, nats; needed where `entropy_coef` is not 0.
    pub entropy: Option<&'a [f64]>,
    /// What it was worth.
    pub advantage: Advantage<'a>,
    /// Importance weight of each token, where an older policy sampled it: see [`importance_weights`].
    pub importance: Option<&'a [f64]>,
}

impl LossRow<'_> {
    /// How many of its tokens count.
    pub fn tokens(&self) -> usize {
        match self.mask {
            None => self.logp.len(),
            Some(mask) => mask.iter().filter(|counts| **counts).count(),
        }
    }

    fn counts(&self, token: usize) -> bool {
        self.mask.is_none_or(|mask| mask.get(token) == Some(&true))
    }
}

/// The loss of some rows of a step: their shares of the step's.
#[derive(Clone, Debug, PartialEq)]
pub struct Loss {
    /// The whole: the sum of the three below.
    pub value: f64,
    /// The surrogate.
    pub policy_value: f64,
    /// The KL term, `beta` included.
    pub kl_value: f64,
    /// The entropy bonus: not above 0.
    pub entropy_value: f64,
    /// dL/dlogp: a row a rollout, a value a token; 0 where the mask is off.
    pub gradient: Vec<Vec<f64>>,
    /// dL/dentropy in the same shape, where `entropy_coef` is not 0.
    pub entropy_gradient: Option<Vec<Vec<f64>>>,
    /// Sums for the step's metrics.
    pub stats: LossStats,
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
    /// A column that the settings need.
    #[error("row {row}: {setting} is not 0, and {column} is missing")]
    Missing {
        /// The row.
        row: usize,
        /// What needs it.
        setting: &'static str,
        /// The column.
        column: &'static str,
    },
    /// A ratio of the sequence with advantages of tokens.
    #[error("row {row}: a sequence ratio takes one advantage a rollout, not one a token")]
    TokenAdvantages {
        /// The row.
        row: usize,
    },
    /// NaN, infinite, or so far apart that a ratio overflows.
    #[error("row {row}, token {token}: {what} is not finite")]
    NotFinite {
        /// The row.
        row: usize,
        /// The token's index in the row; of a sequence ratio the first that counts.
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
/// Columns that do not fit each other or the settings, or values that are not finite.
pub fn policy_loss(
    config: &LossConfig,
    denominator: &Denominator,
    rows: &[LossRow<'_>],
) -> Result<Loss, LossError> {
    let bonus = config.entropy_coef * denominator.per_token();
    let mut sums = Sums::default();
    let mut gradient = Vec::with_capacity(rows.len());
    for (index, row) in rows.iter().enumerate() {
        check_columns(config, index, row)?;
        let weights = denominator.weights(row.tokens());
        gradient.push(row_loss(config, weights, index, row, &mut sums)?);
    }
    let slopes = |row: &LossRow<'_>| {
        let slope = |token| if row.counts(token) { -bonus } else { 0.0 };
        (0..row.logp.len()).map(slope).collect()
    };
    let entropy_gradient = (config.entropy_coef != 0.0).then(|| rows.iter().map(slopes).collect());
    let entropy_value = -bonus * sums.stats.entropy;
    Ok(Loss {
        value: sums.policy + sums.kl + entropy_value,
        policy_value: sums.policy,
        kl_value: sums.kl,
        entropy_value,
        gradient,
        entropy_gradient,
        stats: sums.stats,
    })
}

fn check_columns(config: &LossConfig, row: usize, it: &LossRow<'_>) -> Result<(), LossError> {
    let expected = it.logp.len();
    let advantages = match it.advantage {
        Advantage::Rollout(_) => None,
        Advantage::Tokens(values) => Some(values.len()),
    };
    let columns = [
        ("logp_old", Some(it.logp_old.len())),
        ("logp_ref", it.logp_ref.map(<[f64]>::len)),
        ("mask", it.mask.map(<[bool]>::len)),
        ("entropy", it.entropy.map(<[f64]>::len)),
        ("the advantage", advantages),
        ("the importance weights", it.importance.map(<[f64]>::len)),
    ];
    for (column, found) in columns {
        if let Some(found) = found.filter(|found| *found != expected) {
            return Err(LossError::Column { row, column, found, expected });
        }
    }
    if config.beta != 0.0 && it.logp_ref.is_none() {
        return Err(LossError::Missing { row, setting: "beta", column: "logp_ref" });
    }
    if config.entropy_coef != 0.0 && it.entropy.is_none() {
        return Err(LossError::Missing { row, setting: "entropy_coef", column: "entropy" });
    }
    if config.ratio.is_sequence() && advantages.is_some() {
        return Err(LossError::TokenAdvantages { row });
    }
    Ok(())
}

/// Sums over rows.
#[derive(Default)]
struct Sums {
    policy: f64,
    kl: f64,
    stats: LossStats,
}

fn row_loss(
    config: &LossConfig,
    weights: Weights,
    index: usize,
    row: &LossRow<'_>,
    sums: &mut Sums,
) -> Result<Vec<f64>, LossError> {
    let mut gradient = vec![0.0; row.logp.len()];
    let counted = row.tokens();
    let columns = row.logp.iter().zip(row.logp_old);
    let log_ratio = |(logp, old): (&f64, &f64)| logp - old;
    sums.stats.rollouts += u64::from(counted > 0);
    sums.stats.tokens += counted as u64;
    // What the whole rollout has in common: its ratio, and each token's share of its slope.
    let mut sequence = None;
    if config.ratio.is_sequence() && counted > 0 {
        let all = columns.clone().enumerate().filter(|(token, _)| row.counts(*token));
        let first = all.clone().next().map_or(0, |(token, _)| token);
        let sum: f64 = all.map(|(_, pair)| log_ratio(pair)).sum();
        let share = if config.ratio == Ratio::SequenceMean { 1.0 / counted as f64 } else { 1.0 };
        // Far from 1 the clip decides: a product over many tokens may overflow without harm.
        let ratio = (sum * share).exp();
        if config.surrogate != Surrogate::Clipped || !sum.is_finite() {
            finite(ratio, "the ratio of the sequence", index, first)?;
        }
        sums.stats.ratio(config, ratio);
        let mut slope = 0.0;
        if let (Surrogate::Clipped, Advantage::Rollout(advantage)) =
            (config.surrogate, row.advantage)
        {
            let mut term = clipped(config, ratio, advantage, &mut sums.stats);
            if let Some(importance) = row.importance {
                let own = importance.iter().enumerate().filter(|(token, _)| row.counts(*token));
                term.scale(own.map(|(_, weight)| weight).sum::<f64>() / counted as f64);
            }
            sums.policy += weights.rollout * finite(term.value, "the loss", index, first)?;
            slope = weights.rollout * share * term.slope;
        } else {
            sums.stats.clipped_high += u64::from(cut(config, ratio, row, first));
        }
        sequence = Some((ratio, slope));
    }
    let tokens = columns.zip(&mut gradient).enumerate();
    for (token, ((logp, logp_old), slope)) in tokens.filter(|(token, _)| row.counts(*token)) {
        let log_ratio = log_ratio((logp, logp_old));
        sums.stats.approx_kl += log_ratio.exp_m1() - log_ratio;
        let ratio = match sequence {
            Some((ratio, _)) => ratio,
            None => {
                let ratio = finite(log_ratio.exp(), "the ratio", index, token)?;
                sums.stats.ratio(config, ratio);
                ratio
            }
        };
        let advantage = advantage(row, token);
        let mut own = Term::default();
        match config.surrogate {
            Surrogate::Cispo => {
                own.slope = -ratio.min(config.epsilon_high) * advantage;
                own.value = own.slope * logp;
                if sequence.is_none() {
                    sums.stats.clipped_high += u64::from(cut(config, ratio, row, token));
                }
            }
            Surrogate::Clipped if sequence.is_none() => {
                own = clipped(config, ratio, advantage, &mut sums.stats);
            }
            Surrogate::Clipped => {}
        }
        if let Some(weight) = row.importance.and_then(|column| column.get(token)) {
            own.scale(*weight);
        }
        sums.policy += weights.token * finite(own.value, "the loss", index, token)?;
        if let Some(reference) = row.logp_ref.and_then(|column| column.get(token)) {
            let (kl, kl_slope) = config.kl_estimator.of(*logp, *reference);
            let kl = finite(kl, "the KL term", index, token)?;
            sums.stats.kl += kl;
            sums.stats.kl_tokens += 1;
            sums.kl += weights.token * config.beta * kl;
            own.slope += config.beta * kl_slope;
        }
        if let Some(entropy) = row.entropy.and_then(|column| column.get(token)) {
            sums.stats.entropy += finite(*entropy, "the entropy", index, token)?;
            sums.stats.entropy_tokens += 1;
        }
        let shared = sequence.map_or(0.0, |(_, slope)| slope);
        *slope = finite(weights.token * own.slope + shared, "the gradient", index, token)?;
    }
    Ok(gradient)
}

/// A surrogate's value, and its derivative by the logarithm of the ratio.
#[derive(Clone, Copy, Default)]
struct Term {
    value: f64,
    slope: f64,
}

impl Term {
    fn scale(&mut self, weight: f64) {
        self.value *= weight;
        self.slope *= weight;
    }
}

/// Truncated importance weights: `min(exp(logp - logp_behaviour), cap)` of each token, for the policy that
/// learns (before its update) and the one that sampled. As TRL's correction and verl's token-level one;
/// the truncation is IMPALA's (arXiv 1802.01561).
pub fn importance_weights(logp: &[f64], logp_behaviour: &[f64], cap: f64) -> Vec<f64> {
    logp.iter().zip(logp_behaviour).map(|(new, old)| (new - old).exp().min(cap)).collect()
}

fn clipped(config: &LossConfig, ratio: f64, advantage: f64, stats: &mut LossStats) -> Term {
    let bound = ratio.max(1.0 - config.epsilon).min(1.0 + config.epsilon_high) * advantage;
    let delta = config.delta.unwrap_or(f64::INFINITY);
    let free = ratio.min(delta) * advantage;
    let mut slope = 0.0;
    if advantage == 0.0 {
        return Term::default();
    }
    if free <= bound {
        if ratio > delta && advantage < 0.0 {
            stats.clipped_dual += 1;
        } else {
            slope = -free;
        }
    } else if advantage > 0.0 {
        stats.clipped_high += 1;
    } else {
        stats.clipped_low += 1;
    }
    Term { value: -free.min(bound), slope }
}

/// Whether CISPO's bound is felt, counted as TRL does: where the advantage is positive.
fn cut(config: &LossConfig, ratio: f64, row: &LossRow<'_>, token: usize) -> bool {
    ratio > config.epsilon_high && advantage(row, token) > 0.0
}

fn advantage(row: &LossRow<'_>, token: usize) -> f64 {
    match row.advantage {
        Advantage::Rollout(value) => value,
        Advantage::Tokens(values) => values.get(token).copied().unwrap_or_default(),
    }
}

fn finite(value: f64, what: &'static str, row: usize, token: usize) -> Result<f64, LossError> {
    if value.is_finite() { Ok(value) } else { Err(LossError::NotFinite { row, token, what }) }
}

#[cfg(test)]
mod tests;
