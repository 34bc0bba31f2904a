//! `add`: one sum, one tool. The smallest environment there is; benchmarks against other trainers use
//! it, because its tool exists there word for word.
//!
//! The task's object names the sum that is wanted (`want`, an integer from -1,000,000 to 1,000,000).
//! The tool adds any two integers; the episode never ends by itself, so that the policy still says its
//! answer. Reward 1 and success once a call gave the sum that is wanted, else 0; one milestone,
//! `added`.

use std::{collections::BTreeSet, sync::Arc};

use protocol::Task;
use serde_json::{Map, Value, json};

use crate::{
    Blueprint, Description, Environment, Fault, Raised, Score, Simulated, Simulation, SpecError,
    ToolSpec,
    fields::{Fields, shown, task_fields},
};

/// Its name in recipes.
pub const NAME: &str = "add";

const VERSION: &str = "add-1";
const ADDED: &str = "added";
const LARGEST: i64 = 1_000_000;

#[derive(Debug)]
struct Add;

pub(crate) fn parse(_: &mut Fields<'_>) -> Result<Arc<dyn Blueprint>, SpecError> {
    Ok(Arc::new(Add))
}

fn want(task: &Map<String, Value>) -> Result<i64, SpecError> {
    let (field, expected) = ("task.want", format!("an integer from -{LARGEST} to {LARGEST}"));
    match task.get("want") {
        None => Err(SpecError::Missing { field: field.into(), expected }),
        Some(value) => value
            .as_i64()
            .filter(|want| (-LARGEST..=LARGEST).contains(want))
            .ok_or_else(|| SpecError::Value { field: field.into(), expected, found: shown(value) }),
    }
}

impl Blueprint for Add {
    fn name(&self) -> &str {
        NAME
    }

    fn version(&self) -> String {
        VERSION.into()
    }

    fn settings(&self) -> Map<String, Value> {
        Map::new()
    }

    fn check_task(&self, task: &Task) -> Result<(), SpecError> {
        want(&task_fields(task)?).map(|_| ())
    }

    fn open(&self) -> Result<Box<dyn Environment>, Fault> {
        let tool = ToolSpec::new(
            NAME,
            "Adds two integers.",
            json!({
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "First integer."},
                    "b": {"type": "integer", "description": "Second integer."},
                },
                "required": ["a", "b"],
            }),
        )
        .returning(json!({"type": "string", "description": "The sum as a string."}));
        let description = Description::of_game(NAME, VERSION, tool, [ADDED]);
        Ok(Box::new(Simulated::new(Sum { want: 0, added: false }, description)))
    }

    fn score(&self, reached: &BTreeSet<&str>) -> Option<Score> {
        Some(score(reached.contains(ADDED)))
    }
}

fn score(added: bool) -> Score {
    Score::new(f64::from(u8::from(added)), added, [ADDED], |_| added)
}

struct Sum {
    want: i64,
    added: bool,
}

impl Simulation for Sum {
    fn reset(&mut self, task: &Map<String, Value>, _: u64) -> Result<Option<String>, SpecError> {
        *self = Self { want: want(task)?, added: false };
        Ok(None)
    }

    fn call(&mut self, tool: &str, arguments: &Map<String, Value>) -> Result<String, Raised> {
        let number = |key| arguments.get(key).and_then(Value::as_i64);
        let (NAME, Some(a), Some(b)) = (tool, number("a"), number("b")) else {
            return Err(Raised::new("add takes two integers"));
        };
        let sum = a.checked_add(b).ok_or_else(|| Raised::new("the sum is too large"))?;
        self.added |= sum == self.want;
        Ok(sum.to_string())
    }

    fn done(&self) -> bool {
        false
    }

    fn reached(&self) -> Vec<String> {
        self.added.then(|| ADDED.to_owned()).into_iter().collect()
    }

    fn score(&self) -> Score {
        score(self.added)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wanted_sum_scores_and_overflow_is_the_tools_error() {
        let mut sum = Sum { want: 0, added: false };
        let task = [("want".to_owned(), json!(5))].into_iter().collect();
        assert_eq!(sum.reset(&task, 0), Ok(None));
        let arguments = |a: i64, b: i64| {
            [("a".to_owned(), json!(a)), ("b".to_owned(), json!(b))].into_iter().collect()
        };
        assert_eq!(sum.call(NAME, &arguments(1, 2)), Ok("3".into()));
        assert!(sum.call(NAME, &arguments(i64::MAX, 1)).is_err());
        assert!(!sum.score().success);
        assert_eq!(sum.call(NAME, &arguments(2, 3)), Ok("5".into()));
        assert!(sum.score().success);
    }
}
