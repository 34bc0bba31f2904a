//! What a run's directory says, as far as it is written.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;
use terminal::Failure;

/// A run of any of the trainers.
#[derive(Debug)]
pub(super) struct RunData {
    /// Its directory.
    pub(super) path: PathBuf,
    /// `manifest.json`.
    pub(super) manifest: Value,
    /// Lines of `metrics.jsonl` that are steps or updates, in order.
    pub(super) steps: Vec<Value>,
    /// Those that are evaluations: their step, and the record.
    pub(super) evaluations: Vec<(f64, Value)>,
}

impl RunData {
    /// Reads a run. A last line that is being written is left out.
    ///
    /// # Errors
    /// The directory holds no run.
    pub(super) fn read(path: &Path) -> Result<Self, Failure> {
        let manifest = read_manifest(path)?;
        let metrics = fs::read_to_string(path.join("metrics.jsonl")).unwrap_or_default();
        let (mut steps, mut evaluations) = (Vec::new(), Vec::new());
        for line in metrics.lines() {
            let Ok(line) = serde_json::from_str::<Value>(line) else { continue };
            match (&line["evaluation"], position(&line)) {
                (evaluation @ Value::Object(_), _) => {
                    let step = line["step"].as_f64().unwrap_or_default();
                    evaluations.push((step, evaluation.clone()));
                }
                (_, Some(_)) => steps.push(line),
                _ => {}
            }
        }
        Ok(Self { path: path.to_owned(), manifest, steps, evaluations })
    }

    /// How the run is called on the page.
    pub(super) fn name(&self) -> String {
        let name = self.path.file_name().unwrap_or(self.path.as_os_str());
        name.to_string_lossy().into_owned()
    }

    /// A number of the manifest by its path, as `leases/accepted`.
    pub(super) fn number(&self, pointer: &str) -> Option<f64> {
        self.manifest.pointer(&format!("/{pointer}")).and_then(Value::as_f64)
    }

    /// Refused episodes by the rung of the audit that refused them.
    pub(super) fn rejections(&self) -> BTreeMap<String, u64> {
        let reasons = self.manifest["rejections"].as_object().into_iter().flatten();
        reasons.filter_map(|(name, count)| Some((name.clone(), count.as_u64()?))).collect()
    }
}

fn read_manifest(path: &Path) -> Result<Value, Failure> {
    let file = path.join("manifest.json");
    match fs::read(&file) {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map_err(|e| Failure::Mistake(format!("{}: {e}", file.display()))),
        // Runs on rows write theirs at the end.
        Err(_) if path.join("metrics.jsonl").is_file() => Ok(Value::Null),
        Err(error) => Err(Failure::Mistake(format!(
            "{}: {error}; name the directory that a run was written to",
            file.display()
        ))),
    }
}

/// Where a step or an update stands on the axis of a plot.
pub(super) fn position(line: &Value) -> Option<f64> {
    line["step"].as_f64().or_else(|| line["update"].as_f64())
}
