//! One layer of a decoder over packed rows. Which rows belong to which sequence, and what is kept of
//! their past, is the pass's own concern: it implements [`Sequences`].

use burn::tensor::{Tensor, activation};

use super::{
    adapter::Adapter,
    decoder::{Decoder, Rotations},
    delta::{DeltaRows, DeltaRule},
    ops::{from_f32, linear, rms_norm, rotate, softplus, to_f32},
    weights::{Attention, DeltaNet, Mixer},
};

/// What a pass knows of the sequences that its packed rows belong to.
pub(crate) trait Sequences {
    /// Softmax attention of layer `layer`: rotated queries `[rows, heads, dim]` and keys, values
    /// `[rows, kv_heads, dim]` to `[rows, heads * dim]`.
    fn attend(&mut self, layer: usize, q: Tensor<3>, k: Tensor<3>, v: Tensor<3>) -> Tensor<2>;

    /// The gated delta rule of layer `layer` to `[rows, value_heads * value_dim]`.
    fn recur(&mut self, layer: usize, rule: &DeltaRule<'_>, rows: DeltaRows) -> Tensor<2>;

    /// `[rows, 1]` in the model's type, 0 for padding ahead of a sequence. `None`: no padding.
    fn mask(&self) -> Option<Tensor<2>> {
        None
    }
}

/// A layer's projections by slot, with the adapter's matrices.
struct Projections<'a> {
    decoder: &'a Decoder,
    adapter: Option<&'a Adapter>,
    index: usize,
    first: usize,
}

impl Projections<'_> {
    fn project(&self, slot: usize, x: Tensor<2>) -> Tensor<2> {
        let layer = &self.decoder.weights.model.layers[self.index];
        linear(x, layer.linear(slot), self.adapter.and_then(|a| a.lora(self.first + slot)))
    }
}

impl Decoder {
    /// One layer over `x` `[rows, hidden]`.
    pub(crate) fn layer(
        &self,
        index: usize,
        adapter: Option<&Adapter>,
        x: Tensor<2>,
        rope: &Rotations,
        sequences: &mut impl Sequences,
    ) -> Tensor<2> {
        let layer = &self.weights.model.layers[index];
        let eps = self.config().norm_eps;
        let first = self.config().first_slot(index);
        let own = Projections { decoder: self, adapter, index, first };
        let h = rms_norm(x.clone(), &layer.input_layernorm, eps);
        let (mixed, slot) = match &layer.mixer {
            Mixer::SelfAttn(it) => (self.attention(&own, it, h, rope, sequences), 4),
            Mixer::LinearAttn(it) => (self.delta_net(&own, it, h, sequences), 5),
        };
        let x = x.add(mixed);
        let h = rms_norm(x.clone(), &layer.post_attention_layernorm, eps);
        let gate = own.project(slot, h.clone());
        let active = from_f32(activation::silu(to_f32(gate)), self.dtype());
        let gated = active.mul(own.project(slot + 1, h));
        x.add(own.project(slot + 2, gated))
    }

    fn attention(
        &self,
        own: &Projections<'_>,
        attention: &Attention,
        h: Tensor<2>,
        rope: &Rotations,
        sequences: &mut impl Sequences,
    ) -> Tensor<2> {
        let c = self.config();
        let rows = h.dims()[0];
        let q = own.project(0, h.clone());
        let (mut q, gate) = if attention.gated {
            let both = q.reshape([rows, c.heads, 2 * c.head_dim]);
            let part =
                |start: usize| both.clone().slice([0..rows, 0..c.heads, start..start + c.head_dim]);
            (part(0), Some(part(c.head_dim).reshape([rows, c.heads * c.head_dim])))
        } else {
            (q.reshape([rows, c.heads, c.head_dim]), None)
        };
        let mut k = own.project(1, h.clone()).reshape([rows, c.kv_heads, c.head_dim]);
        let v = own.project(2, h).reshape([rows, c.kv_heads, c.head_dim]);
        if let Some(norm) = &attention.q_norm {
            q = rms_norm(q, norm, c.norm_eps);
        }
        if let Some(norm) = &attention.k_norm {
            k = rms_norm(k, norm, c.norm_eps);
        }
        let q = rotate(q, rope.0.clone(), rope.1.clone());
        let k = rotate(k, rope.0.clone(), rope.1.clone());
        let out = sequences.attend(own.index, q, k, v);
        own.project(
            3,
            match gate {
                None => out,
                Some(gate) => out.mul(from_f32(activation::sigmoid(to_f32(gate)), self.dtype())),
            },
        )
    }

    fn delta_net(
        &self,
        own: &Projections<'_>,
        net: &DeltaNet,
        h: Tensor<2>,
        sequences: &mut impl Sequences,
    ) -> Tensor<2> {
        let h = match sequences.mask() {
            None => h,
            Some(mask) => h.mul(mask),
        };
        let (rows, shape) = (h.dims()[0], &net.shape);
        let dtype = self.dtype();
        let u = own.project(0, h.clone());
        let z = own.project(1, h.clone());
        let b = own.project(2, h.clone());
        let a = own.project(3, h);
        // The gate is rounded to the model's type, the decay is not.
        let beta = to_f32(from_f32(activation::sigmoid(to_f32(b)), dtype));
        let rate = to_f32(net.a_log.val()).exp().neg();
        let steps = softplus(to_f32(a).add(to_f32(net.dt_bias.val()).unsqueeze()));
        let g = steps.mul(rate.unsqueeze());
        let rule = DeltaRule { shape, convolution: net.conv1d.weight.val() };
        let out = sequences.recur(own.index, &rule, DeltaRows { u, beta, g });
        let heads = [rows, shape.value_heads, shape.value_dim];
        let out = rms_norm(from_f32(out, dtype).reshape(heads), &net.norm, self.config().norm_eps);
        let gate = activation::silu(to_f32(z)).reshape(heads);
        let out = from_f32(to_f32(out).mul(gate), dtype);
        own.project(4, out.reshape([rows, shape.values()]))
    }
}
