//! Stateless resets that outlive the process: a learner that was killed and started again on its
//! port answers its actors' old packets at once with "I know nothing of this", where they would
//! otherwise wait for their idle time-out.
//!
//! For that the key of the reset tokens comes from the identity, and connection ids are plain
//! random ones, since the default kind is only recognised by the process that made it.

use hmac::{Hmac, Mac as _, digest::KeyInit};
use quinn::{
    ConnectionId, ConnectionIdGenerator,
    crypto::{CryptoError, HmacKey},
};
use sha2::Sha256;

use crate::Digest;

/// Bytes of a connection id.
const ID_LEN: usize = 8;

/// Signs connection ids; the signature's front is the reset token.
pub(super) struct ResetKey(pub(super) Digest);

impl ResetKey {
    fn mac(&self, data: &[u8]) -> Hmac<Sha256> {
        let mut key = hmac::digest::Key::<Hmac<Sha256>>::default();
        key[..self.0.0.len()].copy_from_slice(&self.0.0);
        let mut mac = <Hmac<Sha256> as KeyInit>::new(&key);
        mac.update(data);
        mac
    }
}

impl HmacKey for ResetKey {
    fn sign(&self, data: &[u8], signature_out: &mut [u8]) {
        let signature = self.mac(data).finalize().into_bytes();
        signature_out.iter_mut().zip(signature).for_each(|(out, byte)| *out = byte);
    }

    fn signature_len(&self) -> usize {
        32
    }

    fn verify(&self, data: &[u8], signature: &[u8]) -> Result<(), CryptoError> {
        self.mac(data).verify_slice(signature).map_err(|_| CryptoError)
    }
}

/// Connection ids without any meaning: digests of a secret seed and a counter.
pub(super) struct RandomIds {
    pub(super) seed: [u8; 32],
    pub(super) next: u64,
}

impl ConnectionIdGenerator for RandomIds {
    fn generate_cid(&mut self) -> ConnectionId {
        self.next += 1;
        let digest = Digest::of_parts("rollcall-cid-v1", &[&self.seed, &self.next.to_le_bytes()]);
        ConnectionId::new(&digest.0[..ID_LEN])
    }

    fn cid_len(&self) -> usize {
        ID_LEN
    }

    fn cid_lifetime(&self) -> Option<std::time::Duration> {
        None
    }
}
