//! The commands beside training: plan, digest, score, sample and check.

use std::{fs, process::Command};

use serde_json::Value;
use tests::{Demo, Finished, finish, programs, start, workspace};

fn run(command: &mut Command) -> Finished {
    let finished = finish(start(command));
    assert!(finished.status.success(), "{}", finished.stderr);
    finished
}

fn rows(finished: &Finished) -> Vec<Value> {
    finished.stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

fn model() -> String {
    workspace().join("examples/guess/model").to_string_lossy().into_owned()
}

#[test]
fn a_plan_is_json_with_every_hash_and_writes_nothing() {
    let demo = Demo::new(7);
    let planned = run(Command::new(&programs().learner).arg("plan").arg(demo.write()));
    let plan: Value = serde_json::from_str(&planned.stdout).expect("JSON");
    assert_eq!(plan["status"], "planned");
    assert_eq!(plan["settings"]["training"]["max_steps"], 7);
    assert_eq!(plan["model"]["sha256"], demo.recipe["model"]["sha256"]);
    assert_eq!(plan["derived"]["groups_per_step"], 2);
    assert!(!demo.run().exists());
}

#[test]
fn what_was_sampled_scores_as_it_was_sampled() {
    let mut command = Command::new(&programs().actor);
    command.args([
        "sample",
        "--device",
        "cpu",
        "--max-tokens",
        "12",
        "--json",
        "--model",
        &model(),
    ]);
    command.args(["--prompt", "Let us play.", "--prompt", "Guess."]);
    let sampled = rows(&run(&mut command));
    assert_eq!(sampled.len(), 2);
    let numbers = |value: &Value| value.as_array().expect("a list").clone();
    let dir = tempfile::tempdir().expect("a directory");
    let data = dir.path().join("rows.jsonl");
    let mut lines = String::new();
    for row in &sampled {
        let mut ids = numbers(&row["prompt_ids"]);
        let from = ids.len();
        ids.extend(numbers(&row["ids"]));
        let line = serde_json::json!({"id": row["index"], "ids": ids, "from": from});
        lines.push_str(&format!("{line}\n"));
    }
    fs::write(&data, lines).expect("written");
    let mut command = Command::new(&programs().learner);
    command.args(["score", "--device", "cpu", "--model", &model(), "--data"]).arg(&data);
    let scored = rows(&run(&mut command));
    for (sampled, scored) in sampled.iter().zip(&scored) {
        assert_eq!(sampled["index"], scored["id"]);
        let (theirs, ours) = (numbers(&sampled["logp_raw"]), numbers(&scored["log_probs"]));
        assert_eq!(theirs.len(), ours.len());
        for (a, b) in theirs.iter().zip(&ours) {
            let (a, b) = (a.as_f64().expect("a number"), b.as_f64().expect("a number"));
            assert!((a - b).abs() < 1e-4, "{a} {b}");
        }
    }
}

#[test]
fn a_row_that_cannot_be_scored_is_named_by_its_line() {
    let dir = tempfile::tempdir().expect("a directory");
    let data = dir.path().join("rows.jsonl");
    fs::write(&data, "{\"ids\": [1, 2, 3]}\n{\"ids\": [1, 99999]}\n").expect("written");
    let mut command = Command::new(&programs().learner);
    command.args(["score", "--device", "cpu", "--model", &model(), "--data"]).arg(&data);
    let finished = finish(start(&mut command));
    assert_eq!(finished.status.code(), Some(2));
    assert!(finished.stderr.contains("line 2"), "{}", finished.stderr);
}

#[test]
fn built_in_environments_pass_their_check() {
    let section = r#"{"name": "office", "level": 3, "error_percent": 50}"#;
    for (environment, task) in [
        ("guess", "{}"),
        ("add", r#"{"want": 5}"#),
        (section, "{}"),
        ("wordle", "{}"),
        ("frozen_lake", "{}"),
    ] {
        let mut command = Command::new(&programs().actor);
        let checked = run(command.args(["check", environment, "--task", task]));
        assert!(checked.stdout.contains("verdict"), "{}", checked.stdout);
    }
    let mut command = Command::new(&programs().actor);
    let finished = finish(start(command.args(["check", r#"{"name": "chess"}"#])));
    assert_eq!(finished.status.code(), Some(2));
    assert!(finished.stderr.contains("environment.name"), "{}", finished.stderr);
}

#[test]
fn a_recipe_with_a_python_class_passes_plan_and_check() {
    if Command::new("python3").arg("--version").output().is_err() {
        println!("skipped: there is no python3");
        return;
    }
    let recipe = workspace().join("examples/python-guess/recipe.json");
    let mut command = Command::new(&programs().learner);
    let planned = run(command.arg("plan").arg(&recipe));
    assert!(planned.stdout.contains("guess_game:GuessGame"), "{}", planned.stdout);
    let mut command = Command::new(&programs().actor);
    let checked = run(command.arg("check").arg(&recipe));
    assert!(checked.stdout.contains("fit to train on"), "{}", checked.stdout);
}

#[test]
fn a_data_set_is_drawn_frozen_and_never_overwritten() {
    let office = workspace().join("examples/office");
    let dir = tempfile::tempdir().expect("a directory");
    for (split, count) in [("train", "512"), ("eval", "200")] {
        let output = dir.path().join(format!("{split}.jsonl"));
        let mut command = Command::new(&programs().learner);
        command.arg("dataset").arg(office.join("recipe.json"));
        command.args(["--split", split, "--rows", count, "--output"]).arg(&output);
        let printed = &rows(&run(&mut command))[0];
        assert_eq!(printed["sha256"], tests::digest(&output));
        let drawn = fs::read(&output).expect("written");
        let shipped = fs::read(office.join(format!("{split}.jsonl"))).expect("there");
        assert!(drawn == shipped, "the demo's {split} set is what the command draws");
        let again = finish(start(&mut command));
        assert_eq!(again.status.code(), Some(2));
        assert!(again.stderr.contains("--output"), "{}", again.stderr);
        assert_eq!(fs::read(&output).expect("there"), drawn);
    }
    let mut command = Command::new(&programs().learner);
    command.args(["dataset", "add", "--split", "train", "--rows", "3", "--output"]);
    let refused = finish(start(command.arg(dir.path().join("add.jsonl"))));
    assert_eq!(refused.status.code(), Some(2));
    assert!(refused.stderr.starts_with("error: environment add draws no tasks"));
}

#[test]
fn every_template_makes_a_plan_that_is_explained() {
    let dir = tempfile::tempdir().expect("a directory");
    for (template, demo) in [("agent", "guess"), ("sft", "guess"), ("vision", "frames")] {
        let demo = workspace().join("examples").join(demo);
        let recipe = dir.path().join(format!("{template}.json"));
        let mut dataset = demo.join("train.jsonl");
        if template == "sft" {
            dataset = dir.path().join("sft.jsonl");
            let row = r#"{"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]}"#;
            fs::write(&dataset, row).expect("written");
        }
        let mut command = Command::new(&programs().learner);
        command.args(["init", template]).arg(&recipe);
        command.arg("--model").arg(demo.join("model")).arg("--dataset").arg(dataset);
        if template != "sft" {
            command.arg("--valid").arg(demo.join("eval.jsonl"));
        }
        run(&mut command);
        let planned = run(Command::new(&programs().learner).arg("plan").arg(&recipe));
        let plan: Value = serde_json::from_str(&planned.stdout).expect("JSON");
        let estimate = &plan["estimate"];
        let parts = estimate["learner_memory"]["parts"].as_array().expect("parts");
        let sum: f64 = parts.iter().filter_map(|part| part["bytes"].as_f64()).sum();
        let whole = estimate["learner_memory"]["bytes"].as_f64().expect("a number");
        assert!((sum - whole).abs() < parts.len() as f64, "{estimate}");
        // The demo's model has 0.2 M weights of 4 bytes, that with a tower 0.4 M.
        let weights = parts[0]["bytes"].as_f64().expect("a number");
        assert!((5e5..4e6).contains(&weights), "{estimate}");
        assert_eq!(estimate["actor_memory"].is_object(), template == "agent", "{estimate}");
        let explained =
            run(Command::new(&programs().learner).arg("plan").arg(&recipe).arg("--explain"));
        for word in ["memory of the learner", "weights", "AdamW", "a step", "operations"] {
            assert!(explained.stdout.contains(word), "{word}: {}", explained.stdout);
        }
    }
}

#[test]
fn programs_say_what_they_are_and_write_their_pages() {
    let dir = tempfile::tempdir().expect("a directory");
    for (program, name, command) in
        [(&programs().learner, "learner", "train"), (&programs().actor, "actor", "join")]
    {
        let said = run(Command::new(program).arg("--version")).stdout;
        assert!(said.starts_with("rollcall 0.1.0 (") && said.contains("features: cpu"), "{said}");
        for shell in ["bash", "zsh", "fish"] {
            let script = run(Command::new(program).args(["completions", shell])).stdout;
            assert!(script.contains(name) && script.contains(command), "{shell}: {script}");
        }
        run(Command::new(program).arg("man").arg(dir.path()));
        for page in [format!("{name}.1"), format!("{name}-{command}.1")] {
            let text = fs::read_to_string(dir.path().join(&page)).expect("a page");
            assert!(text.contains("Examples"), "{page}");
        }
    }
}
