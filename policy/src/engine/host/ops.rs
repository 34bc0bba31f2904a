//! The elementwise and row-wise parts of a layer, on panels and on single heads.

use super::panels::{Chunk, Panels, W};
use crate::simd::{MulAdd, Vectorized, exp, vectorized};

/// `to = x / rms(x) · weight` for each row.
pub(super) fn rms_norm(x: &Panels, weight: &[Chunk], width: usize, eps: f32, to: &mut Panels) {
    to.reshape(width, x.rows);
    vectorized(RmsNorm { x, weight, width, eps, to });
}

struct RmsNorm<'a> {
    x: &'a Panels,
    weight: &'a [Chunk],
    width: usize,
    eps: f32,
    to: &'a mut Panels,
}

impl Vectorized for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<M: MulAdd>(self) {
        let rows = self.x.rows.max(1);
        let mut squares = vec![[0.0; W]; rows];
        for panel in self.x.chunks.chunks_exact(rows) {
            for (sum, chunk) in squares.iter_mut().zip(panel) {
                for i in 0..W {
                    sum[i] += chunk[i] * chunk[i];
                }
            }
        }
        let scale = |sum: &Chunk| {
            let mean = sum.iter().sum::<f32>() / self.width as f32;
            1.0 / (mean + self.eps).sqrt()
        };
        let scales: Vec<f32> = squares.iter().map(scale).collect();
        let to = self.to.chunks.chunks_exact_mut(rows);
        for ((to, panel), weight) in to.zip(self.x.chunks.chunks_exact(rows)).zip(self.weight) {
            for ((to, chunk), scale) in to.iter_mut().zip(panel).zip(&scales) {
                for i in 0..W {
                    to[i] = chunk[i] * scale * weight[i];
                }
            }
        }
    }
}

/// `gate = silu(gate) · up`.
pub(super) fn gated(gate: &mut [Chunk], up: &[Chunk]) {
    vectorized(Gated(gate, up));
}

struct Gated<'a>(&'a mut [Chunk], &'a [Chunk]);

impl Vectorized for Gated<'_> {
    type Output = ();

    #[inline(always)]
    fn run<M: MulAdd>(self) {
        for (gate, up) in self.0.iter_mut().zip(self.1) {
            for i in 0..W {
                gate[i] = gate[i] / (1.0 + exp(-gate[i])) * up[i];
            }
        }
    }
}

/// RMS norm (where `norm` is given) and rotation of one head, in place. `rope` holds the cosines and
/// sines of its position, one for each pair `(i, i + head_dim / 2)`.
#[inline(always)]
pub(super) fn norm_and_rotate(
    head: &mut [f32],
    norm: Option<&[f32]>,
    eps: f32,
    (cos, sin): (&[f32], &[f32]),
) {
    if let Some(norm) = norm {
        let mut squares = [0.0; W];
        for part in head.chunks(W) {
            squares.iter_mut().zip(part).for_each(|(sum, x)| *sum += x * x);
        }
        let mean = squares.iter().sum::<f32>() / head.len() as f32;
        let scale = 1.0 / (mean + eps).sqrt();
        head.iter_mut().zip(norm).for_each(|(x, weight)| *x = *x * scale * weight);
    }
    let (low, high) = head.split_at_mut(cos.len());
    for (((low, high), cos), sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
        (*low, *high) = (*low * cos - *high * sin, *high * cos + *low * sin);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_agrees_with_the_standard_library() {
        for i in -86_900..=86_900 {
            let x = i as f32 * 0.001;
            let exact = f64::from(x).exp();
            let error = (f64::from(exp(x)) - exact).abs() / exact;
            assert!(error < 3e-7, "exp({x}) is off by {error:e}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(f32::NEG_INFINITY) < 1e-37);
    }
}
