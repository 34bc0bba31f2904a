//! A recipe with everything that it names read, checked and hashed: what a run starts from.

mod derived;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use burn::tensor::DType;
use environments::{Description, Determinism, ToolSpec, text::CUT_MARK};
use policy::{
    chat::{ChatError, ChatFormat, ChatOptions, ObservationBound},
    model::{Checkpoint, CheckpointDigests, LoadDtype, ModelConfig},
    vision::{NoImages, PromptImages},
};
use protocol::{ComputeDtype, RunId, RunSettings, Split};
use serde_json::{Value, json};

use self::derived::derive;
use crate::{
    audit::{
        AuditTerms,
        sampling::{Calibration, PairId, SamplingBounds, SamplingJudge, SamplingMode},
    },
    estimate::Estimate,
    files::{
        DatasetRecord, Derived, EnvironmentRecord, FileRecord, Manifest, ModelRecord, ParserRecord,
        PolicyFormat, Status, dependency_versions,
    },
    ppo::plan::PpoPlan,
    recipe::{
        Frozen, Kind, LoraSettings, PpoInputs, Recipe, RecipeError, TaskRow, check_apart,
        check_disjoint, read_tasks, run_id,
    },
    reward::{RewardProtocol, Rewards},
    sft::{load_dtype, plan::SftPlan},
};

/// What bounds the reading of tool calls in this release.
pub(crate) const PARSER: ParserRecord = ParserRecord {
    max_ids: policy::chat::MAX_IDS,
    max_characters: policy::chat::MAX_CHARS,
    max_depth: policy::chat::MAX_DEPTH,
};

/// A validated run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The recipe.
    pub recipe: Recipe,
    /// The run.
    pub run: RunId,
    /// What identifies the checkpoint.
    pub model: CheckpointDigests,
    /// Ids that the model has.
    pub vocabulary: u32,
    /// The model's shape.
    pub shape: ModelConfig,
    /// Bytes of a weight in memory.
    pub weight_bytes: usize,
    /// How conversations become ids.
    pub format: Arc<ChatFormat>,
    /// What the checkpoint makes of images, where the environment shows some.
    pub images: Option<PromptImages>,
    /// What the environment says about itself.
    pub environment: Description,
    /// Bounds of sampling evidence, where the recipe names some.
    pub calibration: Option<Calibration>,
    /// The training tasks.
    pub train: Vec<TaskRow>,
    /// The held-out tasks.
    pub eval: Vec<TaskRow>,
    /// Where the run will be written.
    pub output: PathBuf,
    /// Numbers that follow.
    pub derived: Derived,
}

/// The plan of a recipe of any kind as JSON, and what it takes: what `learner plan` prints.
///
/// # Errors
/// As [`plan`].
pub fn describe(
    path: &Path,
    output: Option<&Path>,
    inputs: &PpoInputs,
) -> Result<(Value, Estimate), RecipeError> {
    let (mut plan, estimate) = match Kind::of(path)? {
        Kind::Online => {
            let plan = plan(path, output)?;
            (json!(plan.manifest()), Estimate::online(&plan))
        }
        Kind::Sft => {
            let plan = SftPlan::read(path, output, false)?;
            (plan.manifest(), Estimate::sft(&plan))
        }
        Kind::Ppo => {
            let plan = PpoPlan::read(path, inputs, output, false)?;
            (plan.manifest(), Estimate::ppo(&plan))
        }
    };
    if let Some(plan) = plan.as_object_mut() {
        plan.insert("estimate".into(), estimate.to_json());
    }
    Ok((plan, estimate))
}

/// Reads and checks everything that a recipe names, and trains nothing. `output` replaces the
/// recipe's `output_dir`.
///
/// # Errors
/// The first mistake, with field or file and remedy.
pub fn plan(path: &Path, output: Option<&Path>) -> Result<Plan, RecipeError> {
    plan_at(path, output, false)
}

