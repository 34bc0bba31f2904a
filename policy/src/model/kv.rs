//! The key-value cache of many sequences of unequal lengths, and one step over any of them: prefill,
//! appended ids and single-id decode mix freely in a step, without padding. Rows of all feeds are
//! packed for the linears; only the attention looks at each sequence's own past. Recurrent layers
//! keep one state a sequence instead of keys and values.

use std::{collections::BTreeMap, ops::Range};

use burn::tensor::{Tensor, TensorData};

use super::{
    adapter::Adapter,
    decoder::{Decoder, MASKED, Position},
    delta::{DeltaRows, DeltaRule, DeltaState},
    error::ModelError,
    images::{Placement, positions},
    layer::Sequences,
    ops::{attend, to_f32},
    rows::{KvId, RowTable},
    runs::Runs,
};
use crate::vision::PlacedImage;

/// Keys and values of many sequences over one decoder, on its device.
#[derive(Debug)]
pub struct KvCache {
    table: RowTable,
    /// The images of each sequence that has some, in order.
    images: BTreeMap<KvId, Vec<Seen>>,
    layers: Vec<LayerCache>,
}

/// An image in a sequence.
#[derive(Clone, Debug)]
struct Seen {
    /// Indices of its ids.
    ids: Range<usize>,
    /// By how much positions lie behind indices after it.
    behind: u32,
}

/// What one layer keeps: keys and values, or states.
#[derive(Debug)]
struct LayerCache {
    recurrent: bool,
    /// `[rows, kv_heads * head_dim]`, one row only where the layer is recurrent.
    keys: Tensor<2>,
    values: Tensor<2>,
    /// Of each sequence that was fed, where the layer is recurrent.
    states: BTreeMap<KvId, DeltaState>,
}

/// Ids to append to one sequence in a step.
#[derive(Clone, Copy, Debug)]
pub struct Feed<'a> {
    /// The sequence; at most once in a step.
    pub sequence: KvId,
    /// At least one id.
    pub ids: &'a [u32],
    /// Images, by the index in `ids` of their first image-pad id, each whole. Image-pad ids outside
    /// of them are ordinary ids.
    pub images: &'a [PlacedImage],
    /// Whether the logits after the last id are wanted.
    pub logits: bool,
}

/// Logits on the host, one row for each feed that asked for them, in the order of the feeds.
#[derive(Clone, Debug, PartialEq)]
pub struct Logits {
    values: Vec<f32>,
    vocab: usize,
}

impl Logits {
    /// The rows, each as long as the vocabulary.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = &[f32]> {
        self.values.chunks_exact(self.vocab.max(1))
    }

    /// The rows, to be changed in place.
    pub fn rows_mut(&mut self) -> impl ExactSizeIterator<Item = &mut [f32]> {
        self.values.chunks_exact_mut(self.vocab.max(1))
    }
}

impl KvCache {
    /// An empty cache of at most `capacity` positions, all sequences together (a shared past counts
    /// once). Memory is taken as it is needed.
    pub fn new(decoder: &Decoder, capacity: usize) -> Self {
        let c = decoder.config();
        let empty = || {
            let width = c.kv_heads * c.head_dim;
            Tensor::zeros([1, width], (decoder.device(), decoder.dtype()))
        };
        let layer = |i: usize| LayerCache {
            recurrent: c.delta(i).is_some(),
            keys: empty(),
            values: empty(),
            states: BTreeMap::new(),
        };
        let layers = (0..c.layers).map(layer).collect();
        Self { table: RowTable::new(capacity), images: BTreeMap::new(), layers }
    }

    /// A new, empty sequence.
    pub fn open(&mut self) -> KvId {
        self.table.open(Vec::new())
    }

    /// A new sequence with the same past, shared and not copied.
    ///
    /// # Errors
    /// The sequence is not open.
    pub fn fork(&mut self, sequence: KvId) -> Result<KvId, ModelError> {
        let rows = self.table.rows(sequence)?.clone();
        let fork = self.table.open(rows);
        if let Some(images) = self.images.get(&sequence).cloned() {
            self.images.insert(fork, images);
        }
        for LayerCache { states, .. } in &mut self.layers {
            if let Some(state) = states.get(&sequence).cloned() {
                states.insert(fork, state);
            }
        }
        Ok(fork)
    }

