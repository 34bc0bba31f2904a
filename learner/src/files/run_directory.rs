//! Writes a run's directory while the run goes on.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use policy::{chat::ChatFormat, model::Adapter};
use protocol::Digest;
use serde::Serialize;
use serde_json::{Value, json};

use super::{
    AdapterRecord, EvidenceLog, EvidenceRecord, EvidenceRow, FileError, GroupRecord, JsonLines,
    Manifest, PolicyVersion, Progressed, Status, compare_adapters, program_sha256, utc_now,
    write_atomic,
};
use crate::{
    advantage::{ScaleRewards, group_advantages},
    audit::{Audited, Rejected},
    plan::Plan,
};

const MANIFEST: &str = "manifest.json";
const EVIDENCE: &str = "evidence.jsonl";
const METRICS: &str = "metrics.jsonl";
/// Refusals that the manifest names one by one.
const LAST_REJECTED: usize = 100;

/// Files of a checkpoint that say how text becomes ids.
const TOKENIZER_FILES: [&str; 8] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
];

/// Where episodes belong that are written down.
#[derive(Clone, Copy, Debug)]
pub struct EpisodeContext<'a> {
    /// Optimizer steps made before the episodes were used.
    pub step: u32,
    /// Their advantages, by generation, where they were trained on.
    pub advantages: Option<&'a [f64]>,
}

/// The directory of a run that goes on.
#[derive(Debug)]
pub struct RunDirectory {
    path: PathBuf,
    manifest: Manifest,
    progress: Progressed,
    evidence: EvidenceLog,
    metrics: JsonLines,
    format: Arc<ChatFormat>,
    tasks: BTreeSet<String>,
}

impl RunDirectory {
    /// Makes the directory of a planned run and writes its first manifest.
    ///
    /// # Errors
    /// It exists, or cannot be written.
    pub fn create(plan: &Plan) -> Result<Self, FileError> {
        let path = plan.output.clone();
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(FileError::io("create", parent))?;
        }
        fs::create_dir(&path).map_err(FileError::io("create", &path))?;
        copy_tokenizer(&plan.recipe.model.path, &path.join("tokenizer"))?;
        let mut progress = Progressed {
            started_at: Some(utc_now()),
            program_sha256: program_sha256(),
            ..Progressed::default()
        };
        progress.task_coverage.training_pool_rows = plan.train.len();
        let mut this = Self {
            manifest: plan.manifest(),
            progress,
            evidence: EvidenceLog::create(path.join(EVIDENCE), &plan.run)?,
            metrics: JsonLines::create(path.join(METRICS))?,
            format: plan.format.clone(),
            tasks: BTreeSet::new(),
            path,
        };
        this.manifest.status = Status::Running;
        this.write_manifest(true)?;
        Ok(this)
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How far the run came, as the manifest says it.
    pub fn progress(&self) -> &Progressed {
        &self.progress
    }

    /// Writes one optimizer step to `metrics.jsonl` and brings the manifest up to date. `grad_norm` is
    /// the norm of the gradient before clipping.
    ///
    /// # Errors
    /// The files cannot be written.
    pub fn step(&mut self, record: &impl Serialize, grad_norm: f64) -> Result<(), FileError> {
        self.metrics.append(record)?;
        self.progress.steps += 1;
        self.progress.update_evidence.nonzero_gradient_steps += u64::from(grad_norm > 0.0);
        self.write_manifest(false)
    }

