//! Lossless deltas: one chunk of an adapter as its difference to the same chunk of an earlier one.
//!
//! An update changes little of each number. The XOR of the two chunks is therefore mostly zeros in
//! the high bytes, which come together when the bytes of all numbers are sorted by their place in the
//! number, and zstd does the rest. Each chunk stands alone, so that it is fetched, decoded and held
//! against the manifest's digest of the whole chunk by itself.
//!
//! `format(1) ‖ segments(2) ‖ (length(4) ‖ width(1)) per segment ‖ zstd frame`, little-endian. The
//! segments cover the chunk; a width is how many bytes a number has there. What the last whole number
//! of a segment leaves over is not sorted. Nothing here is trusted: the result has the length that
//! the manifest says or there is none, and memory is bounded by that length.

use safetensors::{Dtype, SafeTensors};

const FORMAT: u8 = 1;
const HEAD: usize = 3;
const SEGMENT: usize = 5;
/// zstd's fastest level: the sorting has done the work.
const LEVEL: i32 = 1;
/// More segments than this are not worth their description: the chunk counts as one of bytes.
const MAX_SEGMENTS: usize = 4096;

/// A stretch of a file and how many bytes its numbers have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Segment {
    len: usize,
    width: usize,
}

/// Which numbers lie where in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout(Vec<Segment>);

/// Why bytes are no delta of a chunk.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeltaError {
    /// Too short for what it says, or of another format.
    #[error("delta: its description is cut short or of another format")]
    Head,
    /// A segment without bytes, or numbers of a width that there is not.
    #[error("delta: segment {0}: {1} bytes of numbers of {2} bytes")]
    Segment(usize, usize, usize),
    /// The segments are not the chunk, or the base is of another length.
    #[error("delta: it describes {got} bytes, the chunk has {want}")]
    Length {
        /// What it describes.
        got: usize,
        /// What it should be.
        want: usize,
    },
    /// zstd refuses, or gives more or fewer bytes than the chunk has.
    #[error("delta: its bytes do not unpack to the chunk's length")]
    Packed,
    /// zstd has no memory to pack.
    #[error("delta: cannot be packed: {0}")]
    Packing(String),
}

fn width(dtype: Dtype) -> usize {
    match dtype {
        Dtype::F64 | Dtype::I64 | Dtype::U64 => 8,
        Dtype::F32 | Dtype::I32 | Dtype::U32 | Dtype::C64 => 4,
        Dtype::F16 | Dtype::BF16 | Dtype::I16 | Dtype::U16 => 2,
        _ => 1,
    }
}

impl Layout {
    /// The layout of a safetensors file; of plain bytes where `file` is none.
    pub fn of(file: &[u8]) -> Self {
        let mut segments = Vec::new();
        let mut covered = 0;
        if let Ok((header, metadata)) = SafeTensors::read_metadata(file) {
            let mut tensors: Vec<_> = metadata.tensors().into_values().collect();
            tensors.sort_by_key(|tensor| tensor.data_offsets);
            covered = header.saturating_add(8).min(file.len());
            segments.push(Segment { len: covered, width: 1 });
            for tensor in tensors {
                let end = tensor.data_offsets.1.saturating_add(header + 8).min(file.len());
                let len = end.saturating_sub(covered);
                segments.push(Segment { len, width: width(tensor.dtype) });
                covered += len;
            }
        }
        segments.push(Segment { len: file.len() - covered, width: 1 });
        Self(segments)
    }

    /// The segments of a stretch of the file, neighbours of one width taken together.
    fn within(&self, range: std::ops::Range<usize>) -> Vec<Segment> {
        let mut found: Vec<Segment> = Vec::new();
        let mut start = 0;
        for segment in &self.0 {
            let end = start + segment.len;
            let len = end.min(range.end).saturating_sub(start.max(range.start));
            start = end;
            match found.last_mut() {
                _ if len == 0 => {}
                Some(last) if last.width == segment.width => last.len += len,
                _ => found.push(Segment { len, width: segment.width }),
            }
        }
        if found.len() > MAX_SEGMENTS {
            found = vec![Segment { len: range.len(), width: 1 }];
        }
        found
    }
}

