//! Does an environment keep its word? Resets it again and again and compares what the recorder saw.

use std::{
    cell::Cell,
    time::{Duration, Instant},
};

use protocol::{LeaseId, ParsedCall, RunId, Task};
use serde_json::{Map, Value, json};

use crate::{
    CallPermit, Determinism, Environment, EnvironmentSpec, EpisodeKey, Fault, Limits, Recorder,
    Recording, ToolSpec, draws::Draws,
};

/// How often the same seed is reset.
const RESETS: usize = 8;

/// What a probe found. Each check names what it protects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeReport {
    /// What the environment claims.
    pub claimed: Determinism,
    /// Eight fresh environments with one seed gave equal recordings.
    pub repeatable: bool,
    /// Two environments played in turns gave what each gives alone. Nothing where there cannot be two at
    /// once.
    pub isolated: Option<bool>,
    /// An environment reset again after another episode gave what a fresh one gives.
    pub forgets: bool,
    /// Calls that each episode made.
    pub calls: usize,
    /// Whether each episode ended with an answer.
    pub answered: bool,
    /// How long resets took, the opening of the environment included.
    pub resets: Spent,
    /// How long calls took.
    pub made: Spent,
}

/// Times of many things of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spent {
    count: u32,
    total: Duration,
    /// The longest.
    pub longest: Duration,
}

impl Spent {
    fn add(&mut self, since: Instant) {
        let spent = since.elapsed();
        self.count += 1;
        self.total += spent;
        self.longest = self.longest.max(spent);
    }

    /// The mean; zero of nothing.
    pub fn mean(&self) -> Duration {
        self.total.checked_div(self.count).unwrap_or_default()
    }
}

impl ProbeReport {
    /// What the environment can be trusted to be: replayable only where every check held.
    pub fn verdict(&self) -> Determinism {
        if self.repeatable && self.isolated != Some(false) && self.forgets {
            self.claimed
        } else {
            Determinism::Recorded
        }
    }

    /// One line a failed check: what was seen, and the remedy.
    pub fn findings(&self) -> Vec<&'static str> {
        let checks = [
            (
                self.repeatable,
                "the same task, seed and calls gave different episodes: take all randomness from \
                 the seed, and no time from a clock",
            ),
            (
                self.isolated != Some(false),
                "two environments played in turns disturb each other: keep no global state",
            ),
            (
                self.forgets,
                "a reset environment differs from a fresh one: reset every field, or open a new \
                 environment for each episode",
            ),
        ];
        checks.into_iter().filter(|(held, _)| !held).map(|(_, finding)| finding).collect()
    }
}

/// Probes an environment on one dataset row with generated calls ([`sample_calls`]).
///
/// # Errors
/// A fault of the environment in any of the episodes.
pub fn probe(spec: &EnvironmentSpec, task: &Task, seed: u64) -> Result<ProbeReport, Fault> {
    let description = spec.describe()?;
    // Without tools there is nothing to call, and where no answer is taken, unknown tools at least.
    let count = if description.tools.is_empty() && description.answers { 0 } else { 12 };
    let calls = sample_calls(&description.tools, seed, count);
    // Some answers of each length of a short code.
    let mut answers = Draws::new("rollcall-sample-answers-v1", seed);
    let answer = (0..=answers.below(4)).map(|_| answers.below(10).to_string()).collect::<String>();
    let times = (Cell::default(), Cell::default());
    let session = Session { spec, task, answer, limits: spec.limits(), times };
    let other_seed = seed.wrapping_add(1);
    let expected = session.play(spec.open()?, seed, &calls)?.0;
    let other = session.play(spec.open()?, other_seed, &calls)?.0;

    let mut repeatable = true;
    for _ in 1..RESETS {
        repeatable &= session.play(spec.open()?, seed, &calls)?.0 == expected;
    }

    let first = session.start(spec.open()?, seed)?;
    let second = spec.open_beside().and_then(|opened| session.start(opened, other_seed));
    let isolated = match second {
        // The server plays one episode at a time.
        Err(Fault::Busy { .. }) => {
            drop(first);
            None
        }
        Err(fault) => return Err(fault),
        Ok(second) => {
            let mut pair = [first, second];
            for (turn, call) in (0..).zip(&calls) {
                for recorder in &mut pair {
                    session.call(recorder, turn, call)?;
                }
            }
            for recorder in &mut pair {
                session.answer(recorder)?;
            }
            let [first, second] = pair;
            Some(first.finish()? == expected && second.finish()? == other)
        }
    };

    let used = session.play(spec.open()?, other_seed, &calls)?.1;
    let forgets = session.play(used, seed, &calls)?.0 == expected;
    Ok(ProbeReport {
        claimed: description.determinism,
        repeatable,
        isolated,
        forgets,
        calls: calls.len(),
        answered: description.answers,
        resets: session.times.0.get(),
        made: session.times.1.get(),
    })
}

