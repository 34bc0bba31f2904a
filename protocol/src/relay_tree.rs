//! Who fetches adapters from whom: a tree of actors below the learner, as a state machine without I/O.
//!
//! The learner serves up to a fan-out of actors itself, and so does each actor that relays. Whoever has
//! no parent here fetches from the learner, so every actor has a way to it, whatever happens to others.
//! Parents are only a help: an actor that its parent fails goes back to the learner at once and is given
//! another one.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use crate::{
    ActorId, Digest,
    message::Parent,
    wire::bounds::{MAX_CHILDREN, MAX_RELAY_LEVEL},
};

/// Actors that a relay may fail until it is given no more.
const MAX_FAILED: usize = 3;
/// A failure counts for this long.
const FORGET: Duration = Duration::from_secs(600);

/// What an actor is told about its place.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assignment {
    /// Whom it asks first; the learner where there is none.
    pub parent: Option<Parent>,
    /// Whom it serves.
    pub children: BTreeSet<ActorId>,
}

#[derive(Debug)]
struct Node {
    /// Larger is later.
    joined: u64,
    /// Where the learner sees it.
    seen_at: IpAddr,
    /// Where others reach it, if it relays and does not go away.
    relay: Option<SocketAddr>,
    parent: Option<ActorId>,
    children: BTreeSet<ActorId>,
}

/// The tree. Times are counted from any one instant.
#[derive(Debug)]
pub struct RelayTree {
    fan_out: usize,
    nodes: BTreeMap<ActorId, Node>,
    joins: u64,
    /// Which parent failed which child, and when.
    failures: BTreeMap<(ActorId, ActorId), Duration>,
    touched: BTreeSet<ActorId>,
}

/// Whether what happened then still counts.
fn is_recent(at: Duration, now: Duration) -> bool {
    now.saturating_sub(at) < FORGET
}

impl RelayTree {
    /// An empty tree in which nobody has more than `fan_out` children ([`MAX_CHILDREN`] at most); 0 leaves
    /// everybody with the learner.
    pub fn new(fan_out: usize) -> Self {
        Self {
            fan_out: fan_out.min(MAX_CHILDREN),
            nodes: BTreeMap::new(),
            joins: 0,
            failures: BTreeMap::new(),
            touched: BTreeSet::new(),
        }
    }

    /// An actor joined, or joined again. `relay` is where it says that it listens for others: an address of
    /// zeros stands for the one at which the learner sees it.
    pub fn joined(
        &mut self,
        actor: ActorId,
        seen_at: IpAddr,
        relay: Option<SocketAddr>,
        now: Duration,
    ) {
        if self.fan_out == 0 {
            return;
        }
        self.remove(&actor);
        let seen_at = seen_at.to_canonical();
        let relay = relay.and_then(|relay| reached_at(relay, seen_at));
        self.joins += 1;
        let (parent, children) = (None, BTreeSet::new());
        self.nodes.insert(actor, Node { joined: self.joins, seen_at, relay, parent, children });
        self.touched.insert(actor);
        self.settle(now);
    }

    /// An actor is gone.
    pub fn left(&mut self, actor: &ActorId, now: Duration) {
        if self.remove(actor) {
            self.settle(now);
        }
    }

    /// An actor is about to go: it gets no children any more, and those that it has get other parents.
    pub fn draining(&mut self, actor: &ActorId, now: Duration) {
        let Some(node) = self.nodes.get_mut(actor) else { return };
        node.relay = None;
        self.orphan(actor);
        self.settle(now);
    }

    /// An actor says that its parent failed it. False where that is not its parent: an old story.
    pub fn failed(&mut self, child: &ActorId, parent: &ActorId, now: Duration) -> bool {
        if self.nodes.get(child).is_none_or(|node| node.parent != Some(*parent)) {
            return false;
        }
        self.failures.insert((*parent, *child), now);
        self.detach(child);
        if !self.trusted(parent, now) {
            self.orphan(parent);
        }
        self.settle(now);
        true
    }

    /// What an actor is to be told.
    pub fn assignment(&self, actor: &ActorId) -> Assignment {
        let Some(node) = self.nodes.get(actor) else { return Assignment::default() };
        let parent = node.parent.and_then(|parent| {
            let address = self.nodes.get(&parent)?.relay?;
            Some(Parent { actor: parent, address, level: u8::try_from(self.level(actor)).ok()? })
        });
        Assignment { parent, children: node.children.clone() }
    }

    /// Actors whose assignment may have changed since this was asked last.
    pub fn take_touched(&mut self) -> BTreeSet<ActorId> {
        std::mem::take(&mut self.touched)
    }

    /// Actors that fetch from another one.
    pub fn relayed(&self) -> usize {
        self.nodes.values().filter(|node| node.parent.is_some()).count()
    }

    /// How many relays are between an actor and the learner.
    fn level(&self, actor: &ActorId) -> usize {
        let above = |at: &ActorId| self.nodes.get(at).and_then(|node| node.parent);
        std::iter::successors(above(actor), above).count()
    }

