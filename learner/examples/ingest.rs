//! Episodes a second that a learner takes durably: 1, 4 and 16 actors on loopback send episodes, the
//! learner appends each to a journal and acknowledges it after a sync that all share which came in
//! meanwhile. Nothing is audited. Both ends are in this process; no pass mark on time.
//!
//! `cargo run -p learner --example ingest [-- TOKENS EPISODES]`

#[path = "../../protocol/benches/support/learner.rs"]
#[allow(dead_code)] // the benches use the rest
mod learner_side;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use learner::journal::{Journal, Record};
use learner_side::{Failure, admission, episode};
use protocol::{
    AckOutcome, ActorEndpoint, ActorId, AdapterShelf, Arrival, EpisodeId, FromActor, FromLearner,
    Hello, Identity, LearnerLink, LeaseId, LinkConfig, ToActor,
};
use tokio::sync::mpsc;

/// Episodes that an actor has in flight.
const IN_FLIGHT: usize = 64;
/// Episodes that share a sync at most.
const BURST: usize = 256;

/// Sends episodes, so many in flight, until all are acknowledged.
async fn play(
    endpoint: ActorEndpoint,
    mut link: LearnerLink,
    bodies: Vec<Vec<u8>>,
) -> Result<LearnerLink, Failure> {
    let mut bodies = bodies.into_iter();
    loop {
        while endpoint.unacknowledged() < IN_FLIGHT {
            let Some(body) = bodies.next() else { break };
            link.sender().submit(body)?;
        }
        if endpoint.unacknowledged() == 0 {
            return Ok(link);
        }
        link.recv().await?;
    }
}

type Arrived = (ActorId, ToActor, EpisodeId, Vec<u8>);

/// Appends what came in, syncs, and acknowledges; returns how often it synced and for how long.
fn keep(
    mut journal: Journal,
    mut arrived: mpsc::Receiver<Arrived>,
    runtime: &tokio::runtime::Handle,
) -> Result<(usize, Duration), Failure> {
    let (mut syncs, mut syncing) = (0, Duration::ZERO);
    let mut batch = Vec::new();
    while runtime.block_on(arrived.recv_many(&mut batch, BURST)) > 0 {
        for (actor, _, _, body) in &batch {
            let (actor, device) = (*actor, "cpu");
            journal.append(&Record::Accepted { actor, attempt: 0, behind: 0, device, body })?;
        }
        let began = Instant::now();
        journal.sync()?;
        syncs += 1;
        syncing += began.elapsed();
        for (_, sender, episode, _) in batch.drain(..) {
            let ack = FromLearner::Ack { episode, outcome: AckOutcome::Stored };
            runtime.block_on(sender.send(ack))?;
        }
    }
    Ok((syncs, syncing))
}

async fn measure(actors: usize, tokens: u32, episodes: usize) -> Result<(), Failure> {
    let dir = tempfile::tempdir_in(".")?;
    let journal = Journal::create(dir.path().join("journal"), admission().welcome.run)?;
    let mut learner = learner_side::learner(Arc::new(AdapterShelf::default()))?;
    let (arrive, arrived) = mpsc::channel(BURST);
    let handle = tokio::runtime::Handle::current();
    let keeping = std::thread::spawn(move || keep(journal, arrived, &handle));
    let mut players = Vec::new();
    for actor in 0..actors {
        let link = LinkConfig::default();
        let endpoint = ActorEndpoint::new(learner.join("127.0.0.1")?, Identity::generate()?, link);
        let hello = Hello::new(admission().model, "cpu", IN_FLIGHT as u32);
        let (theirs, arrival) = tokio::join!(endpoint.connect(hello), learner.accept());
        let Some(Arrival::Joined(mut ours)) = arrival else { return Err("not joined".into()) };
        let arrive = arrive.clone();
        tokio::spawn(async move {
            let sender = ours.sender();
            while let Ok(message) = ours.recv().await {
                if let FromActor::Episode { id, body } = message
                    && arrive.send((ours.actor, sender.clone(), id, body)).await.is_err()
                {
                    return;
                }
            }
        });
        let bodies = (0..episodes / actors)
            .map(|at| {
                episode(LeaseId { group: at as u64, generation: actor as u32 }, tokens).encode()
            })
            .collect::<Result<Vec<_>, _>>()?;
        players.push((endpoint, theirs?, bodies));
    }
    drop(arrive);
    let bytes = players.first().and_then(|it| it.2.first()).map_or(0, Vec::len);
    let (began, cpu) = (Instant::now(), cpu_seconds());
    let mut playing = tokio::task::JoinSet::new();
    for (endpoint, link, bodies) in players {
        playing.spawn(play(endpoint, link, bodies));
    }
    let mut links = Vec::new();
    while let Some(link) = playing.join_next().await {
        links.push(link??);
    }
    let (wall, cpu) = (began.elapsed().as_secs_f64(), cpu_seconds() - cpu);
    drop(links);
    learner.shutdown(protocol::CloseCode::Finished, "done").await;
    let (syncs, syncing) = tokio::task::spawn_blocking(|| keeping.join())
        .await?
        .map_err(|_| "the journal's thread panicked")??;
    let count = episodes / actors * actors;
    println!(
        "| {actors} | {bytes} | {count} | {:.0} | {:.1} | {syncs} | {:.1} | {:.2} |",
        count as f64 / wall,
        count as f64 / syncs as f64,
        1e3 * syncing.as_secs_f64() / syncs as f64,
        1e3 * cpu / count as f64,
    );
    Ok(())
}

/// Of this process, all threads, user and system. In hundredths of a second on Linux; 0 elsewhere.
fn cpu_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after_name = text.rsplit(')').next().unwrap_or_default();
    let mut fields = after_name.split_whitespace().skip(11);
    let mut ticks = || fields.next().and_then(|it| it.parse::<f64>().ok()).unwrap_or_default();
    (ticks() + ticks()) / 100.0
}

fn main() -> Result<(), Failure> {
    let numbers: Vec<usize> = std::env::args().filter_map(|it| it.parse().ok()).collect();
    let (tokens, episodes) = match numbers.as_slice() {
        [tokens, episodes] => (u32::try_from(*tokens)?, *episodes),
        _ => (512, 4096),
    };
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    println!("load before: {}", load.split(' ').next().unwrap_or_default());
    println!("| actors | bytes | episodes | a second | a sync | syncs | ms a sync | CPU ms each |");
    println!("|---|---|---|---|---|---|---|---|");
    let runtime = tokio::runtime::Runtime::new()?;
    for actors in [1, 4, 16] {
        for _ in 0..3 {
            runtime.block_on(async { tokio::spawn(measure(actors, tokens, episodes)).await })??;
        }
    }
    Ok(())
}
