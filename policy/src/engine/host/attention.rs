//! Causal attention of new rows over their sequences' blocks.
//!
//! Each row's scores, softmax and weighted sum run over its own positions in order, 16 at a time, so
//! a row's bits depend neither on the batch nor on how its prompt was cut into steps.

use rayon::prelude::*;

use super::{
    ops,
    panels::{Chunk, Panels, TILE, W, columns, multiply_add},
    store::{BlockShape, Past},
};
use crate::simd::{MulAdd, Vectorized, exp, vectorized};

/// What every row of a layer's attention shares.
#[derive(Clone, Copy)]
pub(super) struct Attention<'a> {
    pub shape: &'a BlockShape,
    pub layer: usize,
    pub heads: usize,
    /// The query norm's weight; absent in Llama.
    pub norm: Option<&'a [f32]>,
    pub eps: f32,
    /// Cosines and sines `[positions][head_dim / 2]` from position 0.
    pub rope: (&'a [f32], &'a [f32]),
    pub queries: &'a Panels,
}

/// Rows of one sequence in the step.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    /// Index of the first row in the step.
    pub first: usize,
    pub count: usize,
    /// Stream position of the first row.
    pub position: usize,
    pub past: &'a Past,
}

impl Attention<'_> {
    fn group(&self) -> usize {
        self.heads / self.shape.kv_heads
    }

    /// Chunks of an output row.
    pub(super) fn width(&self) -> usize {
        (self.heads * self.shape.head_dim).div_ceil(W)
    }

    /// Fills `out`, row-major, [`Attention::width`] chunks a row, in the order of `feeds`.
    pub(super) fn run(self, feeds: &[Rows<'_>], out: &mut [Chunk]) {
        let step = (TILE / self.group()).max(1);
        let mut rest = out;
        let mut tasks = Vec::new();
        let mut cost = 0;
        for feed in feeds {
            for start in (0..feed.count).step_by(step) {
                let count = step.min(feed.count - start);
                let (out, tail) = rest.split_at_mut(count * self.width());
                rest = tail;
                let rows = Rows {
                    first: feed.first + start,
                    count,
                    position: feed.position + start,
                    past: feed.past,
                };
                cost += count * (rows.position + count);
                tasks.push(Task { attention: self, rows, out });
            }
        }
        let cost = cost * self.heads * self.shape.head_dim * 2;
        if cost < 1 << 20 || tasks.len() == 1 {
            tasks.into_iter().for_each(vectorized);
        } else {
            tasks.into_par_iter().for_each(vectorized);
        }
    }
}

/// A few neighbouring rows of one sequence, all heads.
struct Task<'a> {
    attention: Attention<'a>,
    rows: Rows<'a>,
    out: &'a mut [Chunk],
}

impl Vectorized for Task<'_> {
    type Output = ();

    #[inline(always)]
    fn run<M: MulAdd>(self) {
        let Task { attention: a, rows, out } = self;
        let (dim, panels, group) = (a.shape.head_dim, a.shape.panels(), a.group());
        let mut row = vec![0.0; a.width() * W];
        // `[rows * group][panels]` for each key-value head in turn.
        let mut queries = vec![[0.0; W]; a.heads * rows.count * panels];
        for r in 0..rows.count {
            a.queries.read_row(rows.first + r, &mut row);
            let rope = rope_at(a.rope, dim, rows.position + r);
            for (h, head) in row.chunks_exact_mut(dim).take(a.heads).enumerate() {
                ops::norm_and_rotate(head, a.norm, a.eps, rope);
                let line = (h / group * rows.count + r) * group + h % group;
                let to = queries[line * panels..][..panels].iter_mut();
                to.zip(head.chunks(W))
                    .for_each(|(to, part)| to[..part.len()].copy_from_slice(part));
            }
        }
        let lines = rows.count * group;
        let blocks = (rows.position + rows.count).div_ceil(W);
        let mut scores = vec![[0.0; W]; TILE * blocks];
        let mut result = vec![[0.0; W]; TILE * panels];
        let mut flat = vec![0.0f32; rows.count * a.width() * W];
        for head in 0..a.shape.kv_heads {
            let queries = &queries[head * lines * panels..][..lines * panels];
            for first in (0..lines).step_by(TILE) {
                let count = TILE.min(lines - first);
                let tile = Tile { a: &a, rows: &rows, head, first, blocks };
                let q = &queries[first * panels..];
                match count {
                    1 => tile.run::<M, 1>(q, &mut scores, &mut result),
                    2 => tile.run::<M, 2>(q, &mut scores, &mut result),
                    3 => tile.run::<M, 3>(q, &mut scores, &mut result),
                    4 => tile.run::<M, 4>(q, &mut scores, &mut result),
                    5 => tile.run::<M, 5>(q, &mut scores, &mut result),
                    _ => tile.run::<M, 6>(q, &mut scores, &mut result),
                }
                for (i, line) in (first..first + count).enumerate() {
                    let (r, g) = (line / group, line % group);
                    let to = (r * a.width() * W) + (head * group + g) * dim;
                    let from = result[i * panels..][..panels].as_flattened();
                    flat[to..to + dim].copy_from_slice(&from[..dim]);
                }
            }
        }
        for (to, from) in out.iter_mut().zip(flat.chunks_exact(W)) {
            to.copy_from_slice(from);
        }
    }
}

