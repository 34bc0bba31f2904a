//! `actor sample`: try a policy on prompts, without a learner.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    path::PathBuf,
    time::Instant,
};

use clap::Args;
use policy::{
    chat::{ChatFormat, ChatOptions},
    device::DeviceChoice,
    engine::{Engine, EngineConfig, SequenceId},
    model::{Adapter, Checkpoint, LoadDtype, checkpoint_digests},
};
use protocol::{Digest, FinishReason, LeaseId, NoiseKey, PolicyDigest, RunId, Sampling};
use serde_json::{Map, Value, json};
use terminal::Failure;

/// What to sample, and how.
#[derive(Debug, Args)]
pub struct SampleArguments {
    /// The model directory.
    #[arg(long)]
    model: PathBuf,
    /// A PEFT adapter directory.
    #[arg(long)]
    adapter: Option<PathBuf>,
    /// A file of JSON lines, each with a `prompt` or with `messages`; lines that do not start with a
    /// brace are prompts themselves.
    #[arg(long, required_unless_present = "prompt")]
    prompts: Option<PathBuf>,
    /// A prompt. May be given several times.
    #[arg(long)]
    prompt: Vec<String>,
    /// A system text.
    #[arg(long)]
    system: Option<String>,
    /// Variables for the chat template, as a JSON object.
    #[arg(long, default_value = "{}")]
    chat_template_kwargs: String,
    /// auto, cpu or cuda:N.
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// Most ids to sample for each prompt.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// Divides the logits; 0 takes the likeliest id.
    #[arg(long, default_value_t = 1.0)]
    temperature: f32,
    /// Keep the k likeliest ids; 0 keeps all.
    #[arg(long, default_value_t = 0)]
    top_k: u32,
    /// Keep the smallest set of ids whose probability reaches this.
    #[arg(long, default_value_t = 1.0)]
    top_p: f32,
    /// Drop ids below this share of the largest probability.
    #[arg(long, default_value_t = 0.0)]
    min_p: f32,
    /// Seed of the sampling noise.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Prompts sampled at a time.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    batch: u32,
    /// Print one JSON object a line, with ids and log-probabilities.
    #[arg(long)]
    json: bool,
}

