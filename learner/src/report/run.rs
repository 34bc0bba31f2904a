//! What a run's directory says, as far as it is written.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde_json::Value;
use terminal::Failure;

use crate::{
    audit::RungName,
    files::{METRICS, read_any_manifest},
    scalars::{Growing, Series},
};

/// A run of any of the trainers.
#[derive(Debug)]
pub(super) struct RunData {
    /// Its directory.
    pub(super) path: PathBuf,
    /// `manifest.json`; null where there is none yet.
    pub(super) manifest: Value,
    /// The numbers of `metrics.jsonl`.
    pub(super) series: Series,
}

impl RunData {
    /// Reads a run. A last line that is being written is left out.
    ///
    /// # Errors
    /// The directory holds no run, or a damaged one: one line.
    pub(super) fn read(path: &Path) -> Result<Self, Failure> {
        let manifest = match read_any_manifest(path).map_err(Failure::Mistake)? {
            Some(manifest) => manifest,
            // Runs on rows write theirs at the end.
            None if path.join(METRICS).is_file() => Value::Null,
            None => {
                let file = path.join("manifest.json");
                let problem = "there is none; name the directory that a run was written to";
                return Err(Failure::Mistake(format!("{}: {problem}", file.display())));
            }
        };
        let mut metrics = Growing::new(path.join(METRICS));
        let wrong = |problem: String| {
            let file = path.join(METRICS);
            Failure::Mistake(format!("{}: {problem}", file.display()))
        };
        let news = metrics.read().map_err(|error| wrong(format!("{error}; restore the file")))?;
        if let Some((line, problem)) = news.damaged {
            return Err(wrong(format!("line {line}: {problem}; restore or remove the line")));
        }
        let mut series = Series::default();
        news.records.iter().for_each(|record| series.add(record));
        Ok(Self { path: path.to_owned(), manifest, series })
    }

    /// How the run is called on the page.
    pub(super) fn name(&self) -> String {
        let whole = self.path.canonicalize().unwrap_or_else(|_| self.path.clone());
        let name = whole.file_name().unwrap_or(whole.as_os_str()).to_string_lossy().into_owned();
        name.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
    }

    /// The largest number of this name.
    pub(super) fn most(&self, name: &str) -> Option<f64> {
        self.series.get(name).iter().map(|(_, number)| *number).reduce(f64::max)
    }

    /// Refused episodes by rung of the audit and reason.
    pub(super) fn rejections(&self) -> BTreeMap<String, u64> {
        let reasons = self.manifest["rejections"].as_object().into_iter().flatten();
        let named = reasons.filter_map(|(code, count)| {
            let rung = RungName::of(code).map_or("unknown", RungName::name);
            Some((format!("{rung}: {code}"), count.as_u64()?))
        });
        named.collect()
    }
}
