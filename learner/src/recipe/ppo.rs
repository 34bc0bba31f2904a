//! Recipes of PPO on rows: `learner ppo`.

use std::path::{Path, PathBuf};

use clap::Args;
use policy::model::checkpoint_digests;
use protocol::{ComputeDtype, Digest};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::{
    Frozen, LrScheduler, OptimizerSettings, PromptTemplate, RecipeError,
    dataset::read_bounded,
    online::read_json,
    section::{Bounds, Section},
    sft::code_kwargs,
};
use crate::{advantage::ScaleRewards, loss::LossConfig};

const KEYS: &[&str] = &[
    "schema_version",
    "model",
    "rows",
    "adapter",
    "reference",
    "valid",
    "output_dir",
    "seed",
    "chat_template_kwargs",
    "prompt",
    "training",
    "rollouts",
];

/// What the command line names instead of the recipe: what changes from round to round.
#[derive(Clone, Debug, Default, Args)]
pub struct PpoInputs {
    /// Rows of the round, instead of the recipe's rows.
    #[arg(long)]
    pub rows: Option<PathBuf>,
    /// A PEFT adapter directory to go on from, instead of the recipe's adapter.
    #[arg(long)]
    pub adapter: Option<PathBuf>,
    /// A PEFT adapter directory to hold to, instead of the recipe's reference.
    #[arg(long)]
    pub reference: Option<PathBuf>,
    /// Updates of a round after which it ends in any case, instead of the recipe's.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100_000_000))]
    pub max_updates: Option<u32>,
}

/// A valid recipe of PPO on rows. Frozen files are named, not yet read.
#[derive(Clone, Debug)]
pub struct PpoRecipe {
    /// The recipe's file.
    pub path: PathBuf,
    /// SHA-256 of the recipe's bytes.
    pub sha256: Digest,
    /// The checkpoint under the adapters.
    pub model: Frozen,
    /// The rows of the round; with `rollouts` the tasks.
    pub rows: Frozen,
    /// The adapter to go on from: a PEFT directory, with the optimizer's state where it has one.
    pub adapter: Frozen,
    /// The adapter that the KL term holds to.
    pub reference: Frozen,
    /// Rows to measure greedy accuracy on, before and after, if any.
    pub valid: Option<Frozen>,
    /// Where the run is written, if the recipe says so.
    pub output_dir: Option<PathBuf>,
    /// Decides the order of rows and what is sampled. Default 42.
    pub seed: u64,
    /// Passed to the chat template. Default `{"enable_thinking": false}`.
    pub chat_template_kwargs: Map<String, Value>,
    /// What the policy is asked about a row.
    pub prompt: String,
    /// How it is trained.
    pub training: PpoSettings,
    /// How rounds are sampled here, where they are.
    pub rollouts: Option<RolloutSettings>,
}

/// The `training` section.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PpoSettings {
    /// Passes over the rows of a round, 1 to 10,000. Default 2.
    pub num_train_epochs: u32,
    /// Updates of a round after which it ends in any case, to 100,000,000; 0 (the default) is no bound.
    pub max_updates: u32,
    /// Rows of a micro-batch, 1 to 65,536. Default 16.
    pub per_device_train_batch_size: u32,
    /// Micro-batches of an update, 1 to 1,024. Each weighs the same, and as much where an epoch's last
    /// update has fewer of them. Default 2.
    pub gradient_accumulation_steps: u32,
    /// Longest row in ids, 1 to 262,144; longer ones are refused. Default 4096.
    pub max_length: u32,
    /// Ratios count as at least 1 less this and at most 1 more, above 0, below 1. Default 0.2.
    pub clip: f64,
    /// Weight of the KL term, 0 to 100. Default 0.02.
    pub beta: f64,
    /// Optimizer and schedule. Default learning rate 3e-6, constant.
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

