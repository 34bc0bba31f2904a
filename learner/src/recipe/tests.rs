//! Whole recipes: what is accepted, what is filled in, and what each mistake says.

mod algorithm;

use std::path::Path;

use protocol::Digest;
use serde_json::{Value, json};

use super::*;

const HASH: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

fn minimal() -> Value {
    json!({
        "schema_version": 1,
        "model": {"path": "model", "sha256": HASH},
        "dataset": {"path": "train.jsonl", "sha256": HASH},
        "output_dir": "runs/one",
        "environment": {"name": "guess"},
    })
}

/// `minimal()` with one value replaced; `null` removes it.
fn with(path: &str, value: Value) -> Value {
    let mut recipe = minimal();
    let mut at = &mut recipe;
    for key in path.split('.') {
        at = &mut at[key];
    }
    *at = value;
    recipe
}

fn read(recipe: &Value) -> Result<Recipe, String> {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("recipe.json");
    std::fs::write(&path, recipe.to_string()).expect("written");
    Recipe::read(&path).map_err(|error| error.to_string())
}

#[track_caller]
fn refused(path: &str, value: Value, message: &str) {
    let error = read(&with(path, value)).expect_err("refused");
    assert_eq!(error, message);
}

#[test]
fn defaults_are_those_of_the_pilot_where_it_has_them() {
    let recipe = read(&minimal()).expect("valid");
    let settings = recipe.settings();
    let training = &settings["training"];
    for (key, value) in [
        ("max_steps", json!(32)),
        ("num_generations", json!(4)),
        ("per_device_train_batch_size", json!(4)),
        ("gradient_accumulation_steps", json!(1)),
        ("max_completion_length", json!(768)),
        ("max_tool_calling_iterations", json!(3)),
        ("learning_rate", json!(1e-5)),
        ("beta", json!(0.02)),
        ("temperature", json!(0.6)),
        ("top_p", json!(0.95)),
        ("top_k", json!(20)),
        ("min_p", json!(0.0)),
        ("epsilon", json!(0.2)),
        ("epsilon_high", json!(0.2)),
        ("loss_type", json!("grpo")),
        ("scale_rewards", json!("group")),
        ("max_grad_norm", json!(1.0)),
        ("on_malformed", json!("observe")),
        ("failure_policy", json!("abort")),
    ] {
        assert_eq!(training[key], value, "{key}");
    }
    let lora = json!({"r": 16, "alpha": 32.0, "dropout": 0.0, "target_modules": "all-linear", "use_rslora": false});
    assert_eq!(settings["lora"], lora);
    assert_eq!((recipe.seed, recipe.reward), (42, crate::reward::Rewards::default()));
}

#[test]
fn settings_read_back_to_themselves() {
    let mut recipe = minimal();
    recipe["evaluation"] = json!({"dataset": {"path": "eval.jsonl", "sha256": HASH}});
    let first = read(&recipe).expect("valid").settings();
    let mut again = first.clone();
    for path in ["/model", "/dataset", "/evaluation/dataset"] {
        let file = again.pointer_mut(path).expect("a frozen file");
        file["path"] = json!("elsewhere");
    }
    assert_eq!(read(&again).expect("valid").settings(), first);
}

#[test]
fn several_rewards_are_weighed_and_read_back() {
    let weights = |weights: Value| json!({"weights": weights});
    let both = weights(json!({"trusted-milestones-v1": 0.5, "environment": 2}));
    let recipe = read(&with("reward", both)).expect("valid");
    let settings = recipe.settings();
    let written = json!({"weights": {"environment": 2.0, "trusted-milestones-v1": 0.5}});
    assert_eq!(settings["reward"], written);
    assert_eq!(read(&with("reward", written)).expect("valid").reward, recipe.reward);
    let one = read(&with("reward", weights(json!({"environment": 1.0})))).expect("valid");
    assert_eq!(one.settings()["reward"], json!({"protocol": "environment"}));
    refused(
        "reward",
        weights(json!({"milestones": 1})),
        "reward.weights.milestones is unknown: remove it or use one of environment, \
         trusted-milestones-v1",
    );
    refused(
        "reward",
        weights(json!({"environment": -1})),
        "reward.weights.environment must be a number from 0 to 1000, not -1",
    );
    refused(
        "reward",
        weights(json!({"environment": 0})),
        "reward.weights: no weight is above 0; weigh one of the protocols at least",
    );
    refused(
        "reward",
        json!({"protocol": "environment", "weights": {"environment": 1}}),
        "reward.protocol: weights name protocols too; remove one of them",
    );
}

