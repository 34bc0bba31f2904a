//! One layer, forward and backward, by hand: the same mathematics as the graph of
//! [`crate::model::Decoder`], in fewer passes over memory.

use super::{
    super::layout::Layout,
    attention::{self, Attention},
    heads::{Heads, to_heads},
    linear::{Projection, Sink, host},
    mat::Mat,
    rows::{gated, gated_backward, rms_norm, rms_norm_backward},
};
use crate::model::{
    Adapter, Decoder, ModelError,
    weights::{Mixer, Norm},
};

/// Cosines and sines of a batch's ids, `[ids, head_dim / 2]` each.
pub(super) type Rope = (Vec<f32>, Vec<f32>);

/// One layer's weights.
pub(super) struct Layer {
    prefix: String,
    input_norm: Vec<f32>,
    post_norm: Vec<f32>,
    q_norm: Option<Vec<f32>>,
    k_norm: Option<Vec<f32>>,
    projections: [Projection; 7],
}

/// What the backward pass needs of a layer.
pub(super) struct Saved {
    x: Mat,
    input_scale: Vec<f32>,
    q: Mat,
    k: Mat,
    v: Mat,
    attention: attention::Saved,
    out: Mat,
    middle: Mat,
    post_scale: Vec<f32>,
    gate: Mat,
    up: Mat,
    /// Inputs times A, by slot.
    low: [Option<Mat>; 7],
    /// The rows that went on after the attention, where not all did.
    kept: Option<Vec<u32>>,
}

/// Sizes and positions that all layers share.
#[derive(Clone, Copy)]
pub(super) struct Frame<'a> {
    pub(super) decoder: &'a Decoder,
    pub(super) layout: &'a Layout,
    pub(super) rope: &'a Rope,
}

impl<'a> Frame<'a> {
    fn heads(self, norm: Option<&'a [f32]>, queries: bool) -> Heads<'a> {
        let c = self.decoder.config();
        Heads {
            kv_heads: c.kv_heads,
            group: if queries { c.heads / c.kv_heads } else { 1 },
            dim: c.head_dim,
            norm,
            eps: c.norm_eps as f32,
            rope: Some((&self.rope.0, &self.rope.1)),
            scale: if queries { 1.0 / (c.head_dim as f32).sqrt() } else { 1.0 },
        }
    }

    fn values(self) -> Heads<'a> {
        Heads { rope: None, ..self.heads(None, false) }
    }

    fn attention(self) -> Attention<'a> {
        let c = self.decoder.config();
        let group = c.heads / c.kv_heads;
        Attention { layout: self.layout, kv_heads: c.kv_heads, group, dim: c.head_dim }
    }
}

impl Layer {
    pub(super) fn new(
        decoder: &Decoder,
        adapter: Option<&Adapter>,
        index: usize,
    ) -> Result<Self, ModelError> {
        let layer = &decoder.weights.model.layers[index];
        let Mixer::SelfAttn(attention) = &layer.mixer else {
            return Err(ModelError::Input("this pass has no gated DeltaNet layers".into()));
        };
        let projection = |slot| Projection::new(decoder, adapter, index, slot);
        let norm =
            |norm: &Option<Norm>| norm.as_ref().map(|norm| host(norm.weight.val())).transpose();
        Ok(Self {
            prefix: format!("model.layers.{index}"),
            input_norm: host(layer.input_layernorm.weight.val())?,
            post_norm: host(layer.post_attention_layernorm.weight.val())?,
            q_norm: norm(&attention.q_norm)?,
            k_norm: norm(&attention.k_norm)?,
            projections: [
                projection(0)?,
                projection(1)?,
                projection(2)?,
                projection(3)?,
                projection(4)?,
                projection(5)?,
                projection(6)?,
            ],
        })
    }