/// The same for a run that may be there already, to be gone on with.
///
/// # Errors
/// As [`plan`].
pub fn plan_at(path: &Path, output: Option<&Path>, resume: bool) -> Result<Plan, RecipeError> {
    let mut plan = plan_inputs(path)?;
    let recipe = &plan.recipe;
    let output =
        output.map(Path::to_owned).or_else(|| recipe.output_dir.clone()).ok_or_else(|| {
            RecipeError::Missing {
                field: "output_dir".into(),
                expected: "a new directory, here or with --output".into(),
            }
        })?;
    let evaluation = recipe.evaluation.as_ref().map(|evaluation| &evaluation.dataset);
    let inputs: Vec<_> = [&recipe.model, &recipe.dataset]
        .into_iter()
        .chain(evaluation)
        .chain(&recipe.reference)
        .chain(&recipe.adapter)
        .collect();
    plan.output = check_apart(&output, &inputs, resume)?;
    Ok(plan)
}

const OF_THE_MODEL: &str = "name an adapter of the model";

/// The same for whoever writes no run: `output` stays empty.
///
/// # Errors
/// As [`plan`].
pub fn plan_inputs(path: &Path) -> Result<Plan, RecipeError> {
    let mut recipe = Recipe::read(path)?;
    if let Some(adapter) = &recipe.adapter {
        recipe.lora = LoraSettings::of(adapter.verify_adapter()?);
    }
    let recipe = recipe;
    let model = recipe.model.verify_model()?;
    let wrong_model =
        |problem: String| RecipeError::Model { path: recipe.model.path.clone(), problem };
    let checkpoint =
        Checkpoint::open(&recipe.model.path).map_err(|error| wrong_model(error.to_string()))?;
    let config = checkpoint.config();
    let train = read_tasks(&recipe.dataset, Split::Train, &recipe.environment)?;
    let eval = match &recipe.evaluation {
        Some(evaluation) => read_tasks(&evaluation.dataset, Split::Eval, &recipe.environment)?,
        None => Vec::new(),
    };
    check_disjoint(&train, &eval)?;
    let environment = recipe.environment.describe().map_err(|fault| {
        RecipeError::conflict("environment", fault.to_string(), "choose one that opens")
    })?;
    recipe.reward.check(&environment).map_err(|error| {
        RecipeError::conflict("reward", error.to_string(), "or choose another environment")
    })?;
    recipe.evidence.check(&environment)?;
    let scored = recipe.environment.score_trace(&[]).is_some()
        || recipe.environment.score_claim(*environment.reward_range.start()).is_some();
    if environment.determinism == Determinism::Recorded && !scored {
        return Err(RecipeError::conflict(
            "environment",
            format!(
                "{} cannot be played again, and its trace does not decide its score",
                environment.name
            ),
            "take its randomness from the seed; `actor check` says what differs",
        ));
    }
    recipe.lora.to_config().check_fits(config).map_err(|error| match &recipe.adapter {
        Some(_) => RecipeError::conflict("adapter", error.to_string(), OF_THE_MODEL),
        None => RecipeError::conflict("lora", error.to_string(), "name linears that the model has"),
    })?;
    if let Some(reference) = &recipe.reference {
        reference
            .verify_adapter()?
            .check_fits(config)
            .map_err(|error| RecipeError::conflict("reference", error.to_string(), OF_THE_MODEL))?;
    }
    let calibration = recipe.audit.calibration.as_ref().map(read_calibration).transpose()?;
    let format = Arc::new(chat_format(&recipe, &environment.tools)?);
    let images = prompt_images(&recipe, &environment, &format)?;
    if let Some(images) = &images {
        images.check(config).map_err(|error| takes_none(&environment, &error))?;
    }
    let run = run_id("online", &recipe.settings(), Some(recipe.environment.digest()));
    let derived = derive(&recipe, run, (&format, images.as_ref()), &train, &eval)?;
    if derived.longest_episode_tokens > config.max_positions {
        return Err(RecipeError::conflict(
            "training.max_completion_length",
            format!(
                "a prompt of {} ids and a completion of {} are more than the model's {} positions",
                derived.longest_prompt_tokens,
                recipe.training.max_completion_length,
                config.max_positions
            ),
            "shorten the prompts or the completions",
        ));
    }
    Ok(Plan {
        run,
        model,
        vocabulary: u32::try_from(config.vocab).unwrap_or(u32::MAX),
        shape: config.clone(),
        weight_bytes: weight_bytes(&checkpoint, recipe.training.compute_dtype),
        format,
        images,
        environment,
        calibration,
        train,
        eval,
        output: PathBuf::new(),
        derived,
        recipe,
    })
}

