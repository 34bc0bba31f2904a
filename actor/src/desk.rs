//! What an actor has in hand, without I/O but for its spool: leases that are played, episodes that wait for
//! their acknowledgement, and how much more it may take. It outlives connections.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use protocol::{AckOutcome, EpisodeId, Lease, LeaseAttempt, LeaseId, RunId};

use crate::spool::{Left, Spool, SpoolError};

/// The desk of an actor in one run.
#[derive(Debug)]
pub struct Desk {
    run: RunId,
    slots: u32,
    /// Bytes of unacknowledged episodes above which nothing more is taken.
    cap: u64,
    /// Leases that are played, by the latest attempt that was granted.
    hand: BTreeMap<LeaseId, u32>,
    /// Episodes that wait for their acknowledgement.
    sent: BTreeMap<EpisodeId, (LeaseId, u64)>,
    /// Leases that were granted again while their episode waits: played only if it is refused.
    again: BTreeMap<LeaseId, Lease>,
    spool: Option<Spool>,
}

impl Desk {
    /// An empty desk. Episodes are kept in memory alone where there is no spool.
    pub fn new(run: RunId, slots: u32, cap: u64, spool: Option<Spool>) -> Self {
        let (hand, sent, again) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Self { run, slots, cap, hand, sent, again, spool }
    }

    /// Takes up what an earlier process left in the spool: episodes to be sent again, oldest first.
    ///
    /// # Errors
    /// The spool cannot be read.
    pub fn take_up(&mut self) -> Result<Vec<Bytes>, SpoolError> {
        let Some(spool) = &self.spool else { return Ok(Vec::new()) };
        let left = spool.left(self.run)?;
        Ok(left
            .into_iter()
            .map(|Left { id, lease, body }| {
                self.sent.insert(id, (lease, body.len() as u64));
                body
            })
            .collect())
    }

    /// Leases came. Returns those that are to be played: what is played already, or waits for its
    /// acknowledgement, is not played twice.
    pub fn granted(&mut self, leases: Vec<Lease>) -> Vec<Lease> {
        let answered: BTreeSet<LeaseId> = self.sent.values().map(|(lease, _)| *lease).collect();
        let mut play = Vec::with_capacity(leases.len());
        for lease in leases {
            if self.hand.insert(lease.id, lease.attempt).is_some() {
                continue;
            }
            if answered.contains(&lease.id) {
                self.again.insert(lease.id, lease);
            } else {
                play.push(lease);
            }
        }
        play
    }

    /// A lease is wanted no more. Returns whether it was in hand.
    pub fn revoked(&mut self, lease: LeaseAttempt) -> bool {
        if self.hand.get(&lease.id) != Some(&lease.attempt) {
            return false;
        }
        self.hand.remove(&lease.id);
        self.again.remove(&lease.id);
        true
    }

    /// An episode was played. It is kept before it may be sent.
    ///
    /// # Errors
    /// The spool cannot be written.
    pub fn played(&mut self, lease: LeaseId, body: &[u8]) -> Result<EpisodeId, SpoolError> {
        self.hand.remove(&lease);
        let id = EpisodeId::of_body(body);
        if let Some(spool) = &mut self.spool {
            spool.put(self.run, id, body)?;
        }
        self.sent.insert(id, (lease, body.len() as u64));
        Ok(id)
    }

    /// A lease could not be played. Returns it as it is to be given back, where it still is in hand.
    pub fn failed(&mut self, lease: LeaseId) -> Option<LeaseAttempt> {
        let attempt = self.hand.remove(&lease)?;
        Some(LeaseAttempt { id: lease, attempt })
    }

    /// An episode is accounted for. Returns a lease that is to be played after all.
    ///
    /// # Errors
    /// The spool cannot be written.
    pub fn acknowledged(
        &mut self,
        episode: &EpisodeId,
        outcome: &AckOutcome,
    ) -> Result<Option<Lease>, SpoolError> {
        let lease = self.sent.remove(episode).map(|(lease, _)| lease);
        if let Some(spool) = &mut self.spool {
            spool.remove(episode)?;
        }
        let Some(lease) = lease else { return Ok(None) };
        if self.sent.values().any(|(other, _)| *other == lease) {
            return Ok(None);
        }
        let again = self.again.remove(&lease);
        match outcome {
            AckOutcome::Rejected { .. } => Ok(again),
            AckOutcome::Stored | AckOutcome::Duplicate => {
                if again.is_some() {
                    self.hand.remove(&lease);
                }
                Ok(None)
            }
        }
    }

