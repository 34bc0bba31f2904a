//! Data sets: JSON lines, read once, digested and checked in that one reading, so that what was
//! checked is what is used.

use std::{collections::HashSet, fs, io::Read as _, path::Path};

use environments::EnvironmentSpec;
use protocol::{Digest, Split, Task};
use serde_json::{Map, Value};

use super::{
    Frozen, RecipeError,
    json::{self, clipped, shown},
};

/// Largest data set, in bytes.
pub(super) const MAX_FILE: u64 = 2 << 30;
/// Largest row, in bytes.
const MAX_LINE: usize = 4 << 20;
/// Longest id, in bytes: what a frame may carry.
const MAX_ID: usize = 512;
/// Longest prompt and longest task object, in bytes: what a frame may carry.
const MAX_TEXT: usize = 256 << 10;

/// One task of a data set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskRow {
    /// The task as leases carry it.
    pub task: Task,
    /// The seed that the row fixes for its episodes, if it does.
    pub episode_seed: Option<u64>,
}

/// The tasks of a frozen file: `{"id", "prompt", "task": {"split", "episode_seed"?, ...}}` a line.
/// Other columns are ignored, as TRL ignores them.
///
/// # Errors
/// The file cannot be read or is not the frozen one; a row that is no task of this split, repeats an
/// id or does not fit the environment, by line.
pub fn read_tasks(
    file: &Frozen,
    split: Split,
    environment: &EnvironmentSpec,
) -> Result<Vec<TaskRow>, RecipeError> {
    let mut ids = HashSet::new();
    let rows = read_rows(file, |_, row| {
        let row = task_row(row, split)?;
        environment.check_task(&row.task).map_err(|error| error.to_string())?;
        if !ids.insert(row.task.id.clone()) {
            return Err(format!("id {:?} stands twice: ids are unique", clipped(&row.task.id)));
        }
        Ok(row)
    })?;
    Ok(rows)
}

/// Refuses an evaluation set that shares ids with the training set.
///
/// # Errors
/// The first shared id.
pub fn check_disjoint(train: &[TaskRow], eval: &[TaskRow]) -> Result<(), RecipeError> {
    let ids: HashSet<&str> = train.iter().map(|row| row.task.id.as_str()).collect();
    match eval.iter().find(|row| ids.contains(row.task.id.as_str())) {
        None => Ok(()),
        Some(row) => Err(RecipeError::conflict(
            "evaluation.dataset",
            format!("id {:?} is a training task too", clipped(&row.task.id)),
            "give held-out tasks ids of their own",
        )),
    }
}

/// Reads a frozen file of JSON objects, one a line; blank lines are skipped. `row` turns an object
/// and its line, from 1, into what is kept, or says what is wrong with it.
///
/// # Errors
/// The file cannot be read or is not the frozen one; a line that is no JSON object or that `row`
/// refuses; no rows at all.
pub(super) fn read_rows<T>(
    file: &Frozen,
    row: impl FnMut(u64, &Map<String, Value>) -> Result<T, String>,
) -> Result<Vec<T>, RecipeError> {
    let bytes = read_bounded(&format!("{}.path", file.field), &file.path, MAX_FILE)?;
    file.verify(Digest::of(&bytes))?;
    parse_rows(&bytes, &file.path, row)
}

/// The rows of a file that holds `bytes`.
///
/// # Errors
/// As [`read_rows`].
pub(super) fn parse_rows<T>(
    bytes: &[u8],
    path: &Path,
    mut row: impl FnMut(u64, &Map<String, Value>) -> Result<T, String>,
) -> Result<Vec<T>, RecipeError> {
    let mut rows = Vec::new();
    for (line, text) in (1..).zip(bytes.split(|byte| *byte == b'\n')) {
        if text.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let wrong = |problem: String| RecipeError::Row { path: path.to_owned(), line, problem };
        if text.len() > MAX_LINE {
            return Err(wrong(format!("a row of more than {MAX_LINE} bytes")));
        }
        match json::parse(text) {
            Ok(Value::Object(object)) => rows.push(row(line, &object).map_err(wrong)?),
            Ok(other) => {
                return Err(wrong(format!("a row is a JSON object, not {}", shown(&other))));
            }
            Err(error) => return Err(wrong(error.to_string())),
        }
    }
    if rows.is_empty() {
        return Err(RecipeError::NoRows { path: path.to_owned() });
    }
    Ok(rows)
}

