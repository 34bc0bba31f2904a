//! The gated DeltaNet of a layer, forward and backward, by hand: the same mathematics as the graph of
//! [`crate::model::Decoder`]. Heads of runs of rows are independent, so they are what is spread over
//! threads; continuations go on from the prefix's memory and give its gradient back, in order.

use rayon::prelude::*;

use super::{
    convolution::{Convolution, transposed},
    delta::{Backward, Forward, Head, HeadGradients},
    gates::{gated_norm, gated_norm_backward},
    layer::{Frame, Normed},
    linear::{Inputs, Projection, Sink, host},
    mat::Mat,
};
use crate::{
    model::{Adapter, Decoder, Hybrid, ModelError, weights},
    simd::vectorized,
};

/// One layer's weights.
pub(super) struct DeltaNet {
    path: String,
    shape: Hybrid,
    eps: f32,
    /// Queries, keys and values; the output's gate; how much is written; how fast is forgotten.
    inputs: [Projection; 4],
    output: Projection,
    /// `[taps, channels]`.
    convolution: Vec<f32>,
    /// −exp(A), the factors of the decays' logarithms.
    rates: Vec<f32>,
    dt_bias: Vec<f32>,
    norm: Vec<f32>,
}

/// What the backward pass needs of it.
pub(super) struct Saved {
    u: Mat,
    z: Mat,
    b: Mat,
    a: Mat,
    out: Mat,
    /// Inputs times A, by slot.
    low: [Option<Mat>; 5],
    /// Each value head's memory after the prefix; none without one.
    memories: Vec<Vec<f32>>,
}

/// What each row writes and forgets, `[value_heads][rows]`.
struct Gates {
    beta: Vec<f32>,
    g: Vec<f32>,
}

/// A run of rows.
type Run = (usize, usize);

impl DeltaNet {
    pub(super) fn new(
        decoder: &Decoder,
        adapter: Option<&Adapter>,
        index: usize,
        net: &weights::DeltaNet,
    ) -> Result<Self, ModelError> {
        let projection = |slot| Projection::new(decoder, adapter, index, slot);
        let a_log = host(net.a_log.val())?;
        Ok(Self {
            path: format!("{}.layers.{index}.linear_attn", decoder.config().prefix()),
            shape: net.shape.clone(),
            eps: decoder.config().norm_eps as f32,
            inputs: [projection(0)?, projection(1)?, projection(2)?, projection(3)?],
            output: projection(4)?,
            convolution: transposed(&host(net.conv1d.weight.val())?, net.shape.kernel),
            rates: a_log.iter().map(|a| -a.exp()).collect(),
            dt_bias: host(net.dt_bias.val())?,
            norm: host(net.norm.weight.val())?,
        })
    }

    /// The output at the rows of `kept` (all where absent), given the normed input of all.
    pub(super) fn forward(
        &self,
        frame: Frame<'_>,
        h: Mat,
        kept: Option<&[u32]>,
    ) -> Result<(Mat, Saved), ModelError> {
        let [qkv, z, b, a] = &self.inputs;
        let (u, z) = (qkv.forward(&h)?, z.forward(&h)?);
        let (b, a) = (b.forward(&h)?, a.forward(&h)?);
        drop(h);
        let gates = self.gates(&b.y, &a.y)?;
        let mixed = self.convolution(frame).forward(&u.y)?;
        let (out, memories) = self.recur(frame, &mixed, &gates)?;
        drop(mixed);
        let mut gated = gated_norm(&out, &z.y, &self.norm, self.eps)?;
        if let Some(rows) = kept {
            gated = gated.pick(rows)?;
        }
        let o = self.output.forward(&gated)?;
        let low = [u.z, z.z, b.z, a.z, o.z];
        let saved = Saved { u: u.y, z: z.y, b: b.y, a: a.y, out, low, memories };
        Ok((o.y, saved))
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
        let Saved { u, mut z, b, a, mut out, low, memories } = saved;
        let [zu, zz, zb, za, zo] = low;
        let base = sink.base();
        let (mut dgated, dlow) = self.output.input(dy)?;
        let mut gated = gated_norm(&out, &z, &self.norm, self.eps)?;
        if let Some(rows) = kept {
            gated = gated.pick(rows)?;
            dgated = dgated.spread(rows, out.rows)?;
        }
        self.output.weights(&gated, zo, dy, dlow, sink)?;
        drop(gated);
        let dnorm = gated_norm_backward(&mut out, &mut z, &self.norm, self.eps, &dgated, base)?;
        sink.vector(format!("{}.norm.weight", self.path), dnorm);
        drop(dgated);
        let gates = self.gates(&b, &a)?;
        let convolution = self.convolution(frame);
        let mixed = convolution.forward(&u)?;
        let (dmixed, dgates) = self.recur_backward(frame, &mixed, &gates, &memories, &out)?;
        drop((mixed, out));
        let (du, dweight) = convolution.backward(&u, dmixed, base)?;
        drop(u);
        let dweight = dweight.map(|dweight| transposed(&dweight, self.shape.channels()));
        sink.vector(format!("{}.conv1d.weight", self.path), dweight);
        let (db, da) = self.gates_backward(&gates, dgates, &a, sink)?;
        let [pu, pz, pb, pa] = &self.inputs;
        let mut inputs = Inputs::new(normed);
        inputs.add(pu, zu, &du, sink)?;
        drop(du);
        inputs.add(pz, zz, &z, sink)?;
        inputs.add(pb, zb, &db, sink)?;
        inputs.add(pa, za, &da, sink)?;
        Ok(inputs.finish())
    }

