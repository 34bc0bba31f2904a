//! The whole loop in two operating-system processes.

use std::process::Command;

use serde_json::Value;
use tests::{Demo, Finished, children, finish, programs, signal, start};

fn train(demo: &Demo, more: &[&str]) -> Command {
    let mut command = Command::new(&programs().learner);
    command.arg("train").arg(demo.write()).args(["--device", "cpu", "--json"]).args(more);
    command
}

fn last(finished: &Finished) -> Value {
    let line = finished.stdout.lines().last().expect("the last line");
    serde_json::from_str(line).expect("JSON")
}

#[test]
fn the_same_recipe_and_seed_give_the_same_episodes_and_the_same_adapter() {
    let mut runs = Vec::new();
    for _ in 0..2 {
        let demo = Demo::new(3);
        let finished = finish(start(&mut train(&demo, &["--local-actors", "1"])));
        assert!(finished.status.success(), "{}", finished.stderr);
        let end = last(&finished);
        assert_eq!((&end["event"], &end["status"]), (&"end".into(), &"completed".into()));
        assert_eq!(end["steps"], 3);
        for field in ["success_before", "success_after", "seconds"] {
            assert!(end[field].is_number(), "{field}: {end}");
        }
        assert_eq!(
            end["run"],
            demo.run().canonicalize().expect("there").to_string_lossy().as_ref()
        );
        let manifest = demo.manifest();
        assert_eq!(manifest["status"], "completed");
        let evidence = std::fs::read_to_string(demo.run().join("evidence.jsonl")).expect("there");
        let episodes: Vec<String> = evidence
            .lines()
            .map(|line| {
                let row: Value = serde_json::from_str(line).expect("JSON");
                row["row"]["episode"].as_str().or(row["episode"].as_str()).expect("id").to_owned()
            })
            .collect();
        assert_eq!(episodes.len(), 3 * 16 + 2 * 8);
        assert!(demo.run().join("metrics.jsonl").is_file());
        assert_eq!(manifest["last_adapter"]["sha256"], end["adapter_sha256"]);
        let best = demo.run().join(manifest["best_adapter"]["path"].as_str().expect("a path"));
        assert!(best.join("adapter_model.safetensors").is_file());
        assert_eq!(manifest["best_adapter"], end["best_adapter"]);
        let adapter = end["adapter"].as_str().expect("a path");
        for file in ["adapter_config.json", "adapter_model.safetensors"] {
            assert!(std::path::Path::new(adapter).join(file).is_file(), "{file}");
        }
        runs.push((episodes, end["adapter_sha256"].clone()));
    }
    assert_eq!(runs[0], runs[1]);
}

#[test]
fn an_actor_killed_in_the_middle_changes_nothing_but_the_time() {
    let quiet = Demo::new(4);
    let undisturbed = finish(start(&mut train(&quiet, &["--local-actors", "1"])));
    assert!(undisturbed.status.success(), "{}", undisturbed.stderr);
    let demo = Demo::new(4);
    let learner = start(&mut train(&demo, &["--local-actors", "1"]));
    assert_eq!(learner.event("step")["step"], 1);
    let actors = children(learner.child.id());
    assert_eq!(actors.len(), 1);
    signal(actors[0], "KILL");
    let finished = finish(learner);
    assert!(finished.status.success(), "{}", finished.stderr);
    assert_eq!(last(&finished)["adapter_sha256"], last(&undisturbed)["adapter_sha256"]);
    assert!(last(&finished)["counts"]["joins"].as_u64().expect("a count") >= 2);
}

