//! Gates of a layer's mixer: the sigmoid of attention's output, which lies in the queries'
//! projection, and the gated norm of a DeltaNet's heads.

use rayon::prelude::*;

use super::{
    mat::{Mat, rows_per_task},
    math::{dot, dot3, exp},
    rows::sum,
};
use crate::{
    model::ModelError,
    simd::{MulAdd, Vectorized, vectorized},
};

/// Rows whose weight gradients are summed before they are added to the others.
const PARTIAL: usize = 64;

/// `out` `[ids, heads * dim]` times the sigmoids of the gates, the second halves of each head in
/// `queries` `[ids, heads * 2 * dim]`.
pub(super) fn sigmoid_gate(out: &mut Mat, queries: &Mat, dim: usize) -> Result<(), ModelError> {
    let rows = rows_per_task(out.cols);
    let (own, both) = (rows * out.cols, rows * queries.cols);
    (out.write()?.par_chunks_mut(own).zip(queries.read()?.par_chunks(both)))
        .for_each(|(out, queries)| vectorized(Gate { out, queries, dim }));
    Ok(())
}

struct Gate<'a> {
    out: &'a mut [f32],
    queries: &'a [f32],
    dim: usize,
}

impl Vectorized for Gate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<M: MulAdd>(self) {
        let heads =
            self.out.chunks_exact_mut(self.dim).zip(self.queries.chunks_exact(2 * self.dim));
        for (out, both) in heads {
            let gates = &both[self.dim..];
            out.iter_mut().zip(gates).for_each(|(out, gate)| *out /= 1.0 + exp::<M>(-gate));
        }
    }
}

/// Turns the gradient of [`sigmoid_gate`]'s result into that of `out`, and the gates in `queries`
/// into their gradients.
pub(super) fn sigmoid_gate_backward(
    out: &Mat,
    queries: &mut Mat,
    dout: &mut Mat,
    dim: usize,
) -> Result<(), ModelError> {
    let rows = rows_per_task(out.cols);
    let (own, both) = (rows * out.cols, rows * queries.cols);
    (dout.write()?.par_chunks_mut(own))
        .zip(queries.write()?.par_chunks_mut(both).zip(out.read()?.par_chunks(own)))
        .for_each(|(dout, (queries, out))| vectorized(GateBackward { out, queries, dout, dim }));
    Ok(())
}

struct GateBackward<'a> {
    out: &'a [f32],
    queries: &'a mut [f32],
    dout: &'a mut [f32],
    dim: usize,
}

impl Vectorized for GateBackward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<M: MulAdd>(self) {
        let heads = self.queries.chunks_exact_mut(2 * self.dim);
        let heads = heads.zip(self.out.chunks_exact(self.dim));
        for ((both, out), dout) in heads.zip(self.dout.chunks_exact_mut(self.dim)) {
            let gates = &mut both[self.dim..];
            for ((gate, out), dout) in gates.iter_mut().zip(out).zip(dout) {
                let sigmoid = 1.0 / (1.0 + exp::<M>(-*gate));
                *gate = *dout * out * sigmoid * (1.0 - sigmoid);
                *dout *= sigmoid;
            }
        }
    }
}

/// The norm over each head times the head's silu of `z`: `x / rms(x) · weight · silu(z)`.
pub(super) fn gated_norm(x: &Mat, z: &Mat, weight: &[f32], eps: f32) -> Result<Mat, ModelError> {
    let mut out = Mat::zeros(x.rows, x.cols);
    let size = rows_per_task(x.cols) * x.cols;
    (out.write()?.par_chunks_mut(size))
        .zip(x.read()?.par_chunks(size).zip(z.read()?.par_chunks(size)))
        .for_each(|(out, (x, z))| vectorized(GatedNorm { x, z, weight, eps, out }));
    Ok(out)
}

struct GatedNorm<'a> {
    x: &'a [f32],
    z: &'a [f32],
    weight: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
}

impl Vectorized for GatedNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<M: MulAdd>(self) {
        let dim = self.weight.len();
        let heads = self.x.chunks_exact(dim).zip(self.z.chunks_exact(dim));
        for ((x, z), out) in heads.zip(self.out.chunks_exact_mut(dim)) {
            let inverse = 1.0 / (dot::<M>(x, x) / dim as f32 + self.eps).sqrt();
            for (((out, x), z), weight) in out.iter_mut().zip(x).zip(z).zip(self.weight) {
                *out = x * inverse * weight * (z / (1.0 + exp::<M>(-z)));
            }
        }
    }
}

/// Turns `x` and `z` of [`gated_norm`] into their gradients; returns the weight's where that is
/// wanted.
pub(super) fn gated_norm_backward(
    x: &mut Mat,
    z: &mut Mat,
    weight: &[f32],
    eps: f32,
    dout: &Mat,
    want_weight: bool,
) -> Result<Option<Vec<f32>>, ModelError> {
    let size = PARTIAL * x.cols;
    let partials: Vec<Vec<f32>> = (x.write()?.par_chunks_mut(size))
        .zip(z.write()?.par_chunks_mut(size).zip(dout.read()?.par_chunks(size)))
        .map(|(x, (z, dout))| {
            let mut dweight = vec![0.0; if want_weight { weight.len() } else { 0 }];
            let dweight_slice = dweight.as_mut_slice();
            vectorized(GatedNormBackward { x, z, weight, eps, dout, dweight: dweight_slice });
            dweight
        })
        .collect();
    Ok(want_weight.then(|| sum(partials, weight.len())))
}

struct GatedNormBackward<'a> {
    x: &'a mut [f32],
    z: &'a mut [f32],
    weight: &'a [f32],
    eps: f32,
    dout: &'a [f32],
    /// Empty where it is not wanted.
    dweight: &'a mut [f32],
}

impl Vectorized for GatedNormBackward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<M: MulAdd>(self) {
        let dim = self.weight.len();
        let mut dnormed = vec![0.0; dim];
        let heads = self.x.chunks_exact_mut(dim).zip(self.z.chunks_exact_mut(dim));
        for ((x, z), dout) in heads.zip(self.dout.chunks_exact(dim)) {
            let inverse = 1.0 / (dot::<M>(x, x) / dim as f32 + self.eps).sqrt();
            let parts = z.iter_mut().zip(x.iter()).zip(dout).zip(self.weight);
            for ((((z, x), dout), weight), dnormed) in parts.zip(&mut dnormed) {
                let sigmoid = 1.0 / (1.0 + exp::<M>(-*z));
                let silu = *z * sigmoid;
                *dnormed = dout * silu;
                *z = dout * x * inverse * weight * (sigmoid + silu * (1.0 - sigmoid));
            }
            for ((dweight, x), d) in self.dweight.iter_mut().zip(x.iter()).zip(&dnormed) {
                *dweight = M::mul_add(x * inverse, *d, *dweight);
            }
            let share = dot3::<M>(x, &dnormed, self.weight) * inverse * inverse * inverse;
            let share = share / dim as f32;
            for ((x, d), weight) in x.iter_mut().zip(&dnormed).zip(self.weight) {
                *x = d * weight * inverse - *x * share;
            }
        }
    }
}
