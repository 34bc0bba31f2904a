//! Folders of files that must survive crashes: what the journal, the checkpoints and the spool are written
//! through, so that the same code runs on a disk and in simulations that lose what was not synced.
//!
//! A file's bytes survive once [`Sink::sync`] returned; its name, and that a name is gone, once
//! [`Folder::sync`] returned.

use std::{
    fmt, fs,
    io::{self, Read, Seek, Write},
    path::{Path, PathBuf},
    sync::Arc,
};

/// A file that is being written at its end.
pub trait Sink: Write + Send {
    /// Waits until everything written will survive a crash of the machine.
    ///
    /// # Errors
    /// The system says no: nothing is known of what was written since the last call.
    fn sync(&mut self) -> io::Result<()>;

    /// Cuts the file off after so many bytes.
    ///
    /// # Errors
    /// The system says no.
    fn cut(&mut self, length: u64) -> io::Result<()>;
}

/// A file that is being read.
pub trait Source: Read + Seek + Send {}

impl<T: Read + Seek + Send> Source for T {}

/// A folder of files, without folders in it.
pub trait Folder: fmt::Debug + Send + Sync {
    /// Where it is, for messages.
    fn path(&self) -> &Path;

    /// The names in it.
    ///
    /// # Errors
    /// The system says no; so below.
    fn list(&self) -> io::Result<Vec<String>>;

    /// Opens a file to be read, and says how long it is.
    ///
    /// # Errors
    /// As above.
    fn open(&self, name: &str) -> io::Result<(Box<dyn Source>, u64)>;

    /// Makes a file, which must not be there.
    ///
    /// # Errors
    /// As above.
    fn create(&self, name: &str) -> io::Result<Box<dyn Sink>>;

    /// Opens a file to be written on at its end, and says how long it is.
    ///
    /// # Errors
    /// As above.
    fn append(&self, name: &str) -> io::Result<(Box<dyn Sink>, u64)>;

    /// Gives a file another name, in the place of what has it.
    ///
    /// # Errors
    /// As above.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a file.
    ///
    /// # Errors
    /// As above.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Waits until the names as they are now will survive a crash of the machine.
    ///
    /// # Errors
    /// As above.
    fn sync(&self) -> io::Result<()>;
}

/// The ending of files that are not whole yet.
pub const PARTIAL: &str = ".partial";

/// Puts a file under its name so that it is there whole or not at all, and stays: written beside, synced,
/// renamed, folder synced.
///
/// # Errors
/// The system says no. The file is then whole, old, or not there.
pub fn replace(folder: &dyn Folder, name: &str, parts: &[&[u8]]) -> io::Result<()> {
    let partial = format!("{name}{PARTIAL}");
    match folder.remove(&partial) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = folder.create(&partial)?;
    for part in parts {
        file.write_all(part)?;
    }
    file.sync()?;
    drop(file);
    folder.rename(&partial, name)?;
    folder.sync()
}

/// Reads a whole file of at most `most` bytes.
///
/// # Errors
/// The system says no; the file is longer.
pub fn read(folder: &dyn Folder, name: &str, most: u64) -> io::Result<Vec<u8>> {
    let (mut file, length) = folder.open(name)?;
    if length > most {
        let problem = format!("{length} bytes, and at most {most} are read");
        return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
    }
    let mut bytes = Vec::new();
    Read::take(&mut file, most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// A folder of the file system.
#[derive(Clone, Debug)]
pub struct Disk {
    path: PathBuf,
}

impl Disk {
    /// The folder at this path, which need not be there yet.
    pub fn at(path: impl Into<PathBuf>) -> Arc<dyn Folder> {
        Arc::new(Self { path: path.into() })
    }
}

struct DiskFile(fs::File);

impl Write for DiskFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl Sink for DiskFile {
    fn sync(&mut self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn cut(&mut self, length: u64) -> io::Result<()> {
        self.0.set_len(length)
    }
}

impl Folder for Disk {
    fn path(&self) -> &Path {
        &self.path
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            names.push(entry?.file_name().to_string_lossy().into_owned());
        }
        names.sort_unstable();
        Ok(names)
    }

    fn open(&self, name: &str) -> io::Result<(Box<dyn Source>, u64)> {
        let file = fs::File::open(self.path.join(name))?;
        let found = file.metadata()?;
        if !found.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "no regular file"));
        }
        Ok((Box::new(file), found.len()))
    }

    fn create(&self, name: &str) -> io::Result<Box<dyn Sink>> {
        let path = self.path.join(name);
        let file = fs::OpenOptions::new().append(true).create_new(true).open(path)?;
        Ok(Box::new(DiskFile(file)))
    }

    fn append(&self, name: &str) -> io::Result<(Box<dyn Sink>, u64)> {
        let file = fs::OpenOptions::new().append(true).open(self.path.join(name))?;
        let length = file.metadata()?.len();
        Ok((Box::new(DiskFile(file)), length))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        fs::rename(self.path.join(from), self.path.join(to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.path.join(name))
    }

    fn sync(&self) -> io::Result<()> {
        fs::File::open(&self.path)?.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_replaced_whole_and_nothing_else_is_left() {
        let dir = tempfile::tempdir().expect("a directory");
        let folder = Disk::at(dir.path());
        fs::write(dir.path().join("state.partial"), "torn").expect("written");
        for text in ["one", "two"] {
            replace(folder.as_ref(), "state", &[text.as_bytes(), b"!"]).expect("written");
            let read = read(folder.as_ref(), "state", 4).expect("read");
            assert_eq!(read, format!("{text}!").as_bytes());
        }
        assert_eq!(folder.list().expect("listed"), ["state"]);
        assert!(read(folder.as_ref(), "state", 3).is_err(), "longer than it may be");
        assert!(folder.create("state").is_err(), "there already");
    }
}
