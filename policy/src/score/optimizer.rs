//! AdamW over named parameters, with clipping by the global norm before the step as the field does
//! it. The arithmetic is Burn's; the state is kept by name, so that it saves to deterministic bytes
//! and a resumed run continues bit for bit.

use std::collections::BTreeMap;

use burn::{
    optim::{AdamW, AdamWConfig, AdamWState, AdaptiveMomentumState, Optimizer as _},
    tensor::{Device, Tensor, TensorData},
};
use safetensors::{Dtype, SafeTensors};

use super::{Gradients, Parameters, parameters::parameter_lengths};
use crate::model::{ModelError, safetensors_bytes};

/// AdamW's settings. The learning rate is given to each step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWSettings {
    /// Decay of the first and of the second moment.
    pub betas: (f32, f32),
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Gradients are scaled down to this global norm.
    pub max_grad_norm: Option<f64>,
}

impl Default for AdamWSettings {
    /// As PyTorch's AdamW without weight decay, and TRL's clipping.
    fn default() -> Self {
        Self { betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.0, max_grad_norm: Some(1.0) }
    }
}

/// AdamW with its moments.
#[derive(Clone)]
pub struct Optimizer {
    settings: AdamWSettings,
    adamw: AdamW,
    state: BTreeMap<String, AdamWState<1>>,
}

impl Optimizer {
    /// A fresh optimizer.
    pub fn new(settings: AdamWSettings) -> Self {
        let adamw = AdamWConfig::new()
            .with_beta_1(settings.betas.0)
            .with_beta_2(settings.betas.1)
            .with_epsilon(settings.eps)
            .with_weight_decay(settings.weight_decay)
            .build();
        Self { settings, adamw, state: BTreeMap::new() }
    }

    /// One step on `parameters`. Returns the gradients' norm before clipping.
    ///
    /// # Errors
    /// A gradient that is not finite: nothing is changed then. A failing device.
    pub fn step(
        &mut self,
        lr: f64,
        parameters: &mut impl Parameters,
        mut gradients: Gradients,
    ) -> Result<f64, ModelError> {
        let norm = gradients.norm()?;
        if !norm.is_finite() {
            return Err(ModelError::Input("a gradient is not finite; nothing was updated".into()));
        }
        if let Some(limit) = self.settings.max_grad_norm
            && norm > limit
        {
            gradients.scale(limit / (norm + 1e-6));
        }
        parameters.update(&mut |name, value| {
            let Some(gradient) = gradients.get(name) else { return value };
            let state = self.state.remove(name);
            let (value, state) = self.adamw.step(lr, value, gradient.clone(), state);
            if let Some(state) = state {
                self.state.insert(name.to_owned(), state);
            }
            value
        });
        Ok(norm)
    }

    /// The state as deterministic safetensors bytes.
    ///
    /// # Errors
    /// A failing device.
    pub fn to_bytes(&self) -> Result<Vec<u8>, ModelError> {
        let mut tensors = BTreeMap::new();
        for (name, state) in &self.state {
            let moments = &state.momentum;
            let time = Tensor::<1>::from_data(
                TensorData::new(vec![moments.time as f32], [1]),
                &moments.moment_1.device(),
            );
            let parts =
                [("first", &moments.moment_1), ("second", &moments.moment_2), ("steps", &time)];
            for (part, tensor) in parts {
                let shape = tensor.dims().to_vec();
                tensors.insert(format!("{name}#{part}"), (shape, tensor.clone()));
            }
        }
        safetensors_bytes("optimizer", "adamw", &tensors)
    }

    /// [`load`](Self::load) of a state of these parameters.
    ///
    /// # Errors
    /// As there.
    pub fn load_for(
        &mut self,
        bytes: &[u8],
        parameters: &mut impl Parameters,
        device: &Device,
    ) -> Result<(), ModelError> {
        let lengths = parameter_lengths(parameters);
        self.load(bytes, device, |name| lengths.get(name).copied())
    }

    /// Puts back a state that [`Optimizer::to_bytes`] gave, for parameters of which `len_of` tells the
    /// number of values by name.
    ///
    /// # Errors
    /// Other bytes, or a state of other parameters: nothing is changed then.
    pub fn load(
        &mut self,
        bytes: &[u8],
        device: &Device,
        len_of: impl Fn(&str) -> Option<usize>,
    ) -> Result<(), ModelError> {
        let wrong = |reason: String| ModelError::Input(format!("optimizer state: {reason}"));
        let file = SafeTensors::deserialize(bytes).map_err(|e| wrong(e.to_string()))?;
        let mut state = BTreeMap::new();
        let read = |name: &str| -> Result<Vec<f32>, ModelError> {
            let view = file.tensor(name).map_err(|e| wrong(e.to_string()))?;
            if view.dtype() != Dtype::F32 || view.shape().len() != 1 {
                return Err(wrong(format!("{name:?} is not a flat f32 tensor")));
            }
            let float = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            let values: Vec<f32> = view.data().chunks_exact(4).map(float).collect();
            match values.iter().all(|value| value.is_finite()) {
                true => Ok(values),
                false => Err(wrong(format!("{name:?} holds a value that is not finite"))),
            }
        };
        let names = file.names();
        for name in names.iter().filter_map(|name| name.strip_suffix("#steps")) {
            let (first, second) =
                (read(&format!("{name}#first"))?, read(&format!("{name}#second"))?);
            let steps = read(&format!("{name}#steps"))?;
            let &[steps] = &steps[..] else {
                return Err(wrong(format!("{name:?} has another count of steps than one")));
            };
            // An f32 counts exactly to there.
            if !(0.0..=16_777_216.0).contains(&steps) || steps.fract() != 0.0 {
                return Err(wrong(format!("{name:?} counts {steps} steps")));
            }
            match len_of(name) {
                None => return Err(wrong(format!("no parameter is called {name:?}"))),
                Some(len) if first.len() == len && second.len() == len => {}
                Some(len) => {
                    return Err(wrong(format!("{name:?} has {len} values, its moments do not")));
                }
            }
            let tensor = |values: Vec<f32>| {
                let len = values.len();
                Tensor::<1>::from_data(TensorData::new(values, [len]), device)
            };
            let momentum =
                AdaptiveMomentumState::new(steps as usize, tensor(first), tensor(second));
            state.insert(name.to_owned(), AdamWState::new(momentum));
        }
        self.state = state;
        Ok(())
    }
}