/// Cosines and sines of one position.
pub(super) fn rope_at<'a>(
    rope: (&'a [f32], &'a [f32]),
    dim: usize,
    position: usize,
) -> (&'a [f32], &'a [f32]) {
    let half = dim / 2;
    (&rope.0[position * half..][..half], &rope.1[position * half..][..half])
}

/// A few query lines of one key-value head.
struct Tile<'a> {
    a: &'a Attention<'a>,
    rows: &'a Rows<'a>,
    head: usize,
    first: usize,
    blocks: usize,
}

impl Tile<'_> {
    #[inline(always)]
    fn run<M: MulAdd, const R: usize>(
        &self,
        queries: &[Chunk],
        scores: &mut [Chunk],
        result: &mut [Chunk],
    ) {
        let panels = self.a.shape.panels();
        let wide = columns::<M>(R);
        let mut b = 0;
        while b < self.blocks {
            b += match wide.min(self.blocks - b) {
                4.. if R == 1 || (M::WIDE && R <= 5) => self.score::<M, R, 4>(queries, b, scores),
                2.. if R <= 2 || M::WIDE => self.score::<M, R, 2>(queries, b, scores),
                _ => self.score::<M, R, 1>(queries, b, scores),
            };
        }
        let group = self.a.group();
        let mut inverse = [0.0; R];
        for r in 0..R {
            // This line sees the positions up to and including its own.
            let seen = self.rows.position + (self.first + r) / group + 1;
            let line = &mut scores[r * self.blocks..][..self.blocks];
            inverse[r] = 1.0 / softmax(line, seen);
        }
        let mut p = 0;
        while p < panels {
            p += match wide.min(panels - p) {
                4.. if R == 1 || (M::WIDE && R <= 5) => {
                    self.gather::<M, R, 4>(scores, &inverse, p, result)
                }
                2.. if R <= 2 || M::WIDE => self.gather::<M, R, 2>(scores, &inverse, p, result),
                _ => self.gather::<M, R, 1>(scores, &inverse, p, result),
            };
        }
    }

    #[inline(always)]
    fn head(&self, block: usize) -> (&[[Chunk; W]], &[[Chunk; W]]) {
        let (shape, layer) = (self.a.shape, self.a.layer);
        let block = &self.rows.past.blocks[block];
        let (keys, values) =
            (block.keys(shape, layer, self.head), block.values(shape, layer, self.head));
        (keys.as_chunks().0, values.as_chunks().0)
    }

    /// Scores of `C` blocks from block `b` on. Returns `C`.
    #[inline(always)]
    fn score<M: MulAdd, const R: usize, const C: usize>(
        &self,
        queries: &[Chunk],
        b: usize,
        scores: &mut [Chunk],
    ) -> usize {
        let panels = self.a.shape.panels();
        let scale = 1.0 / (self.a.shape.head_dim as f32).sqrt();
        let keys: [&[[Chunk; W]]; C] = std::array::from_fn(|c| self.head(b + c).0);
        let mut acc = [[[0.0; W]; R]; C];
        for p in 0..panels {
            let q: [&Chunk; R] = std::array::from_fn(|r| &queries[r * panels + p]);
            multiply_add::<M, Chunk, R, C>(&mut acc, q, std::array::from_fn(|c| &keys[c][p]));
        }
        for (c, acc) in acc.into_iter().enumerate() {
            for (r, acc) in acc.into_iter().enumerate() {
                scores[r * self.blocks + b + c] = acc.map(|score| score * scale);
            }
        }
        C
    }

    /// Weighted sums of `C` panels of the values from panel `p` on. Returns `C`.
    #[inline(always)]
    fn gather<M: MulAdd, const R: usize, const C: usize>(
        &self,
        scores: &[Chunk],
        inverse: &[f32; R],
        p: usize,
        result: &mut [Chunk],
    ) -> usize {
        let panels = self.a.shape.panels();
        let mut acc = [[[0.0; W]; R]; C];
        for b in 0..self.blocks {
            let values = self.head(b).1;
            let weights: [&Chunk; R] = std::array::from_fn(|r| &scores[r * self.blocks + b]);
            multiply_add::<M, Chunk, R, C>(
                &mut acc,
                weights,
                std::array::from_fn(|c| &values[p + c]),
            );
        }
        for (c, acc) in acc.into_iter().enumerate() {
            for (r, acc) in acc.into_iter().enumerate() {
                result[r * panels + p + c] = acc.map(|sum| sum * inverse[r]);
            }
        }
        C
    }
}

/// Turns the first `seen` scores into exp(score − max) and the others into 0; returns their sum.
#[inline(always)]
fn softmax(scores: &mut [Chunk], seen: usize) -> f32 {
    for (b, chunk) in scores.iter_mut().enumerate().skip(seen / W) {
        for (i, score) in chunk.iter_mut().enumerate() {
            *score = if b * W + i < seen { *score } else { f32::NEG_INFINITY };
        }
    }
    let mut max = [f32::NEG_INFINITY; W];
    for chunk in scores.iter() {
        for i in 0..W {
            max[i] = if chunk[i] > max[i] { chunk[i] } else { max[i] };
        }
    }
    let max = max.into_iter().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = [0.0; W];
    for chunk in scores.iter_mut() {
        for i in 0..W {
            // A hidden score is −∞: exp gives a tiny number there, and it must be 0.
            let weight = exp(chunk[i] - max);
            chunk[i] = if chunk[i] == f32::NEG_INFINITY { 0.0 } else { weight };
            sum[i] += chunk[i];
        }
    }
    sum.iter().sum()
}
