//! Adapter manifests: what a broadcast promises.
//!
//! A manifest lists the digest of each chunk of an adapter, and for each chunk that has one the digest
//! of a shorter [`delta`] against the same chunk of an earlier broadcast. Who receives a
//! chunk, whole or as a delta, from anyone, holds it against these.

use crate::{
    Digest, PolicyDigest,
    delta::{self, DeltaError, Layout},
    frame::CHUNK_LEN,
    parallel,
};

/// Most chunks of one adapter: 4 GiB.
pub const MAX_CHUNKS: usize = 1024;

/// What an adapter consists of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterManifest {
    /// Optimizer steps behind it; larger is newer.
    pub step: u64,
    /// The policy that base weights and adapter make together.
    pub policy: PolicyDigest,
    /// SHA-256 of the whole safetensors file.
    pub adapter: Digest,
    /// Its length.
    pub bytes: u64,
    /// SHA-256 of each piece of [`CHUNK_LEN`] bytes; the last may be shorter.
    pub chunks: Vec<Digest>,
    /// The shorter way for who has an earlier adapter.
    pub delta: Option<DeltaManifest>,
}

/// The chunks of an adapter as differences to those of an earlier one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeltaManifest {
    /// The policy whose adapter they start from.
    pub base: PolicyDigest,
    /// For each chunk of the adapter its delta; nothing where that is no shorter than the chunk.
    pub chunks: Vec<Option<DeltaChunk>>,
}

/// One chunk's delta.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaChunk {
    /// SHA-256 of the delta's bytes.
    pub digest: Digest,
    /// How many they are; fewer than the chunk has.
    pub bytes: u32,
}

/// Why a manifest or a chunk is not believed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    /// An adapter without bytes.
    #[error("adapter manifest: bytes: an adapter has at least one byte")]
    Empty,
    /// Too large to announce.
    #[error("adapter manifest: bytes: {0} bytes, the limit is {limit}", limit = MAX_CHUNKS * CHUNK_LEN)]
    TooLarge(u64),
    /// Length and chunk list disagree.
    #[error("adapter manifest: chunks: {got} digests for {bytes} bytes, expected {want}")]
    ChunkCount {
        /// Length of the adapter.
        bytes: u64,
        /// Digests listed.
        got: usize,
        /// Digests needed.
        want: usize,
    },
    /// The deltas do not fit the chunks.
    #[error("adapter manifest: delta: {0}")]
    Delta(&'static str),
    /// A delta does not make a chunk.
    #[error("adapter {adapter}: chunk {chunk}: {source}")]
    Undelta {
        /// The adapter.
        adapter: Digest,
        /// The index.
        chunk: usize,
        /// What is wrong with it.
        source: DeltaError,
    },
    /// The policy digest does not follow from base and adapter.
    #[error("adapter manifest: policy: {got} is not these base weights with this adapter ({want})")]
    Policy {
        /// What base and adapter give.
        want: PolicyDigest,
        /// What the manifest says.
        got: PolicyDigest,
    },
    /// No such chunk.
    #[error("adapter {adapter}: chunk {chunk} of {chunks} does not exist")]
    NoSuchChunk {
        /// The adapter.
        adapter: Digest,
        /// The index.
        chunk: usize,
        /// How many there are.
        chunks: usize,
    },
    /// A chunk is not what the manifest promised.
    #[error("adapter {adapter}: chunk {chunk} is not what the manifest promised; fetch it again")]
    Chunk {
        /// The adapter.
        adapter: Digest,
        /// The index.
        chunk: usize,
    },
    /// Not all chunks are there.
    #[error("adapter {adapter}: {missing} of {chunks} chunks are missing")]
    Incomplete {
        /// The adapter.
        adapter: Digest,
        /// How many are missing.
        missing: usize,
        /// How many there are.
        chunks: usize,
    },
    /// All chunks hold and the whole does not: the manifest contradicts itself.
    #[error("adapter: the whole hashes to {got}, the manifest says {want}")]
    Total {
        /// What the manifest says.
        want: Digest,
        /// What the bytes give.
        got: Digest,
    },
}

