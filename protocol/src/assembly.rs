//! An adapter on its way, held to its manifest's promise.
//!
//! Chunks may come from anyone in any order, whole or as deltas; each is verified before it is kept,
//! so a broken transfer goes on where it stopped and nobody on the way needs to be trusted.

use bytes::Bytes;

use crate::{AdapterManifest, DeltaChunk, Digest, ManifestError, PolicyDigest, delta};

/// An adapter on its way: which chunks are here, and the bytes so far.
pub struct Assembly {
    manifest: AdapterManifest,
    bytes: Vec<u8>,
    have: Vec<bool>,
    /// The adapter that the manifest's deltas start from, where it is here.
    base: Option<Bytes>,
    /// Bytes that were kept, of deltas and of whole chunks.
    received: (u64, u64),
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
        Ok(Self { manifest, bytes: vec![0; len], have, base: None, received: (0, 0) })
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
                let _ = assembly.keep(index, chunk, Digest::of(chunk));
            }
        }
        Ok(assembly)
    }

    /// The same with an adapter that is here already: its deltas can be taken where they start from it.
    #[must_use]
    pub fn with_base(mut self, policy: &PolicyDigest, bytes: Bytes) -> Self {
        let fits = self.manifest.delta.as_ref().is_some_and(|delta| delta.base == *policy);
        if fits && bytes.len() == self.bytes.len() {
            self.base = Some(bytes);
        }
        self
    }

    /// The delta of a chunk, where there is one and its base is here.
    pub fn delta(&self, index: usize) -> Option<DeltaChunk> {
        self.base.as_ref()?;
        *self.manifest.delta.as_ref()?.chunks.get(index)?
    }

    /// The manifest.
    pub fn manifest(&self) -> &AdapterManifest {
        &self.manifest
    }

    /// Indices of the chunks that are not here yet, in order.
    pub fn missing(&self) -> impl Iterator<Item = usize> + '_ {
        self.have.iter().enumerate().filter(|(_, have)| !**have).map(|(index, _)| index)
    }

    /// Bytes that were received and kept, of deltas and of whole chunks.
    pub fn received(&self) -> (u64, u64) {
        self.received
    }

    /// A chunk that is here.
    pub(crate) fn chunk(&self, index: usize) -> Option<&[u8]> {
        self.have.get(index).filter(|have| **have)?;
        self.bytes.get(self.manifest.range(index)?)
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
        self.keep(index, chunk, digest)?;
        self.received.1 += chunk.len() as u64;
        Ok(())
    }

    fn keep(&mut self, index: usize, chunk: &[u8], digest: Digest) -> Result<(), ManifestError> {
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

    /// Keeps a chunk whose delta was received, if both are what the manifest promised.
    ///
    /// # Errors
    /// There is no delta of that chunk or its base is not here, or the bytes are others than promised;
    /// the assembly is unchanged then, and the chunk can be had whole.
    pub fn put_delta(&mut self, index: usize, bytes: &[u8]) -> Result<(), ManifestError> {
        self.put_hashed_delta(index, bytes, Digest::of(bytes))
    }

    /// The same for a delta whose digest was just computed from its bytes.
    pub(crate) fn put_hashed_delta(
        &mut self,
        index: usize,
        bytes: &[u8],
        digest: Digest,
    ) -> Result<(), ManifestError> {
        let (adapter, chunks) = (self.manifest.adapter, self.have.len());
        let no_such = || ManifestError::NoSuchChunk { adapter, chunk: index, chunks };
        let (Some(delta), Some(range)) = (self.delta(index), self.manifest.range(index)) else {
            return Err(no_such());
        };
        if digest != delta.digest || bytes.len() != delta.bytes as usize {
            return Err(ManifestError::Chunk { adapter, chunk: index });
        }
        let base = self.base.as_ref().and_then(|base| base.get(range)).ok_or_else(no_such)?;
        let chunk = delta::decode(bytes, base).map_err(|source| ManifestError::Undelta {
            adapter,
            chunk: index,
            source,
        })?;
        self.keep(index, &chunk, Digest::of(&chunk))?;
        self.received.0 += bytes.len() as u64;
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
    use crate::frame::CHUNK_LEN;

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
}
