//! The decoder: weights on a device, a full-sequence forward pass, and the layer that every other
//! pass (cached decoding, scoring) is made of.

use std::sync::Arc;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::{
    adapter::Adapter,
    config::ModelConfig,
    delta::{DeltaRows, DeltaRule, DeltaState},
    error::ModelError,
    images::{Placement, positions},
    layer::Sequences,
    ops::{attend, from_f32, rms_norm, to_f32},
    rope::RopeTable,
    runs::Runs,
    weights::Weights,
};
use crate::vision::PlacedImage;

/// Hugely negative and finite, so that a row without any key gives no NaN.
pub(crate) const MASKED: f32 = -1e30;

/// A decoder-only language model on one device.
#[derive(Clone, Debug)]
pub struct Decoder {
    config: ModelConfig,
    pub(crate) weights: Weights,
    device: Device,
    dtype: DType,
    rope: RopeTable,
}

/// A batch of whole sequences.
#[derive(Clone, Copy, Debug)]
pub struct FullInput<'a> {
    /// Row-major `[batch, len]`.
    pub ids: &'a [u32],
    /// Number of sequences.
    pub batch: usize,
    /// Row-major `[batch, len]`, false for padding (at the left, as transformers' generation has
    /// it); positions count unmasked ids. `None`: no padding.
    pub mask: Option<&'a [bool]>,
    /// Whether to return hidden states.
    pub hidden: bool,
    /// Images, by the index in `ids` of their first image-pad id; each within the unmasked ids of a
    /// row.
    pub images: &'a [PlacedImage],
}

/// What a full-sequence pass gives.
#[derive(Debug)]
pub struct FullOutput {
    /// f32 `[batch, len, vocab]`.
    pub logits: Tensor<3>,
    /// Where asked for, as transformers' `hidden_states`: the embedding, then each layer's output
    /// `[batch, len, hidden]`, the last one after the final norm.
    pub hidden: Vec<Tensor<3>>,
}

/// Where an id stands on the axes of time, height and width; the same on all of them for text.
pub(crate) type Position = [u32; 3];

/// Cosines and sines for the rows of a pass, each `[rows, 1, half]` of the rotated part.
pub(crate) type Rotations = (Tensor<3>, Tensor<3>);

impl Decoder {
    pub(crate) fn new(config: ModelConfig, weights: Weights, device: Device, dtype: DType) -> Self {
        let sections = config.hybrid().map_or([0; 3], |hybrid| hybrid.sections);
        let rope = RopeTable::new(&config.rope, config.rotary()).interleaved(sections);
        Self { config, weights, device, dtype, rope }
    }

    /// The same model with other weights.
    pub(crate) fn with_weights(&self, weights: Weights) -> Self {
        let (config, device, rope) = (self.config.clone(), self.device.clone(), self.rope.clone());
        Self { config, weights, device, dtype: self.dtype, rope }
    }

    /// The model's shape.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Where the weights live.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The type of the weights and of the residual stream.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Whether the engine's pass written by hand for the processor serves it: in f32, on the
    /// processor, and without recurrent layers.
    pub(crate) fn on_host(&self) -> bool {
        self.dtype == DType::F32 && self.device == Device::flex() && self.config.hybrid().is_none()
    }

    pub(crate) fn rope_table(&self) -> &RopeTable {
        &self.rope
    }

    pub(crate) fn check_ids(&self, ids: &[u32]) -> Result<(), ModelError> {
        let vocab = self.config.vocab;
        match ids.iter().find(|id| **id as usize >= vocab) {
            Some(&id) => Err(ModelError::TokenId { id, vocab }),
            None => Ok(()),
        }
    }

    pub(crate) fn check_len(&self, len: usize) -> Result<(), ModelError> {
        let max = self.config.max_positions;
        if len <= max { Ok(()) } else { Err(ModelError::TooLong { len, max }) }
    }

    /// The whole pass: logits at every position of a batch of sequences.
    ///
    /// # Errors
    /// Ids outside of the vocabulary, sequences beyond the model's positions, uneven rows.
    pub fn forward(
        &self,
        adapter: Option<&Adapter>,
        input: FullInput<'_>,
    ) -> Result<FullOutput, ModelError> {
        let FullInput { ids, batch, mask, hidden, images } = input;
        if batch == 0 || ids.is_empty() || !ids.len().is_multiple_of(batch) {
            let reason = format!("{} ids do not make {batch} rows of equal length", ids.len());
            return Err(ModelError::Input(reason));
        }
        if mask.is_some_and(|mask| mask.len() != ids.len()) {
            return Err(ModelError::Input("the mask is not as long as the ids".into()));
        }
        let len = ids.len() / batch;
        self.check_ids(ids)?;
        self.check_len(len)?;
        let c = &self.config;
        let images = self.check_images(ids, images)?;
        let rope = self.rotations(&row_positions(len, ids.len(), mask, &images)?);
        let shaped = |x: &Tensor<2>| x.clone().reshape([batch, len, c.hidden]);
        let mut whole = Whole::new(self, batch, len, mask);
        let mut states = Vec::new();
        let mut x = self.embed(ids);
        let placement = Placement::new(images);
        if !placement.is_empty() {
            let merged = placement.tower(self, adapter)?.run();
            x = placement.put(x, &merged);
        }
        for index in 0..c.layers {
            if hidden {
                states.push(shaped(&x));
            }
            x = self.layer(index, adapter, x, &rope, &mut whole);
        }
        let x = self.final_norm(x);
        if hidden {
            states.push(shaped(&x));
        }
        let logits = to_f32(x.matmul(self.weights.head().transpose()));
        Ok(FullOutput { logits: logits.reshape([batch, len, c.vocab]), hidden: states })
    }

