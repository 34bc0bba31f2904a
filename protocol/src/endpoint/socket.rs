//! UDP sockets and the transport settings of both sides.

use std::{io, net::SocketAddr, sync::Arc};

use quinn::{EndpointConfig, TransportConfig, VarInt};
use rustls::crypto::ring::default_provider;

use super::{
    LinkConfig, Profile,
    reset::{RandomIds, ResetKey},
};
use crate::Identity;

/// Bytes in flight towards one side, over all streams of a connection.
pub(super) const RECEIVE_WINDOW: u32 = 16 << 20;
/// The same before admission.
pub(super) const UNPROVEN_WINDOW: u32 = 16 << 10;

/// A bound socket with large buffers where the system allows them. They are not needed for
/// correctness, so what the system refuses is only logged.
pub(super) fn bind(addr: SocketAddr, buffer: usize) -> io::Result<std::net::UdpSocket> {
    let socket = std::net::UdpSocket::bind(addr)?;
    let options = socket2::SockRef::from(&socket);
    let receive = options.set_recv_buffer_size(buffer).and_then(|()| options.recv_buffer_size());
    let send = options.set_send_buffer_size(buffer).and_then(|()| options.send_buffer_size());
    tracing::debug!(?receive, ?send, wanted = buffer, "udp socket buffers");
    Ok(socket)
}

/// An actor's endpoint: a new socket for each connection, so nobody asks it about old ones.
pub(super) fn actor_endpoint(config: &LinkConfig) -> EndpointConfig {
    let mut endpoint = EndpointConfig::default();
    endpoint.rng_seed(config.rng_seed);
    endpoint
}

/// A learner's endpoint, which answers for the connections of its earlier processes.
///
/// # Errors
/// No randomness.
pub(super) fn learner_endpoint(
    config: &LinkConfig,
    identity: &Identity,
) -> Result<EndpointConfig, rustls::Error> {
    let mut endpoint = EndpointConfig::new(Arc::new(ResetKey(identity.reset_key())));
    let seed = match config.rng_seed {
        Some(seed) => seed,
        None => {
            let mut seed = [0; 32];
            default_provider().secure_random.fill(&mut seed)?;
            seed
        }
    };
    endpoint.rng_seed(config.rng_seed).cid_generator(move || Box::new(RandomIds { seed, next: 0 }));
    Ok(endpoint)
}

/// Which end of which connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// A learner's: a peer starts with one one-way stream and a tiny window.
    Learner,
    /// An actor's, to a learner or to a relay.
    Actor,
    /// A relay's: a peer starts with no stream and a tiny window.
    Relay,
}

/// How a side's connections behave.
pub(super) fn transport(config: &LinkConfig, side: Side) -> Arc<TransportConfig> {
    let mut transport = TransportConfig::default();
    transport
        .keep_alive_interval(Some(config.keep_alive))
        // Out of range means longer than 10^8 years.
        .max_idle_timeout(config.idle.try_into().ok())
        .datagram_receive_buffer_size(None);
    let (streams, window) = match side {
        Side::Learner => (1, UNPROVEN_WINDOW),
        Side::Actor => (0, RECEIVE_WINDOW),
        Side::Relay => (0, UNPROVEN_WINDOW),
    };
    transport
        .max_concurrent_uni_streams(VarInt::from_u32(streams))
        .max_concurrent_bidi_streams(VarInt::from_u32(0))
        .receive_window(VarInt::from_u32(window));
    if config.profile == Profile::Wan {
        transport
            .stream_receive_window(VarInt::from_u32(16 << 20))
            .send_window(64 << 20)
            .congestion_controller_factory(Arc::new(quinn::congestion::BbrConfig::default()));
    }
    Arc::new(transport)
}
