//! A table of mistakes: for each, what its line must name and what it must advise.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use protocol::Digest;
use serde_json::{Value, json};
use tests::{finish, programs, start, workspace};

use super::copy;

/// Where a mistake is made.
struct Desk {
    dir: tempfile::TempDir,
    /// Everything that was wrong with a line, so that one run says all.
    wrong: Vec<String>,
    made: usize,
}

impl Desk {
    fn set_up() -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let desk = Self { dir, wrong: Vec::new(), made: 0 };
        for (from, to) in [("guess/model", "model"), ("frames/model", "eyes")] {
            copy(&workspace().join("examples").join(from), &desk.path(to));
        }
        let examples = workspace().join("examples");
        for (from, to) in [
            ("guess/train.jsonl", "train.jsonl"),
            ("guess/eval.jsonl", "eval.jsonl"),
            ("frames/train-images/000000.png", "0.png"),
        ] {
            fs::copy(examples.join(from), desk.path(to)).expect("copied");
        }
        desk
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// What a recipe says of a file or of a model as it is.
    fn frozen(&self, name: &str) -> Value {
        let path = self.path(name);
        let sha256 = match path.is_dir() {
            true => policy::model::checkpoint_digests(&path).expect("digests").all,
            false => Digest::of(&fs::read(&path).expect("a file")),
        };
        json!({"path": name, "sha256": sha256})
    }

    fn write(&self, name: &str, text: impl AsRef<[u8]>) {
        fs::write(self.path(name), text).expect("written");
    }

    fn online(&self) -> Value {
        json!({
            "schema_version": 1, "model": self.frozen("model"), "dataset": self.frozen("train.jsonl"),
            "output_dir": "run", "environment": {"name": "guess"},
            "training": {"num_generations": 8},
        })
    }

    fn sft(&self, rows: &str) -> Value {
        self.write("rows.jsonl", rows);
        json!({
            "schema_version": 1, "model": self.frozen("model"), "dataset": self.frozen("rows.jsonl"),
            "output_dir": "run",
        })
    }

    fn codes(&self, rows: &str) -> Value {
        let mut recipe = self.sft(rows);
        recipe["model"] = self.frozen("eyes");
        recipe["prompt"] = "{{ name }}".into();
        recipe
    }

    /// Runs a program here and looks at what it says.
    fn refuses(&mut self, program: &Path, arguments: &[&str], names: &str, advises: &str) {
        let mut command = Command::new(program);
        command.args(arguments).current_dir(self.dir.path()).env_remove("ROLLCALL_JOIN");
        let finished = finish(start(&mut command));
        self.made += 1;
        let said = finished.stderr.trim_end();
        let holds = finished.status.code() == Some(2)
            && said.lines().count() == 1
            && said.starts_with("error: ")
            && said.len() < 500
            && finished.stdout.is_empty();
        if !holds || !said.contains(names) || !said.contains(advises) {
            self.wrong.push(format!(
                "{arguments:?} must say {names:?} and {advises:?}: {} {said}",
                finished.status
            ));
        }
    }

    fn learner(&mut self, arguments: &[&str], names: &str, advises: &str) {
        self.refuses(&programs().learner, arguments, names, advises);
    }

    fn actor(&mut self, arguments: &[&str], names: &str, advises: &str) {
        self.refuses(&programs().actor, arguments, names, advises);
    }

    /// `learner plan` of a recipe.
    fn plan(&mut self, recipe: &Value, names: &str, advises: &str) {
        self.write("recipe.json", recipe.to_string());
        self.learner(&["plan", "recipe.json"], names, advises);
    }

    /// The same of an online recipe with the value at `pointer` replaced.
    fn with(&mut self, pointer: &str, value: Value, names: &str, advises: &str) {
        let mut recipe = self.online();
        let (parent, key) = pointer.rsplit_once('/').expect("a pointer");
        let parent = recipe.pointer_mut(parent).and_then(Value::as_object_mut).expect("an object");
        parent.insert(key.into(), value);
        self.plan(&recipe, names, advises);
    }

    #[track_caller]
    fn done(self, least: usize) {
        assert!(self.wrong.is_empty(), "{}", self.wrong.join("\n"));
        assert!(self.made >= least, "only {} mistakes", self.made);
    }
}

