//! A disk that loses what was not synced.

use std::{
    collections::BTreeMap,
    io::{self, Cursor, Write},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use protocol::folder::{Folder, Sink, Source};

/// Random numbers of a seed (splitmix64).
#[derive(Debug)]
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From `low` to below `high`.
    pub(crate) fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.roll() % (high - low).max(1)
    }

    pub(crate) fn chance(&mut self, percent: u64) -> bool {
        self.roll() % 100 < percent
    }
}

#[derive(Debug, Default)]
struct File {
    data: Vec<u8>,
    synced: usize,
}

#[derive(Debug, Default)]
struct Inner {
    files: Vec<File>,
    /// Names as a process sees them.
    now: BTreeMap<String, usize>,
    /// Names that a crash leaves for sure.
    kept: BTreeMap<String, usize>,
    /// How often the machine crashed: what a process of an earlier life holds is dead.
    life: u64,
}

/// One folder on such a disk.
#[derive(Clone, Debug)]
pub(crate) struct SimDisk {
    path: PathBuf,
    inner: Arc<Mutex<Inner>>,
}

impl SimDisk {
    pub(crate) fn new(path: &str) -> Self {
        Self { path: path.into(), inner: Arc::default() }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The machine stops: of names and bytes that were not synced any part may be left.
    pub(crate) fn crash(&self, dice: &mut Dice) {
        let mut inner = self.inner();
        inner.life += 1;
        let mut names: Vec<String> = inner.now.keys().chain(inner.kept.keys()).cloned().collect();
        names.sort_unstable();
        names.dedup();
        let mut left = BTreeMap::new();
        for name in names {
            let side = if dice.chance(50) { &inner.now } else { &inner.kept };
            if let Some(file) = side.get(&name) {
                left.insert(name, *file);
            }
        }
        for file in &mut inner.files {
            let unsynced = (file.data.len() - file.synced) as u64;
            let kept = file.synced + dice.between(0, unsynced + 1) as usize;
            file.data.truncate(kept);
            file.synced = kept;
        }
        (inner.now, inner.kept) = (left.clone(), left);
    }
}

fn absent(name: &str) -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, format!("{name} is not there"))
}

struct SimFile {
    disk: SimDisk,
    file: usize,
    life: u64,
}

impl SimFile {
    fn with<T>(&self, work: impl FnOnce(&mut File) -> T) -> io::Result<T> {
        let mut inner = self.disk.inner();
        if inner.life != self.life {
            return Err(io::Error::other("the machine crashed"));
        }
        let file = inner.files.get_mut(self.file).ok_or_else(|| absent("the file"))?;
        Ok(work(file))
    }
}

impl Write for SimFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.with(|file| file.data.extend_from_slice(bytes))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Sink for SimFile {
    fn sync(&mut self) -> io::Result<()> {
        self.with(|file| file.synced = file.data.len())
    }

    fn cut(&mut self, length: u64) -> io::Result<()> {
        self.with(|file| {
            file.data.truncate(length as usize);
            file.synced = file.synced.min(file.data.len());
        })
    }
}

impl Folder for SimDisk {
    fn path(&self) -> &Path {
        &self.path
    }

    fn list(&self) -> io::Result<Vec<String>> {
        Ok(self.inner().now.keys().cloned().collect())
    }

    fn open(&self, name: &str) -> io::Result<(Box<dyn Source>, u64)> {
        let inner = self.inner();
        let file = inner.now.get(name).and_then(|file| inner.files.get(*file));
        let data = file.ok_or_else(|| absent(name))?.data.clone();
        let length = data.len() as u64;
        Ok((Box::new(Cursor::new(data)), length))
    }

    fn create(&self, name: &str) -> io::Result<Box<dyn Sink>> {
        let mut inner = self.inner();
        if inner.now.contains_key(name) {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, name.to_owned()));
        }
        let (file, life) = (inner.files.len(), inner.life);
        inner.files.push(File::default());
        inner.now.insert(name.to_owned(), file);
        Ok(Box::new(SimFile { disk: self.clone(), file, life }))
    }

    fn append(&self, name: &str) -> io::Result<(Box<dyn Sink>, u64)> {
        let inner = self.inner();
        let file = *inner.now.get(name).ok_or_else(|| absent(name))?;
        let length = inner.files.get(file).map_or(0, |it| it.data.len()) as u64;
        Ok((Box::new(SimFile { disk: self.clone(), file, life: inner.life }), length))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut inner = self.inner();
        let file = inner.now.remove(from).ok_or_else(|| absent(from))?;
        inner.now.insert(to.to_owned(), file);
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.inner().now.remove(name).map(drop).ok_or_else(|| absent(name))
    }

    fn sync(&self) -> io::Result<()> {
        let mut inner = self.inner();
        inner.kept = inner.now.clone();
        Ok(())
    }
}
