//! Time, the network and the machines: everything that can go wrong, decided by a seed.
//!
//! A link is a control stream in order, episodes that overtake each other and it, and an end that either side
//! hears of in its own time, as QUIC gives them: a packet that is lost makes what it carried late. An
//! episode may arrive twice. What is under way when a link is cut is lost.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, BinaryHeap},
    sync::Arc,
};

use actor::{desk::Desk, spool::Spool};
use learner::{audit::Judged, train::intake::Flaws};
use protocol::{
    AckOutcome, ActorId, Digest, EpisodeId, FromActor, FromLearner, Hello, Lease, LeaseId,
    ModelDigests, RunSettings, Welcome,
    frame::{Frame, Kind},
    session::{ActorEvent, ActorSession, LearnerEvent, LearnerSession},
    wire,
};

use crate::{
    disk::{Dice, SimDisk},
    game,
    learner::{Disks, SimLearner},
};

/// Simulated milliseconds after which a run must be over.
const END: u64 = 3_600_000;

/// What a seed decides about a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) seed: u64,
    pub(crate) actors: usize,
    pub(crate) steps: u32,
    pub(crate) staleness: u32,
    /// Percent of messages that come late.
    pub(crate) loss: u64,
    /// Percent of episodes that arrive twice.
    pub(crate) duplication: u64,
    /// Whether actors compute on different devices.
    pub(crate) mixed: bool,
    pub(crate) flaws: Flaws,
}

/// What happened in a run.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Stats {
    pub(crate) learner_crashes: u64,
    pub(crate) actor_crashes: u64,
    pub(crate) cuts: u64,
    pub(crate) left: u64,
    pub(crate) duplicates: u64,
    pub(crate) late: u64,
    pub(crate) rejected: u64,
    pub(crate) restored: u64,
    pub(crate) events: u64,
}

#[derive(Debug)]
enum Event {
    ToLearner(u64, Frame),
    ToActor(u64, Frame),
    LearnerSees(u64),
    ActorSees(u64),
    Connect(usize, u64),
    Judged(u64, Box<Judged>),
    Played(usize, u64, LeaseId, u64),
    Attend(u64),
    Updated(u64),
    CrashLearner,
    StartLearner,
    CrashActor(usize),
    StartActor(usize),
    Cut(usize),
    Closed(u64),
    Leave(usize),
}

/// When, in which order, and what.
#[derive(Debug)]
struct Due(u64, u64, Event);

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        (self.0, self.1) == (other.0, other.1)
    }
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.0, self.1).cmp(&(other.0, other.1))
    }
}

/// A link while it carries anything.
struct Link {
    actor: usize,
    epoch: u64,
    up_at: u64,
    down_at: u64,
}

struct SimActor {
    disk: SimDisk,
    life: u64,
    alive: bool,
    leaving: bool,
    /// The learner knows that it leaves, on this link.
    drained: bool,
    left: bool,
    session: ActorSession,
    desk: Option<Desk>,
    link: Option<u64>,
    epoch: u64,
    free: Option<u32>,
    /// Leases that are played, with a token that tells a later playing from an earlier.
    playing: BTreeMap<LeaseId, (u64, Lease)>,
}

pub(crate) struct World {
    settings: Settings,
    dice: Dice,
    now: u64,
    order: u64,
    queue: BinaryHeap<Reverse<Due>>,
    disks: Disks,
    learner: Option<SimLearner>,
    learner_life: u64,
    attending: bool,
    sessions: BTreeMap<u64, LearnerSession>,
    seats: BTreeMap<ActorId, u64>,
    links: BTreeMap<u64, Link>,
    next_link: u64,
    actors: Vec<SimActor>,
    /// What a learner said that it stored.
    promised: BTreeSet<EpisodeId>,
    pub(crate) stats: Stats,
}

fn id(actor: usize) -> ActorId {
    ActorId(Digest::of(&[actor as u8]))
}

fn hello() -> Hello {
    let digest = game::weights();
    let model = ModelDigests { weights: digest, tokenizer: digest, template: digest };
    Hello::new(model, "cpu", 4)
}

fn welcome() -> Welcome {
    let settings = RunSettings {
        environment: "{}".into(),
        system: None,
        chat_template_kwargs: "{}".into(),
        max_completion_length: 1,
        max_tool_calling_iterations: 1,
        on_malformed: protocol::OnMalformed::Observe,
        lora: "{}".into(),
        compute_dtype: protocol::ComputeDtype::F32,
    };
    Welcome { run: game::run(), settings }
}

fn frame(kind: Kind, body: Vec<u8>) -> Frame {
    Frame { kind, digest: Digest::of(&body), body }
}

