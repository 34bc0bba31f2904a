//! What becomes of a run when a rank is lost, hangs, does not come or is refused: it ends everywhere within
//! its deadline with one line that says which, and `--resume` ends with the bytes of a run that nothing
//! happened to.

use std::{
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tempfile::TempDir;
use tests::{
    Demo, Finished, Started, children, digest, finish, programs, signal, start, workspace,
};

fn golden() -> PathBuf {
    workspace().join("learner/tests/golden/rows").canonicalize().expect("there")
}

fn frozen(name: &str) -> Value {
    let path = golden().join(name);
    json!({"path": path, "sha256": digest(&path)})
}

/// Recipes of both trainers on rows, of a few seconds.
fn recipe(kind: &str) -> Value {
    let mut training = json!({
        "num_train_epochs": 150, "per_device_train_batch_size": 3, "learning_rate": 1e-4,
        "save_steps": 7,
    });
    let mut recipe = json!({
        "schema_version": 1, "model": frozen("model"),
        "prompt": "Find {{ name }}{% if memory %} ({{ memory }}){% endif %}.",
    });
    match kind {
        "sft" => {
            recipe["dataset"] = frozen("sft.jsonl");
            recipe["lora"] = json!({"r": 4, "alpha": 8});
        }
        _ => {
            recipe["rows"] = frozen("ppo.jsonl");
            recipe["adapter"] = frozen("start");
            recipe["reference"] = frozen("reference");
            training["gradient_accumulation_steps"] = json!(1);
        }
    }
    recipe["training"] = training;
    recipe
}

struct Run {
    dir: TempDir,
    kind: &'static str,
}

impl Run {
    fn new(kind: &'static str) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        fs::write(dir.path().join("recipe.json"), recipe(kind).to_string()).expect("written");
        Self { dir, kind }
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&programs().learner);
        command.arg(self.kind).arg(self.dir.path().join("recipe.json"));
        command.arg("--output").arg(self.output()).args(["--device", "cpu", "--json"]);
        command
    }

    fn start(&self, more: &[&str]) -> Started {
        start(self.command().args(["--nproc-per-node", "2"]).args(more))
    }

    fn output(&self) -> PathBuf {
        self.dir.path().join("run")
    }
}

fn end(finished: &Finished) -> Value {
    assert!(finished.status.success(), "{}{}", finished.stdout, finished.stderr);
    let last = finished.stdout.lines().last().expect("a line");
    serde_json::from_str(last).expect("JSON")
}

fn updates(path: &Path) -> Vec<u64> {
    let text = fs::read_to_string(path).expect("metrics");
    let updates = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    updates.filter_map(|line| line["update"].as_u64()).collect()
}

/// Waits for an update of this number, and gives the ranks' processes in order.
fn ranks_after(started: &Started, update: u64) -> Vec<u32> {
    started.line(|line| {
        let value: Value = serde_json::from_str(line).expect("JSON");
        (value["update"].as_u64() >= Some(update)).then_some(())
    });
    let ranks = children(started.child.id());
    assert_eq!(ranks.len(), 2, "two ranks");
    ranks
}

/// The one line that the run said at its end.
fn error(finished: &Finished) -> &str {
    assert!(!finished.status.success(), "{}", finished.stdout);
    let mut errors = finished.stderr.lines().filter(|line| line.starts_with("error: "));
    let first = errors.next().unwrap_or_else(|| panic!("no error: {}", finished.stderr));
    assert_eq!(errors.next(), None, "one line: {}", finished.stderr);
    first
}

fn alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // A process that nobody has waited for is over.
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z'))
}

#[test]
fn a_run_whose_rank_is_killed_ends_at_once_and_goes_on_to_the_same_adapter() {
    for kind in ["sft", "ppo"] {
        let whole = Run::new(kind);
        let expected = end(&finish(whole.start(&[])));
        let killed = Run::new(kind);
        // The first rank, the other one, and in the end the process that started them.
        for (resume, victim) in [(false, 1), (true, 0), (true, 2)] {
            let started = killed.start(if resume { &["--resume"] } else { &[] });
            let ranks = ranks_after(&started, 20);
            let since = Instant::now();
            match ranks.get(victim) {
                Some(rank) => signal(*rank, "KILL"),
                None => started.signal("KILL"),
            }
            let finished = finish(started);
            assert!(since.elapsed() < Duration::from_secs(30), "{:?}", since.elapsed());
            if victim < 2 {
                let said = error(&finished);
                assert!(said.contains(&format!("rank {victim}")), "{said}");
            }
            let deadline = Instant::now() + Duration::from_secs(10);
            while ranks.iter().any(|rank| alive(*rank)) {
                assert!(Instant::now() < deadline, "a rank is left behind");
                thread::sleep(Duration::from_millis(20));
            }
        }
        let resumed = end(&finish(killed.start(&["--resume"])));
        assert_eq!(resumed["sha256"], expected["sha256"], "{kind}");
        assert_eq!(resumed["updates"], expected["updates"]);
        let all = updates(&killed.output().join("metrics.jsonl"));
        assert_eq!(all, updates(&whole.output().join("metrics.jsonl")), "each update once");
        // On another number of ranks an update is made of other rows.
        let other = finish(start(killed.command().arg("--resume")));
        assert_eq!(other.status.code(), Some(2), "{}", other.stderr);
        assert!(error(&other).contains("had 2 ranks, and this one has 1"), "{}", other.stderr);
    }
}

