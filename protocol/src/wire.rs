//! The wire: how values become bodies and what is refused on the way back.
//!
//! Wire structs are apart from the domain types: flat columns, no recursion, texts and byte columns
//! borrowed from the body, so that a claimed length allocates nothing. They are converted by
//! `TryFrom`s that check everything a later reader would otherwise have to doubt: equal column
//! lengths, known enum codes, bounds on every text and count, finite numbers. Encoding checks the
//! same, so that a sender learns of an over-long value before its peer does.
//!
//! Bodies are bincode 2 with fixed-width little-endian integers, so that no number or length has two
//! spellings, and every byte of a body is used.

mod broadcast;
mod control;
mod episode;
mod grant;
mod relay;

pub use bounds::*;
pub use broadcast::{decode_fetch, decode_manifest, encode_fetch, encode_manifest};
pub use control::{
    decode_from_actor, decode_from_learner, decode_hello, decode_refused, decode_welcome,
    encode_from_actor, encode_from_learner, encode_hello, encode_refused, encode_welcome,
};
pub(crate) use episode::check_episode_len;
pub use episode::peek_lease;
pub use grant::{decode_lease, encode_lease};

use serde::{Deserialize, Serialize};

/// Limits of single values. A frame's cap bounds their sum.
pub mod bounds {
    /// Ids in an episode's stream.
    pub const MAX_TOKENS: usize = 1 << 19;
    /// Generation calls of an episode.
    pub const MAX_SPANS: usize = 4096;
    /// Tool calls of an episode.
    pub const MAX_ROWS: usize = 16_384;
    /// Bytes of a tool name: the model writes it, so it may be odd.
    pub const MAX_TOOL_BYTES: usize = 64 << 10;
    /// Bytes of one call's arguments.
    pub const MAX_ARGUMENTS_BYTES: usize = 1 << 20;
    /// Bytes of one observation, and of the reset text.
    pub const MAX_OBSERVATION_BYTES: usize = 256 << 10;
    /// Images that a reset shows.
    pub const MAX_IMAGES: usize = 16;
    /// Bytes of the pixels of an episode's images together. A side has [`crate::image::MAX_SIDE`]
    /// pixels at most.
    pub const MAX_IMAGE_BYTES: usize = 12 << 20;
    /// Milestones of one row.
    pub const MAX_MILESTONES: usize = 256;
    /// Bytes of a milestone's name, and of a task's id.
    pub const MAX_NAME_BYTES: usize = 512;
    /// Bytes of a task's prompt, and of its fields.
    pub const MAX_PROMPT_BYTES: usize = 256 << 10;
    /// Leases of one grant.
    pub const MAX_GRANT: usize = 1024;
    /// Bytes of a grant's leases when each carries its own copy of the task.
    pub const MAX_GRANT_BYTES: usize = 64 << 20;
    /// Bytes of a reason, message, program or device text.
    pub const MAX_LINE_BYTES: usize = 1024;
    /// Bytes of one JSON section of the run's settings.
    pub const MAX_SETTING_BYTES: usize = 256 << 10;
    /// Policies that a hello may name.
    pub const MAX_HELD: usize = 256;
    /// Leases that one revocation or good-bye may name.
    pub const MAX_LEASE_LIST: usize = 3072;
    /// Episodes that an actor may say it keeps in flight.
    pub const MAX_SLOTS: u32 = 65_536;
    /// Actors that one actor may serve adapters to.
    pub const MAX_CHILDREN: usize = 64;
    /// Relays between the learner and an actor.
    pub const MAX_RELAY_LEVEL: u8 = 8;
    /// Longest deadline of a lease: a week.
    pub const MAX_DEADLINE_MS: u64 = 7 * 24 * 3600 * 1000;
}

/// Why a body is not a message, or a value cannot become one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}: {field}: {problem}")]
pub struct WireError {
    /// Which message.
    pub message: &'static str,
    /// Which field of it.
    pub field: &'static str,
    /// What is wrong, bounded in length.
    pub problem: String,
}

