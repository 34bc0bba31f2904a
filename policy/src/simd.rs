//! Runs plain Rust loops compiled for the processor's vector instructions.
//!
//! The release targets a baseline x86-64, where the compiler may use 128-bit registers only. Code
//! that is reached through [`vectorized`] is compiled again with AVX2 and FMA and once more with
//! AVX-512, and chosen at run time. Floating-point operations are neither contracted nor reordered
//! by that: loops that do not ask for [`MulAdd`] give the same bits on every processor, and those
//! that do the same on every one that has fused multiply-adds.

/// Calls `op` with the widest instructions that this processor has.
///
/// `op` and what it calls must be `#[inline(always)]` to be compiled along with the caller.
#[inline]
pub(crate) fn vectorized<Op: Vectorized>(op: Op) -> Op::Output {
    #[cfg(target_arch = "x86_64")]
    return x86::vectorized(op);
    #[cfg(target_arch = "aarch64")]
    return op.run::<Fused>();
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    op.run::<Separate>()
}

/// Asks for the cache line at `value` before it is needed, where the processor can be asked.
#[inline(always)]
pub(crate) fn prefetch<T>(value: &T) {
    #[cfg(target_arch = "x86_64")]
    x86::prefetch(value);
    #[cfg(not(target_arch = "x86_64"))]
    let _ = value;
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod x86 {
    use super::{Fused, FusedWide, Separate, Vectorized};

    #[inline]
    pub(super) fn vectorized<Op: Vectorized>(op: Op) -> Op::Output {
        if is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
        {
            // SAFETY: the processor has what the function is compiled for.
            return unsafe { avx512(op) };
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: as above.
            return unsafe { avx2(op) };
        }
        op.run::<Separate>()
    }

    #[inline(always)]
    pub(super) fn prefetch<T>(value: &T) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: it only reads, if anything, what the reference points to.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(std::ptr::from_ref(value).cast()) };
    }

    #[cfg(test)]
    pub(super) fn fused() -> bool {
        is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn avx512<Op: Vectorized>(op: Op) -> Op::Output {
        op.run::<FusedWide>()
    }

    #[target_feature(enable = "avx2,fma")]
    fn avx2<Op: Vectorized>(op: Op) -> Op::Output {
        op.run::<Fused>()
    }
}

/// Whether [`vectorized`] has multiply-adds with one rounding.
#[cfg(test)]
pub(crate) fn fused() -> bool {
    #[cfg(target_arch = "x86_64")]
    return x86::fused();
    #[cfg(not(target_arch = "x86_64"))]
    cfg!(target_arch = "aarch64")
}

/// A loop nest with its inputs, for [`vectorized`].
pub(crate) trait Vectorized {
    /// What it returns.
    type Output;
    /// The loops; implementations must be `#[inline(always)]`.
    fn run<M: MulAdd>(self) -> Self::Output;
}

/// `a · b + c` as this processor does it best.
pub(crate) trait MulAdd {
    /// Whether one of its registers holds 16 elements (and there are 32 of them).
    const WIDE: bool = false;

    /// `a · b + c`.
    fn mul_add(a: f32, b: f32, c: f32) -> f32;
}

/// One rounding, where there is an instruction for it.
pub(crate) struct Fused;

impl MulAdd for Fused {
    #[inline(always)]
    fn mul_add(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}

/// [`Fused`] with registers of 16 elements.
#[cfg(target_arch = "x86_64")]
struct FusedWide;

#[cfg(target_arch = "x86_64")]
impl MulAdd for FusedWide {
    const WIDE: bool = true;

    #[inline(always)]
    fn mul_add(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}

/// Two roundings.
#[cfg(not(target_arch = "aarch64"))]
pub(crate) struct Separate;

#[cfg(not(target_arch = "aarch64"))]
impl MulAdd for Separate {
    #[inline(always)]
    fn mul_add(a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }
}

/// eˣ in f32 to within 2 ulp for |x| ≤ 87; beyond it stays at e^±87. NaN stays NaN.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // 1.5 · 2²³: adding it rounds to an integer and leaves that integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let x = if x < -87.0 { -87.0 } else { x };
    let x = if x > 87.0 { 87.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    let mut sum = 1.0 / 5_040.0;
    for inverse in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        sum = sum * r + inverse;
    }
    sum * f32::from_bits(shifted.to_bits().wrapping_add(127) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_the_exponential() {
        for i in -8_600..=8_600 {
            let x = i as f32 / 100.0;
            let exact = f64::from(x).exp();
            assert!(((f64::from(exp(x)) - exact) / exact).abs() < 3e-7, "{x}");
        }
        assert!(exp(-1e30) < 1e-37 && exp(f32::NAN).is_nan());
    }
}
