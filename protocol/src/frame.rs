//! Frames: what cuts a stream of untrusted bytes into messages before anything is believed.
//!
//! `magic(4) ‖ version(2) ‖ kind(1) ‖ len(4) ‖ sha256(32) ‖ body(len)`, integers little-endian. Magic,
//! version, kind, whether that kind belongs on this channel, and the kind's own cap are checked
//! before a byte of the body is kept; the body's hash is checked before the body is looked at. Memory
//! follows the bytes that arrived, never the length that was claimed.

use crate::Digest;

/// The version of frames and messages. A peer of another version is refused before the first frame.
pub const PROTOCOL_VERSION: u16 = 3;

/// The first four bytes of every frame.
pub const MAGIC: [u8; 4] = *b"RCL1";

/// Bytes before the body.
pub const HEADER_LEN: usize = 4 + 2 + 1 + 4 + 32;

/// Bytes of one adapter chunk, the last of an adapter excepted.
pub const CHUNK_LEN: usize = 4 << 20;

const CONTROL_CAP: usize = 64 << 10;
const SETTINGS_CAP: usize = 1 << 20;
const ANNOUNCE_CAP: usize = 128 << 10;

/// What a frame's body is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Actor: who I am and what I hold.
    Hello,
    /// Actor: how many episodes I could start.
    Ready,
    /// Actor: a lease could not be played.
    LeaseFailed,
    /// Actor: a policy that new episodes can be played with.
    Holding,
    /// Actor: grant me nothing more.
    Drain,
    /// Actor: good-bye, with the leases that go back.
    Leave,
    /// Actor: the parent that I was given failed.
    ParentFailed,
    /// Actor: one episode; its body's digest is the episode's id.
    Episode,
    /// Actor, to the learner or to a relay: give me one chunk of an adapter.
    Fetch,
    /// Learner: you are in.
    Welcome,
    /// Learner: you are not, and why.
    Refused,
    /// Learner: leases, a whole group together.
    Grant,
    /// Learner: a newer policy exists.
    Announce,
    /// Learner: what became of an episode.
    Ack,
    /// Learner: leases that are no longer wanted.
    Revoke,
    /// Learner: the run is over.
    Finish,
    /// Learner: whom to ask for adapters first.
    Parent,
    /// Learner: who may ask you for adapters.
    Children,
    /// Raw bytes of one adapter chunk.
    Chunk,
}

/// Where a frame may appear. Each kind belongs to exactly one channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Channel {
    /// The control stream, actor to learner.
    ActorControl,
    /// The control stream, learner to actor.
    LearnerControl,
    /// A one-way stream that carries one episode.
    Episode,
    /// The asking half of a fetch stream.
    FetchRequest,
    /// The answering half of a fetch stream.
    FetchReply,
}

impl Kind {
    /// Every kind, for tests and fuzzing.
    pub const ALL: [Self; 19] = [
        Self::Hello,
        Self::Ready,
        Self::LeaseFailed,
        Self::Holding,
        Self::Drain,
        Self::Leave,
        Self::ParentFailed,
        Self::Episode,
        Self::Fetch,
        Self::Welcome,
        Self::Refused,
        Self::Grant,
        Self::Announce,
        Self::Ack,
        Self::Revoke,
        Self::Finish,
        Self::Parent,
        Self::Children,
        Self::Chunk,
    ];

    /// The byte on the wire.
    pub fn byte(self) -> u8 {
        match self {
            Self::Hello => 1,
            Self::Ready => 2,
            Self::LeaseFailed => 3,
            Self::Holding => 4,
            Self::Drain => 5,
            Self::Leave => 6,
            Self::ParentFailed => 7,
            Self::Episode => 16,
            Self::Fetch => 17,
            Self::Welcome => 32,
            Self::Refused => 33,
            Self::Grant => 34,
            Self::Announce => 35,
            Self::Ack => 36,
            Self::Revoke => 37,
            Self::Finish => 38,
            Self::Parent => 39,
            Self::Children => 40,
            Self::Chunk => 48,
        }
    }

