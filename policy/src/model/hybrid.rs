//! What `config.json` says of a Qwen3.5 text decoder beyond a Qwen3 one: which layers keep a
//! recurrent state (gated DeltaNet) instead of keys and values, that state's shape, and the rotary
//! positions of three axes over a part of each head.

use serde_json::Value;

use super::{
    config::{Fields, brief},
    error::ModelError,
    vision::VisionConfig,
};

/// The shape of a Qwen3.5 text decoder beyond [`super::ModelConfig`]. Lengths are in elements.
#[derive(Clone, Debug, PartialEq)]
pub struct Hybrid {
    /// For each layer, whether it is full attention; else gated DeltaNet.
    pub full: Vec<bool>,
    /// Leading elements of a head that are rotated.
    pub rotary: usize,
    /// Frequencies of the time, height and width axes.
    pub sections: [usize; 3],
    /// Taps of the causal convolution.
    pub kernel: usize,
    /// Query and key heads of the DeltaNet; divides `value_heads`.
    pub key_heads: usize,
    /// Value heads of the DeltaNet.
    pub value_heads: usize,
    /// Width of one of its key heads.
    pub key_dim: usize,
    /// Width of one of its value heads.
    pub value_dim: usize,
    /// Whether the decoder is the language model of a vision-language checkpoint, which names its
    /// modules `model.language_model.…` instead of `model.…`.
    pub vision_language: bool,
    /// The vision tower beside the decoder, where the checkpoint has one.
    pub vision: Option<VisionConfig>,
}

impl Hybrid {
    /// Channels of all key heads.
    pub fn keys(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Channels of all value heads.
    pub fn values(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Channels of the convolution: queries, keys and values.
    pub fn channels(&self) -> usize {
        2 * self.keys() + self.values()
    }

    pub(crate) fn read(
        fields: &Fields<'_>,
        layers: usize,
        head_dim: usize,
        vision_language: bool,
    ) -> Result<Self, ModelError> {
        let size = |field: &str, default: usize| -> Result<usize, ModelError> {
            Ok(fields.size(field)?.unwrap_or(default))
        };
        let key_heads = size("linear_num_key_heads", 16)?;
        let value_heads = size("linear_num_value_heads", 32)?;
        if !value_heads.is_multiple_of(key_heads) {
            let reason = format!("{value_heads} is not a multiple of {key_heads} key heads");
            return Err(fields.error("linear_num_value_heads", reason));
        }
        let kernel = size("linear_conv_kernel_dim", 4)?;
        if kernel > 64 {
            return Err(fields.error("linear_conv_kernel_dim", format!("{kernel} exceeds 64")));
        }
        let (rotary, sections) = rotary(fields, head_dim)?;
        Ok(Self {
            full: layer_kinds(fields, layers)?,
            rotary,
            sections,
            kernel,
            key_heads,
            value_heads,
            key_dim: size("linear_key_head_dim", 128)?,
            value_dim: size("linear_value_head_dim", 128)?,
            vision_language,
            vision: None,
        })
    }
}

fn layer_kinds(fields: &Fields<'_>, layers: usize) -> Result<Vec<bool>, ModelError> {
    let Some(types) = fields.get("layer_types") else {
        let interval = fields.size("full_attention_interval")?.unwrap_or(4);
        return Ok((1..=layers).map(|i| i.is_multiple_of(interval)).collect());
    };
    let kind = |kind: &Value| match kind.as_str() {
        Some("full_attention") => Some(true),
        Some("linear_attention") => Some(false),
        _ => None,
    };
    let kinds: Option<Vec<bool>> =
        types.as_array().and_then(|types| types.iter().map(kind).collect());
    kinds.filter(|kinds| kinds.len() == layers).ok_or_else(|| {
        let kinds = "\"linear_attention\" or \"full_attention\"";
        fields.error("layer_types", format!("not a list of {layers} times {kinds}"))
    })
}

/// Rotated elements of a head, and the sections.
fn rotary(fields: &Fields<'_>, head_dim: usize) -> Result<(usize, [usize; 3]), ModelError> {
    let inner = ["rope_parameters", "rope_scaling"]
        .into_iter()
        .find_map(|name| Some((name, fields.get(name)?.as_object()?)));
    let prefix = inner.map(|(name, _)| format!("{}{name}.", fields.prefix)).unwrap_or_default();
    let rope = inner.map(|(_, map)| Fields { path: fields.path, prefix: &prefix, map });
    let rope = rope.as_ref().unwrap_or(fields);
    let outer = fields.positive("partial_rotary_factor")?;
    let factor = rope.positive("partial_rotary_factor")?.or(outer).unwrap_or(0.25);
    let rotary = (head_dim as f64 * factor) as usize;
    if factor > 1.0 || rotary == 0 || !rotary.is_multiple_of(2) {
        let reason = format!("{factor} does not rotate an even part of a head of {head_dim}");
        return Err(rope.error("partial_rotary_factor", reason));
    }
    if rope.get("mrope_interleaved").is_some_and(|flag| flag.as_bool() != Some(true)) {
        return Err(rope.error("mrope_interleaved", "only true is supported"));
    }
    let Some(listed) = rope.get("mrope_section") else { return Ok((rotary, [11, 11, 10])) };
    let numbers: Option<Vec<usize>> = listed.as_array().and_then(|list| {
        let number = |n: &Value| n.as_u64().filter(|n| *n <= 1024).map(|n| n as usize);
        list.iter().map(number).collect()
    });
    match numbers.as_deref() {
        Some(&[t, h, w]) => Ok((rotary, [t, h, w])),
        _ => {
            let reason = format!("{} is not a list of three small integers", brief(listed));
            Err(rope.error("mrope_section", reason))
        }
    }
}
