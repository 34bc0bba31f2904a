//! What a run's episodes had to keep to, rebuilt from its directory, and whether the manifest follows
//! from itself.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use environments::{SpecError, python::FOLDERS_VARIABLE};
use policy::model::{Checkpoint, checkpoint_digests};
use protocol::{Digest, Split};
use serde_json::{Map, Value};

use super::{CheckName, Report, VerifyError, entries};
use crate::{
    audit::Auditor,
    files::{Manifest, Progressed, Status, TOKENIZER, dependency_versions, tokenizer_files},
    plan::{PARSER, audit_terms, chat_format, environment_record, prompt_images, reward_protocol},
    recipe::{Frozen, Recipe, RecipeError, TaskRow, json, read_tasks, run_id},
};

/// A run as its manifest describes it.
pub(super) struct Terms {
    pub(super) directory: PathBuf,
    pub(super) manifest: Manifest,
    pub(super) progress: Progressed,
    pub(super) recipe: Recipe,
    pub(super) auditor: Arc<Auditor>,
    /// The tasks, where the data sets still lie where they were.
    pub(super) tasks: Option<Tasks>,
}

/// The run's data sets.
pub(super) struct Tasks {
    pub(super) train: Vec<TaskRow>,
    pub(super) eval: Vec<TaskRow>,
}

impl Terms {
    /// Whether the run ended in order: its manifest then speaks of everything that it wrote.
    pub(super) fn closed(&self) -> bool {
        !matches!(self.manifest.status, Status::Planned | Status::Running)
    }

    /// Whether the run did all that it was to do.
    pub(super) fn completed(&self) -> bool {
        self.manifest.status == Status::Completed
    }
}

/// Whether a manifest is that of a run on rows, whose outcome stands under `result`.
fn on_rows(text: &[u8]) -> bool {
    let manifest: Option<Value> = serde_json::from_slice(text).ok();
    manifest.is_some_and(|it| it.get("status").is_none() && it.pointer("/result/status").is_some())
}

/// Reads the manifest and what it names. Nothing where it is too damaged to check the rest by.
pub(super) fn read(
    directory: &Path,
    model: Option<&Path>,
) -> Result<(Report, Option<Terms>), VerifyError> {
    use CheckName::Manifest as Name;
    let text = entries::manifest(directory).map_err(|problem| VerifyError::NoRun {
        path: directory.to_owned(),
        problem: format!("manifest.json cannot be read ({problem})"),
    })?;
    let mut report = Report::new(directory.to_owned(), Digest::of(&text));
    if !entries::readable(directory, &mut report) {
        return Ok((report, None));
    }
    let manifest: Manifest = match serde_json::from_slice(&text) {
        Ok(manifest) => manifest,
        Err(_) if on_rows(&text) && !directory.join("journal").exists() => {
            let problem = "learner sft or ppo wrote it, without episodes".to_owned();
            return Err(VerifyError::NoRun { path: directory.to_owned(), problem });
        }
        Err(error) => {
            report.fail(Name, "manifest_unreadable", "manifest.json", error);
            return Ok((report, None));
        }
    };
    report.run = Some(manifest.run);
    report.status = Some(manifest.status);
    report.equal(Name, "manifest_schema", "schema_version", &manifest.schema_version, &1);
    let Some(progress) = manifest.progress.clone() else {
        let problem = unreadable_progress(&text);
        let problem = problem.unwrap_or_else(|| "it is the plan of a run".into());
        report.fail(Name, "manifest_unreadable", "manifest.json", problem);
        return Ok((report, None));
    };
    report.looked_at(
        Name,
        format!("run {}, {:?}, {} steps", manifest.run.0.short(), manifest.status, progress.steps)
            .to_lowercase(),
    );
    // No path of the manifest leads out of the run.
    for adapter in &progress.adapters {
        let name = format!("{}-{}", adapter.step, adapter.sha256.short());
        let found = Path::new("adapters").join(name);
        report.equal(Name, "adapter_path", "adapters", &adapter.path, &found);
    }
    if !report.holds {
        return Ok((report, None));
    }
    let tokenizer = directory.join(TOKENIZER);
    let recipe = match Recipe::from_settings(&manifest.settings, &tokenizer) {
        Ok(recipe) => recipe,
        Err(error) => {
            report.fail(Name, "settings", "settings", with_place(&error, &manifest));
            return Ok((report, None));
        }
    };
    settings(&mut report, &manifest, &recipe);
    let auditor = auditor(&mut report, &manifest, &recipe, &tokenizer);
    if let Some(model) = model {
        checkpoint(&mut report, &manifest, model)?;
    }
    let Some(auditor) = auditor else { return Ok((report, None)) };
    let tasks = tasks(&manifest, &recipe);
    let terms =
        Terms { directory: directory.to_owned(), manifest, progress, recipe, auditor, tasks };
    Ok((report, Some(terms)))
}

