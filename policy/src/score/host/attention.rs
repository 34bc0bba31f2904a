//! Attention over a packed batch, block by block of queries: each block's scores live only while it
//! is worked on, and the backward pass computes them again, with the saved normaliser of each query.
//! Blocks are independent, so they are what is spread over threads; their results are added in order.

use burn::tensor::Tensor;
use rayon::prelude::*;

use super::{
    super::layout::Layout,
    mat::Mat,
    math::{dot, exp, exp_sum, largest},
};
use crate::{
    model::ModelError,
    simd::{MulAdd, Vectorized, vectorized},
};

/// Queries of a block.
const BLOCK: usize = 128;

/// The sizes that all blocks share.
#[derive(Clone, Copy)]
pub(super) struct Attention<'a> {
    pub(super) layout: &'a Layout,
    pub(super) kv_heads: usize,
    pub(super) group: usize,
    pub(super) dim: usize,
}

/// Queries `[kv_heads, ids * group, dim]` (scaled), keys and values `[kv_heads, ids, dim]`, and the
/// normaliser of each query's scores, block by block.
pub(super) struct Saved {
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    sums: Vec<Vec<Normaliser>>,
}

/// The largest score of a query and the inverse sum of the exponentials below it. Kept apart: one
/// log-sum-exp would lose the last bits of large scores, and with them the sum of probabilities.
type Normaliser = (f32, f32);

/// Gradients in the layouts of [`Saved`].
pub(super) struct HeadGradients {
    pub(super) dq: Vec<f32>,
    pub(super) dk: Vec<f32>,
    pub(super) dv: Vec<f32>,
}

/// Consecutive queries of one continuation (or of the prefix) and what they see.
#[derive(Clone, Copy)]
struct Block {
    /// Prefix keys before the continuation's own.
    context: usize,
    /// First id of the continuation.
    start: usize,
    /// The block's queries.
    from: usize,
    to: usize,
}

impl Block {
    fn keys(self) -> usize {
        self.context + self.to - self.start
    }

    /// Keys that the first query sees; each next query sees one more.
    fn first_limit(self) -> usize {
        self.context + self.from - self.start + 1
    }
}

impl Attention<'_> {
    fn blocks(&self) -> Vec<Block> {
        let prefix = self.layout.prefix;
        let segments = std::iter::once((0, prefix, 0))
            .chain(self.layout.rows.iter().map(|&(start, len)| (start, len, prefix)));
        segments
            .flat_map(|(start, len, context)| {
                (start..start + len).step_by(BLOCK).map(move |from| {
                    let to = (from + BLOCK).min(start + len);
                    Block { context, start, from, to }
                })
            })
            .collect()
    }

    fn queries(&self, x: &Tensor<3>, block: Block) -> Tensor<3> {
        let (from, to) = (block.from * self.group, block.to * self.group);
        x.clone().slice([0..self.kv_heads, from..to, 0..self.dim])
    }

    fn keys(&self, x: &Tensor<3>, block: Block) -> Tensor<3> {
        let own = x.clone().slice([0..self.kv_heads, block.start..block.to, 0..self.dim]);
        if block.context == 0 {
            return own;
        }
        let context = x.clone().slice([0..self.kv_heads, 0..block.context, 0..self.dim]);
        Tensor::cat(vec![context, own], 1)
    }

    /// The attention of all ids, `[ids, heads * dim]`.
    pub(super) fn forward(self, q: Mat, k: Mat, v: Mat) -> Result<(Mat, Saved), ModelError> {
        let Self { kv_heads, group, dim, .. } = self;
        let ids = self.layout.ids.len();
        let q = q.into_tensor([kv_heads, ids * group, dim]);
        let k = k.into_tensor([kv_heads, ids, dim]);
        let v = v.into_tensor([kv_heads, ids, dim]);
        let blocks = self.blocks();
        let parts: Vec<(Mat, Vec<Normaliser>)> = (blocks.par_iter())
            .map(|&block| {
                let scores = self.queries(&q, block).matmul(self.keys(&k, block).swap_dims(1, 2));
                let mut scores = Mat::from_tensor(scores, block.keys())?;
                let mut sums = vec![(0.0, 0.0); scores.rows];
                let limits = self.limits(block);
                vectorized(Softmax { scores: scores.write()?, sums: &mut sums, limits });
                let rows = (block.to - block.from) * group;
                let p = scores.into_tensor([kv_heads, rows, block.keys()]);
                Ok((Mat::from_tensor(p.matmul(self.keys(&v, block)), dim)?, sums))
            })
            .collect::<Result<_, ModelError>>()?;
        let mut out = Mat::zeros(ids, kv_heads * group * dim);
        let mut all_sums = Vec::with_capacity(parts.len());
        for (block, (part, sums)) in blocks.iter().zip(parts) {
            self.place(out.write()?, part.read()?, *block);
            all_sums.push(sums);
        }
        Ok((out, Saved { q, k, v, sums: all_sums }))
    }

    fn limits(&self, block: Block) -> Limits {
        let (keys, first) = (block.keys(), block.first_limit());
        Limits { keys, first, queries: block.to - block.from, group: self.group }
    }

    /// Puts a block's `[kv_heads, queries * group, dim]` into `[ids, heads * dim]`.
    fn place(&self, out: &mut [f32], part: &[f32], block: Block) {
        let share = self.group * self.dim;
        let width = self.kv_heads * share;
        let count = block.to - block.from;
        let rows = &mut out[block.from * width..block.to * width];
        for (query, row) in rows.chunks_exact_mut(width).enumerate() {
            for (head, to) in row.chunks_exact_mut(share).enumerate() {
                to.copy_from_slice(&part[(head * count + query) * share..][..share]);
            }
        }
    }

    /// Gradients of queries, keys and values, given the output's in the layout of the queries.
    pub(super) fn backward(self, saved: Saved, dout: Mat) -> Result<HeadGradients, ModelError> {
        let Self { kv_heads, group, dim, .. } = self;
        let ids = self.layout.ids.len();
        let dout = dout.into_tensor([kv_heads, ids * group, dim]);
        let Saved { q, k, v, sums } = saved;
        let blocks = self.blocks();
        let parts: Vec<[Mat; 3]> = (blocks.par_iter().zip(&sums))
            .map(|(&block, sums)| {
                let rows = (block.to - block.from) * group;
                let shape = [kv_heads, rows, block.keys()];
                let (q, dout) = (self.queries(&q, block), self.queries(&dout, block));
                let (k, v) = (self.keys(&k, block), self.keys(&v, block));
                let scores = q.clone().matmul(k.clone().swap_dims(1, 2));
                let dp = dout.clone().matmul(v.swap_dims(1, 2));
                let mut p = Mat::from_tensor(scores, block.keys())?;
                let mut ds = Mat::from_tensor(dp, block.keys())?;
                let limits = self.limits(block);
                vectorized(SoftmaxBackward { p: p.write()?, ds: ds.write()?, sums, limits });
                let (p, ds) = (p.into_tensor(shape), ds.into_tensor(shape));
                Ok([
                    Mat::from_tensor(ds.clone().matmul(k), dim)?,
                    Mat::from_tensor(ds.swap_dims(1, 2).matmul(q), dim)?,
                    Mat::from_tensor(p.swap_dims(1, 2).matmul(dout), dim)?,
                ])
            })
            .collect::<Result<_, ModelError>>()?;
        let mut all = HeadGradients {
            dq: vec![0.0; kv_heads * ids * group * dim],
            dk: vec![0.0; kv_heads * ids * dim],
            dv: vec![0.0; kv_heads * ids * dim],
        };
        for (&block, [dq, dk, dv]) in blocks.iter().zip(&parts) {
            let queries = (block.to - block.from) * group * dim;
            for (head, part) in dq.read()?.chunks_exact(queries).enumerate() {
                let at = (head * ids + block.from) * group * dim;
                all.dq[at..at + queries].copy_from_slice(part);
            }
            for (sum, part) in [(&mut all.dk, dk), (&mut all.dv, dv)] {
                for (head, part) in part.read()?.chunks_exact(block.keys() * dim).enumerate() {
                    let (context, own) = part.split_at(block.context * dim);
                    add(&mut sum[head * ids * dim..], context);
                    add(&mut sum[(head * ids + block.start) * dim..], own);
                }
            }
        }
        Ok(all)
    }
}

