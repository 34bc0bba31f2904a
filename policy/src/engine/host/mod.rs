//! The decoder on the processor, for f32 weights.
//!
//! The same computation as the decoder's own cached pass, arranged for a few rows at a time: weights
//! are packed once, a layer is a handful of loops instead of dozens of tensor operations, and keys
//! and values are read where they lie. Every number of a row depends on that row's sequence alone:
//! logits have the same bits in any batch, with any neighbours, however a prompt was cut.

mod attention;
mod ops;
mod packed;
mod panels;
mod store;
mod weights;

use std::collections::BTreeMap;

use protocol::PolicyDigest;

use self::{
    attention::{Attention, Rows as AttentionRows, rope_at},
    packed::Packed,
    panels::{Chunk, Job, Panels, W, multiply},
    store::{BlockShape, Past, Store},
    weights::{HostAdapter, HostWeights},
};
use super::backend::{Backend, Rows, Slot, SlotFeed};
use crate::{
    model::{Adapter, Decoder, ModelError},
    vision::PlacedImage,
};

/// The logits of a step in panels.
pub(super) struct HostLogits {
    panels: Panels,
    vocab: usize,
}

impl HostLogits {
    /// Copies row `row` to `to`.
    pub(super) fn read(&self, row: usize, to: &mut Vec<f32>) {
        to.resize(self.vocab.next_multiple_of(W), 0.0);
        self.panels.read_row(row, to);
        to.truncate(self.vocab);
    }
}

/// Packed weights, their adapters and the cache.
pub(super) struct HostBackend {
    weights: HostWeights,
    adapters: BTreeMap<PolicyDigest, Option<HostAdapter>>,
    store: Store,
    buffers: Buffers,
}

/// Intermediate results, kept from step to step.
#[derive(Default)]
struct Buffers {
    x: Panels,
    h: Panels,
    q: Panels,
    k: Panels,
    v: Panels,
    up: Panels,
    gate: Panels,
    low: [Panels; 3],
    attended: Vec<Chunk>,
    logits: Panels,
}

/// One sequence in a step.
struct Fed<'a> {
    slot: Slot,
    ids: &'a [u32],
    first: usize,
    past: Past,
}

impl HostBackend {
    /// Packs the weights of `decoder`, which must be f32 and on the processor.
    pub(super) fn new(decoder: &Decoder) -> Result<Self, ModelError> {
        Ok(Self {
            weights: HostWeights::pack(decoder)?,
            adapters: BTreeMap::new(),
            store: Store::new(BlockShape::new(decoder.config())),
            buffers: Buffers::default(),
        })
    }

    fn check(&self, feeds: &[SlotFeed<'_>]) -> Result<(), ModelError> {
        let config = &self.weights.config;
        let mut slots: Vec<Slot> = feeds.iter().map(|feed| feed.slot).collect();
        slots.sort_unstable();
        if slots.is_empty() || slots.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(ModelError::Input("a step needs each of its sequences once".into()));
        }
        for feed in feeds {
            let len = self.store.past(feed.slot)?.len + feed.ids.len();
            if feed.ids.is_empty() {
                return Err(ModelError::Input("a sequence is fed no ids".into()));
            }
            if len > config.max_positions {
                return Err(ModelError::TooLong { len, max: config.max_positions });
            }
            if let Some(&id) = feed.ids.iter().find(|id| **id as usize >= config.vocab) {
                return Err(ModelError::TokenId { id, vocab: config.vocab });
            }
        }
        Ok(())
    }
}

impl Backend for HostBackend {
    fn add(&mut self, policy: PolicyDigest, adapter: Option<Adapter>) -> Result<(), ModelError> {
        let adapter = adapter.map(|a| HostAdapter::pack(&self.weights.config, &a)).transpose()?;
        self.adapters.insert(policy, adapter);
        Ok(())
    }

    fn remove(&mut self, policy: &PolicyDigest) {
        self.adapters.remove(policy);
    }

    fn open(&mut self) -> Slot {
        self.store.open()
    }

    fn fork(&mut self, slot: Slot, len: usize) -> Result<Slot, ModelError> {
        self.store.fork(slot, len)
    }

    fn close(&mut self, slot: Slot) {
        self.store.close(slot);
    }

