//! Reads a journal from its start, one record at a time, and single records again later.

use std::{
    io::{BufReader, Read as _, SeekFrom},
    path::{Path, PathBuf},
    sync::Arc,
};

use protocol::{
    Digest, RunId,
    folder::{Disk, Folder, Source},
};

use super::{
    CHAIN, JournalError, JournalRecord, MAGIC, MAX_PAYLOAD, RECORD_HEADER, Record, RecordError,
    SEGMENT_HEADER, genesis, link, record_header, segment_name, segment_path,
};

/// Where a record starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position {
    /// Its segment.
    pub segment: u64,
    /// Its first byte there.
    pub offset: u64,
}

/// A record as it was read.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Where it stands.
    pub position: Position,
    run: RunId,
    kind: u8,
    payload: Vec<u8>,
}

impl Entry {
    /// What it says.
    ///
    /// # Errors
    /// It is no record of this release.
    pub fn record(&self) -> Result<Record<'_>, RecordError> {
        Record::decode(self.run, self.kind, &self.payload)
    }
}

/// An open segment.
struct Segment {
    number: u64,
    path: PathBuf,
    file: BufReader<Box<dyn Source>>,
    offset: u64,
    length: u64,
}

/// Reads records in order and checks the chain. Memory is bounded by the largest record, and by what
/// the files really hold.
pub struct JournalReader {
    dir: Arc<dyn Folder>,
    run: RunId,
    segments: u64,
    current: Option<Segment>,
    so_far: JournalRecord,
}

impl JournalReader {
    /// A reader of the journal in `dir`, which must be one of `run`.
    ///
    /// # Errors
    /// The directory cannot be read, holds no segments, or lacks one in the middle.
    pub fn open(dir: impl Into<PathBuf>, run: RunId) -> Result<Self, JournalError> {
        Self::over(Disk::at(dir), run)
    }

    /// The same over a folder of the caller's making.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn over(dir: Arc<dyn Folder>, run: RunId) -> Result<Self, JournalError> {
        let segments = count_segments(dir.as_ref())?;
        let so_far = JournalRecord { segments: 0, bytes: 0, records: 0, head: genesis(&run) };
        Ok(Self { dir, run, segments, current: None, so_far })
    }

    /// What was read up to here, by which the manifest's account is compared.
    pub fn so_far(&self) -> JournalRecord {
        self.so_far
    }

    /// The next record; none at the end.
    ///
    /// # Errors
    /// A file cannot be read, is damaged, or ends in the middle of a record
    /// ([`JournalError::Torn`], of the last segment only). There is nothing more to read then.
    pub fn read(&mut self) -> Result<Option<Entry>, JournalError> {
        loop {
            if self.current.as_ref().is_none_or(|it| it.offset == it.length) {
                let next = self.current.as_ref().map_or(0, |it| it.number + 1);
                if next == self.segments {
                    return Ok(None);
                }
                self.current = Some(self.open_segment(next)?);
                continue;
            }
            let (run, before) = (self.run, self.so_far.head);
            let last = self.current.as_ref().is_some_and(|it| it.number + 1 == self.segments);
            let Some(segment) = &mut self.current else { return Ok(None) };
            let (entry, head) = segment.record(run, &before, last)?;
            self.so_far.head = head;
            self.so_far.records += 1;
            self.so_far.bytes += segment.offset - entry.position.offset;
            return Ok(Some(entry));
        }
    }

    fn open_segment(&mut self, number: u64) -> Result<Segment, JournalError> {
        let path = segment_path(self.dir.as_ref(), number);
        let opened = self.dir.open(&segment_name(number));
        let (mut file, length) = opened.map_err(JournalError::io("open", &path))?;
        let mut header = Vec::with_capacity(SEGMENT_HEADER);
        std::io::Read::by_ref(&mut file)
            .take(SEGMENT_HEADER as u64)
            .read_to_end(&mut header)
            .map_err(JournalError::io("read", &path))?;
        if header.len() < SEGMENT_HEADER || header.iter().all(|byte| *byte == 0) {
            let (offset, left) = (0, length);
            if number + 1 == self.segments {
                return Err(JournalError::Torn { path, offset, left });
            }
            let problem = "the segment has no header".into();
            return Err(JournalError::Damaged { path, offset, problem });
        }
        self.check_header(number, &path, &header)?;
        self.so_far.segments += 1;
        self.so_far.bytes += SEGMENT_HEADER as u64;
        let file = BufReader::with_capacity(1 << 16, file);
        Ok(Segment { number, path, file, offset: SEGMENT_HEADER as u64, length })
    }

    fn check_header(&self, number: u64, path: &Path, header: &[u8]) -> Result<(), JournalError> {
        let wanted = super::segment_header(&self.run, number, &self.so_far.head);
        let Some(offset) = header.iter().zip(&wanted).position(|(a, b)| a != b) else {
            return Ok(());
        };
        let run = MAGIC.len();
        let problem = match offset {
            at if at < run => "not a journal segment of this release",
            at if at < run + 32 => "a segment of another run",
            at if at < run + 40 => "a segment under another's name",
            _ => "it does not follow the segment before",
        };
        let (path, offset) = (path.to_owned(), offset as u64);
        Err(JournalError::Damaged { path, offset, problem: problem.into() })
    }
}

