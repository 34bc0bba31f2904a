//! Real MCP servers, on versions 1 and 2 of the official SDK, are played whole episodes of; and nothing
//! that an odd one does gets past the client, or outlives its episode.

mod support;
#[path = "support/venv.rs"]
mod venv;

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use environments::{
    CallPermit, Claim, Determinism, EnvironmentSpec, Fault, Move, Recorder, ReplayError,
    check_trace, play, verify_replay,
};
use protocol::{CallKind, Task};
use serde_json::{Value, json};
use support::{call, key, task};

/// Set where this program stands in for an actor that will be killed.
const ROLE: &str = "ROLLCALL_TEST_LEAVES";

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/servers")
}

/// A section with more settings, in a recipe that lies beside the servers.
fn with(mut section: Value, settings: Value) -> EnvironmentSpec {
    for (key, value) in settings.as_object().into_iter().flatten() {
        section[key] = value.clone();
    }
    EnvironmentSpec::parse_in(&section, &folder()).expect("a valid section")
}

/// The server that misbehaves; nothing where there is no Python.
fn odd(settings: Value) -> Option<EnvironmentSpec> {
    let section = json!({
        "mcp": {"command": ["python3", "plain_mcp.py"]}, "score": "pay", "determinism": "recorded",
    });
    venv::has_python().then(|| with(section, settings))
}

fn start(spec: &EnvironmentSpec, task: &Task) -> Result<Recorder, Fault> {
    Recorder::start(spec.open()?, key(task, 7), spec.limits())
}

#[test]
fn episodes_are_played_scored_and_replayed() {
    for version in venv::MCP {
        let Some(packages) = venv::folder() else { return };
        let section = json!({"mcp": {
            "command": [venv::python(packages), "mcp_server.py"],
            "env": {"PYTHONPATH": packages.join(version)},
        }});
        plays_guessing(version, &with(section, json!({})));
    }
}

#[cfg(feature = "mcp-http")]
#[test]
fn episodes_are_played_scored_and_replayed_over_http() {
    for (version, answers) in venv::MCP.into_iter().flat_map(|it| [(it, "json"), (it, "events")]) {
        let Some(server) = venv::Server::start_mcp(version, &[answers]) else { return };
        let url = format!("http://127.0.0.1:{}/mcp", server.port);
        plays_guessing(
            &format!("{version}, {answers}"),
            &with(json!({"mcp": {"url": url}}), json!({})),
        );
    }
}