    fn convolution<'a>(&'a self, frame: Frame<'a>) -> Convolution<'a> {
        Convolution::new(frame.layout, &self.convolution, self.shape.kernel)
    }

    fn gates(&self, b: &Mat, a: &Mat) -> Result<Gates, ModelError> {
        let heads = self.shape.value_heads;
        let mut gates = Gates { beta: vec![0.0; heads * b.rows], g: vec![0.0; heads * b.rows] };
        let (b, a) = (b.read()?, a.read()?);
        let each = gates.beta.chunks_exact_mut(b.len() / heads);
        let each = each.zip(gates.g.chunks_exact_mut(b.len() / heads)).enumerate();
        for (head, (beta, g)) in each {
            let (rate, bias) = (self.rates[head], self.dt_bias[head]);
            let rows = b[head..].iter().step_by(heads).zip(a[head..].iter().step_by(heads));
            for ((b, a), (beta, g)) in rows.zip(beta.iter_mut().zip(g)) {
                *beta = sigmoid(*b);
                *g = rate * softplus(a + bias);
            }
        }
        Ok(gates)
    }

    /// Gradients of the projections `b` and `a`.
    fn gates_backward(
        &self,
        gates: &Gates,
        dgates: Gates,
        a: &Mat,
        sink: &mut Sink<'_>,
    ) -> Result<(Mat, Mat), ModelError> {
        let (heads, rows) = (self.shape.value_heads, a.rows);
        let (mut db, mut da) = (Mat::zeros(rows, heads), Mat::zeros(rows, heads));
        let (mut dbias, mut dlog) = (vec![0.0; heads], vec![0.0; heads]);
        let (to_b, to_a, a) = (db.write()?, da.write()?, a.read()?);
        for head in 0..heads {
            let (rate, bias) = (self.rates[head], self.dt_bias[head]);
            let (mut bias_sum, mut log_sum) = (0.0f64, 0.0f64);
            for row in 0..rows {
                let (at, place) = (head * rows + row, row * heads + head);
                let beta = gates.beta[at];
                to_b[place] = dgates.beta[at] * beta * (1.0 - beta);
                to_a[place] = dgates.g[at] * rate * sigmoid(a[place] + bias);
                bias_sum += f64::from(to_a[place]);
                log_sum += f64::from(dgates.g[at] * gates.g[at]);
            }
            (dbias[head], dlog[head]) = (bias_sum as f32, log_sum as f32);
        }
        let base = sink.base();
        sink.vector(format!("{}.dt_bias", self.path), base.then_some(dbias));
        sink.vector(format!("{}.A_log", self.path), base.then_some(dlog));
        Ok((db, da))
    }

