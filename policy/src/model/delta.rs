//! The gated delta rule (<https://arxiv.org/abs/2412.06464>) behind its causal convolution, over a
//! batch of sequences that go on from kept states: one row at a time for decoding, and in chunks,
//! where the rows of a chunk are solved together, for everything longer. Both give the same.
//! Everything beyond the convolution is in f32.

use burn::tensor::{DType, Device, Tensor, TensorData, activation};

use super::{
    decoder::MASKED,
    hybrid::Hybrid,
    ops::{from_f32, to_f32},
};

#[cfg(test)]
mod tests;

/// Rows that are solved together.
pub(crate) const CHUNK: usize = 64;
/// Steps in 1 of the logarithms of decays that sums keep exactly.
const GRID: f32 = 1024.0;
/// Keeps the norm of a key from being zero.
const NORM_EPS: f64 = 1e-6;

/// What the rule is fed, packed `[rows, …]`.
pub(crate) struct DeltaRows {
    /// `[rows, channels]` before the convolution, in the model's type.
    pub(crate) u: Tensor<2>,
    /// `[rows, value_heads]`, f32: how much is written.
    pub(crate) beta: Tensor<2>,
    /// `[rows, value_heads]`, f32: the logarithm of the decay.
    pub(crate) g: Tensor<2>,
}

/// The same as a batch `[batch, len, …]`. Padding at the right has `beta` and `g` zero.
pub(crate) struct DeltaBatch {
    pub(crate) u: Tensor<3>,
    pub(crate) beta: Tensor<3>,
    pub(crate) g: Tensor<3>,
}

/// What a sequence's past leaves behind. The default is that of no past.
#[derive(Clone, Debug, Default)]
pub(crate) struct DeltaState {
    /// The convolution's last inputs `[batch, kernel - 1, channels]`.
    pub(crate) recent: Option<Tensor<3>>,
    /// `[batch, value_heads, key_dim, value_dim]`, f32.
    pub(crate) memory: Option<Tensor<4>>,
}

impl DeltaState {
    /// The state of one sequence as that of `batch` sequences.
    pub(crate) fn repeat(self, batch: usize) -> Self {
        Self {
            recent: self.recent.map(|recent| recent.repeat_dim(0, batch)),
            memory: self.memory.map(|memory| memory.repeat_dim(0, batch)),
        }
    }

    /// The state of `batch` sequences as one state each.
    pub(crate) fn unstack(self, batch: usize) -> Vec<Self> {
        if batch == 1 {
            return vec![self];
        }
        let part = |i: usize| Self {
            recent: self.recent.clone().map(|recent| recent.narrow(0, i, 1)),
            memory: self.memory.clone().map(|memory| memory.narrow(0, i, 1)),
        };
        (0..batch).map(part).collect()
    }
}

/// The rule of one layer.
pub(crate) struct DeltaRule<'a> {
    pub(crate) shape: &'a Hybrid,
    /// `[channels, 1, kernel]`.
    pub(crate) convolution: Tensor<3>,
}

