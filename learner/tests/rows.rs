//! Rows of an image, a name and a code: what `learner sft` and `learner ppo` make of them equals what
//! PyTorch, transformers and PEFT make of them (`scripts/golden/rows.py`), and a round that stopped goes
//! on bit for bit.

use std::{
    fs,
    path::{Path, PathBuf},
};

use learner::{
    ppo::{self, PpoOptions, PpoSummary},
    ranks::Ranks,
    recipe::PpoInputs,
    sft::{self, SftOptions, SftSummary},
};
use policy::{device::DeviceChoice, model::checkpoint_digests};
use protocol::Digest;
use safetensors::SafeTensors;
use serde_json::{Value, json};
use terminal::{Audience, Failure, Interrupt, Progress};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/rows")
}

fn numbers() -> Value {
    let text = fs::read_to_string(golden().join("golden.json")).expect("goldens");
    serde_json::from_str(&text).expect("JSON")
}

fn frozen(path: &Path) -> Value {
    let sha256 = if path.is_dir() {
        checkpoint_digests(path).expect("a checkpoint").all
    } else {
        Digest::of(&fs::read(path).expect("a file"))
    };
    json!({"path": path, "sha256": sha256})
}

fn sft_recipe(updates: u32) -> Value {
    let (dir, numbers) = (golden(), numbers());
    json!({
        "schema_version": 1,
        "model": frozen(&dir.join("model")),
        "dataset": frozen(&dir.join("sft.jsonl")),
        "valid": frozen(&dir.join("valid.jsonl")),
        "prompt": numbers["prompt"],
        "lora": {"r": 4, "alpha": 8, "target_modules": numbers["modules"]},
        "training": {
            "num_train_epochs": 2, "per_device_train_batch_size": 4, "max_updates": updates,
            "learning_rate": numbers["sft_learning_rate"],
        },
    })
}

fn ppo_recipe(max_updates: u32) -> Value {
    let (dir, numbers) = (golden(), numbers());
    json!({
        "schema_version": 1,
        "model": frozen(&dir.join("model")),
        "rows": frozen(&dir.join("ppo.jsonl")),
        "adapter": frozen(&dir.join("start")),
        "reference": frozen(&dir.join("reference")),
        "prompt": numbers["prompt"],
        "training": {
            "num_train_epochs": 3, "per_device_train_batch_size": 4, "max_updates": max_updates,
            "gradient_accumulation_steps": 2, "learning_rate": numbers["ppo_learning_rate"],
        },
    })
}

fn written(dir: &Path, recipe: &Value) -> PathBuf {
    let path = dir.join("recipe.json");
    fs::write(&path, recipe.to_string()).expect("written");
    path
}

fn run_sft(dir: &Path, recipe: &Value) -> Result<SftSummary, Failure> {
    let output = Some(dir.join("run"));
    let options =
        SftOptions { output, resume: false, device: DeviceChoice::Cpu, tensorboard: false };
    let mut progress = Progress::new(Audience::Machine);
    sft::run(&written(dir, recipe), &options, &Interrupt::default(), &mut progress, alone)
}

fn alone(_: Digest) -> Result<Ranks, Failure> {
    Ok(Ranks::alone())
}

fn run_ppo(
    dir: &Path,
    recipe: &Value,
    inputs: PpoInputs,
    resume: bool,
) -> Result<PpoSummary, Failure> {
    let output = Some(dir.join("run"));
    let options =
        PpoOptions { inputs, output, resume, device: DeviceChoice::Cpu, no_tensorboard: true };
    let mut progress = Progress::new(Audience::Machine);
    ppo::run(&written(dir, recipe), &options, &Interrupt::default(), &mut progress, alone)
}

/// The lines of `metrics.jsonl` that are updates.
fn update_lines(run: &Path) -> Vec<Value> {
    let mut all = lines(&run.join("metrics.jsonl"));
    all.retain(|line| line["update"].is_u64());
    all
}

fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).expect("lines");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

fn close(what: &str, found: &Value, expected: &Value, tolerance: f64) {
    let (found, expected) = (found.as_f64().expect(what), expected.as_f64().expect(what));
    let off = (found - expected).abs();
    assert!(off <= tolerance, "{what}: {found}, the reference has {expected}");
}

