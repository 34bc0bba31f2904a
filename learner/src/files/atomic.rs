//! Files that are replaced as a whole: a reader sees the old or the new one, never a part.

use std::{fs, io::Write as _, path::Path};

use super::FileError;

/// Replaces `path` by `bytes`. With `durable` it returns once they will survive a crash of the
/// machine.
///
/// # Errors
/// The directory cannot be written to.
pub fn write_atomic(path: &Path, bytes: &[u8], durable: bool) -> Result<(), FileError> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let directory = directory.unwrap_or(Path::new("."));
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let partial = directory.join(format!(".{name}.{}.partial", std::process::id()));
    let written = (|| {
        let mut file = fs::File::create(&partial)?;
        file.write_all(bytes)?;
        if durable { file.sync_all() } else { Ok(()) }
    })();
    let moved = written
        .and_then(|()| fs::rename(&partial, path))
        .and_then(|()| if durable { fs::File::open(directory)?.sync_all() } else { Ok(()) });
    moved.map_err(|source| {
        // The partial file is of no use to anyone; that it stays is no further failure.
        let _ = fs::remove_file(&partial);
        FileError::Io { action: "write", path: path.to_owned(), source }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_replaced_and_nothing_else_is_left() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("manifest.json");
        for (bytes, durable) in [("one", false), ("two", true)] {
            write_atomic(&path, bytes.as_bytes(), durable).expect("written");
            assert_eq!(fs::read_to_string(&path).expect("read"), bytes);
        }
        assert_eq!(fs::read_dir(dir.path()).expect("listed").count(), 1);
        let error = write_atomic(&dir.path().join("no/file"), b"", true).expect_err("no directory");
        assert!(error.to_string().starts_with("cannot write "), "{error}");
    }
}
