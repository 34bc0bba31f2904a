//! One adapter to several actors on loopback, whole and as deltas, beside plain TCP copies to as many
//! readers in the same run. Both ends are in this process; no pass mark on time.
//!
//! `cargo bench -p protocol --bench broadcast` runs 10, 100 and 500 MB to 1, 4 and 16 actors, three
//! times each; `-- MEGABYTES ACTORS` runs one of them.

#[path = "support/learner.rs"]
#[allow(dead_code)] // other benches use the rest
mod learner;

use std::{
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use learner::{Failure, admission, cpu_seconds, learner, median};
use protocol::{
    ActorEndpoint, AdapterManifest, AdapterShelf, Arrival, Assembly, Digest, Hello, Identity,
    LearnerEndpoint, LearnerLink, LinkConfig, PolicyDigest,
};

const ROUNDS: usize = 3;

/// Two adapters of bf16 numbers, normal with deviation 0.02, a small step apart: each number moves by
/// about 1e-4 in one direction or the other.
fn adapters(bytes: usize) -> [Vec<u8>; 2] {
    let bf16 = |number: f32| {
        let bits = number.to_bits();
        ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
    };
    let mut state = 1_u64;
    let mut uniform = move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32
    };
    let mut both = [Vec::with_capacity(bytes), Vec::with_capacity(bytes)];
    for _ in 0..bytes / 2 {
        // Twelve uniform draws, less six, are nearly normal.
        let normal: f32 = (0..12).map(|_| uniform()).sum::<f32>() - 6.0;
        let (old, step) = (0.02 * normal, 1e-4 * (2.0 * uniform() - 1.0));
        both[0].extend(bf16(old).to_le_bytes());
        both[1].extend(bf16(old + step).to_le_bytes());
    }
    let header = |data: &[u8]| {
        let tensor = safetensors::tensor::TensorView::new(
            safetensors::Dtype::BF16,
            vec![data.len() / 2],
            data,
        );
        tensor.and_then(|tensor| safetensors::serialize([("adapter", tensor)], None))
    };
    both.map(|data| header(&data).unwrap_or(data))
}

struct Actor {
    _endpoint: ActorEndpoint,
    link: LearnerLink,
}

async fn join(learner: &mut LearnerEndpoint) -> Result<(Actor, protocol::ActorLink), Failure> {
    let join = learner.join("127.0.0.1")?;
    let endpoint = ActorEndpoint::new(join, Identity::generate()?, LinkConfig::default());
    let hello = Hello::new(admission().model, "cpu", 1);
    let (link, arrival) = tokio::join!(endpoint.connect(hello), learner.accept());
    match arrival {
        Some(Arrival::Joined(ours)) => Ok((Actor { _endpoint: endpoint, link: link? }, ours)),
        other => Err(format!("not joined: {other:?}").into()),
    }
}

/// Every actor fetches at once; wall time and CPU time of both ends until the last has verified all.
async fn fetch(
    actors: &[Actor],
    manifest: &AdapterManifest,
    base: Option<(PolicyDigest, &Bytes)>,
) -> Result<(f64, f64), Failure> {
    let (began, cpu) = (Instant::now(), cpu_seconds());
    let mut fetching = tokio::task::JoinSet::new();
    for actor in actors {
        let mut assembly = Assembly::new(manifest.clone())?;
        if let Some((policy, bytes)) = base {
            assembly = assembly.with_base(&policy, bytes.clone());
        }
        let sender = actor.link.sender();
        fetching.spawn(async move {
            sender.fetch(&mut assembly).await.map_err(|e| e.to_string())?;
            assembly.finish().map(drop).map_err(|e| e.to_string())
        });
    }
    while let Some(fetched) = fetching.join_next().await {
        fetched??;
    }
    Ok((began.elapsed().as_secs_f64(), cpu_seconds() - cpu))
}

