//! The vision path in two processes: a small vision-language checkpoint plays `frames` through an actor,
//! every image is painted again by the learner, and the adapter learns.

#[path = "../../learner/tests/support/image_model.rs"]
mod image_model;
#[path = "../../learner/tests/support/mod.rs"]
mod support;

use std::{fs, path::Path, process::Command};

use environments::{EnvironmentSpec, dataset};
use image_model::write_image_model;
use protocol::{Digest, Split};
use serde_json::{Value, json};
use tests::{Demo, Finished, browser::Browser, finish, programs, start};

/// A recipe for it in a directory of its own.
fn demo() -> Demo {
    let dir = tempfile::tempdir().expect("a directory");
    let model = dir.path().join("model");
    fs::create_dir(&model).expect("created");
    write_image_model(&model);
    let environment =
        json!({"name": "frames", "digits": 1, "levels": 2, "objects": 2, "shapes": 1});
    let spec = EnvironmentSpec::parse(&environment).expect("an environment");
    let tasks = |name: &str, split, count| {
        let rows = spec.draw_dataset(split, 0, count).expect("drawn");
        let text: String = rows.iter().map(|task| format!("{}\n", dataset::row(task))).collect();
        fs::write(dir.path().join(name), &text).expect("written");
        json!({"path": dir.path().join(name), "sha256": Digest::of(text.as_bytes())})
    };
    let digest = tests::digest(&model);
    let recipe = json!({
        "schema_version": 1,
        "model": {"path": model, "sha256": digest},
        "dataset": tasks("train.jsonl", Split::Train, 16),
        "output_dir": dir.path().join("run"),
        "environment": environment,
        "training": {
            "num_generations": 8, "per_device_train_batch_size": 16, "max_steps": 3,
            "max_completion_length": 4, "temperature": 1.0, "top_k": 0, "top_p": 1.0,
            "learning_rate": 1e-2, "beta": 0.02,
        },
        "lora": {"r": 4, "alpha": 8},
        "evaluation": {"dataset": tasks("eval.jsonl", Split::Eval, 4)},
    });
    Demo { dir, recipe }
}

fn learner(arguments: &[&str]) -> Finished {
    finish(start(Command::new(&programs().learner).args(arguments)))
}

fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).expect("there");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[test]
fn a_vision_run_learns_from_images_that_the_learner_has_seen_itself_and_is_reproducible() {
    let mut runs = Vec::new();
    for _ in 0..2 {
        let demo = demo();
        let recipe = demo.write();
        let recipe = recipe.to_string_lossy();
        let trained =
            learner(&["train", &recipe, "--device", "cpu", "--json", "--local-actors", "1"]);
        assert!(trained.status.success(), "{}{}", trained.stdout, trained.stderr);
        let end: Value =
            serde_json::from_str(trained.stdout.lines().last().expect("a line")).expect("JSON");
        assert_eq!((&end["status"], &end["steps"]), (&"completed".into(), &3.into()));
        assert_eq!(end["counts"]["rejected"], 0, "{end}");

        let manifest = demo.manifest();
        let update = &manifest["update_evidence"];
        assert!(update["changed_trainable_tensors"].as_u64() > Some(0), "{update}");
        let evidence = lines(&demo.run().join("evidence.jsonl"));
        assert_eq!(evidence.len(), 3 * 16 + 2 * 4);
        let mut examined = 0;
        for row in &evidence {
            assert_eq!(row["images"].as_array().map(Vec::len), Some(1), "{row}");
            assert_eq!(row["policy_audit"]["replay_verified"], true);
            if row["sampling"].is_object() {
                examined += 1;
                assert_eq!(
                    (&row["sampling"]["flag"], &row["sampling"]["unexplained"]),
                    (&Value::Null, &0.into()),
                    "{row}"
                );
            }
        }
        assert!(examined >= 16, "{examined} episodes were examined");
        let rewards: Vec<f64> =
            evidence.iter().filter_map(|row| row["training_reward"].as_f64()).collect();
        assert!(rewards.contains(&0.0) && rewards.contains(&1.0), "{rewards:?}");

        let run = demo.run();
        let (run, model) = (run.to_string_lossy(), demo.dir.path().join("model"));
        let audit = [
            "audit",
            &run,
            "--model",
            &model.to_string_lossy(),
            "--sampling",
            "16",
            "--device",
            "cpu",
        ]
        .map(str::to_owned);
        let audited = learner(&audit.each_ref().map(String::as_str));
        assert!(audited.status.success(), "{}{}", audited.stdout, audited.stderr);
        assert!(audited.stdout.contains("16 episodes scored again"), "{}", audited.stdout);

        if runs.is_empty() {
            seen(&demo.run());
        }
        let episodes: Vec<Value> = evidence.iter().map(|row| row["episode"].clone()).collect();
        runs.push((episodes, end["adapter_sha256"].clone(), evidence));
    }
    assert_eq!(runs[0], runs[1]);
}

/// The frames of its episodes are seen in its report.
fn seen(run: &Path) {
    let reported = learner(&["report", &run.to_string_lossy()]);
    assert!(reported.status.success(), "{}", reported.stderr);
    let Some(mut browser) = Browser::start() else { return };
    browser.open(&run.join("report.html"), "#episode-5");
    let drawn = browser.evaluate("document.querySelectorAll('#plot-reward polyline').length");
    assert!(drawn.as_u64() >= Some(1), "{drawn}");
    let size = "(it => [it.naturalWidth, it.naturalHeight, it.src.slice(0, 22)])";
    let image = browser.evaluate(&format!("{size}(document.querySelector('#episode img'))"));
    assert!(image[0].as_u64() > Some(8) && image[1].as_u64() > Some(8), "{image}");
    assert_eq!(image[2], "data:image/png;base64,");
    let text = browser.evaluate("document.getElementById('episode').textContent");
    assert!(text.as_str().is_some_and(|it| it.contains("Turn 1: ")), "{text}");
    if let Some(pictures) = std::env::var_os("ROLLCALL_PICTURES") {
        browser.picture("#episodes", 700.0, &Path::new(&pictures).join("report-vision.png"));
    }
}

#[test]
fn a_checkpoint_that_takes_no_images_is_refused_by_name() {
    let refused = |change: &dyn Fn(&Path), message: &str| {
        let mut demo = demo();
        let model = demo.dir.path().join("model");
        change(&model);
        demo.recipe["model"]["sha256"] = tests::digest(&model).into();
        let planned = learner(&["plan", &demo.write().to_string_lossy()]);
        assert_eq!(planned.status.code(), Some(2), "{}", planned.stderr);
        assert_eq!(planned.stderr.lines().count(), 1, "{}", planned.stderr);
        let start = "environment: frames shows images, and the model takes none: ";
        assert!(planned.stderr.contains(start), "{}", planned.stderr);
        assert!(planned.stderr.contains(message), "{}", planned.stderr);
    };
    let edit = |file: &Path, from: &str, to: &str| {
        let text = fs::read_to_string(file).expect("read");
        assert!(text.contains(from), "{text}");
        fs::write(file, text.replacen(from, to, 1)).expect("written");
    };
    let processor = "preprocessor_config.json";
    refused(
        &|model| fs::remove_file(model.join(processor)).expect("removed"),
        "no processor_config.json",
    );
    refused(
        &|model| edit(&model.join(processor), "\"merge_size\":2", "\"merge_size\":1"),
        "its vision tower takes (1536, 2, 265)",
    );
}
