//! `learner dataset`: task rows of an environment that draws its own, or an expert's conversations for
//! `learner sft`.

use std::path::PathBuf;

use environments::{EnvironmentSpec, EpisodeKey, Recording, ToolSpec, dataset, draws::Draws, play};
use protocol::{Digest, LeaseId, RunId, Split, Task};
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
    /// Conversations of an expert instead of tasks.
    pub expert: bool,
    /// The file, which must not exist.
    pub output: PathBuf,
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
        let mut seeds = Draws::new("rollcall-expert-v1", options.seed);
        tasks.iter().map(|task| demonstration(&spec, task, seeds.bits())).collect()
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
    let player = spec.expert(task).map_err(Failure::mistake)?.ok_or_else(|| {
        Failure::Mistake(format!(
            "environment {} has no expert: leave --expert out and let a policy play",
            spec.name()
        ))
    })?;
    let fields: Value = serde_json::from_str(&task.fields).unwrap_or_default();
    let seed = fields.get("episode_seed").and_then(Value::as_u64).unwrap_or(seed);
    let recording =
        play(spec, outside_a_run(task, seed), MAX_CALLS, player).map_err(Failure::fault)?;
    let tools = spec.tools().map_err(Failure::fault)?;
    Ok(conversation(task, &tools, &recording))
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

    fn rows(path: &std::path::Path) -> Vec<Value> {
        let text = std::fs::read_to_string(path).expect("written");
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    }

    #[test]
    fn ids_are_unique_over_splits_and_seeds_and_held_out_seeds_are_fixed() {
        let dir = tempfile::tempdir().expect("a directory");
        for environment in ["guess", r#"{"name": "office", "level": 3}"#, "wordle", "frozen_lake"] {
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
                std::fs::remove_file(output).expect("removed");
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
    fn mistakes_are_refused_by_name_and_nothing_is_overwritten() {
        let dir = tempfile::tempdir().expect("a directory");
        let output = dir.path().join("rows");
        let refused = |options: DatasetOptions| run(&options).expect_err("refused").to_string();
        let add = refused(options("add", output.clone()));
        assert!(add.contains("environment add draws no tasks"), "{add}");
        assert!(refused(options("chess", output.clone())).contains("chess"));
        std::fs::write(&output, "mine").expect("written");
        assert!(refused(options("guess", output.clone())).contains("cannot create"));
        assert_eq!(std::fs::read_to_string(&output).expect("there"), "mine");
    }
}
