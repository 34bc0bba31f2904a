//! What can be wrong with a recipe or a data set: one line each, with the place and the remedy.

use std::{io, path::PathBuf};

use environments::SpecError;
use protocol::Digest;

use super::json::JsonError;

/// A recipe that cannot be run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecipeError {
    /// A file could not be read.
    #[error("{what} {path} cannot be read: {source}; {}", terminal::remedy(.source), path = .path.display())]
    Read {
        /// Which file, as `recipe` or `dataset.path`.
        what: String,
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A recipe that is not JSON.
    #[error("recipe {path}: {source}; mend it there", path = .path.display())]
    Json {
        /// The recipe.
        path: PathBuf,
        /// What is wrong.
        source: JsonError,
    },
    /// A file beyond its bound.
    #[error("{what} {path} is larger than {limit} bytes: take some of it away", path = .path.display())]
    TooLarge {
        /// Which file.
        what: String,
        /// Where.
        path: PathBuf,
        /// The bound.
        limit: u64,
    },
    /// A value of the wrong type or out of bounds.
    #[error("{field} must be {expected}, not {found}")]
    Value {
        /// Dotted path of the field.
        field: String,
        /// What it must be, with its bounds.
        expected: String,
        /// What it is, clipped.
        found: String,
    },
    /// A required field is absent.
    #[error("{field} is missing: set it to {expected}")]
    Missing {
        /// Dotted path of the field.
        field: String,
        /// What it must be.
        expected: String,
    },
    /// A key that nobody reads.
    #[error("{field} is unknown: {remedy}")]
    Unknown {
        /// Dotted path of the field, clipped.
        field: String,
        /// The nearest known key, or all of them.
        remedy: String,
    },
    /// Values that do not go together.
    #[error("{field}: {problem}; {remedy}")]
    Conflict {
        /// Dotted path of the field.
        field: String,
        /// What is wrong.
        problem: String,
        /// What to do.
        remedy: String,
    },
    /// The environment section, by its own rules.
    #[error(transparent)]
    Environment(#[from] SpecError),
    /// A frozen file that has changed.
    #[error(
        "{field}.sha256 is {expected}, and {path} has {found}: restore it or write the new SHA-256 into the recipe",
        path = .path.display()
    )]
    Sha256 {
        /// `model`, `dataset`, ...
        field: String,
        /// Where the file is.
        path: PathBuf,
        /// What the recipe says.
        expected: Digest,
        /// What it is.
        found: Digest,
    },
    /// A data set row.
    #[error("{path} line {line}: {problem}", path = .path.display())]
    Row {
        /// The data set.
        path: PathBuf,
        /// Line, from 1.
        line: u64,
        /// What is wrong and what to do.
        problem: String,
    },
    /// A data set without rows.
    #[error("{path} has no rows: write one JSON object a line", path = .path.display())]
    NoRows {
        /// The data set.
        path: PathBuf,
    },
    /// The model directory.
    #[error("model.path {path}: {problem}", path = .path.display())]
    Model {
        /// The directory.
        path: PathBuf,
        /// What is wrong and what to do.
        problem: String,
    },
}

impl RecipeError {
    pub(crate) fn conflict(
        field: &str,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self::Conflict { field: field.into(), problem: problem.into(), remedy: remedy.into() }
    }
}
