//! `learner audit RUN`: verifies a finished or interrupted run from its directory alone.
//!
//! Nothing that the run concluded is believed. The journal holds what came in, byte for byte; from
//! that and the settings everything else is computed again and compared: leases, verdicts, scores,
//! rewards, advantages, evidence, metrics, totals. Trusted are the settings (the run's id is their
//! digest, and stands in every episode) and the base checkpoint's digest.
//!
//! What a directory cannot show by itself: that it is the directory of the run that one means. Its
//! manifest's SHA-256 is printed for that; it commits to all the rest.

mod entries;
mod episodes;
mod evaluations;
mod ledger;
mod recorded;
mod report;
mod sampling;
mod tally;
mod terms;
mod totals;

use std::path::{Path, PathBuf};

use policy::vision::PromptImages;
use protocol::{Digest, EpisodeId, Lease, LeaseId, PolicyDigest};

pub use report::{Check, CheckName, Finding, Report};
pub use sampling::{SamplingCheck, check_sampling};

use crate::{
    files::{FileError, JOURNAL, Manifest, PolicyError, PolicyStore},
    journal::{JournalError, Record, RecordError, read_at},
    recipe::Recipe,
};
use episodes::Episodes;
use ledger::Ledger;

/// The audit of a run cannot begin: a user's mistake.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// Not a run's directory.
    #[error("{path} is no run: {problem}; name the output directory of learner train", path = .path.display())]
    NoRun {
        /// What was named.
        path: PathBuf,
        /// What is missing.
        problem: String,
    },
    /// The device is not there.
    #[error("{0}")]
    Device(String),
    /// Not a checkpoint.
    #[error("--model {path}: {problem}", path = .path.display())]
    Model {
        /// What was named.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
}

/// Verifies the run in `directory`. With `model` the checkpoint there is compared too.
///
/// # Errors
/// The directory is no run's, or `model` no checkpoint's.
pub fn verify(directory: &Path, model: Option<&Path>) -> Result<Report, VerifyError> {
    let (mut report, terms) = terms::read(directory, model)?;
    if let Some(terms) = terms {
        let ledger = Ledger::read(&terms, &mut report);
        ledger.check_orders(&terms, &mut report);
        let tallies = Episodes::check(&terms, &ledger, &mut report);
        let rounds = evaluations::rounds(&ledger, &tallies);
        evaluations::given_up(&ledger, &rounds, &mut report);
        let gradients = totals::metrics(&terms, &tallies, &rounds, &mut report);
        recorded::bounds(&terms, &mut report);
        entries::unexpected(&terms, &ledger, &mut report);
        match PolicyStore::open(directory) {
            Ok(store) => {
                totals::adapters(&terms, &ledger, &store, &mut report);
                totals::update_evidence(&terms, &ledger, &store, &mut report);
            }
            Err(error) => report.fail(CheckName::Adapters, "adapter_missing", "policies", error),
        }
        totals::totals(&terms, &ledger, &tallies, &rounds, gradients, &mut report);
    }
    report.sort();
    Ok(report)
}

/// A run whose episodes can be taken out one by one, to be scored again.
#[derive(Debug)]
pub struct Archive {
    directory: PathBuf,
    manifest: Manifest,
    recipe: Recipe,
    images: Option<PromptImages>,
    ledger: Ledger,
    policies: PolicyStore,
}

/// An accepted episode and the lease that it answers.
#[derive(Clone, Debug, PartialEq)]
pub struct ArchivedEpisode {
    /// Its id.
    pub id: EpisodeId,
    /// Its lease, as it was issued.
    pub lease: Lease,
    /// What it was sampled on, in the actor's own words.
    pub device: String,
    /// Its bytes.
    pub body: Vec<u8>,
}

/// An episode or adapter cannot be taken out.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// The run's directory does not hold together; `learner audit` says where.
    #[error("{} cannot be read as a run: {}", .0.display(), .1)]
    Run(PathBuf, String),
    /// No such accepted episode.
    #[error("episode {0} is not among the run's accepted episodes")]
    Unknown(EpisodeId),
    /// The journal.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// A record of the journal.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The archive of adapters.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// A file of the run.
    #[error(transparent)]
    File(#[from] FileError),
}

impl Archive {
    /// Opens a run's archive.
    ///
    /// # Errors
    /// The run's directory does not hold together that far.
    pub fn open(directory: &Path) -> Result<Self, ArchiveError> {
        let broken = |problem: String| ArchiveError::Run(directory.to_owned(), problem);
        let (mut report, terms) =
            terms::read(directory, None).map_err(|error| broken(error.to_string()))?;
        let terms = terms.ok_or_else(|| broken(report.summary()))?;
        let ledger = Ledger::read(&terms, &mut report);
        if !report.holds {
            return Err(broken(report.summary()));
        }
        Ok(Self {
            directory: directory.to_owned(),
            manifest: terms.manifest,
            images: terms.auditor.terms().images.clone(),
            recipe: terms.recipe,
            ledger,
            policies: PolicyStore::open(directory)?,
        })
    }

    /// The run's manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The run's recipe; of what it froze only the digests are known.
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// What the run's checkpoint makes of images, where its episodes show some.
    pub fn images(&self) -> Option<&PromptImages> {
        self.images.as_ref()
    }

    /// Accepted episodes, by id.
    pub fn episodes(&self) -> Vec<EpisodeId> {
        let mut ids: Vec<EpisodeId> = self.ledger.accepted.keys().copied().collect();
        ids.sort_unstable();
        ids
    }

    /// `count` accepted episodes, or all where there are fewer: the choice is that of `seed` alone.
    pub fn choose(&self, count: usize, seed: u64) -> Vec<EpisodeId> {
        let rank = |id: &EpisodeId| {
            Digest::of_parts("rollcall-audit-choice-v1", &[&seed.to_le_bytes(), &id.0.0])
        };
        let mut ids = self.episodes();
        ids.sort_by_cached_key(rank);
        ids.truncate(count);
        ids
    }

    /// The lease of an accepted episode, without reading its bytes.
    pub fn lease_of(&self, id: &EpisodeId) -> Option<LeaseId> {
        self.ledger.accepted.get(id).map(|it| it.lease)
    }

    /// Takes an episode out.
    ///
    /// # Errors
    /// There is no such accepted episode, or the journal cannot be read.
    pub fn episode(&self, id: &EpisodeId) -> Result<ArchivedEpisode, ArchiveError> {
        let accepted = self.ledger.accepted.get(id).ok_or(ArchiveError::Unknown(*id))?;
        let entry = read_at(&self.directory.join(JOURNAL), self.ledger.run, accepted.position)?;
        match entry.record()? {
            Record::Accepted { attempt, device, body, .. } => {
                let lease = self.ledger.lease(accepted.lease, attempt);
                let lease = lease.ok_or(ArchiveError::Unknown(*id))?;
                Ok(ArchivedEpisode { id: *id, lease, device: device.into(), body: body.to_vec() })
            }
            _ => Err(ArchiveError::Unknown(*id)),
        }
    }

    /// The adapter of a policy that played, verified.
    ///
    /// # Errors
    /// It was not archived, or is not what it should be.
    pub fn adapter_bytes(&self, policy: &PolicyDigest) -> Result<Vec<u8>, ArchiveError> {
        Ok(self.policies.adapter_bytes(policy)?)
    }
}
