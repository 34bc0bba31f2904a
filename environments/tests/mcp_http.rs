//! MCP over streamable HTTP, against a server in this process: both ways to answer, sessions from their
//! first request to their end, and everything that a server can do to a client that asks it.

#![cfg(feature = "mcp-http")]

#[path = "support/http_mcp.rs"]
mod http_mcp;
mod support;

use std::{env, net::TcpListener, path::Path, process::Command, thread};

use environments::{
    CallPermit, Claim, Determinism, EnvironmentSpec, Fault, Recorder, check_trace, play, probe,
    verify_replay,
};
use http_mcp::{Answers, HttpServer};
use protocol::{CallKind, Task};
use serde_json::{Value, json};
use support::{call, key, task};

fn with(mut section: Value, settings: Value) -> EnvironmentSpec {
    for (key, value) in settings.as_object().into_iter().flatten() {
        section[key] = value.clone();
    }
    EnvironmentSpec::parse_in(&section, Path::new(".")).expect("a valid section")
}

fn spec(server: &HttpServer, settings: Value) -> EnvironmentSpec {
    let section = json!({"mcp": {"url": server.url()}, "score": "pay", "determinism": "recorded"});
    with(section, settings)
}

fn start(spec: &EnvironmentSpec, task: &Task) -> Result<Recorder, Fault> {
    Recorder::start(spec.open()?, key(task, 7), spec.limits())
}

