//! Runs plain Rust loops compiled for the processor's vector instructions.
//!
//! The release targets a baseline x86-64, where the compiler may use 128-bit registers only. Code
//! that is reached through [`vectorized`] is compiled a second time with AVX2 and chosen at run time.
//! Nothing here contracts or reorders floating-point operations: both versions give equal bits.

/// Calls `op` with the widest instructions that this processor has.
///
/// `op` and what it calls must be `#[inline(always)]` to be compiled along with the caller.
#[inline]
pub(crate) fn vectorized<Op: Vectorized>(op: Op) -> Op::Output {
    #[cfg(target_arch = "x86_64")]
    if let Some(v3) = pulp::x86::V3::try_new() {
        return pulp::Simd::vectorize(v3, Wide(op));
    }
    op.run()
}

/// A loop nest with its inputs, for [`vectorized`].
pub(crate) trait Vectorized {
    /// What it returns.
    type Output;
    /// The loops; implementations must be `#[inline(always)]`.
    fn run(self) -> Self::Output;
}

#[cfg(target_arch = "x86_64")]
struct Wide<Op>(Op);

#[cfg(target_arch = "x86_64")]
impl<Op: Vectorized> pulp::WithSimd for Wide<Op> {
    type Output = Op::Output;

    #[inline(always)]
    fn with_simd<S: pulp::Simd>(self, _: S) -> Op::Output {
        self.0.run()
    }
}
