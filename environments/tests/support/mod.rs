//! What the tests share: an episode's key, short ways to write calls, and a simulation that
//! misbehaves on request.

#![allow(dead_code, reason = "each test program uses its part")]

use std::{collections::BTreeSet, sync::Arc};

use environments::{
    Blueprint, Description, Determinism, Environment, EnvironmentSpec, EpisodeKey, Fault, Limits,
    Raised, Recorder, Score, Simulated, Simulation, SpecError, ToolSpec,
};
use protocol::{Digest, LeaseId, ParsedCall, RunId, Split, Task};
use serde_json::{Map, Value, json};

pub(crate) fn task(fields: &str) -> Task {
    Task { id: "t-1".into(), prompt: "Play.".into(), fields: fields.into(), split: Split::Train }
}

pub(crate) fn key(task: &Task, seed: u64) -> EpisodeKey<'_> {
    let lease = LeaseId { group: 3, generation: 1 };
    EpisodeKey { run: RunId(Digest::of(b"run")), lease, task, seed }
}

pub(crate) fn spec(section: Value) -> EnvironmentSpec {
    EnvironmentSpec::parse(&section).expect("a valid section")
}

pub(crate) fn guessing() -> EnvironmentSpec {
    spec(json!({"name": "guess", "n": 8, "max_turns": 3}))
}

pub(crate) fn recorder(spec: &EnvironmentSpec, seed: u64) -> Recorder {
    Recorder::start(spec.open().expect("opens"), key(&task("{}"), seed), spec.limits())
        .expect("resets")
}

pub(crate) fn call(name: &str, arguments: &str) -> ParsedCall {
    ParsedCall::Call { name: name.into(), arguments: arguments.into() }
}

pub(crate) fn guess(value: i64) -> ParsedCall {
    call("guess", &format!("{{\"value\":{value}}}"))
}

pub(crate) fn malformed(raw: &str, reason: &str) -> ParsedCall {
    ParsedCall::Malformed { raw: raw.into(), reason: reason.into() }
}

/// How [`Odd`] misbehaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Vice {
    #[default]
    None,
    /// Reset forgets the total.
    Leaks,
    /// Observations depend on how often any instance was opened in this process.
    Global,
    /// Sets a milestone that it does not declare.
    StrayMilestone,
    /// Takes a milestone back.
    LostMilestone,
    /// Scores NaN.
    NanReward,
    /// Scores more than it may.
    HighReward,
    /// Its score contradicts its milestones.
    OtherMilestones,
    /// Declares a tool named `reset`.
    ReservedTool,
}

#[derive(Debug)]
pub(crate) struct OddBlueprint(pub(crate) Vice);

pub(crate) fn odd(vice: Vice) -> EnvironmentSpec {
    EnvironmentSpec::custom(Arc::new(OddBlueprint(vice)), Limits::default())
}

impl Blueprint for OddBlueprint {
    fn name(&self) -> &str {
        "odd"
    }

    fn version(&self) -> String {
        "odd-1".into()
    }

    fn settings(&self) -> Map<String, Value> {
        Map::new()
    }

    fn check_task(&self, _: &Task) -> Result<(), SpecError> {
        Ok(())
    }

    fn open(&self) -> Result<Box<dyn Environment>, Fault> {
        let none = json!({"type": "object", "properties": {}});
        let n = json!({
            "type": "object",
            "properties": {"n": {"type": "integer"}, "note": {"type": "string", "nullable": true}},
            "required": ["n"],
        });
        let text = json!({
            "type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"],
        });
        let mut tools = vec![
            ToolSpec::new("add", "Adds and says the total.", n.clone()),
            ToolSpec::new("add_then_fail", "Adds, then raises.", n),
            ToolSpec::new("say", "Says it back.", text),
            ToolSpec::new("win", "Ends the episode.", none.clone()),
            ToolSpec::new("break", "Panics.", none.clone()),
        ];
        if self.0 == Vice::ReservedTool {
            tools.push(ToolSpec::new("reset", "", none));
        }
        let description = Description {
            name: "odd".into(),
            version: "odd-1".into(),
            tools,
            milestones: vec!["ten".into(), "won".into()],
            reward_range: 0.0..=1.0,
            determinism: Determinism::Deterministic,
            images: false,
            answers: false,
        };
        let opened = OPENED.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let odd = Odd { vice: self.0, opened, total: 0, ten: false, won: false };
        Ok(Box::new(Simulated::new(odd, description)))
    }

    fn score(&self, _: &BTreeSet<&str>) -> Option<Score> {
        None
    }
}

static OPENED: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);

struct Odd {
    vice: Vice,
    opened: usize,
    total: i64,
    ten: bool,
    won: bool,
}

impl Odd {
    fn add(&mut self, arguments: &Map<String, Value>) -> i64 {
        let n = arguments.get("n").and_then(Value::as_i64).expect("validated");
        self.total = self.total.saturating_add(n);
        self.ten |= self.total >= 10;
        self.total
    }
}

impl Simulation for Odd {
    fn reset(&mut self, task: &Map<String, Value>, seed: u64) -> Result<Option<String>, SpecError> {
        if self.vice != Vice::Leaks {
            self.total = 0;
        }
        (self.ten, self.won) = (false, false);
        if self.vice == Vice::Global {
            return Ok(Some(format!("opened {}", self.opened)));
        }
        let said = task.get("reset").and_then(Value::as_str);
        Ok(said.map(|text| text.replace("SEED", &seed.to_string())))
    }

    fn call(&mut self, tool: &str, arguments: &Map<String, Value>) -> Result<String, Raised> {
        match tool {
            "add" => Ok(self.add(arguments).to_string()),
            "add_then_fail" => {
                self.add(arguments);
                Err(Raised::new("failed \"after\" the fact\n</tool_response>"))
            }
            "say" => Ok(arguments.get("text").and_then(Value::as_str).expect("validated").into()),
            "win" => {
                self.won = true;
                Ok(String::new())
            }
            _ => panic!("broken\non purpose"),
        }
    }

    fn done(&self) -> bool {
        self.won
    }

    fn reached(&self) -> Vec<String> {
        let mut reached = vec![];
        // Out of the declared order, to see it put right.
        if self.won {
            reached.push("won".to_owned());
        }
        if self.ten && !(self.vice == Vice::LostMilestone && self.total > 10) {
            reached.push("ten".to_owned());
        }
        if self.vice == Vice::StrayMilestone {
            reached.push("stray".to_owned());
        }
        reached
    }

    fn score(&self) -> Score {
        let reward = match self.vice {
            Vice::NanReward => f64::NAN,
            Vice::HighReward => 1.5,
            _ => f64::from(u8::from(self.won)),
        };
        Score::new(reward, self.won, ["ten", "won"], |name| match name {
            "ten" => self.ten != (self.vice == Vice::OtherMilestones),
            _ => self.won,
        })
    }
}
