//! `office`: answer a question about orders by looking them up, calculating and submitting.
//!
//! Settings: `records` (2 to 50, default 6), orders in the table; `level` (1 to 3, default 1), which
//! kinds of questions there are (`total`, then `rebate`, then `sum`); `language` (`en`, `de` or `both`,
//! the default); `error_percent` (0 to 50, default 0), the share of episodes in which a tool fails
//! once; `max_calls` (3 to 64, default 8), calls that run before the episode ends.
//!
//! A task's object names its question by `question` and `orders` (one number from 100 to 999, two for
//! `sum`), which its prompt then asks. Where it names none, the question is drawn from the seed and the
//! reset says it, in the task's `language` or the setting's. `error` (`none`, `lookup` or `calculate`)
//! overrides the drawing of tool failures. The numbers in the table always follow from the seed, so an
//! answer cannot be known without looking.
//!
//! Tools: `lookup(order)` shows an order and raises for one that does not exist;
//! `calculate(expression)` works with whole numbers; `submit(answer)` ends the episode.
//!
//! Milestones, each set once, by what happened and never by what was said:
//! - `lookup_success`: every order of the question was looked up.
//! - `calculation_success`: after that, a calculation gave the right answer from the right numbers:
//!   each number in it stands in an order of the question or is the result of such a calculation. (No
//!   order holds its own answer.)
//! - `success`: after that, the right answer was submitted, and no tool had raised in the episode,
//!   a failure that the office injected included. An episode with an injected failure thus earns
//!   milestones and no strict success.
//!
//! Reward 1 for `success`, else 0.

mod expression;
mod question;
mod table;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use protocol::{Split, Task, TraceRow};
use serde_json::{Map, Value, json};

use self::{
    question::{Kind, LANGUAGES, Language, Question},
    table::Order,
};
use crate::{
    Blueprint, Description, Determinism, Environment, Fault, Move, Player, Raised, Score,
    Simulated, Simulation, SpecError, ToolSpec,
    draws::Draws,
    fields::{Fields, task_fields},
    spec,
};

/// Its name in recipes.
pub const NAME: &str = "office";

/// Every order of the question was looked up.
pub const LOOKUP_SUCCESS: &str = "lookup_success";
/// The right answer was calculated from what was looked up.
pub const CALCULATION_SUCCESS: &str = "calculation_success";
/// The right answer was submitted, and no tool had raised.
pub const SUCCESS: &str = "success";

const VERSION: &str = "office-1";
const MILESTONES: [&str; 3] = [LOOKUP_SUCCESS, CALCULATION_SUCCESS, SUCCESS];
const LOOKUP: &str = "lookup";
const CALCULATE: &str = "calculate";
const SUBMIT: &str = "submit";

/// The office's settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Settings {
    records: u64,
    level: u64,
    /// One language, or both in equal shares.
    language: Option<Language>,
    error_percent: u64,
    max_calls: u64,
}

pub(crate) fn parse(fields: &mut Fields<'_>) -> Result<Arc<dyn Blueprint>, SpecError> {
    let [english, german] = LANGUAGES.map(|(name, language)| (name, Some(language)));
    Ok(Arc::new(Settings {
        records: fields.integer("records", 6, 2..=50)?,
        level: fields.integer("level", 1, 1..=3)?,
        language: fields.choice("language", None, &[english, german, ("both", None)])?,
        error_percent: fields.integer("error_percent", 0, 0..=50)?,
        max_calls: fields.integer("max_calls", 8, 3..=64)?,
    }))
}

/// What a task's object says.
struct Asked {
    question: Option<Question>,
    language: Option<Language>,
    /// The tool that fails once, where the task decides that.
    error: Option<Option<&'static str>>,
}

impl Asked {
    fn read(task: &Map<String, Value>) -> Result<Self, SpecError> {
        let mut fields = Fields::new("task", task);
        let errors = [
            ("none", Some(None)),
            (LOOKUP, Some(Some(LOOKUP))),
            (CALCULATE, Some(Some(CALCULATE))),
        ];
        Ok(Self {
            question: Question::read(&mut fields)?,
            language: fields.choice(
                "language",
                None,
                &LANGUAGES.map(|(name, language)| (name, Some(language))),
            )?,
            error: fields.choice("error", None, &errors)?,
        })
    }
}

impl Settings {
    fn level(&self) -> usize {
        usize::try_from(self.level).unwrap_or(1)
    }

    fn draw_language(&self, draws: &mut Draws) -> Language {
        let drawn = if draws.chance(500) { Language::English } else { Language::German };
        self.language.unwrap_or(drawn)
    }
}

impl Blueprint for Settings {
    fn name(&self) -> &str {
        NAME
    }

