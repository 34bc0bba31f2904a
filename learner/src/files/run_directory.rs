//! Writes a run's directory while the run goes on.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use policy::chat::ChatFormat;
use protocol::{
    ActorId, AdapterManifest, Digest, EpisodeId, LeaseAttempt, LeaseId, PolicyDigest, folder::Disk,
};
use serde::Serialize;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::{
    Checkpoints, DeviceBounds, EvidenceLog, EvidenceRecord, EvidenceRow, FailureRecord, FileError,
    FileRecord, GroupRecord, HostRecord, JsonLines, Manifest, PolicyStore, PolicyVersion,
    Progressed, RunLock, SamplingRecord, Status, program_sha256, utc_now, write_atomic,
};
use crate::{
    audit::{
        Audited,
        sampling::{Flagged, SamplingBounds, SamplingJudge},
    },
    journal::{Journal, Record},
    leases::{Balance, GroupOrder},
    plan::Plan,
    tensorboard::EventFile,
};

pub(super) const MANIFEST: &str = "manifest.json";
pub(crate) const EVIDENCE: &str = "evidence.jsonl";
pub(crate) const METRICS: &str = "metrics.jsonl";
pub(crate) const CHECKPOINT: &str = "checkpoint";
pub(crate) const JOURNAL: &str = "journal";
pub(crate) const REJECTED: &str = "rejected";
pub(crate) const TOKENIZER: &str = "tokenizer";

/// Files of a checkpoint that say how text and images become ids.
const TOKENIZER_FILES: [&str; 11] = [
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
    "processor_config.json",
    "preprocessor_config.json",
];

/// An answer to a lease, as it came in.
#[derive(Clone, Copy, Debug)]
pub struct Answer<'a> {
    /// Who sent it.
    pub actor: ActorId,
    /// The lease.
    pub lease: LeaseId,
    /// The latest issue of the lease.
    pub attempt: u32,
    /// How many updates newer than its policy there are.
    pub behind: u64,
    /// What it was sampled on, in the actor's own words.
    pub device: &'a str,
    /// The episode's bytes.
    pub body: &'a [u8],
}

/// Where episodes belong that are written down.
#[derive(Clone, Copy, Debug)]
pub struct EpisodeContext<'a> {
    /// Optimizer steps made before the episodes were used.
    pub step: u32,
    /// Optimizer steps behind the policy that played them.
    pub policy_step: u32,
    /// Their advantages, by generation, where they were trained on.
    pub advantages: Option<&'a [f64]>,
    /// Their sampling evidence, by generation, where they were examined.
    pub sampling: &'a [Option<Flagged>],
}

