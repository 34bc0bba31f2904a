//! The directory of a run: what it wrote down, so that anyone can check it later.
//!
//! | path | what |
//! |---|---|
//! | `manifest.json` | status, hashes, versions, settings, coverage, update evidence; replaced atomically |
//! | `evidence.jsonl` | one line an accepted episode, chained by hash; the head stands in the manifest |
//! | `metrics.jsonl` | one line an optimizer step or evaluation |
//! | `tensorboard/` | the same numbers as event files |
//! | `checkpoint/` | what the run goes on from after a crash: adapter, optimizer, counters |
//! | `journal/` | every judged episode's bytes, every group ordered, every policy announced |
//! | `policies/<policy>.safetensors` | the adapter of every policy that played |
//! | `rejected/<episode>.json` | each refused episode and its reason |
//! | `adapters/<step>-<digest>/` | adapters in PEFT's format |
//! | `joins.jsonl` | who joined and who was turned away |
//! | `tokenizer/` | the checkpoint's tokenizer and chat template |

mod adapters;
mod atomic;
mod checkpoint;
mod evidence;
mod jsonl;
mod lock;
mod manifest;
mod policies;
mod rejected;
mod resume;
mod run_directory;
mod time;
mod update;
mod versions;

use std::{io, path::PathBuf};

pub use adapters::PolicyFiles;
pub use atomic::write_atomic;
pub use checkpoint::{Checkpoint, Checkpoints, Part};
pub use evidence::{
    EvidenceLine, EvidenceLog, EvidenceReader, EvidenceRow, PolicyVersion, SamplingRecord,
    evidence_line, messages, verify_evidence,
};
pub use jsonl::JsonLines;
pub use lock::RunLock;
pub(crate) use manifest::read_any_manifest;
pub use manifest::{
    AdapterRecord, BestAdapter, DatasetRecord, Derived, DeviceBounds, EnvironmentRecord,
    EvidenceRecord, FailureRecord, FileRecord, GroupRecord, HostRecord, Manifest, ModelRecord,
    ParserRecord, PolicyFormat, PolicyRecord, Progressed, Status, TaskCoverage,
};
pub use policies::{PolicyError, PolicyStore};
pub use resume::{Begun, Resumed, RunState, begun, seal, unseal};
pub use run_directory::{Answer, EpisodeContext, RunDirectory, read_manifest};
pub(crate) use run_directory::{
    CHECKPOINT, EVIDENCE, JOURNAL, METRICS, REJECTED, TOKENIZER, tokenizer_files,
};
pub use time::utc_now;
pub use update::{UpdateEvidence, compare_adapters};
pub use versions::{dependency_versions, program_sha256};

use crate::{journal::JournalError, tensorboard::EventError};

/// A file of a run could not be written or read: one line with action, path and cause.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The system said no.
    #[error("cannot {action} {path}: {source}", path = .path.display())]
    Io {
        /// What was tried, as `write`.
        action: &'static str,
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A record cannot be written as JSON.
    #[error("cannot write {path}: {source}", path = .path.display())]
    Json {
        /// Where.
        path: PathBuf,
        /// Why.
        source: serde_json::Error,
    },
    /// A file that is not what the run wrote.
    #[error("{path}{}: {problem}", .line.map(|line| format!(" line {line}")).unwrap_or_default(), path = .path.display())]
    Damaged {
        /// Where.
        path: PathBuf,
        /// Line, from 1, where there is one.
        line: Option<u64>,
        /// What is wrong.
        problem: String,
    },
    /// The journal.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// An event file.
    #[error(transparent)]
    Events(#[from] EventError),
    /// An adapter cannot be written.
    #[error("cannot write the adapter to {path}: {source}", path = .path.display())]
    Adapter {
        /// Where.
        path: PathBuf,
        /// Why.
        source: policy::model::ModelError,
    },
}

impl FileError {
    /// For `map_err`: `action` on `path` failed.
    pub(crate) fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }
}
