//! The four sampling settings, as training and evaluation have them.

use protocol::Sampling;
use serde::Serialize;

use super::{
    RecipeError,
    section::{Bounds, Section},
};

/// How the next token is chosen, in Hugging Face's order.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SamplingSettings {
    /// Divides the logits, to 100. Above 0 in training; 0 means greedy in evaluation.
    pub temperature: f64,
    /// Keep the k largest logits, to 1,000,000; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set whose probability reaches p: above 0, to 1.
    pub top_p: f64,
    /// Drop ids below this share of the largest probability, 0 to 1.
    pub min_p: f64,
}

impl SamplingSettings {
    /// The defaults of training.
    pub(super) const TRAINING: Self = Self { temperature: 0.6, top_k: 20, top_p: 0.95, min_p: 0.0 };

    pub(super) fn read(
        section: &Section<'_>,
        default: Self,
        greedy: bool,
    ) -> Result<Self, RecipeError> {
        let temperature =
            if greedy { Bounds::closed(0.0, 100.0) } else { Bounds::above(0.0, 100.0) };
        Ok(Self {
            temperature: section.f64("temperature", default.temperature, temperature)?,
            top_k: section.u32("top_k", Some(default.top_k), 0..=1_000_000)?,
            top_p: section.f64("top_p", default.top_p, Bounds::above(0.0, 1.0))?,
            min_p: section.f64("min_p", default.min_p, Bounds::closed(0.0, 1.0))?,
        })
    }

    /// As leases carry it.
    #[allow(clippy::cast_possible_truncation, reason = "settings are rounded to f32 on purpose")]
    pub fn to_sampling(&self) -> Sampling {
        Sampling {
            temperature: self.temperature as f32,
            top_k: self.top_k,
            top_p: self.top_p as f32,
            min_p: self.min_p as f32,
        }
    }
}
