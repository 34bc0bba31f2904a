//! What hosting a Python class costs: calls a second through the host and by Python itself, and many
//! episodes at once with the memory of their processes.
//!
//! `cargo run --release -p environments --example python_host -- [EPISODES]`

use std::{collections::BTreeMap, fs, path::Path, process::Command, time::Instant};

use environments::{CallPermit, EnvironmentSpec, EpisodeKey, Fault, Recorder};
use protocol::{Digest, LeaseId, ParsedCall, RunId, Split, Task};
use serde_json::json;

const CALLS: u32 = 5000;
/// The same calls in Python itself, through `json` and back as a host must.
const DIRECT: &str = "
import random, sys, time
sys.path.insert(0, sys.argv[1])
from guess_game import GuessGame
game = GuessGame()
game.reset(largest=1, guesses=10**9)
start = time.perf_counter()
for _ in range(100000):
    game.guess(value=2)
print(100000 / (time.perf_counter() - start))
";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let episodes: usize = std::env::args().nth(1).map_or(Ok(64), |text| text.parse())?;
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/python-guess");
    let section = json!({"python": "guess_game:GuessGame"});
    let started = Instant::now();
    let spec = EnvironmentSpec::parse_in(&section, &folder)?;
    spec.describe()?;
    let opened = started.elapsed();

    let task = Task {
        id: "t".into(),
        prompt: String::new(),
        fields: r#"{"largest": 1, "guesses": 1000000000}"#.into(),
        split: Split::Train,
    };
    let start = |seed| {
        let lease = LeaseId { group: 0, generation: 0 };
        let key = EpisodeKey { run: RunId(Digest::of(b"")), lease, task: &task, seed };
        Recorder::start(spec.open()?, key, spec.limits())
    };
    let guess = ParsedCall::Call { name: "guess".into(), arguments: r#"{"value":2}"#.into() };
    let mut episode = start(0)?;
    let started = Instant::now();
    for turn in 0..CALLS {
        episode.call(turn, &guess, CallPermit::Run)?;
    }
    let hosted = f64::from(CALLS) / started.elapsed().as_secs_f64();
    drop(episode);

    let started = Instant::now();
    for seed in 0..100 {
        drop(start(seed)?);
    }
    let turnover = 100.0 / started.elapsed().as_secs_f64();

    let started = Instant::now();
    let mut open: Vec<Recorder> = (0..episodes as u64).map(start).collect::<Result<_, Fault>>()?;
    let all_open = started.elapsed();
    let started = Instant::now();
    for turn in 0..50 {
        for episode in &mut open {
            episode.call(turn, &guess, CallPermit::Run)?;
        }
    }
    let at_once = 50.0 * episodes as f64 / started.elapsed().as_secs_f64();
    let (processes, resident, proportional) = memory()?;
    drop(open);

    let direct = Command::new("python3").args(["-c", DIRECT]).arg(&folder).output()?;
    let direct: f64 = String::from_utf8(direct.stdout)?.trim().parse()?;
    let report = json!({
        "seconds_to_open_and_probe": opened.as_secs_f64(),
        "calls_per_second_hosted": hosted.round(),
        "calls_per_second_direct": direct.round(),
        "episodes_per_second_one_after_another": turnover.round(),
        "episodes_at_once": episodes,
        "seconds_to_open_them": all_open.as_secs_f64(),
        "calls_per_second_over_them": at_once.round(),
        "processes": processes,
        "resident_mib_summed": resident / 1024,
        "proportional_mib_summed": proportional / 1024,
    });
    println!("{report:#}");
    Ok(())
}

/// How many processes run below this one, and the KiB that they hold: each counted in full, and shared
/// pages in shares.
fn memory() -> Result<(usize, u64, u64), std::io::Error> {
    let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for entry in fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Ok(id) = name.to_string_lossy().parse::<u32>() else { continue };
        let stat = fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
        let parent = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1));
        if let Some(parent) = parent.and_then(|text| text.parse().ok()) {
            children.entry(parent).or_default().push(id);
        }
    }
    let (mut count, mut resident, mut proportional) = (0, 0, 0);
    let mut queue = vec![std::process::id()];
    while let Some(parent) = queue.pop() {
        for id in children.remove(&parent).unwrap_or_default() {
            let text = fs::read_to_string(format!("/proc/{id}/smaps_rollup")).unwrap_or_default();
            let field = |name: &str| -> u64 {
                let line = text.lines().find(|line| line.starts_with(name));
                let number = line.and_then(|line| line.split_whitespace().nth(1));
                number.and_then(|text| text.parse().ok()).unwrap_or_default()
            };
            count += 1;
            resident += field("Rss:");
            proportional += field("Pss:");
            queue.push(id);
        }
    }
    Ok((count, resident, proportional))
}
