//! One group and its rollout slots.

use protocol::{
    ActorId, EpisodeId, Lease, LeaseAttempt, LeaseId, NoiseKey, PolicyDigest, RunId, Sampling, Task,
};

use super::Submission;

/// What a group is to play: one task and seed under one policy, so many times.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupOrder {
    /// The task.
    pub task: Task,
    /// Seed of the environment's reset.
    pub seed: u64,
    /// The policy that plays.
    pub policy: PolicyDigest,
    /// How it samples.
    pub sampling: Sampling,
    /// How many rollouts.
    pub generations: u32,
    /// Milliseconds that a grant lasts.
    pub deadline_ms: u64,
}

impl GroupOrder {
    /// One of its leases.
    pub fn lease(&self, run: RunId, id: LeaseId, attempt: u32) -> Lease {
        Lease {
            run,
            id,
            attempt,
            task: self.task.clone(),
            seed: self.seed,
            noise_key: NoiseKey::derive(&run, id),
            policy: self.policy,
            sampling: self.sampling,
            deadline_ms: self.deadline_ms,
        }
    }
}

/// A lease in an actor's hands.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grant {
    pub(super) actor: ActorId,
    pub(super) deadline_ms: u64,
}

/// The answer to a lease.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    pub(super) episode: EpisodeId,
    pub(super) actor: ActorId,
    pub(super) accepted: bool,
}

/// Attempts that a lost actor costs weigh so much less than others.
const LOSSES_TO_A_FAILURE: u32 = 8;

/// One rollout slot. It waits where it has neither grant nor answer and is not lost.
#[derive(Debug, Default)]
pub(super) struct Slot {
    attempts: u32,
    /// Attempts that ended badly, as far as that is the lease's doing and not the link's.
    failures: u32,
    holders: Vec<ActorId>,
    grant: Option<Grant>,
    answer: Option<Answer>,
    rejected: Vec<Answer>,
    lost: bool,
}

impl Slot {
    pub(super) fn grant(&self) -> Option<&Grant> {
        self.grant.as_ref()
    }

    pub(super) fn answer(&self) -> Option<&Answer> {
        self.answer.as_ref()
    }

    /// The attempt number of its latest grant.
    pub(super) fn last_attempt(&self) -> u32 {
        self.attempts.saturating_sub(1)
    }

    /// The answer that waits for its verdict.
    pub(super) fn pending(&self) -> Option<&Answer> {
        self.answer.as_ref().filter(|answer| !answer.accepted)
    }

    pub(super) fn spent(&self) -> bool {
        self.answer.is_some_and(|answer| answer.accepted)
    }

    /// Ends the grant of `actor`, if it holds one.
    pub(super) fn end_grant(&mut self, actor: ActorId) -> bool {
        self.grant.take_if(|grant| grant.actor == actor).is_some()
    }

    /// An attempt ended badly.
    pub(super) fn count_failure(&mut self) {
        self.failures = self.failures.saturating_add(1);
    }

    /// Settles what follows where nobody plays it any more. Returns whether it waits again. An actor that
    /// is lost may have been lost for any reason, and is held against the lease only in the long run.
    pub(super) fn settle(&mut self, max_attempts: u32) -> bool {
        if self.grant.is_some() || self.answer.is_some() {
            return false;
        }
        self.lost = self.failures >= max_attempts
            || self.attempts >= max_attempts.saturating_mul(LOSSES_TO_A_FAILURE);
        !self.lost
    }

    /// Takes an answer; `holds` is whether the actor held the lease when it came.
    pub(super) fn submit(&mut self, actor: ActorId, holds: bool, episode: EpisodeId) -> Submission {
        let held = self.holders.contains(&actor);
        if let Some(answer) = self.answer {
            return answer.beside(actor, held, episode);
        }
        if self.rejected.iter().any(|answer| answer.episode == episode) {
            // Asked again, it gave what was refused before.
            self.failures += u32::from(holds);
            return Submission::Duplicate;
        }
        if !held {
            return Submission::NotGranted;
        }
        // Whoever was refused may try again when asked again, and not before.
        if let Some(first) = self.rejected.iter().find(|answer| answer.actor == actor && !holds) {
            return Submission::Equivocation { first: first.episode };
        }
        self.answer = Some(Answer { episode, actor, accepted: false });
        self.lost = false;
        Submission::First
    }

    pub(super) fn accept(&mut self) -> bool {
        match &mut self.answer {
            Some(answer) if !answer.accepted => {
                answer.accepted = true;
                true
            }
            _ => false,
        }
    }

