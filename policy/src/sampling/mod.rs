//! Choosing the next token: truncation, Gumbel-max over counter-based noise, and the log-probabilities
//! of the choice.
//!
//! The invariant: a choice is a pure function of the row of logits, the settings, the noise key and
//! the stream position. It knows nothing of batches or neighbours, so whoever has the same logits can
//! make it again: [`Sampler::choose`] at the actor and [`Sampler::examine`] at the learner share
//! truncation, noise and race.
//!
//! Order: temperature, top-k, top-p, min-p, each as in transformers (see `truncate.rs`); then argmax
//! over the surviving ids of logit / T + g with g from [`noise`], the lowest id of equal scores.
//! Temperature 0 is greedy: the largest logit, the lowest id of equals, no noise, no truncation.

mod philox;
mod scan;
mod truncate;

#[cfg(test)]
mod tests;

pub use philox::{noise, philox4x32};
pub use protocol::Sampling;

use protocol::NoiseKey;
use scan::{Challenge, Field, Race, Raced};

use crate::simd::vectorized;

/// Why nothing can be sampled.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SamplingError {
    /// A setting lies outside its range.
    #[error("sampling.{field} is {value}; give {range}")]
    Setting {
        /// Field of [`Sampling`].
        field: &'static str,
        /// What it was.
        value: f32,
        /// What it may be.
        range: &'static str,
    },
    /// The row is no distribution.
    #[error(
        "the logits of the next token hold NaN or +inf, or no finite value: the weights or the \
         adapter are damaged, or the model overflows in this precision; try f32"
    )]
    Logits,
    /// The id asked for is outside the vocabulary.
    #[error("token id {id} is outside the row of {vocab} logits: it was sampled by another model")]
    Id {
        /// The id.
        id: u32,
        /// Length of the row.
        vocab: usize,
    },
}

/// A sampled token. Log-probabilities are in nats.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// The token id.
    pub id: u32,
    /// log softmax(logits) of it: temperature 1, nothing truncated.
    pub logp_raw: f32,
    /// Its log-probability under the distribution that was sampled from: after temperature and
    /// truncation, renormalised over the survivors. 0 when greedy.
    pub logp_sampling: f32,
}

/// What a row of logits says about a sampled id, once its noise is made again.
///
/// Rounding moves the border of top-p and min-p past an id now and then, however far apart the logits
/// are. So the id may be one that a border moved by [`BORDER`] leaves in, it must beat only what a
/// border moved the other way leaves in, and its log-probability is a range.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TokenEvidence {
    /// By how much the id's logit / T (the bare logit when greedy) would have to rise for this row to
    /// give it: so that truncation leaves it in, and so that it beats the other survivors' logit / T
    /// + g. 0 where this row gives it.
    pub deficit: f64,
    /// As [`Choice::logp_raw`].
    pub logp_raw: f32,
    /// The least and the largest that [`Choice::logp_sampling`] can be; for an id that truncation
    /// drops, as if it alone had been left in besides.
    pub logp_sampling: [f32; 2],
}

/// How far rounding may move the border of top-p (in probability) and of min-p (a share of it).
pub const BORDER: f32 = 1e-4;

/// [`TokenEvidence`] but for what a scoring pass knows already: the id's `ln softmax(row / T)`, with
/// T = 1 when greedy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Examined {
    deficit: f64,
    logp_raw: Option<f32>,
    logp_sampling: Option<[f32; 2]>,
}

impl Examined {
    /// Adds that.
    pub fn with(self, log_softmax: f32) -> TokenEvidence {
        TokenEvidence {
            deficit: self.deficit,
            logp_raw: self.logp_raw.unwrap_or(log_softmax),
            logp_sampling: self.logp_sampling.unwrap_or([log_softmax; 2]),
        }
    }
}

/// Checked sampling settings, ready for use.
#[derive(Clone, Debug)]
pub struct Sampler {
    temperature: f64,
    top_k: usize,
    /// 1 − top_p as transformers compares it; `None` where top-p is off.
    rest: Option<f32>,
    min_p: f32,
}

/// What truncation left.
enum Kept {
    All,
    Ids(Vec<u32>),
}

impl Kept {
    fn field(&self) -> Field<'_> {
        match self {
            Self::All => Field::All,
            Self::Ids(ids) => Field::Ids(ids),
        }
    }
}

