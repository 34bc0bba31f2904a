//! Prompts whose keys and values are kept, so that the rollouts of a group compute them once.

use protocol::PolicyDigest;

use super::backend::Slot;

/// The most prompts that are kept.
const MOST: usize = 128;

/// The least ids that are worth sharing between prompts that differ further on.
const LEAST: usize = 16;

struct Entry {
    policy: PolicyDigest,
    /// A prompt without its last id, whose logits each rollout needs for itself.
    ids: Vec<u32>,
    slot: Slot,
    used: u64,
}

/// The kept prompts, each under the policy that computed it.
#[derive(Default)]
pub(super) struct Prefixes(Vec<Entry>);

impl Prefixes {
    /// The slot that shares the longest beginning with `stream` (without its last id), and its
    /// length.
    pub(super) fn find(
        &mut self,
        policy: &PolicyDigest,
        stream: &[u32],
        now: u64,
    ) -> Option<(Slot, usize)> {
        let (_, wanted) = stream.split_last()?;
        let mut best: Option<(usize, &mut Entry)> = None;
        for entry in self.0.iter_mut().filter(|entry| entry.policy == *policy) {
            let common = entry.ids.iter().zip(wanted).take_while(|(a, b)| a == b).count();
            let worth = common == wanted.len() || common >= LEAST;
            if worth && best.as_ref().is_none_or(|(longest, _)| common > *longest) {
                best = Some((common, entry));
            }
        }
        let (common, entry) = best.filter(|(common, _)| *common > 0)?;
        entry.used = now;
        Some((entry.slot, common))
    }

    /// Whether these very ids are kept.
    pub(super) fn holds(&self, policy: &PolicyDigest, ids: &[u32]) -> bool {
        self.0.iter().any(|entry| entry.policy == *policy && entry.ids == ids)
    }

    /// Keeps a prompt. Returns the slot that had to go for it, if any.
    pub(super) fn keep(
        &mut self,
        policy: PolicyDigest,
        ids: Vec<u32>,
        slot: Slot,
        now: u64,
    ) -> Option<Slot> {
        let gone = if self.0.len() >= MOST { self.drop_oldest() } else { None };
        self.0.push(Entry { policy, ids, slot, used: now });
        gone
    }

    /// Forgets the prompt that was not used for longest, and returns its slot.
    pub(super) fn drop_oldest(&mut self) -> Option<Slot> {
        let (oldest, _) = self.0.iter().enumerate().min_by_key(|(_, entry)| entry.used)?;
        Some(self.0.remove(oldest).slot)
    }

    /// Forgets every prompt of a policy, and returns their slots.
    pub(super) fn drop_policy(&mut self, policy: &PolicyDigest) -> Vec<Slot> {
        let gone = self.0.iter().filter(|entry| entry.policy == *policy).map(|entry| entry.slot);
        let gone = gone.collect();
        self.0.retain(|entry| entry.policy != *policy);
        gone
    }
}
