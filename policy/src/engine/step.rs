//! One step: a batched pass for each policy that has running calls, then the next id of each.

use protocol::PolicyDigest;
use rayon::prelude::*;

use super::{
    Engine, EngineError, Generated, SequenceId,
    backend::{Rows, SlotFeed},
    prefix::Prompt,
    sequence::Sequence,
};
use crate::sampling::{Choice, SamplingError};

/// Logits from which sampling them is worth a second thread.
const PARALLEL: usize = 1 << 14;

/// Cost of a pass (see [`super::backend::Backend::cost`]) from which it is worth entering the pool.
const POOL: usize = 1 << 25;

/// What one stream is fed in a pass.
struct Portion {
    id: SequenceId,
    count: usize,
    /// Whether that is all it has, so that an id is sampled.
    whole: bool,
}

impl Engine {
    /// Feeds every running call once and returns the calls that ended with it, in the order in which
    /// they started. Nothing happens where no call is in progress.
    ///
    /// # Errors
    /// A row of logits that cannot be sampled from: that call is cancelled, the others go on, and
    /// results of the same step come with the next one. A failing device: the engine is of no
    /// further use.
    pub fn step(&mut self) -> Result<Vec<Generated>, EngineError> {
        self.now += 1;
        self.admit()?;
        let mut policies: Vec<PolicyDigest> = self.running_policies();
        policies.sort_unstable();
        policies.dedup();
        let mut room = self.config.prefill_chunk;
        let mut failed = Ok(());
        for policy in policies {
            let portions = self.portions(&policy, &mut room);
            if portions.is_empty() {
                continue;
            }
            let ids = portions.iter().map(|portion| portion.count).sum();
            let passed = if self.backend.cost(ids) < POOL {
                self.pass(&policy, &portions)
            } else {
                // Inside of the pool, so that this thread need not hand over and wake up for each
                // of the pass's loops.
                rayon::scope(|_| self.pass(&policy, &portions))
            };
            if let Err(error) = passed {
                if !matches!(error, EngineError::Sampling { .. }) {
                    return Err(error);
                }
                failed = failed.and(Err(error));
            }
        }
        failed.map(|()| std::mem::take(&mut self.ready))
    }

    fn running_policies(&self) -> Vec<PolicyDigest> {
        self.running.iter().filter_map(|id| self.sequences.get(id)).map(|s| s.policy).collect()
    }

    /// What the running calls of a policy are fed, within the step's remaining room for prefill.
    fn portions(&self, policy: &PolicyDigest, room: &mut usize) -> Vec<Portion> {
        let mut portions = Vec::new();
        for &id in &self.running {
            let Some(s) = self.sequences.get(&id).filter(|s| s.policy == *policy) else { continue };
            let pending = s.stream.len() - s.held;
            // A recurrent state is kept where the shared part of the prompt ends: before its last id.
            let ahead = usize::from(!self.backend.rewinds() && s.is_prompt());
            let count = if pending == 1 { 1 } else { s.portion((pending - ahead).min(*room)) };
            if pending > 1 {
                *room = room.saturating_sub(count);
            }
            if count > 0 {
                portions.push(Portion { id, count, whole: count == pending });
            }
        }
        portions
    }

    fn pass(&mut self, policy: &PolicyDigest, portions: &[Portion]) -> Result<(), EngineError> {
        let mut feeds = Vec::with_capacity(portions.len());
        for &Portion { id, count, whole } in portions {
            let s = self.sequences.get(&id).ok_or(EngineError::UnknownSequence(id))?;
            let slot = s.slot.ok_or(EngineError::UnknownSequence(id))?;
            let ids = s.stream.get(s.held..s.held + count).unwrap_or_default();
            feeds.push(SlotFeed { slot, ids, images: s.images_in(count), logits: whole });
        }
        let rows = self.backend.advance(policy, &feeds)?;
        self.stats.passes += 1;
        for &Portion { id, count, .. } in portions {
            let Some(s) = self.sequences.get_mut(&id) else { continue };
            self.stats.fed += count as u64;
            self.stats.fed_again += s.lost.saturating_sub(s.held).min(count) as u64;
            s.fed(count);
            s.used = self.now;
        }
        for portion in portions {
            self.keep_prompt(portion.id)?;
        }
        let whole: Vec<SequenceId> = portions.iter().filter(|p| p.whole).map(|p| p.id).collect();
        let mut failed = Ok(());
        let choices = self.choose(&whole, &rows);
        self.backend.recycle(rows);
        for (&id, choice) in whole.iter().zip(choices) {
            let Some(s) = self.sequences.get_mut(&id) else { continue };
            match choice {
                Ok(choice) => {
                    self.stats.sampled += 1;
                    if let Some(generated) = s.push(id, choice) {
                        self.running.retain(|running| *running != id);
                        self.ready.push(generated);
                    }
                }
                Err(source) => {
                    let position = s.stream.len();
                    s.call = None;
                    self.running.retain(|running| *running != id);
                    let error = EngineError::Sampling { sequence: id, position, source };
                    failed = failed.and(Err(error));
                }
            }
        }
        failed
    }

    /// Samples the next id of each stream from its row.
    fn choose(&self, ids: &[SequenceId], rows: &Rows) -> Vec<Result<Choice, SamplingError>> {
        let streams: Vec<&Sequence> = ids.iter().filter_map(|id| self.sequences.get(id)).collect();
        let choose = |buffer: &mut Vec<f32>, (row, s): (usize, &&Sequence)| {
            s.sampler.choose(rows.read(row, buffer), &s.key, s.stream.len() as u32)
        };
        if streams.len() * self.vocab < PARALLEL {
            let mut buffer = Vec::new();
            return streams.iter().enumerate().map(|item| choose(&mut buffer, item)).collect();
        }
        streams.par_iter().enumerate().map_init(Vec::new, choose).collect()
    }

    /// Keeps the prompt of a stream that has just been fed all of it, for others to share.
    fn keep_prompt(&mut self, id: SequenceId) -> Result<(), EngineError> {
        let Some(s) = self.sequences.get(&id) else { return Ok(()) };
        let Some(slot) = s.slot.filter(|_| s.is_prompt()) else { return Ok(()) };
        let prompt = s.stream.len();
        let fresh = s.held == if self.backend.rewinds() { prompt } else { prompt - 1 };
        let Some((_, ids)) = s.stream.split_last().filter(|(_, ids)| fresh && !ids.is_empty())
        else {
            return Ok(());
        };
        let prompt = Prompt { ids, images: &s.images };
        if prompt.cuts_an_image() || self.prefixes.holds(&s.policy, prompt) {
            return Ok(());
        }
        let fork = self.backend.fork(slot, ids.len())?;
        if let Some(gone) = self.prefixes.keep(s.policy, prompt, fork, self.now) {
            self.backend.close(gone);
        }
        Ok(())
    }
}
