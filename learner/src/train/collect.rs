//! Gathers audited groups: grants leases, audits what comes back, re-issues what does not.
//!
//! Everything that decides which episodes count is the lease book's and the auditor's; this file moves
//! facts between them, the actors and the clock.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    path::Path,
    time::{Duration, Instant},
};

use protocol::{
    AckOutcome, ActorId, AdapterManifest, EpisodeId, FromActor, FromLearner, LeaseAttempt,
};
use serde::Serialize;
use terminal::{Failure, Interrupt};
use tracing::{info, warn};

use super::watcher::Witness;
use crate::{
    audit::{AuditPool, Audited, Judged, Reason, Rejected, Submitted, check_group},
    files::Answer,
    leases::{DroppedGroup, GroupOrder, LeaseBook, LeaseCounts, Standing, Submission},
    local_actors::LocalActors,
    recipe::FailurePolicy,
    serve::{Actor, Event, Server},
};

/// How long the coordinator sleeps when nothing happens.
const TICK: Duration = Duration::from_millis(50);
/// Events that are handled before acknowledgements go out, where more are waiting.
const BURST: usize = 64;

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
#[derive(Clone, Copy, Debug, Default, Serialize)]
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

/// Gathers groups for one run.
pub struct Collector {
    server: Server,
    audits: AuditPool,
    book: LeaseBook,
    actors: BTreeMap<ActorId, Actor>,
    local: Option<LocalActors>,
    interrupt: Interrupt,
    failure_policy: FailurePolicy,
    quarantine_after: u32,
    rejections: BTreeMap<ActorId, u32>,
    cut_off: BTreeSet<ActorId>,
    manifest: Option<AdapterManifest>,
    accepted: HashMap<EpisodeId, (Audited, Source)>,
    /// Acknowledgements that wait until what they promise is on stable storage.
    unsaid: Vec<(ActorId, EpisodeId, AckOutcome)>,
    counts: CollectCounts,
    clock: Instant,
}

/// What a collector is made from.
pub struct CollectorParts {
    /// The network.
    pub server: Server,
    /// The audit.
    pub audits: AuditPool,
    /// The lease book.
    pub book: LeaseBook,
    /// Actors that this program started.
    pub local: Option<LocalActors>,
    /// Whether the user wants it to stop.
    pub interrupt: Interrupt,
    /// What a rejected episode does.
    pub failure_policy: FailurePolicy,
    /// Rejections after which an actor is cut off, where the policy is that.
    pub quarantine_after: u32,
}

impl Collector {
    /// A collector without actors yet.
    pub fn new(parts: CollectorParts) -> Self {
        let CollectorParts {
            server,
            audits,
            book,
            local,
            interrupt,
            failure_policy,
            quarantine_after,
        } = parts;
        Self {
            server,
            audits,
            book,
            actors: BTreeMap::new(),
            local,
            interrupt,
            failure_policy,
            quarantine_after,
            rejections: BTreeMap::new(),
            cut_off: BTreeSet::new(),
            manifest: None,
            accepted: HashMap::new(),
            unsaid: Vec::new(),
            counts: CollectCounts::default(),
            clock: Instant::now(),
        }
    }

    /// What happened so far.
    pub fn counts(&self) -> CollectCounts {
        CollectCounts { leases: self.book.counts(), ..self.counts }
    }

    /// Connected actors.
    pub fn actors(&self) -> usize {
        self.actors.len()
    }

    /// Logs who joins to the run's directory.
    pub fn log_joins(&self, run: &Path) {
        self.server.log_joins(run);
    }

    /// Announces a policy: leases of later orders may name it.
    pub fn publish(&mut self, manifest: AdapterManifest, bytes: Vec<u8>) {
        // One step back stays fetchable for actors that are in the middle of fetching it.
        let manifest = self.server.publish(manifest, bytes, 2);
        for actor in self.actors.values() {
            actor.say(FromLearner::Announce(manifest.clone()));
        }
        self.manifest = Some(manifest);
    }

