//! The book of a learner that was started again, from what its journal says of its earlier life.

use protocol::{ActorId, EpisodeId, LeaseAttempt, LeaseId};

use super::{LeaseBook, LeaseCounts};

impl LeaseBook {
    /// A lease was granted. The grant itself ended with the learner that made it; the answer to it
    /// still counts when it comes.
    pub fn replay_grant(&mut self, actor: ActorId, LeaseAttempt { id, attempt }: LeaseAttempt) {
        if let Some(slot) = self.slot_mut(id) {
            slot.held_before(actor, attempt);
        }
    }

    /// An answer was judged: accepted, refused, or refused after it had been accepted. Returns whether
    /// the lease was there to be answered.
    pub fn replay_verdict(
        &mut self,
        actor: ActorId,
        lease: LeaseId,
        episode: EpisodeId,
        accepted: bool,
    ) -> bool {
        let Some(slot) = self.slot_mut(lease) else {
            // The verdict came after its group was given up.
            let late = !accepted && self.retired.contains(lease.group);
            self.counts.received += u64::from(late);
            self.counts.rejected += u64::from(late);
            return late;
        };
        let spent = slot.answer().filter(|_| slot.spent()).map(|answer| answer.episode);
        match spent {
            Some(_) if accepted => return false,
            Some(before) if before == episode => self.counts.accepted -= 1,
            _ => self.counts.received += 1,
        }
        if let Some(slot) = self.slot_mut(lease) {
            slot.answered_before(actor, episode, accepted);
        }
        if accepted {
            self.waiting.remove(&lease);
            self.counts.accepted += 1;
        } else {
            self.counts.rejected += 1;
            self.settle(lease);
        }
        true
    }

    /// A group counted: what came of it is committed. Returns whether it was complete.
    pub fn replay_consumed(&mut self, group: u64) -> bool {
        self.take(group).is_some() && self.confirm(group)
    }

    /// What no journal says is taken from the last commit: `committed` are its counts, without the
    /// grants that were under way then, and `answers` the answers that came since.
    pub fn replay_counts(&mut self, committed: &LeaseCounts, answers: u64) {
        let LeaseCounts {
            granted,
            submitted,
            failed,
            expired,
            duplicates,
            late,
            equivocations,
            ..
        } = *committed;
        self.counts = LeaseCounts {
            granted: granted + answers,
            submitted: submitted + answers,
            failed,
            expired,
            duplicates,
            late,
            equivocations,
            ..self.counts
        };
    }

    /// The counts as a commit keeps them: without the grants that are under way, which end with the
    /// learner.
    pub fn settled_counts(&self) -> LeaseCounts {
        let granted = self.counts.granted - self.outstanding() as u64;
        LeaseCounts { granted, ..self.counts }
    }
}
