//! The learner as an actor sees it: one receiver, any number of senders, and the outbox behind them.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use quinn::{Endpoint, SendStream};
use tokio::{
    sync::{Notify, mpsc},
    task::JoinSet,
    time::timeout,
};

use super::{
    LinkConfig,
    close::{CloseCode, LinkError, close},
    dial::Dialer,
    fetch::{self, FetchError, Sources},
    link::{CONTROL_QUEUE, Line, WRITE_QUEUE, read_control, too_long, write_control},
    parent::Parents,
    relay,
    stream::{FrameReader, pack, write_error, write_frame},
};
use crate::{
    Assembly, EpisodeId, FromActor, FromLearner, LeaseAttempt, PolicyDigest, Welcome, WireError,
    frame::{Frame, Header, Kind},
    session::{ActorEvent, ActorSession, Violation},
    wire,
};

/// How long a leaving actor waits until its last words are heard.
const LINGER: Duration = Duration::from_secs(2);

/// What outlives an actor's connections.
#[derive(Debug, Default)]
pub(super) struct Shared {
    session: Mutex<ActorSession>,
    submitted: Notify,
    /// Adapter bytes that came from other actors.
    taken: Arc<AtomicU64>,
}

impl Shared {
    pub(super) fn session(&self) -> MutexGuard<'_, ActorSession> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn taken_from_actors(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    pub(super) fn submit(&self, body: Bytes) -> Result<EpisodeId, WireError> {
        let id = self.session().submit(body)?;
        self.submitted.notify_one();
        Ok(id)
    }
}

/// What a link starts from.
pub(super) struct LinkStart {
    pub(super) welcome: Welcome,
    pub(super) endpoint: Endpoint,
    pub(super) line: Line,
    pub(super) epoch: u64,
    pub(super) shared: Arc<Shared>,
    pub(super) config: LinkConfig,
    pub(super) dialer: Arc<Dialer>,
    pub(super) relay: Option<Arc<relay::Shared>>,
}

/// The actor's end of a link. Dropping it closes the connection; the outbox stays with the endpoint.
pub struct LearnerLink {
    welcome: Welcome,
    sender: ToLearner,
    control: mpsc::Receiver<Frame>,
    endpoint: Endpoint,
    finished: bool,
    // Dropped last: its tasks end with the link.
    _tasks: JoinSet<()>,
}

impl std::fmt::Debug for LearnerLink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LearnerLink({})", self.sender.line.connection.remote_address())
    }
}

impl LearnerLink {
    pub(super) fn start(start: LinkStart, (send, reader): (SendStream, FrameReader)) -> Self {
        let LinkStart { welcome, endpoint, line, epoch, shared, config, dialer, relay } = start;
        let (control_tx, control) = mpsc::channel(CONTROL_QUEUE);
        let (queue, queued) = mpsc::channel(WRITE_QUEUE);
        let parents = Parents::new(dialer, config.clone(), queue.clone(), shared.taken.clone());
        if let Some(relay) = &relay {
            // Whom this learner names is not said yet.
            relay.name(BTreeSet::new());
        }
        let parents = Arc::new(parents);
        let sender = ToLearner { line, epoch, shared, queue, config, parents, relay };
        let mut tasks = JoinSet::new();
        tasks.spawn(write_control(sender.line.clone(), send, queued));
        tasks.spawn(read_control(sender.line.clone(), reader, control_tx));
        tasks.spawn(send_episodes(sender.line.clone(), epoch, sender.shared.clone()));
        Self { welcome, sender, control, endpoint, finished: false, _tasks: tasks }
    }

    /// The run and its settings.
    pub fn welcome(&self) -> &Welcome {
        &self.welcome
    }

    /// Bytes of UDP payload that arrived on this link.
    pub fn received_bytes(&self) -> u64 {
        self.sender.line.connection.stats().udp_rx.bytes
    }

    /// A handle that can be kept and used elsewhere.
    pub fn sender(&self) -> ToLearner {
        self.sender.clone()
    }

    /// The next message. Cancel-safe. What arrived before the link ended is given before the error.
    /// Acknowledgements have taken effect on the outbox when they are returned. A learner that
    /// closed because its run is over gives [`FromLearner::Finish`] in any case. From whom adapters come and
    /// to whom they go on is settled here, and not given.
    ///
    /// # Errors
    /// The link has ended; [`LinkError::may_retry`] says whether to connect again.
    pub async fn recv(&mut self) -> Result<FromLearner, LinkError> {
        loop {
            let Some(frame) = self.control.recv().await else {
                return match self.sender.line.failure() {
                    LinkError::Closed { code: CloseCode::Finished, reason } if !self.finished => {
                        self.finished = true;
                        Ok(FromLearner::Finish { reason })
                    }
                    failure => Err(failure),
                };
            };
            let event = self.sender.shared.session().receive(self.sender.epoch, frame);
            match event {
                Ok(ActorEvent::Message(FromLearner::Parent(parent))) => {
                    self.sender.parents.set(parent);
                }
                Ok(ActorEvent::Message(FromLearner::Children(children))) => {
                    if let Some(relay) = &self.sender.relay {
                        relay.name(children);
                    }
                }
                Ok(ActorEvent::Message(message)) => {
                    self.finished |= matches!(message, FromLearner::Finish { .. });
                    return Ok(message);
                }
                Ok(ActorEvent::Welcome(_) | ActorEvent::Refused(_)) => {
                    let again = Violation::Stream("a second answer to the hello");
                    return Err(self.violated(again));
                }
                Err(violation) => return Err(self.violated(violation)),
            }
        }
    }

