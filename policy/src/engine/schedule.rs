//! Which calls run: admission to the batch and to the cache.

use super::{Engine, EngineError, SequenceId};

impl Engine {
    /// Starts every waiting call that there is room for.
    pub(super) fn admit(&mut self) -> Result<(), EngineError> {
        let mut line = self.line();
        while !line.is_empty() && self.running.len() < self.config.max_batch {
            let mut first_blocked = None;
            for &id in &line {
                if self.running.len() >= self.config.max_batch {
                    break;
                }
                if self.prompt_is_underway(id) {
                    continue;
                }
                if self.fits(id) {
                    self.start(id)?;
                } else {
                    first_blocked = Some(id);
                    break;
                }
            }
            let Some(blocked) = first_blocked else { break };
            if !self.make_room(blocked) {
                break;
            }
            line = self.line();
        }
        Ok(())
    }

    /// The waiting calls, those whose streams hold places first, else in the order of the calls.
    fn line(&self) -> Vec<SequenceId> {
        let mut line = self.waiting.clone();
        line.sort_by_key(|id| {
            let sequence = self.sequences.get(id);
            let order = sequence.and_then(|s| s.call.as_ref()).map(|call| call.order);
            (sequence.is_none_or(|s| s.slot.is_none()), order)
        });
        line
    }

    /// Places that a call may still take.
    fn growth(&self, id: SequenceId) -> usize {
        self.sequences.get(&id).map_or(0, |s| {
            let held = match s.slot {
                Some(_) => s.held,
                None => self.prefixes.common(&s.policy, s.prompt()),
            };
            self.backend.places(held, s.final_len() - held)
        })
    }

    fn fits(&self, id: SequenceId) -> bool {
        let running: usize = self.running.iter().map(|&id| self.growth(id)).sum();
        self.backend.used() + running + self.growth(id) <= self.config.max_tokens
    }

    /// Whether a running call is computing the very prompt that this fresh stream starts with.
    fn prompt_is_underway(&self, id: SequenceId) -> bool {
        let Some(fresh) = self.sequences.get(&id).filter(|s| s.slot.is_none()) else {
            return false;
        };
        self.running.iter().filter_map(|id| self.sequences.get(id)).any(|other| {
            let offset = other.call.as_ref().map_or(0, |call| call.offset);
            other.policy == fresh.policy
                && other.held + 1 < offset
                && other.stream.get(..offset) == Some(&fresh.stream)
                && other.images.get(..fresh.images.len()) == Some(&fresh.images)
        })
    }

    fn start(&mut self, id: SequenceId) -> Result<(), EngineError> {
        let now = self.now;
        let Some(sequence) = self.sequences.get_mut(&id) else { return Ok(()) };
        if sequence.slot.is_none() {
            match self.prefixes.find(&sequence.policy, sequence.prompt(), now) {
                Some((slot, len)) => {
                    sequence.slot = Some(self.backend.fork(slot, len)?);
                    sequence.fed(len);
                    self.stats.shared += len as u64;
                }
                None => sequence.slot = Some(self.backend.open()),
            }
        }
        self.waiting.retain(|waiting| *waiting != id);
        self.running.push(id);
        Ok(())
    }

    /// Gives up one kept prompt or, if nothing runs, the places of one waiting stream other than
    /// `first`. Returns whether there was any.
    fn make_room(&mut self, first: SequenceId) -> bool {
        if let Some(slot) = self.prefixes.drop_oldest() {
            self.backend.close(slot);
            return true;
        }
        if !self.running.is_empty() {
            return false;
        }
        // Idle streams first, the longest unused ahead; then those at the end of the line.
        let victim = self
            .sequences
            .iter_mut()
            .filter(|(id, s)| **id != first && s.slot.is_some())
            .min_by_key(|(_, s)| {
                let order = s.call.as_ref().map(|call| std::cmp::Reverse(call.order));
                (order.is_some(), order, s.used)
            });
        let Some((_, sequence)) = victim else { return false };
        if let Some(slot) = sequence.slot.take() {
            self.backend.close(slot);
        }
        sequence.lost = sequence.lost.max(sequence.held);
        sequence.held = 0;
        true
    }
}
