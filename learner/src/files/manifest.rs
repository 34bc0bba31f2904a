//! The manifest: one JSON object that says what a run is, how far it came, and what shows that it
//! happened. `learner plan` prints it before anything ran.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use environments::Determinism;
use protocol::{Digest, LeaseId, PolicyDigest, RunId};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{EvidenceRow, UpdateEvidence, run_directory::MANIFEST};
use crate::{
    advantage::{ScaleRewards, group_advantages},
    audit::{Audited, sampling::SamplingBounds},
    journal::JournalRecord,
    leases::Balance,
};

/// How a run stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Validated, nothing ran.
    Planned,
    /// It runs, or was killed without a chance to say so.
    Running,
    /// It did all of its steps.
    Completed,
    /// Something broke.
    Failed,
    /// The user stopped it.
    Interrupted,
}

/// A file and its digest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// Where it was.
    pub path: PathBuf,
    /// SHA-256 of its bytes.
    pub sha256: Digest,
}

/// The base checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelRecord {
    /// Where it was.
    pub path: PathBuf,
    /// SHA-256 of what `LC_ALL=C sha256sum *` prints in it.
    pub sha256: Digest,
    /// The same over configuration and weights.
    pub weights_sha256: Digest,
    /// Family, as `qwen3`.
    pub architecture: String,
    /// Rows of the embedding.
    pub vocabulary: u32,
    /// The longest sequence, in ids.
    pub max_positions: usize,
}

/// A data set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DatasetRecord {
    /// Where it was.
    pub path: PathBuf,
    /// SHA-256 of its bytes.
    pub sha256: Digest,
    /// Its rows.
    pub rows: usize,
}

/// What is played.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EnvironmentRecord {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Of settings, limits, version and recorder format.
    pub sha256: Digest,
    /// Whether episodes can be replayed.
    pub determinism: Determinism,
    /// The tools as the policy is shown them.
    pub tools: Vec<Value>,
    /// Every milestone that there is.
    pub milestones: Vec<String>,
    /// The bounds of its reward.
    pub reward_range: [f64; 2],
}

/// What decides which ids a conversation becomes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyFormat {
    /// SHA-256 of `tokenizer.json`.
    pub tokenizer_sha256: Digest,
    /// SHA-256 of the chat template.
    pub chat_template_sha256: Digest,
    /// How tool calls are written.
    pub tool_call_dialect: String,
    /// What bounds their reading.
    pub parser: ParserRecord,
    /// Whether the template prints the tools; otherwise the system prompt does.
    pub tools_in_template: bool,
    /// The ids that end a turn.
    pub stop_ids: Vec<u32>,
    /// The checkpoint's files that decide all this, as they lie in the run's `tokenizer/`, with their
    /// SHA-256; empty in plans.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub files: BTreeMap<String, Digest>,
}

/// Numbers that follow from the settings.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Derived {
    /// Groups of an optimizer step.
    pub groups_per_step: u32,
    /// Rollouts of an optimizer step.
    pub rollouts_per_step: u64,
    /// Rollouts of the whole run, without evaluations.
    pub rollouts: u64,
    /// How often each training task comes up, about.
    pub epochs: f64,
    /// Rollouts of one evaluation.
    pub rollouts_per_evaluation: u64,
    /// Longest prompt, in ids, among the tasks that were rendered.
    pub longest_prompt_tokens: usize,
    /// Tasks that were rendered for it: all of a small data set, a sample of a large one.
    pub prompts_rendered: usize,
    /// Most ids of an episode: the longest prompt and `max_completion_length`.
    pub longest_episode_tokens: usize,
    /// Most ids sampled in an optimizer step.
    pub sampled_tokens_per_step: u64,
}

/// The evidence log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvidenceRecord {
    /// Its file in the run's directory.
    pub file: PathBuf,
    /// Its rows.
    pub rows: u64,
    /// SHA-256 of its last line.
    pub head: Digest,
}

/// The adapters that were announced, as far as they were archived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyRecord {
    /// Different policies.
    pub announced: u64,
    /// Of these, the archived.
    pub archived: u64,
    /// Bytes of the archive.
    pub bytes: u64,
}

/// The bounds for actors on a kind of device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceBounds {
    /// The kind, as `cpu`.
    pub actor_device: String,
    /// The bounds.
    pub bounds: SamplingBounds,
}

