//! Makes the untrained half of a demo: a byte-level BPE tokenizer trained on the environment's own
//! text, a chat template, a randomly initialised Qwen3 checkpoint, scripted episodes that `learner sft`
//! pre-trains it on, and data sets.
//!
//! The scripted players are bad on purpose, so that reinforcement learning has something to find. The
//! vision demo, `frames`, has no players: its checkpoint is pre-trained on frames with one object.
//!
//! Usage: `demo_checkpoint DEMO OUT_DIR`, where DEMO is `guess`, `office`, `wordle` or `frames`, or a file of
//! conversations (rows of `learner sft`), for which a tokenizer and a checkpoint are made and no more; OUT_DIR
//! does not exist.

mod checkpoint;
mod frames;
mod guess;
mod office;
mod random;
mod tokenizer;
mod wordle;

use std::{
    error::Error,
    fs,
    io::Write as _,
    path::{Path, PathBuf},
};

use environments::EnvironmentSpec;
use serde_json::Value;

use self::{checkpoint::Shape, random::Random};

type Made<T> = Result<T, Box<dyn Error>>;

/// One demo.
struct Demo {
    /// The `environment` section.
    environment: Value,
    /// Seeds games and weights.
    seed: u64,
    /// Scripted episodes.
    episodes: u64,
    /// Size of the model.
    shape: Shape,
    /// One scripted episode as a row of `learner sft`.
    play: fn(&EnvironmentSpec, &mut Random, u64) -> Made<Value>,
    /// The rows of `train.jsonl` and `eval.jsonl`.
    datasets: fn(&EnvironmentSpec) -> Made<[Vec<Value>; 2]>,
}

const USAGE: &str = "usage: demo_checkpoint guess|office|wordle|frames|ROWS.jsonl OUT_DIR";

fn main() -> Made<()> {
    let mut arguments = std::env::args().skip(1);
    let demo = match arguments.next().as_deref() {
        Some("guess") => guess::demo(),
        Some("office") => office::demo(),
        Some("wordle") => wordle::demo(),
        Some("frames") => return frames::write(&directory(arguments.next())?),
        Some(rows) if rows.ends_with(".jsonl") => {
            let rows: Vec<Value> = fs::read_to_string(rows)?
                .lines()
                .map(serde_json::from_str)
                .collect::<Result<_, _>>()?;
            let model = directory(arguments.next())?;
            return checkpoint_for(&model, &rows, wordle::demo().shape, &mut Random::new(70));
        }
        _ => return Err(USAGE.into()),
    };
    let model = directory(arguments.next())?;
    let out = model.parent().ok_or(USAGE)?;

    let spec = EnvironmentSpec::parse(&demo.environment)?;
    let mut random = Random::new(demo.seed);
    let episodes = (0..demo.episodes)
        .map(|index| (demo.play)(&spec, &mut random, index))
        .collect::<Result<Vec<Value>, _>>()?;
    let [train, eval] = (demo.datasets)(&spec)?;
    for (name, rows) in
        [("episodes.jsonl", &episodes), ("train.jsonl", &train), ("eval.jsonl", &eval)]
    {
        let mut file = fs::File::create(out.join(name))?;
        for row in rows {
            writeln!(file, "{row}")?;
        }
    }
    checkpoint_for(&model, &episodes, demo.shape, &mut random)
}

fn checkpoint_for(model: &Path, episodes: &[Value], shape: Shape, random: &mut Random) -> Made<()> {
    let style = tokenizer::Style { template: tokenizer::TOOLS, control: &tokenizer::CONTROL };
    tokenizer::write(model, &style, episodes, shape.vocabulary)?;
    checkpoint::write(model, shape, random)
}

/// Makes OUT_DIR and the model's directory in it.
fn directory(out: Option<String>) -> Made<PathBuf> {
    let out = PathBuf::from(out.ok_or(USAGE)?);
    let model = out.join("model");
    fs::create_dir(&out)?;
    fs::create_dir(&model)?;
    Ok(model)
}
