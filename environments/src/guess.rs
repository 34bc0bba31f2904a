//! `guess`: find a hidden whole number with a few guesses, each answered by higher, lower or correct.
//!
//! Settings, which a task's object may override within the same bounds: `n` (1 to 1,000,000, default
//! 8), the largest number; `max_turns` (1 to 100, default 3), the guesses. The number is uniform over
//! 1..=n and follows from the seed and `n` alone. A guess outside the range is answered and counted
//! like any other. The episode ends when the number is found or the guesses are used up; a guess after
//! that is an error. Reward 1 and success for the number, else 0; one milestone, `solved`.

use std::{collections::BTreeSet, sync::Arc};

use protocol::{Split, Task, TraceRow};
use serde_json::{Map, Value, json};

use crate::{
    Blueprint, Description, Environment, Fault, Move, Player, Raised, Score, Simulated, Simulation,
    SpecError, ToolSpec,
    draws::Draws,
    fields::{Fields, task_fields},
    spec,
};

/// Its name in recipes.
pub const NAME: &str = "guess";

const VERSION: &str = "guess-1";
const SOLVED: &str = "solved";

/// The game's settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The largest number that can be hidden.
    pub n: u64,
    /// How many guesses there are.
    pub max_turns: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self { n: 8, max_turns: 3 }
    }
}

impl Settings {
    fn read(self, fields: &mut Fields<'_>) -> Result<Self, SpecError> {
        Ok(Self {
            n: fields.integer("n", self.n, 1..=1_000_000)?,
            max_turns: fields.integer("max_turns", self.max_turns, 1..=100)?,
        })
    }

    /// The settings of one episode: these, unless the task's object says otherwise.
    fn for_task(self, task: &Map<String, Value>) -> Result<Self, SpecError> {
        self.read(&mut Fields::new("task", task))
    }
}

pub(crate) fn parse(fields: &mut Fields<'_>) -> Result<Arc<dyn Blueprint>, SpecError> {
    Ok(Arc::new(Settings::default().read(fields)?))
}

impl Blueprint for Settings {
    fn name(&self) -> &str {
        NAME
    }

    fn version(&self) -> String {
        VERSION.into()
    }

    fn settings(&self) -> Map<String, Value> {
        spec::settings(json!({"n": self.n, "max_turns": self.max_turns}))
    }

    fn check_task(&self, task: &Task) -> Result<(), SpecError> {
        self.for_task(&task_fields(task)?).map(|_| ())
    }

    fn open(&self) -> Result<Box<dyn Environment>, Fault> {
        let tool = ToolSpec::new(
            NAME,
            "Guess the hidden number. Answers higher, lower or correct.",
            json!({
                "type": "object",
                "properties": {
                    "value": {"type": "integer", "description": "The number you guess."},
                },
                "required": ["value"],
            }),
        );
        let description = Description::of_game(NAME, VERSION, tool, [SOLVED]);
        Ok(Box::new(Simulated::new(Guess::new(*self), description)))
    }

    fn score(&self, reached: &BTreeSet<&str>) -> Option<Score> {
        Some(score(reached.contains(SOLVED)))
    }

    /// All tasks are alike: what is to be guessed follows from the seed of each episode.
    fn draw_task(&self, _: Split, _: &mut Draws) -> Option<(String, Map<String, Value>)> {
        Some(("Find the hidden number.\n".into(), Map::new()))
    }

    /// Halves what the answers have left.
    fn expert(&self, task: &Task) -> Result<Option<Player>, SpecError> {
        let n = self.for_task(&task_fields(task)?)?.n;
        Ok(Some(Box::new(move |_, rows| Some(Move::new(NAME, json!({"value": middle(n, rows)}))))))
    }
}

fn score(solved: bool) -> Score {
    Score::new(f64::from(u8::from(solved)), solved, [SOLVED], |_| solved)
}

/// The middle of what the rows so far have left of 1..=n.
fn middle(n: u64, rows: &[TraceRow]) -> u64 {
    let (mut low, mut high) = (1, n);
    for row in rows {
        let arguments: Value = serde_json::from_str(&row.arguments).unwrap_or_default();
        let Some(value) = arguments.get("value").and_then(Value::as_u64) else { continue };
        match row.observation.as_str() {
            "higher" => low = low.max(value.saturating_add(1)),
            "lower" => high = high.min(value.saturating_sub(1)),
            _ => {}
        }
    }
    low + high.saturating_sub(low) / 2
}

/// The game.
#[derive(Clone, Debug)]
pub struct Guess {
    settings: Settings,
    round: Settings,
    target: u64,
    turns: u64,
    solved: bool,
}

impl Guess {
    /// A game with these settings; play starts with a reset.
    pub fn new(settings: Settings) -> Self {
        Self { settings, round: settings, target: 0, turns: settings.max_turns, solved: false }
    }

    /// The hidden number of the episode. For tests and scripted players that play badly on purpose.
    pub fn target(&self) -> u64 {
        self.target
    }
}

impl Simulation for Guess {
    fn reset(&mut self, task: &Map<String, Value>, seed: u64) -> Result<Option<String>, SpecError> {
        let round = self.settings.for_task(task)?;
        let target = Draws::new("rollcall-guess-v1", seed).within(1, round.n);
        *self = Self { settings: self.settings, round, target, turns: 0, solved: false };
        let guesses = if round.max_turns == 1 { "guess" } else { "guesses" };
        Ok(Some(format!(
            "The number is between 1 and {}. You have {} {guesses}.",
            round.n, round.max_turns
        )))
    }

    fn call(&mut self, tool: &str, arguments: &Map<String, Value>) -> Result<String, Raised> {
        if self.done() {
            return Err(Raised::new("Game over."));
        }
        let value = arguments.get("value").and_then(Value::as_i64);
        let (NAME, Some(value)) = (tool, value) else {
            return Err(Raised::new("guess takes an integer"));
        };
        self.turns += 1;
        // A negative guess lies below every target.
        let answer = match u64::try_from(value).map(|value| value.cmp(&self.target)) {
            Ok(std::cmp::Ordering::Equal) => {
                self.solved = true;
                "correct"
            }
            Ok(std::cmp::Ordering::Greater) => "lower",
            Ok(std::cmp::Ordering::Less) | Err(_) => "higher",
        };
        Ok(answer.into())
    }

    fn done(&self) -> bool {
        self.solved || self.turns >= self.round.max_turns
    }

    fn reached(&self) -> Vec<String> {
        self.solved.then(|| SOLVED.to_owned()).into_iter().collect()
    }

    fn score(&self) -> Score {
        score(self.solved)
    }
}