    fn version(&self) -> String {
        VERSION.into()
    }

    fn settings(&self) -> Map<String, Value> {
        spec::settings(json!({
            "records": self.records,
            "level": self.level,
            "language": self.language.map_or("both", Language::name),
            "error_percent": self.error_percent,
            "max_calls": self.max_calls,
        }))
    }

    fn check_task(&self, task: &Task) -> Result<(), SpecError> {
        Asked::read(&task_fields(task)?).map(|_| ())
    }

    fn open(&self) -> Result<Box<dyn Environment>, Fault> {
        let one = |name: &str, kind: &str, description: &str| {
            json!({
                "type": "object",
                "properties": {name: {"type": kind, "description": description}},
                "required": [name],
            })
        };
        let tools = vec![
            ToolSpec::new(
                LOOKUP,
                "Shows an order: its quantity, price and rebate.",
                one("order", "integer", "The order's number."),
            ),
            ToolSpec::new(
                CALCULATE,
                "Calculates with whole numbers, +, -, * and parentheses.",
                one("expression", "string", "What to calculate."),
            ),
            ToolSpec::new(
                SUBMIT,
                "Submits the result and ends the task.",
                one("answer", "integer", "The result."),
            ),
        ];
        let description = Description {
            name: NAME.into(),
            version: VERSION.into(),
            tools,
            milestones: MILESTONES.map(str::to_owned).to_vec(),
            reward_range: 0.0..=1.0,
            determinism: Determinism::Deterministic,
            images: false,
            answers: false,
        };
        Ok(Box::new(Simulated::new(Office::new(*self), description)))
    }

    fn score(&self, reached: &BTreeSet<&str>) -> Option<Score> {
        Some(score(|name| reached.contains(name)))
    }

    /// Training asks about orders whose number is no multiple of 7, evaluation about the others: every
    /// digit stands at every place on both sides.
    fn draw_task(&self, split: Split, draws: &mut Draws) -> Option<(String, Map<String, Value>)> {
        let held_out = split == Split::Eval;
        let question =
            Question::draw(self.level(), draws, |number| number.is_multiple_of(7) == held_out);
        let language = self.draw_language(draws);
        let prompt = question.text(language, draws.below(3));
        Some((prompt, question.to_fields(language)))
    }

    fn expert(&self, task: &Task) -> Result<Option<Player>, SpecError> {
        Ok(Some(Box::new(expert(task)?)))
    }
}

fn score(reached: impl Fn(&str) -> bool) -> Score {
    let success = reached(SUCCESS);
    Score::new(f64::from(u8::from(success)), success, MILESTONES, reached)
}

struct Office {
    settings: Settings,
    question: Question,
    table: BTreeMap<u64, Order>,
    /// The tool whose next call fails.
    failing: Option<&'static str>,
    looked_up: BTreeSet<u64>,
    /// Numbers that a calculation may use to count.
    known: BTreeSet<i64>,
    reached: BTreeSet<&'static str>,
    calls: u64,
    raised: bool,
    submitted: bool,
}

impl Office {
    fn new(settings: Settings) -> Self {
        Self {
            settings,
            question: Question { kind: Kind::Total, orders: Vec::new() },
            table: BTreeMap::new(),
            failing: None,
            looked_up: BTreeSet::new(),
            known: BTreeSet::new(),
            reached: BTreeSet::new(),
            calls: 0,
            raised: false,
            submitted: true,
        }
    }

    fn lookup(&mut self, arguments: &Map<String, Value>) -> Result<String, Raised> {
        let number = arguments.get("order").and_then(Value::as_i64).unwrap_or_default();
        let order = u64::try_from(number).ok().and_then(|number| self.table.get(&number));
        let Some(order) = order else {
            return Err(Raised::new(format!("There is no order {number}.")));
        };
        if self.question.orders.contains(&order.number) {
            self.looked_up.insert(order.number);
            self.known.extend(self.question.figures(order));
            if self.looked_up.len() == self.question.orders.len() {
                self.reached.insert(LOOKUP_SUCCESS);
            }
        }
        Ok(order.shown())
    }

    fn calculate(&mut self, arguments: &Map<String, Value>) -> Result<String, Raised> {
        let text = arguments.get("expression").and_then(Value::as_str).unwrap_or_default();
        let done = expression::calculate(text)?;
        if done.numbers.iter().all(|number| self.known.contains(number)) {
            self.known.insert(done.value);
            let right = self.question.answer(&self.table) == Some(done.value);
            if right && self.reached.contains(LOOKUP_SUCCESS) {
                self.reached.insert(CALCULATION_SUCCESS);
            }
        }
        Ok(done.value.to_string())
    }