/// The largest difference between two adapters, and how far the second is from `start`.
fn compare(found: &Path, expected: &Path, start: &Path) -> (f32, f32) {
    let read = |path: &Path| fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let (found, expected, start) = (read(found), read(expected), read(start));
    let of = |bytes| SafeTensors::deserialize(bytes).expect("safetensors");
    let (found, expected, start) = (of(&found), of(&expected), of(&start));
    let mut names = (found.names(), expected.names());
    names.0.sort_unstable();
    names.1.sort_unstable();
    assert_eq!(names.0, names.1);
    let (mut off, mut moved) = (0.0_f32, 0.0_f32);
    for name in names.1 {
        let values = |file: &SafeTensors<'_>| -> Vec<f32> {
            let view = file.tensor(name).expect("a tensor");
            let bytes = view.data().chunks_exact(4);
            bytes.map(|b| f32::from_le_bytes(b.try_into().expect("four bytes"))).collect()
        };
        let (found, expected, start) = (values(&found), values(&expected), values(&start));
        let largest = |a: &[f32], b: &[f32]| {
            assert_eq!(a.len(), b.len(), "{name}");
            a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
        };
        off = off.max(largest(&found, &expected));
        moved = moved.max(largest(&expected, &start));
    }
    (off, moved)
}

#[test]
fn supervised_rows_equal_the_references() {
    for (updates, name) in [(1_u32, "1"), (5, "5")] {
        let dir = tempfile::tempdir().expect("a directory");
        let summary = run_sft(dir.path(), &sft_recipe(updates)).expect("trains");
        let expected = &numbers()["sft"][name];
        let run = dir.path().join("run");
        let metrics = update_lines(&run);
        let reference = expected["updates"].as_array().expect("updates");
        assert_eq!((metrics.len(), summary.updates), (reference.len(), updates.into()));
        for (found, expected) in metrics.iter().zip(reference) {
            close("loss", &found["loss"], &expected["loss"], 1e-4);
            close("learning rate", &found["learning_rate"], &expected["learning_rate"], 1e-12);
            close("gradient norm", &found["grad_norm"], &expected["grad_norm"], 1e-3);
        }
        let [before, after] = summary.accuracy.expect("held-out rows");
        let all = lines(&run.join("metrics.jsonl"));
        let measured = all.iter().filter(|line| line["evaluation"].is_object());
        let measured: Vec<_> = measured.map(|it| (&it["step"], &it["evaluation"])).collect();
        assert_eq!(measured.first(), Some(&(&json!(0), &json!(before))));
        assert_eq!(measured.last(), Some(&(&json!(updates), &json!(after))));
        assert_eq!(json!(before), expected["before"]);
        assert_eq!(json!(after), expected["after"]);
        let mut valid = expected["after"].clone();
        valid["epoch"] = json!(if updates == 1 { 1 } else { 2 });
        valid["updates"] = json!(updates);
        assert_eq!(lines(&run.join("valid.json")), [valid]);
        let (off, _) = compare(
            &run.join("adapter/adapter_model.safetensors"),
            &golden().join(format!("sft-{name}.safetensors")),
            &golden().join("start/adapter_model.safetensors"),
        );
        println!("sft after {updates}: adapter off by {off:.1e}");
        assert!(off <= 1e-4, "off by {off}");
    }
}