    fn used(&self) -> usize {
        self.store.used()
    }

    fn places(&self, len: usize, more: usize) -> usize {
        // The block that is begun may be shared, and is then copied.
        (len + more).next_multiple_of(W) - len / W * W
    }

    fn check_images(
        &self,
        _ids: &[u32],
        images: &[PlacedImage],
    ) -> Result<Vec<PlacedImage>, ModelError> {
        match images.is_empty() {
            true => Ok(Vec::new()),
            false => Err(self.weights.config.no_images()),
        }
    }

    fn advance(
        &mut self,
        policy: &PolicyDigest,
        feeds: &[SlotFeed<'_>],
    ) -> Result<Rows, ModelError> {
        self.check(feeds)?;
        let mut fed = Vec::with_capacity(feeds.len());
        let mut first = 0;
        let mut longest = 0;
        for feed in feeds {
            let past = self.store.take(feed.slot, feed.ids.len())?;
            longest = longest.max(past.len + feed.ids.len());
            fed.push(Fed { slot: feed.slot, ids: feed.ids, first, past });
            first += feed.ids.len();
        }
        self.weights.extend_rope(longest);
        let adapter = self.adapters.get(policy).and_then(Option::as_ref);
        let step = Step { weights: &self.weights, adapter, shape: self.store.shape, rows: first };
        step.embed(&mut self.buffers, &fed);
        for layer in 0..self.weights.layers.len() {
            step.layer(layer, &mut self.buffers, &mut fed);
        }
        let wanted: Vec<usize> = feeds
            .iter()
            .zip(&fed)
            .filter(|(feed, _)| feed.logits)
            .map(|(_, fed)| fed.first + fed.ids.len() - 1)
            .collect();
        let logits = step.logits(&mut self.buffers, &wanted);
        for Fed { slot, ids, mut past, .. } in fed {
            past.len += ids.len();
            self.store.put(slot, past);
        }
        Ok(Rows::Host(HostLogits { panels: logits, vocab: self.weights.config.vocab }))
    }

    fn cost(&self, ids: usize) -> usize {
        // As for a single product: reading the weights is like four more rows.
        (ids + 4) * self.weights.count
    }

    fn recycle(&mut self, rows: Rows) {
        if let Rows::Host(HostLogits { panels, .. }) = rows {
            self.buffers.logits = panels;
        }
    }
}

/// What all parts of a step share.
#[derive(Clone, Copy)]
struct Step<'a> {
    weights: &'a HostWeights,
    adapter: Option<&'a HostAdapter>,
    shape: BlockShape,
    rows: usize,
}

