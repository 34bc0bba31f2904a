//! What a listening endpoint does before it hears a peer: how many knock at a time, who must first show
//! that it is where it says, and who failed too often.

use std::{
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use quinn::Incoming;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Instant,
};

use super::{arrival::JoinFailure, failures::Failures};

/// What becomes of a connection attempt.
pub(super) enum Knock {
    /// It is heard, and counts as one under way while the permit lives.
    Heard(Box<Incoming>, OwnedSemaphorePermit),
    /// It was sent away to prove its address.
    Retried,
    /// It was refused before a handshake.
    Refused(SocketAddr, JoinFailure),
}

/// The bounds of one endpoint.
pub(super) struct Door {
    joining: Arc<Semaphore>,
    max_joining: usize,
    retry_from: usize,
    failures: Mutex<Failures>,
}

impl Door {
    /// `max_joining` peers at a time; from `retry_from` on each must prove its address. An address has
    /// `failures`, and one more each time that `forgiven` has passed.
    pub(super) fn new(
        max_joining: usize,
        retry_from: usize,
        failures: u32,
        forgiven: Duration,
    ) -> Self {
        let max_joining = max_joining.min(Semaphore::MAX_PERMITS);
        let joining = Arc::new(Semaphore::new(max_joining));
        let failures = Mutex::new(Failures::new(failures, forgiven));
        Self { joining, max_joining, retry_from, failures }
    }

    fn failures(&self) -> MutexGuard<'_, Failures> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A peer knocks.
    pub(super) fn knock(&self, incoming: Incoming) -> Knock {
        let remote = incoming.remote_address();
        if self.failures().shut_out(remote.ip(), Instant::now()) {
            incoming.refuse();
            return Knock::Refused(remote, JoinFailure::Failures);
        }
        let joining = self.max_joining.saturating_sub(self.joining.available_permits());
        if joining >= self.retry_from
            && !incoming.remote_address_validated()
            && incoming.may_retry()
        {
            // It can only fail for connections that were validated.
            let _ = incoming.retry();
            return Knock::Retried;
        }
        match self.joining.clone().try_acquire_owned() {
            Ok(permit) => Knock::Heard(Box::new(incoming), permit),
            Err(_) => {
                incoming.refuse();
                Knock::Refused(remote, JoinFailure::Busy)
            }
        }
    }

    /// A peer failed that has shown that it is at this address.
    pub(super) fn failed(&self, address: IpAddr) {
        self.failures().failed(address, Instant::now());
    }
}
