//! Adapter chunks: asked for one by one on streams of their own, answered with raw bytes.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use bytes::Bytes;
use quinn::{Connection, RecvStream, SendStream, VarInt};
use tokio::task::JoinSet;

use super::{
    LinkConfig,
    close::LinkError,
    stream::{FrameReader, pack, write_error, write_frame},
};
use crate::{
    AdapterManifest, Assembly, Digest, Fetch, ManifestError, PolicyDigest,
    frame::{Channel, Frame, Header, Kind},
    session::Violation,
    wire,
};

/// The reset code of a chunk that is not there.
const GONE: u32 = 1;

/// One chunk and its digest, known already so that serving costs no hashing.
#[derive(Clone, Debug)]
pub struct AdapterChunk {
    /// The bytes, shared and not copied.
    pub bytes: Bytes,
    /// Their SHA-256.
    pub digest: Digest,
}

/// Where a learner's links find chunks to serve. Called on the network's threads: it must not block.
pub trait AdapterStore: Send + Sync + 'static {
    /// A chunk of a policy's adapter, if that adapter is still served.
    fn chunk(&self, policy: &PolicyDigest, index: u32) -> Option<AdapterChunk>;
}

/// Adapters served from memory.
#[derive(Default)]
pub struct AdapterShelf(Mutex<HashMap<PolicyDigest, (AdapterManifest, Bytes)>>);

impl std::fmt::Debug for AdapterShelf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AdapterShelf({} adapters)", self.lock().len())
    }
}

impl AdapterShelf {
    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<PolicyDigest, (AdapterManifest, Bytes)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves an adapter: announce its manifest afterwards.
    pub fn put(&self, manifest: AdapterManifest, bytes: impl Into<Bytes>) {
        self.lock().insert(manifest.policy, (manifest, bytes.into()));
    }

    /// Stops serving the policies that `keep` refuses.
    pub fn retain(&self, mut keep: impl FnMut(&AdapterManifest) -> bool) {
        self.lock().retain(|_, (manifest, _)| keep(manifest));
    }
}

impl AdapterStore for AdapterShelf {
    fn chunk(&self, policy: &PolicyDigest, index: u32) -> Option<AdapterChunk> {
        let shelf = self.lock();
        let (manifest, bytes) = shelf.get(policy)?;
        let index = usize::try_from(index).ok()?;
        let range = manifest.range(index).filter(|range| range.end <= bytes.len())?;
        Some(AdapterChunk { bytes: bytes.slice(range), digest: *manifest.chunks.get(index)? })
    }
}

/// Why an adapter did not arrive. Chunks that did are kept by the assembly.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FetchError {
    /// The learner serves this policy no more: a newer one was announced, or will be.
    #[error("adapter of policy {0}: no longer served; wait for a newer announcement")]
    Gone(PolicyDigest),
    /// A chunk is not what the manifest promised.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// The link failed; fetch the rest after reconnecting.
    #[error(transparent)]
    Link(#[from] LinkError),
}

/// Answers one request.
pub(super) async fn serve(
    store: Arc<dyn AdapterStore>,
    mut send: SendStream,
    recv: RecvStream,
    config: &LinkConfig,
) -> Result<(), LinkError> {
    let frame = match FrameReader::new(recv, Channel::FetchRequest, config.frame).only().await {
        Ok(frame) => frame,
        // The actor may drop a fetch, for a newer adapter, before it has asked.
        Err(LinkError::Violation(Violation::Stream(_) | Violation::Reset)) => return Ok(()),
        Err(error) => return Err(error),
    };
    let fetch = wire::decode_fetch(&frame.body).map_err(Violation::from)?;
    let Some(chunk) = store.chunk(&fetch.policy, fetch.chunk) else {
        // An error means that the peer has lost interest.
        let _ = send.reset(VarInt::from_u32(GONE));
        return Ok(());
    };
    let header = Header::with_digest(Kind::Chunk, chunk.bytes.len(), chunk.digest);
    let header = header.map_err(|error| LinkError::Transport(error.to_string()))?;
    match write_frame(&mut send, header, chunk.bytes).await {
        Ok(()) => {
            let _ = send.finish();
            Ok(())
        }
        // Or when it was answered.
        Err(LinkError::Violation(_)) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Fetches one chunk.
async fn ask(
    connection: Connection,
    fetch: Fetch,
    config: LinkConfig,
) -> Result<Frame, FetchError> {
    let body = wire::encode_fetch(&fetch).map_err(LinkError::Unsendable)?;
    let request = pack(Kind::Fetch, &body).map_err(|e| LinkError::Transport(e.to_string()))?;
    let (mut send, recv) = connection.open_bi().await.map_err(LinkError::from)?;
    send.write_chunk(request).await.map_err(write_error)?;
    let _ = send.finish();
    match FrameReader::new(recv, Channel::FetchReply, config.frame).only().await {
        Err(LinkError::Violation(Violation::Reset)) => Err(FetchError::Gone(fetch.policy)),
        reply => Ok(reply?),
    }
}

/// Fetches what an assembly lacks, several chunks at a time, each verified before it is kept.
pub(super) async fn fetch(
    connection: &Connection,
    assembly: &mut Assembly,
    config: &LinkConfig,
) -> Result<(), FetchError> {
    let policy = assembly.manifest().policy;
    let wanted: Vec<usize> = assembly.missing().collect();
    let mut wanted = wanted.into_iter();
    let mut running = JoinSet::new();
    loop {
        while running.len() < config.fetch_parallel.max(1) {
            let Some(index) = wanted.next() else { break };
            let chunk = u32::try_from(index).unwrap_or(u32::MAX); // at most 1024 chunks
            let asked = ask(connection.clone(), Fetch { policy, chunk }, config.clone());
            running.spawn(async move { (index, asked.await) });
        }
        match running.join_next().await {
            None => return Ok(()),
            Some(Ok((index, frame))) => {
                let frame = frame?;
                assembly.put_hashed(index, &frame.body, frame.digest)?;
            }
            Some(Err(failed)) => return Err(LinkError::Transport(failed.to_string()).into()),
        }
    }
}
