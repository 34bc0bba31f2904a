//! What a run shows of itself: the page, opened in a browser; the screen, on a terminal; event files; and
//! that every number it writes is explained.
//!
//! With `ROLLCALL_PICTURES=DIR` the pictures of the documentation are written there.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

use learner::scalars::scalars;
use serde_json::{Value, json};
use tests::{
    Demo, Finished, PATIENCE, browser::Browser, digest, finish, programs, start, workspace,
};

/// What a hostile task says.
const HOSTILE: &str = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">";

/// Names that these short runs do not write.
const NOT_REACHED: [&str; 15] = [
    "milestone_reward",
    "evaluation/milestone_reward",
    "clip_ratio/dual_mean",
    "value_loss",
    "value_clip_fraction",
    "explained_variance",
    "value_grad_norm",
    "importance_mean",
    "importance_capped",
    "rejections/*",
    "evaluation/loss",
    "kl",
    "logp_gap",
    "entropy",
    "peak_memory_gib",
];

fn learner<S: AsRef<std::ffi::OsStr>>(arguments: &[S]) -> Finished {
    finish(start(Command::new(&programs().learner).args(arguments)))
}

fn done(finished: &Finished) {
    assert!(finished.status.success(), "{}{}", finished.stdout, finished.stderr);
}

/// A finished run of the guessing demo whose tasks are hostile, with a refusal made up in its manifest.
fn trained() -> &'static Demo {
    static RUN: OnceLock<Demo> = OnceLock::new();
    RUN.get_or_init(|| {
        let mut demo = Demo::new(3);
        let model = PathBuf::from(demo.recipe["model"]["path"].as_str().expect("a path"));
        let tasks = model.parent().expect("the demo").join("train.jsonl");
        let hostile: String = fs::read_to_string(tasks)
            .expect("its tasks")
            .lines()
            .map(|line| {
                let mut task: Value = serde_json::from_str(line).expect("JSON");
                let prompt = format!("{} {HOSTILE}", task["prompt"].as_str().expect("a prompt"));
                task["prompt"] = prompt.into();
                format!("{task}\n")
            })
            .collect();
        let tasks = demo.dir.path().join("train.jsonl");
        fs::write(&tasks, hostile).expect("written");
        demo.recipe["dataset"] = json!({"path": tasks, "sha256": digest(&tasks)});
        let recipe = demo.write();
        let mut train = Command::new(&programs().learner);
        train.arg("train").arg(recipe).args(["--device", "cpu", "--json", "--local-actors", "1"]);
        done(&finish(start(&mut train)));
        demo
    })
}

/// The frames demo, a few updates of SFT and two rounds of PPO.
fn on_rows() -> &'static (tempfile::TempDir, [PathBuf; 2]) {
    static RUNS: OnceLock<(tempfile::TempDir, [PathBuf; 2])> = OnceLock::new();
    RUNS.get_or_init(|| {
        let dir = tempfile::tempdir().expect("a directory");
        let demo = workspace().join("examples/frames").canonicalize().expect("the demo");
        let read = |name: &str| -> Value {
            let text = fs::read_to_string(demo.join(name)).expect("a recipe");
            serde_json::from_str(&text).expect("JSON")
        };
        let run = |kind: &str, mut recipe: Value, more: &[&str]| {
            for key in ["model", "dataset", "rows", "valid"] {
                if let Some(name) = recipe[key]["path"].as_str().map(str::to_owned) {
                    recipe[key]["path"] = json!(demo.join(name));
                }
            }
            // Measuring takes longer than these updates.
            recipe.as_object_mut().expect("an object").remove("valid");
            let path = dir.path().join(format!("{kind}.json"));
            fs::write(&path, recipe.to_string()).expect("written");
            let output = dir.path().join(kind);
            let mut command = Command::new(&programs().learner);
            command.arg(kind).arg(&path).args(["--device", "cpu", "--json", "--output"]);
            done(&finish(start(command.arg(&output).args(more))));
            output
        };
        let mut sft = read("sft.json");
        sft["training"]["max_updates"] = 3.into();
        let sft = run("sft", sft, &[]);
        let mut ppo = read("ppo.json");
        ppo["rollouts"]["rounds"] = 2.into();
        ppo["rollouts"]["rows_per_round"] = 8.into();
        let adapter = sft.join("adapter");
        let adapter = adapter.to_string_lossy();
        let ppo = run("ppo", ppo, &["--adapter", &adapter, "--reference", &adapter]);
        (dir, [sft, ppo])
    })
}

fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).expect("there");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// Writes a report and gives its path.
fn report(run: &Path, more: &[&str]) -> PathBuf {
    let mut command = Command::new(&programs().learner);
    let written = finish(start(command.arg("report").arg(run).args(more)));
    done(&written);
    PathBuf::from(written.stdout.trim())
}

/// Where pictures go: where the documentation's are wanted, or away.
fn pictures() -> PathBuf {
    std::env::var_os("ROLLCALL_PICTURES").map_or_else(std::env::temp_dir, PathBuf::from)
}

#[test]
fn a_report_shows_its_plots_and_episodes_in_a_browser_and_what_is_hostile_in_them_is_text() {
    let demo = trained();
    let page = report(&demo.run(), &[]);
    let html = fs::read_to_string(&page).expect("written");
    assert!(!html.contains("<img src=x"), "escaped");
    assert!(html.len() < 3 << 20, "{} bytes", html.len());
    let Some(mut browser) = Browser::start() else { return };
    browser.open(&page, "#episode-5");
    let plots = browser.evaluate("[...document.querySelectorAll('figure svg')].length");
    assert!(plots.as_u64() >= Some(18), "{plots}");
    for plot in ["reward", "evaluation", "kl", "clip", "entropy", "gradient", "logp_gap"] {
        let drawn = format!("document.querySelectorAll('#plot-{plot} svg polyline').length");
        assert!(browser.evaluate(&drawn).as_u64() >= Some(1), "{plot}");
    }
    for plot in ["audit_margin", "staleness", "speed", "time", "length", "leases", "actors"] {
        let there = browser.evaluate(&format!("document.getElementById('plot-{plot}') !== null"));
        assert_eq!(there, true, "{plot}");
    }
    // The fifth is a training episode: one after four held-out ones of the first evaluation.
    let title = |browser: &mut Browser| {
        let text = browser.evaluate("document.querySelector('#episode h3').textContent");
        text.as_str().expect("a title").to_owned()
    };
    let fifth = title(&mut browser);
    browser.evaluate("document.getElementById('find').value = 'step 2, guess-train'");
    browser.evaluate("document.getElementById('find').dispatchEvent(new Event('input'))");
    let shown =
        browser.evaluate("[...document.querySelectorAll('#list button:not([hidden])')].length");
    assert_eq!(shown, 16, "the episodes of the last step");
    browser.evaluate("document.querySelector('#list button:not([hidden])').click()");
    browser.evaluate("new Promise(done => setTimeout(done, 50))");
    let chosen = title(&mut browser);
    assert!(chosen.starts_with("step 2, guess-train-") && chosen != fifth, "{chosen}");
    let text = browser.evaluate("document.getElementById('episode').textContent");
    let text = text.as_str().expect("a text");
    assert!(text.contains(HOSTILE), "shown as it is: {text}");
    for wanted in ["Turn 1: ", "<tool_call>", "training reward", "guess", "Tool calls"] {
        assert!(text.contains(wanted), "{wanted}: {text}");
    }
    let tokens = "[...document.querySelectorAll('#episode .sampled')]";
    let colours = format!("new Set({tokens}.map(it => it.style.background)).size");
    assert!(browser.evaluate(&colours).as_u64() > Some(1), "coloured by log-probability");
    let rows = "document.querySelectorAll('#episode table.trace tr').length";
    assert!(browser.evaluate(rows).as_u64() > Some(8));
    browser.evaluate("document.querySelector('input[value=mask]').click()");
    let mask = "getComputedStyle(document.querySelector('#episode .sampled')).backgroundColor";
    assert_eq!(browser.evaluate(mask), "rgb(158, 202, 225)");
    // Nothing of an episode has run, become an element, or been fetched.
    assert!(!browser.evaluate("document.title").as_str().expect("a title").contains("owned"));
    assert_eq!(browser.evaluate("document.images.length"), 0);
    let asked: Vec<&String> =
        browser.asked().iter().filter(|it| !it.starts_with("file:")).collect();
    assert!(asked.iter().all(|it| it.starts_with("about:")), "{asked:?}");
    browser.picture("body", 900.0, &pictures().join("report-short.png"));
}

