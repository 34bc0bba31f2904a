//! Carries what the collector decides on into the run's directory and onto the screen.

use protocol::ActorId;
use terminal::{Failure, Progress};

use super::collect::Witness;
use crate::{
    audit::Rejected,
    files::{Answer, FileError, RunDirectory},
    leases::GroupOrder,
};

/// Writes what the collector decides on, and shows how far it is.
pub(super) struct Watcher<'a> {
    /// Where it is written; nowhere for an evaluation without a run.
    pub(super) files: Option<&'a mut RunDirectory>,
    pub(super) progress: &'a Progress,
    pub(super) position: u64,
    pub(super) what: String,
}

impl Watcher<'_> {
    fn write(
        &mut self,
        record: impl FnOnce(&mut RunDirectory) -> Result<(), FileError>,
    ) -> Result<(), Failure> {
        self.files.as_deref_mut().map_or(Ok(()), record).map_err(Failure::fault)
    }
}

impl Witness for Watcher<'_> {
    fn ordered(&mut self, group: u64, order: &GroupOrder) -> Result<(), Failure> {
        self.write(|files| files.ordered(group, order))
    }

    fn accepted(&mut self, answer: &Answer<'_>) -> Result<(), Failure> {
        self.write(|files| files.accept(answer))
    }

    fn rejected(&mut self, answer: &Answer<'_>, rejected: &Rejected) -> Result<(), Failure> {
        self.write(|files| files.reject(answer, rejected))
    }

    fn taken_back(&mut self, actor: ActorId, rejected: &Rejected) -> Result<(), Failure> {
        self.write(|files| files.take_back(actor, rejected))
    }

    fn dropped(&mut self, group: u64) -> Result<(), Failure> {
        self.write(|files| files.dropped(group))
    }

    fn keep(&mut self) -> Result<(), Failure> {
        self.write(RunDirectory::keep)
    }

    fn progress(&mut self, done: usize, ordered: usize) {
        self.progress.tick(self.position, &format!("{} {done}/{ordered} episodes", self.what));
    }
}
