//! The actor's end of a session. It outlives connections: what was not acknowledged on one is sent
//! again on the next.

use bytes::Bytes;

use super::{Outbox, Violation};
use crate::{
    EpisodeId, RunId, WireError,
    frame::{Frame, Kind},
    message::{FromActor, FromLearner, Refused, Welcome},
    wire,
};

/// What a frame from the learner means.
#[derive(Debug, PartialEq)]
pub enum ActorEvent {
    /// Let in. Everything unacknowledged is to be sent again.
    Welcome(Welcome),
    /// Not let in.
    Refused(Refused),
    /// Anything later.
    Message(FromLearner),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Apart,
    HelloSent,
    Established,
    Over,
}

/// An actor's session with its learner, over all its connections.
#[derive(Debug)]
pub struct ActorSession {
    phase: Phase,
    epoch: u64,
    run: Option<RunId>,
    received: u64,
    outbox: Outbox,
}

impl Default for ActorSession {
    fn default() -> Self {
        Self::new()
    }
}

impl ActorSession {
    /// A session before its first connection.
    pub fn new() -> Self {
        Self { phase: Phase::Apart, epoch: 0, run: None, received: 0, outbox: Outbox::default() }
    }

    /// A new connection whose first frame, the hello, is being sent. Returns its epoch: whatever an
    /// older connection still does has no effect any more.
    pub fn connect(&mut self) -> u64 {
        self.epoch += 1;
        self.phase = Phase::HelloSent;
        self.received = 0;
        self.epoch
    }

    /// The connection of this epoch is gone.
    pub fn disconnect(&mut self, epoch: u64) {
        if epoch == self.epoch {
            self.phase = Phase::Apart;
        }
    }

    /// Takes the next frame.
    ///
    /// # Errors
    /// The learner broke the protocol; the connection is to be closed.
    pub fn receive(&mut self, epoch: u64, frame: Frame) -> Result<ActorEvent, Violation> {
        let kind = frame.kind;
        let unexpected = |when| Err(Violation::Unexpected { kind, when });
        if epoch != self.epoch {
            return unexpected("on a connection that was replaced");
        }
        match (self.phase, kind) {
            (Phase::HelloSent, Kind::Welcome) => {
                let welcome = wire::decode_welcome(&frame.body)?;
                self.phase = Phase::Established;
                self.run = Some(welcome.run);
                self.outbox.rewind();
                Ok(ActorEvent::Welcome(welcome))
            }
            (Phase::HelloSent, Kind::Refused) => {
                self.phase = Phase::Over;
                Ok(ActorEvent::Refused(wire::decode_refused(&frame.body)?))
            }
            (_, Kind::Welcome | Kind::Refused) => unexpected("when no hello waits for its answer"),
            (Phase::Established, _) => {
                let message = wire::decode_from_learner(frame)?;
                match &message {
                    FromLearner::Grant(leases) => self.received += leases.len() as u64,
                    FromLearner::Ack { episode, .. } => {
                        self.outbox.acknowledge(episode);
                    }
                    FromLearner::Finish { .. } => self.phase = Phase::Over,
                    FromLearner::Announce(_)
                    | FromLearner::Revoke(_)
                    | FromLearner::Parent(_)
                    | FromLearner::Children(_) => {}
                }
                Ok(ActorEvent::Message(message))
            }
            (Phase::Over, _) => unexpected("after the end of the run"),
            (Phase::Apart | Phase::HelloSent, _) => unexpected("before the welcome"),
        }
    }

    /// The message that says how many more episodes could start now, all leases received counted.
    pub fn ready(&self, free: u32) -> FromActor {
        FromActor::Ready { free, received: self.received }
    }

    /// Keeps an encoded episode until it is acknowledged.
    ///
    /// # Errors
    /// It is longer than a frame may be, so no learner would take it.
    pub fn submit(&mut self, body: Bytes) -> Result<EpisodeId, WireError> {
        wire::check_episode_len(body.len())?;
        Ok(self.outbox.push(body))
    }

    /// The next episode to send on the connection of this epoch; nothing before its welcome.
    pub fn next_to_send(&mut self, epoch: u64) -> Option<(EpisodeId, Bytes)> {
        let current = epoch == self.epoch && self.phase == Phase::Established;
        current.then(|| self.outbox.next_to_send()).flatten()
    }

    /// Unacknowledged episodes.
    pub fn outbox(&self) -> &Outbox {
        &self.outbox
    }

    /// The run of the last welcome.
    pub fn run(&self) -> Option<RunId> {
        self.run
    }

    /// Whether messages may be sent.
    pub fn is_established(&self) -> bool {
        self.phase == Phase::Established
    }
}