impl World {
    pub(crate) fn new(settings: Settings) -> Self {
        let actors = (0..settings.actors).map(|at| SimActor {
            disk: SimDisk::new(&format!("spool {at}")),
            life: 0,
            alive: false,
            leaving: false,
            drained: false,
            left: false,
            session: ActorSession::new(),
            desk: None,
            link: None,
            epoch: 0,
            free: None,
            playing: BTreeMap::new(),
        });
        Self {
            settings,
            dice: Dice(settings.seed),
            now: 0,
            order: 0,
            queue: BinaryHeap::new(),
            disks: Disks::new(),
            learner: None,
            learner_life: 0,
            attending: false,
            sessions: BTreeMap::new(),
            seats: BTreeMap::new(),
            links: BTreeMap::new(),
            next_link: 0,
            actors: actors.collect(),
            promised: BTreeSet::new(),
            stats: Stats::default(),
        }
    }

    fn at(&mut self, after: u64, event: Event) {
        self.order += 1;
        self.queue.push(Reverse(Due(self.now + after, self.order, event)));
    }

    /// Runs to the end and checks it.
    pub(crate) fn run(&mut self) -> Result<(), String> {
        self.at(0, Event::StartLearner);
        for actor in 0..self.settings.actors {
            let late = self.dice.between(0, 20_000);
            self.at(late, Event::StartActor(actor));
            for _ in 0..self.dice.between(0, 4) {
                let when = self.dice.between(0, 60_000);
                self.at(when, Event::CrashActor(actor));
                let when = self.dice.between(0, 60_000);
                self.at(when, Event::Cut(actor));
            }
            // Somebody stays.
            if actor > 0 && self.dice.chance(20) {
                let when = self.dice.between(5_000, 60_000);
                self.at(when, Event::Leave(actor));
            }
        }
        for _ in 0..self.dice.between(0, 6) {
            let when = self.dice.between(0, 60_000);
            self.at(when, Event::CrashLearner);
        }
        while let Some(Reverse(Due(when, _, event))) = self.queue.pop() {
            self.now = when;
            self.stats.events += 1;
            if self.now > END {
                let step = self.learner.as_ref().map(|it| it.step);
                return Err(format!("the run does not end: step {step:?}"));
            }
            self.happens(event)?;
            if self.learner.as_ref().is_some_and(SimLearner::is_done) {
                return self.check();
            }
        }
        Err("nothing happens any more".into())
    }

    fn check(&mut self) -> Result<(), String> {
        let Some(learner) = &self.learner else { return Ok(()) };
        let counts = learner.intake.counts().leases;
        let balance = learner.intake.balance();
        if !balance.holds() || balance.ready > 0 {
            return Err(format!("{balance}"));
        }
        let wanted = u64::from(self.settings.steps * game::GROUPS * game::GENERATIONS);
        if (counts.consumed, counts.groups_dropped) != (wanted, 0) {
            return Err(format!("{wanted} episodes should be used: {counts:?}"));
        }
        let book = learner.intake.book();
        if book.waiting() + book.outstanding() > 0 {
            return Err("leases are left without an end".into());
        }
        if counts.granted != counts.submitted + counts.failed + counts.expired {
            return Err(format!("grants are left without an end: {counts:?}"));
        }
        let expected = game::undisturbed(self.settings.steps, self.settings.staleness);
        if !self.settings.mixed && learner.policy() != expected {
            return Err("it is another policy than that of an undisturbed run".into());
        }
        self.stats.duplicates = counts.duplicates;
        self.stats.late = counts.late;
        self.stats.rejected = counts.rejected;
        // What was promised is there after the last crash, too.
        self.learner = None;
        self.disks.crash(&mut self.dice);
        let again = self.start_learner()?;
        if again.step != self.settings.steps {
            return Err("the last step is not there after a crash".into());
        }
        if again.intake.counts().leases.consumed != wanted {
            return Err("a restart counts otherwise".into());
        }
        Ok(())
    }

    fn start_learner(&mut self) -> Result<SimLearner, String> {
        let Settings { steps, staleness, flaws, .. } = self.settings;
        let learner = SimLearner::start(&self.disks, steps, staleness, flaws)?;
        let known: BTreeSet<EpisodeId> = self.disks.known()?.into_iter().collect();
        match self.promised.iter().find(|id| !known.contains(id)) {
            Some(lost) => Err(format!("episode {lost} was acknowledged, and is lost")),
            None => Ok(learner),
        }
    }

