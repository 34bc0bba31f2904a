//! An actor's port for other actors: it passes on the adapter chunks that it has verified itself.
//!
//! Only the actors that the learner named are served, by the certificates that they prove to have, and
//! they can do nothing but ask for chunks. Before that a peer has no stream at all.

use std::{
    collections::{BTreeSet, HashMap},
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use quinn::{Connection, Endpoint, Incoming, TokioRuntime, VarInt};
use tokio::{sync::watch, task::JoinHandle, time::timeout};

use super::{
    LinkConfig,
    arrival::BindError,
    close::{CloseCode, close},
    door::{Door, Knock},
    fetch::{Served, Serving, serve_fetches},
    learner::{STREAMS, peer_fingerprint},
    link::Line,
    relay_shelf::RelayShelf,
    socket::{self, Side},
};
use crate::{ActorId, Identity, tls};

/// Peers that connect at a time.
const MAX_JOINING: usize = 64;
/// From so many on each must prove its address.
const RETRY_FROM: usize = 8;
/// Failures of an address that are let pass; one more is after each of the second.
const FAILURES: (u32, Duration) = (20, Duration::from_secs(6));
/// Chunks that are sent at a time, over all children.
const MAX_SERVING: usize = 16;
/// How long a child may come before the learner's word about it.
const EARLY: Duration = Duration::from_secs(2);

#[derive(Default)]
struct Children {
    /// By the learner's word.
    named: BTreeSet<ActorId>,
    live: HashMap<ActorId, Connection>,
}

/// What outlives connections, and what the actor's own fetches fill.
pub(super) struct Shared {
    door: Door,
    children: Mutex<Children>,
    /// Changes with `named`.
    renamed: watch::Sender<()>,
    pub(super) shelf: Arc<RelayShelf>,
    serving: Serving,
    config: LinkConfig,
}

impl Shared {
    fn children(&self) -> MutexGuard<'_, Children> {
        self.children.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves these from now on and nobody else.
    pub(super) fn name(&self, named: BTreeSet<ActorId>) {
        let mut children = self.children();
        children.live.retain(|child, connection| {
            let stays = named.contains(child);
            if !stays {
                close(connection, CloseCode::Done, "the learner named another parent");
            }
            stays
        });
        children.named = named;
        drop(children);
        self.renamed.send_replace(());
    }

    /// Children that are connected.
    #[cfg(test)]
    pub(super) fn live(&self) -> usize {
        self.children().live.len()
    }

    /// Children that the learner names.
    #[cfg(test)]
    pub(super) fn named(&self) -> usize {
        self.children().named.len()
    }

    /// Whether the learner names an actor, now or very soon.
    async fn names(&self, actor: &ActorId) -> bool {
        let mut renamed = self.renamed.subscribe();
        let named = renamed.wait_for(|()| self.children().named.contains(actor));
        matches!(timeout(EARLY, named).await, Ok(Ok(_)))
    }
}

/// A listening relay. Dropping it stops it.
pub struct Relay {
    endpoint: Endpoint,
    addr: SocketAddr,
    shared: Arc<Shared>,
    listener: JoinHandle<()>,
}

impl std::fmt::Debug for Relay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Relay({})", self.addr)
    }
}

impl Relay {
    /// Listens on `addr` (port 0: any free one). Needs a tokio runtime.
    pub(super) fn bind(
        addr: SocketAddr,
        identity: &Identity,
        config: &LinkConfig,
    ) -> Result<Self, BindError> {
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::AddrInUse => BindError::InUse(addr),
            _ => BindError::Io { addr, source },
        };
        let socket = socket::bind(addr, config.socket_buffer).map_err(failed)?;
        let bound = socket.local_addr().map_err(failed)?;
        let mut server = quinn::ServerConfig::with_crypto(Arc::new(tls::server(identity)?));
        server
            .transport_config(socket::transport(config, Side::Relay))
            .max_incoming(MAX_JOINING)
            .incoming_buffer_size(16 << 10)
            .incoming_buffer_size_total(1 << 20);
        let endpoint = Endpoint::new(
            socket::learner_endpoint(config, identity)?,
            Some(server),
            socket,
            Arc::new(TokioRuntime),
        );
        let endpoint = endpoint.map_err(failed)?;
        let shelf = Arc::new(RelayShelf::default());
        let shared = Arc::new(Shared {
            door: Door::new(MAX_JOINING, RETRY_FROM, FAILURES.0, FAILURES.1),
            children: Mutex::default(),
            renamed: watch::channel(()).0,
            serving: Serving::new(shelf.clone(), MAX_SERVING, config),
            shelf,
            config: config.clone(),
        });
        let listener = tokio::spawn(listen(endpoint.clone(), shared.clone()));
        Ok(Self { endpoint, addr: bound, shared, listener })
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// Adapter bytes that other actors took.
    pub fn served(&self) -> Arc<Served> {
        self.shared.serving.served()
    }

    pub(super) fn shared(&self) -> Arc<Shared> {
        self.shared.clone()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.listener.abort();
        self.endpoint.close(VarInt::from_u32(CloseCode::GoingAway.number()), b"actor stopped");
    }
}

async fn listen(endpoint: Endpoint, shared: Arc<Shared>) {
    while let Some(incoming) = endpoint.accept().await {
        let Knock::Heard(incoming, permit) = shared.door.knock(incoming) else { continue };
        let remote = incoming.remote_address();
        let shared = shared.clone();
        tokio::spawn(async move {
            let admitted = admit(*incoming, &shared).await;
            drop(permit);
            match admitted {
                Ok((child, connection)) => serve(child, connection, &shared).await,
                // Who got no further than its first packets may have lied about its address.
                Err(there) => {
                    tracing::debug!(%remote, "no child of this actor");
                    if there {
                        shared.door.failed(remote.ip());
                    }
                }
            }
        });
    }
}

/// From first packets to a child; else whether the peer has shown that it is at its address.
async fn admit(incoming: Incoming, shared: &Shared) -> Result<(ActorId, Connection), bool> {
    let connecting = incoming.accept().map_err(|_| false)?;
    let connection = match timeout(shared.config.join, connecting).await {
        Ok(Ok(connection)) => connection,
        // Without a certificate, or no TLS of ours.
        Ok(Err(quinn::ConnectionError::TransportError(_))) => return Err(true),
        Ok(Err(_)) | Err(_) => return Err(false),
    };
    let refuse = |code, reason| {
        close(&connection, code, reason);
        Err(true)
    };
    let Some(child) = peer_fingerprint(&connection).map(ActorId) else {
        return refuse(CloseCode::Proof, "no client certificate");
    };
    if !shared.names(&child).await {
        return refuse(CloseCode::Refused, "the learner did not name this actor to me");
    }
    let mut children = shared.children();
    if !children.named.contains(&child) {
        return refuse(CloseCode::Refused, "the learner named another parent");
    }
    if let Some(old) = children.live.insert(child, connection.clone()) {
        close(&old, CloseCode::Superseded, "this actor connected again");
    }
    drop(children);
    connection.set_max_concurrent_bi_streams(VarInt::from_u32(STREAMS));
    Ok((child, connection))
}

async fn serve(child: ActorId, connection: Connection, shared: &Shared) {
    tracing::info!(actor = %child.0.short(), "passes adapters on to another actor");
    serve_fetches(Line::new(connection.clone()), shared.serving.link()).await;
    let mut children = shared.children();
    let current = children.live.get(&child).map(Connection::stable_id);
    if current == Some(connection.stable_id()) {
        children.live.remove(&child);
    }
}
