//! What is known of a run, brought up to date from its files.

use std::{
    collections::{BTreeMap, VecDeque},
    fs, io,
    path::{Path, PathBuf},
    time::SystemTime,
};

use serde_json::Value;
use terminal::Failure;

use crate::{
    audit::RungName,
    files::{EVIDENCE, METRICS, read_any_manifest},
    joins::JOINS,
    scalars::{Growing, Series},
};

/// Bytes of long files that are looked at when watching begins.
const TAIL: u64 = 4 << 20;
/// Joins that are remembered.
const JOINS_KEPT: usize = 50;

/// A run as far as its files tell.
#[derive(Debug)]
pub(super) struct State {
    path: PathBuf,
    metrics: Growing,
    evidence: Growing,
    joins_log: Growing,
    begun: bool,
    written: Option<SystemTime>,
    /// `manifest.json`; null where there is none.
    pub(super) manifest: Value,
    /// The numbers of `metrics.jsonl`.
    pub(super) series: Series,
    /// The row of the last accepted episode.
    pub(super) episode: Option<Value>,
    /// Who joined or was turned away, the last ones.
    pub(super) joins: VecDeque<Value>,
    /// What is wrong with the run's files.
    pub(super) problem: Option<String>,
}

/// What was new.
#[derive(Debug, Default)]
pub(super) struct Update {
    /// Lines of `metrics.jsonl`.
    pub(super) records: Vec<Value>,
    /// Lines of `joins.jsonl`.
    pub(super) joins: Vec<Value>,
    /// The last episode, where there is a new one.
    pub(super) episode: Option<Value>,
    /// Whether the run went back to a commit: its lines come again.
    pub(super) anew: bool,
}

impl State {
    /// Of the run in this directory, nothing of it read yet.
    pub(super) fn new(path: &Path) -> Result<Self, Failure> {
        if fs::metadata(path).is_ok_and(|found| !found.is_dir()) {
            let path = path.display();
            return Err(Failure::Mistake(format!(
                "{path}: it is no directory; name the directory that a run is written to"
            )));
        }
        Ok(Self {
            metrics: Growing::new(path.join(METRICS)),
            evidence: Growing::new(path.join(EVIDENCE)),
            joins_log: Growing::new(path.join(JOINS)),
            path: path.to_owned(),
            begun: false,
            written: None,
            manifest: Value::Null,
            series: Series::default(),
            episode: None,
            joins: VecDeque::new(),
            problem: None,
        })
    }

