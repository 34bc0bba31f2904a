//! Carries what the collector decides on into the run's directory and onto the screen.

use protocol::{ActorId, LeaseAttempt};
use terminal::{Failure, Progress};

use crate::{
    audit::Rejected,
    files::{Answer, FileError, RunDirectory},
    leases::GroupOrder,
};

/// Receives what the collector decides on, as it decides. What it was told before a call of
/// [`Witness::keep`] is on stable storage after it.
pub trait Witness {
    /// A group was ordered.
    ///
    /// # Errors
    /// The record of it cannot be kept; so below.
    fn ordered(&mut self, group: u64, order: &GroupOrder) -> Result<(), Failure>;

    /// Leases are about to be given to an actor.
    ///
    /// # Errors
    /// As above.
    fn granted(&mut self, actor: ActorId, leases: &[LeaseAttempt]) -> Result<(), Failure>;

    /// An episode was audited and kept.
    ///
    /// # Errors
    /// As above.
    fn accepted(&mut self, answer: &Answer<'_>) -> Result<(), Failure>;

    /// An episode was refused.
    ///
    /// # Errors
    /// As above.
    fn rejected(&mut self, answer: &Answer<'_>, rejected: &Rejected) -> Result<(), Failure>;

    /// An episode that was kept is refused after all, or one whose group was given up before its verdict.
    ///
    /// # Errors
    /// As above.
    fn taken_back(&mut self, actor: ActorId, rejected: &Rejected) -> Result<(), Failure>;

    /// A group was given up.
    ///
    /// # Errors
    /// As above.
    fn dropped(&mut self, group: u64) -> Result<(), Failure>;

    /// Leases are about to be granted, or episodes acknowledged.
    ///
    /// # Errors
    /// As above: neither may be.
    fn keep(&mut self) -> Result<(), Failure>;

    /// So many of the ordered rollouts are in.
    fn progress(&mut self, done: usize);
}

/// Writes what the collector decides on, and shows how far it is.
pub(super) struct Watcher<'a> {
    /// Where it is written; nowhere for an evaluation without a run.
    pub(super) files: Option<&'a mut RunDirectory>,
    pub(super) progress: &'a Progress,
    pub(super) position: u64,
    pub(super) what: String,
    /// Rollouts that are waited for.
    pub(super) ordered: usize,
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

    fn granted(&mut self, actor: ActorId, leases: &[LeaseAttempt]) -> Result<(), Failure> {
        self.write(|files| files.granted(actor, leases))
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

    fn progress(&mut self, done: usize) {
        // What is ahead of what is waited for counts as well.
        let ordered = self.ordered.max(done);
        self.progress.tick(self.position, &format!("{} {done}/{ordered} episodes", self.what));
    }
}
