//! Whatever actors do: the relay tree has no cycle, keeps its fan-out, every child has a way to the
//! learner, what actors were told is what holds, and nobody stays with the learner who has a place below.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use proptest::{collection::vec, prelude::*};
use protocol::{
    ActorId, Digest, Parent,
    relay_tree::{Assignment, RelayTree},
    wire::bounds::MAX_RELAY_LEVEL,
};

fn actor(number: u8) -> ActorId {
    ActorId(Digest([number; 32]))
}

fn ip(number: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, number])
}

fn port(number: u8) -> SocketAddr {
    SocketAddr::new(ip(number), 7272)
}

const NOW: Duration = Duration::from_secs(1);
const LATER: Duration = Duration::from_secs(2000);

#[derive(Clone, Copy, Debug)]
enum Deed {
    Joins { relays: bool },
    Leaves,
    Drains,
    FailedByItsParent,
}

/// The tree, and what its actors know of it by being told.
struct World {
    tree: RelayTree,
    fan_out: usize,
    told: BTreeMap<ActorId, Assignment>,
    relays: BTreeSet<ActorId>,
    now: Duration,
}

impl World {
    fn new(fan_out: usize) -> Self {
        let (told, relays) = (BTreeMap::new(), BTreeSet::new());
        Self { tree: RelayTree::new(fan_out), fan_out, told, relays, now: NOW }
    }

    fn joins(&mut self, number: u8, relays: bool) {
        self.told.insert(actor(number), Assignment::default());
        self.relays.remove(&actor(number));
        if relays {
            self.relays.insert(actor(number));
        }
        self.tree.joined(actor(number), ip(number), relays.then(|| port(number)), self.now);
        self.check();
    }

    fn does(&mut self, number: u8, deed: Deed) {
        let who = actor(number);
        match deed {
            Deed::Joins { relays } => return self.joins(number, relays),
            Deed::Leaves => {
                self.told.remove(&who);
                self.relays.remove(&who);
                self.tree.left(&who, self.now);
            }
            Deed::Drains => {
                self.relays.remove(&who);
                self.tree.draining(&who, self.now);
            }
            Deed::FailedByItsParent => {
                let parent = self.told.get(&who).and_then(|told| told.parent);
                let Some(Parent { actor: parent, .. }) = parent else { return };
                assert!(self.tree.failed(&who, &parent, self.now));
                assert!(!self.tree.failed(&who, &parent, self.now), "the same twice");
                let next = self.tree.assignment(&who).parent.map(|next| next.actor);
                assert_ne!(next, Some(parent), "the parent that just failed");
            }
        }
        self.check();
    }

    fn parent(&self, who: &ActorId) -> Option<ActorId> {
        self.told.get(who)?.parent.map(|parent| parent.actor)
    }

    fn check(&mut self) {
        for touched in self.tree.take_touched() {
            if let Some(told) = self.told.get_mut(&touched) {
                *told = self.tree.assignment(&touched);
            }
        }
        let mut relayed = 0;
        for (who, told) in &self.told {
            assert_eq!(*told, self.tree.assignment(who), "not told");
            assert!(told.children.len() <= self.fan_out, "{} children", told.children.len());
            assert!(told.children.is_empty() || self.relays.contains(who), "no relay");
            for child in &told.children {
                assert_eq!(self.parent(child), Some(*who), "a child that was told otherwise");
            }
            let Some(Parent { actor: parent, address, level }) = told.parent else { continue };
            relayed += 1;
            assert!(self.told[&parent].children.contains(who), "a parent that was not told");
            assert_eq!(address, port(parent.0.0[0]));
            // Up to the learner, which is further away than that by no way round.
            let way = std::iter::successors(Some(parent), |at| self.parent(at));
            let way: Vec<ActorId> = way.take(self.told.len() + 1).collect();
            assert_eq!(way.len(), usize::from(level), "a cycle, or a wrong level");
            assert!(level <= MAX_RELAY_LEVEL);
        }
        assert_eq!(relayed, self.tree.relayed());
    }

    fn direct(&self) -> Vec<ActorId> {
        let told = self.told.iter();
        told.filter(|(_, told)| told.parent.is_none()).map(|(who, _)| *who).collect()
    }
}

fn deeds() -> impl Strategy<Value = Deed> {
    prop_oneof![
        4 => any::<bool>().prop_map(|relays| Deed::Joins { relays }),
        1 => Just(Deed::Leaves),
        1 => Just(Deed::Drains),
        1 => Just(Deed::FailedByItsParent),
    ]
}

