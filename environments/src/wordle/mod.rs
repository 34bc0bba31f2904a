//! `wordle`: find a hidden word of five letters; each guess is answered letter by letter.
//!
//! Settings: `max_turns` (1 to 20, default 6), the guesses; `words` (2 to all of them, the default), how
//! many words can be hidden, the same ones for every seed; `reward`, `solved` (the default) or `places`.
//! A task's object may name the `word`, which must be one that can be hidden under these settings;
//! otherwise the seed draws it.
//!
//! The answer to a guess is two lines: its letters, and under each `G` (right place), `Y` (elsewhere in
//! the word) or `X`. A letter is marked `G` or `Y` at most as often as the word has it: right places
//! first, then from the left. A guess that is no word of the list is an error and uses up no guess; the
//! episode ends when the word is found, the guesses are used up, or there were `max_turns` such errors.
//!
//! Milestones: `place_1` to `place_5`, that letter's place was guessed right; `solved`. Reward 1 for
//! `solved`, else 0, or with `places` 0.1 for each place.

mod words;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use protocol::{CallKind, Split, Task, TraceRow};
use serde_json::{Map, Value, json};

pub use self::words::{LETTERS, Word};
use self::words::{guessable, hidden};
use crate::{
    Blueprint, Description, Environment, Fault, Move, Player, Raised, Score, Simulated, Simulation,
    SpecError, ToolSpec,
    draws::Draws,
    fields::{Fields, shown, task_fields},
    spec,
};

/// Its name in recipes.
pub const NAME: &str = "wordle";

const VERSION: &str = "wordle-1";
const GUESS: &str = "guess";
const SOLVED: &str = "solved";
const PLACES: [&str; LETTERS] = ["place_1", "place_2", "place_3", "place_4", "place_5"];

/// The words that can be hidden: the first `words` of them under a section's settings.
pub fn hidden_words() -> &'static [Word] {
    hidden()
}

/// The game's settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Settings {
    max_turns: u64,
    words: usize,
    /// Whether right places pay.
    places: bool,
}

pub(crate) fn parse(fields: &mut Fields<'_>) -> Result<Arc<dyn Blueprint>, SpecError> {
    let all = hidden().len();
    let words = fields.integer("words", all as u64, 2..=all as u64)?;
    Ok(Arc::new(Settings {
        max_turns: fields.integer("max_turns", 6, 1..=20)?,
        words: usize::try_from(words).unwrap_or(all),
        places: fields.choice("reward", false, &[("solved", false), ("places", true)])?,
    }))
}

impl Settings {
    /// The words that can be hidden.
    fn words(&self) -> &'static [Word] {
        hidden().get(..self.words).unwrap_or_default()
    }

    /// The word that a task names.
    fn asked(&self, task: &Map<String, Value>) -> Result<Option<Word>, SpecError> {
        let Some(value) = task.get("word") else { return Ok(None) };
        let word = value.as_str().and_then(Word::read);
        word.filter(|word| self.words().contains(word)).map(Some).ok_or_else(|| SpecError::Value {
            field: "task.word".into(),
            expected: format!("one of the {} words that can be hidden", self.words),
            found: shown(value),
        })
    }

    fn score(&self, reached: impl Fn(&str) -> bool) -> Score {
        let solved = reached(SOLVED);
        let places = PLACES.iter().filter(|place| reached(place)).count();
        let partial = if self.places { places as f64 / 10.0 } else { 0.0 };
        let reward = if solved { 1.0 } else { partial };
        Score::new(reward, solved, milestones(), reached)
    }
}

fn milestones() -> impl Iterator<Item = &'static str> {
    PLACES.into_iter().chain([SOLVED])
}

impl Blueprint for Settings {
    fn name(&self) -> &str {
        NAME
    }

    fn version(&self) -> String {
        VERSION.into()
    }

    fn settings(&self) -> Map<String, Value> {
        let reward = if self.places { "places" } else { "solved" };
        spec::settings(json!({"max_turns": self.max_turns, "words": self.words, "reward": reward}))
    }

    fn check_task(&self, task: &Task) -> Result<(), SpecError> {
        self.asked(&task_fields(task)?).map(|_| ())
    }

    fn open(&self) -> Result<Box<dyn Environment>, Fault> {
        let tool = ToolSpec::new(
            GUESS,
            "Guess the hidden word. Answers with a mark under each letter: G is right, Y is elsewhere in \
             the word, X is not in it.",
            json!({
                "type": "object",
                "properties": {
                    "word": {"type": "string", "description": "A word of five letters."},
                },
                "required": ["word"],
            }),
        );
        let description = Description::of_game(NAME, VERSION, tool, milestones());
        Ok(Box::new(Simulated::new(Wordle::new(*self), description)))
    }

    fn score(&self, reached: &BTreeSet<&str>) -> Option<Score> {
        Some(self.score(|name| reached.contains(name)))
    }

