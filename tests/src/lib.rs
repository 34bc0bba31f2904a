//! Cross-process tests of Rollcall: the two programs as a user starts them.

pub mod browser;
pub mod chaos;
pub mod rollouts;

use std::{
    io::{BufRead as _, BufReader, Read as _},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;
use tempfile::TempDir;

/// Nothing here waits longer than this for a program.
pub const PATIENCE: Duration = Duration::from_secs(240);

/// Where the programs of this build are.
#[derive(Clone, Debug)]
pub struct Programs {
    /// The learner.
    pub learner: PathBuf,
    /// The actor.
    pub actor: PathBuf,
}

/// The workspace's directory.
pub fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The programs of the profile that this test was built in, built first where they are not.
///
/// # Panics
/// When they cannot be built.
pub fn programs() -> &'static Programs {
    static PROGRAMS: OnceLock<Programs> = OnceLock::new();
    PROGRAMS.get_or_init(|| {
        let own = std::env::current_exe().expect("a test has a path");
        let profile = own.ancestors().nth(2).expect("tests lie in a profile's deps");
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut build = Command::new(cargo);
        build.args(["build", "--quiet", "--workspace", "--bins"]).current_dir(workspace());
        if profile.ends_with("release") {
            build.arg("--release");
        }
        let target = profile.parent().expect("a profile lies in a target directory");
        build.env("CARGO_TARGET_DIR", target);
        // A test is told which package it is of. Dependencies whose build scripts look at that would be
        // built anew, and everything above them.
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
                build.env_remove(name);
            }
        }
        assert!(build.status().expect("cargo starts").success(), "the programs do not build");
        Programs { learner: profile.join("learner"), actor: profile.join("actor") }
    })
}

/// The recipe of a demo in a directory of its own.
#[derive(Debug)]
pub struct Demo {
    /// Removed with this value.
    pub dir: TempDir,
    /// The recipe's value, paths absolute.
    pub recipe: Value,
}

impl Demo {
    /// The guessing demo with `steps` steps and eight held-out games.
    ///
    /// # Panics
    /// When the demo's files are not there.
    pub fn new(steps: u32) -> Self {
        Self::of("guess", steps)
    }

    /// The demo of this name, likewise.
    ///
    /// # Panics
    /// When the demo's files are not there.
    pub fn of(name: &str, steps: u32) -> Self {
        let demo = workspace().join("examples").join(name);
        let demo = demo.canonicalize().expect("the demo is there");
        let text = std::fs::read_to_string(demo.join("recipe.json")).expect("its recipe");
        let mut recipe: Value = serde_json::from_str(&text).expect("JSON");
        let dir = tempfile::tempdir().expect("a directory");
        let eval = std::fs::read_to_string(demo.join("eval.jsonl")).expect("held-out tasks");
        let few: String = eval.lines().take(8).map(|line| format!("{line}\n")).collect();
        std::fs::write(dir.path().join("eval.jsonl"), few).expect("written");
        recipe["model"]["path"] = path(&demo.join("model"));
        recipe["dataset"]["path"] = path(&demo.join("train.jsonl"));
        recipe["evaluation"]["dataset"]["path"] = path(&dir.path().join("eval.jsonl"));
        recipe["evaluation"]["dataset"]["sha256"] = digest(&dir.path().join("eval.jsonl")).into();
        recipe["output_dir"] = path(&dir.path().join("run"));
        recipe["training"]["max_steps"] = steps.into();
        recipe["training"]["per_device_train_batch_size"] = 16.into();
        Self { dir, recipe }
    }

    /// Writes the recipe and returns its path.
    ///
    /// # Panics
    /// When it cannot be written.
    pub fn write(&self) -> PathBuf {
        let path = self.dir.path().join("recipe.json");
        std::fs::write(&path, self.recipe.to_string()).expect("written");
        path
    }