    /// Whether a sequence can forget its last ids only by forgetting all: a recurrent state cannot
    /// be taken back.
    pub fn recurrent(&self) -> bool {
        self.layers.iter().any(|layer| layer.recurrent)
    }

    /// How many ids the sequence holds.
    ///
    /// # Errors
    /// The sequence is not open.
    pub fn len(&self, sequence: KvId) -> Result<usize, ModelError> {
        Ok(self.table.rows(sequence)?.len())
    }

    /// Forgets all but the first `len` ids of a sequence.
    ///
    /// # Errors
    /// The sequence is not open, or a part of a recurrent one ([`KvCache::recurrent`]) or of an image
    /// would stay.
    pub fn truncate(&mut self, sequence: KvId, len: usize) -> Result<(), ModelError> {
        let held = self.table.rows(sequence)?.len();
        if len >= held {
            return Ok(());
        }
        if self.recurrent() {
            if len > 0 {
                let reason = format!(
                    "a recurrent state over {held} ids cannot be cut back to {len}; forget all of \
                     the sequence, or fork it before it goes on"
                );
                return Err(ModelError::Input(reason));
            }
            self.forget_states(sequence);
        }
        if let Some(images) = self.images.get_mut(&sequence) {
            if images.iter().any(|image| image.ids.start < len && len < image.ids.end) {
                let reason = format!("a sequence cannot be cut to {len} ids within an image");
                return Err(ModelError::Input(reason));
            }
            images.retain(|image| image.ids.end <= len);
        }
        self.table.truncate(sequence, len);
        Ok(())
    }

    /// Forgets a sequence. Nothing happens where it is not open.
    pub fn close(&mut self, sequence: KvId) {
        self.forget_states(sequence);
        self.images.remove(&sequence);
        self.table.close(sequence);
    }

    fn forget_states(&mut self, sequence: KvId) {
        for layer in &mut self.layers {
            layer.states.remove(&sequence);
        }
    }

    /// Positions in use.
    pub fn used(&self) -> usize {
        self.table.used()
    }

    /// The most positions that it may hold.
    pub fn capacity(&self) -> usize {
        self.table.capacity()
    }

    /// Makes every layer at least `height` rows high.
    fn reserve(&mut self, height: usize) {
        for LayerCache { keys, values, .. } in self.layers.iter_mut().filter(|l| !l.recurrent) {
            for store in [keys, values] {
                let [rows, width] = store.dims();
                if rows < height {
                    let more = (height - rows).max(rows).max(256);
                    let options = (&store.device(), store.dtype());
                    let zeros = Tensor::zeros([more, width], options);
                    store.inplace(|old| Tensor::cat(vec![old, zeros], 0));
                }
            }
        }
    }
}

/// Where the rows of one feed lie in the step.
struct Placed {
    sequence: KvId,
    /// First row in the packed step.
    start: usize,
    /// New ids.
    count: usize,
    /// Rows of the store, the past and the new ones.
    rows: Vec<u32>,
    /// Of the new ids.
    positions: Vec<Position>,
}

