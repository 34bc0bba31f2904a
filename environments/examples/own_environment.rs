//! An environment of one's own in Rust: a lamp with three switches, to be lit within four presses.
//!
//! A game is a [`Simulation`]; a [`Blueprint`] says what it is called, what its settings are and how it
//! is opened. `cargo run -p environments --example own_environment` plays it and examines it, as
//! `actor check` does. For recipes, put its name and a function that reads its section into the registry
//! in `environments/src/spec.rs` and build both programs.

use std::{collections::BTreeSet, sync::Arc};

use environments::{
    Blueprint, CallPermit, Description, Determinism, Environment, EnvironmentSpec, EpisodeKey,
    Fault, Limits, Raised, Recorder, Score, Simulated, Simulation, SpecError, ToolSpec,
    draws::Draws, probe,
};
use protocol::{Digest, LeaseId, ParsedCall, RunId, Split, Task};
use serde_json::{Map, Value, json};

/// The game. What it draws follows from the seed alone.
#[derive(Default)]
struct Lamp {
    wired: i64,
    presses: u32,
    lit: bool,
}

impl Simulation for Lamp {
    fn reset(&mut self, _: &Map<String, Value>, seed: u64) -> Result<Option<String>, SpecError> {
        let wired = if Draws::new("lamp-v1", seed).chance(500) { 1 } else { 3 };
        *self = Self { wired, ..Self::default() };
        Ok(Some("The lamp has switches 1, 2 and 3. Light it.".into()))
    }

    fn call(&mut self, _: &str, arguments: &Map<String, Value>) -> Result<String, Raised> {
        let switch = arguments.get("switch").and_then(Value::as_i64).unwrap_or_default();
        self.presses += 1;
        if !(1..=3).contains(&switch) {
            return Err(Raised::new(format!("There is no switch {switch}.")));
        }
        self.lit = switch == self.wired;
        Ok(if self.lit { "It is lit.".into() } else { "It stays dark.".into() })
    }

    fn done(&self) -> bool {
        self.lit || self.presses >= 4
    }

    fn reached(&self) -> Vec<String> {
        self.lit.then(|| "lit".to_owned()).into_iter().collect()
    }

    fn score(&self) -> Score {
        score(self.lit)
    }
}

fn score(lit: bool) -> Score {
    Score::new(f64::from(u8::from(lit)), lit, ["lit"], |_| lit)
}

#[derive(Debug)]
struct LampBlueprint;

impl Blueprint for LampBlueprint {
    fn name(&self) -> &str {
        "lamp"
    }

    fn version(&self) -> String {
        "lamp-1".into()
    }

    fn settings(&self) -> Map<String, Value> {
        Map::new()
    }

    fn check_task(&self, _: &Task) -> Result<(), SpecError> {
        Ok(())
    }

    fn open(&self) -> Result<Box<dyn Environment>, Fault> {
        let parameters = json!({
            "type": "object",
            "properties": {"switch": {"type": "integer", "description": "Which switch."}},
            "required": ["switch"],
        });
        let description = Description {
            name: self.name().into(),
            version: self.version(),
            tools: vec![ToolSpec::new("press", "Press a switch.", parameters)],
            milestones: vec!["lit".into()],
            reward_range: 0.0..=1.0,
            determinism: Determinism::Deterministic,
            images: false,
            answers: false,
        };
        Ok(Box::new(Simulated::new(Lamp::default(), description)))
    }

    fn score(&self, reached: &BTreeSet<&str>) -> Option<Score> {
        Some(score(reached.contains("lit")))
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let spec = EnvironmentSpec::custom(Arc::new(LampBlueprint), Limits::default());
    let task =
        Task { id: "t".into(), prompt: "Play.".into(), fields: "{}".into(), split: Split::Train };
    let lease = LeaseId { group: 0, generation: 0 };
    let key = EpisodeKey { run: RunId(Digest::of(b"example")), lease, task: &task, seed: 7 };
    let mut episode = Recorder::start(spec.open()?, key, spec.limits())?;
    println!("{}", episode.reset_text());
    for (turn, switch) in (0..).zip([1, 2, 3]) {
        let arguments = json!({"switch": switch}).to_string();
        let call = ParsedCall::Call { name: "press".into(), arguments };
        let row = episode.call(turn, &call, CallPermit::Run)?;
        println!("press {switch}: {:?} {}", row.kind, row.observation);
    }
    println!("reward {}", episode.finish()?.score.reward);
    let report = probe(&spec, &task, 0)?;
    println!("{} {:?}", report.verdict(), report.findings());
    Ok(())
}
