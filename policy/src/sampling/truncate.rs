//! Top-k, top-p and min-p with the meaning and the tie rules of transformers' logits processors.
//!
//! * top-k keeps every id whose logit is at least the k-th largest: ties at the border all stay.
//! * top-p sorts ascending (stable: of equal logits the lower id comes first), removes while the
//!   cumulated probability is at most 1 − p, and keeps at least one id: of ties at the border the
//!   higher ids stay.
//! * min-p removes what is less probable than `min_p` times the most probable survivor.
//!
//! transformers works in f32 with sums in f64. Here weights are f64 too, and probabilities, their
//! running sums and 1 − p are rounded to f32 where transformers has them in f32, so that a border that
//! is a tie on paper (seven of ten equal ids against 1 − 0.3) falls to the same side.

use super::scan;
use crate::simd::{MulAdd, Vectorized, vectorized};

/// Buckets of logits, of equal width over the row's range: the border of top-p lies in one of them,
/// and only that one is sorted.
const BUCKETS: usize = 1024;
/// Logits further than this below the largest (after temperature) share the last bucket.
const REACH: f32 = 64.0;

/// The ids whose logit is at least the `k`-th largest, ascending.
pub(super) fn top_k(row: &[f32], k: usize) -> Vec<u32> {
    let border = kth_largest(row, k);
    let mut kept = Vec::with_capacity(k.saturating_add(8).min(row.len()));
    let mut first = 0u32;
    for block in row.chunks(64) {
        if block.iter().any(|&logit| logit >= border) {
            let ids = (first..).zip(block).filter(|&(_, &logit)| logit >= border);
            kept.extend(ids.map(|(id, _)| id));
        }
        first = first.wrapping_add(64);
    }
    kept
}

/// The `k`-th largest value for 1 ≤ k ≤ `row.len()`; −∞ outside.
///
/// Keeps a buffer of the largest values seen and a bar that only rises: values at or below the bar
/// cannot change the k-th largest, and nearly all values of a long row are.
fn kth_largest(row: &[f32], k: usize) -> f32 {
    if k == 0 || k > row.len() {
        return f32::NEG_INFINITY;
    }
    let room = 2 * k + 256;
    let mut buffer: Vec<f32> = Vec::with_capacity(room + 64);
    let mut bar = f32::NEG_INFINITY;
    let mut full = false;
    for block in row.chunks(64) {
        if full && !vectorized(AnyAbove(block, bar)) {
            continue;
        }
        buffer.extend(block.iter().filter(|&&logit| !full || logit > bar));
        if buffer.len() > room {
            bar = keep_largest(&mut buffer, k);
            full = true;
        }
    }
    keep_largest(&mut buffer, k)
}

/// Leaves the `k` largest in `buffer` and returns the smallest of them.
fn keep_largest(buffer: &mut Vec<f32>, k: usize) -> f32 {
    let (_, kth, _) = buffer.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
    let kth = *kth;
    buffer.truncate(k);
    kth
}

struct AnyAbove<'a>(&'a [f32], f32);

impl Vectorized for AnyAbove<'_> {
    type Output = bool;

    #[inline(always)]
    fn run<M: MulAdd>(self) -> bool {
        self.0.iter().fold(false, |any, &logit| any | (logit > self.1))
    }
}

/// Removes from `ids` (ascending, of finite maximum `max` and minimum `min`) what top-p removes.
/// `rest` is 1 − p.
pub(super) fn top_p(
    row: &[f32],
    ids: &mut Vec<u32>,
    (max, min): (f32, f32),
    temperature: f64,
    rest: f32,
) {
    let logit = |id: u32| row.get(id as usize).copied().unwrap_or(f32::NEG_INFINITY);
    let range = (max - min).min(REACH * temperature as f32).max(f32::MIN_POSITIVE);
    let scale = BUCKETS as f32 / range;
    // A cast from float saturates, so −∞ falls into the last bucket.
    let bucket = |logit: f32| (((max - logit) * scale) as usize).min(BUCKETS - 1);
    let mut weights = vec![0.0; ids.len()];
    vectorized(Weights { row, ids, max, temperature, weights: &mut weights });
    let total: f64 = weights.iter().sum();
    let mut mass = [0.0; BUCKETS];
    let mut count = [0usize; BUCKETS];
    for (&id, weight) in ids.iter().zip(&mut weights) {
        *weight = f64::from((*weight / total) as f32);
        let b = bucket(logit(id));
        mass[b] += *weight;
        count[b] += 1;
    }
    let removes = |cumulated: f64| cumulated as f32 <= rest;
    let mut below = 0.0;
    let mut border = BUCKETS - 1;
    while border > 0 && removes(below + mass[border]) {
        below += mass[border];
        border -= 1;
    }
    // Where rounding left the border beyond the last id, the most probable id's bucket decides.
    let mut inside: Vec<(f32, u32, f64)> = ids
        .iter()
        .zip(&weights)
        // Adding 0 makes −0 and 0 the same key, as they are equal logits.
        .map(|(&id, &probability)| (logit(id) + 0.0, id, probability))
        .filter(|&(logit, ..)| bucket(logit) == border)
        .collect();
    inside.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let better = count[..border].iter().sum::<usize>();
    let mut first_kept = None;
    for &(logit, id, probability) in &inside {
        below += probability;
        if !removes(below) {
            first_kept = Some((logit, id));
            break;
        }
    }
    if first_kept.is_none() && better == 0 {
        first_kept = inside.last().map(|&(logit, id, _)| (logit, id));
    }
    ids.retain(|&id| {
        let value = logit(id);
        match bucket(value).cmp(&border) {
            std::cmp::Ordering::Less => true,
            std::cmp::Ordering::Greater => false,
            std::cmp::Ordering::Equal => first_kept
                .is_some_and(|(least, first)| value > least || (value == least && id >= first)),
        }
    });
}

struct Weights<'a> {
    row: &'a [f32],
    ids: &'a [u32],
    max: f32,
    temperature: f64,
    weights: &'a mut [f64],
}

impl Vectorized for Weights<'_> {
    type Output = ();

    #[inline(always)]
    fn run<M: MulAdd>(self) {
        let (max, inverse) = (f64::from(self.max), 1.0 / self.temperature);
        for (weight, &id) in self.weights.iter_mut().zip(self.ids) {
            let logit = self.row.get(id as usize).copied().unwrap_or(f32::NEG_INFINITY);
            *weight = f64::from(logit) - max;
        }
        for weight in self.weights {
            *weight = scan::exp(*weight * inverse);
        }
    }
}

/// Removes from `ids` what is less probable than `min_p` times the most probable (logit `max`).
pub(super) fn min_p(row: &[f32], ids: &mut Vec<u32>, max: f32, temperature: f64, min_p: f32) {
    let (max, inverse) = (f64::from(max), 1.0 / temperature);
    ids.retain(|&id| {
        let logit = row.get(id as usize).copied().unwrap_or(f32::NEG_INFINITY);
        scan::exp((f64::from(logit) - max) * inverse) as f32 >= min_p
    });
}
