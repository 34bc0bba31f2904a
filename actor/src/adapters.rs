//! Adapters on their way to this actor: the newest first, as differences to the last that arrived,
//! going on after a lost link where they stopped.

use std::{collections::BTreeSet, future::pending};

use bytes::Bytes;
use protocol::{AdapterManifest, Assembly, Digest, FetchError, PolicyDigest, ToLearner};
use terminal::Failure;
use tokio::{sync::oneshot, task::JoinHandle};
use tracing::{debug, warn};

use crate::metrics::Metrics;

/// Adapters that are kept half fetched.
const MAX_UNFINISHED: usize = 4;
/// Policies that leases are remembered to wait for.
const MAX_AWAITED: usize = 64;

/// What becomes of a fetch: the adapter's bytes, or what there is of it and why not more.
type Fetched = Result<Bytes, (Option<Box<Assembly>>, String)>;

struct Fetching {
    policy: PolicyDigest,
    /// Dropped to stop it.
    stop: oneshot::Sender<()>,
    task: JoinHandle<Fetched>,
}

/// The adapters that an actor fetches, over all its connections.
pub struct Adapters {
    /// The base weights, which every policy must be made from.
    weights: Digest,
    /// The last that arrived: what deltas start from.
    last: Option<(PolicyDigest, Bytes)>,
    fetching: Option<Fetching>,
    /// One that was whole when its fetch was to stop.
    ready: Option<(PolicyDigest, Bytes)>,
    /// Stopped or broken fetches, newest first.
    unfinished: Vec<Assembly>,
    /// Policies that leases wait for.
    awaited: BTreeSet<PolicyDigest>,
    metrics: Metrics,
}

impl Adapters {
    /// None yet, for a checkpoint whose weights have this digest.
    pub fn new(weights: Digest, metrics: Metrics) -> Self {
        Self {
            weights,
            last: None,
            fetching: None,
            ready: None,
            unfinished: Vec::new(),
            awaited: BTreeSet::new(),
            metrics,
        }
    }

    /// Leases came that wait for a policy: its adapter is worth finishing though a newer one comes.
    pub fn awaited(&mut self, policy: PolicyDigest) {
        if self.awaited.len() >= MAX_AWAITED {
            self.awaited.clear();
        }
        self.awaited.insert(policy);
    }

    /// Fetches an adapter that was announced. The newest wins: an older fetch stops.
    ///
    /// # Errors
    /// The announcement contradicts itself or is of other base weights.
    pub async fn announced(
        &mut self,
        manifest: AdapterManifest,
        learner: &ToLearner,
    ) -> Result<(), Failure> {
        manifest.check_policy(&self.weights).map_err(Failure::fault)?;
        self.stop().await;
        if self.ready.as_ref().is_some_and(|(policy, _)| *policy == manifest.policy) {
            return Ok(());
        }
        let resumed = self.unfinished.iter().position(|it| it.manifest().policy == manifest.policy);
        let assembly = match resumed {
            Some(at) => self.unfinished.remove(at),
            None => Assembly::new(manifest).map_err(Failure::fault)?,
        };
        let awaited = &self.awaited;
        self.unfinished.retain(|it| awaited.contains(&it.manifest().policy));
        self.start(assembly, learner);
        Ok(())
    }

    fn start(&mut self, mut assembly: Assembly, learner: &ToLearner) {
        if let Some((policy, bytes)) = &self.last {
            assembly = assembly.with_base(policy, bytes.clone());
        }
        let (stop, stopped) = oneshot::channel();
        let policy = assembly.manifest().policy;
        let task = tokio::spawn(fetch(assembly, learner.clone(), stopped, self.metrics.clone()));
        self.fetching = Some(Fetching { policy, stop, task });
    }

    /// Stops the fetch under way and keeps what it has: before a newer one, and when its link is lost.
    pub async fn stop(&mut self) {
        let Some(Fetching { policy, task, stop }) = self.fetching.take() else { return };
        drop(stop);
        match task.await {
            Ok(Ok(bytes)) => self.ready = Some((policy, bytes)),
            Ok(Err((Some(assembly), _))) => self.keep(*assembly),
            Ok(Err((None, _))) | Err(_) => {}
        }
    }

    fn keep(&mut self, assembly: Assembly) {
        self.unfinished.insert(0, assembly);
        self.unfinished.truncate(MAX_UNFINISHED);
    }

    /// The next adapter that arrives, verified; never ready while none is on its way. Cancel-safe. One
    /// that did not arrive is only logged: the learner announces its newest again on every link.
    pub async fn arrived(&mut self, learner: &ToLearner) -> (PolicyDigest, Bytes) {
        if let Some(ready) = self.ready.take() {
            self.last = Some(ready.clone());
            return ready;
        }
        loop {
            let Some(Fetching { policy, task, .. }) = &mut self.fetching else {
                return pending().await;
            };
            let policy = *policy;
            let fetched = task.await;
            self.fetching = None;
            let arrived = match fetched {
                Ok(Ok(bytes)) => {
                    self.last = Some((policy, bytes.clone()));
                    Some((policy, bytes))
                }
                Ok(Err((assembly, reason))) => {
                    warn!(policy = %policy.0.short(), "not fetched: {reason}");
                    assembly.into_iter().for_each(|assembly| self.keep(*assembly));
                    None
                }
                Err(failed) => {
                    warn!(policy = %policy.0.short(), "not fetched: {failed}");
                    None
                }
            };
            self.awaited.remove(&policy);
            // Whoever waits for an earlier one gets it now.
            let next = self.unfinished.iter().position(|it| {
                it.manifest().policy != policy && self.awaited.contains(&it.manifest().policy)
            });
            if let Some(at) = next {
                let assembly = self.unfinished.remove(at);
                self.start(assembly, learner);
            }
            if let Some(arrived) = arrived {
                return arrived;
            }
        }
    }
}

async fn fetch(
    mut assembly: Assembly,
    learner: ToLearner,
    stopped: oneshot::Receiver<()>,
    metrics: Metrics,
) -> Fetched {
    let (less, all) = assembly.manifest().transfer_bytes();
    debug!(policy = %assembly.manifest().policy.0.short(), all, less, "fetching");
    let result = tokio::select! {
        result = learner.fetch(&mut assembly) => result,
        _ = stopped => return Err((Some(Box::new(assembly)), "a newer one was announced".into())),
    };
    match result {
        Ok(()) => {
            let (delta, whole_chunks) = assembly.received();
            // Hashing hundreds of megabytes would hold the link up.
            let whole = tokio::task::spawn_blocking(move || assembly.finish()).await;
            let whole = whole.map_err(|e| (None, e.to_string()))?;
            metrics.adapter(delta, whole_chunks);
            whole.map(Bytes::from).map_err(|e| (None, e.to_string()))
        }
        Err(error @ FetchError::Gone(_)) => Err((None, error.to_string())),
        Err(error) => Err((Some(Box::new(assembly)), error.to_string())),
    }
}
