//! A witness that also counts for operators: what the audit refuses, and how long a sync takes.

use std::time::Instant;

use protocol::{ActorId, LeaseAttempt};
use terminal::Failure;

use super::watcher::Witness;
use crate::{audit::Rejected, files::Answer, leases::GroupOrder, metrics::Metrics};

/// Passes everything on.
pub(super) struct Measured<'a> {
    pub(super) witness: &'a mut dyn Witness,
    pub(super) metrics: Metrics,
}

impl Witness for Measured<'_> {
    fn ordered(&mut self, group: u64, order: &GroupOrder) -> Result<(), Failure> {
        self.witness.ordered(group, order)
    }

    fn granted(&mut self, actor: ActorId, leases: &[LeaseAttempt]) -> Result<(), Failure> {
        self.witness.granted(actor, leases)
    }

    fn accepted(&mut self, answer: &Answer<'_>) -> Result<(), Failure> {
        self.witness.accepted(answer)
    }

    fn rejected(&mut self, answer: &Answer<'_>, rejected: &Rejected) -> Result<(), Failure> {
        self.metrics.rejected(rejected.reason.rung().name());
        self.witness.rejected(answer, rejected)
    }

    fn taken_back(&mut self, actor: ActorId, rejected: &Rejected) -> Result<(), Failure> {
        self.metrics.rejected(rejected.reason.rung().name());
        self.witness.taken_back(actor, rejected)
    }

    fn dropped(&mut self, group: u64) -> Result<(), Failure> {
        self.witness.dropped(group)
    }

    fn keep(&mut self) -> Result<(), Failure> {
        let began = Instant::now();
        self.witness.keep()?;
        self.metrics.synced(began.elapsed());
        Ok(())
    }

    fn progress(&mut self, done: usize) {
        self.witness.progress(done);
    }
}