/// What is wrong with the settings. Code that the run found beside its recipe is not looked for there, as
/// nothing is run that a run's directory names: whoever trusts it is told how to say so.
fn with_place(error: &RecipeError, manifest: &Manifest) -> String {
    let folder = manifest.recipe.path.parent().filter(|it| !it.as_os_str().is_empty());
    match (error, folder) {
        (RecipeError::Environment(SpecError::Module { .. }), Some(folder)) => format!(
            "{error}; its recipe lay in {}: to run what is there now, set {FOLDERS_VARIABLE} to that",
            folder.display()
        ),
        _ => error.to_string(),
    }
}

/// Which field keeps what a manifest says of progress from being read; nothing of a plan, which has
/// no such fields.
fn unreadable_progress(text: &[u8]) -> Option<String> {
    let written: Map<String, Value> = serde_json::from_slice(text).ok()?;
    let Ok(Value::Object(sound)) = serde_json::to_value(Progressed::default()) else { return None };
    let fails = |fields: Map<String, Value>| {
        serde_json::from_value::<Progressed>(Value::Object(fields)).err()
    };
    if !sound.keys().any(|key| written.contains_key(key)) {
        return None;
    }
    // One field at a time, among sound ones.
    let wrong = written.iter().find_map(|(key, value)| {
        let mut fields = sound.clone();
        fields.insert(key.clone(), value.clone());
        fails(fields).map(|error| format!("{key}: {error}"))
    });
    wrong.or_else(|| fails(written).map(|error| error.to_string()))
}

/// Whether the manifest's fields follow from its settings.
fn settings(report: &mut Report, manifest: &Manifest, recipe: &Recipe) {
    use CheckName::Manifest as Name;
    let settings = recipe.settings();
    let (written, found) = (json::canonical(&manifest.settings), json::canonical(&settings));
    report.equal(Name, "settings", "settings", &written, &found);
    let run = run_id("online", &settings, Some(recipe.environment.digest()));
    report.equal(Name, "run_id", "run", &manifest.run, &run);
    report.equal(
        Name,
        "manifest_field",
        "model.sha256",
        &manifest.model.sha256,
        &recipe.model.sha256,
    );
    let frozen = recipe.dataset.sha256;
    report.equal(Name, "manifest_field", "dataset.sha256", &manifest.dataset.sha256, &frozen);
    report.equal(
        Name,
        "manifest_field",
        "evaluation_dataset.sha256",
        &manifest.evaluation_dataset.as_ref().map(|it| it.sha256),
        &recipe.evaluation.as_ref().map(|it| it.dataset.sha256),
    );
    match recipe.environment.describe() {
        Ok(description) => {
            let found = environment_record(recipe, &description);
            report.equal(Name, "environment", "environment", &manifest.environment, &found);
        }
        Err(fault) => report.fail(Name, "environment", "environment", fault),
    }
    let protocol = reward_protocol(&recipe.reward);
    let place = "reward_protocol";
    report.equal(Name, "manifest_field", place, &manifest.reward_protocol, &protocol);
    let versions = dependency_versions();
    if manifest.versions != versions {
        let other: Vec<String> = manifest
            .versions
            .iter()
            .filter(|(name, version)| versions.get(*name) != Some(*version))
            .map(|(name, version)| format!("{name} {version}"))
            .collect();
        report.note(Name, format!("it was made with other versions: {}", other.join(", ")));
    }
    let training = &recipe.training;
    let per_step = training.groups_per_step();
    let place = "derived.groups_per_step";
    report.equal(Name, "manifest_field", place, &manifest.derived.groups_per_step, &per_step);
    let rollouts =
        u64::from(per_step) * u64::from(training.num_generations) * u64::from(training.max_steps);
    let place = "derived.rollouts";
    report.equal(Name, "manifest_field", place, &manifest.derived.rollouts, &rollouts);
}

