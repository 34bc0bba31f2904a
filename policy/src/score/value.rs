//! A value head: what a rollout is still worth, as a linear function of the normed hidden state that
//! predicts each scored id. Its parameters are trained by an optimizer of their own.

use std::{collections::BTreeMap, fs, path::Path};

use burn::tensor::{Device, Tensor, TensorData};
use safetensors::{Dtype, SafeTensors};

use super::{Gradients, Parameters};
use crate::model::{Decoder, ModelError, from_f32, safetensors_bytes, to_f32};

const WEIGHT: &str = "value_head.weight";
const BIAS: &str = "value_head.bias";

/// `value = weight · hidden + bias`, in f32.
#[derive(Clone, Debug)]
pub struct ValueHead {
    weight: Tensor<1>,
    bias: Tensor<1>,
}

impl ValueHead {
    /// How its parameters' names start.
    pub const PREFIX: &'static str = "value_head.";
    /// The file beside an adapter that holds one.
    pub const FILE: &'static str = "value_head.safetensors";

    /// A head that gives 0 everywhere.
    pub fn zeros(decoder: &Decoder) -> Self {
        let device = decoder.device();
        Self {
            weight: Tensor::zeros([decoder.config().hidden], device),
            bias: Tensor::zeros([1], device),
        }
    }

    /// Its parameters as deterministic safetensors bytes: `value_head.weight` `[hidden]` and
    /// `value_head.bias` `[1]`.
    ///
    /// # Errors
    /// A failing device.
    pub fn to_safetensors(&self) -> Result<Vec<u8>, ModelError> {
        let entry = |tensor: &Tensor<1>| (tensor.dims().to_vec(), tensor.clone());
        let tensors = BTreeMap::from([
            (WEIGHT.to_owned(), entry(&self.weight)),
            (BIAS.to_owned(), entry(&self.bias)),
        ]);
        safetensors_bytes("rollcall", "value head", &tensors)
    }

    /// Writes [`ValueHead::FILE`] into a directory.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn save(&self, dir: &Path) -> Result<(), ModelError> {
        let path = dir.join(Self::FILE);
        fs::write(&path, self.to_safetensors()?).map_err(ModelError::io(&path))
    }

    /// Reads what [`ValueHead::to_safetensors`] gave, for a decoder of the same width.
    ///
    /// # Errors
    /// Other bytes.
    pub fn from_safetensors(bytes: &[u8], decoder: &Decoder) -> Result<Self, ModelError> {
        let wrong = |reason: String| ModelError::Input(format!("value head: {reason}"));
        let file = SafeTensors::deserialize(bytes).map_err(|e| wrong(e.to_string()))?;
        let read = |name: &str, len: usize| -> Result<Tensor<1>, ModelError> {
            let view = file.tensor(name).map_err(|e| wrong(e.to_string()))?;
            if view.dtype() != Dtype::F32 || view.shape() != [len] {
                return Err(wrong(format!("{name} is not an f32 tensor of shape [{len}]")));
            }
            let (floats, _) = view.data().as_chunks::<4>();
            let values: Vec<f32> = floats.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
            Ok(Tensor::from_data(TensorData::new(values, [len]), decoder.device()))
        };
        Ok(Self { weight: read(WEIGHT, decoder.config().hidden)?, bias: read(BIAS, 1)? })
    }

    /// Values of hidden states `[positions, hidden]`.
    pub(super) fn values(&self, hidden: &Tensor<2>) -> Result<Vec<f32>, ModelError> {
        self.check_width(hidden.dims()[1])?;
        let weight = self.weight.clone().unsqueeze_dim::<2>(1);
        let values = to_f32(hidden.clone()).matmul(weight).add(self.bias.clone().unsqueeze());
        host(&values.flatten::<1>(0, 1))
    }

    /// Adds its share to `dL/dhidden`, and its own gradients to `gradients`.
    pub(super) fn backward(
        &self,
        hidden: &Tensor<2>,
        slopes: &[f32],
        dhidden: Tensor<2>,
        gradients: &mut Gradients,
    ) -> Tensor<2> {
        let data = TensorData::new(slopes.to_vec(), [slopes.len(), 1]);
        let slopes = Tensor::<2>::from_data(data, &dhidden.device());
        let own = to_f32(hidden.clone()).mul(slopes.clone()).sum_dim(0);
        gradients.insert(WEIGHT.into(), own);
        gradients.insert(BIAS.into(), slopes.clone().sum());
        let share = slopes.matmul(self.weight.clone().unsqueeze_dim::<2>(0));
        let dtype = dhidden.dtype();
        dhidden.add(from_f32(share, dtype))
    }

    /// [`ValueHead::values`] of plain rows, each sum in one fixed order.
    pub(super) fn values_on_host(
        &self,
        hidden: &[f32],
        width: usize,
    ) -> Result<Vec<f32>, ModelError> {
        self.check_width(width)?;
        let (weight, bias) = (host(&self.weight)?, host(&self.bias)?);
        let bias = f64::from(bias.first().copied().unwrap_or_default());
        let value = |row: &[f32]| {
            let products = row.iter().zip(&weight).map(|(x, w)| f64::from(*x) * f64::from(*w));
            (products.sum::<f64>() + bias) as f32
        };
        Ok(hidden.chunks_exact(width.max(1)).map(value).collect())
    }

    /// [`ValueHead::backward`] on plain rows.
    pub(super) fn backward_on_host(
        &self,
        hidden: &[f32],
        slopes: &[f32],
        dhidden: &mut [f32],
        gradients: &mut Gradients,
    ) -> Result<(), ModelError> {
        let weight = host(&self.weight)?;
        let mut own = vec![0.0_f64; weight.len()];
        let rows = hidden.chunks_exact(weight.len()).zip(dhidden.chunks_exact_mut(weight.len()));
        for ((hidden, dhidden), slope) in rows.zip(slopes) {
            for ((own, x), (dx, w)) in
                own.iter_mut().zip(hidden).zip(dhidden.iter_mut().zip(&weight))
            {
                *own += f64::from(*slope) * f64::from(*x);
                *dx += slope * w;
            }
        }
        let own: Vec<f32> = own.into_iter().map(|value| value as f32).collect();
        let bias = slopes.iter().copied().map(f64::from).sum::<f64>() as f32;
        let device = self.weight.device();
        gradients.insert(WEIGHT.into(), flat(own, &device));
        gradients.insert(BIAS.into(), flat(vec![bias], &device));
        Ok(())
    }

    /// Whether it reads hidden states of this width.
    pub(super) fn check_width(&self, width: usize) -> Result<(), ModelError> {
        match self.weight.dims()[0] {
            own if own == width => Ok(()),
            own => Err(ModelError::Input(format!(
                "a value head of width {own} cannot read hidden states of width {width}"
            ))),
        }
    }
}

impl Parameters for ValueHead {
    fn update(&mut self, f: &mut dyn FnMut(&str, Tensor<1>) -> Tensor<1>) {
        self.bias = f(BIAS, self.bias.clone());
        self.weight = f(WEIGHT, self.weight.clone());
    }
}

fn flat(values: Vec<f32>, device: &Device) -> Tensor<1> {
    let len = values.len();
    Tensor::from_data(TensorData::new(values, [len]), device)
}

fn host(tensor: &Tensor<1>) -> Result<Vec<f32>, ModelError> {
    let data = tensor.try_to_data().map_err(|e| ModelError::Device(e.to_string()))?;
    data.try_into_vec::<f32>().map_err(|e| ModelError::Device(e.to_string()))
}
