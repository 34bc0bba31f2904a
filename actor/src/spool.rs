//! Episodes that no learner has acknowledged yet, on disk: what was played outlives the process.
//!
//! `<place>-<episode>.episode` holds an episode's encoded bytes; the place gives the order, and the
//! episode's id says what the bytes must be. A file is written beside, synced, renamed, and the folder
//! synced, before its episode is sent; it is removed once an acknowledgement names it. What is torn or
//! not what its name says is set aside under another name, and never sent.

use std::{collections::BTreeMap, io, sync::Arc};

use bytes::Bytes;
use protocol::{
    EpisodeId, LeaseId, RunId,
    folder::{self, Folder, PARTIAL},
    wire::peek_lease,
};

const ENDING: &str = ".episode";
/// The ending of what was set aside.
const ASIDE: &str = ".aside";
/// No episode is longer.
const MAX_EPISODE: u64 = 16 << 20;

/// The spool cannot be read or written: one line.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} the spool {path}: {source}")]
pub struct SpoolError {
    action: &'static str,
    path: String,
    source: io::Error,
}

/// An episode that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Waiting {
    place: u64,
    run: RunId,
    bytes: u64,
}

/// Episodes on disk.
#[derive(Debug)]
pub struct Spool {
    folder: Arc<dyn Folder>,
    waiting: BTreeMap<EpisodeId, Waiting>,
    next_place: u64,
}

/// An episode that an earlier process left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Left {
    /// Its id.
    pub id: EpisodeId,
    /// The lease that it answers.
    pub lease: LeaseId,
    /// Its bytes.
    pub body: Bytes,
}

impl Spool {
    /// Opens a spool. Returns it, and what there is to say about it: a line a file that was set aside.
    ///
    /// # Errors
    /// The folder cannot be read and written.
    pub fn open(folder: Arc<dyn Folder>) -> Result<(Self, Vec<String>), SpoolError> {
        let mut this = Self { folder, waiting: BTreeMap::new(), next_place: 0 };
        let mut notes = Vec::new();
        for name in this.folder.list().map_err(this.failed("read"))? {
            if name.ends_with(&format!("{ENDING}{PARTIAL}")) {
                // Its episode was never sent: whoever wrote it died first.
                this.folder.remove(&name).map_err(this.failed("write"))?;
            } else if name.ends_with(ENDING)
                && let Err(problem) = this.take_up(&name)
            {
                this.folder
                    .rename(&name, &format!("{name}{ASIDE}"))
                    .map_err(this.failed("write"))?;
                notes.push(format!("{name} is set aside: {problem}"));
            }
        }
        Ok((this, notes))
    }

    fn failed(&self, action: &'static str) -> impl FnOnce(io::Error) -> SpoolError + use<> {
        let path = self.folder.path().display().to_string();
        move |source| SpoolError { action, path, source }
    }

    fn take_up(&mut self, name: &str) -> Result<(), String> {
        let (place, id) = parse(name).ok_or("its name is none of a spool's")?;
        let body = self.read(name)?;
        if EpisodeId::of_body(&body) != id {
            return Err("its bytes are not those of its name".into());
        }
        let (run, _) = peek_lease(&body).ok_or("its bytes are no episode")?;
        let waiting = Waiting { place, run, bytes: body.len() as u64 };
        self.waiting.insert(id, waiting);
        self.next_place = self.next_place.max(place.saturating_add(1));
        Ok(())
    }

    fn read(&self, name: &str) -> Result<Vec<u8>, String> {
        folder::read(self.folder.as_ref(), name, MAX_EPISODE).map_err(|error| error.to_string())
    }

    /// The episodes of a run that an earlier process left, oldest first.
    ///
    /// # Errors
    /// One cannot be read any more.
    pub fn left(&self, run: RunId) -> Result<Vec<Left>, SpoolError> {
        let mut own: Vec<(&EpisodeId, &Waiting)> =
            self.waiting.iter().filter(|(_, it)| it.run == run).collect();
        own.sort_by_key(|(_, it)| it.place);
        let mut left = Vec::with_capacity(own.len());
        for (id, it) in own {
            let name = file_name(it.place, id);
            let body = folder::read(self.folder.as_ref(), &name, MAX_EPISODE);
            let body = body.map_err(self.failed("read"))?;
            if let Some((_, lease)) = peek_lease(&body) {
                left.push(Left { id: *id, lease, body: body.into() });
            }
        }
        Ok(left)
    }

    /// How many episodes of other runs there are.
    pub fn foreign(&self, run: RunId) -> usize {
        self.waiting.values().filter(|it| it.run != run).count()
    }

    /// Keeps an episode; it survives a crash from here on.
    ///
    /// # Errors
    /// It cannot be written: it must not be sent.
    pub fn put(&mut self, run: RunId, id: EpisodeId, body: &[u8]) -> Result<(), SpoolError> {
        if self.waiting.contains_key(&id) {
            return Ok(());
        }
        let place = self.next_place;
        folder::replace(self.folder.as_ref(), &file_name(place, &id), &[body])
            .map_err(self.failed("write"))?;
        self.next_place += 1;
        self.waiting.insert(id, Waiting { place, run, bytes: body.len() as u64 });
        Ok(())
    }