/// The auditor of the run, from the tokenizer in its directory.
fn auditor(
    report: &mut Report,
    manifest: &Manifest,
    recipe: &Recipe,
    tokenizer: &Path,
) -> Option<Arc<Auditor>> {
    use CheckName::Tokenizer as Name;
    let wanted = &manifest.policy_format;
    match tokenizer_files(tokenizer) {
        Ok(files) => {
            report.looked_at(Name, format!("{} files", files.len()));
            for name in
                wanted.files.keys().chain(files.keys().filter(|it| !wanted.files.contains_key(*it)))
            {
                let place = format!("{TOKENIZER}/{name}");
                let (written, found) = (wanted.files.get(name), files.get(name));
                report.equal(Name, "tokenizer_file", place, &written, &found);
            }
        }
        Err(error) => report.fail(Name, "tokenizer_file", TOKENIZER, error),
    }
    match checkpoint_digests(tokenizer) {
        Ok(found) => {
            let place = "policy_format.tokenizer_sha256";
            let written = wanted.tokenizer_sha256;
            report.equal(Name, "tokenizer_digest", place, &written, &found.tokenizer);
            let place = "policy_format.chat_template_sha256";
            let written = wanted.chat_template_sha256;
            report.equal(Name, "template_digest", place, &written, &found.template);
        }
        Err(error) => report.fail(Name, "tokenizer_unusable", TOKENIZER, error),
    }
    // What is not the run's is neither loaded nor rendered.
    if report.fails(Name) {
        report.note(Name, "nothing that needs the tokenizer or the template was checked");
        return None;
    }
    let tools = recipe.environment.tools().unwrap_or_default();
    let format = match chat_format(recipe, &tools) {
        Ok(format) => Arc::new(format),
        Err(error) => {
            report.fail(Name, "tokenizer_unusable", TOKENIZER, error);
            return None;
        }
    };
    let (place, stops) = ("policy_format.stop_ids", format.stop_ids().to_vec());
    report.equal(Name, "policy_format", place, &wanted.stop_ids, &stops);
    let (place, dialect) = ("policy_format.tool_call_dialect", format!("{:?}", format.dialect()));
    report.equal(Name, "policy_format", place, &wanted.tool_call_dialect, &dialect);
    report.equal(Name, "policy_format", "policy_format.parser", &wanted.parser, &PARSER);
    let (place, in_template) = ("policy_format.tools_in_template", format.tools_in_template());
    report.equal(Name, "policy_format", place, &wanted.tools_in_template, &in_template);
    let images = recipe.environment.describe().ok().map(|it| prompt_images(recipe, &it, &format));
    let images = match images.transpose() {
        Ok(images) => images.flatten(),
        Err(error) => {
            report.fail(Name, "tokenizer_unusable", TOKENIZER, error);
            return None;
        }
    };
    let terms = audit_terms(manifest.run, recipe, format, images, manifest.model.vocabulary);
    match Auditor::new(terms) {
        Ok(auditor) => Some(Arc::new(auditor)),
        Err(fault) => {
            report.fail(CheckName::Manifest, "environment", "environment", fault);
            None
        }
    }
}

/// Whether the checkpoint in `model` is the run's.
fn checkpoint(report: &mut Report, manifest: &Manifest, model: &Path) -> Result<(), VerifyError> {
    use CheckName::Model as Name;
    let wrong = |problem: String| VerifyError::Model { path: model.to_owned(), problem };
    let digests = checkpoint_digests(model).map_err(|error| wrong(error.to_string()))?;
    let checkpoint = Checkpoint::open(model).map_err(|error| wrong(error.to_string()))?;
    report.looked_at(Name, model.display().to_string());
    report.equal(Name, "model_digest", "model.sha256", &manifest.model.sha256, &digests.all);
    let place = "model.weights_sha256";
    report.equal(Name, "model_digest", place, &manifest.model.weights_sha256, &digests.weights);
    let vocabulary = u32::try_from(checkpoint.config().vocab).unwrap_or(u32::MAX);
    let place = "model.vocabulary";
    report.equal(Name, "model_vocabulary", place, &manifest.model.vocabulary, &vocabulary);
    let files = tokenizer_files(model).map_err(|error| wrong(error.to_string()))?;
    let place = "policy_format.files";
    report.equal(Name, "tokenizer_file", place, &manifest.policy_format.files, &files);
    Ok(())
}

/// The data sets, where they are still there and still the frozen ones.
fn tasks(manifest: &Manifest, recipe: &Recipe) -> Option<Tasks> {
    let read = |path: &Path, frozen: &Frozen, split| {
        // The manifest may name a pipe.
        path.is_file().then_some(())?;
        let file = Frozen { path: path.to_owned(), ..frozen.clone() };
        read_tasks(&file, split, &recipe.environment).ok()
    };
    let train = read(&manifest.dataset.path, &recipe.dataset, Split::Train)?;
    let eval = match (&manifest.evaluation_dataset, &recipe.evaluation) {
        (Some(record), Some(evaluation)) => read(&record.path, &evaluation.dataset, Split::Eval)?,
        _ => Vec::new(),
    };
    Some(Tasks { train, eval })
}
