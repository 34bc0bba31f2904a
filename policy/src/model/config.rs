//! `config.json` of a Hugging Face checkpoint, read into the few numbers that the decoder needs.
//! Everything that would change the computation and that the decoder does not do is refused by name.

use std::{fs, path::Path};

use serde_json::{Map, Value};

use super::{
    error::{ARCHITECTURES, ModelError},
    hybrid::Hybrid,
    rope::RopeConfig,
    vision::VisionConfig,
};

/// The decoder families.
#[derive(Clone, Debug, PartialEq)]
pub enum Architecture {
    /// `Qwen3ForCausalLM`: per-head RMS norms on queries and keys.
    Qwen3,
    /// `LlamaForCausalLM`: the same without those norms.
    Llama,
    /// `Qwen3_5ForCausalLM`, or the language model of `Qwen3_5ForConditionalGeneration`: gated
    /// DeltaNet layers with some gated attention layers between them.
    Qwen3_5(Box<Hybrid>),
}

impl Architecture {
    /// The name in `config.json`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Qwen3 => ARCHITECTURES[0],
            Self::Llama => ARCHITECTURES[1],
            Self::Qwen3_5(hybrid) if hybrid.vision_language => ARCHITECTURES[3],
            Self::Qwen3_5(_) => ARCHITECTURES[2],
        }
    }
}

/// What the name in `config.json` says.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Family {
    Qwen3,
    Llama,
    Qwen3_5 { vision_language: bool },
}

/// The shape of a decoder. Lengths are in elements.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The family.
    pub architecture: Architecture,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the feed-forward layer.
    pub ffn: usize,
    /// Number of layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of one head; `heads * head_dim` need not equal `hidden`.
    pub head_dim: usize,
    /// Rows of the embedding.
    pub vocab: usize,
    /// Epsilon of every RMS norm.
    pub norm_eps: f64,
    /// Whether q, k, v and o have a bias.
    pub attention_bias: bool,
    /// Whether gate, up and down have a bias (Llama only).
    pub mlp_bias: bool,
    /// Whether the head shares the embedding's weight.
    pub tied: bool,
    /// The longest sequence, in ids.
    pub max_positions: usize,
    /// Rotary positions.
    pub rope: RopeConfig,
}

/// No field of a real model is larger; larger ones are refused before any arithmetic.
const LARGEST: u64 = 1 << 24;

/// The fields of one JSON object with errors that name file and field.
pub(crate) struct Fields<'a> {
    pub(crate) path: &'a Path,
    pub(crate) prefix: &'a str,
    pub(crate) map: &'a Map<String, Value>,
}

impl Fields<'_> {
    pub(crate) fn error(&self, field: &str, reason: impl Into<String>) -> ModelError {
        ModelError::Field {
            path: self.path.into(),
            field: format!("{}{field}", self.prefix),
            reason: reason.into(),
        }
    }

    /// The value, with an explicit null read as absent.
    pub(crate) fn get(&self, field: &str) -> Option<&Value> {
        self.map.get(field).filter(|value| !value.is_null())
    }

    pub(crate) fn size(&self, field: &str) -> Result<Option<usize>, ModelError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_u64() {
            Some(n) if (1..=LARGEST).contains(&n) => Ok(usize::try_from(n).ok()),
            _ => Err(self.error(field, format!("{} is not between 1 and {LARGEST}", brief(value)))),
        }
    }

    fn required(&self, field: &str) -> Result<usize, ModelError> {
        self.size(field)?.ok_or_else(|| self.error(field, "missing; an integer is needed"))
    }

    pub(crate) fn flag(&self, field: &str) -> Result<bool, ModelError> {
        match self.get(field) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(self.error(field, format!("{} is not true or false", brief(other)))),
        }
    }

    /// A finite positive number.
    pub(crate) fn positive(&self, field: &str) -> Result<Option<f64>, ModelError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_f64() {
            Some(x) if x.is_finite() && x > 0.0 => Ok(Some(x)),
            _ => Err(self.error(field, format!("{} is not a positive number", brief(value)))),
        }
    }
}

/// A JSON value as part of a message: one line, bounded.
pub(crate) fn brief(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() <= 60 {
        text
    } else {
        text.chars().take(57).chain("...".chars()).collect()
    }
}