#[test]
fn paths_are_relative_to_the_recipe() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("recipe.json");
    std::fs::write(&path, minimal().to_string()).expect("written");
    let recipe = Recipe::read(&path).expect("valid");
    assert_eq!(recipe.model.path, dir.path().join("model"));
    assert_eq!(recipe.output_dir, Some(dir.path().join("runs/one")));
    assert_eq!(recipe.sha256, Digest::of(minimal().to_string().as_bytes()));
}

#[test]
fn unknown_keys_are_refused_by_name_with_the_nearest_known_one() {
    refused("sead", json!(1), "sead is unknown: did you mean seed?");
    refused(
        "training",
        json!({"max_step": 3}),
        "training.max_step is unknown: did you mean training.max_steps?",
    );
    refused("model.sha", json!(HASH), "model.sha is unknown: did you mean model.sha256?");
    refused(
        "lora",
        json!({"rank": 3}),
        "lora.rank is unknown: remove it or use one of r, alpha, dropout, target_modules, use_rslora",
    );
    refused(
        "evaluation",
        json!({"evry": 1}),
        "evaluation.evry is unknown: did you mean evaluation.every?",
    );
    refused(
        "environment",
        json!({"name": "guess", "m": 1}),
        "environment.m is unknown: remove it or use one of limits, max_turns, n, name",
    );
}

#[test]
fn missing_fields_say_what_to_set() {
    for (path, message) in [
        ("schema_version", "schema_version is missing: set it to an integer from 1 to 1"),
        ("model", "model is missing: set it to an object with path and sha256"),
        ("model.sha256", "model.sha256 is missing: set it to a SHA-256 of 64 hex digits"),
        (
            "dataset.path",
            "dataset.path is missing: set it to a path, relative to the recipe's directory",
        ),
        ("environment", "environment is missing: set it to an object with a name"),
    ] {
        refused(path, Value::Null, message);
    }
}

#[test]
fn wrong_types_and_bounds_name_field_found_and_allowed() {
    refused("schema_version", json!(2), "schema_version must be an integer from 1 to 1, not 2");
    refused(
        "schema_version",
        json!("1"),
        "schema_version must be an integer from 1 to 1, not \"1\"",
    );
    refused(
        "model.sha256",
        json!("abc"),
        "model.sha256 must be a SHA-256 of 64 hex digits, not \"abc\"",
    );
    refused("seed", json!(-1), "seed must be an integer from 0 to 18446744073709551615, not -1");
    refused("training", json!([]), "training must be a JSON object, not []");
    for (key, value, message) in [
        ("max_steps", json!(0), "an integer from 1 to 1000000, not 0"),
        ("max_steps", json!(3.0), "an integer from 1 to 1000000, not 3.0"),
        ("num_generations", json!(1), "an integer from 2 to 1024, not 1"),
        ("temperature", json!(0), "a number above 0 and at most 100, not 0"),
        ("top_p", json!(1.5), "a number above 0 and at most 1, not 1.5"),
        ("learning_rate", json!(-1e-5), "a number from 0 to 1, not -0.00001"),
        ("beta", json!(true), "a number from 0 to 100, not true"),
        ("epsilon", json!(1), "a number above 0 and at most 0.999999, not 1"),
        (
            "loss_type",
            json!("gspo"),
            "one of \"grpo\", \"dr_grpo\", \"dapo\", \"cispo\", not \"gspo\"",
        ),
        (
            "algorithm",
            json!("bnpo"),
            "one of \"grpo\", \"dr_grpo\", \"dapo\", \"gspo\", \"cispo\", \"rloo\", \"ppo\", not \"bnpo\"",
        ),
        ("delta", json!(1), "a number above 1 and at most 1000000, not 1"),
        ("value", json!(true), "a JSON object, not true"),
        ("scale_rewards", json!("batch"), "one of \"group\", \"none\", not \"batch\""),
        ("num_iterations", json!(0), "an integer from 1 to 1000, not 0"),
        (
            "failure_policy",
            json!("ignore"),
            "one of \"abort\", \"drop\", \"quarantine\", not \"ignore\"",
        ),
        ("gradient_checkpointing", json!(1), "true or false, not 1"),
    ] {
        refused("training", json!({key: value}), &format!("training.{key} must be {message}"));
    }
}

#[test]
fn a_batch_is_a_whole_number_of_groups() {
    refused(
        "training",
        json!({"num_generations": 4, "per_device_train_batch_size": 6}),
        "training.per_device_train_batch_size: 6 rollouts are no whole number of groups; \
         use a multiple of training.num_generations (4)",
    );
    let training = json!({"num_generations": 4, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 3});
    let recipe = read(&with("training", training)).expect("valid");
    assert_eq!(recipe.training.groups_per_step(), 6);
}

#[test]
fn the_template_keeps_its_own_inputs() {
    refused(
        "chat_template_kwargs",
        json!({"tools": []}),
        "chat_template_kwargs.tools: the episode decides it; remove it",
    );
}

