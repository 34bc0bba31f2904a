//! Recipes: JSON that says what a run is, in full. Every field is checked, unknown keys are refused,
//! and what a run reads is frozen by SHA-256.
//!
//! Recipes hold what decides a run. Where and on what it runs (devices, ports, how many actors) is
//! the command line's business, so that the same recipe gives the same [`RunId`] everywhere.

mod audit;
mod dataset;
mod error;
mod frozen;
pub mod json;
mod lora;
mod online;
mod optimizer;
mod sampling;
mod section;
mod sft;
mod training;

#[cfg(test)]
mod tests;

use protocol::{Digest, RunId};
use serde_json::Value;

pub use audit::AuditSettings;
pub use dataset::{TaskRow, check_disjoint, read_tasks};
pub use error::RecipeError;
pub use frozen::Frozen;
pub(crate) use frozen::check_output;
pub use lora::LoraSettings;
pub use online::{Evaluation, EvidenceSettings, Recipe};
pub use optimizer::{LrScheduler, OptimizerSettings};
pub use sampling::SamplingSettings;
pub use sft::{Conversation, SftRecipe, SftSettings, Trainable, read_conversations};
pub use training::{FailurePolicy, LossType, TrainingSettings};

/// The id of the run that these settings describe ([`Recipe::settings`]), played in the environment
/// of this digest: the same wherever it is written and wherever its files lie.
pub(crate) fn run_id(kind: &str, settings: &Value, environment: Option<Digest>) -> RunId {
    let mut settings = settings.clone();
    // What a run keeps of itself, and how it looks at it, does not make it another run.
    if let Some(settings) = settings.as_object_mut() {
        settings.remove("evidence");
        settings.remove("audit");
    }
    let settings = json::canonical(&settings);
    let environment = environment.map(|digest| digest.0);
    let environment = environment.as_ref().map_or(&[][..], |bytes| bytes.as_slice());
    RunId(Digest::of_parts("rollcall-run-v1", &[kind.as_bytes(), settings.as_bytes(), environment]))
}
