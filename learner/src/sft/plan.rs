//! A supervised recipe with everything that it names read and checked: what a run starts from.

use std::path::{Path, PathBuf};

use policy::model::{Checkpoint, CheckpointDigests};
use protocol::Digest;
use serde_json::{Value, json};

use super::data::Data;
use crate::{
    checkpoint::TrainingCheckpoint,
    files::dependency_versions,
    recipe::{Frozen, RecipeError, SftRecipe, Trainable, check_output},
    rows::Example,
};

/// A validated supervised run.
#[derive(Debug)]
pub struct SftPlan {
    /// The recipe.
    pub recipe: SftRecipe,
    /// Where it will be written.
    pub output: PathBuf,
    /// What identifies the checkpoint.
    pub model: CheckpointDigests,
    /// The checkpoint, its weights not loaded.
    pub checkpoint: Checkpoint,
    /// The rows.
    pub data: Data,
}

impl SftPlan {
    /// Reads and checks everything that a recipe names. `output` replaces its `output_dir`; to `resume`
    /// it may be there already.
    ///
    /// # Errors
    /// The first mistake, with field or file and remedy.
    pub fn read(path: &Path, output: Option<&Path>, resume: bool) -> Result<Self, RecipeError> {
        let recipe = SftRecipe::read(path)?;
        let model = recipe.model.verify_model()?;
        let output = output_of(output.or(recipe.output_dir.as_deref()), resume, {
            [&recipe.model, &recipe.dataset].into_iter().chain(&recipe.valid).collect()
        })?;
        let checkpoint = open(&recipe.model)?;
        if recipe.trainable == Trainable::Lora {
            recipe.lora.to_config().check_fits(checkpoint.config()).map_err(|error| {
                RecipeError::conflict("lora", error.to_string(), "name linears that the model has")
            })?;
        }
        let data = Data::read(&recipe, checkpoint.config())?;
        Ok(Self { recipe, output, model, checkpoint, data })
    }

    /// What all ranks of a run have in common.
    pub fn identity(&self) -> Digest {
        let settings = self.recipe.settings().to_string();
        let images = self.data.images.digest().1;
        Digest::of_parts("rollcall-sft-v1", &[settings.as_bytes(), &images.0])
    }

    /// The plan as JSON: what `learner plan` prints.
    pub fn manifest(&self) -> Value {
        let recipe = &self.recipe;
        let training = &recipe.training;
        let rows = &self.data.train;
        json!({
            "schema_version": 1,
            "status": "planned",
            "method": if self.data.digits.is_some() { "sft_rows" } else { "sft_conversations" },
            "recipe": {"path": recipe.path, "sha256": recipe.sha256},
            "model": model_record(&recipe.model, &self.model, &self.checkpoint),
            "dataset": file_record(&recipe.dataset, rows.len()),
            "valid": recipe.valid.as_ref().zip(self.data.valid.as_ref())
                .map(|(file, rows)| file_record(file, rows.len())),
            "output_dir": self.output,
            "settings": recipe.settings(),
            "derived": {
                "updates": training.updates(rows.len()),
                "updates_per_epoch": training.updates_per_epoch(rows.len()),
                "rows": shape_record(rows, self.data.digits),
                "images": images_record(&self.data.images),
            },
            "versions": dependency_versions(),
        })
    }
}

/// The checkpoint in a frozen directory.
pub(crate) fn open(model: &Frozen) -> Result<Checkpoint, RecipeError> {
    Checkpoint::open(&model.path).map_err(|error| RecipeError::Model {
        path: model.path.clone(),
        problem: error.to_string(),
    })
}

/// The directory to write, checked against what is read. To `resume` it may be that of a run.
pub(crate) fn output_of(
    output: Option<&Path>,
    resume: bool,
    inputs: Vec<&Frozen>,
) -> Result<PathBuf, RecipeError> {
    let output = output.ok_or_else(|| RecipeError::Missing {
        field: "output_dir".into(),
        expected: "a new directory, here or with --output".into(),
    })?;
    let of_run = |name: &str| output.join(name).is_file();
    if resume && (of_run(TrainingCheckpoint::FILE) || of_run("metrics.jsonl")) {
        return Ok(output.to_owned());
    }
    check_output(output, &inputs)
}

pub(crate) fn model_record(
    model: &Frozen,
    digests: &CheckpointDigests,
    checkpoint: &Checkpoint,
) -> Value {
    let config = checkpoint.config();
    json!({
        "path": model.path, "sha256": model.sha256, "weights_sha256": digests.weights,
        "architecture": config.architecture.name(), "vocabulary": config.vocab,
        "max_positions": config.max_positions,
    })
}

pub(crate) fn file_record(file: &Frozen, rows: usize) -> Value {
    json!({"path": file.path, "sha256": file.sha256, "rows": rows})
}

/// How long rows are.
pub(crate) fn shape_record(rows: &[Example], digits: Option<usize>) -> Value {
    let tokens: usize = rows.iter().map(|row| row.ids.len()).sum();
    let scored = rows.iter().flat_map(|row| &row.scored).filter(|scored| **scored).count();
    json!({
        "digits": digits,
        "tokens": tokens,
        "scored_tokens": scored,
        "longest_tokens": rows.iter().map(|row| row.ids.len()).max(),
    })
}

/// Which images are shown: what the recipe does not freeze is written down.
pub(crate) fn images_record(images: &crate::rows::Images) -> Value {
    let (files, sha256) = images.digest();
    json!({"files": files, "sha256": (files > 0).then_some(sha256)})
}
