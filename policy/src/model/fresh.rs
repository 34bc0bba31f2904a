//! Decoders that no checkpoint holds yet: random weights to train from nothing, and writing the
//! weights of a trained one back in the format that was read.

use std::{collections::BTreeMap, fs, path::Path};

use burn::{
    module::{Module, ModuleVisitor, Param},
    tensor::{DType, Device, Tensor, TensorData},
};

use super::{
    bytes::safetensors_bytes,
    config::ModelConfig,
    decoder::Decoder,
    error::ModelError,
    random::Draws,
    weights::{Source, Weights},
};

/// The spread of a fresh weight, as transformers' `initializer_range`.
const SPREAD: f64 = 0.02;

struct Fresh<'a> {
    device: &'a Device,
    seed: u64,
}

impl Source for Fresh<'_> {
    type Error = std::convert::Infallible;

    /// Norms are one, biases zero.
    fn vector(&mut self, name: &str, len: usize) -> Result<Tensor<1>, Self::Error> {
        let value = if name.ends_with(".bias") { 0.0 } else { 1.0 };
        let data = TensorData::new(vec![value; len], [len]);
        Ok(Tensor::from_data(data, (self.device, DType::F32)))
    }

    fn matrix(&mut self, name: &str, shape: [usize; 2]) -> Result<Tensor<2>, Self::Error> {
        let values = Draws::new("rollcall-weight-init-v1", self.seed, name)
            .normals(shape[0] * shape[1], SPREAD);
        Ok(Tensor::from_data(TensorData::new(values, shape), (self.device, DType::F32)))
    }
}

/// Collects the weights by name.
#[derive(Default)]
struct Names {
    path: Vec<String>,
    tensors: BTreeMap<String, (Vec<usize>, Tensor<1>)>,
}

impl ModuleVisitor for Names {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.val();
        let shape = value.dims().to_vec();
        self.tensors.insert(self.path.join("."), (shape, value.flatten(0, D - 1)));
    }
}

impl Decoder {
    /// A decoder with random f32 weights: normal with deviation 0.02, norms one, biases zero. The
    /// same seed gives the same weights anywhere.
    pub fn random(config: ModelConfig, seed: u64, device: &Device) -> Self {
        let Ok(weights) = Weights::build(&config, &mut Fresh { device, seed });
        Self::new(config, weights, device.clone(), DType::F32)
    }

    /// Writes the weights as `path`, a `model.safetensors` in f32 under the checkpoint's names, with
    /// deterministic bytes.
    ///
    /// # Errors
    /// A path that cannot be written, or a failing device.
    pub fn save_weights(&self, path: &Path) -> Result<(), ModelError> {
        let mut names = Names::default();
        self.weights.visit(&mut names);
        let bytes = safetensors_bytes("dtype", "float32", &names.tensors)?;
        fs::write(path, bytes).map_err(ModelError::io(path))
    }
}
