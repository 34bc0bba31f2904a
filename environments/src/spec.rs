//! The recipe's `environment` section: parsed, checked, opened; and the registry of what there is.
//!
//! ```
//! let section = serde_json::json!({"name": "guess", "n": 8, "max_turns": 3});
//! let spec = environments::EnvironmentSpec::parse(&section)?;
//! assert_eq!(spec.tools()?[0].name, "guess");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::{collections::BTreeSet, ffi::OsString, fmt, path::Path, sync::Arc};

use protocol::{Digest, Split, Task, TraceRow};
use serde::{Serialize, Serializer};
use serde_json::{Map, Value, json};

use crate::{
    Description, Environment, Fault, Limits, Player, Score, Solution, SpecError, ToolSpec, add,
    allow,
    draws::Draws,
    fields::{Fields, shown},
    frames, frozen_lake, guess, mcp, office, openenv, python, recorder, without_comments, wordle,
};

/// A configured environment that is not open yet. The registry makes one from a recipe's section.
pub trait Blueprint: fmt::Debug + Send + Sync {
    /// The key under which sections say its name.
    fn key(&self) -> &'static str {
        "name"
    }

    /// The name that recipes use, and messages.
    fn name(&self) -> &str;

    /// What stands under [`Blueprint::key`].
    fn named(&self) -> Value {
        self.name().into()
    }

    /// The folder that its code was found in, where it is not part of this program.
    fn folder(&self) -> Option<&Path> {
        None
    }

    /// Changes whenever the same task, seed and calls could give other rows.
    fn version(&self) -> String;

    /// All settings with their defaults filled in, without `name` and `limits`.
    fn settings(&self) -> Map<String, Value>;

    /// Whether a dataset row fits.
    ///
    /// # Errors
    /// The first field that does not.
    fn check_task(&self, task: &Task) -> Result<(), SpecError>;

    /// Opens it for one episode.
    ///
    /// # Errors
    /// A fault.
    fn open(&self) -> Result<Box<dyn Environment>, Fault>;

    /// Opens it for an episode that is played beside others which do not end before it: a server that has
    /// no room for both is not waited for.
    ///
    /// # Errors
    /// As [`Blueprint::open`].
    fn open_beside(&self) -> Result<Box<dyn Environment>, Fault> {
        self.open()
    }

    /// The score as a function of the milestones that a trace holds, where they decide it.
    fn score(&self, reached: &BTreeSet<&str>) -> Option<Score>;

    /// Whether its methods may wait for something outside this program, so that whoever plays several
    /// episodes at once calls them from a thread of their own.
    fn waits(&self) -> bool {
        false
    }

    /// The score that goes with a reward which the learner cannot compute, where the reward is all that
    /// there is to it. Nothing for a reward that cannot be.
    fn score_claim(&self, _reward: f64) -> Option<Score> {
        None
    }

    /// What of the section this machine's owner must allow ([`allow::ALLOW_VARIABLE`]), if anything.
    fn needs_leave(&self) -> Option<Value> {
        None
    }

    /// A dataset row's prompt and task object, drawn for [`EnvironmentSpec::draw_dataset`]. What it
    /// asks of one split must not be asked of the other, where tasks differ at all. Nothing where
    /// users bring their own tasks.
    fn draw_task(&self, _split: Split, _draws: &mut Draws) -> Option<(String, Map<String, Value>)> {
        None
    }

    /// A program that plays a task well, for baselines and demonstrations. Nothing where there is none.
    ///
    /// # Errors
    /// A task that it cannot play.
    fn expert(&self, _task: &Task) -> Result<Option<Player>, SpecError> {
        Ok(None)
    }

    /// What the episode of a task and seed asks for, and the right answer. Nothing where no answer is
    /// asked for, or none is known.
    ///
    /// # Errors
    /// A task that does not fit.
    fn solution(&self, _task: &Task, _seed: u64) -> Result<Option<Solution>, SpecError> {
        Ok(None)
    }
}

