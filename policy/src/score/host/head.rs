//! The language-model head at scored positions, a block of the vocabulary at a time, so that the
//! head's weight is read once a pass and few logits exist at one time.

use burn::tensor::Tensor;
use rayon::prelude::*;

use super::{
    super::{ScoreConfig, Slopes, evidence::Examiner, head::HeadOutput, head::chunk},
    gemm,
    linear::host,
    mat::Mat,
    math::{dot, exp, exp_sum, largest},
};
use crate::{
    model::{Decoder, ModelError},
    sampling::Examined,
    simd::{MulAdd, Vectorized, vectorized},
};

/// Scores, and each position's log-sum-exp for the backward pass.
pub(super) struct Scored {
    pub(super) output: HeadOutput,
    pub(super) sums: Vec<f32>,
}

/// Log-probabilities of `targets` under the normed hidden states `[positions, hidden]`.
pub(super) fn forward(
    decoder: &Decoder,
    hidden: &Mat,
    targets: &[u32],
    config: &ScoreConfig,
    examiner: Option<&Examiner>,
) -> Result<Scored, ModelError> {
    let head = decoder.head();
    let width = hidden.cols;
    let mut running = vec![Running::default(); targets.len()];
    let mut evidence = vec![None; targets.len()];
    let start = |id: u32, first: usize| (id as usize).wrapping_sub(first);
    let (temperature, entropy) = (config.temperature, config.entropy);
    if let Some(examiner) = examiner {
        // Whole rows of logits, for a few positions at a time; the same sums as below.
        let size = chunk(decoder, config);
        let parts = hidden.read()?.chunks(size * width).zip(targets.chunks(size));
        let outputs = running.chunks_mut(size).zip(evidence.chunks_mut(size));
        for (part, ((hidden, targets), (running, evidence))) in parts.zip(outputs).enumerate() {
            let mut logits = gemm::times_transposed(hidden, &head)?;
            let vocab = decoder.config().vocab;
            (logits.par_chunks_mut(vocab).zip(targets).enumerate())
                .zip(running.par_iter_mut().zip(evidence))
                .try_for_each(|((at, (logits, &id)), (running, evidence))| {
                    // First, as scoring leaves other values in the row.
                    *evidence = examiner.examine(part * size + at, id, logits)?;
                    let blocks = logits.chunks_mut(gemm::block(width)).enumerate();
                    for (block, logits) in blocks {
                        let target = start(id, block * gemm::block(width));
                        let row = Row { logits, temperature, entropy };
                        vectorized(Absorb { row, target, running });
                    }
                    Ok::<_, ModelError>(())
                })?;
        }
    } else {
        for_each_block(&head, |first, weight| {
            let (count, packed) = (weight.len() / width, gemm::packed_transposed(weight, width));
            let size = positions(config, count);
            let parts = hidden.read()?.chunks(size * width).zip(targets.chunks(size));
            for ((hidden, targets), running) in parts.zip(running.chunks_mut(size)) {
                let mut logits = gemm::multiply(hidden, &packed);
                (logits.par_chunks_mut(count).zip(targets).zip(running)).for_each(
                    |((logits, &id), running)| {
                        let row = Row { logits, temperature, entropy };
                        vectorized(Absorb { row, target: start(id, first), running });
                    },
                );
            }
            Ok(())
        })?;
    }
    let log_probs: Vec<f32> = running.iter().map(Running::log_prob).collect();
    let known = evidence.into_iter().zip(&log_probs);
    let evidence = known.map(|(it, &log_prob)| it.map(|it: Examined| it.with(log_prob)));
    let evidence = examiner.map(|_| evidence.collect());
    let entropies = entropy.then(|| running.iter().map(Running::entropy).collect());
    let sums = running.iter().map(Running::log_sum).collect();
    Ok(Scored { output: HeadOutput { log_probs, entropies, evidence }, sums })
}

/// Calls `f` with the first row and the values of some neighbouring rows of the head at a time.
fn for_each_block(
    head: &Tensor<2>,
    mut f: impl FnMut(usize, &[f32]) -> Result<(), ModelError>,
) -> Result<(), ModelError> {
    let [vocab, width] = head.dims();
    let share = gemm::block(width);
    for first in (0..vocab).step_by(share) {
        let until = vocab.min(first + share);
        f(first, &host(head.clone().slice([first..until, 0..width]))?)?;
    }
    Ok(())
}

/// Positions that are multiplied with a block of `count` ids at a time.
fn positions(config: &ScoreConfig, count: usize) -> usize {
    match config.head_chunk {
        0 => ((16 << 20) / count.max(1)).clamp(1, 1 << 14),
        rows => rows,
    }
}

/// The scored ids, their positions' log-sum-exps, and entropies where those have a derivative.
#[derive(Clone, Copy)]
pub(super) struct Known<'a> {
    pub(super) targets: &'a [u32],
    pub(super) sums: &'a [f32],
    pub(super) entropies: &'a [f32],
}

