//! What actors and learners say to each other, and nothing about how either does its work.
//!
//! The domain types ([`Lease`], [`Episode`], [`Span`], [`TraceRow`]) are plain values that both sides
//! hash and compare. Wire types live apart from them and are converted by validating `TryFrom`s.
//! This crate knows neither Burn nor the files of a run; [`folder`] is what both sides write through what
//! must survive.

mod admission;
mod assembly;
mod backoff;
pub mod delta;
pub mod digest;
pub mod endpoint;
pub mod episode;
pub mod folder;
pub mod frame;
pub mod identity;
pub mod image;
pub mod join;
pub mod lease;
pub mod manifest;
pub mod message;
pub mod noise_key;
mod parallel;
mod private;
pub mod relay_tree;
pub mod revoked;
pub mod session;
mod tls;
pub mod trace;
pub mod wire;

pub use assembly::Assembly;
pub use backoff::Backoff;
pub use digest::{ActorId, Digest, EpisodeId, PolicyDigest, RunId, StreamHasher};
pub use endpoint::{
    ActorEndpoint, ActorLink, AdapterShelf, AdapterStore, Arrival, BindError, CloseCode,
    ConnectError, FetchError, JoinFailure, LearnerConfig, LearnerEndpoint, LearnerLink, LinkConfig,
    LinkError, Relay, ToActor, ToLearner,
};
pub use episode::{AddressError, Episode, EpisodeEnd, FinishReason, Span};
pub use frame::PROTOCOL_VERSION;
pub use identity::{Identity, IdentityError};
pub use image::{Image, ImageError};
pub use join::{Join, JoinError, Secret};
pub use lease::{Lease, LeaseId, Sampling, Split, Task};
pub use manifest::{AdapterManifest, DeltaChunk, DeltaManifest, ManifestError};
pub use message::{
    AckOutcome, ComputeDtype, Fetch, FromActor, FromLearner, Hello, LeaseAttempt, ModelDigests,
    OnMalformed, Parent, RefusalCode, Refused, RunSettings, Welcome,
};
pub use noise_key::NoiseKey;
pub use session::Admission;
pub use trace::{CallKind, CallPermit, ParsedCall, TraceChain, TraceRow};
pub use wire::WireError;
