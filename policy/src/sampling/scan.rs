//! Whole-row passes: largest logit, Σ exp and the Gumbel race, vectorised and free of full sorts.
//!
//! The race finds argmax (logit / T + g) exactly in f64, but takes the two logarithms of `g` only
//! for the few ids that can still win. With w = exp((logit − max) / T) and E = −ln u, id `a` beats
//! the best score s so far exactly when E < w · exp(max / T − s); and E ≥ 1 − u, whose leading bits
//! are Philox's word 0. That test is a multiply and a compare, widened by a margin far above its
//! rounding, so it never drops a winner.

use super::philox::{self, LANES};
use crate::simd::{MulAdd, Vectorized, vectorized};

/// Relative widening of the pre-test; its own rounding is below 1e-6.
const SLACK: f64 = 1.0 + 1e-4;

/// The largest and the smallest finite logit; `None` where a logit is NaN or +∞ or none is finite.
pub(super) fn extremes(row: &[f32]) -> Option<(f32, f32)> {
    let (max, min, sound) = vectorized(Extremes(row));
    (sound && max.is_finite()).then_some((max, min))
}

struct Extremes<'a>(&'a [f32]);

impl Vectorized for Extremes<'_> {
    type Output = (f32, f32, bool);

    #[inline(always)]
    fn run<M: MulAdd>(self) -> Self::Output {
        let (mut max, mut min) = ([f32::NEG_INFINITY; LANES], [f32::INFINITY; LANES]);
        let mut unsound = [0u32; LANES];
        let (blocks, tail) = self.0.as_chunks::<LANES>();
        let mut last = [f32::NEG_INFINITY; LANES];
        last.iter_mut().zip(tail).for_each(|(to, from)| *to = *from);
        for block in blocks.iter().chain(std::iter::once(&last)) {
            for i in 0..LANES {
                let x = block[i];
                max[i] = if x > max[i] { x } else { max[i] };
                min[i] = if x < min[i] && x > f32::NEG_INFINITY { x } else { min[i] };
                unsound[i] |= u32::from(x.is_nan() | (x == f32::INFINITY));
            }
        }
        let max = max.into_iter().fold(f32::NEG_INFINITY, f32::max);
        let min = min.into_iter().fold(f32::INFINITY, f32::min);
        (max, min, unsound.iter().all(|&bad| bad == 0))
    }
}

/// exp(x) for x ≤ 0 to within two ulp; below −700 it stays at exp(−700).
#[inline(always)]
pub(super) fn exp(x: f64) -> f64 {
    // 1.5 · 2⁵²: adding it rounds to an integer and leaves that integer in the low bits.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    const LN2_HIGH: f64 = f64::from_bits(0x3FE6_2E42_FEE0_0000);
    const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    let x = if x < -700.0 { -700.0 } else { x };
    let shifted = x * std::f64::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    // Taylor's series on |r| ≤ ln 2 / 2, whose remainder after r¹³ / 13! is below 5e-18.
    let mut sum = 1.0 / 6_227_020_800.0;
    for inverse in [
        1.0 / 479_001_600.0,
        1.0 / 39_916_800.0,
        1.0 / 3_628_800.0,
        1.0 / 362_880.0,
        1.0 / 40_320.0,
        1.0 / 5_040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0,
    ] {
        sum = sum * r + inverse;
    }
    sum * f64::from_bits(shifted.to_bits().wrapping_add(1023) << 52)
}

/// Σ exp((logit − max) / T) over the row.
pub(super) fn sum_exp(row: &[f32], max: f32, temperature: f64) -> f64 {
    vectorized(SumExp { row, max: f64::from(max), inverse: 1.0 / temperature })
}

struct SumExp<'a> {
    row: &'a [f32],
    max: f64,
    inverse: f64,
}

impl Vectorized for SumExp<'_> {
    type Output = f64;

    #[inline(always)]
    fn run<M: MulAdd>(self) -> f64 {
        let mut sums = [0.0; LANES];
        let (blocks, tail) = self.row.as_chunks::<LANES>();
        for block in blocks {
            for i in 0..LANES {
                sums[i] += exp((f64::from(block[i]) - self.max) * self.inverse);
            }
        }
        let tail = tail.iter().map(|&x| exp((f64::from(x) - self.max) * self.inverse));
        sums.iter().sum::<f64>() + tail.sum::<f64>()
    }
}

