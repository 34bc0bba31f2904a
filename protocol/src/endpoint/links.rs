//! The live links of a learner, and which of its actors fetch adapters from which.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use quinn::Connection;
use tokio::{sync::watch, time::Instant};

use super::to_actor::ToActor;
use crate::{
    ActorId, FromLearner,
    relay_tree::{Assignment, RelayTree},
};

/// How many actors fetch from others, and how often that failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RelayCounts {
    /// Actors whose parent is another actor.
    pub relayed: usize,
    /// Parents that their children reported since the learner started.
    pub failures: u64,
}

struct Live {
    connection: Connection,
    place: watch::Sender<Assignment>,
}

struct State {
    live: HashMap<ActorId, Live>,
    tree: RelayTree,
    failures: u64,
    began: Instant,
}

/// One link an actor. Cheap to clone.
#[derive(Clone)]
pub(super) struct Links(Arc<Mutex<State>>);

impl Links {
    /// No links yet; nobody serves adapters to more than `fan_out` actors.
    pub(super) fn new(fan_out: usize) -> Self {
        Self(Arc::new(Mutex::new(State {
            live: HashMap::new(),
            tree: RelayTree::new(fan_out),
            failures: 0,
            began: Instant::now(),
        })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many actors but this one are here.
    pub(super) fn others(&self, actor: &ActorId) -> usize {
        self.state().live.keys().filter(|other| *other != actor).count()
    }

    /// A new link, in place of an older one, which is returned. What the actor is to be told of its place
    /// appears in the receiver.
    pub(super) fn insert(
        &self,
        actor: ActorId,
        connection: Connection,
        relay: Option<SocketAddr>,
    ) -> (Option<Connection>, watch::Receiver<Assignment>) {
        let mut state = self.state();
        let seen_at = connection.remote_address().ip();
        let (place, placed) = watch::channel(Assignment::default());
        let old = state.live.insert(actor, Live { connection, place });
        let now = state.began.elapsed();
        state.tree.joined(actor, seen_at, relay, now);
        state.tell();
        (old.map(|old| old.connection), placed)
    }

    /// An actor's link is no more.
    pub(super) fn remove(&self, actor: &ActorId) -> Option<Connection> {
        self.state().remove(actor)
    }

    /// The same where that link is this connection and not a newer one.
    pub(super) fn remove_own(&self, actor: &ActorId, connection: &Connection) {
        let mut state = self.state();
        let current = state.live.get(actor).map(|live| live.connection.stable_id());
        if current == Some(connection.stable_id()) {
            state.remove(actor);
        }
    }

    /// An actor is about to go.
    pub(super) fn draining(&self, actor: &ActorId) {
        let mut state = self.state();
        let now = state.began.elapsed();
        state.tree.draining(actor, now);
        state.tell();
    }

    /// An actor says that its parent failed.
    pub(super) fn parent_failed(&self, child: &ActorId, parent: &ActorId, reason: &str) {
        let mut state = self.state();
        let now = state.began.elapsed();
        if state.tree.failed(child, parent, now) {
            state.failures += 1;
            let (child, parent) = (child.0.short(), parent.0.short());
            tracing::warn!(%child, %parent, "no adapters from that actor: {reason}");
            state.tell();
        }
    }

    /// What there is to count.
    pub(super) fn counts(&self) -> RelayCounts {
        let state = self.state();
        RelayCounts { relayed: state.tree.relayed(), failures: state.failures }
    }
}

impl State {
    fn remove(&mut self, actor: &ActorId) -> Option<Connection> {
        let live = self.live.remove(actor)?;
        let now = self.began.elapsed();
        self.tree.left(actor, now);
        self.tell();
        Some(live.connection)
    }

    /// Hands what changed to the links' own tasks: nothing here waits.
    fn tell(&mut self) {
        for actor in self.tree.take_touched() {
            let Some(live) = self.live.get(&actor) else { continue };
            let assignment = self.tree.assignment(&actor);
            live.place.send_if_modified(|told| {
                let news = *told != assignment;
                *told = assignment;
                news
            });
        }
    }
}

/// Tells an actor its place, and again whenever it changes, until its link ends.
pub(super) async fn tell_place(to_actor: ToActor, mut placed: watch::Receiver<Assignment>) {
    let mut told = Assignment::default();
    loop {
        let now = placed.borrow_and_update().clone();
        // Whom it may serve comes first: the child may be quicker.
        if now.children != told.children {
            let message = FromLearner::Children(now.children.clone());
            if to_actor.send(message).await.is_err() {
                return;
            }
        }
        if now.parent != told.parent
            && to_actor.send(FromLearner::Parent(now.parent)).await.is_err()
        {
            return;
        }
        told = now;
        if placed.changed().await.is_err() {
            return;
        }
    }
}
