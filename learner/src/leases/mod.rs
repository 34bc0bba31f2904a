//! The lease book: what was asked of whom, and what became of it.
//!
//! No sockets, no clock: calls say what happened and when (milliseconds of the caller's monotonic
//! clock), and the same calls give the same answers. A **lease** is one rollout slot of a group. It is
//! **granted** to an actor, perhaps several times; every grant ends submitted, failed or expired, and
//! [`LeaseCounts`] holds all three, so that at any time
//!
//! ```text
//! granted  = submitted + failed + expired + outstanding
//! received = accepted + rejected + pending                         (unique answers)
//! accepted = consumed + dropped_stale + given_up + ready           (see [`Balance`])
//! ```
//!
//! The first answer to a lease is the one that counts, also when it comes late, from a grant that had
//! expired: a lease gives the same episode wherever it is played, up to floating point. A second,
//! different answer never counts. From another actor it is a [`Submission::Late`] duplicate of work;
//! from the same actor it is a [`Submission::Equivocation`].

mod balance;
mod group;
mod replay;
mod retired;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use protocol::{ActorId, EpisodeId, Lease, LeaseAttempt, LeaseId, PolicyDigest, RunId};
use serde::{Deserialize, Serialize};

use group::{Grant, Group, Slot};
use retired::Retired;

pub use balance::Balance;
pub use group::GroupOrder;

/// What happened to leases so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseCounts {
    /// Times that a lease was given to an actor.
    pub granted: u64,
    /// Grants that ended with an answer, counted or not.
    pub submitted: u64,
    /// Grants that the actor gave back, could not play, or lost by leaving.
    pub failed: u64,
    /// Grants that ran out of time.
    pub expired: u64,
    /// Answers that were the first of their lease.
    pub received: u64,
    /// Of these, the audited and kept.
    pub accepted: u64,
    /// Of these, the refused.
    pub rejected: u64,
    /// Answers that came again.
    pub duplicates: u64,
    /// Different answers to an answered lease by another actor.
    pub late: u64,
    /// Different answers to one lease by one actor.
    pub equivocations: u64,
    /// Groups whose every rollout was accepted.
    pub groups_completed: u64,
    /// Groups that were dropped whole.
    pub groups_dropped: u64,
    /// Accepted answers that were trained on or evaluated.
    #[serde(default)]
    pub consumed: u64,
    /// Accepted answers that were too old when their turn came.
    #[serde(default)]
    pub dropped_stale: u64,
    /// Accepted answers of groups that could not be completed.
    #[serde(default)]
    pub given_up: u64,
}

/// What an answer to a lease is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Submission {
    /// The first: audit it, then [`accept`](LeaseBook::accept) or [`reject`](LeaseBook::reject) it.
    First,
    /// The same answer again. Nothing to do but to acknowledge it.
    Duplicate,
    /// Another answer, and the lease has one already.
    Late,
    /// Another answer by the actor whose answer the lease has already.
    Equivocation {
        /// The answer that the lease has.
        first: EpisodeId,
    },
    /// The lease was never granted to this actor.
    NotGranted,
    /// No such lease was ever issued.
    Unknown,
}

/// A group whose every rollout was accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompleteGroup {
    /// Which.
    pub group: u64,
    /// Its episodes, by generation.
    pub episodes: Vec<EpisodeId>,
    /// Who played them.
    pub actors: Vec<ActorId>,
    /// How many rollouts were ordered.
    pub generations: u32,
    /// Grants that are still outstanding, as another actor's late answer was the first: to be revoked.
    pub revoke: Vec<(ActorId, LeaseAttempt)>,
}

/// A group that cannot be completed and was dropped whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DroppedGroup {
    /// Which.
    pub group: u64,
    /// Grants that are still outstanding: to be revoked.
    pub revoke: Vec<(ActorId, LeaseAttempt)>,
    /// Accepted episodes that will not be used.
    pub unused: Vec<EpisodeId>,
}

/// The lease book could not take an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LeaseError {
    /// The group's number was used before.
    #[error("group {0} was opened before: every group has a number of its own")]
    Reopened(u64),
    /// A group without rollouts.
    #[error("group {0} has no rollouts")]
    Empty(u64),
}

/// Where a lease stands, for the audit.
#[derive(Clone, Debug, PartialEq)]
pub enum Standing {
    /// It waits for an answer, or its first answer is being audited.
    Open(Box<Lease>),
    /// It has its answer, or its group is over.
    Spent,
    /// It was never issued.
    Unknown,
}

