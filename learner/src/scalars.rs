//! The numbers of `metrics.jsonl` by name, as plots, event files, `learner watch` and the metrics endpoint
//! take them: what stands in an object is named by its path, as `leases/granted`.
//!
//! Their meanings stand in docs/metrics.md; a test holds the two together.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Read as _, Seek as _, SeekFrom},
    path::{Path, PathBuf},
};

use serde_json::{Map, Value};

/// Where a record stands on the axis of time; no numbers of its own.
const AXES: [&str; 3] = ["step", "update", "round"];
/// Longest line that is read, in bytes.
const MAX_LINE: usize = 16 << 20;

/// Optimizer steps, or updates, that a record has behind it.
pub fn position(record: &Value) -> Option<u64> {
    record["step"].as_u64().or_else(|| record["update"].as_u64())
}

/// The finite numbers of a record, with their names.
pub fn scalars(record: &Value) -> Vec<(String, f64)> {
    let mut found = Vec::new();
    if let Some(fields) = record.as_object() {
        collect("", fields, &mut found);
    }
    found
}

fn collect(prefix: &str, fields: &Map<String, Value>, found: &mut Vec<(String, f64)>) {
    for (key, value) in fields {
        if prefix.is_empty() && AXES.contains(&key.as_str()) {
            continue;
        }
        match value {
            Value::Object(fields) => collect(&format!("{prefix}{key}/"), fields, found),
            Value::Number(number) => {
                let number = number.as_f64().filter(|it| it.is_finite());
                found.extend(number.map(|it| (format!("{prefix}{key}"), it)));
            }
            _ => {}
        }
    }
}

/// Numbers over steps, by name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Series(BTreeMap<String, Vec<(f64, f64)>>);

impl Series {
    /// Adds the numbers of a record that stands somewhere on the axis.
    pub fn add(&mut self, record: &Value) {
        let Some(position) = position(record) else { return };
        for (name, number) in scalars(record) {
            self.0.entry(name).or_default().push((position as f64, number));
        }
    }

    /// One of them: steps and numbers, in the order of the file.
    pub fn get(&self, name: &str) -> &[(f64, f64)] {
        self.0.get(name).map_or(&[], Vec::as_slice)
    }

    /// The last number of this name.
    pub fn last(&self, name: &str) -> Option<f64> {
        self.get(name).last().map(|(_, number)| *number)
    }

    /// Names that go on from `prefix`, without it.
    pub fn under<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = &'a str> {
        self.names().filter_map(move |name| name.strip_prefix(prefix))
    }

    /// All names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }
}

/// A file of JSON lines that another process may be writing.
#[derive(Debug)]
pub struct Growing {
    path: PathBuf,
    offset: u64,
    lines: u64,
}

/// What was new in a growing file.
#[derive(Debug, Default)]
pub struct News {
    /// Records, in order.
    pub records: Vec<Value>,
    /// Whether the file was cut back or replaced, so that the records are all there are.
    pub anew: bool,
    /// The first line that is none, and why.
    pub damaged: Option<(u64, String)>,
}

impl Growing {
    /// From its start.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), offset: 0, lines: 0 }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Goes to the start of the last line but `lines`, where the file is long.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn skip_to_last(&mut self, bytes: u64) -> io::Result<()> {
        let length = match fs::metadata(&self.path) {
            Ok(found) => found.len(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        };
        if length <= bytes {
            return Ok(());
        }
        let mut file = fs::File::open(&self.path)?;
        file.seek(SeekFrom::Start(length - bytes))?;
        let mut tail = Vec::new();
        file.take(bytes).read_to_end(&mut tail)?;
        let first = tail.iter().position(|byte| *byte == b'\n').map_or(tail.len(), |at| at + 1);
        self.offset = length - bytes + first as u64;
        Ok(())
    }

