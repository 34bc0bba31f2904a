//! The edges: QUIC sockets, clocks and tasks around the session.
//!
//! One connection carries: the admission preamble on the actor's first one-way stream; one two-way
//! control stream; each episode on a one-way stream of its own, read one after the other so that
//! order is kept and one episode at a time is in memory; each chunk of an adapter on a two-way
//! stream of its own. An actor may also listen, for such chunk streams only, of the actors that the learner
//! names to it. Until the preamble is proven a peer has one stream and a 16 KiB window.

mod actor;
mod arrival;
mod close;
mod connect_error;
mod dial;
mod door;
mod failures;
mod fetch;
mod gate;
mod learner;
mod link;
mod links;
mod parent;
mod relay;
mod relay_shelf;
mod reset;
mod shelf;
mod socket;
mod stream;
mod to_actor;
mod to_learner;

use std::time::Duration;

pub use actor::ActorEndpoint;
pub use arrival::{Arrival, BindError, JoinFailure};
pub use close::{CloseCode, LinkError};
pub use connect_error::ConnectError;
pub use dial::SocketFactory;
pub use fetch::{FetchError, Served};
pub use learner::{LearnerConfig, LearnerEndpoint};
pub use links::RelayCounts;
pub use relay::Relay;
pub use shelf::{AdapterChunk, AdapterShelf, AdapterStore, Coming};
pub use to_actor::{ActorLink, ToActor};
pub use to_learner::{LearnerLink, ToLearner};

/// What network the traffic crosses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Profile {
    /// Default windows and Cubic: little queueing, so control stays quick beside bulk.
    #[default]
    Lan,
    /// BBR and a 16 MiB stream window, for long and lossy paths.
    Wan,
}

/// Times and sizes of a connection. The default is what runs use; tests shorten it.
#[derive(Clone, Debug)]
pub struct LinkConfig {
    /// Network profile.
    pub profile: Profile,
    /// A silent side says something this often.
    pub keep_alive: Duration,
    /// A peer that is silent for this long, counted from what was last said to it, is gone: it is
    /// noticed within this time and one keep-alive.
    pub idle: Duration,
    /// The preamble, and then the hello and its answer, must arrive within this time.
    pub join: Duration,
    /// How long an actor tries to reach a learner before it says that there is no answer.
    pub reach: Duration,
    /// A frame must be whole this long after its first byte, and a peer must make room for one that
    /// is to be sent to it.
    pub frame: Duration,
    /// Bytes of the socket's buffers, where the system allows.
    pub socket_buffer: usize,
    /// Chunks of an adapter that are fetched at a time.
    pub fetch_parallel: usize,
    /// An actor that passes adapters on has this long for each chunk, and for each relay between it and the
    /// learner as long again; then the chunk is fetched from the learner.
    pub relay: Duration,
    /// Makes packet contents repeatable, for simulations only.
    pub rng_seed: Option<[u8; 32]>,
}

impl Default for LinkConfig {
    fn default() -> Self {
        Self {
            profile: Profile::Lan,
            keep_alive: Duration::from_secs(5),
            idle: Duration::from_secs(30),
            join: Duration::from_secs(5),
            reach: Duration::from_secs(10),
            frame: Duration::from_secs(120),
            socket_buffer: 8 << 20,
            fetch_parallel: 4,
            relay: Duration::from_secs(20),
            rng_seed: None,
        }
    }
}

#[cfg(test)]
mod tests;