/// An adapter that was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdapterRecord {
    /// Optimizer steps behind it.
    pub step: u64,
    /// Its directory in the run's directory.
    pub path: PathBuf,
    /// SHA-256 of its `adapter_model.safetensors`.
    pub sha256: Digest,
    /// That of its `value_head.safetensors`, where the run has a value head.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value_head_sha256: Option<Digest>,
}

/// The adapter that did best on held-out tasks: by strict success, then by reward, then the later.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BestAdapter {
    /// The adapter.
    #[serde(flatten)]
    pub adapter: AdapterRecord,
    /// Its share of held-out episodes with strict success.
    pub success: f64,
    /// Its mean training reward on them.
    pub reward: f64,
}

/// What of the tasks was played.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskCoverage {
    /// Rows of the training set.
    pub training_pool_rows: usize,
    /// Different tasks that were trained on.
    pub consumed_unique_tasks: usize,
    /// Their ids; written when the run ends.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub consumed_unique_task_ids: Vec<String>,
    /// Rollouts that were trained on.
    pub total_rollouts: u64,
    /// Groups that were trained on.
    pub optimizer_groups: u64,
    /// Rollouts of evaluations.
    pub evaluation_rollouts: u64,
    /// Episodes that were refused.
    pub rejected_rollouts: u64,
    /// Of these, bytes that are kept.
    pub rejected_bytes: u64,
}

/// One group that was trained on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupRecord {
    /// Optimizer step, from 0.
    pub optimizer_step: u64,
    /// The group.
    pub group: u64,
    /// Its task.
    pub task_id: String,
    /// Its seed.
    pub episode_seed: u64,
    /// Training rewards, by generation.
    pub rewards: Vec<f64>,
    /// Their population standard deviation.
    pub reward_std: f64,
    /// Environment's own rewards, by generation.
    pub strict_rewards: Vec<f64>,
    /// Rollouts with strict success.
    pub strict_successes: u64,
    /// The policy that played.
    pub policy: PolicyDigest,
}

impl GroupRecord {
    /// The record of a group that was trained on in this step; nothing where it has no rollouts.
    pub fn of(optimizer_step: u64, rollouts: &[&Audited]) -> Option<Self> {
        let first = rollouts.first()?;
        let rewards: Vec<f64> = rollouts.iter().map(|it| it.reward.training_reward).collect();
        let reward_std =
            group_advantages(&rewards, ScaleRewards::None).map_or(0.0, |group| group.std);
        Some(Self {
            optimizer_step,
            group: first.episode.lease.group,
            task_id: first.episode.task.clone(),
            episode_seed: first.episode.seed,
            rewards,
            reward_std,
            strict_rewards: rollouts.iter().map(|it| it.reward.strict_reward).collect(),
            strict_successes: rollouts.iter().filter(|it| it.reward.strict_success).count() as u64,
            policy: first.episode.policy,
        })
    }

    /// The same from the evidence rows of a group that was trained on.
    pub(super) fn of_rows(rows: &[EvidenceRow]) -> Option<Self> {
        let first = rows.first()?;
        let rewards: Vec<f64> = rows.iter().map(|it| it.training_reward).collect();
        let strict = || rows.iter().map(|it| &it.reward_components);
        let reward_std =
            group_advantages(&rewards, ScaleRewards::None).map_or(0.0, |group| group.std);
        Some(Self {
            optimizer_step: first.optimizer_step,
            group: first.lease.group,
            task_id: first.task_id.clone(),
            episode_seed: first.episode_seed,
            rewards,
            reward_std,
            strict_rewards: strict().map(|it| it.strict_reward).collect(),
            strict_successes: strict().filter(|it| it.strict_success).count() as u64,
            policy: first.policy_version.policy,
        })
    }
}

/// Why a run ended before its last step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailureRecord {
    /// One line.
    pub message: String,
    /// Optimizer steps made until then.
    pub step: u64,
    /// The refused episode that ended it, in the run's directory, where `failure_policy` is `abort`.
    pub refused: Option<PathBuf>,
}

/// A machine and a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostRecord {
    /// As `cpu` or `cuda:0`.
    pub device: String,
    /// Operating system.
    pub os: String,
    /// Processor architecture.
    pub architecture: String,
    /// Processors that the program may use.
    pub processors: usize,
}

/// What bounds the reading of tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParserRecord {
    /// Ids of a turn that are parsed.
    pub max_ids: usize,
    /// Characters of a turn that are parsed.
    pub max_characters: usize,
    /// Depth of arguments.
    pub max_depth: usize,
}

