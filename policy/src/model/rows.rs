//! Which row of the key-value store holds which position of which sequence. Rows are counted, so a
//! forked sequence shares its past with its parent and the past is computed and stored once.

use std::collections::BTreeMap;

use super::error::ModelError;

/// A sequence in a [`super::KvCache`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KvId(u64);

/// The rows of every open sequence.
#[derive(Debug)]
pub(crate) struct RowTable {
    sequences: BTreeMap<KvId, Vec<u32>>,
    next: u64,
    /// How many sequences use each row.
    users: Vec<u32>,
    /// Unused rows, the lowest last.
    free: Vec<u32>,
    capacity: usize,
}

impl RowTable {
    pub(crate) fn new(capacity: usize) -> Self {
        // Rows are numbered in 32 bits.
        let capacity = capacity.min(i32::MAX as usize);
        Self { sequences: BTreeMap::new(), next: 0, users: Vec::new(), free: Vec::new(), capacity }
    }

    pub(crate) fn open(&mut self, rows: Vec<u32>) -> KvId {
        for &row in &rows {
            self.users[row as usize] += 1;
        }
        let id = KvId(self.next);
        self.next += 1;
        self.sequences.insert(id, rows);
        id
    }

    pub(crate) fn rows(&self, id: KvId) -> Result<&Vec<u32>, ModelError> {
        self.sequences.get(&id).ok_or_else(|| {
            ModelError::Input(format!("sequence {} is not open in this key-value cache", id.0))
        })
    }

    /// Gives `count` new rows to the end of a sequence.
    pub(crate) fn extend(&mut self, id: KvId, count: usize) {
        let Some(rows) = self.sequences.get_mut(&id) else { return };
        for _ in 0..count {
            let row = self.free.pop().unwrap_or_else(|| {
                self.users.push(0);
                u32::try_from(self.users.len() - 1).unwrap_or(u32::MAX)
            });
            self.users[row as usize] = 1;
            rows.push(row);
        }
    }

    /// Keeps the first `len` positions of a sequence and releases the rest.
    pub(crate) fn truncate(&mut self, id: KvId, len: usize) {
        let Some(rows) = self.sequences.get_mut(&id) else { return };
        if len < rows.len() {
            for row in rows.split_off(len) {
                let users = &mut self.users[row as usize];
                *users -= 1;
                if *users == 0 {
                    self.free.push(row);
                }
            }
            self.free.sort_unstable_by(|a, b| b.cmp(a));
        }
    }

    pub(crate) fn close(&mut self, id: KvId) {
        self.truncate(id, 0);
        self.sequences.remove(&id);
    }

    /// Rows ever used; a store must hold as many.
    pub(crate) fn height(&self) -> usize {
        self.users.len()
    }

    pub(crate) fn used(&self) -> usize {
        self.users.len() - self.free.len()
    }

    pub(crate) fn room(&self, needed: usize) -> Result<(), ModelError> {
        let free = self.capacity.saturating_sub(self.used());
        if needed <= free {
            return Ok(());
        }
        Err(ModelError::CacheFull { needed, free, capacity: self.capacity })
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }
}
