//! What a journal's records say, and their bytes: bincode with fixed-width little-endian integers, as
//! on the wire, every byte used.

use protocol::{
    ActorId, Digest, EpisodeId, LeaseAttempt, LeaseId, PolicyDigest, RunId,
    wire::{decode_lease, encode_lease, line},
};
use serde::{Deserialize, Serialize};

use super::MAX_PAYLOAD;
use crate::leases::GroupOrder;

/// One record. Episodes are borrowed: their bytes are written and read as they came.
#[derive(Clone, Debug, PartialEq)]
pub enum Record<'a> {
    /// A group was ordered. With the run's id this is every lease of it.
    Group {
        /// Its number.
        group: u64,
        /// What its leases ask for.
        order: GroupOrder,
    },
    /// A policy was announced.
    Policy {
        /// Optimizer steps behind it.
        step: u64,
        /// Its digest.
        policy: PolicyDigest,
        /// SHA-256 of its adapter.
        adapter: Digest,
        /// Length of its adapter.
        bytes: u64,
        /// Whether the adapter was archived.
        archived: bool,
    },
    /// The answer to a lease, audited and kept. The lease stands in the bytes.
    Accepted {
        /// Who sent it.
        actor: ActorId,
        /// The latest issue of the lease.
        attempt: u32,
        /// Updates between its policy and the newest when it was judged.
        behind: u64,
        /// What it was sampled on, in the actor's own words.
        device: &'a str,
        /// The episode.
        body: &'a [u8],
    },
    /// The answer to a lease, refused; or one that was accepted before and is taken back.
    Rejected {
        /// Who sent it.
        actor: ActorId,
        /// The lease.
        lease: LeaseId,
        /// The latest issue of the lease.
        attempt: u32,
        /// Updates between its policy and the newest when it was judged.
        behind: u64,
        /// Its announced id.
        id: EpisodeId,
        /// The stable name of the reason.
        reason: &'a str,
        /// The episode; nothing where it was over the bound of what is kept of refused episodes, or
        /// stands in the record that accepted it.
        body: Option<&'a [u8]>,
    },
    /// A group was given up: its accepted episodes are used for nothing.
    Dropped {
        /// Which.
        group: u64,
    },
    /// Leases were given to an actor.
    Granted {
        /// To whom.
        actor: ActorId,
        /// Which, each with its attempt.
        leases: Vec<LeaseAttempt>,
    },
    /// An optimizer step or an evaluation is made, and its checkpoint written.
    Committed(Commit),
    /// The run went on from its last commit after its learner had ended: policies that were announced
    /// since then are void, everything else stands.
    Resumed {
        /// Number of that commit.
        commit: u64,
    },
}

/// What is made for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Commit {
    /// From 0, by which the checkpoint is named.
    pub number: u64,
    /// Optimizer steps.
    pub steps: u32,
    /// Evaluations.
    pub rounds: u32,
    /// Digest of the checkpoint.
    pub checkpoint: Digest,
    /// Lines of `evidence.jsonl`.
    pub evidence_rows: u64,
    /// Their bytes.
    pub evidence_bytes: u64,
    /// The head of their chain.
    pub evidence_head: Digest,
    /// Bytes of `metrics.jsonl`.
    pub metrics_bytes: u64,
    /// Their SHA-256.
    pub metrics_sha256: Digest,
}

/// A payload that is no record of this release.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct RecordError(String);

#[derive(Serialize, Deserialize)]
struct GroupWire<'a> {
    generations: u32,
    lease: &'a [u8],
}

#[derive(Serialize, Deserialize)]
struct PolicyWire {
    step: u64,
    policy: Digest,
    adapter: Digest,
    bytes: u64,
    archived: bool,
}

#[derive(Serialize, Deserialize)]
struct AcceptedWire<'a> {
    actor: Digest,
    attempt: u32,
    behind: u64,
    device: &'a str,
    body: &'a [u8],
}

#[derive(Serialize, Deserialize)]
struct RejectedWire<'a> {
    actor: Digest,
    group: u64,
    generation: u32,
    attempt: u32,
    behind: u64,
    id: Digest,
    reason: &'a str,
    #[serde(borrow)]
    body: Option<&'a [u8]>,
}

#[derive(Serialize, Deserialize)]
struct GrantedWire<'a> {
    actor: Digest,
    /// Group, generation and attempt of each: 8 + 4 + 4 bytes, little-endian.
    leases: &'a [u8],
}

fn config() -> impl bincode::config::Config {
    bincode::config::standard().with_fixed_int_encoding().with_limit::<MAX_PAYLOAD>()
}

impl<'a> Record<'a> {
    /// The byte that says which record it is.
    pub(super) fn kind(&self) -> u8 {
        match self {
            Self::Group { .. } => 1,
            Self::Policy { .. } => 2,
            Self::Accepted { .. } => 3,
            Self::Rejected { .. } => 4,
            Self::Dropped { .. } => 5,
            Self::Granted { .. } => 6,
            Self::Committed(_) => 7,
            Self::Resumed { .. } => 8,
        }
    }