#[test]
fn episodes_are_played_scored_and_replayed_whichever_way_a_server_answers() {
    for answers in [Answers::Json, Answers::Events] {
        let server = HttpServer::start(answers, 8);
        let spec = spec(&server, json!({"success_reward": 0.5, "determinism": "deterministic"}));
        let task = task(r#"{"say":"seed SEED"}"#);
        let moves = [("add", json!({"n": 2})), ("add", json!({"n": 3})), ("win", json!({}))];
        let recording = play(&spec, key(&task, (1 << 40) + 5), 3, |reset, rows| {
            assert_eq!(reset, "seed 5", "the 31 low bits");
            let (tool, arguments) = moves[rows.len()].clone();
            Some(environments::Move::new(tool, arguments))
        })
        .expect("no fault");
        let said: Vec<&str> = recording.rows.iter().map(|row| row.observation.as_str()).collect();
        assert_eq!(said, ["2", "5", "won"]);
        assert!(recording.rows[2].done);
        assert_eq!((recording.score.reward, recording.score.success), (0.75, true));
        let description = spec.describe().expect("described");
        assert_eq!(description.determinism, Determinism::Deterministic);
        let claim = Claim::from(&recording);
        let key = key(&task, (1 << 40) + 5);
        assert_eq!(check_trace(key, &description, &spec.limits(), claim), Ok(()));
        assert_eq!(verify_replay(&spec, key, claim).as_ref(), Ok(&recording));
        assert_eq!(server.open(), 0, "every session was ended");
    }
}

#[test]
fn a_session_is_named_in_every_request_and_ended() {
    let server = HttpServer::start(Answers::Json, 8);
    let spec = spec(&server, json!({}));
    let mut episode = start(&spec, &task(r#"{"map":3}"#)).expect("resets");
    episode.call(0, &call("add", r#"{"n":1}"#), CallPermit::Run).expect("no fault");
    episode.finish().expect("scored");
    let seen = server.seen();
    // The first session only lists the tools.
    let start =
        seen.iter().rposition(|it| it.body["method"] == "initialize").expect("two sessions");
    let (first, rest) = seen[start..].split_first().expect("an episode");
    assert_eq!(first.headers["accept"], "application/json, text/event-stream");
    assert_eq!(first.headers["content-type"], "application/json");
    assert!(!first.headers.contains_key("mcp-session-id"), "{first:?}");
    assert!(!first.headers.contains_key("mcp-protocol-version"), "{first:?}");
    assert!(!first.headers.contains_key("authorization"), "{first:?}");
    let said: Vec<&str> = rest
        .iter()
        .map(|it| {
            assert_eq!(it.headers["mcp-session-id"], "s-2");
            assert_eq!(it.headers["mcp-protocol-version"], "2025-03-26", "as the server answered");
            it.body["params"]["name"].as_str().or(it.body["method"].as_str()).unwrap_or(&it.method)
        })
        .collect();
    assert_eq!(said, ["notifications/initialized", "rollcall_reset", "add", "pay", "DELETE"]);
    assert_eq!(rest[1].body["params"]["arguments"], json!({"seed": 7, "map": 3}));
}

#[test]
fn what_a_server_may_do_is_understood() {
    let server = HttpServer::start(Answers::Events, 8);
    let spec = spec(&server, json!({}));
    let mut episode = start(&spec, &task("{}")).expect("resets");
    for (turn, (how, expected)) in (0..).zip([
        ("several", (CallKind::Ok, "several")),
        ("resume", (CallKind::Ok, "resumed")),
        ("ask", (CallKind::Ok, "[{},-32601]")),
        ("refuse", (CallKind::Raised, r#"{"error": "no such thing"}"#)),
        ("nothing", (CallKind::Ok, "done")),
    ]) {
        let told = call("misbehave", &json!({"how": how}).to_string());
        let row = episode.call(turn, &told, CallPermit::Run).expect("no fault");
        assert_eq!((row.kind, row.observation.as_str()), expected, "{how}");
    }
    let seen = server.seen();
    let resumed = seen.iter().find(|it| it.method == "GET").expect("it asked for the rest");
    assert_eq!(resumed.headers["last-event-id"], "7");
    assert_eq!(resumed.headers["accept"], "text/event-stream");
}

#[test]
fn a_server_that_breaks_voids_its_episode() {
    let server = HttpServer::start(Answers::Json, 64);
    let (quick, patient) = (spec(&server, json!({"call_seconds": 1})), spec(&server, json!({})));
    for (how, expected) in [
        ("hang", "no answer for 1s"),
        ("drip", "no answer for 1s"),
        ("drip json", "no answer for 1s"),
        ("drip head", "no answer for 1s"),
        ("huge", "its reply is too long"),
        ("huge event", "its reply is too long"),
        ("lost", "no longer knows the session"),
        (
            "redirect",
            "it redirects to \"http://elsewhere.invalid/mcp\": if that is the server, set \
             environment.mcp.url to it",
        ),
        ("type", "content of type \"text/html\""),
        ("cut", "its answer ended early"),
        ("torn", "its connection broke"),
        ("gone", "its connection broke"),
        ("none", "content of type \"\""),
        ("other", "it answered another request"),
        ("noise", "its message is no JSON object"),
        ("status", "status 500 Internal Server Error: it broke"),
        ("break", "it failed: broken"),
    ] {
        let spec = if expected.starts_with("no answer") { &quick } else { &patient };
        let mut episode = start(spec, &task("{}")).expect("resets");
        let told = call("misbehave", &json!({"how": how}).to_string());
        let fault = episode.call(0, &told, CallPermit::Run).expect_err("a fault").to_string();
        assert!(fault.contains(expected) && !fault.contains('\n'), "{how}: {fault}");
        assert_eq!(episode.finish().err(), Some(Fault::Void), "never scored");
    }
    assert_eq!(server.open(), 0, "sessions are ended after faults too");
    let lost = server.seen().iter().filter(|it| it.method == "DELETE").count();
    let begun = server.seen().iter().filter(|it| it.body["method"] == "initialize").count();
    assert_eq!(begun - lost, 1, "only the one that is lost already is not");
}

#[test]
fn a_server_without_room_is_asked_again_and_then_named() {
    let server = HttpServer::start(Answers::Json, 1);
    let url = server.url();
    let full = spec(&server, json!({"capacity_seconds": 0}));
    full.describe().expect("there is room");
    let held = start(&full, &task("{}")).expect("resets");
    let fault = start(&full, &task("{}")).expect_err("no room");
    assert!(matches!(&fault, Fault::Busy { environment, .. } if *environment == url), "{fault}");
    assert!(fault.to_string().contains("its server has no room (status 503"), "{fault}");
    let waiting = spec(&server, json!({"capacity_seconds": 60, "determinism": "recorded"}));
    thread::scope(|scope| {
        let waits = scope.spawn(|| start(&waiting, &task("{}")).map(drop));
        drop(held);
        waits.join().expect("no panic").expect("its turn came");
    });
    // The probe, which would play two at once, is not in its own way.
    let tested = spec(&server, json!({"determinism": "deterministic"}));
    let report = probe(&tested, &task("{}"), 3).expect("no fault");
    assert_eq!(report.isolated, None);
}

#[test]
fn a_server_that_no_seed_reaches_is_only_recorded() {
    let server = HttpServer::start(Answers::Json, 8);
    let careless = json!({"url": server.careless_url()});
    let tested = spec(&server, json!({"mcp": careless, "determinism": "deterministic"}));
    assert_eq!(tested.describe().expect("described").determinism, Determinism::Recorded);
    let recording = play(&tested, key(&task("{}"), 1), 1, |_, _| None).expect("no fault");
    assert!(verify_replay(&tested, key(&task("{}"), 1), Claim::from(&recording)).is_err());
    assert_eq!(tested.score_claim(0.0), Some(recording.score));
}

#[test]
fn mistakes_are_named_with_a_remedy() {
    let parse = |section: Value| EnvironmentSpec::parse_in(&section, Path::new("."));
    let url = "environment.mcp.url must be a server's URL, as \"http://localhost:8000/mcp\", not ";
    for wrong in ["x", "ftp://a/mcp", "http://", "http://u:p@a/mcp", "http://a/mcp#b", "http://a b"]
    {
        let refused = parse(json!({"mcp": {"url": wrong}})).expect_err("refused").to_string();
        assert!(refused.starts_with(url), "{refused}");
    }
    for (section, expected) in [
        (json!({"mcp": {"url": "http://a", "env": {}}}), "environment.mcp.env is unknown"),
        (
            json!({"mcp": {"url": "http://a"}, "variables": ["A"]}),
            "environment.variables is unknown",
        ),
        (
            json!({"mcp": {"url": "http://a", "bearer_token_env_var": 1}}),
            "environment.mcp.bearer_token_env_var must be the name of a variable",
        ),
    ] {
        let refused = parse(section).expect_err("refused").to_string();
        assert!(refused.contains(expected), "{refused}");
    }
    let named = json!({"url": "http://127.0.0.1:9/mcp"});
    let elsewhere =
        EnvironmentSpec::parse(&json!({"mcp": named})).expect_err("refused").to_string();
    assert!(elsewhere.contains(&format!("set ROLLCALL_ALLOW='[{named}]'")), "{elsewhere}");
    let closed = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("one");
    let closed = parse(json!({"mcp": {"url": format!("http://{closed}/mcp")}})).expect("valid");
    assert_eq!(EnvironmentSpec::parse_in(&closed.to_json(), Path::new(".")), Ok(closed.clone()));
    let fault = closed.describe().expect_err("nobody listens").to_string();
    assert!(fault.contains("start the server or mend environment.mcp.url"), "{fault}");
    let server = HttpServer::start(Answers::Json, 8);
    let unscored = spec(&server, json!({"score": "rollcall_score"}));
    let fault = unscored.describe().expect_err("no score").to_string();
    assert!(fault.contains("name another in environment.score"), "{fault}");
    let unset = json!({"url": server.url(), "bearer_token_env_var": "ROLLCALL_NO_SUCH_VARIABLE"});
    let unset = parse(json!({"mcp": unset, "score": "pay"})).expect("valid");
    let fault = unset.describe().expect_err("no token").to_string();
    assert!(fault.contains("the variable ROLLCALL_NO_SUCH_VARIABLE is not set"), "{fault}");
}

/// Set where this program plays with a token.
const TOKEN: &str = "ROLLCALL_TEST_TOKEN";

#[test]
fn a_token_is_taken_from_its_variable_and_shown_to_nobody() {
    let output = Command::new(env::current_exe().expect("this program"))
        .args(["--exact", "plays_with_a_token", "--nocapture"])
        .env(TOKEN, "token-7")
        .output()
        .expect("runs");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("it was told"), "{said}");
    assert!(!said.contains("token-7"), "{said}");
}

#[test]
fn plays_with_a_token() {
    if env::var_os(TOKEN).is_none() {
        return;
    }
    let server = HttpServer::start(Answers::Json, 8);
    let named = json!({"url": server.url(), "bearer_token_env_var": TOKEN});
    let spec = spec(&server, json!({"mcp": named}));
    let mut episode = start(&spec, &task("{}")).expect("resets");
    let all_told = server
        .seen()
        .iter()
        .all(|it| it.headers.get("authorization").is_some_and(|value| value == "Bearer token-7"));
    assert!(all_told, "every request has it");
    println!("it was told; {spec:?} {:?}", spec.to_json());
    let told = call("misbehave", r#"{"how":"status"}"#);
    println!("{}", episode.call(0, &told, CallPermit::Run).expect_err("a fault"));
}
