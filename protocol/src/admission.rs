//! The first bytes of a connection: which version, and the proof of knowing the join secret.
//!
//! `magic(4) ‖ version(2, little-endian) ‖ proof(32)` on the first one-way stream. This layout, the
//! close codes and their one-line texts never change, so that peers of different versions can tell
//! each other so. The proof is an HMAC over keying material that TLS exports for this session and
//! for the certificate of this actor: it is worthless in another session or from another key.

use hmac::{Hmac, Mac as _, digest::KeyInit};
use sha2::Sha256;

use crate::{Digest, frame::PROTOCOL_VERSION, join::Secret};

const MAGIC: [u8; 4] = *b"RCLJ";
const LABEL: &[u8] = b"EXPORTER-rollcall-admission";

/// Magic and version.
pub(crate) const HEAD_LEN: usize = 6;
/// The proof that follows them in version 1.
pub(crate) const PROOF_LEN: usize = 32;

/// The exporter's answer for one session and actor.
pub(crate) struct Binding([u8; 32]);

impl Binding {
    /// `None` where the session cannot export, which a finished TLS 1.3 handshake always can.
    pub(crate) fn of(connection: &quinn::Connection, actor: &Digest) -> Option<Self> {
        let mut bytes = [0; 32];
        connection.export_keying_material(&mut bytes, LABEL, &actor.0).ok()?;
        Some(Self(bytes))
    }

    fn mac(&self, secret: &Secret) -> Hmac<Sha256> {
        // A key shorter than the hash's block is padded with zeros by HMAC's definition.
        let mut key = hmac::digest::Key::<Hmac<Sha256>>::default();
        key[..secret.0.len()].copy_from_slice(&secret.0);
        let mut mac = <Hmac<Sha256> as KeyInit>::new(&key);
        mac.update(&self.0);
        mac
    }

    pub(crate) fn prove(&self, secret: &Secret) -> [u8; PROOF_LEN] {
        self.mac(secret).finalize().into_bytes().into()
    }

    /// In constant time.
    pub(crate) fn verify(&self, secret: &Secret, proof: &[u8; PROOF_LEN]) -> bool {
        self.mac(secret).verify_slice(proof).is_ok()
    }
}

/// The bytes that an actor opens with.
pub(crate) fn preamble(version: u16, proof: &[u8; PROOF_LEN]) -> [u8; HEAD_LEN + PROOF_LEN] {
    let mut bytes = [0; HEAD_LEN + PROOF_LEN];
    bytes[..4].copy_from_slice(&MAGIC);
    bytes[4..HEAD_LEN].copy_from_slice(&version.to_le_bytes());
    bytes[HEAD_LEN..].copy_from_slice(proof);
    bytes
}

/// The version that a preamble's first bytes name; `None` where they are no preamble.
pub(crate) fn version(head: &[u8; HEAD_LEN]) -> Option<u16> {
    let [m0, m1, m2, m3, v0, v1] = *head;
    ([m0, m1, m2, m3] == MAGIC).then_some(u16::from_le_bytes([v0, v1]))
}

/// What both sides print when their versions differ.
pub(crate) fn version_refusal(actor: u16) -> String {
    format!(
        "protocol version: the actor speaks {actor}, the learner {PROTOCOL_VERSION}: \
         install the same release on both machines"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_holds_for_its_own_secret_and_session_only() {
        let (ours, other) = (Binding([1; 32]), Binding([2; 32]));
        let proof = ours.prove(&Secret([3; 16]));
        assert!(ours.verify(&Secret([3; 16]), &proof));
        assert!(!ours.verify(&Secret([4; 16]), &proof));
        assert!(!other.verify(&Secret([3; 16]), &proof));
    }

    #[test]
    fn the_preamble_names_its_version_first() {
        let bytes = preamble(513, &[9; 32]);
        assert_eq!(bytes, *b"RCLJ\x01\x02\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09");
        assert_eq!(version(bytes.first_chunk().expect("six")), Some(513));
        assert_eq!(version(b"GET / "), None);
    }
}
