//! The learner's endpoint: who knocks, who gets in, and what a stranger can cost.
//!
//! A connection attempt becomes an [`ActorLink`] after a TLS handshake with the client's key proven,
//! the preamble with the right version and proof, and a hello that fits, each within its time.
//! Everything else becomes a [`JoinFailure`] for the learner's log and a close code for the peer.

use std::{
    collections::BTreeSet,
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use quinn::{
    AsyncUdpSocket, Connection, ConnectionError, Endpoint, Incoming, TokioRuntime, VarInt,
};
use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
    time::timeout,
};

use super::{
    LinkConfig,
    arrival::{Arrival, BindError, JoinFailure},
    close::{CloseCode, LinkError, close, tls_alert},
    door::{Door, Knock},
    fetch::{Served, Serving},
    gate::{Secrets, ShutOut},
    links::{Links, RelayCounts},
    shelf::AdapterStore,
    socket::{self, RECEIVE_WINDOW, Side},
    stream::{FrameReader, pack},
    to_actor::ActorLink,
};
use crate::{
    ActorId, Digest, Hello, Identity, RefusalCode, Refused,
    admission::{self, Binding, PROOF_LEN},
    frame::{Channel, Kind},
    join::{Join, Secret},
    relay_tree::Assignment,
    session::{Admission, LearnerEvent, LearnerSession, Violation},
    tls, wire,
};

/// Episodes on their way at a time, and adapter chunks being served at a time, for each actor.
pub(super) const STREAMS: u32 = 8;
/// How long a refused actor may take to read its refusal.
const LINGER: Duration = Duration::from_secs(2);
/// TLS alert: certificate required.
const ALERT_NO_CERTIFICATE: u8 = 116;

/// What a learner's endpoint needs to know.
#[derive(Clone)]
pub struct LearnerConfig {
    /// Who is let in and what they are told.
    pub admission: Admission,
    /// Where adapter chunks come from.
    pub store: Arc<dyn AdapterStore>,
    /// Actors at a time; a few more get in where they join in the same instant.
    pub max_actors: usize,
    /// Joins under way at a time; more are refused before they cost a handshake.
    pub max_joining: usize,
    /// From this many joins under way on, a peer must show that it receives at its address before it
    /// is heard.
    pub retry_from: usize,
    /// Failed joins of one address that are let pass; then it is refused before a handshake.
    pub failures: u32,
    /// One failure of an address is forgiven each time that this has passed.
    pub forgiven: Duration,
    /// Adapter chunks that are sent at a time, over all actors; one actor has 4 of them at most. More
    /// wait their turn. One that takes longer than a second does not count any more.
    pub max_serving: usize,
    /// Actors that the learner serves adapters itself, and that each actor that relays serves, where there
    /// are relays enough; 64 at most. 0: the learner serves everybody.
    pub relay_fanout: usize,
    /// Times and sizes.
    pub link: LinkConfig,
}

impl LearnerConfig {
    /// Up to 1024 actors, 256 of them joining at once, with default times.
    pub fn new(admission: Admission, store: Arc<dyn AdapterStore>) -> Self {
        Self {
            admission,
            store,
            max_actors: 1024,
            max_joining: 256,
            retry_from: 32,
            failures: 20,
            forgiven: Duration::from_secs(6),
            max_serving: 64,
            relay_fanout: 4,
            link: LinkConfig::default(),
        }
    }
}

impl std::fmt::Debug for LearnerConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LearnerConfig")
            .field("admission", &self.admission)
            .field("max_actors", &self.max_actors)
            .field("max_joining", &self.max_joining)
            .field("retry_from", &self.retry_from)
            .field("failures", &self.failures)
            .field("forgiven", &self.forgiven)
            .field("max_serving", &self.max_serving)
            .field("relay_fanout", &self.relay_fanout)
            .field("link", &self.link)
            .finish_non_exhaustive()
    }
}

struct Shared {
    config: LearnerConfig,
    secrets: Mutex<Secrets>,
    shut_out: Mutex<ShutOut>,
    door: Door,
    links: Links,
    serving: Serving,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A listening learner. Dropping it stops listening and closes every link.
pub struct LearnerEndpoint {
    endpoint: Endpoint,
    fingerprint: Digest,
    shared: Arc<Shared>,
    arrivals: mpsc::Receiver<Arrival>,
    listener: JoinHandle<()>,
}

impl std::fmt::Debug for LearnerEndpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LearnerEndpoint({:?})", self.endpoint.local_addr())
    }
}

