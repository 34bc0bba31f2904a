//! Attention over a packed batch: the prefix over itself, each continuation over the prefix and
//! itself. Continuations are padded to the longest only here.

use burn::tensor::{Int, Tensor, TensorData, activation};

use super::layout::Layout;
use crate::model::{Decoder, MASKED, attend, from_f32, to_f32};

/// Masks and index lists of a layout, made once for all layers.
pub(crate) struct Masks {
    /// `[1, 1, prefix * group, prefix]`.
    prefix: Option<Tensor<4>>,
    /// `[rows, 1, longest * group, longest]`.
    own: Tensor<4>,
    /// Packed row of each padded place, `[rows * longest]`.
    pad: Tensor<1, Int>,
    /// Padded place of each continuation id.
    unpad: Tensor<1, Int>,
    longest: usize,
}

impl Masks {
    pub(crate) fn new(decoder: &Decoder, layout: &Layout) -> Self {
        let c = decoder.config();
        let group = c.heads / c.kv_heads;
        let causal = |len: usize, longest: usize, bias: &mut Vec<f32>| {
            for query in 0..longest {
                // A padded query sees the first key, so that its row is finite.
                let seen = if query < len { query + 1 } else { 1 };
                for _ in 0..group {
                    bias.resize(bias.len() + seen, 0.0);
                    bias.resize(bias.len() + longest - seen, MASKED);
                }
            }
        };
        let tensor = |bias: Vec<f32>, rows: usize, len: usize| {
            let data = TensorData::new(bias, [rows, 1, len * group, len]);
            Tensor::from_data(data, decoder.device())
        };
        let prefix = (layout.prefix > 0).then(|| {
            let mut bias = Vec::new();
            causal(layout.prefix, layout.prefix, &mut bias);
            tensor(bias, 1, layout.prefix)
        });
        let longest = layout.rows.iter().map(|row| row.1).max().unwrap_or(0);
        let (mut own, mut pad, mut unpad) = (Vec::new(), Vec::new(), Vec::new());
        for (number, &(start, len)) in layout.rows.iter().enumerate() {
            causal(len, longest, &mut own);
            pad.extend((0..longest).map(|i| (start + i.min(len - 1)) as u32));
            unpad.extend((0..len).map(|i| (number * longest + i) as u32));
        }
        Self {
            prefix,
            own: tensor(own, layout.rows.len(), longest),
            pad: decoder.int(&pad),
            unpad: decoder.int(&unpad),
            longest,
        }
    }

    /// Rotated `q` `[ids, heads, dim]` over `k` and `v` `[ids, kv_heads, dim]`, to
    /// `[ids, heads * dim]`.
    pub(crate) fn attend(
        &self,
        decoder: &Decoder,
        layout: &Layout,
        q: Tensor<3>,
        k: Tensor<3>,
        v: Tensor<3>,
    ) -> Tensor<2> {
        let c = decoder.config();
        let (prefix, rows, longest) = (layout.prefix, layout.rows.len(), self.longest);
        let (width, kv_width) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let total = layout.ids.len();
        let q = q.reshape([total, width]);
        let k = k.reshape([total, kv_width]);
        let v = v.reshape([total, kv_width]);
        let group = c.heads / c.kv_heads;
        let queries = |x: Tensor<2>, rows: usize, len: usize| {
            x.reshape([rows, len, c.kv_heads, group * c.head_dim]).swap_dims(1, 2).reshape([
                rows,
                c.kv_heads,
                len * group,
                c.head_dim,
            ])
        };
        let keys = |x: Tensor<2>, rows: usize, len: usize| {
            x.reshape([rows, len, c.kv_heads, c.head_dim]).swap_dims(1, 2)
        };
        let back = |x: Tensor<4>, rows: usize, len: usize| {
            x.reshape([rows, c.kv_heads, len, group * c.head_dim])
                .swap_dims(1, 2)
                .reshape([rows * len, width])
        };
        let padded = |x: &Tensor<2>| x.clone().select(0, self.pad.clone());
        let own_q = queries(padded(&q), rows, longest);
        let (own_k, own_v) = (keys(padded(&k), rows, longest), keys(padded(&v), rows, longest));
        let Some(mask) = &self.prefix else {
            let out = attend(own_q, own_k, own_v, Some(self.own.clone()));
            return back(out, rows, longest).select(0, self.unpad.clone());
        };
        let first = |x: &Tensor<2>, width: usize| x.clone().slice([0..prefix, 0..width]);
        let prefix_k = keys(first(&k, kv_width), 1, prefix);
        let prefix_v = keys(first(&v, kv_width), 1, prefix);
        let prefix_out = attend(
            queries(first(&q, width), 1, prefix),
            prefix_k.clone(),
            prefix_v.clone(),
            Some(mask.clone()),
        );
        let dtype = own_q.dtype();
        let scale = 1.0 / (c.head_dim as f64).sqrt();
        let shared = |x: Tensor<4>| {
            // All rows' queries of one head as one matrix: the prefix's keys are read once.
            let [_, heads, len, dim] = x.dims();
            x.swap_dims(0, 1).reshape([1, heads, rows * len, dim])
        };
        let apart = |x: Tensor<4>| {
            let [_, heads, len, dim] = x.dims();
            x.reshape([heads, rows, len / rows, dim]).swap_dims(0, 1)
        };
        let over_prefix = apart(shared(own_q.clone()).matmul(prefix_k.swap_dims(2, 3)));
        let over_own = to_f32(own_q.matmul(own_k.swap_dims(2, 3))).mul_scalar(scale);
        let scores = Tensor::cat(
            vec![to_f32(over_prefix).mul_scalar(scale), over_own.add(self.own.clone())],
            3,
        );
        let p = from_f32(activation::softmax(scores, 3), dtype);
        let lines = longest * group;
        let part = |range: std::ops::Range<usize>| {
            p.clone().slice([0..rows, 0..c.kv_heads, 0..lines, range])
        };
        let from_prefix = apart(shared(part(0..prefix)).matmul(prefix_v));
        let from_own = part(prefix..prefix + longest).matmul(own_v);
        let own_out = back(from_prefix.add(from_own), rows, longest);
        Tensor::cat(vec![back(prefix_out, 1, prefix), own_out.select(0, self.unpad.clone())], 0)
    }
}