#[test]
fn an_interrupt_ends_both_processes_and_the_manifest_says_so() {
    let demo = Demo::new(100_000);
    let learner = start(&mut train(&demo, &["--local-actors", "1"]));
    learner.event("step");
    let actors = children(learner.child.id());
    learner.signal("INT");
    let finished = finish(learner);
    assert_eq!(finished.status.code(), Some(130), "{}", finished.stderr);
    assert_eq!(last(&finished)["status"], "interrupted");
    assert_eq!(demo.manifest()["status"], "interrupted");
    let audited = finish(start(Command::new(&programs().learner).arg("audit").arg(demo.run())));
    assert_eq!(audited.status.code(), Some(0), "{}{}", audited.stdout, audited.stderr);
    for actor in actors {
        let alive = Command::new("kill").arg("-0").arg(actor.to_string()).output();
        assert!(!alive.expect("kill starts").status.success(), "actor {actor} is still there");
    }
}

#[test]
fn actors_join_from_elsewhere_with_the_join_string_and_leave_on_request() {
    let demo = Demo::new(3);
    let learner = start(&mut train(&demo, &[]));
    let join = learner.event("listening")["join"].as_str().expect("a join string").to_owned();
    let model = demo.recipe["model"]["path"].as_str().expect("a path").to_owned();
    let actor = || {
        let mut command = Command::new(&programs().actor);
        command.args(["join", "--device", "cpu", "--model", &model]).env("ROLLCALL_JOIN", &join);
        start(&mut command)
    };
    let first = actor();
    learner.event("step");
    // One leaves when asked to, another takes over.
    first.signal("TERM");
    let first = finish(first);
    assert_eq!(first.status.code(), Some(0), "{}", first.stderr);
    let second = actor();
    let finished = finish(learner);
    assert!(finished.status.success(), "{}", finished.stderr);
    let second = finish(second);
    assert_eq!(second.status.code(), Some(0), "{}", second.stderr);
    assert_eq!(last(&finished)["steps"], 3);
}

#[test]
fn a_trained_adapter_is_measured_by_eval() {
    let demo = Demo::new(1);
    let finished = finish(start(&mut train(&demo, &["--local-actors", "1"])));
    assert!(finished.status.success(), "{}", finished.stderr);
    let end = last(&finished);
    let mut command = Command::new(&programs().learner);
    command.arg("eval").arg(demo.write()).args(["--device", "cpu", "--json", "--adapter"]);
    let evaluated = finish(start(command.arg(end["adapter"].as_str().expect("a path"))));
    assert!(evaluated.status.success(), "{}", evaluated.stderr);
    let result = last(&evaluated);
    assert_eq!(result["adapter_sha256"], end["adapter_sha256"]);
    assert_eq!(result["episodes"], 8);
}

#[test]
fn a_run_starts_from_the_adapter_that_its_recipe_names() {
    let mut first = Demo::new(1);
    first.recipe["lora"] = serde_json::json!({"r": 4, "alpha": 12});
    let finished = finish(start(&mut train(&first, &["--local-actors", "1"])));
    assert!(finished.status.success(), "{}", finished.stderr);
    let end = last(&finished);
    let adapter = end["adapter"].as_str().expect("a path");
    let named = finish(start(Command::new(&programs().learner).arg("digest").arg(adapter)));
    let sha256 = named.stdout.split_whitespace().next().expect("a digest").to_owned();
    let mut second = Demo::new(1);
    second.recipe["adapter"] = serde_json::json!({"path": adapter, "sha256": sha256});
    for key in ["lora", "evaluation"] {
        second.recipe.as_object_mut().expect("an object").remove(key);
    }
    second.recipe["training"]["learning_rate"] = 0.into();
    let ranks = ["--local-actors", "1", "--nproc-per-node", "2"];
    let finished = finish(start(&mut train(&second, &ranks)));
    assert!(finished.status.success(), "{}", finished.stderr);
    let end_of_second = last(&finished);
    assert_eq!(end_of_second["adapter_sha256"], end["adapter_sha256"]);
    let settings = &second.manifest()["settings"]["lora"];
    assert_eq!((settings["r"].as_u64(), settings["alpha"].as_f64()), (Some(4), Some(12.0)));
    let audited = finish(start(Command::new(&programs().learner).arg("audit").arg(second.run())));
    assert_eq!(audited.status.code(), Some(0), "{}{}", audited.stdout, audited.stderr);
}

