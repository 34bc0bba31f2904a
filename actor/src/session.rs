//! The actor's life on the network: join, play what is granted, fetch new adapters, come back after a
//! lost link, leave when told.

use std::{
    collections::BTreeSet,
    sync::mpsc::{Sender, channel},
    time::Duration,
};

use bytes::Bytes;
use policy::model::Decoder;
use protocol::{
    ActorEndpoint, Backoff, Episode, FromLearner, Hello, LearnerLink, LeaseAttempt, LinkError,
    PolicyDigest, RunId, ToLearner, Welcome,
};
use terminal::Failure;
use tokio::{
    sync::{
        mpsc::{UnboundedReceiver, unbounded_channel},
        watch,
    },
    time::Instant,
};
use tracing::{info, warn};

use crate::{
    adapters::Adapters,
    desk::Desk,
    metrics::Metrics,
    player::{Outcome, Player},
    spool::Spool,
    worker::{self, Command, Report},
};

/// How long unacknowledged episodes may take to be acknowledged when the actor leaves with leases that it
/// did not finish.
const FLUSH: Duration = Duration::from_secs(5);

/// What a session needs besides the network.
pub struct SessionOptions {
    /// The first message of every connection.
    pub hello: Hello,
    /// How long to wait for a learner that does not answer at first.
    pub patience: Duration,
    /// Digest of the base weights, which a policy's digest must be made from.
    pub base: protocol::Digest,
    /// What operators see.
    pub metrics: Metrics,
    /// Bytes of unacknowledged episodes above which nothing more is played.
    pub cap: u64,
    /// How long leases in hand may take to be finished when the actor is asked to leave.
    pub grace: Duration,
}

/// Whether the actor is to stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stay {
    /// Until the run is over.
    Yes,
    /// Until what is in hand is finished.
    Finishing,
    /// No longer.
    No,
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
    metrics: Metrics,
    desk: Desk,
}

/// When the actor was asked to leave, and until when it may finish.
struct Leaving {
    asked: watch::Receiver<Stay>,
    grace: Duration,
    until: Option<Instant>,
}

impl Leaving {
    /// Ready when the actor is to leave now: at once, or when its grace is over.
    async fn over(&mut self) {
        loop {
            let stay = *self.asked.borrow_and_update();
            match (stay, self.until) {
                (Stay::No, _) => return,
                (Stay::Finishing, Some(until)) => {
                    tokio::select! {
                        () = tokio::time::sleep_until(until) => return,
                        changed = self.asked.changed() => if changed.is_err() { return },
                    }
                }
                (Stay::Finishing, None) => self.until = Some(Instant::now() + self.grace),
                (Stay::Yes, _) => {
                    if self.asked.changed().await.is_err() {
                        return std::future::pending().await;
                    }
                }
            }
        }
    }

    fn is_asked(&self) -> bool {
        *self.asked.borrow() != Stay::Yes
    }
}

/// Ready when the actor is asked to leave, where that is not `known` yet.
async fn first_asked(mut asked: watch::Receiver<Stay>, known: bool) {
    if known || asked.wait_for(|stay| *stay != Stay::Yes).await.is_err() {
        std::future::pending().await
    }
}

