//! Figures of a link on loopback, beside a plain TCP copy in the same run. No pass mark on time.
//!
//! `cargo bench -p protocol --bench link`

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::Arc,
    time::{Duration, Instant},
};

use protocol::{
    AckOutcome, ActorEndpoint, ActorLink, AdapterManifest, AdapterShelf, Admission, Arrival,
    Assembly, ComputeDtype, Digest, Episode, EpisodeEnd, FinishReason, FromActor, FromLearner,
    Hello, Identity, LearnerConfig, LearnerEndpoint, LearnerLink, LeaseId, LinkConfig,
    ModelDigests, OnMalformed, PolicyDigest, RunId, RunSettings, Secret, Span, Welcome,
};

type Failure = Box<dyn std::error::Error + Send + Sync>;

fn admission() -> Admission {
    let digest = |text: &str| Digest::of(text.as_bytes());
    Admission {
        model: ModelDigests {
            weights: digest("weights"),
            tokenizer: digest("tokenizer"),
            template: digest("template"),
        },
        welcome: Welcome {
            run: RunId(digest("run")),
            settings: RunSettings {
                environment: "{}".to_owned(),
                system: None,
                chat_template_kwargs: "{}".to_owned(),
                max_completion_length: 4096,
                max_tool_calling_iterations: 8,
                on_malformed: OnMalformed::Observe,
                lora: "{}".to_owned(),
                compute_dtype: ComputeDtype::F32,
            },
        },
    }
}

/// An episode of `tokens` ids, half of them sampled.
fn episode(seed: u64, tokens: u32) -> Episode {
    let policy = PolicyDigest(Digest::of(b"policy"));
    let ids: Vec<u32> = (tokens / 2..tokens).collect();
    let logps: Vec<f32> = ids.iter().map(|id| -1.0 / (*id as f32 + 1.0)).collect();
    Episode {
        run: admission().welcome.run,
        lease: LeaseId { group: seed, generation: 0 },
        task: "task".to_owned(),
        seed,
        policy,
        reset_text: "Guess a number.".to_owned(),
        reset_images: Vec::new(),
        tokens: (0..tokens).collect(),
        loss_mask: (0..tokens).map(|i| u8::from(i >= tokens / 2)).collect(),
        spans: vec![Span {
            offset: tokens / 2,
            ids,
            logp_raw: logps.clone(),
            logp_sampling: logps,
            finish: FinishReason::Stop,
            policy,
            context: Digest::of(b"context"),
        }],
        trace: Vec::new(),
        trace_head: Digest::of(b"head"),
        end: EpisodeEnd::NoCall,
        reward: 1.0,
        images: Vec::new(),
    }
}

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

fn tcp_copy(bytes: &Arc<Vec<u8>>) -> Result<Duration, Failure> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let addr = listener.local_addr()?;
    let source = bytes.clone();
    let serving = std::thread::spawn(move || listener.accept()?.0.write_all(&source));
    let mut copy = Vec::with_capacity(bytes.len());
    let began = Instant::now();
    TcpStream::connect(addr)?.read_to_end(&mut copy)?;
    let took = began.elapsed();
    serving.join().map_err(|_| "the sender panicked")??;
    if copy == **bytes { Ok(took) } else { Err("the copy differs".into()) }
}

fn main() -> Result<(), Failure> {
    tokio::runtime::Runtime::new()?.block_on(run())
}

async fn run() -> Result<(), Failure> {
    let shelf = Arc::new(AdapterShelf::default());
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let config = LearnerConfig::new(admission(), shelf.clone());
    let mut learner =
        LearnerEndpoint::bind(any, &Identity::generate()?, Secret::generate()?, config)?;
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
        let bodies: Vec<Vec<u8>> =
            (0..count).map(|seed| episode(seed, tokens).encode()).collect::<Result<_, _>>()?;
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

        let episode = episode(0, tokens);
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

    for megabytes in [10_usize, 100] {
        let bytes: Arc<Vec<u8>> =
            Arc::new((0..megabytes * 1_000_000).map(|i| (i ^ (i >> 9)) as u8).collect());
        let manifest = AdapterManifest::build(1, &admission().model.weights, &bytes)?;
        shelf.put(manifest.clone(), bytes.to_vec());
        let began = Instant::now();
        let mut assembly = Assembly::new(manifest)?;
        sender.fetch(&mut assembly).await?;
        let copy = assembly.finish()?;
        let took = began.elapsed();
        if copy != **bytes {
            return Err("the adapter differs".into());
        }
        let tcp = tokio::task::block_in_place(|| tcp_copy(&bytes))?;
        let rate = |took: Duration| megabytes as f64 / took.as_secs_f64();
        println!(
            "adapter of {megabytes} MB, fetched and verified: {:.0} MB/s; plain TCP, unverified: {:.0} MB/s; ratio {:.2}",
            rate(took),
            rate(tcp),
            rate(took) / rate(tcp)
        );
    }
    answering.abort();
    Ok(())
}
