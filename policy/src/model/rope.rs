//! Rotary positions: inverse frequencies of the supported kinds and tables of cosines and sines.
//! The formulas and their f32 rounding follow transformers' `modeling_rope_utils.py`.

use serde_json::Value;

use super::{
    config::{Fields, brief},
    error::ModelError,
};

/// How positions become angles.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Base of the geometric series of wavelengths.
    pub theta: f64,
    /// Stretching for contexts longer than those of the pre-training.
    pub scaling: RopeScaling,
}

/// The supported kinds of rope scaling.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// None.
    Default,
    /// All frequencies divided by a factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// YaRN (<https://arxiv.org/abs/2309.00071>).
    Yarn {
        /// Ratio of the new context to the original one.
        factor: f64,
        /// Scale of cosines and sines.
        attention_factor: f64,
        /// Rotations above which a dimension is left as it is.
        beta_fast: f64,
        /// Rotations below which a dimension is interpolated.
        beta_slow: f64,
        /// The context of the pre-training, in ids.
        original: usize,
        /// Whether the bounds of the ramp are rounded to whole dimensions.
        truncate: bool,
    },
    /// Llama 3.1.
    Llama3 {
        /// Ratio of the new context to the original one.
        factor: f64,
        /// Divides the original context into the longest kept wavelength.
        low_freq_factor: f64,
        /// Divides the original context into the shortest stretched wavelength.
        high_freq_factor: f64,
        /// The context of the pre-training, in ids.
        original: usize,
    },
}

impl RopeConfig {
    /// Reads `rope_parameters`, or the older `rope_theta` and `rope_scaling`.
    /// A `partial` rotation is another reader's concern; elsewhere it is refused.
    pub(crate) fn read(
        fields: &Fields<'_>,
        max_positions: usize,
        partial: bool,
    ) -> Result<Self, ModelError> {
        let outer = fields.positive("rope_theta")?;
        let name =
            ["rope_parameters", "rope_scaling"].into_iter().find(|name| fields.get(name).is_some());
        let Some(name) = name else {
            return Ok(Self { theta: outer.unwrap_or(10_000.0), scaling: RopeScaling::Default });
        };
        let Some(map) = fields.get(name).and_then(Value::as_object) else {
            return Err(fields.error(name, "not an object"));
        };
        let prefix = format!("{}{name}.", fields.prefix);
        let rope = Fields { path: fields.path, prefix: &prefix, map };
        let theta = rope.positive("rope_theta")?.or(outer).unwrap_or(10_000.0);
        if let Some(factor) = rope.get("partial_rotary_factor")
            && factor.as_f64() != Some(1.0)
            && !partial
        {
            return Err(rope.error("partial_rotary_factor", "only 1 is supported"));
        }
        let factor = || {
            rope.positive("factor")?
                .ok_or_else(|| rope.error("factor", "missing; a number is needed"))
        };
        let original = || match rope.size("original_max_position_embeddings")? {
            Some(original) => Ok(original),
            None => Ok(fields.size("original_max_position_embeddings")?.unwrap_or(max_positions)),
        };
        let kind = rope.get("rope_type").or_else(|| rope.get("type"));
        let scaling = match kind.map(|kind| kind.as_str()) {
            None | Some(Some("default")) => RopeScaling::Default,
            Some(Some("linear")) => RopeScaling::Linear { factor: factor()? },
            Some(Some("yarn")) => yarn(&rope, factor()?, original()?)?,
            Some(Some("llama3")) => {
                let needed = |field| {
                    rope.positive(field)?
                        .ok_or_else(|| rope.error(field, "missing; a number is needed"))
                };
                RopeScaling::Llama3 {
                    factor: factor()?,
                    low_freq_factor: needed("low_freq_factor")?,
                    high_freq_factor: needed("high_freq_factor")?,
                    original: original()?,
                }
            }
            _ => {
                let found = kind.map(brief).unwrap_or_default();
                let reason = format!("{found} is not one of default, linear, yarn, llama3");
                return Err(rope.error("rope_type", reason));
            }
        };
        Ok(Self { theta, scaling })
    }

    /// The longest sequence, where `config.json` lists `listed`: YaRN files often list the original.
    pub(crate) fn max_positions(&self, listed: usize) -> usize {
        match self.scaling {
            RopeScaling::Yarn { factor, original, .. } => {
                listed.max((original as f64 * factor).min(1e9) as usize)
            }
            _ => listed,
        }
    }