    fn submit(&mut self, arguments: &Map<String, Value>) -> String {
        self.submitted = true;
        let answer = arguments.get("answer").and_then(Value::as_i64);
        let right = answer.is_some() && answer == self.question.answer(&self.table);
        if right && !self.raised && self.reached.contains(CALCULATION_SUCCESS) {
            self.reached.insert(SUCCESS);
        }
        if right { "accepted".into() } else { "rejected".into() }
    }

    fn run(&mut self, tool: &str, arguments: &Map<String, Value>) -> Result<String, Raised> {
        if self.failing.is_some_and(|failing| failing == tool) {
            self.failing = None;
            return Err(Raised::new(format!("{tool} is not available right now. Try again.")));
        }
        match tool {
            LOOKUP => self.lookup(arguments),
            CALCULATE => self.calculate(arguments),
            _ => Ok(self.submit(arguments)),
        }
    }
}

impl Simulation for Office {
    fn reset(&mut self, task: &Map<String, Value>, seed: u64) -> Result<Option<String>, SpecError> {
        let settings = self.settings;
        let asked = Asked::read(task)?;
        // A stream for each purpose: whether a task names its question does not change its table.
        let mut draws = Draws::new("rollcall-office-question-v1", seed);
        let drawn = Question::draw(settings.level(), &mut draws, |_| true);
        let language = asked.language.unwrap_or_else(|| settings.draw_language(&mut draws));
        let phrasing = draws.below(3);
        let (question, text) = match asked.question {
            Some(question) => (question, None),
            None => {
                let text = drawn.text(language, phrasing);
                (drawn, Some(text))
            }
        };
        let mut draws = Draws::new("rollcall-office-failure-v1", seed);
        let fails = draws.chance(settings.error_percent * 10);
        let failing = if draws.chance(500) { LOOKUP } else { CALCULATE };
        let failing = asked.error.unwrap_or(fails.then_some(failing));

        let size = usize::try_from(settings.records).unwrap_or_default();
        let mut draws = Draws::new("rollcall-office-table-v1", seed);
        let table = table::draw(&question.orders, size, &mut draws);
        *self = Self { question, table, failing, submitted: false, ..Self::new(settings) };
        Ok(text)
    }

    fn call(&mut self, tool: &str, arguments: &Map<String, Value>) -> Result<String, Raised> {
        if self.done() {
            return Err(Raised::new("The task is closed."));
        }
        self.calls += 1;
        let result = self.run(tool, arguments);
        self.raised |= result.is_err();
        result
    }

    fn done(&self) -> bool {
        self.submitted || self.calls >= self.settings.max_calls
    }

    fn reached(&self) -> Vec<String> {
        self.reached.iter().map(|name| (*name).to_owned()).collect()
    }

    fn score(&self) -> Score {
        score(|name| self.reached.contains(name))
    }
}

/// A player that knows the way: looks up every order, calculates once, submits, and repeats a call
/// that failed. For [`crate::play()`], baselines and demonstrations to learn from.
///
/// # Errors
/// The task's object names no question, or a bad one.
pub fn expert(
    task: &Task,
) -> Result<impl Fn(&str, &[TraceRow]) -> Option<Move> + use<>, SpecError> {
    let fields = task_fields(task)?;
    let question =
        Question::read(&mut Fields::new("task", &fields))?.ok_or_else(|| SpecError::Missing {
            field: "task.question".into(),
            expected: "total, rebate or sum".into(),
        })?;
    Ok(move |_: &str, rows: &[TraceRow]| next_move(&question, rows))
}

fn next_move(question: &Question, rows: &[TraceRow]) -> Option<Move> {
    let answered = |tool: &'static str| {
        rows.iter().filter(move |row| row.tool == tool && row.kind == protocol::CallKind::Ok)
    };
    let shown: Vec<Value> =
        answered(LOOKUP).filter_map(|row| serde_json::from_str(&row.observation).ok()).collect();
    if let Some(order) = question.orders.get(shown.len()) {
        return Some(Move::new(LOOKUP, json!({"order": order})));
    }
    if let Some(row) = answered(CALCULATE).next() {
        let answer: i64 = row.observation.parse().ok()?;
        return Some(Move::new(SUBMIT, json!({"answer": answer})));
    }
    let terms = shown.iter().map(|order| {
        let figure = |name: &str| order.get(name).map(Value::to_string);
        let total = format!("{}*{}", figure("quantity")?, figure("price")?);
        Some(match question.kind {
            Kind::Rebate => format!("{total}-{}", figure("rebate")?),
            Kind::Total | Kind::Sum => total,
        })
    });
    let expression = terms.collect::<Option<Vec<String>>>()?.join("+");
    Some(Move::new(CALCULATE, json!({"expression": expression})))
}
