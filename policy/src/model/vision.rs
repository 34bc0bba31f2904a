//! What `config.json` says of the vision tower of a vision-language checkpoint.

use serde_json::Value;

use super::{config::Fields, error::ModelError};

/// The shape of a vision tower. Lengths are in elements.
#[derive(Clone, Debug, PartialEq)]
pub struct VisionConfig {
    /// Number of blocks.
    pub depth: usize,
    /// Width of its residual stream.
    pub hidden: usize,
    /// Width of its feed-forward layers.
    pub ffn: usize,
    /// Heads of its attention; divides `hidden`.
    pub heads: usize,
    /// Pixels along a side of a patch.
    pub patch: usize,
    /// Frames in a patch.
    pub time: usize,
    /// Patches along a side of the blocks that become one embedding.
    pub merge: usize,
    /// Learned positions: the largest square of them is a grid over the image.
    pub positions: usize,
    /// Base of its rotary wavelengths.
    pub theta: f64,
    /// The id whose embeddings images replace.
    pub image_pad: u32,
}

impl VisionConfig {
    /// Values of a patch.
    pub fn patch_values(&self) -> usize {
        3 * self.time * self.patch * self.patch
    }

    /// Side of the grid of learned positions.
    pub(crate) fn side(&self) -> usize {
        self.positions.isqrt()
    }

    /// Width of the merger: that of the patches of a block together.
    pub(crate) fn merged(&self) -> usize {
        self.hidden * self.merge * self.merge
    }

    /// Reads the fields beside `text_config`, of a text decoder of width `hidden`.
    pub(crate) fn read(outer: &Fields<'_>, hidden: usize) -> Result<Self, ModelError> {
        let empty = serde_json::Map::new();
        let map = match outer.get("vision_config") {
            None => &empty,
            Some(Value::Object(map)) => map,
            Some(_) => return Err(outer.error("vision_config", "not an object")),
        };
        let fields = Fields { path: outer.path, prefix: "vision_config.", map };
        let size = |fields: &Fields<'_>, names: &[&str], default, most| {
            for name in names {
                match fields.size(name)? {
                    Some(size) if size > most => {
                        return Err(fields.error(name, format!("{size} exceeds {most}")));
                    }
                    Some(size) => return Ok(size),
                    None => {}
                }
            }
            Ok(default)
        };
        match fields.get("hidden_act").map(Value::as_str) {
            None | Some(Some("gelu_pytorch_tanh")) => {}
            Some(_) => {
                let reason = "only \"gelu_pytorch_tanh\" is supported";
                return Err(fields.error("hidden_act", reason));
            }
        }
        let deep = fields.get("deepstack_visual_indexes").and_then(Value::as_array);
        if deep.is_some_and(|list| !list.is_empty()) {
            let reason = "feeding blocks to the decoder's layers is not supported";
            return Err(fields.error("deepstack_visual_indexes", reason));
        }
        if size(&fields, &["in_channels"], 3, 1 << 10)? != 3 {
            return Err(fields.error("in_channels", "only 3 is supported"));
        }
        let out = size(&fields, &["out_hidden_size"], hidden, 1 << 24)?;
        if out != hidden {
            let reason = format!("{out} is not the text_config.hidden_size {hidden}");
            return Err(fields.error("out_hidden_size", reason));
        }
        let theta = match fields.get("rope_parameters") {
            None => None,
            Some(Value::Object(map)) => {
                let rope =
                    Fields { path: outer.path, prefix: "vision_config.rope_parameters.", map };
                match rope.get("rope_type").map(Value::as_str) {
                    None | Some(Some("axial" | "default")) => rope.positive("rope_theta")?,
                    Some(_) => {
                        return Err(rope.error("rope_type", "only \"axial\" is supported"));
                    }
                }
            }
            Some(_) => return Err(fields.error("rope_parameters", "not an object")),
        };
        let image_pad = match outer.get("image_token_id") {
            None => Some(248_056),
            Some(id) => id.as_u64().and_then(|id| u32::try_from(id).ok()),
        };
        let image_pad =
            image_pad.ok_or_else(|| outer.error("image_token_id", "not a token's id"))?;
        let config = Self {
            depth: size(&fields, &["depth", "num_hidden_layers"], 27, 1024)?,
            hidden: size(&fields, &["hidden_size"], 1152, 1 << 16)?,
            ffn: size(&fields, &["intermediate_size"], 4304, 1 << 20)?,
            heads: size(&fields, &["num_heads", "num_attention_heads"], 16, 1 << 10)?,
            patch: size(&fields, &["patch_size"], 16, 256)?,
            time: size(&fields, &["temporal_patch_size"], 2, 16)?,
            merge: size(&fields, &["spatial_merge_size"], 2, 16)?,
            positions: size(&fields, &["num_position_embeddings"], 2304, 1 << 20)?,
            theta: theta.unwrap_or(10_000.0),
            image_pad,
        };
        if !config.hidden.is_multiple_of(4 * config.heads) {
            let (hidden, heads) = (config.hidden, config.heads);
            let reason = format!("{heads} heads do not cut {hidden} into multiples of 4");
            return Err(fields.error("num_heads", reason));
        }
        Ok(config)
    }
}
