//! The values of all parameters at once: to keep them, and to put them back.

use std::collections::BTreeMap;

use burn::tensor::{Tensor, TensorData};
use safetensors::{Dtype, SafeTensors};

use super::Parameters;
use crate::model::{ModelError, from_f32, safetensors_bytes, to_f32};

/// How many values each parameter has, by name.
pub(super) fn parameter_lengths(parameters: &mut impl Parameters) -> BTreeMap<String, usize> {
    let mut lengths = BTreeMap::new();
    parameters.update(&mut |name, value| {
        lengths.insert(name.to_owned(), value.dims()[0]);
        value
    });
    lengths
}

/// The values of all parameters as deterministic safetensors bytes, flat and in f32, which holds those
/// of narrower types exactly.
///
/// # Errors
/// A failing device.
pub fn save_parameters(parameters: &mut impl Parameters) -> Result<Vec<u8>, ModelError> {
    let mut tensors = BTreeMap::new();
    parameters.update(&mut |name, value| {
        tensors.insert(name.to_owned(), (vec![value.dims()[0]], to_f32(value.clone())));
        value
    });
    safetensors_bytes("rollcall", "parameters", &tensors)
}

/// Puts back what [`save_parameters`] gave.
///
/// # Errors
/// Bytes of other parameters: nothing is changed then.
pub fn load_parameters(parameters: &mut impl Parameters, bytes: &[u8]) -> Result<(), ModelError> {
    let wrong = |reason: String| ModelError::Input(format!("saved parameters: {reason}"));
    let file = SafeTensors::deserialize(bytes).map_err(|e| wrong(e.to_string()))?;
    let mut values = BTreeMap::new();
    for (name, len) in parameter_lengths(parameters) {
        let view = file.tensor(&name).map_err(|e| wrong(e.to_string()))?;
        if view.dtype() != Dtype::F32 || view.shape() != [len] {
            return Err(wrong(format!("{name:?} is not an f32 tensor of shape [{len}]")));
        }
        let (floats, _) = view.data().as_chunks::<4>();
        let floats: Vec<f32> = floats.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        values.insert(name, floats);
    }
    if file.names().len() != values.len() {
        return Err(wrong("there are others than those of this model".into()));
    }
    parameters.update(&mut |name, value| match values.remove(name) {
        None => value,
        Some(floats) => {
            let data = TensorData::new(floats, [value.dims()[0]]);
            from_f32(Tensor::from_data(data, &value.device()), value.dtype())
        }
    });
    Ok(())
}
