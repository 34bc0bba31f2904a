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
    time::{Instant, sleep, timeout, timeout_at},
};

use super::{
    LinkConfig,
    close::LinkError,
    link::Line,
    parent::{ParentLink, Parents},
    relay,
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

    /// Waits while a chunk is on its way to here, for as long as the peer does.
    async fn await_chunk(&self, send: &mut SendStream, fetch: &Fetch) {
        let began = Instant::now();
        while let Some(mut coming) = self.0.store.coming(fetch) {
            let until = began + coming.patience.min(self.0.patience);
            tokio::select! {
                news = timeout_at(until, coming.news.changed()) => {
                    if !matches!(news, Ok(Ok(()))) {
                        return;
                    }
                }
                _ = send.stopped() => return,
            }
        }
    }

    async fn serve(&self, mut send: SendStream, fetch: &Fetch) -> Result<(), LinkError> {
        self.await_chunk(&mut send, fetch).await;
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

/// Answers a link's requests until it ends.
pub(super) async fn serve_fetches(line: Line, serving: LinkServing) {
    // The stream limit bounds how many of one link run at a time.
    let mut running = JoinSet::new();
    loop {
        match line.connection.accept_bi().await {
            Ok((send, recv)) => {
                let (line, serving) = (line.clone(), serving.clone());
                running.spawn(async move {
                    if let Err(error) = serving.answer(send, recv).await {
                        line.fail(error);
                    }
                });
            }
            Err(error) => {
                line.fail(error.into());
                return;
            }
        }
        while running.try_join_next().is_some() {}
    }
}

/// Fetches one chunk.
pub(super) async fn ask(
    connection: Connection,
    fetch: Fetch,
    config: &LinkConfig,
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

/// Where chunks come from, and to whom they may go on.
pub(super) struct Sources<'a> {
    pub(super) learner: &'a Connection,
    pub(super) parents: &'a Parents,
    pub(super) relay: Option<&'a relay::Shared>,
}

/// A chunk that is not here.
struct Wanted {
    index: usize,
    delta: bool,
    /// The parent had its chance.
    learner: bool,
}

/// Fetches what an assembly lacks, several chunks at a time, as deltas where it can, each verified
/// before it is kept: from the parent where there is one, and from the learner what that does not give.
pub(super) async fn fetch(
    sources: &Sources<'_>,
    assembly: &mut Assembly,
    config: &LinkConfig,
) -> Result<(), FetchError> {
    let policy = assembly.manifest().policy;
    let passing = sources.relay.map(|relay| relay.shelf.begin(assembly));
    let missing = assembly.missing();
    let wanted = |index| Wanted { index, delta: assembly.delta(index).is_some(), learner: false };
    let mut queue: Vec<Wanted> = missing.map(wanted).collect();
    queue.reverse();
    // A parent that had not this adapter is not asked for more of it.
    let mut without: Option<Arc<ParentLink>> = None;
    let mut running = JoinSet::new();
    loop {
        while running.len() < config.fetch_parallel.max(1) {
            let Some(wanted) = queue.pop() else { break };
            let lacks =
                |it: &Arc<ParentLink>| without.as_ref().is_some_and(|no| Arc::ptr_eq(no, it));
            let parent = sources.parents.current();
            let parent = parent.filter(|parent| !wanted.learner && !lacks(parent));
            let chunk = u32::try_from(wanted.index).unwrap_or(u32::MAX); // at most 1024 chunks
            let fetch = Fetch { policy, chunk, delta: wanted.delta };
            let (learner, config) = (sources.learner.clone(), config.clone());
            running.spawn(async move {
                let answer = match &parent {
                    Some(parent) => parent.ask(fetch).await,
                    None => ask(learner, fetch, &config).await,
                };
                (wanted, parent, answer)
            });
        }
        let Some(answered) = running.join_next().await else { return Ok(()) };
        let (wanted, parent, answer) =
            answered.map_err(|failed| LinkError::Transport(failed.to_string()))?;
        let Wanted { index, delta, .. } = wanted;
        let frame = match (answer, &parent) {
            (Ok(frame), _) => frame,
            (Err(error), Some(parent)) => {
                match error {
                    FetchError::Gone(_) => without = Some(parent.clone()),
                    error => parent.fail(&error.to_string()),
                }
                let learner = !parent.is_retired();
                queue.push(Wanted { learner, ..wanted });
                continue;
            }
            // The learner has it whole.
            (Err(FetchError::Gone(_)), None) if delta => {
                queue.push(Wanted { index, delta: false, learner: true });
                continue;
            }
            (Err(error), None) => return Err(error),
        };
        let kept = match delta {
            true => assembly.put_hashed_delta(index, &frame.body, frame.digest),
            false => assembly.put_hashed(index, &frame.body, frame.digest),
        };
        match (kept, &parent) {
            (Ok(()), _) => {
                if parent.is_some() {
                    sources.parents.took(frame.body.len());
                }
                let Some(passing) = &passing else { continue };
                match assembly.chunk(index).filter(|_| delta) {
                    Some(chunk) => passing.keep_delta(index, frame.body.into(), chunk),
                    None => passing.keep(index, frame.body.into()),
                }
            }
            (Err(error @ ManifestError::Chunk { .. }), Some(parent)) => {
                parent.fail(&error.to_string());
                queue.push(Wanted { learner: true, ..wanted });
            }
            // What a delta does not make can be had whole.
            (Err(error), _) if delta => {
                tracing::warn!("{error}; fetching it whole");
                queue.push(Wanted { index, delta: false, learner: true });
            }
            (Err(error), _) => return Err(error.into()),
        }
    }
}
