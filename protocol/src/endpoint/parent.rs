//! The actor that an actor asks for adapters before it asks the learner.
//!
//! It is a help and no more: what it sends is held against the learner's manifest, and whatever it does
//! wrong ends the connection to it, which sends every request that waits there to the learner, and is
//! reported, so that the learner names another one.

use std::{
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use quinn::Connection;
use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
    time::timeout,
};
use tracing::{info, warn};

use super::{
    LinkConfig,
    close::{CloseCode, LinkError, close},
    dial::Dialer,
    fetch::{FetchError, ask},
    stream::pack,
};
use crate::{Fetch, FromActor, frame::Frame, message::Parent, wire};

/// How long an actor that passes adapters on may take to answer at all.
const DIAL: Duration = Duration::from_secs(5);

/// Whether the connection is there.
#[derive(Clone)]
enum State {
    Dialing,
    Up(Connection),
    Failed,
}

/// One parent, from its assignment to the next one.
pub(super) struct ParentLink {
    parent: Parent,
    level: AtomicU8,
    state: watch::Receiver<State>,
    /// What it did wrong.
    failure: Arc<OnceLock<String>>,
    retired: AtomicBool,
    config: LinkConfig,
    task: JoinHandle<()>,
}

impl ParentLink {
    /// The learner named another one: who waits for this one goes on, and nobody is blamed.
    fn retire(&self) {
        self.retired.store(true, Ordering::Relaxed);
        self.task.abort();
        if let State::Up(connection) = &*self.state.borrow() {
            close(connection, CloseCode::Done, "fetches from another one now");
        }
    }

    /// Whether the learner named another one.
    pub(super) fn is_retired(&self) -> bool {
        self.retired.load(Ordering::Relaxed)
    }

    fn is_usable(&self) -> bool {
        self.failure.get().is_none() && !matches!(*self.state.borrow(), State::Failed)
    }

    /// It did something wrong: nothing more is asked of it, and who waits for it goes on.
    pub(super) fn fail(&self, reason: &str) {
        let _ = self.failure.set(reason.to_owned());
        if let State::Up(connection) = &*self.state.borrow() {
            close(connection, CloseCode::Violation, reason);
        }
    }

    /// The connection, once it is there or cannot be.
    async fn connection(&self) -> Option<Connection> {
        let mut state = self.state.clone();
        let state = state.wait_for(|state| !matches!(state, State::Dialing)).await.ok()?;
        match &*state {
            State::Up(connection) => Some(connection.clone()),
            State::Dialing | State::Failed => None,
        }
    }

    /// Fetches one chunk, within the time that is due to all relays above.
    pub(super) async fn ask(&self, fetch: Fetch) -> Result<Frame, FetchError> {
        let patience = self.config.relay * u32::from(self.level.load(Ordering::Relaxed).max(1));
        let asked = timeout(patience, async {
            let connection = self.connection().await.ok_or(LinkError::Local)?;
            ask(connection, fetch, &self.config).await
        });
        asked.await.unwrap_or_else(|_| {
            self.fail(&format!("a chunk did not come within {} s", patience.as_secs_f64()));
            Err(LinkError::Local.into())
        })
    }
}

/// Whom an actor asks first, on one link to its learner.
pub(super) struct Parents {
    dialer: Arc<Dialer>,
    config: LinkConfig,
    /// The control stream to the learner, for reports.
    reports: mpsc::Sender<Bytes>,
    current: Mutex<Option<Arc<ParentLink>>>,
    taken: Arc<AtomicU64>,
}

impl Parents {
    /// Nobody yet. `taken` counts the bytes that come from others than the learner.
    pub(super) fn new(
        dialer: Arc<Dialer>,
        config: LinkConfig,
        reports: mpsc::Sender<Bytes>,
        taken: Arc<AtomicU64>,
    ) -> Self {
        // A relay that dies is noticed sooner than a learner: there is a way without it.
        let config = LinkConfig { idle: config.idle / 2, ..config };
        Self { dialer, config, reports, current: Mutex::new(None), taken }
    }

    /// The parent of now, where it is of any use.
    pub(super) fn current(&self) -> Option<Arc<ParentLink>> {
        let current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        current.clone().filter(|link| link.is_usable())
    }

    /// So many bytes came from a parent.
    pub(super) fn took(&self, bytes: usize) {
        self.taken.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// The learner named another one, or nobody.
    pub(super) fn set(&self, parent: Option<Parent>) {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if let (Some(link), Some(parent)) = (&*current, &parent)
            && (link.parent.actor, link.parent.address) == (parent.actor, parent.address)
            && link.is_usable()
        {
            link.level.store(parent.level, Ordering::Relaxed);
            return;
        }
        if let Some(old) = current.take() {
            old.retire();
        }
        *current = parent.map(|parent| Arc::new(self.start(parent)));
    }

    fn start(&self, parent: Parent) -> ParentLink {
        let (states, state) = watch::channel(State::Dialing);
        let failure = Arc::new(OnceLock::new());
        let (dialer, config) = (self.dialer.clone(), self.config.clone());
        let (reports, told) = (self.reports.clone(), failure.clone());
        let task = tokio::spawn(async move {
            let reason = attend(&dialer, &parent, &config, &states, &told).await;
            states.send_replace(State::Failed);
            warn!(actor = %parent.actor.0.short(), "adapters come from the learner: {reason}");
            let message = FromActor::ParentFailed { parent: parent.actor, reason };
            let frame = wire::encode_from_actor(&message).ok();
            if let Some(frame) = frame.and_then(|(kind, body)| pack(kind, &body).ok()) {
                // A link that is lost needs no parent.
                let _ = reports.send(frame).await;
            }
        });
        let (level, retired) = (AtomicU8::new(parent.level), AtomicBool::new(false));
        ParentLink { parent, level, state, failure, retired, config: self.config.clone(), task }
    }
}

impl Drop for Parents {
    fn drop(&mut self) {
        self.set(None);
    }
}

/// Connects, and waits until the connection has ended. Returns why.
async fn attend(
    dialer: &Dialer,
    parent: &Parent,
    config: &LinkConfig,
    states: &watch::Sender<State>,
    failure: &OnceLock<String>,
) -> String {
    let (actor, address) = (parent.actor.0, parent.address);
    match dialer.dial(address, actor, config, config.reach.min(DIAL)).await {
        Ok(dialed) => {
            info!(actor = %actor.short(), %address, "adapters come from another actor");
            states.send_replace(State::Up(dialed.connection.clone()));
            let lost = dialed.connection.closed().await;
            failure.get().cloned().unwrap_or_else(|| LinkError::from(lost).to_string())
        }
        Err(error) => wire::line(&format!("{address}: {error}")),
    }
}
