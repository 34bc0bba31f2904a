//! A projection with its adapter's low-rank part, forward and backward.

use burn::tensor::Tensor;

use super::{
    super::{Gradients, Trainable},
    layer::Normed,
    mat::{Mat, failed},
    rows::{add_bias, add_low_rank, column_sums},
};
use crate::model::{Adapter, Decoder, ModelError, lora_key};

/// One linear's weights, as the loops need them.
pub(super) struct Projection {
    /// Its path in the checkpoint.
    path: String,
    weight: Tensor<2>,
    bias: Option<Vec<f32>>,
    lora: Option<LowRank>,
}

struct LowRank {
    /// `[r, in]`.
    a: Tensor<2>,
    a_values: Mat,
    /// `scale * B`, `[out, r]`.
    b: Tensor<2>,
    /// The same as `[r, out]`.
    b_transposed: Mat,
    scale: f32,
}

/// A projection's output, and its input times A.
pub(super) struct Projected {
    pub(super) y: Mat,
    pub(super) z: Option<Mat>,
}

/// Where gradients go, and which are wanted.
pub(super) struct Sink<'a> {
    pub(super) gradients: &'a mut Gradients,
    pub(super) trainable: Trainable,
}

impl Sink<'_> {
    pub(super) fn base(&self) -> bool {
        self.trainable == Trainable::Base
    }

    pub(super) fn matrix(&mut self, name: String, values: Mat) {
        let shape = [values.rows, values.cols];
        self.gradients.insert(name, values.into_tensor(shape));
    }

    pub(super) fn vector(&mut self, name: String, values: Option<Vec<f32>>) {
        if let Some(values) = values {
            let len = values.len();
            self.gradients.insert(name, Mat::new(values, 1, len).into_tensor([len]));
        }
    }
}

impl Projection {
    /// Linear number `slot` of layer `layer`.
    pub(super) fn new(
        decoder: &Decoder,
        adapter: Option<&Adapter>,
        layer: usize,
        slot: usize,
    ) -> Result<Self, ModelError> {
        let config = decoder.config();
        let linear = decoder.weights.model.layers[layer].linear(slot);
        let bias = match &linear.bias {
            None => None,
            Some(bias) => Some(host(bias.val())?),
        };
        let lora = match adapter.and_then(|a| a.lora(config.first_slot(layer) + slot)) {
            None => None,
            Some((lora, scale)) => {
                let (a, b) = (lora.lora_a.val(), lora.lora_b.val().mul_scalar(scale));
                let ([_, inputs], [outputs, _]) = (a.dims(), b.dims());
                Some(LowRank {
                    a_values: Mat::from_tensor(a.clone(), inputs)?,
                    b_transposed: Mat::from_tensor(b.clone().transpose(), outputs)?,
                    a,
                    b,
                    scale,
                })
            }
        };
        let name = config.layer_linears(layer)[slot].0;
        let path = format!("{}.layers.{layer}.{name}", config.prefix());
        Ok(Self { path, weight: linear.weight.val(), bias, lora })
    }

    pub(super) fn forward(&self, x: &Mat) -> Result<Projected, ModelError> {
        let mut y = x.times_transposed(&self.weight)?;
        if let Some(bias) = &self.bias {
            add_bias(&mut y, bias)?;
        }
        let z = match &self.lora {
            None => None,
            Some(lora) => {
                let z = x.times_transposed(&lora.a)?;
                add_low_rank(&mut y, &z, &lora.b_transposed)?;
                Some(z)
            }
        };
        Ok(Projected { y, z })
    }

    /// The input's gradient, and that of the input times A.
    pub(super) fn input(&self, dy: &Mat) -> Result<(Mat, Option<Mat>), ModelError> {
        let mut dx = dy.times(&self.weight)?;
        let dz = self.low_input(dy)?;
        if let (Some(lora), Some(dz)) = (&self.lora, &dz) {
            add_low_rank(&mut dx, dz, &lora.a_values)?;
        }
        Ok((dx, dz))
    }

    /// The gradient of the input times A alone.
    pub(super) fn low_input(&self, dy: &Mat) -> Result<Option<Mat>, ModelError> {
        self.lora.as_ref().map(|lora| dy.times(&lora.b)).transpose()
    }

    /// Sends the gradients of what is trained to `sink`; `z` is the input `x` times A.
    pub(super) fn weights(
        &self,
        x: &Mat,
        z: Option<Mat>,
        dy: &Mat,
        dz: Option<Mat>,
        sink: &mut Sink<'_>,
    ) -> Result<(), ModelError> {
        if sink.base() {
            sink.matrix(format!("{}.weight", self.path), dy.transposed_times(x)?);
            let bias = self.bias.is_some().then(|| column_sums(dy)).transpose()?;
            sink.vector(format!("{}.bias", self.path), bias);
        } else if let (Some(lora), Some(mut z), Some(dz)) = (&self.lora, z, dz) {
            z.scale(lora.scale)?;
            sink.matrix(lora_key(&self.path, "lora_B"), dy.transposed_times(&z)?);
            sink.matrix(lora_key(&self.path, "lora_A"), dz.transposed_times(x)?);
        }
        Ok(())
    }
}

/// Sums what the projections of one normed input give back to it.
pub(super) struct Inputs<'a> {
    normed: Normed<'a>,
    h: Option<Mat>,
    dh: Option<Mat>,
}

impl<'a> Inputs<'a> {
    pub(super) fn new(normed: Normed<'a>) -> Self {
        Self { normed, h: None, dh: None }
    }

    /// Adds the share of one projection, and sends its weights' gradients to `sink`.
    pub(super) fn add(
        &mut self,
        projection: &Projection,
        z: Option<Mat>,
        dy: &Mat,
        sink: &mut Sink<'_>,
    ) -> Result<(), ModelError> {
        let dz = if self.normed.want {
            let (part, dz) = projection.input(dy)?;
            match &mut self.dh {
                None => self.dh = Some(part),
                Some(dh) => dh.add(&part)?,
            }
            dz
        } else {
            projection.low_input(dy)?
        };
        let h = match &mut self.h {
            Some(h) => h,
            none => none.insert((self.normed.make)()?),
        };
        projection.weights(h, z, dy, dz, sink)
    }

    /// The input's gradient, where it is wanted.
    pub(super) fn finish(self) -> Option<Mat> {
        self.dh
    }
}

/// A small tensor's values.
pub(super) fn host<const D: usize>(tensor: Tensor<D>) -> Result<Vec<f32>, ModelError> {
    tensor.try_into_data().map_err(failed)?.try_into_vec::<f32>().map_err(failed)
}
