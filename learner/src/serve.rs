//! The learner's end of the network, as events for a thread that does not wait for sockets.
//!
//! Every actor has a task of its own; the coordinator hands it messages through an unbounded queue
//! (what can be in it is bounded by the leases that the coordinator itself issues) and hears of
//! everything through one bounded channel.

use std::{
    net::SocketAddr,
    path::Path,
    sync::{Arc, mpsc as std_mpsc},
    time::Duration,
};

use crate::{
    audit::Judged,
    joins::JoinLog,
    keys::{KeyWatch, Keys},
    metrics::Metrics,
};
use protocol::{
    ActorId, AdapterManifest, FromActor, FromLearner, Join,
    endpoint::{
        ActorLink, AdapterShelf, Arrival, BindError, CloseCode, JoinFailure, LearnerConfig,
        LearnerEndpoint, ToActor,
    },
    session::Admission,
};
use tokio::{
    runtime::{Handle, Runtime},
    sync::{mpsc as queue, oneshot, watch},
    task::JoinSet,
    time::MissedTickBehavior,
};
use tracing::{info, warn};

/// How long actors may take to hear that the run is over.
const FAREWELL: Duration = Duration::from_secs(5);
/// How often the identity directory is looked at, and what actors took is counted.
const LOOK: Duration = Duration::from_secs(1);
/// Events that wait for the coordinator. A full queue holds the actors' streams back.
const WAITING_EVENTS: usize = 256;

/// What the coordinator hears of: what happens on the network, and verdicts on what came from there.
#[derive(Debug)]
pub enum Event {
    /// An actor was let in.
    Joined(Actor),
    /// An actor said something.
    Said {
        /// Who.
        actor: ActorId,
        /// What.
        message: FromActor,
    },
    /// An actor's link ended.
    Gone {
        /// Who.
        actor: ActorId,
        /// Which of its connections.
        connection: u64,
        /// Why, one line.
        reason: String,
    },
    /// An episode was audited.
    Judged(Box<Judged>),
    /// A peer was not let in.
    TurnedAway {
        /// Where it came from.
        remote: SocketAddr,
        /// Why.
        failure: JoinFailure,
    },
}

/// A connected actor, as the coordinator sees it.
#[derive(Clone, Debug)]
pub struct Actor {
    /// Who it is.
    pub id: ActorId,
    /// Episodes that it keeps in flight.
    pub slots: u32,
    /// Its device, in its own words.
    pub device: String,
    /// Where it is.
    pub remote: SocketAddr,
    /// Tells this connection of the actor from its others.
    pub connection: u64,
    state: ToActor,
    messages: queue::UnboundedSender<FromLearner>,
}

impl Actor {
    /// Queues a message. A link that has ended says so by an event, not here.
    pub fn say(&self, message: FromLearner) {
        let _ = self.messages.send(message);
    }

    /// Slots without a lease, by the learner's own count.
    pub fn free(&self) -> usize {
        if self.state.is_draining() {
            return 0;
        }
        (self.slots as usize).saturating_sub(self.state.outstanding().len())
    }
}

/// Why a learner does not listen.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The address.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The identity directory.
    #[error(transparent)]
    Keys(#[from] protocol::IdentityError),
}

/// A listening learner.
pub struct Server {
    runtime: Handle,
    join: Join,
    shelf: Arc<AdapterShelf>,
    joins: Arc<JoinLog>,
    metrics: Metrics,
    events: queue::Receiver<Event>,
    sender: queue::Sender<Event>,
    shut_out: queue::UnboundedSender<ActorId>,
    stop: Option<oneshot::Sender<String>>,
    stopped: std_mpsc::Receiver<()>,
}

/// Where and how a learner listens.
#[derive(Clone, Copy, Debug)]
pub struct Listen<'a> {
    /// The address.
    pub addr: SocketAddr,
    /// The name under which actors reach it.
    pub host: &'a str,
    /// See [`LearnerConfig::relay_fanout`].
    pub relay_fanout: usize,
}