/// Makes the errors of one message.
#[derive(Clone, Copy)]
struct Checker(&'static str);

impl Checker {
    fn fail<T>(self, field: &'static str, problem: impl Into<String>) -> Result<T, WireError> {
        Err(WireError { message: self.0, field, problem: problem.into() })
    }

    fn ensure(
        self,
        holds: bool,
        field: &'static str,
        problem: impl FnOnce() -> String,
    ) -> Result<(), WireError> {
        if holds { Ok(()) } else { self.fail(field, problem()) }
    }

    /// At most `limit` of something.
    fn count(self, field: &'static str, got: usize, limit: usize) -> Result<(), WireError> {
        self.ensure(got <= limit, field, || format!("{got} entries, the limit is {limit}"))
    }

    /// A text of at most `limit` bytes.
    fn text(self, field: &'static str, text: &str, limit: usize) -> Result<(), WireError> {
        let got = text.len();
        self.ensure(got <= limit, field, || format!("{got} bytes, the limit is {limit}"))
    }

    /// A column as long as the one that it belongs to.
    fn column(self, field: &'static str, got: usize, want: usize) -> Result<(), WireError> {
        self.ensure(got == want, field, || format!("{got} entries, its table has {want}"))
    }

    /// An enum's code.
    fn code<T>(self, field: &'static str, code: u8, known: Option<T>) -> Result<T, WireError> {
        known.map_or_else(|| self.fail(field, format!("unknown code {code}")), Ok)
    }

    fn flag(self, field: &'static str, byte: u8) -> Result<bool, WireError> {
        match byte {
            0 => Ok(false),
            1 => Ok(true),
            other => self.fail(field, format!("{other} is neither 0 nor 1")),
        }
    }
}

/// The decoder's own limit, above every frame cap; the frames' caps are what bounds a body.
const DECODE_LIMIT: usize = 64 << 20;

fn config() -> impl bincode::config::Config {
    bincode::config::standard().with_fixed_int_encoding().with_limit::<DECODE_LIMIT>()
}

fn encode_body(message: &'static str, value: &impl Serialize) -> Result<Vec<u8>, WireError> {
    bincode::serde::encode_to_vec(value, config())
        .or_else(|error| Checker(message).fail("body", line(&error.to_string())))
}

fn decode_body<'a, T: Deserialize<'a>>(
    message: &'static str,
    body: &'a [u8],
) -> Result<T, WireError> {
    let check = Checker(message);
    let (value, used) = bincode::serde::borrow_decode_from_slice(body, config())
        .or_else(|error| check.fail("body", line(&error.to_string())))?;
    check.ensure(used == body.len(), "body", || {
        format!("{} bytes follow the message", body.len() - used)
    })?;
    Ok(value)
}

/// One line of at most [`MAX_LINE_BYTES`] bytes, for reasons that travel or reach a log: control
/// characters become spaces, and what is too long is cut at a character.
pub fn line(text: &str) -> String {
    let mut out = String::with_capacity(text.len().min(MAX_LINE_BYTES));
    for c in text.chars().map(|c| if c.is_control() { ' ' } else { c }) {
        if out.len() + c.len_utf8() > MAX_LINE_BYTES {
            break;
        }
        out.push(c);
    }
    out
}

/// A one-line text: bounded, without control characters, safe to print.
fn check_line(check: Checker, field: &'static str, text: &str) -> Result<(), WireError> {
    check.text(field, text, MAX_LINE_BYTES)?;
    check.ensure(!text.chars().any(char::is_control), field, || {
        "a control character in a one-line text".to_owned()
    })
}

macro_rules! codes {
    ($type:ty, $to:ident, $from:ident, { $($variant:ident = $code:literal),+ $(,)? }) => {
        fn $to(value: $type) -> u8 {
            match value {
                $(<$type>::$variant => $code),+
            }
        }

        fn $from(code: u8) -> Option<$type> {
            match code {
                $($code => Some(<$type>::$variant),)+
                _ => None,
            }
        }
    };
}
use codes;