/// Which ids take part in a race.
#[derive(Clone, Copy)]
pub(super) enum Field<'a> {
    /// The whole row.
    All,
    /// These ids, ascending, each inside the row.
    Ids(&'a [u32]),
}

/// A race over a row of logits.
pub(super) struct Race<'a> {
    pub row: &'a [f32],
    pub field: Field<'a>,
    /// The row's largest logit.
    pub max: f32,
    pub temperature: f64,
    pub key: [u32; 2],
    pub position: u32,
    /// An id that does not take part.
    pub without: Option<u32>,
}

/// Who won.
pub(super) struct Raced {
    /// The id with the largest logit / T + g, the lowest of equals; `None` if nothing took part.
    pub winner: Option<(u32, f64)>,
    /// Σ exp((logit − max) / T) over those that took part.
    pub sum: f64,
}

impl Vectorized for Race<'_> {
    type Output = Raced;

    #[inline(always)]
    fn run<M: MulAdd>(self) -> Raced {
        let mut state = State { winner: None, bar: f64::INFINITY, sums: [0.0; LANES] };
        match self.field {
            Field::All => {
                let (blocks, tail) = self.row.as_chunks::<LANES>();
                let mut ids: [u32; LANES] = std::array::from_fn(|i| i as u32);
                for block in blocks {
                    self.block(&mut state, &ids, block);
                    ids.iter_mut().for_each(|id| *id = id.wrapping_add(LANES as u32));
                }
                if !tail.is_empty() {
                    let mut block = [f32::NEG_INFINITY; LANES];
                    block.iter_mut().zip(tail).for_each(|(to, from)| *to = *from);
                    self.block(&mut state, &ids, &block);
                }
            }
            Field::Ids(field) => {
                for chunk in field.chunks(LANES) {
                    let mut ids = [0; LANES];
                    let mut block = [f32::NEG_INFINITY; LANES];
                    for ((id, logit), &from) in ids.iter_mut().zip(&mut block).zip(chunk) {
                        *id = from;
                        *logit = self.row.get(from as usize).copied().unwrap_or(*logit);
                    }
                    self.block(&mut state, &ids, &block);
                }
            }
        }
        Raced { winner: state.winner, sum: state.sums.iter().sum() }
    }
}

struct State {
    winner: Option<(u32, f64)>,
    /// exp(max / T − best score): E must be below w times this to win.
    bar: f64,
    sums: [f64; LANES],
}

impl Race<'_> {
    /// One block; lanes that do not take part hold −∞, which adds nothing and cannot win.
    #[inline(always)]
    fn block(&self, state: &mut State, ids: &[u32; LANES], logits: &[f32; LANES]) {
        let (max, inverse) = (f64::from(self.max), 1.0 / self.temperature);
        let mut weights = [0.0; LANES];
        for i in 0..LANES {
            weights[i] = exp((f64::from(logits[i]) - max) * inverse);
            state.sums[i] += weights[i];
        }
        let (high, low) = philox::high_low(self.key, self.position, ids);
        let mut open = 0u32;
        for i in 0..LANES {
            // (2³² − 1 − x0) / 2³² is at most 1 − u.
            let least = f64::from(!high[i]) * (0.5f64).powi(32);
            open |= u32::from(least <= state.bar * weights[i] * SLACK) << i;
        }
        if open != 0 {
            self.settle(state, open, ids, logits, &high, &low);
        }
    }

    #[inline(never)]
    fn settle(
        &self,
        state: &mut State,
        mut open: u32,
        ids: &[u32; LANES],
        logits: &[f32; LANES],
        high: &[u32; LANES],
        low: &[u32; LANES],
    ) {
        while open != 0 {
            let i = open.trailing_zeros() as usize;
            open &= open - 1;
            let logit = f64::from(logits[i]);
            if logit == f64::NEG_INFINITY || self.without == Some(ids[i]) {
                continue;
            }
            let score = logit / self.temperature + philox::gumbel(high[i], low[i]);
            if state.winner.is_none_or(|(_, best)| score > best) {
                state.winner = Some((ids[i], score));
                state.bar = (f64::from(self.max) / self.temperature - score).exp();
            }
        }
    }
}