#[test]
fn an_online_run_whose_rank_is_killed_goes_on_to_the_same_adapter() {
    let train = |demo: &Demo, more: &[&str]| {
        let mut command = Command::new(&programs().learner);
        command.arg("train").arg(demo.write()).args(["--device", "cpu", "--json"]);
        start(command.args(["--local-actors", "1", "--nproc-per-node", "2"]).args(more))
    };
    let whole = Demo::new(6);
    let expected = end(&finish(train(&whole, &[])));
    let killed = Demo::new(6);
    for (resume, victim, step) in [(false, 1, 1), (true, 0, 3)] {
        let started = train(&killed, if resume { &["--resume"] } else { &[] });
        started.line(|line| {
            let value: Value = serde_json::from_str(line).expect("JSON");
            (value["event"] == "step" && value["step"].as_u64() >= Some(step)).then_some(())
        });
        let ranks = children(started.child.id());
        assert_eq!(ranks.len(), 2, "two ranks");
        signal(ranks[victim], "KILL");
        let finished = finish(started);
        assert!(error(&finished).contains(&format!("rank {victim}")), "{}", finished.stderr);
    }
    let resumed = end(&finish(train(&killed, &["--resume"])));
    assert_eq!(resumed["adapter_sha256"], expected["adapter_sha256"]);
    assert_eq!(resumed["counts"]["accepted"], expected["counts"]["accepted"]);
}

#[test]
fn a_mistake_that_all_ranks_make_is_said_once() {
    let run = Run::new("sft");
    let path = run.dir.path().join("recipe.json");
    let mut recipe: Value = serde_json::from_slice(&fs::read(&path).expect("read")).expect("JSON");
    recipe["training"]["epochs"] = json!(1);
    fs::write(&path, recipe.to_string()).expect("written");
    let since = Instant::now();
    let finished = finish(run.start(&[]));
    assert_eq!(finished.status.code(), Some(2), "{}", finished.stderr);
    assert!(error(&finished).contains("training.epochs is unknown"), "{}", finished.stderr);
    assert!(since.elapsed() < Duration::from_secs(10), "{:?}", since.elapsed());
}

#[test]
fn a_rank_that_hangs_ends_the_run_within_its_deadline() {
    let run = Run::new("sft");
    let started = run.start(&["--rank-timeout-seconds", "2"]);
    let ranks = ranks_after(&started, 5);
    signal(ranks[1], "STOP");
    let since = Instant::now();
    let finished = finish(started);
    assert!(since.elapsed() < Duration::from_secs(40), "{:?}", since.elapsed());
    let said = error(&finished);
    assert!(said.contains("rank 1 did not reach") && said.contains("within 2 s"), "{said}");
    assert!(!ranks.iter().any(|rank| alive(*rank)), "the hanging rank is ended too");
}

/// One rank of two, started as a launcher starts it.
fn rank(run: &Run, rank: usize, port: u16, secret: &str) -> Started {
    let mut command = run.command();
    command
        .args(["--rendezvous-seconds", "3"])
        .env("ROLLCALL_RANK", rank.to_string())
        .env("ROLLCALL_WORLD_SIZE", "2")
        .env("ROLLCALL_LOCAL_RANK", rank.to_string())
        .env("ROLLCALL_RENDEZVOUS", format!("127.0.0.1:{port}"))
        .env("ROLLCALL_RANK_SECRET", secret);
    start(&mut command)
}

#[test]
fn ranks_that_do_not_meet_say_why_within_the_deadline() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let run = Run::new("sft");
    let secret = "0123456789abcdef";
    let said = |finished: Finished, parts: &[&str]| {
        assert_eq!(finished.status.code(), Some(2), "{}", finished.stderr);
        let said = error(&finished);
        assert!(parts.iter().all(|part| said.contains(part)), "{said}");
    };
    let since = Instant::now();
    said(finish(rank(&run, 0, port, secret)), &["cannot listen on", "ROLLCALL_RENDEZVOUS"]);
    drop(listener);
    said(finish(rank(&run, 0, port, secret)), &["rank 1 of 2 did not come within 3 s"]);
    said(finish(rank(&run, 1, port, secret)), &["rank 1 found no rank 0", "within 3 s"]);
    let (first, other) = (rank(&run, 0, port, secret), rank(&run, 1, port, "fedcba9876543210"));
    said(finish(other), &["rank 1 was refused", "ROLLCALL_RANK_SECRET"]);
    said(finish(first), &["rank 1 of 2 did not come"]);
    assert!(since.elapsed() < Duration::from_secs(60), "{:?}", since.elapsed());
    assert!(!run.output().exists(), "nothing was begun");
}