/// All leases of a run.
#[derive(Debug)]
pub struct LeaseBook {
    run: RunId,
    max_attempts: u32,
    groups: BTreeMap<u64, Group>,
    /// Complete groups of which it is not settled yet that they count.
    taken: BTreeMap<u64, Group>,
    waiting: BTreeSet<LeaseId>,
    retired: Retired,
    counts: LeaseCounts,
}

impl LeaseBook {
    /// An empty book. A lease may fail, expire or be refused `max_attempts` times (at least once), and be
    /// lost with its actor eight times as often.
    pub fn new(run: RunId, max_attempts: u32) -> Self {
        Self {
            run,
            max_attempts: max_attempts.max(1),
            groups: BTreeMap::new(),
            taken: BTreeMap::new(),
            waiting: BTreeSet::new(),
            retired: Retired::default(),
            counts: LeaseCounts::default(),
        }
    }

    /// What happened so far.
    pub fn counts(&self) -> LeaseCounts {
        self.counts
    }

    /// Leases that wait to be granted.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Grants that no end was seen of.
    pub fn outstanding(&self) -> usize {
        self.slots().filter(|(_, slot)| slot.grant().is_some()).count()
    }

    /// Groups that are neither taken nor dropped.
    pub fn open_groups(&self) -> usize {
        self.groups.len()
    }

    /// Their numbers.
    pub fn open_numbers(&self) -> Vec<u64> {
        self.groups.keys().copied().collect()
    }

    /// Opens a group: its leases wait to be granted.
    ///
    /// # Errors
    /// The number was used before, or the group is empty.
    pub fn open(&mut self, group: u64, order: GroupOrder) -> Result<(), LeaseError> {
        if order.generations == 0 {
            return Err(LeaseError::Empty(group));
        }
        if self.knows(group) {
            return Err(LeaseError::Reopened(group));
        }
        let leases = (0..order.generations).map(|generation| LeaseId { group, generation });
        self.waiting.extend(leases);
        self.groups.insert(group, Group::new(order));
        Ok(())
    }

    /// Grants up to `at_most` waiting leases, the oldest groups first and the leases of a group
    /// together.
    pub fn grant(&mut self, actor: ActorId, now_ms: u64, at_most: usize) -> Vec<Lease> {
        let chosen: Vec<LeaseId> = self.waiting.iter().take(at_most).copied().collect();
        let mut leases = Vec::with_capacity(chosen.len());
        for id in chosen {
            self.waiting.remove(&id);
            let Some(group) = self.groups.get_mut(&id.group) else { continue };
            if let Some(lease) = group.grant(self.run, id, actor, now_ms) {
                self.counts.granted += 1;
                leases.push(lease);
            }
        }
        leases
    }

    /// When the next grant runs out, if any is outstanding.
    pub fn next_deadline(&self) -> Option<u64> {
        self.slots().filter_map(|(_, slot)| slot.grant().map(|grant| grant.deadline_ms)).min()
    }

    /// Ends the grants that have run out of time. Their leases wait again, unless they were granted as
    /// often as allowed.
    pub fn expire(&mut self, now_ms: u64) -> Vec<(ActorId, LeaseAttempt)> {
        let over = self.end_grants(true, |_, grant| grant.deadline_ms <= now_ms);
        self.counts.expired += over.len() as u64;
        over
    }

    /// Ends every grant of an actor that has left.
    pub fn release(&mut self, actor: ActorId) -> Vec<LeaseAttempt> {
        let over = self.end_grants(false, |_, grant| grant.actor == actor);
        self.counts.failed += over.len() as u64;
        over.into_iter().map(|(_, attempt)| attempt).collect()
    }

    /// Ends one grant that its actor could not play. Anything but the actor's outstanding grant is
    /// ignored; returns whether it was that.
    pub fn fail(&mut self, actor: ActorId, attempt: LeaseAttempt) -> bool {
        let over = self.end_grants(true, |at, grant| at == attempt && grant.actor == actor);
        self.counts.failed += over.len() as u64;
        !over.is_empty()
    }

