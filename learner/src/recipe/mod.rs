//! Recipes: JSON with `//` comments that says what a run is, in full. Every field is checked, unknown keys are refused,
//! and what a run reads is frozen by SHA-256.
//!
//! Recipes hold what decides a run. Where and on what it runs (devices, ports, how many actors) is
//! the command line's business, so that the same recipe gives the same [`RunId`] everywhere.

mod algorithm;
mod audit;
mod conversations;
mod dataset;
mod error;
mod frozen;
pub mod json;
mod lora;
mod online;
mod optimizer;
mod ppo;
mod rows;
mod sampling;
mod section;
mod sft;
mod training;

#[cfg(test)]
mod tests;

use std::path::Path;

use protocol::{Digest, RunId};
use serde_json::Value;

pub use algorithm::{Algorithm, AlgorithmSettings, ValueSettings};
pub use audit::AuditSettings;
pub use conversations::{Conversation, read_conversations};
pub use dataset::{TaskRow, check_disjoint, read_tasks};
pub use error::RecipeError;
pub use frozen::Frozen;
pub(crate) use frozen::{check_apart, check_output};
pub use lora::LoraSettings;
pub use online::{Evaluation, EvidenceSettings, Recipe};
pub use optimizer::{LrScheduler, OptimizerSettings};
pub(crate) use ppo::now;
pub use ppo::{CodeReward, PpoInputs, PpoRecipe, PpoSettings, RolloutSettings};
pub use rows::{CodeRow, Columns, PromptTemplate, Sampled, parse_code_rows, read_code_rows};
pub use sampling::SamplingSettings;
pub use sft::{SftRecipe, SftSettings, Trainable};
pub use training::{FailurePolicy, TrainingSettings};

/// Which command takes a recipe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `learner train` and `learner eval`.
    Online,
    /// `learner sft`.
    Sft,
    /// `learner ppo`.
    Ppo,
}

impl Kind {
    /// By the keys that only one kind has.
    ///
    /// # Errors
    /// The file cannot be read, or is no JSON.
    pub fn of(path: &Path) -> Result<Self, RecipeError> {
        let (recipe, _) = online::read_json(path)?;
        let has = |keys: &[&str]| keys.iter().any(|key| recipe.get(key).is_some());
        Ok(if has(&["rows", "rollouts"]) {
            Self::Ppo
        } else if has(&["environment", "evaluation", "reward", "audit", "evidence"]) {
            Self::Online
        } else if has(&["dataset"]) {
            Self::Sft
        } else if has(&["adapter", "reference"]) {
            Self::Ppo
        } else {
            Self::Online
        })
    }
}

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
