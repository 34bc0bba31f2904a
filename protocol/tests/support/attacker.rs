//! A peer that means harm, made from bare quinn: what it knows of the protocol is written out here.

use std::{
    fmt, io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use hmac::{Hmac, Mac as _, digest::KeyInit};
use protocol::{
    Digest, Fetch, Hello, PROTOCOL_VERSION, PolicyDigest,
    frame::{self, HEADER_LEN, Header, Kind},
    wire,
};
use quinn::{
    AsyncUdpSocket, ClientConfig, Connection, Endpoint, EndpointConfig, RecvStream, Runtime as _,
    SendStream, TokioRuntime, UdpPoller, VarInt,
    crypto::rustls::QuicClientConfig,
    udp::{RecvMeta, Transmit},
};
use rustls::{
    DigitallySignedStruct, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::ring::default_provider,
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime},
};

use crate::support::{Message, samples};

/// Tells the other process what to do, and to whom.
pub(crate) const ATTACK: &str = "ROLLCALL_TEST_ATTACK";
pub(crate) const TARGET: &str = "ROLLCALL_TEST_TARGET";

/// In this order: what makes the address suspicious comes last.
pub(crate) const ATTACKS: [&str; 8] = [
    "200 half-open connections",
    "400 mutated frames, each on a link of its own",
    "16 admitted peers that claim the longest frames and drip",
    "16 admitted peers that ask for chunks and read nothing",
    "16 admitted peers that read no answers",
    "200 connections that say nothing",
    "1000 joins with a wrong secret",
    "1000 joins without a certificate",
];

pub(crate) async fn run(attack: &str, target: &str) {
    let target = Target::of(target);
    match ATTACKS.iter().position(|it| *it == attack).expect("a known attack") {
        0 => half_open(&target).await,
        1 => mutated_frames(&target).await,
        2 => drips(&target).await,
        3 => unread_chunks(&target).await,
        4 => unread_answers(&target).await,
        5 => silent(&target).await,
        6 => wrong_secrets(&target).await,
        _ => no_certificates(&target).await,
    }
}

#[derive(Clone)]
struct Target {
    address: SocketAddr,
    secret: [u8; 16],
}

impl Target {
    fn of(join: &str) -> Self {
        let (address, token) = join.split_once('#').expect("a join string");
        let token = URL_SAFE_NO_PAD.decode(token).expect("base64url");
        let secret = *token.last_chunk().expect("a token");
        Self { address: address.parse().expect("an address"), secret }
    }
}

#[derive(Debug)]
struct AnyLearner;

impl ServerCertVerifier for AnyLearner {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
}

/// A new key for each, or none.
fn client(with_certificate: bool) -> (ClientConfig, Digest) {
    let builder = rustls::ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("TLS 1.3")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyLearner));
    let (mut crypto, fingerprint) = if with_certificate {
        let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519).expect("a key");
        let params = rcgen::CertificateParams::new(vec!["x".to_owned()]).expect("sound");
        let certificate = params.self_signed(&key).expect("signed");
        let fingerprint = Digest::of(certificate.der());
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let config = builder.with_client_auth_cert(vec![certificate.der().clone()], key);
        (config.expect("sound"), fingerprint)
    } else {
        (builder.with_no_client_auth(), Digest([0; 32]))
    };
    crypto.alpn_protocols = vec![b"rollcall".to_vec()];
    crypto.enable_sni = false;
    let mut client =
        ClientConfig::new(Arc::new(QuicClientConfig::try_from(crypto).expect("TLS 1.3")));
    let mut transport = quinn::TransportConfig::default();
    transport.keep_alive_interval(Some(Duration::from_secs(1)));
    client.transport_config(Arc::new(transport));
    (client, fingerprint)
}

