//! `{"openenv": "ws://host:port"}`: an environment of an OpenEnv server, over its WebSocket.
//!
//! A session is one environment of the server's, and every episode has a session of its own: reset with
//! the task's fields and the seed (its 31 low bits, which every library takes), then steps. Servers of
//! versions 0.3 to 0.10 say nearly the same; `wire` knows both.
//!
//! What the policy can call is one tool, `step` or as `tool` says, that takes the server's typed action:
//! its schema is asked for at `/schema`, or stands in the section as `action`. Where actions call tools by
//! name (`list_tools`, `call_tool`), the tools are those that the server lists.
//!
//! What the server's code raises, and an action that its own checks refuse, are errors that the policy is
//! shown. A time-out closes the session and voids the episode, as the late reply would be taken for the
//! next one. A server at its capacity is asked again, with growing pauses, for `capacity_seconds`.
//!
//! Reward is what the steps' rewards come to, by `reward`: their sum, the last or the largest; 0 where
//! no step says one.

mod socket;
mod wire;

use std::{
    collections::BTreeSet,
    path::Path,
    sync::{Arc, OnceLock},
    time::Duration,
};

use protocol::Task;
use serde_json::{Map, Value, json};

use self::{
    socket::{Address, Socket},
    wire::Said,
};
use crate::{
    Blueprint, Description, Environment, Fault, Raised, Reply, Score, SpecError, ToolSpec, allow,
    fields::{Fields, task_fields},
    hosted::{self, Common, Host},
    room::{Place, Room},
};

/// The key that such sections have in place of `name`.
pub const KEY: &str = "openenv";

const VERSION: &str = "openenv-1";
/// How long a session may take to be told that it is over.
const PARTING: Duration = Duration::from_secs(1);

/// How the rewards of the steps make the episode's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Total {
    Sum,
    Last,
    Largest,
}

const TOTALS: [(&str, Total); 3] =
    [("sum", Total::Sum), ("last", Total::Last), ("max", Total::Largest)];

/// What a section says.
#[derive(Clone, Debug)]
struct Settings {
    /// As it stands in the section.
    url: String,
    address: Address,
    tool: String,
    /// The schema of its actions, where the server is not asked for it.
    action: Option<Map<String, Value>>,
    /// The field of observations that is shown.
    observation: Option<String>,
    total: Total,
    common: Common,
    connect_seconds: u64,
    capacity_seconds: u64,
}

/// Reads a section of a recipe in the folder `recipe`, where one of this machine names the server.
pub(crate) fn parse(
    fields: &mut Fields<'_>,
    recipe: Option<&Path>,
) -> Result<Arc<dyn Blueprint>, SpecError> {
    let expected = "a server's URL, as \"ws://localhost:8000\"";
    let url = fields.text(KEY, expected)?;
    let address = Address::read(url).ok_or_else(|| SpecError::Value {
        field: "environment.openenv".into(),
        expected: expected.into(),
        found: crate::fields::shown(&url.into()),
    })?;
    allow::check("environment.openenv", &url.into(), recipe)?;
    let settings = Settings {
        url: url.into(),
        address,
        tool: fields.optional_text("tool", "a tool's name")?.unwrap_or("step").into(),
        action: fields.object("action")?.cloned(),
        observation: fields.optional_text("observation", "a field's name")?.map(str::to_owned),
        total: fields.choice("reward", Total::Sum, &TOTALS)?,
        common: Common::parse(fields)?,
        connect_seconds: fields.integer("connect_seconds", 10, 1..=3600)?,
        capacity_seconds: fields.integer("capacity_seconds", 300, 0..=86_400)?,
    };
    let server = Server { settings, by_name: OnceLock::new(), room: Room::default() };
    Ok(Arc::new(Remote { server: Arc::new(server), described: OnceLock::new() }))
}

/// A server.
#[derive(Debug)]
struct Server {
    settings: Settings,
    /// Whether actions call tools by name. Set before the first episode.
    by_name: OnceLock<bool>,
    room: Room,
}

