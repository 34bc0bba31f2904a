//! A PPO recipe with everything that it names read and checked: what a run starts from.

use std::path::{Path, PathBuf};

use policy::model::{Checkpoint, CheckpointDigests, LoraConfig};
use protocol::Digest;
use serde_json::{Value, json};

use crate::{
    files::dependency_versions,
    recipe::{
        CodeRow, Columns, Frozen, PpoInputs, PpoRecipe, RecipeError, Sampled, json::canonical,
        read_code_rows,
    },
    rows::{Example, Images, RowFormat, Scored},
    sft::{
        data::{check_digits, examples},
        plan::{file_record, images_record, model_record, open, output_of, shape_record},
    },
};

/// A validated run of PPO on rows.
#[derive(Debug)]
pub struct PpoPlan {
    /// The recipe.
    pub recipe: PpoRecipe,
    /// Where it will be written.
    pub output: PathBuf,
    /// What identifies the checkpoint.
    pub model: CheckpointDigests,
    /// The checkpoint, its weights not loaded.
    pub checkpoint: Checkpoint,
    /// The settings of the adapter that is gone on from.
    pub lora: LoraConfig,
    /// How rows are written.
    pub format: RowFormat,
    /// The rows, or with `rollouts` the tasks.
    pub rows: Vec<CodeRow>,
    /// Their token streams.
    pub examples: Vec<Example>,
    /// Held-out rows and their streams.
    pub valid: Option<(Vec<CodeRow>, Vec<Example>)>,
    /// The images that they show.
    pub images: Images,
    /// Digits of a code.
    pub digits: usize,
    /// The digest of all that decides the run, but where it ends.
    pub identity: Digest,
}

impl PpoPlan {
    /// Reads and checks everything that a recipe names. `output` replaces its `output_dir`; to `resume`
    /// it may be there already.
    ///
    /// # Errors
    /// The first mistake, with field or file and remedy.
    pub fn read(
        path: &Path,
        inputs: &PpoInputs,
        output: Option<&Path>,
        resume: bool,
    ) -> Result<Self, RecipeError> {
        let recipe = PpoRecipe::read(path, inputs)?;
        let model = recipe.model.verify_model()?;
        let output = output_of(output.or(recipe.output_dir.as_deref()), resume, {
            [&recipe.model, &recipe.rows, &recipe.adapter, &recipe.reference]
                .into_iter()
                .chain(&recipe.valid)
                .collect()
        })?;
        let checkpoint = open(&recipe.model)?;
        let lora = check_adapter(&recipe.adapter, &checkpoint)?;
        check_adapter(&recipe.reference, &checkpoint)?;
        let config = checkpoint.config();
        let mut images = Images::of_model(&recipe.model.path, config);
        let format = RowFormat::load(
            &recipe.model.path,
            &recipe.chat_template_kwargs,
            &recipe.prompt,
            (recipe.training.max_length as usize).min(config.max_positions),
        )?;
        let mut digits = None;
        let mut set = |file: &Frozen, columns| {
            let rows = read_code_rows(file, columns)?;
            check_digits(file, &rows, &mut digits)?;
            let examples = examples(file, &rows, &format, &mut images, Scored::Code)?;
            Ok::<_, RecipeError>((rows, examples))
        };
        let sampled_here = recipe.rollouts.is_some();
        let columns = if sampled_here { Columns::Codes } else { Columns::Round };
        let (rows, examples) = set(&recipe.rows, columns)?;
        let valid = recipe.valid.as_ref().map(|file| set(file, Columns::Codes)).transpose()?;
        let digits = digits.unwrap_or_default();
        let identity = identity(&recipe, &images);
        Ok(Self {
            identity,
            recipe,
            output,
            model,
            checkpoint,
            lora,
            format,
            rows,
            examples,
            valid,
            images,
            digits,
        })
    }

    /// What the rows say about their codes; empty where rounds are sampled here.
    pub fn sampled(&self) -> Vec<Sampled> {
        self.rows.iter().filter_map(|row| row.scored).collect()
    }

    /// The plan as JSON: what `learner plan` prints.
    pub fn manifest(&self) -> Value {
        let recipe = &self.recipe;
        let training = &recipe.training;
        let rollouts = recipe.rollouts.map(|it| {
            let tasks = it.tasks(self.rows.len());
            json!({
                "tasks_per_round": tasks,
                "codes_per_round": tasks * it.num_generations as usize,
                "updates_per_round_at_most": training.updates(tasks * it.num_generations as usize),
            })
        });
        let updates = match recipe.rollouts {
            None => Some(training.updates(self.rows.len())),
            Some(_) => None,
        };
        json!({
            "schema_version": 1,
            "status": "planned",
            "method": if recipe.rollouts.is_some() { "ppo_rollouts" } else { "ppo_rows" },
            "recipe": {"path": recipe.path, "sha256": recipe.sha256},
            "model": model_record(&recipe.model, &self.model, &self.checkpoint),
            "rows": file_record(&recipe.rows, self.rows.len()),
            "adapter": {"path": recipe.adapter.path, "sha256": recipe.adapter.sha256},
            "reference": {"path": recipe.reference.path, "sha256": recipe.reference.sha256},
            "valid": recipe.valid.as_ref().zip(self.valid.as_ref())
                .map(|(file, (rows, _))| file_record(file, rows.len())),
            "output_dir": self.output,
            "settings": recipe.settings(),
            "derived": {
                "updates": updates,
                "rollouts": rollouts,
                "rows": shape_record(&self.examples, Some(self.digits)),
                "images": images_record(&self.images),
            },
            "versions": dependency_versions(),
        })
    }
}

fn identity(recipe: &PpoRecipe, images: &Images) -> Digest {
    let mut settings = recipe.settings();
    for (section, key) in [("training", "max_updates"), ("rollouts", "rounds")] {
        if let Some(section) = settings.get_mut(section).and_then(Value::as_object_mut) {
            section.remove(key);
        }
    }
    let images = images.digest().1;
    Digest::of_parts("rollcall-ppo-v1", &[canonical(&settings).as_bytes(), &images.0])
}

/// An adapter's directory is the frozen one, and belongs to the checkpoint as far as its settings tell.
fn check_adapter(adapter: &Frozen, checkpoint: &Checkpoint) -> Result<LoraConfig, RecipeError> {
    let config = adapter.verify_adapter()?;
    config.check_fits(checkpoint.config()).map_err(|error| {
        let problem = format!("{} does not fit: {error}", adapter.path.display());
        RecipeError::conflict(&format!("{}.path", adapter.field), problem, "name one of this model")
    })?;
    Ok(config)
}