impl LearnerEndpoint {
    /// Listens on `addr` (port 0: any free one). Needs a tokio runtime.
    ///
    /// # Errors
    /// The port is in use, or the address is not ours.
    pub fn bind(
        addr: SocketAddr,
        identity: &Identity,
        secret: Secret,
        config: LearnerConfig,
    ) -> Result<Self, BindError> {
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::AddrInUse => BindError::InUse(addr),
            _ => BindError::Io { addr, source },
        };
        let socket = socket::bind(addr, config.link.socket_buffer).map_err(failed)?;
        let endpoint = Endpoint::new(
            socket::learner_endpoint(&config.link, identity)?,
            Some(server_config(identity, &config)?),
            socket,
            Arc::new(TokioRuntime),
        );
        Ok(Self::start(endpoint.map_err(failed)?, identity, secret, config))
    }

    /// Listens on a socket of the caller's making, such as a simulated one.
    ///
    /// # Errors
    /// The identity does not work, or the socket is refused.
    pub fn over(
        socket: Arc<dyn AsyncUdpSocket>,
        identity: &Identity,
        secret: Secret,
        config: LearnerConfig,
    ) -> Result<Self, BindError> {
        let addr = socket.local_addr().unwrap_or_else(|_| SocketAddr::from(([0, 0, 0, 0], 0)));
        let endpoint = Endpoint::new_with_abstract_socket(
            socket::learner_endpoint(&config.link, identity)?,
            Some(server_config(identity, &config)?),
            socket,
            Arc::new(TokioRuntime),
        );
        let endpoint = endpoint.map_err(|source| BindError::Io { addr, source })?;
        Ok(Self::start(endpoint, identity, secret, config))
    }

    fn start(
        endpoint: Endpoint,
        identity: &Identity,
        secret: Secret,
        config: LearnerConfig,
    ) -> Self {
        let LearnerConfig { max_joining, retry_from, failures, forgiven, .. } = config;
        let shared = Arc::new(Shared {
            door: Door::new(max_joining, retry_from, failures, forgiven),
            links: Links::new(config.relay_fanout),
            serving: Serving::new(config.store.clone(), config.max_serving, &config.link),
            config,
            secrets: Mutex::new(Secrets::new(secret)),
            shut_out: Mutex::default(),
        });
        let (sender, arrivals) = mpsc::channel(64);
        let listener = tokio::spawn(listen(endpoint.clone(), shared.clone(), sender));
        Self { endpoint, fingerprint: identity.fingerprint(), shared, arrivals, listener }
    }

    /// The next peer that joined or failed to. Cancel-safe. `None` after [`Self::shutdown`].
    pub async fn accept(&mut self) -> Option<Arrival> {
        self.arrivals.recv().await
    }

    /// Where it listens.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.endpoint.local_addr()
    }

    /// Adapter bytes that actors took, also after this endpoint is gone.
    pub fn served(&self) -> Arc<Served> {
        self.shared.serving.served()
    }

    /// Actors that fetch adapters from others, and parents that failed.
    pub fn relays(&self) -> RelayCounts {
        self.shared.links.counts()
    }

    /// The join string for actors that reach this machine as `host`.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn join(&self, host: &str) -> io::Result<Join> {
        Ok(Join {
            host: host.to_owned(),
            port: self.local_addr()?.port(),
            learner: self.fingerprint,
            secret: lock(&self.shared.secrets).current().clone(),
        })
    }

    /// From now on actors join with another secret. Links that exist stay, and an actor that joined
    /// since this learner started may connect again with the secret that it has.
    pub fn set_secret(&self, secret: Secret) {
        lock(&self.shared.secrets).replace(secret);
    }

    /// Shuts an actor out, now and for as long as this learner runs.
    pub fn revoke(&self, actor: ActorId) {
        lock(&self.shared.shut_out).now.insert(actor);
        self.cut(&actor);
    }

    /// Shuts out the actors of a list, in place of those of an earlier list.
    pub fn set_revoked(&self, listed: BTreeSet<ActorId>) {
        lock(&self.shared.shut_out).listed.clone_from(&listed);
        listed.iter().for_each(|actor| self.cut(actor));
    }

    fn cut(&self, actor: &ActorId) {
        if let Some(connection) = self.shared.links.remove(actor) {
            close(&connection, CloseCode::Revoked, "this actor was shut out by the learner");
        }
    }

    /// Closes every link, saying why, and waits up to two seconds until the peers know.
    pub async fn shutdown(self, code: CloseCode, reason: &str) {
        self.listener.abort();
        self.endpoint.close(VarInt::from_u32(code.number()), wire::line(reason).as_bytes());
        let _ = timeout(LINGER, self.endpoint.wait_idle()).await;
    }
}

