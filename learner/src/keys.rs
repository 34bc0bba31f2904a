//! The learner's identity directory: its certificate, the join secret, the actors that are shut out,
//! and the join string of now. A running learner takes up what `learner token` or an editor changes.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
    time::SystemTime,
};

use protocol::{ActorId, Identity, IdentityError, Join, Secret, revoked};
use tracing::{error, info};

/// Who the learner is and who may join.
#[derive(Debug)]
pub struct Keys {
    /// Its certificate.
    pub identity: Identity,
    /// What lets actors in.
    pub secret: Secret,
    /// Actors that are shut out.
    pub revoked: BTreeSet<ActorId>,
    /// Where all this is kept, if it is.
    watch: Option<KeyWatch>,
}

impl Keys {
    /// The keys kept in `dir`, made there on first use; fresh ones that nothing keeps without it.
    ///
    /// # Errors
    /// A file cannot be read or written, is readable by others, or is damaged.
    pub fn open(dir: Option<&Path>) -> Result<Self, IdentityError> {
        let Some(dir) = dir else {
            return Ok(Self {
                identity: Identity::generate()?,
                secret: Secret::generate()?,
                revoked: BTreeSet::new(),
                watch: None,
            });
        };
        let identity = Identity::load_or_create(dir)?;
        let secret = Secret::load_or_create(dir)?;
        let watch = KeyWatch::new(dir);
        Ok(Self { identity, secret, revoked: revoked::load(dir)?, watch: Some(watch) })
    }

    /// Watches the directory from here on.
    pub(crate) fn take_watch(&mut self) -> Option<KeyWatch> {
        self.watch.take()
    }
}

/// What tells one version of a file from the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    modified: Option<SystemTime>,
    bytes: u64,
    inode: u64,
}

impl Stamp {
    fn of(path: &Path) -> Option<Self> {
        use std::os::unix::fs::MetadataExt as _;
        let metadata = fs::metadata(path).ok()?;
        let modified = metadata.modified().ok();
        Some(Self { modified, bytes: metadata.len(), inode: metadata.ino() })
    }
}

/// An identity directory that is looked at again and again.
#[derive(Debug)]
pub(crate) struct KeyWatch {
    dir: PathBuf,
    secret: Option<Stamp>,
    revoked: Option<Stamp>,
}

/// What changed in it.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    pub(crate) secret: Option<Secret>,
    pub(crate) revoked: Option<BTreeSet<ActorId>>,
}

impl KeyWatch {
    fn new(dir: &Path) -> Self {
        let (secret, revoked) =
            (Stamp::of(&dir.join(Secret::FILE)), Stamp::of(&dir.join(revoked::FILE)));
        Self { dir: dir.to_owned(), secret, revoked }
    }

    /// What changed since the last look. What cannot be read changes nothing and is said once.
    pub(crate) fn look(&mut self) -> Changes {
        let mut changes = Changes::default();
        let now = Stamp::of(&self.dir.join(Secret::FILE));
        if std::mem::replace(&mut self.secret, now) != now {
            match Secret::load(&self.dir) {
                Ok(secret) => changes.secret = secret,
                Err(damaged) => error!("{damaged}; the join secret stays as it was"),
            }
        }
        let now = Stamp::of(&self.dir.join(revoked::FILE));
        if std::mem::replace(&mut self.revoked, now) != now {
            match revoked::load(&self.dir) {
                Ok(revoked) => changes.revoked = Some(revoked),
                Err(damaged) => error!("{damaged}; who is shut out stays as it was"),
            }
        }
        changes
    }

    /// Writes the join string of now to the directory.
    pub(crate) fn keep(&self, join: &Join) -> Result<(), IdentityError> {
        join.keep(&self.dir)?;
        info!("the join string is in {}", self.dir.join(Join::FILE).display());
        Ok(())
    }
}

/// Replaces the secret of an identity directory. Returns the new join string, where a learner has
/// written one there before.
///
/// # Errors
/// There is no identity, or a file cannot be read or written.
pub fn rotate(dir: &Path) -> Result<Option<Join>, IdentityError> {
    known(dir)?;
    let kept = Join::kept(dir)?;
    let secret = Secret::rotate(dir)?;
    let Some(join) = kept else { return Ok(None) };
    let join = Join { secret, ..join };
    join.keep(dir)?;
    Ok(Some(join))
}

/// The join string that a learner wrote to an identity directory.
///
/// # Errors
/// There is none, or it cannot be read.
pub fn show(dir: &Path) -> Result<Join, IdentityError> {
    known(dir)?;
    Join::kept(dir)?.ok_or_else(|| IdentityError::File {
        path: dir.join(Join::FILE),
        problem: "no learner with this identity has listened yet: start it first".into(),
    })
}

/// Shuts an actor out of every learner with this identity; `false` where it was already.
///
/// # Errors
/// There is no identity, or the list cannot be read or written.
pub fn revoke(dir: &Path, actor: ActorId) -> Result<bool, IdentityError> {
    known(dir)?;
    revoked::add(dir, actor)
}

/// A directory that is mistyped shall not become an identity.
fn known(dir: &Path) -> Result<(), IdentityError> {
    let path = dir.join(Identity::FILE);
    match fs::metadata(&path) {
        Ok(_) => Ok(()),
        Err(error) => {
            let problem = match error.kind() {
                io::ErrorKind::NotFound => {
                    "not there: name the directory that `learner train --identity` uses".to_owned()
                }
                _ => error.to_string(),
            };
            Err(IdentityError::File { path, problem })
        }
    }
}

#[cfg(test)]
mod tests {
    use protocol::Digest;

    use super::*;

    #[test]
    fn a_running_learner_sees_what_changes_and_nothing_else() {
        let dir = tempfile::tempdir().expect("a directory");
        let dir = dir.path();
        assert!(rotate(dir).expect_err("no identity").to_string().contains("--identity"));
        let mut keys = Keys::open(Some(dir)).expect("made");
        let mut watch = keys.take_watch().expect("kept");
        let quiet = watch.look();
        assert!(quiet.secret.is_none() && quiet.revoked.is_none());

        assert!(show(dir).is_err());
        assert!(rotate(dir).expect("written").is_none(), "no learner has listened");
        let first = watch.look().secret.expect("seen");
        assert_ne!(first, keys.secret);
        let join = Join {
            host: "learner.example".into(),
            port: 7171,
            learner: keys.identity.fingerprint(),
            secret: first.clone(),
        };
        watch.keep(&join).expect("written");
        let shown = rotate(dir).expect("written").expect("a learner has listened");
        assert_eq!(shown.reveal(), show(dir).expect("there").reveal());
        let second = watch.look().secret.expect("seen");
        assert!(second == shown.secret && second != first);

        let actor = ActorId(Digest::of(b"an actor"));
        assert!(revoke(dir, actor).expect("written") && !revoke(dir, actor).expect("there"));
        assert_eq!(watch.look().revoked, Some([actor].into()));
        // What a person damages changes nothing.
        fs::write(dir.join(revoked::FILE), "nonsense\n").expect("ours");
        assert!(watch.look().revoked.is_none());
        fs::remove_file(dir.join(revoked::FILE)).expect("ours");
        assert_eq!(watch.look().revoked, Some(BTreeSet::new()));
    }
}
