//! Goes on with a run whose learner ended: what its last commit says, and what came in since then.
//!
//! Order of a commit: evidence and metrics synced, checkpoint written and renamed, then the journal's
//! record. So the last such record names lines that are there and a checkpoint that is there. What was
//! written after it is undone (lines, policies that nobody played) or stands (orders, grants, verdicts).

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use policy::score::ValueHead;
use protocol::{
    Digest, PolicyDigest, RunId, Split,
    folder::{Disk, Folder},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use super::{
    AdapterRecord, Checkpoint, Checkpoints, EvidenceLog, EvidenceRow, FileError, GroupRecord,
    JsonLines, Manifest, Part, PolicyStore, Progressed, RunDirectory, Status, read_manifest,
    run_directory::{CHECKPOINT, EVIDENCE, JOURNAL, MANIFEST, METRICS, REJECTED, TOKENIZER},
    tokenizer_files,
};
use crate::{
    joins::{EARLIER as EARLIER_JOINS, JOINS},
    journal::{Commit, Journal, JournalError, JournalReader, Record, SEGMENT_BYTES},
    plan::Plan,
    recipe::json,
    report::{PLOTS, REPORT},
    tensorboard::TENSORBOARD,
    train::{
        intake::CollectCounts,
        record::Evaluated,
        replay::{Replay, Replayed},
    },
};

const POLICIES: &str = "policies";
const ADAPTERS: &str = "adapters";
/// What a run's directory holds.
const OURS: [&str; 14] = [
    MANIFEST,
    EVIDENCE,
    METRICS,
    JOURNAL,
    CHECKPOINT,
    POLICIES,
    ADAPTERS,
    REJECTED,
    TOKENIZER,
    JOINS,
    EARLIER_JOINS,
    TENSORBOARD,
    REPORT,
    PLOTS,
];

/// What a commit keeps beside the weights.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RunState {
    /// Optimizer steps.
    pub steps: u32,
    /// Evaluations.
    pub rounds: u32,
    /// Seconds of training.
    pub seconds: f64,
    /// The first evaluation.
    pub before: Option<Evaluated>,
    /// The last one.
    pub after: Option<Evaluated>,
    /// What happened to leases, without the grants under way.
    pub counts: CollectCounts,
    /// What the manifest says. Its groups are left out: the evidence has them.
    pub progress: Progressed,
}

/// What lies where a run is to be written.
#[derive(Debug)]
pub enum Begun {
    /// Nothing, or a run that ended before its first commit, which is removed.
    Nothing,
    /// A run that did all of its steps.
    Complete(Box<Manifest>),
    /// A run that can be gone on with.
    Going,
}

/// A run that is gone on with.
#[derive(Debug)]
pub struct Resumed {
    /// Its directory.
    pub files: RunDirectory,
    /// Its last checkpoint.
    pub checkpoint: Checkpoint<RunState>,
    /// Its leases.
    pub replayed: Replayed,
}

pub(super) fn refused(path: &Path, problem: impl Into<String>) -> FileError {
    FileError::Damaged { path: path.to_owned(), line: None, problem: problem.into() }
}

/// Looks at what lies at a plan's output.
///
/// # Errors
/// Something else than this run; a run that cannot be read.
pub fn begun(plan: &Plan) -> Result<Begun, FileError> {
    let path = &plan.output;
    let listed = match fs::read_dir(path) {
        Ok(listed) => listed,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Begun::Nothing),
        Err(error) => return Err(FileError::io("read", path)(error)),
    };
    let mut names = Vec::new();
    for entry in listed {
        let entry = entry.map_err(FileError::io("read", path))?;
        names.push(entry.file_name().to_string_lossy().into_owned());
    }
    let partial = format!(".{MANIFEST}.");
    let foreign =
        names.iter().find(|name| !OURS.contains(&name.as_str()) && !name.starts_with(&partial));
    if !path.join(MANIFEST).is_file() {
        if let Some(name) = foreign {
            let problem =
                format!("{name} is no file of a run; name another directory with --output");
            return Err(refused(path, problem));
        }
        return discard(plan, &names);
    }
    let manifest = read_manifest(path)?;
    same_run(plan, &manifest)?;
    if manifest.status == Status::Completed {
        return Ok(Begun::Complete(Box::new(manifest)));
    }
    if committed(plan)? { Ok(Begun::Going) } else { discard(plan, &names) }
}