/// Looks for an id whose score beats a given one: [`Race`] for a choice that was made already, which
/// nearly no other id can undo, so that a weight in f32 is exact enough for the pre-test.
pub(super) struct Challenge<'a> {
    pub row: &'a [f32],
    /// The row's largest logit.
    pub max: f32,
    pub temperature: f64,
    pub key: [u32; 2],
    pub position: u32,
    /// The id that holds the score.
    pub id: u32,
    pub score: f64,
}

impl Vectorized for Challenge<'_> {
    /// The largest score there is: `score`, where no other id beats it.
    type Output = f64;

    #[inline(always)]
    fn run<M: MulAdd>(self) -> f64 {
        let mut best = self.score;
        // An id can win only if its −ln u, at least (2³² − 1 − x0) / 2³², lies below its weight times
        // this.
        let bar = (f64::from(self.max) / self.temperature - self.score).exp() * SLACK;
        let bar = bar as f32;
        let (blocks, tail) = self.row.as_chunks::<LANES>();
        let mut ids: [u32; LANES] = std::array::from_fn(|i| i as u32);
        for block in blocks {
            self.block(&mut best, bar, &ids, block);
            ids.iter_mut().for_each(|id| *id = id.wrapping_add(LANES as u32));
        }
        if !tail.is_empty() {
            let mut block = [f32::NEG_INFINITY; LANES];
            block.iter_mut().zip(tail).for_each(|(to, from)| *to = *from);
            self.block(&mut best, bar, &ids, &block);
        }
        best
    }
}

impl Challenge<'_> {
    #[inline(always)]
    fn block(&self, best: &mut f64, bar: f32, ids: &[u32; LANES], logits: &[f32; LANES]) {
        let (high, _) = philox::high_low(self.key, self.position, ids);
        let max = self.max;
        let inverse = (1.0 / self.temperature) as f32;
        let mut open = 0u32;
        for i in 0..LANES {
            // f32's exp stays at e⁻⁸⁷ below −87, which only lets more ids through.
            let weight = crate::simd::exp((logits[i] - max) * inverse);
            let least = !high[i] as f32 * (0.5f32).powi(32);
            open |= u32::from(least <= bar * weight) << i;
        }
        if open != 0 {
            self.settle(best, open, ids, logits);
        }
    }

    #[inline(never)]
    fn settle(&self, best: &mut f64, mut open: u32, ids: &[u32; LANES], logits: &[f32; LANES]) {
        while open != 0 {
            let i = open.trailing_zeros() as usize;
            open &= open - 1;
            let logit = f64::from(logits[i]);
            if logit == f64::NEG_INFINITY || ids[i] == self.id {
                continue;
            }
            let [high, low, ..] = philox::philox4x32([ids[i], self.position, 0, 0], self.key);
            let score = logit / self.temperature + philox::gumbel(high, low);
            *best = best.max(score);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_agrees_with_the_standard_library() {
        for i in 0..200_000 {
            let x = -f64::from(i) * 0.0035;
            let (ours, exact) = (exp(x), x.max(-700.0).exp());
            assert!((ours - exact).abs() <= 5e-16 * exact, "exp({x}) = {ours}, not {exact}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f64::NEG_INFINITY) < 1e-300);
    }

    #[test]
    fn extremes_refuse_what_is_no_distribution() {
        let mut row = vec![0.5f32; 37];
        row[36] = -3.0;
        row[5] = f32::NEG_INFINITY;
        row[30] = 2.0;
        assert_eq!(extremes(&row), Some((2.0, -3.0)));
        for bad in [f32::NAN, f32::INFINITY] {
            for at in [0, 20, 36] {
                let mut row = row.clone();
                row[at] = bad;
                assert_eq!(extremes(&row), None, "{bad} at {at}");
            }
        }
        assert_eq!(extremes(&[f32::NEG_INFINITY; 3]), None);
        assert_eq!(extremes(&[]), None);
    }
}