#[test]
fn fields_of_a_recipe() {
    let mut desk = Desk::set_up();
    for (pointer, value, names, advises) in [
        ("/schema_version", json!(2), "schema_version", "from 1 to 1"),
        ("/model", json!(null), "model is missing", "path and sha256"),
        ("/model", json!("model"), "model must be", "a JSON object"),
        ("/model/sha256", json!("abc"), "model.sha256", "64 hex digits"),
        ("/model/sha256", json!("0".repeat(64)), "model.sha256", "write the new SHA-256"),
        ("/model/path", json!("nowhere"), "model.path nowhere", "name a Hugging Face checkpoint"),
        ("/dataset/path", json!("no.jsonl"), "dataset.path no.jsonl", "name one that is there"),
        ("/dataset/path", json!("model"), "dataset.path model", "name a file"),
        ("/output_dir", json!(null), "output_dir is missing", "--output"),
        ("/output_dir", json!("model"), "output_dir", "name a new directory"),
        ("/output_dir", json!("model/run"), "output_dir", "apart from models and data"),
        ("/trainig", json!({}), "trainig", "did you mean training?"),
        ("/training/max_steps", json!("8"), "training.max_steps", "an integer from 1"),
        ("/training/max_steps", json!(0), "training.max_steps", "an integer from 1"),
        ("/training/learning_rate", json!(-1), "training.learning_rate", "from 0 to 1"),
        ("/training/learning_rat", json!(1), "training.learning_rat", "training.learning_rate?"),
        ("/training/top_p", json!(0), "training.top_p", "above 0"),
        ("/training/algorithm", json!("grppo"), "training.algorithm", "\"dr_grpo\""),
        ("/training/value", json!({}), "training.value", "set algorithm to ppo"),
        ("/training/gradient_checkpointing", json!(1), "training.gradient", "true or false"),
        ("/training/compute_dtype", json!("fp8"), "training.compute_dtype", "\"bf16\""),
        (
            "/training/per_device_train_batch_size",
            json!(12),
            "training.per_device_train_batch_size",
            "use a multiple",
        ),
        (
            "/training/max_completion_length",
            json!(200_000),
            "training.max_completion_length",
            "shorten",
        ),
        ("/lora", json!({"r": 0}), "lora.r", "from 1 to 4096"),
        ("/lora", json!({"dropout": 0.1}), "lora.dropout", "set it to 0"),
        ("/lora", json!({"target_modules": ["nope"]}), "lora", "name linears"),
        ("/reward", json!({"protocol": "mine"}), "reward.protocol", "\"environment\""),
        ("/reward", json!({"protocol": "trusted-milestones-v1"}), "reward", "\"environment\""),
        ("/audit", json!({"sampling": "on"}), "audit.sampling", "\"report\""),
        ("/chat_template_kwargs", json!({"tools": []}), "chat_template_kwargs.tools", "remove it"),
        ("/environment", json!(null), "environment is missing", "an object with a name"),
        ("/environment", json!({"name": "chess"}), "environment.name", "\"guess\""),
        ("/environment", json!({"name": "guess", "m": 1}), "environment.m", "one of limits"),
        (
            "/environment",
            json!({"python": "nowhere:Game"}),
            "environment.python",
            "put it beside the recipe",
        ),
        ("/environment", json!({"python": "game"}), "environment.python", "\"module:Class\""),
        ("/environment", json!({"openenv": "ftp://x"}), "environment.openenv", "ws://"),
        ("/environment", json!({"mcp": {}}), "environment.mcp.command", "a list of texts"),
    ] {
        desk.with(pointer, value, names, advises);
    }
    let adapter = desk.frozen("model");
    desk.with("/reference", adapter, "reference.path", "name a PEFT adapter's directory");
    let same = json!({"dataset": desk.frozen("train.jsonl")});
    desk.with("/evaluation", same, "train.jsonl line 1: task.split", "\"eval\"");
    desk.done(30);
}

#[test]
fn files_that_are_no_recipes() {
    let mut desk = Desk::set_up();
    desk.learner(&["plan", "no.json"], "recipe no.json", "name one that is there");
    desk.learner(&["plan", "model"], "recipe model", "name a file");
    for (text, names, advises) in [
        ("{\"seed\": 1\n\"model\": 2}", "line 2 column 1", "expected `,`"),
        ("{\"seed\": 1, \"seed\": 2}", "line 1 column", "stands twice"),
        ("{\"seed\": 1 /* no */}", "line 1 column", "mend it there"),
        ("[]", "the recipe", "a JSON object"),
        ("", "recipe.json", "mend it there"),
    ] {
        desk.write("recipe.json", text);
        desk.learner(&["plan", "recipe.json"], names, advises);
    }
    desk.done(7);
}

