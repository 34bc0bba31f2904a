//! `{"mcp": {"command": ["program", "argument"]}}`: the tools of an MCP server over its standard input
//! and output.
//!
//! MCP knows tools and neither episodes, seeds nor scores. So every episode has a server process of its
//! own, which is told the seed (its 31 low bits) and the task's object in the variables [`SEED`] and
//! [`TASK`] and wherever `{seed}` stands in its command or variables; and two tools, which the policy is
//! never shown, are asked by us: `rollcall_reset`, where there is one, with the task's fields and the seed,
//! for the text that the policy is shown first; and `rollcall_score`, for the reward. Sections may name
//! others. No tool whose name starts with `rollcall_` is shown.
//!
//! A result ends the episode whose structured content has `"done": true`, or whose `_meta` has
//! `"rollcall/done": true`. Errors of tools are observations.
//!
//! The program is run in the recipe's folder. It has your rights: it is no sandbox.

mod session;

use std::{
    collections::BTreeSet,
    env,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
    time::Duration,
};

use protocol::Task;
use serde_json::{Map, Value, json};

use self::session::{Failed, Program, Session};
use crate::{
    Blueprint, Description, Environment, Fault, Raised, Reply, Score, SpecError, ToolSpec, allow,
    fields::{Fields, shown, task_fields},
    hosted::{self, Common, Host},
    python::FOLDERS_VARIABLE,
    text,
};

/// The key that such sections have in place of `name`.
pub const KEY: &str = "mcp";
/// The variable in which a server finds its episode's seed.
pub const SEED: &str = "ROLLCALL_SEED";
/// The variable in which a server finds its episode's task: a JSON object.
pub const TASK: &str = "ROLLCALL_TASK";

const VERSION: &str = "mcp-1";
/// What the names of tools start with that are ours to call.
const OURS: &str = "rollcall_";
const RESET: &str = "rollcall_reset";
const SCORE: &str = "rollcall_score";
/// Stands for the seed in a command or a variable.
const SEED_PLACE: &str = "{seed}";

/// What a section says.
#[derive(Clone, Debug)]
struct Settings {
    /// For messages: the command's words.
    name: String,
    command: Vec<String>,
    /// Variables that are set for it.
    set: Vec<(String, String)>,
    folder: PathBuf,
    variables: Vec<String>,
    /// The tool that is called first, where the section names one.
    reset: Option<String>,
    score: String,
    common: Common,
    start_seconds: u64,
}

/// Reads a section of a recipe in the folder `recipe`, where one of this machine names the command.
pub(crate) fn parse(
    fields: &mut Fields<'_>,
    recipe: Option<&Path>,
) -> Result<Arc<dyn Blueprint>, SpecError> {
    let wrong = |expected: &str, found: &Value| SpecError::Value {
        field: "environment.mcp".into(),
        expected: expected.into(),
        found: shown(found),
    };
    let server = fields.object(KEY)?.cloned().unwrap_or_default();
    let mut inner = Fields::new("environment.mcp", &server);
    let command = inner.texts("command", 256)?;
    if command.is_empty() {
        return Err(SpecError::Missing {
            field: "environment.mcp.command".into(),
            expected: "a list of texts, as [\"python3\", \"server.py\"]".into(),
        });
    }
    let mut set = Vec::new();
    for (name, value) in inner.object("env")?.into_iter().flatten() {
        let Some(value) = value.as_str().filter(|it| !it.contains('\0') && lawful(name)) else {
            return Err(wrong("a command whose env holds texts", value));
        };
        set.push((name.clone(), value.to_owned()));
    }
    if command.iter().any(|word| word.contains('\0')) {
        return Err(wrong("a command without NUL", &json!(command)));
    }
    inner.refuse_others()?;
    let named = Value::Object(server);
    allow::check("environment.mcp", &named, recipe)?;
    let tool = "the name of a tool of the server";
    let settings = Settings {
        name: command.join(" ").chars().take(100).collect(),
        command,
        set,
        folder: folder(recipe),
        variables: fields.texts("variables", 64)?,
        reset: fields.optional_text("reset", tool)?.map(str::to_owned),
        score: fields.optional_text("score", tool)?.unwrap_or(SCORE).into(),
        common: Common::parse(fields)?,
        start_seconds: fields.integer("start_seconds", 60, 1..=3600)?,
    };
    let program = Arc::new(Server { settings, resets: OnceLock::new() });
    Ok(Arc::new(Command { program, named, described: OnceLock::new() }))
}

fn lawful(variable: &str) -> bool {
    !variable.is_empty() && !variable.contains(['=', '\0'])
}