    /// The whole lines that were written since the last call; none where there is no file yet.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(&mut self) -> io::Result<News> {
        let mut news = News::default();
        let found = match fs::metadata(&self.path) {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(news),
            Err(error) => return Err(error),
        };
        if !found.is_file() {
            return Err(io::Error::other("it is no regular file"));
        }
        let mut file = fs::File::open(&self.path)?;
        // A run that is gone on with cuts off what it had not committed.
        if found.len() < self.offset {
            (self.offset, self.lines, news.anew) = (0, 0, true);
        }
        file.seek(SeekFrom::Start(self.offset))?;
        let mut block = vec![0; 1 << 20];
        let mut text = Vec::new();
        loop {
            let read = file.read(&mut block)?;
            text.extend_from_slice(block.get(..read).unwrap_or_default());
            if read == 0 {
                return Ok(news);
            }
            let Some(end) = text.iter().rposition(|byte| *byte == b'\n') else {
                if text.len() > MAX_LINE {
                    let problem = "a line without end".to_owned();
                    news.damaged.get_or_insert((self.lines + 1, problem));
                    return Ok(news);
                }
                continue;
            };
            for line in text.get(..end).unwrap_or_default().split(|byte| *byte == b'\n') {
                self.lines += 1;
                if line.is_empty() {
                    continue;
                }
                match serde_json::from_slice(line) {
                    Ok(record) => news.records.push(record),
                    Err(error) => drop(news.damaged.get_or_insert((self.lines, error.to_string()))),
                }
            }
            self.offset += end as u64 + 1;
            text.drain(..=end);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn numbers_are_named_by_their_path_and_what_is_none_is_left_out() {
        let record = json!({
            "step": 3, "reward": 0.5, "clip_ratio/low_mean": 0.0, "leases": {"granted": 4},
            "kl": null, "stepped": true, "policy": "ab", "list": [1], "sampling": {"a": {"b": 1}},
        });
        let expected = [
            ("reward", 0.5),
            ("clip_ratio/low_mean", 0.0),
            ("leases/granted", 4.0),
            ("sampling/a/b", 1.0),
        ]
        .map(|(name, number)| (name.to_owned(), number));
        assert_eq!(scalars(&record), expected);
        assert_eq!(position(&record), Some(3));
        assert_eq!(position(&json!({"update": 2})), Some(2));
        assert_eq!(scalars(&json!([1, 2])), []);
        let mut series = Series::default();
        series.add(&record);
        series.add(&json!({"step": 4, "reward": 1}));
        series.add(&json!({"reward": 7}));
        assert_eq!(series.get("reward"), [(3.0, 0.5), (4.0, 1.0)]);
        assert_eq!(series.under("leases/").collect::<Vec<_>>(), ["granted"]);
        assert_eq!((series.last("reward"), series.last("none")), (Some(1.0), None));
    }

    #[test]
    fn a_growing_file_is_read_line_by_line_and_again_where_it_was_cut() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("metrics.jsonl");
        let mut growing = Growing::new(&path);
        assert!(growing.read().expect("nothing yet").records.is_empty());
        let mut read = |text: &str| {
            fs::write(&path, text).expect("written");
            growing.read().expect("read")
        };
        assert!(read("{\"step\":").records.is_empty());
        assert_eq!(read("{\"step\":1}\n{\"st").records, [json!({"step": 1})]);
        let news = read("{\"step\":1}\n{\"step\":2}\nno\n{\"step\":3}\n");
        assert_eq!(news.records, [json!({"step": 2}), json!({"step": 3})]);
        assert_eq!((news.damaged.map(|it| it.0), news.anew), (Some(3), false));
        let news = read("{\"step\":9}\n");
        assert_eq!((news.records, news.anew), (vec![json!({"step": 9})], true));
        let mut tail = Growing::new(&path);
        fs::write(&path, "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n").expect("written");
        tail.skip_to_last(15).expect("there");
        assert_eq!(tail.read().expect("read").records, [json!({"step": 3})]);
    }
}