    /// An answer came. Whatever it is, the actor's grant of that lease has ended.
    pub fn submit(&mut self, actor: ActorId, lease: LeaseId, episode: EpisodeId) -> Submission {
        let submission = match self.slot_mut(lease) {
            None => self.retired.submission(lease, actor, episode),
            Some(slot) => {
                let holds = slot.end_grant(actor);
                let submission = slot.submit(actor, holds, episode);
                self.counts.submitted += u64::from(holds);
                self.waiting.remove(&lease);
                self.settle(lease);
                submission
            }
        };
        match submission {
            Submission::First => self.counts.received += 1,
            Submission::Duplicate => self.counts.duplicates += 1,
            Submission::Late => self.counts.late += 1,
            Submission::Equivocation { .. } => self.counts.equivocations += 1,
            Submission::NotGranted | Submission::Unknown => {}
        }
        submission
    }

    /// The audit accepted the answer to a lease. Returns whether there was one to accept.
    pub fn accept(&mut self, lease: LeaseId) -> bool {
        let accepted = self.slot_mut(lease).is_some_and(Slot::accept);
        self.counts.accepted += u64::from(accepted);
        accepted
    }

    /// The answer to a lease does not count. The lease waits again, unless it was granted as often as
    /// allowed or its group is over. Returns whether there was one to refuse.
    pub fn reject(&mut self, lease: LeaseId) -> bool {
        let rejected = match self.slot_mut(lease) {
            Some(slot) => slot.reject(),
            None => self.retired.judged(lease),
        };
        if rejected {
            self.counts.rejected += 1;
            self.settle(lease);
        }
        rejected
    }

    /// Takes the oldest group whose every rollout was accepted. It is over once it is
    /// [confirmed](Self::confirm); until then it can be [opened again](Self::reopen).
    pub fn take_complete(&mut self) -> Option<CompleteGroup> {
        let (&group, _) = self.groups.iter().find(|(_, group)| group.complete())?;
        self.take(group)
    }

    /// Takes this group, if its every rollout was accepted; as [`Self::take_complete`].
    pub fn take(&mut self, group: u64) -> Option<CompleteGroup> {
        if !self.groups.get(&group)?.complete() {
            return None;
        }
        let mut taken = self.groups.remove(&group)?;
        let revoke = taken.grants(group);
        self.counts.failed += revoke.len() as u64;
        taken.end_grants();
        let (episodes, actors) = taken.accepted().into_iter().unzip();
        let generations = taken.order().generations;
        self.taken.insert(group, taken);
        Some(CompleteGroup { group, episodes, actors, generations, revoke })
    }

    /// A taken group counts: nothing about it changes any more. Returns whether it was taken.
    pub fn confirm(&mut self, group: u64) -> bool {
        let Some(over) = self.taken.remove(&group) else { return false };
        self.counts.groups_completed += 1;
        self.counts.consumed += over.accepted().len() as u64;
        self.retired.add(group, &over);
        true
    }

    /// A taken group is too old to count. Returns whether it was taken.
    pub fn drop_stale(&mut self, group: u64) -> bool {
        let Some(over) = self.taken.remove(&group) else { return false };
        self.counts.groups_dropped += 1;
        self.counts.dropped_stale += over.accepted().len() as u64;
        self.retired.add(group, &over);
        true
    }

    /// Whether a group is neither taken nor over.
    pub fn is_open(&self, group: u64) -> bool {
        self.groups.contains_key(&group)
    }

    /// Whether a group was opened, now or before.
    pub fn knows(&self, group: u64) -> bool {
        self.is_open(group) || self.taken.contains_key(&group) || self.retired.contains(group)
    }

    /// Whether an answer waits for its verdict.
    pub fn is_pending(&self, lease: LeaseId, episode: EpisodeId) -> bool {
        match self.slot(lease) {
            Some(slot) => slot.pending().is_some_and(|answer| answer.episode == episode),
            None => self.retired.is_pending(lease, episode),
        }
    }

    /// The policy that plays a group which is not over.
    pub fn policy(&self, group: u64) -> Option<PolicyDigest> {
        let open = self.groups.get(&group).or(self.taken.get(&group));
        open.map(|group| group.order().policy)
    }

    /// The policies of groups that are open.
    pub fn policies(&self) -> BTreeSet<PolicyDigest> {
        self.groups.values().map(|group| group.order().policy).collect()
    }