struct Session<'a> {
    spec: &'a EnvironmentSpec,
    task: &'a Task,
    answer: String,
    limits: Limits,
    /// Of resets and of calls.
    times: (Cell<Spent>, Cell<Spent>),
}

impl Session<'_> {
    fn start(&self, environment: Box<dyn Environment>, seed: u64) -> Result<Recorder, Fault> {
        let key = EpisodeKey {
            run: RunId(self.spec.digest()),
            lease: LeaseId { group: 0, generation: 0 },
            task: self.task,
            seed,
        };
        let since = Instant::now();
        let recorder = Recorder::start(environment, key, self.limits)?;
        timed(&self.times.0, since);
        Ok(recorder)
    }

    fn call(&self, recorder: &mut Recorder, turn: u32, call: &ParsedCall) -> Result<(), Fault> {
        let since = Instant::now();
        recorder.call(turn, call, CallPermit::Run)?;
        timed(&self.times.1, since);
        Ok(())
    }

    /// After all calls, where the environment takes answers.
    fn answer(&self, recorder: &mut Recorder) -> Result<(), Fault> {
        recorder.answer(u32::MAX, &self.answer).map(|_| ())
    }

    fn play(
        &self,
        environment: Box<dyn Environment>,
        seed: u64,
        calls: &[ParsedCall],
    ) -> Result<(Recording, Box<dyn Environment>), Fault> {
        let mut recorder = self.start(environment, seed)?;
        for (turn, call) in (0..).zip(calls) {
            self.call(&mut recorder, turn, call)?;
        }
        self.answer(&mut recorder)?;
        recorder.release()
    }
}

fn timed(times: &Cell<Spent>, since: Instant) {
    let mut spent = times.get();
    spent.add(since);
    times.set(spent);
}

/// `count` calls of the tools, most with arguments that fit their schemas, some with ones that do not:
/// what a policy that knows the tools and nothing else might write. A function of its arguments alone.
pub fn sample_calls(tools: &[ToolSpec], seed: u64, count: usize) -> Vec<ParsedCall> {
    let mut draws = Draws::new("rollcall-sample-calls-v1", seed);
    (0..count)
        .map(|_| match draws.pick(tools) {
            None => ParsedCall::Call { name: "none".into(), arguments: "{}".into() },
            Some(tool) => {
                let mut value = sample(&tool.parameters, &mut draws, 0);
                if draws.chance(100) {
                    value = json!({"unexpected": value});
                }
                ParsedCall::Call { name: tool.name.clone(), arguments: value.to_string() }
            }
        })
        .collect()
}

fn sample(schema: &Value, draws: &mut Draws, depth: u32) -> Value {
    if let Some(value) = schema.get("const") {
        return value.clone();
    }
    if let Some(value) =
        schema.get("enum").and_then(Value::as_array).and_then(|values| draws.pick(values))
    {
        return value.clone();
    }
    let branches = ["anyOf", "oneOf"].iter().find_map(|key| schema.get(key)?.as_array());
    if let Some(branch) = branches.and_then(|branches| draws.pick(branches)) {
        return if depth < 8 { sample(branch, draws, depth + 1) } else { Value::Null };
    }
    let kind = match schema.get("type") {
        Some(Value::Array(kinds)) => draws.pick(kinds).and_then(Value::as_str),
        Some(kind) => kind.as_str(),
        None if depth == 0 => Some("object"),
        None => None,
    };
    match kind {
        Some("integer") => draws.within(0, 10).into(),
        Some("number") => json!(draws.within(0, 20) as f64 / 2.0),
        Some("boolean") => draws.chance(500).into(),
        Some("string") => {
            draws.pick(&["", "a", "hello", "Ünïcode 😀", "<|im_end|>"]).copied().into()
        }
        Some("array") if depth < 8 => {
            let items = schema.get("items").unwrap_or(&Value::Null);
            (0..draws.below(3)).map(|_| sample(items, draws, depth + 1)).collect()
        }
        Some("object") if depth < 8 => {
            let properties = schema.get("properties").and_then(Value::as_object);
            let required = schema.get("required").and_then(Value::as_array);
            let needed = |key: &str| {
                required.is_some_and(|keys| keys.iter().any(|required| required == key))
            };
            let mut object = Map::new();
            for (key, schema) in properties.into_iter().flatten() {
                if needed(key) || draws.chance(500) {
                    object.insert(key.clone(), sample(schema, draws, depth + 1));
                }
            }
            Value::Object(object)
        }
        _ => Value::Null,
    }
}
