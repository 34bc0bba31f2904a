//! The depthwise causal convolution of a gated DeltaNet with its activation, over a packed batch:
//! continuations go on from the prefix's last rows, which get the gradients of all of them.

use rayon::prelude::*;

use super::{
    super::layout::Layout,
    mat::{Mat, rows_per_task},
    math::exp,
    rows::sum,
};
use crate::{
    model::ModelError,
    simd::{MulAdd, Vectorized, vectorized},
};

/// Rows whose weight gradients are summed before they are added to the others.
const PARTIAL: usize = 64;

/// A convolution over the rows of a layout.
pub(super) struct Convolution<'a> {
    layout: &'a Layout,
    /// First row and end of the run of rows that each row is in.
    runs: Vec<(usize, usize)>,
    /// `[taps, channels]`, the last tap on the newest row.
    weight: &'a [f32],
    taps: usize,
    channels: usize,
}

/// `[channels, taps]` as `[taps, channels]` and back.
pub(super) fn transposed(weight: &[f32], columns: usize) -> Vec<f32> {
    let rows = weight.len() / columns.max(1);
    (0..columns).flat_map(|c| (0..rows).map(move |r| weight[r * columns + c])).collect()
}

impl<'a> Convolution<'a> {
    pub(super) fn new(layout: &'a Layout, weight: &'a [f32], taps: usize) -> Self {
        let mut runs = vec![(0, layout.prefix); layout.prefix];
        for &(start, len) in &layout.rows {
            runs.resize(runs.len() + len, (start, start + len));
        }
        Self { layout, runs, weight, taps, channels: weight.len() / taps.max(1) }
    }

    /// The row `distance` before `row` in its sequence.
    #[inline(always)]
    fn before(&self, row: usize, distance: usize) -> Option<usize> {
        let own = row - self.runs[row].0;
        match distance.checked_sub(own) {
            None | Some(0) => Some(row - distance),
            Some(beyond) if row >= self.layout.prefix => self.layout.prefix.checked_sub(beyond),
            Some(_) => None,
        }
    }

    /// `silu(Σ_j weight[j] · u[row − taps + 1 + j])`.
    pub(super) fn forward(&self, u: &Mat) -> Result<Mat, ModelError> {
        let mut out = Mat::zeros(u.rows, u.cols);
        let (rows, u) = (rows_per_task(u.cols), u.read()?);
        (out.write()?.par_chunks_mut(rows * self.channels).enumerate()).for_each(|(task, out)| {
            vectorized(Sums { of: self, u, first: task * rows, out, active: true })
        });
        Ok(out)
    }

    /// The gradient of `u`, and that of the weight `[taps, channels]` where that is wanted.
    pub(super) fn backward(
        &self,
        u: &Mat,
        dout: Mat,
        want_weight: bool,
    ) -> Result<(Mat, Option<Vec<f32>>), ModelError> {
        let mut dsums = dout;
        let rows = rows_per_task(u.cols);
        let values = u.read()?;
        let size = rows * self.channels;
        (dsums.write()?.par_chunks_mut(size).enumerate()).for_each(|(task, dsums)| {
            let mut sums = vec![0.0; dsums.len()];
            let out = sums.as_mut_slice();
            vectorized(Sums { of: self, u: values, first: task * rows, out, active: false });
            vectorized(SiluBackward { x: &sums, dy: dsums });
        });
        let dsums = dsums.read()?;
        let mut du = Mat::zeros(u.rows, u.cols);
        (du.write()?.par_chunks_mut(size).enumerate()).for_each(|(task, du)| {
            vectorized(InputGradient { of: self, dsums, first: task * rows, du })
        });
        let dweight = want_weight.then(|| {
            let partials: Vec<Vec<f32>> = (dsums.par_chunks(PARTIAL * self.channels).enumerate())
                .map(|(task, dsums)| self.weight_gradient(values, dsums, task * PARTIAL))
                .collect();
            sum(partials, self.weight.len())
        });
        Ok((du, dweight))
    }

    fn weight_gradient(&self, u: &[f32], dsums: &[f32], first: usize) -> Vec<f32> {
        let mut dweight = vec![0.0; self.weight.len()];
        for (row, dsum) in dsums.chunks_exact(self.channels).enumerate() {
            for (j, dweight) in dweight.chunks_exact_mut(self.channels).enumerate() {
                let Some(from) = self.before(first + row, self.taps - 1 - j) else { continue };
                let u = &u[from * self.channels..][..self.channels];
                for ((dw, dsum), u) in dweight.iter_mut().zip(dsum).zip(u) {
                    *dw += dsum * u;
                }
            }
        }
        dweight
    }
}

/// The convolution's sums, activated or not.
struct Sums<'a> {
    of: &'a Convolution<'a>,
    u: &'a [f32],
    first: usize,
    /// Zeros.
    out: &'a mut [f32],
    active: bool,
}

impl Vectorized for Sums<'_> {
    type Output = ();

    #[inline(always)]
    fn run<M: MulAdd>(self) {
        let Convolution { taps, channels, weight, .. } = *self.of;
        for (row, out) in self.out.chunks_exact_mut(channels).enumerate() {
            for (j, weight) in weight.chunks_exact(channels).enumerate() {
                let Some(from) = self.of.before(self.first + row, taps - 1 - j) else { continue };
                let u = &self.u[from * channels..][..channels];
                for ((out, weight), u) in out.iter_mut().zip(weight).zip(u) {
                    *out = M::mul_add(*weight, *u, *out);
                }
            }
            if self.active {
                out.iter_mut().for_each(|x| *x /= 1.0 + exp::<M>(-*x));
            }
        }
    }
}

/// Multiplies gradients by the derivative of silu at `x`.
struct SiluBackward<'a> {
    x: &'a [f32],
    dy: &'a mut [f32],
}

impl Vectorized for SiluBackward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<M: MulAdd>(self) {
        for (dy, x) in self.dy.iter_mut().zip(self.x) {
            let sigmoid = 1.0 / (1.0 + exp::<M>(-x));
            *dy *= sigmoid + x * sigmoid * (1.0 - sigmoid);
        }
    }
}

struct InputGradient<'a> {
    of: &'a Convolution<'a>,
    dsums: &'a [f32],
    first: usize,
    /// Zeros.
    du: &'a mut [f32],
}

impl Vectorized for InputGradient<'_> {
    type Output = ();

    #[inline(always)]
    fn run<M: MulAdd>(self) {
        let Convolution { taps, channels, weight, layout, .. } = *self.of;
        for (row, du) in self.du.chunks_exact_mut(channels).enumerate() {
            let row = self.first + row;
            let end = self.of.runs[row].1;
            for distance in 0..taps {
                let weight = &weight[(taps - 1 - distance) * channels..][..channels];
                let mut add = |from: usize| {
                    let dsum = &self.dsums[from * channels..][..channels];
                    for ((du, weight), dsum) in du.iter_mut().zip(weight).zip(dsum) {
                        *du = M::mul_add(*weight, *dsum, *du);
                    }
                };
                if row + distance < end {
                    add(row + distance);
                } else if row < layout.prefix {
                    let beyond = row + distance - layout.prefix;
                    let rows = layout.rows.iter().filter(|(_, len)| beyond < *len);
                    rows.for_each(|(start, _)| add(start + beyond));
                }
            }
        }
    }
}
