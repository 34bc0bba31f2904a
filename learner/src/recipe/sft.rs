//! Recipes of supervised fine-tuning: `learner sft`.

use std::path::{Path, PathBuf};

use protocol::{ComputeDtype, Digest};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::{
    Frozen, LoraSettings, LrScheduler, OptimizerSettings, PromptTemplate, RecipeError,
    online::{kwargs, read_json},
    section::Section,
};

pub(super) const KEYS: &[&str] = &[
    "schema_version",
    "model",
    "dataset",
    "valid",
    "output_dir",
    "seed",
    "chat_template_kwargs",
    "prompt",
    "training",
    "trainable",
    "lora",
];

/// What is trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Trainable {
    /// An adapter.
    Lora,
    /// Every weight: for small models.
    All,
}

/// A valid recipe of supervised fine-tuning. Frozen files are named, not yet read.
#[derive(Clone, Debug)]
pub struct SftRecipe {
    /// The recipe's file.
    pub path: PathBuf,
    /// SHA-256 of the recipe's bytes.
    pub sha256: Digest,
    /// The checkpoint to start from.
    pub model: Frozen,
    /// Conversations or rows to learn.
    pub dataset: Frozen,
    /// Conversations to measure the loss on, or rows to measure the accuracy on, if any.
    pub valid: Option<Frozen>,
    /// Where the run is written, if the recipe says so.
    pub output_dir: Option<PathBuf>,
    /// Decides the order of rows and the adapter's initialisation. Default 42.
    pub seed: u64,
    /// Passed to the chat template. Default for rows of codes `{"enable_thinking": false}`.
    pub chat_template_kwargs: Map<String, Value>,
    /// What the policy is asked about a row; the data are rows of codes then, else conversations.
    pub prompt: Option<String>,
    /// How it is trained.
    pub training: SftSettings,
    /// What is trained. Default `lora`.
    pub trainable: Trainable,
    /// The adapter, where one is trained.
    pub lora: LoraSettings,
}

/// The `training` section. Only the ids of assistant turns are learned. Rows of codes have other
/// defaults where two are given, those of the row trainers in the field.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SftSettings {
    /// Passes over the data, 1 to 10,000. Default 1.
    pub num_train_epochs: u32,
    /// Updates after which training ends in any case, to 100,000,000; 0 (the default) is no bound.
    /// `max_updates` is the same.
    pub max_steps: u32,
    /// Rows of a micro-batch, 1 to 65,536. Default 8; 16.
    pub per_device_train_batch_size: u32,
    /// Micro-batches of an update, 1 to 1,024. Default 1.
    pub gradient_accumulation_steps: u32,
    /// Longest row in ids, 1 to 262,144; longer ones are refused. Default 1024; 4096.
    pub max_length: u32,
    /// Optimizer and schedule. Default learning rate 1e-4; and for rows of codes `warmup_cosine` with 10
    /// updates of warm-up.
    #[serde(flatten)]
    pub optimizer: OptimizerSettings,
    /// Recompute activations in the backward pass. Default true.
    pub gradient_checkpointing: bool,
    /// Number format of the forward passes, `f32` or `bf16`. Default `f32`.
    pub compute_dtype: ComputeDtype,
    /// Updates after which a checkpoint is written, besides those at the ends of epochs, to 100,000,000;
    /// 0 is none. Default 100. It decides nothing about the run.
    #[serde(skip)]
    pub save_steps: u32,
}

pub(super) const TRAINING_KEYS: &[&str] = &[
    "num_train_epochs",
    "max_steps",
    "max_updates",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "max_length",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "gradient_checkpointing",
    "compute_dtype",
    "save_steps",
];

impl SftSettings {
    fn read(section: &Section<'_>, codes: bool) -> Result<Self, RecipeError> {
        let max_updates = section.u32("max_updates", Some(0), 0..=100_000_000)?;
        if max_updates > 0 && section.value("max_steps").is_some() {
            return Err(RecipeError::conflict(
                &section.at("max_updates"),
                "max_steps says the same",
                "remove one of them",
            ));
        }
        let optimizer = if codes {
            OptimizerSettings::read_for_rows(section, 1e-4, LrScheduler::WarmupCosine, 10)?
        } else {
            OptimizerSettings::read(section, 1e-4)?
        };
        Ok(Self {
            num_train_epochs: section.u32("num_train_epochs", Some(1), 1..=10_000)?,
            max_steps: section.u32("max_steps", Some(max_updates), 0..=100_000_000)?,
            per_device_train_batch_size: section.u32(
                "per_device_train_batch_size",
                Some(if codes { 16 } else { 8 }),
                1..=65_536,
            )?,
            gradient_accumulation_steps: section.u32(
                "gradient_accumulation_steps",
                Some(1),
                1..=1024,
            )?,
            max_length: section.u32(
                "max_length",
                Some(if codes { 4096 } else { 1024 }),
                1..=262_144,
            )?,
            optimizer,
            gradient_checkpointing: section.bool("gradient_checkpointing", true)?,
            compute_dtype: section.choice(
                "compute_dtype",
                ComputeDtype::F32,
                &[("f32", ComputeDtype::F32), ("bf16", ComputeDtype::Bf16)],
            )?,
            save_steps: section.u32("save_steps", Some(100), 0..=100_000_000)?,
        })
    }

