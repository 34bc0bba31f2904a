//! From a recipe to the files of a run: plans, their mistakes, evidence and manifests.

#[path = "support/bench.rs"]
mod bench;
mod support;

use std::fs;

use bench::Bench;

use learner::{
    audit::{Reason, Rejected},
    files::{
        Answer, EpisodeContext, PolicyFiles, RunDirectory, Status, read_manifest, verify_evidence,
    },
    journal::{JournalReader, Record},
    plan::Plan,
    train::record::Evaluated,
};
use policy::model::{Adapter, Checkpoint, LoadDtype};
use protocol::{ActorId, Digest, EpisodeId, LeaseId};
use serde_json::{Value, json};
use support::{Say, World, text};

#[test]
fn a_plan_has_every_hash_and_every_default() {
    let bench = Bench::new();
    let plan = bench.plan().expect("valid");
    let json = serde_json::to_value(plan.manifest()).expect("JSON");
    assert_eq!(json["status"], "planned");
    assert_eq!(json["run"], json!(plan.run));
    assert_eq!(json["model"]["sha256"], bench.recipe["model"]["sha256"]);
    for pointer in [
        "/recipe/sha256",
        "/model/weights_sha256",
        "/dataset/sha256",
        "/evaluation_dataset/sha256",
        "/environment/sha256",
        "/policy_format/tokenizer_sha256",
        "/policy_format/chat_template_sha256",
    ] {
        let digest = json.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
        assert_eq!(digest.len(), 64, "{pointer}");
    }
    assert_eq!(json["settings"]["training"]["learning_rate"], 1e-5);
    assert_eq!(json["environment"]["tools"][0]["function"]["name"], "guess");
    let derived = &json["derived"];
    let counts = ["groups_per_step", "rollouts_per_step", "rollouts", "rollouts_per_evaluation"];
    assert_eq!(counts.map(|key| derived[key].as_u64()), [Some(1), Some(2), Some(6), Some(3)]);
    assert_eq!(derived["prompts_rendered"], 9);
    assert!(derived["longest_prompt_tokens"].as_u64() > Some(50), "{derived}");
    assert_eq!(json.get("started_at"), None, "nothing ran");
    assert!(!bench.path("runs").exists(), "nothing was written");
}

#[test]
fn the_same_recipe_is_the_same_run_wherever_it_lies() {
    let (a, b) = (Bench::new(), Bench::new());
    let elsewhere = b.path("elsewhere");
    let (a, b) = (a.plan().expect("valid"), b.plan_to(Some(&elsewhere)).expect("valid"));
    assert_eq!(a.run, b.run);
    assert!(b.output.ends_with("elsewhere"));
}

#[test]
fn mistakes_are_one_line_with_place_and_remedy() {
    let mut bench = Bench::new();
    fs::create_dir_all(bench.path("runs/one")).expect("created");
    bench.refused("output_dir: DIR/runs/one exists already; name a new directory");
    bench.recipe["output_dir"] = json!("model/run");
    bench.refused("output_dir: DIR/model/run and model.path DIR/model overlap");
    bench.recipe["output_dir"] = Value::Null;
    bench.refused("output_dir is missing: set it to a new directory, here or with --output");

    let mut bench = Bench::new();
    bench.recipe["model"]["sha256"] = json!(Digest::of(b"other"));
    bench.refused("DIR/model has ");
    bench.recipe["model"]["path"] = json!("nowhere");
    bench.refused("model.path DIR/nowhere: there is no such directory");

    let mut bench = Bench::new();
    bench.recipe["dataset"] = bench.write("train.jsonl", "{\"prompt\": \"p\"}\n");
    bench.refused("DIR/train.jsonl line 1: id is missing");
    let row = json!({"id": "eval-1", "prompt": "p", "task": {"split": "train"}}).to_string();
    bench.recipe["dataset"] = bench.write("train.jsonl", &row);
    bench.refused("evaluation.dataset: id \"eval-1\" is a training task too");

    let mut bench = Bench::new();
    bench.recipe["training"]["max_completion_length"] = json!(2000);
    bench.refused("training.max_completion_length: a prompt of ");
    bench.recipe["training"]["max_completion_length"] = json!(400);
    bench.recipe["reward"] = json!({"protocol": "trusted-milestones-v1"});
    bench.refused("needs the milestone lookup_success");
    bench.recipe["reward"] = Value::Null;
    bench.recipe["environment"] = json!({"name": "frames"});
    bench.refused(
        "environment: frames shows images, and the model takes none: neither its config.json",
    );
}