proptest! {
    #[test]
    fn it_stays_a_tree_whatever_actors_do(
        fan_out in 1_usize..5, deeds in vec((1_u8..40, deeds(), 0_u64..40), 1..120),
    ) {
        let mut world = World::new(fan_out);
        for (number, deed, seconds) in deeds {
            world.now += Duration::from_secs(seconds);
            world.does(number, deed);
        }
        // Time forgives, and one more who joins brings the tree into order.
        world.now += LATER;
        world.joins(50, true);
        let direct = world.direct();
        let room = |relay: &ActorId| {
            let told = &world.told[relay];
            let level = told.parent.map_or(0, |parent| parent.level);
            told.children.len() < fan_out && level < MAX_RELAY_LEVEL
        };
        let leaf = |who: &&ActorId| world.told[who].children.is_empty() && !world.relays.contains(who);
        if direct.len() > fan_out && direct.iter().any(|who| leaf(&who)) {
            prop_assert!(!world.relays.iter().any(room), "a leaf stays although there is room");
        }
    }
}

#[test]
fn relays_alone_make_a_full_tree_and_the_learner_serves_its_fan_out() {
    let mut world = World::new(2);
    for number in 1..=14 {
        world.joins(number, true);
    }
    let mut levels = BTreeMap::new();
    for told in world.told.values() {
        *levels.entry(told.parent.map_or(0, |parent| parent.level)).or_insert(0) += 1;
    }
    assert_eq!(levels, BTreeMap::from([(0, 2), (1, 4), (2, 8)]));
}

#[test]
fn those_who_came_first_make_room_for_relays() {
    let mut world = World::new(2);
    for number in 1..=4 {
        world.joins(number, false);
    }
    assert_eq!(world.direct().len(), 4, "nobody relays yet");
    world.joins(5, true);
    world.joins(6, true);
    // Two relays serve two each, and the learner the relays.
    assert_eq!(world.direct(), [actor(5), actor(6)]);
    world.does(5, Deed::Drains);
    // One relay is full; who has no place is with the learner.
    let direct = world.direct();
    assert_eq!(direct.len(), 4);
    assert!(direct.contains(&actor(6)) && world.told[&actor(6)].children.len() == 2);
}

#[test]
fn a_relay_that_fails_three_actors_is_given_nobody_until_that_is_forgotten() {
    let mut world = World::new(3);
    world.joins(1, true);
    for number in 2..=9 {
        world.joins(number, false);
    }
    for _ in 0..3 {
        let child = *world.told[&actor(1)].children.first().expect("served");
        world.does(child.0.0[0], Deed::FailedByItsParent);
    }
    assert!(world.told[&actor(1)].children.is_empty());
    assert_eq!(world.direct().len(), 9);
    world.now += LATER;
    world.joins(10, false);
    assert_eq!(world.told[&actor(1)].children.len(), 3);
    // Who comes back is a new one.
    for _ in 0..3 {
        let child = *world.told[&actor(1)].children.first().expect("served");
        world.does(child.0.0[0], Deed::FailedByItsParent);
    }
    assert!(world.told[&actor(1)].children.is_empty());
    world.joins(1, true);
    assert_eq!(world.told[&actor(1)].children.len(), 3);
}

#[test]
fn without_a_fan_out_nobody_is_told_anything() {
    let mut world = World::new(0);
    for number in 1..=9 {
        world.joins(number, true);
    }
    assert!(world.tree.take_touched().is_empty() && world.tree.relayed() == 0);
}

/// Where a child is told to look for the one relay there is.
fn advertised(relay: &str, seen_at: &str, child_at: &str) -> Option<String> {
    let mut tree = RelayTree::new(1);
    let parse = |text: &str| text.parse::<IpAddr>().expect("an address");
    tree.joined(actor(1), parse(seen_at), Some(relay.parse().expect("an address")), NOW);
    tree.joined(actor(2), parse(child_at), None, NOW);
    let parent = tree.assignment(&actor(2)).parent;
    parent.map(|parent| parent.address.to_string())
}

#[test]
fn a_relay_is_looked_for_where_it_listens_or_else_where_the_learner_sees_it() {
    let at = |relay, seen_at| advertised(relay, seen_at, "10.0.0.9");
    assert_eq!(at("192.168.1.5:9", "10.0.0.1").as_deref(), Some("192.168.1.5:9"));
    assert_eq!(at("0.0.0.0:9", "10.0.0.1").as_deref(), Some("10.0.0.1:9"));
    assert_eq!(at("0.0.0.0:9", "::ffff:10.0.0.1").as_deref(), Some("10.0.0.1:9"));
    assert_eq!(at("[::]:9", "2001:db8::1").as_deref(), Some("[2001:db8::1]:9"));
    assert_eq!(at("[::]:9", "10.0.0.1").as_deref(), Some("10.0.0.1:9"));
    assert_eq!(at("0.0.0.0:9", "2001:db8::1"), None, "it listens on IPv4 only");
    // A port of this machine is none for others.
    assert_eq!(at("0.0.0.0:9", "127.0.0.1"), None);
    let near = advertised("0.0.0.0:9", "127.0.0.1", "127.0.0.1");
    assert_eq!(near.as_deref(), Some("127.0.0.1:9"));
}