#[test]
fn an_audit_of_a_run_without_episodes_is_a_mistake_and_no_verdict() {
    for run in &on_rows().1 {
        let audited = finish(start(Command::new(&programs().learner).arg("audit").arg(run)));
        assert_eq!(audited.status.code(), Some(2), "{}", audited.stderr);
        let want = "learner sft or ppo wrote it, without episodes; name the output directory of learner train";
        assert!(audited.stderr.trim_end().ends_with(want), "{}", audited.stderr);
        assert_eq!(audited.stderr.lines().count(), 1, "{}", audited.stderr);
    }
}

#[test]
fn a_report_of_rows_shows_sampled_codes_with_their_pictures_and_two_runs_are_compared() {
    let (_, [sft, ppo]) = on_rows();
    let page = report(ppo, &["--compare", &sft.to_string_lossy(), "--episodes", "20"]);
    assert!(report(sft, &[]).is_file());
    let Some(mut browser) = Browser::start() else { return };
    browser.open(&page, "");
    assert_eq!(browser.evaluate("document.querySelectorAll('header h1').length"), 2);
    for plot in ["reward", "loss", "kl", "entropy", "gradient", "time", "speed"] {
        let there = browser.evaluate(&format!("document.getElementById('plot-{plot}') !== null"));
        assert_eq!(there, true, "{plot}");
    }
    let legend = browser.evaluate("document.getElementById('plot-gradient').textContent");
    let legend = legend.as_str().expect("a text");
    assert!(legend.contains("(ppo)") && legend.contains("(sft)"), "{legend}");
    assert_eq!(browser.evaluate("document.querySelectorAll('#list button').length"), 20);
    let width = browser.evaluate("document.querySelector('#episode img').naturalWidth");
    assert!(width.as_u64() > Some(8), "{width}");
}

#[test]
fn plots_for_papers_are_files_and_what_is_no_run_is_refused_in_one_line() {
    let demo = trained();
    let dir = tempfile::tempdir().expect("a directory");
    let plots = dir.path().join("plots");
    let run = demo.run();
    report(&run, &["--format", "svg", "--output", &plots.to_string_lossy()]);
    let reward = fs::read_to_string(plots.join("reward.svg")).expect("written");
    assert!(reward.starts_with("<svg") && reward.contains("polyline"), "{reward}");
    assert!(plots.read_dir().expect("there").count() >= 18);

    // An unfinished run, at every line that it had written.
    let unfinished = dir.path().join("unfinished & <b>");
    fs::create_dir(&unfinished).expect("created");
    let metrics = fs::read_to_string(run.join("metrics.jsonl")).expect("there");
    for cut in 0..=metrics.lines().count() {
        let some: String = metrics.lines().take(cut).map(|line| format!("{line}\n")).collect();
        fs::write(unfinished.join("metrics.jsonl"), format!("{some}{{\"step\":")).expect("written");
        let html = fs::read_to_string(report(&unfinished, &[])).expect("written");
        assert!(html.contains("unfinished &amp; &lt;b&gt;") && !html.contains("<b>"), "{cut}");
    }

    let refused = |run: &Path, more: &[&str], wanted: &str| {
        let mut command = Command::new(&programs().learner);
        let said = finish(start(command.arg("report").arg(run).args(more)));
        assert_eq!(said.status.code(), Some(2), "{}", said.stderr);
        assert_eq!(said.stderr.lines().count(), 1, "{}", said.stderr);
        assert!(said.stderr.contains(wanted), "{wanted}: {}", said.stderr);
    };
    refused(&dir.path().join("none"), &[], "name the directory that a run was written to");
    refused(&run, &["--compare", "none"], "none/manifest.json: ");
    refused(&run, &["--output", "/none/x.html"], "name another place with --output");
    fs::write(unfinished.join("metrics.jsonl"), "{}\nno\n{}\n").expect("written");
    refused(&unfinished, &[], "metrics.jsonl: line 2: expected");
    fs::write(unfinished.join("metrics.jsonl"), "").expect("written");
    fs::write(unfinished.join("evidence.jsonl"), "no\n").expect("written");
    refused(&unfinished, &[], "evidence.jsonl: the line at byte 0: expected");
    fs::write(unfinished.join("manifest.json"), "[1").expect("written");
    refused(&unfinished, &[], "manifest.json: EOF");
    let png = learner(&["report", ".", "--format", "png"]);
    assert_eq!(png.status.code(), Some(2));
    assert!(png.stderr.contains("'png'") && png.stderr.contains("html, svg"), "{}", png.stderr);
}