    /// The accepted answer does not count after all.
    pub(super) fn take_back(&mut self) -> bool {
        let refused = self.answer.take_if(|answer| answer.accepted);
        self.failures += u32::from(refused.is_some());
        self.rejected.extend(refused);
        refused.is_some()
    }

    /// An actor held it, in an earlier life of the learner.
    pub(super) fn held_before(&mut self, actor: ActorId, attempt: u32) {
        self.attempts = self.attempts.max(attempt.saturating_add(1));
        if !self.holders.contains(&actor) {
            self.holders.push(actor);
        }
    }

    /// It was answered in an earlier life of the learner.
    pub(super) fn answered_before(&mut self, actor: ActorId, episode: EpisodeId, accepted: bool) {
        let answer = Answer { episode, actor, accepted };
        if accepted {
            self.answer = Some(answer);
        } else {
            self.answer.take_if(|answer| answer.episode == episode);
            self.failures += 1;
            self.rejected.push(answer);
        }
    }

    pub(super) fn reject(&mut self) -> bool {
        let refused = self.answer.take_if(|answer| !answer.accepted);
        self.failures += u32::from(refused.is_some());
        self.rejected.extend(refused);
        refused.is_some()
    }
}

impl Answer {
    /// What another answer to the same lease is.
    pub(super) fn beside(self, actor: ActorId, held: bool, episode: EpisodeId) -> Submission {
        if self.episode == episode {
            Submission::Duplicate
        } else if self.actor == actor {
            Submission::Equivocation { first: self.episode }
        } else if held {
            Submission::Late
        } else {
            Submission::NotGranted
        }
    }
}

/// The slots of one group.
#[derive(Debug)]
pub(super) struct Group {
    order: GroupOrder,
    slots: Vec<Slot>,
}

impl Group {
    pub(super) fn new(order: GroupOrder) -> Self {
        let slots = (0..order.generations).map(|_| Slot::default()).collect();
        Self { order, slots }
    }

    pub(super) fn order(&self) -> &GroupOrder {
        &self.order
    }

    pub(super) fn slots(&self) -> impl Iterator<Item = (u32, &Slot)> {
        (0..).zip(&self.slots)
    }

    pub(super) fn slot(&self, generation: u32) -> Option<&Slot> {
        self.slots.get(usize::try_from(generation).ok()?)
    }

    pub(super) fn slot_mut(&mut self, generation: u32) -> Option<&mut Slot> {
        self.slots.get_mut(usize::try_from(generation).ok()?)
    }

    pub(super) fn complete(&self) -> bool {
        self.slots.iter().all(Slot::spent)
    }

    pub(super) fn lost(&self) -> bool {
        self.slots.iter().any(|slot| slot.lost)
    }

    /// Accepted episodes by generation, and who played them.
    pub(super) fn accepted(&self) -> Vec<(EpisodeId, ActorId)> {
        let spent = self.slots.iter().filter(|slot| slot.spent());
        spent.filter_map(|slot| slot.answer.map(|it| (it.episode, it.actor))).collect()
    }

    /// Ends every outstanding grant.
    pub(super) fn end_grants(&mut self) {
        self.slots.iter_mut().for_each(|slot| slot.grant = None);
    }

    /// Outstanding grants.
    pub(super) fn grants(&self, group: u64) -> Vec<(ActorId, LeaseAttempt)> {
        let grant = |(generation, slot): (u32, &Slot)| {
            let id = LeaseId { group, generation };
            slot.grant.map(|g| (g.actor, LeaseAttempt { id, attempt: slot.last_attempt() }))
        };
        self.slots().filter_map(grant).collect()
    }

    /// Gives a waiting lease to an actor.
    pub(super) fn grant(
        &mut self,
        run: RunId,
        id: LeaseId,
        actor: ActorId,
        now_ms: u64,
    ) -> Option<Lease> {
        let deadline_ms = now_ms.saturating_add(self.order.deadline_ms);
        let slot = self.slot_mut(id.generation)?;
        slot.grant = Some(Grant { actor, deadline_ms });
        slot.attempts = slot.attempts.saturating_add(1);
        if !slot.holders.contains(&actor) {
            slot.holders.push(actor);
        }
        let attempt = slot.last_attempt();
        Some(self.lease(run, id, attempt))
    }

    /// The lease of a slot.
    pub(super) fn lease(&self, run: RunId, id: LeaseId, attempt: u32) -> Lease {
        self.order.lease(run, id, attempt)
    }
}