#[test]
fn rounds_of_rows_equal_the_references() {
    for (updates, name) in [(1_u32, "1"), (5, "5")] {
        let dir = tempfile::tempdir().expect("a directory");
        let summary =
            run_ppo(dir.path(), &ppo_recipe(updates), PpoInputs::default(), false).expect("trains");
        let expected = &numbers()["ppo"][name];
        let stats = json!(summary.stats.expect("statistics"));
        for key in ["pg_loss", "kl", "clip_frac", "logp_gap", "logp_gap_abs"] {
            // Four decimal places are written down.
            close(key, &stats[key], &expected[key], 1e-4 + 5e-5);
        }
        assert_eq!(stats["rows"], expected["rows"]);
        let run = dir.path().join("run");
        assert_eq!(lines(&run.join("stats.json")), [stats]);
        let norms = expected["grad_norms"].as_array().expect("norms");
        for (found, expected) in update_lines(&run).iter().zip(norms) {
            close("gradient norm", &found["grad_norm"], expected, 1e-3);
        }
        let (off, moved) = compare(
            &run.join("adapter/adapter_model.safetensors"),
            &golden().join(format!("ppo-{name}.safetensors")),
            &golden().join("start/adapter_model.safetensors"),
        );
        println!("ppo after {updates}: adapter off by {off:.1e}, moved by {moved:.1e}");
        assert!(off <= 1e-4, "off by {off}");
        assert!(moved > 1e-3, "moved by {moved}");
    }
}

/// Adapter, optimizer and statistics of a run, the time left out.
fn left_behind(dir: &Path) -> (Vec<u8>, Vec<u8>, Value) {
    let run = dir.join("run");
    let read = |name: &str| fs::read(run.join(name)).expect("a file");
    let mut stats = lines(&run.join("stats.json")).remove(0);
    stats.as_object_mut().expect("an object").remove("train_s");
    let adapter = read("adapter/adapter_model.safetensors");
    (adapter, read("adapter/optimizer.safetensors"), stats)
}

#[test]
fn a_round_that_stopped_anywhere_goes_on_bit_for_bit() {
    let whole = tempfile::tempdir().expect("a directory");
    run_ppo(whole.path(), &ppo_recipe(0), PpoInputs::default(), false).expect("trains");
    let expected = left_behind(whole.path());
    // Two updates an epoch: inside of the first, at its end, inside of the last.
    for stop in [1, 2, 5] {
        let dir = tempfile::tempdir().expect("a directory");
        let until = PpoInputs { max_updates: Some(stop), ..PpoInputs::default() };
        let summary = run_ppo(dir.path(), &ppo_recipe(0), until, false).expect("trains");
        assert_eq!((summary.updates, summary.status), (stop.into(), "completed"));
        assert_ne!(left_behind(dir.path()).0, expected.0);
        let summary = run_ppo(dir.path(), &ppo_recipe(0), PpoInputs::default(), true);
        assert_eq!(summary.expect("goes on").updates, 6);
        assert_eq!(left_behind(dir.path()), expected, "stopped after {stop}");
    }
    // A launcher repeats its command: whether the run is complete, or has not begun.
    for dir in [whole, tempfile::tempdir().expect("a directory")] {
        let summary = run_ppo(dir.path(), &ppo_recipe(0), PpoInputs::default(), true);
        let summary = summary.expect("there is nothing left to do");
        assert_eq!((summary.updates, summary.status), (6, "completed"));
        assert_eq!(left_behind(dir.path()), expected);
        assert_eq!(update_lines(&dir.path().join("run")).len(), 6);
        refused(dir.path());
    }
}

/// To go on with a run by another recipe, or in a directory of something else.
fn refused(whole: &Path) {
    let taken = tempfile::tempdir().expect("a directory");
    fs::create_dir(taken.path().join("run")).expect("made");
    let error = run_ppo(taken.path(), &ppo_recipe(0), PpoInputs::default(), true);
    assert!(error.expect_err("no run").to_string().contains("exists already"));
    let mut recipe = ppo_recipe(0);
    recipe["training"]["beta"] = json!(0.5);
    let error = run_ppo(whole, &recipe, PpoInputs::default(), true).expect_err("another");
    assert!(error.to_string().contains("had other rows, adapters or settings"), "{error}");
}

#[test]
fn a_stopped_round_goes_on_at_the_learning_rates_that_it_would_have_had() {
    let recipe = || {
        let mut recipe = ppo_recipe(0);
        recipe["training"]["lr_scheduler_type"] = json!("cosine");
        recipe
    };
    let whole = tempfile::tempdir().expect("a directory");
    run_ppo(whole.path(), &recipe(), PpoInputs::default(), false).expect("trains");
    let dir = tempfile::tempdir().expect("a directory");
    let until = PpoInputs { max_updates: Some(3), ..PpoInputs::default() };
    run_ppo(dir.path(), &recipe(), until, false).expect("trains");
    run_ppo(dir.path(), &recipe(), PpoInputs::default(), true).expect("goes on");
    assert_eq!(left_behind(dir.path()), left_behind(whole.path()));
}