    /// How many levels are below an actor.
    fn height(&self, actor: &ActorId) -> usize {
        let Some(node) = self.nodes.get(actor) else { return 0 };
        node.children.iter().map(|child| 1 + self.height(child)).max().unwrap_or(0)
    }

    /// Whether an actor is another one or below it.
    fn is_below(&self, actor: &ActorId, top: &ActorId) -> bool {
        let above = |at: &ActorId| self.nodes.get(at).and_then(|node| node.parent);
        std::iter::successors(Some(*actor), above).any(|at| at == *top)
    }

    /// Whether a relay failed few enough actors lately.
    fn trusted(&self, relay: &ActorId, now: Duration) -> bool {
        let all = (*relay, ActorId(Digest([0; 32])))..=(*relay, ActorId(Digest([0xff; 32])));
        let failed = self.failures.range(all).filter(|(_, at)| is_recent(**at, now));
        failed.count() < MAX_FAILED
    }

    fn touch_below(&mut self, actor: &ActorId) {
        self.touched.insert(*actor);
        let children = self.nodes.get(actor).map(|node| node.children.clone());
        children.iter().flatten().for_each(|child| self.touch_below(child));
    }

    fn attach(&mut self, child: &ActorId, parent: &ActorId) {
        if let Some(node) = self.nodes.get_mut(parent) {
            node.children.insert(*child);
            self.touched.insert(*parent);
        }
        if let Some(node) = self.nodes.get_mut(child) {
            node.parent = Some(*parent);
        }
        self.touch_below(child);
    }

    /// Gives an actor back to the learner, with what is below it.
    fn detach(&mut self, child: &ActorId) {
        let Some(parent) = self.nodes.get_mut(child).and_then(|node| node.parent.take()) else {
            return;
        };
        if let Some(node) = self.nodes.get_mut(&parent) {
            node.children.remove(child);
        }
        self.touched.insert(parent);
        self.touch_below(child);
    }

    fn orphan(&mut self, parent: &ActorId) {
        let children = self.nodes.get(parent).map(|node| node.children.clone());
        children.iter().flatten().for_each(|child| self.detach(child));
    }

    fn remove(&mut self, actor: &ActorId) -> bool {
        self.orphan(actor);
        self.detach(actor);
        self.touched.remove(actor);
        self.failures.retain(|(parent, _), _| parent != actor);
        self.nodes.remove(actor).is_some()
    }

    /// Moves actors from the learner to relays while it has too many and there is a place for one.
    fn settle(&mut self, now: Duration) {
        self.failures.retain(|_, at| is_recent(*at, now));
        loop {
            let direct = self.nodes.iter().filter(|(_, node)| node.parent.is_none());
            let mut direct: Vec<(&ActorId, &Node)> = direct.collect();
            if direct.len() <= self.fan_out {
                return;
            }
            // Who serves nobody goes down first, and of those who came last; relays stay near the top.
            direct.sort_by_key(|(_, node)| {
                (node.relay.is_some(), !node.children.is_empty(), Reverse(node.joined))
            });
            let relays: Vec<(&ActorId, &Node)> =
                self.nodes.iter().filter(|(relay, node)| self.has_room(relay, node, now)).collect();
            let found = direct
                .into_iter()
                .find_map(|(actor, node)| Some((*actor, self.place(actor, node, &relays)?)));
            match found {
                Some((child, parent)) => self.attach(&child, &parent),
                None => return,
            }
        }
    }

    fn has_room(&self, relay: &ActorId, node: &Node, now: Duration) -> bool {
        node.relay.is_some() && node.children.len() < self.fan_out && self.trusted(relay, now)
    }

    /// The relay nearest to the learner that can take an actor with all that is below it.
    fn place(&self, actor: &ActorId, node: &Node, relays: &[(&ActorId, &Node)]) -> Option<ActorId> {
        let below = self.height(actor);
        let fits = |(relay, at): &&(&ActorId, &Node)| {
            let reach =
                at.relay.is_some_and(|it| !it.ip().is_loopback() || node.seen_at.is_loopback());
            reach
                && !self.failures.contains_key(&(**relay, *actor))
                && !self.is_below(relay, actor)
                && self.level(relay) + 1 + below <= usize::from(MAX_RELAY_LEVEL)
        };
        let key =
            |(relay, at): &&(&ActorId, &Node)| (self.level(relay), at.children.len(), at.joined);
        relays.iter().filter(fits).min_by_key(key).map(|(relay, _)| **relay)
    }
}

/// Where others reach a relay; nowhere where it listens on IPv4 only and is seen at an IPv6 address.
fn reached_at(relay: SocketAddr, seen_at: IpAddr) -> Option<SocketAddr> {
    match relay.ip() {
        ip if !ip.is_unspecified() => Some(SocketAddr::new(ip.to_canonical(), relay.port())),
        IpAddr::V4(_) if seen_at.is_ipv6() => None,
        _ => Some(SocketAddr::new(seen_at, relay.port())),
    }
}