/// Makes a blueprint from the settings of a section, `name` and `limits` already read.
type Parse = fn(&mut Fields<'_>) -> Result<Arc<dyn Blueprint>, SpecError>;

/// What there is, by name.
const REGISTRY: [(&str, Parse); 6] = [
    (guess::NAME, guess::parse),
    (add::NAME, add::parse),
    (office::NAME, office::parse),
    (wordle::NAME, wordle::parse),
    (frozen_lake::NAME, frozen_lake::parse),
    (frames::NAME, frames::parse),
];

/// Makes a blueprint from the settings of a section of a file in a folder, `limits` already read.
type ParseIn = fn(&mut Fields<'_>, Option<&Path>) -> Result<Arc<dyn Blueprint>, SpecError>;

/// What runs outside this program, by the key that such sections have in place of `name`.
const OUTSIDE: [(&str, ParseIn); 3] =
    [(python::KEY, python::parse), (openenv::KEY, openenv::parse), (mcp::KEY, mcp::parse)];

/// The built-in environment that `name` says.
fn named(fields: &mut Fields<'_>) -> Result<Arc<dyn Blueprint>, SpecError> {
    let names: Vec<String> = EnvironmentSpec::names().map(|name| format!("{name:?}")).collect();
    let expected = format!("one of {}", names.join(", "));
    let name = fields.text("name", &expected)?;
    match REGISTRY.iter().find(|(known, _)| *known == name) {
        Some((_, parse)) => parse(fields),
        None => Err(SpecError::Value {
            field: "environment.name".into(),
            expected,
            found: shown(&name.into()),
        }),
    }
}

/// An environment as a recipe asks for it.
#[derive(Clone, Debug)]
pub struct EnvironmentSpec {
    blueprint: Arc<dyn Blueprint>,
    limits: Limits,
}

impl EnvironmentSpec {
    /// Reads an `environment` section: `name`, the settings of the environment of that name, and
    /// `limits` ([`Limits`]); or `python`, `openenv` or `mcp` in place of `name`. Code that a section names is
    /// looked for only where this machine's owner says ([`python::FOLDERS_VARIABLE`]), and servers and
    /// commands are only those that it allows ([`allow::ALLOW_VARIABLE`]).
    ///
    /// # Errors
    /// The first mistake, with its field and remedy: an unknown name or field, a value of the wrong
    /// type or out of bounds.
    pub fn parse(section: &Value) -> Result<Self, SpecError> {
        Self::read(section, None)
    }

    /// [`EnvironmentSpec::parse`] of a section of a file in `folder`: code that it names may lie there.
    ///
    /// # Errors
    /// As [`EnvironmentSpec::parse`].
    pub fn parse_in(section: &Value, folder: &Path) -> Result<Self, SpecError> {
        Self::read(section, Some(folder))
    }

    fn read(section: &Value, folder: Option<&Path>) -> Result<Self, SpecError> {
        let Value::Object(object) = section else {
            return Err(SpecError::Value {
                field: "environment".into(),
                expected: "an object with a name".into(),
                found: shown(section),
            });
        };
        let mut fields = Fields::new("environment", object);
        let limits = match fields.object("limits")? {
            None => Limits::default(),
            Some(object) => Limits::parse(object)?,
        };
        let blueprint = match OUTSIDE.iter().find(|(key, _)| object.contains_key(*key)) {
            Some((_, parse)) => parse(&mut fields, folder)?,
            None => named(&mut fields)?,
        };
        fields.refuse_others()?;
        Ok(Self { blueprint, limits })
    }

    /// Reads what a command line says: an environment's name, its section as JSON text, or a file that
    /// is such a section or holds one under `environment`, as a recipe does.
    ///
    /// # Errors
    /// It is none of these, or as [`EnvironmentSpec::parse`].
    pub fn from_argument(argument: &str) -> Result<Self, SpecError> {
        if Self::names().any(|name| name == argument) {
            return Self::parse(&json!({"name": argument}));
        }
        let wrong = |reason: String| SpecError::Argument {
            argument: argument.chars().take(200).collect(),
            reason,
            names: Self::names().collect::<Vec<_>>().join(", "),
        };
        let text = if argument.trim_start().starts_with('{') {
            argument.to_owned()
        } else {
            std::fs::read_to_string(argument).map_err(|error| wrong(error.to_string()))?
        };
        let text = without_comments(text.as_bytes());
        let value: Value =
            serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
        let section = value.get("environment").unwrap_or(&value);
        let file = Path::new(argument).parent().filter(|_| !argument.trim_start().starts_with('{'));
        Self::parse_in(section, file.unwrap_or(Path::new("")))
    }

    /// An environment that is not in the registry, for programs that bring their own.
    pub fn custom(blueprint: Arc<dyn Blueprint>, limits: Limits) -> Self {
        Self { blueprint, limits }
    }

    /// The names that recipes can use.
    pub fn names() -> impl Iterator<Item = &'static str> {
        REGISTRY.iter().map(|(name, _)| *name)
    }

    pub(crate) fn blueprint(&self) -> &dyn Blueprint {
        self.blueprint.as_ref()
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.blueprint.name()
    }

    /// The folder that its code was found in, where it is not part of this program.
    pub fn folder(&self) -> Option<&Path> {
        self.blueprint.folder()
    }

    /// Variables with which a program on this machine may open the section, as it came over the network:
    /// where its code lies, and what its owner allows. None for what is part of this program.
    pub fn variables(&self) -> Vec<(&'static str, OsString)> {
        let folder = self.folder().map(|it| (python::FOLDERS_VARIABLE, it.as_os_str().to_owned()));
        let leave = self.blueprint.needs_leave();
        let leave =
            leave.map(|it| (allow::ALLOW_VARIABLE, Value::from(vec![it]).to_string().into()));
        folder.into_iter().chain(leave).collect()
    }

    /// Whether its methods may wait for something outside this program.
    pub fn waits(&self) -> bool {
        self.blueprint.waits()
    }

    /// The score that goes with a reward that is only claimed; nothing where a trace's milestones decide
    /// it, or for a reward that cannot be.
    pub fn score_claim(&self, reward: f64) -> Option<Score> {
        self.blueprint.score_claim(reward)
    }

    /// The bounds on calls and texts.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// The section with every default filled in; [`EnvironmentSpec::parse`] reads it back.
    pub fn to_json(&self) -> Value {
        let mut object = Map::new();
        object.insert(self.blueprint.key().into(), self.blueprint.named());
        object.extend(self.blueprint.settings());
        object.insert("limits".into(), self.limits.to_json());
        Value::Object(object)
    }

    /// Names everything that decides an episode besides task, seed and calls: settings, limits, the
    /// environment's version and the recorder's format. Two sides must agree on it.
    pub fn digest(&self) -> Digest {
        let section = self.to_json().to_string();
        let version = self.blueprint.version();
        Digest::of_parts(
            "rollcall-environment-v1",
            &[section.as_bytes(), version.as_bytes(), recorder::FORMAT.as_bytes()],
        )
    }

    /// Opens it for one episode.
    ///
    /// # Errors
    /// A fault. Built-in environments have none here.
    pub fn open(&self) -> Result<Box<dyn Environment>, Fault> {
        self.blueprint.open()
    }

    pub(crate) fn open_beside(&self) -> Result<Box<dyn Environment>, Fault> {
        self.blueprint.open_beside()
    }

    /// What it says about itself.
    ///
    /// # Errors
    /// As [`EnvironmentSpec::open`].
    pub fn describe(&self) -> Result<Description, Fault> {
        Ok(self.open()?.describe().clone())
    }

    /// Its tools, in the order in which the policy is shown them.
    ///
    /// # Errors
    /// As [`EnvironmentSpec::open`].
    pub fn tools(&self) -> Result<Vec<ToolSpec>, Fault> {
        self.describe().map(|description| description.tools)
    }

    /// Whether a dataset row fits, before anything is played.
    ///
    /// # Errors
    /// The first field that does not, with a remedy.
    pub fn check_task(&self, task: &Task) -> Result<(), SpecError> {
        self.blueprint.check_task(task)
    }

    /// A program that plays a task well; nothing where the environment has none.
    ///
    /// # Errors
    /// A task that it cannot play.
    pub fn expert(&self, task: &Task) -> Result<Option<Player>, SpecError> {
        self.blueprint.expert(task)
    }

    /// What the episode of a task and seed asks for, and the right answer; nothing where none is known.
    ///
    /// # Errors
    /// A task that does not fit.
    pub fn solution(&self, task: &Task, seed: u64) -> Result<Option<Solution>, SpecError> {
        self.blueprint.solution(task, seed)
    }

    /// The score that a checked trace stands for, from its milestones alone; nothing where the
    /// environment's score depends on more than those.
    pub fn score_trace(&self, rows: &[TraceRow]) -> Option<Score> {
        let reached = rows.iter().flat_map(|row| row.milestones.iter().map(String::as_str));
        self.blueprint.score(&reached.collect())
    }
}

impl PartialEq for EnvironmentSpec {
    fn eq(&self, other: &Self) -> bool {
        self.digest() == other.digest()
    }
}

impl Serialize for EnvironmentSpec {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.to_json().serialize(serializer)
    }
}

