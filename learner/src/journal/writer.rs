//! Appends to a journal.

use std::{fs, path::PathBuf, sync::Arc};

use protocol::{
    RunId,
    folder::{Disk, Folder, Sink},
};

use super::{
    Entry, JournalError, JournalReader, JournalRecord, Record, SEGMENT_BYTES, SEGMENT_HEADER,
    genesis, link, record_header, segment_header, segment_name, segment_path,
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
pub struct Journal {
    dir: Arc<dyn Folder>,
    run: RunId,
    path: PathBuf,
    file: Box<dyn Sink>,
    /// Bytes of the current segment, the waiting ones included.
    length: u64,
    limit: u64,
    waiting: Vec<u8>,
    dirty: bool,
    so_far: JournalRecord,
}

impl std::fmt::Debug for Journal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Journal({}, {:?})", self.path.display(), self.so_far)
    }
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
        Self::create_over(Disk::at(dir), run, limit)
    }

    /// A new journal in an empty folder, in segments of at most `limit` bytes.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn create_over(dir: Arc<dyn Folder>, run: RunId, limit: u64) -> Result<Self, JournalError> {
        let mut so_far = JournalRecord { segments: 0, bytes: 0, records: 0, head: genesis(&run) };
        let (path, file) = new_segment(dir.as_ref(), &run, &mut so_far)?;
        let length = SEGMENT_HEADER as u64;
        let waiting = Vec::new();
        Ok(Self { dir, run, path, file, length, limit, waiting, dirty: true, so_far })
    }

    /// A journal that is there already, to be gone on with. A torn tail is cut off.
    ///
    /// # Errors
    /// It cannot be read and written, or is damaged anywhere but at its end.
    pub fn recover(dir: impl Into<PathBuf>, run: RunId) -> Result<(Self, Recovered), JournalError> {
        Self::recover_over(Disk::at(dir), run, SEGMENT_BYTES, |_| Ok(()))
    }

    /// The same over a folder of the caller's making; `visit` is shown every whole record.
    ///
    /// # Errors
    /// As [`Self::recover`], and what `visit` says.
    pub fn recover_over(
        dir: Arc<dyn Folder>,
        run: RunId,
        limit: u64,
        mut visit: impl FnMut(&Entry) -> Result<(), JournalError>,
    ) -> Result<(Self, Recovered), JournalError> {
        let mut reader = JournalReader::over(dir.clone(), run)?;
        let cut = loop {
            match reader.read() {
                Ok(Some(entry)) => visit(&entry)?,
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
                let name = segment_name(so_far.segments);
                dir.remove(&name).map_err(JournalError::io("remove", path))?;
                so_far.segments
            }
            _ => so_far.segments.saturating_sub(1),
        };
        let (path, mut file, mut length) = if number == so_far.segments {
            let (path, file) = new_segment(dir.as_ref(), &run, &mut so_far)?;
            (path, file, SEGMENT_HEADER as u64)
        } else {
            let path = segment_path(dir.as_ref(), number);
            let opened = dir.append(&segment_name(number));
            let (file, length) = opened.map_err(JournalError::io("open", &path))?;
            (path, file, length)
        };
        if let Some((path, offset @ 1.., _)) = &cut {
            file.cut(*offset).map_err(JournalError::io("cut", path))?;
            length = *offset;
        }
        file.sync().map_err(JournalError::io("sync", &path))?;
        let waiting = Vec::new();
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
            (self.path, self.file) = new_segment(self.dir.as_ref(), &self.run, &mut self.so_far)?;
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
        self.file.sync().map_err(JournalError::io("sync", &self.path))?;
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
    dir: &dyn Folder,
    run: &RunId,
    so_far: &mut JournalRecord,
) -> Result<(PathBuf, Box<dyn Sink>), JournalError> {
    let path = segment_path(dir, so_far.segments);
    let begin = || {
        let mut file = dir.create(&segment_name(so_far.segments))?;
        file.write_all(&segment_header(run, so_far.segments, &so_far.head))?;
        file.sync()?;
        dir.sync()?;
        Ok(file)
    };
    let file = begin().map_err(JournalError::io("create", &path))?;
    so_far.segments += 1;
    so_far.bytes += SEGMENT_HEADER as u64;
    Ok((path, file))
}