#[cfg(feature = "mcp-http")]
#[test]
fn a_server_over_http_at_its_capacity_is_waited_for_and_one_that_ends_is_a_fault() {
    let Some(mut server) = venv::Server::start_mcp(venv::MCP[1], &["json", "1"]) else { return };
    let named = json!({"url": format!("http://127.0.0.1:{}/mcp", server.port)});
    let with = |settings| with(json!({"mcp": named, "determinism": "recorded"}), settings);
    let (patient, impatient) = (with(json!({})), with(json!({"capacity_seconds": 0})));
    let task = task("{}");
    let held = start(&patient, &task).expect("resets");
    let busy = impatient.describe().expect_err("no room");
    assert!(matches!(busy, Fault::Busy { .. }), "{busy}");
    thread::scope(|scope| {
        let waits = scope.spawn(|| start(&patient, &task));
        drop(held);
        let mut episode = waits.join().expect("no panic").expect("its turn came");
        server.kill();
        let fault = episode.call(0, &call("guess", r#"{"value":1}"#), CallPermit::Run);
        let fault = fault.expect_err("a fault").to_string();
        assert!(fault.contains("its connection broke"), "{fault}");
    });
}

/// Plays the guessing game of `spec` on two seeds, and again, and once more with a tool that raises.
fn plays_guessing(which: &str, spec: &EnvironmentSpec) {
    let description = spec.describe().expect("described");
    assert_eq!(description.determinism, Determinism::Deterministic, "{which}");
    let names: Vec<&str> = description.tools.iter().map(|tool| tool.name.as_str()).collect();
    assert_eq!(names, ["guess"], "ours are not shown");
    assert_eq!(
        description.tools[0].parameters,
        json!({"properties": {"value": {"type": "integer"}}, "required": ["value"], "type": "object"})
    );
    let task = task(r#"{"largest":100}"#);
    for seed in [5, 1 << 40] {
        let key = key(&task, seed);
        let (mut low, mut high) = (1, 100);
        let recording = play(spec, key, 20, |reset, rows| {
            assert_eq!(reset, "The number is between 1 and 100.");
            let middle = |low: i64, high: i64| (low + high) / 2;
            let said = rows.last().map(|row| row.observation.as_str()).unwrap_or_default();
            if said.contains("higher") {
                low = middle(low, high) + 1;
            } else if said.contains("lower") {
                high = middle(low, high) - 1;
            }
            Some(Move::new("guess", json!({"value": middle(low, high)})))
        })
        .expect("no fault");
        assert!(recording.score.success && recording.score.reward == 1.0, "seven halvings do");
        assert!(recording.rows.last().is_some_and(|row| row.done));
        let claim = Claim::from(&recording);
        assert_eq!(check_trace(key, &description, &spec.limits(), claim), Ok(()));
        assert_eq!(verify_replay(spec, key, claim).as_ref(), Ok(&recording));
    }
    let mut episode = start(spec, &task).expect("resets");
    let row = episode.call(0, &call("guess", r#"{"value":13}"#), CallPermit::Run).expect("runs");
    assert!(
        row.kind == CallKind::Raised && row.observation.contains("Error executing tool guess"),
        "{which}: {row:?}"
    );
}

#[test]
fn a_server_that_draws_from_the_system_is_only_recorded() {
    let draws = json!({"command": ["python3", "plain_mcp.py", "draw", "pay"]});
    let Some(spec) = odd(json!({"mcp": draws, "determinism": "deterministic"})) else { return };
    assert_eq!(spec.describe().expect("described").determinism, Determinism::Recorded);
    let task = task("{}");
    let recording = play(&spec, key(&task, 1), 1, |reset, _| {
        assert_eq!(reset, "");
        Some(Move::new("draw", json!({})))
    })
    .expect("no fault");
    let refused = verify_replay(&spec, key(&task, 1), Claim::from(&recording));
    assert!(matches!(refused, Err(ReplayError::Recorded(_))), "{refused:?}");
    assert_eq!(spec.score_claim(0.0), Some(recording.score));
}

#[test]
fn what_tools_say_and_raise_is_shown() {
    let Some(spec) = odd(json!({"success_reward": 0.5})) else { return };
    let task = task(r#"{"say":"<|im_start|>"}"#);
    let mut episode = start(&spec, &task).expect("resets");
    assert_eq!(episode.reset_text(), "<|im_start|>");
    let mut said = |turn, tool: &str, arguments: Value| {
        let call = call(tool, &arguments.to_string());
        let row = episode.call(turn, &call, CallPermit::Run).expect("no fault");
        (row.kind, row.observation.clone())
    };
    assert_eq!(said(0, "add", json!({"n": "5"})), (CallKind::Ok, "5".into()));
    let (kind, message) = said(1, "add_then_fail", json!({"n": 2}));
    assert!(
        kind == CallKind::Raised && message.contains(r#"failed \"after\" </tool_response>"#),
        "{message}"
    );
    assert_eq!(
        said(2, "add", json!({"n": 0})),
        (CallKind::Ok, "7".into()),
        "what it changed counts"
    );
    for tool in ["pay", "rollcall_reset", "rollcall_x", "reset", "Add", ""] {
        assert_eq!(said(3, tool, json!({})).0, CallKind::UnknownTool, "{tool}");
    }
    assert_eq!(said(4, "misbehave", json!({"how": "print"})), (CallKind::Ok, "done".into()));
    assert_eq!(said(5, "misbehave", json!({"how": "stderr"})), (CallKind::Ok, "done".into()));
    let asked = said(6, "misbehave", json!({"how": "ask"}));
    assert_eq!(asked, (CallKind::Ok, "[{}, -32601]".into()), "its own requests are answered");
    let refused = said(6, "misbehave", json!({"how": "refuse"}));
    assert_eq!(refused, (CallKind::Raised, r#"{"error": "no such thing"}"#.into()));
    let seen = said(7, "variables", json!({})).1;
    assert!(seen.contains("ROLLCALL_SEED") && seen.contains("PATH"), "{seen}");
    assert!(!seen.contains("CARGO_MANIFEST_DIR"), "our variables do not reach it: {seen}");
    assert_eq!(said(8, "win", json!({})), (CallKind::Ok, "won".into()));
    assert_eq!(said(9, "add", json!({"n": 1})).0, CallKind::AfterDone);
    let score = episode.finish().expect("scored").score;
    assert_eq!((score.reward, score.success), (0.75, true));
}

#[test]
fn a_server_that_breaks_voids_its_episode() {
    let Some(spec) = odd(json!({"call_seconds": 1})) else { return };
    let task = task("{}");
    for (how, expected) in [
        ("exit", "its process ended"),
        ("abort", "its process ended"),
        ("leave", "its process ended"),
        ("break", "it failed: broken"),
        ("other", "it answered another request"),
        ("flood", "no answer for 1s"),
        ("hang", "no answer for 1s"),
        ("huge", "its reply is too long"),
    ] {
        let mut episode = start(&spec, &task).expect("resets");
        let call = call("misbehave", &json!({"how": how}).to_string());
        let fault = episode.call(0, &call, CallPermit::Run).expect_err("a fault").to_string();
        assert!(fault.contains(expected) && !fault.contains('\n'), "{how}: {fault}");
        assert!(episode.finish().is_err(), "never scored");
    }
    let failing = support::task(r#"{"fail":true}"#);
    let fault = start(&spec, &failing).expect_err("a fault").to_string();
    assert!(fault.contains("no such task"), "{fault}");
}

#[test]
fn mistakes_are_named_with_a_remedy() {
    let folder = Path::new(".");
    for (section, expected) in [
        (json!({"mcp": "x"}), "environment.mcp must be an object"),
        (json!({"mcp": {}}), "environment.mcp.command is missing: set it to a list of texts"),
        (
            json!({"mcp": {"command": [1]}}),
            "environment.mcp.command must be a list of at most 256 texts",
        ),
        (json!({"mcp": {"command": ["x"], "url": "y"}}), "environment.mcp.url is unknown"),
        (json!({"mcp": {"command": ["x"], "env": {"A": 1}}}), "a command whose env holds texts"),
        (json!({"mcp": {"command": ["x"]}, "tool": "y"}), "environment.tool is unknown"),
    ] {
        let refused = EnvironmentSpec::parse_in(&section, folder).expect_err("refused").to_string();
        assert!(refused.contains(expected), "{refused}");
    }
    let named = json!({"command": ["no-such-program-here"]});
    let elsewhere =
        EnvironmentSpec::parse(&json!({"mcp": named})).expect_err("refused").to_string();
    assert!(elsewhere.contains(&format!("set ROLLCALL_ALLOW='[{named}]'")), "{elsewhere}");
    let spec = EnvironmentSpec::parse_in(&json!({"mcp": named}), folder).expect("valid");
    assert_eq!(EnvironmentSpec::parse_in(&spec.to_json(), folder), Ok(spec.clone()));
    let fault = spec.describe().expect_err("no program").to_string();
    assert!(fault.contains("mend environment.mcp.command"), "{fault}");
    let silent = json!({"mcp": {"command": ["sleep", "30"]}, "start_seconds": 1});
    let silent = EnvironmentSpec::parse_in(&silent, folder).expect("valid");
    let fault = silent.describe().expect_err("no server").to_string();
    assert!(fault.contains("no answer for 1s"), "{fault}");
    let Some(unscored) = odd(json!({"score": "rollcall_score"})) else { return };
    let fault = unscored.describe().expect_err("no score").to_string();
    assert!(fault.contains("name another in environment.score"), "{fault}");
    let unstarted = odd(json!({"reset": "begin"})).expect("Python is here");
    let fault = unstarted.describe().expect_err("no such tool").to_string();
    assert!(fault.contains("mend environment.reset"), "{fault}");
}

/// Waits for what another process does, no longer than a minute.
#[track_caller]
fn eventually(what: &str, done: impl Fn() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < Duration::from_secs(60), "{what}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// The processes that wrote their ids to `path`: server, a child, a child with its own session.
fn ids(path: &Path) -> Vec<u32> {
    let text = fs::read_to_string(path).expect("written");
    text.split(' ').map(|id| id.parse().expect("an id")).collect()
}

/// Running, and not a zombie.
fn alive(id: &u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(" Z"))
}

#[test]
fn the_end_of_an_episode_and_a_time_out_end_all_that_a_server_started() {
    let Some(spec) = odd(json!({"call_seconds": 2})) else { return };
    let dir = tempfile::tempdir().expect("a directory");
    let task = task("{}");
    for hang in [false, true] {
        let path = dir.path().join(hang.to_string());
        let mut episode = start(&spec, &task).expect("resets");
        let leave = call("leave", &json!({"path": path}).to_string());
        episode.call(0, &leave, CallPermit::Run).expect("no fault");
        let left = ids(&path);
        assert!(left.len() == 3 && left.iter().all(alive), "{left:?}");
        if hang {
            let hang = call("misbehave", r#"{"how":"hang"}"#);
            episode.call(1, &hang, CallPermit::Run).expect_err("a fault");
        } else {
            episode.finish().expect("scored");
        }
        // They are killed when that returns; the system takes a moment to end them.
        eventually("all that the server started is gone", || !left.iter().any(alive));
    }
}

#[test]
fn nothing_outlives_a_program_that_is_killed_in_a_call() {
    if env::var_os(ROLE).is_some() || !venv::has_python() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("ids");
    let mut actor = Command::new(env::current_exe().expect("this program"))
        .args(["--exact", "stands_in_for_an_actor", "--nocapture"])
        .env(ROLE, &path)
        .stdout(Stdio::null())
        .spawn()
        .expect("starts");
    eventually("the actor's episode runs", || path.exists());
    let left = ids(&path);
    assert!(left.iter().all(alive));
    actor.kill().expect("killed");
    actor.wait().expect("reaped");
    eventually("its processes are gone", || !left.iter().any(alive));
}

/// Plays an episode that hangs, when it is told to.
#[test]
fn stands_in_for_an_actor() {
    let Some(path) = env::var_os(ROLE) else { return };
    let spec = odd(json!({"call_seconds": 600})).expect("Python is here");
    let task = task("{}");
    let mut episode = start(&spec, &task).expect("resets");
    let leave = call("leave", &json!({"path": Path::new(&path)}).to_string());
    episode.call(0, &leave, CallPermit::Run).expect("runs");
    drop(episode.call(1, &call("misbehave", r#"{"how":"hang"}"#), CallPermit::Run));
}