const TRAINING_KEYS: &[&str] = &[
    "num_train_epochs",
    "max_updates",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "max_length",
    "clip",
    "beta",
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

/// What a sampled code is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CodeReward {
    /// The share of its digits that are right.
    Digits,
    /// 1 where it is right as a whole, else 0.
    Exact,
}

/// The `rollouts` section: rounds that are sampled here.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RolloutSettings {
    /// Rounds, 1 to 100,000. Default 1.
    pub rounds: u32,
    /// Tasks of a round, 1 to 1,000,000; 0 (the default) takes all. Further rounds go on where the last
    /// one ended.
    pub rows_per_round: u32,
    /// Codes that are sampled for a task, 2 to 1,024. Default 8.
    pub num_generations: u32,
    /// Temperature, above 0, to 100. Default 1.
    pub temperature: f64,
    /// What a code is worth. Default `digits`.
    pub reward: CodeReward,
    /// How advantages are scaled. Default `group`.
    pub scale_rewards: ScaleRewards,
}

const ROLLOUT_KEYS: &[&str] =
    &["rounds", "rows_per_round", "num_generations", "temperature", "reward", "scale_rewards"];

impl PpoSettings {
    fn read(section: &Section<'_>) -> Result<Self, RecipeError> {
        Ok(Self {
            num_train_epochs: section.u32("num_train_epochs", Some(2), 1..=10_000)?,
            max_updates: section.u32("max_updates", Some(0), 0..=100_000_000)?,
            per_device_train_batch_size: section.u32(
                "per_device_train_batch_size",
                Some(16),
                1..=65_536,
            )?,
            gradient_accumulation_steps: section.u32(
                "gradient_accumulation_steps",
                Some(2),
                1..=1024,
            )?,
            max_length: section.u32("max_length", Some(4096), 1..=262_144)?,
            clip: section.f64("clip", 0.2, Bounds::above(0.0, 0.999_999))?,
            beta: section.f64("beta", 0.02, Bounds::closed(0.0, 100.0))?,
            optimizer: OptimizerSettings::read_for_rows(section, 3e-6, LrScheduler::Constant, 0)?,
            gradient_checkpointing: section.bool("gradient_checkpointing", true)?,
            compute_dtype: section.choice(
                "compute_dtype",
                ComputeDtype::F32,
                &[("f32", ComputeDtype::F32), ("bf16", ComputeDtype::Bf16)],
            )?,
            save_steps: section.u32("save_steps", Some(100), 0..=100_000_000)?,
        })
    }

    /// The same where each of `world` ranks has a part of a micro-batch as large as this one.
    #[must_use]
    pub fn over_ranks(&self, world: usize) -> Self {
        let world = u32::try_from(world).unwrap_or(u32::MAX);
        let batch = self.per_device_train_batch_size.saturating_mul(world);
        Self { per_device_train_batch_size: batch, ..*self }
    }

    /// Updates of one pass over so many rows. The last may be made of fewer micro-batches.
    pub fn updates_per_epoch(&self, rows: usize) -> u64 {
        (rows as u64)
            .div_ceil(u64::from(self.per_device_train_batch_size))
            .div_ceil(u64::from(self.gradient_accumulation_steps))
    }

    /// Updates of a round of so many rows that nothing cuts short: what its learning rates are spread
    /// over, wherever it stops in between.
    pub fn whole_updates(&self, rows: usize) -> u64 {
        self.updates_per_epoch(rows) * u64::from(self.num_train_epochs)
    }

    /// Updates of a round of so many rows.
    pub fn updates(&self, rows: usize) -> u64 {
        let all = self.whole_updates(rows);
        if self.max_updates == 0 { all } else { all.min(self.max_updates.into()) }
    }

    /// What its loss needs to know: one ratio of the whole code's probabilities, and k3.
    pub fn loss(&self) -> LossConfig {
        LossConfig {
            ratio: crate::loss::Ratio::SequenceProduct,
            epsilon: self.clip,
            epsilon_high: self.clip,
            beta: self.beta,
            ..LossConfig::default()
        }
    }
}