impl Drop for LearnerEndpoint {
    fn drop(&mut self) {
        self.listener.abort();
        self.endpoint.close(VarInt::from_u32(CloseCode::GoingAway.number()), b"learner stopped");
    }
}

fn server_config(
    identity: &Identity,
    config: &LearnerConfig,
) -> Result<quinn::ServerConfig, rustls::Error> {
    let mut server = quinn::ServerConfig::with_crypto(Arc::new(tls::server(identity)?));
    server
        .transport_config(socket::transport(&config.link, Side::Learner))
        .max_incoming(config.max_joining)
        .incoming_buffer_size(64 << 10)
        .incoming_buffer_size_total(8 << 20);
    Ok(server)
}

async fn listen(endpoint: Endpoint, shared: Arc<Shared>, arrivals: mpsc::Sender<Arrival>) {
    while let Some(incoming) = endpoint.accept().await {
        let (incoming, permit) = match shared.door.knock(incoming) {
            Knock::Heard(incoming, permit) => (incoming, permit),
            Knock::Retried => continue,
            Knock::Refused(remote, failure) => {
                // A full log must not slow the listener.
                let _ = arrivals.try_send(Arrival::Refused { remote, actor: None, failure });
                continue;
            }
        };
        let remote = incoming.remote_address();
        let (shared, arrivals) = (shared.clone(), arrivals.clone());
        tokio::spawn(async move {
            let mut actor = None;
            let joined = join(*incoming, &shared, &mut actor).await;
            drop(permit);
            match joined {
                Ok(link) => {
                    let _ = arrivals.send(Arrival::Joined(link)).await;
                }
                Err(failure) => {
                    // Who got no further than its first packets may have lied about its address.
                    let there = actor.is_some() || failure == JoinFailure::NoCertificate;
                    if there && failure.counts() {
                        shared.door.failed(remote.ip());
                    }
                    let _ = arrivals.try_send(Arrival::Refused { remote, actor, failure });
                }
            }
        });
    }
}

async fn join(
    incoming: Incoming,
    shared: &Arc<Shared>,
    actor: &mut Option<ActorId>,
) -> Result<ActorLink, JoinFailure> {
    let patience = shared.config.link.join;
    let slow = JoinFailure::Slow(patience.as_secs());
    let connecting = incoming.accept().map_err(handshake_failure)?;
    let Ok(connection) = timeout(patience, connecting).await else { return Err(slow) };
    let connection = connection.map_err(handshake_failure)?;
    let joined = timeout(patience, admit(&connection, shared, actor)).await.unwrap_or(Err(slow));
    if let Err(failure) = &joined {
        turn_away(&connection, failure).await;
    }
    joined
}

fn handshake_failure(error: ConnectionError) -> JoinFailure {
    if tls_alert(&error) == Some(ALERT_NO_CERTIFICATE) {
        JoinFailure::NoCertificate
    } else {
        JoinFailure::Link(error.into())
    }
}

/// From a finished handshake to a welcomed actor.
async fn admit(
    connection: &Connection,
    shared: &Arc<Shared>,
    actor: &mut Option<ActorId>,
) -> Result<ActorLink, JoinFailure> {
    let fingerprint = peer_fingerprint(connection).ok_or(JoinFailure::NoCertificate)?;
    let id = ActorId(fingerprint);
    *actor = Some(id);
    let (binding, proof) = preamble(connection, &fingerprint).await?;
    if !lock(&shared.secrets).hold(&id, &binding, &proof) {
        return Err(JoinFailure::Proof);
    }
    if lock(&shared.shut_out).refuses(&id) {
        return Err(JoinFailure::Revoked);
    }
    // Proven: room for a control stream, episodes and fetches.
    connection.set_receive_window(VarInt::from_u32(RECEIVE_WINDOW));
    connection.set_max_concurrent_uni_streams(VarInt::from_u32(STREAMS));
    connection.set_max_concurrent_bi_streams(VarInt::from_u32(STREAMS + 1));

    let (mut send, recv) = connection.accept_bi().await.map_err(LinkError::from)?;
    let mut reader = FrameReader::new(recv, Channel::ActorControl, shared.config.link.frame);
    let frame = reader.next().await?;
    let frame = frame.ok_or(LinkError::from(Violation::Stream("it ended before the hello")))?;
    let mut session = LearnerSession::new();
    let LearnerEvent::Hello(hello) = session.receive(frame).map_err(LinkError::from)? else {
        return Err(LinkError::from(Violation::Stream("it does not start with a hello")).into());
    };
    let answer = judge(shared, &id, &hello);
    let (kind, body) = match &answer {
        Ok(()) => (Kind::Welcome, wire::encode_welcome(&shared.config.admission.welcome)),
        Err(refused) => (Kind::Refused, wire::encode_refused(refused)),
    };
    let body = body.map_err(LinkError::Unsendable)?;
    let frame = pack(kind, &body).map_err(|error| LinkError::Transport(error.to_string()))?;
    send.write_chunk(frame).await.map_err(super::stream::write_error)?;
    if let Err(refused) = answer {
        let _ = send.finish();
        return Err(refused.into());
    }
    session.admit(&hello);
    lock(&shared.secrets).joined(id);
    let placed = supersede(connection, shared, id, hello.relay);
    // It may have been shut out since it was asked.
    if lock(&shared.shut_out).refuses(&id) {
        shared.links.remove_own(&id, connection);
        return Err(JoinFailure::Revoked);
    }
    let (config, serving) = (&shared.config.link, shared.serving.link());
    let (connection, streams) = (connection.clone(), (send, reader));
    let place = (shared.links.clone(), placed);
    Ok(ActorLink::start((id, hello), connection, streams, session, config, serving, place))
}

