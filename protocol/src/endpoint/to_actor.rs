//! An admitted actor as the learner sees it: one receiver, any number of senders.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use quinn::{Connection, SendStream};
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time::timeout,
};

use super::{
    LinkConfig,
    close::{CloseCode, LinkError, close},
    fetch::{LinkServing, serve_fetches},
    link::{CONTROL_QUEUE, Line, WRITE_QUEUE, read_control, too_long, write_control},
    links::{Links, tell_place},
    stream::{FrameReader, pack},
};
use crate::{
    ActorId, FromActor, FromLearner, Hello, LeaseAttempt, PolicyDigest,
    frame::{Channel, Frame},
    relay_tree::Assignment,
    session::{LearnerEvent, LearnerSession, Violation},
    wire,
};

/// Episodes that wait to be received, of up to 16 MiB each: the actor waits meanwhile.
const EPISODE_QUEUE: usize = 1;
/// How long a finished actor may take to go.
const LINGER: Duration = Duration::from_secs(3);

/// The learner's end of a link to one actor. Dropping it closes the link.
pub struct ActorLink {
    /// Who it is.
    pub actor: ActorId,
    /// What it said at first.
    pub hello: Box<Hello>,
    sender: ToActor,
    control: mpsc::Receiver<Frame>,
    episodes: mpsc::Receiver<Frame>,
    links: Links,
    // Dropped last: its tasks end with the link.
    _tasks: JoinSet<()>,
}

impl std::fmt::Debug for ActorLink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ActorLink({}, {})", self.actor.0.short(), self.remote())
    }
}

impl ActorLink {
    pub(super) fn start(
        (actor, hello): (ActorId, Hello),
        connection: Connection,
        (send, reader): (SendStream, FrameReader),
        session: LearnerSession,
        config: &LinkConfig,
        serving: LinkServing,
        (links, placed): (Links, watch::Receiver<Assignment>),
    ) -> Self {
        let line = Line::new(connection);
        let (control_tx, control) = mpsc::channel(CONTROL_QUEUE);
        let (episode_tx, episodes) = mpsc::channel(EPISODE_QUEUE);
        let (queue, queued) = mpsc::channel(WRITE_QUEUE);
        let mut tasks = JoinSet::new();
        tasks.spawn(write_control(line.clone(), send, queued));
        tasks.spawn(read_control(line.clone(), reader, control_tx));
        tasks.spawn(read_episodes(line.clone(), config.clone(), episode_tx));
        tasks.spawn(serve_fetches(line.clone(), serving));
        let session = Arc::new(Mutex::new(session));
        let patience = config.frame;
        let sender = ToActor { actor, line, session, queue, patience };
        tasks.spawn(tell_place(sender.clone(), placed));
        Self { actor, hello: Box::new(hello), sender, control, episodes, links, _tasks: tasks }
    }

    /// Where it is.
    pub fn remote(&self) -> SocketAddr {
        self.sender.line.connection.remote_address()
    }

    /// A handle that can be kept and used elsewhere.
    pub fn sender(&self) -> ToActor {
        self.sender.clone()
    }

    /// The next message. Cancel-safe. What arrived before the link ended is given before the error. Who
    /// fetches adapters from whom is settled here, and not given.
    ///
    /// # Errors
    /// The link has ended; [`ToActor::outstanding`] says what is to be issued again.
    pub async fn recv(&mut self) -> Result<FromActor, LinkError> {
        loop {
            // Episodes first: an actor's good-bye comes after what it sent before.
            let frame = tokio::select! {
                biased;
                Some(frame) = self.episodes.recv() => frame,
                Some(frame) = self.control.recv() => frame,
                else => return Err(self.sender.line.failure()),
            };
            let event = self.sender.session().receive(frame);
            match event {
                Ok(LearnerEvent::Message(FromActor::ParentFailed { parent, reason })) => {
                    self.links.parent_failed(&self.actor, &parent, &reason);
                }
                Ok(LearnerEvent::Message(message)) => {
                    if matches!(message, FromActor::Drain | FromActor::Leave { .. }) {
                        self.links.draining(&self.actor);
                    }
                    return Ok(message);
                }
                Ok(LearnerEvent::Hello(_)) => {
                    return Err(self.sender.violated(Violation::Stream("a second hello")));
                }
                Err(violation) => return Err(self.sender.violated(violation)),
            }
        }
    }

