//! What a person can get wrong gets one clear line and exit status 2.

mod table;

use std::{fs, path::Path, process::Command};

use serde_json::json;
use tests::{Demo, Finished, digest, finish, programs, start};

/// The one line of a mistake.
#[track_caller]
fn mistake(finished: &Finished, says: &[&str]) {
    assert_eq!(finished.status.code(), Some(2), "{finished:?}");
    let errors: Vec<&str> =
        finished.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 1, "{}", finished.stderr);
    assert!(!finished.stderr.contains("panicked"), "{}", finished.stderr);
    for part in says {
        assert!(errors[0].contains(part), "{:?} does not say {part:?}", errors[0]);
    }
}

fn learner(arguments: &[&str]) -> Finished {
    finish(start(Command::new(&programs().learner).args(arguments)))
}

fn train(demo: &Demo, more: &[&str]) -> Finished {
    let path = demo.write();
    let mut arguments = vec!["train", path.to_str().expect("text"), "--local-actors", "1"];
    arguments.extend(more);
    learner(&arguments)
}

#[test]
fn a_model_that_is_missing_or_another() {
    let mut demo = Demo::new(1);
    demo.recipe["model"]["path"] = "/nonexistent/model".into();
    mistake(&train(&demo, &[]), &["model", "/nonexistent/model"]);
    let mut demo = Demo::new(1);
    let frozen = demo.recipe["model"]["sha256"].as_str().expect("text").to_owned();
    let wrong = format!("{}{}", if frozen.starts_with('0') { "1" } else { "0" }, &frozen[1..]);
    demo.recipe["model"]["sha256"] = wrong.into();
    mistake(&train(&demo, &[]), &["model", "sha256"]);
}

#[test]
fn a_recipe_that_is_missing_or_has_an_unknown_key_or_a_bad_value() {
    mistake(&learner(&["plan", "/nonexistent/recipe.json"]), &["/nonexistent/recipe.json"]);
    let mut demo = Demo::new(1);
    demo.recipe["training"]["learning_rat"] = 1.into();
    mistake(&train(&demo, &[]), &["training.learning_rat", "learning_rate"]);
    let mut demo = Demo::new(1);
    demo.recipe["training"]["top_p"] = 1.5.into();
    mistake(&train(&demo, &[]), &["training.top_p", "1.5"]);
}

#[test]
fn adapter_targets_that_the_model_lacks_and_a_byte_order_mark() {
    let mut demo = Demo::new(1);
    for targets in [json!("(((("), json!(["nope"]), json!("zzz")] {
        demo.recipe["lora"]["target_modules"] = targets;
        let recipe = demo.write();
        mistake(&learner(&["plan", recipe.to_str().expect("text")]), &["lora", "target_modules"]);
    }
    let recipe = demo.write();
    let text = fs::read(&recipe).expect("read");
    fs::write(&recipe, [b"\xef\xbb\xbf".as_slice(), &text].concat()).expect("written");
    mistake(&learner(&["plan", recipe.to_str().expect("text")]), &["byte order mark"]);
}

#[test]
fn a_mistake_before_the_first_episode_leaves_no_run_behind() {
    let demo = Demo::new(1);
    let finished = train(&demo, &["--actor-program", "/bin/true"]);
    mistake(&finished, &["local actor"]);
    assert!(!demo.run().exists());
}

#[test]
fn a_dataset_row_without_id() {
    let mut demo = Demo::new(1);
    let data = demo.dir.path().join("rows.jsonl");
    fs::write(&data, "{\"prompt\": \"p\", \"task\": {\"split\": \"train\"}}\n").expect("written");
    demo.recipe["dataset"]["path"] = data.to_str().expect("text").into();
    demo.recipe["dataset"]["sha256"] = digest(&data).into();
    mistake(&train(&demo, &[]), &["rows.jsonl", "1", "id"]);
}

#[test]
fn an_output_directory_that_exists() {
    let demo = Demo::new(1);
    fs::create_dir(demo.run()).expect("made");
    mistake(&train(&demo, &[]), &["output_dir", "--output"]);
    assert_eq!(fs::read_dir(demo.run()).expect("there").count(), 0);
}

#[test]
fn a_gpu_that_is_not_there() {
    let demo = Demo::new(1);
    mistake(&train(&demo, &["--device", "cuda:63"]), &["cuda:63"]);
    assert!(!demo.run().exists(), "a mistake leaves no run behind");
}

#[test]
fn a_port_in_use() {
    let held = std::net::UdpSocket::bind("127.0.0.1:0").expect("a port");
    let address = held.local_addr().expect("bound").to_string();
    let demo = Demo::new(1);
    mistake(&train(&demo, &["--listen", &address]), &[&address, "in use"]);
    assert!(!demo.run().exists(), "a mistake leaves no run behind");
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).expect("made");
    for entry in fs::read_dir(from).expect("there") {
        let entry = entry.expect("an entry");
        fs::copy(entry.path(), to.join(entry.file_name())).expect("copied");
    }
}

#[test]
fn a_wrong_join_string_or_another_checkpoint_tokenizer_or_template() {
    let demo = Demo::new(2);
    let mut command = Command::new(&programs().learner);
    command.arg("train").arg(demo.write()).args(["--device", "cpu", "--json"]);
    let mut run = start(&mut command);
    let join = run.event("listening")["join"].as_str().expect("text").to_owned();
    let model = demo.recipe["model"]["path"].as_str().expect("text").to_owned();
    let actor = |join: &str, model: &str| {
        let mut command = Command::new(&programs().actor);
        command.args(["join", join, "--device", "cpu", "--model", model]);
        finish(start(&mut command))
    };
    mistake(&actor("nonsense", &model), &["join string"]);
    // Another secret, then another fingerprint: the last and the first characters of the token.
    let flip = |at: usize| {
        let mut bytes = join.clone().into_bytes();
        bytes[at] = if bytes[at] == b'A' { b'Q' } else { b'A' };
        String::from_utf8(bytes).expect("text")
    };
    mistake(&actor(&flip(join.len() - 2), &model), &["secret"]);
    let token = join.find('#').expect("a token") + 1;
    mistake(&actor(&flip(token + 4), &model), &["certificate"]);

    for (file, from, to, word) in [
        ("config.json", "\"rms_norm_eps\": 1e-6", "\"rms_norm_eps\": 2e-6", "weights"),
        ("tokenizer.json", "\"type\": \"BPE\"", "\"type\":  \"BPE\"", "tokenizer"),
        ("chat_template.jinja", "Tools:", "Tools.", "chat template"),
    ] {
        let other = demo.dir.path().join(file);
        copy(Path::new(&model), &other);
        let text = fs::read_to_string(other.join(file)).expect("text");
        // Whatever the writer's spacing, one changed byte is another checkpoint.
        let changed = text.replacen(from, to, 1);
        let changed = if changed == text { format!("{text} ") } else { changed };
        fs::write(other.join(file), changed).expect("written");
        mistake(&actor(&join, other.to_str().expect("text")), &[word, "model"]);
    }
    run.child.kill().expect("killed");
    finish(run);
}

#[test]
fn arguments_that_do_not_parse() {
    let finished = learner(&["train"]);
    assert_eq!(finished.status.code(), Some(2));
    let finished = learner(&["train", "recipe.json", "--device", "gpu"]);
    assert_eq!(finished.status.code(), Some(2));
    assert!(finished.stderr.contains("--device"), "{}", finished.stderr);
}