    /// Its payload.
    ///
    /// # Errors
    /// A value over its bound.
    pub(super) fn encode(&self, run: RunId) -> Result<Vec<u8>, RecordError> {
        match self {
            Self::Group { group, order } => {
                let id = LeaseId { group: *group, generation: 0 };
                let lease = encode_lease(&order.lease(run, id, 0)).map_err(wrong)?;
                pack(&GroupWire { generations: order.generations, lease: &lease })
            }
            Self::Policy { step, policy, adapter, bytes, archived } => pack(&PolicyWire {
                step: *step,
                policy: policy.0,
                adapter: *adapter,
                bytes: *bytes,
                archived: *archived,
            }),
            Self::Accepted { actor, attempt, behind, device, body } => pack(&AcceptedWire {
                actor: actor.0,
                attempt: *attempt,
                behind: *behind,
                device,
                body,
            }),
            Self::Rejected { actor, lease, attempt, behind, id, reason, body } => {
                pack(&RejectedWire {
                    actor: actor.0,
                    group: lease.group,
                    generation: lease.generation,
                    attempt: *attempt,
                    behind: *behind,
                    id: id.0,
                    reason,
                    body: *body,
                })
            }
            Self::Dropped { group } => pack(group),
            Self::Granted { actor, leases } => {
                let mut columns = Vec::with_capacity(leases.len() * LEASE_BYTES);
                for LeaseAttempt { id, attempt } in leases {
                    columns.extend(id.group.to_le_bytes());
                    columns.extend(id.generation.to_le_bytes());
                    columns.extend(attempt.to_le_bytes());
                }
                pack(&GrantedWire { actor: actor.0, leases: &columns })
            }
            Self::Committed(commit) => pack(commit),
            Self::Resumed { commit } => pack(commit),
        }
    }

    /// Reads a payload back.
    ///
    /// # Errors
    /// It is no record of this kind, or of no kind that this release knows.
    pub(super) fn decode(run: RunId, kind: u8, payload: &'a [u8]) -> Result<Self, RecordError> {
        Ok(match kind {
            1 => {
                let wire: GroupWire<'_> = unpack(payload)?;
                let lease = decode_lease(wire.lease).map_err(wrong)?;
                if lease.run != run {
                    return Err(RecordError("a group of another run".into()));
                }
                let group = lease.id.group;
                let order = GroupOrder {
                    task: lease.task,
                    seed: lease.seed,
                    policy: lease.policy,
                    sampling: lease.sampling,
                    generations: wire.generations,
                    deadline_ms: lease.deadline_ms,
                };
                Self::Group { group, order }
            }
            2 => {
                let wire: PolicyWire = unpack(payload)?;
                Self::Policy {
                    step: wire.step,
                    policy: PolicyDigest(wire.policy),
                    adapter: wire.adapter,
                    bytes: wire.bytes,
                    archived: wire.archived,
                }
            }
            3 => {
                let wire: AcceptedWire<'_> = unpack(payload)?;
                Self::Accepted {
                    actor: ActorId(wire.actor),
                    attempt: wire.attempt,
                    behind: wire.behind,
                    device: wire.device,
                    body: wire.body,
                }
            }
            4 => {
                let wire: RejectedWire<'_> = unpack(payload)?;
                Self::Rejected {
                    actor: ActorId(wire.actor),
                    lease: LeaseId { group: wire.group, generation: wire.generation },
                    attempt: wire.attempt,
                    behind: wire.behind,
                    id: EpisodeId(wire.id),
                    reason: wire.reason,
                    body: wire.body,
                }
            }
            5 => Self::Dropped { group: unpack(payload)? },
            6 => {
                let wire: GrantedWire<'_> = unpack(payload)?;
                let (leases, rest) = wire.leases.as_chunks::<LEASE_BYTES>();
                if !rest.is_empty() {
                    return Err(RecordError("half a lease".into()));
                }
                let leases = leases.iter().map(lease_attempt).collect();
                Self::Granted { actor: ActorId(wire.actor), leases }
            }
            7 => Self::Committed(unpack(payload)?),
            8 => Self::Resumed { commit: unpack(payload)? },
            other => {
                return Err(RecordError(format!(
                    "records of kind {other} are none of this release"
                )));
            }
        })
    }
}

const LEASE_BYTES: usize = 16;

fn lease_attempt(bytes: &[u8; LEASE_BYTES]) -> LeaseAttempt {
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = *bytes;
    let id = LeaseId {
        group: u64::from_le_bytes([a, b, c, d, e, f, g, h]),
        generation: u32::from_le_bytes([i, j, k, l]),
    };
    LeaseAttempt { id, attempt: u32::from_le_bytes([m, n, o, p]) }
}

fn wrong(error: impl std::fmt::Display) -> RecordError {
    RecordError(line(&error.to_string()))
}

fn pack(value: &impl Serialize) -> Result<Vec<u8>, RecordError> {
    let payload = bincode::serde::encode_to_vec(value, config()).map_err(wrong)?;
    if payload.len() > MAX_PAYLOAD {
        let got = payload.len();
        return Err(RecordError(format!("{got} bytes, the limit is {MAX_PAYLOAD}")));
    }
    Ok(payload)
}

fn unpack<'a, T: Deserialize<'a>>(payload: &'a [u8]) -> Result<T, RecordError> {
    let (value, used) =
        bincode::serde::borrow_decode_from_slice(payload, config()).map_err(wrong)?;
    if used < payload.len() {
        let rest = payload.len() - used;
        return Err(RecordError(format!("{rest} bytes follow the record")));
    }
    Ok(value)
}
