//! Row-wise and elementwise loops of a layer, forward and backward, each over many rows at a time.

use rayon::prelude::*;

use super::{
    mat::{Mat, rows_per_task},
    math::{dot, dot3, exp},
};
use crate::{
    model::ModelError,
    simd::{MulAdd, Vectorized, vectorized},
};

/// Rows whose weight gradients are summed before they are added to the others: fixed, so that sums do
/// not depend on the number of threads.
const PARTIAL: usize = 64;

/// An RMS norm's output, and the inverse root mean square of each row.
pub(super) fn rms_norm(x: &Mat, weight: &[f32], eps: f32) -> Result<(Mat, Vec<f32>), ModelError> {
    let cols = x.cols;
    let mut out = Mat::zeros(x.rows, cols);
    let mut inverse = vec![0.0; x.rows];
    let rows = rows_per_task(cols);
    let x = x.read()?;
    (out.write()?.par_chunks_mut(rows * cols))
        .zip(inverse.par_chunks_mut(rows))
        .zip(x.par_chunks(rows * cols))
        .for_each(|((out, inverse), x)| vectorized(RmsNorm { x, weight, eps, out, inverse }));
    Ok((out, inverse))
}

struct RmsNorm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
    inverse: &'a mut [f32],
}

impl Vectorized for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<M: MulAdd>(self) {
        let width = self.weight.len();
        let rows = self.x.chunks_exact(width).zip(self.out.chunks_exact_mut(width));
        for ((x, out), inverse) in rows.zip(self.inverse) {
            let scale = 1.0 / (dot::<M>(x, x) / width as f32 + self.eps).sqrt();
            for ((out, x), weight) in out.iter_mut().zip(x).zip(self.weight) {
                *out = x * scale * weight;
            }
            *inverse = scale;
        }
    }
}

/// Adds an RMS norm's input gradient to `dx`; returns its weight's gradient where that is wanted.
pub(super) fn rms_norm_backward(
    x: &Mat,
    weight: &[f32],
    inverse: &[f32],
    dout: &Mat,
    dx: &mut Mat,
    want_weight: bool,
) -> Result<Option<Vec<f32>>, ModelError> {
    let cols = x.cols;
    let (x, dout) = (x.read()?, dout.read()?);
    let size = PARTIAL * cols;
    let partials: Vec<Vec<f32>> = (dx.write()?.par_chunks_mut(size))
        .zip(inverse.par_chunks(PARTIAL))
        .zip(x.par_chunks(size).zip(dout.par_chunks(size)))
        .map(|((dx, inverse), (x, dout))| {
            let mut dweight = vec![0.0; if want_weight { cols } else { 0 }];
            let dweight_slice = dweight.as_mut_slice();
            vectorized(RmsBackward { x, weight, inverse, dout, dx, dweight: dweight_slice });
            dweight
        })
        .collect();
    Ok(want_weight.then(|| sum(partials, cols)))
}

struct RmsBackward<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    inverse: &'a [f32],
    dout: &'a [f32],
    dx: &'a mut [f32],
    /// Empty where it is not wanted.
    dweight: &'a mut [f32],
}

impl Vectorized for RmsBackward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<M: MulAdd>(self) {
        let width = self.weight.len();
        let rows = self.x.chunks_exact(width).zip(self.dout.chunks_exact(width));
        let rows = rows.zip(self.dx.chunks_exact_mut(width)).zip(self.inverse);
        for (((x, dout), dx), &scale) in rows {
            let share = dot3::<M>(x, dout, self.weight) * scale * scale * scale / width as f32;
            for (((dx, x), dout), weight) in dx.iter_mut().zip(x).zip(dout).zip(self.weight) {
                *dx += dout * weight * scale - x * share;
            }
            for ((dw, x), dout) in self.dweight.iter_mut().zip(x).zip(dout) {
                *dw = M::mul_add(x * scale, *dout, *dw);
            }
        }
    }
}

/// Vectors added in order.
pub(super) fn sum(partials: Vec<Vec<f32>>, len: usize) -> Vec<f32> {
    let mut sum = vec![0.0; len];
    for partial in partials {
        sum.iter_mut().zip(partial).for_each(|(sum, part)| *sum += part);
    }
    sum
}

/// The sum of all rows.
pub(super) fn column_sums(x: &Mat) -> Result<Vec<f32>, ModelError> {
    let cols = x.cols;
    let partial = |rows: &[f32]| sum(rows.chunks_exact(cols).map(<[f32]>::to_vec).collect(), cols);
    let partials = x.read()?.par_chunks(PARTIAL * cols).map(partial).collect();
    Ok(sum(partials, cols))
}