    /// Every fifth word is asked in evaluation only.
    fn draw_task(&self, split: Split, draws: &mut Draws) -> Option<(String, Map<String, Value>)> {
        let held_out = split == Split::Eval;
        let words = self.words().iter().enumerate();
        let words: Vec<Word> = words
            .filter(|(index, _)| index.is_multiple_of(5) == held_out)
            .map(|(_, word)| *word)
            .collect();
        let word = draws.pick(&words)?;
        let task = spec::settings(json!({"word": word.to_string()}));
        Some(("Find the hidden word.\n".into(), task))
    }

    /// Guesses the word that shares most letters with the words that the answers have left.
    fn expert(&self, task: &Task) -> Result<Option<Player>, SpecError> {
        self.asked(&task_fields(task)?)?;
        let words = self.words();
        Ok(Some(Box::new(move |_, rows| {
            let best = best_guess(words, rows)?;
            Some(Move::new(GUESS, json!({"word": best.to_string()})))
        })))
    }
}

/// The word to guess after `rows`: of the words that fit every answer, the one whose distinct letters
/// are the most frequent among them; the first of equals.
fn best_guess(words: &[Word], rows: &[TraceRow]) -> Option<Word> {
    let answers = rows.iter().filter(|row| row.kind == CallKind::Ok).filter_map(|row| {
        let arguments: Value = serde_json::from_str(&row.arguments).ok()?;
        Some((Word::read(arguments.get("word")?.as_str()?)?, row.observation.as_str()))
    });
    let answers: Vec<(Word, &str)> = answers.collect();
    let fits =
        |word: &&Word| answers.iter().all(|(guess, said)| answer(*guess, **word).as_str() == *said);
    let left: Vec<Word> = words.iter().filter(fits).copied().collect();
    let mut frequency: BTreeMap<u8, usize> = BTreeMap::new();
    for letter in left.iter().flat_map(Word::distinct) {
        *frequency.entry(letter).or_default() += 1;
    }
    let shared = |word: &Word| -> usize {
        word.distinct().iter().filter_map(|letter| frequency.get(letter)).sum()
    };
    left.iter().rev().max_by_key(|word| shared(word)).copied()
}

/// The two lines that answer `guess` when `target` is hidden.
fn answer(guess: Word, target: Word) -> String {
    let marks = guess.marks(target);
    let line = |bytes: [u8; LETTERS]| {
        bytes.map(|byte| char::from(byte.to_ascii_uppercase()).to_string()).join(" ")
    };
    format!("{}\n{}", line(guess.0), line(marks))
}

/// The game.
struct Wordle {
    settings: Settings,
    /// Nothing before the first reset.
    target: Option<Word>,
    guesses: u64,
    refused: u64,
    reached: BTreeSet<&'static str>,
}

impl Wordle {
    fn new(settings: Settings) -> Self {
        Self { settings, target: None, guesses: 0, refused: 0, reached: BTreeSet::new() }
    }

    fn guess(&mut self, target: Word, text: &str) -> Result<String, Raised> {
        let Some(guess) = Word::read(text).filter(|word| guessable().contains(word)) else {
            self.refused += 1;
            let shown: String = text.chars().take(20).collect();
            return Err(Raised::new(format!(
                "{shown:?} is not a word of five letters in the list."
            )));
        };
        self.guesses += 1;
        for ((place, said), meant) in PLACES.iter().zip(guess.0).zip(target.0) {
            if said == meant {
                self.reached.insert(place);
            }
        }
        if guess == target {
            self.reached.insert(SOLVED);
        }
        Ok(answer(guess, target))
    }
}

impl Simulation for Wordle {
    fn reset(&mut self, task: &Map<String, Value>, seed: u64) -> Result<Option<String>, SpecError> {
        let asked = self.settings.asked(task)?;
        let drawn = Draws::new("rollcall-wordle-v1", seed).pick(self.settings.words()).copied();
        *self = Self { target: asked.or(drawn), ..Self::new(self.settings) };
        let guesses = if self.settings.max_turns == 1 { "guess" } else { "guesses" };
        Ok(Some(format!(
            "A word of five letters is hidden. You have {} {guesses}.",
            self.settings.max_turns
        )))
    }

    fn call(&mut self, _: &str, arguments: &Map<String, Value>) -> Result<String, Raised> {
        let (false, Some(target)) = (self.done(), self.target) else {
            return Err(Raised::new("Game over."));
        };
        let text = arguments.get("word").and_then(Value::as_str).unwrap_or_default();
        self.guess(target, text)
    }

    fn done(&self) -> bool {
        let most = self.settings.max_turns;
        self.reached.contains(SOLVED) || self.guesses >= most || self.refused >= most
    }

    fn reached(&self) -> Vec<String> {
        self.reached.iter().map(|name| (*name).to_owned()).collect()
    }

    fn score(&self) -> Score {
        self.settings.score(|name| self.reached.contains(name))
    }
}