fn endpoint() -> Endpoint {
    Endpoint::client(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a port")
}

async fn connect(
    endpoint: &Endpoint,
    target: &Target,
    with_certificate: bool,
) -> Option<(Connection, Digest)> {
    let (client, fingerprint) = client(with_certificate);
    let connecting = endpoint.connect_with(client, target.address, "x").expect("an address");
    connecting.await.ok().map(|connection| (connection, fingerprint))
}

async fn prove(connection: &Connection, fingerprint: &Digest, secret: &[u8; 16]) {
    let mut exported = [0; 32];
    let label = b"EXPORTER-rollcall-admission";
    connection.export_keying_material(&mut exported, label, &fingerprint.0).expect("exported");
    let mut mac = <Hmac<sha2::Sha256> as KeyInit>::new_from_slice(secret).expect("any length");
    mac.update(&exported);
    let proof = mac.finalize().into_bytes();
    let bytes = [b"RCLJ".as_slice(), &PROTOCOL_VERSION.to_le_bytes(), &proof].concat();
    if let Ok(mut first) = connection.open_uni().await {
        // A learner that has had enough closes in between.
        let _ = first.write_all(&bytes).await;
        let _ = first.finish();
    }
}

/// An admitted peer: connection and control stream, the welcome read.
async fn admitted(endpoint: &Endpoint, target: &Target) -> (Connection, SendStream, RecvStream) {
    let (connection, fingerprint) = connect(endpoint, target, true).await.expect("TLS");
    prove(&connection, &fingerprint, &target.secret).await;
    let (mut send, mut recv) = connection.open_bi().await.expect("admitted");
    let found = samples().into_iter().find(|(name, _)| *name == "hello");
    let Some((_, Message::Hello(hello))) = found else { panic!("a hello") };
    let hello = wire::encode_hello(&Hello { protocol: PROTOCOL_VERSION, ..hello }).expect("sound");
    send.write_all(&frame::encode(Kind::Hello, &hello).expect("short")).await.expect("room");
    let mut head = [0; HEADER_LEN];
    recv.read_exact(&mut head).await.expect("an answer");
    let header = Header::parse(&head, frame::Channel::LearnerControl).expect("ours");
    let mut body = vec![0; header.expect("whole").len];
    recv.read_exact(&mut body).await.expect("an answer");
    wire::decode_welcome(&body).expect("a welcome");
    (connection, send, recv)
}

/// A socket that hears nothing.
struct Deaf(Arc<dyn AsyncUdpSocket>);

impl fmt::Debug for Deaf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Deaf")
    }
}

impl AsyncUdpSocket for Deaf {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        self.0.clone().create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        self.0.try_send(transmit)
    }

    fn poll_recv(
        &self,
        _: &mut Context<'_>,
        _: &mut [io::IoSliceMut<'_>],
        _: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        Poll::Pending
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }
}

/// Each begins a handshake and never hears the answer.
async fn half_open(target: &Target) {
    let mut held = Vec::new();
    for _ in 0..200 {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").expect("a port");
        let socket = Arc::new(Deaf(TokioRuntime.wrap_udp_socket(socket).expect("wrapped")));
        let runtime = Arc::new(TokioRuntime);
        let endpoint =
            Endpoint::new_with_abstract_socket(EndpointConfig::default(), None, socket, runtime)
                .expect("an endpoint");
        let connecting = endpoint.connect_with(client(true).0, target.address, "x").expect("sent");
        held.push((endpoint, tokio::spawn(connecting.into_future())));
    }
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(held.iter().all(|(_, connecting)| !connecting.is_finished()));
    held.iter().for_each(|(_, connecting)| connecting.abort());
}

fn mutated(seed: u64) -> (Kind, Vec<u8>) {
    let samples = samples();
    let mut random = Digest::of(&seed.to_le_bytes()).0;
    let (_, message) = &samples[usize::from(random[0]) % samples.len()];
    let (kind, body) = message.encode().expect("sound");
    let mut bytes = frame::encode(kind, &body).expect("short");
    // From the ninth byte on mostly: magic and version are soon seen through.
    for _ in 0..=random[1] % 4 {
        random = Digest::of(&random).0;
        let place = usize::from(u16::from_le_bytes([random[2], random[3]]));
        let at = if random[4].is_multiple_of(8) { place % 7 } else { place % bytes.len() };
        bytes[at] ^= random[5] | 1;
    }
    (kind, bytes)
}

/// Any of them ends its own link; none does anything else.
async fn mutated_frames(target: &Target) {
    let endpoint = endpoint();
    for seed in 0..400 {
        let (connection, mut send, _recv) = admitted(&endpoint, target).await;
        let (kind, bytes) = mutated(seed);
        match kind {
            Kind::Episode => {
                let mut stream = connection.open_uni().await.expect("admitted");
                let _ = stream.write_all(&bytes).await;
                let _ = stream.finish();
            }
            Kind::Fetch | Kind::Chunk => {
                let (mut stream, _) = connection.open_bi().await.expect("admitted");
                let _ = stream.write_all(&bytes).await;
                let _ = stream.finish();
            }
            _ => {
                let _ = send.write_all(&bytes).await;
                let _ = send.finish();
            }
        }
        // Most are closed at once; one that only looks unfinished would be at its time.
        let patience = Duration::from_millis(300);
        let _ = tokio::time::timeout(patience, connection.closed()).await;
        connection.close(VarInt::from_u32(0), b"");
    }
}

