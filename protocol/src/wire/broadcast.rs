//! What announces an adapter and what asks for its chunks, on the wire.

use serde::{Deserialize, Serialize};

use super::{Checker, WireError, decode_body, encode_body};
use crate::{AdapterManifest, DeltaChunk, DeltaManifest, Digest, PolicyDigest, message::Fetch};

#[derive(Serialize, Deserialize)]
struct ManifestWire {
    step: u64,
    policy: Digest,
    adapter: Digest,
    bytes: u64,
    chunks: Vec<Digest>,
    /// Nothing, or the policy that the deltas start from.
    base: Vec<Digest>,
    /// With a base, for each chunk the length of its delta; 0 where it has none.
    delta_bytes: Vec<u32>,
    /// Of those that have one.
    deltas: Vec<Digest>,
}

#[derive(Serialize, Deserialize)]
struct FetchWire {
    policy: Digest,
    chunk: u32,
    delta: u8,
}

/// Encodes an [`AdapterManifest`].
///
/// # Errors
/// It contradicts itself.
pub fn encode_manifest(manifest: &AdapterManifest) -> Result<Vec<u8>, WireError> {
    check_manifest(manifest)?;
    let chunks = manifest.delta.as_ref().map(|delta| delta.chunks.as_slice()).unwrap_or_default();
    let wire = ManifestWire {
        step: manifest.step,
        policy: manifest.policy.0,
        adapter: manifest.adapter,
        bytes: manifest.bytes,
        chunks: manifest.chunks.clone(),
        base: manifest.delta.iter().map(|delta| delta.base.0).collect(),
        delta_bytes: chunks.iter().map(|chunk| chunk.map_or(0, |chunk| chunk.bytes)).collect(),
        deltas: chunks.iter().flatten().map(|chunk| chunk.digest).collect(),
    };
    encode_body("announce", &wire)
}

/// Decodes an [`AdapterManifest`].
///
/// # Errors
/// The body is none.
pub fn decode_manifest(body: &[u8]) -> Result<AdapterManifest, WireError> {
    let check = Checker("announce");
    let wire: ManifestWire = decode_body("announce", body)?;
    let delta = match wire.base.as_slice() {
        [] => {
            check.column("delta_bytes", wire.delta_bytes.len(), 0)?;
            check.column("deltas", wire.deltas.len(), 0)?;
            None
        }
        [base] => {
            let with = wire.delta_bytes.iter().filter(|bytes| **bytes > 0).count();
            check.column("deltas", wire.deltas.len(), with)?;
            let mut digests = wire.deltas.into_iter();
            let chunks = wire.delta_bytes.into_iter().map(|bytes| match bytes {
                0 => None,
                _ => digests.next().map(|digest| DeltaChunk { digest, bytes }),
            });
            Some(DeltaManifest { base: PolicyDigest(*base), chunks: chunks.collect() })
        }
        several => return check.fail("base", format!("{} policies", several.len())),
    };
    let manifest = AdapterManifest {
        step: wire.step,
        policy: PolicyDigest(wire.policy),
        adapter: wire.adapter,
        bytes: wire.bytes,
        chunks: wire.chunks,
        delta,
    };
    check_manifest(&manifest)?;
    Ok(manifest)
}

fn check_manifest(manifest: &AdapterManifest) -> Result<(), WireError> {
    manifest.check().or_else(|error| Checker("announce").fail("manifest", error.to_string()))
}

/// Encodes a [`Fetch`].
///
/// # Errors
/// None in practice.
pub fn encode_fetch(fetch: &Fetch) -> Result<Vec<u8>, WireError> {
    let Fetch { policy, chunk, delta } = *fetch;
    encode_body("fetch", &FetchWire { policy: policy.0, chunk, delta: u8::from(delta) })
}

/// Decodes a [`Fetch`].
///
/// # Errors
/// The body is none.
pub fn decode_fetch(body: &[u8]) -> Result<Fetch, WireError> {
    let wire: FetchWire = decode_body("fetch", body)?;
    let delta = Checker("fetch").flag("delta", wire.delta)?;
    Ok(Fetch { policy: PolicyDigest(wire.policy), chunk: wire.chunk, delta })
}