/// Reads a whole file of at most `limit` bytes.
pub(super) fn read_bounded(what: &str, path: &Path, limit: u64) -> Result<Vec<u8>, RecipeError> {
    let read = || {
        let mut bytes = Vec::new();
        fs::File::open(path)?.take(limit + 1).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes: Vec<u8> = read().map_err(|source| RecipeError::Read {
        what: what.into(),
        path: path.to_owned(),
        source,
    })?;
    if bytes.len() as u64 > limit {
        return Err(RecipeError::TooLarge { what: what.into(), path: path.to_owned(), limit });
    }
    Ok(bytes)
}

fn task_row(row: &Map<String, Value>, split: Split) -> Result<TaskRow, String> {
    let id = text(row, "id", MAX_ID)?;
    let prompt = text(row, "prompt", MAX_TEXT)?;
    let fields = match row.get("task") {
        Some(Value::Object(fields)) => fields,
        Some(other) => return Err(format!("task must be an object, not {}", shown(other))),
        None => return Err("task is missing: add an object with a split".into()),
    };
    let wanted = match split {
        Split::Train => "train",
        Split::Eval => "eval",
    };
    match fields.get("split") {
        Some(found) if found == wanted => {}
        found => {
            return Err(format!(
                "task.split must be {wanted:?} in this file, not {}",
                found.map_or_else(|| "absent".into(), shown)
            ));
        }
    }
    let episode_seed = match fields.get("episode_seed") {
        None | Some(Value::Null) => None,
        Some(value) => Some(value.as_u64().ok_or_else(|| {
            format!(
                "task.episode_seed must be an integer from 0 to {}, not {}",
                u64::MAX,
                shown(value)
            )
        })?),
    };
    let fields = Value::Object(fields.clone()).to_string();
    if fields.len() > MAX_TEXT {
        return Err(format!("task must be at most {MAX_TEXT} bytes of JSON"));
    }
    Ok(TaskRow { task: Task { id: id.into(), prompt: prompt.into(), fields, split }, episode_seed })
}

/// A non-empty text of a row.
pub(super) fn text<'a>(
    row: &'a Map<String, Value>,
    key: &str,
    limit: usize,
) -> Result<&'a str, String> {
    match row.get(key) {
        Some(Value::String(text)) if !text.is_empty() && text.len() <= limit => Ok(text),
        None | Some(Value::Null) => Err(format!("{key} is missing: add a non-empty text")),
        Some(other) => Err(format!(
            "{key} must be a non-empty text of at most {limit} bytes, not {}",
            shown(other)
        )),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn environment() -> EnvironmentSpec {
        EnvironmentSpec::parse(&json!({"name": "guess"})).expect("valid")
    }

    /// A frozen file with this text, in a directory that lives as long as it is needed.
    fn file(text: &str) -> (tempfile::TempDir, Frozen) {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("tasks.jsonl");
        fs::write(&path, text).expect("written");
        let sha256 = Digest::of(text.as_bytes());
        (dir, Frozen { field: "dataset".into(), path, sha256 })
    }

    fn row(id: &str, task: Value) -> String {
        json!({"id": id, "prompt": "Play.", "task": task, "extra": 1}).to_string()
    }

    fn error(text: &str) -> String {
        let (_dir, file) = file(text);
        let error = read_tasks(&file, Split::Train, &environment()).expect_err("refused");
        error.to_string().replace(&*file.path.to_string_lossy(), "FILE")
    }

    #[test]
    fn tasks_keep_their_fields_and_seeds() {
        let text = format!(
            "{}\r\n\n{}\n",
            row("a", json!({"split": "train", "episode_seed": 7, "n": 9})),
            row("b", json!({"split": "train"}))
        );
        let (_dir, file) = file(&text);
        let rows = read_tasks(&file, Split::Train, &environment()).expect("valid");
        assert_eq!((rows.len(), rows[0].episode_seed, rows[1].episode_seed), (2, Some(7), None));
        assert_eq!(rows[0].task.fields, r#"{"split":"train","episode_seed":7,"n":9}"#);
    }

    #[test]
    fn mistakes_name_file_and_line() {
        let good = row("a", json!({"split": "train"}));
        for (second, message) in [
            (r#"{"prompt": "p"}"#.into(), "id is missing: add a non-empty text"),
            (good.clone(), "id \"a\" stands twice: ids are unique"),
            (
                row("b", json!({"split": "eval"})),
                "task.split must be \"train\" in this file, not \"eval\"",
            ),
            (row("b", json!({})), "task.split must be \"train\" in this file, not absent"),
            (row("b", json!(3)), "task must be an object, not 3"),
            (
                row("b", json!({"split": "train", "episode_seed": -1})),
                "task.episode_seed must be an integer from 0 to 18446744073709551615, not -1",
            ),
            (
                row("b", json!({"split": "train", "n": 0})),
                "task.n must be an integer from 1 to 1000000, not 0",
            ),
            ("[]".into(), "a row is a JSON object, not []"),
            ("{".into(), "not valid JSON: EOF while parsing an object at line 1 column 1"),
        ] {
            assert_eq!(error(&format!("{good}\n{second}\n")), format!("FILE line 2: {message}"));
        }
        assert_eq!(error("\n"), "FILE has no rows: write one JSON object a line");
    }

    #[test]
    fn a_changed_file_is_refused_before_its_rows_are_read() {
        let (_dir, mut file) = file("[]");
        file.sha256 = Digest::of(b"other");
        let error = read_tasks(&file, Split::Train, &environment()).expect_err("refused");
        assert!(matches!(error, RecipeError::Sha256 { .. }), "{error}");
    }

    #[test]
    fn held_out_ids_are_not_training_ids() {
        let task = |id: &str, split| TaskRow {
            task: Task { id: id.into(), prompt: "p".into(), fields: "{}".into(), split },
            episode_seed: None,
        };
        let train = [task("a", Split::Train), task("b", Split::Train)];
        check_disjoint(&train, &[task("c", Split::Eval)]).expect("disjoint");
        let error = check_disjoint(&train, &[task("b", Split::Eval)]).expect_err("shared");
        assert!(error.to_string().contains("id \"b\" is a training task too"), "{error}");
    }
}
