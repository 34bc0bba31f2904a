//! TensorBoard event files: the numbers of `metrics.jsonl` under the same names, in `tensorboard/` of a
//! run's directory.
//!
//! A file is a sequence of TFRecords (length, masked CRC-32C of it, data, masked CRC-32C of that) of
//! `tensorflow.Event` messages, of which only the fields that scalars need are declared here. Each start of
//! a trainer writes a file of its own, which says by a session log from which step on: TensorBoard forgets
//! what earlier files have of steps that are made again.

use std::{
    fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use prost::Message as _;
use serde_json::Value;

use crate::scalars::{position, scalars};

/// The folder in a run's directory.
pub const TENSORBOARD: &str = "tensorboard";
/// What the first record of a file says.
const VERSION: &str = "brain.Event:2";
/// `SessionLog.SessionStatus.START`.
const START: i32 = 1;

#[derive(Clone, PartialEq, prost::Message)]
struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(oneof = "What", tags = "3, 5, 7")]
    what: Option<What>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum What {
    #[prost(string, tag = "3")]
    FileVersion(String),
    #[prost(message, tag = "5")]
    Summary(Summary),
    #[prost(message, tag = "7")]
    Session(SessionLog),
}

#[derive(Clone, PartialEq, prost::Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    values: Vec<Scalar>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Scalar {
    #[prost(string, tag = "1")]
    tag: String,
    #[prost(float, optional, tag = "2")]
    value: Option<f32>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct SessionLog {
    #[prost(int32, tag = "1")]
    status: i32,
}

/// An event file cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {path}: {source}; --no-tensorboard leaves event files out", path = .path.display())]
pub struct EventError {
    /// Where.
    path: PathBuf,
    /// Why.
    source: io::Error,
}

/// An event file that is being written.
#[derive(Debug)]
pub struct EventFile {
    path: PathBuf,
    file: fs::File,
}

impl EventFile {
    /// A new file of the run in this directory, of which `done` steps are made and written.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn create(run: &Path, done: u64) -> Result<Self, EventError> {
        let folder = run.join(TENSORBOARD);
        let failed = |path: &Path, source| EventError { path: path.to_owned(), source };
        fs::create_dir_all(&folder).map_err(|error| failed(&folder, error))?;
        // TensorBoard reads the files of a folder in the order of their names.
        let mut number = 0;
        let (path, file) = loop {
            let name = format!("events.out.tfevents.{:010}.rollcall.{number}", seconds() as u64);
            let path = folder.join(name);
            match fs::File::create_new(&path) {
                Ok(file) => break (path, file),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
                Err(error) => return Err(failed(&path, error)),
            }
        };
        let mut this = Self { path, file };
        this.write(0, What::FileVersion(VERSION.into()))?;
        // What files of an earlier life, or of another run, say of steps to come does not count.
        let next = if done == 0 { 0 } else { done + 1 };
        this.write(next, What::Session(SessionLog { status: START }))?;
        Ok(this)
    }

    /// Writes the numbers of a record of `metrics.jsonl`.
    ///
    /// # Errors
    /// The file cannot be written.
    #[allow(clippy::cast_possible_truncation, reason = "event files hold f32")]
    pub fn add(&mut self, record: &Value) -> Result<(), EventError> {
        let Some(step) = position(record) else { return Ok(()) };
        let scalar = |(tag, value): (String, f64)| Scalar { tag, value: Some(value as f32) };
        let values: Vec<Scalar> = scalars(record).into_iter().map(scalar).collect();
        if values.is_empty() {
            return Ok(());
        }
        self.write(step, What::Summary(Summary { values }))
    }

    fn write(&mut self, step: u64, what: What) -> Result<(), EventError> {
        let step = i64::try_from(step).unwrap_or(i64::MAX);
        let event = Event { wall_time: seconds(), step, what: Some(what) };
        let record = record(&event.encode_to_vec());
        // One call a record: who reads meanwhile sees whole ones.
        let written = self.file.write_all(&record);
        written.map_err(|source| EventError { path: self.path.clone(), source })
    }
}

fn seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |it| it.as_secs_f64())
}

/// Data as a TFRecord.
fn record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let mut record = Vec::with_capacity(data.len() + 16);
    record.extend_from_slice(&length);
    record.extend_from_slice(&masked(&length).to_le_bytes());
    record.extend_from_slice(data);
    record.extend_from_slice(&masked(data).to_le_bytes());
    record
}

fn masked(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Reads a file as TensorBoard does.
    fn events(path: &Path) -> Vec<Event> {
        let bytes = fs::read(path).expect("read");
        let mut rest = bytes.as_slice();
        let mut events = Vec::new();
        while !rest.is_empty() {
            let (length, after) = rest.split_at(8);
            let (check, after) = after.split_at(4);
            assert_eq!(check, masked(length).to_le_bytes());
            let length = u64::from_le_bytes(length.try_into().expect("eight bytes"));
            let (data, after) = after.split_at(usize::try_from(length).expect("short"));
            let (check, after) = after.split_at(4);
            assert_eq!(check, masked(data).to_le_bytes());
            events.push(Event::decode(data).expect("an event"));
            rest = after;
        }
        events
    }

    #[test]
    fn a_record_is_byte_for_byte_what_tensorflow_writes() {
        // tf.io.TFRecordWriter, of b"rollcall".
        let event = Event {
            wall_time: 1.5,
            step: 7,
            what: Some(What::Summary(Summary {
                values: vec![Scalar { tag: "kl".into(), value: Some(0.0) }],
            })),
        };
        let data = event.encode_to_vec();
        let expected = [
            0x09, 0, 0, 0, 0, 0, 0, 0xf8, 0x3f, 0x10, 7, 0x2a, 0x0b, 0x0a, 0x09, 0x0a, 2, b'k',
            b'l', 0x15, 0, 0, 0, 0,
        ];
        assert_eq!(data, expected);
        assert_eq!(crc32c::crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(record(&data).len(), data.len() + 16);
    }

    #[test]
    fn scalars_are_written_by_step_and_a_run_that_goes_on_says_from_where() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut file = EventFile::create(dir.path(), 0).expect("created");
        file.add(&json!({"step": 1, "reward": 0.5, "policy": "x"})).expect("written");
        file.add(&json!({"policy": "x"})).expect("nothing to write");
        let mut again = EventFile::create(dir.path(), 1).expect("created");
        again.add(&json!({"step": 2, "leases": {"granted": 3}})).expect("written");
        assert!(file.path < again.path, "TensorBoard reads them in this order");
        let first = events(&file.path);
        assert_eq!(first.len(), 3);
        assert_eq!(first[0].what, Some(What::FileVersion(VERSION.into())));
        let session = Some(What::Session(SessionLog { status: START }));
        assert_eq!((first[1].step, &first[1].what), (0, &session));
        let value = |tag: &str, value| Scalar { tag: tag.into(), value: Some(value) };
        let summary = |values| Some(What::Summary(Summary { values }));
        assert_eq!((first[2].step, &first[2].what), (1, &summary(vec![value("reward", 0.5)])));
        let second = events(&again.path);
        assert_eq!((second[1].step, &second[1].what), (2, &session));
        assert_eq!(second[2].what, summary(vec![value("leases/granted", 3.0)]));
    }
}
