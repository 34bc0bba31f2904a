//! A recipe, a small model and data sets in a directory of their own.

// Every test program uses its own part of this.
#![allow(dead_code)]

use std::{
    fs,
    path::{Path, PathBuf},
};

use learner::plan::{Plan, plan};
use policy::model::{Decoder, ModelConfig, checkpoint_digests};
use protocol::Digest;
use serde_json::{Value, json};

use crate::support::{VOCABULARY, write_tokenizer};

/// A recipe with everything that it names, in a directory of its own.
pub(crate) struct Bench {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) recipe: Value,
}

impl Bench {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let model = dir.path().join("model");
        fs::create_dir(&model).expect("created");
        write_tokenizer(&model);
        write_model(&model);
        let row = |id: &str, split: &str| {
            let task = json!({"split": split});
            json!({"id": id, "prompt": "Let us play. ", "task": task}).to_string() + "\n"
        };
        let train: String = (0..6).map(|i| row(&format!("train-{i}"), "train")).collect();
        let eval: String = (0..3).map(|i| row(&format!("eval-{i}"), "eval")).collect();
        let mut bench = Self { dir, recipe: Value::Null };
        bench.recipe = json!({
            "schema_version": 1,
            "model": {"path": "model"},
            "dataset": bench.write("train.jsonl", &train),
            "output_dir": "runs/one",
            "training": {"num_generations": 2, "max_steps": 3, "max_completion_length": 400},
            "environment": {"name": "guess"},
            "evaluation": {"dataset": bench.write("eval.jsonl", &eval)},
        });
        bench.freeze_model();
        bench
    }

    /// The same with pictures to look at, and a model that `write` makes in a directory.
    pub(crate) fn frames(write: impl FnOnce(&Path)) -> Self {
        let mut bench = Self::new();
        fs::remove_dir_all(bench.path("model")).expect("removed");
        fs::create_dir(bench.path("model")).expect("created");
        write(&bench.path("model"));
        bench.freeze_model();
        bench.recipe["environment"] = json!({"name": "frames"});
        bench
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn freeze_model(&mut self) {
        let digests = checkpoint_digests(&self.path("model")).expect("readable");
        self.recipe["model"]["sha256"] = json!(digests.all);
    }

    /// Writes a file and freezes it.
    pub(crate) fn write(&self, name: &str, text: &str) -> Value {
        fs::write(self.path(name), text).expect("written");
        json!({"path": name, "sha256": Digest::of(text.as_bytes())})
    }

    pub(crate) fn plan(&self) -> Result<Plan, String> {
        self.plan_to(None)
    }

    pub(crate) fn plan_to(&self, output: Option<&Path>) -> Result<Plan, String> {
        let path = self.path("recipe.json");
        fs::write(&path, self.recipe.to_string()).expect("written");
        plan(&path, output).map_err(|error| error.to_string())
    }

    #[track_caller]
    pub(crate) fn refused(&self, message: &str) {
        let error = self.plan().expect_err("refused");
        assert!(!error.contains('\n'), "{error}");
        let error = error.replace(&*self.dir.path().to_string_lossy(), "DIR");
        assert!(error.contains(message), "{error}\ndoes not contain\n{message}");
    }
}

fn write_model(dir: &Path) {
    let config = json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 16,
        "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "max_position_embeddings": 2048, "tie_word_embeddings": true,
        "attention_bias": false, "hidden_act": "silu",
    });
    fs::write(dir.join("config.json"), config.to_string()).expect("written");
    let config = ModelConfig::read(&dir.join("config.json")).expect("a configuration");
    let device = "cpu".parse::<policy::device::DeviceChoice>().expect("a device");
    let device = device.resolve().open().expect("opens");
    let decoder = Decoder::random(config, 1, &device);
    decoder.save_weights(&dir.join("model.safetensors")).expect("written");
}
