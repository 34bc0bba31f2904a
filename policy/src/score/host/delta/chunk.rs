//! One chunk of rows of the gated delta rule: the equations that the rows share, what they read and
//! write, and the gradients of all of it.

use super::{
    super::{
        gemm::{Packed, Rows, add_product},
        math::{dot, exp},
    },
    Head,
};
use crate::simd::MulAdd;

/// Rows that are solved together.
pub(super) const CHUNK: usize = 64;
/// Keeps the norm of a key from being zero.
const NORM_EPS: f32 = 1e-6;

/// Where the gradients of a chunk's rows go.
pub(super) struct ChunkGradients<'a> {
    pub(super) dq: &'a mut [f32],
    pub(super) dk: &'a mut [f32],
    pub(super) dv: &'a mut [f32],
    pub(super) dbeta: &'a mut [f32],
    pub(super) dg: &'a mut [f32],
}

/// A chunk's rows and what follows from them alone. Matrices are row-major.
pub(super) struct Chunk<'a> {
    pub(super) rows: usize,
    key_dim: usize,
    value_dim: usize,
    /// Normalised, the queries also scaled.
    q: Vec<f32>,
    k: Vec<f32>,
    q_inverse: Vec<f32>,
    k_inverse: Vec<f32>,
    v: Vec<f32>,
    beta: &'a [f32],
    /// exp(G), and exp(G of the last row − G).
    since: Vec<f32>,
    until: Vec<f32>,
    /// D, zero above the diagonal.
    decay: Vec<f32>,
    keys: Packed,
    /// `k[i]·k[j]`.
    overlap: Vec<f32>,
}

fn product(a: &[f32], rows: usize, b: &Packed) -> Vec<f32> {
    let mut y = vec![0.0; rows * b.columns()];
    add(a, rows, b, &mut y);
    y
}

fn add(a: &[f32], rows: usize, b: &Packed, y: &mut [f32]) {
    let stride = a.len() / rows.max(1);
    add_product(Rows { values: a, stride, rows }, b, y, b.columns());
}

fn transpose(x: &[f32], rows: usize) -> Vec<f32> {
    let cols = x.len() / rows.max(1);
    let mut y = vec![0.0; x.len()];
    for (i, row) in x.chunks_exact(cols.max(1)).enumerate() {
        for (to, from) in y.iter_mut().skip(i).step_by(rows).zip(row) {
            *to = *from;
        }
    }
    y
}

/// Each row times its factor.
#[inline(always)]
fn scaled(x: &[f32], factors: &[f32]) -> Vec<f32> {
    let cols = x.len() / factors.len().max(1);
    let mut y = x.to_vec();
    for (row, factor) in y.chunks_exact_mut(cols.max(1)).zip(factors) {
        row.iter_mut().for_each(|y| *y *= factor);
    }
    y
}

#[inline(always)]
fn normalised<M: MulAdd>(
    x: &[f32],
    stride: usize,
    rows: usize,
    dim: usize,
    scale: f32,
) -> (Vec<f32>, Vec<f32>) {
    let mut y = vec![0.0; rows * dim];
    let mut inverses = vec![0.0; rows];
    for (row, (y, inverse)) in y.chunks_exact_mut(dim.max(1)).zip(&mut inverses).enumerate() {
        let x = &x[row * stride..][..dim];
        *inverse = 1.0 / (dot::<M>(x, x) + NORM_EPS).sqrt();
        y.iter_mut().zip(x).for_each(|(y, x)| *y = x * *inverse * scale);
    }
    (y, inverses)
}

