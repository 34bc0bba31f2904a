//! Gradients by parameter name, as one flat vector to the outside: measured, clipped, averaged over
//! ranks and applied without knowing what they belong to.

use std::collections::BTreeMap;

use burn::tensor::{Device, Tensor, TensorData};

use super::ValueHead;
use crate::model::{Adapter, Decoder, ModelError};

/// Gradients in f32, each flat, by parameter name in sorted order.
#[derive(Clone, Debug, Default)]
pub struct Gradients {
    entries: BTreeMap<String, Tensor<1>>,
}

/// Something with named parameters: an adapter (PEFT's key names) or a decoder (the names in its
/// checkpoint).
pub trait Parameters {
    /// Replaces each parameter by what `f` gives for its name and flat value.
    fn update(&mut self, f: &mut dyn FnMut(&str, Tensor<1>) -> Tensor<1>);
}

impl Gradients {
    pub(crate) fn insert<const D: usize>(&mut self, name: String, gradient: Tensor<D>) {
        let flat = crate::model::to_f32(gradient).flatten::<1>(0, D - 1);
        let sum = match self.entries.remove(&name) {
            None => flat,
            Some(sum) => sum.add(flat),
        };
        self.entries.insert(name, sum);
    }

    /// Adds a gradient of zeros to a parameter of `len` elements that has none, as where only another
    /// rank has one.
    pub fn fill(&mut self, name: &str, len: usize, device: &Device) {
        self.entries
            .entry(name.to_owned())
            .or_insert_with(|| Tensor::from_data(TensorData::new(vec![0f32; len], [len]), device));
    }

    /// Names with flat gradients, sorted.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor<1>)> {
        self.entries.iter().map(|(name, tensor)| (name.as_str(), tensor))
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Tensor<1>> {
        self.entries.get(name)
    }

    /// The gradient of one parameter, flat.
    ///
    /// # Errors
    /// No such parameter, or a failing device.
    pub fn values(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        let missing = || ModelError::Input(format!("no gradient is called {name:?}"));
        host(self.entries.get(name).ok_or_else(missing)?)
    }

    /// All gradients, one after another in the order of the names.
    ///
    /// # Errors
    /// A failing device.
    pub fn flatten(&self) -> Result<Vec<f32>, ModelError> {
        let mut flat = Vec::new();
        for tensor in self.entries.values() {
            flat.append(&mut host(tensor)?);
        }
        Ok(flat)
    }

    /// Puts back what [`Gradients::flatten`] gave, changed (for example averaged over ranks).
    ///
    /// # Errors
    /// Another number of values.
    pub fn unflatten(&mut self, flat: &[f32]) -> Result<(), ModelError> {
        let count: usize = self.entries.values().map(|t| t.dims()[0]).sum();
        if flat.len() != count {
            let reason = format!("{} values for {count} gradient elements", flat.len());
            return Err(ModelError::Input(reason));
        }
        let mut rest = flat;
        for tensor in self.entries.values_mut() {
            let (part, after) = rest.split_at(tensor.dims()[0]);
            let data = TensorData::new(part.to_vec(), [part.len()]);
            *tensor = Tensor::from_data(data, &tensor.device());
            rest = after;
        }
        Ok(())
    }

    /// Takes out the gradients of a value head, where one had some.
    pub fn take_value_head(&mut self) -> Self {
        let (head, rest) = std::mem::take(&mut self.entries)
            .into_iter()
            .partition(|(name, _)| name.starts_with(ValueHead::PREFIX));
        self.entries = rest;
        Self { entries: head }
    }

    /// Adds another pass's gradients.
    pub fn add(&mut self, other: Self) {
        for (name, tensor) in other.entries {
            self.insert(name, tensor);
        }
    }

    /// Multiplies every element.
    pub fn scale(&mut self, factor: f64) {
        for tensor in self.entries.values_mut() {
            tensor.inplace(|t| t.mul_scalar(factor));
        }
    }

    /// The Euclidean norm over all elements, summed in f64 in a fixed order. Not finite if any
    /// element is not.
    ///
    /// # Errors
    /// A failing device.
    pub fn norm(&self) -> Result<f64, ModelError> {
        let square = |v: f32| f64::from(v) * f64::from(v);
        Ok(self.flatten()?.into_iter().map(square).sum::<f64>().sqrt())
    }
}

fn host(tensor: &Tensor<1>) -> Result<Vec<f32>, ModelError> {
    let data = tensor.try_to_data().map_err(|e| ModelError::Device(e.to_string()))?;
    data.try_into_vec::<f32>().map_err(|e| ModelError::Device(e.to_string()))
}

impl Parameters for Adapter {
    fn update(&mut self, f: &mut dyn FnMut(&str, Tensor<1>) -> Tensor<1>) {
        self.update_named(f);
    }
}

impl Parameters for Decoder {
    fn update(&mut self, f: &mut dyn FnMut(&str, Tensor<1>) -> Tensor<1>) {
        self.update_named(f);
    }
}