    /// The embeddings `[ids, hidden]`.
    pub(crate) fn embed(&self, ids: &[u32]) -> Tensor<2> {
        self.weights.model.embed_tokens.weight.val().select(0, self.int(ids))
    }

    pub(crate) fn int(&self, values: &[u32]) -> Tensor<1, Int> {
        let values: Vec<i32> = values.iter().map(|&v| v.cast_signed()).collect();
        let len = values.len();
        Tensor::from_data(TensorData::new(values, [len]), (&self.device, DType::I32))
    }

    /// Cosines and sines at positions of time, height and width, `[positions, half]` each.
    pub(crate) fn rope_at(&self, positions: &[Position]) -> (Vec<f32>, Vec<f32>) {
        self.rope.at_axes(positions.iter().copied())
    }

    pub(crate) fn rotations(&self, positions: &[Position]) -> Rotations {
        let (cos, sin) = self.rope_at(positions);
        let shape = [positions.len(), 1, self.config.rotary() / 2];
        let tensor = |values: Vec<f32>| {
            let data = TensorData::new(values, shape);
            from_f32(Tensor::from_data(data, &self.device), self.dtype)
        };
        (tensor(cos), tensor(sin))
    }

    pub(crate) fn final_norm(&self, x: Tensor<2>) -> Tensor<2> {
        rms_norm(x, &self.weights.model.norm, self.config.norm_eps)
    }

    /// `[batch, 1, len * group, len]`, query heads of one group in consecutive rows.
    fn causal_bias(&self, batch: usize, len: usize, mask: Option<&[bool]>) -> Tensor<4> {
        let group = self.config.heads / self.config.kv_heads;
        let rows = if mask.is_some() { batch } else { 1 };
        let mut bias = Vec::with_capacity(rows * len * group * len);
        for row in 0..rows {
            for query in 0..len {
                let seen = |key: usize| {
                    key <= query && mask.is_none_or(|m| m.get(row * len + key) == Some(&true))
                };
                let line: Vec<f32> =
                    (0..len).map(|key| if seen(key) { 0.0 } else { MASKED }).collect();
                (0..group).for_each(|_| bias.extend_from_slice(&line));
            }
        }
        let data = TensorData::new(bias, [rows, 1, len * group, len]);
        Tensor::from_data(data, &self.device)
    }
}

/// The sequences of a full pass.
struct Whole<'a> {
    decoder: &'a Decoder,
    batch: usize,
    len: usize,
    bias: Tensor<4>,
    runs: Runs,
    mask: Option<Tensor<2>>,
}

impl<'a> Whole<'a> {
    fn new(decoder: &'a Decoder, batch: usize, len: usize, mask: Option<&[bool]>) -> Self {
        let bias = decoder.causal_bias(batch, len, mask);
        let runs = Runs::new(decoder, 0, &vec![len; batch]);
        let mask = mask.map(|mask| {
            let values = mask.iter().map(|&seen| if seen { 1.0f32 } else { 0.0 }).collect();
            let data = TensorData::new::<f32, _>(values, [batch * len, 1]);
            from_f32(Tensor::from_data(data, &decoder.device), decoder.dtype)
        });
        Self { decoder, batch, len, bias, runs, mask }
    }
}

impl Sequences for Whole<'_> {
    fn attend(&mut self, _layer: usize, q: Tensor<3>, k: Tensor<3>, v: Tensor<3>) -> Tensor<2> {
        let c = &self.decoder.config;
        let (batch, len, group) = (self.batch, self.len, c.heads / c.kv_heads);
        let q = q.reshape([batch, len, c.kv_heads, group * c.head_dim]).swap_dims(1, 2).reshape([
            batch,
            c.kv_heads,
            len * group,
            c.head_dim,
        ]);
        let kv = |x: Tensor<3>| x.reshape([batch, len, c.kv_heads, c.head_dim]).swap_dims(1, 2);
        attend(q, kv(k), kv(v), Some(self.bias.clone()))
            .reshape([batch, c.kv_heads, len, group * c.head_dim])
            .swap_dims(1, 2)
            .reshape([batch * len, c.heads * c.head_dim])
    }

    fn recur(&mut self, _layer: usize, rule: &DeltaRule<'_>, rows: DeltaRows) -> Tensor<2> {
        self.runs.join(rule.run(self.runs.split(&rows), DeltaState::default()).0)
    }

    fn mask(&self) -> Option<Tensor<2>> {
        self.mask.clone()
    }
}

/// Positions of each id of rows of `len`: among the unmasked ones of its row, and in its images.
fn row_positions(
    len: usize,
    total: usize,
    mask: Option<&[bool]>,
    images: &[PlacedImage],
) -> Result<Vec<Position>, ModelError> {
    let mut all = Vec::with_capacity(total);
    for start in (0..total).step_by(len) {
        let seen = |at: &usize| mask.is_none_or(|mask| mask.get(*at) == Some(&true));
        let places: Vec<usize> = (start..start + len).filter(seen).collect();
        let mut own = Vec::new();
        for image in images.iter().filter(|image| (start..start + len).contains(&image.at)) {
            let at = places.partition_point(|place| *place < image.at);
            let tokens = image.patches.tokens();
            let whole = (image.at..image.end()).eq(places.iter().copied().skip(at).take(tokens));
            if !whole {
                let (at, end) = (image.at, image.end());
                let reason = format!("an image at {at}..{end} is not within unmasked ids of a row");
                return Err(ModelError::Input(reason));
            }
            own.push(PlacedImage { at, patches: Arc::clone(&image.patches) });
        }
        let mut unmasked = positions(places.len(), &own, 0).0.into_iter();
        let position = |at: usize| if seen(&at) { unmasked.next() } else { None };
        all.extend((start..start + len).map(position).map(Option::unwrap_or_default));
    }
    Ok(all)
}
