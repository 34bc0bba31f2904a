//! What a run keeps of refused episodes.

use std::fs;

use protocol::{ActorId, LeaseId};
use serde_json::{Value, json};

use super::{Answer, FileError, REJECTED, RunDirectory, utc_now, write_atomic};
use crate::{audit::Rejected, journal::Record, train::replay::LateRefusal};

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
        write_atomic(&path, format!("{record:#}\n").as_bytes(), true)?;
        self.last_refused = Some(rejected.id);
        self.count_rejected(code, rejected.lease, message);
        self.write_manifest(true)
    }

    fn count_rejected(&mut self, code: &str, lease: Option<LeaseId>, message: String) {
        self.progress.task_coverage.rejected_rollouts += 1;
        *self.progress.rejections.entry(code.to_owned()).or_default() += 1;
        if self.progress.last_rejected.len() == LAST_REJECTED {
            self.progress.last_rejected.remove(0);
        }
        self.progress.last_rejected.push((lease, message));
    }

    /// Counts an episode that was refused after the last commit, and sees to its file, which a crash may
    /// have taken.
    pub(super) fn refused_before(&mut self, refusal: &LateRefusal) -> Result<(), FileError> {
        let LateRefusal { id, lease, reason, kept } = refusal;
        self.progress.task_coverage.rejected_bytes += kept.unwrap_or_default();
        let path = self.path.join(REJECTED).join(format!("{id}.json"));
        let written = fs::read(&path).ok().and_then(|text| serde_json::from_slice(&text).ok());
        let written: Value = written.unwrap_or_default();
        let message = match written.get("message").and_then(Value::as_str) {
            Some(message) if written.get("reason").and_then(Value::as_str) == Some(reason) => {
                message.to_owned()
            }
            _ => {
                let directory = self.path.join(REJECTED);
                fs::create_dir_all(&directory).map_err(FileError::io("create", &directory))?;
                let record = json!({
                    "episode_id": id,
                    "lease": lease,
                    "reason": reason,
                    "message": "a crash took what was written about it; its bytes are in the journal",
                });
                write_atomic(&path, format!("{record:#}\n").as_bytes(), true)?;
                reason.clone()
            }
        };
        self.count_rejected(reason, Some(*lease), message);
        Ok(())
    }
}
