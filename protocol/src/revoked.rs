//! Actors that are shut out for good: a file in the learner's identity directory, one id a line.
//!
//! The file is made to be read and edited by people as sshd's lists of keys are: empty lines and what
//! follows a `#` do not count, and an actor is let in again when its line is gone.

use std::{
    collections::BTreeSet,
    fs,
    io::{self, Read as _},
    path::Path,
};

use crate::{ActorId, Digest, IdentityError, private};

/// A hundred thousand ids.
const MAX_BYTES: u64 = 8 << 20;

/// The file in a learner's identity directory.
pub const FILE: &str = "revoked";

/// The actors that are shut out by the file in `dir`; none where there is no file.
///
/// # Errors
/// It cannot be read, or a line is no actor's id.
pub fn load(dir: &Path) -> Result<BTreeSet<ActorId>, IdentityError> {
    Ok(ids(dir, &text(dir)?)?.into_iter().collect())
}

/// Adds an actor to the file in `dir`; `false` where it is there already. A learner that uses the
/// directory takes it up by itself.
///
/// # Errors
/// The file cannot be read or written, or is damaged.
pub fn add(dir: &Path, actor: ActorId) -> Result<bool, IdentityError> {
    let mut text = text(dir)?;
    if ids(dir, &text)?.contains(&actor) {
        return Ok(false);
    }
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    text.push_str(&format!("{}\n", actor.0));
    let path = dir.join(FILE);
    private::replace(&path, text.as_bytes()).map_err(IdentityError::file(path))?;
    Ok(true)
}

fn text(dir: &Path) -> Result<String, IdentityError> {
    let path = dir.join(FILE);
    let file = match fs::File::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(String::new()),
        Err(error) => return Err(IdentityError::file(path)(error)),
    };
    let mut text = String::new();
    let read = file.take(MAX_BYTES + 1).read_to_string(&mut text);
    read.map_err(IdentityError::file(path.clone()))?;
    if text.len() as u64 > MAX_BYTES {
        let problem = format!("longer than {MAX_BYTES} bytes: remove lines that are not needed");
        return Err(IdentityError::File { path, problem });
    }
    Ok(text)
}

fn ids(dir: &Path, text: &str) -> Result<Vec<ActorId>, IdentityError> {
    let mut found = Vec::new();
    for (at, line) in text.lines().enumerate() {
        let id = line.split('#').next().unwrap_or_default().trim();
        if id.is_empty() {
            continue;
        }
        let id: Digest = id.parse().map_err(|_| IdentityError::File {
            path: dir.join(FILE),
            problem: format!("line {}: an actor's id is 64 hex digits", at + 1),
        })?;
        found.push(ActorId(id));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn actor(text: &[u8]) -> ActorId {
        ActorId(Digest::of(text))
    }

    #[test]
    fn ids_are_added_once_and_what_people_write_stays() {
        let dir = tempfile::tempdir().expect("a directory");
        assert!(load(dir.path()).expect("none").is_empty());
        assert!(add(dir.path(), actor(b"a")).expect("written"));
        let path = dir.path().join(FILE);
        let mut text = fs::read_to_string(&path).expect("there");
        text.push_str(&format!("# lent to somebody\n\n  {} # the old host", actor(b"b").0));
        fs::write(&path, &text).expect("ours");
        assert!(!add(dir.path(), actor(b"b")).expect("there already"));
        assert!(add(dir.path(), actor(b"c")).expect("written"));
        assert_eq!(load(dir.path()).expect("read"), [actor(b"a"), actor(b"b"), actor(b"c")].into());
        assert!(fs::read_to_string(&path).expect("there").starts_with(&text));
    }

    #[test]
    fn a_damaged_list_is_refused_by_its_line() {
        let dir = tempfile::tempdir().expect("a directory");
        fs::write(dir.path().join(FILE), "# actors\nabc\n").expect("ours");
        let error = load(dir.path()).expect_err("no id").to_string();
        assert!(error.contains("revoked: line 2: "), "{error}");
        assert!(add(dir.path(), actor(b"a")).is_err());
    }
}
