//! Small pieces of the vectorised loops. Sums run over 16 lanes in a fixed order, so that they do not
//! depend on the processor's vector width.

use crate::simd::MulAdd;

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

/// eˣ to within 1 ulp (2 without fused multiply-adds) for |x| ≤ 87; beyond it stays at e^±87.
#[inline(always)]
pub(super) fn exp<M: MulAdd>(x: f32) -> f32 {
    // 1.5 · 2²³: adding it rounds to an integer and leaves that integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let x = if x < -87.0 { -87.0 } else { x };
    let x = if x > 87.0 { 87.0 } else { x };
    let shifted = M::mul_add(x, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = M::mul_add(-n, LN2_LOW, M::mul_add(-n, LN2_HIGH, x));
    let mut sum = 1.0 / 5_040.0;
    for inverse in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        sum = M::mul_add(sum, r, inverse);
    }
    sum * f32::from_bits(shifted.to_bits().wrapping_add(127) << 23)
}

/// Replaces each x by exp(x − shift) and returns their sum.
#[inline(always)]
pub(super) fn exp_sum<M: MulAdd>(x: &mut [f32], shift: f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let (chunks, rest) = x.as_chunks_mut::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            chunk[i] = exp::<M>(chunk[i] - shift);
            lanes[i] += chunk[i];
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *x = exp::<M>(*x - shift);
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
            assert_eq!(exp_sum::<Fused>(&mut e, 0.0), len as f32);
        }
        assert_eq!(largest(&[-3.0, -1.0, -2.0]), -1.0);
    }

    #[test]
    fn exp_is_the_exponential() {
        for i in -8_600..=8_600 {
            let x = i as f32 / 100.0;
            let exact = f64::from(x).exp();
            assert!(((f64::from(exp::<Fused>(x)) - exact) / exact).abs() < 1.2e-7, "{x}");
        }
        assert!(exp::<Fused>(-1e30) < 1e-37 && exp::<Fused>(f32::NAN).is_nan());
    }
}