    /// The same where each of `world` ranks has a micro-batch of its own.
    #[must_use]
    pub fn over_ranks(&self, world: usize) -> Self {
        let world = u32::try_from(world).unwrap_or(u32::MAX);
        let batch = self.per_device_train_batch_size.saturating_mul(world);
        Self { per_device_train_batch_size: batch, ..*self }
    }

    /// Updates over a data set of so many rows. The last update of an epoch may be a small one.
    pub fn updates(&self, rows: usize) -> u64 {
        let all = self.updates_per_epoch(rows) * u64::from(self.num_train_epochs);
        if self.max_steps == 0 { all } else { all.min(self.max_steps.into()) }
    }

    /// Updates of one pass over so many rows.
    pub fn updates_per_epoch(&self, rows: usize) -> u64 {
        let batch = u64::from(self.per_device_train_batch_size)
            * u64::from(self.gradient_accumulation_steps);
        (rows as u64).div_ceil(batch.max(1))
    }
}

impl SftRecipe {
    /// Reads and validates a recipe file.
    ///
    /// # Errors
    /// The first mistake, by field.
    pub fn read(path: &Path) -> Result<Self, RecipeError> {
        let (value, sha256) = read_json(path)?;
        let base = path.parent().unwrap_or(Path::new(""));
        let recipe = Section::new("", &value, KEYS)?;
        recipe.u64("schema_version", None, 1..=1)?;
        let empty = json!({});
        let training = recipe.value("training").unwrap_or(&empty);
        let valid = match recipe.section("valid", Frozen::KEYS)? {
            None => None,
            Some(section) => Some(Frozen::read(&section, "valid", base)?),
        };
        let trainable = recipe.choice(
            "trainable",
            Trainable::Lora,
            &[("lora", Trainable::Lora), ("all", Trainable::All)],
        )?;
        if trainable == Trainable::All && recipe.value("lora").is_some() {
            return Err(RecipeError::conflict(
                "lora",
                "trainable \"all\" trains no adapter",
                "remove it, or set trainable to \"lora\"",
            ));
        }
        let prompt = PromptTemplate::read(&recipe)?;
        let training = Section::new("training", training, TRAINING_KEYS)?;
        Ok(Self {
            path: path.to_owned(),
            sha256,
            model: Frozen::required(&recipe, "model", base)?,
            dataset: Frozen::required(&recipe, "dataset", base)?,
            valid,
            output_dir: recipe.optional_path("output_dir")?.map(|path| base.join(path)),
            seed: recipe.u64("seed", Some(42), 0..=u64::MAX)?,
            chat_template_kwargs: if prompt.is_some() {
                code_kwargs(&recipe)?
            } else {
                kwargs(&recipe)?
            },
            training: SftSettings::read(&training, prompt.is_some())?,
            prompt,
            trainable,
            lora: LoraSettings::parse(recipe.value("lora").unwrap_or(&empty))?,
        })
    }

    /// Everything that decides a run, defaults filled in, without paths.
    pub fn settings(&self) -> Value {
        let mut settings = json!({
            "schema_version": 1,
            "model": {"sha256": self.model.sha256},
            "dataset": {"sha256": self.dataset.sha256},
            "valid": self.valid.as_ref().map(|file| json!({"sha256": file.sha256})),
            "seed": self.seed,
            "chat_template_kwargs": self.chat_template_kwargs,
            "training": self.training,
            "trainable": self.trainable,
        });
        let lora = (self.trainable == Trainable::Lora).then(|| ("lora", json!(self.lora)));
        let prompt = self.prompt.as_ref().map(|prompt| ("prompt", json!(prompt)));
        if let Some(object) = settings.as_object_mut() {
            object.extend(prompt.into_iter().chain(lora).map(|(key, it)| (key.to_owned(), it)));
        }
        settings
    }
}

/// The variables of the chat template for rows of codes: no thinking, unless the recipe says so.
pub(super) fn code_kwargs(recipe: &Section<'_>) -> Result<Map<String, Value>, RecipeError> {
    let mut all = Map::from_iter([("enable_thinking".to_owned(), Value::Bool(false))]);
    all.extend(kwargs(recipe)?);
    Ok(all)
}