impl Server {
    /// Listens for actors that fit `admission`.
    ///
    /// # Errors
    /// The port is in use or the address is not ours; the join string cannot be kept.
    pub fn start(
        runtime: &Runtime,
        listen: &Listen<'_>,
        mut keys: Keys,
        admission: Admission,
        metrics: Metrics,
    ) -> Result<Self, ServeError> {
        let shelf = Arc::new(AdapterShelf::default());
        let Listen { addr, host, relay_fanout } = *listen;
        let config = LearnerConfig::new(admission, shelf.clone());
        let config = LearnerConfig { relay_fanout, ..config };
        let _guard = runtime.enter();
        let watch = keys.take_watch();
        let endpoint = LearnerEndpoint::bind(addr, &keys.identity, keys.secret, config)?;
        endpoint.set_revoked(keys.revoked);
        let join = endpoint.join(host).map_err(|source| BindError::Io { addr, source })?;
        watch.as_ref().map_or(Ok(()), |watch| watch.keep(&join))?;
        let joins = Arc::new(JoinLog::start().map_err(|source| BindError::Io { addr, source })?);
        let (event_sender, events) = queue::channel(WAITING_EVENTS);
        let (stop, stopping) = oneshot::channel();
        let (stopped_sender, stopped) = std_mpsc::channel();
        let (shut_out, shutting_out) = queue::unbounded_channel();
        let sender = event_sender.clone();
        let listener = Listener {
            endpoint,
            host: host.to_owned(),
            watch,
            joins: joins.clone(),
            metrics: metrics.clone(),
            events: event_sender,
            shutting_out,
        };
        runtime.spawn(listener.listen(stopping, stopped_sender));
        let runtime = runtime.handle().clone();
        let stop = Some(stop);
        Ok(Self { runtime, join, shelf, joins, metrics, events, sender, shut_out, stop, stopped })
    }

    /// The join string's parts.
    pub fn join(&self) -> &Join {
        &self.join
    }

    /// Where metrics are kept.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Logs who joins to the run's directory, who did until now included.
    pub fn log_joins(&self, run: &Path) {
        self.joins.open(run);
    }

    /// Makes an adapter fetchable, whole and as differences to the newest before it, and forgets all
    /// but the `keep` newest steps. Returns the manifest to announce.
    pub fn publish(&self, manifest: AdapterManifest, bytes: Vec<u8>, keep: u64) -> AdapterManifest {
        let step = manifest.step;
        let manifest = self.shelf.put(manifest, bytes);
        self.shelf.retain(|held| held.step + keep > step);
        let (delta, whole) = manifest.transfer_bytes();
        self.metrics.adapter(delta, whole);
        manifest
    }

    /// The next event, if one comes in time.
    pub fn next(&mut self, patience: Duration) -> Option<Event> {
        self.metrics.queue("events", self.events.len());
        let events = &mut self.events;
        let next = async { tokio::time::timeout(patience, events.recv()).await };
        self.runtime.block_on(next).ok().flatten()
    }

    /// Puts verdicts among the events. For threads that may wait where many events do.
    pub fn teller(&self) -> impl FnOnce(Judged) + Send + 'static {
        let sender = self.sender.clone();
        // Nobody hears it where the run has ended.
        move |judged| drop(sender.blocking_send(Event::Judged(Box::new(judged))))
    }

    /// Shuts an actor out, now and later.
    pub fn shut_out(&self, actor: ActorId) {
        // Nobody listens only where nobody is let in any more.
        let _ = self.shut_out.send(actor);
    }

    /// Tells every actor that the run is over and stops listening.
    pub fn finish(&mut self, reason: &str) {
        if let Some(stop) = self.stop.take() {
            // Nobody listens any more: whoever waits to be heard goes on.
            self.events.close();
            let _ = stop.send(reason.to_owned());
            let _ = self.stopped.recv_timeout(FAREWELL);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.finish("the learner stopped");
    }
}

/// What the listening task owns.
struct Listener {
    endpoint: LearnerEndpoint,
    host: String,
    watch: Option<KeyWatch>,
    joins: Arc<JoinLog>,
    metrics: Metrics,
    events: queue::Sender<Event>,
    shutting_out: queue::UnboundedReceiver<ActorId>,
}