    /// Issues `orders` and waits until each open group is complete or dropped. Groups come back by
    /// number; they are over once they are [confirmed](Self::confirm).
    ///
    /// # Errors
    /// The user interrupts; an episode is refused and the recipe says abort; local actors cannot be
    /// kept alive.
    pub fn collect(
        &mut self,
        orders: Vec<(u64, GroupOrder)>,
        witness: &mut dyn Witness,
    ) -> Result<Vec<CollectedGroup>, Failure> {
        let ordered = orders.iter().map(|(_, order)| order.generations as usize).sum();
        for (group, order) in orders {
            witness.ordered(group, &order)?;
            self.book.open(group, order).map_err(Failure::fault)?;
        }
        let mut complete = Vec::new();
        let mut done = 0;
        while self.book.open_groups() > 0 {
            if self.interrupt.raised() {
                return Err(Failure::Interrupted("interrupted".into()));
            }
            self.tend()?;
            self.grant();
            let mut patience = TICK;
            for _ in 0..BURST {
                let Some(event) = self.server.next(patience) else { break };
                self.handle(event, witness)?;
                patience = Duration::ZERO;
            }
            self.acknowledge(witness)?;
            for (actor, lease) in self.book.expire(self.now_ms()) {
                warn!(actor = %actor.0.short(), %lease, "expired");
                self.revoke(actor, lease);
            }
            while let Some(group) = self.book.take_complete() {
                for (actor, lease) in &group.revoke {
                    self.revoke(*actor, *lease);
                }
                let kept = group.episodes.iter().filter_map(|id| self.accepted.remove(id));
                let (rollouts, sources): (Vec<Audited>, Vec<Source>) = kept.unzip();
                let all: Vec<&Audited> = rollouts.iter().collect();
                check_group(group.group, group.generations, &all).map_err(Failure::fault)?;
                complete.push(CollectedGroup { group: group.group, rollouts, sources });
            }
            while let Some(dropped) = self.book.take_lost() {
                self.forget(&dropped, witness)?;
            }
            let open = self.accepted.len();
            let finished: usize = complete.iter().map(|group| group.rollouts.len()).sum();
            if open + finished != done {
                done = open + finished;
                witness.progress(done, ordered);
            }
        }
        complete.sort_by_key(|group| group.group);
        Ok(complete)
    }

    /// These groups count: nothing about them changes any more.
    pub fn confirm(&mut self, groups: &[CollectedGroup]) {
        for group in groups {
            self.book.confirm(group.group);
        }
    }

    /// Refuses rollouts of a collected group after all, by generation and reason. Their leases wait
    /// again; [`Self::collect`] gives the group back once it is complete.
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

    /// What a refused episode means for the run and for its actor.
    fn answer_for(&mut self, actor: ActorId, rejected: &Rejected) -> Result<(), Failure> {
        let lease = rejected.lease.map_or_else(|| "no lease".into(), |lease| lease.to_string());
        warn!(actor = %actor.0.short(), lease, "rejected: {}", rejected.reason);
        match self.failure_policy {
            FailurePolicy::Abort => {
                return Err(Failure::Fault(format!(
                    "episode {} of lease {lease} was refused ({}); training.failure_policy is abort",
                    rejected.id, rejected.reason
                )));
            }
            FailurePolicy::Drop => return Ok(()),
            FailurePolicy::Quarantine => {}
        }
        let rejections = self.rejections.entry(actor).or_default();
        *rejections += 1;
        if *rejections >= self.quarantine_after && self.cut_off.insert(actor) {
            warn!(actor = %actor.0.short(), "cut off after {rejections} rejections");
            self.counts.cut_off += 1;
            self.server.shut_out(actor);
            self.actors.remove(&actor);
            self.book.release(actor);
        }
        Ok(())
    }