impl<'a> Chunk<'a> {
    #[inline(always)]
    pub(super) fn load<M: MulAdd>(head: Head<'a>, first: usize) -> Self {
        let Head { stride, key_dim, value_dim, .. } = head;
        let rows = CHUNK.min(head.rows - first);
        let (q, q_inverse) =
            normalised::<M>(&head.q[first * stride..], stride, rows, key_dim, query_scale(key_dim));
        let (k, k_inverse) = normalised::<M>(&head.k[first * stride..], stride, rows, key_dim, 1.0);
        let mut v = vec![0.0; rows * value_dim];
        for (row, v) in v.chunks_exact_mut(value_dim.max(1)).enumerate() {
            v.copy_from_slice(&head.v[(first + row) * stride..][..value_dim]);
        }
        // Differences of these sums can be small beside them.
        let mut total = 0.0f64;
        let sums: Vec<f64> = head.g[first..first + rows]
            .iter()
            .map(|&g| {
                total += f64::from(g);
                total
            })
            .collect();
        let mut decay = vec![0.0; rows * rows];
        for (i, (row, to)) in decay.chunks_exact_mut(rows.max(1)).zip(&sums).enumerate() {
            for (decay, from) in row[..=i].iter_mut().zip(&sums) {
                *decay = exp::<M>((to - from) as f32);
            }
        }
        let since = sums.iter().map(|&sum| exp::<M>(sum as f32)).collect();
        let until = sums.iter().map(|&sum| exp::<M>((total - sum) as f32)).collect();
        let keys = Packed::transposed(&k, key_dim, key_dim, rows);
        let overlap = product(&k, rows, &keys);
        let beta = &head.beta[first..first + rows];
        Self {
            rows,
            key_dim,
            value_dim,
            q,
            k,
            q_inverse,
            k_inverse,
            v,
            beta,
            since,
            until,
            decay,
            keys,
            overlap,
        }
    }

    fn memory(&self, memory: &[f32]) -> Packed {
        Packed::plain(memory, self.value_dim, self.key_dim, self.value_dim)
    }

    /// What multiplies earlier rows' changes in the equation of each row.
    #[inline(always)]
    fn lower(&self) -> Vec<f32> {
        let mut lower = vec![0.0; self.rows * self.rows];
        for (i, row) in lower.chunks_exact_mut(self.rows).enumerate() {
            let at = i * self.rows;
            let both = self.overlap[at..].iter().zip(&self.decay[at..]);
            for (lower, (overlap, decay)) in row[..i].iter_mut().zip(both) {
                *lower = self.beta[i] * overlap * decay;
            }
        }
        lower
    }

    /// What each row writes under its key, `[rows, value_dim]`.
    #[inline(always)]
    pub(super) fn change<M: MulAdd>(&self, memory: Option<&[f32]>) -> Vec<f32> {
        let held = memory.map(|memory| product(&self.k, self.rows, &self.memory(memory)));
        let mut change = self.wanted(held.as_deref());
        let lower = self.lower();
        let width = self.value_dim;
        for i in 1..self.rows {
            let (done, rest) = change.split_at_mut(i * width);
            subtract::<M>(&mut rest[..width], done, lower[i * self.rows..].iter());
        }
        change
    }

    /// The right-hand sides of the equations, given `k S`.
    #[inline(always)]
    fn wanted(&self, held: Option<&[f32]>) -> Vec<f32> {
        let mut wanted = scaled(&self.v, self.beta);
        if let Some(held) = held {
            let rows = wanted.chunks_exact_mut(self.value_dim);
            for (i, (wanted, held)) in rows.zip(held.chunks_exact(self.value_dim)).enumerate() {
                let factor = self.beta[i] * self.since[i];
                wanted.iter_mut().zip(held).for_each(|(w, held)| *w -= factor * held);
            }
        }
        wanted
    }

    /// `q[i]·k[j]`, without the decay.
    fn scores(&self) -> Vec<f32> {
        product(&self.q, self.rows, &self.keys)
    }

    #[inline(always)]
    pub(super) fn read(&self, memory: Option<&[f32]>, change: &[f32], out: &mut [f32]) {
        if let Some(memory) = memory {
            let q = scaled(&self.q, &self.since);
            add(&q, self.rows, &self.memory(memory), out);
        }
        let mut weights = self.scores();
        weights.iter_mut().zip(&self.decay).for_each(|(weight, decay)| *weight *= decay);
        let change = Packed::plain(change, self.value_dim, self.rows, self.value_dim);
        add(&weights, self.rows, &change, out);
    }

    /// The memory after the chunk.
    #[inline(always)]
    pub(super) fn write(&self, memory: Option<&[f32]>, change: &[f32]) -> Vec<f32> {
        let kept = self.since[self.rows - 1];
        let mut after = match memory {
            None => vec![0.0; self.key_dim * self.value_dim],
            Some(memory) => memory.iter().map(|m| m * kept).collect(),
        };
        let keys = transpose(&scaled(&self.k, &self.until), self.rows);
        let change = Packed::plain(change, self.value_dim, self.rows, self.value_dim);
        add(&keys, self.key_dim, &change, &mut after);
        after
    }