    fn violated(&self, violation: Violation) -> LinkError {
        self.sender.line.fail(violation.into());
        self.sender.line.failure()
    }

    /// Says good-bye with the leases that go back, and waits up to two seconds until the learner
    /// has heard it. To lose nothing, wait first until nothing is unacknowledged.
    pub async fn leave(self, returned: Vec<LeaseAttempt>) {
        if self.sender.send(FromActor::Leave { returned }).await.is_ok() {
            let _ = timeout(LINGER, self.sender.line.connection.closed()).await;
        }
        self.close().await;
    }

    /// Closes the link and waits up to two seconds until the learner knows.
    pub async fn close(self) {
        close(&self.sender.line.connection, CloseCode::Done, "the actor left");
        let _ = timeout(LINGER, self.endpoint.wait_idle()).await;
    }
}

impl Drop for LearnerLink {
    fn drop(&mut self) {
        close(&self.sender.line.connection, CloseCode::Done, "the actor left");
        self.sender.parents.set(None);
        self.sender.shared.session().disconnect(self.sender.epoch);
    }
}

/// Sends to the learner. Cheap to clone.
#[derive(Clone)]
pub struct ToLearner {
    line: Line,
    epoch: u64,
    shared: Arc<Shared>,
    queue: mpsc::Sender<Bytes>,
    config: LinkConfig,
    parents: Arc<Parents>,
    relay: Option<Arc<relay::Shared>>,
}

impl std::fmt::Debug for ToLearner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ToLearner({})", self.line.connection.remote_address())
    }
}

impl ToLearner {
    /// Keeps an encoded episode until it is acknowledged and sends it, now or on a later link. Never
    /// waits: bound what is unacknowledged before playing more.
    ///
    /// # Errors
    /// The body is longer than any episode may be.
    pub fn submit(&self, body: impl Into<Bytes>) -> Result<EpisodeId, WireError> {
        self.shared.submit(body.into())
    }

    /// Says how many more episodes could start now. Call it when every lease that
    /// [`LearnerLink::recv`] returned is counted.
    ///
    /// # Errors
    /// The link has ended.
    pub async fn ready(&self, free: u32) -> Result<(), LinkError> {
        let message = self.shared.session().ready(free);
        self.send(message).await
    }

    /// Gives a lease back that could not be played to its end.
    ///
    /// # Errors
    /// The link has ended.
    pub async fn lease_failed(&self, lease: LeaseAttempt, reason: &str) -> Result<(), LinkError> {
        self.send(FromActor::LeaseFailed { lease, reason: reason.to_owned() }).await
    }

    /// Says that new episodes can be played with a policy.
    ///
    /// # Errors
    /// The link has ended.
    pub async fn holding(&self, policy: PolicyDigest) -> Result<(), LinkError> {
        self.send(FromActor::Holding { policy }).await
    }

    /// Asks for no more grants.
    ///
    /// # Errors
    /// The link has ended.
    pub async fn drain(&self) -> Result<(), LinkError> {
        self.send(FromActor::Drain).await
    }

    /// Fetches what an assembly lacks, some chunks at a time, each verified before it is kept: from the
    /// actor that the learner named, if it did, and from the learner what that does not give. After
    /// an error the assembly keeps what arrived: call again on the next link to go on.
    ///
    /// # Errors
    /// The learner serves that policy no more, sent other bytes, or the link has ended.
    pub async fn fetch(&self, assembly: &mut Assembly) -> Result<(), FetchError> {
        let sources = Sources {
            learner: &self.line.connection,
            parents: &self.parents,
            relay: self.relay.as_deref(),
        };
        fetch::fetch(&sources, assembly, &self.config).await
    }

    /// An adapter that was fetched is whole: an actor that passes it on serves it from these bytes, and lets
    /// go of what it kept until now.
    pub fn fetched(&self, policy: &PolicyDigest, bytes: &Bytes) {
        if let Some(relay) = &self.relay {
            relay.shelf.whole(policy, bytes);
        }
    }

    async fn send(&self, message: FromActor) -> Result<(), LinkError> {
        let (kind, body) = wire::encode_from_actor(&message).map_err(LinkError::Unsendable)?;
        let frame = pack(kind, &body).map_err(too_long)?;
        self.queue.send(frame).await.map_err(|_| self.line.failure())
    }
}

/// Sends the outbox in order, each episode on a stream of its own, and then what is submitted.
async fn send_episodes(line: Line, epoch: u64, shared: Arc<Shared>) {
    loop {
        let next = shared.session().next_to_send(epoch);
        let Some((id, body)) = next else {
            shared.submitted.notified().await;
            continue;
        };
        if let Err(error) = send_episode(&line, id, body).await {
            line.fail(error);
            return;
        }
    }
}

async fn send_episode(line: &Line, id: EpisodeId, body: Bytes) -> Result<(), LinkError> {
    let header = Header::with_digest(Kind::Episode, body.len(), id.0).map_err(too_long)?;
    let mut stream = line.connection.open_uni().await?;
    write_frame(&mut stream, header, body).await?;
    stream.finish().map_err(|_| write_error(quinn::WriteError::ClosedStream))
}