/// Refuses the run of another recipe, by name.
fn same_run(plan: &Plan, manifest: &Manifest) -> Result<(), FileError> {
    let other = |what: String| {
        let problem = format!(
            "it holds {what}; resume that run with its own recipe, or name another directory with \
             --output"
        );
        Err(refused(&plan.output, problem))
    };
    if manifest.run != plan.run {
        let (theirs, ours) = (manifest.run.0.short(), plan.run.0.short());
        let fields = differing(&manifest.settings, &plan.recipe.settings());
        let fields = if fields.is_empty() { "its environment".into() } else { fields.join(", ") };
        return other(format!("run {theirs}, and the recipe makes run {ours}: {fields} differ"));
    }
    let fields = differing(&manifest.settings, &plan.recipe.settings());
    if fields.is_empty() {
        return Ok(());
    }
    other(format!("a run whose {} differ from the recipe's", fields.join(", ")))
}

/// Sections in which two recipes differ; of `training` the fields.
fn differing(a: &Value, b: &Value) -> Vec<String> {
    let keys = |value: &Value| -> Vec<String> {
        value.as_object().map(|it| it.keys().cloned().collect()).unwrap_or_default()
    };
    let differ = |a: &Value, b: &Value, prefix: &str| {
        let mut all = keys(a);
        all.extend(keys(b));
        all.sort_unstable();
        all.dedup();
        let other = all
            .into_iter()
            .filter(|key| a.get(key).map(json::canonical) != b.get(key).map(json::canonical));
        other.map(|key| format!("{prefix}{key}")).collect::<Vec<String>>()
    };
    let mut fields = differ(a, b, "");
    if let Some(at) = fields.iter().position(|field| field == "training") {
        fields.remove(at);
        let training = |value: &Value| value.get("training").cloned().unwrap_or_default();
        fields.extend(differ(&training(a), &training(b), "training."));
    }
    fields
}

