//! Adapter manifests: what a broadcast promises, and the assembly that holds it to that promise.
//!
//! Chunks may come from anyone in any order; each is verified against the manifest before it is
//! kept, so a broken transfer goes on where it stopped and nobody on the way needs to be trusted.

use crate::{Digest, PolicyDigest, frame::CHUNK_LEN};

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
        let adapter = Digest::of(bytes);
        let manifest = Self {
            step,
            policy: PolicyDigest::new(base, &adapter),
            adapter,
            bytes: bytes.len() as u64,
            chunks: bytes.chunks(CHUNK_LEN).map(Digest::of).collect(),
        };
        manifest.check()?;
        Ok(manifest)
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
        Ok(())
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

/// An adapter on its way: which chunks are here, and the bytes so far.
pub struct Assembly {
    manifest: AdapterManifest,
    bytes: Vec<u8>,
    have: Vec<bool>,
}

impl std::fmt::Debug for Assembly {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let have = self.have.iter().filter(|have| **have).count();
        write!(f, "Assembly({}, {have} of {})", self.manifest.policy, self.have.len())
    }
}

impl Assembly {
    /// Starts with nothing.
    ///
    /// # Errors
    /// The manifest contradicts itself.
    pub fn new(manifest: AdapterManifest) -> Result<Self, ManifestError> {
        manifest.check()?;
        let have = vec![false; manifest.chunks.len()];
        let len =
            usize::try_from(manifest.bytes).map_err(|_| ManifestError::TooLarge(manifest.bytes))?;
        Ok(Self { manifest, bytes: vec![0; len], have })
    }

    /// Starts from the bytes of an earlier, broken transfer: chunks that hold are kept.
    ///
    /// # Errors
    /// The manifest contradicts itself.
    pub fn resume(manifest: AdapterManifest, partial: &[u8]) -> Result<Self, ManifestError> {
        let mut assembly = Self::new(manifest)?;
        for index in 0..assembly.have.len() {
            let chunk = assembly.manifest.range(index).and_then(|range| partial.get(range));
            if let Some(chunk) = chunk {
                // A chunk that does not hold is simply still missing.
                let _ = assembly.put(index, chunk);
            }
        }
        Ok(assembly)
    }

    /// The manifest.
    pub fn manifest(&self) -> &AdapterManifest {
        &self.manifest
    }

    /// Indices of the chunks that are not here yet, in order.
    pub fn missing(&self) -> impl Iterator<Item = usize> + '_ {
        self.have.iter().enumerate().filter(|(_, have)| !**have).map(|(index, _)| index)
    }

    /// Whether every chunk is here.
    pub fn is_complete(&self) -> bool {
        self.have.iter().all(|have| *have)
    }

    /// Keeps a chunk if it is what the manifest promised.
    ///
    /// # Errors
    /// No such chunk, or other bytes than promised; the assembly is unchanged then.
    pub fn put(&mut self, index: usize, chunk: &[u8]) -> Result<(), ManifestError> {
        self.put_hashed(index, chunk, Digest::of(chunk))
    }

    /// The same for a chunk whose digest was just computed from its bytes.
    pub(crate) fn put_hashed(
        &mut self,
        index: usize,
        chunk: &[u8],
        digest: Digest,
    ) -> Result<(), ManifestError> {
        let adapter = self.manifest.adapter;
        let chunks = self.have.len();
        let no_such = || ManifestError::NoSuchChunk { adapter, chunk: index, chunks };
        let range = self.manifest.range(index).ok_or_else(no_such)?;
        let want = self.manifest.chunks.get(index).ok_or_else(no_such)?;
        if chunk.len() != range.len() || digest != *want {
            return Err(ManifestError::Chunk { adapter, chunk: index });
        }
        self.bytes[range].copy_from_slice(chunk);
        self.have[index] = true;
        Ok(())
    }

    /// The adapter's bytes, the total hash verified.
    ///
    /// # Errors
    /// Chunks are missing, or the manifest contradicts itself.
    pub fn finish(self) -> Result<Vec<u8>, ManifestError> {
        let missing = self.missing().count();
        if missing > 0 {
            return Err(ManifestError::Incomplete {
                adapter: self.manifest.adapter,
                missing,
                chunks: self.have.len(),
            });
        }
        let got = Digest::of(&self.bytes);
        if got == self.manifest.adapter {
            Ok(self.bytes)
        } else {
            Err(ManifestError::Total { want: self.manifest.adapter, got })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adapter() -> (AdapterManifest, Vec<u8>) {
        let bytes: Vec<u8> = (0..CHUNK_LEN * 2 + 5).map(|i| (i % 251) as u8).collect();
        let manifest = AdapterManifest::build(3, &Digest::of(b"base"), &bytes).expect("an adapter");
        (manifest, bytes)
    }

    #[test]
    fn chunks_in_any_order_give_the_same_bytes() {
        let (manifest, bytes) = adapter();
        assert_eq!(manifest.chunks.len(), 3);
        manifest.check_policy(&Digest::of(b"base")).expect("its own base");
        assert!(manifest.check_policy(&Digest::of(b"other")).is_err());
        let mut assembly = Assembly::new(manifest.clone()).expect("sound");
        for index in [2, 0, 1] {
            let range = manifest.range(index).expect("exists");
            assembly.put(index, &bytes[range]).expect("as promised");
        }
        assert_eq!(assembly.finish().expect("whole"), bytes);
    }

    #[test]
    fn a_chunk_with_one_flipped_bit_is_not_kept() {
        let (manifest, bytes) = adapter();
        let mut assembly = Assembly::new(manifest).expect("sound");
        let mut chunk = bytes[..CHUNK_LEN].to_vec();
        chunk[17] ^= 1;
        assert!(matches!(assembly.put(0, &chunk), Err(ManifestError::Chunk { chunk: 0, .. })));
        assert!(matches!(assembly.put(0, &bytes[..9]), Err(ManifestError::Chunk { .. })));
        assert!(matches!(assembly.put(3, &[]), Err(ManifestError::NoSuchChunk { .. })));
        assert_eq!(assembly.missing().collect::<Vec<_>>(), [0, 1, 2]);
        assert!(matches!(assembly.finish(), Err(ManifestError::Incomplete { missing: 3, .. })));
    }

    #[test]
    fn a_broken_transfer_resumes_with_the_chunks_that_hold() {
        let (manifest, mut bytes) = adapter();
        bytes[0] ^= 1;
        let assembly = Assembly::resume(manifest, &bytes[..CHUNK_LEN * 2 + 1]).expect("sound");
        assert_eq!(assembly.missing().collect::<Vec<_>>(), [0, 2]);
    }

    #[test]
    fn a_manifest_whose_total_contradicts_its_chunks_is_caught() {
        let (mut manifest, bytes) = adapter();
        manifest.adapter = Digest::of(b"something else");
        let assembly = Assembly::resume(manifest, &bytes).expect("sound");
        assert!(matches!(assembly.finish(), Err(ManifestError::Total { .. })));
    }

    #[test]
    fn lengths_and_chunk_counts_must_agree() {
        let (mut manifest, _) = adapter();
        manifest.bytes += CHUNK_LEN as u64;
        assert!(matches!(manifest.check(), Err(ManifestError::ChunkCount { .. })));
        manifest.bytes = u64::MAX;
        assert!(matches!(manifest.check(), Err(ManifestError::TooLarge(_))));
        assert_eq!(AdapterManifest::build(0, &Digest([0; 32]), &[]), Err(ManifestError::Empty));
    }
}
