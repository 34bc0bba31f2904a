//! Figures of a link on loopback: joins, control, episodes. No pass mark on time.
//!
//! `cargo bench -p protocol --bench link`

#[path = "support/learner.rs"]
#[allow(dead_code)] // other benches use the rest
mod learner;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use learner::{Failure, admission, episode, learner};
use protocol::{
    AckOutcome, ActorEndpoint, ActorLink, AdapterShelf, Arrival, Episode, FromActor, FromLearner,
    Hello, Identity, LearnerEndpoint, LearnerLink, LeaseId, LinkConfig,
};

async fn pair(
    learner: &mut LearnerEndpoint,
    actor: &ActorEndpoint,
) -> Result<(LearnerLink, ActorLink), Failure> {
    let hello = Hello::new(admission().model, "cpu", 8);
    let (theirs, ours) = tokio::join!(actor.connect(hello), learner.accept());
    match ours {
        Some(Arrival::Joined(ours)) => Ok((theirs?, ours)),
        other => Err(format!("not joined: {other:?}").into()),
    }
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// Acknowledges every episode and answers every `Ready`.
async fn answer(mut link: ActorLink) -> Result<(), Failure> {
    let sender = link.sender();
    loop {
        let reply = match link.recv().await? {
            FromActor::Episode { id, .. } => {
                FromLearner::Ack { episode: id, outcome: AckOutcome::Stored }
            }
            FromActor::Ready { .. } => FromLearner::Revoke(Vec::new()),
            _ => continue,
        };
        sender.send(reply).await?;
    }
}

fn main() -> Result<(), Failure> {
    tokio::runtime::Runtime::new()?.block_on(run())
}

async fn run() -> Result<(), Failure> {
    let shelf = Arc::new(AdapterShelf::default());
    let mut learner = learner(shelf)?;
    let join = learner.join("127.0.0.1")?;
    let actor = ActorEndpoint::new(join, Identity::generate()?, LinkConfig::default());

    let mut joins = Vec::new();
    for _ in 0..20 {
        let began = Instant::now();
        let links = pair(&mut learner, &actor).await?;
        joins.push(began.elapsed());
        drop(links);
    }
    println!("join, p50 of 20: {:?}", median(joins));

    let (mut theirs, ours) = pair(&mut learner, &actor).await?;
    let answering = tokio::spawn(answer(ours));
    let sender = theirs.sender();
    let mut trips = Vec::new();
    for _ in 0..500 {
        let began = Instant::now();
        sender.ready(1).await?;
        theirs.recv().await?;
        trips.push(began.elapsed());
    }
    println!("control round trip, p50 of 500: {:?}", median(trips));

    for (tokens, count) in [(512, 2000_u64), (30_000, 200)] {
        let bodies: Vec<Vec<u8>> = (0..count)
            .map(|seed| episode(LeaseId { group: seed, generation: 0 }, tokens).encode())
            .collect::<Result<_, _>>()?;
        let bytes = bodies.first().map_or(0, Vec::len);
        let began = Instant::now();
        for body in bodies {
            sender.submit(body)?;
        }
        while actor.unacknowledged() > 0 {
            theirs.recv().await?;
        }
        let rate = count as f64 / began.elapsed().as_secs_f64();
        println!("episodes of {bytes} bytes, sent and acknowledged: {rate:.0} a second");

        let episode = episode(LeaseId { group: 0, generation: 0 }, tokens);
        let body = episode.encode()?;
        let rounds = 20_000_000 / body.len();
        let began = Instant::now();
        for _ in 0..rounds {
            std::hint::black_box(episode.encode()?);
        }
        let encode = began.elapsed();
        let began = Instant::now();
        for _ in 0..rounds {
            std::hint::black_box(Episode::decode(&body)?);
        }
        let decode = began.elapsed();
        let rate = |took: Duration| (rounds * body.len()) as f64 / 1e9 / took.as_secs_f64();
        println!("  encode {:.2} GB/s, decode {:.2} GB/s", rate(encode), rate(decode));
    }

    answering.abort();
    Ok(())
}
