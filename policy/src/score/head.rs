//! The language-model head at scored positions only, a chunk at a time: a full `[positions, vocab]`
//! never exists. The backward pass computes the logits again and needs no graph:
//! `dL/dlogits = dL/dlogp (onehot − softmax) / T`.

use burn::tensor::{Tensor, TensorData};

use super::{ScoreConfig, Scores, layout::Layout};
use crate::model::{Decoder, ModelError, to_f32};

/// What the head gives at the scored positions.
pub(crate) struct HeadOutput {
    pub(crate) log_probs: Vec<f32>,
    pub(crate) entropies: Option<Vec<f32>>,
}

impl HeadOutput {
    pub(crate) fn split(self, layout: &Layout) -> Scores {
        Scores {
            log_probs: layout.split(&self.log_probs),
            entropies: self.entropies.map(|values| layout.split(&values)),
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
) -> Result<HeadOutput, ModelError> {
    let head = decoder.head();
    let width = decoder.config().hidden;
    let mut log_probs = Vec::with_capacity(targets.len());
    let mut entropies = config.entropy.then(Vec::new);
    let mut start = 0;
    for targets in targets.chunks(chunk(decoder, config)) {
        let end = start + targets.len();
        let rows = hidden.clone().slice([start..end, 0..width]);
        let log = log_softmax(rows, &head, config);
        let picked = log.clone().gather(1, decoder.int(targets).unsqueeze_dim(1));
        log_probs.extend(host(picked)?);
        if let Some(entropies) = &mut entropies {
            entropies.extend(host(log.clone().exp().mul(log).sum_dim(1).neg())?);
        }
        start = end;
    }
    Ok(HeadOutput { log_probs, entropies })
}

/// `dL/dhidden` `[positions, hidden]`, and `dL/dhead` `[vocab, hidden]` where `weight` asks for it.
pub(crate) fn backward(
    decoder: &Decoder,
    hidden: &Tensor<2>,
    targets: &[u32],
    dlogp: &[f32],
    config: &ScoreConfig,
    weight: bool,
) -> (Tensor<2>, Option<Tensor<2>>) {
    let head = decoder.head();
    let width = decoder.config().hidden;
    let size = chunk(decoder, config);
    let mut parts = Vec::new();
    let mut dhead: Option<Tensor<2>> = None;
    let mut start = 0;
    for (targets, dlogp) in targets.chunks(size).zip(dlogp.chunks(size)) {
        let count = targets.len();
        let rows = hidden.clone().slice([start..start + count, 0..width]);
        let scaled: Vec<f32> = dlogp.iter().map(|d| d / config.temperature).collect();
        let data = TensorData::new(scaled, [count, 1]);
        let scaled = Tensor::<2>::from_data(data, decoder.device());
        let p = log_softmax(rows.clone(), &head, config).exp();
        let index = decoder.int(targets).unsqueeze_dim(1);
        let dlogits = p.mul(scaled.clone().neg()).scatter(
            1,
            index,
            scaled,
            burn::tensor::IndexingUpdateOp::Add,
        );
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

fn log_softmax(hidden: Tensor<2>, head: &Tensor<2>, config: &ScoreConfig) -> Tensor<2> {
    let mut logits = to_f32(hidden.matmul(head.clone().transpose()));
    if config.temperature != 1.0 {
        logits = logits.div_scalar(config.temperature);
    }
    burn::tensor::activation::log_softmax(logits, 1)
}

fn host(tensor: Tensor<2>) -> Result<Vec<f32>, ModelError> {
    let data = tensor.try_into_data().map_err(|e| ModelError::Device(e.to_string()))?;
    data.try_into_vec::<f32>().map_err(|e| ModelError::Device(e.to_string()))
}
