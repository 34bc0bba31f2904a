//! `{"mcp": {"command": ["program", "argument"]}}` or `{"mcp": {"url": "http://host/mcp"}}`: the tools of an
//! MCP server, over its standard input and output or over streamable HTTP.
//!
//! MCP knows tools and neither episodes, seeds nor scores. So every episode has a server process of its
//! own, which is told the seed (its 31 low bits) and the task's object in the variables [`SEED`] and
//! [`TASK`] and wherever `{seed}` stands in its command or variables; or, of a server at a URL, a session
//! of its own, with the seed wherever `{seed}` stands in the URL. And two tools, which the policy is
//! never shown, are asked by us: `rollcall_reset`, where there is one, with the task's fields and the seed,
//! for the text that the policy is shown first; and `rollcall_score`, for the reward. Sections may name
//! others. No tool whose name starts with `rollcall_` is shown.
//!
//! A result ends the episode whose structured content has `"done": true`, or whose `_meta` has
//! `"rollcall/done": true`. Errors of tools are observations.
//!
//! A program is run in the recipe's folder. It has your rights: it is no sandbox.

#[cfg(feature = "mcp-http")]
mod events;
#[cfg_attr(not(feature = "mcp-http"), path = "no_http.rs")]
mod http;
mod session;
mod stdio;

use std::{
    collections::BTreeSet,
    env,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
    time::Duration,
};

use protocol::Task;
use serde_json::{Map, Value, json};

