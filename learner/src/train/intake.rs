//! What comes in from actors and what goes out to them, without I/O: calls say what happened and when,
//! records go to a [`Witness`], and messages come out once what they promise is on stable storage.
//!
//! Everything that decides which episodes count is the lease book's and the auditor's; this moves facts
//! between them and the actors. Sockets, threads and the clock are the collector's; simulations bring
//! their own.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use protocol::{
    AckOutcome, ActorId, AdapterManifest, EpisodeId, FromActor, FromLearner, LeaseAttempt,
    PolicyDigest,
};
use serde::{Deserialize, Serialize};
use terminal::Failure;
use tracing::{info, warn};

use super::watcher::Witness;
use crate::{
    audit::{Audited, Judged, Reason, Rejected, Submitted, check_group},
    files::Answer,
    leases::{
        Balance, CompleteGroup, DroppedGroup, GroupOrder, LeaseBook, LeaseCounts, Standing,
        Submission,
    },
    recipe::FailurePolicy,
};

/// A group whose every rollout was accepted, by generation.
#[derive(Debug)]
pub struct CollectedGroup {
    /// Its number.
    pub group: u64,
    /// Its rollouts.
    pub rollouts: Vec<Audited>,
    /// Where each was played.
    pub sources: Vec<Source>,
}

/// Where an episode was played.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// By whom.
    pub actor: ActorId,
    /// On what, in the actor's own words.
    pub device: String,
}

/// What happened while groups were gathered, since the start of the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CollectCounts {
    /// What became of leases.
    #[serde(flatten)]
    pub leases: LeaseCounts,
    /// Bytes that were no episode.
    pub unreadable: u64,
    /// Actors that joined, each time counted.
    pub joins: u64,
    /// Peers that were turned away.
    pub turned_away: u64,
    /// Actors that were lost.
    pub losses: u64,
    /// Actors that were cut off.
    pub cut_off: u64,
}

/// How the recipe deals with what the audit refuses.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// What a rejected episode does.
    pub failure_policy: FailurePolicy,
    /// Rejections after which an actor is cut off, where the policy is that.
    pub quarantine_after: u32,
    /// Updates that a policy may be behind when its episode is learned from.
    pub staleness: u64,
}

/// Mistakes that a simulation plants, to show that it finds them.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flaws {
    /// Acknowledge what is not on stable storage yet.
    pub acknowledge_before_sync: bool,
    /// Forget at a restart how many steps were committed.
    pub forget_watermark: bool,
    /// Acknowledge a second copy of what the audit still has in hand.
    pub acknowledge_in_audit: bool,
}

/// A connected actor.
#[derive(Debug)]
struct Seat {
    device: String,
    connection: u64,
    /// Leases granted on this connection.
    granted: u64,
    /// Leases that it said it would take in all, on this connection.
    window: u64,
    draining: bool,
}

/// What is to be done for an actor, once what was written is kept.
#[derive(Debug)]
pub enum Effect {
    /// Say this.
    Say(ActorId, FromLearner),
    /// Shut it out, now and later.
    ShutOut(ActorId),
}

/// Receives what actors say and decides what they are told.
#[derive(Debug)]
pub struct Intake {
    book: LeaseBook,
    rules: Rules,
    seats: BTreeMap<ActorId, Seat>,
    rejections: BTreeMap<ActorId, u32>,
    cut_off: BTreeSet<ActorId>,
    /// The policies that leases may name, oldest first.
    manifests: VecDeque<AdapterManifest>,
    accepted: HashMap<EpisodeId, (Audited, Source)>,
    /// Who else sent an answer that waits for its verdict.
    copies: BTreeMap<EpisodeId, BTreeSet<ActorId>>,
    due: Vec<Effect>,
    counts: CollectCounts,
    flaws: Flaws,
}

impl Intake {
    /// One that goes on with a book, and with the accepted episodes of the book's open groups.
    pub fn new(
        book: LeaseBook,
        rules: Rules,
        accepted: HashMap<EpisodeId, (Audited, Source)>,
    ) -> Self {
        Self {
            book,
            rules,
            seats: BTreeMap::new(),
            rejections: BTreeMap::new(),
            cut_off: BTreeSet::new(),
            manifests: VecDeque::new(),
            accepted,
            copies: BTreeMap::new(),
            due: Vec::new(),
            counts: CollectCounts::default(),
            flaws: Flaws::default(),
        }
    }