/// Reads a JSON object of at most `limit` bytes.
pub(crate) fn read_object(path: &Path, limit: u64) -> Result<Map<String, Value>, ModelError> {
    let file = |reason: String| ModelError::File { path: path.into(), reason };
    let len = fs::metadata(path).map_err(ModelError::io(path))?.len();
    if len > limit {
        return Err(file(format!("{len} bytes exceed the limit of {limit} for this file")));
    }
    let text = fs::read(path).map_err(ModelError::io(path))?;
    match serde_json::from_slice(&text) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(file("not a JSON object".into())),
        Err(e) => Err(file(format!("not JSON: {e}"))),
    }
}

impl ModelConfig {
    /// Reads `config.json` at `path`.
    ///
    /// # Errors
    /// Names the field and the remedy; an architecture that is not supported is refused with the
    /// list of those that are.
    pub fn read(path: &Path) -> Result<Self, ModelError> {
        let map = read_object(path, 1 << 20)?;
        Self::from_fields(&Fields { path, prefix: "", map: &map })
    }

    fn from_fields(fields: &Fields<'_>) -> Result<Self, ModelError> {
        let family = family(fields)?;
        let Family::Qwen3_5 { vision_language: true } = family else {
            return Self::from_decoder_fields(fields, family);
        };
        let Some(map) = fields.get("text_config").and_then(Value::as_object) else {
            return Err(fields.error("text_config", "missing; an object is needed"));
        };
        let text = Fields { path: fields.path, prefix: "text_config.", map };
        let mut config = Self::from_decoder_fields(&text, family)?;
        if fields.get("tie_word_embeddings").is_some() {
            config.tied = fields.flag("tie_word_embeddings")?;
        }
        let vision = VisionConfig::read(fields, config.hidden)?;
        if let Architecture::Qwen3_5(hybrid) = &mut config.architecture {
            hybrid.vision = Some(vision);
        }
        Ok(config)
    }

    fn from_decoder_fields(fields: &Fields<'_>, family: Family) -> Result<Self, ModelError> {
        refuse_unsupported(fields, family)?;
        let hidden = fields.required("hidden_size")?;
        let heads = fields.required("num_attention_heads")?;
        let kv_heads = fields.size("num_key_value_heads")?.unwrap_or(heads);
        let layers = fields.required("num_hidden_layers")?;
        let head_dim = match (fields.size("head_dim")?, family, fields.map.get("head_dim")) {
            (Some(dim), _, _) => dim,
            (None, Family::Qwen3, None) => 128,
            (None, Family::Qwen3_5 { .. }, None) => 256,
            _ => hidden / heads,
        };
        if !heads.is_multiple_of(kv_heads) {
            let reason = format!("{kv_heads} does not divide num_attention_heads {heads}");
            return Err(fields.error("num_key_value_heads", reason));
        }
        if head_dim == 0 || !head_dim.is_multiple_of(2) || head_dim > 1024 {
            let reason = format!("{head_dim} is not an even number up to 1024");
            return Err(fields.error("head_dim", reason));
        }
        if layers > 1024 {
            return Err(fields.error("num_hidden_layers", format!("{layers} exceeds 1024")));
        }
        let listed = fields.size("max_position_embeddings")?.unwrap_or(2048);
        let partial = matches!(family, Family::Qwen3_5 { .. });
        let rope = RopeConfig::read(fields, listed, partial)?;
        let architecture =
            match family {
                Family::Qwen3 => Architecture::Qwen3,
                Family::Llama => Architecture::Llama,
                Family::Qwen3_5 { vision_language } => Architecture::Qwen3_5(Box::new(
                    Hybrid::read(fields, layers, head_dim, vision_language)?,
                )),
            };
        Ok(Self {
            mlp_bias: architecture == Architecture::Llama && fields.flag("mlp_bias")?,
            architecture,
            hidden,
            ffn: fields.required("intermediate_size")?,
            layers,
            heads,
            kv_heads,
            head_dim,
            vocab: fields.required("vocab_size")?,
            norm_eps: fields.positive("rms_norm_eps")?.unwrap_or(1e-6),
            attention_bias: fields.flag("attention_bias")?,
            tied: fields.flag("tie_word_embeddings")?,
            max_positions: rope.max_positions(listed),
            rope,
        })
    }

