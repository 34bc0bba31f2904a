//! Where every answer is: two sums that hold at any time, and are shown when a run ends.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::LeaseBook;

/// Where the unique answers of a run are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Balance {
    /// Answers that were the first of their lease.
    pub received_unique: u64,
    /// Of these, the audited and kept.
    pub accepted: u64,
    /// Of these, the refused.
    pub rejected: u64,
    /// Of these, the ones whose verdict is out.
    pub pending: u64,
    /// Accepted answers that were trained on or evaluated.
    pub consumed: u64,
    /// Accepted answers that were too old when their turn came.
    pub dropped_stale: u64,
    /// Accepted answers of groups that could not be completed.
    pub given_up: u64,
    /// Accepted answers that wait for their turn.
    pub ready: u64,
}

impl Balance {
    /// Whether both sums hold.
    pub fn holds(&self) -> bool {
        self.received_unique == self.accepted + self.rejected + self.pending
            && self.accepted == self.consumed + self.dropped_stale + self.given_up + self.ready
    }
}

impl fmt::Display for Balance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { received_unique, accepted, rejected, pending, .. } = self;
        let Self { consumed, dropped_stale, given_up, ready, .. } = self;
        write!(f, "{received_unique} received = {accepted} accepted + {rejected} rejected + ")?;
        write!(f, "{pending} pending; {accepted} accepted = {consumed} consumed + ")?;
        write!(f, "{dropped_stale} stale + {given_up} given up + {ready} ready")
    }
}

impl LeaseBook {
    /// Where every answer is: what was counted, beside what the book holds.
    pub fn balance(&self) -> Balance {
        let slots = || self.groups.values().chain(self.taken.values()).flat_map(|it| it.slots());
        let pending = slots().filter(|(_, slot)| slot.pending().is_some()).count();
        let ready = slots().filter(|(_, slot)| slot.spent()).count();
        let counts = self.counts;
        Balance {
            received_unique: counts.received,
            accepted: counts.accepted,
            rejected: counts.rejected,
            pending: (pending + self.retired.pending()) as u64,
            consumed: counts.consumed,
            dropped_stale: counts.dropped_stale,
            given_up: counts.given_up,
            ready: ready as u64,
        }
    }
}
