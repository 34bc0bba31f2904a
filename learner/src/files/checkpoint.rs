//! `checkpoint/`: what a run goes on from after a crash.
//!
//! `checkpoint/<number>.checkpoint` is written whole, synced and renamed before the journal's record of
//! the commit with this number, and removed when the next commit is on stable storage: whatever the
//! last such record is, its checkpoint is there. Integers are little-endian:
//!
//! ```text
//! magic(8) ‖ length of the header(8) ‖ header ‖ parts, one after the other
//! header = {"parts": [{"name", "bytes", "sha256"}, …], "state": …}
//! ```
//!
//! The record holds the header's SHA-256, and the header those of the parts.

use std::{
    io::{self, Read as _},
    path::PathBuf,
    sync::Arc,
};

use protocol::{
    Digest,
    folder::{self, Folder, PARTIAL},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::FileError;

const MAGIC: [u8; 8] = *b"RCLCHKP1";
/// Longest header, in bytes.
const MAX_HEADER: u64 = 256 << 20;
/// Longest part, in bytes.
const MAX_PART: u64 = 64 << 30;
const ENDING: &str = ".checkpoint";

/// Named bytes.
pub type Part<'a> = (&'a str, &'a [u8]);

#[derive(Serialize, Deserialize)]
struct PartHeader {
    name: String,
    bytes: u64,
    sha256: Digest,
}

#[derive(Serialize, Deserialize)]
struct Header<S> {
    parts: Vec<PartHeader>,
    state: S,
}

/// A checkpoint that was read.
#[derive(Clone, Debug)]
pub struct Checkpoint<S> {
    /// Counters and what else is small.
    pub state: S,
    parts: Vec<(String, Vec<u8>)>,
}

impl<S> Checkpoint<S> {
    /// The bytes of a part.
    pub fn part(&self, name: &str) -> Option<&[u8]> {
        self.parts.iter().find(|(it, _)| it == name).map(|(_, bytes)| bytes.as_slice())
    }
}

/// The folder of a run's checkpoints.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    folder: Arc<dyn Folder>,
}

impl Checkpoints {
    /// In this folder.
    pub fn new(folder: Arc<dyn Folder>) -> Self {
        Self { folder }
    }

    /// The file of a commit's checkpoint.
    pub fn file(number: u64) -> String {
        format!("{number:08}{ENDING}")
    }

    fn path(&self, number: u64) -> PathBuf {
        self.folder.path().join(Self::file(number))
    }

    /// Writes a checkpoint; it survives a crash from here on. Returns its digest, for the journal.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write(
        &self,
        number: u64,
        state: &impl Serialize,
        parts: &[Part<'_>],
    ) -> Result<Digest, FileError> {
        let path = self.path(number);
        let header = Header {
            parts: parts
                .iter()
                .map(|(name, bytes)| PartHeader {
                    name: (*name).to_owned(),
                    bytes: bytes.len() as u64,
                    sha256: Digest::of(bytes),
                })
                .collect(),
            state,
        };
        let header = serde_json::to_vec(&header)
            .map_err(|source| FileError::Json { path: path.clone(), source })?;
        let length = (header.len() as u64).to_le_bytes();
        let mut all: Vec<&[u8]> = vec![&MAGIC, &length, &header];
        all.extend(parts.iter().map(|(_, bytes)| *bytes));
        folder::replace(self.folder.as_ref(), &Self::file(number), &all)
            .map_err(FileError::io("write", path))?;
        Ok(Digest::of(&header))
    }