impl Segment {
    /// Reads the record at the current offset, which is below the length. Returns it with the chain
    /// after it.
    fn record(
        &mut self,
        run: RunId,
        before: &Digest,
        last: bool,
    ) -> Result<(Entry, Digest), JournalError> {
        let (offset, left) = (self.offset, self.length - self.offset);
        let damaged = |path: &Path, problem: &str| JournalError::Damaged {
            path: path.to_owned(),
            offset,
            problem: problem.into(),
        };
        let torn = |path: &Path| {
            if last {
                JournalError::Torn { path: path.to_owned(), offset, left }
            } else {
                damaged(path, "the segment ends in the middle of a record, and others follow")
            }
        };
        if left < (RECORD_HEADER + CHAIN) as u64 {
            return Err(torn(&self.path));
        }
        let header: [u8; RECORD_HEADER] = self.take()?;
        let [a, b, c, d, kind, ..] = header;
        let length = u32::from_le_bytes([a, b, c, d]);
        if record_header(before, kind, length) != header {
            // Space that a crash left allocated and unwritten is zeros to the end.
            let unwritten = header.iter().all(|byte| *byte == 0) && self.rest_is_zero()?;
            return Err(if unwritten {
                torn(&self.path)
            } else {
                damaged(&self.path, "no record of this chain starts here")
            });
        }
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if length > MAX_PAYLOAD {
            return Err(damaged(&self.path, "a record over the limit"));
        }
        let whole = (RECORD_HEADER + length + CHAIN) as u64;
        if left < whole {
            return Err(torn(&self.path));
        }
        let mut payload = vec![0; length];
        self.file.read_exact(&mut payload).map_err(JournalError::io("read", &self.path))?;
        let head = link(before, kind, &payload);
        if Digest(self.take()?) != head {
            // Only the very last record can be half of one with the right length.
            return Err(if left == whole {
                torn(&self.path)
            } else {
                damaged(&self.path, "the record was changed")
            });
        }
        self.offset += whole;
        let position = Position { segment: self.number, offset };
        Ok((Entry { position, run, kind, payload }, head))
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], JournalError> {
        let mut bytes = [0; N];
        self.file.read_exact(&mut bytes).map_err(JournalError::io("read", &self.path))?;
        Ok(bytes)
    }

    fn rest_is_zero(&mut self) -> Result<bool, JournalError> {
        let mut block = vec![0; 1 << 16];
        loop {
            let read = self.file.read(&mut block).map_err(JournalError::io("read", &self.path))?;
            if read == 0 {
                return Ok(true);
            }
            if block.iter().take(read).any(|byte| *byte != 0) {
                return Ok(false);
            }
        }
    }
}

/// Reads one record again whose chain was verified before. `dir` is the journal.
///
/// # Errors
/// There is no record at this position.
pub fn read_at(dir: &Path, run: RunId, position: Position) -> Result<Entry, JournalError> {
    read_over(Disk::at(dir).as_ref(), run, position)
}

/// The same over a folder of the caller's making.
///
/// # Errors
/// As [`read_at`].
pub fn read_over(dir: &dyn Folder, run: RunId, position: Position) -> Result<Entry, JournalError> {
    let path = segment_path(dir, position.segment);
    let read = || {
        let (mut file, length) = dir.open(&segment_name(position.segment))?;
        let left = length.saturating_sub(position.offset);
        file.seek(SeekFrom::Start(position.offset))?;
        let mut header = [0; RECORD_HEADER];
        file.read_exact(&mut header)?;
        let [a, b, c, d, kind, ..] = header;
        let length = u64::from(u32::from_le_bytes([a, b, c, d]));
        let mut payload = Vec::new();
        file.take(length.min(left)).read_to_end(&mut payload)?;
        Ok(Entry { position, run, kind, payload })
    };
    read().map_err(JournalError::io("read", &path))
}

/// How many segments there are, numbered from 0 without a gap.
pub(super) fn count_segments(dir: &dyn Folder) -> Result<u64, JournalError> {
    let mut numbers = Vec::new();
    for name in dir.list().map_err(JournalError::io("read", dir.path()))? {
        let number = name.strip_suffix(".segment").and_then(|number| number.parse().ok());
        match number {
            Some(number) if segment_name(number) == name => numbers.push(number),
            _ => {
                let path = dir.path().join(&name);
                let problem = "no file of a journal; move it away".into();
                return Err(JournalError::Segment { path, problem });
            }
        }
    }
    numbers.sort_unstable();
    let count = numbers.len() as u64;
    match (0..).zip(&numbers).find(|(want, number)| want != *number) {
        Some((missing, _)) => Err(missing_segment(dir, missing)),
        None if count == 0 => Err(missing_segment(dir, 0)),
        None => Ok(count),
    }
}

fn missing_segment(dir: &dyn Folder, number: u64) -> JournalError {
    JournalError::Segment {
        path: segment_path(dir, number),
        problem: "the segment is missing".into(),
    }
}
