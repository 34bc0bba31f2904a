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
    weights::{Source, Weights, file_name},
};

/// The spread of a fresh weight, as transformers' `initializer_range`.
const SPREAD: f64 = 0.02;

struct Fresh<'a> {
    config: &'a ModelConfig,
    device: &'a Device,
    seed: u64,
}

impl Source for Fresh<'_> {
    type Error = std::convert::Infallible;

    fn tensor<const D: usize>(
        &mut self,
        name: &str,
        shape: [usize; D],
    ) -> Result<Tensor<D>, Self::Error> {
        let len = shape.iter().product();
        let draws = || Draws::new("rollcall-weight-init-v1", self.seed, name);
        let plain = name.contains(".linear_attn.") || name.contains(".visual.");
        let zero_centred = self.config.hybrid().is_some() && !plain;
        let values = if name.ends_with(".A_log") {
            // Decays as transformers draws them: of a factor in (0, 16).
            draws().within(len, 8.0).into_iter().map(|value| (value + 8.0).ln()).collect()
        } else if D == 1 {
            vec![if name.ends_with(".bias") || zero_centred { 0.0 } else { 1.0 }; len]
        } else {
            draws().normals(len, SPREAD)
        };
        Ok(Tensor::from_data(TensorData::new(values, shape), (self.device, DType::F32)))
    }
}

/// Collects the weights by name.
struct Names<'a> {
    config: &'a ModelConfig,
    path: Vec<String>,
    tensors: BTreeMap<String, (Vec<usize>, Tensor<1>)>,
}

impl ModuleVisitor for Names<'_> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.val();
        let shape = value.dims().to_vec();
        let name = file_name(self.config, &self.path);
        self.tensors.insert(name, (shape, value.flatten(0, D - 1)));
    }
}

impl Decoder {
    /// A decoder with random f32 weights: normal with deviation 0.02, norms one, biases zero, a
    /// DeltaNet's decays as transformers draws them. The same seed gives the same weights anywhere.
    pub fn random(config: ModelConfig, seed: u64, device: &Device) -> Self {
        let Ok(weights) = Weights::build(&config, &mut Fresh { config: &config, device, seed });
        Self::new(config, weights, device.clone(), DType::F32)
    }

    /// Writes the weights as `path`, a `model.safetensors` in f32 under the checkpoint's names, with
    /// deterministic bytes.
    ///
    /// # Errors
    /// A path that cannot be written, or a failing device.
    pub fn save_weights(&self, path: &Path) -> Result<(), ModelError> {
        let config = self.config();
        let mut names = Names { config, path: Vec::new(), tensors: BTreeMap::new() };
        self.weights.visit(&mut names);
        let bytes = safetensors_bytes("dtype", "float32", &names.tensors)?;
        fs::write(path, bytes).map_err(ModelError::io(path))
    }
}
