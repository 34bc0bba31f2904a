//! How connections end: codes that never change their meaning, and what they tell the other side.

use quinn::{ConnectionError, VarInt};

use crate::{WireError, session::Violation, wire::line};

/// Why a side closed a connection. The numbers are the same in every version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CloseCode {
    /// Nothing more to say.
    Done,
    /// The two sides are of different versions.
    Version,
    /// The proof of knowing the join secret does not hold.
    Proof,
    /// The hello was refused; the refusal was sent before.
    Refused,
    /// The peer broke the protocol.
    Violation,
    /// The peer did not finish joining in time.
    Slow,
    /// Too many actors, or too many joining at once.
    Busy,
    /// The process is stopping and may come back.
    GoingAway,
    /// This actor was shut out.
    Revoked,
    /// The same identity connected again.
    Superseded,
    /// The run is over.
    Finished,
    /// A code of another version.
    Other(u32),
}

impl CloseCode {
    const KNOWN: [Self; 11] = [
        Self::Done,
        Self::Version,
        Self::Proof,
        Self::Refused,
        Self::Violation,
        Self::Slow,
        Self::Busy,
        Self::GoingAway,
        Self::Revoked,
        Self::Superseded,
        Self::Finished,
    ];

    /// The number on the wire.
    pub fn number(self) -> u32 {
        match self {
            Self::Done => 0,
            Self::Version => 1,
            Self::Proof => 2,
            Self::Refused => 3,
            Self::Violation => 4,
            Self::Slow => 5,
            Self::Busy => 6,
            Self::GoingAway => 7,
            Self::Revoked => 8,
            Self::Superseded => 9,
            Self::Finished => 10,
            Self::Other(number) => number,
        }
    }

    fn from_number(number: u64) -> Self {
        let known = Self::KNOWN.into_iter().find(|code| u64::from(code.number()) == number);
        known.unwrap_or_else(|| Self::Other(u32::try_from(number).unwrap_or(u32::MAX)))
    }

    /// Whether trying again later can help.
    pub fn may_retry(self) -> bool {
        match self {
            Self::Done | Self::Slow | Self::Busy | Self::GoingAway => true,
            Self::Version
            | Self::Proof
            | Self::Refused
            | Self::Violation
            | Self::Revoked
            | Self::Superseded
            | Self::Finished
            | Self::Other(_) => false,
        }
    }
}

/// Closes a connection with one line of text.
pub(super) fn close(connection: &quinn::Connection, code: CloseCode, reason: &str) {
    connection.close(VarInt::from_u32(code.number()), line(reason).as_bytes());
}

/// Why a link gives nothing more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    /// The peer closed it.
    #[error("link: closed by the peer: {reason}")]
    Closed {
        /// Why.
        code: CloseCode,
        /// The peer's words, one line.
        reason: String,
    },
    /// The peer broke the protocol and was closed.
    #[error("link: {0}")]
    Violation(#[from] Violation),
    /// The peer was silent for too long.
    #[error("link: nothing heard from the peer for the idle time-out: it died or is cut off")]
    TimedOut,
    /// This side closed it.
    #[error("link: closed on this side")]
    Local,
    /// The peer's process started anew.
    #[error("link: the peer's process started anew")]
    Reset,
    /// QUIC itself failed.
    #[error("link: {0}")]
    Transport(String),
    /// A value of ours cannot be sent; the link is unharmed.
    #[error("cannot send {0}")]
    Unsendable(WireError),
}

impl LinkError {
    /// Whether connecting again can help.
    pub fn may_retry(&self) -> bool {
        match self {
            Self::Closed { code, .. } => code.may_retry(),
            Self::TimedOut | Self::Reset | Self::Transport(_) => true,
            Self::Violation(_) | Self::Local | Self::Unsendable(_) => false,
        }
    }
}

impl From<ConnectionError> for LinkError {
    fn from(error: ConnectionError) -> Self {
        match error {
            ConnectionError::ApplicationClosed(close) => Self::Closed {
                code: CloseCode::from_number(close.error_code.into_inner()),
                reason: line(&String::from_utf8_lossy(&close.reason)),
            },
            ConnectionError::TimedOut => Self::TimedOut,
            ConnectionError::LocallyClosed => Self::Local,
            ConnectionError::Reset => Self::Reset,
            other => Self::Transport(line(&other.to_string())),
        }
    }
}

/// The TLS alert in a handshake's failure, if that is what it was.
pub(super) fn tls_alert(error: &ConnectionError) -> Option<u8> {
    let code = match error {
        ConnectionError::TransportError(error) => u64::from(error.code),
        ConnectionError::ConnectionClosed(close) => u64::from(close.error_code),
        _ => return None,
    };
    (0x100..0x200).contains(&code).then(|| u8::try_from(code & 0xff).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn close_codes_keep_their_numbers() {
        let numbers: Vec<u32> = CloseCode::KNOWN.iter().map(|code| code.number()).collect();
        assert_eq!(numbers, (0..11).collect::<Vec<_>>());
        for code in CloseCode::KNOWN {
            assert_eq!(CloseCode::from_number(code.number().into()), code);
        }
        assert_eq!(CloseCode::from_number(99), CloseCode::Other(99));
    }
}
