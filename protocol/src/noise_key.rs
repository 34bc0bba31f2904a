//! The key of a rollout's sampling noise.

use serde::{Deserialize, Serialize};

use crate::{Digest, LeaseId, RunId};

/// Keys the counter-based Gumbel noise of one rollout. Only the learner's leases choose it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NoiseKey(pub Digest);

impl NoiseKey {
    /// `SHA-256("rollcall-noise-v1" ‖ run id ‖ group id ‖ generation index)`, integers little-endian.
    pub fn derive(run: &RunId, lease: LeaseId) -> Self {
        let mut bytes = b"rollcall-noise-v1".to_vec();
        bytes.extend_from_slice(&run.0.0);
        bytes.extend_from_slice(&lease.group.to_le_bytes());
        bytes.extend_from_slice(&lease.generation.to_le_bytes());
        Self(Digest::of(&bytes))
    }

    /// The two 32-bit words that key Philox-4x32: the first 8 bytes, little-endian.
    pub fn philox(&self) -> [u32; 2] {
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|i| self.0.0[at + i]));
        [word(0), word(4)]
    }
}
