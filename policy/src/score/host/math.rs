//! Small pieces of the vectorised loops. Sums run over 16 lanes in a fixed order, so that they do not
//! depend on the processor's vector width.

use crate::simd::{MulAdd, exp};

const LANES: usize = 16;

#[inline(always)]
pub(super) fn total(lanes: [f32; LANES]) -> f32 {
    let mut lanes = lanes;
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Σ aᵢ bᵢ.
#[inline(always)]
pub(super) fn dot<M: MulAdd>(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a.iter().zip(b) {
        for i in 0..LANES {
            lanes[i] = M::mul_add(a[i], b[i], lanes[i]);
        }
    }
    for (i, (a, b)) in a_rest.iter().zip(b_rest).enumerate() {
        lanes[i] = M::mul_add(*a, *b, lanes[i]);
    }
    total(lanes)
}

/// Σ aᵢ bᵢ cᵢ.
#[inline(always)]
pub(super) fn dot3<M: MulAdd>(a: &[f32], b: &[f32], c: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    let (c, c_rest) = c.as_chunks::<LANES>();
    for ((a, b), c) in a.iter().zip(b).zip(c) {
        for i in 0..LANES {
            lanes[i] = M::mul_add(a[i] * b[i], c[i], lanes[i]);
        }
    }
    for (i, ((a, b), c)) in a_rest.iter().zip(b_rest).zip(c_rest).enumerate() {
        lanes[i] = M::mul_add(a * b, *c, lanes[i]);
    }
    total(lanes)
}

/// The largest value; −∞ of nothing.
#[inline(always)]
pub(super) fn largest(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (x, rest) = x.as_chunks::<LANES>();
    for x in x {
        for i in 0..LANES {
            lanes[i] = if x[i] > lanes[i] { x[i] } else { lanes[i] };
        }
    }
    rest.iter().chain(&lanes).fold(f32::NEG_INFINITY, |m, &v| if v > m { v } else { m })
}

/// Replaces each x by exp(x − shift) and returns their sum.
#[inline(always)]
pub(super) fn exp_sum(x: &mut [f32], shift: f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let (chunks, rest) = x.as_chunks_mut::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            chunk[i] = exp(chunk[i] - shift);
            lanes[i] += chunk[i];
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *x = exp(*x - shift);
        *lane += *x;
    }
    total(lanes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Fused;

    #[test]
    fn sums_take_every_element_once() {
        for len in [0, 1, 15, 16, 17, 40] {
            let a: Vec<f32> = (0..len).map(|i| i as f32 - 3.0).collect();
            let plain: f32 = a.iter().map(|a| a * a).sum();
            assert_eq!(dot::<Fused>(&a, &a), plain);
            assert_eq!(dot3::<Fused>(&a, &a, &vec![2.0; len]), 2.0 * plain);
            let mut e = vec![0.0; len];
            assert_eq!(exp_sum(&mut e, 0.0), len as f32);
        }
        assert_eq!(largest(&[-3.0, -1.0, -2.0]), -1.0);
    }
}