    /// The layer's output and what [`Layer::backward`] needs. Where `kept` lists rows, only those are
    /// computed beyond the attention: the last layer's other rows serve nobody.
    pub(super) fn forward(
        &self,
        frame: Frame<'_>,
        x: Mat,
        kept: Option<&[u32]>,
    ) -> Result<(Mat, Saved), ModelError> {
        let eps = frame.decoder.config().norm_eps as f32;
        let [q, k, v, o, gate, up, down] = &self.projections;
        let (mut h, input_scale) = rms_norm(&x, &self.input_norm, eps)?;
        let (q, k, v) = (q.forward(&mut h)?, k.forward(&mut h)?, v.forward(&mut h)?);
        drop(h);
        let (mut out, attention) = frame.attention().forward(
            frame.heads(self.q_norm.as_deref(), true).forward(&q.y)?,
            frame.heads(self.k_norm.as_deref(), false).forward(&k.y)?,
            frame.values().forward(&v.y)?,
        )?;
        let residual = kept.map(|rows| x.pick(rows)).transpose()?;
        if let Some(rows) = kept {
            out = out.pick(rows)?;
        }
        let o = o.forward(&mut out)?;
        let mut middle = o.y;
        middle.add(residual.as_ref().unwrap_or(&x))?;
        let (mut h, post_scale) = rms_norm(&middle, &self.post_norm, eps)?;
        let (gate, up) = (gate.forward(&mut h)?, up.forward(&mut h)?);
        drop(h);
        let mut active = gated(&gate.y, &up.y)?;
        let down = down.forward(&mut active)?;
        let mut y = down.y;
        y.add(&middle)?;
        let low = [q.z, k.z, v.z, o.z, gate.z, up.z, down.z];
        let (q, k, v, gate, up) = (q.y, k.y, v.y, gate.y, up.y);
        let kept = kept.map(<[u32]>::to_vec);
        let saved = Saved {
            x,
            input_scale,
            q,
            k,
            v,
            attention,
            out,
            middle,
            post_scale,
            gate,
            up,
            low,
            kept,
        };
        Ok((y, saved))
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
        let Saved { x, input_scale, q, k, v, attention, mut out, middle, post_scale, .. } = saved;
        let (mut gate, mut up) = (saved.gate, saved.up);
        let (mut q, mut k, mut v) = (q, k, v);
        let [zq, zk, zv, zo, zgate, zup, zdown] = saved.low;
        let [pq, pk, pv, po, pgate, pup, pdown] = &self.projections;
        let eps = frame.decoder.config().norm_eps as f32;
        let base = sink.base();

        let (mut active, dz) = pdown.input(&mut dy)?;
        gated_backward(&mut gate, &mut up, &mut active)?;
        pdown.weights(&mut active, zdown, &mut dy, dz, sink)?;
        drop(active);
        let (mut h, _) = rms_norm(&middle, &self.post_norm, eps)?;
        let (mut dh, dz) = pgate.input(&mut gate)?;
        pgate.weights(&mut h, zgate, &mut gate, dz, sink)?;
        let (part, dz) = pup.input(&mut up)?;
        pup.weights(&mut h, zup, &mut up, dz, sink)?;
        dh.add(&part)?;
        drop((part, gate, up, h));
        let dnorm = rms_norm_backward(&middle, &self.post_norm, &post_scale, &dh, &mut dy, base)?;
        sink.vector(format!("{}.post_attention_layernorm.weight", self.prefix), dnorm);

        let (mut dout, dz) = po.input(&mut dy)?;
        po.weights(&mut out, zo, &mut dy, dz, sink)?;
        if let Some(rows) = &saved.kept {
            dout = dout.spread(rows, x.rows)?;
            dy = dy.spread(rows, x.rows)?;
        }
        let c = frame.decoder.config();
        let dout = to_heads(&dout, c.kv_heads, c.head_dim)?;
        let heads = frame.attention().backward(attention, dout)?;
        let queries = frame.heads(self.q_norm.as_deref(), true);
        let dnorm = queries.backward(&mut q, &heads.dq, base)?;
        sink.vector(format!("{}.self_attn.q_norm.weight", self.prefix), dnorm);
        let keys = frame.heads(self.k_norm.as_deref(), false);
        let dnorm = keys.backward(&mut k, &heads.dk, base)?;
        sink.vector(format!("{}.self_attn.k_norm.weight", self.prefix), dnorm);
        frame.values().backward(&mut v, &heads.dv, false)?;

        let (mut h, _) = rms_norm(&x, &self.input_norm, eps)?;
        let mut dh: Option<Mat> = None;
        for (projection, z, dy) in [(pq, zq, &mut q), (pk, zk, &mut k), (pv, zv, &mut v)] {
            let dz = if want_input {
                let (part, dz) = projection.input(dy)?;
                match &mut dh {
                    None => dh = Some(part),
                    Some(dh) => dh.add(&part)?,
                }
                dz
            } else {
                projection.low_input(dy)?
            };
            projection.weights(&mut h, z, dy, dz, sink)?;
        }
        if let Some(dh) = dh {
            let dnorm = rms_norm_backward(&x, &self.input_norm, &input_scale, &dh, &mut dy, base)?;
            sink.vector(format!("{}.input_layernorm.weight", self.prefix), dnorm);
        }
        Ok(dy)
    }
}
