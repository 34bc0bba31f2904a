//! Why an actor is not connected, in words that say what to do.

use std::io;

use super::close::LinkError;
use crate::{Digest, RefusalCode, Refused};

/// Why an actor is not connected. One line: what, where, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The host has no address.
    #[error("join string: host {host:?} cannot be resolved ({problem}): check the name")]
    Unresolvable {
        /// The host.
        host: String,
        /// The resolver's words.
        problem: String,
        /// Whether this actor was connected before, so that the name is right.
        before: bool,
    },
    /// Nobody answers.
    #[error(
        "{address}: no answer within {seconds} s: is the learner running, and does its UDP port pass the firewall?"
    )]
    NoAnswer {
        /// The learner's address.
        address: String,
        /// How long was waited.
        seconds: u64,
    },
    /// Somebody else answers.
    #[error(
        "{address}: another learner answers (certificate {}, the join string says {}): use the join string that this learner printed",
        presented.short(), expected.short()
    )]
    WrongLearner {
        /// The address.
        address: String,
        /// The join string's fingerprint.
        expected: Digest,
        /// The fingerprint that was presented.
        presented: Digest,
    },
    /// The join string's secret is not the learner's.
    #[error(
        "{address}: the learner does not accept the join string's secret: use the string that it printed last"
    )]
    WrongSecret {
        /// The address.
        address: String,
    },
    /// The learner wants a certificate, or does not like ours.
    #[error(
        "{address}: the learner does not accept this actor's certificate: remove its identity directory and join again"
    )]
    Certificate {
        /// The address.
        address: String,
    },
    /// The two sides are of different releases.
    #[error("{0}")]
    Version(String),
    /// The learner refused the hello.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// This machine has no socket for us.
    #[error("cannot open a UDP socket: {0}")]
    Socket(io::Error),
    /// The identity does not work for TLS.
    #[error("identity: {0}")]
    Tls(#[from] rustls::Error),
    /// Anything else that ended the connection.
    #[error("{address}: {error}")]
    Link {
        /// The address.
        address: String,
        /// What it was.
        error: LinkError,
    },
}

impl ConnectError {
    /// Whether trying again later can help; otherwise a person must act.
    pub fn may_retry(&self) -> bool {
        match self {
            Self::NoAnswer { .. } | Self::Socket(_) => true,
            Self::Unresolvable { before, .. } => *before,
            Self::Refused(refused) => refused.code == RefusalCode::Full,
            Self::Link { error, .. } => error.may_retry(),
            Self::WrongLearner { .. }
            | Self::WrongSecret { .. }
            | Self::Certificate { .. }
            | Self::Version(_)
            | Self::Tls(_) => false,
        }
    }
}