impl Server {
    fn fault(&self, during: &'static str, what: String) -> Fault {
        Fault::Process { environment: self.settings.url.clone(), during, what }
    }

    /// The tools that the policy is shown.
    fn tools(self: &Arc<Self>) -> Result<Vec<ToolSpec>, Fault> {
        let settings = &self.settings;
        let during = "its schema";
        let schema = match &settings.action {
            Some(schema) => Value::Object(schema.clone()),
            None => socket::get(&settings.address, "/schema", settings.common.reset())
                .map_err(|what| self.fault(during, what))?
                .and_then(|mut all| all.get_mut("action").map(Value::take))
                .ok_or_else(|| {
                    let what = "it has none at /schema: set environment.action to the JSON schema \
                                of its actions";
                    self.fault(during, what.into())
                })?,
        };
        if !*self.by_name.get_or_init(|| wire::calls_tools(&schema)) {
            return Ok(vec![wire::action_tool(&settings.tool, &schema)]);
        }
        let listing = json!({"type": "step", "data": {"type": "list_tools"}});
        let during = "its list of tools";
        match self.session(&listing, during, settings.common.reset(), false)? {
            (_, Said::Observation { observation, .. }) => {
                wire::tools(&observation).map_err(|what| self.fault(during, what))
            }
            (_, Said::Raised(what) | Said::Busy(what)) => Err(self.fault(during, what)),
        }
    }

    /// A new session and what the server says to `first`, asking again while it is at its capacity.
    fn session(
        self: &Arc<Self>,
        first: &Value,
        during: &'static str,
        patience: Duration,
        beside: bool,
    ) -> Result<(Session, Said), Fault> {
        let settings = &self.settings;
        let ask = || {
            let connect = Duration::from_secs(settings.connect_seconds);
            let socket = Socket::connect(&settings.address, connect);
            let socket = socket.map_err(|what| self.fault(during, what))?;
            let mut session = Session { server: self.clone(), socket: Some(socket), place: None };
            Ok(match session.ask(first, during, patience)? {
                Said::Busy(what) => Err(what),
                said => Ok((session, said)),
            })
        };
        let waits = Duration::from_secs(settings.capacity_seconds);
        let ((mut session, said), place) = self.room.find(&settings.url, waits, beside, ask)?;
        session.place = Some(place);
        Ok((session, said))
    }
}

impl Host for Server {
    fn name(&self) -> &str {
        &self.settings.url
    }

    fn version(&self) -> String {
        VERSION.into()
    }

    fn common(&self) -> &Common {
        &self.settings.common
    }

    fn play(self: &Arc<Self>, description: Description, beside: bool) -> Box<dyn Environment> {
        let server = self.clone();
        Box::new(Episode { server, description, beside, session: None, reward: None })
    }
}

/// A session, closed when it is dropped.
#[derive(Debug)]
struct Session {
    server: Arc<Server>,
    /// Nothing after an error.
    socket: Option<Socket>,
    /// Set once the server has room for it.
    place: Option<Place>,
}

impl Session {
    fn ask(
        &mut self,
        message: &Value,
        during: &'static str,
        patience: Duration,
    ) -> Result<Said, Fault> {
        let server = self.server.clone();
        let Some(mut socket) = self.socket.take() else {
            return Err(server.fault(during, "there was no reset before it".into()));
        };
        // A socket that failed is dropped, and with it what may still come over it.
        let said = socket
            .ask(message, patience)
            .and_then(wire::read)
            .map_err(|what| server.fault(during, what))?;
        self.socket = Some(socket);
        Ok(said)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if let Some(socket) = self.socket.take() {
            socket.part(PARTING);
        }
    }
}

/// An environment of a server in a recipe.
#[derive(Debug)]
struct Remote {
    server: Arc<Server>,
    described: OnceLock<Result<Description, Fault>>,
}

impl Remote {
    /// What the server has, asked once, with the claim to be deterministic put to the test.
    fn described(&self) -> Result<Description, Fault> {
        let describe = || {
            let settings = &self.server.settings;
            let tools = self.server.tools()?;
            let description = settings.common.describe(&settings.url, VERSION.into(), tools);
            hosted::tested(&self.server, description)
        };
        self.described.get_or_init(describe).clone()
    }
}