impl Sampler {
    /// Checks the settings: temperature ≥ 0, top_p and min_p in 0..=1, all finite.
    pub fn new(sampling: &Sampling) -> Result<Self, SamplingError> {
        let &Sampling { temperature, top_k, top_p, min_p } = sampling;
        let refuse = |field, value, range| Err(SamplingError::Setting { field, value, range });
        if !(temperature == 0.0 || (1e-5..=1e5).contains(&temperature)) {
            return refuse("temperature", temperature, "0 for greedy, or 0.00001 to 100000");
        }
        if !(0.0..=1.0).contains(&top_p) {
            return refuse("top_p", top_p, "0 to 1, where 1 keeps every id");
        }
        if !(0.0..=1.0).contains(&min_p) {
            return refuse("min_p", min_p, "0 to 1, where 0 drops no id");
        }
        Ok(Self {
            temperature: decimal(temperature),
            top_k: top_k as usize,
            rest: (top_p < 1.0).then(|| (1.0 - decimal(top_p)) as f32),
            min_p,
        })
    }

    fn greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// Samples the token at stream position `position` from its row of logits (length V).
    pub fn choose(
        &self,
        row: &[f32],
        key: &NoiseKey,
        position: u32,
    ) -> Result<Choice, SamplingError> {
        let (max, min) = scan::extremes(row).ok_or(SamplingError::Logits)?;
        let log_prob = |id: u32, temperature: f64, sum: f64| {
            let logit = row.get(id as usize).copied().unwrap_or(f32::NEG_INFINITY);
            ((f64::from(logit) - f64::from(max)) / temperature - sum.ln()) as f32
        };
        if self.greedy() {
            let id = (0u32..).zip(row).find(|&(_, &logit)| logit == max).map_or(0, |(id, _)| id);
            let logp_raw = log_prob(id, 1.0, scan::sum_exp(row, max, 1.0));
            return Ok(Choice { id, logp_raw, logp_sampling: 0.0 });
        }
        let kept = self.truncate(row, (max, min));
        let Raced { winner, sum } = self.race(row, kept.field(), max, key, position, None);
        let (id, _) = winner.ok_or(SamplingError::Logits)?;
        let logp_sampling = log_prob(id, self.temperature, sum);
        let logp_raw = match kept {
            Kept::All if self.temperature == 1.0 => logp_sampling,
            _ => log_prob(id, 1.0, scan::sum_exp(row, max, 1.0)),
        };
        Ok(Choice { id, logp_raw, logp_sampling })
    }

    /// Makes the noise again and says how far `row` is from giving `id` at `position`.
    pub fn examine(
        &self,
        row: &[f32],
        key: &NoiseKey,
        position: u32,
        id: u32,
    ) -> Result<Examined, SamplingError> {
        let own = row.get(id as usize).copied().map(f64::from);
        let own = own.ok_or(SamplingError::Id { id, vocab: row.len() })?;
        let (max, min) = scan::extremes(row).ok_or(SamplingError::Logits)?;
        if self.greedy() {
            // Of equal logits the lowest id is taken, which no rise by an amount expresses: 0.
            let deficit = f64::from(max) - own;
            return Ok(Examined { deficit, logp_raw: None, logp_sampling: Some([0.0; 2]) });
        }
        let raw = || (own - f64::from(max) - scan::sum_exp(row, max, 1.0).ln()) as f32;
        let logp_raw = (self.temperature != 1.0).then(raw);
        let score = own / self.temperature + noise(key, position, id);
        let Some([inner, outer]) = self.truncate_both_ways(row, (max, min)) else {
            let key = key.philox();
            let best = vectorized(Challenge {
                row,
                max,
                temperature: self.temperature,
                key,
                position,
                id,
                score,
            });
            return Ok(Examined { deficit: best - score, logp_raw, logp_sampling: None });
        };
        let own = (own - f64::from(max)) / self.temperature;
        let Raced { winner, sum } =
            self.race(row, Field::Ids(&inner), max, key, position, Some(id));
        // The outer border leaves in what the inner one does, and little more; both ascend.
        let mut common = inner.iter().peekable();
        let between = outer.iter().filter(|id| common.next_if_eq(id).is_none());
        let more: f64 = between
            .filter_map(|&id| row.get(id as usize))
            .map(|&logit| scan::exp((f64::from(logit) - f64::from(max)) / self.temperature))
            .sum();
        let within = |ids: &[u32]| ids.binary_search(&id).is_ok();
        let [of_inner, of_outer] = [(&inner, sum), (&outer, sum + more)]
            .map(|(ids, sum)| if within(ids) { sum } else { sum + own.exp() });
        let mut deficit = winner.map_or(0.0, |(_, best)| (best - score).max(0.0));
        if !within(&outer) {
            let logits = outer.iter().filter_map(|&id| row.get(id as usize).copied());
            let least = f64::from(logits.fold(f32::INFINITY, f32::min));
            deficit = deficit.max((least - f64::from(max)) / self.temperature - own);
        }
        let logp_sampling = Some([of_outer, of_inner].map(|sum| (own - sum.ln()) as f32));
        Ok(Examined { deficit, logp_raw, logp_sampling })
    }