/// A checkpoint that writes digits, and an adapter over it: what rounds are sampled from.
fn taught(dir: &Path) -> (PathBuf, PathBuf) {
    let (whole, lora) = (dir.join("whole"), dir.join("lora"));
    fs::create_dir(&whole).and_then(|()| fs::create_dir(&lora)).expect("made");
    let mut recipe = sft_recipe(0);
    recipe.as_object_mut().expect("an object").remove("lora");
    recipe["trainable"] = json!("all");
    recipe["training"]["num_train_epochs"] = json!(30);
    recipe["training"]["learning_rate"] = json!(0.01);
    let taught = run_sft(&whole, &recipe).expect("trains");
    let mut recipe = sft_recipe(1);
    recipe["model"] = frozen(&taught.checkpoint);
    recipe["training"]["learning_rate"] = json!(1e-3);
    let adapter = run_sft(&lora, &recipe).expect("trains").checkpoint;
    (taught.checkpoint, adapter)
}

fn rollouts_recipe(model: &Path, adapter: &Path, rounds: u32) -> Value {
    let mut recipe = ppo_recipe(0);
    recipe["model"] = frozen(model);
    recipe["rows"] = frozen(&golden().join("sft.jsonl"));
    recipe["valid"] = frozen(&golden().join("valid.jsonl"));
    recipe["adapter"] = frozen(adapter);
    recipe["reference"] = frozen(adapter);
    recipe["training"]["num_train_epochs"] = json!(1);
    recipe["rollouts"] = json!({"rounds": rounds, "rows_per_round": 6, "num_generations": 5});
    recipe
}

#[test]
fn rounds_that_are_sampled_here_are_rounds_of_their_own_files() {
    let taught_in = tempfile::tempdir().expect("a directory");
    let (model, adapter) = taught(taught_in.path());
    let whole = tempfile::tempdir().expect("a directory");
    let recipe = rollouts_recipe(&model, &adapter, 2);
    let summary = run_ppo(whole.path(), &recipe, PpoInputs::default(), false).expect("trains");
    println!("{:?} {:?}", summary.rounds, summary.accuracy);
    assert_eq!(summary.rounds.len(), 2);
    for round in &summary.rounds {
        assert_eq!((round.tasks, round.codes), (6, 30));
        assert!((0.0..=1.0).contains(&round.reward) && round.malformed < 30, "{round:?}");
    }
    let stats = summary.stats.expect("statistics");
    // The engine and the scoring pass agree on what the policy thought of its codes.
    assert!(stats.logp_gap_abs < 1e-3, "{stats:?}");

    // Stopped after a round, it goes on bit for bit.
    let parts = tempfile::tempdir().expect("a directory");
    let first = rollouts_recipe(&model, &adapter, 1);
    run_ppo(parts.path(), &first, PpoInputs::default(), false).expect("trains");
    let one = parts.path().join("one");
    fs::create_dir(&one).expect("made");
    for entry in fs::read_dir(parts.path().join("run/adapter")).expect("an adapter") {
        let entry = entry.expect("an entry");
        fs::copy(entry.path(), one.join(entry.file_name())).expect("copied");
    }
    run_ppo(parts.path(), &recipe, PpoInputs::default(), true).expect("goes on");
    assert_eq!(left_behind(parts.path()), left_behind(whole.path()));

    // And the second round's file gives the same from the first one's adapter and optimizer.
    let plain = tempfile::tempdir().expect("a directory");
    let mut recipe = recipe;
    recipe.as_object_mut().expect("an object").remove("rollouts");
    let rows = whole.path().join("run/rounds/2/train.jsonl");
    let inputs = PpoInputs { rows: Some(rows), adapter: Some(one), ..PpoInputs::default() };
    run_ppo(plain.path(), &recipe, inputs, false).expect("trains");
    assert_eq!(left_behind(plain.path()), left_behind(whole.path()));
}