/// Whether anything was committed.
fn committed(plan: &Plan) -> Result<bool, FileError> {
    let mut reader = match JournalReader::open(plan.output.join(JOURNAL), plan.run) {
        Ok(reader) => reader,
        Err(JournalError::Io { .. } | JournalError::Segment { .. }) => return Ok(false),
        Err(error) => return Err(error.into()),
    };
    loop {
        match reader.read() {
            Ok(Some(entry)) => {
                if matches!(entry.record(), Ok(Record::Committed(_))) {
                    return Ok(true);
                }
            }
            Ok(None) | Err(JournalError::Torn { .. }) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Removes what a learner wrote that ended before its first commit: nothing was played.
fn discard(plan: &Plan, names: &[String]) -> Result<Begun, FileError> {
    let path = &plan.output;
    let segments = fs::read_dir(path.join(JOURNAL)).map_or(0, Iterator::count);
    if segments > 1 || names.iter().any(|name| name == ADAPTERS || name == REJECTED) {
        let problem = "it holds a run without a commit, which cannot be resumed; name another \
                       directory with --output";
        return Err(refused(path, problem));
    }
    fs::remove_dir_all(path).map_err(FileError::io("remove", path))?;
    Ok(Begun::Nothing)
}

/// Makes a commit: the checkpoint is written first, and removed last is the one before it.
///
/// # Errors
/// Something cannot be written; the commit before this one stands.
pub fn seal(
    journal: &mut Journal,
    checkpoints: &Checkpoints,
    commit: Commit,
    state: &impl Serialize,
    weights: &[Part<'_>],
) -> Result<(), FileError> {
    let checkpoint = checkpoints.write(commit.number, state, weights)?;
    journal.append(&Record::Committed(Commit { checkpoint, ..commit }))?;
    journal.sync()?;
    checkpoints.keep_only(commit.number)
}

/// Reads what [`seal`] and the records after it left. Nothing where nothing was committed.
///
/// # Errors
/// The journal is damaged, or the checkpoint of its last commit.
pub fn unseal<S: DeserializeOwned>(
    journal: Arc<dyn Folder>,
    checkpoints: &Checkpoints,
    run: RunId,
    mut replay: Replay,
) -> Result<Option<(Journal, Replayed, Checkpoint<S>)>, FileError> {
    let path = journal.path().to_owned();
    let (journal, _) = Journal::recover_over(journal, run, SEGMENT_BYTES, |entry| {
        let record = entry.record()?;
        let at = entry.position;
        replay.take(record, at).map_err(|problem| JournalError::Damaged {
            path: path.join(format!("{:08}.segment", at.segment)),
            offset: at.offset,
            problem,
        })
    })?;
    let Some(replayed) = replay.end() else { return Ok(None) };
    let checkpoint = checkpoints.read(replayed.commit.number, replayed.commit.checkpoint)?;
    Ok(Some((journal, replayed, checkpoint)))
}

impl RunDirectory {
    /// Makes what happened until now survive a crash: the run can go on from here. `weights` are the
    /// adapter and what belongs to its training.
    ///
    /// # Errors
    /// Something cannot be written; the commit before this one stands.
    pub fn commit(&mut self, mut state: RunState, weights: &[Part<'_>]) -> Result<(), FileError> {
        self.evidence.sync()?;
        self.metrics.sync()?;
        let groups = std::mem::take(&mut self.progress.reward_groups);
        state.progress = self.progress.clone();
        self.progress.reward_groups = groups;
        let number = self.next_commit;
        let commit = Commit {
            number,
            steps: state.steps,
            rounds: state.rounds,
            checkpoint: Digest([0; 32]),
            evidence_rows: self.evidence.rows(),
            evidence_bytes: self.evidence.bytes(),
            evidence_head: self.evidence.head(),
            metrics_bytes: self.metrics.bytes(),
            metrics_sha256: Digest(self.metrics_sha256.clone().finalize().into()),
        };
        seal(&mut self.journal, &self.checkpoints, commit, &state, weights)?;
        self.next_commit += 1;
        self.write_manifest(false)
    }

    /// Goes on with the run of a plan.
    ///
    /// # Errors
    /// Its files cannot be read and written, or are not what it wrote.
    pub fn resume(plan: &Plan) -> Result<Resumed, FileError> {
        let path = plan.output.clone();
        let replay = Replay::new(plan.run, plan.recipe.training.groups_per_step());
        let checkpoints = Checkpoints::new(Disk::at(path.join(CHECKPOINT)));
        let journal = Disk::at(path.join(JOURNAL));
        let unsealed = unseal(journal, &checkpoints, plan.run, replay)?;
        let (journal, mut replayed, checkpoint): (_, _, Checkpoint<RunState>) =
            unsealed.ok_or_else(|| refused(&path, "nothing was committed in it"))?;
        let commit = replayed.commit;
        replayed.count_from(&checkpoint.state.counts.leases);
        let mut groups = Groups::default();
        let rows = (commit.evidence_rows, commit.evidence_bytes, commit.evidence_head);
        let evidence = path.join(EVIDENCE);
        let evidence = EvidenceLog::resume(evidence, &plan.run, rows, |row| groups.add(row))?;
        let metrics = JsonLines::resume(path.join(METRICS), commit.metrics_bytes)?;
        let metrics_sha256 = prefix_sha256(metrics.path(), commit)?;
        let mut manifest = plan.manifest();
        manifest.policy_format.files = tokenizer_files(&path.join(TOKENIZER))?;
        manifest.status = Status::Running;
        let mut files = Self {
            lock: None,
            manifest,
            progress: checkpoint.state.progress.clone(),
            evidence,
            metrics,
            metrics_sha256,
            events: None,
            journal,
            policies: PolicyStore::of(&path, plan.model.weights),
            announced: replayed.policies.iter().map(|it| it.policy).collect(),
            last_refused: None,
            archive_bytes: plan.recipe.evidence.archive_bytes(),
            format: plan.format.clone(),
            tasks: Default::default(),
            checkpoints,
            next_commit: commit.number + 1,
            path,
        };
        (files.progress.reward_groups, files.tasks) = groups.end();
        files.progress.resumes = replayed.resumes + 1;
        files.progress.ended_at = None;
        files.progress.error = None;
        for refusal in &replayed.refused_since {
            files.refused_before(refusal)?;
        }
        files.adopt_adapters(&replayed)?;
        files.journal.append(&Record::Resumed { commit: commit.number })?;
        // From here on the manifest speaks of the commit: what follows it in the files is not the run's.
        files.write_manifest(true)?;
        files.evidence.cut()?;
        files.metrics.cut()?;
        files.checkpoints.keep_only(commit.number)?;
        files.remove_void_policies()?;
        Ok(Resumed { files, checkpoint, replayed })
    }

    /// Adapters that were saved after the last commit are the run's where they are whole.
    fn adopt_adapters(&mut self, replayed: &Replayed) -> Result<(), FileError> {
        let folder = self.path.join(ADAPTERS);
        for name in names(&folder)? {
            let place = Path::new(ADAPTERS).join(&name);
            if self.progress.adapters.iter().any(|it| it.path == place) {
                continue;
            }
            let path = self.path.join(&place);
            let sha256 = fs::read(path.join("adapter_model.safetensors")).map(|it| Digest::of(&it));
            let known = sha256.ok().and_then(|sha256| {
                let known = replayed.policies.iter().find(|it| it.adapter == sha256)?;
                let named = format!("{}-{}", known.step, sha256.short()) == name;
                named.then_some((known.step, sha256))
            });
            let Some((step, sha256)) = known else {
                fs::remove_dir_all(&path).map_err(FileError::io("remove", &path))?;
                continue;
            };
            let head = fs::read(path.join(ValueHead::FILE)).ok();
            let value_head_sha256 = head.map(|bytes| Digest::of(&bytes));
            let record = AdapterRecord { step, path: place, sha256, value_head_sha256 };
            self.progress.adapters.push(record);
        }
        Ok(())
    }

    /// Removes adapters of policies that no commit knows.
    fn remove_void_policies(&self) -> Result<(), FileError> {
        let folder = self.path.join(POLICIES);
        for name in names(&folder)? {
            let policy = name.strip_suffix(".safetensors").and_then(|it| it.parse().ok());
            if policy.is_none_or(|policy| !self.announced.contains(&PolicyDigest(policy))) {
                let path = folder.join(name);
                fs::remove_file(&path).map_err(FileError::io("remove", path))?;
            }
        }
        Ok(())
    }
}

fn names(folder: &PathBuf) -> Result<Vec<String>, FileError> {
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let mut names = Disk::at(folder).list().map_err(FileError::io("read", folder))?;
    names.sort_unstable();
    Ok(names)
}

/// The hash of the metrics that are committed, to be gone on with.
fn prefix_sha256(path: &Path, commit: Commit) -> Result<Sha256, FileError> {
    let mut bytes = fs::read(path).map_err(FileError::io("read", path))?;
    bytes.truncate(usize::try_from(commit.metrics_bytes).unwrap_or(usize::MAX));
    let mut hash = Sha256::new();
    hash.update(&bytes);
    if Digest(hash.clone().finalize().into()) != commit.metrics_sha256 {
        return Err(refused(path, "its lines are not those that the journal speaks of"));
    }
    Ok(hash)
}

/// Groups that were trained on, as evidence rows come by.
#[derive(Default)]
struct Groups {
    rows: Vec<EvidenceRow>,
    groups: Vec<GroupRecord>,
}

impl Groups {
    fn add(&mut self, row: EvidenceRow) {
        if row.split == Split::Eval {
            return;
        }
        if self.rows.last().is_some_and(|it| it.lease.group != row.lease.group) {
            self.close();
        }
        self.rows.push(row);
    }

    fn close(&mut self) {
        self.groups.extend(GroupRecord::of_rows(&self.rows));
        self.rows.clear();
    }

    fn end(mut self) -> (Vec<GroupRecord>, std::collections::BTreeSet<String>) {
        self.close();
        let tasks = self.groups.iter().map(|group| group.task_id.clone()).collect();
        (self.groups, tasks)
    }
}
