//! The thread that samples. It owns the player and its engine; the session talks to it in commands and
//! hears reports, so that neither the network nor the engine ever waits for the other.

use std::{
    collections::BTreeMap,
    sync::mpsc::{Receiver, RecvError, TryRecvError},
    thread::{self, JoinHandle},
};

use bytes::Bytes;
use policy::model::{Adapter, Decoder};
use protocol::{Lease, LeaseAttempt, LeaseId, PolicyDigest};
use tokio::sync::mpsc::UnboundedSender;

use crate::player::{Outcome, Player};

/// What the session asks for.
#[derive(Debug)]
pub enum Command {
    /// A policy's adapter arrived.
    Adopt {
        /// The policy.
        policy: PolicyDigest,
        /// Verified `adapter_model.safetensors` bytes.
        bytes: Bytes,
    },
    /// Play these. Leases whose policy is still on its way wait for it.
    Play(Vec<Lease>),
    /// Stop playing this one.
    Abandon(LeaseId),
    /// Give back everything in flight and end.
    Stop,
}

/// What the thread says.
#[derive(Debug)]
pub enum Report {
    /// New episodes can be played with this policy.
    Holding(PolicyDigest),
    /// Leases wait for a policy that is not held.
    Wanting(PolicyDigest),
    /// A policy was forgotten: nothing plays it and newer ones came.
    Dropped(PolicyDigest),
    /// A lease ended.
    Ended(Outcome),
    /// The last report after [`Command::Stop`]: leases that were given up.
    Stopped(Vec<LeaseAttempt>),
    /// The last report: the engine or an adapter is unusable.
    Broken(String),
}

/// Policies kept beside those with episodes in flight: the newest, and one before it for leases that
/// crossed its announcement.
const KEPT_POLICIES: usize = 2;

/// Starts the thread.
///
/// # Errors
/// When the operating system gives no thread.
pub fn start(
    player: Player,
    decoder: Decoder,
    commands: Receiver<Command>,
    reports: UnboundedSender<Report>,
) -> std::io::Result<JoinHandle<()>> {
    thread::Builder::new().name("sampler".into()).spawn(move || {
        let mut worker = Worker {
            player,
            decoder,
            held: Vec::new(),
            waiting: BTreeMap::new(),
            reports: reports.clone(),
        };
        let last = worker.run(&commands).unwrap_or_else(Report::Broken);
        // Nobody listening means that the program is ending anyway.
        drop(reports.send(last));
    })
}

struct Worker {
    player: Player,
    /// For the shapes that an adapter must have.
    decoder: Decoder,
    /// Policies in the engine, oldest first.
    held: Vec<PolicyDigest>,
    waiting: BTreeMap<PolicyDigest, Vec<Lease>>,
    reports: UnboundedSender<Report>,
}

impl Worker {
    fn run(&mut self, commands: &Receiver<Command>) -> Result<Report, String> {
        loop {
            let command = if self.player.in_flight() > 0 {
                match commands.try_recv() {
                    Ok(command) => Some(command),
                    Err(TryRecvError::Empty) => None,
                    Err(TryRecvError::Disconnected) => return Ok(self.stopped()),
                }
            } else {
                match commands.recv() {
                    Ok(command) => Some(command),
                    Err(RecvError) => return Ok(self.stopped()),
                }
            };
            match command {
                Some(command) => {
                    if self.obey(command)? {
                        return Ok(self.stopped());
                    }
                }
                // Only when every command is obeyed: what was granted together starts together.
                None => {
                    for outcome in self.player.step().map_err(|e| e.to_string())? {
                        self.report(Report::Ended(outcome));
                    }
                }
            }
        }
    }

    /// Carries out a command; true means stop.
    fn obey(&mut self, command: Command) -> Result<bool, String> {
        match command {
            Command::Adopt { policy, bytes } => {
                self.adopt(policy, &bytes)?;
                for lease in self.waiting.remove(&policy).unwrap_or_default() {
                    self.play(lease);
                }
            }
            Command::Play(leases) => {
                for lease in leases {
                    if self.held.contains(&lease.policy) {
                        self.play(lease);
                    } else {
                        let policy = lease.policy;
                        let waiting = self.waiting.entry(policy).or_default();
                        waiting.push(lease);
                        if waiting.len() == 1 {
                            self.report(Report::Wanting(policy));
                        }
                    }
                }
            }
            Command::Abandon(lease) => {
                self.player.abandon(lease);
                for leases in self.waiting.values_mut() {
                    leases.retain(|waiting| waiting.id != lease);
                }
            }
            Command::Stop => return Ok(true),
        }
        Ok(false)
    }

    fn adopt(&mut self, policy: PolicyDigest, bytes: &[u8]) -> Result<(), String> {
        if !self.held.contains(&policy) {
            let adapter = Adapter::from_safetensors(bytes, &self.decoder)
                .map_err(|e| format!("the adapter of policy {policy} does not fit: {e}"))?;
            self.player.engine().add_adapter(policy, adapter).map_err(|e| e.to_string())?;
            self.held.push(policy);
        }
        self.report(Report::Holding(policy));
        let mut surplus = self.held.len().saturating_sub(KEPT_POLICIES);
        let (reports, engine) = (&self.reports, self.player.engine());
        self.held.retain(|held| {
            // A policy with episodes in flight is refused here and tried again at the next adoption.
            let dropped = surplus > 0 && *held != policy && engine.drop_adapter(held).is_ok();
            if dropped {
                surplus -= 1;
                drop(reports.send(Report::Dropped(*held)));
            }
            !dropped
        });
        Ok(())
    }

    fn play(&mut self, lease: Lease) {
        let attempt = LeaseAttempt::from(&lease);
        if let Err(reason) = self.player.start(lease) {
            self.report(Report::Ended(Outcome::Failed { lease: attempt, reason }));
        }
    }

    fn stopped(&mut self) -> Report {
        let mut leases: Vec<LeaseAttempt> = self.player.leases().collect();
        leases.extend(self.waiting.values().flatten().map(LeaseAttempt::from));
        Report::Stopped(leases)
    }

    fn report(&self, report: Report) {
        // The session may be gone; the next command or its absence ends this thread.
        drop(self.reports.send(report));
    }
}