/// Where the command is run: in the recipe's folder, else in the first that this machine's owner names.
fn folder(recipe: Option<&Path>) -> PathBuf {
    let named = env::var_os(FOLDERS_VARIABLE).unwrap_or_default();
    let folders = recipe.map(Path::to_owned).into_iter().chain(env::split_paths(&named));
    let mut folders = folders.filter_map(|folder| match folder.as_os_str().is_empty() {
        true if recipe.is_none() => None,
        true => Path::new(".").canonicalize().ok(),
        false => folder.canonicalize().ok(),
    });
    folders.next().unwrap_or_else(|| PathBuf::from("."))
}

/// A server that is started for each episode.
#[derive(Debug)]
struct Server {
    settings: Settings,
    /// Whether there is a tool to call first. Set before the first episode.
    resets: OnceLock<bool>,
}

impl Server {
    fn fault(&self, during: &'static str, what: String) -> Fault {
        Fault::Process { environment: self.settings.name.clone(), during, what }
    }

    fn start(&self, seed: u64, task: &Map<String, Value>) -> Result<Session, Fault> {
        let settings = &self.settings;
        let seed = (seed & 0x7fff_ffff).to_string();
        let filled = |text: &String| text.replace(SEED_PLACE, &seed);
        let command: Vec<String> = settings.command.iter().map(filled).collect();
        let mut set: Vec<(String, String)> =
            settings.set.iter().map(|(name, value)| (name.clone(), filled(value))).collect();
        set.push((SEED.into(), seed.clone()));
        set.push((TASK.into(), Value::Object(task.clone()).to_string()));
        let (folder, variables) = (&settings.folder, &settings.variables);
        let program = Program { command: &command, folder, variables, set };
        Session::start(&program, Duration::from_secs(settings.start_seconds))
            .map_err(|what| self.fault("its start", what))
    }

    /// The tools that the policy is shown.
    fn tools(&self) -> Result<Vec<ToolSpec>, Fault> {
        let settings = &self.settings;
        let mut session = self.start(0, &Map::new())?;
        let fault = |what: String| self.fault("its list of tools", what);
        let listed = session.tools(settings.common.reset()).map_err(fault)?;
        let has = |name: &str| listed.iter().any(|tool| tool.name == name);
        let reset = settings.reset.as_deref().unwrap_or(RESET);
        if settings.reset.is_some() && !has(reset) {
            return Err(fault(format!("it has no tool {reset:?}: mend environment.reset")));
        }
        if !has(&settings.score) {
            return Err(fault(format!(
                "it has no tool {:?} to ask for the reward: give it one, or name another in \
                 environment.score",
                settings.score
            )));
        }
        self.resets.get_or_init(|| has(reset));
        let kept = listed.iter().filter(|tool| {
            tool.name != reset && tool.name != settings.score && !tool.name.starts_with(OURS)
        });
        Ok(kept.cloned().collect())
    }
}

impl Host for Server {
    fn name(&self) -> &str {
        &self.settings.name
    }

    fn version(&self) -> String {
        VERSION.into()
    }

    fn common(&self) -> &Common {
        &self.settings.common
    }

    fn play(self: &Arc<Self>, description: Description, _: bool) -> Box<dyn Environment> {
        Box::new(Episode { server: self.clone(), description, session: None })
    }
}

/// A server's command in a recipe.
#[derive(Debug)]
struct Command {
    program: Arc<Server>,
    /// As it stands in the section.
    named: Value,
    described: OnceLock<Result<Description, Fault>>,
}

impl Blueprint for Command {
    fn key(&self) -> &'static str {
        KEY
    }

    fn name(&self) -> &str {
        &self.program.settings.name
    }

    fn named(&self) -> Value {
        self.named.clone()
    }

    fn folder(&self) -> Option<&Path> {
        Some(&self.program.settings.folder)
    }

    fn version(&self) -> String {
        VERSION.into()
    }

    fn settings(&self) -> Map<String, Value> {
        let settings = &self.program.settings;
        let mut all = Map::new();
        if let Some(tool) = &settings.reset {
            all.insert("reset".into(), json!(tool));
        }
        all.insert("score".into(), json!(settings.score));
        all.extend(settings.common.settings());
        all.insert("start_seconds".into(), settings.start_seconds.into());
        all.insert("variables".into(), json!(settings.variables));
        all
    }

    fn check_task(&self, task: &Task) -> Result<(), SpecError> {
        task_fields(task).map(|_| ())
    }

    fn open(&self) -> Result<Box<dyn Environment>, Fault> {
        let describe = || {
            let settings = &self.program.settings;
            let tools = self.program.tools()?;
            let description = settings.common.describe(&settings.name, VERSION.into(), tools);
            hosted::tested(&self.program, description)
        };
        let description = self.described.get_or_init(describe).clone()?;
        Ok(self.program.play(description, false))
    }

    fn waits(&self) -> bool {
        true
    }

    fn needs_leave(&self) -> Option<Value> {
        Some(self.named.clone())
    }

    fn score(&self, _: &BTreeSet<&str>) -> Option<Score> {
        None
    }

    fn score_claim(&self, reward: f64) -> Option<Score> {
        self.program.settings.common.score(reward)
    }
}