    /// Reads what was written since the last call.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(super) fn refresh(&mut self) -> Result<Update, Failure> {
        let fault = |path: &Path, error: io::Error| {
            Failure::Mistake(format!("{}: {error}; name a run that can be read", path.display()))
        };
        if !std::mem::replace(&mut self.begun, true) {
            for file in [&mut self.evidence, &mut self.joins_log] {
                file.skip_to_last(TAIL).map_err(|error| fault(file.path(), error))?;
            }
        }
        self.look_at_manifest();
        let mut read = |file: &mut Growing| {
            let news = file.read().map_err(|error| fault(file.path(), error))?;
            if let Some((line, problem)) = &news.damaged {
                let path = file.path().display();
                self.problem = Some(format!("{path}: line {line}: {problem}; it is left out"));
            }
            Ok::<_, Failure>(news)
        };
        let metrics = read(&mut self.metrics)?;
        let episodes = read(&mut self.evidence)?;
        let joins = read(&mut self.joins_log)?;
        if metrics.anew {
            self.series = Series::default();
        }
        metrics.records.iter().for_each(|record| self.series.add(record));
        let episode = episodes.records.into_iter().next_back();
        if episode.is_some() {
            self.episode.clone_from(&episode);
        }
        for join in &joins.records {
            self.joins.push_back(join.clone());
            if self.joins.len() > JOINS_KEPT {
                self.joins.pop_front();
            }
        }
        let (records, anew) = (metrics.records, metrics.anew);
        Ok(Update { records, joins: joins.records, episode, anew })
    }

    /// A manifest that cannot be read leaves what is known as it is.
    fn look_at_manifest(&mut self) {
        let found = fs::metadata(self.path.join("manifest.json")).and_then(|it| it.modified());
        let written = found.ok();
        if written.is_none() || written == self.written {
            return;
        }
        match read_any_manifest(&self.path) {
            Ok(Some(manifest)) => self.manifest = manifest,
            // It is being replaced.
            Ok(None) => return,
            Err(problem) => self.problem = Some(problem),
        }
        self.written = written;
    }

    /// How the run is called.
    pub(super) fn name(&self) -> String {
        let whole = self.path.canonicalize().unwrap_or_else(|_| self.path.clone());
        super::plain(&whole.file_name().unwrap_or(whole.as_os_str()).to_string_lossy())
    }

    /// `waiting`, `running`, `completed`, `failed` or `interrupted`.
    pub(super) fn status(&self) -> &str {
        if let Some(status) = self.manifest["status"].as_str() {
            return status;
        }
        let metrics = fs::metadata(self.path.join(METRICS)).and_then(|it| it.modified()).ok();
        // Runs on rows write theirs at the end: one that is gone on with has an old one.
        let old = metrics > self.written;
        match self.manifest.pointer("/result/status").and_then(Value::as_str) {
            Some(status) if !old => status,
            _ if metrics.is_some() => "running",
            _ => "waiting",
        }
    }

    /// Whether nothing more will come.
    pub(super) fn ended(&self) -> bool {
        matches!(self.status(), "completed" | "failed" | "interrupted")
    }

    /// Steps or updates made, and how many there will be, where the recipe says so.
    pub(super) fn steps(&self) -> (u64, Option<u64>) {
        let names = ["loss", "pg_loss", "evaluation/success", "evaluation/loss"];
        let last = names.iter().filter_map(|name| self.series.get(name).last());
        let made = last.map(|(step, _)| *step as u64).max().unwrap_or_default();
        let total = self.manifest.pointer("/settings/training/max_steps").and_then(Value::as_u64);
        (made, total)
    }

    /// Episodes that the audit refused, by rung.
    pub(super) fn rejections(&self) -> BTreeMap<&str, u64> {
        let mut found = BTreeMap::new();
        for (code, count) in self.manifest["rejections"].as_object().into_iter().flatten() {
            let rung = RungName::of(code).map_or("unknown", RungName::name);
            *found.entry(rung).or_default() += count.as_u64().unwrap_or_default();
        }
        found
    }

    /// What was said of the last refused episodes.
    pub(super) fn refusals(&self) -> impl DoubleEndedIterator<Item = String> {
        let all = self.manifest["last_rejected"].as_array().into_iter().flatten();
        all.filter_map(|it| it.get(1).and_then(Value::as_str)).map(super::plain)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_followed_from_before_its_start_to_its_end() {
        let dir = tempfile::tempdir().expect("a directory");
        let run = dir.path().join("run");
        let mut state = State::new(&run).expect("nothing there yet");
        state.refresh().expect("nothing to read");
        assert_eq!((state.status(), state.ended()), ("waiting", false));
        fs::create_dir(&run).expect("created");
        let write = |name: &str, text: &str| fs::write(run.join(name), text).expect("written");
        write("metrics.jsonl", "{\"step\":1,\"loss\":0.5}\n{\"step\":2,\"lo");
        let update = state.refresh().expect("read");
        assert_eq!((update.records.len(), state.status()), (1, "running"));
        write("metrics.jsonl", "{\"step\":1,\"loss\":0.5}\n{\"step\":2,\"loss\":0.25}\n");
        write("evidence.jsonl", "{\"task_id\":\"a\"}\n{\"task_id\":\"b\"}\n");
        write("joins.jsonl", "{\"outcome\":\"joined\"}\n");
        let manifest = r#"{"status":"completed","settings":{"training":{"max_steps":2}},
            "rejections":{"mask_mismatch":2,"trace_head":1},"last_rejected":[[null,"a\u001b"]]}"#;
        write("manifest.json", manifest);
        let update = state.refresh().expect("read");
        assert_eq!((update.records.len(), update.joins.len()), (1, 1));
        assert_eq!(update.episode.map(|it| it["task_id"].clone()), Some("b".into()));
        assert_eq!((state.steps(), state.ended()), ((2, Some(2)), true));
        assert_eq!(state.rejections(), BTreeMap::from([("tokens", 2), ("trace", 1)]));
        assert_eq!(state.refusals().collect::<Vec<_>>(), ["a "]);
        // It went back to a commit and on from there.
        write("metrics.jsonl", "{\"step\":1,\"loss\":0.5}\n");
        assert!(state.refresh().expect("read").anew);
        assert_eq!(state.series.get("loss"), [(1.0, 0.5)]);
        write("metrics.jsonl", "{\"step\":1,\"loss\":0.5}\nno\n");
        state.refresh().expect("read");
        assert!(state.problem.as_deref().is_some_and(|it| it.contains("line 2")));
        assert!(State::new(&run.join("metrics.jsonl")).is_err());
    }
}