/// How far a run came.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progressed {
    /// When it started, UTC.
    pub started_at: Option<String>,
    /// When it ended, UTC.
    pub ended_at: Option<String>,
    /// Why it failed or was interrupted.
    pub error: Option<FailureRecord>,
    /// Where it was computed.
    pub host: Option<HostRecord>,
    /// SHA-256 of the program.
    pub program_sha256: Option<Digest>,
    /// Optimizer steps made.
    pub steps: u64,
    /// The evidence log.
    pub evidence: Option<EvidenceRecord>,
    /// The journal.
    pub journal: Option<JournalRecord>,
    /// The adapters that were announced.
    pub policies: PolicyRecord,
    /// The metrics file.
    pub metrics: Option<FileRecord>,
    /// Bounds by which sampling evidence was judged.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sampling_bounds: Vec<DeviceBounds>,
    /// Adapters that were written: each that did best when it was measured, and the last.
    pub adapters: Vec<AdapterRecord>,
    /// The one that did best on held-out tasks so far.
    #[serde(default)]
    pub best_adapter: Option<BestAdapter>,
    /// The one of the most steps.
    #[serde(default)]
    pub last_adapter: Option<AdapterRecord>,
    /// What of the tasks was played.
    pub task_coverage: TaskCoverage,
    /// What shows that training did something.
    pub update_evidence: UpdateEvidence,
    /// Held-out success before and after.
    pub evaluation: Value,
    /// What became of leases.
    pub leases: Value,
    /// Where every answer is: `received_unique = accepted + rejected + pending` and
    /// `accepted = consumed + dropped_stale + given_up + ready`. Written when the run ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub balance: Option<Balance>,
    /// How often the run went on after its learner had ended.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub resumes: u64,
    /// The groups that were trained on; written when the run ends.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reward_groups: Vec<GroupRecord>,
    /// Refused episodes by reason.
    #[serde(default)]
    pub rejections: BTreeMap<String, u64>,
    /// The last refused leases, with their reasons; at most a hundred.
    #[serde(default)]
    pub last_rejected: Vec<(Option<LeaseId>, String)>,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// The whole manifest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Of this format: 1.
    pub schema_version: u32,
    /// How it stands.
    pub status: Status,
    /// How it is trained: `online_grpo`.
    pub method: String,
    /// The run.
    pub run: RunId,
    /// The recipe.
    pub recipe: FileRecord,
    /// The checkpoint.
    pub model: ModelRecord,
    /// The training tasks.
    pub dataset: DatasetRecord,
    /// The held-out tasks.
    pub evaluation_dataset: Option<DatasetRecord>,
    /// Where the run is written.
    pub output_dir: PathBuf,
    /// Every setting of the recipe, defaults filled in.
    pub settings: Value,
    /// What is played.
    pub environment: EnvironmentRecord,
    /// What decides ids.
    pub policy_format: PolicyFormat,
    /// How episodes are rewarded.
    pub reward_protocol: Value,
    /// The policy that the KL term compares with.
    pub reference_policy: String,
    /// Numbers that follow.
    pub derived: Derived,
    /// Versions of the program and of what decides its numbers.
    pub versions: BTreeMap<String, String>,
    /// How far it came; absent in plans.
    #[serde(flatten)]
    pub progress: Option<Progressed>,
}

/// Longest manifest that is read by whoever takes any trainer's, in bytes.
const MAX_MANIFEST: u64 = 1 << 30;

/// What stands in the manifest of a run of any of the trainers; nothing where there is none.
///
/// # Errors
/// Why it cannot be read, in one line.
pub(crate) fn read_any_manifest(directory: &Path) -> Result<Option<Value>, String> {
    let file = directory.join(MANIFEST);
    let wrong = |problem: String| format!("{}: {problem}", file.display());
    let unreadable = |error: io::Error| wrong(format!("{error}; name a run that can be read"));
    match fs::metadata(&file) {
        Ok(found) if found.is_file() && found.len() <= MAX_MANIFEST => {}
        Ok(_) => return Err(wrong("it is no manifest of a run; name another directory".into())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(unreadable(error)),
    }
    let bytes = fs::read(&file).map_err(unreadable)?;
    match serde_json::from_slice(&bytes) {
        Ok(manifest @ Value::Object(_)) => Ok(Some(manifest)),
        Ok(_) => Err(wrong("it is no manifest of a run; name another directory".into())),
        Err(error) => Err(wrong(format!("{error}; restore it, or remove it to see the metrics"))),
    }
}