fn judge(shared: &Shared, id: &ActorId, hello: &Hello) -> Result<(), Refused> {
    shared.config.admission.judge(hello)?;
    let others = shared.links.others(id);
    if others >= shared.config.max_actors {
        return Err(Refused {
            code: RefusalCode::Full,
            message: format!("the learner has its {others} actors: start this one later"),
            expected: format!("fewer than {}", shared.config.max_actors),
            got: others.to_string(),
        });
    }
    Ok(())
}

/// One link an identity: the newer one counts, since the older may be a connection that died
/// without a word.
fn supersede(
    connection: &Connection,
    shared: &Shared,
    id: ActorId,
    relay: Option<SocketAddr>,
) -> watch::Receiver<Assignment> {
    let (old, placed) = shared.links.insert(id, connection.clone(), relay);
    if let Some(old) = old {
        let reason = "another process joined with this identity: give each its own directory";
        close(&old, CloseCode::Superseded, reason);
    }
    placed
}

pub(super) fn peer_fingerprint(connection: &Connection) -> Option<Digest> {
    let chain = connection.peer_identity()?;
    let chain = chain.downcast::<Vec<rustls::pki_types::CertificateDer<'static>>>().ok()?;
    chain.first().map(|certificate| Digest::of(certificate))
}

/// The opening of a connection: what its proof must be made from, and the proof.
async fn preamble(
    connection: &Connection,
    fingerprint: &Digest,
) -> Result<(Binding, [u8; PROOF_LEN]), JoinFailure> {
    let mut stream = connection.accept_uni().await.map_err(LinkError::from)?;
    let short = |error: quinn::ReadExactError| match error {
        quinn::ReadExactError::ReadError(quinn::ReadError::ConnectionLost(lost)) => {
            JoinFailure::Link(lost.into())
        }
        _ => JoinFailure::Preamble,
    };
    let mut head = [0; admission::HEAD_LEN];
    stream.read_exact(&mut head).await.map_err(short)?;
    let version = admission::version(&head).ok_or(JoinFailure::Preamble)?;
    if version != crate::PROTOCOL_VERSION {
        return Err(JoinFailure::Version(version));
    }
    let mut proof = [0; PROOF_LEN];
    stream.read_exact(&mut proof).await.map_err(short)?;
    // A stream that is dropped before its end still counts against those that the peer may open.
    match stream.read_chunk(1, true).await {
        Ok(None) => {}
        Err(quinn::ReadError::ConnectionLost(lost)) => return Err(JoinFailure::Link(lost.into())),
        Ok(Some(_)) | Err(_) => return Err(JoinFailure::Preamble),
    }
    let binding = Binding::of(connection, fingerprint).ok_or(JoinFailure::Proof)?;
    Ok((binding, proof))
}

/// Tells a peer why it is not let in.
async fn turn_away(connection: &Connection, failure: &JoinFailure) {
    let code = match failure {
        JoinFailure::Version(_) => CloseCode::Version,
        JoinFailure::Proof | JoinFailure::NoCertificate => CloseCode::Proof,
        JoinFailure::Refused(_) => CloseCode::Refused,
        JoinFailure::Revoked => CloseCode::Revoked,
        JoinFailure::Slow(_) => CloseCode::Slow,
        JoinFailure::Busy | JoinFailure::Failures => CloseCode::Busy,
        JoinFailure::Preamble | JoinFailure::Link(_) => CloseCode::Violation,
    };
    if code == CloseCode::Refused {
        // The refusal is on its way as a message; the peer closes when it has read it.
        let _ = timeout(LINGER, connection.closed()).await;
    }
    close(connection, code, &failure.to_string());
}