    /// Plants mistakes.
    #[doc(hidden)]
    #[must_use]
    pub fn with_flaws(mut self, flaws: Flaws) -> Self {
        self.flaws = flaws;
        self
    }

    /// Goes on counting where an earlier life of the learner stopped: `counts` are those of its last
    /// commit, the lease counts left out, and `rejections` what each actor's refusals came to.
    pub fn go_on(&mut self, counts: CollectCounts, rejections: BTreeMap<ActorId, u32>) {
        self.counts = counts;
        self.rejections = rejections;
        if self.rules.failure_policy == FailurePolicy::Quarantine {
            let over = self.rejections.iter().filter(|(_, it)| **it >= self.rules.quarantine_after);
            self.cut_off = over.map(|(actor, _)| *actor).collect();
            self.due.extend(self.cut_off.iter().map(|actor| Effect::ShutOut(*actor)));
        }
    }

    /// What happened so far.
    pub fn counts(&self) -> CollectCounts {
        CollectCounts { leases: self.book.counts(), ..self.counts }
    }

    /// The same as a commit keeps it.
    pub fn settled_counts(&self) -> CollectCounts {
        CollectCounts { leases: self.book.settled_counts(), ..self.counts }
    }

    /// Where every answer is.
    pub fn balance(&self) -> Balance {
        self.book.balance()
    }

    /// The lease book.
    pub fn book(&self) -> &LeaseBook {
        &self.book
    }

    /// Connected actors.
    pub fn actors(&self) -> usize {
        self.seats.len()
    }

    /// Accepted episodes that wait for their group.
    pub fn waiting(&self) -> usize {
        self.accepted.len()
    }

    /// Whether anything is to be done.
    pub fn has_due(&self) -> bool {
        !self.due.is_empty()
    }

    /// How many policies are to be served: those that leases may name.
    pub fn policies_kept(&self) -> u64 {
        // One step back stays fetchable for actors that are in the middle of fetching it.
        self.rules.staleness + 2
    }

    /// Announces a policy: leases of later orders may name it.
    pub fn publish(&mut self, manifest: AdapterManifest) {
        for actor in self.seats.keys() {
            self.due.push(Effect::Say(*actor, FromLearner::Announce(manifest.clone())));
        }
        self.manifests.push_back(manifest);
        while self.manifests.len() as u64 > self.policies_kept() {
            self.manifests.pop_front();
        }
    }

    /// How many updates newer there are than a policy.
    fn behind(&self, policy: Option<PolicyDigest>) -> u64 {
        let newest = self.manifests.back().map_or(0, |it| it.step);
        let own = self.manifests.iter().rev().find(|it| Some(it.policy) == policy);
        own.map_or(newest, |it| newest - it.step.min(newest))
    }

    /// Orders a group.
    ///
    /// # Errors
    /// Its number was used before; the record cannot be kept.
    pub fn order(
        &mut self,
        group: u64,
        order: GroupOrder,
        witness: &mut dyn Witness,
    ) -> Result<(), Failure> {
        witness.ordered(group, &order)?;
        self.book.open(group, order).map_err(Failure::fault)
    }

    /// An actor was let in.
    pub fn joined(&mut self, actor: ActorId, device: String, connection: u64) {
        // Its connection ends as soon as the server has heard of it.
        if self.cut_off.contains(&actor) {
            return;
        }
        self.counts.joins += 1;
        let needed = self.book.policies();
        let newest = self.manifests.back().map(|it| it.policy);
        for manifest in &self.manifests {
            if needed.contains(&manifest.policy) || Some(manifest.policy) == newest {
                self.due.push(Effect::Say(actor, FromLearner::Announce(manifest.clone())));
            }
        }
        // A reconnecting actor starts with a clean slate; what it still plays is welcome.
        self.book.release(actor);
        let seat = Seat { device, connection, granted: 0, window: 0, draining: false };
        self.seats.insert(actor, seat);
    }

