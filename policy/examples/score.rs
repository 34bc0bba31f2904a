//! Seconds of scoring with gradients on a checkpoint with an adapter: forward and backward over rows
//! of made-up ids. `scripts/bench/qwen35.py` runs it beside transformers and PEFT. Prints one JSON
//! object a run, passes no judgement.
//!
//! ```text
//! cargo run --release -p policy --example score -- CHECKPOINT ADAPTER --rows 8 --length 256
//!     [--prefix 0] [--scored LAST] [--runs 3] [--checkpointing]
//! ```

use std::{path::Path, process::ExitCode, str::FromStr, time::Instant};

use policy::{
    device::DeviceChoice,
    model::{Adapter, Checkpoint, LoadDtype},
    score::{self, ScoreBatch, ScoreConfig, ScoreRow, Trainable},
};

type Failure = Box<dyn std::error::Error>;

struct Arguments(Vec<String>);

impl Arguments {
    fn number<T: FromStr>(&self, name: &str, default: T) -> Result<T, Failure> {
        let Some(at) = self.0.iter().position(|argument| argument == name) else {
            return Ok(default);
        };
        let text = self.0.get(at + 1).map_or("", String::as_str);
        text.parse().map_err(|_| format!("{name}: {text:?} is no number").into())
    }

    fn flag(&self, name: &str) -> bool {
        self.0.iter().any(|argument| argument == name)
    }
}

/// Processor time of this process's threads so far in seconds, where the system tells it.
fn cpu_seconds() -> f64 {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let nanoseconds = tasks.filter_map(|task| {
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<f64>().ok()
    });
    nanoseconds.sum::<f64>() / 1e9
}

/// A line of this process's status in MiB, where the system tells it.
fn memory(line: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let value = status.lines().find_map(|text| text.strip_prefix(line));
    let value = value.and_then(|text| text.trim().trim_end_matches(" kB").parse::<u64>().ok());
    value.unwrap_or_default() >> 10
}

/// Id `place` of row `row`, as the peer makes it; the highest ids are left out, being special.
fn id(row: usize, place: usize, vocab: usize) -> u32 {
    ((place * 7919 + row * 104_729 + place * place * 31) % (vocab - 64)) as u32
}

fn run() -> Result<(), Failure> {
    let arguments = Arguments(std::env::args().skip(1).collect());
    let [checkpoint, adapter, ..] = arguments.0.as_slice() else {
        return Err("give a checkpoint directory and an adapter directory".into());
    };
    let rows = arguments.number("--rows", 8)?;
    let length: usize = arguments.number("--length", 256)?;
    let prefix: usize = arguments.number("--prefix", 0)?;
    let last = arguments.number("--scored", length)?;
    let runs = arguments.number("--runs", 3)?;
    let device = DeviceChoice::Cpu.open()?;
    let decoder = Checkpoint::open(checkpoint)?.load(&device, LoadDtype::F32)?;
    let adapter = Adapter::load_peft(Path::new(adapter), &decoder)?;
    let vocab = decoder.config().vocab;
    let own = prefix..length;
    let row = |row: usize| ScoreRow {
        ids: own.clone().map(|place| id(row, place, vocab)).collect(),
        scored: own.clone().map(|place| place > 0 && place + last >= length).collect(),
        noise: None,
    };
    let batch = ScoreBatch {
        prefix: (0..prefix).map(|place| id(0, place, vocab)).collect(),
        rows: (0..rows).map(row).collect(),
    };
    let checkpointing = arguments.flag("--checkpointing");
    let config = ScoreConfig { checkpointing, ..ScoreConfig::default() };
    let loaded = memory("VmRSS:");
    for _ in 0..runs {
        let (start, cpu) = (Instant::now(), cpu_seconds());
        let tape = score::forward(&decoder, Some(&adapter), Trainable::Adapter, &batch, &config)?;
        let forward = start.elapsed().as_secs_f64();
        let log_probs = tape.log_probs();
        let count: usize = log_probs.iter().map(Vec::len).sum();
        let sum: f64 = log_probs.iter().flatten().map(|&l| f64::from(l)).sum();
        let each = -1.0 / count as f32;
        let dlogp: Vec<Vec<f32>> = log_probs.iter().map(|row| vec![each; row.len()]).collect();
        let gradients = tape.backward(&dlogp)?;
        let (wall, cpu) = (start.elapsed().as_secs_f64(), cpu_seconds() - cpu);
        println!(
            "{{\"wall\": {wall:.4}, \"forward\": {forward:.4}, \"cpu\": {cpu:.4}, \"loss\": {:.8}, \
             \"norm\": {:.8e}, \"loaded\": {loaded}, \"peak\": {}}}",
            -sum / count as f64,
            gradients.norm()?,
            memory("VmHWM:"),
        );
    }
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}
