//! Tokens per second of the generation engine on a checkpoint: single calls at one batch size, or
//! rollouts of several turns beside the same ids processed once. `scripts/bench/decode.py` runs it
//! beside another engine. Prints numbers, passes no judgement.
//!
//! ```text
//! cargo run --release -p policy --example decode -- CHECKPOINT --batch 8 --prompt 128 --new 128
//! cargo run --release -p policy --example decode -- CHECKPOINT --batch 8 --turns 8
//! ```

use std::{process::ExitCode, str::FromStr, time::Instant};

use policy::{
    device::DeviceChoice,
    engine::{Engine, EngineConfig, Generated, Pass, SequenceId},
    model::{Adapter, Checkpoint, LoadDtype, LoraConfig, TargetModules},
};
use protocol::{Digest, NoiseKey, PolicyDigest, Sampling};

type Failure = Box<dyn std::error::Error>;

/// As the peer's script samples.
const SAMPLING: Sampling = Sampling { temperature: 1.0, top_k: 20, top_p: 1.0, min_p: 0.0 };

struct Arguments(Vec<String>);

impl Arguments {
    fn text(&self, name: &str) -> Option<&str> {
        let at = self.0.iter().position(|argument| argument == name)?;
        self.0.get(at + 1).map(String::as_str)
    }

    fn number<T: FromStr>(&self, name: &str, default: T) -> Result<T, Failure> {
        match self.text(name) {
            None => Ok(default),
            Some(text) => text.parse().map_err(|_| format!("{name}: {text:?} is no number").into()),
        }
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

struct Bench {
    engine: Engine,
    policy: PolicyDigest,
    vocab: usize,
    calls: u32,
}

impl Bench {
    fn ids(&mut self, count: usize) -> Vec<u32> {
        self.calls += 1;
        let vocab = self.vocab;
        let salt = self.calls as usize * 104_729;
        (0..count).map(|i| ((i * 7919 + salt) % vocab) as u32).collect()
    }

    fn open(&mut self, sampling: Sampling) -> Result<SequenceId, Failure> {
        self.calls += 1;
        let key = NoiseKey(Digest::of(&self.calls.to_le_bytes()));
        Ok(self.engine.open(self.policy, key, sampling)?)
    }

    fn finish(&mut self) -> Result<Vec<Generated>, Failure> {
        let mut ended = Vec::new();
        while self.engine.has_work() {
            ended.extend(self.engine.step()?);
        }
        Ok(ended)
    }

    /// `batch` calls of `new` ids each after prompts of their own.
    fn calls(&mut self, batch: usize, prompt: usize, new: u32) -> Result<(), Failure> {
        let mut open = Vec::new();
        for _ in 0..batch {
            let (id, ids) = (self.open(SAMPLING)?, self.ids(prompt));
            self.engine.append(id, &ids)?;
            self.engine.generate(id, new, &[])?;
            open.push(id);
        }
        self.finish()?;
        open.into_iter().for_each(|id| self.engine.close(id));
        Ok(())
    }

    /// `batch` rollouts of `turns` calls of `new` ids, `tool` ids appended between two calls.
    /// Returns the streams.
    fn rollouts(
        &mut self,
        (batch, turns): (usize, usize),
        (prompt, new, tool): (usize, u32, usize),
    ) -> Result<Vec<Vec<u32>>, Failure> {
        let mut open = Vec::new();
        for _ in 0..batch {
            let (id, ids) = (self.open(SAMPLING)?, self.ids(prompt));
            self.engine.append(id, &ids)?;
            open.push(id);
        }
        for turn in 0..turns {
            for &id in &open {
                if turn > 0 {
                    let ids = self.ids(tool);
                    self.engine.append(id, &ids)?;
                }
                self.engine.generate(id, new, &[])?;
            }
            self.finish()?;
        }
        let mut streams = Vec::new();
        for id in open {
            streams.push(self.engine.stream(id)?.to_vec());
            self.engine.close(id);
        }
        Ok(streams)
    }

    /// The same ids processed once: everything but the sampled ids of one long call is prompt.
    fn once(&mut self, streams: &[Vec<u32>], sampled: usize) -> Result<(), Failure> {
        let mut open = Vec::new();
        for stream in streams {
            let prompt = stream.len().saturating_sub(sampled).max(1);
            let (id, ids) = (self.open(SAMPLING)?, self.ids(prompt));
            self.engine.append(id, &ids)?;
            self.engine.generate(id, sampled as u32, &[])?;
            open.push(id);
        }
        self.finish()?;
        open.into_iter().for_each(|id| self.engine.close(id));
        Ok(())
    }
}

fn run() -> Result<(), Failure> {
    let arguments = Arguments(std::env::args().skip(1).collect());
    let dir = arguments.0.first().ok_or("give a checkpoint directory")?;
    let batch = arguments.number("--batch", 16)?;
    let prompt = arguments.number("--prompt", 128)?;
    let new = arguments.number("--new", 128u32)?;
    let turns = arguments.number("--turns", 0)?;
    let tool = arguments.number("--tool", 32)?;
    let runs = arguments.number("--runs", 3)?;
    let rank = arguments.number("--lora", 0)?;
    let device: DeviceChoice = arguments.text("--device").unwrap_or("cpu").parse()?;
    let pass = if arguments.text("--pass") == Some("tensors") { Pass::Tensors } else { Pass::Auto };
    let decoder = Checkpoint::open(dir)?.load(&device.open()?, LoadDtype::F32)?;
    let vocab = decoder.config().vocab;
    let adapter = (rank > 0).then(|| {
        let target_modules = TargetModules::AllLinear;
        let config = LoraConfig { r: rank, alpha: 32.0, target_modules, use_rslora: false };
        Adapter::init(&config, &decoder, 1)
    });
    let mut engine = Engine::new(decoder, EngineConfig { pass, ..EngineConfig::default() })?;
    let policy = PolicyDigest(Digest::of(b"bench"));
    engine.add_adapter(policy, adapter.transpose()?)?;
    let mut bench = Bench { engine, policy, vocab, calls: 0 };
    for run in 0..runs {
        if turns == 0 {
            let (start, cpu) = (Instant::now(), cpu_seconds());
            bench.calls(batch, prompt, new)?;
            let (wall, cpu) = (start.elapsed().as_secs_f64(), cpu_seconds() - cpu);
            let ids = batch as f64 * f64::from(new);
            println!(
                "run {run}: {:.1} tok/s wall, {:.1} tok per CPU-second",
                ids / wall,
                ids / cpu.max(0.001)
            );
        } else {
            let fed = bench.engine.stats().fed;
            let start = Instant::now();
            let streams = bench.rollouts((batch, turns), (prompt, new, tool))?;
            let wall = start.elapsed().as_secs_f64();
            let fed = bench.engine.stats().fed - fed;
            let ids: usize = streams.iter().map(Vec::len).sum();
            let start = Instant::now();
            bench.once(&streams, turns * new as usize)?;
            let once = start.elapsed().as_secs_f64();
            println!(
                "run {run}: {ids} ids in {batch} rollouts of {turns} turns: {fed} fed, {wall:.3} s; \
                 the same ids processed once {once:.3} s; ratio {:.2}",
                wall / once
            );
        }
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