/// The directory of a run that goes on.
#[derive(Debug)]
pub struct RunDirectory {
    pub(super) path: PathBuf,
    /// Whoever goes on with a run holds it already.
    #[expect(dead_code, reason = "it is held")]
    pub(super) lock: Option<RunLock>,
    pub(super) manifest: Manifest,
    pub(super) progress: Progressed,
    pub(super) evidence: EvidenceLog,
    pub(super) metrics: JsonLines,
    pub(super) metrics_sha256: Sha256,
    /// TensorBoard's, where it is written.
    pub(super) events: Option<EventFile>,
    pub(super) journal: Journal,
    pub(super) policies: PolicyStore,
    pub(super) announced: BTreeSet<PolicyDigest>,
    pub(super) last_refused: Option<EpisodeId>,
    /// Bytes of adapters that may be archived in all.
    pub(super) archive_bytes: u64,
    pub(super) format: Arc<ChatFormat>,
    pub(super) tasks: BTreeSet<String>,
    pub(super) checkpoints: Checkpoints,
    /// The number of the next commit.
    pub(super) next_commit: u64,
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
        let lock = RunLock::of(&path)?;
        let tokenizer = copy_tokenizer(&plan.recipe.model.path, &path.join(TOKENIZER))?;
        let mut progress = Progressed {
            started_at: Some(utc_now()),
            program_sha256: program_sha256(),
            ..Progressed::default()
        };
        progress.task_coverage.training_pool_rows = plan.train.len();
        let mut this = Self {
            lock,
            manifest: plan.manifest(),
            progress,
            evidence: EvidenceLog::create(path.join(EVIDENCE), &plan.run)?,
            metrics: JsonLines::create(path.join(METRICS))?,
            metrics_sha256: Sha256::new(),
            events: None,
            journal: Journal::create(path.join(JOURNAL), plan.run)?,
            policies: PolicyStore::create(&path, plan.model.weights)?,
            announced: BTreeSet::new(),
            last_refused: None,
            archive_bytes: plan.recipe.evidence.archive_bytes(),
            format: plan.format.clone(),
            tasks: BTreeSet::new(),
            checkpoints: Checkpoints::new(Disk::at(path.join(CHECKPOINT))),
            next_commit: 0,
            path,
        };
        let checkpoints = this.path.join(CHECKPOINT);
        fs::create_dir(&checkpoints).map_err(FileError::io("create", &checkpoints))?;
        this.manifest.status = Status::Running;
        this.manifest.policy_format.files = tokenizer;
        this.write_manifest(true)?;
        Ok(this)
    }

    /// Says on which device the run is computed.
    pub fn computed_on(&mut self, device: &str) {
        self.progress.host = Some(HostRecord {
            device: device.to_owned(),
            os: std::env::consts::OS.into(),
            architecture: std::env::consts::ARCH.into(),
            processors: std::thread::available_parallelism().map_or(1, usize::from),
        });
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
        self.metrics(record)?;
        self.progress.steps += 1;
        self.progress.update_evidence.nonzero_gradient_steps += u64::from(grad_norm > 0.0);
        self.write_manifest(false)
    }

    /// Writes a record that is no optimizer step, such as an evaluation, to `metrics.jsonl`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn metrics(&mut self, record: &impl Serialize) -> Result<(), FileError> {
        let line = self.metrics.append(record)?;
        self.metrics_sha256.update(&line);
        self.metrics_sha256.update(b"\n");
        let Some(events) = &mut self.events else { return Ok(()) };
        let path = self.metrics.path().to_owned();
        let record =
            serde_json::from_slice(&line).map_err(|source| FileError::Json { path, source })?;
        Ok(events.add(&record)?)
    }

    /// Writes TensorBoard's event files from now on.
    ///
    /// # Errors
    /// They cannot be written.
    pub fn write_events(&mut self) -> Result<(), FileError> {
        self.events = Some(EventFile::create(&self.path, self.progress.steps)?);
        Ok(())
    }

    /// Notes by which bounds sampling evidence is judged.
    pub fn judged_by(&mut self, judge: &SamplingJudge) {
        let record = |(actor_device, bounds): &(String, SamplingBounds)| DeviceBounds {
            actor_device: actor_device.clone(),
            bounds: *bounds,
        };
        self.progress.sampling_bounds = judge.all().iter().map(record).collect();
    }

    /// Writes down a policy that is about to be announced, and archives its adapter where the recipe
    /// leaves room.
    ///
    /// # Errors
    /// The files cannot be written.
    pub fn policy(&mut self, manifest: &AdapterManifest, bytes: &[u8]) -> Result<(), FileError> {
        let policies = &mut self.progress.policies;
        if self.announced.insert(manifest.policy) {
            policies.announced += 1;
            if policies.bytes + manifest.bytes <= self.archive_bytes {
                self.policies.archive(&manifest.policy, bytes)?;
                policies.archived += 1;
                policies.bytes += manifest.bytes;
            }
        }
        let record = Record::Policy {
            step: manifest.step,
            policy: manifest.policy,
            adapter: manifest.adapter,
            bytes: manifest.bytes,
            archived: self.policies.holds(&manifest.policy),
        };
        Ok(self.journal.append(&record)?)
    }

    /// Writes down a group that is about to be played.
    ///
    /// # Errors
    /// The journal cannot be written.
    pub fn ordered(&mut self, group: u64, order: &GroupOrder) -> Result<(), FileError> {
        Ok(self.journal.append(&Record::Group { group, order: order.clone() })?)
    }

    /// Writes down leases that are about to be given to an actor.
    ///
    /// # Errors
    /// The journal cannot be written.
    pub fn granted(&mut self, actor: ActorId, leases: &[LeaseAttempt]) -> Result<(), FileError> {
        Ok(self.journal.append(&Record::Granted { actor, leases: leases.to_vec() })?)
    }

    /// Writes down an episode that the audit passed.
    ///
    /// # Errors
    /// The journal cannot be written.
    pub fn accept(&mut self, answer: &Answer<'_>) -> Result<(), FileError> {
        let &Answer { actor, attempt, behind, device, body, .. } = answer;
        Ok(self.journal.append(&Record::Accepted { actor, attempt, behind, device, body })?)
    }

    /// Writes down a group that was given up.
    ///
    /// # Errors
    /// The journal cannot be written.
    pub fn dropped(&mut self, group: u64) -> Result<(), FileError> {
        Ok(self.journal.append(&Record::Dropped { group })?)
    }

    /// Waits until what was journalled will survive a crash of the machine.
    ///
    /// # Errors
    /// The system says no.
    pub fn keep(&mut self) -> Result<(), FileError> {
        Ok(self.journal.sync()?)
    }

    /// How long the journal is.
    pub fn journal_bytes(&self) -> u64 {
        self.journal.so_far().bytes
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
                global_step: u64::from(context.policy_step),
                base_model_sha256: self.manifest.model.sha256,
                policy: audited.episode.policy,
            };
            let advantage = context.advantages.and_then(|all| all.get(index)).copied();
            let sampling = context.sampling.get(index).and_then(Option::as_ref);
            let mut row = EvidenceRow::new(audited, step, version, advantage, &self.format);
            row.sampling = sampling.map(SamplingRecord::of);
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
        let all: Vec<&Audited> = rollouts.iter().collect();
        if let Some(group) = GroupRecord::of(step, &all) {
            self.tasks.insert(group.task_id.clone());
            coverage.consumed_unique_tasks = self.tasks.len();
            let mixed = u64::from(group.reward_std > 0.0);
            self.progress.update_evidence.mixed_reward_groups += mixed;
            self.progress.reward_groups.push(group);
        }
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
        balance: Option<Balance>,
    ) -> Result<(), FileError> {
        self.manifest.status = status;
        self.progress.ended_at = Some(utc_now());
        let abort = self.manifest.settings.pointer("/training/failure_policy");
        let refused = self
            .last_refused
            .filter(|_| status == Status::Failed && abort.and_then(Value::as_str) == Some("abort"));
        self.progress.error = (status != Status::Completed).then(|| FailureRecord {
            message: reason.to_owned(),
            step: self.progress.steps,
            refused: refused.map(|id| Path::new(REJECTED).join(format!("{id}.json"))),
        });
        self.progress.leases = serde_json::to_value(leases).unwrap_or(Value::Null);
        self.progress.balance = balance;
        self.progress.task_coverage.consumed_unique_task_ids = self.tasks.iter().cloned().collect();
        self.evidence.sync()?;
        self.metrics.sync()?;
        let groups = std::mem::take(&mut self.progress.reward_groups);
        self.write(true, groups)
    }

    /// The manifest of a run that goes on leaves its groups out: they would be written anew each time.
    pub(super) fn write_manifest(&mut self, durable: bool) -> Result<(), FileError> {
        let groups = std::mem::take(&mut self.progress.reward_groups);
        let written = self.write(durable, Vec::new());
        self.progress.reward_groups = groups;
        written
    }

    fn write(&mut self, durable: bool, groups: Vec<GroupRecord>) -> Result<(), FileError> {
        // The manifest never speaks of records that a crash could take back.
        self.journal.sync()?;
        self.progress.evidence = Some(EvidenceRecord {
            file: EVIDENCE.into(),
            rows: self.evidence.rows(),
            head: self.evidence.head(),
        });
        self.progress.journal = Some(self.journal.so_far());
        self.progress.metrics = Some(FileRecord {
            path: METRICS.into(),
            sha256: Digest(self.metrics_sha256.clone().finalize().into()),
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

/// Files of a checkpoint that say how text becomes ids, with their digests.
///
/// # Errors
/// One cannot be read.
pub(crate) fn tokenizer_files(model: &Path) -> Result<BTreeMap<String, Digest>, FileError> {
    let mut files = BTreeMap::new();
    for name in TOKENIZER_FILES {
        let path = model.join(name);
        if path.is_file() {
            let bytes = fs::read(&path).map_err(FileError::io("read", path))?;
            files.insert(name.to_owned(), Digest::of(&bytes));
        }
    }
    Ok(files)
}

fn copy_tokenizer(model: &Path, to: &Path) -> Result<BTreeMap<String, Digest>, FileError> {
    fs::create_dir(to).map_err(FileError::io("create", to))?;
    for name in TOKENIZER_FILES {
        let from = model.join(name);
        if from.is_file() {
            fs::copy(&from, to.join(name)).map_err(FileError::io("copy", from))?;
        }
    }
    tokenizer_files(to)
}