    /// Writes a record that is no optimizer step, such as an evaluation, to `metrics.jsonl`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn metrics(&mut self, record: &impl Serialize) -> Result<(), FileError> {
        self.metrics.append(record).map(drop)
    }

    /// Writes the accepted rollouts of one group, by generation.
    ///
    /// # Errors
    /// The evidence cannot be written.
    pub fn episodes(
        &mut self,
        rollouts: &[Audited],
        context: &EpisodeContext<'_>,
    ) -> Result<(), FileError> {
        let step = u64::from(context.step);
        for (index, audited) in rollouts.iter().enumerate() {
            let version = PolicyVersion {
                global_step: step,
                base_model_sha256: self.manifest.model.sha256,
                policy: audited.episode.policy,
            };
            let advantage = context.advantages.and_then(|all| all.get(index)).copied();
            let row = EvidenceRow::new(audited, step, version, advantage, &self.format);
            self.evidence.append(&row)?;
        }
        let count = rollouts.len() as u64;
        let coverage = &mut self.progress.task_coverage;
        if context.advantages.is_none() {
            coverage.evaluation_rollouts += count;
            return Ok(());
        }
        coverage.total_rollouts += count;
        coverage.optimizer_groups += 1;
        let Some(first) = rollouts.first() else { return Ok(()) };
        self.tasks.insert(first.episode.task.clone());
        coverage.consumed_unique_tasks = self.tasks.len();
        let rewards: Vec<f64> = rollouts.iter().map(|it| it.reward.training_reward).collect();
        let std = group_advantages(&rewards, ScaleRewards::None).map_or(0.0, |group| group.std);
        self.progress.update_evidence.mixed_reward_groups += u64::from(std > 0.0);
        self.progress.reward_groups.push(GroupRecord {
            optimizer_step: step,
            group: first.episode.lease.group,
            task_id: first.episode.task.clone(),
            episode_seed: first.episode.seed,
            rewards,
            reward_std: std,
            strict_rewards: rollouts.iter().map(|it| it.reward.strict_reward).collect(),
            strict_successes: rollouts.iter().filter(|it| it.reward.strict_success).count() as u64,
            policy: first.episode.policy,
        });
        Ok(())
    }

    /// Writes a refused episode and its reason to `rejected/`.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn reject(&mut self, rejected: &Rejected) -> Result<(), FileError> {
        let (rung, code) = rejected.reason.name();
        let message = rejected.reason.to_string();
        let directory = self.path.join("rejected");
        fs::create_dir_all(&directory).map_err(FileError::io("create", &directory))?;
        let record = json!({
            "episode_id": rejected.id,
            "lease": rejected.lease,
            "rung": rung,
            "reason": code,
            "message": message,
            "rejected_at": utc_now(),
            "episode": rejected.episode,
        });
        let path = directory.join(format!("{}.json", rejected.id));
        write_atomic(&path, format!("{record:#}\n").as_bytes(), false)?;
        self.progress.task_coverage.rejected_rollouts += 1;
        *self.progress.rejections.entry(code.to_owned()).or_default() += 1;
        if self.progress.last_rejected.len() == LAST_REJECTED {
            self.progress.last_rejected.remove(0);
        }
        self.progress.last_rejected.push((rejected.lease, message));
        self.write_manifest(true)
    }

    /// Writes an adapter in PEFT's format and returns its directory. `digest` is the SHA-256 of its
    /// `adapter_model.safetensors`, `base` what PEFT shall load it onto.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn adapter(
        &mut self,
        step: u32,
        adapter: &Adapter,
        digest: Digest,
        base: &str,
    ) -> Result<PathBuf, FileError> {
        let name = Path::new("adapters").join(format!("{step}-{}", digest.short()));
        let path = self.path.join(&name);
        if path.exists() {
            return Ok(path);
        }
        let parent = self.path.join("adapters");
        let partial = parent.join(format!(".{step}-{}.partial", digest.short()));
        fs::create_dir_all(&parent).map_err(FileError::io("create", &parent))?;
        adapter
            .save_peft(&partial, base)
            .map_err(|source| FileError::Adapter { path: path.clone(), source })?;
        fs::rename(&partial, &path).map_err(FileError::io("write", &path))?;
        self.progress.adapters.push(AdapterRecord {
            step: u64::from(step),
            path: name,
            sha256: digest,
        });
        self.write_manifest(true)?;
        Ok(path)
    }

    /// Compares the adapter of the start with the one of the end.
    ///
    /// # Errors
    /// They are not adapters of one shape, or hold weights that are not finite.
    pub fn update_evidence(&mut self, first: &Adapter, last: &Adapter) -> Result<(), FileError> {
        let bytes = |adapter: &Adapter| {
            adapter
                .to_safetensors()
                .map_err(|source| FileError::Adapter { path: self.path.clone(), source })
        };
        let found = compare_adapters(&bytes(first)?, &bytes(last)?).map_err(|problem| {
            FileError::Damaged { path: self.path.join("adapters"), line: None, problem }
        })?;
        let evidence = &mut self.progress.update_evidence;
        evidence.trainable_tensors = found.trainable_tensors;
        evidence.changed_trainable_tensors = found.changed_trainable_tensors;
        evidence.max_abs_parameter_delta = found.max_abs_parameter_delta;
        Ok(())
    }

    /// Held-out results before and after training, for the manifest.
    pub fn evaluations<T: Serialize>(&mut self, before: Option<&T>, after: Option<&T>) {
        self.progress.evaluation = json!({"before": before, "after": after});
    }

    /// Writes the last manifest. `reason` says why a run failed or was interrupted; `leases` is what
    /// became of them.
    ///
    /// # Errors
    /// The files cannot be written.
    pub fn close(
        &mut self,
        status: Status,
        reason: &str,
        leases: &impl Serialize,
    ) -> Result<(), FileError> {
        self.manifest.status = status;
        self.progress.ended_at = Some(utc_now());
        self.progress.error = (status != Status::Completed).then(|| reason.to_owned());
        self.progress.leases = serde_json::to_value(leases).unwrap_or(Value::Null);
        self.progress.task_coverage.consumed_unique_task_ids = self.tasks.iter().cloned().collect();
        self.evidence.sync()?;
        self.metrics.sync()?;
        let groups = std::mem::take(&mut self.progress.reward_groups);
        self.write(true, groups)
    }

    /// The manifest of a run that goes on leaves its groups out: they would be written anew each time.
    fn write_manifest(&mut self, durable: bool) -> Result<(), FileError> {
        let groups = std::mem::take(&mut self.progress.reward_groups);
        let written = self.write(durable, Vec::new());
        self.progress.reward_groups = groups;
        written
    }

    fn write(&mut self, durable: bool, groups: Vec<GroupRecord>) -> Result<(), FileError> {
        self.progress.evidence = Some(EvidenceRecord {
            file: EVIDENCE.into(),
            rows: self.evidence.rows(),
            head: self.evidence.head(),
        });
        self.progress.reward_groups = groups;
        self.manifest.progress = Some(self.progress.clone());
        let path = self.path.join(MANIFEST);
        let mut text = serde_json::to_vec_pretty(&self.manifest)
            .map_err(|source| FileError::Json { path: path.clone(), source })?;
        text.push(b'\n');
        write_atomic(&path, &text, durable)
    }
}

/// A manifest that was written to a run's directory.
///
/// # Errors
/// It cannot be read, or is no manifest.
pub fn read_manifest(run: &Path) -> Result<Manifest, FileError> {
    let path = run.join(MANIFEST);
    let text = fs::read(&path).map_err(FileError::io("read", &path))?;
    serde_json::from_slice(&text).map_err(|error| FileError::Damaged {
        path,
        line: None,
        problem: error.to_string(),
    })
}

fn copy_tokenizer(model: &Path, to: &Path) -> Result<(), FileError> {
    fs::create_dir(to).map_err(FileError::io("create", to))?;
    for name in TOKENIZER_FILES {
        let from = model.join(name);
        if from.is_file() {
            fs::copy(&from, to.join(name)).map_err(FileError::io("copy", from))?;
        }
    }
    Ok(())
}
