//! What actors and learners say to each other, and nothing about how either does its work.
//!
//! The domain types ([`Lease`], [`Episode`], [`Span`], [`TraceRow`]) are plain values that both sides
//! hash and compare. Wire types live apart from them and are converted by validating `TryFrom`s.
//! This crate knows neither Burn nor the files of a run.

pub mod digest;
pub mod episode;
pub mod lease;
pub mod noise_key;
pub mod trace;

pub use digest::{ActorId, Digest, EpisodeId, PolicyDigest, RunId, StreamHasher};
pub use episode::{Episode, EpisodeEnd, FinishReason, Span};
pub use lease::{Lease, LeaseId, Sampling, Split, Task};
pub use noise_key::NoiseKey;
pub use trace::{CallKind, ParsedCall, TraceChain, TraceRow};
