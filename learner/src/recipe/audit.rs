//! The `audit` section: what sampling evidence does, and when an actor is cut off. The exact rungs of
//! the audit have no settings.

use std::path::Path;

use serde_json::{Value, json};

use super::{Frozen, RecipeError, section::Section};
use crate::audit::sampling::SamplingMode;

pub(super) const KEYS: &[&str] = &["sampling", "calibration", "quarantine_after"];

/// The section. It decides nothing of what is played, so it is no part of the run's id.
#[derive(Clone, Debug, PartialEq)]
pub struct AuditSettings {
    /// `off`, `report` (the default) or `enforce`.
    pub sampling: SamplingMode,
    /// Bounds that `learner calibrate` measured. Without them there are bounds for f32 on processors
    /// only.
    pub calibration: Option<Frozen>,
    /// Rejections after which an actor is cut off where `training.failure_policy` is `quarantine`, 1
    /// to 1,000,000. Default 3.
    pub quarantine_after: u32,
}

impl AuditSettings {
    pub(super) fn read(recipe: &Section<'_>, base: &Path) -> Result<Self, RecipeError> {
        let empty = json!({});
        let section = Section::new("audit", recipe.value("audit").unwrap_or(&empty), KEYS)?;
        let modes = [
            ("off", SamplingMode::Off),
            ("report", SamplingMode::Report),
            ("enforce", SamplingMode::Enforce),
        ];
        let calibration = match section.value("calibration") {
            None => None,
            Some(_) => Some(Frozen::required(&section, "calibration", base)?),
        };
        Ok(Self {
            sampling: section.choice("sampling", SamplingMode::Report, &modes)?,
            calibration,
            quarantine_after: section.u32("quarantine_after", Some(3), 1..=1_000_000)?,
        })
    }

    pub(super) fn settings(&self) -> Value {
        let calibration = self.calibration.as_ref().map(|it| json!({"sha256": it.sha256}));
        json!({
            "sampling": self.sampling,
            "calibration": calibration,
            "quarantine_after": self.quarantine_after,
        })
    }
}
