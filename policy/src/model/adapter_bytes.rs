//! An adapter as safetensors bytes: the same adapter always gives the same bytes (names sorted, f32,
//! PEFT's key names, the settings in `__metadata__`), so their SHA-256 names the adapter.

use std::collections::BTreeMap;

use burn::tensor::{Bytes, DType, Tensor, TensorData};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::{Value, json};

use super::{
    adapter::{Adapter, AdapterInfo, Lora, LoraConfig, matrix},
    bytes::safetensors_bytes,
    decoder::Decoder,
    error::ModelError,
    target::TargetModules,
};

/// PEFT's name of a matrix: `part` is `lora_A` or `lora_B`.
pub(crate) fn lora_key(path: &str, part: &str) -> String {
    format!("base_model.model.{path}.{part}.weight")
}

/// The key of the settings in `__metadata__`.
const SETTINGS: &str = "lora_config";
/// The largest adapter that is read, in bytes.
const LIMIT: usize = 8 << 30;

impl Adapter {
    /// The adapter as the bytes of an `adapter_model.safetensors`, deterministic and complete.
    ///
    /// # Errors
    /// A failing device.
    pub fn to_safetensors(&self) -> Result<Vec<u8>, ModelError> {
        let settings = settings_to_json(self.config()).to_string();
        let shaped = |(name, tensor): (String, Tensor<2>)| {
            (name, (tensor.dims().to_vec(), tensor.flatten(0, 1)))
        };
        let tensors = self.named().into_iter().map(shaped).collect();
        safetensors_bytes(SETTINGS, &settings, &tensors)
    }

    /// Reads what [`Adapter::to_safetensors`] wrote.
    ///
    /// # Errors
    /// Anything but the bytes of an adapter that fits `decoder`, with finite values.
    pub fn from_safetensors(bytes: &[u8], decoder: &Decoder) -> Result<Self, ModelError> {
        let wrong = |reason: String| ModelError::Adapter(reason);
        if bytes.len() > LIMIT {
            return Err(wrong(format!("{} bytes exceed the limit of {LIMIT}", bytes.len())));
        }
        let (_, metadata) = SafeTensors::read_metadata(bytes)
            .map_err(|e| wrong(format!("not safetensors: {e}")))?;
        let settings = metadata.metadata().as_ref().and_then(|map| map.get(SETTINGS));
        let settings =
            settings.ok_or_else(|| wrong(format!("no {SETTINGS:?} in its __metadata__")))?;
        let config = settings_from_json(settings)?;
        Self::from_tensors(config, bytes, decoder)
    }

    /// The settings that [`Adapter::to_safetensors`] put into these bytes, if it wrote them.
    pub(crate) fn written_settings(bytes: &[u8]) -> Option<LoraConfig> {
        let (_, metadata) = SafeTensors::read_metadata(bytes).ok()?;
        settings_from_json(metadata.metadata().as_ref()?.get(SETTINGS)?).ok()
    }

    /// Reads the tensors of a safetensors file written by PEFT or by us.
    pub(crate) fn from_tensors(
        config: LoraConfig,
        bytes: &[u8],
        decoder: &Decoder,
    ) -> Result<Self, ModelError> {
        config.check()?;
        let file = SafeTensors::deserialize(bytes)
            .map_err(|e| ModelError::Adapter(format!("not safetensors: {e}")))?;
        let mut tensors: BTreeMap<String, TensorView<'_>> = file.tensors().into_iter().collect();
        let linears = decoder.config().linears();
        let targets = config.target_modules.select(&linears)?;
        let mut loras = Vec::with_capacity(linears.len());
        for (linear, hit) in linears.iter().zip(targets) {
            if !hit {
                loras.push(None);
                continue;
            }
            let mut take = |part: &str, shape: [usize; 2]| {
                let name = lora_key(&linear.path, part);
                let Some(view) = tensors.remove(&name) else {
                    return Err(ModelError::Adapter(format!("tensor {name:?} is missing")));
                };
                let values = finite_values(&name, &view, shape)?;
                Ok(matrix(values, shape[0], decoder.device()))
            };
            loras.push(Some(Lora {
                lora_a: take("lora_A", [config.r, linear.inputs])?,
                lora_b: take("lora_B", [linear.outputs, config.r])?,
            }));
        }
        if let Some(name) = tensors.keys().next() {
            let name: String = name.chars().take(200).collect();
            let reason = format!("tensor {name:?} belongs to no targeted linear of the model");
            return Err(ModelError::Adapter(reason));
        }
        Ok(Self { loras, info: AdapterInfo { config, linears } })
    }

    /// Its tensors by PEFT's key names, sorted.
    pub fn named(&self) -> BTreeMap<String, Tensor<2>> {
        let pair = |(linear, lora): (&super::weights::LinearInfo, &Lora)| {
            let name = |part: &str| lora_key(&linear.path, part);
            [(name("lora_A"), lora.lora_a.val()), (name("lora_B"), lora.lora_b.val())]
        };
        self.targeted().flat_map(pair).collect()
    }
}

/// The values in f32, after checking shape, type and finiteness.
fn finite_values(
    name: &str,
    view: &TensorView<'_>,
    shape: [usize; 2],
) -> Result<Vec<f32>, ModelError> {
    let wrong = |reason: String| ModelError::Adapter(format!("tensor {name:?}: {reason}"));
    if view.shape() != shape {
        return Err(wrong(format!("shape {:?}, the settings imply {shape:?}", view.shape())));
    }
    let dtype = match view.dtype() {
        Dtype::F32 => DType::F32,
        Dtype::BF16 => DType::BF16,
        Dtype::F16 => DType::F16,
        other => return Err(wrong(format!("type {other:?} is not one of F32, BF16, F16"))),
    };
    let values =
        TensorData::try_from_bytes(Bytes::from_bytes_vec(view.data().into()), shape, dtype)
            .map_err(|e| wrong(e.to_string()))?
            .iter::<f32>()
            .collect::<Vec<f32>>();
    match values.iter().all(|v| v.is_finite()) {
        true => Ok(values),
        false => Err(wrong("holds a value that is not finite".into())),
    }
}

fn settings_to_json(config: &LoraConfig) -> Value {
    json!({
        "lora_alpha": number(config.alpha),
        "r": config.r,
        "target_modules": match &config.target_modules {
            TargetModules::AllLinear => json!("all-linear"),
            TargetModules::Names(names) => json!(names),
            TargetModules::Pattern(pattern) => json!(pattern),
        },
        "use_rslora": config.use_rslora,
    })
}

fn settings_from_json(text: &str) -> Result<LoraConfig, ModelError> {
    let wrong = |field: &str| ModelError::Adapter(format!("bad {field:?} in its {SETTINGS:?}"));
    let value: Value = serde_json::from_str(text).map_err(|_| wrong("JSON"))?;
    Ok(LoraConfig {
        r: value["r"].as_u64().and_then(|r| usize::try_from(r).ok()).ok_or_else(|| wrong("r"))?,
        alpha: value["lora_alpha"].as_f64().ok_or_else(|| wrong("lora_alpha"))?,
        target_modules: TargetModules::from_json(&value["target_modules"])
            .ok_or_else(|| wrong("target_modules"))?,
        use_rslora: value["use_rslora"].as_bool().ok_or_else(|| wrong("use_rslora"))?,
    })
}

/// Whole numbers without a fraction, as PEFT writes `lora_alpha`.
pub(crate) fn number(x: f64) -> Value {
    if x.fract() == 0.0 && x.abs() < 1e15 { json!(x as i64) } else { json!(x) }
}