impl Listener {
    async fn listen(
        mut self,
        mut stopping: oneshot::Receiver<String>,
        stopped: std_mpsc::Sender<()>,
    ) {
        let mut links = JoinSet::new();
        let (over, _) = watch::channel(None::<String>);
        let mut connections = 0;
        let mut looks = tokio::time::interval(LOOK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let served = self.endpoint.served();
        let reason = loop {
            self.metrics.actors(links.len());
            let arrival = tokio::select! {
                reason = &mut stopping => break reason.unwrap_or_else(|_| "the learner stopped".into()),
                Some(_) = links.join_next() => continue,
                Some(actor) = self.shutting_out.recv() => {
                    self.endpoint.revoke(actor);
                    continue;
                }
                _ = looks.tick() => {
                    self.metrics.broadcast(served.delta(), served.whole());
                    let relays = self.endpoint.relays();
                    self.metrics.relays(relays.relayed, relays.failures);
                    self.look();
                    continue;
                }
                arrival = self.endpoint.accept() => arrival,
            };
            match arrival {
                Some(Arrival::Joined(link)) => {
                    self.joins.joined(link.remote(), link.actor);
                    self.metrics.join("joined");
                    connections += 1;
                    links.spawn(attend(link, self.events.clone(), over.subscribe(), connections));
                }
                Some(Arrival::Refused { remote, actor, failure }) => {
                    self.joins.refused(remote, actor, &failure);
                    self.metrics.join(failure.name());
                    // A coordinator that is busy with an update has more to do than to hear of this.
                    let _ = self.events.try_send(Event::TurnedAway { remote, failure });
                }
                None => break "the endpoint closed".into(),
            }
        };
        over.send_replace(Some(reason.clone()));
        let everyone = async { while links.join_next().await.is_some() {} };
        drop(tokio::time::timeout(FAREWELL, everyone).await);
        self.endpoint.shutdown(CloseCode::Finished, &reason).await;
        let _ = stopped.send(());
    }

    /// Takes up what changed in the identity directory.
    fn look(&mut self) {
        let Some(watch) = &mut self.watch else { return };
        let changes = watch.look();
        if let Some(secret) = changes.secret {
            self.endpoint.set_secret(secret);
            info!("the join secret was replaced; links that exist stay");
            let kept = self.endpoint.join(&self.host).map_err(|error| error.to_string());
            if let Err(error) = kept.and_then(|it| watch.keep(&it).map_err(|it| it.to_string())) {
                warn!("{error}");
            }
        }
        if let Some(revoked) = changes.revoked {
            info!("{} actors are shut out by the identity directory", revoked.len());
            self.endpoint.set_revoked(revoked);
        }
    }
}

/// Carries messages between one actor and the coordinator until either ends.
async fn attend(
    mut link: ActorLink,
    events: queue::Sender<Event>,
    mut over: watch::Receiver<Option<String>>,
    connection: u64,
) {
    let id = link.actor;
    let state = link.sender();
    let (messages, mut queued) = queue::unbounded_channel();
    let actor = Actor {
        id,
        slots: link.hello.slots,
        device: link.hello.device.clone(),
        remote: link.remote(),
        connection,
        state: state.clone(),
        messages,
    };
    if events.send(Event::Joined(actor)).await.is_err() {
        return;
    }
    let reason = loop {
        tokio::select! {
            message = link.recv() => match message {
                Ok(message) => {
                    if events.send(Event::Said { actor: id, message }).await.is_err() {
                        let reason = farewell(&mut over).await;
                        link.finish(&reason).await;
                        return;
                    }
                }
                Err(error) => break error.to_string(),
            },
            message = queued.recv() => match message {
                Some(message) => {
                    if let Err(error) = state.send(message).await {
                        break error.to_string();
                    }
                }
                None => break "the coordinator let go".into(),
            },
            reason = farewell(&mut over) => {
                link.finish(&reason).await;
                return;
            }
        }
    };
    let _ = events.send(Event::Gone { actor: id, connection, reason }).await;
}

/// The reason why the run is over, once it is.
async fn farewell(over: &mut watch::Receiver<Option<String>>) -> String {
    match over.wait_for(Option::is_some).await {
        Ok(reason) => reason.clone().unwrap_or_default(),
        Err(_) => "the learner stopped".into(),
    }
}
