//! Appends to a journal.

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
};

use protocol::RunId;

use super::{
    JournalError, JournalReader, JournalRecord, Record, SEGMENT_BYTES, SEGMENT_HEADER, genesis,
    link, record_header, segment_header, segment_path,
};

/// Bytes that wait for a sync before they are written in any case.
const BUFFER: usize = 1 << 20;

/// What a crash left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recovered {
    /// Whole records.
    pub records: u64,
    /// Bytes of a torn tail that were cut off; they were never acknowledged.
    pub cut: u64,
}

/// A journal that is being written.
#[derive(Debug)]
pub struct Journal {
    dir: PathBuf,
    run: RunId,
    path: PathBuf,
    file: fs::File,
    /// Bytes of the current segment, the waiting ones included.
    length: u64,
    limit: u64,
    waiting: Vec<u8>,
    dirty: bool,
    so_far: JournalRecord,
}

impl Journal {
    /// A new journal in `dir`, which must not exist.
    ///
    /// # Errors
    /// It exists, or cannot be written.
    pub fn create(dir: impl Into<PathBuf>, run: RunId) -> Result<Self, JournalError> {
        Self::create_limited(dir.into(), run, SEGMENT_BYTES)
    }

    pub(super) fn create_limited(
        dir: PathBuf,
        run: RunId,
        limit: u64,
    ) -> Result<Self, JournalError> {
        fs::create_dir(&dir).map_err(JournalError::io("create", &dir))?;
        let mut so_far = JournalRecord { segments: 0, bytes: 0, records: 0, head: genesis(&run) };
        let (path, file) = new_segment(&dir, &run, &mut so_far)?;
        let length = SEGMENT_HEADER as u64;
        let waiting = Vec::new();
        Ok(Self { dir, run, path, file, length, limit, waiting, dirty: true, so_far })
    }

    /// A journal that is there already, to be gone on with. A torn tail is cut off.
    ///
    /// # Errors
    /// It cannot be read and written, or is damaged anywhere but at its end.
    pub fn recover(dir: impl Into<PathBuf>, run: RunId) -> Result<(Self, Recovered), JournalError> {
        let dir = dir.into();
        let mut reader = JournalReader::open(&dir, run)?;
        let cut = loop {
            match reader.read() {
                Ok(Some(_)) => {}
                Ok(None) => break None,
                Err(JournalError::Torn { path, offset, left }) => break Some((path, offset, left)),
                Err(error) => return Err(error),
            }
        };
        let mut so_far = reader.so_far();
        let recovered =
            Recovered { records: so_far.records, cut: cut.as_ref().map_or(0, |(.., left)| *left) };
        let number = match &cut {
            // A segment that does not even have its header is begun anew.
            Some((path, 0, _)) => {
                fs::remove_file(path).map_err(JournalError::io("remove", path))?;
                so_far.segments
            }
            _ => so_far.segments.saturating_sub(1),
        };
        let (path, file) = if number == so_far.segments {
            new_segment(&dir, &run, &mut so_far)?
        } else {
            let path = segment_path(&dir, number);
            let file = fs::OpenOptions::new().append(true).open(&path);
            (path.clone(), file.map_err(JournalError::io("open", &path))?)
        };
        if let Some((path, offset @ 1.., _)) = &cut {
            file.set_len(*offset).map_err(JournalError::io("cut", path))?;
        }
        file.sync_all().map_err(JournalError::io("sync", &path))?;
        let length = file.metadata().map_err(JournalError::io("read", &path))?.len();
        let (limit, waiting) = (SEGMENT_BYTES, Vec::new());
        let journal = Self { dir, run, path, file, length, limit, waiting, dirty: false, so_far };
        Ok((journal, recovered))
    }

    /// What it holds, unsynced records included.
    pub fn so_far(&self) -> JournalRecord {
        self.so_far
    }

    /// Appends one record. It is on its way to the disk, and there after the next
    /// [`Journal::sync`].
    ///
    /// # Errors
    /// A value over its bound; the system says no.
    pub fn append(&mut self, record: &Record<'_>) -> Result<(), JournalError> {
        let (kind, payload) = (record.kind(), record.encode(self.run)?);
        // Payloads are bounded far below 4 GiB.
        let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        let header = record_header(&self.so_far.head, kind, length);
        let head = link(&self.so_far.head, kind, &payload);
        let size = (header.len() + payload.len() + head.0.len()) as u64;
        if self.length > SEGMENT_HEADER as u64 && self.length + size > self.limit {
            self.sync()?;
            (self.path, self.file) = new_segment(&self.dir, &self.run, &mut self.so_far)?;
            self.length = SEGMENT_HEADER as u64;
        }
        for part in [&header[..], &payload, &head.0] {
            self.waiting.extend_from_slice(part);
        }
        self.dirty = true;
        self.length += size;
        self.so_far.head = head;
        self.so_far.bytes += size;
        self.so_far.records += 1;
        if self.waiting.len() >= BUFFER { self.write() } else { Ok(()) }
    }

    /// Waits until everything appended will survive a crash of the machine. One call serves all
    /// records since the last.
    ///
    /// # Errors
    /// The system says no: nothing since the last sync may be acknowledged.
    pub fn sync(&mut self) -> Result<(), JournalError> {
        if !self.dirty {
            return Ok(());
        }
        self.write()?;
        self.file.sync_data().map_err(JournalError::io("sync", &self.path))?;
        self.dirty = false;
        Ok(())
    }

    fn write(&mut self) -> Result<(), JournalError> {
        self.file.write_all(&self.waiting).map_err(JournalError::io("write", &self.path))?;
        self.waiting.clear();
        Ok(())
    }
}

/// Begins a segment; its name survives a crash from here on.
fn new_segment(
    dir: &Path,
    run: &RunId,
    so_far: &mut JournalRecord,
) -> Result<(PathBuf, fs::File), JournalError> {
    let path = segment_path(dir, so_far.segments);
    let begin = || {
        let mut file = fs::OpenOptions::new().append(true).create_new(true).open(&path)?;
        file.write_all(&segment_header(run, so_far.segments, &so_far.head))?;
        file.sync_all()?;
        fs::File::open(dir)?.sync_all()?;
        Ok(file)
    };
    let file = begin().map_err(JournalError::io("create", &path))?;
    so_far.segments += 1;
    so_far.bytes += SEGMENT_HEADER as u64;
    Ok((path, file))
}
