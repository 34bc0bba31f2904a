//! Frames between rank 0 and another rank, once they have met: a header of 24 bytes (magic, kind,
//! number of the operation, length) and a body.

use std::{
    fmt,
    io::{self, Read, Write},
};

const MAGIC: [u8; 4] = *b"RCRK";
/// The longest body: an adapter in f32, and room.
const LONGEST: u64 = 8 << 30;

/// What a frame is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Values to be summed, and their sum: f32, little-endian.
    Sum,
    /// The same in f64.
    WideSum,
    /// Rank 0's bytes for all.
    Broadcast,
    /// A rank's bytes, and everybody's.
    Gather,
    /// The sender has finished and leaves.
    Leave,
    /// The run has failed: the body says why.
    Abort,
}

const KINDS: [Kind; 6] =
    [Kind::Sum, Kind::WideSum, Kind::Broadcast, Kind::Gather, Kind::Leave, Kind::Abort];

/// One operation, as messages name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Operation {
    pub(super) kind: Kind,
    /// Counts from 1; the same on all ranks.
    pub(super) number: u64,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.kind {
            Kind::Sum => "sum",
            Kind::WideSum => "sum of metrics",
            Kind::Broadcast => "broadcast",
            Kind::Gather => "gathering",
            Kind::Leave => "end",
            Kind::Abort => "abort",
        };
        write!(f, "{name} {}", self.number)
    }
}

/// A received frame.
#[derive(Debug)]
pub(super) struct Frame {
    pub(super) operation: Operation,
    pub(super) body: Vec<u8>,
}

pub(super) fn write(to: &mut impl Write, operation: Operation, body: &[u8]) -> io::Result<()> {
    let mut header = [0; 24];
    header[..4].copy_from_slice(&MAGIC);
    header[4] = KINDS.iter().position(|kind| *kind == operation.kind).unwrap_or_default() as u8;
    header[8..16].copy_from_slice(&operation.number.to_le_bytes());
    header[16..].copy_from_slice(&(body.len() as u64).to_le_bytes());
    to.write_all(&header)?;
    to.write_all(body)
}

/// The next frame; none where the sender has closed.
pub(super) fn read(from: &mut impl Read) -> io::Result<Option<Frame>> {
    let mut header = [0; 24];
    let mut got = 0;
    while got < header.len() {
        match from.read(&mut header[got..]) {
            Ok(0) if got == 0 => return Ok(None),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(more) => got += more,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    let word = |at: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&header[at..at + 8]);
        u64::from_le_bytes(bytes)
    };
    let (number, len) = (word(8), word(16));
    let bad = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let kind = KINDS.get(usize::from(header[4])).filter(|_| header[..4] == MAGIC);
    let kind = *kind.ok_or_else(|| bad("not a frame between ranks"))?;
    if len > LONGEST {
        return Err(bad("a frame of impossible length"));
    }
    // Grows as bytes come: a length alone takes no memory.
    let mut body = Vec::new();
    from.take(len).read_to_end(&mut body)?;
    if body.len() as u64 != len {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(Some(Frame { operation: Operation { kind, number }, body }))
}
