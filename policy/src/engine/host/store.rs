//! Keys and values of many sequences in blocks of 16 positions.
//!
//! A block is counted by reference, so a forked sequence shares its past; writing to a shared block
//! copies it first. Inside a block keys lie as 16 positions side by side for each element, values as
//! 16 elements side by side for each position: both are panels that the product kernel reads as they
//! are.

use std::{collections::BTreeMap, sync::Arc};

use super::{
    super::backend::Slot,
    panels::{Chunk, W},
};
use crate::model::{ModelConfig, ModelError};

/// The shape of a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockShape {
    pub layers: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

impl BlockShape {
    pub(super) fn new(config: &ModelConfig) -> Self {
        Self { layers: config.layers, kv_heads: config.kv_heads, head_dim: config.head_dim }
    }

    /// `head_dim` in chunks, rounded up.
    pub(super) fn panels(&self) -> usize {
        self.head_dim.div_ceil(W)
    }

    /// Chunks of one head's keys (or values) in one layer.
    fn half(&self) -> usize {
        self.panels() * W
    }

    /// Chunks of a block.
    fn len(&self) -> usize {
        self.layers * self.kv_heads * 2 * self.half()
    }

    fn at(&self, layer: usize, head: usize) -> usize {
        (layer * self.kv_heads + head) * 2 * self.half()
    }
}

/// 16 positions of one sequence, all layers.
#[derive(Clone, Debug)]
pub(super) struct Block(Vec<Chunk>);

impl Block {
    /// `[head_dim, padded][16 positions]`.
    pub(super) fn keys(&self, shape: &BlockShape, layer: usize, head: usize) -> &[Chunk] {
        &self.0[shape.at(layer, head)..][..shape.half()]
    }

    /// `[head_dim / 16][16 positions][16]`.
    pub(super) fn values(&self, shape: &BlockShape, layer: usize, head: usize) -> &[Chunk] {
        &self.0[shape.at(layer, head) + shape.half()..][..shape.half()]
    }

    /// Writes one position's key and value of one head, each `head_dim` long.
    pub(super) fn write(
        &mut self,
        shape: &BlockShape,
        (layer, head): (usize, usize),
        lane: usize,
        key: &[f32],
        value: &[f32],
    ) {
        let (keys, values) =
            self.0[shape.at(layer, head)..][..2 * shape.half()].split_at_mut(shape.half());
        for (chunk, element) in keys.iter_mut().zip(key) {
            chunk[lane] = *element;
        }
        for (panel, elements) in values.chunks_mut(W).zip(value.chunks(W)) {
            panel[lane][..elements.len()].copy_from_slice(elements);
        }
    }
}

/// One sequence's blocks; `len` positions are valid.
#[derive(Clone, Debug, Default)]
pub(super) struct Past {
    pub blocks: Vec<Arc<Block>>,
    pub len: usize,
}

/// All sequences.
#[derive(Debug)]
pub(super) struct Store {
    pub shape: BlockShape,
    pasts: BTreeMap<Slot, Past>,
    next: u64,
    /// Distinct blocks in use.
    blocks: usize,
}

impl Store {
    pub(super) fn new(shape: BlockShape) -> Self {
        Self { shape, pasts: BTreeMap::new(), next: 0, blocks: 0 }
    }

    /// Positions in use, in whole blocks; a shared block counts once.
    pub(super) fn used(&self) -> usize {
        self.blocks * W
    }

    pub(super) fn open(&mut self) -> Slot {
        self.insert(Past::default())
    }

    fn insert(&mut self, past: Past) -> Slot {
        let slot = Slot(self.next);
        self.next += 1;
        self.pasts.insert(slot, past);
        slot
    }

    pub(super) fn fork(&mut self, slot: Slot, len: usize) -> Result<Slot, ModelError> {
        let past = self.past(slot)?;
        let len = len.min(past.len);
        let blocks = past.blocks.iter().take(len.div_ceil(W)).cloned().collect();
        Ok(self.insert(Past { blocks, len }))
    }

    pub(super) fn close(&mut self, slot: Slot) {
        let blocks = self.pasts.remove(&slot).map(|past| past.blocks).unwrap_or_default();
        self.blocks -= blocks.iter().filter(|block| Arc::strong_count(block) == 1).count();
    }

    pub(super) fn past(&self, slot: Slot) -> Result<&Past, ModelError> {
        self.pasts.get(&slot).ok_or_else(|| {
            ModelError::Input(format!("sequence {} is not open in the engine's cache", slot.0))
        })
    }

    /// Takes a sequence out, to be written to, with own blocks for `count` more positions.
    pub(super) fn take(&mut self, slot: Slot, count: usize) -> Result<Past, ModelError> {
        self.past(slot)?;
        let mut past = self.pasts.remove(&slot).unwrap_or_default();
        let shared = |block: &&mut Arc<Block>| Arc::strong_count(block) > 1;
        if !past.len.is_multiple_of(W)
            && let Some(block) = past.blocks.last_mut().filter(shared)
        {
            *block = Arc::new(Block::clone(block));
            self.blocks += 1;
        }
        while past.blocks.len() * W < past.len + count {
            past.blocks.push(Arc::new(Block(vec![[0.0; W]; self.shape.len()])));
            self.blocks += 1;
        }
        Ok(past)
    }

    /// Puts back what [`Store::take`] gave.
    pub(super) fn put(&mut self, slot: Slot, past: Past) {
        self.pasts.insert(slot, past);
    }
}
