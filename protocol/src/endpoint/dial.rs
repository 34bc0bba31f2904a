//! Connections that an actor makes: to its learner, and to the actor that passes adapters on to it.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use quinn::{AsyncUdpSocket, ClientConfig, Connection, ConnectionError, Endpoint, TokioRuntime};
use tokio::time::timeout;

use super::{
    LinkConfig,
    close::LinkError,
    socket::{self, Side},
};
use crate::{Digest, Identity, tls};

/// Makes the socket of each connection, given an address family's unspecified address.
pub type SocketFactory =
    Arc<dyn Fn(SocketAddr) -> io::Result<Arc<dyn AsyncUdpSocket>> + Send + Sync>;

/// What makes connections.
pub(super) struct Dialer {
    pub(super) identity: Identity,
    pub(super) sockets: SocketFactory,
}

/// A connection, and what keeps it.
pub(super) struct Dialed {
    pub(super) endpoint: Endpoint,
    pub(super) connection: Connection,
    pub(super) pinned: Arc<tls::Pinned>,
}

/// Why there is no connection.
pub(super) enum DialError {
    /// No socket.
    Socket(io::Error),
    /// The identity does not work.
    Tls(rustls::Error),
    /// The address is none.
    Address(String),
    /// Nobody answered in time.
    NoAnswer,
    /// The peer, or somebody else, said no.
    Lost(ConnectionError, Arc<tls::Pinned>),
}

impl std::fmt::Display for DialError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Socket(error) => write!(f, "no socket: {error}"),
            Self::Tls(error) => write!(f, "identity: {error}"),
            Self::Address(error) => f.write_str(error),
            Self::NoAnswer => f.write_str("no answer: is its UDP port open for this machine?"),
            Self::Lost(_, pinned) if pinned.impostor().is_some() => {
                f.write_str("somebody else answers at its address")
            }
            Self::Lost(lost, _) => write!(f, "{}", LinkError::from(lost.clone())),
        }
    }
}

impl Dialer {
    /// Connects to who has the certificate of that fingerprint.
    pub(super) async fn dial(
        &self,
        remote: SocketAddr,
        fingerprint: Digest,
        config: &LinkConfig,
        patience: Duration,
    ) -> Result<Dialed, DialError> {
        let any: IpAddr = match remote {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let socket = (self.sockets)(SocketAddr::new(any, 0)).map_err(DialError::Socket)?;
        let endpoint = Endpoint::new_with_abstract_socket(
            socket::actor_endpoint(config),
            None,
            socket,
            Arc::new(TokioRuntime),
        )
        .map_err(DialError::Socket)?;
        let pinned = tls::Pinned::new(fingerprint);
        let crypto = tls::client(Some(&self.identity), pinned.clone()).map_err(DialError::Tls)?;
        let mut client = ClientConfig::new(Arc::new(crypto));
        client.transport_config(socket::transport(config, Side::Actor));
        let connecting = endpoint.connect_with(client, remote, "rollcall");
        let connecting = connecting.map_err(|error| DialError::Address(error.to_string()))?;
        match timeout(patience, connecting).await {
            Err(_) | Ok(Err(ConnectionError::TimedOut)) => Err(DialError::NoAnswer),
            Ok(Ok(connection)) => Ok(Dialed { endpoint, connection, pinned }),
            Ok(Err(lost)) => Err(DialError::Lost(lost, pinned)),
        }
    }
}
