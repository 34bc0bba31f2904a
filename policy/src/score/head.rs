//! The language-model head at scored positions only, a chunk at a time: a full `[positions, vocab]`
//! never exists. The backward pass computes the logits again and needs no graph:
//! `dL/dlogits = (dL/dlogp (onehot − p) − dL/dH p (ln p + H)) / T` with `p = softmax(logits / T)` of
//! entropy H.

use burn::tensor::{Tensor, TensorData};

use rayon::prelude::*;

use super::{ScoreConfig, Scores, Slopes, evidence::Examiner, layout::Layout};
use crate::{
    model::{Decoder, ModelError, to_f32},
    sampling::TokenEvidence,
};

/// What the head gives at the scored positions.
pub(crate) struct HeadOutput {
    pub(crate) log_probs: Vec<f32>,
    pub(crate) entropies: Option<Vec<f32>>,
    pub(crate) evidence: Option<Vec<Option<TokenEvidence>>>,
}

impl HeadOutput {
    pub(crate) fn split(self, layout: &Layout) -> Scores {
        Scores {
            log_probs: layout.split(&self.log_probs),
            entropies: self.entropies.map(|values| layout.split(&values)),
            evidence: self.evidence.map(|values| {
                layout
                    .split(&values)
                    .into_iter()
                    .map(|row| row.into_iter().flatten().collect())
                    .collect()
            }),
        }
    }
}

/// Positions whose logits exist at one time.
pub(crate) fn chunk(decoder: &Decoder, config: &ScoreConfig) -> usize {
    match config.head_chunk {
        0 => ((16 << 20) / decoder.config().vocab).clamp(1, 4096),
        rows => rows,
    }
}

/// Log-probabilities of `targets` under the normed hidden states `hidden` `[positions, hidden]`.
pub(crate) fn forward(
    decoder: &Decoder,
    hidden: &Tensor<2>,
    targets: &[u32],
    config: &ScoreConfig,
    examiner: Option<&Examiner>,
) -> Result<HeadOutput, ModelError> {
    let head = decoder.head();
    let width = decoder.config().hidden;
    let mut log_probs = Vec::with_capacity(targets.len());
    let mut entropies = config.entropy.then(Vec::new);
    let mut evidence = examiner.map(|_| Vec::new());
    let mut start = 0;
    for targets in targets.chunks(chunk(decoder, config)) {
        let end = start + targets.len();
        let rows = hidden.clone().slice([start..end, 0..width]);
        let logits = logits(rows, &head);
        let log = log_softmax(logits.clone(), config);
        let picked = log.clone().gather(1, decoder.int(targets).unsqueeze_dim(1));
        log_probs.extend(host(picked)?);
        if let (Some(examiner), Some(evidence)) = (examiner, &mut evidence) {
            let vocab = logits.dims()[1];
            let rows = host(logits)?;
            let known = log_probs.get(start..).unwrap_or_default();
            let found: Result<Vec<_>, ModelError> = (rows.par_chunks(vocab))
                .zip(targets.par_iter().zip(known))
                .enumerate()
                .map(|(at, (row, (&id, &log_prob)))| {
                    let examined = examiner.examine(start + at, id, row)?;
                    Ok(examined.map(|it| it.with(log_prob)))
                })
                .collect();
            evidence.extend(found?);
        }
        if let Some(entropies) = &mut entropies {
            entropies.extend(host(log.clone().exp().mul(log).sum_dim(1).neg())?);
        }
        start = end;
    }
    Ok(HeadOutput { log_probs, entropies, evidence })
}

/// `dL/dhidden` `[positions, hidden]`, and `dL/dhead` `[vocab, hidden]` where `weight` asks for it.
pub(crate) fn backward(
    decoder: &Decoder,
    hidden: &Tensor<2>,
    targets: &[u32],
    slopes: &Slopes<'_>,
    config: &ScoreConfig,
    weight: bool,
) -> (Tensor<2>, Option<Tensor<2>>) {
    let head = decoder.head();
    let width = decoder.config().hidden;
    let size = chunk(decoder, config);
    let mut parts = Vec::new();
    let mut dhead: Option<Tensor<2>> = None;
    let mut start = 0;
    for (targets, dlogp) in targets.chunks(size).zip(slopes.log_probs.chunks(size)) {
        let count = targets.len();
        let rows = hidden.clone().slice([start..start + count, 0..width]);
        let column = |slopes: &[f32]| {
            let scaled: Vec<f32> = slopes.iter().map(|d| d / config.temperature).collect();
            Tensor::<2>::from_data(TensorData::new(scaled, [count, 1]), decoder.device())
        };
        let scaled = column(dlogp);
        let log = log_softmax(logits(rows.clone(), &head), config);
        let p = log.clone().exp();
        let bonus = slopes.entropies.as_ref().map(|slopes| {
            let entropy = p.clone().mul(log.clone()).sum_dim(1).neg();
            p.clone().mul(log.add(entropy)).mul(column(&slopes[start..start + count]))
        });
        let index = decoder.int(targets).unsqueeze_dim(1);
        let mut dlogits = p.mul(scaled.clone().neg()).scatter(
            1,
            index,
            scaled,
            burn::tensor::IndexingUpdateOp::Add,
        );
        if let Some(bonus) = bonus {
            dlogits = dlogits.sub(bonus);
        }
        let dlogits = crate::model::from_f32(dlogits, decoder.dtype());
        parts.push(dlogits.clone().matmul(head.clone()));
        if weight {
            let part = dlogits.transpose().matmul(rows);
            dhead = Some(match dhead {
                None => part,
                Some(sum) => sum.add(part),
            });
        }
        start += count;
    }
    (Tensor::cat(parts, 0), dhead)
}

fn logits(hidden: Tensor<2>, head: &Tensor<2>) -> Tensor<2> {
    to_f32(hidden.matmul(head.clone().transpose()))
}

fn log_softmax(mut logits: Tensor<2>, config: &ScoreConfig) -> Tensor<2> {
    if config.temperature != 1.0 {
        logits = logits.div_scalar(config.temperature);
    }
    burn::tensor::activation::log_softmax(logits, 1)
}

fn host(tensor: Tensor<2>) -> Result<Vec<f32>, ModelError> {
    let data = tensor.try_into_data().map_err(|e| ModelError::Device(e.to_string()))?;
    data.try_into_vec::<f32>().map_err(|e| ModelError::Device(e.to_string()))
}