    /// An actor's link ended.
    pub fn gone(&mut self, actor: ActorId, connection: u64, reason: &str) {
        if self.seats.get(&actor).is_some_and(|seat| seat.connection == connection) {
            info!(actor = %actor.0.short(), "gone: {reason}");
            self.counts.losses += 1;
            self.seats.remove(&actor);
            self.book.release(actor);
        }
    }

    /// A peer was not let in.
    pub fn turned_away(&mut self) {
        self.counts.turned_away += 1;
    }

    /// An actor said something. Returns an answer that is to be audited.
    pub fn said(&mut self, actor: ActorId, message: FromActor) -> Option<Submitted> {
        match message {
            FromActor::Episode { id, body } => return self.submit(actor, id, body),
            FromActor::LeaseFailed { lease, reason } => {
                warn!(actor = %actor.0.short(), %lease, "failed: {reason}");
                self.book.fail(actor, lease);
            }
            FromActor::Leave { returned } => {
                info!(actor = %actor.0.short(), returned = returned.len(), "leaves");
                for lease in returned {
                    self.book.fail(actor, lease);
                }
                if let Some(seat) = self.seats.get_mut(&actor) {
                    seat.draining = true;
                }
            }
            FromActor::Ready { free, received } => {
                if let Some(seat) = self.seats.get_mut(&actor) {
                    // An actor cannot have received what was not granted.
                    seat.window = received.min(seat.granted) + u64::from(free);
                }
            }
            FromActor::Drain => {
                info!(actor = %actor.0.short(), "drains");
                if let Some(seat) = self.seats.get_mut(&actor) {
                    seat.draining = true;
                    // What was granted before is on its way before this.
                    self.due.push(Effect::Say(actor, FromLearner::Revoke(Vec::new())));
                }
            }
            // Who fetches from whom is settled by the links.
            FromActor::Holding { .. } | FromActor::ParentFailed { .. } => {}
        }
        None
    }

    /// Takes an answer. Says what becomes of it where no audit has to tell.
    fn submit(&mut self, actor: ActorId, id: EpisodeId, body: Vec<u8>) -> Option<Submitted> {
        let rejected = |reason: &str| AckOutcome::Rejected { reason: reason.into() };
        let Some(lease) = protocol::wire::peek_lease(&body).map(|(_, lease)| lease) else {
            self.counts.unreadable += 1;
            self.acknowledge(actor, id, rejected("no lease can be read in it"));
            return None;
        };
        let standing = self.book.standing(lease);
        let behind = self.behind(self.book.policy(lease.group));
        let outcome = match self.book.submit(actor, lease, id) {
            Submission::First => {
                return Some(Submitted { actor, lease, id, body, standing, behind });
            }
            Submission::Duplicate if self.book.is_pending(lease, id) => {
                // Nothing of it is on stable storage yet: its verdict answers both.
                if !self.flaws.acknowledge_in_audit {
                    self.copies.entry(id).or_default().insert(actor);
                    return None;
                }
                AckOutcome::Duplicate
            }
            Submission::Duplicate => AckOutcome::Duplicate,
            Submission::Late => rejected("the lease was answered before"),
            Submission::Equivocation { first } => {
                warn!(actor = %actor.0.short(), %lease, "answered twice: {first} and {id}");
                rejected("the lease was answered before, with other bytes")
            }
            Submission::NotGranted | Submission::Unknown => rejected("no lease of this actor's"),
        };
        self.acknowledge(actor, id, outcome);
        None
    }

    fn acknowledge(&mut self, actor: ActorId, episode: EpisodeId, outcome: AckOutcome) {
        self.due.push(Effect::Say(actor, FromLearner::Ack { episode, outcome }));
    }

