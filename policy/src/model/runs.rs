//! Consecutive runs of packed rows, each a sequence or a part of one, as a batch padded at the right
//! and back.

use burn::tensor::{Int, Tensor, TensorData};

use super::{
    decoder::Decoder,
    delta::{DeltaBatch, DeltaRows},
};

/// Runs of packed rows that follow each other.
#[derive(Debug)]
pub(crate) struct Runs {
    first: usize,
    rows: usize,
    count: usize,
    longest: usize,
    ragged: Option<Ragged>,
}

/// Where the rows of runs of unequal lengths lie in the batch.
#[derive(Debug)]
struct Ragged {
    /// Row of each place, counted from the first run's first.
    pad: Tensor<1, Int>,
    /// Place of each row.
    unpad: Tensor<1, Int>,
    /// `[runs, longest, 1]`, 0 in the padding.
    real: Tensor<3>,
}

impl Runs {
    /// Runs of these lengths (at least one), the first of which starts at row `first`.
    pub(crate) fn new(decoder: &Decoder, first: usize, lens: &[usize]) -> Self {
        let rows = lens.iter().sum();
        let longest = lens.iter().copied().max().unwrap_or(0);
        let even = lens.iter().all(|&len| len == longest);
        let ragged = (!even).then(|| {
            let (mut pad, mut unpad, mut real) = (Vec::new(), Vec::new(), Vec::new());
            let mut start = 0;
            for (number, &len) in lens.iter().enumerate() {
                let last = len.saturating_sub(1);
                pad.extend((0..longest).map(|i| (start + i.min(last)) as u32));
                real.extend((0..longest).map(|i| if i < len { 1.0f32 } else { 0.0 }));
                unpad.extend((0..len).map(|i| (number * longest + i) as u32));
                start += len;
            }
            let real = TensorData::new(real, [lens.len(), longest, 1]);
            Ragged {
                pad: decoder.int(&pad),
                unpad: decoder.int(&unpad),
                real: Tensor::from_data(real, decoder.device()),
            }
        });
        Self { first, rows, count: lens.len(), longest, ragged }
    }

    /// Their number.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// The runs' rows of `rows` as a batch.
    pub(crate) fn split(&self, rows: &DeltaRows) -> DeltaBatch {
        let part = |x: &Tensor<2>| {
            let width = x.dims()[1];
            let own = x.clone().slice([self.first..self.first + self.rows, 0..width]);
            let own = match &self.ragged {
                None => own,
                Some(ragged) => own.select(0, ragged.pad.clone()),
            };
            own.reshape([self.count, self.longest, width])
        };
        let gate = |x: &Tensor<2>| match &self.ragged {
            None => part(x),
            Some(ragged) => part(x).mul(ragged.real.clone()),
        };
        DeltaBatch { u: part(&rows.u), beta: gate(&rows.beta), g: gate(&rows.g) }
    }

    /// A batch `[runs, longest, heads, dim]` as packed rows `[rows, heads * dim]`.
    pub(crate) fn join(&self, x: Tensor<4>) -> Tensor<2> {
        let [count, longest, heads, dim] = x.dims();
        let x = x.reshape([count * longest, heads * dim]);
        match &self.ragged {
            None => x,
            Some(ragged) => x.select(0, ragged.unpad.clone()),
        }
    }
}