impl RolloutSettings {
    /// Tasks of a round, of a file of so many.
    pub fn tasks(&self, rows: usize) -> usize {
        match self.rows_per_round as usize {
            0 => rows,
            some => some.min(rows),
        }
    }

    fn read(section: &Section<'_>) -> Result<Self, RecipeError> {
        Ok(Self {
            rounds: section.u32("rounds", Some(1), 1..=100_000)?,
            rows_per_round: section.u32("rows_per_round", Some(0), 0..=1_000_000)?,
            num_generations: section.u32("num_generations", Some(8), 2..=1024)?,
            temperature: section.f64("temperature", 1.0, Bounds::above(0.0, 100.0))?,
            reward: section.choice(
                "reward",
                CodeReward::Digits,
                &[("digits", CodeReward::Digits), ("exact", CodeReward::Exact)],
            )?,
            scale_rewards: section.choice(
                "scale_rewards",
                ScaleRewards::Group,
                &[("group", ScaleRewards::Group), ("none", ScaleRewards::None)],
            )?,
        })
    }
}

impl PpoRecipe {
    /// Reads and validates a recipe file. What `inputs` names replaces what the recipe says and is
    /// frozen as it is now.
    ///
    /// # Errors
    /// The first mistake, by field.
    pub fn read(path: &Path, inputs: &PpoInputs) -> Result<Self, RecipeError> {
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
        let input = |key: &str, given: &Option<PathBuf>| match given {
            Some(path) => now(key, path),
            None if recipe.value(key).is_none() => Err(RecipeError::Missing {
                field: key.into(),
                expected: format!("an object with path and sha256, or name it with --{key}"),
            }),
            None => Frozen::required(&recipe, key, base),
        };
        let prompt = PromptTemplate::read(&recipe)?.ok_or_else(|| RecipeError::Missing {
            field: "prompt".into(),
            expected: "a Jinja template over name and memory".into(),
        })?;
        let mut training = PpoSettings::read(&Section::new("training", training, TRAINING_KEYS)?)?;
        training.max_updates = inputs.max_updates.unwrap_or(training.max_updates);
        let rollouts = recipe.section("rollouts", ROLLOUT_KEYS)?;
        Ok(Self {
            path: path.to_owned(),
            sha256,
            model: Frozen::required(&recipe, "model", base)?,
            rows: input("rows", &inputs.rows)?,
            adapter: input("adapter", &inputs.adapter)?,
            reference: input("reference", &inputs.reference)?,
            valid,
            output_dir: recipe.optional_path("output_dir")?.map(|path| base.join(path)),
            seed: recipe.u64("seed", Some(42), 0..=u64::MAX)?,
            chat_template_kwargs: code_kwargs(&recipe)?,
            prompt,
            training,
            rollouts: rollouts.as_ref().map(RolloutSettings::read).transpose()?,
        })
    }

    /// Everything that decides a run, defaults filled in, without paths.
    pub fn settings(&self) -> Value {
        json!({
            "schema_version": 1,
            "model": {"sha256": self.model.sha256},
            "rows": {"sha256": self.rows.sha256},
            "adapter": {"sha256": self.adapter.sha256},
            "reference": {"sha256": self.reference.sha256},
            "valid": self.valid.as_ref().map(|file| json!({"sha256": file.sha256})),
            "seed": self.seed,
            "chat_template_kwargs": self.chat_template_kwargs,
            "prompt": self.prompt,
            "training": self.training,
            "rollouts": self.rollouts,
        })
    }
}