/// Samples a turn for every prompt.
pub(crate) fn run(arguments: &SampleArguments) -> Result<(), Failure> {
    let kwargs: Map<String, Value> = serde_json::from_str(&arguments.chat_template_kwargs)
        .map_err(|e| Failure::Mistake(format!("--chat-template-kwargs: {e}; give an object")))?;
    let conversations = conversations(arguments)?;
    let device = arguments.device.resolve().open().map_err(Failure::mistake)?;
    let digests = checkpoint_digests(&arguments.model).map_err(Failure::mistake)?;
    let checkpoint = Checkpoint::open(&arguments.model).map_err(Failure::mistake)?;
    let format =
        ChatFormat::load(&arguments.model, ChatOptions { kwargs, ..ChatOptions::default() })
            .map_err(Failure::mistake)?;
    let decoder = checkpoint.load(&device, LoadDtype::F32).map_err(Failure::mistake)?;
    let adapter = match &arguments.adapter {
        Some(dir) => Some(Adapter::load_peft(dir, &decoder).map_err(Failure::mistake)?),
        None => None,
    };
    let config = EngineConfig {
        max_batch: arguments.batch as usize,
        max_tokens: 1 << 20,
        ..EngineConfig::default()
    };
    let mut engine = Engine::new(decoder, config).map_err(Failure::mistake)?;
    let bytes = adapter.as_ref().map(Adapter::to_safetensors).transpose();
    let bytes = bytes.map_err(Failure::fault)?.unwrap_or_default();
    let policy = PolicyDigest::new(&digests.weights, &Digest::of(&bytes));
    engine.add_adapter(policy, adapter).map_err(Failure::mistake)?;

    let sampling = Sampling {
        temperature: arguments.temperature,
        top_k: arguments.top_k,
        top_p: arguments.top_p,
        min_p: arguments.min_p,
    };
    let run = RunId(Digest::of_parts("rollcall-sample-v1", &[&arguments.seed.to_le_bytes()]));
    let mut sequences: Vec<SequenceId> = Vec::new();
    let mut prompts = Vec::new();
    for (group, messages) in (0..).zip(&conversations) {
        let prompt = format.conversation(messages, true).map_err(Failure::mistake)?;
        let key = NoiseKey::derive(&run, LeaseId { group, generation: 0 });
        let sequence = engine.open(policy, key, sampling).map_err(Failure::mistake)?;
        engine.append(sequence, &prompt).map_err(Failure::mistake)?;
        engine
            .generate(sequence, arguments.max_tokens, format.stop_ids())
            .map_err(Failure::mistake)?;
        sequences.push(sequence);
        prompts.push(prompt);
    }
    let started = Instant::now();
    let mut sampled = 0;
    let mut stdout = std::io::stdout().lock();
    while engine.has_work() {
        for generated in engine.step().map_err(Failure::fault)? {
            let index = sequences.iter().position(|it| *it == generated.sequence).unwrap_or(0);
            sampled += generated.ids.len();
            let body = match generated.ids.split_last() {
                Some((_, body)) if generated.finish == FinishReason::Stop => body,
                _ => &generated.ids,
            };
            let text = format.decode(body);
            let written = if arguments.json {
                let row = json!({
                    "index": index, "prompt_ids": prompts[index], "text": text, "finish": generated.finish,
                    "ids": generated.ids, "logp_raw": generated.logp_raw,
                    "logp_sampling": generated.logp_sampling,
                });
                writeln!(stdout, "{row}")
            } else if conversations.len() == 1 {
                writeln!(stdout, "{text}")
            } else {
                writeln!(stdout, "[{index}] {text}")
            };
            // A reader that has seen enough is no fault.
            if written.is_err() {
                return Ok(());
            }
            engine.close(generated.sequence);
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    let rate = sampled as f64 / seconds;
    eprintln!("{sampled} tokens in {seconds:.2} s: {rate:.1} tokens/s");
    Ok(())
}

fn conversations(arguments: &SampleArguments) -> Result<Vec<Vec<Value>>, Failure> {
    let start = |prompt: &str| {
        let system = arguments.system.iter().map(|text| json!({"role": "system", "content": text}));
        system.chain([json!({"role": "user", "content": prompt})]).collect::<Vec<Value>>()
    };
    let mut all: Vec<Vec<Value>> = arguments.prompt.iter().map(|prompt| start(prompt)).collect();
    let Some(path) = &arguments.prompts else { return Ok(all) };
    let at = |line: usize, problem: &str| {
        Failure::Mistake(format!("{}, line {}: {problem}", path.display(), line + 1))
    };
    let file = std::fs::File::open(path).map_err(|e| {
        Failure::Mistake(format!("--prompts {}: {e}; name a file of prompts", path.display()))
    })?;
    for (number, line) in BufReader::new(file).lines().enumerate() {
        let line = line.map_err(|e| at(number, &e.to_string()))?;
        if line.trim().is_empty() {
            continue;
        }
        if !line.starts_with('{') {
            all.push(start(&line));
            continue;
        }
        let row: Value = serde_json::from_str(&line).map_err(|e| at(number, &e.to_string()))?;
        match (&row["messages"], &row["prompt"]) {
            (Value::Array(messages), _) if !messages.is_empty() => all.push(messages.clone()),
            (_, Value::String(prompt)) => all.push(start(prompt)),
            _ => return Err(at(number, "needs a text `prompt` or a list `messages`")),
        }
    }
    if all.is_empty() {
        return Err(Failure::Mistake(format!("{}: no prompt in it", path.display())));
    }
    Ok(all)
}
