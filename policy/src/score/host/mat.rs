//! Row-major f32 matrices that plain loops and Burn's matrix products share without copies.

use burn::tensor::{Device, Tensor, TensorData};
use rayon::prelude::*;

use super::gemm;
use crate::model::ModelError;

/// `[rows, cols]`, row-major.
#[derive(Debug)]
pub(super) struct Mat {
    data: TensorData,
    pub(super) rows: usize,
    pub(super) cols: usize,
}

pub(super) fn failed(error: impl std::fmt::Display) -> ModelError {
    ModelError::Device(error.to_string())
}

impl Mat {
    pub(super) fn new(values: Vec<f32>, rows: usize, cols: usize) -> Self {
        Self { data: TensorData::new(values, [rows, cols]), rows, cols }
    }

    pub(super) fn zeros(rows: usize, cols: usize) -> Self {
        Self::new(vec![0.0; rows * cols], rows, cols)
    }

    /// A tensor's values as a matrix of `cols` columns. Copies nothing if the tensor is unshared.
    pub(super) fn from_tensor<const D: usize>(
        tensor: Tensor<D>,
        cols: usize,
    ) -> Result<Self, ModelError> {
        let data = tensor.try_into_data().map_err(failed)?;
        let rows = data.num_elements() / cols.max(1);
        Ok(Self { data, rows, cols })
    }

    pub(super) fn read(&self) -> Result<&[f32], ModelError> {
        self.data.as_slice().map_err(failed)
    }

    pub(super) fn write(&mut self) -> Result<&mut [f32], ModelError> {
        self.data.as_mut_slice().map_err(failed)
    }

    pub(super) fn copy(&self) -> Result<Self, ModelError> {
        Ok(Self::new(self.read()?.to_vec(), self.rows, self.cols))
    }

    /// The matrix as a tensor of any shape with as many elements.
    pub(super) fn into_tensor<const D: usize>(self, shape: [usize; D]) -> Tensor<D> {
        let (bytes, _, dtype) = self.data.into_parts();
        Tensor::from_data(TensorData::from_bytes(bytes, shape, dtype), &Device::flex())
    }

    /// `self · wᵀ` for `w` `[outputs, cols]`.
    pub(super) fn times_transposed(&self, w: &Tensor<2>) -> Result<Self, ModelError> {
        Ok(Self::new(gemm::times_transposed(self.read()?, w)?, self.rows, w.dims()[0]))
    }

    /// `self · w` for `w` `[cols, outputs]`.
    pub(super) fn times(&self, w: &Tensor<2>) -> Result<Self, ModelError> {
        Ok(Self::new(gemm::times(self.read()?, w)?, self.rows, w.dims()[1]))
    }

    /// `selfᵀ · other`, `[cols, other.cols]`.
    pub(super) fn transposed_times(&self, other: &Self) -> Result<Self, ModelError> {
        let product = gemm::transposed_times(self.read()?, self.cols, other.read()?, other.cols);
        Ok(Self::new(product, self.cols, other.cols))
    }

    /// Rows `rows`, in that order.
    pub(super) fn pick(&self, rows: &[u32]) -> Result<Self, ModelError> {
        let (values, cols) = (self.read()?, self.cols);
        let picked = rows.iter().flat_map(|&row| &values[row as usize * cols..][..cols]);
        Ok(Self::new(picked.copied().collect(), rows.len(), cols))
    }

    /// The transpose of [`Mat::pick`]: each row added to row `rows[i]` of `height` rows, in order.
    pub(super) fn spread(&self, rows: &[u32], height: usize) -> Result<Self, ModelError> {
        let cols = self.cols;
        let mut sum = Self::zeros(height, cols);
        let to = sum.write()?;
        for (&row, from) in rows.iter().zip(self.read()?.chunks_exact(cols)) {
            let to = &mut to[row as usize * cols..][..cols];
            to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
        }
        Ok(sum)
    }

    /// Multiplies every element.
    pub(super) fn scale(&mut self, factor: f32) -> Result<(), ModelError> {
        self.write()?.iter_mut().for_each(|value| *value *= factor);
        Ok(())
    }

    /// Adds another matrix of the same shape.
    pub(super) fn add(&mut self, other: &Self) -> Result<(), ModelError> {
        let rows = rows_per_task(self.cols);
        let width = rows * self.cols;
        let other = other.read()?;
        self.write()?.par_chunks_mut(width).zip(other.par_chunks(width)).for_each(|(to, from)| {
            to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
        });
        Ok(())
    }
}

/// Rows of `cols` elements that are worth a task of their own.
pub(super) fn rows_per_task(cols: usize) -> usize {
    (1_usize << 14).div_ceil(cols.max(1)).max(1)
}
