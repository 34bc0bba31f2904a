//! Adapter chunks: asked for one by one on streams of their own, answered with raw bytes.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use quinn::{Connection, RecvStream, SendStream, VarInt};
use tokio::{
    sync::{Semaphore, SemaphorePermit},
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use super::{
    LinkConfig,
    close::LinkError,
    shelf::{AdapterChunk, AdapterStore},
    stream::{FrameReader, pack, write_error, write_frame},
};
use crate::{
    Assembly, Digest, Fetch, ManifestError, PolicyDigest,
    frame::{Channel, Frame, Header, Kind},
    session::Violation,
    wire,
};

/// The reset code of a chunk that is not there, or no longer.
const GONE: u32 = 1;
/// The reset code of a chunk that was not taken in time.
const SLOW: u32 = 2;
/// Chunks that one link is sent at a time.
pub(super) const LINK_PLACES: usize = 4;
/// A chunk that is not through after this long gives its place to the next one and goes on without,
/// and so do the link's later ones until one is quicker: whoever takes so long takes little of the line.
const PLACE: Duration = Duration::from_secs(1);

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

/// Adapter bytes that peers took, since the endpoint started.
#[derive(Debug, Default)]
pub struct Served {
    delta: AtomicU64,
    whole: AtomicU64,
}

impl Served {
    /// As deltas.
    pub fn delta(&self) -> u64 {
        self.delta.load(Ordering::Relaxed)
    }

    /// As whole chunks.
    pub fn whole(&self) -> u64 {
        self.whole.load(Ordering::Relaxed)
    }
}

/// What the links of one endpoint serve from, and how much of it at a time.
pub(super) struct Serving {
    store: Arc<dyn AdapterStore>,
    served: Arc<Served>,
    places: Arc<Semaphore>,
    /// A request and its answer each have this long.
    patience: Duration,
}

impl Serving {
    /// At most `places` chunks at a time, over all links, but for those that go slowly.
    pub(super) fn new(store: Arc<dyn AdapterStore>, places: usize, config: &LinkConfig) -> Self {
        let places = places.clamp(1, Semaphore::MAX_PERMITS);
        let places = Arc::new(Semaphore::new(places));
        Self { store, served: Arc::default(), places, patience: config.frame }
    }

    /// What was taken.
    pub(super) fn served(&self) -> Arc<Served> {
        self.served.clone()
    }

    /// What one link serves from.
    pub(super) fn link(&self) -> LinkServing {
        let Self { store, served, places, patience } = self;
        LinkServing(Arc::new(Link {
            store: store.clone(),
            served: served.clone(),
            places: places.clone(),
            own: Semaphore::new(LINK_PLACES),
            slow: AtomicBool::new(false),
            patience: *patience,
        }))
    }
}

struct Link {
    store: Arc<dyn AdapterStore>,
    served: Arc<Served>,
    places: Arc<Semaphore>,
    own: Semaphore,
    slow: AtomicBool,
    patience: Duration,
}

/// The same for one link.
#[derive(Clone)]
pub(super) struct LinkServing(Arc<Link>);

impl LinkServing {
    /// Answers one request.
    pub(super) async fn answer(&self, send: SendStream, recv: RecvStream) -> Result<(), LinkError> {
        let reader = FrameReader::new(recv, Channel::FetchRequest, self.0.patience);
        let frame = match reader.only().await {
            Ok(frame) => frame,
            // The actor may drop a fetch, for a newer adapter, before it has asked.
            Err(LinkError::Violation(Violation::Stream(_) | Violation::Reset)) => return Ok(()),
            Err(error) => return Err(error),
        };
        let fetch = wire::decode_fetch(&frame.body).map_err(Violation::from)?;
        self.serve(send, &fetch).await
    }

    /// A place among all links' chunks, where this link is none of the slow ones.
    async fn place(&self) -> Result<Option<SemaphorePermit<'_>>, LinkError> {
        let slow = || self.0.slow.load(Ordering::Relaxed);
        if slow() {
            return Ok(None);
        }
        let place = self.0.places.acquire().await;
        let place = place.map_err(|closed| LinkError::Transport(closed.to_string()))?;
        Ok((!slow()).then_some(place))
    }

    async fn serve(&self, mut send: SendStream, fetch: &Fetch) -> Result<(), LinkError> {
        let _own = self.0.own.acquire().await;
        let place = self.place().await?;
        let Some(AdapterChunk { bytes, digest, mut served }) = self.0.store.chunk(fetch) else {
            // An error means that the peer has lost interest.
            let _ = send.reset(VarInt::from_u32(GONE));
            return Ok(());
        };
        let length = bytes.len() as u64;
        let sent = {
            let sending = timeout(self.0.patience, hand_over(&mut send, bytes, digest));
            tokio::pin!(sending);
            let began = Instant::now();
            let mut place = place;
            let sent = loop {
                tokio::select! {
                    biased;
                    _ = served.changed() => break Err(GONE),
                    sent = &mut sending => break sent.map_err(|_| SLOW),
                    () = sleep(PLACE), if place.is_some() => {
                        place = None;
                        self.0.slow.store(true, Ordering::Relaxed);
                    }
                }
            };
            if matches!(sent, Ok(Ok(()))) && began.elapsed() < PLACE {
                self.0.slow.store(false, Ordering::Relaxed);
            }
            sent
        };
        match sent {
            Err(code) => {
                let _ = send.reset(VarInt::from_u32(code));
                Ok(())
            }
            Ok(Ok(())) => {
                let Served { delta, whole } = self.0.served.as_ref();
                let taken = if fetch.delta { delta } else { whole };
                taken.fetch_add(length, Ordering::Relaxed);
                Ok(())
            }
            // Or when it was answered.
            Ok(Err(LinkError::Violation(_))) => Ok(()),
            Ok(Err(error)) => Err(error),
        }
    }
}