impl AdapterManifest {
    /// The manifest of `bytes` (a safetensors file) on top of the base weights `base`.
    ///
    /// # Errors
    /// No bytes, or more than 4 GiB.
    pub fn build(step: u64, base: &Digest, bytes: &[u8]) -> Result<Self, ManifestError> {
        let chunks: Vec<&[u8]> = bytes.chunks(CHUNK_LEN).collect();
        let (adapter, chunks) = parallel::both(
            || Digest::of(bytes),
            || parallel::map(&chunks, |_, chunk| Digest::of(chunk)),
        );
        let policy = PolicyDigest::new(base, &adapter);
        let manifest =
            Self { step, policy, adapter, bytes: bytes.len() as u64, chunks, delta: None };
        manifest.check()?;
        Ok(manifest)
    }

    /// The same with deltas against the adapter of an earlier policy, and the deltas' bytes by chunk.
    /// Where none is shorter than its chunk, or the two adapters differ in length or not at all, the
    /// manifest stays as it is.
    #[must_use]
    pub fn with_delta(
        self,
        bytes: &[u8],
        base: PolicyDigest,
        base_bytes: &[u8],
    ) -> (Self, Vec<Option<Vec<u8>>>) {
        if base_bytes.len() != bytes.len() || base == self.policy {
            return (self, Vec::new());
        }
        let layout = Layout::of(bytes);
        let pairs: Vec<_> = bytes.chunks(CHUNK_LEN).zip(base_bytes.chunks(CHUNK_LEN)).collect();
        let deltas = parallel::map(&pairs, |index, (chunk, base)| {
            let start = index * CHUNK_LEN;
            let delta = delta::encode(&layout, start..start + chunk.len(), base, chunk).ok()?;
            let shorter = u32::try_from(delta.len()).ok().filter(|_| delta.len() < chunk.len());
            shorter.map(|bytes| (DeltaChunk { digest: Digest::of(&delta), bytes }, delta))
        });
        if deltas.iter().all(Option::is_none) {
            return (self, Vec::new());
        }
        let (chunks, deltas) = deltas.into_iter().map(Option::unzip).unzip();
        (Self { delta: Some(DeltaManifest { base, chunks }), ..self }, deltas)
    }

    /// What one who has the base fetches, and what one without it does, in bytes.
    pub fn transfer_bytes(&self) -> (u64, u64) {
        let deltas = self.delta.as_ref().map(|delta| delta.chunks.as_slice()).unwrap_or_default();
        let saved = deltas.iter().enumerate().filter_map(|(index, delta)| {
            let whole = self.range(index)?.len() as u64;
            Some(whole.saturating_sub(u64::from(delta.as_ref()?.bytes)))
        });
        (self.bytes.saturating_sub(saved.sum()), self.bytes)
    }

    /// Whether length and chunk list agree and are within limits.
    ///
    /// # Errors
    /// They are not.
    pub fn check(&self) -> Result<(), ManifestError> {
        if self.bytes == 0 {
            return Err(ManifestError::Empty);
        }
        let chunk = CHUNK_LEN as u64;
        let want = usize::try_from(self.bytes.div_ceil(chunk)).unwrap_or(usize::MAX);
        if want > MAX_CHUNKS {
            return Err(ManifestError::TooLarge(self.bytes));
        }
        if self.chunks.len() != want {
            return Err(ManifestError::ChunkCount {
                bytes: self.bytes,
                got: self.chunks.len(),
                want,
            });
        }
        self.delta.as_ref().map_or(Ok(()), |delta| self.check_delta(delta))
    }

    fn check_delta(&self, delta: &DeltaManifest) -> Result<(), ManifestError> {
        if delta.base == self.policy {
            return Err(ManifestError::Delta("its base is the adapter itself"));
        }
        if delta.chunks.len() != self.chunks.len() {
            return Err(ManifestError::Delta("it has not one entry for each chunk"));
        }
        if delta.chunks.iter().all(Option::is_none) {
            return Err(ManifestError::Delta("it has no chunk at all"));
        }
        let shorter = |(index, chunk): (usize, &Option<DeltaChunk>)| {
            let whole = self.range(index).map_or(0, |range| range.len());
            chunk.is_none_or(|chunk| chunk.bytes > 0 && (chunk.bytes as usize) < whole)
        };
        if delta.chunks.iter().enumerate().all(shorter) {
            Ok(())
        } else {
            Err(ManifestError::Delta("a chunk of it is empty or no shorter than the whole chunk"))
        }
    }

