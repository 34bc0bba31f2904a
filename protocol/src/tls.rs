//! TLS without a certificate authority: fingerprints instead of names, TLS 1.3 only.
//!
//! The actor accepts exactly the certificate that its join string names. The learner demands a
//! certificate, has its possession proven, and accepts any: who may join is decided by the proof of
//! [`crate::admission`]. There is no resumption, so no handshake skips any of this.

use std::sync::{Arc, Mutex, PoisonError};

use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, PeerIncompatible,
    SignatureScheme,
    client::{
        Resumption,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, ring::default_provider, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime},
    server::{
        NoServerSessionStorage,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
    version::TLS13,
};

use crate::{Digest, Identity};

/// The same in every version, so that version differences are told by us and not by TLS.
const ALPN: &[u8] = b"rollcall";

/// Ours have about 350.
const MAX_CERTIFICATE_BYTES: usize = 2048;

/// Verifies that the learner is the one of the join string.
#[derive(Debug)]
pub(crate) struct Pinned {
    learner: Digest,
    presented: Mutex<Option<Digest>>,
    provider: Arc<CryptoProvider>,
}

impl Pinned {
    pub(crate) fn new(learner: Digest) -> Arc<Self> {
        let provider = Arc::new(default_provider());
        Arc::new(Self { learner, presented: Mutex::new(None), provider })
    }

    /// The fingerprint of another certificate that was presented, if one was.
    pub(crate) fn impostor(&self) -> Option<Digest> {
        self.presented.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let presented = Digest::of(end_entity);
        if presented == self.learner {
            return Ok(ServerCertVerified::assertion());
        }
        *self.presented.lock().unwrap_or_else(PoisonError::into_inner) = Some(presented);
        Err(CertificateError::ApplicationVerificationFailure.into())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(PeerIncompatible::Tls12NotOffered.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, cert, dss, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
}

/// Demands a certificate and the proof that its key is there; its digest is the actor's id.
#[derive(Debug)]
struct AnyActor {
    provider: Arc<CryptoProvider>,
}

impl ClientCertVerifier for AnyActor {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        if intermediates.is_empty() && end_entity.len() <= MAX_CERTIFICATE_BYTES {
            Ok(ClientCertVerified::assertion())
        } else {
            Err(CertificateError::BadEncoding.into())
        }
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(PeerIncompatible::Tls12NotOffered.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, cert, dss, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
}

/// The actor's side. Without an identity it presents no certificate, which every learner refuses.
pub(crate) fn client(
    identity: Option<&Identity>,
    pinned: Arc<Pinned>,
) -> Result<QuicClientConfig, Error> {
    let builder = rustls::ClientConfig::builder_with_provider(pinned.provider.clone())
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(pinned);
    let mut config = match identity {
        Some(own) => builder.with_client_auth_cert(vec![own.certificate()], own.key())?,
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.enable_sni = false;
    config.resumption = Resumption::disabled();
    QuicClientConfig::try_from(config).map_err(|error| Error::General(error.to_string()))
}

/// The learner's side.
pub(crate) fn server(identity: &Identity) -> Result<QuicServerConfig, Error> {
    let provider = Arc::new(default_provider());
    let mut config = rustls::ServerConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(Arc::new(AnyActor { provider }))
        .with_single_cert(vec![identity.certificate()], identity.key())?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    QuicServerConfig::try_from(config).map_err(|error| Error::General(error.to_string()))
}