    /// The inverse frequencies of a head of `dim` elements, and the scale of cosines and sines.
    pub(crate) fn frequencies(&self, dim: usize) -> (Vec<f32>, f32) {
        let theta = self.theta as f32;
        let plain: Vec<f32> =
            (0..dim / 2).map(|j| 1.0 / theta.powf((2 * j) as f32 / dim as f32)).collect();
        match self.scaling {
            RopeScaling::Default => (plain, 1.0),
            RopeScaling::Linear { factor } => {
                (plain.iter().map(|f| f / factor as f32).collect(), 1.0)
            }
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original } => {
                let stretch = |f: f32| {
                    let wavelength = std::f64::consts::TAU / f64::from(f);
                    let smooth = (original as f64 / wavelength - low_freq_factor)
                        / (high_freq_factor - low_freq_factor);
                    if wavelength < original as f64 / high_freq_factor {
                        f
                    } else if wavelength > original as f64 / low_freq_factor {
                        f / factor as f32
                    } else {
                        ((1.0 - smooth) * f64::from(f) / factor + smooth * f64::from(f)) as f32
                    }
                };
                (plain.into_iter().map(stretch).collect(), 1.0)
            }
            RopeScaling::Yarn {
                factor,
                attention_factor,
                beta_fast,
                beta_slow,
                original,
                truncate,
            } => {
                let bound = |rotations: f64| {
                    dim as f64 * (original as f64 / (rotations * std::f64::consts::TAU)).ln()
                        / (2.0 * self.theta.ln())
                };
                let (mut low, mut high) = (bound(beta_fast), bound(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                let (low, mut high) = (low.max(0.0), high.min(dim as f64 - 1.0));
                if low == high {
                    high += 0.001;
                }
                let stretch = |(j, f): (usize, f32)| {
                    let ramp = ((j as f64 - low) / (high - low)).clamp(0.0, 1.0) as f32;
                    f / factor as f32 * ramp + f * (1.0 - ramp)
                };
                (plain.into_iter().enumerate().map(stretch).collect(), attention_factor as f32)
            }
        }
    }
}

fn yarn(rope: &Fields<'_>, factor: f64, original: usize) -> Result<RopeScaling, ModelError> {
    let scale = |m: f64| if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 };
    let derived = match (rope.positive("mscale")?, rope.positive("mscale_all_dim")?) {
        (Some(m), Some(all)) => scale(m) / scale(all),
        _ => scale(1.0),
    };
    Ok(RopeScaling::Yarn {
        factor,
        attention_factor: rope.positive("attention_factor")?.unwrap_or(derived),
        beta_fast: rope.positive("beta_fast")?.unwrap_or(32.0),
        beta_slow: rope.positive("beta_slow")?.unwrap_or(1.0),
        original,
        truncate: rope.get("truncate").is_none_or(|t| t.as_bool() != Some(false)),
    })
}

/// Cosines and sines of positions, computed on demand and kept.
#[derive(Clone, Debug)]
pub(crate) struct RopeTable {
    inverse: Vec<f32>,
    scale: f32,
    /// Frequencies that turn with height and with width, as `mrope_section` counts them.
    sections: [usize; 3],
}

impl RopeTable {
    pub(crate) fn new(config: &RopeConfig, head_dim: usize) -> Self {
        let (inverse, scale) = config.frequencies(head_dim);
        Self { inverse, scale, sections: [0; 3] }
    }

    /// With time, height and width interleaved over the frequencies.
    pub(crate) fn interleaved(self, sections: [usize; 3]) -> Self {
        Self { sections, ..self }
    }

    /// The axis of frequency `index`: time, height or width.
    fn axis(&self, index: usize) -> usize {
        let axis = index % 3;
        let count = self.sections.get(axis).copied().unwrap_or(0);
        if index < 3 * count { axis } else { 0 }
    }

    /// Cosines and sines at `positions`, each `[positions, head_dim / 2]` row-major.
    pub(crate) fn at(&self, positions: &[u32]) -> (Vec<f32>, Vec<f32>) {
        self.at_axes(positions.iter().map(|&position| [position; 3]))
    }

    /// The same at positions of time, height and width.
    pub(crate) fn at_axes(
        &self,
        positions: impl Iterator<Item = [u32; 3]>,
    ) -> (Vec<f32>, Vec<f32>) {
        let angle = |position: [u32; 3]| {
            let frequencies = self.inverse.iter().enumerate();
            frequencies.map(move |(j, f)| position[self.axis(j)] as f32 * f)
        };
        positions
            .flat_map(angle)
            .map(|angle| {
                let (sin, cos) = f64::from(angle).sin_cos();
                (cos as f32 * self.scale, sin as f32 * self.scale)
            })
            .unzip()
    }
}
