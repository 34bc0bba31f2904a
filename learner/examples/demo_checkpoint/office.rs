//! The office demo. Its scripted clerk knows the way and every tool, and is careless: now and then it
//! answers without looking, takes the wrong figures or the wrong sign, or submits another number than
//! it calculated. About a third of its episodes end with the right result.

use environments::{EnvironmentSpec, Move, dataset, play};
use learner::dataset::{conversation, outside_a_run};
use protocol::{Split, Task, TraceRow};
use serde_json::{Value, json};

use crate::{Demo, Made, checkpoint::Shape, random::Random};

/// Seed of the scripted tasks, and of the data sets.
const SEEDS: (u64, u64) = (1_000, 0);

/// How an episode starts.
#[derive(Clone, Copy)]
enum Start {
    /// With a look-up.
    Looks,
    /// With a calculation of numbers that it makes up.
    Invents,
    /// With a result that it makes up.
    Guesses,
}

/// What is calculated from the figures that were found.
#[derive(Clone, Copy)]
enum Formula {
    /// What was asked for.
    Right,
    /// Quantity times price, asked for or not.
    Total,
    /// The sum of quantity and price.
    Sum,
    /// Quantity times price minus rebate, asked for or not.
    Rebate,
    /// Price times rebate.
    Mixed,
}

const STARTS: [(Start, i64); 3] = [(Start::Looks, 76), (Start::Invents, 12), (Start::Guesses, 12)];
const FORMULAS: [(Formula, i64); 5] = [
    (Formula::Right, 30),
    (Formula::Total, 20),
    (Formula::Sum, 20),
    (Formula::Rebate, 20),
    (Formula::Mixed, 10),
];
/// How often the number that is submitted is the one that was calculated, in percent.
const SUBMITS_RESULT: i64 = 85;

pub(crate) fn demo() -> Demo {
    Demo {
        environment: json!({"name": "office", "level": 2, "max_calls": 4}),
        seed: 40,
        episodes: 12_000,
        shape: Shape { vocabulary: 512, hidden: 96, layers: 3, ffn: 288, heads: 6, kv_heads: 2 },
        play: episode,
        datasets,
    }
}

fn episode(spec: &EnvironmentSpec, random: &mut Random, index: u64) -> Made<Value> {
    let task = spec
        .draw_dataset(Split::Train, SEEDS.0 + index, 1)
        .and_then(|tasks| tasks.into_iter().next())
        .ok_or("office draws no tasks")?;
    let mut expert = spec.expert(&task)?.ok_or("office has no expert")?;
    let start = random.pick(&STARTS);
    let formula = random.pick(&FORMULAS);
    let submits_result = random.between(1, 100) <= SUBMITS_RESULT;
    let made_up = random.between(10, 999);
    let (quantity, price) = (random.between(2, 9), random.between(10, 99));
    let recording = play(spec, outside_a_run(&task, (1 << 40) + index), 4, |reset, rows| {
        let submit = |answer: i64| Some(Move::new("submit", json!({"answer": answer})));
        let calculate = |text: String| Some(Move::new("calculate", json!({"expression": text})));
        let last = rows.last();
        let calculated = last.filter(|row| row.tool == "calculate");
        match (start, calculated) {
            (_, Some(row)) if submits_result => submit(row.observation.parse().unwrap_or(made_up)),
            (_, Some(_)) | (Some(Start::Guesses), None) => submit(made_up),
            (Some(Start::Invents), None) => calculate(format!("{quantity}*{price}")),
            (Some(Start::Looks) | None, None) => match last {
                Some(row) => match figures(row).zip(formula) {
                    Some((figures, formula)) => match careless(formula, figures) {
                        Some(text) => calculate(text),
                        None => expert(reset, rows),
                    },
                    None => submit(made_up),
                },
                None => expert(reset, rows),
            },
        }
    })?;
    Ok(conversation(&Task { id: format!("episode-{index}"), ..task }, &spec.tools()?, &recording))
}

/// Quantity, price and rebate of a look-up's answer.
fn figures(row: &TraceRow) -> Option<[i64; 3]> {
    let shown: Value = serde_json::from_str(&row.observation).ok()?;
    let figure = |name: &str| shown.get(name).and_then(Value::as_i64);
    Some([figure("quantity")?, figure("price")?, figure("rebate")?])
}

/// What to calculate; nothing where the expert knows.
fn careless(formula: Formula, [quantity, price, rebate]: [i64; 3]) -> Option<String> {
    match formula {
        Formula::Right => None,
        Formula::Total => Some(format!("{quantity}*{price}")),
        Formula::Sum => Some(format!("{quantity}+{price}")),
        Formula::Rebate => Some(format!("{quantity}*{price}-{rebate}")),
        Formula::Mixed => Some(format!("{price}*{rebate}")),
    }
}

fn datasets(spec: &EnvironmentSpec) -> Made<[Vec<Value>; 2]> {
    let rows = |split, count| {
        let tasks = spec.draw_dataset(split, SEEDS.1, count).ok_or("office draws no tasks")?;
        Made::Ok(tasks.iter().map(dataset::row).collect())
    };
    Ok([rows(Split::Train, 512)?, rows(Split::Eval, 200)?])
}
