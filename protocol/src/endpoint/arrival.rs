//! What comes of listening: actors, peers that are not let in, and ports that cannot be had.

use std::{io, net::SocketAddr};

use super::{close::LinkError, to_actor::ActorLink};
use crate::{ActorId, RefusalCode, Refused, admission};

/// Why a learner cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Another process has the port.
    #[error("listen address {0}: the port is in use: choose another, or port 0 for any free one")]
    InUse(SocketAddr),
    /// The operating system refuses.
    #[error("listen address {addr}: {source}")]
    Io {
        /// The address.
        addr: SocketAddr,
        /// Its words.
        source: io::Error,
    },
    /// The identity does not work for TLS, or there is no randomness.
    #[error("identity: {0}")]
    Tls(#[from] rustls::Error),
}

/// Why a peer did not become an actor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JoinFailure {
    /// It presented no certificate.
    #[error("no client certificate: this is no actor of ours")]
    NoCertificate,
    /// Its proof does not hold: another secret, or made for another key or session.
    #[error("wrong secret, or a proof made for another identity: give it the current join string")]
    Proof,
    /// Another protocol version.
    #[error("{}", admission::version_refusal(*.0))]
    Version(u16),
    /// It did not finish in time.
    #[error("joining took longer than {0} s")]
    Slow(u64),
    /// Its hello was refused.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// It was shut out before.
    #[error("this actor was shut out")]
    Revoked,
    /// Too many attempts from its address failed lately.
    #[error("too many attempts from its address failed lately")]
    Failures,
    /// Too many peers join at the moment.
    #[error("too many peers are joining at once")]
    Busy,
    /// Its first bytes are no preamble.
    #[error("its first bytes are not those of an actor")]
    Preamble,
    /// Anything else that ended the connection.
    #[error(transparent)]
    Link(#[from] LinkError),
}

impl JoinFailure {
    /// One word for logs and counters.
    pub fn name(&self) -> &'static str {
        match self {
            Self::NoCertificate => "no_certificate",
            Self::Proof => "proof",
            Self::Version(_) => "version",
            Self::Slow(_) => "slow",
            Self::Refused(_) => "refused",
            Self::Revoked => "revoked",
            Self::Failures => "failures",
            Self::Busy => "busy",
            Self::Preamble => "preamble",
            Self::Link(_) => "link",
        }
    }

    /// Whether it counts against the peer's address, given that the peer has shown that it is there.
    pub(super) fn counts(&self) -> bool {
        match self {
            Self::NoCertificate
            | Self::Proof
            | Self::Version(_)
            | Self::Slow(_)
            | Self::Revoked
            | Self::Preamble => true,
            Self::Refused(refused) => refused.code != RefusalCode::Full,
            Self::Link(error) => matches!(error, LinkError::Violation(_)),
            Self::Failures | Self::Busy => false,
        }
    }
}

/// What came of a connection attempt.
#[derive(Debug)]
pub enum Arrival {
    /// A new actor.
    Joined(ActorLink),
    /// One that was not let in.
    Refused {
        /// Where it came from.
        remote: SocketAddr,
        /// Who it is, where it got far enough to prove that.
        actor: Option<ActorId>,
        /// Why.
        failure: JoinFailure,
    },
}
