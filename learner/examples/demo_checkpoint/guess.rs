//! The guessing demo. Most of its scripted games ignore the feedback, for a success rate of about 0.4.

use environments::{EnvironmentSpec, Move, play};
use learner::dataset::{conversation, outside_a_run};
use protocol::{Split, Task};
use serde_json::{Value, json};

use crate::{Demo, Made, checkpoint::Shape, random::Random};

const PROMPT: &str = "Let us play.\n";

/// How a game is played.
#[derive(Clone, Copy)]
enum Style {
    /// Halves what the feedback has left.
    Halving,
    /// Says the same number again and again.
    Stubborn,
    /// Says anything, whatever the feedback.
    Random,
}

const STYLES: [(Style, i64); 3] =
    [(Style::Halving, 22), (Style::Stubborn, 40), (Style::Random, 38)];

pub(crate) fn demo() -> Demo {
    Demo {
        environment: json!({"name": "guess", "n": 8, "max_turns": 3}),
        seed: 20,
        episodes: 6000,
        shape: Shape { vocabulary: 400, hidden: 64, layers: 3, ffn: 192, heads: 4, kv_heads: 2 },
        play: game,
        datasets,
    }
}

fn game(spec: &EnvironmentSpec, random: &mut Random, index: u64) -> Made<Value> {
    let task = Task {
        id: format!("game-{index}"),
        prompt: PROMPT.into(),
        fields: "{}".into(),
        split: Split::Train,
    };
    let style = random.pick(&STYLES);
    let stubborn = random.between(1, 8);
    let mut expert = spec.expert(&task)?.ok_or("guess has no expert")?;
    // Seeds far from those of the data sets.
    let recording = play(spec, outside_a_run(&task, (1 << 40) + index), 3, |reset, rows| {
        let guess = match style {
            Some(Style::Halving) => return expert(reset, rows),
            Some(Style::Stubborn) => stubborn,
            _ => random.between(1, 8),
        };
        Some(Move::new("guess", json!({"value": guess})))
    })?;
    Ok(conversation(&task, &spec.tools()?, &recording))
}

/// One seed a row.
fn datasets(_: &EnvironmentSpec) -> Made<[Vec<Value>; 2]> {
    let rows = |split: &str, seeds: std::ops::Range<u64>| {
        let row = |seed: u64| {
            json!({"id": format!("guess-{split}-{seed}"), "prompt": PROMPT,
                "task": {"split": split, "episode_seed": seed}})
        };
        seeds.map(row).collect()
    };
    Ok([rows("train", 0..512), rows("eval", 1_000_000..1_000_200)])
}