/// Sends a chunk and waits until the peer has it: until then its bytes are in memory here.
async fn hand_over(send: &mut SendStream, bytes: Bytes, digest: Digest) -> Result<(), LinkError> {
    let header = Header::with_digest(Kind::Chunk, bytes.len(), digest);
    let header = header.map_err(|error| LinkError::Transport(error.to_string()))?;
    write_frame(send, header, bytes).await?;
    let _ = send.finish();
    // An error is the connection's end, which its other tasks report.
    let _ = send.stopped().await;
    Ok(())
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

/// Fetches what an assembly lacks, several chunks at a time, as deltas where it can, each verified
/// before it is kept.
pub(super) async fn fetch(
    connection: &Connection,
    assembly: &mut Assembly,
    config: &LinkConfig,
) -> Result<(), FetchError> {
    let policy = assembly.manifest().policy;
    let mut wanted: Vec<(usize, bool)> =
        assembly.missing().map(|index| (index, assembly.delta(index).is_some())).collect();
    wanted.reverse();
    let mut running = JoinSet::new();
    loop {
        while running.len() < config.fetch_parallel.max(1) {
            let Some((index, delta)) = wanted.pop() else { break };
            let chunk = u32::try_from(index).unwrap_or(u32::MAX); // at most 1024 chunks
            let asked = ask(connection.clone(), Fetch { policy, chunk, delta }, config.clone());
            running.spawn(async move { (index, delta, asked.await) });
        }
        match running.join_next().await {
            None => return Ok(()),
            Some(Ok((index, true, Ok(frame)))) => {
                // What a delta does not make can be had whole.
                if let Err(error) = assembly.put_hashed_delta(index, &frame.body, frame.digest) {
                    tracing::warn!("{error}; fetching it whole");
                    wanted.push((index, false));
                }
            }
            Some(Ok((index, true, Err(FetchError::Gone(_))))) => wanted.push((index, false)),
            Some(Ok((index, _, frame))) => {
                let frame = frame?;
                assembly.put_hashed(index, &frame.body, frame.digest)?;
            }
            Some(Err(failed)) => return Err(LinkError::Transport(failed.to_string()).into()),
        }
    }
}