impl Plan {
    /// What its episodes must keep to. Nothing is stale in a run that waits for its episodes.
    pub fn audit_terms(&self) -> AuditTerms {
        let (format, images) = (self.format.clone(), self.images.clone());
        audit_terms(self.run, &self.recipe, format, images, self.vocabulary)
    }

    /// What the bounds of sampling evidence belong to, on a kind of learner's device and of actor's.
    pub fn pair(&self, learner_device: &str, actor_device: &str) -> PairId {
        PairId {
            model_weights_sha256: self.model.weights,
            compute_dtype: self.recipe.training.compute_dtype,
            learner_device: learner_device.to_owned(),
            actor_device: actor_device.to_owned(),
            sampling: self.recipe.training.sampling(),
        }
    }

    /// The judge of sampling evidence on a kind of learner's device.
    ///
    /// # Errors
    /// Evidence is to be enforced, and there are no bounds for it.
    pub fn sampling_judge(&self, learner_device: &str) -> Result<SamplingJudge, RecipeError> {
        let audit = &self.recipe.audit;
        let dtype = self.recipe.training.compute_dtype;
        let bounds = match &self.calibration {
            Some(calibration) => calibration.bounds(&self.pair(learner_device, "")),
            None if dtype == ComputeDtype::F32 && learner_device == "cpu" => {
                vec![("cpu".into(), SamplingBounds::F32_CPU)]
            }
            None => Vec::new(),
        };
        if audit.sampling == SamplingMode::Enforce && bounds.is_empty() {
            return Err(RecipeError::conflict(
                "audit.sampling",
                format!(
                    "enforce needs bounds, and there are none for this model and sampling in {dtype} \
                     on {learner_device}"
                ),
                "measure them with learner calibrate and name the file in audit.calibration",
            ));
        }
        Ok(SamplingJudge::new(audit.sampling, bounds))
    }

    /// What actors are told, so that they do as the learner does.
    pub fn run_settings(&self) -> RunSettings {
        let recipe = &self.recipe;
        RunSettings {
            environment: recipe.environment.to_json().to_string(),
            system: recipe.system_prompt.clone(),
            chat_template_kwargs: Value::Object(recipe.chat_template_kwargs.clone()).to_string(),
            max_completion_length: recipe.training.max_completion_length,
            max_tool_calling_iterations: recipe.training.max_tool_calling_iterations,
            on_malformed: recipe.training.on_malformed,
            lora: json!(recipe.lora).to_string(),
            compute_dtype: recipe.training.compute_dtype,
        }
    }

    /// The manifest of a run that did not start: what `learner plan` prints.
    pub fn manifest(&self) -> Manifest {
        let recipe = &self.recipe;
        let dataset = |file: &Frozen, rows: &[TaskRow]| DatasetRecord {
            path: file.path.clone(),
            sha256: file.sha256,
            rows: rows.len(),
        };
        Manifest {
            schema_version: 1,
            status: Status::Planned,
            method: "online_grpo".into(),
            run: self.run,
            recipe: FileRecord { path: recipe.path.clone(), sha256: recipe.sha256 },
            model: ModelRecord {
                path: recipe.model.path.clone(),
                sha256: self.model.all,
                weights_sha256: self.model.weights,
                architecture: self.shape.architecture.name().into(),
                vocabulary: self.vocabulary,
                max_positions: self.shape.max_positions,
            },
            dataset: dataset(&recipe.dataset, &self.train),
            evaluation_dataset: recipe
                .evaluation
                .as_ref()
                .map(|evaluation| dataset(&evaluation.dataset, &self.eval)),
            output_dir: self.output.clone(),
            settings: recipe.settings(),
            environment: environment_record(recipe, &self.environment),
            policy_format: PolicyFormat {
                tokenizer_sha256: self.model.tokenizer,
                chat_template_sha256: self.model.template,
                tool_call_dialect: format!("{:?}", self.format.dialect()),
                parser: PARSER,
                tools_in_template: self.format.tools_in_template(),
                stop_ids: self.format.stop_ids().to_vec(),
                files: BTreeMap::new(),
            },
            reward_protocol: reward_protocol(&recipe.reward),
            reference_policy: match &recipe.reference {
                Some(reference) => format!("the frozen adapter of SHA-256 {}", reference.sha256),
                None => "the base checkpoint with the adapter disabled".into(),
            },
            derived: self.derived,
            versions: dependency_versions(),
            progress: None,
        }
    }
}

