//! `learner dataset`: task rows of an environment that draws its own, or what an expert does for
//! `learner sft`: conversations, or images with the right answers.

use std::{
    fs,
    path::{Path, PathBuf},
};

use environments::{
    EnvironmentSpec, EpisodeKey, Recorder, Recording, Solution, ToolSpec, dataset, draws::Draws,
    play,
};
use policy::vision::Rgb;
use protocol::{Digest, Image, LeaseId, RunId, Split, Task};
use serde_json::{Value, json};
use terminal::{Failure, print_line};

use crate::files::JsonLines;

/// Calls after which an expert is taken to be lost.
const MAX_CALLS: u32 = 1024;

/// What to write.
#[derive(Clone, Debug)]
pub struct DatasetOptions {
    /// The environment, as [`EnvironmentSpec::from_argument`] takes it.
    pub environment: String,
    /// How many rows.
    pub rows: usize,
    /// For training, or held out.
    pub split: Split,
    /// Decides the rows. No two seeds give the same ids.
    pub seed: u64,
    /// What an expert does instead of tasks.
    pub expert: bool,
    /// The file, which must not exist.
    pub output: PathBuf,
}

impl DatasetOptions {
    /// The folder of the rows' images, which must not exist: it lies beside the file and has its name.
    fn images(&self) -> PathBuf {
        let mut name = self.output.file_stem().unwrap_or_default().to_owned();
        name.push("-images");
        self.output.with_file_name(name)
    }
}

/// Writes the rows and prints what a recipe says of the file: `{"path", "sha256"}`.
///
/// # Errors
/// The environment draws no tasks or has no expert; the file exists or cannot be written.
pub fn run(options: &DatasetOptions) -> Result<(), Failure> {
    let spec = EnvironmentSpec::from_argument(&options.environment).map_err(Failure::mistake)?;
    let name = spec.name();
    let tasks = spec.draw_dataset(options.split, options.seed, options.rows).ok_or_else(|| {
        Failure::Mistake(format!(
            "environment {name} draws no tasks: write its rows yourself, as docs/recipes.md says"
        ))
    })?;
    let rows = if options.expert {
        let shows_images = spec.describe().map_err(Failure::fault)?.images;
        let mut folder = shows_images.then(|| ImageFolder::create(options.images())).transpose()?;
        let mut seeds = Draws::new("rollcall-expert-v1", options.seed);
        tasks
            .iter()
            .map(|task| match &mut folder {
                Some(folder) => folder.row(&spec, task, seeds.bits()),
                None => demonstration(&spec, task, seeds.bits()),
            })
            .collect()
    } else {
        Ok(tasks.iter().map(dataset::row).collect::<Vec<Value>>())
    }?;
    let mut file = JsonLines::create(&options.output)
        .map_err(|e| Failure::Mistake(format!("{e}; name a new file with --output")))?;
    let mut bytes = Vec::new();
    for row in &rows {
        bytes.extend(file.append(row).map_err(Failure::fault)?);
        bytes.push(b'\n');
    }
    file.sync().map_err(Failure::fault)?;
    print_line(&json!({"path": options.output, "sha256": Digest::of(&bytes)}).to_string());
    Ok(())
}

/// An expert's episode of a task as a row of `learner sft`. The task's own `episode_seed` comes before
/// `seed`.
fn demonstration(spec: &EnvironmentSpec, task: &Task, seed: u64) -> Result<Value, Failure> {
    let player = spec.expert(task).map_err(Failure::mistake)?.ok_or_else(|| no_expert(spec))?;
    let key = outside_a_run(task, own_seed(task, seed));
    let recording = play(spec, key, MAX_CALLS, player).map_err(Failure::fault)?;
    let tools = spec.tools().map_err(Failure::fault)?;
    Ok(conversation(task, &tools, &recording))
}

fn no_expert(spec: &EnvironmentSpec) -> Failure {
    Failure::Mistake(format!(
        "environment {} has no expert: leave --expert out and let a policy play",
        spec.name()
    ))
}