/// `dL/dhidden` `[positions, hidden]`, and the head's own gradient where `weight` asks for it.
/// Positions without a gradient cost nothing.
pub(super) fn backward(
    decoder: &Decoder,
    hidden: &Mat,
    known: Known<'_>,
    slopes: &Slopes<'_>,
    config: &ScoreConfig,
    weight: bool,
) -> Result<(Mat, Option<Tensor<2>>), ModelError> {
    let Known { targets, sums, entropies } = known;
    let dlogp = slopes.log_probs.as_slice();
    let dentropy = |i: usize| slopes.entropies.as_ref().map_or(0.0, |it| it[i]);
    let head = decoder.head();
    let width = hidden.cols;
    let mut dhidden = Mat::zeros(hidden.rows, width);
    let mut dhead: Option<Mat> = None;
    let values = hidden.read()?;
    let active: Vec<usize> =
        (0..dlogp.len()).filter(|&i| dlogp[i] != 0.0 || dentropy(i) != 0.0).collect();
    if weight {
        dhead = Some(Mat::zeros(decoder.config().vocab, width));
    }
    for active in active.chunks(positions(config, gemm::block(width))) {
        let rows: Vec<f32> =
            active.iter().flat_map(|&i| &values[i * width..][..width]).copied().collect();
        let mut dpart = vec![0.0; rows.len()];
        for_each_block(&head, |first, weight| {
            let count = weight.len() / width;
            let mut dlogits = gemm::multiply(&rows, &gemm::packed_transposed(weight, width));
            dlogits.par_chunks_mut(count).zip(active).for_each(|(logits, &i)| {
                let (temperature, entropy) = (config.temperature, false);
                let row = Row { logits, temperature, entropy };
                let (target, sum) = ((targets[i] as usize).wrapping_sub(first), sums[i]);
                let bonus = slopes.entropies.is_some().then(|| (dentropy(i), entropies[i]));
                vectorized(Gradient { row, target, sum, dlogp: dlogp[i], bonus });
            });
            gemm::add_multiply(&dlogits, &gemm::packed_plain(weight, width), &mut dpart);
            if let Some(dhead) = &mut dhead {
                let part = gemm::transposed_times(&dlogits, count, &rows, width);
                let to = &mut dhead.write()?[first * width..][..part.len()];
                to.iter_mut().zip(&part).for_each(|(to, part)| *to += part);
            }
            Ok(())
        })?;
        let dhidden = dhidden.write()?;
        for (&i, part) in active.iter().zip(dpart.chunks_exact(width)) {
            dhidden[i * width..][..width].copy_from_slice(part);
        }
    }
    let shape = head.dims();
    Ok((dhidden, dhead.map(|dhead| dhead.into_tensor(shape))))
}

struct Row<'a> {
    logits: &'a mut [f32],
    temperature: f32,
    entropy: bool,
}

impl Row<'_> {
    #[inline(always)]
    fn temper(&mut self) {
        if self.temperature != 1.0 {
            let scale = 1.0 / self.temperature;
            self.logits.iter_mut().for_each(|x| *x *= scale);
        }
    }
}

/// What the logits of a position seen so far come to.
#[derive(Clone, Copy)]
struct Running {
    max: f32,
    /// Σ exp(x − max).
    sum: f32,
    /// Σ exp(x − max) (x − max), where the entropy is wanted.
    weighted: f32,
    /// The scored id's logit.
    target: f32,
}

impl Default for Running {
    fn default() -> Self {
        Self { max: f32::NEG_INFINITY, sum: 0.0, weighted: 0.0, target: f32::NAN }
    }
}

impl Running {
    fn log_prob(&self) -> f32 {
        self.target - self.max - self.sum.ln()
    }

    fn log_sum(&self) -> f32 {
        self.max + self.sum.ln()
    }

    fn entropy(&self) -> f32 {
        self.sum.ln() - self.weighted / self.sum
    }
}

/// Adds neighbouring logits of a position, and leaves other values in their place.
struct Absorb<'a> {
    row: Row<'a>,
    /// Index of the scored id, beyond the row if it is elsewhere.
    target: usize,
    running: &'a mut Running,
}

impl Vectorized for Absorb<'_> {
    type Output = ();

    #[inline(always)]
    fn run<M: MulAdd>(mut self) {
        self.row.temper();
        let (logits, running) = (self.row.logits, self.running);
        if let Some(&target) = logits.get(self.target) {
            running.target = target;
        }
        let max = largest(logits);
        if max > running.max {
            if running.sum > 0.0 {
                let (kept, lower) = (exp::<M>(running.max - max), running.max - max);
                running.weighted = kept * (running.weighted + lower * running.sum);
                running.sum *= kept;
            }
            running.max = max;
        }
        if self.row.entropy {
            let shifted: Vec<f32> = logits.iter().map(|x| x - running.max).collect();
            running.sum += exp_sum::<M>(logits, running.max);
            running.weighted += dot::<M>(logits, &shifted);
        } else {
            running.sum += exp_sum::<M>(logits, running.max);
        }
    }
}

struct Gradient<'a> {
    row: Row<'a>,
    target: usize,
    sum: f32,
    dlogp: f32,
    /// dL/dentropy, and the entropy.
    bonus: Option<(f32, f32)>,
}

impl Vectorized for Gradient<'_> {
    type Output = ();

    #[inline(always)]
    fn run<M: MulAdd>(mut self) {
        self.row.temper();
        let scale = self.dlogp / self.row.temperature;
        let sum = self.sum;
        match self.bonus {
            None => self.row.logits.iter_mut().for_each(|x| *x = -scale * exp::<M>(*x - sum)),
            Some((slope, entropy)) => {
                let slope = slope / self.row.temperature;
                self.row.logits.iter_mut().for_each(|x| {
                    let log = *x - sum;
                    *x = -exp::<M>(log) * (scale + slope * (log + entropy));
                });
            }
        }
        if let Some(target) = self.row.logits.get_mut(self.target) {
            *target += scale;
        }
    }
}
