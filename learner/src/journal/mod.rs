//! The journal of a run: every judged episode's exact bytes, and what is needed to judge them again.
//!
//! `journal/` holds segments `00000000.segment`, `00000001.segment`, … that only grow. Integers are
//! little-endian:
//!
//! ```text
//! segment = magic(8) ‖ run(32) ‖ number(8) ‖ chain before its first record(32) ‖ record*
//! record  = length(4) ‖ kind(1) ‖ check(3) ‖ payload(length) ‖ chain(32)
//! chain   = SHA-256 over the chain before, kind and payload
//! ```
//!
//! The chain goes through all segments from a digest of the run's id, and its head stands in the
//! manifest, so no record can be changed, dropped, added or moved. `check` is a digest of the chain
//! before, length and kind: a length that was damaged is told from a record that a crash cut short.
//! What follows the last whole record of the last segment is a torn tail, which [`Journal::recover`]
//! cuts off; damage anywhere else is refused by file and byte.
//!
//! Records are appended to a buffer and written and synced together by [`Journal::sync`], so that
//! many acknowledgements share one sync. All of it goes through a [`Folder`], so that simulations run
//! the same code on storage that loses what was not synced.

mod reader;
mod record;
mod writer;

#[cfg(test)]
mod tests;

use std::{io, path::PathBuf};

use protocol::{Digest, RunId, folder::Folder};
use serde::{Deserialize, Serialize};

pub use reader::{Entry, JournalReader, Position, read_at, read_over};
pub use record::{Commit, Record, RecordError};
pub use writer::{Journal, Recovered};

/// A segment is left for a new one before it grows over this, in bytes.
pub const SEGMENT_BYTES: u64 = 64 << 20;

/// Longest payload of a record: an episode or a lease of the largest size with what stands around it.
pub const MAX_PAYLOAD: usize = 32 << 20;

const MAGIC: [u8; 8] = *b"RCLJRNL1";
const SEGMENT_HEADER: usize = 8 + 32 + 8 + 32;
const RECORD_HEADER: usize = 4 + 1 + 3;
const CHAIN: usize = 32;

/// What a journal holds, as the manifest says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JournalRecord {
    /// Files.
    pub segments: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Records.
    pub records: u64,
    /// The chain after the last record.
    pub head: Digest,
}

/// A journal cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
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
    /// A file that is there before it should be, or a segment that is not.
    #[error("{path}: {problem}", path = .path.display())]
    Segment {
        /// Where.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// Bytes that were changed since they were written.
    #[error("{path} byte {offset}: {problem}", path = .path.display())]
    Damaged {
        /// Where.
        path: PathBuf,
        /// Where in it.
        offset: u64,
        /// What is wrong.
        problem: String,
    },
    /// The journal ends in the middle of a record, as a crash leaves it.
    #[error("{path} byte {offset}: the last record is torn ({left} bytes of it are there)", path = .path.display())]
    Torn {
        /// Where.
        path: PathBuf,
        /// Where in it the whole records end.
        offset: u64,
        /// Bytes after it.
        left: u64,
    },
    /// A record that cannot be written.
    #[error("the journal cannot take a record: {0}")]
    Record(#[from] RecordError),
}

impl JournalError {
    /// For `map_err`: `action` on `path` failed.
    fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }
}

fn genesis(run: &RunId) -> Digest {
    Digest::of_parts("rollcall-journal-v1", &[&run.0.0])
}

/// The chain after a record.
fn link(before: &Digest, kind: u8, payload: &[u8]) -> Digest {
    Digest::of_parts("rollcall-journal-record-v1", &[&before.0, &[kind], payload])
}

/// The header of a record; its check is bound to where the record stands.
fn record_header(before: &Digest, kind: u8, length: u32) -> [u8; RECORD_HEADER] {
    let [a, b, c, d] = length.to_le_bytes();
    let check =
        Digest::of_parts("rollcall-journal-header-v1", &[&before.0, &[a, b, c, d], &[kind]]);
    let [x, y, z, ..] = check.0;
    [a, b, c, d, kind, x, y, z]
}

fn segment_header(run: &RunId, number: u64, chain: &Digest) -> Vec<u8> {
    [&MAGIC[..], &run.0.0, &number.to_le_bytes(), &chain.0].concat()
}

fn segment_name(number: u64) -> String {
    format!("{number:08}.segment")
}

fn segment_path(dir: &dyn Folder, number: u64) -> PathBuf {
    dir.path().join(segment_name(number))
}
