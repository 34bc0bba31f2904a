//! The generation engine: many token streams, several policies, one model.
//!
//! **A stream only grows.** [`Engine::append`] adds external ids, [`Engine::generate`] samples. Keys
//! and values stay in the cache between calls, so each id is fed to the model once; a stream whose
//! tool is running keeps its place in the cache and gives up its place in the batch. The digest of
//! the context is taken over the ids as they are fed.
//!
//! **Continuous batching.** Each [`Engine::step`] feeds every running call: one id to those that
//! decode, and up to `prefill_chunk` ids in all to those that have more ids waiting. Streams of one
//! policy form one batch. Calls enter as others end, at most `max_batch` at a time.
//!
//! **Admission.** The cache has `max_tokens` places. A call starts when its stream and its whole
//! budget fit beside what is held and what the running calls may still grow to, so a running call
//! never has to stop; until then it waits in line: first the streams that already hold places, then
//! in the order of the calls. Kept prompts make room for any call. Only when nothing runs and the
//! first in line does not fit do streams that wait (longest unused first) give up their places; they
//! are fed again when their turn comes. A call that could not fit alone is refused.
//!
//! **Shared prompts.** The first stream with a prompt computes it; streams of the same policy with
//! the same prompt (ids and images), or the same beginning, start from its keys and values. Every cached thing belongs
//! to a policy digest and goes with it.
//!
//! **What a result depends on.** Its policy, the ids of its stream, its settings and its noise key;
//! the noise is drawn by (key, stream position, id). On the processor with f32 weights the logits of
//! a stream have the same bits in any batch, so ids and log-probabilities are exactly those of the
//! stream alone. On other devices log-probabilities may differ in the last bits between batch
//! shapes, and an id where two scores are that close. Not part of that: the device, and on the
//! processor whether it has fused multiply-adds.

mod backend;
mod error;
mod host;
mod prefix;
mod schedule;
mod sequence;
mod step;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use protocol::{NoiseKey, PolicyDigest, Sampling, StreamHasher};

use self::{
    backend::{Backend, TensorBackend},
    host::HostBackend,
    prefix::Prefixes,
    sequence::{Call, Sequence},
};
use crate::{
    model::{Adapter, Decoder, ModelError},
    sampling::Sampler,
    vision::PlacedImage,
};

pub use error::EngineError;
pub use sequence::{Generated, SequenceId};

/// The engine's limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineConfig {
    /// The most generation calls that run at a time.
    pub max_batch: usize,
    /// Places of the key-value cache, one for each id of each stream (a shared beginning counts
    /// once; on the processor whole blocks of 16 count).
    pub max_tokens: usize,
    /// The most ids of prompts and appended texts that are fed in one step.
    pub prefill_chunk: usize,
    /// Which forward pass computes.
    pub pass: Pass,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self { max_batch: 64, max_tokens: 1 << 17, prefill_chunk: 512, pass: Pass::Auto }
    }
}

/// Which forward pass computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pass {
    /// Packed weights on the processor for a decoder that is there in f32 and has no recurrent
    /// layers, else tensors.
    #[default]
    Auto,
    /// Tensors everywhere.
    Tensors,
}

/// Counters since the engine was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Batched passes.
    pub passes: u64,
    /// Ids fed to the model.
    pub fed: u64,
    /// Of those, ids fed again because their places were given up.
    pub fed_again: u64,
    /// Ids taken from shared prompts instead of being fed.
    pub shared: u64,
    /// Ids sampled.
    pub sampled: u64,
}

/// Samples for many streams at once. Synchronous; give it a thread of its own.
pub struct Engine {
    config: EngineConfig,
    vocab: usize,
    max_positions: usize,
    backend: Box<dyn Backend>,
    policies: BTreeSet<PolicyDigest>,
    sequences: BTreeMap<SequenceId, Sequence>,
    prefixes: Prefixes,
    /// Calls that wait to run.
    waiting: Vec<SequenceId>,
    /// Calls that run, in the order in which they started.
    running: Vec<SequenceId>,
    /// Results that a step with an error could not return.
    ready: Vec<Generated>,
    next_sequence: u64,
    next_call: u64,
    now: u64,
    stats: EngineStats,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Engine({} sequences, {} running)", self.sequences.len(), self.running.len())
    }
}

