//! The actor's endpoint: finds the learner, proves itself, and keeps what was not acknowledged.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use quinn::{Connection, ConnectionError, SendStream, TokioRuntime};
use tokio::{net::lookup_host, time::timeout};

use super::{
    LinkConfig,
    arrival::BindError,
    close::{CloseCode, LinkError, close, tls_alert},
    connect_error::ConnectError,
    dial::{DialError, Dialed, Dialer, SocketFactory},
    link::{Line, too_long},
    relay::Relay,
    socket,
    stream::{FrameReader, pack, write_error},
    to_learner::{LearnerLink, LinkStart, Shared},
};
use crate::{
    EpisodeId, Hello, Identity, PROTOCOL_VERSION, Refused, Welcome, WireError,
    admission::{self, Binding},
    frame::{Channel, Kind},
    join::Join,
    session::{ActorEvent, Violation},
    tls, wire,
};

/// Addresses of one name that are tried.
const MAX_ADDRESSES: usize = 8;
/// How long to wait until the learner knows that its refusal was read.
const LINGER: Duration = Duration::from_secs(2);

/// An actor's side of the network. It outlives connections and holds the episodes that no learner
/// has acknowledged; each new connection sends them again.
pub struct ActorEndpoint {
    join: Join,
    dialer: Arc<Dialer>,
    config: LinkConfig,
    relay: Option<Relay>,
    shared: Arc<Shared>,
    last: Mutex<Option<Connection>>,
}

/// How an introduction fails.
enum Introduction {
    Refused(Refused),
    Link(LinkError),
}

impl<E: Into<LinkError>> From<E> for Introduction {
    fn from(error: E) -> Self {
        Self::Link(error.into())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl std::fmt::Debug for ActorEndpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ActorEndpoint({:?} to {})", self.dialer.identity, self.join.address())
    }
}

impl ActorEndpoint {
    /// An endpoint that is not connected yet.
    pub fn new(join: Join, identity: Identity, config: LinkConfig) -> Self {
        let buffer = config.socket_buffer;
        let sockets: SocketFactory = Arc::new(move |addr| {
            use quinn::Runtime as _;
            TokioRuntime.wrap_udp_socket(socket::bind(addr, buffer)?)
        });
        Self::over(sockets, join, identity, config)
    }

    /// The same over sockets of the caller's making, such as simulated ones.
    pub fn over(
        sockets: SocketFactory,
        join: Join,
        identity: Identity,
        config: LinkConfig,
    ) -> Self {
        let dialer = Arc::new(Dialer { identity, sockets });
        let (shared, last) = (Arc::default(), Mutex::new(None));
        Self { join, dialer, config, relay: None, shared, last }
    }

    /// The same, listening on `addr` (port 0: any free one) to pass adapters on to actors that the learner
    /// names. Needs a tokio runtime.
    ///
    /// # Errors
    /// The port is in use, or the address is not ours.
    pub fn with_relay(mut self, addr: SocketAddr) -> Result<Self, BindError> {
        self.relay = Some(Relay::bind(addr, &self.dialer.identity, &self.config)?);
        Ok(self)
    }

    /// What passes adapters on, if it does.
    pub fn relay(&self) -> Option<&Relay> {
        self.relay.as_ref()
    }

    /// Adapter bytes that came from other actors.
    pub fn taken_from_actors(&self) -> u64 {
        self.shared.taken_from_actors()
    }

    /// Who this actor is.
    pub fn identity(&self) -> &Identity {
        &self.dialer.identity
    }

    /// Episodes that no learner has acknowledged.
    pub fn unacknowledged(&self) -> usize {
        self.shared.session().outbox().len()
    }

    /// Bytes of those episodes.
    pub fn unacknowledged_bytes(&self) -> usize {
        self.shared.session().outbox().bytes()
    }

    /// Adds an encoded episode from an earlier process, to be sent after the next welcome.
    ///
    /// # Errors
    /// The body is longer than any episode may be.
    pub fn restore(&self, body: Bytes) -> Result<EpisodeId, WireError> {
        self.shared.submit(body)
    }

    /// Connects, joins and says hello. An earlier link of this endpoint ends.
    ///
    /// # Errors
    /// Each way in which this fails is a variant of its own; see [`ConnectError::may_retry`].
    pub async fn connect(&self, mut hello: Hello) -> Result<LearnerLink, ConnectError> {
        hello.relay = self.relay.as_ref().map(Relay::local_addr);
        if let Some(old) = lock(&self.last).take() {
            close(&old, CloseCode::Done, "connecting anew");
        }
        let Dialed { endpoint, connection, pinned } = self.reach().await?;
        *lock(&self.last) = Some(connection.clone());
        let epoch = self.shared.session().connect();
        let joined = timeout(self.config.reach, self.introduce(&connection, epoch, &hello)).await;
        let error = match joined {
            Ok(Ok((welcome, streams))) => {
                let line = Line::new(connection);
                let start = LinkStart {
                    welcome,
                    endpoint,
                    line,
                    epoch,
                    shared: self.shared.clone(),
                    config: self.config.clone(),
                    dialer: self.dialer.clone(),
                    relay: self.relay.as_ref().map(Relay::shared),
                };
                return Ok(LearnerLink::start(start, streams));
            }
            Ok(Err(Introduction::Refused(refused))) => {
                close(&connection, CloseCode::Done, "understood");
                let _ = timeout(LINGER, endpoint.wait_idle()).await;
                ConnectError::Refused(refused)
            }
            Ok(Err(Introduction::Link(error))) => match connection.close_reason() {
                // What the learner closed with says more than what failed because of it.
                Some(lost) => self.explain(lost, &pinned),
                None => {
                    close(&connection, CloseCode::Violation, &error.to_string());
                    ConnectError::Link { address: self.join.address(), error }
                }
            },
            Err(_) => {
                close(&connection, CloseCode::Slow, "no answer to the hello");
                self.no_answer()
            }
        };
        self.shared.session().disconnect(epoch);
        Err(error)
    }

