//! Rung 2: the episode answers a lease of this run that waits for an answer, with the task, seed and
//! policy that the learner chose, and the policy is not too old.

use protocol::{Episode, Lease};

use super::{AuditTerms, Reason};
use crate::leases::Standing;

pub(super) fn check<'a>(
    terms: &AuditTerms,
    episode: &Episode,
    standing: &'a Standing,
    behind: u64,
) -> Result<&'a Lease, Reason> {
    if episode.run != terms.run {
        return Err(Reason::RunMismatch);
    }
    let lease = match standing {
        Standing::Unknown => return Err(Reason::LeaseUnknown { lease: episode.lease }),
        Standing::Spent => return Err(Reason::LeaseSpent { lease: episode.lease }),
        Standing::Open(lease) => lease.as_ref(),
    };
    if episode.lease != lease.id || lease.run != terms.run {
        return Err(Reason::LeaseMismatch { expected: lease.id, found: episode.lease });
    }
    if episode.task != lease.task.id {
        return Err(Reason::TaskMismatch {
            expected: lease.task.id.clone(),
            found: episode.task.clone(),
        });
    }
    if episode.seed != lease.seed {
        return Err(Reason::SeedMismatch { expected: lease.seed, found: episode.seed });
    }
    if episode.policy != lease.policy {
        return Err(Reason::PolicyMismatch { expected: lease.policy, found: episode.policy });
    }
    if behind > terms.max_staleness {
        return Err(Reason::StalePolicy { behind, bound: terms.max_staleness });
    }
    Ok(lease)
}