    /// What a Qwen3.5 decoder has beyond the other families.
    pub fn hybrid(&self) -> Option<&Hybrid> {
        match &self.architecture {
            Architecture::Qwen3_5(hybrid) => Some(hybrid),
            Architecture::Qwen3 | Architecture::Llama => None,
        }
    }

    /// The shape of the vision tower, where there is one.
    pub fn vision(&self) -> Option<&VisionConfig> {
        self.hybrid()?.vision.as_ref()
    }

    /// The same decoder without a vision tower.
    pub(crate) fn without_vision(mut self) -> Self {
        if let Architecture::Qwen3_5(hybrid) = &mut self.architecture {
            hybrid.vision = None;
        }
        self
    }

    /// Elements of a head that are rotated.
    pub(crate) fn rotary(&self) -> usize {
        self.hybrid().map_or(self.head_dim, |hybrid| hybrid.rotary)
    }
}

fn family(fields: &Fields<'_>) -> Result<Family, ModelError> {
    let listed = fields.get("architectures").and_then(Value::as_array);
    let named = listed.and_then(|list| list.first()).and_then(Value::as_str);
    let found = named.or_else(|| fields.get("model_type").and_then(Value::as_str));
    match found {
        Some("Qwen3ForCausalLM" | "qwen3") => Ok(Family::Qwen3),
        Some("LlamaForCausalLM" | "llama") => Ok(Family::Llama),
        Some("Qwen3_5ForCausalLM" | "qwen3_5_text") => {
            Ok(Family::Qwen3_5 { vision_language: false })
        }
        Some("Qwen3_5ForConditionalGeneration" | "qwen3_5") => {
            Ok(Family::Qwen3_5 { vision_language: true })
        }
        other => Err(ModelError::Architecture {
            path: fields.path.into(),
            found: other.unwrap_or("(none)").chars().take(80).collect(),
        }),
    }
}

