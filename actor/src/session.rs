//! The actor's life on the network: join, play what is granted, fetch new adapters, come back after a
//! lost link, leave when told.

use std::{
    collections::BTreeSet,
    sync::mpsc::{Sender, channel},
    time::{Duration, Instant},
};

use policy::model::Decoder;
use protocol::{
    AckOutcome, ActorEndpoint, Backoff, FromLearner, Hello, LearnerLink, LeaseAttempt, LinkError,
    PolicyDigest, RunId, Welcome,
};
use terminal::Failure;
use tokio::sync::{
    mpsc::{UnboundedReceiver, unbounded_channel},
    watch,
};
use tracing::{info, warn};

use crate::{
    adapters::Adapters,
    player::{Outcome, Player},
    worker::{self, Command, Report},
};

/// How long unacknowledged episodes may take to be acknowledged when the actor leaves.
const FLUSH: Duration = Duration::from_secs(5);

/// What a session needs besides the network.
pub struct SessionOptions {
    /// The first message of every connection.
    pub hello: Hello,
    /// How long to wait for a learner that does not answer at first.
    pub patience: Duration,
    /// Digest of the base weights, which a policy's digest must be made from.
    pub base: protocol::Digest,
}

/// Why the link ended.
enum End {
    /// The learner said that the run is over.
    Finished(String),
    /// The actor was asked to leave.
    Left,
    /// The link broke.
    Lost(LinkError),
}

/// The sampling thread of one run, which outlives connections.
struct Rollout {
    run: RunId,
    commands: Sender<Command>,
    reports: UnboundedReceiver<Report>,
    held: BTreeSet<PolicyDigest>,
    adapters: Adapters,
    /// Leases in the thread's hands.
    leases: BTreeSet<LeaseAttempt>,
}

/// Plays for a learner until its run is over, the learner is gone for good, or `leave` turns true.
///
/// # Errors
/// A mistake that a person must mend (wrong join string, other checkpoint), or a broken engine.
pub async fn serve(
    endpoint: &ActorEndpoint,
    options: SessionOptions,
    mut leave: watch::Receiver<bool>,
    make_player: impl Fn(&Welcome) -> Result<(Player, Decoder), Failure>,
) -> Result<String, Failure> {
    let mut backoff = Backoff::default();
    let mut rollout: Option<Rollout> = None;
    let mut answered = Instant::now();
    loop {
        let mut hello = options.hello.clone();
        hello.held = rollout.iter().flat_map(|rollout| rollout.held.iter().copied()).collect();
        let connected = tokio::select! {
            connected = endpoint.connect(hello) => connected,
            _ = leave.wait_for(|leave| *leave) => return Ok("left before joining".into()),
        };
        let lost = match connected {
            Ok(mut link) => {
                backoff.succeeded();
                let rollout = match &mut rollout {
                    Some(rollout) if rollout.run == link.welcome().run => rollout,
                    Some(_) => {
                        return Err(Failure::Mistake(
                            "the learner now serves another run: join it anew".into(),
                        ));
                    }
                    None => rollout.insert(start(link.welcome(), options.base, &make_player)?),
                };
                info!(run = %rollout.run.0.short(), "joined");
                let end = play(&mut link, rollout, &options, &mut leave).await?;
                answered = Instant::now();
                match end {
                    End::Finished(reason) => {
                        link.close().await;
                        return Ok(reason);
                    }
                    End::Left => {
                        let returned = stop(rollout).await;
                        flush(endpoint, &mut link).await;
                        link.leave(returned).await;
                        return Ok("left".into());
                    }
                    End::Lost(error) if error.may_retry() => error.to_string(),
                    End::Lost(error) => return Err(Failure::fault(error)),
                }
            }
            Err(error) if error.may_retry() => {
                if answered.elapsed() >= options.patience {
                    return Err(Failure::mistake(error));
                }
                error.to_string()
            }
            Err(error) => return Err(Failure::mistake(error)),
        };
        let wait = backoff.failed(jitter(endpoint, backoff.failures()));
        warn!("{lost}; trying again in {:.1} s", wait.as_secs_f64());
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            _ = leave.wait_for(|leave| *leave) => return Ok("left while disconnected".into()),
        }
    }
}

/// A draw in [0, 1) that differs between actors, so that a fleet does not return in one instant.
fn jitter(endpoint: &ActorEndpoint, failures: u32) -> f64 {
    let id = endpoint.identity().actor_id();
    let draw =
        protocol::Digest::of_parts("rollcall-backoff-v1", &[&id.0.0, &failures.to_le_bytes()]);
    f64::from(u16::from_le_bytes([draw.0[0], draw.0[1]])) / 65_536.0
}

fn start(
    welcome: &Welcome,
    base: protocol::Digest,
    make_player: impl Fn(&Welcome) -> Result<(Player, Decoder), Failure>,
) -> Result<Rollout, Failure> {
    let (player, decoder) = make_player(welcome)?;
    let (commands, inbox) = channel();
    let (outbox, reports) = unbounded_channel();
    worker::start(player, decoder, inbox, outbox).map_err(Failure::fault)?;
    Ok(Rollout {
        run: welcome.run,
        commands,
        reports,
        held: BTreeSet::new(),
        adapters: Adapters::new(base),
        leases: BTreeSet::new(),
    })
}