    /// Carries out a verdict.
    ///
    /// # Errors
    /// The recipe says that a refusal ends the run; the record cannot be kept.
    pub fn judged(&mut self, judged: Judged, witness: &mut dyn Witness) -> Result<(), Failure> {
        let Submitted { actor, lease, id, body, standing, behind } = &judged.answer;
        let attempt = match standing {
            Standing::Open(lease) => lease.attempt,
            Standing::Spent | Standing::Unknown => 0,
        };
        let device = self.seats.get(actor).map(|it| it.device.clone()).unwrap_or_default();
        let (actor, lease, id, behind) = (*actor, *lease, *id, *behind);
        let answer = Answer { actor, lease, attempt, behind, device: &device, body };
        let outcome = match judged.verdict {
            Ok(audited) if self.book.accept(lease) => {
                witness.accepted(&answer)?;
                self.accepted.insert(id, (audited, Source { actor, device }));
                AckOutcome::Stored
            }
            // Its group was given up in the meantime.
            Ok(_) => {
                let reason = Reason::GroupGivenUp;
                let rejected = Rejected { id, lease: Some(lease), reason, episode: None };
                let outcome = AckOutcome::Rejected { reason: rejected.reason.to_string() };
                witness.taken_back(actor, &rejected)?;
                self.book.reject(lease);
                outcome
            }
            Err(rejected) => {
                witness.rejected(&answer, &rejected)?;
                self.book.reject(lease);
                self.answer_for(actor, &rejected)?;
                AckOutcome::Rejected { reason: rejected.reason.to_string() }
            }
        };
        for copy in self.copies.remove(&id).unwrap_or_default() {
            if copy != actor {
                self.acknowledge(copy, id, outcome.clone());
            }
        }
        self.acknowledge(actor, id, outcome);
        Ok(())
    }

    /// What a refused episode means for the run and for its actor.
    fn answer_for(&mut self, actor: ActorId, rejected: &Rejected) -> Result<(), Failure> {
        let lease = rejected.lease.map_or_else(|| "no lease".into(), |lease| lease.to_string());
        warn!(actor = %actor.0.short(), lease, "rejected: {}", rejected.reason);
        let rejections = self.rejections.entry(actor).or_default();
        *rejections += 1;
        match self.rules.failure_policy {
            FailurePolicy::Abort => {
                return Err(Failure::Fault(format!(
                    "episode {} of lease {lease} was refused ({}); training.failure_policy is abort",
                    rejected.id, rejected.reason
                )));
            }
            FailurePolicy::Drop => return Ok(()),
            FailurePolicy::Quarantine => {}
        }
        if *rejections >= self.rules.quarantine_after && self.cut_off.insert(actor) {
            warn!(actor = %actor.0.short(), "cut off after {rejections} rejections");
            self.counts.cut_off += 1;
            self.due.push(Effect::ShutOut(actor));
            self.seats.remove(&actor);
            self.book.release(actor);
        }
        Ok(())
    }

    /// Hands out what waits, oldest first, evenly over the actors with free slots.
    ///
    /// # Errors
    /// The record cannot be kept.
    pub fn grant(&mut self, now_ms: u64, witness: &mut dyn Witness) -> Result<(), Failure> {
        let free = |seat: &Seat| match seat.draining {
            true => 0,
            false => seat.window.saturating_sub(seat.granted),
        };
        let mut sharing = self.seats.values().filter(|seat| free(seat) > 0).count();
        for (actor, seat) in &mut self.seats {
            let (free, waiting) = (free(seat), self.book.waiting());
            if free == 0 || waiting == 0 {
                continue;
            }
            let share = waiting.div_ceil(sharing.max(1));
            sharing = sharing.saturating_sub(1);
            let free = usize::try_from(free).unwrap_or(usize::MAX);
            let leases = self.book.grant(*actor, now_ms, share.min(free));
            if !leases.is_empty() {
                seat.granted += leases.len() as u64;
                let attempts: Vec<LeaseAttempt> = leases.iter().map(LeaseAttempt::from).collect();
                witness.granted(*actor, &attempts)?;
                self.due.push(Effect::Say(*actor, FromLearner::Grant(leases)));
            }
        }
        Ok(())
    }

    /// Takes back the grants whose time has run out.
    pub fn expire(&mut self, now_ms: u64) {
        for (actor, lease) in self.book.expire(now_ms) {
            warn!(actor = %actor.0.short(), %lease, "expired");
            self.revoke(actor, lease);
        }
    }

    fn revoke(&mut self, actor: ActorId, lease: LeaseAttempt) {
        if self.seats.contains_key(&actor) {
            self.due.push(Effect::Say(actor, FromLearner::Revoke(vec![lease])));
        }
    }

