//! Evidence that training changed the weights: two adapters, compared tensor by tensor.

use safetensors::{Dtype, SafeTensors};
use serde::{Deserialize, Serialize};

/// What an update did to the trained tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct UpdateEvidence {
    /// Tensors of the adapter.
    pub trainable_tensors: usize,
    /// Of these, the changed.
    pub changed_trainable_tensors: usize,
    /// Largest absolute change of a weight.
    pub max_abs_parameter_delta: f64,
    /// Groups whose rewards differ.
    pub mixed_reward_groups: u64,
    /// Optimizer steps whose gradient was not 0.
    pub nonzero_gradient_steps: u64,
}

/// Tensors of two adapter files that differ, and by how much: fills the first three fields.
///
/// # Errors
/// The files are no adapters of one shape with finite weights.
pub fn compare_adapters(before: &[u8], after: &[u8]) -> Result<UpdateEvidence, String> {
    let read = |bytes| SafeTensors::deserialize(bytes).map_err(|error| error.to_string());
    let (before, after) = (read(before)?, read(after)?);
    let names = before.names();
    if names.len() != after.len() {
        return Err(format!("{} tensors before, {} after", names.len(), after.len()));
    }
    let mut evidence = UpdateEvidence { trainable_tensors: names.len(), ..Default::default() };
    for name in names {
        let tensor = |file: &SafeTensors<'_>| {
            let view = file.tensor(name).map_err(|error| format!("{name}: {error}"))?;
            if view.dtype() != Dtype::F32 {
                return Err(format!("{name}: {:?} is no 32-bit float", view.dtype()));
            }
            let bytes = view.data().as_chunks::<4>().0;
            Ok(bytes.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect::<Vec<f32>>())
        };
        let (old, new) = (tensor(&before)?, tensor(&after)?);
        if old.len() != new.len() {
            return Err(format!("{name}: {} weights before, {} after", old.len(), new.len()));
        }
        let mut largest = 0.0_f64;
        for (old, new) in old.iter().zip(&new) {
            let delta = (f64::from(*new) - f64::from(*old)).abs();
            if !delta.is_finite() {
                return Err(format!("{name}: a weight that is not finite"));
            }
            largest = largest.max(delta);
        }
        evidence.changed_trainable_tensors += usize::from(largest > 0.0);
        evidence.max_abs_parameter_delta = evidence.max_abs_parameter_delta.max(largest);
    }
    Ok(evidence)
}

#[cfg(test)]
mod tests {
    use safetensors::tensor::TensorView;

    use super::*;

    fn adapter(tensors: &[(&str, &[f32])]) -> Vec<u8> {
        let bytes: Vec<(&str, Vec<u8>)> = tensors
            .iter()
            .map(|(name, values)| (*name, values.iter().flat_map(|v| v.to_le_bytes()).collect()))
            .collect();
        let views = bytes.iter().map(|(name, bytes)| {
            (*name, TensorView::new(Dtype::F32, vec![bytes.len() / 4], bytes).expect("a view"))
        });
        safetensors::serialize(views, None).expect("serialised")
    }

    #[test]
    fn changes_are_counted_and_measured() {
        let before = adapter(&[("a", &[1.0, 2.0]), ("b", &[0.0])]);
        let after = adapter(&[("a", &[1.0, 1.5]), ("b", &[0.0])]);
        let evidence = compare_adapters(&before, &after).expect("comparable");
        let found = (evidence.trainable_tensors, evidence.changed_trainable_tensors);
        assert_eq!((found, evidence.max_abs_parameter_delta), ((2, 1), 0.5));
        let same = compare_adapters(&before, &before).expect("comparable");
        assert_eq!((same.changed_trainable_tensors, same.max_abs_parameter_delta), (0, 0.0));
    }

    #[test]
    fn other_shapes_names_and_broken_weights_are_refused() {
        let before = adapter(&[("a", &[1.0, 2.0])]);
        for after in [
            adapter(&[("a", &[1.0])]),
            adapter(&[("b", &[1.0, 2.0])]),
            adapter(&[("a", &[1.0, f32::NAN])]),
            adapter(&[("a", &[1.0, 2.0]), ("b", &[0.0])]),
            b"no adapter".to_vec(),
        ] {
            assert!(compare_adapters(&before, &after).is_err());
        }
    }
}
