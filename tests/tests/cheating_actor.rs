//! A learner with an actor that samples from other weights than it says: nothing that it sends is
//! learned from, it is cut off, and the run is completed by the honest one.

use std::{path::Path, process::Command, sync::Arc, time::Duration};

use actor::{
    player::Player,
    session::{SessionOptions, Stay, serve},
};
use environments::EnvironmentSpec;
use learner::plan::plan_inputs;
use policy::{
    device::DeviceChoice,
    engine::{Engine, EngineConfig},
    model::{Checkpoint, LoadDtype, checkpoint_digests},
};
use protocol::{
    Hello, Identity, Join, ModelDigests,
    endpoint::{ActorEndpoint, LinkConfig},
};
use serde_json::{Value, json};
use tests::{Demo, finish, programs, rollouts::rounded, start};
use tokio::sync::watch;

/// Plays for a learner with weights of 4 bits, until the learner ends it. Returns its last words.
fn cheat(join: Join, recipe: &Path) -> String {
    let plan = plan_inputs(recipe).expect("a valid recipe");
    let model = plan.recipe.model.path.clone();
    let digests = checkpoint_digests(&model).expect("a checkpoint");
    let device = DeviceChoice::Cpu.open().expect("the processor");
    let checkpoint = Checkpoint::open(&model).expect("a checkpoint");
    let decoder = checkpoint.load(&device, LoadDtype::F32).expect("loads");
    let options = SessionOptions {
        hello: Hello::new(
            ModelDigests {
                weights: digests.weights,
                tokenizer: digests.tokenizer,
                template: digests.template,
            },
            "cpu",
            16,
        ),
        patience: Duration::from_secs(60),
        base: digests.weights,
        cap: 1 << 30,
        grace: Duration::ZERO,
        metrics: actor::metrics::Metrics::default(),
    };
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let outcome = runtime.block_on(async {
        let (_leave, left) = watch::channel(Stay::Yes);
        let identity = Identity::generate().expect("an identity");
        let endpoint = ActorEndpoint::new(join, identity, LinkConfig::default());
        serve(&endpoint, options, None, left, |_| {
            let engine = Engine::new(rounded(&decoder, 4), EngineConfig::default());
            let engine = engine.expect("an engine");
            let limits = plan.recipe.training.episode_limits();
            let environment: EnvironmentSpec = plan.recipe.environment.clone();
            let player = Player::new(engine, Arc::clone(&plan.format), environment, limits)
                .with_images(plan.images.clone());
            Ok((player, decoder.clone()))
        })
        .await
    });
    match outcome {
        Ok(reason) => reason,
        Err(failure) => failure.to_string(),
    }
}

#[test]
fn an_actor_with_other_weights_is_cut_off_and_nothing_of_it_is_learned_from() {
    let mut demo = Demo::new(4);
    demo.recipe["training"]["failure_policy"] = json!("quarantine");
    demo.recipe["audit"] = json!({"sampling": "enforce", "quarantine_after": 2});
    demo.recipe.as_object_mut().expect("an object").remove("evaluation");
    let recipe = demo.write();
    let mut train = Command::new(&programs().learner);
    train.arg("train").arg(&recipe).args(["--device", "cpu", "--json"]);
    let learner = start(&mut train);
    let join = learner.event("listening")["join"].as_str().expect("a join string").to_owned();
    let last_words = cheat(join.parse().expect("a join string"), &recipe);
    assert!(last_words.contains("shut out"), "{last_words}");

    let mut honest = Command::new(&programs().actor);
    let model = demo.recipe["model"]["path"].as_str().expect("a path");
    honest.args(["join", "--device", "cpu", "--model", model]).env("ROLLCALL_JOIN", &join);
    let honest = start(&mut honest);
    let learner = finish(learner);
    assert!(learner.status.success(), "{}", learner.stderr);
    finish(honest);
    let end: Value =
        serde_json::from_str(learner.stdout.lines().last().expect("a line")).expect("JSON");
    assert_eq!((&end["status"], &end["steps"]), (&json!("completed"), &json!(4)));
    assert_eq!(end["counts"]["cut_off"], 1);
    assert!(end["counts"]["rejected"].as_u64() >= Some(2), "{end}");

    let output = demo.run();
    let rejected: Vec<Value> = std::fs::read_dir(output.join("rejected"))
        .expect("there are some")
        .map(|file| {
            let text = std::fs::read(file.expect("a file").path()).expect("reads");
            serde_json::from_slice(&text).expect("JSON")
        })
        .collect();
    assert!(rejected.iter().all(|it| it["rung"] == "sampling"), "{rejected:?}");
    let evidence = std::fs::read_to_string(output.join("evidence.jsonl")).expect("reads");
    for it in &rejected {
        let id = it["episode_id"].as_str().expect("an id");
        assert!(!evidence.contains(id), "{id} was learned from");
    }

    let mut audit = Command::new(&programs().learner);
    audit.arg("audit").arg(&output).args(["--model", model, "--sampling", "40", "--json"]);
    let audit = finish(start(&mut audit));
    assert!(audit.status.success(), "{}{}", audit.stdout, audit.stderr);
    let report: Value = serde_json::from_str(audit.stdout.trim()).expect("JSON");
    let sampling = report["checks"].as_array().expect("checks").last().expect("one").clone();
    assert_eq!((&sampling["name"], &sampling["holds"]), (&json!("sampling"), &json!(true)));
    assert!(sampling["looked_at"].as_str().expect("a text").starts_with("40 episodes"));
}
