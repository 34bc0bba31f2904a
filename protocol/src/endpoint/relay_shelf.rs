//! What a relay has to pass on: the chunks of adapters that it fetches or has fetched, from the moment at
//! which each is verified.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use tokio::sync::watch;

use super::shelf::{AdapterChunk, AdapterStore, Coming};
use crate::{AdapterManifest, Assembly, Fetch, PolicyDigest};

/// Adapters that are kept: the newest, and the one before it for those who are late.
const MAX_ADAPTERS: usize = 2;
/// How long a child may ask before its parent has heard of an adapter.
const EARLY: Duration = Duration::from_secs(2);
/// The fetch's own time-outs end this sooner.
const FETCHED: Duration = Duration::from_secs(600);

struct Passed {
    manifest: AdapterManifest,
    chunks: Vec<Option<Bytes>>,
    deltas: Vec<Option<Bytes>>,
    /// The rest is on its way.
    coming: bool,
    /// As deltas, where there are any.
    as_deltas: bool,
    /// Dropped with the adapter.
    served: watch::Sender<()>,
}

/// Chunks by policy.
pub(super) struct RelayShelf {
    adapters: Mutex<VecDeque<Passed>>,
    /// Changes with everything.
    news: watch::Sender<()>,
}

impl Default for RelayShelf {
    fn default() -> Self {
        Self { adapters: Mutex::default(), news: watch::channel(()).0 }
    }
}

impl RelayShelf {
    fn change<T>(&self, policy: &PolicyDigest, change: impl FnOnce(&mut Passed) -> T) -> Option<T> {
        let mut adapters = self.lock();
        let changed = adapters.iter_mut().find(|it| it.manifest.policy == *policy).map(change);
        drop(adapters);
        self.news.send_replace(());
        changed
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Passed>> {
        self.adapters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An adapter is fetched from here on; what is of it already can be had.
    pub(super) fn begin(self: &Arc<Self>, assembly: &Assembly) -> Passing {
        let manifest = assembly.manifest();
        let policy = manifest.policy;
        let count = manifest.chunks.len();
        {
            let mut adapters = self.lock();
            if !adapters.iter().any(|it| it.manifest.policy == policy) {
                if adapters.len() >= MAX_ADAPTERS {
                    adapters.pop_front();
                }
                adapters.push_back(Passed {
                    manifest: manifest.clone(),
                    chunks: vec![None; count],
                    deltas: vec![None; count],
                    coming: false,
                    as_deltas: false,
                    served: watch::channel(()).0,
                });
            }
        }
        self.change(&policy, |passed| {
            passed.coming = true;
            passed.as_deltas = (0..count).any(|index| assembly.delta(index).is_some());
            for (index, place) in passed.chunks.iter_mut().enumerate() {
                if place.is_none() {
                    *place = assembly.chunk(index).map(Bytes::copy_from_slice);
                }
            }
        });
        Passing { shelf: self.clone(), policy }
    }

    /// An adapter is whole: what is passed on is what the actor keeps anyway.
    pub(super) fn whole(&self, policy: &PolicyDigest, bytes: &Bytes) {
        self.change(policy, |passed| {
            let Passed { manifest, chunks, .. } = passed;
            for (index, place) in chunks.iter_mut().enumerate() {
                let range = manifest.range(index).filter(|range| range.end <= bytes.len());
                *place = range.map(|range| bytes.slice(range));
            }
        });
    }

    /// What a liar would have.
    #[cfg(test)]
    pub(super) fn tamper(&self, change: impl FnOnce(&mut Vec<Option<Bytes>>, &mut bool)) {
        if let Some(passed) = self.lock().back_mut() {
            change(&mut passed.chunks, &mut passed.coming);
        }
    }
}

/// A fetch under way. Whoever waits for more of it goes elsewhere when it ends.
pub(super) struct Passing {
    shelf: Arc<RelayShelf>,
    policy: PolicyDigest,
}

impl Passing {
    /// A chunk was verified that came whole.
    pub(super) fn keep(&self, index: usize, chunk: Bytes) {
        self.shelf.change(&self.policy, |passed| place(&mut passed.chunks, index, chunk));
    }

    /// A chunk was verified that came as this delta.
    pub(super) fn keep_delta(&self, index: usize, delta: Bytes, chunk: &[u8]) {
        self.shelf.change(&self.policy, |passed| {
            place(&mut passed.deltas, index, delta);
            place(&mut passed.chunks, index, Bytes::copy_from_slice(chunk));
        });
    }
}

fn place(places: &mut [Option<Bytes>], index: usize, bytes: Bytes) {
    if let Some(place) = places.get_mut(index) {
        *place = Some(bytes);
    }
}

impl Drop for Passing {
    fn drop(&mut self) {
        self.shelf.change(&self.policy, |passed| passed.coming = false);
    }
}

impl AdapterStore for RelayShelf {
    fn chunk(&self, fetch: &Fetch) -> Option<AdapterChunk> {
        let adapters = self.lock();
        let passed = adapters.iter().find(|it| it.manifest.policy == fetch.policy)?;
        let index = usize::try_from(fetch.chunk).ok()?;
        let (places, digest) = if fetch.delta {
            let deltas = &passed.manifest.delta.as_ref()?.chunks;
            (&passed.deltas, deltas.get(index)?.as_ref()?.digest)
        } else {
            (&passed.chunks, *passed.manifest.chunks.get(index)?)
        };
        let bytes = places.get(index)?.clone()?;
        Some(AdapterChunk { bytes, digest, served: passed.served.subscribe() })
    }

    fn coming(&self, fetch: &Fetch) -> Option<Coming> {
        let news = self.news.subscribe();
        let adapters = self.lock();
        let Some(passed) = adapters.iter().find(|it| it.manifest.policy == fetch.policy) else {
            return Some(Coming { news, patience: EARLY });
        };
        let index = usize::try_from(fetch.chunk).ok()?;
        // A chunk that is here and has no delta here came whole.
        let here = passed.chunks.get(index)?.is_some();
        let wanted = !here && passed.coming && (!fetch.delta || passed.as_deltas);
        wanted.then_some(Coming { news, patience: FETCHED })
    }
}