#[test]
fn every_number_that_runs_write_stands_in_the_documentation_and_nothing_else_does() {
    let docs = fs::read_to_string(workspace().join("docs/metrics.md")).expect("the docs");
    let mut documented: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    let mut section = "";
    for line in docs.lines() {
        if let Some(named) = line.strip_prefix("## `learner ") {
            section = named.trim_end_matches('`');
        } else if let Some(row) = line.strip_prefix("| `") {
            let name = row.split('`').next().expect("a name").to_owned();
            assert!(documented.entry(section).or_default().insert(name), "twice: {line}");
        }
    }
    let (_, [sft, ppo]) = on_rows();
    for (section, run) in [("train", &trained().run()), ("sft", sft), ("ppo", ppo)] {
        let documented = &documented[section];
        let written: BTreeSet<String> = lines(&run.join("metrics.jsonl"))
            .iter()
            .flat_map(scalars)
            .map(|(name, _)| match name.split_once('/') {
                Some((folder @ ("episodes_by_actor" | "rejections"), _)) => format!("{folder}/*"),
                _ => name,
            })
            .collect();
        let unknown: Vec<_> = written.difference(documented).collect();
        assert!(unknown.is_empty(), "{section} writes what is not explained: {unknown:?}");
        let missing = documented.difference(&written);
        let missing: Vec<_> = missing
            .filter(|it| !NOT_REACHED.contains(&it.as_str()))
            .filter(|it| section == "train" || !it.starts_with("evaluation/"))
            .collect();
        assert!(missing.is_empty(), "{section} does not write: {missing:?}");
    }
}

#[test]
fn event_files_have_every_number_and_a_run_may_do_without_them() {
    let events = |run: &Path| -> Vec<Vec<u8>> {
        let folder = run.join("tensorboard");
        let files = folder.read_dir().into_iter().flatten().flatten();
        files.map(|file| fs::read(file.path()).expect("read")).collect()
    };
    let (_, [sft, ppo]) = on_rows();
    for run in [&trained().run(), sft, ppo] {
        let files = events(run);
        assert_eq!(files.len(), 1, "{}", run.display());
        for (name, _) in lines(&run.join("metrics.jsonl")).iter().flat_map(scalars) {
            let tag = name.as_bytes();
            assert!(files[0].windows(tag.len()).any(|it| it == tag), "{name}");
        }
    }
}

#[test]
fn a_run_is_watched_from_before_its_start_as_lines_and_as_json() {
    let demo = Demo::new(2);
    let watch = |more: &[&str]| {
        let mut command = Command::new(&programs().learner);
        start(command.arg("watch").arg(demo.run()).args(more))
    };
    let (json, text) = (watch(&["--json"]), watch(&[]));
    assert_eq!(json.event("status")["status"], "waiting");
    let mut train = Command::new(&programs().learner);
    train.arg("train").arg(demo.write()).args(["--device", "cpu", "--local-actors", "1"]);
    train.arg("--no-tensorboard");
    done(&finish(start(&mut train)));
    let (json, text) = (finish(json), finish(text));
    done(&json);
    done(&text);
    assert!(!demo.run().join("tensorboard").exists());
    let events: Vec<Value> =
        json.stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let of = |name: &str| events.iter().filter(|it| it["event"] == name).count();
    assert_eq!((of("step"), of("evaluation"), of("join")), (2, 2, 1), "{}", json.stdout);
    assert_eq!(events.last().map(|it| it["status"].clone()), Some("completed".into()));
    for wanted in ["step 1  reward ", "step 2  reward ", "held-out success", ": completed, 2 steps"]
    {
        assert!(text.stdout.contains(wanted), "{wanted}: {}", text.stdout);
    }
    assert!(!text.stdout.contains('\u{1b}'), "plain lines");
    // A run that is over is shown at once.
    done(&finish(watch(&[])));
    let no = learner(&["watch", &demo.run().join("manifest.json").to_string_lossy()]);
    assert_eq!((no.status.code(), no.stderr.lines().count()), (Some(2), 1), "{}", no.stderr);
}

/// A terminal of its own in tmux.
struct Terminal(String);