    fn happens(&mut self, event: Event) -> Result<(), String> {
        match event {
            Event::StartLearner => {
                if self.learner.is_none() {
                    self.learner_life += 1;
                    self.learner = Some(self.start_learner()?);
                    self.attend_soon();
                    self.at(1000, Event::Attend(self.learner_life));
                }
            }
            Event::CrashLearner => {
                if self.learner.take().is_some() {
                    self.stats.learner_crashes += 1;
                    self.learner_life += 1;
                    self.disks.crash(&mut self.dice);
                    (self.sessions, self.seats) = Default::default();
                    for link in self.links.keys().copied().collect::<Vec<u64>>() {
                        self.cut(link);
                    }
                    let pause = self.dice.between(100, 20_000);
                    self.at(pause, Event::StartLearner);
                }
            }
            Event::Attend(life) if life == self.learner_life => self.attend()?,
            Event::Updated(life) if life == self.learner_life => {
                if let Some(learner) = &mut self.learner {
                    learner.updated()?;
                    self.attend_soon();
                }
            }
            Event::Judged(life, judged) if life == self.learner_life => {
                if let Some(learner) = &mut self.learner {
                    learner.judged(*judged)?;
                    self.attend_soon();
                }
            }
            Event::ToLearner(link, frame) => self.learner_hears(link, frame)?,
            Event::LearnerSees(link) => {
                let session = self.sessions.remove(&link);
                let seat = self.seats.iter().find(|(_, it)| **it == link).map(|(id, _)| *id);
                if let (Some(learner), Some(_), Some(actor)) = (&mut self.learner, session, seat) {
                    self.seats.remove(&actor);
                    learner.intake.gone(actor, link, "cut");
                    self.attend_soon();
                }
            }
            Event::Attend(_) | Event::Updated(_) | Event::Judged(..) => {}
            Event::StartActor(actor) => self.start_actor(actor)?,
            Event::CrashActor(actor) => self.crash_actor(actor),
            Event::Connect(actor, life) => self.connect(actor, life)?,
            Event::ToActor(link, frame) => self.actor_hears(link, frame)?,
            Event::ActorSees(link) => self.actor_sees(link),
            Event::Played(actor, life, lease, token) => self.played(actor, life, lease, token)?,
            Event::Cut(actor) => {
                if let Some(link) = self.actors[actor].link {
                    self.stats.cuts += 1;
                    self.cut(link);
                }
            }
            Event::Closed(link) => self.cut(link),
            Event::Leave(actor) => {
                self.actors[actor].leaving = true;
                self.say(actor, &FromActor::Drain);
                self.settle(actor)?;
            }
        }
        Ok(())
    }

    /// Nothing more passes, and each side hears of it in its own time.
    fn cut(&mut self, link: u64) {
        if self.links.remove(&link).is_some() {
            for event in [Event::LearnerSees(link), Event::ActorSees(link)] {
                let after = self.dice.between(0, 35_000);
                self.at(after, event);
            }
        }
    }

    /// How long a message is under way.
    fn delay(&mut self) -> u64 {
        let late = if self.dice.chance(self.settings.loss) { 3000 } else { 0 };
        self.dice.between(1, 40) + self.dice.between(0, late + 1)
    }

    // The learner's side.

    fn attend_soon(&mut self) {
        if !std::mem::replace(&mut self.attending, true) {
            let after = self.dice.between(0, 50);
            self.at(after, Event::Attend(self.learner_life));
        }
    }

    fn attend(&mut self) -> Result<(), String> {
        self.attending = false;
        let Some(learner) = &mut self.learner else { return Ok(()) };
        let (said, begins) = learner.attend(self.now)?;
        let outstanding = learner.intake.book().outstanding() > 0;
        for (actor, message) in said {
            self.tell(actor, &message);
        }
        if begins {
            let busy = self.dice.between(10, 5000);
            self.at(busy, Event::Updated(self.learner_life));
        }
        if outstanding {
            self.attending = true;
            self.at(1000, Event::Attend(self.learner_life));
        }
        Ok(())
    }

    fn tell(&mut self, actor: ActorId, message: &FromLearner) {
        let Some(&link) = self.seats.get(&actor) else { return };
        if let Some(session) = self.sessions.get_mut(&link) {
            session.sending(message);
        }
        let (kind, body) = wire::encode_from_learner(message).expect("sound");
        self.send_down(link, frame(kind, body));
    }

    fn send_down(&mut self, link: u64, frame: Frame) {
        let delay = self.delay();
        let Some(it) = self.links.get_mut(&link) else { return };
        // In order.
        it.down_at = it.down_at.max(self.now + delay);
        let after = it.down_at - self.now;
        self.at(after, Event::ToActor(link, frame));
    }

