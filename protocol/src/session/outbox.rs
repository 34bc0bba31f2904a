//! Episodes that the learner has not acknowledged yet.
//!
//! Delivery is at least once: an episode stays until an acknowledgement names it, and is sent again
//! on every new connection, oldest first. What is sent twice has the same id both times.

use std::collections::{BTreeMap, HashMap};

use bytes::Bytes;

use crate::EpisodeId;

/// Unacknowledged episodes in the order in which they were submitted.
#[derive(Debug, Default)]
pub struct Outbox {
    entries: BTreeMap<u64, (EpisodeId, Bytes)>,
    places: HashMap<EpisodeId, u64>,
    next_place: u64,
    /// Entries from here on were not sent on the current connection.
    unsent_from: u64,
    bytes: usize,
}

impl Outbox {
    /// Adds an encoded episode. One that waits already is not added again.
    pub fn push(&mut self, body: Bytes) -> EpisodeId {
        let id = EpisodeId::of_body(&body);
        if !self.places.contains_key(&id) {
            self.bytes += body.len();
            self.places.insert(id, self.next_place);
            self.entries.insert(self.next_place, (id, body));
            self.next_place += 1;
        }
        id
    }

    /// The next episode that the current connection has not carried, now counted as sent.
    pub fn next_to_send(&mut self) -> Option<(EpisodeId, Bytes)> {
        let (place, (id, body)) = self.entries.range(self.unsent_from..).next()?;
        self.unsent_from = place + 1;
        Some((*id, body.clone()))
    }

    /// A new connection: everything is to be sent again.
    pub fn rewind(&mut self) {
        self.unsent_from = 0;
    }

    /// Forgets an acknowledged episode. False where it was not waiting: acknowledged before.
    pub fn acknowledge(&mut self, id: &EpisodeId) -> bool {
        let entry = self.places.remove(id).and_then(|place| self.entries.remove(&place));
        self.bytes -= entry.as_ref().map_or(0, |(_, body)| body.len());
        entry.is_some()
    }

    /// How many episodes wait.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether everything was acknowledged.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Bytes of the episodes that wait.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Ids of the episodes that wait, oldest first.
    pub fn waiting(&self) -> impl Iterator<Item = EpisodeId> + '_ {
        self.entries.values().map(|(id, _)| *id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_forgotten_before_its_acknowledgement_and_order_survives_reconnects() {
        let mut outbox = Outbox::default();
        let ids: Vec<_> = [b"a", b"b", b"c"].map(|b| outbox.push(Bytes::from_static(b))).to_vec();
        assert_eq!(outbox.next_to_send().expect("a").0, ids[0]);
        assert_eq!(outbox.next_to_send().expect("b").0, ids[1]);
        assert!(outbox.acknowledge(&ids[0]));
        assert!(!outbox.acknowledge(&ids[0]), "a second acknowledgement changes nothing");
        outbox.rewind();
        let sent: Vec<_> = std::iter::from_fn(|| outbox.next_to_send()).map(|(id, _)| id).collect();
        assert_eq!(sent, ids[1..]);
        assert_eq!((outbox.len(), outbox.bytes()), (2, 2));
    }

    #[test]
    fn an_episode_that_waits_is_not_queued_twice() {
        let mut outbox = Outbox::default();
        let id = outbox.push(Bytes::from_static(b"same"));
        assert_eq!(outbox.push(Bytes::from_static(b"same")), id);
        assert_eq!(outbox.len(), 1);
        outbox.acknowledge(&id);
        assert!(outbox.is_empty() && outbox.bytes() == 0);
    }
}