/// A file or directory that the command line names by `--key`, as it is now.
///
/// # Errors
/// It cannot be read.
pub(crate) fn now(key: &str, path: &Path) -> Result<Frozen, RecipeError> {
    let field = format!("--{key}");
    let sha256 = if path.is_dir() {
        checkpoint_digests(path)
            .map_err(|error| RecipeError::conflict(&field, error.to_string(), "name another"))?
            .all
    } else {
        Digest::of(&read_bounded(&field, path, super::dataset::MAX_FILE)?)
    };
    Ok(Frozen { field: key.into(), path: path.to_owned(), sha256 })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HASH: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    fn minimal() -> Value {
        let frozen = |path: &str| json!({"path": path, "sha256": HASH});
        json!({
            "schema_version": 1, "model": frozen("model"), "rows": frozen("rows.jsonl"),
            "adapter": frozen("sft/adapter"), "reference": frozen("sft/adapter"),
            "prompt": "Find {{ name }}.",
        })
    }

    fn read(recipe: &Value, inputs: &PpoInputs) -> Result<PpoRecipe, String> {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("recipe.json");
        std::fs::write(&path, recipe.to_string()).expect("written");
        PpoRecipe::read(&path, inputs).map_err(|error| error.to_string())
    }

    #[test]
    fn defaults_are_those_of_the_row_trainer() {
        let recipe = read(&minimal(), &PpoInputs::default()).expect("valid");
        let training = recipe.training;
        assert_eq!((training.clip, training.beta, training.num_train_epochs), (0.2, 0.02, 2));
        assert_eq!(training.optimizer.learning_rate_at(5, 6), 3e-6);
        assert_eq!(training.optimizer.max_grad_norm, 1.0);
        assert_eq!(recipe.settings()["chat_template_kwargs"], json!({"enable_thinking": false}));
        // 70 rows: 5 micro-batches of at most 16, so 3 updates an epoch.
        assert_eq!((training.updates_per_epoch(70), training.updates(70)), (3, 6));
    }

    #[test]
    fn the_command_line_names_what_changes_between_rounds() {
        let dir = tempfile::tempdir().expect("a directory");
        let rows = dir.path().join("train.jsonl");
        std::fs::write(&rows, "{}").expect("written");
        let mut recipe = minimal();
        recipe.as_object_mut().expect("an object").remove("rows");
        let missing = read(&recipe, &PpoInputs::default()).expect_err("no rows");
        assert_eq!(
            missing,
            "rows is missing: set it to an object with path and sha256, or name it with --rows"
        );
        let inputs =
            PpoInputs { rows: Some(rows.clone()), max_updates: Some(3), ..PpoInputs::default() };
        let recipe = read(&recipe, &inputs).expect("valid");
        assert_eq!((recipe.rows.path, recipe.rows.sha256), (rows, Digest::of(b"{}")));
        assert_eq!(recipe.training.updates(1000), 3);
    }

    #[test]
    fn the_page_on_rows_has_every_key() {
        let page = include_str!("../../../docs/vision.md");
        let top = KEYS.iter().filter(|key| **key != "training");
        let mut known: Vec<String> = top.map(|key| (*key).to_owned()).collect();
        known.extend(TRAINING_KEYS.iter().map(|key| format!("training.{key}")));
        known.extend(ROLLOUT_KEYS.iter().map(|key| format!("rollouts.{key}")));
        let missing: Vec<&String> =
            known.iter().filter(|key| !page.contains(&format!("`{key}`"))).collect();
        assert!(missing.is_empty(), "docs/vision.md does not speak of {missing:?}");
    }

    #[test]
    fn mistakes_name_their_field() {
        for (key, value, message) in [
            (
                "prompt",
                Value::Null,
                "prompt is missing: set it to a Jinja template over name and memory",
            ),
            ("training", json!({"clip": 1}), "training.clip must be a number above 0"),
            ("training", json!({"epochs": 1}), "training.epochs is unknown: "),
            (
                "rollouts",
                json!({"num_generations": 1}),
                "rollouts.num_generations must be an integer from 2",
            ),
            (
                "rollouts",
                json!({"reward": "half"}),
                "rollouts.reward must be one of \"digits\", \"exact\"",
            ),
            ("dataset", json!({}), "dataset is unknown: "),
        ] {
            let mut recipe = minimal();
            recipe[key] = value;
            let error = read(&recipe, &PpoInputs::default()).expect_err(message);
            assert!(error.starts_with(message), "{error}");
        }
    }
}
