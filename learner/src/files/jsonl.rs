//! Files of JSON lines that only grow.

use std::{
    fs,
    io::{Read as _, Seek as _, SeekFrom, Write as _},
    path::{Path, PathBuf},
};

use serde::Serialize;

use super::FileError;

/// A file of JSON lines. Each line is written by one call; a line that a crash tore is cut off when
/// the file is opened again.
#[derive(Debug)]
pub struct JsonLines {
    path: PathBuf,
    file: fs::File,
    bytes: u64,
}

impl JsonLines {
    /// A new file.
    ///
    /// # Errors
    /// It exists, or cannot be written.
    pub fn create(path: impl Into<PathBuf>) -> Result<Self, FileError> {
        let path = path.into();
        let file = fs::File::create_new(&path).map_err(FileError::io("create", &path))?;
        Ok(Self { path, file, bytes: 0 })
    }

    /// A file that is there already, without its torn last line.
    ///
    /// # Errors
    /// It cannot be read and written.
    pub fn append_to(path: impl Into<PathBuf>) -> Result<Self, FileError> {
        let path = path.into();
        let (file, bytes) = Self::open(&path).map_err(FileError::io("open", &path))?;
        Ok(Self { path, file, bytes })
    }

    /// A file that is there already, to be gone on with after its first `bytes` bytes. What follows them
    /// stays until [`Self::cut`].
    ///
    /// # Errors
    /// It cannot be read and written, or is shorter.
    pub fn resume(path: impl Into<PathBuf>, bytes: u64) -> Result<Self, FileError> {
        let path = path.into();
        let file = fs::OpenOptions::new().read(true).write(true).open(&path);
        let file = file.map_err(FileError::io("open", &path))?;
        let found = file.metadata().map_err(FileError::io("read", &path))?.len();
        if found < bytes {
            let problem = format!("{found} bytes; the journal speaks of {bytes}");
            return Err(FileError::Damaged { path, line: None, problem });
        }
        Ok(Self { path, file, bytes })
    }

    /// Cuts off what is not counted.
    ///
    /// # Errors
    /// The system says no.
    pub fn cut(&mut self) -> Result<(), FileError> {
        let bytes = self.bytes;
        let cut = self.file.set_len(bytes).and_then(|()| self.file.seek(SeekFrom::Start(bytes)));
        cut.map(drop).map_err(FileError::io("cut", &self.path))
    }

    /// Bytes of its lines.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    fn open(path: &Path) -> std::io::Result<(fs::File, u64)> {
        const BLOCK: u64 = 1 << 16;
        let mut file = fs::OpenOptions::new().read(true).write(true).open(path)?;
        let length = file.seek(SeekFrom::End(0))?;
        let mut end = length;
        let mut block = Vec::new();
        // Goes back to the last newline.
        while end > 0 {
            let start = end.saturating_sub(BLOCK);
            file.seek(SeekFrom::Start(start))?;
            block.clear();
            std::io::Read::by_ref(&mut file).take(end - start).read_to_end(&mut block)?;
            if let Some(at) = block.iter().rposition(|byte| *byte == b'\n') {
                end = start + at as u64 + 1;
                break;
            }
            end = start;
        }
        if end < length {
            file.set_len(end)?;
        }
        file.seek(SeekFrom::Start(end))?;
        Ok((file, end))
    }

    /// Appends one record and returns its line, without the newline.
    ///
    /// # Errors
    /// It is no JSON, or cannot be written.
    pub fn append(&mut self, record: &impl Serialize) -> Result<Vec<u8>, FileError> {
        let mut line = serde_json::to_vec(record)
            .map_err(|source| FileError::Json { path: self.path.clone(), source })?;
        line.push(b'\n');
        self.file.write_all(&line).map_err(FileError::io("write", &self.path))?;
        self.bytes += line.len() as u64;
        line.pop();
        Ok(line)
    }

    /// Waits until everything written will survive a crash of the machine.
    ///
    /// # Errors
    /// The system says no.
    pub fn sync(&self) -> Result<(), FileError> {
        self.file.sync_all().map_err(FileError::io("sync", &self.path))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_torn_last_line_is_cut_off_and_the_rest_is_kept() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("metrics.jsonl");
        let mut lines = JsonLines::create(&path).expect("created");
        lines.append(&json!({"step": 1})).expect("written");
        lines.append(&json!({"step": 2})).expect("written");
        let whole = fs::read(&path).expect("read");
        for torn in ["", "{\"st", &"x".repeat(200_000)] {
            fs::write(&path, [&whole, torn.as_bytes()].concat()).expect("written");
            let mut lines = JsonLines::append_to(&path).expect("opened");
            assert_eq!(fs::read(&path).expect("read"), whole);
            lines.append(&json!({"step": 3})).expect("written");
            let text = fs::read_to_string(&path).expect("read");
            assert_eq!(text, "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n");
        }
        fs::write(&path, "torn from the start").expect("written");
        JsonLines::append_to(&path).expect("opened");
        assert_eq!(fs::read(&path).expect("read"), b"");
    }

    #[test]
    fn a_file_that_is_there_is_not_overwritten() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("metrics.jsonl");
        JsonLines::create(&path).expect("created");
        let error = JsonLines::create(&path).expect_err("there").to_string();
        assert!(error.starts_with("cannot create ") && error.contains("metrics.jsonl"), "{error}");
    }
}