    fn learner_hears(&mut self, link: u64, received: Frame) -> Result<(), String> {
        let Some(carries) = self.links.get(&link) else { return Ok(()) };
        let actor = id(carries.actor);
        let Some(learner) = &mut self.learner else { return Ok(()) };
        let session = self.sessions.entry(link).or_default();
        match session.receive(received).map_err(|e| e.to_string())? {
            LearnerEvent::Hello(hello) => {
                session.admit(&hello);
                if let Some(older) = self.seats.insert(actor, link) {
                    self.sessions.remove(&older);
                }
                let body = wire::encode_welcome(&welcome()).map_err(|e| e.to_string())?;
                learner.intake.joined(actor, "cpu".into(), link);
                self.send_down(link, frame(Kind::Welcome, body));
                self.attend_soon();
            }
            // A link that was replaced says nothing any more.
            LearnerEvent::Message(_) if self.seats.get(&actor) != Some(&link) => {}
            LearnerEvent::Message(message) => {
                if let Some(answer) = learner.said(actor, message) {
                    let judged = Box::new(game::judge(answer));
                    let busy = self.dice.between(1, 3000);
                    self.at(busy, Event::Judged(self.learner_life, judged));
                }
                self.attend_soon();
            }
        }
        Ok(())
    }

    // The actors' side.

    fn start_actor(&mut self, actor: usize) -> Result<(), String> {
        let it = &mut self.actors[actor];
        if it.alive || it.left {
            return Ok(());
        }
        it.life += 1;
        it.alive = true;
        it.session = ActorSession::new();
        let (spool, _) = Spool::open(Arc::new(it.disk.clone())).map_err(|e| e.to_string())?;
        let mut desk = Desk::new(game::run(), 4, 2000, Some(spool));
        for body in desk.take_up().map_err(|e| e.to_string())? {
            self.stats.restored += 1;
            it.session.submit(body).map_err(|e| e.to_string())?;
        }
        it.desk = Some(desk);
        let life = it.life;
        self.at(0, Event::Connect(actor, life));
        Ok(())
    }

    fn crash_actor(&mut self, actor: usize) {
        let it = &mut self.actors[actor];
        if !it.alive {
            return;
        }
        self.stats.actor_crashes += 1;
        it.life += 1;
        it.alive = false;
        it.desk = None;
        it.free = None;
        it.playing.clear();
        it.disk.crash(&mut self.dice);
        if let Some(link) = it.link.take() {
            self.cut(link);
        }
        let pause = self.dice.between(100, 20_000);
        self.at(pause, Event::StartActor(actor));
    }

    fn connect(&mut self, actor: usize, life: u64) -> Result<(), String> {
        let it = &mut self.actors[actor];
        if !it.alive || it.life != life || it.link.is_some() || it.left {
            return Ok(());
        }
        if self.learner.is_none() {
            let pause = self.dice.between(200, 5000);
            self.at(pause, Event::Connect(actor, life));
            return Ok(());
        }
        let epoch = it.session.connect();
        it.epoch = epoch;
        self.next_link += 1;
        let link = self.next_link;
        it.link = Some(link);
        it.free = None;
        self.links.insert(link, Link { actor, epoch, up_at: self.now, down_at: self.now });
        let body = wire::encode_hello(&hello()).map_err(|e| e.to_string())?;
        self.send_up(link, frame(Kind::Hello, body));
        Ok(())
    }

    fn send_up(&mut self, link: u64, frame: Frame) {
        let delay = self.delay();
        let Some(it) = self.links.get_mut(&link) else { return };
        it.up_at = it.up_at.max(self.now + delay);
        let after = it.up_at - self.now;
        self.at(after, Event::ToLearner(link, frame));
    }

    fn say(&mut self, actor: usize, message: &FromActor) {
        let it = &self.actors[actor];
        if let (Some(link), true) = (it.link, it.session.is_established()) {
            let (kind, body) = wire::encode_from_actor(message).expect("sound");
            self.send_up(link, frame(kind, body));
        }
    }

    fn actor_sees(&mut self, link: u64) {
        let Some(actor) = self.actors.iter().position(|it| it.link == Some(link)) else { return };
        let it = &mut self.actors[actor];
        it.link = None;
        it.session.disconnect(it.epoch);
        let life = it.life;
        let pause = self.dice.between(200, 5000);
        self.at(pause, Event::Connect(actor, life));
    }