/// One connection's worth of work.
async fn play(
    link: &mut LearnerLink,
    rollout: &mut Rollout,
    options: &SessionOptions,
    leave: &mut watch::Receiver<bool>,
) -> Result<End, Failure> {
    let sender = link.sender();
    let slots = options.hello.slots as usize;
    // What an earlier link left unfinished goes on from where it stopped.
    rollout.adapters.stop().await;
    let mut free = None;
    loop {
        let now = u32::try_from(slots.saturating_sub(rollout.leases.len())).unwrap_or(u32::MAX);
        if free != Some(now) {
            if let Err(error) = sender.ready(now).await {
                return Ok(End::Lost(error));
            }
            free = Some(now);
        }
        tokio::select! {
            message = link.recv() => match message {
                Ok(FromLearner::Grant(leases)) => {
                    rollout.leases.extend(leases.iter().map(LeaseAttempt::from));
                    for policy in leases.iter().map(|lease| lease.policy) {
                        if !rollout.held.contains(&policy) {
                            rollout.adapters.awaited(policy);
                        }
                    }
                    rollout.tell(Command::Play(leases))?;
                    // A grant uses up free slots that the learner knows of already.
                    free = Some(u32::try_from(slots.saturating_sub(rollout.leases.len())).unwrap_or(u32::MAX));
                }
                Ok(FromLearner::Announce(manifest)) => {
                    if !rollout.held.contains(&manifest.policy) {
                        rollout.adapters.announced(manifest, &sender).await?;
                    }
                }
                Ok(FromLearner::Ack { episode, outcome: AckOutcome::Rejected { reason } }) => {
                    warn!(episode = %episode.0.short(), "rejected: {reason}");
                }
                Ok(FromLearner::Ack { .. }) => {}
                Ok(FromLearner::Revoke(leases)) => {
                    for lease in leases {
                        rollout.leases.remove(&lease);
                        rollout.tell(Command::Abandon(lease))?;
                    }
                }
                Ok(FromLearner::Finish { reason }) => return Ok(End::Finished(reason)),
                Err(error) => return Ok(End::Lost(error)),
            },
            report = rollout.reports.recv() => {
                let sent = match report {
                    Some(Report::Holding(policy)) => {
                        rollout.held.insert(policy);
                        sender.holding(policy).await
                    }
                    Some(Report::Dropped(policy)) => {
                        rollout.held.remove(&policy);
                        Ok(())
                    }
                    Some(Report::Ended(Outcome::Played { lease, episode })) => {
                        rollout.leases.remove(&lease);
                        let body = episode.encode();
                        let body = body.map_err(|e| e.to_string());
                        match body.and_then(|body| sender.submit(body).map_err(|e| e.to_string())) {
                            Ok(_) => Ok(()),
                            Err(reason) => sender.lease_failed(lease, &reason).await,
                        }
                    }
                    Some(Report::Ended(Outcome::Failed { lease, reason })) => {
                        rollout.leases.remove(&lease);
                        warn!(%lease, "failed: {reason}");
                        sender.lease_failed(lease, &reason).await
                    }
                    Some(Report::Broken(reason)) => return Err(Failure::Fault(reason)),
                    Some(Report::Stopped(_)) | None => {
                        return Err(Failure::Fault("the sampling thread ended".into()));
                    }
                };
                if let Err(error) = sent {
                    return Ok(End::Lost(error));
                }
            },
            (policy, bytes) = rollout.adapters.arrived(&sender) => {
                rollout.tell(Command::Adopt { policy, bytes })?;
            }
            _ = leave.wait_for(|leave| *leave) => return Ok(End::Left),
        }
    }
}

impl Rollout {
    fn tell(&self, command: Command) -> Result<(), Failure> {
        self.commands.send(command).map_err(|_| Failure::Fault("the sampling thread ended".into()))
    }
}

/// Ends the sampling thread and takes back what it had in hand.
async fn stop(rollout: &mut Rollout) -> Vec<LeaseAttempt> {
    if rollout.tell(Command::Stop).is_err() {
        return rollout.leases.iter().copied().collect();
    }
    while let Some(report) = rollout.reports.recv().await {
        match report {
            Report::Stopped(leases) => return leases,
            Report::Broken(_) => break,
            _ => {}
        }
    }
    rollout.leases.iter().copied().collect()
}

/// Waits, within bounds, until the learner has acknowledged everything.
async fn flush(endpoint: &ActorEndpoint, link: &mut LearnerLink) {
    let deadline = tokio::time::Instant::now() + FLUSH;
    while endpoint.unacknowledged() > 0 {
        match tokio::time::timeout_at(deadline, link.recv()).await {
            Ok(Ok(_)) => {}
            Ok(Err(_)) | Err(_) => {
                warn!("left with {} episodes unacknowledged", endpoint.unacknowledged());
                return;
            }
        }
    }
}
