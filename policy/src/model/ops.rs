//! The decoder's building blocks on Burn tensors, the same for every device, with or without
//! gradients. Rounding follows transformers: norms and softmax in f32, the rest in the model's type.

use burn::tensor::{DType, Tensor, activation};

use super::{
    adapter::Lora,
    tower::LayerNorm,
    weights::{Linear, Norm},
};

/// Of every layer norm.
const LAYER_NORM_EPS: f64 = 1e-6;

/// RMS norm over the last dimension.
pub(crate) fn rms_norm<const D: usize>(x: Tensor<D>, norm: &Norm, eps: f64) -> Tensor<D> {
    let dtype = x.dtype();
    let x = to_f32(x);
    let mean = x.clone().square().mean_dim(D - 1);
    let x = x.mul(mean.add_scalar(eps).sqrt().recip());
    let weight = norm.weight.val();
    if norm.zero_centred {
        from_f32(x.mul(to_f32(weight).add_scalar(1.0).unsqueeze()), dtype)
    } else {
        from_f32(x, dtype).mul(weight.unsqueeze())
    }
}

/// Layer norm over the last dimension.
pub(crate) fn layer_norm(x: Tensor<2>, norm: &LayerNorm) -> Tensor<2> {
    let dtype = x.dtype();
    let x = to_f32(x);
    let x = x.clone().sub(x.mean_dim(1));
    let scale = x.clone().square().mean_dim(1).add_scalar(LAYER_NORM_EPS).sqrt().recip();
    let x = x.mul(scale).mul(to_f32(norm.weight.val()).unsqueeze());
    from_f32(x.add(to_f32(norm.bias.val()).unsqueeze()), dtype)
}

/// The Gaussian error linear unit.
pub(crate) fn gelu(x: Tensor<2>) -> Tensor<2> {
    let share = x.clone().mul_scalar(std::f64::consts::FRAC_1_SQRT_2).erf().add_scalar(1.0);
    x.mul(share).mul_scalar(0.5)
}

/// The same by its approximation with a hyperbolic tangent.
pub(crate) fn gelu_tanh(x: Tensor<2>) -> Tensor<2> {
    let cube = x.clone().mul(x.clone()).mul(x.clone()).mul_scalar(0.044_715);
    let inner = x.clone().add(cube).mul_scalar((2.0 / std::f64::consts::PI).sqrt());
    x.mul(inner.tanh().add_scalar(1.0)).mul_scalar(0.5)
}

/// `ln(1 + eˣ)` without overflow.
pub(crate) fn softplus<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    activation::relu(x.clone()).add(x.abs().neg().exp().log1p())
}

/// `x Wᵀ + b`, plus the adapter's low-rank part; `x` is `[rows, in]`.
pub(crate) fn linear(x: Tensor<2>, linear: &Linear, lora: Option<(&Lora, f32)>) -> Tensor<2> {
    let low = lora.map(|(lora, scale)| low_rank(x.clone(), lora, scale));
    let mut y = x.matmul(linear.weight.val().transpose());
    if let Some(bias) = &linear.bias {
        y = y.add(bias.val().unsqueeze());
    }
    match low {
        None => y,
        Some(low) => {
            let dtype = y.dtype();
            y.add(from_f32(low, dtype))
        }
    }
}

fn low_rank(x: Tensor<2>, lora: &Lora, scale: f32) -> Tensor<2> {
    let inner = to_f32(x).matmul(lora.lora_a.val().transpose()).mul_scalar(scale);
    inner.matmul(lora.lora_b.val().transpose())
}

/// Rotates pairs `(i, i + half)` of the leading `2 * half` elements of each head; `x` is
/// `[rows, heads, head_dim]`, `cos` and `sin` are `[rows, 1, half]`.
pub(crate) fn rotate(x: Tensor<3>, cos: Tensor<3>, sin: Tensor<3>) -> Tensor<3> {
    let [rows, heads, dim] = x.dims();
    let half = cos.dims()[2];
    let part = |from: usize, to: usize| x.clone().slice([0..rows, 0..heads, from..to]);
    let (low, high) = (part(0, half), part(half, 2 * half));
    let rotated_low = low.clone().mul(cos.clone()).sub(high.clone().mul(sin.clone()));
    let rotated_high = high.mul(cos).add(low.mul(sin));
    let mut parts = vec![rotated_low, rotated_high];
    if 2 * half < dim {
        parts.push(part(2 * half, dim));
    }
    Tensor::cat(parts, 2)
}

/// Softmax attention of `q` `[batch, heads, rows, dim]` over `k` and `v` `[batch, heads, keys, dim]`
/// plus `bias` (0 or hugely negative), broadcast to `[batch, heads, rows, keys]`.
pub(crate) fn attend(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    bias: Option<Tensor<4>>,
) -> Tensor<4> {
    let dtype = q.dtype();
    let scale = 1.0 / (q.dims()[3] as f64).sqrt();
    let mut scores = to_f32(q.matmul(k.swap_dims(2, 3))).mul_scalar(scale);
    if let Some(bias) = bias {
        scores = scores.add(bias);
    }
    from_f32(activation::softmax(scores, 3), dtype).matmul(v)
}

pub(crate) fn to_f32<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    if x.dtype() == DType::F32 { x } else { x.cast(DType::F32) }
}

pub(crate) fn from_f32<const D: usize>(x: Tensor<D>, dtype: DType) -> Tensor<D> {
    if dtype == DType::F32 { x } else { x.cast(dtype) }
}