use self::{
    http::Endpoint,
    session::{Failed, Session},
    stdio::{Pipes, Program},
};
use crate::{
    Blueprint, Description, Environment, Fault, Raised, Reply, Score, SpecError, ToolSpec, allow,
    fields::{Fields, shown, task_fields},
    hosted::{self, Common, Host},
    python::FOLDERS_VARIABLE,
    room::{Place, Room},
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
#[derive(Debug)]
struct Settings {
    /// For messages: the command's words, or the URL.
    name: String,
    reached: Reached,
    /// The tool that is called first, where the section names one.
    reset: Option<String>,
    score: String,
    common: Common,
    start_seconds: u64,
}

/// How a server is reached.
#[derive(Debug)]
enum Reached {
    /// It is started for each episode.
    Started {
        command: Vec<String>,
        /// Variables that are set for it.
        set: Vec<(String, String)>,
        folder: PathBuf,
        variables: Vec<String>,
    },
    /// It runs, and is asked for a session for each episode.
    Asked { endpoint: Endpoint, room: Room, capacity_seconds: u64 },
}

/// Reads a section of a recipe in the folder `recipe`, where one of this machine names the command.
pub(crate) fn parse(
    fields: &mut Fields<'_>,
    recipe: Option<&Path>,
) -> Result<Arc<dyn Blueprint>, SpecError> {
    let server = fields.object(KEY)?.cloned().unwrap_or_default();
    let mut inner = Fields::new("environment.mcp", &server);
    let by_url = server.contains_key("url") && !server.contains_key("command");
    let (name, reached) = if by_url {
        let endpoint = Endpoint::read(&mut inner, SEED_PLACE)?;
        let capacity_seconds = fields.integer("capacity_seconds", 300, 0..=86_400)?;
        let room = Room::default();
        (endpoint.url().to_owned(), Reached::Asked { endpoint, room, capacity_seconds })
    } else {
        let (command, set) = command(&mut inner)?;
        let (folder, variables) = (folder(recipe), fields.texts("variables", 64)?);
        (command.join(" "), Reached::Started { command, set, folder, variables })
    };
    inner.refuse_others()?;
    let named = Value::Object(server);
    allow::check("environment.mcp", &named, recipe)?;
    let tool = "the name of a tool of the server";
    let settings = Settings {
        name: name.chars().take(100).collect(),
        reached,
        reset: fields.optional_text("reset", tool)?.map(str::to_owned),
        score: fields.optional_text("score", tool)?.unwrap_or(SCORE).into(),
        common: Common::parse(fields)?,
        start_seconds: fields.integer("start_seconds", 60, 1..=3600)?,
    };
    let server = Arc::new(Server { settings, resets: OnceLock::new() });
    Ok(Arc::new(Named { server, named, described: OnceLock::new() }))
}

/// The words of a command, and the variables that are set for it.
type Started = (Vec<String>, Vec<(String, String)>);

fn command(inner: &mut Fields<'_>) -> Result<Started, SpecError> {
    let wrong = |expected: &str, found: &Value| SpecError::Value {
        field: "environment.mcp".into(),
        expected: expected.into(),
        found: shown(found),
    };
    let command = inner.texts("command", 256)?;
    if command.is_empty() {
        return Err(SpecError::Missing {
            field: "environment.mcp.command".into(),
            expected: "a list of texts, as [\"python3\", \"server.py\"], or set \
                       environment.mcp.url to a server's URL"
                .into(),
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
    Ok((command, set))
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

/// A server.
#[derive(Debug)]
struct Server {
    settings: Settings,
    /// Whether there is a tool to call first. Set before the first episode.
    resets: OnceLock<bool>,
}

/// An episode's session, and its place where the server counts them.
#[derive(Debug)]
struct Seated {
    session: Session,
    _place: Option<Place>,
}

impl Server {
    fn fault(&self, during: &'static str, what: String) -> Fault {
        Fault::Process { environment: self.settings.name.clone(), during, what }
    }

    /// A session for an episode.
    fn start(&self, seed: u64, task: &Map<String, Value>, beside: bool) -> Result<Seated, Fault> {
        let seed = (seed & 0x7fff_ffff).to_string();
        let patience = Duration::from_secs(self.settings.start_seconds);
        let fault = |what: String| self.fault("its start", what);
        match &self.settings.reached {
            Reached::Started { command, set, folder, variables } => {
                let filled = |text: &String| text.replace(SEED_PLACE, &seed);
                let command: Vec<String> = command.iter().map(filled).collect();
                let mut set: Vec<(String, String)> =
                    set.iter().map(|(name, value)| (name.clone(), filled(value))).collect();
                set.push((SEED.into(), seed.clone()));
                set.push((TASK.into(), Value::Object(task.clone()).to_string()));
                let program = Program { command: &command, folder, variables, set };
                let link = Pipes::start(&program).map_err(fault)?;
                let session = Session::start(Box::new(link), patience);
                let session = session.map_err(|failed| fault(failed.reason()))?;
                Ok(Seated { session, _place: None })
            }
            Reached::Asked { endpoint, room, capacity_seconds } => {
                let waits = Duration::from_secs(*capacity_seconds);
                let ask = || {
                    let link = endpoint.connect(SEED_PLACE, &seed).map_err(fault)?;
                    match Session::start(Box::new(link), patience) {
                        Ok(session) => Ok(Ok(session)),
                        Err(Failed::Full(what)) => Ok(Err(what)),
                        Err(failed) => Err(fault(failed.reason())),
                    }
                };
                let (session, place) = room.find(&self.settings.name, waits, beside, ask)?;
                Ok(Seated { session, _place: Some(place) })
            }
        }
    }

    /// The tools that the policy is shown.
    fn tools(&self) -> Result<Vec<ToolSpec>, Fault> {
        let settings = &self.settings;
        let Seated { mut session, _place } = self.start(0, &Map::new(), false)?;
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

    fn play(self: &Arc<Self>, description: Description, beside: bool) -> Box<dyn Environment> {
        Box::new(Episode { server: self.clone(), description, beside, seated: None })
    }
}

/// A server in a recipe.
#[derive(Debug)]
struct Named {
    server: Arc<Server>,
    /// As it stands in the section.
    named: Value,
    described: OnceLock<Result<Description, Fault>>,
}

impl Named {
    /// What the server has, asked once, with the claim to be deterministic put to the test.
    fn described(&self) -> Result<Description, Fault> {
        let describe = || {
            let settings = &self.server.settings;
            let tools = self.server.tools()?;
            let description = settings.common.describe(&settings.name, VERSION.into(), tools);
            hosted::tested(&self.server, description)
        };
        self.described.get_or_init(describe).clone()
    }
}

impl Blueprint for Named {
    fn key(&self) -> &'static str {
        KEY
    }

    fn name(&self) -> &str {
        &self.server.settings.name
    }

    fn named(&self) -> Value {
        self.named.clone()
    }

    fn folder(&self) -> Option<&Path> {
        match &self.server.settings.reached {
            Reached::Started { folder, .. } => Some(folder),
            Reached::Asked { .. } => None,
        }
    }

    fn version(&self) -> String {
        VERSION.into()
    }

    fn settings(&self) -> Map<String, Value> {
        let settings = &self.server.settings;
        let mut all = Map::new();
        if let Some(tool) = &settings.reset {
            all.insert("reset".into(), json!(tool));
        }
        all.insert("score".into(), json!(settings.score));
        all.extend(settings.common.settings());
        all.insert("start_seconds".into(), settings.start_seconds.into());
        match &settings.reached {
            Reached::Started { variables, .. } => all.insert("variables".into(), json!(variables)),
            Reached::Asked { capacity_seconds, .. } => {
                all.insert("capacity_seconds".into(), (*capacity_seconds).into())
            }
        };
        all
    }

    fn check_task(&self, task: &Task) -> Result<(), SpecError> {
        task_fields(task).map(|_| ())
    }

    fn open(&self) -> Result<Box<dyn Environment>, Fault> {
        Ok(self.server.play(self.described()?, false))
    }

    fn open_beside(&self) -> Result<Box<dyn Environment>, Fault> {
        Ok(self.server.play(self.described()?, true))
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
        self.server.settings.common.score(reward)
    }
}

/// An episode: a session from its reset on.
struct Episode {
    server: Arc<Server>,
    description: Description,
    beside: bool,
    seated: Option<Seated>,
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
        let Some(mut seated) = self.seated.take() else {
            return Err(server.fault(during, "there was no reset before it".into()));
        };
        let result = match seated.session.call(tool, &arguments, patience) {
            Ok(result) => Ok(result),
            Err(Failed::Refused(message)) => Err(message),
            Err(failed) => return Err(server.fault(during, failed.reason())),
        };
        self.seated = Some(seated);
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
        self.seated = None;
        let fields = hosted::row(task, Map::new())?;
        self.seated = Some(self.server.start(seed, &fields, self.beside)?);
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
