//! Writes a run's directory while the run goes on.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use policy::{chat::ChatFormat, model::Adapter};
use protocol::{ActorId, AdapterManifest, Digest, EpisodeId, LeaseId, PolicyDigest};
use serde::Serialize;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::{
    AdapterRecord, BestAdapter, DeviceBounds, EvidenceLog, EvidenceRecord, EvidenceRow,
    FailureRecord, FileError, FileRecord, GroupRecord, HostRecord, JsonLines, Manifest,
    PolicyStore, PolicyVersion, Progressed, SamplingRecord, Status, compare_adapters,
    program_sha256, utc_now, write_atomic,
};
use crate::{
    advantage::{ScaleRewards, group_advantages},
    audit::{
        Audited, Rejected,
        sampling::{Flagged, SamplingBounds, SamplingJudge},
    },
    journal::{Journal, Record},
    leases::GroupOrder,
    plan::Plan,
    train::record::Evaluated,
};

const MANIFEST: &str = "manifest.json";
pub(crate) const EVIDENCE: &str = "evidence.jsonl";
pub(crate) const METRICS: &str = "metrics.jsonl";
pub(crate) const JOURNAL: &str = "journal";
pub(crate) const REJECTED: &str = "rejected";
pub(crate) const TOKENIZER: &str = "tokenizer";
/// Bytes of refused episodes that are kept in all. What is refused after that leaves its reason only,
/// so that a hostile actor cannot fill the disk.
const REJECTED_BYTES: u64 = 64 << 20;
/// Refusals that the manifest names one by one.
const LAST_REJECTED: usize = 100;

/// Files of a checkpoint that say how text becomes ids.
const TOKENIZER_FILES: [&str; 9] = [
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
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
    /// Their advantages, by generation, where they were trained on.
    pub advantages: Option<&'a [f64]>,
    /// Their sampling evidence, by generation, where they were examined.
    pub sampling: &'a [Option<Flagged>],
}

/// The directory of a run that goes on.
#[derive(Debug)]
pub struct RunDirectory {
    path: PathBuf,
    manifest: Manifest,
    progress: Progressed,
    evidence: EvidenceLog,
    metrics: JsonLines,
    metrics_sha256: Sha256,
    journal: Journal,
    policies: PolicyStore,
    announced: BTreeSet<PolicyDigest>,
    last_refused: Option<EpisodeId>,
    /// Bytes of adapters that may be archived in all.
    archive_bytes: u64,
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
        let tokenizer = copy_tokenizer(&plan.recipe.model.path, &path.join(TOKENIZER))?;
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
            metrics_sha256: Sha256::new(),
            journal: Journal::create(path.join(JOURNAL), plan.run)?,
            policies: PolicyStore::create(&path, plan.model.weights)?,
            announced: BTreeSet::new(),
            last_refused: None,
            archive_bytes: plan.recipe.evidence.archive_bytes(),
            format: plan.format.clone(),
            tasks: BTreeSet::new(),
            path,
        };
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
        self.metrics_sha256.update(self.metrics.append(record)?);
        self.metrics_sha256.update(b"\n");
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

    /// Writes a refused episode and its reason to the journal and to `rejected/`.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn reject(&mut self, answer: &Answer<'_>, rejected: &Rejected) -> Result<(), FileError> {
        let &Answer { actor, lease, attempt, behind, body, .. } = answer;
        let kept = &mut self.progress.task_coverage.rejected_bytes;
        let fits = *kept + body.len() as u64 <= REJECTED_BYTES;
        if fits {
            *kept += body.len() as u64;
        }
        self.journal.append(&Record::Rejected {
            actor,
            lease,
            attempt,
            behind,
            id: rejected.id,
            reason: rejected.reason.code(),
            body: fits.then_some(body),
        })?;
        self.write_rejected(rejected, fits)
    }

    /// Writes down that an episode which was kept is refused after all. Its bytes are in the journal
    /// already.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn take_back(&mut self, actor: ActorId, rejected: &Rejected) -> Result<(), FileError> {
        if let Some(lease) = rejected.lease {
            self.journal.append(&Record::Rejected {
                actor,
                lease,
                attempt: 0,
                behind: 0,
                id: rejected.id,
                reason: rejected.reason.code(),
                body: None,
            })?;
        }
        self.write_rejected(rejected, true)
    }

    fn write_rejected(&mut self, rejected: &Rejected, whole: bool) -> Result<(), FileError> {
        let (rung, code) = rejected.reason.name();
        let message = rejected.reason.to_string();
        let directory = self.path.join(REJECTED);
        fs::create_dir_all(&directory).map_err(FileError::io("create", &directory))?;
        let record = json!({
            "episode_id": rejected.id,
            "lease": rejected.lease,
            "rung": rung,
            "reason": code,
            "message": message,
            "rejected_at": utc_now(),
            "episode": rejected.episode.as_ref().filter(|_| whole),
        });
        let path = directory.join(format!("{}.json", rejected.id));
        write_atomic(&path, format!("{record:#}\n").as_bytes(), false)?;
        self.last_refused = Some(rejected.id);
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
        let record = self.write_adapter(step, adapter, digest, base)?;
        let path = self.path.join(&record.path);
        self.progress.last_adapter = Some(record);
        self.write_manifest(true)?;
        Ok(path)
    }

    /// Writes an adapter that did at least as well on held-out tasks as every one before it: by strict
    /// success, then by reward. Others are not written.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn keep_best(
        &mut self,
        step: u32,
        adapter: &Adapter,
        digest: Digest,
        base: &str,
        evaluated: &Evaluated,
    ) -> Result<(), FileError> {
        let Evaluated { success, reward, .. } = *evaluated;
        let best = self.progress.best_adapter.as_ref();
        if best.is_some_and(|best| (best.success, best.reward) > (success, reward)) {
            return Ok(());
        }
        let adapter = self.write_adapter(step, adapter, digest, base)?;
        self.progress.best_adapter = Some(BestAdapter { adapter, success, reward });
        self.write_manifest(true)
    }

    fn write_adapter(
        &mut self,
        step: u32,
        adapter: &Adapter,
        digest: Digest,
        base: &str,
    ) -> Result<AdapterRecord, FileError> {
        let name = Path::new("adapters").join(format!("{step}-{}", digest.short()));
        let path = self.path.join(&name);
        let record = AdapterRecord { step: u64::from(step), path: name, sha256: digest };
        if path.exists() {
            return Ok(record);
        }
        let parent = self.path.join("adapters");
        let partial = parent.join(format!(".{step}-{}.partial", digest.short()));
        fs::create_dir_all(&parent).map_err(FileError::io("create", &parent))?;
        adapter
            .save_peft(&partial, base)
            .map_err(|source| FileError::Adapter { path: path.clone(), source })?;
        fs::rename(&partial, &path).map_err(FileError::io("write", &path))?;
        self.progress.adapters.push(record.clone());
        Ok(record)
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
