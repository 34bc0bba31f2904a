//! Real endpoints over a simulated network on a paused clock: the same seed gives the same packets,
//! and episodes are stored exactly once through loss, duplication, reordering and partitions.

#[path = "support/network.rs"]
mod network;
mod support;

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    sync::{Arc, OnceLock, atomic::AtomicU16, atomic::Ordering},
    time::Duration,
};

use network::{Network, Weather};
use protocol::{
    AckOutcome, ActorEndpoint, AdapterManifest, AdapterShelf, Admission, Arrival, Assembly,
    Backoff, EpisodeId, FetchError, FromActor, FromLearner, Hello, Identity, Join, LearnerConfig,
    LearnerEndpoint, LearnerLink, LinkConfig, LinkError, Secret, endpoint::SocketFactory,
};
use support::{Message, episode, samples};
use tokio::time::{Instant, sleep, timeout};

const LEARNER: ([u8; 4], u16) = ([10, 0, 0, 1], 4433);

/// Keys are random; everything else of a simulation comes from its seed.
fn identities() -> &'static (Identity, Identity) {
    static IDENTITIES: OnceLock<(Identity, Identity)> = OnceLock::new();
    IDENTITIES.get_or_init(|| {
        let make = || Identity::generate().expect("randomness");
        (make(), make())
    })
}

fn admission() -> Admission {
    let find = |wanted: &str| samples().into_iter().find(|(name, _)| *name == wanted);
    let Some((_, Message::Hello(hello))) = find("hello") else { panic!("a hello") };
    let Some((_, Message::Welcome(welcome))) = find("welcome") else { panic!("a welcome") };
    Admission { model: hello.model, welcome }
}

fn hello() -> Hello {
    Hello::new(admission().model, "cpu", 4)
}

fn link(seed: u64, side: u8) -> LinkConfig {
    let mut bytes = [side; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    LinkConfig { rng_seed: Some(bytes), ..LinkConfig::default() }
}

struct Sides {
    network: Network,
    learner: LearnerEndpoint,
    shelf: Arc<AdapterShelf>,
    actor: ActorEndpoint,
}

fn sides(seed: u64, weather: Weather) -> Sides {
    let network = Network::new(seed, weather);
    let (ours, theirs) = identities();
    let shelf = Arc::new(AdapterShelf::default());
    let mut config = LearnerConfig::new(admission(), shelf.clone());
    config.link = link(seed, 1);
    let secret = Secret::generate().expect("randomness");
    let address = SocketAddr::from(LEARNER);
    let socket = network.socket(address);
    let learner = LearnerEndpoint::over(socket, ours, secret, config).expect("listening");
    let join: Join = learner.join("10.0.0.1").expect("bound");
    let (port, net) = (AtomicU16::new(5000), network.clone());
    let sockets: SocketFactory = Arc::new(move |_| {
        let host = IpAddr::from([10, 0, 0, 2]);
        Ok(net.socket(SocketAddr::new(host, port.fetch_add(1, Ordering::Relaxed))))
    });
    let config = LinkConfig { fetch_parallel: 1, ..link(seed, 2) };
    let actor = ActorEndpoint::over(sockets, join, theirs.clone(), config);
    Sides { network, learner, shelf, actor }
}

/// Stores and acknowledges whatever comes, over as many links as it takes.
async fn ingest(learner: &mut LearnerEndpoint, stored: &mut Vec<EpisodeId>) {
    while let Some(arrival) = learner.accept().await {
        let Arrival::Joined(mut link) = arrival else { continue };
        while let Ok(message) = link.recv().await {
            let FromActor::Episode { id, .. } = message else { continue };
            let outcome = if stored.contains(&id) {
                AckOutcome::Duplicate
            } else {
                stored.push(id);
                AckOutcome::Stored
            };
            let ack = FromLearner::Ack { episode: id, outcome };
            if link.sender().send(ack).await.is_err() {
                break;
            }
        }
    }
}

/// Connects, and again after every loss, until everything is acknowledged.
async fn deliver(actor: &ActorEndpoint) {
    let mut backoff = Backoff::default();
    while actor.unacknowledged() > 0 {
        match actor.connect(hello()).await {
            Ok(mut link) => {
                backoff.succeeded();
                drain(actor, &mut link).await;
            }
            Err(error) => assert!(error.may_retry(), "{error}"),
        }
        sleep(backoff.failed(0.5)).await;
    }
}

async fn drain(actor: &ActorEndpoint, link: &mut LearnerLink) {
    while actor.unacknowledged() > 0 {
        if let Err(error) = link.recv().await {
            assert!(error.may_retry(), "{error}");
            return;
        }
    }
}

fn submit(actor: &ActorEndpoint, count: u64) -> BTreeSet<EpisodeId> {
    let mut submitted = BTreeSet::new();
    for seed in 0..count {
        let mut episode = episode();
        episode.seed = seed;
        let body = episode.encode().expect("sound");
        submitted.insert(actor.restore(body.into()).expect("short"));
    }
    submitted
}

/// One simulation: 40 episodes, a partition longer than the idle time-out in between.
fn simulate(seed: u64, weather: Weather) -> Vec<(Duration, SocketAddr, SocketAddr, usize)> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let Sides { network, mut learner, actor, .. } = sides(seed, weather);
        let submitted = submit(&actor, 40);
        let storm = async {
            sleep(Duration::from_millis(20 + seed % 50)).await;
            network.partition(true);
            sleep(Duration::from_secs(45)).await;
            network.partition(false);
        };
        let mut stored = Vec::new();
        let work = async {
            tokio::select! {
                () = ingest(&mut learner, &mut stored) => panic!("the learner stopped"),
                () = deliver(&actor) => {}
            }
        };
        let finished = timeout(Duration::from_secs(3600), async { tokio::join!(work, storm) });
        finished.await.expect("within an hour of simulated time");
        assert_eq!(stored.len(), submitted.len(), "each is counted once");
        assert_eq!(stored.into_iter().collect::<BTreeSet<_>>(), submitted);
        network.trace()
    })
}

