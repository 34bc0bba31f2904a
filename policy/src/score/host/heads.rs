//! Between a projection's rows and attention's heads: head norm, rotation, and the change of layout
//! from `[ids, heads, dim]` to `[kv_heads, ids * group, dim]`, forward and backward in one pass each.

use rayon::prelude::*;

use super::{
    mat::Mat,
    math::{dot, dot3},
    rows::sum,
};
use crate::{
    model::ModelError,
    simd::{MulAdd, Vectorized, vectorized},
};

/// Ids whose norm gradients are summed before they are added to the others.
const PARTIAL: usize = 64;

/// How the heads of one projection are treated.
#[derive(Clone, Copy)]
pub(super) struct Heads<'a> {
    pub(super) kv_heads: usize,
    /// Heads for each key and value head: more than one for queries.
    pub(super) group: usize,
    pub(super) dim: usize,
    /// Elements from one head to the next in the projection.
    pub(super) stride: usize,
    /// The weight of the norm over each head.
    pub(super) norm: Option<&'a [f32]>,
    pub(super) eps: f32,
    /// Cosines and sines `[ids, half]` of pairs `(i, i + half)`; none for values.
    pub(super) rope: Option<(&'a [f32], &'a [f32])>,
    /// Multiplies the result.
    pub(super) scale: f32,
}

impl Heads<'_> {
    /// Pairs that are rotated, where the projection has `elements` elements.
    #[inline(always)]
    fn half(&self, elements: usize) -> usize {
        let ids = elements / (self.kv_heads * self.group * self.stride);
        self.rope.map_or(0, |(cos, _)| cos.len() / ids.max(1))
    }

    /// `[ids, kv_heads * group * stride]` to `[kv_heads, ids * group, dim]`.
    pub(super) fn forward(self, x: &Mat) -> Result<Mat, ModelError> {
        let mut out = Mat::zeros(self.kv_heads * x.rows * self.group, self.dim);
        let size = x.rows * self.group * self.dim;
        let x = x.read()?;
        (out.write()?.par_chunks_mut(size.max(1)).enumerate())
            .for_each(|(head, out)| vectorized(Forward { heads: self, head, x, out }));
        Ok(out)
    }

    /// Turns `x`, the input of [`Heads::forward`], into its gradient; returns the norm's weight
    /// gradient where that is wanted.
    pub(super) fn backward(
        self,
        x: &mut Mat,
        dout: &[f32],
        want_norm: bool,
    ) -> Result<Option<Vec<f32>>, ModelError> {
        let (ids, width) = (x.rows, x.cols);
        let want = want_norm && self.norm.is_some();
        let partials: Vec<Vec<f32>> = (x.write()?.par_chunks_mut(PARTIAL * width).enumerate())
            .map(|(task, x)| {
                let mut dnorm = vec![0.0; if want { self.dim } else { 0 }];
                let first = task * PARTIAL;
                let dnorm_slice = dnorm.as_mut_slice();
                vectorized(Backward { heads: self, first, ids, x, dout, dnorm: dnorm_slice });
                dnorm
            })
            .collect();
        Ok(want.then(|| sum(partials, self.dim)))
    }
}

struct Forward<'a> {
    heads: Heads<'a>,
    head: usize,
    x: &'a [f32],
    out: &'a mut [f32],
}

impl Vectorized for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<M: MulAdd>(self) {
        let Heads { kv_heads, group, dim, stride, norm, eps, rope, scale } = self.heads;
        let (share, half) = (group * stride, self.heads.half(self.x.len()));
        let rows =
            self.x.chunks_exact(kv_heads * share).zip(self.out.chunks_exact_mut(group * dim));
        for (id, (x, out)) in rows.enumerate() {
            let x = &x[self.head * share..][..share];
            for (x, out) in x.chunks_exact(stride).zip(out.chunks_exact_mut(dim)) {
                let x = &x[..dim];
                match norm {
                    None => out.iter_mut().zip(x).for_each(|(out, x)| *out = x * scale),
                    Some(norm) => {
                        let inverse = scale / (dot::<M>(x, x) / dim as f32 + eps).sqrt();
                        for ((out, x), norm) in out.iter_mut().zip(x).zip(norm) {
                            *out = x * inverse * norm;
                        }
                    }
                }
                if let Some((cos, sin)) = rope {
                    let (cos, sin) = (&cos[id * half..][..half], &sin[id * half..][..half]);
                    let (low, high) = out[..2 * half].split_at_mut(half);
                    for (((low, high), cos), sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
                        let turned = *low * cos - *high * sin;
                        *high = *high * cos + *low * sin;
                        *low = turned;
                    }
                }
            }
        }
    }
}

struct Backward<'a> {
    heads: Heads<'a>,
    first: usize,
    ids: usize,
    x: &'a mut [f32],
    dout: &'a [f32],
    /// Empty where it is not wanted.
    dnorm: &'a mut [f32],
}

impl Vectorized for Backward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<M: MulAdd>(self) {
        let Heads { kv_heads, group, dim, stride, norm, eps, rope, scale } = self.heads;
        let half = self.heads.half(self.ids * kv_heads * group * stride);
        let mut turned = vec![0.0; dim];
        for (row, x) in self.x.chunks_exact_mut(kv_heads * group * stride).enumerate() {
            let id = self.first + row;
            for (head, x) in x.chunks_exact_mut(stride).enumerate() {
                let x = &mut x[..dim];
                let place = (head / group * self.ids + id) * group + head % group;
                let dout = &self.dout[place * dim..][..dim];
                turned.iter_mut().zip(dout).for_each(|(d, dout)| *d = dout * scale);
                if let Some((cos, sin)) = rope {
                    let (cos, sin) = (&cos[id * half..][..half], &sin[id * half..][..half]);
                    let (low, high) = turned[..2 * half].split_at_mut(half);
                    let (dlow, dhigh) = dout[..2 * half].split_at(half);
                    for i in 0..half {
                        low[i] = (dlow[i] * cos[i] + dhigh[i] * sin[i]) * scale;
                        high[i] = (dhigh[i] * cos[i] - dlow[i] * sin[i]) * scale;
                    }
                }
                let Some(norm) = norm else {
                    x.copy_from_slice(&turned);
                    continue;
                };
                let inverse = 1.0 / (dot::<M>(x, x) / dim as f32 + eps).sqrt();
                for ((dnorm, x), d) in self.dnorm.iter_mut().zip(x.iter()).zip(&turned) {
                    *dnorm = M::mul_add(x * inverse, *d, *dnorm);
                }
                let share = dot3::<M>(x, &turned, norm) * inverse * inverse * inverse / dim as f32;
                for ((x, d), norm) in x.iter_mut().zip(&turned).zip(norm) {
                    *x = d * norm * inverse - *x * share;
                }
            }
        }
    }
}

/// `[ids, heads * dim]` to `[kv_heads, ids * group, dim]`, and back.
pub(super) fn to_heads(x: &Mat, kv_heads: usize, dim: usize) -> Result<Mat, ModelError> {
    let group = x.cols / dim / kv_heads;
    let plain =
        Heads { kv_heads, group, dim, stride: dim, norm: None, eps: 0.0, rope: None, scale: 1.0 };
    plain.forward(x)
}