/// The seed that a task fixes, else `seed`.
fn own_seed(task: &Task, seed: u64) -> u64 {
    let fields: Value = serde_json::from_str(&task.fields).unwrap_or_default();
    fields.get("episode_seed").and_then(Value::as_u64).unwrap_or(seed)
}

/// Images as PNG files, for people and for rows that name them.
#[derive(Debug)]
struct ImageFolder {
    path: PathBuf,
    written: usize,
}

impl ImageFolder {
    fn create(path: PathBuf) -> Result<Self, Failure> {
        fs::create_dir(&path).map_err(|error| {
            Failure::Mistake(format!(
                "{}: {error}; name a new file with --output, the images lie beside it",
                path.display()
            ))
        })?;
        Ok(Self { path, written: 0 })
    }

    /// An episode's image and right answer as a row of `learner sft`: `{"image", "name", "code"}`. The
    /// image is named relative to the file of the rows.
    fn row(&mut self, spec: &EnvironmentSpec, task: &Task, seed: u64) -> Result<Value, Failure> {
        let seed = own_seed(task, seed);
        let solution = spec.solution(task, seed).map_err(Failure::mistake)?;
        let Solution { name, answer } = solution.ok_or_else(|| no_expert(spec))?;
        let environment = spec.open().map_err(Failure::fault)?;
        let recorder = Recorder::start(environment, outside_a_run(task, seed), spec.limits())
            .map_err(Failure::fault)?;
        let [image] = recorder.images() else {
            return Err(Failure::Mistake(format!(
                "environment {} shows {} images an episode, and a row holds one",
                spec.name(),
                recorder.images().len()
            )));
        };
        let file = format!("{:06}.png", self.written);
        write_png(image, &self.path.join(&file))?;
        self.written += 1;
        let folder = self.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(json!({"image": format!("{folder}/{file}"), "name": name, "code": answer}))
    }
}

/// Writes an image that a person, or any other program, can look at.
fn write_png(image: &Image, path: &Path) -> Result<(), Failure> {
    let bytes = Rgb::from(image).to_png().map_err(Failure::fault)?;
    fs::write(path, bytes).map_err(|e| Failure::Fault(format!("{}: {e}", path.display())))
}

/// The key of an episode that belongs to no run.
pub fn outside_a_run(task: &Task, seed: u64) -> EpisodeKey<'_> {
    let lease = LeaseId { group: 0, generation: 0 };
    EpisodeKey { run: RunId(Digest::of(b"")), lease, task, seed }
}