    /// The ids that truncation leaves, ascending; all of them when greedy.
    pub fn survivors(&self, row: &[f32]) -> Result<Vec<u32>, SamplingError> {
        let extremes = scan::extremes(row).ok_or(SamplingError::Logits)?;
        let kept = if self.greedy() { Kept::All } else { self.truncate(row, extremes) };
        Ok(match kept {
            Kept::All => every_id(row),
            Kept::Ids(ids) => ids,
        })
    }

    fn truncates(&self, row: &[f32]) -> bool {
        self.top_k(row) || self.rest.is_some() || self.min_p > 0.0
    }

    fn top_k(&self, row: &[f32]) -> bool {
        self.top_k != 0 && self.top_k < row.len()
    }

    fn truncate(&self, row: &[f32], extremes: (f32, f32)) -> Kept {
        if !self.truncates(row) {
            return Kept::All;
        }
        Kept::Ids(self.narrow(row, extremes, self.largest(row), 0.0))
    }

    /// What survives with the borders of top-p and min-p moved inwards, and outwards; nothing where
    /// everything survives.
    fn truncate_both_ways(&self, row: &[f32], extremes: (f32, f32)) -> Option<[Vec<u32>; 2]> {
        if !self.truncates(row) {
            return None;
        }
        let ids = self.largest(row);
        if self.rest.is_some() {
            return Some([BORDER, -BORDER].map(|by| self.narrow(row, extremes, ids.clone(), by)));
        }
        // Without top-p each border is a logit, so the inner survivors are among the outer ones.
        let outer = self.narrow(row, extremes, ids, -BORDER);
        Some([self.narrow(row, extremes, outer.clone(), BORDER), outer])
    }

    /// What top-k leaves, ascending.
    fn largest(&self, row: &[f32]) -> Vec<u32> {
        if self.top_k(row) { truncate::top_k(row, self.top_k) } else { every_id(row) }
    }

    /// What top-p and min-p leave of `ids`, with their borders moved inwards by `by`.
    fn narrow(&self, row: &[f32], (max, min): (f32, f32), mut ids: Vec<u32>, by: f32) -> Vec<u32> {
        if let Some(rest) = self.rest {
            truncate::top_p(row, &mut ids, (max, min), self.temperature, rest + by);
        }
        if self.min_p > 0.0 {
            let border = self.min_p + self.min_p * by;
            truncate::min_p(row, &mut ids, max, self.temperature, border.min(1.0));
        }
        ids
    }

    fn race(
        &self,
        row: &[f32],
        field: Field<'_>,
        max: f32,
        key: &NoiseKey,
        position: u32,
        without: Option<u32>,
    ) -> Raced {
        vectorized(Race {
            row,
            field,
            max,
            temperature: self.temperature,
            key: key.philox(),
            position,
            without,
        })
    }
}

fn every_id(row: &[f32]) -> Vec<u32> {
    (0u32..).zip(row).map(|(id, _)| id).collect()
}

/// The decimal number that was rounded to `x`: 0.6f32 stands for the 0.6 of a recipe and not for
/// 0.60000002, and 1 − 0.6 must come out as in a trainer that reads it in f64.
fn decimal(x: f32) -> f64 {
    x.to_string().parse().unwrap_or(f64::from(x))
}
