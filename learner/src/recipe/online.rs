//! Recipes of online runs: `learner plan`, `learner train` and `learner eval`.

use std::path::{Path, PathBuf};

use environments::{Description, Determinism, EnvironmentSpec, SpecError, without_comments};
use protocol::Digest;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::{
    AuditSettings, Frozen, LoraSettings, RecipeError, TrainingSettings,
    dataset::read_bounded,
    json,
    sampling::SamplingSettings,
    section::{Bounds, Section},
};
use crate::reward::{RewardProtocol, Rewards};

/// Largest recipe, in bytes.
const MAX_RECIPE: u64 = 1 << 20;
/// Largest system text and largest JSON section that travels to actors, in bytes.
pub(super) const MAX_SETTING: usize = 256 << 10;

pub(super) const KEYS: &[&str] = &[
    "schema_version",
    "model",
    "dataset",
    "output_dir",
    "seed",
    "chat_template_kwargs",
    "system_prompt",
    "training",
    "lora",
    "adapter",
    "environment",
    "evaluation",
    "reference",
    "reward",
    "evidence",
    "audit",
];

/// A recipe whose every field is valid. Frozen files are named, not yet read.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// The recipe's file.
    pub path: PathBuf,
    /// SHA-256 of the recipe's bytes.
    pub sha256: Digest,
    /// The checkpoint.
    pub model: Frozen,
    /// The training tasks.
    pub dataset: Frozen,
    /// Where the run is written, if the recipe says so.
    pub output_dir: Option<PathBuf>,
    /// Decides seeds, task order and adapter initialisation. Default 42.
    pub seed: u64,
    /// Passed to the chat template.
    pub chat_template_kwargs: Map<String, Value>,
    /// System text.
    pub system_prompt: Option<String>,
    /// How it is trained.
    pub training: TrainingSettings,
    /// The adapter's settings.
    pub lora: LoraSettings,
    /// The adapter to start from: a PEFT directory, whose settings `lora` holds once it is verified. A
    /// fresh one, which changes nothing, where absent.
    pub adapter: Option<Frozen>,
    /// What is played.
    pub environment: EnvironmentSpec,
    /// How the policy is measured on held-out tasks, if it is.
    pub evaluation: Option<Evaluation>,
    /// The adapter that the KL term holds to: a PEFT directory. The base alone where absent.
    pub reference: Option<Frozen>,
    /// How episodes are rewarded.
    pub reward: Rewards,
    /// What is kept for later audits, and what they may lack.
    pub evidence: EvidenceSettings,
    /// What sampling evidence does, and when an actor is cut off.
    pub audit: AuditSettings,
}

/// The `evidence` section. It decides nothing of what is played, so it is no part of the run's id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct EvidenceSettings {
    /// MiB of adapters that are archived in all, so that every episode can be scored again under the
    /// policy that played it; 0 (none) to 16,777,216. Default 4,096.
    pub archive_mib: u64,
    /// Take episodes of environments that cannot be played again, as actors recorded them. Default false.
    pub allow_recorded: bool,
}

impl EvidenceSettings {
    /// Bytes of adapters that are archived in all.
    pub fn archive_bytes(&self) -> u64 {
        self.archive_mib << 20
    }

    /// Whether episodes of this environment are taken.
    ///
    /// # Errors
    /// They cannot be replayed, and the recipe does not allow that.
    pub fn check(&self, environment: &Description) -> Result<(), RecipeError> {
        if environment.determinism == Determinism::Recorded && !self.allow_recorded {
            return Err(RecipeError::conflict(
                "environment",
                format!("{} is recorded: its episodes cannot be played again", environment.name),
                "set evidence.allow_recorded to true to take them as actors recorded them, or take its \
                 randomness from the seed; `actor check` says what differs",
            ));
        }
        Ok(())
    }
}

/// The `evaluation` section.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    /// The held-out tasks.
    pub dataset: Frozen,
    /// Steps between evaluations during the run, to 1,000,000; 0 (the default) evaluates only before
    /// and after.
    pub every: u32,
    /// Episodes a task, 1 to 1,024. Default 1.
    pub num_generations: u32,
    /// How its episodes are sampled. Default: as in training.
    pub sampling: SamplingSettings,
}