    /// Tells every actor that the run is over and ends the local ones.
    pub fn finish(&mut self, reason: &str) {
        self.server.finish(reason);
        if let Some(mut local) = self.local.take() {
            local.stop(Duration::from_secs(5));
        }
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.clock.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn tend(&mut self) -> Result<(), Failure> {
        let Some(local) = &mut self.local else { return Ok(()) };
        for status in local.tend().map_err(Failure::mistake)? {
            warn!("a local actor ended with {status}; started another");
        }
        Ok(())
    }

    /// Hands out what waits, evenly over the actors with free slots.
    fn grant(&mut self) {
        let now = self.now_ms();
        let mut sharing = self.actors.values().filter(|actor| actor.free() > 0).count();
        for (id, actor) in &self.actors {
            let (free, waiting) = (actor.free(), self.book.waiting());
            if free == 0 || waiting == 0 {
                continue;
            }
            let share = waiting.div_ceil(sharing.max(1));
            sharing = sharing.saturating_sub(1);
            let leases = self.book.grant(*id, now, share.min(free));
            if !leases.is_empty() {
                actor.say(FromLearner::Grant(leases));
            }
        }
    }

    fn handle(&mut self, event: Event, witness: &mut dyn Witness) -> Result<(), Failure> {
        match event {
            // Its connection ends as soon as the server has heard of it.
            Event::Joined(actor) if self.cut_off.contains(&actor.id) => {}
            Event::Joined(actor) => {
                info!(actor = %actor.id.0.short(), device = actor.device, slots = actor.slots, "joined");
                self.counts.joins += 1;
                if let Some(manifest) = &self.manifest {
                    actor.say(FromLearner::Announce(manifest.clone()));
                }
                // A reconnecting actor starts with a clean slate; what it still plays is welcome.
                self.book.release(actor.id);
                self.actors.insert(actor.id, actor);
            }
            Event::Said { actor, message } => self.hear(actor, message)?,
            Event::Judged(judged) => self.settle(*judged, witness)?,
            Event::Gone { actor, connection, reason, .. } => {
                let current = self.actors.get(&actor).is_some_and(|it| it.connection == connection);
                if current {
                    info!(actor = %actor.0.short(), "gone: {reason}");
                    self.counts.losses += 1;
                    self.actors.remove(&actor);
                    self.book.release(actor);
                }
            }
            Event::TurnedAway { remote, failure } => {
                warn!(%remote, "not let in: {failure}");
                self.counts.turned_away += 1;
            }
        }
        Ok(())
    }

    fn hear(&mut self, actor: ActorId, message: FromActor) -> Result<(), Failure> {
        match message {
            FromActor::Episode { id, body } => {
                if let Some(outcome) = self.submit(actor, id, body) {
                    self.unsaid.push((actor, id, outcome));
                }
            }
            FromActor::LeaseFailed { lease, reason } => {
                warn!(actor = %actor.0.short(), %lease, "failed: {reason}");
                self.book.fail(actor, lease);
            }
            FromActor::Leave { returned } => {
                info!(actor = %actor.0.short(), returned = returned.len(), "leaves");
                for lease in returned {
                    self.book.fail(actor, lease);
                }
            }
            FromActor::Ready { .. } | FromActor::Holding { .. } | FromActor::Drain => {}
        }
        Ok(())
    }

    /// Takes an answer. Says at once what becomes of it where no audit has to tell.
    fn submit(&mut self, actor: ActorId, id: EpisodeId, body: Vec<u8>) -> Option<AckOutcome> {
        let rejected = |reason: &str| Some(AckOutcome::Rejected { reason: reason.into() });
        let Some(lease) = protocol::wire::peek_lease(&body).map(|(_, lease)| lease) else {
            self.counts.unreadable += 1;
            return rejected("no lease can be read in it");
        };
        let standing = self.book.standing(lease);
        match self.book.submit(actor, lease, id) {
            Submission::First => {
                let answer = Submitted { actor, lease, id, body, standing, behind: 0 };
                self.audits.judge(answer, self.server.teller());
                None
            }
            Submission::Duplicate => Some(AckOutcome::Duplicate),
            Submission::Late => rejected("the lease was answered before"),
            Submission::Equivocation { first } => {
                warn!(actor = %actor.0.short(), %lease, "answered twice: {first} and {id}");
                rejected("the lease was answered before, with other bytes")
            }
            Submission::NotGranted | Submission::Unknown => rejected("no lease of this actor's"),
        }
    }

    /// Carries out a verdict.
    fn settle(&mut self, judged: Judged, witness: &mut dyn Witness) -> Result<(), Failure> {
        let Submitted { actor, lease, id, body, standing, behind } = &judged.answer;
        let attempt = match standing {
            Standing::Open(lease) => lease.attempt,
            Standing::Spent | Standing::Unknown => 0,
        };
        let device = self.actors.get(actor).map(|it| it.device.clone()).unwrap_or_default();
        let (actor, lease, behind) = (*actor, *lease, *behind);
        let answer = Answer { actor, lease, attempt, behind, device: &device, body };
        let outcome = match judged.verdict {
            // Its group may have been dropped in the meantime.
            Ok(audited) if self.book.accept(lease) => {
                witness.accepted(&answer)?;
                self.accepted.insert(*id, (audited, Source { actor, device }));
                AckOutcome::Stored
            }
            Ok(_) => AckOutcome::Rejected { reason: "its group was given up".into() },
            Err(rejected) => {
                witness.rejected(&answer, &rejected)?;
                self.book.reject(lease);
                self.answer_for(actor, &rejected)?;
                AckOutcome::Rejected { reason: rejected.reason.to_string() }
            }
        };
        self.unsaid.push((actor, *id, outcome));
        Ok(())
    }

    /// Says what became of episodes, once that is on stable storage.
    fn acknowledge(&mut self, witness: &mut dyn Witness) -> Result<(), Failure> {
        if self.unsaid.is_empty() {
            return Ok(());
        }
        witness.keep()?;
        for (actor, episode, outcome) in self.unsaid.drain(..) {
            if let Some(actor) = self.actors.get(&actor) {
                actor.say(FromLearner::Ack { episode, outcome });
            }
        }
        Ok(())
    }

    fn revoke(&self, actor: ActorId, lease: LeaseAttempt) {
        if let Some(actor) = self.actors.get(&actor) {
            actor.say(FromLearner::Revoke(vec![lease]));
        }
    }

    fn forget(&mut self, dropped: &DroppedGroup, witness: &mut dyn Witness) -> Result<(), Failure> {
        witness.dropped(dropped.group)?;
        warn!(group = dropped.group, "dropped: a lease of it cannot be played");
        for (actor, lease) in &dropped.revoke {
            self.revoke(*actor, *lease);
        }
        for unused in &dropped.unused {
            self.accepted.remove(unused);
        }
        Ok(())
    }
}