impl Terminal {
    /// One in which a command runs; nothing where there is no tmux.
    fn start(name: &str, size: (u16, u16), command: &str) -> Option<Self> {
        if !Command::new("tmux").arg("-V").output().is_ok_and(|it| it.status.success()) {
            println!("skipped: there is no tmux");
            return None;
        }
        let this = Self(format!("rollcall-{name}-{}", std::process::id()));
        let (width, height) = (size.0.to_string(), size.1.to_string());
        let command = format!("{command}; echo left with $?; stty -a; cat");
        let started = Command::new("tmux")
            .args([
                "-L",
                &this.0,
                "-f",
                "/dev/null",
                "new-session",
                "-d",
                "-x",
                &width,
                "-y",
                &height,
            ])
            .arg(command)
            .status();
        assert!(started.expect("tmux starts").success());
        Some(this)
    }

    fn tmux(&self, arguments: &[&str]) -> String {
        let said = Command::new("tmux").args(["-L", &self.0]).args(arguments).output();
        String::from_utf8_lossy(&said.expect("tmux starts").stdout).into_owned()
    }

    /// The pane, once it has all of these texts.
    fn pane(&self, colours: bool, wanted: &[&str]) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let arguments: &[&str] =
                if colours { &["capture-pane", "-p", "-e"] } else { &["capture-pane", "-p"] };
            let pane = self.tmux(arguments);
            if wanted.iter().all(|it| pane.contains(it)) {
                return pane;
            }
            assert!(Instant::now() < deadline, "{wanted:?} does not come: {pane}");
            thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Whether anything in a pane has a colour, in any of the ways in which one is written.
fn coloured(pane: &str) -> bool {
    let plain = (30..38).map(|it| format!("\u{1b}[{it}m"));
    plain.chain(["\u{1b}[38;".to_owned()]).any(|it| pane.contains(&it))
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.tmux(&["kill-server"]);
    }
}

#[test]
fn a_terminal_shows_curves_actors_refusals_and_the_last_episode_and_is_given_back() {
    let run = trained().run();
    let command = format!("{} watch {}", programs().learner.display(), run.display());
    let Some(terminal) = Terminal::start("watch", (120, 40), &command) else { return };
    let shown = ["Reward", "Held-out", "Actors", "1 connected", "Refused by the audit", "q leave"];
    let pane = terminal.pane(false, &shown);
    assert!(pane.contains("completed  step 3/3"), "{pane}");
    assert!(pane.contains("guess-eval-"), "the last episode: {pane}");
    assert!(pane.chars().any(|c| ('\u{2801}'..='\u{28ff}').contains(&c)), "curves: {pane}");
    assert!(coloured(&terminal.pane(true, &[])), "in colour");
    terminal.tmux(&["send-keys", "Right"]);
    let more = terminal.pane(false, &["Log-probability gap"]);
    assert!(!more.contains(" Held-out tasks "), "{more}");
    terminal.tmux(&["resize-window", "-x", "60", "-y", "20"]);
    terminal.pane(false, &["Actors", "q leave"]);
    terminal.tmux(&["send-keys", "q"]);
    // The shell has its screen back, and a line is a line again.
    let left = terminal.pane(false, &["left with 0", " icanon"]);
    assert!(!left.contains("-icanon") && !left.contains("Actors"), "{left}");
}

#[test]
fn a_terminal_without_colours_follows_a_run_and_ctrl_c_leaves() {
    let dir = tempfile::tempdir().expect("a directory");
    let run = dir.path().join("run");
    let program = programs().learner.display();
    let command = format!("NO_COLOR=1 {program} watch {}", run.display());
    let Some(terminal) = Terminal::start("plain", (80, 24), &command) else { return };
    terminal.pane(false, &["waiting", "no step has been made yet"]);
    fs::create_dir(&run).expect("created");
    let metrics = lines(&trained().run().join("metrics.jsonl"));
    let mut text = String::new();
    for record in &metrics[..3] {
        text.push_str(&format!("{record}\n"));
        fs::write(run.join("metrics.jsonl"), &text).expect("written");
    }
    terminal.pane(false, &["running", "step 2", "Reward"]);
    let colours = terminal.pane(true, &["Reward"]);
    assert!(!coloured(&colours), "{colours:?}");
    terminal.tmux(&["send-keys", "C-c"]);
    terminal.pane(false, &["left with 0"]);
}