impl Decoder {
    /// Feeds ids to sequences, all in one pass, and returns the logits that were asked for. Either
    /// every feed is taken or, on an error, none.
    ///
    /// # Errors
    /// No feeds, an empty feed, a sequence fed twice or not open, ids outside of the vocabulary, no
    /// room in the cache or in the model's positions, or a failing device.
    pub fn advance(
        &self,
        adapter: Option<&Adapter>,
        cache: &mut KvCache,
        feeds: &[Feed<'_>],
    ) -> Result<Logits, ModelError> {
        let images = self.check_feeds(cache, feeds)?;
        let mut start = 0;
        let mut packed = Vec::new();
        for (feed, images) in feeds.iter().zip(&images) {
            let moved = |it: &PlacedImage| PlacedImage { at: start + it.at, ..it.clone() };
            packed.extend(images.iter().map(moved));
            start += feed.ids.len();
        }
        let placement = Placement::new(packed);
        let merged = match placement.is_empty() {
            true => None,
            false => Some(placement.tower(self, adapter)?.run()),
        };
        let placed = self.place(cache, feeds, &images)?;
        let ids: Vec<u32> = feeds.iter().flat_map(|feed| feed.ids).copied().collect();
        let past = |p: &Placed| p.rows.len() - p.count;
        let positions: Vec<Position> = placed.iter().flat_map(|p| &p.positions).copied().collect();
        let targets: Vec<u32> =
            placed.iter().flat_map(|p| p.rows[past(p)..].iter().copied()).collect();
        let rope = self.rotations(&positions);
        let mut x = self.embed(&ids);
        if let Some(merged) = merged {
            x = placement.put(x, &merged);
        }
        let mut step = Step { decoder: self, cache, placed: &placed, targets: &targets };
        for index in 0..self.config().layers {
            x = self.layer(index, adapter, x, &rope, &mut step);
        }
        let wanted: Vec<u32> = feeds
            .iter()
            .zip(&placed)
            .filter(|(feed, _)| feed.logits)
            .map(|(_, p)| (p.start + p.count - 1) as u32)
            .collect();
        let vocab = self.config().vocab;
        if wanted.is_empty() {
            return Ok(Logits { values: Vec::new(), vocab });
        }
        let x = self.final_norm(x.select(0, self.int(&wanted)));
        let logits = to_f32(x.matmul(self.weights.head().transpose()));
        let data = logits.try_into_data().map_err(|e| ModelError::Device(e.to_string()))?;
        let values = data.try_into_vec::<f32>().map_err(|e| ModelError::Device(e.to_string()))?;
        Ok(Logits { values, vocab })
    }

    /// Checks all feeds and gives the images of each, in order.
    fn check_feeds(
        &self,
        cache: &KvCache,
        feeds: &[Feed<'_>],
    ) -> Result<Vec<Vec<PlacedImage>>, ModelError> {
        let input = |reason: &str| Err(ModelError::Input(reason.into()));
        if feeds.is_empty() {
            return input("a step needs at least one sequence");
        }
        let mut seen: Vec<KvId> = feeds.iter().map(|feed| feed.sequence).collect();
        seen.sort_unstable();
        if seen.windows(2).any(|pair| pair[0] == pair[1]) {
            return input("a sequence is fed twice in one step");
        }
        let mut images = Vec::with_capacity(feeds.len());
        for feed in feeds {
            if feed.ids.is_empty() {
                return input("a sequence is fed no ids");
            }
            self.check_ids(feed.ids)?;
            self.check_len(cache.table.rows(feed.sequence)?.len() + feed.ids.len())?;
            images.push(self.check_images(feed.ids, feed.images)?);
        }
        cache.table.room(feeds.iter().map(|feed| feed.ids.len()).sum())?;
        Ok(images)
    }

    /// Gives checked feeds their rows and positions.
    fn place(
        &self,
        cache: &mut KvCache,
        feeds: &[Feed<'_>],
        images: &[Vec<PlacedImage>],
    ) -> Result<Vec<Placed>, ModelError> {
        let mut start = 0;
        let mut placed = Vec::with_capacity(feeds.len());
        for (feed, images) in feeds.iter().zip(images) {
            let (sequence, count) = (feed.sequence, feed.ids.len());
            let past = cache.table.rows(sequence)?.len();
            let last = cache.images.get(&sequence).and_then(|seen| seen.last());
            let first = past as u32 - last.map_or(0, |image| image.behind);
            for (number, image) in images.iter().enumerate() {
                let (_, next) = positions(image.end(), &images[..=number], first);
                let ids = past + image.at..past + image.end();
                let behind = ids.end as u32 - next;
                cache.images.entry(sequence).or_default().push(Seen { ids, behind });
            }
            cache.table.extend(sequence, count);
            let rows = cache.table.rows(sequence)?.clone();
            let (positions, _) = positions(count, images, first);
            placed.push(Placed { sequence, start, count, rows, positions });
            start += count;
        }
        cache.reserve(cache.table.height());
        Ok(placed)
    }

    /// Feeds of equal counts as one batch, padded at the right to the longest sequence.
    fn attend_over(
        &self,
        q: Tensor<3>,
        keys: &Tensor<2>,
        values: &Tensor<2>,
        feeds: &[Placed],
    ) -> Tensor<4> {
        let c = self.config();
        let (batch, count) = (feeds.len(), feeds[0].count);
        let group = c.heads / c.kv_heads;
        let longest = feeds.iter().map(|p| p.rows.len()).max().unwrap_or(0);
        let mut index = Vec::with_capacity(batch * longest);
        let mut bias = Vec::with_capacity(batch * count * group * longest);
        for feed in feeds {
            index.extend_from_slice(&feed.rows);
            index.resize(index.len() + longest - feed.rows.len(), 0);
            for query in 0..count {
                let seen = feed.rows.len() - count + query + 1;
                for _ in 0..group {
                    bias.resize(bias.len() + seen, 0.0);
                    bias.resize(bias.len() + longest - seen, MASKED);
                }
            }
        }
        let index = self.int(&index);
        let gather = |store: &Tensor<2>| {
            let rows = store.clone().select(0, index.clone());
            rows.reshape([batch, longest, c.kv_heads, c.head_dim]).swap_dims(1, 2)
        };
        let bias = TensorData::new(bias, [batch, 1, count * group, longest]);
        let bias = Tensor::from_data(bias, self.device());
        let q = q
            .reshape([batch, count, c.kv_heads, group * c.head_dim])
            .swap_dims(1, 2)
            .reshape([batch, c.kv_heads, count * group, c.head_dim]);
        attend(q, gather(keys), gather(values), Some(bias))
            .reshape([batch, c.kv_heads, count, group * c.head_dim])
            .swap_dims(1, 2)
    }
}

/// The feeds of a step and their pasts.
struct Step<'a> {
    decoder: &'a Decoder,
    cache: &'a mut KvCache,
    placed: &'a [Placed],
    /// Row of the store of each packed row.
    targets: &'a [u32],
}

impl<'a> Step<'a> {
    /// The feeds in groups that are computed together: neighbours of one id, longer ones one by one.
    fn groups(&self) -> impl Iterator<Item = &'a [Placed]> + use<'a> {
        let single = |p: &Placed| p.count == 1;
        self.placed.chunk_by(move |a, b| single(a) && single(b))
    }
}

impl Sequences for Step<'_> {
    fn attend(&mut self, layer: usize, q: Tensor<3>, k: Tensor<3>, v: Tensor<3>) -> Tensor<2> {
        let c = self.decoder.config();
        let groups = self.groups();
        let LayerCache { keys, values, .. } = &mut self.cache.layers[layer];
        write_rows(keys, k, self.targets);
        write_rows(values, v, self.targets);
        let width = c.heads * c.head_dim;
        let part = |feeds: &[Placed]| {
            let rows: usize = feeds.iter().map(|p| p.count).sum();
            let start = feeds[0].start;
            let q = q.clone().slice([start..start + rows, 0..c.heads, 0..c.head_dim]);
            self.decoder.attend_over(q, keys, values, feeds).reshape([rows, width])
        };
        joined(groups.map(part).collect())
    }

    fn recur(&mut self, layer: usize, rule: &DeltaRule<'_>, rows: DeltaRows) -> Tensor<2> {
        let decoder = self.decoder;
        let groups = self.groups();
        let states = &mut self.cache.layers[layer].states;
        let part = |feeds: &[Placed]| {
            let lens: Vec<usize> = feeds.iter().map(|p| p.count).collect();
            let runs = Runs::new(decoder, feeds[0].start, &lens);
            let past: Vec<Option<DeltaState>> =
                feeds.iter().map(|p| states.remove(&p.sequence)).collect();
            let past = rule.stack(past, decoder.device(), decoder.dtype());
            let (out, after) = rule.run(runs.split(&rows), past);
            for (feed, state) in feeds.iter().zip(after.unstack(feeds.len())) {
                states.insert(feed.sequence, state);
            }
            runs.join(out)
        };
        joined(groups.map(part).collect())
    }
}

fn joined(mut parts: Vec<Tensor<2>>) -> Tensor<2> {
    if parts.len() == 1 { parts.remove(0) } else { Tensor::cat(parts, 0) }
}

/// Writes `[rows, heads, dim]` to the rows `targets` of a store, run by run.
fn write_rows(store: &mut Tensor<2>, values: Tensor<3>, targets: &[u32]) {
    let [count, heads, dim] = values.dims();
    let width = heads * dim;
    let values = values.reshape([count, width]);
    let mut from = 0;
    while from < count {
        let first = targets[from] as usize;
        let run = (from..count).take_while(|&i| targets[i] as usize == first + i - from).count();
        let part = values.clone().slice([from..from + run, 0..width]);
        store.inplace(|old| old.slice_assign([first..first + run, 0..width], part));
        from += run;
    }
}
