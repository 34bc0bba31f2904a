//! The kinds of environment, each with one that does as it is told.

use std::{any::Any, path::Path};

use environments::EnvironmentSpec;
use protocol::ParsedCall;
use serde_json::{Value, json};

use crate::{
    hosted,
    http_mcp::{Answers, HttpServer},
    support::{self, Vice, call},
    venv::{self, Server},
};

/// What an environment is told to do.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Do<'a> {
    /// Add what this JSON text says, and show the total.
    Add(&'a str),
    /// Add 4, then raise.
    AddThenFail,
    /// Say this.
    Say(&'a str),
    /// Say a text of this kind.
    Text(&'static str),
    /// Print, write to descriptor 1, read standard input, start a child that prints.
    Print,
    /// Break in this way.
    Break(&'static str),
    /// Answer too late.
    Hang,
    /// End the episode.
    Win,
}

/// One kind.
pub(crate) struct Backend {
    pub(crate) name: &'static str,
    /// A fresh environment that does as it is told, with these settings.
    pub(crate) odd: fn(Value) -> Option<Odd>,
    /// The call that tells it; nothing where it cannot do that.
    pub(crate) tell: fn(Do<'_>) -> Option<ParsedCall>,
    /// The task whose reset says a text.
    pub(crate) says: fn(&str) -> Value,
    /// How it can break.
    pub(crate) ways: &'static [&'static str],
    /// A well-behaved one, and one that no seed reaches.
    pub(crate) pair: fn() -> Option<[Odd; 2]>,
}

/// An environment, and the server that must live as long.
pub(crate) struct Odd {
    pub(crate) spec: EnvironmentSpec,
    _server: Option<Box<dyn Any>>,
}

impl From<EnvironmentSpec> for Odd {
    fn from(spec: EnvironmentSpec) -> Self {
        Self { spec, _server: None }
    }
}

pub(crate) const BACKENDS: [Backend; 6] = [
    Backend {
        name: "built in",
        odd: |settings| {
            let limits = settings.get("limits").and_then(Value::as_object).cloned();
            let limits = environments::Limits::parse(&limits.unwrap_or_default()).expect("valid");
            let blueprint = std::sync::Arc::new(support::OddBlueprint(Vice::None));
            Some(EnvironmentSpec::custom(blueprint, limits).into())
        },
        tell: |what| {
            Some(match what {
                Do::Add(n) => call("add", &format!(r#"{{"n":{n}}}"#)),
                Do::AddThenFail => call("add_then_fail", r#"{"n":4}"#),
                Do::Say(text) => call("say", &json!({"text": text}).to_string()),
                Do::Break(_) => call("break", "{}"),
                Do::Win => call("win", "{}"),
                Do::Text(kind) => call("say", &json!({"text": support_text(kind)}).to_string()),
                Do::Print | Do::Hang => return None,
            })
        },
        says: |text| json!({"reset": text}),
        ways: &["panic"],
        pair: || Some([support::guessing().into(), support::odd(Vice::Global).into()]),
    },
    Backend {
        name: "python",
        odd: |settings| hosted::class("odd:Odd", settings).map(Odd::from),
        tell: |what| {
            let misbehave = |how| call("misbehave", &json!({"how": how}).to_string());
            Some(match what {
                Do::Add(n) => call("add", &format!(r#"{{"n":{n}}}"#)),
                Do::AddThenFail => call("add_then_fail", r#"{"n":4}"#),
                Do::Say(text) => call("say", &json!({"text": text}).to_string()),
                Do::Text(kind) => call("answer", &json!({"kind": kind}).to_string()),
                Do::Print => misbehave("print"),
                Do::Break(how) => misbehave(how),
                Do::Hang => misbehave("hang"),
                Do::Win => call("win", "{}"),
            })
        },
        says: |text| json!({"text": text}),
        ways: &["exit", "hard exit", "quiet exit", "crash", "memory"],
        pair: || {
            Some([hosted::guess_game()?.into(), hosted::class("odd:Random", json!({}))?.into()])
        },
    },
    Backend {
        name: "openenv 0.3",
        odd: |settings| openenv("openenv-0.3", "odd", settings),
        tell: tell_openenv,
        says: |text| json!({"say": text}),
        ways: &["exit", "abort", "huge"],
        pair: || openenv_pair("openenv-0.3"),
    },
    Backend {
        name: "openenv 0.10",
        odd: |settings| openenv("openenv-0.10", "odd", settings),
        tell: tell_openenv,
        says: |text| json!({"say": text}),
        ways: &["exit", "abort", "huge"],
        pair: || openenv_pair("openenv-0.10"),
    },
    Backend {
        name: "mcp",
        odd: |settings| mcp(&[], settings),
        tell: |what| {
            let misbehave = |how| call("misbehave", &json!({"how": how}).to_string());
            Some(match what {
                Do::Add(n) => call("add", &format!(r#"{{"n":{n}}}"#)),
                Do::AddThenFail => call("add_then_fail", r#"{"n":4}"#),
                Do::Say(text) => call("say", &json!({"text": text}).to_string()),
                Do::Text(kind) => call("answer", &json!({"kind": kind}).to_string()),
                Do::Print => misbehave("print"),
                Do::Break(how) => misbehave(how),
                Do::Hang => misbehave("hang"),
                Do::Win => call("win", "{}"),
            })
        },
        says: |text| json!({"say": text}),
        ways: &["exit", "abort", "leave", "huge"],
        pair: || {
            let tested = json!({"determinism": "deterministic"});
            Some([mcp(&["add", "pay"], tested.clone())?, mcp(&["draw", "pay"], tested)?])
        },
    },
    Backend {
        name: "mcp http",
        odd: |settings| mcp_http(HttpServer::url, settings),
        tell: |what| {
            let misbehave = |how| call("misbehave", &json!({"how": how}).to_string());
            Some(match what {
                Do::Add(n) => call("add", &format!(r#"{{"n":{n}}}"#)),
                Do::AddThenFail => call("add_then_fail", r#"{"n":4}"#),
                Do::Say(text) => call("say", &json!({"text": text}).to_string()),
                Do::Text("surrogate") => misbehave("surrogate"),
                Do::Text(kind) => call("say", &json!({"text": support_text(kind)}).to_string()),
                Do::Break(how) => misbehave(how),
                Do::Hang => misbehave("hang"),
                Do::Win => call("win", "{}"),
                Do::Print => return None,
            })
        },
        says: |text| json!({"say": text}),
        ways: &["gone", "torn", "lost", "status", "huge"],
        pair: || {
            let tested = json!({"determinism": "deterministic"});
            Some([
                mcp_http(HttpServer::url, tested.clone())?,
                mcp_http(HttpServer::careless_url, tested)?,
            ])
        },
    },
];

/// The texts that servers give for a kind.
pub(crate) fn support_text(kind: &str) -> String {
    match kind {
        "long" => "é".repeat(200_000),
        "emoji" => "😀".repeat(70),
        "nul" => "a\0b".into(),
        "lines" => "  a\r\nb  ".into(),
        _ => String::new(),
    }
}

fn with(mut section: Value, settings: Value) -> Value {
    for (key, value) in settings.as_object().into_iter().flatten() {
        section[key] = value.clone();
    }
    section
}

fn tell_openenv(what: Do<'_>) -> Option<ParsedCall> {
    let step = |action: Value| call("step", &action.to_string());
    Some(match what {
        // As text, as not every number that is written can be a value.
        Do::Add(n) => call("step", &format!(r#"{{"do":"add","n":{n}}}"#)),
        Do::AddThenFail => step(json!({"do": "add_then_fail", "n": 4})),
        Do::Say(text) => step(json!({"do": "say", "text": text})),
        Do::Text(kind) => step(json!({"do": kind})),
        Do::Print => step(json!({"do": "print"})),
        Do::Break(how) => step(json!({"do": how})),
        Do::Hang => step(json!({"do": "sleep", "n": 3})),
        Do::Win => step(json!({"do": "win"})),
    })
}

fn openenv(version: &str, kind: &str, settings: Value) -> Option<Odd> {
    let server = Server::start(version, kind, 8)?;
    let section =
        json!({"openenv": server.url(), "determinism": "recorded", "observation": "text"});
    let spec = EnvironmentSpec::parse_in(&with(section, settings), Path::new("."));
    Some(Odd { spec: spec.expect("a valid section"), _server: Some(Box::new(server)) })
}

fn openenv_pair(version: &str) -> Option<[Odd; 2]> {
    let tested = json!({"determinism": "deterministic"});
    Some([openenv(version, "guess", tested.clone())?, openenv(version, "careless", tested)?])
}

fn mcp(tools: &[&str], settings: Value) -> Option<Odd> {
    if !venv::has_python() {
        return None;
    }
    let command: Vec<&str> = ["python3", "plain_mcp.py"].iter().chain(tools).copied().collect();
    let section = json!({"mcp": {"command": command}, "score": "pay", "determinism": "recorded"});
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/servers");
    let spec = EnvironmentSpec::parse_in(&with(section, settings), &folder);
    Some(spec.expect("a valid section").into())
}

fn mcp_http(url: fn(&HttpServer) -> String, settings: Value) -> Option<Odd> {
    if cfg!(not(feature = "mcp-http")) {
        println!("skipped: this build has no cargo feature mcp-http");
        return None;
    }
    let server = HttpServer::start(Answers::Events, 64);
    let section = json!({"mcp": {"url": url(&server)}, "score": "pay", "determinism": "recorded"});
    let spec = EnvironmentSpec::parse_in(&with(section, settings), Path::new("."));
    Some(Odd { spec: spec.expect("a valid section"), _server: Some(Box::new(server)) })
}
