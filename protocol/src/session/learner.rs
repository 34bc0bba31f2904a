//! The learner's end of a session: who is let in, what was granted, what waits for its answer.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::Violation;
use crate::{Digest, LeaseId};
use crate::{
    EpisodeId, PolicyDigest,
    frame::{Frame, Kind, PROTOCOL_VERSION},
    message::{
        FromActor, FromLearner, Hello, LeaseAttempt, ModelDigests, RefusalCode, Refused, Welcome,
    },
    wire::{self, bounds::MAX_HELD},
};

/// What a learner wants of an actor, and what it tells one that fits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admission {
    /// The checkpoint that both sides must have.
    pub model: ModelDigests,
    /// The answer to an actor that has it.
    pub welcome: Welcome,
}

impl Admission {
    /// Whether an actor fits.
    ///
    /// # Errors
    /// The first thing in which it does not, with what to do about it.
    pub fn judge(&self, hello: &Hello) -> Result<(), Refused> {
        if hello.protocol != PROTOCOL_VERSION {
            return Err(Refused {
                code: RefusalCode::ProtocolVersion,
                message: crate::admission::version_refusal(hello.protocol),
                expected: PROTOCOL_VERSION.to_string(),
                got: hello.protocol.to_string(),
            });
        }
        let (want, got) = (&self.model, &hello.model);
        let checks = [
            (RefusalCode::Weights, "weights", want.weights, got.weights),
            (RefusalCode::Tokenizer, "tokenizer", want.tokenizer, got.tokenizer),
            (RefusalCode::Template, "chat template", want.template, got.template),
        ];
        checks
            .into_iter()
            .find(|(_, _, want, got)| want != got)
            .map_or(Ok(()), |(code, what, want, got)| Err(other_model(code, what, &want, &got)))
    }
}

fn other_model(code: RefusalCode, what: &str, want: &Digest, got: &Digest) -> Refused {
    Refused {
        code,
        message: format!(
            "model: the actor's {what} (sha256 {}) is not the learner's ({}): \
             start the actor with a copy of the learner's checkpoint directory",
            got.short(),
            want.short()
        ),
        expected: want.to_string(),
        got: got.to_string(),
    }
}

/// What a frame from an actor means.
#[derive(Debug, PartialEq, Eq)]
pub enum LearnerEvent {
    /// The first frame: judge it, then answer with [`LearnerSession::admit`].
    Hello(Hello),
    /// Anything later.
    Message(FromActor),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Opening,
    Judging,
    Established,
    Draining,
    Left,
}

/// One actor's session as the learner keeps it.
#[derive(Debug)]
pub struct LearnerSession {
    phase: Phase,
    /// Leases granted on this connection.
    granted: u64,
    /// Leases that the actor said it would take in all, on this connection.
    window: u64,
    outstanding: BTreeMap<LeaseId, u32>,
    unanswered: BTreeSet<EpisodeId>,
    held: VecDeque<PolicyDigest>,
}

impl Default for LearnerSession {
    fn default() -> Self {
        Self::new()
    }
}

impl LearnerSession {
    /// A session that waits for its hello.
    pub fn new() -> Self {
        Self {
            phase: Phase::Opening,
            granted: 0,
            window: 0,
            outstanding: BTreeMap::new(),
            unanswered: BTreeSet::new(),
            held: VecDeque::new(),
        }
    }

    /// Takes the next frame.
    ///
    /// # Errors
    /// The actor broke the protocol; the connection is to be closed.
    pub fn receive(&mut self, frame: Frame) -> Result<LearnerEvent, Violation> {
        let kind = frame.kind;
        let unexpected = |when| Err(Violation::Unexpected { kind, when });
        match (self.phase, kind) {
            (Phase::Opening, Kind::Hello) => {
                let hello = wire::decode_hello(&frame.body)?;
                self.phase = Phase::Judging;
                Ok(LearnerEvent::Hello(hello))
            }
            (Phase::Opening, _) => unexpected("before the hello"),
            (Phase::Judging, _) => unexpected("before the hello was answered"),
            (_, Kind::Hello) => unexpected("a second time"),
            (Phase::Left, _) => unexpected("after the actor left"),
            _ => {
                let message = wire::decode_from_actor(frame)?;
                self.note(&message);
                Ok(LearnerEvent::Message(message))
            }
        }
    }

    /// The hello was accepted: what it promised holds from here on.
    pub fn admit(&mut self, hello: &Hello) {
        self.phase = Phase::Established;
        self.held = hello.held.iter().copied().take(MAX_HELD).collect();
    }

    fn note(&mut self, message: &FromActor) {
        match message {
            FromActor::Ready { free, received } => {
                // An actor cannot have received what was not granted.
                self.window = (*received).min(self.granted) + u64::from(*free);
            }
            FromActor::Episode { id, body } => {
                self.unanswered.insert(*id);
                if let Some((_, lease)) = wire::peek_lease(body) {
                    self.outstanding.remove(&lease);
                }
            }
            FromActor::LeaseFailed { lease, .. } => self.settle(*lease),
            FromActor::Holding { policy } => {
                if !self.holds(policy) {
                    self.held.truncate(MAX_HELD - 1);
                    self.held.push_front(*policy);
                }
            }
            FromActor::ParentFailed { .. } => {}
            FromActor::Drain => self.phase = Phase::Draining,
            FromActor::Leave { returned } => {
                returned.iter().for_each(|lease| self.settle(*lease));
                self.phase = Phase::Left;
            }
        }
    }

    /// Notes what is about to be sent.
    pub fn sending(&mut self, message: &FromLearner) {
        match message {
            FromLearner::Grant(leases) => {
                self.granted += leases.len() as u64;
                self.outstanding.extend(leases.iter().map(|lease| (lease.id, lease.attempt)));
            }
            FromLearner::Ack { episode, .. } => {
                self.unanswered.remove(episode);
            }
            FromLearner::Revoke(leases) => leases.iter().for_each(|lease| self.settle(*lease)),
            FromLearner::Announce(_)
            | FromLearner::Parent(_)
            | FromLearner::Children(_)
            | FromLearner::Finish { .. } => {}
        }
    }

    fn settle(&mut self, lease: LeaseAttempt) {
        if self.outstanding.get(&lease.id) == Some(&lease.attempt) {
            self.outstanding.remove(&lease.id);
        }
    }

    /// How many more leases the actor would start at once; 0 once it drains. Granting more is
    /// allowed, since groups are granted whole: the actor plays them as slots become free.
    pub fn credit(&self) -> u64 {
        match self.phase {
            Phase::Established => self.window.saturating_sub(self.granted),
            _ => 0,
        }
    }

    /// Whether the actor is going away.
    pub fn is_draining(&self) -> bool {
        matches!(self.phase, Phase::Draining | Phase::Left)
    }

    /// Leases granted on this connection that are neither answered, failed, returned nor revoked:
    /// what is to be issued again when the connection ends.
    pub fn outstanding(&self) -> impl Iterator<Item = LeaseAttempt> + '_ {
        self.outstanding.iter().map(|(id, attempt)| LeaseAttempt { id: *id, attempt: *attempt })
    }

    /// Whether the actor said that it can play a policy.
    pub fn holds(&self, policy: &PolicyDigest) -> bool {
        self.held.contains(policy)
    }

    /// Episodes received and not acknowledged yet.
    pub fn unanswered(&self) -> usize {
        self.unanswered.len()
    }
}
