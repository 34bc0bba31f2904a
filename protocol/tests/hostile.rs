//! Strangers and admitted peers that mean harm, from a process of their own: what they can cost the
//! learner's memory, counted by its allocator, and that honest actors go on meanwhile. One test only:
//! the count is of the whole process.

#[path = "support/attacker.rs"]
mod attacker;
mod support;

use std::{
    alloc::System,
    net::SocketAddr,
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use attacker::{ATTACK, ATTACKS, TARGET};
use protocol::{
    AckOutcome, ActorEndpoint, ActorLink, AdapterManifest, AdapterShelf, Admission, Arrival,
    FromActor, FromLearner, Hello, Identity, LearnerConfig, LearnerEndpoint, LearnerLink,
    LinkConfig, Secret, frame::CHUNK_LEN,
};
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use support::{Message, episode, samples};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// What all attacks together may keep in the learner's memory at any time; twice what they do.
const LIMIT: usize = 70 << 20;
/// What they may leave behind when their links are noticed to be dead.
const LEFT: usize = 8 << 20;

/// Bytes that are allocated now.
fn live() -> usize {
    let stats = ALLOCATOR.stats();
    stats.bytes_allocated.saturating_sub(stats.bytes_deallocated)
}

fn admission() -> Admission {
    let find = |wanted: &str| samples().into_iter().find(|(name, _)| *name == wanted);
    let Some((_, Message::Hello(hello))) = find("hello") else { panic!("a hello") };
    let Some((_, Message::Welcome(welcome))) = find("welcome") else { panic!("a welcome") };
    Admission { model: hello.model, welcome }
}

/// Answers an actor as a learner does; an admitted attacker is answered the same way.
async fn attend(mut link: ActorLink) {
    let sender = link.sender();
    while let Ok(message) = link.recv().await {
        let answer = match message {
            FromActor::Episode { id, .. } => {
                FromLearner::Ack { episode: id, outcome: AckOutcome::Stored }
            }
            FromActor::Ready { .. } => FromLearner::Revoke(Vec::new()),
            _ => continue,
        };
        if sender.send(answer).await.is_err() {
            return;
        }
    }
}

/// Plays on, one episode and one question at a time, and notes the longest wait.
async fn work(mut link: LearnerLink, stop: Arc<AtomicBool>) -> (usize, Duration) {
    let (mut done, mut longest) = (0, Duration::ZERO);
    while !stop.load(Ordering::Relaxed) {
        let began = Instant::now();
        let mut episode = episode();
        episode.seed = done as u64;
        let id = link.sender().submit(episode.encode().expect("sound")).expect("short");
        loop {
            match link.recv().await.expect("an honest link lives") {
                FromLearner::Ack { episode, .. } if episode == id => break,
                _ => {}
            }
        }
        link.sender().ready(1).await.expect("an honest link lives");
        assert!(matches!(link.recv().await, Ok(FromLearner::Revoke(_))));
        longest = longest.max(began.elapsed());
        done += 1;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    (done, longest)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_peers_cost_bounded_memory_and_honest_actors_go_on() {
    if let Ok(attack) = std::env::var(ATTACK) {
        // This is the other process.
        attacker::run(&attack, &std::env::var(TARGET).expect("a join string")).await;
        return;
    }
    let shelf = Arc::new(AdapterShelf::default());
    let mut config = LearnerConfig::new(admission(), shelf.clone());
    config.link.join = Duration::from_secs(3);
    config.link.idle = Duration::from_secs(10);
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let identity = Identity::generate().expect("made");
    let secret = Secret::generate().expect("made");
    let mut learner = LearnerEndpoint::bind(any, &identity, secret, config).expect("a port");
    let join = learner.join("127.0.0.1").expect("bound");
    let bytes: Vec<u8> = (0..2 * CHUNK_LEN).map(|at| (at % 251) as u8).collect();
    let manifest = AdapterManifest::build(1, &admission().model.weights, &bytes).expect("sound");
    shelf.put(manifest, bytes);

    let (refused, joined) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let counts = (refused.clone(), joined.clone());
    let listening = tokio::spawn(async move {
        while let Some(arrival) = learner.accept().await {
            match arrival {
                Arrival::Joined(link) => {
                    counts.1.fetch_add(1, Ordering::Relaxed);
                    tokio::spawn(attend(link));
                }
                Arrival::Refused { failure, .. } => {
                    counts.0.fetch_add(1, Ordering::Relaxed);
                    assert!(failure.to_string().len() < 1100, "{failure}");
                }
            }
        }
    });
    let actor = |seed: u8| {
        let link = LinkConfig { fetch_parallel: usize::from(seed), ..LinkConfig::default() };
        ActorEndpoint::new(join.clone(), Identity::generate().expect("made"), link)
    };
    let honest = actor(1);
    let link = honest.connect(Hello::new(admission().model, "cpu", 4)).await.expect("welcome");
    let stop = Arc::new(AtomicBool::new(false));
    let working = tokio::spawn(work(link, stop.clone()));
    tokio::time::sleep(Duration::from_secs(1)).await;

    // A thread of its own sees every peak, however busy the runtime is.
    let peak = Arc::new(AtomicUsize::new(0));
    let (watched, done) = (peak.clone(), stop.clone());
    let watching = std::thread::spawn(move || {
        while !done.load(Ordering::Relaxed) {
            watched.fetch_max(live(), Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    let before = live();
    println!("{:>8} KiB before", before >> 10);
    for attack in ATTACKS {
        peak.store(live(), Ordering::Relaxed);
        let (refusals, joins) = (refused.load(Ordering::Relaxed), joined.load(Ordering::Relaxed));
        let began = Instant::now();
        let attacking = tokio::process::Command::new(std::env::current_exe().expect("a program"))
            .args(["--exact", "hostile_peers_cost_bounded_memory_and_honest_actors_go_on"])
            .arg("--nocapture")
            .env(ATTACK, attack)
            .env(TARGET, join.reveal())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .output();
        let output = attacking.await.expect("started");
        assert!(
            output.status.success(),
            "{attack}: {}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        let cost = peak.load(Ordering::Relaxed).saturating_sub(before);
        println!(
            "{:>8} KiB more at most, {:>5} turned away, {:>4} let in, {:.1} s: {attack}",
            cost >> 10,
            refused.load(Ordering::Relaxed) - refusals,
            joined.load(Ordering::Relaxed) - joins,
            began.elapsed().as_secs_f64(),
        );
        assert!(cost < LIMIT, "{attack}: {cost} bytes, the limit is {LIMIT}");
        assert!(!working.is_finished(), "{attack}: the honest actor was lost");
    }

    // One that comes later is let in, when the address is forgiven.
    let late = actor(2);
    let came = loop {
        match late.connect(Hello::new(admission().model, "cpu", 4)).await {
            Ok(link) => break link,
            Err(error) => assert!(error.may_retry(), "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    };
    came.close().await;
    stop.store(true, Ordering::Relaxed);
    watching.join().expect("no panic");
    let (rounds, longest) = working.await.expect("no panic");
    println!("the honest actor: {rounds} rounds, the longest took {longest:?}");
    assert!(rounds > 100, "{rounds} rounds");
    assert!(longest < Duration::from_secs(5), "{longest:?}");
    // What they cost is given back.
    let until = Instant::now() + Duration::from_secs(60);
    while live().saturating_sub(before) > LEFT && Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let kept = live().saturating_sub(before);
    println!("{:>8} KiB more afterwards", kept >> 10);
    assert!(kept < LEFT, "{kept} bytes are kept");
    assert!(!listening.is_finished());
    listening.abort();
}
