//! Weights in panels of 16 outputs, as the product kernel streams them.
//!
//! Checkpoints are mostly written in bf16. Where every value of a weight is one, it is kept as one, at
//! half the memory and half the traffic, and widened in the kernel: the numbers are the same.

use super::panels::{Chunk, W};

/// 16 values as bf16, the upper halves of their f32.
pub(super) type Half = [u16; W];

/// 16 neighbouring values in one of the forms in which they are kept.
pub(super) trait Stored: Copy + Send + Sync {
    /// The values.
    fn widen(&self) -> Chunk;
}

impl Stored for Chunk {
    #[inline(always)]
    fn widen(&self) -> Chunk {
        *self
    }
}

impl Stored for Half {
    #[inline(always)]
    fn widen(&self) -> Chunk {
        self.map(|half| f32::from_bits(u32::from(half) << 16))
    }
}

/// A matrix `[out, in]` in panels of 16 outputs: panel `p` is `[in][16]`, inputs padded to a multiple
/// of 16 and outputs as well, with zeros.
#[derive(Clone, Debug)]
pub(super) struct Matrix<S> {
    pub outputs: usize,
    /// Chunks of inputs: `in` / 16, rounded up.
    pub depth: usize,
    data: Vec<S>,
}

impl<T: Copy + Default> Matrix<[T; W]>
where
    [T; W]: Stored,
{
    /// Packs row-major `[outputs, inputs]` values, each as `store` gives it.
    pub(super) fn pack(
        values: &[f32],
        outputs: usize,
        inputs: usize,
        store: impl Fn(f32) -> T,
    ) -> Self {
        let (depth, panels) = (inputs.div_ceil(W), outputs.div_ceil(W));
        let mut data = vec![[T::default(); W]; panels * depth * W];
        for (output, row) in values.chunks(inputs.max(1)).take(outputs).enumerate() {
            let panel = &mut data[output / W * depth * W..];
            for (chunk, value) in panel.iter_mut().zip(row) {
                chunk[output % W] = store(*value);
            }
        }
        Self { outputs, depth, data }
    }
}

impl<S: Stored> Matrix<S> {
    /// Panel `panel`, 16 inputs at a time.
    #[inline(always)]
    pub(super) fn panel(&self, panel: usize) -> &[[S; W]] {
        self.data[panel * self.depth * W..][..self.depth * W].as_chunks::<W>().0
    }

    /// The elements of at most `panels` panels from panel `panel` on.
    #[inline(always)]
    pub(super) fn ahead(&self, panel: usize, panels: usize) -> &[S] {
        let size = self.depth * W;
        let rest = self.data.get(panel * size..).unwrap_or_default();
        rest.get(..panels * size).unwrap_or(rest)
    }

    fn read_row(&self, output: usize, to: &mut [f32]) {
        let panel = self.data.iter().skip(output / W * self.depth * W);
        for (to, chunk) in to.iter_mut().zip(panel) {
            *to = chunk.widen()[output % W];
        }
    }
}

/// A weight and its bias.
#[derive(Clone, Debug)]
pub(super) struct Packed {
    pub weight: Weight,
    pub bias: Option<Vec<Chunk>>,
}

/// A weight in the smallest form that keeps its values.
#[derive(Clone, Debug)]
pub(super) enum Weight {
    /// As f32.
    Full(Matrix<Chunk>),
    /// As bf16.
    Half(Matrix<Half>),
}

impl Packed {
    /// Packs row-major `[outputs, inputs]` values.
    pub(super) fn new(values: &[f32], outputs: usize, inputs: usize) -> Self {
        let weight = if values.iter().all(|value| value.to_bits() & 0xFFFF == 0) {
            let upper = |value: f32| (value.to_bits() >> 16) as u16;
            Weight::Half(Matrix::pack(values, outputs, inputs, upper))
        } else {
            Weight::Full(Matrix::pack(values, outputs, inputs, |value| value))
        };
        Self { weight, bias: None }
    }

    /// Adds a bias of `outputs` elements.
    pub(super) fn with_bias(mut self, bias: Option<&[f32]>) -> Self {
        self.bias = bias.map(chunked);
        self
    }

    /// Rows of the weight.
    pub(super) fn outputs(&self) -> usize {
        match &self.weight {
            Weight::Full(matrix) => matrix.outputs,
            Weight::Half(matrix) => matrix.outputs,
        }
    }

    /// Elements, padding included.
    pub(super) fn elements(&self) -> usize {
        match &self.weight {
            Weight::Full(matrix) => matrix.data.len() * W,
            Weight::Half(matrix) => matrix.data.len() * W,
        }
    }

    /// Row `output` of the weight: its first `to.len()` inputs.
    pub(super) fn read_row(&self, output: usize, to: &mut [f32]) {
        match &self.weight {
            Weight::Full(matrix) => matrix.read_row(output, to),
            Weight::Half(matrix) => matrix.read_row(output, to),
        }
    }
}

/// `values` in chunks, padded with zeros.
pub(super) fn chunked(values: &[f32]) -> Vec<Chunk> {
    let chunk = |part: &[f32]| std::array::from_fn(|i| part.get(i).copied().unwrap_or(0.0));
    values.chunks(W).map(chunk).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packed_row_reads_back_in_the_smallest_form_that_holds_it() {
        let quarter = |i: usize| (i % 64) as f32 * 0.25 - 3.0;
        let special = [0.0, -0.0, f32::MIN_POSITIVE, f32::INFINITY, -1.5];
        let halves: Vec<f32> = (0..20 * 37).map(quarter).chain(special).collect();
        let fulls: Vec<f32> = halves.iter().map(|v| v + 1e-3).collect();
        for (values, half) in [(&halves[5..], true), (&fulls[5..], false)] {
            let packed = Packed::new(values, 20, 37);
            assert_eq!(matches!(packed.weight, Weight::Half(_)), half);
            let mut row = vec![0.0; 37];
            for o in 0..20 {
                packed.read_row(o, &mut row);
                let bits = |row: &[f32]| row.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&row), bits(&values[o * 37..][..37]));
            }
        }
        let mut one = fulls.clone();
        one.iter_mut().skip(1).for_each(|v| *v = 1.0);
        assert!(matches!(Packed::new(&one[..16], 4, 4).weight, Weight::Full(_)));
    }
}
