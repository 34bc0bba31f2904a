//! SHA-256 digests and the typed ids made from them.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use sha2::{Digest as _, Sha256};

/// A SHA-256 digest: 32 bytes, shown and written in JSON as 64 lower-case hex digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest(pub [u8; 32]);

/// The text was not 64 hex digits.
#[derive(Debug, thiserror::Error)]
#[error("a sha256 is 64 hex digits, not {0:?}")]
pub struct NotADigest(String);

impl Digest {
    /// The digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// The digest of a domain label and parts, each preceded by its length as 8 little-endian bytes,
    /// so that no two different lists of parts hash alike.
    pub fn of_parts(domain: &str, parts: &[&[u8]]) -> Self {
        let mut hash = Sha256::new();
        for part in std::iter::once(domain.as_bytes()).chain(parts.iter().copied()) {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        Self(hash.finalize().into())
    }

    /// The first 12 hex digits, for messages to people.
    pub fn short(&self) -> String {
        self.to_string().chars().take(12).collect()
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Digest {
    type Err = NotADigest;

    fn from_str(text: &str) -> Result<Self, NotADigest> {
        let bad = || NotADigest(text.chars().take(80).collect());
        if text.len() != 64 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(bad());
        }
        let mut bytes = [0; 32];
        for (i, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).map_err(|_| bad())?;
        }
        Ok(Self(bytes))
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            serializer.collect_str(self)
        } else {
            self.0.serialize(serializer)
        }
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if deserializer.is_human_readable() {
            String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
        } else {
            <[u8; 32]>::deserialize(deserializer).map(Self)
        }
    }
}

macro_rules! digest_newtype {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub Digest);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self.0)
            }
        }
    };
}

digest_newtype!(
    /// One training run: the digest of its recipe and of every file that the recipe freezes (not of
    /// where it writes), so that the same recipe gives the same noise, leases and episodes.
    RunId
);
digest_newtype!(
    /// The digest of an episode's encoded body.
    EpisodeId
);
digest_newtype!(
    /// A policy: base checkpoint and adapter together. Every cache is keyed by it.
    PolicyDigest
);
digest_newtype!(
    /// An actor: the digest of its certificate.
    ActorId
);

impl PolicyDigest {
    /// The policy that applies the adapter with digest `adapter` to the base weights `base`.
    pub fn new(base: &Digest, adapter: &Digest) -> Self {
        Self(Digest::of_parts("rollcall-policy-v1", &[&base.0, &adapter.0]))
    }
}

/// A running SHA-256 over a token stream: each id as four little-endian bytes.
///
/// The generation engine feeds it exactly the ids that it conditions on, so that a span's context
/// digest speaks of what the model saw and not of what the episode says.
#[derive(Clone, Default)]
pub struct StreamHasher {
    state: Sha256,
    len: usize,
}

impl StreamHasher {
    /// Appends ids.
    pub fn feed(&mut self, ids: &[u32]) {
        for id in ids {
            self.state.update(id.to_le_bytes());
        }
        self.len += ids.len();
    }

    /// How many ids were fed.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing was fed yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The digest of everything fed so far.
    pub fn digest(&self) -> Digest {
        Digest(self.state.clone().finalize().into())
    }
}

impl fmt::Debug for StreamHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StreamHasher({} ids)", self.len)
    }
}
