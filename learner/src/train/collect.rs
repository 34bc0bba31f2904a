//! Gathers audited groups: brings what happens on the network, in the audit and on the clock to the
//! [`Intake`], and carries out what it decides.

use std::{
    collections::BTreeMap,
    path::Path,
    time::{Duration, Instant},
};

use protocol::{ActorId, AdapterManifest};
use terminal::{Failure, Interrupt};
use tracing::{info, warn};

use super::{
    intake::{CollectCounts, CollectedGroup, Effect, Intake},
    measured::Measured,
    watcher::Witness,
};
use crate::{
    audit::{AuditPool, Reason},
    leases::{Balance, GroupOrder},
    local_actors::LocalActors,
    metrics::Metrics,
    serve::{Actor, Event, Server},
};

/// How long the coordinator sleeps when nothing happens.
const TICK: Duration = Duration::from_millis(50);
/// Events that are handled before acknowledgements go out, where more are waiting.
const BURST: usize = 64;

/// Gathers groups for one run.
pub struct Collector {
    server: Server,
    audits: AuditPool,
    intake: Intake,
    actors: BTreeMap<ActorId, Actor>,
    local: Option<LocalActors>,
    interrupt: Interrupt,
    clock: Instant,
}

/// What a collector is made from.
pub struct CollectorParts {
    /// The network.
    pub server: Server,
    /// The audit.
    pub audits: AuditPool,
    /// What decides.
    pub intake: Intake,
    /// Actors that this program started.
    pub local: Option<LocalActors>,
    /// Whether the user wants it to stop.
    pub interrupt: Interrupt,
}

impl Collector {
    /// A collector without actors yet.
    pub fn new(parts: CollectorParts) -> Self {
        let CollectorParts { server, audits, intake, local, interrupt } = parts;
        let (actors, clock) = (BTreeMap::new(), Instant::now());
        Self { server, audits, intake, actors, local, interrupt, clock }
    }

    /// What happened so far.
    pub fn counts(&self) -> CollectCounts {
        self.intake.counts()
    }

    /// The same as a commit keeps it.
    pub fn settled_counts(&self) -> CollectCounts {
        self.intake.settled_counts()
    }

    /// Where every answer is.
    pub fn balance(&self) -> Balance {
        self.intake.balance()
    }

    /// Actors that are connected.
    pub fn actors(&self) -> usize {
        self.actors.len()
    }

    /// How long the audit's threads worked so far, all of them together.
    pub fn audited(&self) -> Duration {
        self.audits.worked()
    }

    /// Whether a group was ordered, now or before.
    pub fn knows(&self, group: u64) -> bool {
        self.intake.book().knows(group)
    }

    /// Where metrics are kept.
    pub fn metrics(&self) -> &Metrics {
        self.server.metrics()
    }

    /// Logs who joins to the run's directory.
    pub fn log_joins(&self, run: &Path) {
        self.server.log_joins(run);
    }

    /// Announces a policy: leases of later orders may name it.
    pub fn publish(&mut self, manifest: AdapterManifest, bytes: Vec<u8>) {
        let manifest = self.server.publish(manifest, bytes, self.intake.policies_kept());
        self.intake.publish(manifest);
    }

    /// Issues orders.
    ///
    /// # Errors
    /// A group's number was used before; the record cannot be kept.
    pub fn order(
        &mut self,
        orders: Vec<(u64, GroupOrder)>,
        witness: &mut dyn Witness,
    ) -> Result<(), Failure> {
        for (group, order) in orders {
            self.intake.order(group, order, witness)?;
        }
        Ok(())
    }