#[test]
fn the_same_seed_gives_the_same_packets() {
    let weather = Weather { loss: 50, duplication: 20, delay_ms: 30 };
    let first = simulate(7, weather);
    assert!(first.len() > 20);
    assert!(first == simulate(7, weather), "two runs of one seed differ");
    assert!(first != simulate(8, weather), "two seeds agree");
}

#[test]
fn episodes_are_stored_exactly_once_in_any_weather() {
    for seed in 0..200 {
        let weather = Weather {
            loss: [0, 20, 100, 200][seed as usize % 4],
            duplication: [0, 50, 200][seed as usize % 3],
            delay_ms: [1, 10, 80][seed as usize / 2 % 3],
        };
        simulate(seed, weather);
    }
}

#[tokio::test(start_paused = true)]
async fn an_adapter_transfer_goes_on_after_a_partition_with_what_it_has() {
    let weather = Weather { loss: 10, duplication: 0, delay_ms: 5 };
    let Sides { network, mut learner, shelf, actor } = sides(3, weather);
    let bytes: Vec<u8> = (0..9_u32 << 20).map(|i| (i >> 3) as u8).collect();
    let manifest =
        AdapterManifest::build(1, &admission().model.weights, &bytes).expect("an adapter");
    shelf.put(manifest.clone(), bytes.clone());
    let serving = tokio::spawn(async move {
        let mut links = Vec::new();
        while let Some(arrival) = learner.accept().await {
            if let Arrival::Joined(link) = arrival {
                links.push(link);
            }
        }
    });
    let mut assembly = Assembly::new(manifest).expect("sound");
    let link = actor.connect(hello()).await.expect("welcome");
    let sender = link.sender();
    let cut = async {
        sleep(Duration::from_secs(12)).await;
        network.partition(true);
    };
    let began = Instant::now();
    let (broken, ()) = tokio::join!(sender.fetch(&mut assembly), cut);
    assert_eq!(broken, Err(FetchError::Link(LinkError::TimedOut)));
    println!("{assembly:?} after {:?}", began.elapsed());
    let missing: Vec<usize> = assembly.missing().collect();
    assert!((1..3).contains(&missing.len()), "{missing:?}");
    drop(link);
    network.partition(false);
    let link = actor.connect(hello()).await.expect("welcome back");
    link.sender().fetch(&mut assembly).await.expect("served");
    assert_eq!(assembly.finish().expect("whole"), bytes);
    serving.abort();
}
