//! Messages as plain values: what an actor tells its learner and what the learner answers.
//!
//! How they look on the wire, and what is refused there, is [`crate::wire`]'s business.

use std::{collections::BTreeSet, fmt, net::SocketAddr};

use crate::{
    ActorId, AdapterManifest, Digest, EpisodeId, Lease, LeaseId, PolicyDigest, RunId,
    frame::PROTOCOL_VERSION,
};

/// What must be equal at both ends before an actor may play: the same base weights, the same
/// tokenizer and the same chat template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelDigests {
    /// Base weights and configuration.
    pub weights: Digest,
    /// Tokenizer.
    pub tokenizer: Digest,
    /// Chat template text.
    pub template: Digest,
}

/// An actor's first message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The sender's [`PROTOCOL_VERSION`].
    pub protocol: u16,
    /// The checkpoint that it was started with.
    pub model: ModelDigests,
    /// Program and release, for the learner's log.
    pub program: String,
    /// The device that it samples on, for the learner's log.
    pub device: String,
    /// How many episodes it keeps in flight, at least 1.
    pub slots: u32,
    /// Policies that it holds already, from an earlier connection.
    pub held: Vec<PolicyDigest>,
    /// Where it serves adapters to other actors, if it does; an address of zeros stands for the one at
    /// which the learner sees it.
    pub relay: Option<SocketAddr>,
}

impl Hello {
    /// A hello of this release.
    pub fn new(model: ModelDigests, device: impl Into<String>, slots: u32) -> Self {
        Self {
            protocol: PROTOCOL_VERSION,
            model,
            program: concat!("rollcall ", env!("CARGO_PKG_VERSION")).to_owned(),
            device: device.into(),
            slots,
            held: Vec::new(),
            relay: None,
        }
    }
}

/// What a malformed tool call does to an episode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnMalformed {
    /// The policy is told, and goes on.
    Observe,
    /// The episode ends.
    End,
}

/// Number format of the forward pass at the actors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ComputeDtype {
    /// 32-bit floats.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
}

impl fmt::Display for ComputeDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        })
    }
}

/// Everything about a run that an actor must do as the learner does, or the audit would disagree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunSettings {
    /// The recipe's `environment` section, its limits included, compact JSON text.
    pub environment: String,
    /// System text, where the recipe has one.
    pub system: Option<String>,
    /// The recipe's `chat_template_kwargs`, compact JSON text of an object.
    pub chat_template_kwargs: String,
    /// Most ids after the prompt, sampled and external together.
    pub max_completion_length: u32,
    /// Rounds of tool calls; one more generation is allowed, whose calls are not executed.
    pub max_tool_calling_iterations: u32,
    /// What a malformed call does.
    pub on_malformed: OnMalformed,
    /// The recipe's `lora` section, compact JSON text.
    pub lora: String,
    /// Number format of the forward pass.
    pub compute_dtype: ComputeDtype,
}

/// The learner's answer to a [`Hello`] that it accepts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// The run.
    pub run: RunId,
    /// Its settings.
    pub settings: RunSettings,
}

/// Why an actor is not admitted, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RefusalCode {
    /// The two sides are of different releases.
    ProtocolVersion,
    /// Other base weights.
    Weights,
    /// Another tokenizer.
    Tokenizer,
    /// Another chat template.
    Template,
    /// The learner has as many actors as it allows.
    Full,
    /// This actor was shut out.
    Revoked,
    /// The run is over.
    RunOver,
}

/// Why an actor is not admitted: one line that says what to do, and the two values that differ.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Refused {
    /// For programs.
    pub code: RefusalCode,
    /// For people; names both values and the remedy.
    pub message: String,
    /// What the learner wants; empty where it makes no sense.
    pub expected: String,
    /// What the actor has; empty where it makes no sense.
    pub got: String,
}

/// One issue of a lease: a lease that is issued again keeps its id and gets the next attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseAttempt {
    /// The lease.
    pub id: LeaseId,
    /// Its attempt.
    pub attempt: u32,
}

impl From<&Lease> for LeaseAttempt {
    fn from(lease: &Lease) -> Self {
        Self { id: lease.id, attempt: lease.attempt }
    }
}