/// An episode: a server from its first reset on.
struct Episode {
    server: Arc<Server>,
    description: Description,
    session: Option<Session>,
}

impl Episode {
    /// The result of a tool; what the server refuses is the inner error.
    fn ask(
        &mut self,
        during: &'static str,
        tool: &str,
        arguments: Map<String, Value>,
        patience: Duration,
    ) -> Result<Result<Value, String>, Fault> {
        let server = &self.server;
        // A session that broke is dropped, and all that runs below it with it.
        let Some(mut session) = self.session.take() else {
            return Err(server.fault(during, "there was no reset before it".into()));
        };
        let result = match session.call(tool, &arguments, patience) {
            Ok(result) => Ok(result),
            Err(Failed::Refused(message)) => Err(message),
            Err(Failed::Broken(what)) => {
                drop(session);
                return Err(server.fault(during, what));
            }
        };
        self.session = Some(session);
        Ok(result)
    }

    /// The result of a tool of ours, which must not fail.
    fn ask_ours(
        &mut self,
        during: &'static str,
        tool: &str,
        arguments: Map<String, Value>,
        patience: Duration,
    ) -> Result<(Value, String), Fault> {
        let result = self.ask(during, tool, arguments, patience)?;
        let fault = |what: String| self.server.fault(during, format!("{tool}: {what}"));
        let result = result.map_err(fault)?;
        let said = text::tool_result(&result).map_err(fault)?.map_err(fault)?;
        Ok((result, said))
    }
}

/// Whether a result says that the episode has ended.
fn ends(result: &Value) -> bool {
    result.pointer("/structuredContent/done") == Some(&Value::Bool(true))
        || result.pointer("/_meta/rollcall~1done") == Some(&Value::Bool(true))
}

/// The reward that a result holds: in its structured content, else in its text.
fn reward(result: &Value, said: &str) -> Option<f64> {
    let number = |value: &Value| {
        let inner = value.get("reward").or_else(|| value.get("result"));
        inner.unwrap_or(value).as_f64()
    };
    result
        .get("structuredContent")
        .and_then(number)
        .or_else(|| number(&serde_json::from_str(said).ok()?))
}

impl Environment for Episode {
    fn describe(&self) -> &Description {
        &self.description
    }

    fn reset(&mut self, task: &Task, seed: u64) -> Result<Option<String>, Fault> {
        self.session = None;
        let fields = hosted::row(task, Map::new())?;
        self.session = Some(self.server.start(seed, &fields)?);
        if self.server.resets.get() != Some(&true) {
            return Ok(None);
        }
        let mut given = Map::new();
        given.insert("seed".into(), (seed & 0x7fff_ffff).into());
        given.extend(fields);
        let tool = self.server.settings.reset.clone().unwrap_or_else(|| RESET.into());
        let patience = self.server.settings.common.reset();
        Ok(Some(self.ask_ours("reset", &tool, given, patience)?.1))
    }

    fn call(&mut self, tool: &str, arguments: &Map<String, Value>) -> Result<Reply, Fault> {
        let during = "a call";
        let patience = self.server.settings.common.call();
        let reply = |result, done| Reply { result, reached: Vec::new(), done };
        match self.ask(during, tool, arguments.clone(), patience)? {
            Err(message) => Ok(reply(Err(Raised(message)), false)),
            Ok(result) => {
                let said = text::tool_result(&result);
                let said = said.map_err(|what| self.server.fault(during, what))?;
                Ok(reply(said.map_err(Raised), ends(&result)))
            }
        }
    }

    fn score(&mut self) -> Result<Score, Fault> {
        let during = "its reward";
        let (tool, patience) =
            (self.server.settings.score.clone(), self.server.settings.common.call());
        let (result, said) = self.ask_ours(during, &tool, Map::new(), patience)?;
        let reward = reward(&result, &said).ok_or_else(|| {
            self.server
                .fault(during, format!("{tool} returned no number and no {{\"reward\": number}}"))
        })?;
        Host::score(self.server.as_ref(), reward)
    }
}