    fn from_byte(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.byte() == byte)
    }

    /// The longest body that this kind may have.
    pub fn cap(self) -> usize {
        match self {
            Self::Welcome | Self::Grant => SETTINGS_CAP,
            Self::Announce => ANNOUNCE_CAP,
            Self::Episode => 16 << 20,
            Self::Chunk => CHUNK_LEN,
            _ => CONTROL_CAP,
        }
    }

    /// The channel that this kind belongs to.
    pub fn channel(self) -> Channel {
        match self {
            Self::Hello
            | Self::Ready
            | Self::LeaseFailed
            | Self::Holding
            | Self::Drain
            | Self::Leave
            | Self::ParentFailed => Channel::ActorControl,
            Self::Episode => Channel::Episode,
            Self::Fetch => Channel::FetchRequest,
            Self::Welcome
            | Self::Refused
            | Self::Grant
            | Self::Announce
            | Self::Ack
            | Self::Revoke
            | Self::Finish
            | Self::Parent
            | Self::Children => Channel::LearnerControl,
            Self::Chunk => Channel::FetchReply,
        }
    }
}

/// Why bytes are not a frame. None of these can be recovered from: the stream's position is lost.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// Not our protocol.
    #[error("frame: starts with {0:02x?}, not with the magic of this protocol")]
    Magic([u8; 4]),
    /// Another release.
    #[error("frame: protocol version {got}, this side speaks {PROTOCOL_VERSION}")]
    Version {
        /// What the frame said.
        got: u16,
    },
    /// A kind byte that this version does not know.
    #[error("frame: unknown kind {0}")]
    UnknownKind(u8),
    /// A known kind in the wrong place.
    #[error("frame: {kind:?} does not belong on the {channel:?} channel")]
    Misplaced {
        /// The kind.
        kind: Kind,
        /// Where it appeared.
        channel: Channel,
    },
    /// Longer than its kind allows.
    #[error("frame: {kind:?} of {len} bytes, the limit is {cap}")]
    TooLong {
        /// The kind.
        kind: Kind,
        /// The length.
        len: usize,
        /// The limit.
        cap: usize,
    },
    /// The body is not what its header says.
    #[error("frame: the body of {kind:?} hashes to {got}, its header says {want}")]
    Hash {
        /// The kind.
        kind: Kind,
        /// The header's digest.
        want: Digest,
        /// The body's digest.
        got: Digest,
    },
}

/// A checked header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What the body is.
    pub kind: Kind,
    /// Body bytes, at most `kind.cap()`.
    pub len: usize,
    /// What the body must hash to.
    pub digest: Digest,
}

impl Header {
    /// The header of `body`.
    ///
    /// # Errors
    /// The body is longer than its kind's cap.
    pub fn of(kind: Kind, body: &[u8]) -> Result<Self, FrameError> {
        Self::with_digest(kind, body.len(), Digest::of(body))
    }

    /// The header of a body of `len` bytes whose digest is known already.
    ///
    /// # Errors
    /// `len` exceeds the kind's cap.
    pub fn with_digest(kind: Kind, len: usize, digest: Digest) -> Result<Self, FrameError> {
        if len > kind.cap() {
            return Err(FrameError::TooLong { kind, len, cap: kind.cap() });
        }
        Ok(Self { kind, len, digest })
    }

    /// The header's bytes.
    pub fn to_bytes(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        let len = u32::try_from(self.len).unwrap_or(u32::MAX); // caps are far below
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
        bytes[6] = self.kind.byte();
        bytes[7..11].copy_from_slice(&len.to_le_bytes());
        bytes[11..].copy_from_slice(&self.digest.0);
        bytes
    }

