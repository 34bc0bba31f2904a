//! Prompts whose keys and values are kept, so that the rollouts of a group compute them once.

use protocol::PolicyDigest;

use super::backend::Slot;
use crate::vision::PlacedImage;

/// The most prompts that are kept.
const MOST: usize = 128;

/// The least ids that are worth sharing between prompts that differ further on.
const LEAST: usize = 16;

/// Ids with the images among them, in order.
#[derive(Clone, Copy)]
pub(super) struct Prompt<'a> {
    pub ids: &'a [u32],
    pub images: &'a [PlacedImage],
}

impl Prompt<'_> {
    /// How many ids both begin with, with the same images, and no part of an image.
    fn common(self, other: Self) -> usize {
        let ids = self.ids.iter().zip(other.ids).take_while(|(a, b)| a == b).count();
        let same = self.images.iter().zip(other.images).take_while(|(a, b)| a == b).count();
        let next = |it: Self| it.images.get(same).map_or(usize::MAX, |image| image.at);
        let common = ids.min(next(self)).min(next(other));
        let cut = self.images.iter().find(|image| image.at < common && common < image.end());
        cut.map_or(common, |image| image.at)
    }

    /// Whether it ends within an image.
    pub(super) fn cuts_an_image(self) -> bool {
        let len = self.ids.len();
        self.images.iter().any(|image| image.at < len && len < image.end())
    }
}

struct Entry {
    policy: PolicyDigest,
    /// A prompt without its last id, whose logits each rollout needs for itself.
    ids: Vec<u32>,
    images: Vec<PlacedImage>,
    slot: Slot,
    used: u64,
}

impl Entry {
    fn prompt(&self) -> Prompt<'_> {
        Prompt { ids: &self.ids, images: &self.images }
    }
}

/// The kept prompts, each under the policy that computed it.
pub(super) struct Prefixes {
    entries: Vec<Entry>,
    /// Whether a beginning of a kept prompt can be taken over, or only all of it.
    rewinds: bool,
}

impl Prefixes {
    pub(super) fn new(rewinds: bool) -> Self {
        Self { entries: Vec::new(), rewinds }
    }

    /// The kept prompt that shares the longest beginning with `stream` (without its last id): its
    /// index and that length.
    fn best(&self, policy: &PolicyDigest, stream: Prompt<'_>) -> Option<(usize, usize)> {
        let (_, wanted) = stream.ids.split_last()?;
        let without_last = Prompt { ids: wanted, images: stream.images };
        let common = |entry: &Entry| without_last.common(entry.prompt());
        let mine = self.entries.iter().enumerate().filter(|(_, entry)| entry.policy == *policy);
        let (longest, index) = mine
            .map(|(index, entry)| (common(entry), index, entry.ids.len()))
            .filter(|&(common, _, kept)| self.rewinds || common == kept)
            .map(|(common, index, _)| (common, std::cmp::Reverse(index)))
            .max()
            .filter(|&(common, _)| common > 0 && (common == wanted.len() || common >= LEAST))?;
        Some((index.0, longest))
    }

    /// How many ids of `stream` need not be computed.
    pub(super) fn common(&self, policy: &PolicyDigest, stream: Prompt<'_>) -> usize {
        self.best(policy, stream).map_or(0, |(_, common)| common)
    }

    /// The slot to start `stream` from, and how many of its ids to take over.
    pub(super) fn find(
        &mut self,
        policy: &PolicyDigest,
        stream: Prompt<'_>,
        now: u64,
    ) -> Option<(Slot, usize)> {
        let (index, common) = self.best(policy, stream)?;
        let entry = self.entries.get_mut(index)?;
        entry.used = now;
        Some((entry.slot, common))
    }

    /// Whether these very ids and images are kept.
    pub(super) fn holds(&self, policy: &PolicyDigest, prompt: Prompt<'_>) -> bool {
        let same = |entry: &Entry| entry.ids == prompt.ids && entry.images == prompt.images;
        self.entries.iter().any(|entry| entry.policy == *policy && same(entry))
    }

    /// Keeps a prompt. Returns the slot that had to go for it, if any.
    pub(super) fn keep(
        &mut self,
        policy: PolicyDigest,
        prompt: Prompt<'_>,
        slot: Slot,
        now: u64,
    ) -> Option<Slot> {
        let gone = if self.entries.len() >= MOST { self.drop_oldest() } else { None };
        let (ids, images) = (prompt.ids.to_vec(), prompt.images.to_vec());
        self.entries.push(Entry { policy, ids, images, slot, used: now });
        gone
    }

    /// Forgets the prompt that was not used for longest, and returns its slot.
    pub(super) fn drop_oldest(&mut self) -> Option<Slot> {
        let (oldest, _) = self.entries.iter().enumerate().min_by_key(|(_, entry)| entry.used)?;
        Some(self.entries.remove(oldest).slot)
    }

    /// Forgets every prompt of a policy, and returns their slots.
    pub(super) fn drop_policy(&mut self, policy: &PolicyDigest) -> Vec<Slot> {
        let gone =
            self.entries.iter().filter(|entry| entry.policy == *policy).map(|entry| entry.slot);
        let gone = gone.collect();
        self.entries.retain(|entry| entry.policy != *policy);
        gone
    }
}
