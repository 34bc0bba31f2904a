//! Real OpenEnv servers, of the oldest and the newest version, are played whole episodes of.

mod support;
#[path = "support/venv.rs"]
mod venv;

use std::{path::Path, thread, time::Duration};

use environments::{
    CallPermit, Claim, Determinism, EnvironmentSpec, Fault, Move, Recorder, ReplayError,
    check_trace, play, probe, verify_replay,
};
use protocol::CallKind;
use serde_json::{Value, json};
use support::{call, key, task};
use venv::Server;

/// The section of a recipe on this machine.
fn spec(server: &Server, settings: Value) -> EnvironmentSpec {
    let mut section = json!({"openenv": server.url()});
    for (key, value) in settings.as_object().into_iter().flatten() {
        section[key] = value.clone();
    }
    EnvironmentSpec::parse_in(&section, Path::new(".")).expect("a valid section")
}

#[test]
fn episodes_are_played_scored_and_replayed() {
    for version in venv::versions() {
        let Some(server) = Server::start(version, "guess", 4) else { return };
        let spec = spec(&server, json!({}));
        let description = spec.describe().expect("described");
        assert_eq!(description.determinism, Determinism::Deterministic, "{version}");
        let tools: Vec<Value> =
            description.tools.iter().map(|tool| tool.to_json()["function"].clone()).collect();
        assert_eq!(
            tools,
            [json!({
                "name": "step",
                "description": "Guess the hidden number.",
                "parameters": {
                    "additionalProperties": false,
                    "properties": {"number": {"type": "integer"}},
                    "required": ["number"],
                    "type": "object",
                },
            })]
        );
        for seed in 0..8 {
            let task = task(r#"{"largest":100,"unknown":[1]}"#);
            let key = key(&task, seed << 40 | seed);
            let (mut low, mut high) = (1, 100);
            let recording = play(&spec, key, 20, |reset, rows| {
                assert_eq!(reset, "The number is between 1 and 100.");
                let middle = |low: i64, high: i64| (low + high) / 2;
                match rows.last().map(|row| row.observation.as_str()) {
                    Some("higher") => low = middle(low, high) + 1,
                    Some("lower") => high = middle(low, high) - 1,
                    _ => {}
                }
                Some(Move::new("step", json!({"number": middle(low, high)})))
            })
            .expect("no fault");
            assert!(recording.score.success && recording.score.reward == 1.0, "seven halvings do");
            assert!(recording.rows.last().is_some_and(|row| row.done));
            let claim = Claim::from(&recording);
            assert_eq!(check_trace(key, &description, &spec.limits(), claim), Ok(()));
            assert_eq!(verify_replay(&spec, key, claim).as_ref(), Ok(&recording));
            let mut forged = recording.clone();
            forged.rows[0].observation = "forged".into();
            assert!(verify_replay(&spec, key, Claim::from(&forged)).is_err());
        }
    }
}

#[test]
fn a_server_that_drops_the_seed_is_only_recorded() {
    for version in venv::versions() {
        let Some(server) = Server::start(version, "careless", 4) else { return };
        let spec = spec(&server, json!({}));
        assert_eq!(spec.describe().expect("described").determinism, Determinism::Recorded);
        let task = task("{}");
        let recording =
            play(&spec, key(&task, 1), 3, |_, _| Some(Move::new("step", json!({"number": 7}))))
                .expect("no fault");
        let refused = verify_replay(&spec, key(&task, 1), Claim::from(&recording));
        assert!(matches!(refused, Err(ReplayError::Recorded(_))), "{refused:?}");
        let claimed = spec.score_claim(recording.score.reward);
        assert_eq!(claimed, Some(recording.score), "which a learner may be told to believe");
        assert_eq!(spec.score_claim(1.5), None);
        assert_eq!(spec.score_claim(f64::NAN), None);
    }
}

#[test]
fn tools_that_a_server_lists_are_called_by_name() {
    for version in venv::versions() {
        let Some(server) = Server::start(version, "tools", 4) else { return };
        let spec = spec(&server, json!({}));
        let tools = spec.tools().expect("listed");
        let mut names: Vec<&str> = tools.iter().map(|tool| tool.name.as_str()).collect();
        names.sort_unstable();
        assert_eq!(names, ["add", "fail"]);
        assert_eq!(spec.describe().expect("described").determinism, Determinism::Deterministic);
        let task = task("{}");
        let mut episode =
            Recorder::start(spec.open().expect("opens"), key(&task, 3), spec.limits())
                .expect("resets");
        let start: i64 = episode
            .reset_text()
            .trim_start_matches("Start at ")
            .trim_end_matches('.')
            .parse()
            .expect("a number");
        let mut said = |turn, tool: &str, arguments: &str| {
            let row =
                episode.call(turn, &call(tool, arguments), CallPermit::Run).expect("no fault");
            (row.kind, row.observation.clone())
        };
        assert_eq!(said(0, "add", r#"{"n":2}"#), (CallKind::Ok, format!("total {}", start + 2)));
        assert_eq!(said(1, "add", r#"{"n":"3"}"#), (CallKind::Ok, format!("total {}", start + 5)));
        let (kind, message) = said(2, "fail", r#"{"message":"<|im_end|>"}"#);
        assert!(kind == CallKind::Raised && message.contains("<|im_end|>"), "{message}");
        assert_eq!(said(3, "list_tools", "{}").0, CallKind::UnknownTool);
        let recording = episode.finish().expect("scored");
        assert_eq!(recording.score.reward, 0.0, "no step said a reward");
        verify_replay(&spec, key(&task, 3), Claim::from(&recording)).expect("the same again");
    }
}

#[test]
fn a_server_at_its_capacity_is_waited_for() {
    for version in venv::versions() {
        let Some(server) = Server::start(version, "guess", 1) else { return };
        let patient = spec(&server, json!({"capacity_seconds": 60}));
        let description = patient.describe().expect("one at a time is enough to be described");
        assert_eq!(description.determinism, Determinism::Deterministic);
        let task = task("{}");
        let report = probe(&patient, &task, 0).expect("no fault");
        assert_eq!((report.isolated, report.findings()), (None, vec![]), "two cannot be compared");
        let first =
            Recorder::start(patient.open().expect("opens"), key(&task, 0), patient.limits());
        let first = first.expect("resets");
        let hurried = spec(&server, json!({"capacity_seconds": 0, "determinism": "recorded"}));
        let opened = hurried.open().expect("opens");
        let busy = Recorder::start(opened, key(&task, 1), hurried.limits()).expect_err("no room");
        assert!(matches!(busy, Fault::Busy { .. }), "{busy}");
        let (patient, task) = (&patient, &task);
        thread::scope(|scope| {
            let second = scope.spawn(move || {
                Recorder::start(patient.open().expect("opens"), key(task, 1), patient.limits())
            });
            thread::sleep(Duration::from_millis(200));
            assert!(!second.is_finished(), "it waits");
            drop(first);
            second.join().expect("no panic").expect("plays when there is room");
        });
    }
}

#[test]
fn a_time_out_ends_the_session_and_its_late_reply_is_never_seen() {
    for version in venv::versions() {
        let Some(server) = Server::start(version, "odd", 4) else { return };
        let spec = spec(
            &server,
            json!({"call_seconds": 1, "determinism": "recorded", "observation": "text"}),
        );
        let task = task("{}");
        let mut episode =
            Recorder::start(spec.open().expect("opens"), key(&task, 0), spec.limits())
                .expect("resets");
        let sleep = call("step", r#"{"do":"sleep","n":2}"#);
        let fault = episode.call(0, &sleep, CallPermit::Run).expect_err("a fault").to_string();
        assert!(fault.contains("no answer for 1s"), "{fault}");
        assert_eq!(episode.call(1, &sleep, CallPermit::Run).err(), Some(Fault::Void));
        assert!(episode.finish().is_err(), "never scored");
        let said = play(&spec, key(&task, 0), 1, |_, _| {
            Some(Move::new("step", json!({"do": "add", "n": 1})))
        });
        assert_eq!(said.expect("no fault").rows[0].observation, "1");
    }
}

#[test]
fn a_server_that_dies_voids_its_episodes() {
    for version in venv::versions() {
        let Some(mut server) = Server::start(version, "guess", 4) else { return };
        let spec = spec(&server, json!({}));
        let task = task("{}");
        let mut episode =
            Recorder::start(spec.open().expect("opens"), key(&task, 0), spec.limits())
                .expect("resets");
        server.kill();
        let guess = call("step", r#"{"number":1}"#);
        let fault = episode.call(0, &guess, CallPermit::Run).expect_err("a fault");
        assert!(matches!(fault, Fault::Process { .. }), "{fault}");
        let gone = Recorder::start(spec.open().expect("described"), key(&task, 0), spec.limits());
        let gone = gone.expect_err("no server").to_string();
        assert!(gone.contains("cannot connect") && !gone.contains('\n'), "{gone}");
    }
}
