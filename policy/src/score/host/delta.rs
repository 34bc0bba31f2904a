//! The gated delta rule of one head over one sequence, in chunks, and its gradients. The backward
//! pass computes the chunks again, from the memory before each, so that between the passes nothing is
//! kept but what the rule was fed. `crate::model::delta` says the same in tensors.
//!
//! In a chunk with memory `S` before it, `G` the running sum of `g`, `D[i][j] = exp(G[i] − G[j])` for
//! j ≤ i: rows change the memory by `k[j] p[j]ᵀ`, where `p` solves
//! `p[i] + β[i] Σ_{j<i} D[i][j] (k[i]·k[j]) p[j] = β[i] (v[i] − exp(G[i]) Sᵀ k[i])`; the output is
//! `exp(G[i]) Sᵀ q[i] + Σ_{j≤i} D[i][j] (q[i]·k[j]) p[j]`.

mod chunk;
#[cfg(test)]
mod tests;

use self::chunk::{CHUNK, Chunk, ChunkGradients};
use super::gemm::Rows;
use crate::simd::{MulAdd, Vectorized};

/// What one value head is fed: `rows` rows, `stride` elements from one to the next in `q`, `k`, `v`.
#[derive(Clone, Copy)]
pub(super) struct Head<'a> {
    pub(super) q: &'a [f32],
    pub(super) k: &'a [f32],
    pub(super) v: &'a [f32],
    pub(super) stride: usize,
    pub(super) rows: usize,
    /// How much each row writes, and the logarithm of its decay.
    pub(super) beta: &'a [f32],
    pub(super) g: &'a [f32],
    pub(super) key_dim: usize,
    pub(super) value_dim: usize,
}

/// Gradients of what one value head was fed.
#[derive(Debug, Default)]
pub(super) struct HeadGradients {
    /// `[rows, key_dim]`.
    pub(super) dq: Vec<f32>,
    pub(super) dk: Vec<f32>,
    /// `[rows, value_dim]`.
    pub(super) dv: Vec<f32>,
    /// `[rows]`.
    pub(super) dbeta: Vec<f32>,
    pub(super) dg: Vec<f32>,
    /// Of the memory before the first row.
    pub(super) dmemory: Vec<f32>,
}

/// Computes outputs `[rows, value_dim]`, and the memory `[key_dim, value_dim]` after the last row.
pub(super) struct Forward<'a> {
    pub(super) head: Head<'a>,
    /// The memory before the first row; zero where absent.
    pub(super) memory: Option<&'a [f32]>,
}

impl Vectorized for Forward<'_> {
    type Output = (Vec<f32>, Vec<f32>);

    #[inline(always)]
    fn run<M: MulAdd>(self) -> Self::Output {
        let mut out = vec![0.0; self.head.rows * self.head.value_dim];
        let mut memory = self.memory.map(<[f32]>::to_vec);
        for first in (0..self.head.rows).step_by(CHUNK) {
            let chunk = Chunk::load::<M>(self.head, first);
            let change = chunk.change::<M>(memory.as_deref());
            let to = &mut out[first * self.head.value_dim..][..chunk.rows * self.head.value_dim];
            chunk.read(memory.as_deref(), &change, to);
            memory = Some(chunk.write(memory.as_deref(), &change));
        }
        (out, memory.unwrap_or_default())
    }
}

/// Computes gradients, given those of the outputs and of the memory after the last row.
pub(super) struct Backward<'a> {
    pub(super) head: Head<'a>,
    pub(super) memory: Option<&'a [f32]>,
    /// `stride` elements from row to row.
    pub(super) dout: &'a [f32],
    pub(super) dout_stride: usize,
    /// Zero where absent.
    pub(super) dmemory: Option<&'a [f32]>,
}

impl Vectorized for Backward<'_> {
    type Output = HeadGradients;

    #[inline(always)]
    fn run<M: MulAdd>(self) -> HeadGradients {
        let head = self.head;
        let starts: Vec<usize> = (0..head.rows).step_by(CHUNK).collect();
        // The memory before each chunk but the first.
        let mut memories: Vec<Vec<f32>> = Vec::with_capacity(starts.len());
        for &first in starts.iter().take(starts.len().saturating_sub(1)) {
            let before = memories.last().map(Vec::as_slice).or(self.memory);
            let chunk = Chunk::load::<M>(head, first);
            let change = chunk.change::<M>(before);
            memories.push(chunk.write(before, &change));
        }
        let mut all = HeadGradients {
            dq: vec![0.0; head.rows * head.key_dim],
            dk: vec![0.0; head.rows * head.key_dim],
            dv: vec![0.0; head.rows * head.value_dim],
            dbeta: vec![0.0; head.rows],
            dg: vec![0.0; head.rows],
            dmemory: Vec::new(),
        };
        let mut after = self.dmemory.map(<[f32]>::to_vec);
        for &first in starts.iter().rev() {
            let before = memories.last().map(Vec::as_slice).or(self.memory);
            let chunk = Chunk::load::<M>(head, first);
            let rows = first..first + chunk.rows;
            let dout = Rows {
                values: &self.dout[first * self.dout_stride..],
                stride: self.dout_stride,
                rows: chunk.rows,
            };
            let keys = first * head.key_dim..(first + chunk.rows) * head.key_dim;
            let values = first * head.value_dim..(first + chunk.rows) * head.value_dim;
            let to = ChunkGradients {
                dq: &mut all.dq[keys.clone()],
                dk: &mut all.dk[keys],
                dv: &mut all.dv[values],
                dbeta: &mut all.dbeta[rows.clone()],
                dg: &mut all.dg[rows],
            };
            after = Some(chunk.backward::<M>(before, dout, after.as_deref(), to));
            memories.pop();
        }
        all.dmemory = after.unwrap_or_default();
        all
    }
}