    /// Whether the policy digest is that of this adapter on the base weights `base`.
    ///
    /// # Errors
    /// It is another.
    pub fn check_policy(&self, base: &Digest) -> Result<(), ManifestError> {
        let want = PolicyDigest::new(base, &self.adapter);
        if self.policy == want {
            Ok(())
        } else {
            Err(ManifestError::Policy { want, got: self.policy })
        }
    }

    /// Where chunk `index` lies in the file; `None` where there is no such chunk.
    pub fn range(&self, index: usize) -> Option<std::ops::Range<usize>> {
        let total = usize::try_from(self.bytes).ok()?;
        let start = index.checked_mul(CHUNK_LEN).filter(|start| *start < total)?;
        Some(start..total.min(start + CHUNK_LEN))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adapter(last: u8) -> Vec<u8> {
        (0..CHUNK_LEN * 2 + 5).map(|i| if i % 1000 == 0 { last } else { (i % 251) as u8 }).collect()
    }

    fn manifest() -> AdapterManifest {
        AdapterManifest::build(3, &Digest::of(b"base"), &adapter(0)).expect("an adapter")
    }

    #[test]
    fn lengths_and_chunk_counts_must_agree() {
        let mut manifest = manifest();
        manifest.bytes += CHUNK_LEN as u64;
        assert!(matches!(manifest.check(), Err(ManifestError::ChunkCount { .. })));
        manifest.bytes = u64::MAX;
        assert!(matches!(manifest.check(), Err(ManifestError::TooLarge(_))));
        assert_eq!(AdapterManifest::build(0, &Digest([0; 32]), &[]), Err(ManifestError::Empty));
    }

    #[test]
    fn a_delta_must_be_shorter_than_its_chunk_and_of_another_policy() {
        let earlier = AdapterManifest::build(2, &Digest::of(b"base"), &adapter(9)).expect("sound");
        let (sound, deltas) = manifest().with_delta(&adapter(0), earlier.policy, &adapter(9));
        assert_eq!(sound.check(), Ok(()));
        let (with, without) = sound.transfer_bytes();
        assert_eq!(without, sound.bytes);
        let sent: usize = deltas.iter().flatten().map(Vec::len).sum();
        // Five bytes are not worth a delta.
        assert!(deltas[0].is_some() && deltas[1].is_some() && deltas[2].is_none());
        assert_eq!(with, sent as u64 + 5);
        assert!(with * 50 < without, "{with} of {without}");

        let changed = |change: fn(&mut DeltaManifest)| {
            let mut manifest = sound.clone();
            manifest.delta.as_mut().map(change).expect("there");
            manifest.check()
        };
        let cases: [fn(&mut DeltaManifest); 5] = [
            |it| it.chunks.truncate(2),
            |it| it.chunks.fill(None),
            |it| it.chunks[0].as_mut().expect("there").bytes = 0,
            |it| it.chunks[1].as_mut().expect("there").bytes = CHUNK_LEN as u32,
            |it| it.chunks[2] = it.chunks[0],
        ];
        for case in cases {
            assert!(matches!(changed(case), Err(ManifestError::Delta(_))));
        }
        let mut own = sound.clone();
        own.policy = earlier.policy;
        assert!(matches!(own.check(), Err(ManifestError::Delta(_))));
    }

    #[test]
    fn nothing_shorter_means_no_delta() {
        let (bytes, policy) = (adapter(0), PolicyDigest(Digest::of(b"earlier")));
        let plain = manifest();
        let same = plain.clone().with_delta(&bytes, plain.policy, &bytes);
        let longer = plain.clone().with_delta(&bytes, policy, &[0; 7]);
        let noise: Vec<u8> = (0..bytes.len() as u64 / 32 + 1)
            .flat_map(|at| Digest::of(&at.to_le_bytes()).0)
            .take(bytes.len())
            .collect();
        let unlike = plain.clone().with_delta(&bytes, policy, &noise);
        for (manifest, deltas) in [same, longer, unlike] {
            assert_eq!((manifest, deltas), (plain.clone(), Vec::new()));
        }
    }
}