/// The golden rows with one of them changed, and the message about it.
fn refusal(change: impl Fn(&mut Value)) -> String {
    let dir = tempfile::tempdir().expect("a directory");
    let mut rows = lines(&golden().join("ppo.jsonl"));
    for row in &mut rows {
        let image = golden().join(row["image"].as_str().expect("a path"));
        row["image"] = json!(image);
    }
    change(&mut rows[2]);
    let path = dir.path().join("rows.jsonl");
    let text: String = rows.iter().map(|row| format!("{row}\n")).collect();
    fs::write(&path, text).expect("written");
    fs::write(dir.path().join("broken.png"), b"\x89PNG\r\n\x1a\nbroken").expect("written");
    fs::File::create(dir.path().join("vast.png"))
        .and_then(|it| it.set_len(65 << 20))
        .expect("made");
    let inputs = PpoInputs { rows: Some(path.clone()), ..PpoInputs::default() };
    let error = run_ppo(dir.path(), &ppo_recipe(0), inputs, false).expect_err("refused");
    assert!(matches!(error, Failure::Mistake(_)), "{error}");
    assert!(!dir.path().join("run").exists(), "nothing is written");
    error.to_string().replace(&*dir.path().to_string_lossy(), "DIR")
}

#[test]
fn rows_that_cannot_be_learned_from_name_file_and_line() {
    for (key, value, message) in [
        ("code", Value::Null, "code is missing: add a non-empty text"),
        ("code", json!("12"), "code \"12\" has 2 digits, that of line 1 has 3"),
        ("code", json!("1a2"), "code must be digits"),
        ("image", Value::Null, "image is missing: add the path of a PNG or JPEG file"),
        ("image", json!("none.png"), "image DIR/none.png: No such file or directory"),
        ("image", json!("broken.png"), "image DIR/broken.png: "),
        ("image", json!("vast.png"), "image DIR/vast.png: it is larger than 67108864 bytes"),
        ("name", json!("x".repeat(4096)), "4"),
        ("adv", Value::Null, "adv is missing: add a number"),
        ("vllm_logp", json!("low"), "vllm_logp must be a number"),
    ] {
        let found = refusal(|row| row[key] = value.clone());
        assert!(found.starts_with(&format!("DIR/rows.jsonl line 3: {message}")), "{found}");
    }
}

#[test]
fn digits_that_share_an_id_are_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let model = dir.path().join("model");
    fs::create_dir(&model).expect("made");
    for entry in fs::read_dir(golden().join("model")).expect("a checkpoint") {
        let entry = entry.expect("an entry");
        fs::copy(entry.path(), model.join(entry.file_name())).expect("copied");
    }
    let path = model.join("tokenizer.json");
    let text = fs::read_to_string(&path).expect("a tokenizer");
    let mut tokenizer: Value = serde_json::from_str(&text).expect("JSON");
    tokenizer["model"]["vocab"]["00"] = json!(301);
    tokenizer["model"]["merges"].as_array_mut().expect("merges").push(json!(["0", "0"]));
    fs::write(&path, tokenizer.to_string()).expect("written");
    let mut recipe = ppo_recipe(0);
    recipe["model"] = frozen(&model);
    let error = run_ppo(dir.path(), &recipe, PpoInputs::default(), false).expect_err("refused");
    let error = error.to_string();
    assert!(error.contains("ppo.jsonl line "), "{error}");
    assert!(error.contains("as one id a digit after the prompt"), "{error}");
}

#[test]
fn adapters_of_other_trainers_say_what_to_do_with_their_optimizer() {
    let dir = tempfile::tempdir().expect("a directory");
    let start = dir.path().join("start");
    fs::create_dir(&start).expect("made");
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        fs::copy(golden().join("start").join(name), start.join(name)).expect("copied");
    }
    fs::write(start.join("optimizer.pt"), b"PK").expect("written");
    let inputs = PpoInputs { adapter: Some(start.clone()), ..PpoInputs::default() };
    let error =
        run_ppo(dir.path(), &ppo_recipe(0), inputs, false).expect_err("refused").to_string();
    assert!(
        error.contains("optimizer.pt is PyTorch's and is not read here; move it away"),
        "{error}"
    );
    fs::write(start.join("optimizer.safetensors"), b"not one").expect("written");
    let inputs = PpoInputs { adapter: Some(start), ..PpoInputs::default() };
    let error =
        run_ppo(dir.path(), &ppo_recipe(0), inputs, false).expect_err("refused").to_string();
    assert!(error.contains("optimizer.safetensors: optimizer state: "), "{error}");
}

