//! A user's folder with the demos cut down to a step, in which command lines are run.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use protocol::Digest;
use serde_json::{Value, json};
use tests::{finish, programs, start, workspace};

use super::{blocks::after, program};

/// A folder as a user has it: the demos, a recipe of their own, a model.
pub(crate) struct Desk {
    dir: tempfile::TempDir,
}

impl Desk {
    pub(crate) fn set_up() -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let desk = Self { dir };
        desk.copy(&workspace().join("examples"), "examples");
        for (file, rows) in [("train.jsonl", 32), ("eval.jsonl", 4)] {
            for demo in ["guess", "office", "wordle", "frames", "mcp-guess"] {
                desk.cut(&format!("examples/{demo}/{file}"), rows);
            }
        }
        for recipe in [
            "examples/guess/recipe.json",
            "examples/guess/ppo-recipe.json",
            "examples/office/recipe.json",
            "examples/wordle/recipe.json",
            "examples/python-guess/recipe.json",
            "examples/frames/sft.json",
            "examples/frames/ppo.json",
        ] {
            desk.shorten(recipe, recipe);
        }
        desk.copy(&workspace().join("examples/guess/model"), "Qwen3-0.6B");
        desk
    }

    fn path(&self, path: &str) -> PathBuf {
        self.dir.path().join(path)
    }

    fn copy(&self, from: &Path, to: &str) {
        fs::create_dir_all(self.path(to)).expect("made");
        for entry in fs::read_dir(from).expect("there") {
            let entry = entry.expect("an entry");
            let name = format!("{to}/{}", entry.file_name().to_string_lossy());
            match entry.file_type().expect("a kind").is_dir() {
                true => self.copy(&entry.path(), &name),
                false => drop(fs::copy(entry.path(), self.path(&name)).expect("copied")),
            }
        }
    }

    /// Keeps the first rows of a file.
    fn cut(&self, file: &str, rows: usize) {
        let text = fs::read_to_string(self.path(file)).expect("rows");
        let text: String = text.lines().take(rows).map(|line| format!("{line}\n")).collect();
        fs::write(self.path(file), text).expect("written");
    }

    /// A demo's recipe with the digests of the cut files and as little work as there can be.
    fn shorten(&self, from: &str, to: &str) {
        let text = fs::read(self.path(from)).expect("a recipe");
        let text = environments::without_comments(&text);
        let mut recipe: Value = serde_json::from_slice(&text).expect("JSON");
        let folder = self.path(from).parent().expect("a folder").to_owned();
        for at in ["/dataset", "/evaluation/dataset", "/valid", "/rows"] {
            if let Some(file) = recipe.pointer_mut(at) {
                let bytes = fs::read(folder.join(file["path"].as_str().expect("a path")));
                file["sha256"] = json!(Digest::of(&bytes.expect("rows")));
            }
        }
        if let Some(Value::Object(training)) = recipe.get_mut("training") {
            for (key, few) in
                [("max_steps", 1), ("num_train_epochs", 1), ("per_device_train_batch_size", 8)]
            {
                if training.contains_key(key) {
                    training.insert(key.into(), few.into());
                }
            }
        }
        if recipe.get("rollouts").is_some() {
            recipe["rollouts"] = json!({"rounds": 1, "rows_per_round": 4, "num_generations": 2});
        }
        fs::write(self.path(to), recipe.to_string()).expect("written");
    }

    /// Takes away what a command is about to write, so that pages may show it more than once.
    fn make_way(&self, words: &[String]) {
        let writes = ["train", "sft", "ppo", "dataset", "init", "calibrate"];
        let Some(verb) = words.get(1).filter(|verb| writes.contains(&verb.as_str())) else {
            return;
        };
        if words.iter().any(|word| word == "--resume" || word == "--force") {
            return;
        }
        let output = match after(words, "--output") {
            Some(output) => self.path(output),
            None if verb == "init" => {
                let named = words.get(3).filter(|word| !word.starts_with("--"));
                self.path(named.map_or("recipe.json", String::as_str))
            }
            None => {
                let recipe = self.path(words.get(2).expect("a recipe"));
                let text = fs::read(&recipe).expect("the recipe is there");
                let text = environments::without_comments(&text);
                let value: Value = serde_json::from_slice(&text).expect("JSON");
                recipe.with_file_name(value["output_dir"].as_str().expect("an output"))
            }
        };
        let images = format!("{}-images", output.with_extension("").display());
        for path in [output.as_path(), Path::new(&images)] {
            if path.is_dir() {
                fs::remove_dir_all(path).expect("removed");
            } else if path.exists() {
                fs::remove_file(path).expect("removed");
            }
        }
    }

    /// Words with what only a run can say put in: `runs/guess/adapters/150-…` is the adapter that is there.
    fn filled_in(&self, words: &[String]) -> Vec<String> {
        let adapter = |word: &String| {
            let (run, _) = word.split_once("/adapters/").filter(|_| word.ends_with('…'))?;
            let folder = fs::read_dir(self.path(&format!("{run}/adapters"))).ok()?;
            let names = folder.filter_map(Result::ok).map(|it| it.file_name());
            let name = names.max()?.to_string_lossy().into_owned();
            Some(format!("{run}/adapters/{name}"))
        };
        words.iter().map(|word| adapter(word).unwrap_or_else(|| word.clone())).collect()
    }

    pub(crate) fn run(&self, place: &str, variables: Vec<(String, String)>, words: &[String]) {
        let words = self.filled_in(words);
        self.make_way(&words);
        let python = words.iter().any(|word| word.contains("python"));
        if python && Command::new("python3").arg("--version").output().is_err() {
            println!("skipped  {place}: there is no python3");
            return;
        }
        let (name, _) = program(&words[0]).unwrap_or_else(|| {
            panic!("{place}: only learner and actor are run; say what {:?} needs", words[0])
        });
        let path = if name == "learner" { &programs().learner } else { &programs().actor };
        let mut command = Command::new(path);
        command.args(&words[1..]).envs(variables).current_dir(self.dir.path());
        let started = std::time::Instant::now();
        let finished = finish(start(&mut command));
        println!("{:>6.2} s  {place}: {}", started.elapsed().as_secs_f64(), words.join(" "));
        assert!(finished.status.success(), "{place}: {words:?}: {}", finished.stderr);
        if words.get(1).is_some_and(|verb| verb == "init") {
            let recipe = words.get(3).map_or("recipe.json", String::as_str);
            self.shorten(recipe, recipe);
        }
    }
}
