//! The word game. Few of its scripted games use what the answers say, for a success rate of about 0.4.

use environments::{EnvironmentSpec, Move, play, wordle::hidden_words};
use learner::dataset::{conversation, outside_a_run};
use protocol::{Split, Task};
use serde_json::{Value, json};

use crate::{Demo, Made, checkpoint::Shape, random::Random};

const PROMPT: &str = "Find the hidden word.\n";
const WORDS: i64 = 12;
const GUESSES: u32 = 3;

/// How a game is played.
#[derive(Clone, Copy)]
enum Style {
    /// Guesses what fits every answer, and always begins with the same word.
    Careful,
    /// Guesses anything, whatever the answers say.
    Random,
}

const STYLES: [(Style, i64); 2] = [(Style::Careful, 20), (Style::Random, 80)];

pub(crate) fn demo() -> Demo {
    Demo {
        environment: json!({"name": "wordle", "words": WORDS, "max_turns": GUESSES}),
        seed: 50,
        episodes: 4000,
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
    let mut expert = spec.expert(&task)?.ok_or("the word game has no expert")?;
    // Seeds far from those of the data sets.
    let key = outside_a_run(&task, (1 << 40) + index);
    let recording = play(spec, key, GUESSES, |reset, rows| {
        if matches!(style, Some(Style::Careful)) {
            return expert(reset, rows);
        }
        let place = random.between(0, WORDS - 1);
        let word = hidden_words().get(usize::try_from(place).ok()?)?;
        Some(Move::new("guess", json!({"word": word.to_string()})))
    })?;
    Ok(conversation(&task, &spec.tools()?, &recording))
}

/// One seed a row, which draws the word.
fn datasets(_: &EnvironmentSpec) -> Made<[Vec<Value>; 2]> {
    let rows = |split: &str, seeds: std::ops::Range<u64>| {
        let row = |seed: u64| {
            json!({"id": format!("wordle-{split}-{seed}"), "prompt": PROMPT,
                "task": {"split": split, "episode_seed": seed}})
        };
        seeds.map(row).collect()
    };
    Ok([rows("train", 0..512), rows("eval", 1_000_000..1_000_200)])
}