    /// A lease of a group that is not over, as its latest issue.
    pub fn lease(&self, id: LeaseId) -> Option<Lease> {
        let group = self.groups.get(&id.group).or(self.taken.get(&id.group))?;
        let slot = group.slot(id.generation)?;
        Some(group.lease(self.run, id, slot.last_attempt()))
    }

    /// Answers of a taken group turn out not to count: their leases wait again, unless they were
    /// granted as often as allowed. Returns how many answers that took back.
    pub fn reopen(&mut self, group: u64, generations: &[u32]) -> usize {
        let Some(taken) = self.taken.remove(&group) else { return 0 };
        self.groups.insert(group, taken);
        let mut refused = 0;
        for &generation in generations {
            let lease = LeaseId { group, generation };
            if self.slot_mut(lease).is_some_and(Slot::take_back) {
                refused += 1;
                self.settle(lease);
            }
        }
        self.counts.accepted -= refused;
        self.counts.rejected += refused;
        refused as usize
    }

    /// Drops the oldest group that has a lease with no attempts left.
    pub fn take_lost(&mut self) -> Option<DroppedGroup> {
        let (&group, _) = self.groups.iter().find(|(_, group)| group.lost())?;
        self.drop_group(group)
    }

    /// Drops a group, whatever its state.
    pub fn drop_group(&mut self, group: u64) -> Option<DroppedGroup> {
        let over = self.groups.remove(&group)?;
        self.waiting.retain(|id| id.group != group);
        self.counts.groups_dropped += 1;
        let revoke = self.retire(group, &over);
        let unused: Vec<EpisodeId> =
            over.accepted().into_iter().map(|(episode, _)| episode).collect();
        self.counts.given_up += unused.len() as u64;
        Some(DroppedGroup { group, revoke, unused })
    }

    /// Where a lease stands.
    pub fn standing(&self, lease: LeaseId) -> Standing {
        match self.groups.get(&lease.group) {
            None if self.taken.contains_key(&lease.group) => Standing::Spent,
            None if self.retired.contains(lease.group) => Standing::Spent,
            None => Standing::Unknown,
            Some(group) => match group.slot(lease.generation) {
                None => Standing::Unknown,
                Some(slot) if slot.spent() => Standing::Spent,
                Some(slot) => {
                    Standing::Open(Box::new(group.lease(self.run, lease, slot.last_attempt())))
                }
            },
        }
    }

    fn slots(&self) -> impl Iterator<Item = (LeaseId, &Slot)> {
        self.groups.iter().flat_map(|(group, it)| {
            it.slots().map(|(generation, slot)| (LeaseId { group: *group, generation }, slot))
        })
    }

    fn slot(&self, lease: LeaseId) -> Option<&Slot> {
        let group = self.groups.get(&lease.group);
        group.or(self.taken.get(&lease.group))?.slot(lease.generation)
    }

    fn slot_mut(&mut self, lease: LeaseId) -> Option<&mut Slot> {
        let group = self.groups.get_mut(&lease.group);
        group.or(self.taken.get_mut(&lease.group))?.slot_mut(lease.generation)
    }

    fn end_grants(
        &mut self,
        failed: bool,
        ends: impl Fn(LeaseAttempt, &Grant) -> bool,
    ) -> Vec<(ActorId, LeaseAttempt)> {
        let over: Vec<(ActorId, LeaseAttempt)> = self
            .slots()
            .filter_map(|(id, slot)| {
                let grant = slot.grant()?;
                let attempt = LeaseAttempt { id, attempt: slot.last_attempt() };
                ends(attempt, grant).then_some((grant.actor, attempt))
            })
            .collect();
        for (actor, attempt) in &over {
            if let Some(slot) = self.slot_mut(attempt.id) {
                slot.end_grant(*actor);
                if failed {
                    slot.count_failure();
                }
            }
            self.settle(attempt.id);
        }
        over
    }

    /// A lease that nobody plays any more waits again, or is lost.
    fn settle(&mut self, lease: LeaseId) {
        let max_attempts = self.max_attempts;
        if self.slot_mut(lease).is_some_and(|slot| slot.settle(max_attempts)) {
            self.waiting.insert(lease);
        }
    }

    /// Puts a group away. Returns its outstanding grants, which count as failed.
    fn retire(&mut self, group: u64, over: &Group) -> Vec<(ActorId, LeaseAttempt)> {
        let revoke = over.grants(group);
        self.counts.failed += revoke.len() as u64;
        self.retired.add(group, over);
        revoke
    }
}