#[test]
fn the_run_id_depends_on_what_decides_a_run_and_on_nothing_else() {
    let id = |recipe: &Value| {
        let recipe = read(recipe).expect("valid");
        run_id("online", &recipe.settings(), Some(recipe.environment.digest()))
    };
    let base = id(&minimal());
    assert_eq!(base, id(&with("output_dir", json!("elsewhere"))));
    assert_eq!(base, id(&with("model.path", json!("copy"))));
    assert_eq!(
        base,
        id(&with("training", json!({"max_steps": 32}))),
        "a default that is spelled out"
    );
    for other in [
        with("seed", json!(43)),
        with("training", json!({"max_steps": 33})),
        with("environment", json!({"name": "guess", "n": 9})),
        with("dataset.sha256", json!(HASH.replace('e', "f"))),
        with("system_prompt", json!("Be brief.")),
    ] {
        assert_ne!(base, id(&other), "{other}");
    }
    let recipe = read(&minimal()).expect("valid");
    assert_ne!(
        base,
        run_id("online", &recipe.settings(), None),
        "another version of the environment"
    );
}

#[test]
fn files_that_are_no_recipes_are_named() {
    let error = Recipe::read(Path::new("no/such/recipe.json")).expect_err("absent").to_string();
    assert!(error.starts_with("recipe no/such/recipe.json cannot be read: "), "{error}");
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("r.json");
    std::fs::write(&path, r#"{"seed": 1, "seed": 2}"#).expect("written");
    let error = Recipe::read(&path).expect_err("repeated").to_string();
    let twice =
        "r.json: not valid JSON: the key \"seed\" stands twice at line 1 column 18; mend it";
    assert!(error.contains(twice), "{error}");
    std::fs::write(&path, "// a recipe\n{\"seed\": 1, // text\n\"seed\": 2}").expect("written");
    let error = Recipe::read(&path).expect_err("repeated").to_string();
    assert!(error.contains("stands twice at line 3 column 6"), "{error}");
    std::fs::write(&path, "[]").expect("written");
    let error = Recipe::read(&path).expect_err("a list").to_string();
    assert_eq!(error, "the recipe must be a JSON object, not []");
}

fn sft(recipe: Value) -> Result<SftRecipe, String> {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("recipe.json");
    std::fs::write(&path, recipe.to_string()).expect("written");
    SftRecipe::read(&path).map_err(|error| error.to_string())
}

fn minimal_sft() -> Value {
    json!({
        "schema_version": 1,
        "model": {"path": "model", "sha256": HASH},
        "dataset": {"path": "games.jsonl", "sha256": HASH},
    })
}

#[test]
fn sft_recipes_share_the_house_rules() {
    let recipe = sft(minimal_sft()).expect("valid");
    assert_eq!(
        (recipe.trainable, recipe.training.optimizer.learning_rate),
        (Trainable::Lora, 1e-4)
    );
    let mut all = minimal_sft();
    all["trainable"] = json!("all");
    all["training"] = json!({"num_train_epochs": 3, "per_device_train_batch_size": 10});
    let recipe = sft(all.clone()).expect("valid");
    assert_eq!((recipe.training.updates(25), recipe.settings().get("lora")), (9, None));
    all["lora"] = json!({"r": 4});
    assert!(
        sft(all).expect_err("refused").starts_with("lora: trainable \"all\" trains no adapter")
    );
    let mut both = minimal_sft();
    both["training"] = json!({"max_updates": 3});
    assert_eq!(sft(both.clone()).expect("valid").training.max_steps, 3);
    both["training"]["max_steps"] = json!(3);
    assert!(sft(both).expect_err("refused").starts_with("training.max_updates: max_steps says"));
    let mut rows = minimal_sft();
    rows["prompt"] = json!("Find {{ name }}.");
    let rows = sft(rows).expect("valid");
    assert_eq!((rows.training.optimizer.warmup_steps, rows.training.max_length), (10, 4096));
    assert_eq!(rows.settings()["chat_template_kwargs"], json!({"enable_thinking": false}));
    let mut typo = minimal_sft();
    typo["trainabel"] = json!("all");
    assert_eq!(sft(typo).expect_err("refused"), "trainabel is unknown: did you mean trainable?");
}

#[test]
fn conversations_are_checked_by_line() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("games.jsonl");
    let good = json!({"messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "content": "ok"},
    ], "tools": [{}]});
    let read = |second: Value| {
        let text = format!("{good}\n{second}\n");
        std::fs::write(&path, &text).expect("written");
        let sha256 = Digest::of(text.as_bytes());
        let file = Frozen { field: "dataset".into(), path: path.clone(), sha256 };
        read_conversations(&file).map_err(|error| error.to_string())
    };
    assert_eq!(read(good.clone()).expect("valid").len(), 2);
    for (row, message) in [
        (json!({}), "messages is missing: add a list of messages"),
        (json!({"messages": []}), "messages must be a list of messages, not []"),
        (
            json!({"messages": [{"role": "user", "content": "x"}]}),
            "messages have no assistant turn: there is nothing to learn; add one or take the row out",
        ),
        (
            json!({"messages": [{"role": "bot", "content": "x"}]}),
            "messages[0].role must be system, user, assistant or tool, not \"bot\"",
        ),
        (
            json!({"messages": [{"role": "assistant"}]}),
            "messages[0].content must be a text, not absent",
        ),
    ] {
        let error = read(row).expect_err("refused");
        assert!(error.ends_with(&format!("games.jsonl line 2: {message}")), "{error}");
    }
}