impl DeltaRule<'_> {
    /// Outputs `[batch, len, value_heads, value_dim]` in f32, and the state after the batch's last
    /// rows.
    pub(crate) fn run(&self, batch: DeltaBatch, state: DeltaState) -> (Tensor<4>, DeltaState) {
        let DeltaBatch { u, beta, g } = batch;
        let Hybrid { key_heads, value_heads, key_dim, value_dim, .. } = *self.shape;
        let [rows, len, _] = u.dims();
        let (mixed, recent) = self.convolve(u, state.recent);
        let mixed = to_f32(mixed);
        let keys = self.shape.keys();
        let many = rows * value_heads;
        let repeat = value_heads / key_heads;
        let heads = |start: usize| {
            let part = mixed.clone().slice([0..rows, 0..len, start..start + keys]);
            let x = part.reshape([rows, len, key_heads, key_dim]);
            let norm = x.clone().square().sum_dim(3).add_scalar(NORM_EPS).sqrt();
            let x = x.div(norm).reshape([rows, len, key_heads, 1, key_dim]);
            x.repeat_dim(3, repeat)
                .reshape([rows, len, value_heads, key_dim])
                .swap_dims(1, 2)
                .reshape([many, len, key_dim])
        };
        let q = heads(0).mul_scalar(1.0 / (key_dim as f64).sqrt());
        let k = heads(keys);
        let v = mixed
            .clone()
            .slice([0..rows, 0..len, 2 * keys..2 * keys + self.shape.values()])
            .reshape([rows, len, value_heads, value_dim])
            .swap_dims(1, 2)
            .reshape([many, len, value_dim]);
        let gates = |x: Tensor<3>| x.swap_dims(1, 2).reshape([many, len, 1]);
        let memory = state.memory.map(|memory| memory.reshape([many, key_dim, value_dim]));
        let parts = Heads { q, k, v, beta: gates(beta), g: gates(g) };
        let (out, memory) = if len == 1 { parts.step(memory) } else { parts.chunks(memory) };
        let out = out.reshape([rows, value_heads, len, value_dim]).swap_dims(1, 2);
        let memory = memory.reshape([rows, value_heads, key_dim, value_dim]);
        (out, DeltaState { recent: Some(recent), memory: Some(memory) })
    }

    /// The states of single sequences as that of a batch.
    pub(crate) fn stack(
        &self,
        states: Vec<Option<DeltaState>>,
        device: &Device,
        dtype: DType,
    ) -> DeltaState {
        if states.iter().all(Option::is_none) {
            return DeltaState::default();
        }
        let Hybrid { kernel, value_heads, key_dim, value_dim, .. } = *self.shape;
        let (mut recent, mut memory) = (Vec::new(), Vec::new());
        for state in states.into_iter().map(Option::unwrap_or_default) {
            recent.push(state.recent.unwrap_or_else(|| {
                Tensor::zeros([1, kernel - 1, self.shape.channels()], (device, dtype))
            }));
            memory.push(state.memory.unwrap_or_else(|| {
                Tensor::zeros([1, value_heads, key_dim, value_dim], (device, DType::F32))
            }));
        }
        DeltaState { recent: Some(Tensor::cat(recent, 0)), memory: Some(Tensor::cat(memory, 0)) }
    }

    /// The activated convolution, and its last inputs.
    fn convolve(&self, u: Tensor<3>, recent: Option<Tensor<3>>) -> (Tensor<3>, Tensor<3>) {
        let [rows, len, channels] = u.dims();
        let taps = self.shape.kernel;
        let (dtype, device) = (u.dtype(), u.device());
        let recent =
            recent.unwrap_or_else(|| Tensor::zeros([rows, taps - 1, channels], (&device, dtype)));
        let u = Tensor::cat(vec![recent, u], 1);
        let wide = to_f32(u.clone());
        let weight = to_f32(self.convolution.clone());
        let tap = |j: usize| {
            let weight = weight.clone().slice([0..channels, 0..1, j..j + 1]);
            let part = wide.clone().slice([0..rows, j..j + len, 0..channels]);
            part.mul(weight.reshape([1, 1, channels]))
        };
        let sum = (1..taps).fold(tap(0), |sum, j| sum.add(tap(j)));
        let active = activation::silu(to_f32(from_f32(sum, dtype)));
        (from_f32(active, dtype), u.slice([0..rows, len..len + taps - 1, 0..channels]))
    }
}

/// All heads of a batch, one after another: `q` and `k` `[heads, len, key_dim]`, normalised, `v`
/// `[heads, len, value_dim]`, `beta` and `g` `[heads, len, 1]`.
#[derive(Clone)]
pub(crate) struct Heads {
    pub(crate) q: Tensor<3>,
    pub(crate) k: Tensor<3>,
    pub(crate) v: Tensor<3>,
    pub(crate) beta: Tensor<3>,
    pub(crate) g: Tensor<3>,
}

impl Heads {
    /// One row: decays the memory `[heads, key_dim, value_dim]`, moves what it holds under the key
    /// towards the value, reads it under the query.
    pub(crate) fn step(self, memory: Option<Tensor<3>>) -> (Tensor<3>, Tensor<3>) {
        let Self { q, k, v, beta, g } = self;
        let (change, decayed) = match memory {
            None => (v.mul(beta), None),
            Some(memory) => {
                let memory = memory.mul(g.exp());
                (v.sub(k.clone().matmul(memory.clone())).mul(beta), Some(memory))
            }
        };
        let written = k.swap_dims(1, 2).matmul(change);
        let memory = match decayed {
            None => written,
            Some(memory) => memory.add(written),
        };
        (q.matmul(memory.clone()), memory)
    }