    fn head<'a>(
        &self,
        mixed: &'a Mat,
        gates: &'a Gates,
        run: Run,
        head: usize,
    ) -> Result<Head<'a>, ModelError> {
        let Hybrid { key_heads, value_heads, key_dim, value_dim, .. } = self.shape;
        let (start, rows) = run;
        let (stride, keys) = (self.shape.channels(), self.shape.keys());
        let key_head = head / (value_heads / key_heads);
        let values = &mixed.read()?[start * stride..];
        let own = head * mixed.rows + start..head * mixed.rows + start + rows;
        Ok(Head {
            q: &values[key_head * key_dim..],
            k: &values[keys + key_head * key_dim..],
            v: &values[2 * keys + head * value_dim..],
            stride,
            rows,
            beta: &gates.beta[own.clone()],
            g: &gates.g[own],
            key_dim,
            value_dim,
        })
    }

    /// The rule's outputs `[rows, values]`, and each head's memory after the prefix.
    fn recur(
        &self,
        frame: Frame<'_>,
        mixed: &Mat,
        gates: &Gates,
    ) -> Result<(Mat, Vec<Vec<f32>>), ModelError> {
        let (heads, dim) = (self.shape.value_heads, self.shape.value_dim);
        let width = self.shape.values();
        let mut out = Mat::zeros(mixed.rows, width);
        let mut place = |(start, _): Run, head: usize, part: Vec<f32>| -> Result<(), ModelError> {
            let rows = out.write()?[start * width..].chunks_exact_mut(width);
            for (to, from) in rows.zip(part.chunks_exact(dim)) {
                to[head * dim..][..dim].copy_from_slice(from);
            }
            Ok(())
        };
        let run = |run: Run, head: usize, memory: Option<&[f32]>| {
            Ok(vectorized(Forward { head: self.head(mixed, gates, run, head)?, memory }))
        };
        let mut memories = Vec::new();
        let prefix = (0, frame.layout.prefix);
        if prefix.1 > 0 {
            let parts: Vec<_> = (0..heads)
                .into_par_iter()
                .map(|head| run(prefix, head, None))
                .collect::<Result<_, ModelError>>()?;
            for (head, (part, memory)) in parts.into_iter().enumerate() {
                place(prefix, head, part)?;
                memories.push(memory);
            }
        }
        for group in frame.layout.rows.chunks(ROWS) {
            let tasks: Vec<(Run, usize)> = tasks(group, heads);
            let parts: Vec<_> = (tasks.par_iter())
                .map(|&(rows, head)| run(rows, head, memories.get(head).map(Vec::as_slice)))
                .collect::<Result<_, ModelError>>()?;
            for ((rows, head), (part, _)) in tasks.into_iter().zip(parts) {
                place(rows, head, part)?;
            }
        }
        Ok((out, memories))
    }

    /// Gradients of the rule's inputs, given that of its outputs.
    fn recur_backward(
        &self,
        frame: Frame<'_>,
        mixed: &Mat,
        gates: &Gates,
        memories: &[Vec<f32>],
        dout: &Mat,
    ) -> Result<(Mat, Gates), ModelError> {
        let Hybrid { key_heads, value_heads, key_dim, value_dim, .. } = self.shape;
        let (channels, keys, width) = (self.shape.channels(), self.shape.keys(), dout.cols);
        let total = mixed.rows;
        let mut dmixed = Mat::zeros(total, channels);
        let mut dgates =
            Gates { beta: vec![0.0; value_heads * total], g: vec![0.0; value_heads * total] };
        let mut place = |(start, rows): Run, head: usize, part: &HeadGradients| {
            let key_head = head / (value_heads / key_heads);
            let own = dmixed.write()?[start * channels..].chunks_exact_mut(channels);
            for (row, to) in own.take(rows).enumerate() {
                for (first, dim, from) in [
                    (key_head * key_dim, key_dim, &part.dq),
                    (keys + key_head * key_dim, key_dim, &part.dk),
                    (2 * keys + head * value_dim, value_dim, &part.dv),
                ] {
                    let from = &from[row * dim..][..dim];
                    to[first..][..dim].iter_mut().zip(from).for_each(|(to, from)| *to += from);
                }
            }
            let at = head * total + start;
            dgates.beta[at..at + rows].copy_from_slice(&part.dbeta);
            dgates.g[at..at + rows].copy_from_slice(&part.dg);
            Ok::<_, ModelError>(())
        };
        let dvalues = dout.read()?;
        let run = |run: Run, head: usize, memory: Option<&[f32]>, dmemory: Option<&[f32]>| {
            let dout = &dvalues[run.0 * width + head * value_dim..];
            let head = self.head(mixed, gates, run, head)?;
            Ok(vectorized(Backward { head, memory, dout, dout_stride: width, dmemory }))
        };
        let mut dmemories: Vec<Vec<f32>> = memories.iter().map(|m| vec![0.0; m.len()]).collect();
        for group in frame.layout.rows.chunks(ROWS) {
            let tasks = tasks(group, value_heads);
            let parts: Vec<HeadGradients> = (tasks.par_iter())
                .map(|&(rows, head)| run(rows, head, memories.get(head).map(Vec::as_slice), None))
                .collect::<Result<_, ModelError>>()?;
            for ((rows, head), part) in tasks.into_iter().zip(parts) {
                place(rows, head, &part)?;
                if let Some(sum) = dmemories.get_mut(head) {
                    sum.iter_mut().zip(&part.dmemory).for_each(|(sum, part)| *sum += part);
                }
            }
        }
        let prefix = (0, frame.layout.prefix);
        let parts: Vec<HeadGradients> = (dmemories.par_iter().enumerate())
            .map(|(head, dmemory)| run(prefix, head, None, Some(dmemory)))
            .collect::<Result<_, ModelError>>()?;
        for (head, part) in parts.iter().enumerate() {
            place(prefix, head, part)?;
        }
        Ok((dmixed, dgates))
    }
}

/// Continuations whose results exist beside each other before they are put where they belong.
const ROWS: usize = 4;

/// Every head of each run.
fn tasks(runs: &[Run], heads: usize) -> Vec<(Run, usize)> {
    runs.iter().flat_map(|&run| (0..heads).map(move |head| (run, head))).collect()
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// ln(1 + eˣ) without overflow.
fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}