#[test]
fn a_template_without_tools_needs_a_system_prompt() {
    let mut bench = Bench::new();
    let template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n\
                    {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    fs::write(bench.path("model/chat_template.jinja"), template).expect("written");
    bench.freeze_model();
    bench.refused("system_prompt: the model's chat template has no place for tools");
    bench.recipe["system_prompt"] = json!("Tools:\n{tools}");
    let plan = bench.plan().expect("valid");
    assert!(!plan.manifest().policy_format.tools_in_template);
}

#[test]
fn a_model_that_cannot_be_loaded_is_refused_at_plan_time() {
    let mut bench = Bench::new();
    fs::write(bench.path("model/config.json"), r#"{"model_type": "gpt2"}"#).expect("written");
    bench.freeze_model();
    bench.refused("model.path DIR/model: ");
}

/// Plays one whole group and some more into a run's directory.
fn play(bench: &Bench) -> (Plan, RunDirectory) {
    let plan = bench.plan().expect("valid");
    let world = World::of(plan.audit_terms());
    let mut files = RunDirectory::create(&plan).expect("created");
    let rollouts: Vec<_> = (0..2)
        .map(|generation| {
            let lease = world.lease(0, generation, 5);
            let turns = if generation == 0 { world.bisection(&lease) } else { vec![text("no")] };
            world.accept(&world.play(&lease, &turns), &lease)
        })
        .collect();
    let context =
        EpisodeContext { step: 0, policy_step: 0, advantages: Some(&[0.5, -0.5]), sampling: &[] };
    files.episodes(&rollouts, &context).expect("written");
    files
        .episodes(
            &rollouts[..1],
            &EpisodeContext { step: 1, policy_step: 1, advantages: None, sampling: &[] },
        )
        .expect("written");
    let lease = world.lease(1, 0, 5);
    let mut forged = world.play(&lease, &[Say::Guess(9), text("no")]);
    forged.reward = 1.0;
    let rejected = world.audit(&forged, &lease).expect_err("forged");
    let body = forged.encode().expect("encodes");
    let answer = Answer {
        actor: ActorId(Digest::of(b"actor")),
        lease: lease.id,
        attempt: 0,
        behind: 0,
        device: "cpu",
        body: &body,
    };
    files.reject(&answer, &rejected).expect("written");
    files.step(&json!({"step": 1, "loss": 0.25}), 0.5).expect("written");
    (plan, files)
}

#[test]
fn a_run_leaves_a_manifest_evidence_metrics_and_rejections() {
    let bench = Bench::new();
    let (plan, mut files) = play(&bench);
    let running = read_manifest(files.path()).expect("readable");
    assert_eq!(running.status, Status::Running);
    files.evaluations(Some(&json!({"success": 0.25})), None);
    files.close(Status::Completed, "", &json!({"granted": 4}), None).expect("closed");

    let run = files.path();
    let manifest = read_manifest(run).expect("readable");
    assert_eq!((manifest.status, manifest.run), (Status::Completed, plan.run));
    let progress = manifest.progress.clone().expect("it ran");
    let coverage = &progress.task_coverage;
    assert_eq!((coverage.training_pool_rows, coverage.total_rollouts), (6, 2));
    assert_eq!((coverage.evaluation_rollouts, coverage.rejected_rollouts), (1, 1));
    assert_eq!(coverage.consumed_unique_task_ids, ["task-1"]);
    assert_eq!(progress.reward_groups.len(), 1);
    let update = progress.update_evidence;
    assert_eq!((update.mixed_reward_groups, update.nonzero_gradient_steps), (1, 1));
    assert_eq!(progress.rejections["reward_mismatch"], 1);
    assert_eq!(progress.leases["granted"], 4);

    let evidence = progress.evidence.expect("written");
    let mut rows = Vec::new();
    let found = verify_evidence(&run.join(&evidence.file), &plan.run, |row| {
        rows.push(row);
        Ok(())
    });
    assert_eq!(found.expect("a chain"), (evidence.rows, evidence.head));
    assert_eq!((rows.len(), rows[0].advantage, rows[2].advantage), (3, Some(0.5), None));
    assert_eq!(
        rows[0].messages[0]["content"],
        "Let us play. The number is between 1 and 8. You have 3 guesses."
    );
    assert!(rows[0].messages[1]["content"].as_str().unwrap_or_default().starts_with("<tool_call>"));
    assert_eq!(rows[0].messages[2]["role"], "tool");
    assert!(rows[0].policy_audit.replay_verified && rows[0].score.success);

    let rejected: Vec<_> = fs::read_dir(run.join("rejected")).expect("listed").collect();
    let path = rejected[0].as_ref().expect("an entry").path();
    let text = fs::read_to_string(path).expect("read");
    let rejected: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(
        (&rejected["rung"], &rejected["reason"]),
        (&json!("reward"), &json!("reward_mismatch"))
    );
    assert_eq!(rejected["episode"]["reward"], 1.0);
    let metrics = fs::read_to_string(run.join("metrics.jsonl")).expect("read");
    assert_eq!(metrics, "{\"step\":1,\"loss\":0.25}\n");
    assert!(run.join("tokenizer/tokenizer.json").is_file());
    assert!(
        RunDirectory::create(&plan).expect_err("there").to_string().starts_with("cannot create ")
    );
}

#[test]
fn the_best_and_the_last_adapter_are_kept_and_the_later_of_two_equals() {
    let bench = Bench::new();
    let plan = bench.plan().expect("valid");
    let mut files = RunDirectory::create(&plan).expect("created");
    let device = "cpu".parse::<policy::device::DeviceChoice>().expect("a device");
    let device = device.resolve().open().expect("opens");
    let checkpoint = Checkpoint::open(bench.path("model")).expect("a checkpoint");
    let decoder = checkpoint.load(&device, LoadDtype::F32).expect("loads");
    let mut write = |step: u32, measured: Option<(f64, f64)>| {
        let adapter = Adapter::init(&plan.recipe.lora.to_config(), &decoder, step.into())
            .expect("an adapter");
        let digest = Digest::of(&adapter.to_safetensors().expect("written"));
        let policy = PolicyFiles { adapter: &adapter, digest, base: "model", value_head: None };
        match measured {
            None => drop(files.adapter(step, policy).expect("written")),
            Some((success, reward)) => {
                let milestone_reward = None;
                let evaluated =
                    Evaluated { success, reward, milestone_reward, episodes: 1, malformed: 0.0 };
                files.keep_best(step, policy, &evaluated).expect("written");
            }
        }
        let progress = read_manifest(files.path()).expect("readable").progress.expect("it runs");
        let best = progress.best_adapter.map(|best| best.adapter.step);
        (best, progress.last_adapter.map(|last| last.step), progress.adapters.len())
    };
    assert_eq!(write(0, Some((0.2, 0.9))), (Some(0), None, 1));
    assert_eq!(write(2, Some((0.5, 0.3))), (Some(2), None, 2), "success comes before reward");
    assert_eq!(write(4, Some((0.5, 0.2))), (Some(2), None, 2), "a worse one is not written");
    assert_eq!(write(6, Some((0.5, 0.3))), (Some(6), None, 3), "the later of two equals");
    assert_eq!(write(8, None), (Some(6), Some(8), 4));
    assert_eq!(write(8, Some((0.6, 0.0))), (Some(8), Some(8), 4), "the last may be the best");
    let written = fs::read_dir(files.path().join("adapters")).expect("listed").count();
    assert_eq!(written, 4);
}

#[test]
fn tampering_with_the_evidence_breaks_its_chain() {
    let bench = Bench::new();
    let (plan, mut files) = play(&bench);
    files.close(Status::Completed, "", &json!({}), None).expect("closed");
    let path = files.path().join("evidence.jsonl");
    let head = |run| verify_evidence(&path, run, |_| Ok(())).map_err(|error| error.to_string());
    let honest = head(&plan.run).expect("a chain");
    let text = fs::read_to_string(&path).expect("read");
    let lines: Vec<&str> = text.lines().collect();

    let edited = text.replacen("\"training_reward\":1.0", "\"training_reward\":0.5", 1);
    assert_ne!(edited, text);
    let dropped = [lines[0], lines[2]].join("\n") + "\n";
    let swapped = [lines[1], lines[0], lines[2]].join("\n") + "\n";
    let torn = text.trim_end().to_owned();
    for (tampered, line) in [(edited, 2), (dropped, 2), (swapped, 1), (torn, 3)] {
        fs::write(&path, tampered).expect("written");
        let error = head(&plan.run).expect_err("damaged");
        assert!(error.contains(&format!("evidence.jsonl line {line}: ")), "{error}");
    }
    fs::write(&path, [lines[0], lines[1]].join("\n") + "\n").expect("written");
    assert_ne!(head(&plan.run).expect("a chain").1, honest.1, "a cut log has another head");
    fs::write(&path, &text).expect("written");
    let other = protocol::RunId(Digest::of(b"other"));
    assert!(head(&other).expect_err("another run").contains("line 1: "));
}

#[test]
fn refused_bytes_are_kept_up_to_a_bound_and_reasons_always() {
    let bench = Bench::new();
    let plan = bench.plan().expect("valid");
    let mut files = RunDirectory::create(&plan).expect("created");
    let body = vec![7; 24 << 20];
    for number in 0..4_u64 {
        let id = EpisodeId(Digest::of(&number.to_le_bytes()));
        let reason = Reason::BadFrame { problem: "noise".into() };
        let lease = LeaseId { group: number, generation: 0 };
        let rejected = Rejected { id, lease: Some(lease), reason, episode: None };
        let actor = ActorId(Digest::of(b"actor"));
        let answer = Answer { actor, lease, attempt: 0, behind: 0, device: "cpu", body: &body };
        files.reject(&answer, &rejected).expect("written");
    }
    let mut reader = JournalReader::open(files.path().join("journal"), plan.run).expect("there");
    let mut kept = Vec::new();
    while let Some(entry) = reader.read().expect("whole") {
        match entry.record().expect("a record") {
            Record::Rejected { reason, body, .. } => kept.push((reason.to_owned(), body.is_some())),
            other => panic!("{other:?}"),
        }
    }
    let named = |kept| ("bad_frame".to_owned(), kept);
    assert_eq!(kept, [named(true), named(true), named(false), named(false)]);
    let coverage = read_manifest(files.path()).expect("there").progress.expect("it runs");
    let coverage = coverage.task_coverage;
    assert_eq!((coverage.rejected_rollouts, coverage.rejected_bytes), (4, 48 << 20));
}
