//! Short ways to host the classes that the tests bring.

#![allow(dead_code, reason = "each test program uses its part")]

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use environments::{CallPermit, EnvironmentSpec, EpisodeKey, Recorder};
use protocol::{Task, TraceRow};
use serde_json::{Value, json};

use crate::support::{call, key, task};

/// Whether there is a Python to test with.
pub(crate) fn python() -> bool {
    let found =
        Command::new("python3").arg("--version").output().is_ok_and(|it| it.status.success());
    if !found {
        println!("skipped: there is no python3");
    }
    found
}

pub(crate) fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python")
}

/// A class of the tests' modules with more settings; nothing where there is no Python.
pub(crate) fn class(name: &str, settings: Value) -> Option<EnvironmentSpec> {
    hosting(name, settings, &folder())
}

pub(crate) fn guess_game() -> Option<EnvironmentSpec> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/python-guess");
    hosting("guess_game:GuessGame", json!({}), &folder)
}

fn hosting(name: &str, settings: Value, folder: &Path) -> Option<EnvironmentSpec> {
    let mut section = json!({"python": name});
    for (key, value) in settings.as_object().into_iter().flatten() {
        section[key] = value.clone();
    }
    python().then(|| EnvironmentSpec::parse_in(&section, folder).expect("a valid section"))
}

/// Why a class cannot be opened.
pub(crate) fn refused(name: &str) -> String {
    let Some(spec) = class(name, json!({})) else { return String::new() };
    spec.describe().expect_err("refused").to_string()
}

pub(crate) fn started(spec: &EnvironmentSpec, task: &Task) -> Recorder {
    Recorder::start(spec.open().expect("opens"), key(task, 7), spec.limits()).expect("resets")
}

/// An episode after these calls, one a turn.
pub(crate) fn converse(
    spec: &EnvironmentSpec,
    key: EpisodeKey<'_>,
    calls: &[(&str, String)],
) -> Recorder {
    let mut episode =
        Recorder::start(spec.open().expect("opens"), key, spec.limits()).expect("resets");
    for (turn, (tool, arguments)) in (0..).zip(calls) {
        episode.call(turn, &call(tool, arguments), CallPermit::Run).expect("no fault");
    }
    episode
}

/// The rows of these calls.
pub(crate) fn said(spec: &EnvironmentSpec, calls: &[(&str, String)]) -> Vec<TraceRow> {
    let task = task("{}");
    converse(spec, key(&task, 7), calls).finish().expect("scores").rows
}

pub(crate) fn misbehaving(spec: &EnvironmentSpec, ways: &[&str]) -> Vec<TraceRow> {
    let calls: Vec<(&str, String)> =
        ways.iter().map(|how| ("misbehave", json!({"how": how}).to_string())).collect();
    said(spec, &calls)
}

/// The fault that a call ends in.
pub(crate) fn fault(spec: &EnvironmentSpec, how: &str) -> String {
    let task = task("{}");
    let mut episode = started(spec, &task);
    let call = call("misbehave", &json!({"how": how}).to_string());
    let fault = episode.call(0, &call, CallPermit::Run).expect_err("a fault").to_string();
    assert!(episode.finish().is_err(), "it is void");
    fault
}