    /// Reads a header from the front of `bytes`; `None` where more bytes are needed. What is there
    /// is judged at once, so that a wrong stream is refused on its first bytes.
    ///
    /// # Errors
    /// Every [`FrameError`] but `Hash`.
    pub fn parse(bytes: &[u8], channel: Channel) -> Result<Option<Self>, FrameError> {
        let seen = bytes.len().min(MAGIC.len());
        if bytes[..seen] != MAGIC[..seen] {
            let mut got = [0; 4];
            got[..seen].copy_from_slice(&bytes[..seen]);
            return Err(FrameError::Magic(got));
        }
        let Some((fixed, rest)) = bytes.split_first_chunk::<11>() else { return Ok(None) };
        let &[_, _, _, _, v0, v1, kind, l0, l1, l2, l3] = fixed;
        let got = u16::from_le_bytes([v0, v1]);
        if got != PROTOCOL_VERSION {
            return Err(FrameError::Version { got });
        }
        let kind = Kind::from_byte(kind).ok_or(FrameError::UnknownKind(kind))?;
        if kind.channel() != channel {
            return Err(FrameError::Misplaced { kind, channel });
        }
        let len = usize::try_from(u32::from_le_bytes([l0, l1, l2, l3])).unwrap_or(usize::MAX);
        if len > kind.cap() {
            return Err(FrameError::TooLong { kind, len, cap: kind.cap() });
        }
        Ok(rest.first_chunk::<32>().map(|digest| Self { kind, len, digest: Digest(*digest) }))
    }
}

/// One whole frame, its hash verified.
#[derive(Clone, PartialEq, Eq)]
pub struct Frame {
    /// What the body is.
    pub kind: Kind,
    /// SHA-256 of the body as received.
    pub digest: Digest,
    /// The body.
    pub body: Vec<u8>,
}

impl std::fmt::Debug for Frame {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Frame({:?}, {} bytes, {})", self.kind, self.body.len(), self.digest.short())
    }
}

/// Encodes a frame.
///
/// # Errors
/// The body is longer than its kind's cap.
pub fn encode(kind: Kind, body: &[u8]) -> Result<Vec<u8>, FrameError> {
    let header = Header::of(kind, body)?;
    let mut bytes = Vec::with_capacity(HEADER_LEN + body.len());
    bytes.extend_from_slice(&header.to_bytes());
    bytes.extend_from_slice(body);
    Ok(bytes)
}

/// What [`Decoder::feed`] found.
#[derive(Debug, PartialEq, Eq)]
pub enum Decoded {
    /// Every byte was taken and the frame is not whole yet.
    Incomplete {
        /// At least this many bytes are missing.
        missing: usize,
    },
    /// A whole frame.
    Complete {
        /// The frame.
        frame: Frame,
        /// How many of the fed bytes belong to it; the rest is the next frame's.
        consumed: usize,
    },
}

/// Cuts frames out of bytes that arrive in any pieces.
#[derive(Debug)]
pub struct Decoder {
    channel: Channel,
    head: Vec<u8>,
    header: Option<Header>,
    body: Vec<u8>,
}

impl Decoder {
    /// A decoder for one direction of one stream.
    pub fn new(channel: Channel) -> Self {
        Self { channel, head: Vec::new(), header: None, body: Vec::new() }
    }

    /// Whether no frame is begun: the only place where a stream may end.
    pub fn is_idle(&self) -> bool {
        self.head.is_empty() && self.header.is_none()
    }

