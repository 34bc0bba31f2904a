//! Small files that only their owner may read: keys and secrets.

use std::{
    fs, io,
    io::{Read as _, Write as _},
    path::Path,
};

/// No file of ours is longer.
const MAX_BYTES: u64 = 64 << 10;

/// Why a private file cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PrivateFileError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("others may read it (mode {0:03o}): run `chmod 600` on it, or remove it for a new one")]
    #[cfg_attr(not(unix), allow(dead_code))]
    Mode(u32),
    #[error("longer than {MAX_BYTES} bytes: this is no file of ours")]
    TooLong,
}

/// Reads a private file; `None` where there is none.
pub(crate) fn read(path: &Path) -> Result<Option<Vec<u8>>, PrivateFileError> {
    let file = match fs::File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        let mode = file.metadata()?.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(PrivateFileError::Mode(mode));
        }
    }
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(PrivateFileError::TooLong);
    }
    Ok(Some(bytes))
}

/// Writes a private file that appears whole or not at all, and never replaces one: `false` where
/// one was there already, also when another process made it meanwhile.
pub(crate) fn create(path: &Path, bytes: &[u8]) -> io::Result<bool> {
    write(path, bytes, |temporary| match fs::hard_link(temporary, path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error),
    })
}

/// Writes a private file that appears whole or not at all, in place of one that is there.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    write(path, bytes, |temporary| fs::rename(temporary, path))
}

fn write<T>(
    path: &Path,
    bytes: &[u8],
    settle: impl FnOnce(&Path) -> io::Result<T>,
) -> io::Result<T> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(dir)?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = dir.join(format!(".{name}.{}.tmp", std::process::id()));
    let settled = write_new(&temporary, bytes).and_then(|()| settle(&temporary));
    match fs::remove_file(&temporary) {
        // It was renamed.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        // What failed before is what counts.
        Err(error) if settled.is_ok() => return Err(error),
        _ => {}
    }
    let settled = settled?;
    fs::File::open(dir)?.sync_all()?;
    Ok(settled)
}

fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut options = fs::OpenOptions::new();
    options.write(true).create(true).truncate(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt as _;
        options.mode(0o600);
    }
    let mut file = options.open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}