    /// Reads the checkpoint of a commit whose record has this digest.
    ///
    /// # Errors
    /// It is not there, or not what was written.
    pub fn read<S: DeserializeOwned>(
        &self,
        number: u64,
        digest: Digest,
    ) -> Result<Checkpoint<S>, FileError> {
        let path = self.path(number);
        let damaged = |problem: String| FileError::Damaged {
            path: path.clone(),
            line: None,
            problem: format!("{problem}: the checkpoint cannot be gone on from"),
        };
        let (mut file, length) = match self.folder.open(&Self::file(number)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(damaged(
                    "it is not there, and the last commit of the journal names it".into(),
                ));
            }
            opened => opened.map_err(FileError::io("open", &path))?,
        };
        let mut left = length;
        let mut take = |wanted: u64| -> Result<Vec<u8>, FileError> {
            if wanted > left {
                return Err(damaged("the file is cut short".into()));
            }
            left -= wanted;
            let mut bytes = Vec::new();
            let read = io::Read::by_ref(&mut file).take(wanted).read_to_end(&mut bytes);
            read.map_err(FileError::io("read", &path))?;
            Ok(bytes)
        };
        if take(MAGIC.len() as u64)? != MAGIC {
            return Err(damaged("not a checkpoint of this release".into()));
        }
        let size: [u8; 8] = take(8)?.try_into().unwrap_or_default();
        let size = u64::from_le_bytes(size);
        if size > MAX_HEADER {
            return Err(damaged(format!("a header of {size} bytes")));
        }
        let header = take(size)?;
        if Digest::of(&header) != digest {
            return Err(damaged("it is not the one that the journal speaks of".into()));
        }
        let header: Header<S> =
            serde_json::from_slice(&header).map_err(|error| damaged(error.to_string()))?;
        let mut parts = Vec::with_capacity(header.parts.len());
        for PartHeader { name, bytes, sha256 } in header.parts {
            if bytes > MAX_PART {
                return Err(damaged(format!("{name} of {bytes} bytes")));
            }
            let found = take(bytes)?;
            if Digest::of(&found) != sha256 {
                return Err(damaged(format!("{name} was changed")));
            }
            parts.push((name, found));
        }
        if left > 0 {
            return Err(damaged(format!("{left} bytes follow it")));
        }
        Ok(Checkpoint { state: header.state, parts })
    }

    /// Removes every checkpoint but that of this commit, and what was written in part.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn keep_only(&self, number: u64) -> Result<(), FileError> {
        let kept = Self::file(number);
        let names = self.folder.list().map_err(FileError::io("read", self.folder.path()))?;
        for name in names {
            let ours = name.ends_with(ENDING) || name.ends_with(&format!("{ENDING}{PARTIAL}"));
            if ours && name != kept {
                self.folder.remove(&name).map_err(|source| {
                    FileError::io("remove", self.folder.path().join(&name))(source)
                })?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use protocol::folder::Disk;

    use super::*;

    #[test]
    fn what_was_written_comes_back_and_anything_else_is_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let checkpoints = Checkpoints::new(Disk::at(dir.path()));
        let parts: [Part<'_>; 2] = [("adapter", b"weights"), ("optimizer", b"")];
        let state = serde_json::json!({"step": 3, "loss": 0.1 + 0.2});
        let digest = checkpoints.write(7, &state, &parts).expect("written");
        let read = || checkpoints.read::<serde_json::Value>(7, digest);
        let found = read().expect("read");
        assert_eq!(found.state, state);
        assert_eq!(found.part("adapter"), Some(&b"weights"[..]));
        assert_eq!((found.part("optimizer"), found.part("head")), (Some(&b""[..]), None));
        let path = dir.path().join("00000007.checkpoint");
        let whole = fs::read(&path).expect("read");
        for at in 0..whole.len() {
            let mut flipped = whole.clone();
            flipped[at] ^= 1;
            fs::write(&path, flipped).expect("written");
            assert!(read().is_err(), "byte {at}");
            fs::write(&path, &whole[..at]).expect("written");
            assert!(read().is_err(), "cut at {at}");
        }
        fs::write(&path, [&whole[..], b"x"].concat()).expect("written");
        assert!(read().expect_err("longer").to_string().contains("1 bytes follow it"));
        fs::write(&path, whole).expect("written");
        fs::write(dir.path().join("00000008.checkpoint.partial"), "torn").expect("written");
        checkpoints.write(6, &state, &[]).expect("written");
        checkpoints.keep_only(7).expect("removed");
        assert_eq!(fs::read_dir(dir.path()).expect("listed").count(), 1);
        read().expect("still there");
    }
}