    /// Any number of rows, [`CHUNK`] at a time.
    pub(crate) fn chunks(self, memory: Option<Tensor<3>>) -> (Tensor<3>, Tensor<3>) {
        let [heads, len, key_dim] = self.q.dims();
        let value_dim = self.v.dims()[2];
        let size = len.min(CHUNK);
        let count = len.div_ceil(size);
        let device = self.q.device();
        let shaped = |x: Tensor<3>| {
            let width = x.dims()[2];
            let x = match count * size - len {
                0 => x,
                more => Tensor::cat(vec![x, Tensor::zeros([heads, more, width], &device)], 1),
            };
            x.reshape([heads, count, size, width])
        };
        let (q, k, v) = (shaped(self.q), shaped(self.k), shaped(self.v));
        let (beta, g) = (shaped(self.beta), shaped(self.g));
        let masks = Masks { size, device: &device };
        // Logarithms of the decay from the start of the chunk, and between any two of its rows. Those
        // are small differences of large sums: summed as multiples of 2⁻¹⁰, which is exact, and rests.
        let coarse = g.clone().detach().mul_scalar(GRID).round().div_scalar(GRID);
        let sums = masks.make(|i, j| if j <= i { 1.0 } else { 0.0 });
        let totals = [sums.clone().matmul(coarse.clone()), sums.matmul(g.sub(coarse))];
        let between = |from: &dyn Fn(&Tensor<4>) -> Tensor<4>,
                       to: &dyn Fn(&Tensor<4>) -> Tensor<4>| {
            let [coarse, rest] = totals.each_ref().map(|total| to(total).sub(from(total)));
            coarse.add(rest)
        };
        let rows = |total: &Tensor<4>| total.clone();
        let columns = |total: &Tensor<4>| total.clone().swap_dims(2, 3);
        let last = |total: &Tensor<4>| total.clone().narrow(2, size - 1, 1);
        let later = masks.make(|i, j| if j <= i { 0.0 } else { MASKED });
        let decay = between(&columns, &rows).add(later).exp();
        let transposed = k.clone().swap_dims(2, 3);
        let overlap = k.clone().matmul(transposed.clone()).mul(decay.clone()).mul(beta.clone());
        let solve = masks.inverse(&overlap);
        let since = totals[0].clone().add(totals[1].clone()).exp();
        let u = solve.clone().matmul(v.mul(beta.clone()));
        let w = solve.matmul(k.clone().mul(beta).mul(since.clone()));
        let weights = q.clone().matmul(transposed).mul(decay);
        let reads = q.mul(since.clone());
        let writes = k.mul(between(&rows, &last).exp()).swap_dims(2, 3);
        let at = |x: &Tensor<4>, chunk: usize| {
            let [_, _, rows, width] = x.dims();
            x.clone()
                .slice([0..heads, chunk..chunk + 1, 0..rows, 0..width])
                .reshape([heads, rows, width])
        };
        let mut memory = memory;
        let mut out = Vec::with_capacity(count);
        for chunk in 0..count {
            let mut change = at(&u, chunk);
            if let Some(memory) = &memory {
                change = change.sub(at(&w, chunk).matmul(memory.clone()));
            }
            let mut read = at(&weights, chunk).matmul(change.clone());
            let mut written = at(&writes, chunk).matmul(change);
            if let Some(memory) = memory {
                let kept = at(&since, chunk).slice([0..heads, size - 1..size, 0..1]);
                read = read.add(at(&reads, chunk).matmul(memory.clone()));
                written = written.add(memory.mul(kept));
            }
            out.push(read);
            memory = Some(written);
        }
        let out = if count == 1 { out.remove(0) } else { Tensor::cat(out, 1) };
        let memory = memory.unwrap_or_else(|| Tensor::zeros([heads, key_dim, value_dim], &device));
        (out.slice([0..heads, 0..len, 0..value_dim]), memory)
    }
}

/// Constant matrices over the rows of a chunk.
struct Masks<'a> {
    size: usize,
    device: &'a Device,
}

impl Masks<'_> {
    fn make(&self, value: impl Fn(usize, usize) -> f32) -> Tensor<4> {
        let size = self.size;
        let values: Vec<f32> = (0..size * size).map(|i| value(i / size, i % size)).collect();
        Tensor::from_data(TensorData::new(values, [1, 1, size, size]), self.device)
    }

    /// `(I + N)⁻¹`, where N is what lies strictly below the diagonal: blocks of 2, 4, 8, … rows, each
    /// from the inverses of its halves, `[[A, 0], [B, D]]⁻¹ = [[A⁻¹, 0], [−D⁻¹ B A⁻¹, D⁻¹]]`.
    fn inverse(&self, n: &Tensor<4>) -> Tensor<4> {
        let below = |half: usize| {
            let block = 2 * half;
            self.make(move |i, j| {
                let joined = i / block == j / block && i % block >= half && j % block < half;
                if joined { 1.0 } else { 0.0 }
            })
        };
        let identity = self.make(|i, j| if i == j { 1.0 } else { 0.0 });
        let mut inverse = identity.sub(n.clone().mul(below(1)));
        let mut half = 2;
        while half < self.size {
            let joining = inverse.clone().matmul(n.clone().mul(below(half)));
            inverse = inverse.clone().sub(joining.matmul(inverse));
            half *= 2;
        }
        inverse
    }
}
