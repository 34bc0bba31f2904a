//! What the engine asks of a forward pass with a key-value cache, and the two answers: Burn tensors
//! on any device ([`TensorBackend`]), and packed weights on the processor ([`super::host`]).

use std::collections::BTreeMap;

use protocol::PolicyDigest;

use super::host::HostLogits;
use crate::{
    model::{Adapter, Decoder, Feed, KvCache, KvId, Logits, ModelError},
    vision::PlacedImage,
};

/// A sequence of a backend's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Slot(pub u64);

/// Ids to append to one sequence in a step.
pub(super) struct SlotFeed<'a> {
    /// At most once in a step.
    pub slot: Slot,
    /// At least one id.
    pub ids: &'a [u32],
    /// Images, by the index in `ids` of their first image-pad id, each whole.
    pub images: Vec<PlacedImage>,
    /// Whether the logits after the last id are wanted.
    pub logits: bool,
}

/// A cache and a forward pass over it. Slots are never shared between policies.
pub(super) trait Backend: Send {
    /// Makes an adapter (or the bare model) usable.
    fn add(&mut self, policy: PolicyDigest, adapter: Option<Adapter>) -> Result<(), ModelError>;

    /// Forgets an adapter.
    fn remove(&mut self, policy: &PolicyDigest);

    /// A new, empty sequence.
    fn open(&mut self) -> Slot;

    /// A new sequence that shares the first `len` ids of another; all of them, unless the backend
    /// [rewinds](Backend::rewinds).
    fn fork(&mut self, slot: Slot, len: usize) -> Result<Slot, ModelError>;

    /// Forgets a sequence.
    fn close(&mut self, slot: Slot);

    /// Places of the cache in use.
    fn used(&self) -> usize;

    /// At most how many places `more` ids after the first `len` of a sequence will take.
    fn places(&self, len: usize, more: usize) -> usize;

    /// Checks the images among `ids` and gives them in order.
    fn check_images(
        &self,
        ids: &[u32],
        images: &[PlacedImage],
    ) -> Result<Vec<PlacedImage>, ModelError>;

    /// Feeds sequences of one policy and gives the logits that were asked for.
    fn advance(
        &mut self,
        policy: &PolicyDigest,
        feeds: &[SlotFeed<'_>],
    ) -> Result<Rows, ModelError>;

    /// Whether a fork may hold fewer ids than its parent: not where the past is one recurrent state.
    fn rewinds(&self) -> bool {
        true
    }

    /// Multiply-adds of a pass over `ids` ids that this thread would share with others; 0 where the
    /// work is done elsewhere.
    fn cost(&self, _ids: usize) -> usize {
        0
    }

    /// Takes back rows that are no longer needed, to use their memory again.
    fn recycle(&mut self, _rows: Rows) {}
}

/// Rows of logits, one for each feed that asked for them, in their order.
pub(super) enum Rows {
    /// Row-major.
    Flat(Logits),
    /// In panels.
    Host(HostLogits),
}

impl Rows {
    /// Row `row`, copied into `buffer` where it does not lie in one piece.
    pub(super) fn read<'a>(&'a self, row: usize, buffer: &'a mut Vec<f32>) -> &'a [f32] {
        match self {
            Self::Flat(logits) => logits.rows().nth(row).unwrap_or(&[]),
            Self::Host(logits) => {
                logits.read(row, buffer);
                buffer
            }
        }
    }
}

/// The decoder's own cached pass, on any device and in any type.
pub(super) struct TensorBackend {
    decoder: Decoder,
    cache: KvCache,
    adapters: BTreeMap<PolicyDigest, Option<Adapter>>,
    slots: BTreeMap<Slot, KvId>,
    next: u64,
}

impl TensorBackend {
    pub(super) fn new(decoder: Decoder, capacity: usize) -> Self {
        let cache = KvCache::new(&decoder, capacity);
        Self { decoder, cache, adapters: BTreeMap::new(), slots: BTreeMap::new(), next: 0 }
    }

    fn id(&self, slot: Slot) -> Result<KvId, ModelError> {
        let missing =
            || ModelError::Input(format!("sequence {} is not open in the engine's cache", slot.0));
        self.slots.get(&slot).copied().ok_or_else(missing)
    }

    fn insert(&mut self, id: KvId) -> Slot {
        let slot = Slot(self.next);
        self.next += 1;
        self.slots.insert(slot, id);
        slot
    }
}

impl Backend for TensorBackend {
    fn add(&mut self, policy: PolicyDigest, adapter: Option<Adapter>) -> Result<(), ModelError> {
        self.adapters.insert(policy, adapter);
        Ok(())
    }

    fn remove(&mut self, policy: &PolicyDigest) {
        self.adapters.remove(policy);
    }

    fn open(&mut self) -> Slot {
        let id = self.cache.open();
        self.insert(id)
    }

    fn fork(&mut self, slot: Slot, len: usize) -> Result<Slot, ModelError> {
        let id = self.cache.fork(self.id(slot)?)?;
        self.cache.truncate(id, len)?;
        Ok(self.insert(id))
    }

    fn close(&mut self, slot: Slot) {
        if let Some(id) = self.slots.remove(&slot) {
            self.cache.close(id);
        }
    }

    fn used(&self) -> usize {
        self.cache.used()
    }

    fn places(&self, _len: usize, more: usize) -> usize {
        more
    }

    fn rewinds(&self) -> bool {
        !self.cache.recurrent()
    }

    fn check_images(
        &self,
        ids: &[u32],
        images: &[PlacedImage],
    ) -> Result<Vec<PlacedImage>, ModelError> {
        self.decoder.check_images(ids, images)
    }

    fn advance(
        &mut self,
        policy: &PolicyDigest,
        feeds: &[SlotFeed<'_>],
    ) -> Result<Rows, ModelError> {
        let feeds: Vec<Feed<'_>> = feeds
            .iter()
            .map(|&SlotFeed { slot, ids, ref images, logits }| {
                Ok(Feed { sequence: self.id(slot)?, ids, images, logits })
            })
            .collect::<Result<_, ModelError>>()?;
        let adapter = self.adapters.get(policy).and_then(Option::as_ref);
        self.decoder.advance(adapter, &mut self.cache, &feeds).map(Rows::Flat)
    }
}