/// silu(gate) ⊙ up.
pub(super) fn gated(gate: &Mat, up: &Mat) -> Result<Mat, ModelError> {
    let mut out = Mat::zeros(gate.rows, gate.cols);
    let size = rows_per_task(1);
    let (gate, up) = (gate.read()?, up.read()?);
    (out.write()?.par_chunks_mut(size))
        .zip(gate.par_chunks(size).zip(up.par_chunks(size)))
        .for_each(|(out, (gate, up))| vectorized(Gated { gate, up, out }));
    Ok(out)
}

struct Gated<'a> {
    gate: &'a [f32],
    up: &'a [f32],
    out: &'a mut [f32],
}

impl Vectorized for Gated<'_> {
    type Output = ();

    #[inline(always)]
    fn run<M: MulAdd>(self) {
        for ((out, gate), up) in self.out.iter_mut().zip(self.gate).zip(self.up) {
            *out = gate / (1.0 + exp::<M>(-gate)) * up;
        }
    }
}

/// Turns gate, up and the gradient of [`gated`] into their gradients and its value, in place.
pub(super) fn gated_backward(
    gate: &mut Mat,
    up: &mut Mat,
    dout: &mut Mat,
) -> Result<(), ModelError> {
    let size = rows_per_task(1);
    (gate.write()?.par_chunks_mut(size))
        .zip(up.write()?.par_chunks_mut(size))
        .zip(dout.write()?.par_chunks_mut(size))
        .for_each(|((gate, up), dout)| vectorized(GatedBackward { gate, up, dout }));
    Ok(())
}

struct GatedBackward<'a> {
    gate: &'a mut [f32],
    up: &'a mut [f32],
    dout: &'a mut [f32],
}

impl Vectorized for GatedBackward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<M: MulAdd>(self) {
        for ((gate, up), dout) in self.gate.iter_mut().zip(self.up).zip(self.dout) {
            let sigmoid = 1.0 / (1.0 + exp::<M>(-*gate));
            let silu = *gate * sigmoid;
            let value = silu * *up;
            *gate = *dout * *up * (sigmoid + silu * (1.0 - sigmoid));
            *up = *dout * silu;
            *dout = value;
        }
    }
}

/// `y += z · m` for a `z` of few columns; `m` is `[z.cols, y.cols]`.
pub(super) fn add_low_rank(y: &mut Mat, z: &Mat, m: &Mat) -> Result<(), ModelError> {
    let (cols, rank) = (y.cols, z.cols);
    let rows = rows_per_task(cols);
    let (z, m) = (z.read()?, m.read()?);
    (y.write()?.par_chunks_mut(rows * cols))
        .zip(z.par_chunks(rows * rank))
        .for_each(|(y, z)| vectorized(AddLowRank { y, z, m, cols, rank }));
    Ok(())
}

struct AddLowRank<'a> {
    y: &'a mut [f32],
    z: &'a [f32],
    m: &'a [f32],
    cols: usize,
    rank: usize,
}

/// Columns that [`AddLowRank`] keeps in registers.
const TILE: usize = 32;

impl Vectorized for AddLowRank<'_> {
    type Output = ();

    #[inline(always)]
    fn run<M: MulAdd>(self) {
        for (y, z) in self.y.chunks_exact_mut(self.cols).zip(self.z.chunks_exact(self.rank)) {
            let (tiles, rest) = y.as_chunks_mut::<TILE>();
            let done = tiles.len() * TILE;
            for (t, tile) in tiles.iter_mut().enumerate() {
                let mut sum = *tile;
                for (z, m) in z.iter().zip(self.m.chunks_exact(self.cols)) {
                    if let Some(m) = m[t * TILE..].first_chunk::<TILE>() {
                        for i in 0..TILE {
                            sum[i] = M::mul_add(*z, m[i], sum[i]);
                        }
                    }
                }
                *tile = sum;
            }
            for (z, m) in z.iter().zip(self.m.chunks_exact(self.cols)) {
                for (y, m) in rest.iter_mut().zip(&m[done..]) {
                    *y = M::mul_add(*z, *m, *y);
                }
            }
        }
    }
}

/// Adds `bias` to each row.
pub(super) fn add_bias(y: &mut Mat, bias: &[f32]) -> Result<(), ModelError> {
    let cols = y.cols;
    y.write()?.par_chunks_mut(rows_per_task(cols) * cols).for_each(|rows| {
        for row in rows.chunks_exact_mut(cols) {
            row.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
        }
    });
    Ok(())
}
