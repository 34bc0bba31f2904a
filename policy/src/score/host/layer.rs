//! One layer, forward and backward, by hand: the same mathematics as the graph of
//! [`crate::model::Decoder`], in fewer passes over memory.

use super::{
    super::layout::Layout,
    delta_net::{self, DeltaNet},
    linear::{Projection, Sink, host},
    mat::Mat,
    rows::{gated, gated_backward, rms_norm, rms_norm_backward},
    self_attention::{self, SelfAttention},
};
use crate::model::{
    Adapter, Decoder, ModelError,
    weights::{Mixer, Norm},
};

/// Cosines and sines of a batch's ids, `[ids, half]` each, of as many pairs as are rotated.
pub(super) type Rope = (Vec<f32>, Vec<f32>);

/// One layer's weights.
pub(super) struct Layer {
    prefix: String,
    input_norm: Vec<f32>,
    post_norm: Vec<f32>,
    mixer: Mix,
    /// Gate, up, down.
    mlp: [Projection; 3],
}

/// What lets the rows see each other.
enum Mix {
    Attention(Box<SelfAttention>),
    Delta(Box<DeltaNet>),
}

/// What the backward pass needs of it.
enum Mixed {
    Attention(Box<self_attention::Saved>),
    Delta(Box<delta_net::Saved>),
}

/// What the backward pass needs of a layer.
pub(super) struct Saved {
    x: Mat,
    input_scale: Vec<f32>,
    mixed: Mixed,
    middle: Mat,
    post_scale: Vec<f32>,
    gate: Mat,
    up: Mat,
    /// The feed-forward part's inputs times A, by slot.
    low: [Option<Mat>; 3],
    /// The rows that went on after the mixer, where not all did.
    kept: Option<Vec<u32>>,
}

/// Sizes and positions that all layers share.
#[derive(Clone, Copy)]
pub(super) struct Frame<'a> {
    pub(super) decoder: &'a Decoder,
    pub(super) layout: &'a Layout,
    pub(super) rope: &'a Rope,
}

/// The normed input of a mixer in the backward pass.
#[derive(Clone, Copy)]
pub(super) struct Normed<'a> {
    /// Computes it again.
    pub(super) make: &'a dyn Fn() -> Result<Mat, ModelError>,
    /// Whether its gradient is wanted.
    pub(super) want: bool,
}

/// What a norm multiplies by.
pub(super) fn norm_weight(norm: &Norm) -> Result<Vec<f32>, ModelError> {
    let mut weight = host(norm.weight.val())?;
    if norm.zero_centred {
        weight.iter_mut().for_each(|weight| *weight += 1.0);
    }
    Ok(weight)
}

impl Layer {
    pub(super) fn new(
        decoder: &Decoder,
        adapter: Option<&Adapter>,
        index: usize,
    ) -> Result<Self, ModelError> {
        let layer = &decoder.weights.model.layers[index];
        let (mixer, slot) = match &layer.mixer {
            Mixer::SelfAttn(it) => {
                (Mix::Attention(SelfAttention::new(decoder, adapter, index, it)?.into()), 4)
            }
            Mixer::LinearAttn(it) => {
                (Mix::Delta(DeltaNet::new(decoder, adapter, index, it)?.into()), 5)
            }
        };
        let projection = |slot| Projection::new(decoder, adapter, index, slot);
        Ok(Self {
            prefix: format!("{}.layers.{index}", decoder.config().prefix()),
            input_norm: norm_weight(&layer.input_layernorm)?,
            post_norm: norm_weight(&layer.post_attention_layernorm)?,
            mixer,
            mlp: [projection(slot)?, projection(slot + 1)?, projection(slot + 2)?],
        })
    }