    /// Waits until each of these groups is complete or given up. Groups come back by number; they are
    /// over once they are [confirmed](Self::confirm).
    ///
    /// # Errors
    /// The user interrupts; an episode is refused and the recipe says abort; local actors cannot be
    /// kept alive.
    pub fn collect(
        &mut self,
        groups: &[u64],
        witness: &mut dyn Witness,
    ) -> Result<Vec<CollectedGroup>, Failure> {
        let mut complete: Vec<CollectedGroup> = Vec::new();
        let mut done = 0;
        let is_open = |this: &Self, group: &&u64| this.intake.book().is_open(**group);
        while groups.iter().any(|group| is_open(self, &group)) {
            for &group in groups {
                complete.extend(self.intake.take(group)?);
            }
            if !groups.iter().any(|group| is_open(self, &group)) {
                break;
            }
            self.attend(TICK, witness)?;
            let finished: usize = complete.iter().map(|group| group.rollouts.len()).sum();
            let known = self.intake.waiting() + finished;
            if known != done {
                done = known;
                witness.progress(done);
            }
        }
        complete.sort_by_key(|group| group.group);
        Ok(complete)
    }

    /// Waits at most `patience` for something to happen and deals with it.
    ///
    /// # Errors
    /// As [`Self::collect`].
    pub fn attend(&mut self, patience: Duration, witness: &mut dyn Witness) -> Result<(), Failure> {
        let metrics = self.metrics().clone();
        let counts = self.intake.counts();
        metrics.leases(&counts.leases, counts.unreadable);
        metrics.queue("episodes", self.intake.waiting());
        metrics.queue("leases", self.intake.book().waiting());
        let witness = &mut Measured { witness, metrics };
        if self.interrupt.raised() {
            return Err(Failure::Interrupted("interrupted".into()));
        }
        if let Some(local) = &mut self.local {
            for status in local.tend().map_err(Failure::mistake)? {
                warn!("a local actor ended with {status}; started another");
            }
        }
        self.intake.grant(self.now_ms(), witness)?;
        self.carry_out(witness)?;
        let mut patience = patience;
        for _ in 0..BURST {
            let Some(event) = self.server.next(patience) else { break };
            self.handle(event, witness)?;
            patience = Duration::ZERO;
        }
        self.intake.expire(self.now_ms());
        self.intake.drop_lost(witness)?;
        self.carry_out(witness)
    }

    /// These groups count: nothing about them changes any more.
    pub fn confirm(&mut self, groups: &[CollectedGroup]) {
        self.intake.confirm(groups);
    }

    /// As [`Intake::drop_stale`].
    ///
    /// # Errors
    /// The record cannot be kept.
    pub fn drop_stale(
        &mut self,
        groups: Vec<CollectedGroup>,
        witness: &mut dyn Witness,
    ) -> Result<Vec<CollectedGroup>, Failure> {
        self.intake.drop_stale(groups, witness)
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
        let witness = &mut Measured { witness, metrics: self.metrics().clone() };
        self.intake.refuse_collected(group, refused, witness)
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

    fn handle(&mut self, event: Event, witness: &mut dyn Witness) -> Result<(), Failure> {
        match event {
            Event::Joined(actor) => {
                info!(actor = %actor.id.0.short(), device = actor.device, slots = actor.slots, "joined");
                self.intake.joined(actor.id, actor.device.clone(), actor.connection);
                self.actors.insert(actor.id, actor);
            }
            Event::Said { actor, message } => {
                if let Some(answer) = self.intake.said(actor, message) {
                    self.audits.judge(answer, self.server.teller());
                }
            }
            Event::Judged(judged) => self.intake.judged(*judged, witness)?,
            Event::Gone { actor, connection, reason } => {
                self.intake.gone(actor, connection, &reason);
                if self.actors.get(&actor).is_some_and(|it| it.connection == connection) {
                    self.actors.remove(&actor);
                }
            }
            Event::TurnedAway { remote, failure } => {
                warn!(%remote, "not let in: {failure}");
                self.intake.turned_away();
            }
        }
        Ok(())
    }

    fn carry_out(&mut self, witness: &mut dyn Witness) -> Result<(), Failure> {
        for effect in self.intake.due(witness)? {
            match effect {
                Effect::Say(actor, message) => {
                    if let Some(actor) = self.actors.get(&actor) {
                        actor.say(message);
                    }
                }
                Effect::ShutOut(actor) => {
                    self.server.shut_out(actor);
                    self.actors.remove(&actor);
                }
            }
        }
        Ok(())
    }
}
