//! The evidence log: one line an accepted episode, each line naming the SHA-256 of the one before.
//!
//! The first line names a digest made of the run's id, so a log cannot be moved to another run; the
//! digest of the last line is the head, which the manifest holds. Changing, dropping, adding or
//! reordering a line breaks the chain; cutting the log off at its end changes the head.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
};

use environments::Score;
use policy::chat::ChatFormat;
use protocol::{
    Digest, EpisodeEnd, EpisodeId, LeaseId, PolicyDigest, RunId, Split, Task, TraceRow,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{FileError, JsonLines};
use crate::{
    audit::{Audited, PolicyAudit},
    reward::Reward,
};

/// Which policy played.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyVersion {
    /// Optimizer steps that it has behind it.
    pub global_step: u64,
    /// The base checkpoint.
    pub base_model_sha256: Digest,
    /// Base and adapter together.
    pub policy: PolicyDigest,
}

/// What the log says of one episode.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvidenceRow {
    /// Optimizer step that it was trained in, from 0; for evaluations, the steps made before it.
    pub optimizer_step: u64,
    /// The lease that it answers.
    pub lease: LeaseId,
    /// The episode.
    pub episode: EpisodeId,
    /// Trained on, or held out.
    pub split: Split,
    /// The task.
    pub task_id: String,
    /// The seed of its reset.
    pub episode_seed: u64,
    /// Which policy played.
    pub policy_version: PolicyVersion,
    /// The environment's score, by the learner's own replay.
    pub score: Score,
    /// What is trained on.
    pub training_reward: f64,
    /// How it came about.
    pub reward_components: Reward,
    /// Its group-relative advantage; none where it was not trained on.
    pub advantage: Option<f64>,
    /// Why it ended.
    pub end: EpisodeEnd,
    /// The conversation as text.
    pub messages: Vec<Value>,
    /// The checked trace.
    pub trace: Vec<TraceRow>,
    /// The chain's value after the last row.
    pub trace_head: Digest,
    /// What the audit checked.
    pub policy_audit: PolicyAudit,
}

impl EvidenceRow {
    /// The row of an accepted episode.
    pub fn new(
        audited: &Audited,
        optimizer_step: u64,
        policy_version: PolicyVersion,
        advantage: Option<f64>,
        format: &ChatFormat,
    ) -> Self {
        let episode = &audited.episode;
        Self {
            optimizer_step,
            lease: episode.lease,
            episode: audited.id,
            split: audited.task.split,
            task_id: episode.task.clone(),
            episode_seed: episode.seed,
            policy_version,
            score: audited.score.clone(),
            training_reward: audited.reward.training_reward,
            reward_components: audited.reward.clone(),
            advantage,
            end: episode.end,
            messages: messages(format, &audited.task, audited),
            trace: episode.trace.clone(),
            trace_head: episode.trace_head,
            policy_audit: audited.policy_audit.clone(),
        }
    }
}

/// An episode as a conversation: what was asked, what the policy wrote (control tokens included), and
/// what it was shown.
pub fn messages(format: &ChatFormat, task: &Task, audited: &Audited) -> Vec<Value> {
    let episode = &audited.episode;
    let prompt = format!("{}{}", task.prompt, episode.reset_text);
    let mut messages = vec![json!({"role": "user", "content": prompt})];
    for (turn, span) in (0_u32..).zip(&episode.spans) {
        messages.push(json!({"role": "assistant", "content": format.decode(&span.ids)}));
        for row in episode.trace.iter().filter(|row| row.turn == turn) {
            let (name, content) = (&row.tool, &row.observation);
            messages.push(json!({"role": "tool", "name": name, "content": content}));
        }
    }
    messages
}

#[derive(Serialize)]
struct Chained<'a> {
    previous: Digest,
    #[serde(flatten)]
    row: &'a EvidenceRow,
}

#[derive(Deserialize)]
struct Link {
    previous: Digest,
}

fn genesis(run: &RunId) -> Digest {
    Digest::of_parts("rollcall-evidence-v1", &[&run.0.0])
}

/// A log that is being written.
#[derive(Debug)]
pub struct EvidenceLog {
    lines: JsonLines,
    head: Digest,
    rows: u64,
}

impl EvidenceLog {
    /// A new log.
    ///
    /// # Errors
    /// The file exists, or cannot be written.
    pub fn create(path: impl Into<PathBuf>, run: &RunId) -> Result<Self, FileError> {
        Ok(Self { lines: JsonLines::create(path)?, head: genesis(run), rows: 0 })
    }

    /// A log that is there already: its chain is verified, a torn last line is cut off.
    ///
    /// # Errors
    /// The file cannot be read, or is damaged.
    pub fn append_to(path: impl Into<PathBuf>, run: &RunId) -> Result<Self, FileError> {
        let lines = JsonLines::append_to(path)?;
        let (rows, head) = verify_evidence(lines.path(), run, |_| Ok(()))?;
        Ok(Self { lines, head, rows })
    }

    /// Appends one row.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn append(&mut self, row: &EvidenceRow) -> Result<(), FileError> {
        let line = self.lines.append(&Chained { previous: self.head, row })?;
        self.head = Digest::of(&line);
        self.rows += 1;
        Ok(())
    }

    /// SHA-256 of the last line; of the run, where there is none.
    pub fn head(&self) -> Digest {
        self.head
    }

    /// How many rows it has.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Waits until everything written will survive a crash of the machine.
    ///
    /// # Errors
    /// The system says no.
    pub fn sync(&self) -> Result<(), FileError> {
        self.lines.sync()
    }
}

/// Reads a log from its start, checks that it is a chain of this run, and hands on its rows. Returns
/// how many there are, and the head.
///
/// # Errors
/// The file cannot be read; a line that is no row or does not follow the one before; what `row` says.
pub fn verify_evidence(
    path: &Path,
    run: &RunId,
    mut row: impl FnMut(EvidenceRow) -> Result<(), String>,
) -> Result<(u64, Digest), FileError> {
    let file = fs::File::open(path).map_err(FileError::io("open", path))?;
    let mut reader = BufReader::new(file);
    let (mut head, mut rows, mut line) = (genesis(run), 0, Vec::new());
    loop {
        line.clear();
        let read = reader.read_until(b'\n', &mut line).map_err(FileError::io("read", path))?;
        if read == 0 {
            return Ok((rows, head));
        }
        rows += 1;
        let damaged = |problem: String| FileError::Damaged {
            path: path.to_owned(),
            line: Some(rows),
            problem,
        };
        if line.pop() != Some(b'\n') {
            return Err(damaged("the line is torn".into()));
        }
        let link: Link = serde_json::from_slice(&line).map_err(|e| damaged(e.to_string()))?;
        if link.previous != head {
            return Err(damaged(format!(
                "it follows {}, and the line before has {}",
                link.previous.short(),
                head.short()
            )));
        }
        let parsed = serde_json::from_slice(&line).map_err(|e| damaged(e.to_string()))?;
        row(parsed).map_err(damaged)?;
        head = Digest::of(&line);
    }
}
