//! What a run keeps of refused episodes.

use std::fs;

use protocol::ActorId;
use serde_json::json;

use super::{Answer, FileError, REJECTED, RunDirectory, utc_now, write_atomic};
use crate::{audit::Rejected, journal::Record};

/// Bytes of refused episodes that are kept in all. What is refused after that leaves its reason only,
/// so that a hostile actor cannot fill the disk.
const REJECTED_BYTES: u64 = 64 << 20;
/// Refusals that the manifest names one by one.
const LAST_REJECTED: usize = 100;

impl RunDirectory {
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
}
