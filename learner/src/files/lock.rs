//! One learner at a time writes a run: two that go on with the same one would write over each other.

use std::{
    fs::{File, TryLockError},
    io,
    path::Path,
    time::{Duration, Instant},
};

use super::{FileError, resume::refused};

/// How long a learner that was killed may take to be gone.
const PATIENCE: Duration = Duration::from_secs(15);

/// The right to write a run's directory, until it is dropped or its process ends, however it ends.
#[derive(Debug)]
pub struct RunLock(#[expect(dead_code, reason = "it is held")] File);

impl RunLock {
    /// Takes the directory, if it is there. No file is added to it.
    ///
    /// # Errors
    /// Another learner has it, or it cannot be opened.
    pub fn of(directory: &Path) -> Result<Option<Self>, FileError> {
        let file = match File::open(directory) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(FileError::io("open", directory)(error)),
        };
        let deadline = Instant::now() + PATIENCE;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Some(Self(file))),
                // Some network file systems know no locks; the run is not to fail for that.
                Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => {
                    return Ok(Some(Self(file)));
                }
                Err(TryLockError::Error(error)) => {
                    return Err(FileError::io("lock", directory)(error));
                }
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(50));
                }
                Err(TryLockError::WouldBlock) => {
                    let problem = "another learner writes it: wait for it or end it, or name another \
                                   directory with --output";
                    return Err(refused(directory, problem));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_one_learners_until_it_lets_go() {
        let dir = tempfile::tempdir().expect("a directory");
        assert!(RunLock::of(&dir.path().join("none")).expect("absent").is_none());
        let first = RunLock::of(dir.path()).expect("free");
        assert!(File::open(dir.path()).expect("there").try_lock().is_err());
        let waiting = std::thread::scope(|scope| {
            let second = scope.spawn(|| RunLock::of(dir.path()).map(|it| it.is_some()));
            drop(first);
            second.join().expect("no panic")
        });
        assert!(waiting.expect("free again"));
    }
}
