//! How often a policy writes the right digits.

use std::fmt;

use policy::{
    model::{Adapter, Decoder},
    score::{ScoreConfig, log_probs},
};
use protocol::{Digest, NoiseKey, Sampling};
use serde::{Deserialize, Serialize};
use terminal::Failure;

use super::{Example, Images, batches, shared_batch};
use crate::ranks::{Ranks, split_even};

/// Shares of right digits and of codes that are right as a whole, rounded to four places.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Accuracy {
    /// Of the digits.
    pub digit_acc: f64,
    /// Of the codes.
    pub code_acc: f64,
    /// Codes.
    pub rows: u64,
}

impl fmt::Display for Accuracy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { digit_acc, code_acc, rows } = self;
        write!(f, "digits {digit_acc:.4}, codes {code_acc:.4} right of {rows} held-out rows")
    }
}

/// Counts right digits and codes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    digits: u64,
    right_digits: u64,
    codes: u64,
    right_codes: u64,
}

impl Tally {
    /// Counts one code: which of its digits are right.
    pub fn add(&mut self, right: impl IntoIterator<Item = bool>) {
        let mut all = true;
        for right in right {
            self.digits += 1;
            self.right_digits += u64::from(right);
            all &= right;
        }
        self.codes += 1;
        self.right_codes += u64::from(all);
    }

    /// Adds what the other ranks counted.
    ///
    /// # Errors
    /// A rank that fails.
    pub fn sum(&mut self, ranks: &mut Ranks) -> Result<(), Failure> {
        let counts =
            [&mut self.digits, &mut self.right_digits, &mut self.codes, &mut self.right_codes];
        let mut sums = [0.0; 4];
        for (sum, count) in sums.iter_mut().zip(&counts) {
            *sum = **count as f64;
        }
        ranks.all_reduce_wide(&mut sums)?;
        for (sum, count) in sums.into_iter().zip(counts) {
            *count = sum as u64;
        }
        Ok(())
    }

    /// The shares.
    pub fn accuracy(&self) -> Accuracy {
        let share = |part: u64, of: u64| four_places(part as f64 / of.max(1) as f64);
        Accuracy {
            digit_acc: share(self.right_digits, self.digits),
            code_acc: share(self.right_codes, self.codes),
            rows: self.codes,
        }
    }
}

/// A number rounded to four decimal places, as it is written down.
pub(crate) fn four_places(value: f64) -> f64 {
    format!("{value:.4}").parse().unwrap_or(value)
}

/// Accuracy of the digits of `examples` where each is the likeliest id after the right ones before it.
/// Of each row's scored ids the first `digits` count.
///
/// # Errors
/// An image that changed, or a failing device.
pub fn teacher_forced_accuracy(
    decoder: &Decoder,
    adapter: Option<&Adapter>,
    examples: &[Example],
    images: &Images,
    digits: usize,
    batch_size: usize,
    ranks: &mut Ranks,
) -> Result<Accuracy, Failure> {
    // Examining an id as a greedy choice tells whether the policy would have chosen it.
    let greedy = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0 };
    let config = ScoreConfig { examine: Some(greedy), ..ScoreConfig::default() };
    let key = NoiseKey(Digest::of(b"greedy choices draw no noise"));
    let mut tally = Tally::default();
    let mine = split_even(examples.len(), ranks.rank(), ranks.world());
    for batch in batches(&examples[mine], batch_size) {
        let mut rows = Example::score_rows(&batch, images).map_err(Failure::Fault)?;
        rows.iter_mut().for_each(|row| row.noise = Some(key));
        let scores =
            log_probs(decoder, adapter, &shared_batch(rows), &config).map_err(Failure::fault)?;
        for row in scores.evidence.iter().flatten() {
            tally.add(row.iter().take(digits).map(|token| token.deficit == 0.0));
        }
    }
    tally.sum(ranks)?;
    Ok(tally.accuracy())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_is_right_only_as_a_whole() {
        let mut tally = Tally::default();
        tally.add([true, true, true]);
        tally.add([true, false, true]);
        tally.add([false, false, false]);
        let expected = Accuracy { digit_acc: 0.5556, code_acc: 0.3333, rows: 3 };
        assert_eq!(tally.accuracy(), expected);
        assert_eq!(Tally::default().accuracy().rows, 0);
    }
}
