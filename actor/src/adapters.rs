//! Adapters on their way to this actor: the newest first, as differences to the last that arrived,
//! going on after a lost link where they stopped.

use std::{
    collections::{BTreeSet, VecDeque},
    future::pending,
};

use bytes::Bytes;
use protocol::{AdapterManifest, Assembly, Backoff, Digest, FetchError, PolicyDigest, ToLearner};
use terminal::Failure;
use tokio::{
    sync::oneshot,
    task::JoinHandle,
    time::{Instant, sleep_until},
};
use tracing::{debug, warn};

use crate::metrics::Metrics;

/// Adapters that are kept half fetched.
const MAX_UNFINISHED: usize = 4;
/// Policies that leases are remembered to wait for.
const MAX_AWAITED: usize = 64;
/// Announcements that are remembered: a lease may name an older policy.
const MAX_KNOWN: usize = 80;

/// Why an adapter did not arrive.
struct Broken {
    /// What there is of it.
    assembly: Option<Box<Assembly>>,
    /// The learner serves it no more.
    gone: bool,
    reason: String,
}

impl Broken {
    fn without(reason: impl ToString) -> Self {
        Self { assembly: None, gone: false, reason: reason.to_string() }
    }

    fn with(assembly: Assembly, gone: bool, reason: impl ToString) -> Self {
        Self { assembly: Some(Box::new(assembly)), gone, reason: reason.to_string() }
    }
}

type Fetched = Result<Bytes, Broken>;

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
    /// The policy that was announced last.
    newest: Option<PolicyDigest>,
    /// One that was whole when its fetch was to stop.
    ready: Option<(PolicyDigest, Bytes)>,
    /// Stopped or broken fetches, newest first.
    unfinished: Vec<Assembly>,
    /// When the newest of them is tried again on this link.
    retry: Option<Instant>,
    backoff: Backoff,
    /// Policies that leases wait for.
    awaited: BTreeSet<PolicyDigest>,
    /// What was announced, oldest first.
    known: VecDeque<AdapterManifest>,
    metrics: Metrics,
}

impl Adapters {
    /// None yet, for a checkpoint whose weights have this digest.
    pub fn new(weights: Digest, metrics: Metrics) -> Self {
        Self {
            weights,
            last: None,
            fetching: None,
            newest: None,
            ready: None,
            unfinished: Vec::new(),
            retry: None,
            backoff: Backoff::default(),
            awaited: BTreeSet::new(),
            known: VecDeque::new(),
            metrics,
        }
    }

    /// Leases came that wait for a policy: its adapter is worth fetching though newer ones came.
    ///
    /// # Errors
    /// As [`Self::announced`].
    pub fn awaited(&mut self, policy: PolicyDigest, learner: &ToLearner) -> Result<(), Failure> {
        if self.awaited.len() >= MAX_AWAITED {
            self.awaited.clear();
        }
        self.awaited.insert(policy);
        if self.ready.is_some() {
            return Ok(());
        }
        if let Some(last) = self.last.as_ref().filter(|(last, _)| *last == policy) {
            self.ready = Some(last.clone());
            return Ok(());
        }
        self.fetch_awaited(learner)
    }

    /// Starts with what leases wait for, where there is anything and nothing is under way.
    fn fetch_awaited(&mut self, learner: &ToLearner) -> Result<(), Failure> {
        if self.fetching.is_some() || self.retry.is_some() {
            return Ok(());
        }
        let awaited = &self.awaited;
        let half = self.unfinished.iter().position(|it| awaited.contains(&it.manifest().policy));
        let assembly = match half {
            Some(at) => self.unfinished.remove(at),
            None => {
                let known = self.known.iter().find(|it| awaited.contains(&it.policy));
                let Some(known) = known else { return Ok(()) };
                Assembly::new(known.clone()).map_err(Failure::fault)?
            }
        };
        self.start(assembly, learner);
        Ok(())
    }