    fn actor_hears(&mut self, link: u64, received: Frame) -> Result<(), String> {
        let Some(&Link { actor, epoch, .. }) = self.links.get(&link) else { return Ok(()) };
        let it = &mut self.actors[actor];
        if it.link != Some(link) || it.left {
            return Ok(());
        }
        let Some(desk) = &mut it.desk else { return Ok(()) };
        let play = match it.session.receive(epoch, received).map_err(|e| e.to_string())? {
            ActorEvent::Welcome(_) => {
                it.drained = false;
                if it.leaving {
                    self.say(actor, &FromActor::Drain);
                }
                Vec::new()
            }
            ActorEvent::Refused(refused) => return Err(refused.to_string()),
            ActorEvent::Message(FromLearner::Grant(leases)) => desk.granted(leases),
            ActorEvent::Message(FromLearner::Ack { episode, outcome }) => {
                if !matches!(outcome, AckOutcome::Rejected { .. }) {
                    self.promised.insert(episode);
                }
                let again = desk.acknowledged(&episode, &outcome).map_err(|e| e.to_string())?;
                again.into_iter().collect()
            }
            ActorEvent::Message(FromLearner::Revoke(leases)) => {
                it.drained |= it.leaving && leases.is_empty();
                for lease in leases {
                    if desk.revoked(lease) {
                        it.playing.remove(&lease.id);
                    }
                }
                Vec::new()
            }
            ActorEvent::Message(
                FromLearner::Announce(_)
                | FromLearner::Parent(_)
                | FromLearner::Children(_)
                | FromLearner::Finish { .. },
            ) => Vec::new(),
        };
        for lease in play {
            self.order += 1;
            let token = self.order;
            // Some tasks are slow.
            let slow = if lease.id.group % 3 == 1 { 8 } else { 1 };
            let busy = self.dice.between(50, 2000) * slow;
            let it = &mut self.actors[actor];
            let (life, id) = (it.life, lease.id);
            it.playing.insert(id, (token, lease));
            self.at(busy, Event::Played(actor, life, id, token));
        }
        self.settle(actor)
    }

    fn played(
        &mut self,
        actor: usize,
        life: u64,
        lease: LeaseId,
        token: u64,
    ) -> Result<(), String> {
        let it = &mut self.actors[actor];
        if it.life != life || it.playing.get(&lease).is_none_or(|(own, _)| *own != token) {
            return Ok(());
        }
        let Some((_, lease)) = it.playing.remove(&lease) else { return Ok(()) };
        let Some(desk) = &mut it.desk else { return Ok(()) };
        if self.dice.chance(3) {
            if let Some(lease) = desk.failed(lease.id) {
                self.say(actor, &FromActor::LeaseFailed { lease, reason: "no luck".into() });
            }
            return self.settle(actor);
        }
        let variant = if self.settings.mixed { actor as u32 } else { 0 };
        let forged = lease.attempt == 0 && self.dice.chance(5);
        let body = game::episode(&lease, variant, forged);
        desk.played(lease.id, &body).map_err(|e| e.to_string())?;
        it.session.submit(body.into()).map_err(|e| e.to_string())?;
        self.settle(actor)
    }

    /// Sends what waits, says what is free, and leaves where everything is done.
    fn settle(&mut self, actor: usize) -> Result<(), String> {
        let it = &mut self.actors[actor];
        let (Some(link), true) = (it.link, it.session.is_established()) else { return Ok(()) };
        let Some(epoch) = self.links.get(&link).map(|it| it.epoch) else { return Ok(()) };
        let mut bodies = Vec::new();
        while let Some((_, body)) = it.session.next_to_send(epoch) {
            bodies.push(body.to_vec());
        }
        for body in bodies {
            // On streams of their own, and now and then twice.
            let copies = 1 + u64::from(self.dice.chance(self.settings.duplication));
            for _ in 0..copies {
                let after = self.delay();
                self.at(after, Event::ToLearner(link, frame(Kind::Episode, body.clone())));
            }
        }
        let it = &mut self.actors[actor];
        let Some(desk) = &it.desk else { return Ok(()) };
        let free = desk.free();
        if it.free != Some(free) {
            it.free = Some(free);
            let ready = it.session.ready(free);
            self.say(actor, &ready);
        }
        let it = &mut self.actors[actor];
        if it.drained && !it.left && it.desk.as_ref().is_some_and(Desk::is_clear) {
            self.stats.left += 1;
            self.say(actor, &FromActor::Leave { returned: Vec::new() });
            let it = &mut self.actors[actor];
            (it.left, it.alive) = (true, false);
            // The link ends when the good-bye has come through.
            let after = self.links.get(&link).map_or(0, |it| it.up_at - self.now);
            self.at(after, Event::Closed(link));
        }
        Ok(())
    }
}