    /// Takes bytes up to the end of the current frame. Allocates no more than twice what has
    /// arrived, whatever length was claimed. After an error the decoder must not be fed again.
    ///
    /// # Errors
    /// The bytes are no frame of this channel.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<Decoded, FrameError> {
        let mut consumed = 0;
        let header = match self.header {
            Some(header) => header,
            None => {
                let take = bytes.len().min(HEADER_LEN - self.head.len());
                self.head.extend_from_slice(&bytes[..take]);
                consumed = take;
                let Some(header) = Header::parse(&self.head, self.channel)? else {
                    return Ok(Decoded::Incomplete { missing: HEADER_LEN - self.head.len() });
                };
                self.head.clear();
                *self.header.insert(header)
            }
        };
        let rest = &bytes[consumed..];
        let take = rest.len().min(header.len - self.body.len());
        self.body.extend_from_slice(&rest[..take]);
        consumed += take;
        if self.body.len() < header.len {
            return Ok(Decoded::Incomplete { missing: header.len - self.body.len() });
        }
        self.header = None;
        let body = std::mem::take(&mut self.body);
        let got = Digest::of(&body);
        if got != header.digest {
            return Err(FrameError::Hash { kind: header.kind, want: header.digest, got });
        }
        let frame = Frame { kind: header.kind, digest: got, body };
        Ok(Decoded::Complete { frame, consumed })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn feed_all(channel: Channel, mut bytes: &[u8], step: usize) -> Result<Vec<Frame>, FrameError> {
        let mut decoder = Decoder::new(channel);
        let mut frames = Vec::new();
        while !bytes.is_empty() {
            let piece = &bytes[..step.min(bytes.len())];
            let taken = match decoder.feed(piece)? {
                Decoded::Incomplete { missing } => {
                    assert!(missing > 0);
                    piece.len()
                }
                Decoded::Complete { frame, consumed } => {
                    frames.push(frame);
                    consumed
                }
            };
            bytes = &bytes[taken..];
        }
        assert!(decoder.is_idle());
        Ok(frames)
    }

    #[test]
    fn frames_survive_any_cutting_of_the_stream() {
        let mut bytes = encode(Kind::Hello, b"one").expect("short");
        bytes.extend(encode(Kind::Drain, b"").expect("short"));
        bytes.extend(encode(Kind::Leave, &[7; 500]).expect("short"));
        for step in [1, 2, 43, 44, 100, 1000] {
            let frames = feed_all(Channel::ActorControl, &bytes, step).expect("well-formed");
            let bodies: Vec<&[u8]> = frames.iter().map(|f| f.body.as_slice()).collect();
            assert_eq!(bodies, [b"one".as_slice(), b"", &[7; 500]]);
        }
    }

    #[test]
    fn a_wrong_stream_is_refused_on_its_first_byte() {
        let mut decoder = Decoder::new(Channel::ActorControl);
        assert_eq!(decoder.feed(b"G"), Err(FrameError::Magic([b'G', 0, 0, 0])));
    }

    #[test]
    fn version_kind_channel_cap_and_hash_have_their_own_refusals() {
        let good = encode(Kind::Hello, b"body").expect("short");
        let with = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            Decoder::new(Channel::ActorControl).feed(&bytes)
        };
        assert_eq!(with(4, 9), Err(FrameError::Version { got: 9 }));
        assert_eq!(with(6, 200), Err(FrameError::UnknownKind(200)));
        let misplaced = FrameError::Misplaced { kind: Kind::Grant, channel: Channel::ActorControl };
        assert_eq!(with(6, Kind::Grant.byte()), Err(misplaced));
        assert!(matches!(with(10, 1), Err(FrameError::TooLong { kind: Kind::Hello, .. })));
        assert!(matches!(with(20, 1), Err(FrameError::Hash { .. })));
        assert!(matches!(with(44, 1), Err(FrameError::Hash { .. })));
    }

    #[test]
    fn a_claimed_length_allocates_nothing() {
        let header = Header { kind: Kind::Episode, len: 16 << 20, digest: Digest([0; 32]) };
        let mut decoder = Decoder::new(Channel::Episode);
        let answer = decoder.feed(&header.to_bytes()).expect("a header");
        assert_eq!(answer, Decoded::Incomplete { missing: 16 << 20 });
        assert_eq!(decoder.body.capacity(), 0);
    }

    #[test]
    fn a_sender_cannot_exceed_a_cap_either() {
        assert!(matches!(
            encode(Kind::Ready, &vec![0; CONTROL_CAP + 1]),
            Err(FrameError::TooLong { .. })
        ));
    }
}