impl fmt::Display for LeaseAttempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} attempt {}", self.id, self.attempt)
    }
}

/// What an admitted actor says.
#[derive(Clone, PartialEq, Eq)]
pub enum FromActor {
    /// It could start `free` more episodes, counted after the first `received` leases of this
    /// connection, so that leases on their way are not counted twice.
    Ready {
        /// Free slots.
        free: u32,
        /// Leases received on this connection when `free` was counted.
        received: u64,
    },
    /// An episode. The body is what was received, unread: [`Episode::decode`](crate::Episode::decode)
    /// is the first rung of the audit.
    Episode {
        /// SHA-256 of `body`.
        id: EpisodeId,
        /// The encoded episode.
        body: Vec<u8>,
    },
    /// A lease could not be played to its end.
    LeaseFailed {
        /// Which.
        lease: LeaseAttempt,
        /// Why, one line.
        reason: String,
    },
    /// New episodes can be played with this policy from now on.
    Holding {
        /// The policy.
        policy: PolicyDigest,
    },
    /// The actor that it was to fetch adapters from failed; it fetches from the learner.
    ParentFailed {
        /// Which.
        parent: ActorId,
        /// How, one line.
        reason: String,
    },
    /// It is going away: finish what is in flight, grant nothing more.
    Drain,
    /// Its last message. The leases named go back unplayed.
    Leave {
        /// Leases that it will not answer.
        returned: Vec<LeaseAttempt>,
    },
}

impl fmt::Debug for FromActor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ready { free, received } => write!(f, "Ready({free} after {received})"),
            Self::Episode { id, body } => write!(f, "Episode({id}, {} bytes)", body.len()),
            Self::LeaseFailed { lease, reason } => write!(f, "LeaseFailed({lease}: {reason})"),
            Self::Holding { policy } => write!(f, "Holding({policy})"),
            Self::ParentFailed { parent, reason } => {
                write!(f, "ParentFailed({}: {reason})", parent.0.short())
            }
            Self::Drain => f.write_str("Drain"),
            Self::Leave { returned } => write!(f, "Leave({returned:?})"),
        }
    }
}

/// What became of an episode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AckOutcome {
    /// Written to stable storage. The audit may still reject it; that is not the actor's business.
    Stored,
    /// Was stored before.
    Duplicate,
    /// Will never be used: forget it.
    Rejected {
        /// Why, one line.
        reason: String,
    },
}

impl AckOutcome {
    /// One word for logs and counters.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Stored => "stored",
            Self::Duplicate => "duplicate",
            Self::Rejected { .. } => "rejected",
        }
    }
}

/// What a learner says to an admitted actor.
#[derive(Clone, Debug, PartialEq)]
pub enum FromLearner {
    /// Leases to play; the leases of a group come together, so that its prompt is computed once.
    Grant(Vec<Lease>),
    /// A policy that is newer than all before.
    Announce(AdapterManifest),
    /// An episode is accounted for: it need not be sent again.
    Ack {
        /// Which.
        episode: EpisodeId,
        /// What became of it.
        outcome: AckOutcome,
    },
    /// Stop playing these; nothing needs to be sent for them. An empty list answers [`FromActor::Drain`]:
    /// nothing is granted after it.
    Revoke(Vec<LeaseAttempt>),
    /// Fetch adapters from that actor before asking the learner; from the learner alone where there is none.
    Parent(Option<Parent>),
    /// The actors that may fetch adapters from this one, in place of those of an earlier message.
    Children(BTreeSet<ActorId>),
    /// The run is over; the actor's work is done.
    Finish {
        /// Why, one line.
        reason: String,
    },
}

/// An actor that passes adapters on to another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parent {
    /// Who: the SHA-256 of the certificate that it must present.
    pub actor: ActorId,
    /// Where.
    pub address: SocketAddr,
    /// How many relays are between the learner and the child, this one included, at least 1: patience grows
    /// with it.
    pub level: u8,
}

/// Asks for one chunk of a policy's adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fetch {
    /// The policy.
    pub policy: PolicyDigest,
    /// Index of the chunk.
    pub chunk: u32,
    /// Its delta against the base that the manifest names, instead of the whole chunk.
    pub delta: bool,
}