#[test]
fn rows_of_data() {
    let mut desk = Desk::set_up();
    for (row, names, advises) in [
        ("{\"id\": \"a\"", "line 1", "not valid JSON"),
        ("[]", "line 1", "a JSON object"),
        ("{\"prompt\": \"p\", \"task\": {}}", "line 1: id", "add a non-empty text"),
        ("{\"id\": \"a\", \"prompt\": \"p\", \"task\": {}}", "task.split", "must be \"train\""),
        (
            "{\"id\": \"a\", \"prompt\": \"p\", \"task\": {\"split\": \"train\", \"n\": 0}}",
            "task.n",
            "from 1",
        ),
        ("", "rows.jsonl", "write one JSON object a line"),
    ] {
        desk.write("rows.jsonl", row);
        let rows = desk.frozen("rows.jsonl");
        desk.with("/dataset", rows, names, advises);
    }
    for (row, names, advises) in [
        ("{\"text\": \"x\"}", "line 1: messages is missing", "add a list"),
        (
            "{\"messages\": [{\"role\": \"robot\", \"content\": \"x\"}]}",
            "line 1: messages[0].role",
            "user, assistant",
        ),
        (
            "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}]}",
            "line 1: messages",
            "add one",
        ),
    ] {
        let recipe = desk.sft(row);
        desk.plan(&recipe, names, advises);
    }
    for (row, names, advises) in [
        ("{\"image\": \"0.png\", \"name\": \"x\", \"code\": \"4o\"}", "line 1: code", "digits"),
        ("{\"image\": \"1.png\", \"name\": \"x\", \"code\": \"40\"}", "1.png", "as it lies from"),
        ("{\"image\": \"eval.jsonl\", \"name\": \"x\", \"code\": \"40\"}", "eval.jsonl", "convert"),
    ] {
        let recipe = desk.codes(row);
        desk.plan(&recipe, names, advises);
    }
    desk.write("ids.jsonl", "{\"ids\": [1]}\n");
    let score = ["score", "--device", "cpu", "--model", "model", "--data"];
    desk.learner(&[&score[..], &["ids.jsonl"]].concat(), "ids.jsonl, line 1", "`from`");
    desk.learner(&[&score[..], &["no.jsonl"]].concat(), "--data no.jsonl", "JSON lines");
    desk.done(14);
}

#[test]
fn checkpoints_and_adapters() {
    let mut desk = Desk::set_up();
    for damaged in ["short", "bare", "other", "mute"] {
        copy(&desk.path("model"), &desk.path(damaged));
    }
    let weights = fs::read(desk.path("model/model.safetensors")).expect("weights");
    desk.write("short/model.safetensors", &weights[..1000]);
    fs::remove_file(desk.path("bare/config.json")).expect("removed");
    let config = fs::read_to_string(desk.path("model/config.json")).expect("a configuration");
    desk.write("other/config.json", config.replace("Qwen3ForCausalLM", "GPT2LMHeadModel"));
    fs::remove_file(desk.path("mute/tokenizer.json")).expect("removed");
    for (model, names, advises) in [
        ("nowhere", "nowhere", "name a Hugging Face directory"),
        ("short", "short/model.safetensors", "copy it again"),
        ("bare", "bare/config.json", "name a Hugging Face directory"),
        ("other", "other/config.json", "supported: Qwen3ForCausalLM"),
        ("mute", "mute/tokenizer.json", "copy it from the model's own"),
    ] {
        desk.actor(&["sample", "--prompt", "x", "--model", model], names, advises);
    }
    desk.learner(&["digest", "nowhere"], "nowhere", "name a file or a model directory");
    let short = desk.frozen("short");
    desk.with("/model", short, "model.safetensors", "copy it again");
    for adapter in ["nowhere", "model"] {
        let sample = ["sample", "--prompt", "x", "--model", "model", "--adapter", adapter];
        desk.actor(&sample, "adapter_config.json", "name a PEFT adapter's directory");
    }
    // The adapter of another model.
    fs::create_dir(desk.path("foreign")).expect("made");
    desk.write(
        "foreign/adapter_config.json",
        "{\"peft_type\": \"LORA\", \"r\": 4, \"lora_alpha\": 8, \"target_modules\": [\"c_attn\"]}",
    );
    desk.write("foreign/adapter_model.safetensors", weights);
    let foreign = desk.frozen("foreign");
    desk.with("/reference", foreign, "reference", "name an adapter of the model");
    desk.done(9);
}