    /// The layer's output and what [`Layer::backward`] needs. Where `kept` lists rows, only those are
    /// computed beyond the mixer: the last layer's other rows serve nobody.
    pub(super) fn forward(
        &self,
        frame: Frame<'_>,
        x: Mat,
        kept: Option<&[u32]>,
    ) -> Result<(Mat, Saved), ModelError> {
        let eps = frame.decoder.config().norm_eps as f32;
        let (h, input_scale) = rms_norm(&x, &self.input_norm, eps)?;
        let (mut middle, mixed) = match &self.mixer {
            Mix::Attention(it) => {
                let (y, saved) = it.forward(frame, h, kept)?;
                (y, Mixed::Attention(saved.into()))
            }
            Mix::Delta(it) => {
                let (y, saved) = it.forward(frame, h, kept)?;
                (y, Mixed::Delta(saved.into()))
            }
        };
        match kept {
            None => middle.add(&x)?,
            Some(rows) => middle.add(&x.pick(rows)?)?,
        }
        let [gate, up, down] = &self.mlp;
        let (h, post_scale) = rms_norm(&middle, &self.post_norm, eps)?;
        let (gate, up) = (gate.forward(&h)?, up.forward(&h)?);
        drop(h);
        let active = gated(&gate.y, &up.y)?;
        let down = down.forward(&active)?;
        let mut y = down.y;
        y.add(&middle)?;
        let low = [gate.z, up.z, down.z];
        let (gate, up) = (gate.y, up.y);
        let kept = kept.map(<[u32]>::to_vec);
        Ok((y, Saved { x, input_scale, mixed, middle, post_scale, gate, up, low, kept }))
    }

    /// The gradient of the layer's input, given that of its output. `want_input` is false where
    /// nothing below is trained; what is returned then is not that gradient.
    pub(super) fn backward(
        &self,
        frame: Frame<'_>,
        saved: Saved,
        mut dy: Mat,
        want_input: bool,
        sink: &mut Sink<'_>,
    ) -> Result<Mat, ModelError> {
        let Saved { x, input_scale, mixed, middle, post_scale, mut gate, mut up, .. } = saved;
        let [zgate, zup, zdown] = saved.low;
        let [pgate, pup, pdown] = &self.mlp;
        let eps = frame.decoder.config().norm_eps as f32;
        let base = sink.base();

        let (mut active, dz) = pdown.input(&dy)?;
        gated_backward(&mut gate, &mut up, &mut active)?;
        pdown.weights(&active, zdown, &dy, dz, sink)?;
        drop(active);
        let (h, _) = rms_norm(&middle, &self.post_norm, eps)?;
        let (mut dh, dz) = pgate.input(&gate)?;
        pgate.weights(&h, zgate, &gate, dz, sink)?;
        drop(gate);
        let (part, dz) = pup.input(&up)?;
        pup.weights(&h, zup, &up, dz, sink)?;
        dh.add(&part)?;
        drop((part, up, h));
        let dnorm = rms_norm_backward(&middle, &self.post_norm, &post_scale, &dh, &mut dy, base)?;
        sink.vector(format!("{}.post_attention_layernorm.weight", self.prefix), dnorm);
        drop((dh, middle));

        let kept = saved.kept.as_deref();
        let make = || Ok(rms_norm(&x, &self.input_norm, eps)?.0);
        let normed = Normed { make: &make, want: want_input };
        let dh = match (&self.mixer, mixed) {
            (Mix::Attention(it), Mixed::Attention(saved)) => {
                it.backward(frame, *saved, &dy, kept, normed, sink)?
            }
            (Mix::Delta(it), Mixed::Delta(saved)) => {
                it.backward(frame, *saved, &dy, kept, normed, sink)?
            }
            _ => return Err(ModelError::Input("a layer got another layer's record".into())),
        };
        if let Some(rows) = kept {
            dy = dy.spread(rows, x.rows)?;
        }
        if let Some(dh) = dh {
            let dnorm = rms_norm_backward(&x, &self.input_norm, &input_scale, &dh, &mut dy, base)?;
            sink.vector(format!("{}.input_layernorm.weight", self.prefix), dnorm);
        }
        Ok(dy)
    }
}