fn add(to: &mut [f32], from: &[f32]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
}

/// How many keys each row of a block's scores `[kv_heads, queries * group, keys]` sees.
#[derive(Clone, Copy)]
struct Limits {
    keys: usize,
    first: usize,
    queries: usize,
    group: usize,
}

impl Limits {
    #[inline(always)]
    fn of(self, row: usize) -> usize {
        self.first + row / self.group % self.queries
    }
}

struct Softmax<'a> {
    scores: &'a mut [f32],
    sums: &'a mut [Normaliser],
    limits: Limits,
}

impl Vectorized for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    fn run<M: MulAdd>(self) {
        let rows = self.scores.chunks_exact_mut(self.limits.keys).zip(self.sums).enumerate();
        for (row, (scores, normaliser)) in rows {
            let (seen, hidden) = scores.split_at_mut(self.limits.of(row));
            let max = largest(seen);
            let scale = 1.0 / exp_sum::<M>(seen, max);
            seen.iter_mut().for_each(|p| *p *= scale);
            hidden.fill(0.0);
            *normaliser = (max, scale);
        }
    }
}

struct SoftmaxBackward<'a> {
    /// Scores in, probabilities out.
    p: &'a mut [f32],
    /// Gradients of probabilities in, of scores out.
    ds: &'a mut [f32],
    sums: &'a [Normaliser],
    limits: Limits,
}

impl Vectorized for SoftmaxBackward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<M: MulAdd>(self) {
        let keys = self.limits.keys;
        let rows = self.p.chunks_exact_mut(keys).zip(self.ds.chunks_exact_mut(keys));
        for (row, ((p, ds), &(max, scale))) in rows.zip(self.sums).enumerate() {
            let limit = self.limits.of(row);
            let ((p, p_hidden), (ds, ds_hidden)) = (p.split_at_mut(limit), ds.split_at_mut(limit));
            p_hidden.fill(0.0);
            ds_hidden.fill(0.0);
            p.iter_mut().for_each(|p| *p = exp::<M>(*p - max) * scale);
            let share = dot::<M>(p, ds);
            ds.iter_mut().zip(p.iter()).for_each(|(ds, p)| *ds = p * (*ds - share));
        }
    }
}