    /// Takes a group whose every rollout was accepted.
    ///
    /// # Errors
    /// Its rollouts do not belong together.
    pub fn take(&mut self, group: u64) -> Result<Option<CollectedGroup>, Failure> {
        let Some(CompleteGroup { group, episodes, generations, revoke, .. }) =
            self.book.take(group)
        else {
            return Ok(None);
        };
        for (actor, lease) in revoke {
            self.revoke(actor, lease);
        }
        let kept = episodes.iter().filter_map(|id| self.accepted.remove(id));
        let (rollouts, sources): (Vec<Audited>, Vec<Source>) = kept.unzip();
        let all: Vec<&Audited> = rollouts.iter().collect();
        check_group(group, generations, &all).map_err(Failure::fault)?;
        Ok(Some(CollectedGroup { group, rollouts, sources }))
    }

    /// Gives up the groups that cannot be completed.
    ///
    /// # Errors
    /// The record cannot be kept.
    pub fn drop_lost(&mut self, witness: &mut dyn Witness) -> Result<(), Failure> {
        while let Some(DroppedGroup { group, revoke, unused }) = self.book.take_lost() {
            witness.dropped(group)?;
            warn!(group, "dropped: a lease of it cannot be played");
            for (actor, lease) in revoke {
                self.revoke(actor, lease);
            }
            for unused in &unused {
                self.accepted.remove(unused);
            }
        }
        Ok(())
    }

    /// These groups count: nothing about them changes any more.
    pub fn confirm(&mut self, groups: &[CollectedGroup]) {
        for group in groups {
            self.book.confirm(group.group);
        }
    }

    /// Gives back taken groups whose policy is more updates behind than the recipe allows.
    ///
    /// # Errors
    /// The record cannot be kept.
    pub fn drop_stale(
        &mut self,
        groups: Vec<CollectedGroup>,
        witness: &mut dyn Witness,
    ) -> Result<Vec<CollectedGroup>, Failure> {
        let mut fresh = Vec::with_capacity(groups.len());
        for group in groups {
            let behind = self.behind(self.book.policy(group.group));
            if behind <= self.rules.staleness {
                fresh.push(group);
                continue;
            }
            let bound = self.rules.staleness;
            warn!(group = group.group, "dropped: {behind} updates behind; the bound is {bound}");
            witness.dropped(group.group)?;
            self.book.drop_stale(group.group);
        }
        Ok(fresh)
    }

    /// Refuses rollouts of a taken group after all, by place and reason. Their leases wait again; the
    /// group can be taken once more when it is complete.
    ///
    /// # Errors
    /// The recipe says abort; the record cannot be kept.
    pub fn refuse_collected(
        &mut self,
        group: CollectedGroup,
        refused: &BTreeMap<usize, Reason>,
        witness: &mut dyn Witness,
    ) -> Result<(), Failure> {
        let generations: Vec<u32> = (0..)
            .zip(&group.rollouts)
            .enumerate()
            .filter(|(at, _)| refused.contains_key(at))
            .map(|(_, (generation, _))| generation)
            .collect();
        self.book.reopen(group.group, &generations);
        let rollouts = group.rollouts.into_iter().zip(group.sources);
        for (at, (audited, source)) in rollouts.enumerate() {
            let Some(reason) = refused.get(&at) else {
                self.accepted.insert(audited.id, (audited, source));
                continue;
            };
            let rejected = Rejected {
                id: audited.id,
                lease: Some(audited.episode.lease),
                reason: reason.clone(),
                episode: Some(Box::new(audited.episode)),
            };
            witness.taken_back(source.actor, &rejected)?;
            self.answer_for(source.actor, &rejected)?;
        }
        Ok(())
    }

    /// What is to be done now; what it promises is on stable storage.
    ///
    /// # Errors
    /// Nothing may be promised: the record cannot be kept.
    pub fn due(&mut self, witness: &mut dyn Witness) -> Result<Vec<Effect>, Failure> {
        if !self.due.is_empty() && !self.flaws.acknowledge_before_sync {
            witness.keep()?;
        }
        Ok(std::mem::take(&mut self.due))
    }
}