impl fmt::Display for EnvironmentSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_json().fmt(f)
    }
}

/// The settings object of a blueprint.
pub(crate) fn settings(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(section: Value) -> String {
        EnvironmentSpec::parse(&section).expect_err("refused").to_string()
    }

    #[test]
    fn mistakes_name_the_field_and_a_remedy() {
        for (section, message) in [
            (json!([]), "environment must be an object with a name, not []"),
            (
                json!({}),
                r#"environment.name is missing: set it to one of "guess", "add", "office", "wordle", "frozen_lake", "frames""#,
            ),
            (
                json!({"name": 3}),
                r#"environment.name must be one of "guess", "add", "office", "wordle", "frozen_lake", "frames", not 3"#,
            ),
            (
                json!({"name": "chess"}),
                r#"environment.name must be one of "guess", "add", "office", "wordle", "frozen_lake", "frames", not "chess""#,
            ),
            (
                json!({"name": "guess", "m": 1}),
                "environment.m is unknown: remove it or use one of limits, max_turns, n, name",
            ),
            (
                json!({"name": "guess", "n": 0}),
                "environment.n must be an integer from 1 to 1000000, not 0",
            ),
            (
                json!({"name": "guess", "n": "8"}),
                "environment.n must be an integer from 1 to 1000000, not \"8\"",
            ),
            (
                json!({"name": "guess", "n": 8.0}),
                "environment.n must be an integer from 1 to 1000000, not 8.0",
            ),
            (
                json!({"name": "guess", "max_turns": -1}),
                "environment.max_turns must be an integer from 1 to 100, not -1",
            ),
            (
                json!({"name": "guess", "limits": {"calls": 1}}),
                "environment.limits.calls is unknown: remove it or use one of calls_per_turn, \
                 episode_seconds, observation_chars, observation_tokens, reset_chars",
            ),
            (
                json!({"name": "guess", "limits": {"observation_chars": 1}}),
                "environment.limits.observation_chars must be an integer from 64 to 65536, not 1",
            ),
            (json!({"name": "guess", "limits": 1}), "environment.limits must be an object, not 1"),
        ] {
            assert_eq!(error(section), message);
        }
        let long = error(json!({"name": "x".repeat(10_000)}));
        assert!(long.len() < 200, "{long}");
    }

    #[test]
    fn a_command_line_gives_a_name_a_section_or_a_file() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("recipe.json");
        std::fs::write(
            &path,
            "{\"environment\": // a comment\n {\"name\": \"office\", \"level\": 2}}",
        )
        .expect("written");
        for (argument, name) in [
            ("guess", "guess"),
            (r#" {"name": "add"}"#, "add"),
            (&path.to_string_lossy(), "office"),
        ] {
            let spec = EnvironmentSpec::from_argument(argument).expect("an environment");
            assert_eq!(spec.name(), name);
        }
        for argument in ["chess", "{", r#"{"name": 1}"#] {
            let error = EnvironmentSpec::from_argument(argument).expect_err("refused").to_string();
            assert!(error.contains(" or ") || error.contains("one of"), "{error}");
            assert!(!error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn defaults_are_filled_in_and_read_back() {
        let spec = EnvironmentSpec::parse(&json!({"name": "guess"})).expect("parses");
        assert_eq!(
            spec.to_string(),
            r#"{"name":"guess","n":8,"max_turns":3,"limits":{"calls_per_turn":8,"observation_chars":8192,"reset_chars":16384}}"#
        );
        assert_eq!(EnvironmentSpec::parse(&spec.to_json()), Ok(spec.clone()));
        let other = json!({"name": "guess", "limits": {"calls_per_turn": 1}});
        assert_ne!(EnvironmentSpec::parse(&other).map(|other| other.digest()), Ok(spec.digest()));
    }
}
