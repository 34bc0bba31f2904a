//! The session at both ends, without I/O: frames and calls go in, events and accounts come out.
//!
//! A session starts with one hello and one answer; what an admitted peer may say, what it was
//! granted and what is not acknowledged yet is kept here, so that the sockets' code decides nothing
//! and the same rules run in simulations.

mod actor;
mod learner;
mod outbox;
#[cfg(test)]
mod tests;

pub use actor::{ActorEvent, ActorSession};
pub use learner::{Admission, LearnerEvent, LearnerSession};
pub use outbox::Outbox;

use crate::{
    WireError,
    frame::{FrameError, Kind},
};

/// What a peer did that ends the connection. Bounded in length, one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// Bytes that are no frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// A frame that is no message.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// A message at the wrong time.
    #[error("session: {kind:?} {when}")]
    Unexpected {
        /// The message.
        kind: Kind,
        /// The rule.
        when: &'static str,
    },
    /// A stream that ends inside a frame, has more than its frame, or should not end.
    #[error("stream: {0}")]
    Stream(&'static str),
    /// A stream that was given up by its sender.
    #[error("stream: the peer reset it")]
    Reset,
    /// A frame that took too long to arrive.
    #[error("stream: a frame did not arrive within {0} s of its first byte")]
    Slow(u64),
}