/// An episode of one call a turn as a row of `learner sft`: `{"id", "messages", "tools"}`. It ends with
/// the last call: what that was answered is nothing to learn from.
pub fn conversation(task: &Task, tools: &[ToolSpec], recording: &Recording) -> Value {
    let prompt = format!("{}{}", task.prompt, recording.reset_text);
    let mut messages = vec![json!({"role": "user", "content": prompt})];
    for row in &recording.rows {
        let arguments: Value = serde_json::from_str(&row.arguments).unwrap_or_default();
        let function = json!({"name": row.tool, "arguments": arguments});
        let call = json!({"type": "function", "function": function});
        messages.push(json!({"role": "assistant", "content": "", "tool_calls": [call]}));
        messages.push(json!({"role": "tool", "content": row.observation}));
    }
    if messages.len() > 1 {
        messages.pop();
    }
    let tools: Vec<Value> = tools.iter().map(ToolSpec::to_json).collect();
    json!({"id": task.id, "messages": messages, "tools": tools})
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn options(environment: &str, output: PathBuf) -> DatasetOptions {
        DatasetOptions {
            environment: environment.into(),
            rows: 20,
            split: Split::Train,
            seed: 3,
            expert: false,
            output,
        }
    }

    fn rows(path: &Path) -> Vec<Value> {
        let text = fs::read_to_string(path).expect("written");
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    }

    #[test]
    fn ids_are_unique_over_splits_and_seeds_and_held_out_seeds_are_fixed() {
        let dir = tempfile::tempdir().expect("a directory");
        for environment in
            ["guess", r#"{"name": "office", "level": 3}"#, "wordle", "frozen_lake", "frames"]
        {
            let mut ids = BTreeSet::new();
            for (file, split, seed) in [
                ("a", Split::Train, 0),
                ("b", Split::Train, 1),
                ("c", Split::Eval, 0),
                ("d", Split::Eval, 1),
            ] {
                let output = dir.path().join(file);
                let options = options(environment, output.clone());
                run(&DatasetOptions { split, seed, ..options }).expect("written");
                for row in rows(&output) {
                    let fixed = row["task"]["episode_seed"].is_u64();
                    assert_eq!(fixed, split == Split::Eval, "{row}");
                    ids.insert(row["id"].to_string());
                }
                fs::remove_file(output).expect("removed");
            }
            assert_eq!(ids.len(), 80);
        }
    }

    #[test]
    fn experts_write_conversations_that_solve_their_tasks() {
        let dir = tempfile::tempdir().expect("a directory");
        for (environment, last) in
            [("guess", "guess"), ("office", "submit"), ("wordle", "guess"), ("frozen_lake", "move")]
        {
            let output = dir.path().join(environment);
            let options = options(environment, output.clone());
            run(&DatasetOptions { expert: true, ..options }).expect("written");
            for row in rows(&output) {
                let messages = row["messages"].as_array().expect("messages");
                assert!(messages.len() >= 2 && row["tools"].is_array());
                let call = &messages[messages.len() - 1]["tool_calls"][0]["function"];
                assert_eq!(call["name"], last);
                assert!(call["arguments"].is_object());
            }
        }
    }

    #[test]
    fn an_expert_on_images_writes_the_frames_that_episodes_show_and_their_codes() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut frames = BTreeSet::new();
        for (file, split) in [("train.jsonl", Split::Train), ("eval.jsonl", Split::Eval)] {
            let output = dir.path().join(file);
            let options = options("frames", output.clone());
            let options = DatasetOptions { expert: true, split, ..options };
            run(&options).expect("written");
            let again =
                DatasetOptions { output: dir.path().join(format!("again-{file}")), ..options };
            run(&again).expect("written");
            let spec = EnvironmentSpec::from_argument("frames").expect("an environment");
            let tasks = spec.draw_dataset(split, 3, 20).expect("drawn");
            for ((row, again), task) in rows(&output).iter().zip(rows(&again.output)).zip(tasks) {
                let text = |key: &str| row[key].as_str().expect("a text").to_owned();
                assert!(task.prompt.contains(&text("name")), "{row}");
                assert!(text("code").len() == 2 && again["code"] == row["code"], "{row}");
                let read = |row: &Value| {
                    let path = row["image"].as_str().expect("a path");
                    fs::read(dir.path().join(path)).expect("written")
                };
                let png = read(row);
                assert_eq!(png, read(&again));
                let rgb = Rgb::decode(&png).expect("an image");
                assert_eq!((rgb.width, rgb.height), (64, 64));
                frames.insert(rgb.pixels);
                if split == Split::Eval {
                    // A held-out row fixes its episode, which is the one of the picture.
                    let seed = own_seed(&task, 0);
                    let solution = spec.solution(&task, seed).expect("fits").expect("known");
                    assert_eq!(solution.answer, text("code"));
                }
            }
        }
        assert_eq!(frames.len(), 40);
        // Neither the rows nor their images are overwritten.
        let output = dir.path().join("train.jsonl");
        fs::remove_file(&output).expect("removed");
        let options = DatasetOptions { expert: true, ..options("frames", output) };
        let refused = run(&options).expect_err("refused").to_string();
        assert!(refused.contains("train-images: ") && refused.contains("--output"), "{refused}");
    }

    #[test]
    fn mistakes_are_refused_by_name_and_nothing_is_overwritten() {
        let dir = tempfile::tempdir().expect("a directory");
        let output = dir.path().join("rows");
        let refused = |options: DatasetOptions| run(&options).expect_err("refused").to_string();
        let add = refused(options("add", output.clone()));
        assert!(add.contains("environment add draws no tasks"), "{add}");
        assert!(refused(options("chess", output.clone())).contains("chess"));
        fs::write(&output, "mine").expect("written");
        assert!(refused(options("guess", output.clone())).contains("cannot create"));
        assert_eq!(fs::read_to_string(&output).expect("there"), "mine");
    }
}