    /// The gradient of the memory before the chunk, given that of the memory after it.
    #[inline(always)]
    pub(super) fn backward<M: MulAdd>(
        &self,
        memory: Option<&[f32]>,
        dout: Rows<'_>,
        dafter: Option<&[f32]>,
        to: ChunkGradients<'_>,
    ) -> Vec<f32> {
        let Self { rows, key_dim, value_dim, .. } = *self;
        let packed_memory = memory.map(|memory| self.memory(memory));
        let held = packed_memory.as_ref().map(|memory| product(&self.k, rows, memory));
        let wanted = self.wanted(held.as_deref());
        let lower = self.lower();
        let mut change = wanted.clone();
        for i in 1..rows {
            let (done, rest) = change.split_at_mut(i * value_dim);
            subtract::<M>(&mut rest[..value_dim], done, lower[i * rows..].iter());
        }
        let scores = self.scores();
        let mut dout_rows = vec![0.0; rows * value_dim];
        for (row, to) in dout_rows.chunks_exact_mut(value_dim).enumerate() {
            to.copy_from_slice(&dout.values[row * dout.stride..][..value_dim]);
        }
        let dout = dout_rows;
        let packed_dout = Packed::plain(&dout, value_dim, rows, value_dim);
        let packed_change = Packed::transposed(&change, value_dim, value_dim, rows);

        // Of the changes: what was read of them, and what they wrote.
        let mut weights = scores.clone();
        weights.iter_mut().zip(&self.decay).for_each(|(weight, decay)| *weight *= decay);
        let mut dwanted = product(&transpose(&weights, rows), rows, &packed_dout);
        let mut dsince = vec![0.0; rows];
        let mut duntil = vec![0.0; rows];
        let mut dk = vec![0.0; rows * key_dim];
        if let Some(dafter) = dafter {
            let packed = Packed::plain(dafter, value_dim, key_dim, value_dim);
            add(&scaled(&self.k, &self.until), rows, &packed, &mut dwanted);
            let packed = Packed::transposed(dafter, value_dim, value_dim, key_dim);
            add(&change, rows, &packed, &mut dk);
            for (i, dk) in dk.chunks_exact_mut(key_dim).enumerate() {
                duntil[i] = dot::<M>(&self.k[i * key_dim..][..key_dim], dk);
                dk.iter_mut().for_each(|dk| *dk *= self.until[i]);
            }
        }
        // Of the right-hand sides: the transposed equations.
        for i in (0..rows.saturating_sub(1)).rev() {
            let (rest, done) = dwanted.split_at_mut((i + 1) * value_dim);
            let factors = lower[(i + 1) * rows + i..].iter().step_by(rows);
            subtract::<M>(&mut rest[i * value_dim..], done, factors);
        }
        let dweights = product(&dout, rows, &packed_change);
        let dlower = product(&dwanted, rows, &packed_change);

        // Of gates, and of what the memory held.
        for (i, dwanted) in dwanted.chunks_exact(value_dim).enumerate() {
            let at = i * value_dim;
            let mut dbeta = dot::<M>(dwanted, &self.v[at..][..value_dim]);
            if let Some(held) = &held {
                let share = dot::<M>(dwanted, &held[at..][..value_dim]);
                dbeta -= self.since[i] * share;
                dsince[i] -= self.beta[i] * share;
            }
            to.dbeta[i] = dbeta;
            let dv = to.dv[at..][..value_dim].iter_mut().zip(dwanted);
            dv.for_each(|(dv, dwanted)| *dv = self.beta[i] * dwanted);
        }

        // Of queries and keys through their products, and of the decays between rows.
        let mut dsums = vec![0.0; rows];
        let mut dscores = vec![0.0; rows * rows];
        let mut doverlap = vec![0.0; rows * rows];
        for i in 0..rows {
            for j in 0..=i {
                let at = i * rows + j;
                dscores[at] = dweights[at] * self.decay[at];
                let mut moved = dscores[at] * scores[at];
                if j < i {
                    let written = -dlower[at] * self.decay[at];
                    let shared = written * self.overlap[at];
                    to.dbeta[i] += shared;
                    moved += shared * self.beta[i];
                    // k[i]·k[j] moves with both: the transpose is its other half.
                    let doverlapped = written * self.beta[i];
                    doverlap[at] = doverlapped;
                    doverlap[j * rows + i] = doverlapped;
                }
                dsums[i] += moved;
                dsums[j] -= moved;
            }
        }
        let plain_keys = Packed::plain(&self.k, key_dim, rows, key_dim);
        let plain_queries = Packed::plain(&self.q, key_dim, rows, key_dim);
        let mut dq = product(&dscores, rows, &plain_keys);
        add(&transpose(&dscores, rows), rows, &plain_queries, &mut dk);
        add(&doverlap, rows, &plain_keys, &mut dk);

        // Through the memory.
        let mut dbefore = vec![0.0; key_dim * value_dim];
        let mut dkept = 0.0;
        if let Some(dafter) = dafter {
            let kept = self.since[rows - 1];
            dbefore.iter_mut().zip(dafter).for_each(|(to, from)| *to = kept * from);
            dkept = memory.map_or(0.0, |memory| dot::<M>(dafter, memory));
        }
        let mut dheld = scaled(&dwanted, self.beta);
        for (i, dheld) in dheld.chunks_exact_mut(value_dim).enumerate() {
            dheld.iter_mut().for_each(|d| *d *= -self.since[i]);
        }
        let read = scaled(&self.q, &self.since);
        add(&transpose(&read, rows), key_dim, &packed_dout, &mut dbefore);
        let packed_dheld = Packed::plain(&dheld, value_dim, rows, value_dim);
        add(&transpose(&self.k, rows), key_dim, &packed_dheld, &mut dbefore);
        if let (Some(memory), Some(packed)) = (memory, &packed_memory) {
            let transposed = Packed::transposed(memory, value_dim, value_dim, key_dim);
            let given = product(&self.q, rows, packed);
            for (i, given) in given.chunks_exact(value_dim).enumerate() {
                dsince[i] += dot::<M>(&dout[i * value_dim..][..value_dim], given);
            }
            add(&scaled(&dout, &self.since), rows, &transposed, &mut dq);
            add(&dheld, rows, &transposed, &mut dk);
        }

        // Of the running sums, and so of the decays' logarithms.
        for i in 0..rows {
            let moved = duntil[i] * self.until[i];
            dsums[i] += dsince[i] * self.since[i] - moved;
            dsums[rows - 1] += moved;
        }
        dsums[rows - 1] += dkept * self.since[rows - 1];
        let mut sum = 0.0;
        for (dg, dsum) in to.dg.iter_mut().zip(&dsums).rev() {
            sum += dsum;
            *dg = sum;
        }
        self.normalised_backward::<M>((&self.q, &self.q_inverse, query_scale(key_dim)), &dq, to.dq);
        self.normalised_backward::<M>((&self.k, &self.k_inverse, 1.0), &dk, to.dk);
        dbefore
    }

