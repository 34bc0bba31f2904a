//! Datasets of built-in environments: rows drawn from a seed, with unique ids and held-out splits.
//!
//! A row is a line of JSON, `{"id": …, "prompt": …, "task": {"split": "train" | "eval", …}}`.

use protocol::{Split, Task};
use serde_json::{Map, Value, json};

use crate::{EnvironmentSpec, draws::Draws};

impl EnvironmentSpec {
    /// Draws `count` rows of a split: a function of the settings, the split and the seed. Ids are
    /// unique over both splits and all seeds. Held-out rows fix their episode's seed, so that every
    /// evaluation plays the same episodes; a training row is another episode in each group. Nothing where the environment draws no tasks, because
    /// its users bring their own.
    pub fn draw_dataset(&self, split: Split, seed: u64, count: usize) -> Option<Vec<Task>> {
        let (name, domain) = match split {
            Split::Train => ("train", "rollcall-dataset-train-v1"),
            Split::Eval => ("eval", "rollcall-dataset-eval-v1"),
        };
        let mut draws = Draws::new(domain, seed);
        let mut episodes = Draws::new("rollcall-dataset-episodes-v1", seed);
        let row = |index| {
            let (prompt, drawn) = self.blueprint().draw_task(split, &mut draws)?;
            let mut fields = Map::new();
            fields.insert("split".into(), name.into());
            if split == Split::Eval {
                // 53 bits: what every reader of JSON keeps.
                fields.insert("episode_seed".into(), (episodes.bits() >> 11).into());
            }
            fields.extend(drawn);
            Some(Task {
                id: format!("{}-{name}-{seed}-{index}", self.name()),
                prompt,
                fields: Value::Object(fields).to_string(),
                split,
            })
        };
        (0..count).map(row).collect()
    }
}

/// A task as a dataset's row. Its object's text is read as JSON, `null` where it is none.
pub fn row(task: &Task) -> Value {
    let fields: Value = serde_json::from_str(&task.fields).unwrap_or_default();
    json!({"id": task.id, "prompt": task.prompt, "task": fields})
}