#[test]
fn conversations_may_show_images() {
    let dir = tempfile::tempdir().expect("a directory");
    let image = golden().join("images/0.png");
    let shown = json!([{"type": "image"}, {"type": "text", "text": "<|image_pad|>?"}]);
    let row = |content: &Value, images: Value| {
        json!({"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "A tower."}],
               "images": images})
    };
    let data = dir.path().join("games.jsonl");
    let run = |row: Value| {
        fs::write(&data, format!("{row}\n")).expect("written");
        let mut recipe = sft_recipe(1);
        for key in ["prompt", "valid"] {
            recipe.as_object_mut().expect("an object").remove(key);
        }
        recipe["dataset"] = frozen(&data);
        run_sft(dir.path(), &recipe)
    };
    let error = |row: Value| {
        let error = run(row).expect_err("refused").to_string();
        error.replace(&*dir.path().to_string_lossy(), "DIR")
    };
    assert_eq!(
        error(row(&shown, json!([]))),
        "DIR/games.jsonl line 1: images has 0 paths and the messages show 1 images: give one for each \
         {\"type\": \"image\"}"
    );
    let part = json!([{"type": "audio"}]);
    assert!(
        error(row(&part, json!([])))
            .contains("messages[0].content[0] must be {\"type\": \"image\"} or")
    );
    assert!(error(row(&shown, json!(["none.png"]))).contains("line 1: image DIR/none.png: "));
    let mut forged = row(&shown, json!([image]));
    forged["messages"][1]["content"] = json!("<|image_pad|>");
    let forged = error(forged);
    assert!(forged.contains("line 1: it has an image pad without an image"), "{forged}");
    assert_eq!(run(row(&shown, json!([image]))).expect("trains").updates, 1);
}

#[test]
fn plans_say_what_would_be_done() {
    let dir = tempfile::tempdir().expect("a directory");
    let output = dir.path().join("run");
    let plan = |recipe: &Value| {
        let path = written(dir.path(), recipe);
        learner::plan::describe(&path, Some(&output), &PpoInputs::default())
            .map(|(plan, _)| plan)
            .map_err(|error| error.to_string())
    };
    let sft = plan(&sft_recipe(0)).expect("valid");
    assert_eq!((&sft["method"], &sft["derived"]["updates"]), (&json!("sft_rows"), &json!(6)));
    assert_eq!(sft["derived"]["images"]["files"], 5);
    assert_eq!(sft["derived"]["rows"]["scored_tokens"], 40);
    let ppo = plan(&ppo_recipe(0)).expect("valid");
    assert_eq!((&ppo["method"], &ppo["derived"]["updates"]), (&json!("ppo_rows"), &json!(6)));
    assert_eq!(ppo["derived"]["rows"]["scored_tokens"], 30);
    let mut rounds = ppo_recipe(0);
    rounds["rollouts"] = json!({"rounds": 3});
    let rounds = plan(&rounds).expect("valid");
    assert_eq!(rounds["derived"]["rollouts"]["codes_per_round"], 80);
    let mut other = ppo_recipe(0);
    other["adapter"]["sha256"] = other["model"]["sha256"].clone();
    assert!(plan(&other).expect_err("another adapter").starts_with("adapter.sha256 is "));
    let mut none = ppo_recipe(0);
    let empty = tempfile::tempdir().expect("a directory");
    none["reference"]["path"] = json!(empty.path());
    let error = plan(&none).expect_err("no adapter");
    let says = error.starts_with("reference.path") && error.contains("adapter_config.json");
    assert!(says && error.contains("name a PEFT adapter's directory"), "{error}");
    assert!(!output.exists());
}