impl Step<'_> {
    fn embed(&self, buffers: &mut Buffers, fed: &[Fed<'_>]) {
        let width = self.weights.config.hidden;
        buffers.x.reshape(width, self.rows);
        let mut line = vec![0.0; width];
        for (row, &id) in fed.iter().flat_map(|fed| fed.ids).enumerate() {
            self.weights.embedding(id, &mut line);
            buffers.x.write_row(row, &line);
        }
    }

    fn layer(&self, index: usize, buffers: &mut Buffers, fed: &mut [Fed<'_>]) {
        let Some(layer) = self.weights.layers.get(index) else { return };
        let (hidden, eps) = (self.weights.config.hidden, self.weights.eps());
        let Buffers { x, h, q, k, v, up, gate, low, attended, .. } = buffers;
        let linear = |slot: usize| &layer.linears[slot];

        ops::rms_norm(x, &layer.input_norm, hidden, eps, h);
        self.linears(
            index,
            0,
            h.view(),
            [linear(0), linear(1), linear(2)],
            [&mut *q, &mut *k, &mut *v],
            low,
            false,
        );
        self.remember(index, k, v, fed);
        let attention = Attention {
            shape: &self.shape,
            layer: index,
            heads: self.weights.config.heads,
            norm: layer.q_norm.as_deref(),
            eps,
            rope: self.weights.rope(),
            queries: q,
        };
        let width = attention.width();
        attended.resize(width * self.rows, [0.0; W]);
        let rows: Vec<AttentionRows<'_>> = fed
            .iter()
            .map(|Fed { ids, first, past, .. }| AttentionRows {
                first: *first,
                count: ids.len(),
                position: past.len,
                past,
            })
            .collect();
        attention.run(&rows, attended);
        let view = panels::View { chunks: attended, row: width, panel: 1, rows: self.rows };
        self.linears(index, 3, view, [linear(3)], [&mut *x], low, true);

        ops::rms_norm(x, &layer.post_norm, hidden, eps, h);
        self.linears(
            index,
            4,
            h.view(),
            [linear(4), linear(5)],
            [&mut *gate, &mut *up],
            low,
            false,
        );
        ops::gated(&mut gate.chunks, &up.chunks);
        self.linears(index, 6, gate.view(), [linear(6)], [x], low, true);
    }

    /// `ys[i] = x Wᵢᵀ`, or `+=`, with the adapter's parts, for the linears from slot `first` of a
    /// layer on.
    #[allow(clippy::too_many_arguments)]
    fn linears<const N: usize>(
        &self,
        layer: usize,
        first: usize,
        x: panels::View<'_>,
        weights: [&Packed; N],
        ys: [&mut Panels; N],
        low: &mut [Panels; 3],
        add: bool,
    ) {
        let loras: [_; N] =
            std::array::from_fn(|i| self.adapter.and_then(|a| a.lora(layer, first + i)));
        let inner = low.iter_mut().zip(&loras).filter_map(|(t, lora)| {
            let lora = lora.as_ref()?;
            t.reshape(lora.a.outputs(), self.rows);
            Some(Job { x, weight: &lora.a, low: None, y: t, add: false })
        });
        let inner: Vec<_> = inner.collect();
        if !inner.is_empty() {
            multiply(inner);
        }
        let mut jobs = Vec::with_capacity(N);
        for (i, (weight, y)) in weights.into_iter().zip(ys).enumerate() {
            if !add {
                y.reshape(weight.outputs(), self.rows);
            }
            let part = loras[i].as_ref().map(|lora| (low[i].view(), &lora.b));
            jobs.push(Job { x, weight, low: part, y, add });
        }
        multiply(jobs);
    }

    /// Writes the new keys, normed and rotated, and values to the sequences' blocks.
    fn remember(&self, layer: usize, k: &Panels, v: &Panels, fed: &mut [Fed<'_>]) {
        let Some(weights) = self.weights.layers.get(layer) else { return };
        let (heads, dim) = (self.shape.kv_heads, self.shape.head_dim);
        let padded = (heads * dim).next_multiple_of(W);
        let (mut keys, mut values) = (vec![0.0; padded], vec![0.0; padded]);
        for Fed { ids, first, past, .. } in fed {
            for i in 0..ids.len() {
                k.read_row(*first + i, &mut keys);
                v.read_row(*first + i, &mut values);
                let position = past.len + i;
                let rope = rope_at(self.weights.rope(), dim, position);
                let block = past.blocks.get_mut(position / W).and_then(std::sync::Arc::get_mut);
                let Some(block) = block else { continue };
                let pairs = keys.chunks_exact_mut(dim).zip(values.chunks_exact(dim));
                for (head, (key, value)) in pairs.enumerate().take(heads) {
                    let norm = weights.k_norm.as_deref();
                    ops::norm_and_rotate(key, norm, self.weights.eps(), rope);
                    block.write(&self.shape, (layer, head), position % W, key, value);
                }
            }
        }
    }

    fn logits(&self, buffers: &mut Buffers, wanted: &[usize]) -> Panels {
        let config = &self.weights.config;
        let Buffers { x, h, logits, .. } = buffers;
        let mut logits = std::mem::take(logits);
        if wanted.is_empty() {
            return logits;
        }
        let mut last = Panels::default();
        last.reshape(config.hidden, wanted.len());
        let mut line = vec![0.0; config.hidden.next_multiple_of(W)];
        for (to, &from) in wanted.iter().enumerate() {
            x.read_row(from, &mut line);
            last.write_row(to, &line);
        }
        ops::rms_norm(&last, &self.weights.norm, config.hidden, self.weights.eps(), h);
        logits.reshape(config.vocab, wanted.len());
        let weight = &self.weights.head;
        multiply(vec![Job { x: h.view(), weight, low: None, y: &mut logits, add: false }]);
        logits
    }
}
