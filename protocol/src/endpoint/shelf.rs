//! What a learner serves: the chunks of the newest adapters, whole and as deltas, from memory.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use tokio::sync::watch;

use crate::{AdapterManifest, Digest, Fetch, PolicyDigest};

/// One chunk, or its delta, and the digest, known already so that serving costs no hashing.
#[derive(Clone, Debug)]
pub struct AdapterChunk {
    /// The bytes, shared and not copied.
    pub bytes: Bytes,
    /// Their SHA-256.
    pub digest: Digest,
    /// Fails once the adapter is served no more: who is in the middle of the chunk then is cut off,
    /// so that a slow actor does not keep old adapters in memory.
    pub served: watch::Receiver<()>,
}

/// A chunk that is on its way to who is asked for it.
#[derive(Clone, Debug)]
pub struct Coming {
    /// Changes when it may have come, or may come no more.
    pub news: watch::Receiver<()>,
    /// How long to wait for it, counted from the request.
    pub patience: Duration,
}

/// Where links find chunks to serve. Called on the network's threads: it must not block.
pub trait AdapterStore: Send + Sync + 'static {
    /// A chunk of a policy's adapter, if that adapter is still served and has it in that form.
    fn chunk(&self, fetch: &Fetch) -> Option<AdapterChunk>;

    /// Whether a chunk is worth waiting for. A learner has what it serves.
    fn coming(&self, _fetch: &Fetch) -> Option<Coming> {
        None
    }
}

#[derive(Clone)]
struct Shelved {
    manifest: AdapterManifest,
    bytes: Bytes,
    deltas: Vec<Option<Bytes>>,
    /// Dropped with the adapter.
    served: Arc<watch::Sender<()>>,
}

/// Adapters served from memory.
#[derive(Default)]
pub struct AdapterShelf(Mutex<HashMap<PolicyDigest, Shelved>>);

impl std::fmt::Debug for AdapterShelf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AdapterShelf({} adapters)", self.lock().len())
    }
}

impl AdapterShelf {
    fn lock(&self) -> MutexGuard<'_, HashMap<PolicyDigest, Shelved>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves an adapter, with deltas against the newest that is served already. Returns the manifest
    /// to announce.
    pub fn put(&self, manifest: AdapterManifest, bytes: impl Into<Bytes>) -> AdapterManifest {
        let bytes = bytes.into();
        let earlier = {
            let mut shelf = self.lock();
            // An update that changed nothing: whoever fetches it goes on.
            if let Some(same) = shelf.get_mut(&manifest.policy) {
                same.manifest.step = manifest.step;
                return same.manifest.clone();
            }
            shelf.values().max_by_key(|it| it.manifest.step).cloned()
        };
        // Not under the lock: this takes a while, and links ask for chunks meanwhile.
        let (manifest, deltas) = match earlier {
            Some(base) => manifest.with_delta(&bytes, base.manifest.policy, &base.bytes),
            None => (manifest, Vec::new()),
        };
        let deltas = deltas.into_iter().map(|delta| delta.map(Bytes::from)).collect();
        let served = Arc::new(watch::channel(()).0);
        let shelved = Shelved { manifest: manifest.clone(), bytes, deltas, served };
        self.lock().insert(manifest.policy, shelved);
        manifest
    }

    /// Stops serving the policies that `keep` refuses.
    pub fn retain(&self, mut keep: impl FnMut(&AdapterManifest) -> bool) {
        self.lock().retain(|_, shelved| keep(&shelved.manifest));
    }
}

impl AdapterStore for AdapterShelf {
    fn chunk(&self, fetch: &Fetch) -> Option<AdapterChunk> {
        let shelf = self.lock();
        let Shelved { manifest, bytes, deltas, served } = shelf.get(&fetch.policy)?;
        let index = usize::try_from(fetch.chunk).ok()?;
        let (bytes, digest) = if fetch.delta {
            let delta = manifest.delta.as_ref()?.chunks.get(index)?.as_ref()?;
            (deltas.get(index)?.clone()?, delta.digest)
        } else {
            let range = manifest.range(index).filter(|range| range.end <= bytes.len())?;
            (bytes.slice(range), *manifest.chunks.get(index)?)
        };
        Some(AdapterChunk { bytes, digest, served: served.subscribe() })
    }
}
