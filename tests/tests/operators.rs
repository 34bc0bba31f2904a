//! What an operator does to a running learner: join files, a new secret, a revoked actor, metrics.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{TcpStream, UdpSocket},
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use protocol::{Digest, Join, Secret};
use serde_json::Value;
use tests::{Demo, Finished, Started, finish, programs, start};

fn actor(demo: &Demo, identity: &Path, join: &[&str]) -> Command {
    let mut command = Command::new(&programs().actor);
    let model = demo.recipe["model"]["path"].as_str().expect("a path");
    command.args(["join", "--device", "cpu", "--model", model, "--identity"]).arg(identity);
    command.args(join).env_remove("ROLLCALL_JOIN").env("RUST_LOG", "info");
    command
}

fn token(arguments: &[&str]) -> Finished {
    finish(start(Command::new(&programs().learner).arg("token").args(arguments)))
}

/// What `GET /metrics` gives.
fn scrape(address: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("listening");
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("text");
    let (head, body) = answer.split_once("\r\n\r\n").expect("an answer");
    assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
    assert!(head.contains("application/openmetrics-text"), "{head}");
    assert!(body.ends_with("# EOF\n"), "{body}");
    body.to_owned()
}

/// A sample's number.
fn value(text: &str, series: &str) -> Option<f64> {
    let line = text.lines().find(|line| line.rsplit_once(' ').is_some_and(|it| it.0 == series));
    line?.rsplit(' ').next()?.parse().ok()
}