    /// How many more episodes may start now.
    pub fn free(&self) -> u32 {
        if self.unacknowledged().1 >= self.cap {
            return 0;
        }
        let hand = u32::try_from(self.hand.len()).unwrap_or(u32::MAX);
        self.slots.saturating_sub(hand)
    }

    /// Episodes and bytes that wait for their acknowledgement.
    pub fn unacknowledged(&self) -> (usize, u64) {
        (self.sent.len(), self.sent.values().map(|(_, bytes)| bytes).sum())
    }

    /// Leases in hand.
    pub fn in_hand(&self) -> impl Iterator<Item = LeaseAttempt> + '_ {
        self.hand.iter().map(|(id, attempt)| LeaseAttempt { id: *id, attempt: *attempt })
    }

    /// Whether nothing is played and nothing waits.
    pub fn is_clear(&self) -> bool {
        self.hand.is_empty() && self.sent.is_empty()
    }

    /// Whether what waits outlives this process.
    pub fn is_spooled(&self) -> bool {
        self.spool.is_some()
    }

    /// The run is over: nothing of it is wanted any more.
    ///
    /// # Errors
    /// The spool cannot be written.
    pub fn clear(&mut self) -> Result<(), SpoolError> {
        self.sent.clear();
        self.spool.as_mut().map_or(Ok(()), |spool| spool.clear(self.run))
    }
}

#[cfg(test)]
mod tests {
    use protocol::{Digest, NoiseKey, PolicyDigest, Sampling, Split, Task};

    use super::*;

    fn lease(generation: u32, attempt: u32) -> Lease {
        let run = RunId(Digest::of(b"run"));
        let id = LeaseId { group: 0, generation };
        Lease {
            run,
            id,
            attempt,
            task: Task {
                id: "t".into(),
                prompt: String::new(),
                fields: "{}".into(),
                split: Split::Train,
            },
            seed: 0,
            noise_key: NoiseKey::derive(&run, id),
            policy: PolicyDigest(Digest::of(b"policy")),
            sampling: Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 },
            deadline_ms: 1000,
        }
    }

    fn desk(cap: u64) -> Desk {
        Desk::new(RunId(Digest::of(b"run")), 3, cap, None)
    }

    #[test]
    fn a_lease_that_is_granted_again_over_a_new_link_is_not_played_twice() {
        let mut desk = desk(1000);
        assert_eq!(desk.granted(vec![lease(0, 0), lease(1, 0)]).len(), 2);
        assert!(desk.granted(vec![lease(0, 1)]).is_empty(), "it is being played");
        assert!(!desk.revoked((&lease(0, 0)).into()), "an older grant of it ended");
        let id = desk.played(lease(0, 1).id, b"episode").expect("kept");
        assert!(desk.granted(vec![lease(0, 2)]).is_empty(), "its answer is on its way");
        assert_eq!((desk.free(), desk.in_hand().count()), (1, 2));
        let again = desk.acknowledged(&id, &AckOutcome::Stored).expect("kept");
        assert_eq!((again, desk.in_hand().count()), (None, 1));
        assert_eq!(desk.failed(lease(1, 0).id), Some((&lease(1, 0)).into()));
        assert!(desk.is_clear());
    }

    #[test]
    fn a_refused_answers_lease_is_played_once_more_when_it_was_granted_again() {
        let mut desk = desk(1000);
        desk.granted(vec![lease(0, 0)]);
        let id = desk.played(lease(0, 0).id, b"episode").expect("kept");
        assert!(desk.granted(vec![lease(0, 1)]).is_empty());
        let refused = AckOutcome::Rejected { reason: "no".into() };
        let again = desk.acknowledged(&id, &refused).expect("kept");
        assert_eq!(again, Some(lease(0, 1)));
        assert_eq!(desk.acknowledged(&id, &refused).expect("kept"), None, "once");
    }

    #[test]
    fn unacknowledged_bytes_over_the_cap_stop_the_taking_of_leases() {
        let mut desk = desk(10);
        desk.granted(vec![lease(0, 0), lease(1, 0)]);
        assert_eq!(desk.free(), 1);
        let one = desk.played(lease(0, 0).id, b"123456").expect("kept");
        assert_eq!(desk.free(), 2);
        desk.played(lease(1, 0).id, b"7890ab").expect("kept");
        assert_eq!(desk.free(), 0);
        desk.acknowledged(&one, &AckOutcome::Stored).expect("kept");
        assert_eq!(desk.free(), 3);
    }
}