    /// Forgets an acknowledged episode. That its file is gone need not survive a crash: it would be
    /// acknowledged once more.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub fn remove(&mut self, id: &EpisodeId) -> Result<(), SpoolError> {
        let Some(it) = self.waiting.remove(id) else { return Ok(()) };
        match self.folder.remove(&file_name(it.place, id)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(self.failed("write")(error))
            }
            _ => Ok(()),
        }
    }

    /// Forgets the episodes of a run that is over.
    ///
    /// # Errors
    /// A file cannot be removed.
    pub fn clear(&mut self, run: RunId) -> Result<(), SpoolError> {
        let own: Vec<EpisodeId> =
            self.waiting.iter().filter(|(_, it)| it.run == run).map(|(id, _)| *id).collect();
        own.iter().try_for_each(|id| self.remove(id))
    }

    /// Episodes and bytes of a run that wait.
    pub fn waiting(&self, run: RunId) -> (usize, u64) {
        let own = || self.waiting.values().filter(|it| it.run == run);
        (own().count(), own().map(|it| it.bytes).sum())
    }
}

fn file_name(place: u64, id: &EpisodeId) -> String {
    format!("{place:020}-{id}{ENDING}")
}

fn parse(name: &str) -> Option<(u64, EpisodeId)> {
    let (place, id) = name.strip_suffix(ENDING)?.split_once('-')?;
    let (place, id) = (place.parse().ok()?, EpisodeId(id.parse().ok()?));
    (file_name(place, &id) == name).then_some((place, id))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use protocol::{Digest, Episode, EpisodeEnd, PolicyDigest, folder::Disk};

    use super::*;

    pub(super) fn episode(run: &str, generation: u32) -> (RunId, Vec<u8>) {
        let run = RunId(Digest::of(run.as_bytes()));
        let episode = Episode {
            run,
            lease: LeaseId { group: 1, generation },
            task: "t".into(),
            seed: 1,
            policy: PolicyDigest(Digest::of(b"policy")),
            reset_text: String::new(),
            reset_images: Vec::new(),
            tokens: vec![1],
            loss_mask: vec![0],
            spans: Vec::new(),
            trace: Vec::new(),
            trace_head: Digest::of(b""),
            end: EpisodeEnd::NoCall,
            reward: 0.0,
            images: Vec::new(),
        };
        (run, episode.encode().expect("sound"))
    }

    #[test]
    fn episodes_outlive_the_process_in_order_until_they_are_acknowledged() {
        let dir = tempfile::tempdir().expect("a directory");
        let folder = Disk::at(dir.path());
        let (mut spool, notes) = Spool::open(folder.clone()).expect("opened");
        assert_eq!(notes, Vec::<String>::new());
        let mut ids = Vec::new();
        for generation in [5, 3, 4] {
            let (run, body) = episode("a", generation);
            let id = EpisodeId::of_body(&body);
            spool.put(run, id, &body).expect("kept");
            spool.put(run, id, &body).expect("kept once");
            ids.push(id);
        }
        let (other, body) = episode("b", 0);
        spool.put(other, EpisodeId::of_body(&body), &body).expect("kept");
        let (run, _) = episode("a", 0);
        for _ in 0..2 {
            let (mut spool, notes) = Spool::open(folder.clone()).expect("opened");
            assert!(notes.is_empty());
            let left: Vec<EpisodeId> =
                spool.left(run).expect("read").iter().map(|it| it.id).collect();
            assert_eq!(left, ids);
            assert_eq!((spool.foreign(run), spool.waiting(run).0), (1, left.len()));
            spool.remove(&ids.remove(0)).expect("removed");
        }
        let (mut spool, _) = Spool::open(folder.clone()).expect("opened");
        spool.clear(run).expect("removed");
        assert_eq!((spool.waiting(run), spool.foreign(run)), ((0, 0), 1));
        assert_eq!(folder.list().expect("listed").len(), 1);
    }

    #[test]
    fn torn_and_changed_files_are_set_aside_and_others_are_left_alone() {
        let dir = tempfile::tempdir().expect("a directory");
        let (run, body) = episode("a", 1);
        let id = EpisodeId::of_body(&body);
        let good = dir.path().join(file_name(7, &id));
        for at in 0..body.len() {
            let mut flipped = body.clone();
            flipped[at] ^= 1;
            for bytes in [&flipped[..], &body[..at]] {
                fs::write(&good, bytes).expect("written");
                let (spool, notes) = Spool::open(Disk::at(dir.path())).expect("opened");
                assert_eq!((spool.waiting(run).0, notes.len()), (0, 1), "byte {at}");
                assert!(notes[0].contains("is set aside"), "{notes:?}");
            }
        }
        fs::write(dir.path().join(format!("x{ENDING}")), &body).expect("written");
        fs::write(dir.path().join(format!("y{ENDING}{PARTIAL}")), "torn").expect("written");
        fs::write(dir.path().join("identity.pem"), "not an episode").expect("written");
        fs::write(&good, &body).expect("written");
        let (spool, notes) = Spool::open(Disk::at(dir.path())).expect("opened");
        assert_eq!((spool.waiting(run).0, notes.len()), (1, 1));
        let names = Disk::at(dir.path()).list().expect("listed");
        assert!(names.iter().any(|name| name == "identity.pem"), "{names:?}");
        assert!(!names.iter().any(|name| name.ends_with(PARTIAL)), "{names:?}");
    }
}
