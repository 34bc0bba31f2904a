//! One token stream and the generation call that it is in.

use std::fmt;

use protocol::{Digest, FinishReason, NoiseKey, PolicyDigest, StreamHasher};

use super::{backend::Slot, prefix::Prompt};
use crate::{
    sampling::{Choice, Sampler},
    vision::PlacedImage,
};

/// A sequence of an [`super::Engine`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub(super) u64);

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What one generation call gave. The columns have the length of `ids`.
#[derive(Clone, Debug, PartialEq)]
pub struct Generated {
    /// The sequence.
    pub sequence: SequenceId,
    /// The policy that sampled.
    pub policy: PolicyDigest,
    /// Sampled ids; a stop id is the last one.
    pub ids: Vec<u32>,
    /// log softmax(logits) of each id, at temperature 1 and untruncated. Nats.
    pub logp_raw: Vec<f32>,
    /// Log-probability of each id under the distribution that was sampled from. Nats.
    pub logp_sampling: Vec<f32>,
    /// `Stop` if the last id is a stop id, even where it is the last of the budget (as TRL and vLLM
    /// have it); else `Length`.
    pub finish: FinishReason,
    /// SHA-256 of the ids before the first sampled one, as they were fed to the model.
    pub context: Digest,
    /// Index of the first sampled id in the stream.
    pub offset: u32,
}

/// A stream, and how much of it the cache holds.
pub(super) struct Sequence {
    pub policy: PolicyDigest,
    pub key: NoiseKey,
    pub sampler: Sampler,
    /// Every id, external and sampled.
    pub stream: Vec<u32>,
    /// The images in it, in order.
    pub images: Vec<PlacedImage>,
    /// How many of them were sampled.
    pub sampled: usize,
    /// Over the ids that were fed to the model, each once.
    pub hasher: StreamHasher,
    /// Its place in the cache; none before its first call runs, or after it had to make room.
    pub slot: Option<Slot>,
    /// Ids in the cache.
    pub held: usize,
    /// Ids that were in the cache and had to be given up.
    pub lost: usize,
    /// When it was last in a step, for choosing what makes room.
    pub used: u64,
    pub call: Option<Call>,
}

/// A generation call in progress.
pub(super) struct Call {
    /// Order among all calls.
    pub order: u64,
    pub budget: usize,
    pub stop_ids: Vec<u32>,
    /// Stream length when it was made.
    pub offset: usize,
    pub context: Option<Digest>,
    pub logp_raw: Vec<f32>,
    pub logp_sampling: Vec<f32>,
}

impl Sequence {
    /// Stream length if the call uses its whole budget.
    pub(super) fn final_len(&self) -> usize {
        self.call.as_ref().map_or(self.stream.len(), |call| call.offset + call.budget)
    }

    /// Whether it is all prompt, and generating: nothing is sampled yet.
    pub(super) fn is_prompt(&self) -> bool {
        let offset = self.call.as_ref().map(|call| call.offset);
        self.sampled == 0 && offset == Some(self.stream.len())
    }

    /// The stream as it is.
    pub(super) fn prompt(&self) -> Prompt<'_> {
        Prompt { ids: &self.stream, images: &self.images }
    }

    /// At most `count` of the next ids, but no part of an image: all of one where nothing precedes it.
    pub(super) fn portion(&self, count: usize) -> usize {
        let end = self.held + count;
        match self.images.iter().find(|image| image.at < end && end < image.end()) {
            None => count,
            Some(image) if image.at > self.held => image.at - self.held,
            Some(image) => image.end() - self.held,
        }
    }

    /// The images that start among the next `count` ids, by their index in those.
    pub(super) fn images_in(&self, count: usize) -> Vec<PlacedImage> {
        let next = self.held..self.held + count;
        let own = self.images.iter().filter(|image| next.contains(&image.at));
        own.map(|it| PlacedImage { at: it.at - self.held, ..it.clone() }).collect()
    }

    /// Notes that `count` more ids were fed to the model. Ids fed again are not hashed again.
    pub(super) fn fed(&mut self, count: usize) {
        self.held += count;
        let hashed = self.hasher.len();
        if let Some(new) = self.stream.get(hashed..self.held) {
            self.hasher.feed(new);
        }
    }

    /// Appends a sampled id. Returns the finished call's result, if it is its last.
    pub(super) fn push(&mut self, id: SequenceId, choice: Choice) -> Option<Generated> {
        let call = self.call.as_mut()?;
        let digest = || self.hasher.digest();
        call.context.get_or_insert_with(digest);
        self.stream.push(choice.id);
        self.sampled += 1;
        call.logp_raw.push(choice.logp_raw);
        call.logp_sampling.push(choice.logp_sampling);
        let finish = if call.stop_ids.contains(&choice.id) {
            FinishReason::Stop
        } else if call.logp_raw.len() >= call.budget {
            FinishReason::Length
        } else {
            return None;
        };
        let call = self.call.take()?;
        Some(Generated {
            sequence: id,
            policy: self.policy,
            ids: self.stream.get(call.offset..).unwrap_or_default().to_vec(),
            logp_raw: call.logp_raw,
            logp_sampling: call.logp_sampling,
            finish,
            context: call.context.unwrap_or_else(digest),
            offset: call.offset as u32,
        })
    }
}