#[test]
fn the_office_trains_on_weighted_rewards_and_reports_them_apart() {
    let mut demo = Demo::of("office", 2);
    demo.recipe["reward"] =
        serde_json::json!({"weights": {"environment": 0.5, "trusted-milestones-v1": 0.25}});
    demo.recipe["evaluation"]["every"] = 1.into();
    let finished = finish(start(&mut train(&demo, &["--local-actors", "1"])));
    assert!(finished.status.success(), "{}", finished.stderr);
    let end = last(&finished);
    assert_eq!(end["counts"]["rejected"], 0);
    let number = |value: &Value| value.as_f64().expect("a number");
    let sums = |record: &Value| {
        let want = 0.5 * number(&record["success"]) + 0.25 * number(&record["milestone_reward"]);
        assert!((number(&record["reward"]) - want).abs() < 1e-9, "{record}");
    };
    sums(&end["before"]);
    sums(&end["after"]);
    let read = |name: &str| {
        let text = std::fs::read_to_string(demo.run().join(name)).expect("there");
        let rows = text.lines().map(|line| serde_json::from_str(line).expect("JSON"));
        rows.collect::<Vec<Value>>()
    };
    let metrics = read("metrics.jsonl");
    let (evaluations, steps): (Vec<_>, Vec<_>) =
        metrics.iter().partition(|row| row["evaluation"].is_object());
    assert_eq!((evaluations.len(), steps.len()), (3, 2));
    steps.iter().for_each(|step| sums(step));
    for row in read("evidence.jsonl") {
        let parts = &row["reward_components"]["parts"];
        assert_eq!(parts[0]["version"], "environment");
        assert_eq!(parts[1]["version"], "trusted-milestones-v1");
        let parts = [0, 1].map(|at| number(&parts[at]["weight"]) * number(&parts[at]["reward"]));
        assert!((number(&row["training_reward"]) - parts[0] - parts[1]).abs() < 1e-9, "{row}");
    }
    let best = &demo.manifest()["best_adapter"];
    let measured = evaluations.iter().map(|row| number(&row["evaluation"]["success"]));
    assert_eq!(number(&best["success"]), measured.fold(0.0, f64::max));
    let audited = finish(start(Command::new(&programs().learner).arg("audit").arg(demo.run())));
    assert_eq!(audited.status.code(), Some(0), "{}{}", audited.stdout, audited.stderr);
}

#[test]
fn a_finished_run_is_audited_from_its_directory_and_a_changed_one_is_found_out() {
    let demo = Demo::new(2);
    let finished = finish(start(&mut train(&demo, &["--local-actors", "1"])));
    assert!(finished.status.success(), "{}", finished.stderr);
    let audit = |more: &[&str]| {
        let mut command = Command::new(&programs().learner);
        finish(start(command.arg("audit").arg(demo.run()).args(more)))
    };
    let model = demo.recipe["model"]["path"].as_str().expect("a path").to_owned();
    let holds = audit(&["--model", &model]);
    assert_eq!(holds.status.code(), Some(0), "{}{}", holds.stdout, holds.stderr);
    assert!(holds.stdout.contains("48 episodes accepted, 0 refused"), "{}", holds.stdout);
    let metrics = demo.run().join("metrics.jsonl");
    let text = std::fs::read_to_string(&metrics).expect("there");
    std::fs::write(&metrics, text.replacen("\"success\":0.", "\"success\":0.9", 1))
        .expect("written");
    let fails = audit(&["--json"]);
    assert_eq!(fails.status.code(), Some(1), "{}", fails.stdout);
    let report: Value = serde_json::from_str(&fails.stdout).expect("one object");
    assert_eq!(report["holds"], false);
    assert_eq!(fails.stderr.lines().count(), 1, "{}", fails.stderr);
    assert!(fails.stderr.contains("1 of 12 checks fail (metrics)"), "{}", fails.stderr);
    std::fs::remove_file(demo.run().join("manifest.json")).expect("removed");
    assert_eq!(audit(&[]).status.code(), Some(2));
}