/// Frames of the longest length, a kilobyte a time.
async fn drips(target: &Target) {
    let endpoint = endpoint();
    let mut held = Vec::new();
    for _ in 0..16 {
        let (connection, mut send, recv) = admitted(&endpoint, target).await;
        let head =
            |kind: Kind| Header { kind, len: kind.cap(), digest: Digest([0; 32]) }.to_bytes();
        send.write_all(&head(Kind::Leave)).await.expect("room");
        let mut streams = vec![send];
        for _ in 0..8 {
            let mut stream = connection.open_uni().await.expect("admitted");
            stream.write_all(&head(Kind::Episode)).await.expect("room");
            streams.push(stream);
        }
        held.push((connection, streams, recv));
    }
    for _ in 0..40 {
        for (connection, streams, _) in &mut held {
            for stream in streams {
                if connection.close_reason().is_none() {
                    let _ = stream.write_all(&[0x5b; 1024]).await;
                }
            }
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn unread_chunks(target: &Target) {
    let endpoint = endpoint();
    let bytes: Vec<u8> = (0..2 * frame::CHUNK_LEN).map(|at| (at % 251) as u8).collect();
    let found = samples().into_iter().find(|(name, _)| *name == "hello");
    let Some((_, Message::Hello(hello))) = found else { panic!("a hello") };
    let policy = PolicyDigest::new(&hello.model.weights, &Digest::of(&bytes));
    let mut held = Vec::new();
    for _ in 0..16 {
        let (connection, send, recv) = admitted(&endpoint, target).await;
        let mut streams = Vec::new();
        for chunk in 0..8 {
            let fetch = Fetch { policy, chunk: chunk % 2, delta: false };
            let body = wire::encode_fetch(&fetch).expect("sound");
            let (mut ask, answer) = connection.open_bi().await.expect("admitted");
            ask.write_all(&frame::encode(Kind::Fetch, &body).expect("short")).await.expect("room");
            ask.finish().expect("open");
            streams.push((ask, answer));
        }
        held.push((connection, send, recv, streams));
    }
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert!(held.iter().all(|(connection, ..)| connection.close_reason().is_none()));
}

/// Questions without end, and no look at the answers.
async fn unread_answers(target: &Target) {
    let endpoint = endpoint();
    let message = protocol::FromActor::Ready { free: 1, received: 0 };
    let (kind, body) = wire::encode_from_actor(&message).expect("sound");
    let many = frame::encode(kind, &body).expect("short").repeat(1000);
    let mut held = Vec::new();
    for _ in 0..16 {
        let (connection, mut send, recv) = admitted(&endpoint, target).await;
        let many = many.clone();
        let asking = tokio::spawn(async move { while send.write_all(&many).await.is_ok() {} });
        held.push((connection, recv, asking));
    }
    tokio::time::sleep(Duration::from_secs(4)).await;
    held.iter().for_each(|(_, _, asking)| asking.abort());
}

async fn silent(target: &Target) {
    let endpoint = endpoint();
    let mut held = Vec::new();
    for _ in 0..200 {
        held.extend(connect(&endpoint, target, true).await);
    }
    assert!(!held.is_empty());
    // Their time is up before ours.
    for (connection, _) in &held {
        let closed = tokio::time::timeout(Duration::from_secs(10), connection.closed()).await;
        closed.expect("closed in time");
    }
}

async fn wrong_secrets(target: &Target) {
    let endpoint = endpoint();
    for round in 0..20 {
        let mut joins = tokio::task::JoinSet::new();
        for _ in 0..50 {
            let (endpoint, target) = (endpoint.clone(), target.clone());
            joins.spawn(async move {
                let Some((connection, fingerprint)) = connect(&endpoint, &target, true).await
                else {
                    return;
                };
                prove(&connection, &fingerprint, &[round; 16]).await;
                connection.closed().await;
            });
        }
        joins.join_all().await;
    }
}

async fn no_certificates(target: &Target) {
    let endpoint = endpoint();
    for _ in 0..20 {
        let mut joins = tokio::task::JoinSet::new();
        for _ in 0..50 {
            let (endpoint, target) = (endpoint.clone(), target.clone());
            joins.spawn(async move {
                if let Some((connection, _)) = connect(&endpoint, &target, false).await {
                    connection.closed().await;
                }
            });
        }
        joins.join_all().await;
    }
}
