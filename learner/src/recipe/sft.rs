//! Recipes of supervised fine-tuning: `learner sft`.

use std::path::{Path, PathBuf};

use protocol::{ComputeDtype, Digest};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::{
    Frozen, LoraSettings, OptimizerSettings, RecipeError,
    dataset::read_rows,
    json::{clipped, shown},
    online::{kwargs, read_json},
    section::Section,
};

const KEYS: &[&str] = &[
    "schema_version",
    "model",
    "dataset",
    "valid",
    "output_dir",
    "seed",
    "chat_template_kwargs",
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
    /// Conversations to learn.
    pub dataset: Frozen,
    /// Conversations to measure the loss on, if any.
    pub valid: Option<Frozen>,
    /// Where the run is written, if the recipe says so.
    pub output_dir: Option<PathBuf>,
    /// Decides the order of rows and the adapter's initialisation. Default 42.
    pub seed: u64,
    /// Passed to the chat template.
    pub chat_template_kwargs: Map<String, Value>,
    /// How it is trained.
    pub training: SftSettings,
    /// What is trained. Default `lora`.
    pub trainable: Trainable,
    /// The adapter, where one is trained.
    pub lora: LoraSettings,
}

/// The `training` section. Only the ids of assistant turns are learned.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SftSettings {
    /// Passes over the data, 1 to 10,000. Default 1.
    pub num_train_epochs: u32,
    /// Updates after which training ends in any case, to 100,000,000; 0 (the default) is no bound.
    pub max_steps: u32,
    /// Rows of a micro-batch, 1 to 65,536. Default 8.
    pub per_device_train_batch_size: u32,
    /// Micro-batches of an update, 1 to 1,024. Default 1.
    pub gradient_accumulation_steps: u32,
    /// Longest conversation in ids, 1 to 262,144; longer ones are refused. Default 1024.
    pub max_length: u32,
    /// Optimizer and schedule. Default learning rate 1e-4.
    #[serde(flatten)]
    pub optimizer: OptimizerSettings,
    /// Recompute activations in the backward pass. Default true.
    pub gradient_checkpointing: bool,
    /// Number format of the forward passes, `f32` or `bf16`. Default `f32`.
    pub compute_dtype: ComputeDtype,
}

const TRAINING_KEYS: &[&str] = &[
    "num_train_epochs",
    "max_steps",
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
];

impl SftSettings {
    fn read(section: &Section<'_>) -> Result<Self, RecipeError> {
        Ok(Self {
            num_train_epochs: section.u32("num_train_epochs", Some(1), 1..=10_000)?,
            max_steps: section.u32("max_steps", Some(0), 0..=100_000_000)?,
            per_device_train_batch_size: section.u32(
                "per_device_train_batch_size",
                Some(8),
                1..=65_536,
            )?,
            gradient_accumulation_steps: section.u32(
                "gradient_accumulation_steps",
                Some(1),
                1..=1024,
            )?,
            max_length: section.u32("max_length", Some(1024), 1..=262_144)?,
            optimizer: OptimizerSettings::read(section, 1e-4)?,
            gradient_checkpointing: section.bool("gradient_checkpointing", true)?,
            compute_dtype: section.choice(
                "compute_dtype",
                ComputeDtype::F32,
                &[("f32", ComputeDtype::F32), ("bf16", ComputeDtype::Bf16)],
            )?,
        })
    }

    /// Updates over a data set of so many rows. The last update of an epoch may be a small one.
    pub fn updates(&self, rows: usize) -> u64 {
        let batch = u64::from(self.per_device_train_batch_size)
            * u64::from(self.gradient_accumulation_steps);
        let all = (rows as u64).div_ceil(batch.max(1)) * u64::from(self.num_train_epochs);
        if self.max_steps == 0 { all } else { all.min(self.max_steps.into()) }
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
        Ok(Self {
            path: path.to_owned(),
            sha256,
            model: Frozen::required(&recipe, "model", base)?,
            dataset: Frozen::required(&recipe, "dataset", base)?,
            valid,
            output_dir: recipe.optional_path("output_dir")?.map(|path| base.join(path)),
            seed: recipe.u64("seed", Some(42), 0..=u64::MAX)?,
            chat_template_kwargs: kwargs(&recipe)?,
            training: SftSettings::read(&Section::new("training", training, TRAINING_KEYS)?)?,
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
        if let (Trainable::Lora, Some(object)) = (self.trainable, settings.as_object_mut()) {
            object.insert("lora".into(), json!(self.lora));
        }
        settings
    }
}

/// One conversation: what the chat template takes.
#[derive(Clone, Debug, PartialEq)]
pub struct Conversation {
    /// The row's id, where it has one.
    pub id: Option<String>,
    /// The messages, as the template takes them.
    pub messages: Vec<Value>,
    /// The tools, as the template takes them.
    pub tools: Vec<Value>,
}

/// The conversations of a frozen file: `{"id"?, "messages", "tools"?}` a line.
///
/// # Errors
/// The file cannot be read or is not the frozen one; a row that is no conversation, by line.
pub fn read_conversations(file: &Frozen) -> Result<Vec<Conversation>, RecipeError> {
    read_rows(file, conversation)
}

fn conversation(row: &Map<String, Value>) -> Result<Conversation, String> {
    let id = match row.get("id") {
        None | Some(Value::Null) => None,
        Some(Value::String(id)) => Some(id.clone()),
        Some(other) => return Err(format!("id must be a text, not {}", shown(other))),
    };
    let messages = match row.get("messages") {
        Some(Value::Array(messages)) if !messages.is_empty() => messages.clone(),
        Some(other) => {
            return Err(format!("messages must be a list of messages, not {}", shown(other)));
        }
        None => return Err("messages is missing: add a list of messages".into()),
    };
    let mut learned = false;
    for (index, message) in messages.iter().enumerate() {
        let role = message.get("role").and_then(Value::as_str);
        match role {
            Some("assistant") => learned = true,
            Some("system" | "user" | "tool") => {}
            Some(role) => {
                return Err(format!(
                    "messages[{index}].role must be system, user, assistant or tool, not {:?}",
                    clipped(role)
                ));
            }
            None => return Err(format!("messages[{index}] must be an object with a role")),
        }
        let calls = message.get("tool_calls").is_some_and(|calls| !calls.is_null());
        match message.get("content") {
            Some(Value::String(_)) => {}
            None | Some(Value::Null) if role == Some("assistant") && calls => {}
            found => {
                return Err(format!(
                    "messages[{index}].content must be a text, not {}",
                    found.map_or_else(|| "absent".into(), shown)
                ));
            }
        }
    }
    if !learned {
        return Err("messages have no assistant turn: there is nothing to learn".into());
    }
    let tools = match row.get("tools") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(tools)) if tools.iter().all(Value::is_object) => tools.clone(),
        Some(other) => {
            return Err(format!("tools must be a list of objects, not {}", shown(other)));
        }
    };
    Ok(Conversation { id, messages, tools })
}