impl Recipe {
    /// Reads and validates a recipe file.
    ///
    /// # Errors
    /// The first mistake, by field.
    pub fn read(path: &Path) -> Result<Self, RecipeError> {
        let (value, sha256) = read_json(path)?;
        let given = |key: &str| value.get(key).is_some_and(|it| !it.is_null());
        if given("adapter") && given("lora") {
            let problem = "the adapter that the run starts from has settings of its own";
            return Err(RecipeError::conflict("lora", problem, "remove it, or adapter"));
        }
        Self::parse(&value, path, sha256, EnvironmentSpec::parse_in)
    }

    fn parse(
        value: &Value,
        path: &Path,
        sha256: Digest,
        parse_environment: impl Fn(&Value, &Path) -> Result<EnvironmentSpec, SpecError>,
    ) -> Result<Self, RecipeError> {
        let base = path.parent().unwrap_or(Path::new(""));
        let recipe = Section::new("", value, KEYS)?;
        recipe.u64("schema_version", None, 1..=1)?;
        let empty = json!({});
        let training = Section::new(
            "training",
            recipe.value("training").unwrap_or(&empty),
            TrainingSettings::KEYS,
        )?;
        let training = TrainingSettings::read(&training)?;
        let frozen = |key: &str| {
            let section = recipe.section(key, Frozen::KEYS)?;
            section.map(|section| Frozen::read(&section, key, base)).transpose()
        };
        let reference = frozen("reference")?;
        if reference.is_some() && training.algorithm.beta == 0.0 {
            return Err(RecipeError::conflict(
                "reference",
                "nothing holds to it where training.beta is 0",
                "remove it or set training.beta",
            ));
        }
        let environment = recipe.required("environment", "an object with a name")?;
        Ok(Self {
            path: path.to_owned(),
            sha256,
            model: Frozen::required(&recipe, "model", base)?,
            dataset: Frozen::required(&recipe, "dataset", base)?,
            output_dir: recipe.optional_path("output_dir")?.map(|path| base.join(path)),
            seed: recipe.u64("seed", Some(42), 0..=u64::MAX)?,
            chat_template_kwargs: kwargs(&recipe)?,
            system_prompt: recipe.optional_text("system_prompt", MAX_SETTING)?.map(Into::into),
            lora: LoraSettings::parse(recipe.value("lora").unwrap_or(&empty))?,
            adapter: frozen("adapter")?,
            environment: parse_environment(environment, base)?,
            evaluation: evaluation(&recipe, base, training.sampling)?,
            reference,
            reward: reward(&recipe)?,
            evidence: evidence(&recipe)?,
            audit: AuditSettings::read(&recipe, base)?,
            training,
        })
    }

    /// The recipe that [`Recipe::settings`] are of, as a manifest holds them. Of what it froze only the
    /// digests are known; `model` is where the files lie that stand for the checkpoint.
    ///
    /// # Errors
    /// The first setting that is none of this release.
    pub fn from_settings(settings: &Value, model: &Path) -> Result<Self, RecipeError> {
        let mut settings = settings.clone();
        for (pointer, path) in [
            ("/model", model),
            ("/dataset", Path::new("-")),
            ("/evaluation/dataset", Path::new("-")),
            ("/audit/calibration", Path::new("-")),
            ("/reference", Path::new("-")),
            ("/adapter", Path::new("-")),
        ] {
            if let Some(Value::Object(file)) = settings.pointer_mut(pointer) {
                file.insert("path".into(), path.to_string_lossy().into());
            }
        }
        let sha256 = Digest::of(settings.to_string().as_bytes());
        // What stands in a run's directory is not this machine's owner's word: nothing that it names is run.
        Self::parse(&settings, Path::new(""), sha256, |section, _| EnvironmentSpec::parse(section))
    }

    /// Everything that decides a run, defaults filled in: what stands in plans and manifests. Paths
    /// are left out, as a run that reads the same files from elsewhere is the same run.
    pub fn settings(&self) -> Value {
        let mut settings = json!({
            "schema_version": 1,
            "model": {"sha256": self.model.sha256},
            "dataset": {"sha256": self.dataset.sha256},
            "seed": self.seed,
            "chat_template_kwargs": self.chat_template_kwargs,
            "system_prompt": self.system_prompt,
            "training": self.training,
            "lora": self.lora,
            "environment": self.environment,
            "evaluation": self.evaluation.as_ref().map(|it| json!({
                "dataset": {"sha256": it.dataset.sha256},
                "every": it.every,
                "num_generations": it.num_generations,
                "temperature": it.sampling.temperature,
                "top_k": it.sampling.top_k,
                "top_p": it.sampling.top_p,
                "min_p": it.sampling.min_p,
            })),
            "reward": reward_settings(&self.reward),
            "evidence": self.evidence,
            "audit": self.audit.settings(),
        });
        // Absent rather than null, as in recipes that are older than they.
        for (key, frozen) in [("reference", &self.reference), ("adapter", &self.adapter)] {
            if let Some(frozen) = frozen {
                settings[key] = json!({"sha256": frozen.sha256});
            }
        }
        settings
    }
}