/// Plays for a learner until its run is over, the learner is gone for good, or the actor is asked to leave.
///
/// # Errors
/// A mistake that a person must mend (wrong join string, other checkpoint), a broken engine, or a spool that
/// cannot be written.
pub async fn serve(
    endpoint: &ActorEndpoint,
    options: SessionOptions,
    mut spool: Option<Spool>,
    asked: watch::Receiver<Stay>,
    make_player: impl Fn(&Welcome) -> Result<(Player, Decoder), Failure>,
) -> Result<String, Failure> {
    let mut leaving = Leaving { asked: asked.clone(), grace: options.grace, until: None };
    let mut backoff = Backoff::default();
    let mut rollout: Option<Rollout> = None;
    let mut answered = Instant::now();
    loop {
        if leaving.is_asked() && rollout.as_ref().is_none_or(|it| it.desk.is_clear()) {
            return Ok("left with nothing in hand".into());
        }
        let mut hello = options.hello.clone();
        hello.held = rollout.iter().flat_map(|rollout| rollout.held.iter().copied()).collect();
        let connected = tokio::select! {
            connected = endpoint.connect(hello) => connected,
            () = leaving.over() => return Ok(left_apart(rollout.as_ref())),
            () = first_asked(asked.clone(), rollout.is_some()) => return Ok("left before joining".into()),
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
                    None => {
                        let desk = take_up(&link, endpoint, &options, spool.take())?;
                        rollout.insert(start(link.welcome(), &options, desk, &make_player)?)
                    }
                };
                info!(run = %rollout.run.0.short(), "joined");
                options.metrics.connected();
                let end = play(endpoint, &mut link, rollout, &mut leaving).await?;
                options.metrics.disconnected();
                answered = Instant::now();
                match end {
                    End::Finished(reason) => {
                        rollout.desk.clear().map_err(Failure::fault)?;
                        link.close().await;
                        return Ok(reason);
                    }
                    End::Left => {
                        let returned = stop(rollout, &link.sender()).await?;
                        // Who is to leave at once has nobody to wait for.
                        if *asked.borrow() != Stay::No {
                            flush(&mut link, &mut rollout.desk).await?;
                        }
                        let count = returned.len();
                        link.leave(returned).await;
                        return Ok(format!("left; {count} leases went back"));
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
            () = leaving.over() => return Ok(left_apart(rollout.as_ref())),
        }
    }
}

/// What is said of an actor that leaves while no learner answers.
fn left_apart(rollout: Option<&Rollout>) -> String {
    let Some(rollout) = rollout else { return "left before joining".into() };
    match (rollout.desk.unacknowledged().0, rollout.desk.is_spooled()) {
        (0, _) => "left while disconnected".into(),
        (count, true) => format!(
            "left while disconnected; {count} episodes wait in the spool for the next start"
        ),
        (count, false) => format!("left while disconnected; {count} episodes are lost: no --spool"),
    }
}

/// The desk of the run that was joined, with what an earlier process left for it.
fn take_up(
    link: &LearnerLink,
    endpoint: &ActorEndpoint,
    options: &SessionOptions,
    spool: Option<Spool>,
) -> Result<Desk, Failure> {
    let run = link.welcome().run;
    if let Some(count) = spool.as_ref().map(|spool| spool.foreign(run)).filter(|it| *it > 0) {
        warn!("{count} episodes of other runs stay in the spool until those runs are joined");
    }
    let mut desk = Desk::new(run, options.hello.slots, options.cap, spool);
    let left = desk.take_up().map_err(Failure::fault)?;
    if !left.is_empty() {
        info!("sends {} episodes again that an earlier process left", left.len());
    }
    for body in left {
        endpoint.restore(body).map_err(Failure::fault)?;
    }
    Ok(desk)
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
    options: &SessionOptions,
    desk: Desk,
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
        adapters: Adapters::new(options.base, options.metrics.clone()),
        metrics: options.metrics.clone(),
        desk,
    })
}