impl Blueprint for Remote {
    fn key(&self) -> &'static str {
        KEY
    }

    fn name(&self) -> &str {
        &self.server.settings.url
    }

    fn version(&self) -> String {
        VERSION.into()
    }

    fn settings(&self) -> Map<String, Value> {
        let settings = &self.server.settings;
        let total = TOTALS.iter().find(|(_, total)| *total == settings.total);
        let mut all = Map::new();
        all.insert("tool".into(), json!(settings.tool));
        if let Some(action) = &settings.action {
            all.insert("action".into(), json!(action));
        }
        if let Some(field) = &settings.observation {
            all.insert("observation".into(), json!(field));
        }
        all.insert("reward".into(), json!(total.map(|(name, _)| name)));
        all.extend(settings.common.settings());
        all.insert("connect_seconds".into(), settings.connect_seconds.into());
        all.insert("capacity_seconds".into(), settings.capacity_seconds.into());
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
        Some(self.server.settings.url.clone().into())
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
    session: Option<Session>,
    /// What the steps so far come to; nothing where none said a reward.
    reward: Option<f64>,
}

impl Environment for Episode {
    fn describe(&self) -> &Description {
        &self.description
    }

    fn reset(&mut self, task: &Task, seed: u64) -> Result<Option<String>, Fault> {
        let mut given = Map::new();
        given.insert("seed".into(), (seed & 0x7fff_ffff).into());
        let reset = json!({"type": "reset", "data": hosted::row(task, given)?});
        (self.session, self.reward) = (None, None);
        let during = "reset";
        let patience = self.server.settings.common.reset();
        let (session, said) = self.server.session(&reset, during, patience, self.beside)?;
        let fault = |what: String| self.server.fault(during, what);
        match said {
            Said::Observation { done: true, .. } => {
                Err(fault("it says that the episode is over before it began".into()))
            }
            Said::Observation { observation, .. } => {
                self.session = Some(session);
                let field = self.server.settings.observation.as_deref();
                wire::shown(observation, field).map(Some).map_err(fault)
            }
            Said::Raised(what) | Said::Busy(what) => Err(fault(what)),
        }
    }

    fn call(&mut self, tool: &str, arguments: &Map<String, Value>) -> Result<Reply, Fault> {
        let during = "a call";
        let settings = &self.server.settings;
        let by_name = self.server.by_name.get() == Some(&true);
        let action = if by_name {
            json!({"type": "call_tool", "tool_name": tool, "arguments": arguments})
        } else {
            json!(arguments)
        };
        let step = json!({"type": "step", "data": action});
        let fault = |what: String| self.server.fault(during, what);
        let session = self.session.as_mut();
        let session = session.ok_or_else(|| fault("there was no reset before it".into()))?;
        match session.ask(&step, during, settings.common.call())? {
            Said::Raised(message) => {
                Ok(Reply { result: Err(Raised(message)), reached: Vec::new(), done: false })
            }
            Said::Busy(what) => Err(fault(what)),
            Said::Observation { observation, reward, done } => {
                if let Some(reward) = reward {
                    let so_far = self.reward;
                    self.reward = Some(match (settings.total, so_far) {
                        (Total::Last, _) | (_, None) => reward,
                        (Total::Sum, Some(so_far)) => so_far + reward,
                        (Total::Largest, Some(so_far)) => so_far.max(reward),
                    });
                }
                let result = if by_name {
                    wire::called(&observation).map_err(fault)?.map_err(Raised)
                } else {
                    let field = settings.observation.as_deref();
                    Ok(wire::shown(observation, field).map_err(fault)?)
                };
                Ok(Reply { result, reached: Vec::new(), done })
            }
        }
    }

    fn score(&mut self) -> Result<Score, Fault> {
        Host::score(self.server.as_ref(), self.reward.unwrap_or_default())
    }
}