/// Bytes of a weight in memory.
pub(crate) fn weight_bytes(checkpoint: &Checkpoint, dtype: ComputeDtype) -> usize {
    match load_dtype(dtype) {
        LoadDtype::F32 => DType::F32.size(),
        LoadDtype::File => checkpoint.file_dtype().size(),
    }
}

fn read_calibration(file: &Frozen) -> Result<Calibration, RecipeError> {
    let (calibration, sha256) = Calibration::read(&file.path).map_err(|error| {
        RecipeError::conflict("audit.calibration", error.to_string(), "or leave it out")
    })?;
    file.verify(sha256)?;
    Ok(calibration)
}

/// What the episodes of a recipe's run must keep to.
pub(crate) fn audit_terms(
    run: RunId,
    recipe: &Recipe,
    format: Arc<ChatFormat>,
    images: Option<PromptImages>,
    vocabulary: u32,
) -> AuditTerms {
    AuditTerms {
        run,
        format,
        images,
        vocabulary,
        environment: recipe.environment.clone(),
        limits: recipe.training.episode_limits(),
        reward: recipe.reward.clone(),
        max_staleness: u64::from(recipe.training.staleness),
        allow_recorded: recipe.evidence.allow_recorded,
    }
}

/// What a recipe's environment says about itself.
pub(crate) fn environment_record(recipe: &Recipe, description: &Description) -> EnvironmentRecord {
    EnvironmentRecord {
        name: description.name.clone(),
        version: description.version.clone(),
        sha256: recipe.environment.digest(),
        determinism: description.determinism,
        tools: description.tools.iter().map(ToolSpec::to_json).collect(),
        milestones: description.milestones.clone(),
        reward_range: [*description.reward_range.start(), *description.reward_range.end()],
    }
}

pub(crate) fn reward_protocol(rewards: &Rewards) -> Value {
    let formula = |protocol| match protocol {
        RewardProtocol::Environment => "the environment's score by the learner's own replay",
        RewardProtocol::TrustedMilestonesV1 => {
            "clip(0.15*lookup_success + 0.25*calculation_success + 0.60*strict_success - \
             0.05*trusted_tool_errors, 0, 1)"
        }
    };
    if let Some(protocol) = rewards.only() {
        let formula = formula(protocol);
        return json!({"version": protocol, "scope": "training_only", "formula": formula});
    }
    let parts = rewards.weights().iter().map(|(protocol, weight)| {
        json!({"version": protocol, "weight": weight, "formula": formula(*protocol)})
    });
    json!({
        "version": "weighted",
        "scope": "training_only",
        "formula": "the sum of weight * reward over the parts",
        "parts": parts.collect::<Vec<Value>>(),
    })
}

/// What a recipe's checkpoint makes of images, where its environment shows some.
pub(crate) fn prompt_images(
    recipe: &Recipe,
    environment: &Description,
    format: &ChatFormat,
) -> Result<Option<PromptImages>, RecipeError> {
    if !environment.images {
        return Ok(None);
    }
    let images = PromptImages::load(&recipe.model.path, format);
    images.map(Some).map_err(|error| takes_none(environment, &error))
}

fn takes_none(environment: &Description, error: &NoImages) -> RecipeError {
    RecipeError::conflict(
        "environment",
        format!("{} shows images, and the model takes none: {error}", environment.name),
        "choose a vision-language checkpoint",
    )
}

/// The chat format of a recipe's checkpoint.
pub(crate) fn chat_format(recipe: &Recipe, tools: &[ToolSpec]) -> Result<ChatFormat, RecipeError> {
    let bound = recipe.environment.limits().observation_tokens;
    let options = ChatOptions {
        bound: bound.map(|tokens| ObservationBound { tokens, mark: CUT_MARK }),
        tools: tools.iter().map(ToolSpec::to_json).collect(),
        system: recipe.system_prompt.clone(),
        kwargs: recipe.chat_template_kwargs.clone(),
        ..ChatOptions::default()
    };
    ChatFormat::load(&recipe.model.path, options).map_err(|error| match error {
        ChatError::ToolsNotShown => RecipeError::conflict(
            "system_prompt",
            "the model's chat template has no place for tools",
            "describe them here; {tools} stands for their JSON",
        ),
        other => RecipeError::Model { path: recipe.model.path.clone(), problem: other.to_string() },
    })
}