/// Asks until the answer is there.
#[track_caller]
fn until<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(60);
    while Instant::now() < deadline {
        if let Some(found) = ask() {
            return found;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    panic!("{what} does not come");
}

fn joins(demo: &Demo) -> Vec<Value> {
    let text = fs::read_to_string(demo.run().join("joins.jsonl")).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// The id of an actor that joined after `known` others.
fn joined(demo: &Demo, known: usize) -> String {
    until("a line of a join", || {
        let lines = joins(demo).into_iter().filter(|line| line["outcome"] == "joined");
        let line = lines.skip(known).last()?;
        line["actor"].as_str().map(str::to_owned)
    })
}

#[test]
fn secrets_are_replaced_and_actors_shut_out_while_a_learner_runs_and_metrics_are_served() {
    let demo = Demo::new(100_000);
    let keys = demo.dir.path().join("keys");
    let mut command = Command::new(&programs().learner);
    command.arg("train").arg(demo.write()).args(["--device", "cpu", "--json"]);
    command.args(["--metrics-listen", "0", "--identity"]).arg(&keys);
    let learner: Started = start(&mut command);
    let metrics = learner.event("metrics")["address"].as_str().expect("an address").to_owned();
    let first = learner.event("listening")["join"].as_str().expect("a join string").to_owned();
    let keys_text = keys.to_str().expect("text");
    assert_eq!(token(&["show", keys_text]).stdout.trim(), first);

    // By a file that is kept current.
    let file = keys.join("join");
    let identities = ["one", "two"].map(|name| demo.dir.path().join(name));
    let by_file = ["--join-file", file.to_str().expect("text"), "--metrics-listen", "0"];
    let one = start(&mut actor(&demo, &identities[0], &by_file));
    let id = joined(&demo, 0);
    learner.event("step");
    let text = scrape(&metrics);
    assert_eq!(value(&text, "rollcall_actors"), Some(1.0), "{text}");
    assert_eq!(value(&text, "rollcall_joins_total{outcome=\"joined\"}"), Some(1.0), "{text}");
    until("a broadcast byte", || {
        value(&scrape(&metrics), "rollcall_broadcast_bytes_total{form=\"delta\"}")
            .filter(|bytes| *bytes > 0.0)
    });

    // A new secret: who is in stays, the old string lets nobody in, the new one does.
    let rotated = token(&["rotate", keys_text]);
    let second = rotated.stdout.trim().to_owned();
    assert!(rotated.status.success() && second != first, "{}", rotated.stderr);
    assert_eq!(token(&["show", keys_text]).stdout.trim(), second);
    // The learner looks once a second: who comes sooner is let in, and is sent away here.
    let mut attempts = 0;
    until("a refusal of the old secret", || {
        attempts += 1;
        let identity = demo.dir.path().join(format!("late-{attempts}"));
        let mut late = start(&mut actor(&demo, &identity, &[&first]));
        let deadline = Instant::now() + Duration::from_secs(10);
        while late.child.try_wait().expect("a child").is_none() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = late.child.kill();
        let late = finish(late);
        (late.status.code() == Some(2)).then(|| {
            assert!(late.stderr.contains("printed last"), "{}", late.stderr);
        })
    });
    let mut by_stdin = actor(&demo, &identities[1], &["--join-file", "-"]);
    let mut two = by_stdin.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("started");
    let mut stdin = two.stdin.take().expect("a pipe");
    stdin.write_all(format!("{second}\n").as_bytes()).expect("written");
    drop(stdin);
    until("a second actor", || {
        value(&scrape(&metrics), "rollcall_actors").filter(|actors| *actors == 2.0)
    });

    // The first is shut out: it ends, and may not come back.
    let revoked = token(&["revoke", keys_text, &id]);
    assert!(revoked.status.success(), "{}", revoked.stderr);
    let one = finish(one);
    assert!(!one.status.success(), "{}", one.stderr);
    assert!(one.stderr.contains("shut out"), "{}", one.stderr);
    let again = finish(start(&mut actor(&demo, &identities[0], &[&second])));
    assert!(!again.status.success() && again.stderr.contains("shut out"), "{}", again.stderr);
    learner.event("step");
    let outcomes: Vec<Value> = joins(&demo).into_iter().map(|it| it["outcome"].clone()).collect();
    assert!(outcomes.contains(&"proof".into()), "{outcomes:?}");
    assert!(outcomes.contains(&"revoked".into()), "{outcomes:?}");
    let text = scrape(&metrics);
    assert_eq!(value(&text, "rollcall_joins_total{outcome=\"revoked\"}"), Some(1.0), "{text}");

    learner.signal("INT");
    let ended = finish(learner);
    assert_eq!(ended.status.code(), Some(130), "{}", ended.stderr);
    assert!(two.wait().expect("a child").success());
}

#[test]
fn an_actor_passes_adapters_on_to_another_one() {
    let demo = Demo::new(100_000);
    let keys = demo.dir.path().join("keys");
    let mut command = Command::new(&programs().learner);
    command.arg("train").arg(demo.write()).args(["--device", "cpu", "--json"]);
    command.args(["--relay-fanout", "1", "--metrics-listen", "0", "--identity"]).arg(&keys);
    let learner = start(&mut command);
    let metrics = learner.event("metrics")["address"].as_str().expect("an address").to_owned();
    learner.event("listening");
    let file = keys.join("join");
    let by_file = ["--join-file", file.to_str().expect("text")];
    let relays = [by_file.as_slice(), &["--relay", "127.0.0.1:0"]].concat();
    let relay = start(&mut actor(&demo, &demo.dir.path().join("relay"), &relays));
    joined(&demo, 0);
    let child = start(&mut actor(&demo, &demo.dir.path().join("child"), &by_file));
    until("a child of the relay", || {
        value(&scrape(&metrics), "rollcall_relayed_actors").filter(|actors| *actors == 1.0)
    });
    // Some adapters on.
    for _ in 0..5 {
        learner.event("step");
    }
    let text = scrape(&metrics);
    assert_eq!(value(&text, "rollcall_relay_failures_total"), Some(0.0), "{text}");
    learner.signal("INT");
    let ended = finish(learner);
    assert_eq!(ended.status.code(), Some(130), "{}", ended.stderr);
    let (relay, child) = (finish(relay), finish(child));
    assert!(relay.status.success() && child.status.success(), "{relay:?} {child:?}");
    let passed = relay.stderr.lines().find_map(|line| line.split_once(" passed "));
    let (_, passed) = passed.unwrap_or_else(|| panic!("{}", relay.stderr));
    let bytes = passed.split(' ').next().and_then(|bytes| bytes.parse::<u64>().ok());
    assert!(bytes > Some(0), "{passed}");
    assert!(child.stderr.contains("adapters come from another actor"), "{}", child.stderr);
}

#[test]
fn mistakes_of_operators_have_one_line() {
    let dir = tempfile::tempdir().expect("a directory");
    let dir_text = dir.path().to_str().expect("text");
    for arguments in [&["rotate", dir_text][..], &["show", dir_text]] {
        let said = token(arguments);
        assert_eq!(said.status.code(), Some(2), "{said:?}");
        assert!(said.stderr.contains("identity.pem: not there"), "{}", said.stderr);
    }
    assert_eq!(fs::read_dir(dir.path()).expect("there").count(), 0, "nothing is made");
    assert_eq!(token(&["revoke", dir_text, "abc"]).status.code(), Some(2));
    let demo = Demo::new(1);
    let identity = dir.path().join("id");
    let none = finish(start(&mut actor(&demo, &identity, &[])));
    assert_eq!(none.status.code(), Some(2));
    assert!(none.stderr.contains("ROLLCALL_JOIN"), "{}", none.stderr);
    let both = finish(start(&mut actor(&demo, &identity, &["x", "--join-file", "y"])));
    assert_eq!(both.status.code(), Some(2));
    let relay = finish(start(&mut actor(&demo, &identity, &["x", "--relay", "here"])));
    assert_eq!(relay.status.code(), Some(2));
    assert!(relay.stderr.contains("an IP address of this machine and a UDP port"), "{relay:?}");
    let nobody = Join {
        host: "127.0.0.1".to_owned(),
        port: 1,
        learner: Digest::of(b"nobody"),
        secret: Secret::generate().expect("made"),
    };
    let join = nobody.reveal();
    let taken = UdpSocket::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("bound").to_string();
    let busy = finish(start(&mut actor(&demo, &identity, &[&join, "--relay", &port])));
    assert_eq!(busy.status.code(), Some(2), "{busy:?}");
    let said = format!("error: --relay: listen address {port}: the port is in use");
    assert!(busy.stderr.lines().any(|line| line.starts_with(&said)), "{}", busy.stderr);
    let missing = finish(start(&mut actor(&demo, &identity, &["--join-file", "/nonexistent"])));
    assert!(missing.stderr.contains("--join-file /nonexistent"), "{}", missing.stderr);
}