    /// The gradient of a normalised row's input.
    #[inline(always)]
    fn normalised_backward<M: MulAdd>(
        &self,
        (y, inverses, scale): (&[f32], &[f32], f32),
        dy: &[f32],
        dx: &mut [f32],
    ) {
        let dim = self.key_dim;
        let rows = dx.chunks_exact_mut(dim).zip(y.chunks_exact(dim)).zip(dy.chunks_exact(dim));
        for (((dx, y), dy), inverse) in rows.zip(inverses) {
            let share = dot::<M>(y, dy) / scale;
            for ((dx, y), dy) in dx.iter_mut().zip(y).zip(dy) {
                *dx = (dy * scale - y * share) * inverse;
            }
        }
    }
}

fn query_scale(key_dim: usize) -> f32 {
    1.0 / (key_dim as f32).sqrt()
}

/// `y −= Σ_j factors[j] · rows[j]`, rows in order.
#[inline(always)]
fn subtract<'a, M: MulAdd>(
    y: &mut [f32],
    rows: &[f32],
    factors: impl Iterator<Item = &'a f32> + Clone,
) {
    const TILE: usize = 64;
    let width = y.len();
    let (tiles, rest) = y.as_chunks_mut::<TILE>();
    let done = tiles.len() * TILE;
    for (t, tile) in tiles.iter_mut().enumerate() {
        let mut sum = *tile;
        for (row, factor) in rows.chunks_exact(width).zip(factors.clone()) {
            if let Some(row) = row[t * TILE..].first_chunk::<TILE>() {
                for i in 0..TILE {
                    sum[i] = M::mul_add(-factor, row[i], sum[i]);
                }
            }
        }
        *tile = sum;
    }
    for (row, factor) in rows.chunks_exact(width).zip(factors) {
        for (y, row) in rest.iter_mut().zip(&row[done..]) {
            *y = M::mul_add(-factor, *row, *y);
        }
    }
}
