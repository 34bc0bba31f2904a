//! Seconds of scoring with gradients on a checkpoint with an adapter: forward and backward over rows
//! of made-up ids. `scripts/bench/qwen35.py` runs it beside transformers and PEFT. Prints one JSON
//! object a run, passes no judgement.
//!
//! ```text
//! cargo run --release -p policy --example score -- CHECKPOINT ADAPTER --rows 8 --length 256
//!     [--prefix 0] [--image SIDE] [--scored LAST] [--runs 3] [--checkpointing]
//! ```

use std::{path::Path, process::ExitCode, str::FromStr, sync::Arc, time::Instant};

use policy::{
    device::DeviceChoice,
    model::{Adapter, Checkpoint, LoadDtype},
    score::{self, ScoreBatch, ScoreConfig, ScoreRow, Trainable},
    vision::{Patches, PlacedImage},
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

/// An image of `side` pixels ahead of a row: its ids (start, pads, end) and itself.
fn image(row: usize, side: usize, vocab: usize) -> Result<(Vec<u32>, Vec<PlacedImage>), Failure> {
    if side == 0 {
        return Ok((Vec::new(), Vec::new()));
    }
    let across = side / 16;
    let value = |i: usize| ((i * 7919 + row * 104_729) % 2001) as f32 / 1000.0 - 1.0;
    let values = (0..across * across * 1536).map(value).collect();
    let patches = Patches::new([1, across as u32, across as u32], 2, values)?;
    let special = |offset: usize| (vocab - offset) as u32;
    let mut ids = vec![special(1); patches.tokens() + 2];
    (ids[0], ids[patches.tokens() + 1]) = (special(3), special(4));
    Ok((ids, vec![PlacedImage { at: 1, patches: Arc::new(patches) }]))
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
    let side = arguments.number("--image", 0)?;
    let own = prefix..length;
    let row = |row: usize| {
        let (mut ids, images) = image(row, side, vocab)?;
        let shown = ids.len();
        ids.extend((prefix + shown..length).map(|place| id(row, place, vocab)));
        let scored = |place| place > shown && place + last >= length;
        let scored = own.clone().map(scored).collect();
        Ok(ScoreRow { ids, scored, noise: None, images })
    };
    let batch = ScoreBatch {
        prefix: (0..prefix).map(|place| id(0, place, vocab)).collect(),
        rows: (0..rows).map(row).collect::<Result<_, Failure>>()?,
        images: Vec::new(),
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
