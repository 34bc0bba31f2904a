//! The language-model head at scored positions, a chunk of logits at a time.

use burn::tensor::Tensor;
use rayon::prelude::*;

use super::{
    super::{ScoreConfig, Slopes, evidence::Examiner, head::HeadOutput, head::chunk},
    mat::Mat,
    math::{dot, exp_sum, largest},
};
use crate::{
    model::{Decoder, ModelError},
    simd::{MulAdd, Vectorized, exp, vectorized},
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
    let mut log_probs = vec![0.0; targets.len()];
    let mut sums = vec![0.0; targets.len()];
    let mut entropies = vec![0.0; targets.len()];
    let mut evidence = vec![None; targets.len()];
    let size = chunk(decoder, config);
    let hidden = hidden.read()?.chunks(size * decoder.config().hidden);
    let outputs = log_probs.chunks_mut(size).zip(sums.chunks_mut(size));
    let outputs = outputs.zip(entropies.chunks_mut(size)).zip(evidence.chunks_mut(size));
    let mut first = 0;
    for ((hidden, targets), (((log_probs, sums), entropies), evidence)) in
        hidden.zip(targets.chunks(size)).zip(outputs)
    {
        let mut logits = logits(hidden, targets.len(), &head)?;
        let vocab = logits.cols;
        (logits.write()?.par_chunks_mut(vocab).zip(targets).enumerate())
            .zip(log_probs.par_iter_mut().zip(sums).zip(entropies).zip(evidence))
            .try_for_each(|((at, (logits, &id)), (((log_prob, sum), entropy), evidence))| {
                // First, as scoring leaves other values in the row.
                let examined = examiner.map(|it| it.examine(first + at, id, logits)).transpose()?;
                let (temperature, target) = (config.temperature, id as usize);
                let row = Row { logits, temperature, entropy: config.entropy };
                (*log_prob, *sum, *entropy) = vectorized(ScoreRow { row, target });
                *evidence = examined.flatten().map(|it| it.with(*log_prob));
                Ok::<_, ModelError>(())
            })?;
        first += targets.len();
    }
    let entropies = config.entropy.then_some(entropies);
    let evidence = examiner.map(|_| evidence);
    Ok(Scored { output: HeadOutput { log_probs, entropies, evidence }, sums })
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
    for active in active.chunks(chunk(decoder, config)) {
        let rows: Vec<f32> =
            active.iter().flat_map(|&i| &values[i * width..][..width]).copied().collect();
        let mut dlogits = logits(&rows, active.len(), &head)?;
        let vocab = dlogits.cols;
        dlogits.write()?.par_chunks_mut(vocab).zip(active).for_each(|(logits, &i)| {
            let (temperature, entropy) = (config.temperature, false);
            let row = Row { logits, temperature, entropy };
            let (target, sum) = (targets[i] as usize, sums[i]);
            let bonus = slopes.entropies.is_some().then(|| (dentropy(i), entropies[i]));
            vectorized(Gradient { row, target, sum, dlogp: dlogp[i], bonus });
        });
        let part = dlogits.times(&head)?;
        for (&i, part) in active.iter().zip(part.read()?.chunks_exact(width)) {
            dhidden.write()?[i * width..][..width].copy_from_slice(part);
        }
        if weight {
            let part = dlogits.transposed_times(&Mat::new(rows, active.len(), width))?;
            match &mut dhead {
                None => dhead = Some(part),
                Some(sum) => sum.add(&part)?,
            }
        }
    }
    let shape = head.dims();
    let dhead = weight.then(|| dhead.unwrap_or_else(|| Mat::zeros(shape[0], shape[1])));
    Ok((dhidden, dhead.map(|dhead| dhead.into_tensor(shape))))
}

fn logits(hidden: &[f32], rows: usize, head: &Tensor<2>) -> Result<Mat, ModelError> {
    let width = head.dims()[1];
    Mat::new(hidden.to_vec(), rows, width).times_transposed(head)
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

struct ScoreRow<'a> {
    row: Row<'a>,
    target: usize,
}

impl Vectorized for ScoreRow<'_> {
    /// Log-probability, log-sum-exp, entropy.
    type Output = (f32, f32, f32);

    #[inline(always)]
    fn run<M: MulAdd>(mut self) -> Self::Output {
        self.row.temper();
        let logits = self.row.logits;
        let target = logits.get(self.target).copied().unwrap_or(f32::NAN);
        let max = largest(logits);
        if !self.row.entropy {
            let sum = exp_sum(logits, max);
            let log_sum = sum.ln();
            return (target - max - log_sum, max + log_sum, 0.0);
        }
        let shifted: Vec<f32> = logits.iter().map(|x| x - max).collect();
        let sum = exp_sum(logits, max);
        let log_sum = sum.ln();
        let entropy = log_sum - dot::<M>(logits, &shifted) / sum;
        (target - max - log_sum, max + log_sum, entropy)
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
            None => self.row.logits.iter_mut().for_each(|x| *x = -scale * exp(*x - sum)),
            Some((slope, entropy)) => {
                let slope = slope / self.row.temperature;
                self.row.logits.iter_mut().for_each(|x| {
                    let log = *x - sum;
                    *x = -exp(log) * (scale + slope * (log + entropy));
                });
            }
        }
        if let Some(target) = self.row.logits.get_mut(self.target) {
            *target += scale;
        }
    }
}