/// Reads a recipe file, JSON with comments, once: its value and the digest of its bytes.
pub(super) fn read_json(path: &Path) -> Result<(Value, Digest), RecipeError> {
    let bytes = read_bounded("recipe", path, MAX_RECIPE)?;
    let value = json::parse(&without_comments(&bytes))
        .map_err(|source| RecipeError::Json { path: path.to_owned(), source })?;
    Ok((value, Digest::of(&bytes)))
}

pub(super) fn kwargs(recipe: &Section<'_>) -> Result<Map<String, Value>, RecipeError> {
    let kwargs = recipe.map("chat_template_kwargs")?;
    // The template's own inputs are not for recipes to replace.
    for key in ["messages", "tools", "add_generation_prompt"] {
        if kwargs.contains_key(key) {
            return Err(RecipeError::conflict(
                &format!("chat_template_kwargs.{key}"),
                "the episode decides it",
                "remove it",
            ));
        }
    }
    Ok(kwargs)
}

fn evaluation(
    recipe: &Section<'_>,
    base: &Path,
    training: SamplingSettings,
) -> Result<Option<Evaluation>, RecipeError> {
    const KEYS: &[&str] =
        &["dataset", "every", "num_generations", "temperature", "top_k", "top_p", "min_p"];
    let Some(section) = recipe.section("evaluation", KEYS)? else { return Ok(None) };
    Ok(Some(Evaluation {
        dataset: Frozen::required(&section, "dataset", base)?,
        every: section.u32("every", Some(0), 0..=1_000_000)?,
        num_generations: section.u32("num_generations", Some(1), 1..=1024)?,
        sampling: SamplingSettings::read(&section, training, true)?,
    }))
}

fn evidence(recipe: &Section<'_>) -> Result<EvidenceSettings, RecipeError> {
    let empty = json!({});
    let section = Section::new(
        "evidence",
        recipe.value("evidence").unwrap_or(&empty),
        &["archive_mib", "allow_recorded"],
    )?;
    Ok(EvidenceSettings {
        archive_mib: section.u64("archive_mib", Some(4096), 0..=1 << 24)?,
        allow_recorded: section.bool("allow_recorded", false)?,
    })
}

fn reward(recipe: &Section<'_>) -> Result<Rewards, RecipeError> {
    const NAMES: &[&str] = &[RewardProtocol::NAMES[0].0, RewardProtocol::NAMES[1].0];
    let Some(section) = recipe.section("reward", &["protocol", "weights"])? else {
        return Ok(Rewards::default());
    };
    let Some(weights) = section.section("weights", NAMES)? else {
        let default = RewardProtocol::Environment;
        return Ok(section.choice("protocol", default, &RewardProtocol::NAMES)?.into());
    };
    if section.value("protocol").is_some() {
        return Err(RecipeError::conflict(
            &section.at("protocol"),
            "weights name protocols too",
            "remove one of them",
        ));
    }
    let mut terms = Vec::new();
    for (name, protocol) in RewardProtocol::NAMES {
        if let Some(weight) = weights.optional_f64(name, Bounds::closed(0.0, 1000.0))? {
            terms.push((protocol, weight));
        }
    }
    Rewards::weighted(terms).ok_or_else(|| {
        RecipeError::conflict(
            &section.at("weights"),
            "no weight is above 0",
            "weigh one of the protocols at least",
        )
    })
}

/// The section that reads back to these rewards.
fn reward_settings(rewards: &Rewards) -> Value {
    if let Some(protocol) = rewards.only() {
        return json!({"protocol": protocol});
    }
    let weights: Map<String, Value> = rewards
        .weights()
        .iter()
        .map(|(protocol, weight)| (protocol.to_string(), json!(weight)))
        .collect();
    json!({"weights": weights})
}
