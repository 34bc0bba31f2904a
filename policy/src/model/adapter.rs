//! LoRA adapters (<https://arxiv.org/abs/2106.09685>): for each targeted linear two small f32
//! matrices beside the frozen weight, `y = W x + s B A x`. An adapter is a module of its own, so one
//! loaded base serves several adapters, and itself alone.

use burn::{
    module::{Module, Param},
    tensor::{Device, Tensor, TensorData},
};

use super::{
    config::ModelConfig, decoder::Decoder, error::ModelError, random::Draws, target::TargetModules,
    tower, weights::LinearInfo,
};

/// The settings of an adapter, as in PEFT's `LoraConfig`.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraConfig {
    /// Rank.
    pub r: usize,
    /// Numerator of the scale.
    pub alpha: f64,
    /// Which linears get matrices.
    pub target_modules: TargetModules,
    /// Scale `alpha / sqrt(r)` instead of `alpha / r`.
    pub use_rslora: bool,
}

impl LoraConfig {
    /// The factor of the low-rank part.
    pub fn scale(&self) -> f64 {
        let r = self.r as f64;
        self.alpha / if self.use_rslora { r.sqrt() } else { r }
    }

    /// Checks the settings against a model's linears, without its weights.
    ///
    /// # Errors
    /// Settings out of bounds, or targets that match no linear.
    pub fn check_fits(&self, model: &ModelConfig) -> Result<(), ModelError> {
        self.check()?;
        self.target_modules.select(&model.linears()).map(drop)
    }

    pub(crate) fn check(&self) -> Result<(), ModelError> {
        if self.r == 0 || self.r > 4096 {
            return Err(ModelError::Adapter(format!("r {} is not between 1 and 4096", self.r)));
        }
        if !(self.alpha.is_finite() && self.alpha > 0.0) {
            let reason = format!("lora_alpha {} is not a positive number", self.alpha);
            return Err(ModelError::Adapter(reason));
        }
        Ok(())
    }
}

/// The two matrices beside one linear, in f32.
#[derive(Module, Debug)]
pub struct Lora {
    /// `[r, in]`.
    pub lora_a: Param<Tensor<2>>,
    /// `[out, r]`.
    pub lora_b: Param<Tensor<2>>,
}

/// An adapter over one decoder's linears.
#[derive(Module, Debug)]
pub struct Adapter {
    /// By the linear's slot; `None` where it is not targeted.
    pub(crate) loras: Vec<Option<Lora>>,
    #[module(skip)]
    pub(crate) info: AdapterInfo,
}

#[derive(Clone, Debug)]
pub(crate) struct AdapterInfo {
    pub(crate) config: LoraConfig,
    pub(crate) linears: Vec<LinearInfo>,
}

impl Adapter {
    /// A fresh adapter: A uniform in ±1/√in from a counter-based generator keyed by `seed` and the
    /// module's path, B zero, so that it changes nothing yet.
    ///
    /// # Errors
    /// Settings out of bounds, or targets that match no linear of `decoder`.
    pub fn init(config: &LoraConfig, decoder: &Decoder, seed: u64) -> Result<Self, ModelError> {
        config.check()?;
        let linears = decoder.config().linears();
        let device = decoder.device();
        let make = |linear: &LinearInfo| {
            let bound = 1.0 / (linear.inputs as f64).sqrt();
            let a = Draws::new("rollcall-lora-init-v1", seed, &linear.path)
                .within(config.r * linear.inputs, bound);
            Lora {
                lora_a: matrix(a, config.r, device),
                lora_b: matrix(vec![0.0; linear.outputs * config.r], linear.outputs, device),
            }
        };
        let targets = config.target_modules.select(&linears)?;
        let loras = linears.iter().zip(targets).map(|(l, hit)| hit.then(|| make(l))).collect();
        Ok(Self { loras, info: AdapterInfo { config: config.clone(), linears } })
    }

    /// Its settings.
    pub fn config(&self) -> &LoraConfig {
        &self.info.config
    }

    /// The matrices beside the linear of this slot, and the scale.
    pub(crate) fn lora(&self, slot: usize) -> Option<(&Lora, f32)> {
        let lora = self.loras.get(slot)?.as_ref()?;
        Some((lora, self.info.config.scale() as f32))
    }

    /// Whether it has matrices in the vision tower.
    pub(crate) fn sees(&self) -> bool {
        self.targeted().any(|(linear, _)| linear.path.starts_with(tower::PREFIX))
    }

    /// Each targeted linear's path with its matrices, in the order of the slots.
    pub(crate) fn targeted(&self) -> impl Iterator<Item = (&LinearInfo, &Lora)> {
        self.info.linears.iter().zip(&self.loras).filter_map(|(l, lora)| Some((l, lora.as_ref()?)))
    }
}

/// A matrix of `rows` rows as a trainable parameter.
pub(crate) fn matrix(values: Vec<f32>, rows: usize, device: &Device) -> Param<Tensor<2>> {
    let columns = values.len() / rows.max(1);
    let data = TensorData::new(values, [rows, columns]);
    Param::initialized(burn::module::ParamId::new(), Tensor::from_data(data, device))
}