impl Engine {
    /// An engine over a loaded model, without any policy yet.
    ///
    /// # Errors
    /// A limit of 0; weights that cannot be read back from their device.
    pub fn new(decoder: Decoder, config: EngineConfig) -> Result<Self, EngineError> {
        let EngineConfig { max_batch, max_tokens, prefill_chunk, pass } = config;
        let limits = [
            ("max_batch", max_batch, 1),
            ("max_tokens", max_tokens, 32),
            ("prefill_chunk", prefill_chunk, 1),
        ];
        if let Some(&(field, value, least)) = limits.iter().find(|(_, v, least)| v < least) {
            return Err(EngineError::Config { field, value, least });
        }
        let shape = decoder.config();
        let (vocab, max_positions) = (shape.vocab, shape.max_positions);
        let on_host = decoder.on_host();
        let backend: Box<dyn Backend> = match pass {
            Pass::Auto if on_host => Box::new(HostBackend::new(&decoder)?),
            _ => Box::new(TensorBackend::new(decoder, max_tokens)),
        };
        let prefixes = Prefixes::new(backend.rewinds());
        Ok(Self {
            config,
            vocab,
            max_positions,
            backend,
            policies: BTreeSet::new(),
            sequences: BTreeMap::new(),
            prefixes,
            waiting: Vec::new(),
            running: Vec::new(),
            ready: Vec::new(),
            next_sequence: 0,
            next_call: 0,
            now: 0,
            stats: EngineStats::default(),
        })
    }

    /// Makes a policy playable: the model with `adapter`, or the model alone with `None`. The caller
    /// vouches that the digest is that of these weights.
    ///
    /// # Errors
    /// A digest that is there already; an adapter that does not fit the model.
    pub fn add_adapter(
        &mut self,
        policy: PolicyDigest,
        adapter: impl Into<Option<Adapter>>,
    ) -> Result<(), EngineError> {
        if self.policies.contains(&policy) {
            return Err(EngineError::KnownPolicy(policy));
        }
        self.backend.add(policy, adapter.into())?;
        self.policies.insert(policy);
        Ok(())
    }

    /// Forgets a policy and everything cached under it.
    ///
    /// # Errors
    /// An unknown policy, or one with open sequences.
    pub fn drop_adapter(&mut self, policy: &PolicyDigest) -> Result<(), EngineError> {
        if !self.policies.contains(policy) {
            return Err(EngineError::UnknownPolicy(*policy));
        }
        let open = self.sequences.values().filter(|s| s.policy == *policy).count();
        if open > 0 {
            return Err(EngineError::PolicyInUse { policy: *policy, open });
        }
        for slot in self.prefixes.drop_policy(policy) {
            self.backend.close(slot);
        }
        self.backend.remove(policy);
        self.policies.remove(policy);
        Ok(())
    }

    /// The policies that can be played.
    pub fn policies(&self) -> impl Iterator<Item = &PolicyDigest> {
        self.policies.iter()
    }

    /// Opens an empty stream under a policy. It takes no places of the cache before its first call
    /// runs.
    ///
    /// # Errors
    /// An unknown policy, sampling settings out of range.
    pub fn open(
        &mut self,
        policy: PolicyDigest,
        key: NoiseKey,
        sampling: Sampling,
    ) -> Result<SequenceId, EngineError> {
        if !self.policies.contains(&policy) {
            return Err(EngineError::UnknownPolicy(policy));
        }
        let sequence = Sequence {
            policy,
            key,
            sampler: Sampler::new(&sampling)?,
            stream: Vec::new(),
            images: Vec::new(),
            sampled: 0,
            hasher: StreamHasher::default(),
            slot: None,
            held: 0,
            lost: 0,
            used: 0,
            call: None,
        };
        let id = SequenceId(self.next_sequence);
        self.next_sequence += 1;
        self.sequences.insert(id, sequence);
        Ok(id)
    }

    /// Adds external ids (prompt, template framing, observations) to a stream. They are fed to the
    /// model with the next call, and only they.
    ///
    /// # Errors
    /// An unknown or generating sequence, ids outside of the vocabulary, a stream longer than the
    /// model's positions. Nothing is added then.
    pub fn append(&mut self, sequence: SequenceId, ids: &[u32]) -> Result<(), EngineError> {
        self.append_images(sequence, ids, Vec::new())
    }

