//! A decoder's weights and an adapter's matrices, packed.

use burn::tensor::Tensor;

use super::{
    packed::{Matrix, Packed, chunked},
    panels::Chunk,
};
use crate::model::{
    Adapter, Decoder, ModelConfig, ModelError, RopeTable,
    weights::{LINEARS, Layer, Mixer, Norm},
};

/// All weights of a decoder.
pub(super) struct HostWeights {
    pub config: ModelConfig,
    pub layers: Vec<HostLayer>,
    /// Elements of the linears' and the head's weights.
    pub count: usize,
    /// The final norm.
    pub norm: Vec<Chunk>,
    pub head: Packed,
    /// Row-major `[vocab, hidden]`; absent where the head's weight serves.
    embedding: Option<Vec<f32>>,
    table: RopeTable,
    /// Cosines and sines `[positions][head_dim / 2]`, from position 0 as far as needed so far.
    rope: (Vec<f32>, Vec<f32>),
}

/// One layer.
pub(super) struct HostLayer {
    pub input_norm: Vec<Chunk>,
    pub post_norm: Vec<Chunk>,
    pub q_norm: Option<Vec<f32>>,
    pub k_norm: Option<Vec<f32>>,
    /// In the order of [`LINEARS`].
    pub linears: Vec<Packed>,
}

impl HostWeights {
    pub(super) fn pack(decoder: &Decoder) -> Result<Self, ModelError> {
        let config = decoder.config().clone();
        let weights = &decoder.weights;
        let shapes = config.linear_shapes();
        let layer = |layer: &Layer| {
            let linears = (0..LINEARS.len()).zip(shapes).map(|(i, [outputs, inputs])| {
                let linear = layer.linear(i);
                let bias = linear.bias.as_ref().map(|bias| values(bias.val())).transpose()?;
                let packed = Packed::new(&values(linear.weight.val())?, outputs, inputs);
                Ok(packed.with_bias(bias.as_deref()))
            });
            let Mixer::SelfAttn(attention) = &layer.mixer else {
                return Err(ModelError::Input("this pass has no gated DeltaNet layers".into()));
            };
            let head_norm = |norm: &Option<Norm>| {
                norm.as_ref().map(|norm| values(norm.weight.val())).transpose()
            };
            Ok(HostLayer {
                input_norm: chunked(&values(layer.input_layernorm.weight.val())?),
                post_norm: chunked(&values(layer.post_attention_layernorm.weight.val())?),
                q_norm: head_norm(&attention.q_norm)?,
                k_norm: head_norm(&attention.k_norm)?,
                linears: linears.collect::<Result<_, ModelError>>()?,
            })
        };
        let head = values(weights.head())?;
        let embedding = match config.tied {
            true => None,
            false => Some(values(weights.model.embed_tokens.weight.val())?),
        };
        let linear: usize = shapes.iter().map(|[outputs, inputs]| outputs * inputs).sum();
        Ok(Self {
            count: linear * config.layers + config.vocab * config.hidden,
            layers: weights.model.layers.iter().map(layer).collect::<Result<_, ModelError>>()?,
            norm: chunked(&values(weights.model.norm.weight.val())?),
            head: Packed::new(&head, config.vocab, config.hidden),
            embedding,
            config,
            table: decoder.rope_table().clone(),
            rope: (Vec::new(), Vec::new()),
        })
    }

    pub(super) fn eps(&self) -> f32 {
        self.config.norm_eps as f32
    }

    /// Copies the embedding of `id`, `hidden` long.
    pub(super) fn embedding(&self, id: u32, to: &mut [f32]) {
        let id = id as usize;
        match &self.embedding {
            None => self.head.read_row(id, to),
            Some(rows) => {
                let from = rows.iter().skip(id * self.config.hidden);
                to.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
            }
        }
    }

    pub(super) fn rope(&self) -> (&[f32], &[f32]) {
        (&self.rope.0, &self.rope.1)
    }

    /// Makes the rotary table reach over `len` positions.
    pub(super) fn extend_rope(&mut self, len: usize) {
        let half = (self.config.head_dim / 2).max(1);
        let have = self.rope.0.len() / half;
        if have < len {
            let until = (2 * have).max(len).max(64).min(self.config.max_positions.max(len));
            let positions: Vec<u32> = (have..until).map(|p| p as u32).collect();
            let (cos, sin) = self.table.at(&positions);
            self.rope.0.extend(cos);
            self.rope.1.extend(sin);
        }
    }
}

/// An adapter's matrices, by the linear's slot.
pub(super) struct HostAdapter {
    loras: Vec<Option<HostLora>>,
}

/// `B` has the adapter's scale in it.
pub(super) struct HostLora {
    pub a: Packed,
    pub b: Matrix<Chunk>,
}

impl HostAdapter {
    pub(super) fn pack(config: &ModelConfig, adapter: &Adapter) -> Result<Self, ModelError> {
        let shapes = config.linear_shapes();
        let lora = |slot: usize| {
            let Some((lora, scale)) = adapter.lora(slot) else { return Ok(None) };
            let [outputs, inputs] = shapes[slot % LINEARS.len()];
            let (a, b) = (lora.lora_a.val(), lora.lora_b.val());
            let r = a.dims()[0];
            if a.dims() != [r, inputs] || b.dims() != [outputs, r] {
                let linears = config.linears();
                let path = linears.get(slot).map_or("a linear", |linear| &linear.path);
                return Err(ModelError::Adapter(format!("its matrices do not fit {path}")));
            }
            Ok(Some(HostLora {
                a: Packed::new(&values(a)?, r, inputs),
                b: Matrix::pack(&values(b)?, outputs, r, |value| value * scale),
            }))
        };
        let slots = config.layers * LINEARS.len();
        Ok(Self { loras: (0..slots).map(lora).collect::<Result<_, ModelError>>()? })
    }

    pub(super) fn lora(&self, layer: usize, linear: usize) -> Option<&HostLora> {
        self.loras.get(layer * LINEARS.len() + linear)?.as_ref()
    }
}

fn values<const D: usize>(tensor: Tensor<D>) -> Result<Vec<f32>, ModelError> {
    let data = tensor.try_into_data().map_err(|e| ModelError::Device(e.to_string()))?;
    data.convert::<f32>().try_into_vec().map_err(|e| ModelError::Device(e.to_string()))
}