    /// The run's directory.
    pub fn run(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    /// The run's manifest.
    ///
    /// # Panics
    /// When there is none.
    pub fn manifest(&self) -> Value {
        let text = std::fs::read_to_string(self.run().join("manifest.json")).expect("a manifest");
        serde_json::from_str(&text).expect("JSON")
    }
}

fn path(path: &Path) -> Value {
    path.to_string_lossy().into_owned().into()
}

/// What `learner digest` says of a path.
///
/// # Panics
/// When it says nothing.
pub fn digest(path: &Path) -> String {
    let said = finish(start(Command::new(&programs().learner).arg("digest").arg(path)));
    assert!(said.status.success(), "{}", said.stderr);
    said.stdout.trim().to_owned()
}

/// A running program whose output is being read.
#[derive(Debug)]
pub struct Started {
    /// The process.
    pub child: Child,
    stdout: thread::JoinHandle<String>,
    stderr: thread::JoinHandle<String>,
    lines: std::sync::mpsc::Receiver<String>,
}

/// How a program ended.
#[derive(Debug)]
pub struct Finished {
    /// Its status.
    pub status: ExitStatus,
    /// Everything on standard output.
    pub stdout: String,
    /// Everything on standard error.
    pub stderr: String,
}

/// Starts a program with its output captured.
///
/// # Panics
/// When it cannot be started.
pub fn start(command: &mut Command) -> Started {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let out = child.stdout.take().expect("captured");
    let mut err = child.stderr.take().expect("captured");
    let (sender, lines) = std::sync::mpsc::channel();
    let stdout = thread::spawn(move || {
        let mut all = String::new();
        for line in BufReader::new(out).lines().map_while(Result::ok) {
            all.push_str(&line);
            all.push('\n');
            // Nobody may be waiting for lines.
            let _ = sender.send(line);
        }
        all
    });
    let stderr = thread::spawn(move || {
        let mut all = String::new();
        let _ = err.read_to_string(&mut all);
        all
    });
    Started { child, stdout, stderr, lines }
}

impl Started {
    /// Waits for the first line of standard output that `wanted` takes something from.
    ///
    /// # Panics
    /// When none comes in time.
    pub fn line<T>(&self, mut wanted: impl FnMut(&str) -> Option<T>) -> T {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left).expect("the line comes");
            if let Some(found) = wanted(&line) {
                return found;
            }
        }
    }

    /// The next JSON line with this `event`.
    ///
    /// # Panics
    /// When none comes in time.
    pub fn event(&self, event: &str) -> Value {
        self.line(|line| {
            let value: Value = serde_json::from_str(line).expect("every line is JSON");
            (value["event"] == event).then_some(value)
        })
    }

    /// Sends a signal by its name, such as INT.
    ///
    /// # Panics
    /// When it cannot be sent.
    pub fn signal(&self, name: &str) {
        signal(self.child.id(), name);
    }
}

/// Sends a signal by its name.
///
/// # Panics
/// When it cannot be sent.
pub fn signal(pid: u32, name: &str) {
    let sent = Command::new("kill").arg(format!("-{name}")).arg(pid.to_string()).status();
    assert!(sent.expect("kill starts").success(), "no process {pid}");
}

/// Waits for a program's end.
///
/// # Panics
/// When it does not end in time.
pub fn finish(mut started: Started) -> Finished {
    let deadline = Instant::now() + PATIENCE;
    let status = loop {
        if let Some(status) = started.child.try_wait().expect("a child") {
            break status;
        }
        if Instant::now() > deadline {
            let _ = started.child.kill();
            panic!("the program does not end: {:?}", started.stderr.join());
        }
        thread::sleep(Duration::from_millis(20));
    };
    Finished {
        status,
        stdout: started.stdout.join().expect("read"),
        stderr: started.stderr.join().expect("read"),
    }
}

/// The children of a process.
pub fn children(parent: u32) -> Vec<u32> {
    let listed = Command::new("ps").args(["-o", "pid=", "--ppid", &parent.to_string()]).output();
    let text = listed.map(|output| output.stdout).unwrap_or_default();
    String::from_utf8_lossy(&text).split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}