    /// Tells the actor that the run is over and waits, up to three seconds, until it has gone.
    pub async fn finish(self, reason: &str) {
        let sent = self.sender.send(FromLearner::Finish { reason: reason.to_owned() }).await;
        if sent.is_ok() {
            let _ = timeout(LINGER, self.sender.line.connection.closed()).await;
        }
        self.sender.close(CloseCode::Finished, reason);
    }
}

impl Drop for ActorLink {
    fn drop(&mut self) {
        let connection = &self.sender.line.connection;
        close(connection, CloseCode::GoingAway, "the learner dropped this link");
        self.links.remove_own(&self.actor, connection);
    }
}

/// Sends to one actor, and answers questions about it. Cheap to clone.
#[derive(Clone)]
pub struct ToActor {
    actor: ActorId,
    line: Line,
    session: Arc<Mutex<LearnerSession>>,
    queue: mpsc::Sender<Bytes>,
    patience: Duration,
}

impl std::fmt::Debug for ToActor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ToActor({})", self.actor.0.short())
    }
}

impl ToActor {
    fn session(&self) -> MutexGuard<'_, LearnerSession> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn violated(&self, violation: Violation) -> LinkError {
        self.line.fail(violation.into());
        self.line.failure()
    }

    /// Whom it sends to.
    pub fn actor(&self) -> ActorId {
        self.actor
    }

    /// Sends a message. Returns when it is queued; delivery is known by its effect only. Waits while
    /// 256 messages wait already, so hold no lock across it; an actor that reads none of them for the
    /// time of [`LinkConfig::frame`] loses its link.
    ///
    /// # Errors
    /// The link has ended, or the message breaks a bound ([`LinkError::Unsendable`]).
    pub async fn send(&self, message: FromLearner) -> Result<(), LinkError> {
        let (kind, body) = wire::encode_from_learner(&message).map_err(LinkError::Unsendable)?;
        let frame = pack(kind, &body).map_err(too_long)?;
        let Ok(place) = timeout(self.patience, self.queue.reserve()).await else {
            return Err(self.violated(Violation::Stream("the peer does not read its messages")));
        };
        let place = place.map_err(|_| self.line.failure())?;
        self.session().sending(&message);
        place.send(frame);
        Ok(())
    }

    /// How many more leases the actor would start at once.
    pub fn credit(&self) -> u64 {
        self.session().credit()
    }

    /// Whether the actor is going away.
    pub fn is_draining(&self) -> bool {
        self.session().is_draining()
    }

    /// Whether the actor can play a policy without fetching it first.
    pub fn holds(&self, policy: &PolicyDigest) -> bool {
        self.session().holds(policy)
    }

    /// Leases granted on this link and not answered, failed, returned or revoked.
    pub fn outstanding(&self) -> Vec<LeaseAttempt> {
        self.session().outstanding().collect()
    }

    /// Closes the link.
    pub fn close(&self, code: CloseCode, reason: &str) {
        close(&self.line.connection, code, reason);
    }
}

async fn read_episodes(line: Line, config: LinkConfig, frames: mpsc::Sender<Frame>) {
    loop {
        let frame = match line.connection.accept_uni().await {
            Ok(stream) => FrameReader::new(stream, Channel::Episode, config.frame).only().await,
            Err(error) => Err(error.into()),
        };
        match frame {
            Ok(frame) => {
                if frames.send(frame).await.is_err() {
                    return;
                }
            }
            Err(error) => {
                line.fail(error);
                return;
            }
        }
    }
}