    /// A QUIC connection to the first address that answers, IPv4 first.
    async fn reach(&self) -> Result<Dialed, ConnectError> {
        let unresolvable = |problem: String| ConnectError::Unresolvable {
            host: self.join.host.clone(),
            problem,
            before: self.shared.session().run().is_some(),
        };
        let found = lookup_host((self.join.host.as_str(), self.join.port)).await;
        let mut addresses: Vec<SocketAddr> =
            found.map_err(|error| unresolvable(error.to_string()))?.collect();
        addresses.sort_by_key(SocketAddr::is_ipv6);
        addresses.dedup();
        addresses.truncate(MAX_ADDRESSES);
        let count = u32::try_from(addresses.len()).unwrap_or(1).max(1);
        let mut last = unresolvable("no address".to_owned());
        for address in addresses {
            match self.reach_one(address, self.config.reach / count).await {
                Ok(reached) => return Ok(reached),
                Err(error) if !error.may_retry() => return Err(error),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    async fn reach_one(
        &self,
        remote: SocketAddr,
        patience: Duration,
    ) -> Result<Dialed, ConnectError> {
        let link = |error| ConnectError::Link { address: self.join.address(), error };
        self.dialer.dial(remote, self.join.learner, &self.config, patience).await.map_err(
            |failed| match failed {
                DialError::Socket(error) => ConnectError::Socket(error),
                DialError::Tls(error) => error.into(),
                DialError::Address(error) => link(LinkError::Transport(error)),
                DialError::NoAnswer => self.no_answer(),
                DialError::Lost(lost, pinned) => self.explain(lost, &pinned),
            },
        )
    }

    fn no_answer(&self) -> ConnectError {
        ConnectError::NoAnswer {
            address: self.join.address(),
            seconds: self.config.reach.as_secs(),
        }
    }

    /// What a connection that was lost while joining means.
    fn explain(&self, lost: ConnectionError, pinned: &tls::Pinned) -> ConnectError {
        let address = self.join.address();
        if let Some(presented) = pinned.impostor() {
            return ConnectError::WrongLearner { address, expected: self.join.learner, presented };
        }
        if tls_alert(&lost).is_some() && matches!(lost, ConnectionError::ConnectionClosed(_)) {
            return ConnectError::Certificate { address };
        }
        match LinkError::from(lost) {
            LinkError::TimedOut => self.no_answer(),
            LinkError::Closed { code: CloseCode::Proof, .. } => {
                ConnectError::WrongSecret { address }
            }
            LinkError::Closed { code: CloseCode::Version, reason } => ConnectError::Version(reason),
            error => ConnectError::Link { address, error },
        }
    }

    /// Preamble, hello and its answer.
    async fn introduce(
        &self,
        connection: &Connection,
        epoch: u64,
        hello: &Hello,
    ) -> Result<(Welcome, (SendStream, FrameReader)), Introduction> {
        let binding = Binding::of(connection, &self.dialer.identity.fingerprint());
        let binding = binding.ok_or(LinkError::Transport("TLS exports no keys".to_owned()))?;
        let proof = binding.prove(&self.join.secret);
        let mut first = connection.open_uni().await.map_err(LinkError::from)?;
        first
            .write_all(&admission::preamble(PROTOCOL_VERSION, &proof))
            .await
            .map_err(write_error)?;
        let _ = first.finish();

        let (mut send, recv) = connection.open_bi().await.map_err(LinkError::from)?;
        let body = wire::encode_hello(hello).map_err(LinkError::Unsendable)?;
        let frame = pack(Kind::Hello, &body).map_err(too_long)?;
        send.write_chunk(frame).await.map_err(write_error)?;
        let mut reader = FrameReader::new(recv, Channel::LearnerControl, self.config.frame);
        let frame = reader.next().await?;
        let frame =
            frame.ok_or(LinkError::from(Violation::Stream("it ended before the answer")))?;
        match self.shared.session().receive(epoch, frame).map_err(LinkError::from)? {
            ActorEvent::Welcome(welcome) => Ok((welcome, (send, reader))),
            ActorEvent::Refused(refused) => Err(Introduction::Refused(refused)),
            ActorEvent::Message(_) => {
                Err(LinkError::from(Violation::Stream("no answer to the hello")).into())
            }
        }
    }
}