/// Every key of every object in `value`.
fn keys(value: &Value, found: &mut std::collections::BTreeSet<String>) {
    if let Value::Object(object) = value {
        for (key, value) in object {
            found.insert(key.clone());
            keys(value, found);
        }
    }
}

#[test]
fn the_reference_page_has_every_key() {
    let page = include_str!("../../../docs/recipes.md");
    let mut recipe = minimal();
    recipe["evaluation"] = json!({"dataset": {"path": "eval.jsonl", "sha256": HASH}});
    let mut settings = read(&recipe).expect("valid").settings();
    settings["environment"] = json!({});
    let mut found = std::collections::BTreeSet::new();
    keys(&settings, &mut found);
    keys(&sft(minimal_sft()).expect("valid").settings(), &mut found);
    let optional = [
        online::KEYS,
        TrainingSettings::KEYS,
        ValueSettings::KEYS,
        LoraSettings::KEYS,
        audit::KEYS,
        sft::KEYS,
        sft::TRAINING_KEYS,
    ];
    found.extend(optional.into_iter().flatten().map(|key| (*key).to_owned()));
    let missing: Vec<&String> = found
        .iter()
        .filter(|key| !page.contains(&format!("`{key}`")) && !page.contains(&format!(".{key}`")))
        .filter(|key| *key != "sha256")
        .collect();
    assert!(missing.is_empty(), "docs/recipes.md does not speak of {missing:?}");
}

#[test]
fn recorded_environments_need_a_recipe_that_allows_them() {
    let guess = read(&minimal()).expect("valid");
    let mut described = guess.environment.describe().expect("opens");
    guess.evidence.check(&described).expect("deterministic");
    described.determinism = environments::Determinism::Recorded;
    assert_eq!(
        guess.evidence.check(&described).expect_err("refused").to_string(),
        "environment: guess is recorded: its episodes cannot be played again; set \
         evidence.allow_recorded to true to take them as actors recorded them, or take its \
         randomness from the seed; `actor check` says what differs"
    );
    let allowed = read(&with("evidence", json!({"allow_recorded": true}))).expect("valid");
    allowed.evidence.check(&described).expect("allowed");
    refused(
        "evidence",
        json!({"archive_mib": -1}),
        "evidence.archive_mib must be an integer from 0 to 16777216, not -1",
    );
}

#[test]
fn what_a_run_keeps_of_itself_does_not_make_it_another_run() {
    let id = |recipe: &Recipe| run_id("online", &recipe.settings(), None);
    let small = read(&with("evidence", json!({"archive_mib": 0}))).expect("valid");
    let other = read(&with("seed", json!(1))).expect("valid");
    let plain = read(&minimal()).expect("valid");
    assert_eq!(id(&plain), id(&small));
    assert_ne!(id(&plain), id(&other));
    let again = Recipe::from_settings(&small.settings(), Path::new("elsewhere")).expect("valid");
    assert_eq!(
        (again.settings(), again.model.path.as_path()),
        (small.settings(), Path::new("elsewhere"))
    );
}

#[test]
fn an_adapter_to_start_from_makes_another_run_and_brings_its_own_settings() {
    let adapter = json!({"path": "sft", "sha256": "0".repeat(64)});
    let recipe = with("adapter", adapter);
    let read_back = read(&recipe).expect("valid");
    let again = Recipe::from_settings(&read_back.settings(), Path::new("m")).expect("valid");
    assert_eq!(again.settings(), read_back.settings());
    assert_ne!(read_back.settings(), read(&minimal()).expect("valid").settings());
    let mut both = recipe;
    both["lora"] = json!({"r": 4});
    let error = read(&both).expect_err("two adapters");
    let want =
        "lora: the adapter that the run starts from has settings of its own; remove it, or adapter";
    assert_eq!(error, want);
}
