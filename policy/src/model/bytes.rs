//! Safetensors bytes that depend on nothing but their content: names sorted, f32, little-endian.

use std::collections::BTreeMap;

use burn::tensor::Tensor;
use serde_json::{Map, Value, json};

use super::error::ModelError;

/// Flat tensors with their shapes as safetensors bytes in f32, with `key: value` in the metadata
/// beside `format: pt`.
pub(crate) fn safetensors_bytes(
    key: &str,
    value: &str,
    tensors: &BTreeMap<String, (Vec<usize>, Tensor<1>)>,
) -> Result<Vec<u8>, ModelError> {
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({"format": "pt", key: value}));
    let mut data = Vec::new();
    for (name, (shape, tensor)) in tensors {
        let values = tensor.try_to_data().map_err(|e| ModelError::Device(e.to_string()))?;
        let start = data.len();
        for value in values.iter::<f32>() {
            data.extend_from_slice(&value.to_le_bytes());
        }
        let info = json!({"dtype": "F32", "shape": shape, "data_offsets": [start, data.len()]});
        header.insert(name.clone(), info);
    }
    let mut bytes = vec![0; 8];
    bytes.extend_from_slice(Value::Object(header).to_string().as_bytes());
    bytes.resize(bytes.len().next_multiple_of(8), b' ');
    let header = bytes.len() as u64 - 8;
    bytes[..8].copy_from_slice(&header.to_le_bytes());
    bytes.append(&mut data);
    Ok(bytes)
}
