//! The evidence log: one line an accepted episode, each line naming the SHA-256 of the one before.
//!
//! The first line names a digest made of the run's id, so a log cannot be moved to another run; the
//! digest of the last line is the head, which the manifest holds. Changing, dropping, adding or
//! reordering a line breaks the chain; cutting the log off at its end changes the head.

use std::{
    borrow::Cow,
    fs,
    io::{BufRead as _, BufReader, Read as _},
    path::{Path, PathBuf},
};

use environments::Score;
use policy::chat::ChatFormat;
use protocol::{
    CallKind, Digest, EpisodeEnd, EpisodeId, LeaseId, PolicyDigest, RunId, Split, Task, TraceRow,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{FileError, JsonLines};
use crate::{
    audit::{
        Audited, PolicyAudit,
        sampling::{Flagged, SamplingEvidence},
    },
    reward::Reward,
};

/// Longest line that is read, in bytes.
const MAX_LINE: u64 = 512 << 20;

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
    /// Its group-relative advantage, also where a value head gave the tokens theirs; none where it was not trained on.
    pub advantage: Option<f64>,
    /// Why it ended.
    pub end: EpisodeEnd,
    /// The conversation as text.
    pub messages: Vec<Value>,
    /// The checked trace.
    pub trace: Vec<TraceRow>,
    /// The chain's value after the last row.
    pub trace_head: Digest,
    /// Digests of the images that the policy was shown before the text, in order; absent where there
    /// were none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<Digest>,
    /// What the audit checked.
    pub policy_audit: PolicyAudit,
    /// How its ids were sampled, as far as the scoring pass can tell; absent where it was not asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sampling: Option<SamplingRecord>,
}

/// The sampling evidence about an episode.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingRecord {
    /// The evidence.
    #[serde(flatten)]
    pub evidence: SamplingEvidence,
    /// The name of the bound that it breaks, if any.
    pub flag: Option<String>,
}

impl SamplingRecord {
    /// The record of judged evidence.
    pub fn of(flagged: &Flagged) -> Self {
        let flag = flagged.reason.as_ref().map(|reason| reason.code().to_owned());
        Self { evidence: flagged.evidence, flag }
    }
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
            images: episode.reset_images.clone(),
            policy_audit: audited.policy_audit.clone(),
            sampling: None,
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
        let calls = episode.trace.iter().filter(|row| row.kind != CallKind::Answer);
        for row in calls.filter(|row| row.turn == turn) {
            let (name, said) = (&row.tool, row.observation.as_str());
            // What cannot be encoded was shown to nobody.
            let content = format.shown(said).unwrap_or(Cow::Borrowed(said));
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

    /// A log that is there already, to be gone on with after its first `rows` rows, which are `bytes`
    /// bytes with this head; each row is shown to `visit`. What follows them stays until [`Self::cut`].
    ///
    /// # Errors
    /// The file cannot be read, or its rows are others.
    pub fn resume(
        path: impl Into<PathBuf>,
        run: &RunId,
        (rows, bytes, head): (u64, u64, Digest),
        mut visit: impl FnMut(EvidenceRow),
    ) -> Result<Self, FileError> {
        let lines = JsonLines::resume(path, bytes)?;
        let mut reader = EvidenceReader::open(lines.path(), run)?;
        let mut length = 0;
        while reader.rows() < rows
            && let Some(line) = reader.read()?
        {
            length += line.text.len() as u64 + 1;
            visit(line.row);
        }
        if (reader.rows(), length, reader.head()) != (rows, bytes, head) {
            let problem =
                format!("its first {rows} lines are not those that the journal speaks of");
            let path = lines.path().to_owned();
            return Err(FileError::Damaged { path, line: None, problem });
        }
        Ok(Self { lines, head, rows })
    }

    /// Cuts off what is not counted.
    ///
    /// # Errors
    /// The system says no.
    pub fn cut(&mut self) -> Result<(), FileError> {
        self.lines.cut()
    }

    /// Bytes of its rows.
    pub fn bytes(&self) -> u64 {
        self.lines.bytes()
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

/// A line of a log as it stands there.
#[derive(Clone, Debug)]
pub struct EvidenceLine {
    /// From 1.
    pub number: u64,
    /// Its bytes, without the newline.
    pub text: Vec<u8>,
    /// The digest that it says it follows.
    pub previous: Digest,
    /// Its row.
    pub row: EvidenceRow,
    /// What is wrong with its place in the chain, if anything is.
    pub broken: Option<String>,
}

/// Reads a log from its start. Lines that break the chain are handed on with what is wrong, so that
/// the rest can be looked at too.
#[derive(Debug)]
pub struct EvidenceReader {
    path: PathBuf,
    lines: BufReader<fs::File>,
    head: Digest,
    rows: u64,
}

impl EvidenceReader {
    /// A reader of the log of `run`.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub fn open(path: impl Into<PathBuf>, run: &RunId) -> Result<Self, FileError> {
        let path = path.into();
        let file = fs::File::open(&path).map_err(FileError::io("open", &path))?;
        Ok(Self { path, lines: BufReader::new(file), head: genesis(run), rows: 0 })
    }

    /// SHA-256 of the last line that was read; of the run, where there was none.
    pub fn head(&self) -> Digest {
        self.head
    }

    /// Lines that were read.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// The next line; none at the end.
    ///
    /// # Errors
    /// The file cannot be read; a line that is torn, or no row.
    pub fn read(&mut self) -> Result<Option<EvidenceLine>, FileError> {
        let mut text = Vec::new();
        let mut limited = std::io::Read::by_ref(&mut self.lines).take(MAX_LINE);
        let read = limited.read_until(b'\n', &mut text);
        if read.map_err(FileError::io("read", &self.path))? == 0 {
            return Ok(None);
        }
        let number = self.rows + 1;
        let damaged = |problem: String| FileError::Damaged {
            path: self.path.clone(),
            line: Some(number),
            problem,
        };
        if text.pop() != Some(b'\n') {
            return Err(damaged("the line is torn".into()));
        }
        let link: Link = serde_json::from_slice(&text).map_err(|e| damaged(e.to_string()))?;
        let row = serde_json::from_slice(&text).map_err(|e| damaged(e.to_string()))?;
        let broken = (link.previous != self.head).then(|| {
            let (follows, before) = (link.previous.short(), self.head.short());
            format!("it follows {follows}, and the line before has {before}")
        });
        self.head = Digest::of(&text);
        self.rows = number;
        Ok(Some(EvidenceLine { number, text, previous: link.previous, row, broken }))
    }
}

/// A row as the line that follows one with the digest `previous`.
///
/// # Errors
/// It is no JSON.
pub fn evidence_line(previous: Digest, row: &EvidenceRow) -> Result<Vec<u8>, serde_json::Error> {
    serde_json::to_vec(&Chained { previous, row })
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
    let mut reader = EvidenceReader::open(path, run)?;
    while let Some(line) = reader.read()? {
        let checked = line.broken.map_or(Ok(()), Err).and_then(|()| row(line.row));
        checked.map_err(|problem| FileError::Damaged {
            path: path.to_owned(),
            line: Some(line.number),
            problem,
        })?;
    }
    Ok((reader.rows(), reader.head()))
}