/// One connection's worth of work.
async fn play(
    endpoint: &ActorEndpoint,
    link: &mut LearnerLink,
    rollout: &mut Rollout,
    leaving: &mut Leaving,
) -> Result<End, Failure> {
    let sender = link.sender();
    // What an earlier link left unfinished goes on from where it stopped.
    rollout.adapters.stop().await;
    let asked = leaving.asked.clone();
    let mut free = None;
    let mut draining = false;
    // The learner knows of it: whatever it granted has come.
    let mut known = false;
    loop {
        let (episodes, bytes) = rollout.desk.unacknowledged();
        rollout.metrics.holds(rollout.desk.in_hand().count(), episodes, bytes);
        let served = endpoint.relay().map(|relay| relay.served());
        let served = served.map_or(0, |served| served.delta() + served.whole());
        rollout.metrics.relayed(endpoint.taken_from_actors(), served);
        if !draining && leaving.is_asked() {
            draining = true;
            info!("asked to leave: finishes what is in hand");
            if let Err(error) = sender.drain().await {
                return Ok(End::Lost(error));
            }
        }
        if known && rollout.desk.is_clear() {
            return Ok(End::Left);
        }
        let now = rollout.desk.free();
        if free != Some(now) {
            if let Err(error) = sender.ready(now).await {
                return Ok(End::Lost(error));
            }
            free = Some(now);
        }
        tokio::select! {
            message = link.recv() => match message {
                Ok(FromLearner::Grant(leases)) => {
                    let leases = rollout.desk.granted(leases);
                    rollout.tell(Command::Play(leases))?;
                    // A grant uses up free slots that the learner knows of already.
                    free = Some(rollout.desk.free());
                }
                Ok(FromLearner::Announce(manifest)) => {
                    if !rollout.held.contains(&manifest.policy) {
                        rollout.adapters.announced(manifest, &sender).await?;
                    }
                }
                Ok(FromLearner::Finish { reason }) => return Ok(End::Finished(reason)),
                Ok(FromLearner::Revoke(leases)) if leases.is_empty() => known = draining,
                Ok(message) => rollout.hear(message)?,
                Err(error) => return Ok(End::Lost(error)),
            },
            report = rollout.reports.recv() => {
                let sent = match report {
                    Some(Report::Holding(policy)) => {
                        rollout.held.insert(policy);
                        sender.holding(policy).await
                    }
                    Some(Report::Wanting(policy)) => {
                        if !rollout.held.contains(&policy) {
                            rollout.adapters.awaited(policy, &sender)?;
                        }
                        Ok(())
                    }
                    Some(Report::Dropped(policy)) => {
                        rollout.held.remove(&policy);
                        Ok(())
                    }
                    Some(Report::Ended(outcome)) => rollout.ended(outcome, &sender).await?,
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
            () = leaving.over() => return Ok(End::Left),
            () = first_asked(asked.clone(), draining) => {}
        }
    }
}

impl Rollout {
    fn tell(&self, command: Command) -> Result<(), Failure> {
        self.commands.send(command).map_err(|_| Failure::Fault("the sampling thread ended".into()))
    }

    /// Acknowledgements and revocations.
    fn hear(&mut self, message: FromLearner) -> Result<(), Failure> {
        match message {
            FromLearner::Ack { episode, outcome } => {
                self.metrics.episode(outcome.name());
                if let protocol::AckOutcome::Rejected { reason } = &outcome {
                    warn!(episode = %episode.0.short(), "rejected: {reason}");
                }
                let again = self.desk.acknowledged(&episode, &outcome).map_err(Failure::fault)?;
                again.map_or(Ok(()), |lease| self.tell(Command::Play(vec![lease])))
            }
            FromLearner::Revoke(leases) => {
                leases.into_iter().try_for_each(|lease| match self.desk.revoked(lease) {
                    true => self.tell(Command::Abandon(lease.id)),
                    false => Ok(()),
                })
            }
            FromLearner::Grant(_)
            | FromLearner::Announce(_)
            | FromLearner::Parent(_)
            | FromLearner::Children(_)
            | FromLearner::Finish { .. } => Ok(()),
        }
    }

    /// Keeps and sends an episode, or gives its lease back.
    async fn ended(
        &mut self,
        outcome: Outcome,
        sender: &ToLearner,
    ) -> Result<Result<(), LinkError>, Failure> {
        let (lease, reason) = match outcome {
            Outcome::Played { lease, episode } => match encoded(&episode) {
                Ok(body) => {
                    // Kept before it may be sent.
                    self.desk.played(lease.id, &body).map_err(Failure::fault)?;
                    self.metrics.episode("played");
                    sender.submit(body).map_err(Failure::fault)?;
                    return Ok(Ok(()));
                }
                Err(reason) => (lease, reason),
            },
            Outcome::Failed { lease, reason } => (lease, reason),
        };
        self.metrics.episode("failed");
        let Some(lease) = self.desk.failed(lease.id) else { return Ok(Ok(())) };
        warn!(%lease, "failed: {reason}");
        Ok(sender.lease_failed(lease, &reason).await)
    }
}

/// An episode as it travels, where it is not too long to.
fn encoded(episode: &Episode) -> Result<Bytes, String> {
    episode.encode().map(Bytes::from).map_err(|error| error.to_string())
}

/// Ends the sampling thread. What it finished meanwhile is kept; returns the leases that go back.
async fn stop(rollout: &mut Rollout, sender: &ToLearner) -> Result<Vec<LeaseAttempt>, Failure> {
    rollout.tell(Command::Stop)?;
    while let Some(report) = rollout.reports.recv().await {
        match report {
            Report::Stopped(_) | Report::Broken(_) => break,
            Report::Ended(outcome @ Outcome::Played { .. }) => {
                // A link that is lost says so when it is flushed.
                let _ = rollout.ended(outcome, sender).await?;
            }
            _ => {}
        }
    }
    Ok(rollout.desk.in_hand().collect())
}

/// Waits, within bounds, until the learner has acknowledged everything.
async fn flush(link: &mut LearnerLink, desk: &mut Desk) -> Result<(), Failure> {
    let deadline = Instant::now() + FLUSH;
    while desk.unacknowledged().0 > 0 {
        match tokio::time::timeout_at(deadline, link.recv()).await {
            Ok(Ok(FromLearner::Ack { episode, outcome })) => {
                // Nothing is played any more.
                let _ = desk.acknowledged(&episode, &outcome).map_err(Failure::fault)?;
            }
            Ok(Ok(_)) => {}
            Ok(Err(_)) | Err(_) => {
                let (count, place) = (desk.unacknowledged().0, desk.is_spooled());
                let fate =
                    if place { "they stay in the spool" } else { "they are lost: no --spool" };
                warn!("leaves with {count} episodes unacknowledged; {fate}");
                return Ok(());
            }
        }
    }
    Ok(())
}
