//! Audits the exact rungs on a few threads of their own, so that neither the network nor the trainer
//! waits for them.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread::available_parallelism,
    time::{Duration, Instant},
};

use protocol::{ActorId, EpisodeId, LeaseId};

use super::{Audited, Auditor, Presented, Rejected};
use crate::leases::Standing;

/// Most threads.
const THREADS: usize = 8;

/// An answer to a lease that waits for its verdict.
#[derive(Clone, Debug)]
pub struct Submitted {
    /// Who sent it.
    pub actor: ActorId,
    /// The lease.
    pub lease: LeaseId,
    /// The episode's announced id.
    pub id: EpisodeId,
    /// Its bytes.
    pub body: Vec<u8>,
    /// What the lease book said about the lease when it came.
    pub standing: Standing,
    /// How many updates newer than its policy there are.
    pub behind: u64,
}

/// An answer and its verdict.
#[derive(Debug)]
pub struct Judged {
    /// The answer.
    pub answer: Submitted,
    /// The verdict.
    pub verdict: Result<Audited, Box<Rejected>>,
}

/// The threads. How much waits for them is bounded by the leases that are out.
#[derive(Debug)]
pub struct AuditPool {
    auditor: Arc<Auditor>,
    threads: rayon::ThreadPool,
    /// Nanoseconds that the threads worked.
    worked: Arc<AtomicU64>,
}

impl AuditPool {
    /// Half of this machine's processors, at least one.
    ///
    /// # Errors
    /// The system gives no threads.
    pub fn new(auditor: Auditor) -> Result<Self, rayon::ThreadPoolBuildError> {
        let processors = available_parallelism().map_or(1, usize::from);
        let threads = rayon::ThreadPoolBuilder::new()
            .num_threads((processors / 2).clamp(1, THREADS))
            .thread_name(|number| format!("audit-{number}"))
            .build()?;
        Ok(Self { auditor: Arc::new(auditor), threads, worked: Arc::default() })
    }

    /// How long the threads worked so far, all of them together.
    pub fn worked(&self) -> Duration {
        Duration::from_nanos(self.worked.load(Ordering::Relaxed))
    }

    /// Audits an answer some time soon and hands the verdict to `tell`.
    pub fn judge(&self, answer: Submitted, tell: impl FnOnce(Judged) + Send + 'static) {
        let (auditor, worked) = (self.auditor.clone(), self.worked.clone());
        self.threads.spawn(move || {
            let began = Instant::now();
            let verdict = auditor.audit(Presented {
                id: answer.id,
                body: &answer.body,
                standing: &answer.standing,
                behind: answer.behind,
            });
            let took = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
            worked.fetch_add(took, Ordering::Relaxed);
            tell(Judged { answer, verdict });
        });
    }
}
