//! `metrics.jsonl` of a run on rows, and the same numbers for TensorBoard.

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
};

use serde::Serialize;
use serde_json::{Value, json};
use terminal::Failure;

use crate::{
    checkpoint::cut_back,
    files::METRICS,
    scalars::{Growing, position},
    tensorboard::EventFile,
};

/// The log of a run that goes on. Written by rank 0.
#[derive(Debug)]
pub struct MetricsLog {
    path: PathBuf,
    file: fs::File,
    events: Option<EventFile>,
    updates: u64,
    evaluated: Option<u64>,
}

impl MetricsLog {
    /// That of the run in `output`, of which the first `bytes` bytes stand: none at its start.
    ///
    /// # Errors
    /// It cannot be read and written.
    pub fn open(output: &Path, bytes: u64, tensorboard: bool) -> Result<Self, Failure> {
        let path = output.join(METRICS);
        cut_back(&path, bytes)?;
        let fault = |e| Failure::Fault(format!("{}: {e}", path.display()));
        let before = Growing::new(&path).read().map_err(fault)?;
        let updates = before.records.iter().filter_map(position).max().unwrap_or_default();
        let mut evaluations = before.records.iter().filter(|it| it["evaluation"].is_object());
        let evaluated = evaluations.next_back().and_then(position);
        let file = fs::OpenOptions::new().create(true).append(true).open(&path).map_err(fault)?;
        let events = tensorboard.then(|| EventFile::create(output, updates)).transpose();
        Ok(Self { path, file, events: events.map_err(Failure::fault)?, updates, evaluated })
    }

    /// Updates of the whole run that were written, whatever their number in a round.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// Appends what held-out rows say after so many updates of the whole run, unless it was written.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn evaluation(&mut self, evaluation: &impl Serialize, updates: u64) -> Result<(), Failure> {
        if self.evaluated == Some(updates) {
            return Ok(());
        }
        self.evaluated = Some(updates);
        self.append(&json!({"evaluation": evaluation, "step": updates}))
    }

    /// Appends a line.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn append(&mut self, record: &impl Serialize) -> Result<(), Failure> {
        let record: Value = serde_json::to_value(record).map_err(Failure::fault)?;
        let written = self.file.write_all(format!("{record}\n").as_bytes());
        written.map_err(|e| Failure::Fault(format!("{}: {e}", self.path.display())))?;
        self.updates = self.updates.max(position(&record).unwrap_or_default());
        let events = self.events.as_mut();
        events.map_or(Ok(()), |events| events.add(&record)).map_err(Failure::fault)
    }

    /// How long it is.
    ///
    /// # Errors
    /// The system says no.
    pub fn bytes(&self) -> Result<u64, Failure> {
        let found = self.file.metadata();
        let found = found.map_err(|e| Failure::Fault(format!("{}: {e}", self.path.display())))?;
        Ok(found.len())
    }
}