    /// [`Engine::append`] of ids with images among them, each by the index in `ids` of its first
    /// image-pad id. Image-pad ids outside of them, and sampled ones, are ordinary ids.
    ///
    /// # Errors
    /// As [`Engine::append`]; also images for a model without a vision tower, of another processor, or
    /// whose ids are not image-pad ids of their own.
    pub fn append_images(
        &mut self,
        sequence: SequenceId,
        ids: &[u32],
        images: Vec<PlacedImage>,
    ) -> Result<(), EngineError> {
        let (vocab, max) = (self.vocab, self.max_positions);
        let images = self.backend.check_images(ids, &images)?;
        let Sequence { stream, images: placed, .. } = self.idle(sequence)?;
        if let Some(&id) = ids.iter().find(|id| **id as usize >= vocab) {
            return Err(ModelError::TokenId { id, vocab }.into());
        }
        let len = stream.len();
        if ids.len() > max.saturating_sub(len) {
            return Err(EngineError::Context { sequence, len, more: ids.len(), max });
        }
        stream.extend_from_slice(ids);
        placed.extend(images.into_iter().map(|it| PlacedImage { at: len + it.at, ..it }));
        Ok(())
    }

    /// Starts a generation call: up to `budget` ids, ending with the first of `stop_ids`. Its result
    /// comes from a later [`Engine::step`].
    ///
    /// # Errors
    /// An unknown, generating or empty sequence, a budget of 0, more ids than the model's positions
    /// or than the whole cache can hold.
    pub fn generate(
        &mut self,
        sequence: SequenceId,
        budget: u32,
        stop_ids: &[u32],
    ) -> Result<(), EngineError> {
        let (max, places) = (self.max_positions, self.config.max_tokens);
        let (len, more) = (self.idle(sequence)?.stream.len(), budget as usize);
        if len == 0 {
            return Err(EngineError::Empty(sequence));
        }
        if more == 0 {
            return Err(EngineError::NoBudget(sequence));
        }
        if more > max.saturating_sub(len) {
            return Err(EngineError::Context { sequence, len, more, max });
        }
        // One block more than it needs, so that rounding to blocks can never keep it out.
        let needed = self.backend.places(0, len + more) + self.backend.places(0, 1);
        if needed > places {
            return Err(EngineError::Cache { sequence, needed, max: places });
        }
        let order = self.next_call;
        self.next_call += 1;
        self.idle(sequence)?.call = Some(Call {
            order,
            budget: more,
            stop_ids: stop_ids.to_vec(),
            offset: len,
            context: None,
            logp_raw: Vec::new(),
            logp_sampling: Vec::new(),
        });
        self.waiting.push(sequence);
        Ok(())
    }

    /// Forgets a stream, cancelling its call. Nothing happens where it is not open.
    pub fn close(&mut self, sequence: SequenceId) {
        self.waiting.retain(|id| *id != sequence);
        self.running.retain(|id| *id != sequence);
        self.ready.retain(|generated| generated.sequence != sequence);
        let slot = self.sequences.remove(&sequence).and_then(|sequence| sequence.slot);
        if let Some(slot) = slot {
            self.backend.close(slot);
        }
    }

    /// Whether a call is in progress, so that [`Engine::step`] has something to do.
    pub fn has_work(&self) -> bool {
        !(self.waiting.is_empty() && self.running.is_empty() && self.ready.is_empty())
    }

    /// Every id of an open stream so far.
    ///
    /// # Errors
    /// An unknown sequence.
    pub fn stream(&self, sequence: SequenceId) -> Result<&[u32], EngineError> {
        let found = self.sequences.get(&sequence).ok_or(EngineError::UnknownSequence(sequence))?;
        Ok(&found.stream)
    }

    /// The longest stream that the model takes.
    pub fn max_positions(&self) -> usize {
        self.max_positions
    }

    /// Places of the key-value cache in use.
    pub fn used_tokens(&self) -> usize {
        self.backend.used()
    }

    /// Counters since the engine was made.
    pub fn stats(&self) -> EngineStats {
        self.stats
    }

    fn idle(&mut self, id: SequenceId) -> Result<&mut Sequence, EngineError> {
        match self.sequences.get_mut(&id) {
            None => Err(EngineError::UnknownSequence(id)),
            Some(sequence) if sequence.call.is_some() => Err(EngineError::Busy(id)),
            Some(sequence) => Ok(sequence),
        }
    }
}