#[test]
fn command_lines() {
    let mut desk = Desk::set_up();
    desk.write("recipe.json", desk.online().to_string());
    for (arguments, names, advises) in [
        (&["plan"][..], "<RECIPE>", "Usage: learner plan <RECIPE>"),
        (&["trian", "recipe.json"], "'trian'", "'train'"),
        (&["plan", "recipe.json", "--outptu", "x"], "'--outptu'", "'--output'"),
        (&["train", "recipe.json", "--device", "gpu"], "--device", "auto, cpu, cuda:N"),
        (&["train", "recipe.json", "--listen", "here"], "--listen", "0.0.0.0:7171"),
        (&["train", "recipe.json", "--local-actors", "-1"], "'-1'", "try '--help'"),
        (&["train", "recipe.json", "--metrics-listen", "x"], "--metrics-listen", "ADDRESS:PORT"),
        (&["train", "recipe.json", "--nproc-per-node", "0"], "--nproc-per-node", "1..=256"),
        (
            &["train", "recipe.json", "--local-actors", "1", "--actor-program", "no"],
            "no",
            "build it",
        ),
        (&["audit", "nowhere"], "nowhere", "name the output directory"),
        (&["audit", "model"], "model", "name the output directory"),
        (&["report", "nowhere"], "nowhere", "name the directory"),
        (&["token", "show", "nowhere"], "nowhere/identity.pem", "--identity"),
        (&["token", "revoke", "nowhere", "abc"], "<ACTOR>", "64 hex digits"),
        (
            &["dataset", "chess", "--rows", "1", "--split", "train", "--output", "x"],
            "chess",
            "guess",
        ),
        (
            &["dataset", "guess", "--rows", "1", "--split", "test", "--output", "x"],
            "--split",
            "eval",
        ),
        (
            &["dataset", "guess", "--rows", "1", "--split", "eval", "--output", "eval.jsonl"],
            "eval.jsonl",
            "--output",
        ),
        (&["dataset", "add", "--rows", "1", "--split", "eval", "--output", "x"], "add", "yourself"),
        (&["init", "agent"], "recipe.json", "--force"),
        (&["init", "agent", "no/recipe.json"], "no/recipe.json", "make its directory"),
        (
            &["init", "sft", "x.json", "--model", "nowhere"],
            "--model nowhere",
            "name one that is there",
        ),
        (&["init", "sft", "x.json", "--adapter", "model"], "--adapter", "leave it out"),
        (&["ppo", "recipe.json"], "dataset is unknown", "reference"),
        (&["man", "/dev/null/man"], "/dev/null/man", "name a folder"),
    ] {
        desk.learner(arguments, names, advises);
    }
    let join = ["join", "--model", "model", "--device", "cpu"];
    for (more, names, advises) in [
        (&[][..], "no join string", "--join-file"),
        (&["nonsense"], "join string", "copy the whole string"),
        (&["host:7171#abc"], "join string", "copy it whole"),
        (&["host#abc"], "join string", "not host:port"),
        (&["host:0#abc"], "join string", "a port from 1 to 65535"),
        (&["--join-file", "no"], "--join-file no", "identity directory"),
    ] {
        desk.actor(&[&join[..], more].concat(), names, advises);
    }
    desk.actor(&["check", "nothing"], "nothing", "give one of guess");
    desk.actor(&["check", "guess", "--task", "{"], "the task object", "--task");
    desk.actor(&["check", "{\"python\": \"no:X\"}"], "environment.python", "ROLLCALL_ENVIRONMENTS");
    let sample = ["sample", "--model", "model"];
    let kwargs = ["--prompt", "x", "--chat-template-kwargs", "x"];
    desk.actor(&[&sample[..], &kwargs].concat(), "--chat-template-kwargs", "give an object");
    desk.actor(&[&sample[..], &["--prompts", "no"]].concat(), "--prompts no", "a file of prompts");
    desk.done(30);
}