    fn next(&mut self, learner: &ToLearner) {
        if let Err(failure) = self.fetch_awaited(learner) {
            warn!("not fetched: {failure}");
        }
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
        self.known.retain(|it| it.policy != manifest.policy);
        self.known.push_back(manifest.clone());
        if self.known.len() > MAX_KNOWN {
            self.known.pop_front();
        }
        self.stop().await;
        self.backoff.succeeded();
        self.newest = Some(manifest.policy);
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
        self.retry = None;
        let Some(Fetching { policy, task, stop }) = self.fetching.take() else { return };
        drop(stop);
        match task.await {
            Ok(Ok(bytes)) => self.ready = Some((policy, bytes)),
            Ok(Err(Broken { assembly: Some(assembly), .. })) => self.keep(*assembly),
            Ok(Err(_)) | Err(_) => {}
        }
    }

    fn keep(&mut self, assembly: Assembly) {
        self.unfinished.insert(0, assembly);
        self.unfinished.truncate(MAX_UNFINISHED);
    }

    /// The next adapter that arrives, verified; never ready while none is on its way. Cancel-safe. A
    /// fetch that fails is tried again after a while, as long as no newer adapter is announced.
    pub async fn arrived(&mut self, learner: &ToLearner) -> (PolicyDigest, Bytes) {
        if let Some(ready) = self.ready.take() {
            return self.take(ready, learner);
        }
        loop {
            let Some(Fetching { policy, task, .. }) = &mut self.fetching else {
                match self.retry {
                    Some(at) => sleep_until(at).await,
                    None => return pending().await,
                }
                self.retry = None;
                if !self.unfinished.is_empty() {
                    let assembly = self.unfinished.remove(0);
                    self.start(assembly, learner);
                }
                continue;
            };
            let policy = *policy;
            let fetched = task.await;
            self.fetching = None;
            let Broken { assembly, gone, reason } = match fetched {
                Ok(Ok(bytes)) => return self.take((policy, bytes), learner),
                Ok(Err(broken)) => broken,
                Err(failed) => Broken::without(failed),
            };
            let wait = self.backoff.failed(f64::from(policy.0.0[0]) / 256.0);
            warn!(policy = %policy.0.short(), "not fetched: {reason}");
            if gone && self.newest != Some(policy) {
                self.awaited.remove(&policy);
                self.known.retain(|it| it.policy != policy);
                self.next(learner);
            } else if let Some(assembly) = assembly {
                self.keep(*assembly);
                self.retry = Some(Instant::now() + wait);
            }
        }
    }

    /// One has arrived: the next ones start from it, and whoever waits for an earlier one gets that now.
    fn take(
        &mut self,
        arrived: (PolicyDigest, Bytes),
        learner: &ToLearner,
    ) -> (PolicyDigest, Bytes) {
        self.backoff.succeeded();
        self.awaited.remove(&arrived.0);
        self.last = Some(arrived.clone());
        self.next(learner);
        arrived
    }
}

async fn fetch(
    mut assembly: Assembly,
    learner: ToLearner,
    stopped: oneshot::Receiver<()>,
    metrics: Metrics,
) -> Fetched {
    let (less, all) = assembly.manifest().transfer_bytes();
    let policy = assembly.manifest().policy;
    debug!(policy = %policy.0.short(), all, less, "fetching");
    let result = tokio::select! {
        result = learner.fetch(&mut assembly) => result,
        _ = stopped => return Err(Broken::with(assembly, false, "it was stopped")),
    };
    if let Err(error) = result {
        let gone = matches!(error, FetchError::Gone(_));
        return Err(Broken::with(assembly, gone, error));
    }
    let (delta, whole) = assembly.received();
    // Hashing hundreds of megabytes would hold the link up.
    let finished = tokio::task::spawn_blocking(move || assembly.finish()).await;
    let bytes = finished.map_err(Broken::without)?.map_err(Broken::without)?;
    metrics.adapter(delta, whole);
    let bytes = Bytes::from(bytes);
    learner.fetched(&policy, &bytes);
    Ok(bytes)
}