fn refuse_unsupported(fields: &Fields<'_>, family: Family) -> Result<(), ModelError> {
    if fields.flag("use_sliding_window")? {
        return Err(fields.error("use_sliding_window", "true is not supported"));
    }
    let uniform = !matches!(family, Family::Qwen3_5 { .. });
    if let Some(types) = fields.get("layer_types").filter(|_| uniform) {
        let full = |kind: &Value| kind.as_str() == Some("full_attention");
        match types.as_array() {
            Some(types) if types.iter().all(full) => {}
            _ => {
                let reason = "only \"full_attention\" layers are supported";
                return Err(fields.error("layer_types", reason));
            }
        }
    }
    match fields.get("hidden_act").map(|act| act.as_str()) {
        None | Some(Some("silu" | "swish")) => {}
        Some(_) => return Err(fields.error("hidden_act", "only \"silu\" is supported")),
    }
    if fields.get("quantization_config").is_some() {
        let reason = "quantized weights are not supported; use an f32, bf16 or f16 checkpoint";
        return Err(fields.error("quantization_config", reason));
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    fn base() -> Value {
        json!({
            "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "intermediate_size": 160,
            "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2,
            "head_dim": 16, "vocab_size": 1026, "rms_norm_eps": 1e-6, "hidden_act": "silu",
            "max_position_embeddings": 2048, "tie_word_embeddings": true, "rope_theta": 1e6
        })
    }

    fn parse(value: &Value) -> Result<ModelConfig, ModelError> {
        let map = value.as_object().unwrap();
        ModelConfig::from_fields(&Fields { path: Path::new("config.json"), prefix: "", map })
    }

    #[test]
    fn old_and_new_rope_fields_mean_the_same() {
        let mut new = base();
        new.as_object_mut().unwrap().remove("rope_theta");
        new["rope_parameters"] = json!({"rope_type": "default", "rope_theta": 1e6});
        assert_eq!(parse(&base()).unwrap(), parse(&new).unwrap());
    }

    #[test]
    fn head_dim_is_read_and_not_derived_where_it_is_given() {
        let config = parse(&base()).unwrap();
        assert_eq!((config.head_dim, config.heads * config.head_dim), (16, 128));
        let mut llama = base();
        llama["architectures"] = json!(["LlamaForCausalLM"]);
        llama.as_object_mut().unwrap().remove("head_dim");
        assert_eq!(parse(&llama).unwrap().head_dim, 8);
    }

    fn hybrid() -> Value {
        let mut config = base();
        config["architectures"] = json!(["Qwen3_5ForCausalLM"]);
        config["head_dim"] = json!(32);
        config["num_hidden_layers"] = json!(5);
        config
    }

    #[test]
    fn hybrid_layers_are_read_from_either_class_in_old_and_new_fields() {
        let mut old = hybrid();
        old["partial_rotary_factor"] = json!(0.5);
        old["rope_scaling"] = json!({"mrope_section": [3, 3, 2]});
        let text = parse(&old).unwrap();
        let shape = text.hybrid().unwrap();
        assert_eq!(shape.full, [false, false, false, true, false]);
        assert_eq!((shape.rotary, shape.sections, text.rotary()), (16, [3, 3, 2], 16));
        assert_eq!((text.architecture.name(), text.prefix()), ("Qwen3_5ForCausalLM", "model"));
        let mut new = hybrid();
        new.as_object_mut().unwrap().remove("architectures");
        new["layer_types"] = json!(vec!["linear_attention"; 5]);
        new["rope_parameters"] = json!({
            "rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5,
            "mrope_section": [3, 3, 2], "mrope_interleaved": true
        });
        let whole = json!({
            "architectures": ["Qwen3_5ForConditionalGeneration"], "tie_word_embeddings": false,
            "text_config": new
        });
        let language = parse(&whole).unwrap();
        assert!(!language.tied && language.rope == text.rope);
        assert_eq!(language.hybrid().unwrap().full, [false; 5]);
        assert_eq!(language.prefix(), "model.language_model");
    }

    #[test]
    fn what_is_wrong_with_a_hybrid_is_refused_by_name() {
        for (field, value, says) in [
            ("layer_types", json!(["full_attention"]), "layer_types"),
            ("layer_types", json!(vec!["sliding_attention"; 5]), "layer_types"),
            ("linear_num_value_heads", json!(17), "linear_num_value_heads"),
            ("linear_conv_kernel_dim", json!(0), "linear_conv_kernel_dim"),
            ("partial_rotary_factor", json!(1.5), "partial_rotary_factor"),
            ("rope_parameters", json!({"mrope_section": [1, 2]}), "mrope_section"),
            ("rope_parameters", json!({"mrope_interleaved": false}), "mrope_interleaved"),
        ] {
            let mut text = hybrid();
            text[field] = value;
            let message = parse(&text).unwrap_err().to_string();
            assert!(message.contains(says) && !message.contains('\n'), "{field}: {message}");
            let architectures = json!(["Qwen3_5ForConditionalGeneration"]);
            let whole = json!({"architectures": architectures, "text_config": text});
            let message = parse(&whole).unwrap_err().to_string();
            assert!(message.contains("text_config.") && message.contains(says), "{message}");
        }
    }

    #[test]
    fn what_is_not_supported_is_refused_by_name() {
        for (field, value, says) in [
            (
                "architectures",
                json!(["Qwen3_5MoeForConditionalGeneration"]),
                "Qwen3ForCausalLM, Llama",
            ),
            ("use_sliding_window", json!(true), "use_sliding_window"),
            ("layer_types", json!(["sliding_attention"]), "layer_types"),
            ("hidden_act", json!("gelu"), "hidden_act"),
            ("quantization_config", json!({"bits": 4}), "quantization_config"),
            ("num_key_value_heads", json!(3), "num_key_value_heads"),
            ("hidden_size", json!(0), "hidden_size"),
            ("hidden_size", json!("64"), "hidden_size"),
            ("vocab_size", Value::Null, "vocab_size"),
            ("head_dim", json!(7), "head_dim"),
            ("rope_scaling", json!({"rope_type": "longrope"}), "longrope"),
            ("rope_scaling", json!({"rope_type": "yarn"}), "factor"),
        ] {
            let mut config = base();
            config[field] = value;
            let message = parse(&config).unwrap_err().to_string();
            assert!(message.contains(says) && !message.contains('\n'), "{field}: {message}");
        }
    }
}