/// The same bytes over TCP to as many readers at once, unverified.
fn copy(bytes: &Arc<Vec<u8>>, readers: usize) -> Result<(f64, f64), Failure> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let addr = listener.local_addr()?;
    let (began, cpu) = (Instant::now(), cpu_seconds());
    std::thread::scope(|scope| -> Result<(), Failure> {
        let mut reading = Vec::new();
        for _ in 0..readers {
            let source = bytes.clone();
            reading.push(scope.spawn(move || -> std::io::Result<bool> {
                let mut copied = Vec::with_capacity(source.len());
                TcpStream::connect(addr)?.read_to_end(&mut copied)?;
                Ok(copied.len() == source.len())
            }));
            let (mut stream, _) = listener.accept()?;
            let source = bytes.clone();
            scope.spawn(move || stream.write_all(&source));
        }
        for reader in reading {
            if !reader.join().map_err(|_| "a reader panicked")?? {
                return Err("a copy is short".into());
            }
        }
        Ok(())
    })?;
    Ok((began.elapsed().as_secs_f64(), cpu_seconds() - cpu))
}

async fn measure(megabytes: usize, count: usize) -> Result<(), Failure> {
    let [old, new] = adapters(megabytes * 1_000_000);
    let shelf = Arc::new(AdapterShelf::default());
    let mut learner = learner(shelf.clone())?;
    let (mut actors, mut links) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let (actor, link) = join(&mut learner).await?;
        actors.push(actor);
        links.push(link);
    }
    let weights = admission().model.weights;
    let base = AdapterManifest::build(1, &weights, &old)?;
    let old = Bytes::from(old);
    shelf.put(base.clone(), old.clone());
    let began = Instant::now();
    let manifest = AdapterManifest::build(2, &weights, &new)?;
    let hashing = began.elapsed();
    let began = Instant::now();
    let manifest = shelf.put(manifest, new.clone());
    let packing = began.elapsed();
    let new = Arc::new(new);
    let (with, without) = manifest.transfer_bytes();
    let mut columns: [Vec<(f64, f64)>; 3] = Default::default();
    for _ in 0..ROUNDS {
        columns[0].push(tokio::task::block_in_place(|| copy(&new, count))?);
        columns[1].push(fetch(&actors, &manifest, None).await?);
        columns[2].push(fetch(&actors, &manifest, Some((base.policy, &old))).await?);
    }
    let [tcp, whole, delta] = columns.map(|rounds| {
        let (wall, cpu): (Vec<f64>, Vec<f64>) = rounds.into_iter().unzip();
        (median(wall), median(cpu))
    });
    println!(
        "| {megabytes} | {count} | {:.2} | {:.2} | {:.2} | {:.2} | {:.2} | {:.2} | {:.2} | {:.2} + {:.2} |",
        tcp.0,
        tcp.1,
        whole.0,
        whole.1,
        delta.0,
        delta.1,
        with as f64 / without as f64,
        hashing.as_secs_f64(),
        packing.as_secs_f64(),
    );
    debug_assert_eq!(manifest.adapter, Digest::of(&new));
    drop(links);
    Ok(())
}

fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().unwrap_or_default().to_owned()
}

fn main() -> Result<(), Failure> {
    let numbers: Vec<usize> = std::env::args().filter_map(|it| it.parse().ok()).collect();
    let cases = match numbers.as_slice() {
        [megabytes, actors] => vec![(*megabytes, *actors)],
        _ => [10, 100, 500].into_iter().flat_map(|it| [1, 4, 16].map(|n| (it, n))).collect(),
    };
    let runtime = tokio::runtime::Runtime::new()?;
    println!("load before: {}", load());
    println!(
        "| MB | actors | TCP s | CPU s | whole s | CPU s | delta s | CPU s | delta/whole | hash + pack s |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for (megabytes, actors) in cases {
        runtime.block_on(async { tokio::spawn(measure(megabytes, actors)).await })??;
    }
    println!("load after: {}", load());
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(())
}