/// Packs the difference between two chunks that lie at `range` of files of this layout.
///
/// # Errors
/// The chunks are not both of the range's length; no memory.
pub fn encode(
    layout: &Layout,
    range: std::ops::Range<usize>,
    base: &[u8],
    chunk: &[u8],
) -> Result<Vec<u8>, DeltaError> {
    let want = range.len();
    let segments = layout.within(range);
    let described: usize = segments.iter().map(|segment| segment.len).sum();
    for got in [base.len(), chunk.len(), described] {
        if got != want {
            return Err(DeltaError::Length { got, want });
        }
    }
    let mut delta: Vec<u8> = base.iter().zip(chunk).map(|(a, b)| a ^ b).collect();
    let mut sorted = vec![0; want];
    let mut rest = (delta.as_slice(), sorted.as_mut_slice());
    for segment in &segments {
        let (from, to) = (rest.0.split_at(segment.len), rest.1.split_at_mut(segment.len));
        match segment.width {
            2 => sort::<2>(from.0, to.0),
            4 => sort::<4>(from.0, to.0),
            8 => sort::<8>(from.0, to.0),
            _ => to.0.copy_from_slice(from.0),
        }
        rest = (from.1, to.1);
    }
    delta.clear();
    delta.push(FORMAT);
    delta.extend(u16::try_from(segments.len()).unwrap_or(u16::MAX).to_le_bytes());
    for segment in &segments {
        delta.extend(u32::try_from(segment.len).unwrap_or(u32::MAX).to_le_bytes());
        delta.push(u8::try_from(segment.width).unwrap_or(1)); // 1 to 8
    }
    let packed = zstd::bulk::compress(&sorted, LEVEL);
    delta.extend(packed.map_err(|error| DeltaError::Packing(error.to_string()))?);
    Ok(delta)
}

/// The chunk of `base.len()` bytes that a delta against `base` makes.
///
/// # Errors
/// The bytes are no such delta. Allocates the chunk twice at most, and zstd's tables.
pub fn decode(delta: &[u8], base: &[u8]) -> Result<Vec<u8>, DeltaError> {
    let want = base.len();
    let (head, rest) = delta.split_first_chunk::<HEAD>().ok_or(DeltaError::Head)?;
    let &[format, low, high] = head;
    let count = usize::from(u16::from_le_bytes([low, high]));
    let described = rest.split_at_checked(count * SEGMENT);
    let Some((described, packed)) = described.filter(|_| format == FORMAT) else {
        return Err(DeltaError::Head);
    };
    let mut segments = Vec::with_capacity(count);
    let mut got = 0_usize;
    for (at, bytes) in described.as_chunks::<SEGMENT>().0.iter().enumerate() {
        let &[a, b, c, d, width] = bytes;
        let len = usize::try_from(u32::from_le_bytes([a, b, c, d])).unwrap_or(usize::MAX);
        let width = usize::from(width);
        if len == 0 || !matches!(width, 1 | 2 | 4 | 8) {
            return Err(DeltaError::Segment(at, len, width));
        }
        got = got.saturating_add(len);
        segments.push(Segment { len, width });
    }
    if got != want {
        return Err(DeltaError::Length { got, want });
    }
    let mut sorted = vec![0; want];
    // Writes into what is there and no further.
    match zstd::bulk::decompress_to_buffer(packed, sorted.as_mut_slice()) {
        Ok(len) if len == want => {}
        _ => return Err(DeltaError::Packed),
    }
    let mut chunk = base.to_vec();
    let mut rest = (sorted.as_slice(), chunk.as_mut_slice());
    for segment in &segments {
        let (from, to) = (rest.0.split_at(segment.len), rest.1.split_at_mut(segment.len));
        match segment.width {
            2 => apply::<2>(from.0, to.0),
            4 => apply::<4>(from.0, to.0),
            8 => apply::<8>(from.0, to.0),
            _ => apply::<1>(from.0, to.0),
        }
        rest = (from.1, to.1);
    }
    Ok(chunk)
}

/// The bytes of whole numbers, one column for each place in a number.
fn columns<const W: usize>(bytes: &[u8]) -> [&[u8]; W] {
    let numbers = bytes.len() / W;
    std::array::from_fn(|place| &bytes[place * numbers..(place + 1) * numbers])
}

fn sort<const W: usize>(from: &[u8], to: &mut [u8]) {
    let (numbers, left) = from.as_chunks::<W>();
    let (sorted, tail) = to.split_at_mut(numbers.len() * W);
    tail.copy_from_slice(left);
    if numbers.is_empty() {
        return;
    }
    for (place, column) in sorted.chunks_exact_mut(numbers.len()).enumerate() {
        for (byte, number) in column.iter_mut().zip(numbers) {
            *byte = number[place];
        }
    }
}

/// Puts sorted bytes back into their places, as a difference to what is there.
fn apply<const W: usize>(from: &[u8], to: &mut [u8]) {
    let columns = columns::<W>(from);
    let left = &from[from.len() / W * W..];
    let (numbers, tail) = to.as_chunks_mut::<W>();
    for (at, number) in numbers.iter_mut().enumerate() {
        for (byte, column) in number.iter_mut().zip(columns) {
            *byte ^= column[at];
        }
    }
    tail.iter_mut().zip(left).for_each(|(byte, left)| *byte ^= left);
}
