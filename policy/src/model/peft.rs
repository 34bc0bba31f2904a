//! PEFT's adapter directories: `adapter_config.json` beside `adapter_model.safetensors`. What PEFT
//! wrote is read, what we write PEFT and vLLM read; a setting that would change the computation in a
//! way that we do not do is refused by name.

use std::{collections::BTreeSet, fs, path::Path};

use serde_json::{Value, json};

use super::{
    adapter::{Adapter, LoraConfig},
    adapter_bytes::number,
    config::{Fields, brief, read_object},
    decoder::Decoder,
    error::ModelError,
    target::TargetModules,
    weights::LinearInfo,
};

/// Fields that say nothing about what a finished adapter computes.
const DESCRIPTIVE: &[&str] = &[
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "task_type",
];
/// Fields that are read.
const READ: &[&str] =
    &["bias", "init_lora_weights", "lora_alpha", "peft_type", "r", "target_modules", "use_rslora"];

impl LoraConfig {
    /// Reads an `adapter_config.json`.
    ///
    /// # Errors
    /// Names the field: malformed, missing, or asking for what is not supported.
    pub fn read_peft(path: &Path) -> Result<Self, ModelError> {
        let map = read_object(path, 1 << 20)?;
        let fields = Fields { path, prefix: "", map: &map };
        if map.get("peft_type").and_then(Value::as_str) != Some("LORA") {
            return Err(fields.error("peft_type", "only \"LORA\" is supported"));
        }
        if fields.get("bias").is_some_and(|bias| bias.as_str() != Some("none")) {
            return Err(fields.error("bias", "only \"none\" is supported"));
        }
        match fields.get("init_lora_weights") {
            None | Some(Value::Bool(_)) => {}
            Some(Value::String(kind)) if kind == "gaussian" => {}
            Some(other) => {
                let reason = format!("{} changes the base and is not supported", brief(other));
                return Err(fields.error("init_lora_weights", reason));
            }
        }
        let known =
            |key: &String| DESCRIPTIVE.contains(&key.as_str()) || READ.contains(&key.as_str());
        let neutral = |value: &Value| match value {
            Value::Null | Value::Bool(false) => true,
            Value::Object(map) => map.is_empty(),
            Value::Array(list) => list.is_empty(),
            _ => false,
        };
        if let Some((key, value)) = map.iter().find(|(k, v)| !known(k) && !neutral(v)) {
            return Err(fields.error(key, format!("{} is not supported", brief(value))));
        }
        let missing = |field: &str| fields.error(field, "missing or malformed");
        let config = Self {
            r: fields.size("r")?.ok_or_else(|| missing("r"))?,
            alpha: fields.positive("lora_alpha")?.ok_or_else(|| missing("lora_alpha"))?,
            target_modules: fields
                .get("target_modules")
                .and_then(TargetModules::from_json)
                .ok_or_else(|| missing("target_modules"))?,
            use_rslora: fields.flag("use_rslora")?,
        };
        config.check()?;
        Ok(config)
    }

    /// The text of an `adapter_config.json` for a model with these linears.
    pub fn peft_json(&self, base_model: &str, linears: &[LinearInfo]) -> String {
        let target_modules = match &self.target_modules {
            TargetModules::AllLinear => {
                json!(linears.iter().map(|it| target_name(&it.path)).collect::<BTreeSet<_>>())
            }
            TargetModules::Names(names) => json!(names),
            TargetModules::Pattern(pattern) => json!(pattern),
        };
        let value = json!({
            "alpha_pattern": {},
            "auto_mapping": null,
            "base_model_name_or_path": base_model,
            "bias": "none",
            "fan_in_fan_out": false,
            "inference_mode": true,
            "init_lora_weights": true,
            "layers_pattern": null,
            "layers_to_transform": null,
            "lora_alpha": number(self.alpha),
            "lora_dropout": 0.0,
            "modules_to_save": null,
            "peft_type": "LORA",
            "r": self.r,
            "rank_pattern": {},
            "revision": null,
            "target_modules": target_modules,
            "task_type": "CAUSAL_LM",
            "use_dora": false,
            "use_rslora": self.use_rslora,
        });
        format!("{value:#}\n")
    }
}

/// The end of a linear's path that names it and its like, and nothing else, as PEFT has it.
pub fn target_name(path: &str) -> &str {
    match path.rsplit_once('.') {
        // `proj` alone is the convolution over patches too.
        Some((_, "proj")) => "attn.proj",
        Some((_, name)) => name,
        None => path,
    }
}

impl TargetModules {
    /// PEFT's spelling: `"all-linear"`, a regex, or a list of names.
    pub fn from_json(value: &Value) -> Option<Self> {
        match value {
            Value::String(text) if text == "all-linear" => Some(Self::AllLinear),
            Value::String(text) if text.len() <= 4096 => Some(Self::Pattern(text.clone())),
            Value::Array(names) if !names.is_empty() && names.len() <= 4096 => names
                .iter()
                .map(|name| name.as_str().map(str::to_owned))
                .collect::<Option<_>>()
                .map(Self::Names),
            _ => None,
        }
    }
}

impl Adapter {
    /// Loads a PEFT adapter directory for `decoder`. Weights that this crate wrote carry their settings:
    /// those are kept where `adapter_config.json` agrees, so that saving gives the same bytes again.
    ///
    /// # Errors
    /// Names the file, and the field or tensor.
    pub fn load_peft(dir: &Path, decoder: &Decoder) -> Result<Self, ModelError> {
        let config = LoraConfig::read_peft(&dir.join("adapter_config.json"))?;
        let path = dir.join("adapter_model.safetensors");
        let bytes = fs::read(&path).map_err(ModelError::io(&path))?;
        let linears = decoder.config().linears();
        let same = |own: &LoraConfig| {
            let targets = |config: &LoraConfig| config.target_modules.select(&linears).ok();
            own.r == config.r
                && own.alpha == config.alpha
                && own.use_rslora == config.use_rslora
                && targets(own) == targets(&config)
        };
        let config = Self::written_settings(&bytes).filter(same).unwrap_or(config);
        Self::from_tensors(config, &bytes, decoder).map_err(|error| match error {
            ModelError::Adapter(reason) => ModelError::File { path, reason },
            other => other,
        })
    }

    /// Writes a PEFT adapter directory, made if it is absent. `base_model` is what
    /// `base_model_name_or_path` will say.
    ///
    /// # Errors
    /// A directory that cannot be written, or a failing device.
    pub fn save_peft(&self, dir: &Path, base_model: &str) -> Result<(), ModelError> {
        fs::create_dir_all(dir).map_err(ModelError::io(dir))?;
        let weights = dir.join("adapter_model.safetensors");
        fs::write(&weights, self.to_safetensors()?).map_err(ModelError::io(&weights))?;
        let config = dir.join("adapter_config.json");
        fs::write(&config, self.config().peft_json(base_model, &self.info.linears))
            .map_err(ModelError::io(&config))
    }
}
