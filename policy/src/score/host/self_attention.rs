//! The attention of a layer, with its projections, norms and gate, forward and backward.

use super::{
    attention::{self, Attention},
    gates::{sigmoid_gate, sigmoid_gate_backward},
    heads::{Heads, to_heads},
    layer::{Frame, Normed, norm_weight},
    linear::{Inputs, Projection, Sink},
    mat::Mat,
};
use crate::model::{
    Adapter, Decoder, ModelError,
    weights::{self, Norm},
};

/// One layer's weights.
pub(super) struct SelfAttention {
    path: String,
    q_norm: Option<Vec<f32>>,
    k_norm: Option<Vec<f32>>,
    /// Queries (each head's gate after them, where there is one), keys, values.
    inputs: [Projection; 3],
    output: Projection,
    gated: bool,
}

/// What the backward pass needs of it.
pub(super) struct Saved {
    q: Mat,
    k: Mat,
    v: Mat,
    attention: attention::Saved,
    /// Before the gate where there is one, at all rows; else at the kept ones.
    out: Mat,
    /// Inputs times A, by slot.
    low: [Option<Mat>; 4],
}

impl SelfAttention {
    pub(super) fn new(
        decoder: &Decoder,
        adapter: Option<&Adapter>,
        index: usize,
        attention: &weights::Attention,
    ) -> Result<Self, ModelError> {
        let projection = |slot| Projection::new(decoder, adapter, index, slot);
        let norm = |norm: &Option<Norm>| norm.as_ref().map(norm_weight).transpose();
        Ok(Self {
            path: format!("{}.layers.{index}.self_attn", decoder.config().prefix()),
            q_norm: norm(&attention.q_norm)?,
            k_norm: norm(&attention.k_norm)?,
            inputs: [projection(0)?, projection(1)?, projection(2)?],
            output: projection(3)?,
            gated: attention.gated,
        })
    }

    fn heads<'a>(&'a self, frame: Frame<'a>, norm: Option<&'a [f32]>, queries: bool) -> Heads<'a> {
        let c = frame.decoder.config();
        Heads {
            kv_heads: c.kv_heads,
            group: if queries { c.heads / c.kv_heads } else { 1 },
            dim: c.head_dim,
            stride: if queries && self.gated { 2 * c.head_dim } else { c.head_dim },
            norm,
            eps: c.norm_eps as f32,
            rope: Some((&frame.rope.0, &frame.rope.1)),
            scale: if queries { 1.0 / (c.head_dim as f32).sqrt() } else { 1.0 },
        }
    }

    fn queries<'a>(&'a self, frame: Frame<'a>) -> Heads<'a> {
        self.heads(frame, self.q_norm.as_deref(), true)
    }

    fn keys<'a>(&'a self, frame: Frame<'a>) -> Heads<'a> {
        self.heads(frame, self.k_norm.as_deref(), false)
    }

    fn values<'a>(&'a self, frame: Frame<'a>) -> Heads<'a> {
        Heads { rope: None, ..self.heads(frame, None, false) }
    }

    fn attention<'a>(&self, frame: Frame<'a>) -> Attention<'a> {
        let c = frame.decoder.config();
        let group = c.heads / c.kv_heads;
        Attention { layout: frame.layout, kv_heads: c.kv_heads, group, dim: c.head_dim }
    }

    /// The output at the rows of `kept` (all where absent), given the normed input of all.
    pub(super) fn forward(
        &self,
        frame: Frame<'_>,
        h: Mat,
        kept: Option<&[u32]>,
    ) -> Result<(Mat, Saved), ModelError> {
        let [q, k, v] = &self.inputs;
        let (q, k, v) = (q.forward(&h)?, k.forward(&h)?, v.forward(&h)?);
        drop(h);
        let (mut out, attention) = self.attention(frame).forward(
            self.queries(frame).forward(&q.y)?,
            self.keys(frame).forward(&k.y)?,
            self.values(frame).forward(&v.y)?,
        )?;
        let mut gated = self.gate(&out, &q.y, frame)?;
        if let Some(rows) = kept {
            match &mut gated {
                Some(gated) => *gated = gated.pick(rows)?,
                None => out = out.pick(rows)?,
            }
        }
        let o = self.output.forward(gated.as_ref().unwrap_or(&out))?;
        let low = [q.z, k.z, v.z, o.z];
        Ok((o.y, Saved { q: q.y, k: k.y, v: v.y, attention, out, low }))
    }

    /// The gated output, where there is a gate.
    fn gate(&self, out: &Mat, q: &Mat, frame: Frame<'_>) -> Result<Option<Mat>, ModelError> {
        if !self.gated {
            return Ok(None);
        }
        let mut gated = out.copy()?;
        sigmoid_gate(&mut gated, q, frame.decoder.config().head_dim)?;
        Ok(Some(gated))
    }

    /// The gradient of the normed input (where `normed` wants it), given the output's at `kept`.
    pub(super) fn backward(
        &self,
        frame: Frame<'_>,
        saved: Saved,
        dy: &Mat,
        kept: Option<&[u32]>,
        normed: Normed<'_>,
        sink: &mut Sink<'_>,
    ) -> Result<Option<Mat>, ModelError> {
        let Saved { mut q, mut k, mut v, attention, out, low } = saved;
        let [zq, zk, zv, zo] = low;
        let (c, base) = (frame.decoder.config(), sink.base());
        let (mut dout, dz) = self.output.input(dy)?;
        let mut gated = self.gate(&out, &q, frame)?;
        if let (Some(gated), Some(rows)) = (&mut gated, kept) {
            *gated = gated.pick(rows)?;
        }
        self.output.weights(gated.as_ref().unwrap_or(&out), zo, dy, dz, sink)?;
        drop(gated);
        if let Some(rows) = kept {
            dout = dout.spread(rows, q.rows)?;
        }
        if self.gated {
            sigmoid_gate_backward(&out, &mut q, &mut dout, c.head_dim)?;
        }
        drop(out);
        let dout = to_heads(&dout, c.kv_heads, c.head_dim)?;
        let heads = self.attention(frame).backward(attention, dout)?;
        let dnorm = self.queries(frame).backward(&mut q, &heads.dq, base)?;
        sink.vector(format!("{}.q_norm.weight", self.path), dnorm);
        let dnorm = self.keys(frame).backward(&mut k, &heads.dk, base)?;
        sink.vector(format!("{}.k_norm.weight", self.path), dnorm);
        self.values(frame).backward(&mut v, &heads.dv, false)?;
        drop(heads);
        let [pq, pk, pv] = &self.inputs;
        let mut inputs = Inputs::new(normed);
        inputs.add(pq, zq, &q, sink)?;
        inputs.add(pk, zk, &k, sink)?;
        inputs.add(pv, zv, &v, sink)?;
        Ok(inputs.finish())
    }
}
