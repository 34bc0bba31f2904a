//! The adapters that played, so that episodes of any step can be scored again under the policy that
//! sampled them.
//!
//! `policies/<policy>.safetensors` is an adapter's broadcast bytes under the digest of the policy that
//! it makes with the run's base weights: the name says what the bytes must be.

use std::{
    fs,
    path::{Path, PathBuf},
};

use protocol::{Digest, PolicyDigest};

use super::{FileError, read_manifest, write_atomic};

const POLICIES: &str = "policies";

/// The archive of a run's adapters.
#[derive(Clone, Debug)]
pub struct PolicyStore {
    run: PathBuf,
    base: Digest,
    /// Adapters that lie elsewhere in the run: where and of what policy.
    saved: Vec<(PolicyDigest, PathBuf)>,
}

/// An adapter cannot be had from a run's directory.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// It was never archived, or is gone.
    #[error(
        "policy {0} is not in the run's policies/: evidence.archive_mib of its recipe bounds what is \
         kept"
    )]
    Missing(PolicyDigest),
    /// The file is not what its name says.
    #[error("{path}: these bytes make policy {found}, not {wanted}", path = .path.display())]
    Other {
        /// Where.
        path: PathBuf,
        /// The policy asked for.
        wanted: PolicyDigest,
        /// The policy that the bytes make.
        found: PolicyDigest,
    },
    /// A file of the run cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
}

impl PolicyStore {
    /// The archive of a finished run, read from its directory.
    ///
    /// # Errors
    /// The run has no manifest.
    pub fn open(run: &Path) -> Result<Self, FileError> {
        let manifest = read_manifest(run)?;
        let base = manifest.model.weights_sha256;
        let adapters = manifest.progress.map(|it| it.adapters).unwrap_or_default();
        let saved = adapters.into_iter().map(|it| {
            (PolicyDigest::new(&base, &it.sha256), it.path.join("adapter_model.safetensors"))
        });
        Ok(Self { run: run.to_owned(), base, saved: saved.collect() })
    }

    /// The empty archive of a run that starts.
    pub(super) fn create(run: &Path, base: Digest) -> Result<Self, FileError> {
        let dir = run.join(POLICIES);
        fs::create_dir(&dir).map_err(FileError::io("create", &dir))?;
        Ok(Self::of(run, base))
    }

    /// The archive of a run that goes on.
    pub(super) fn of(run: &Path, base: Digest) -> Self {
        Self { run: run.to_owned(), base, saved: Vec::new() }
    }

    /// Where the adapter of a policy is archived.
    pub fn path(&self, policy: &PolicyDigest) -> PathBuf {
        self.run.join(POLICIES).join(format!("{policy}.safetensors"))
    }

    /// Whether the adapter of a policy is archived.
    pub fn holds(&self, policy: &PolicyDigest) -> bool {
        self.path(policy).is_file()
    }

    /// Archives an adapter; it survives a crash from here on.
    pub(super) fn archive(&self, policy: &PolicyDigest, bytes: &[u8]) -> Result<(), FileError> {
        write_atomic(&self.path(policy), bytes, true)
    }

    /// The adapter of a policy as it was broadcast (`adapter_model.safetensors`), verified.
    ///
    /// # Errors
    /// It is not in the run's directory, or is not what it should be.
    pub fn adapter_bytes(&self, policy: &PolicyDigest) -> Result<Vec<u8>, PolicyError> {
        let archived = self.path(policy);
        let saved = self.saved.iter().find(|(it, _)| it == policy);
        let path = match saved {
            Some((_, path)) if !archived.is_file() => self.run.join(path),
            _ => archived,
        };
        let bytes = fs::read(&path).map_err(|source| match source.kind() {
            std::io::ErrorKind::NotFound => PolicyError::Missing(*policy),
            _ => FileError::io("read", &path)(source).into(),
        })?;
        let found = PolicyDigest::new(&self.base, &Digest::of(&bytes));
        if found == *policy {
            Ok(bytes)
        } else {
            Err(PolicyError::Other { path, wanted: *policy, found })
        }
    }
}
