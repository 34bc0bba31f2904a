//! `checkpoint.safetensors` in a run's directory: everything that a supervised run or one on rows goes
//! on from, in one file that is replaced as a whole, so that a run that is cut short at any instant
//! goes on exactly.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::Path,
};

use policy::{
    device::Device,
    score::{Optimizer, Parameters, load_parameters, save_parameters},
};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde::{Serialize, de::DeserializeOwned};
use terminal::Failure;

use crate::{files::write_atomic, ranks::Ranks};

/// Where the counters stand in the file's metadata.
const RECORD: &str = "rollcall";
const PARAMETERS: &str = "parameters";
const OPTIMIZER: &str = "optimizer";

/// Tables of numbers beside the parameters, by name.
pub type Tables = BTreeMap<&'static str, Vec<Vec<f64>>>;

/// What a run goes on from.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainingCheckpoint {
    /// Counters and whatever else is few, as JSON text.
    record: String,
    /// What [`save_parameters`] gives.
    parameters: Vec<u8>,
    /// What [`Optimizer::to_bytes`] gives.
    optimizer: Vec<u8>,
    tables: BTreeMap<String, Vec<Vec<f64>>>,
}

impl TrainingCheckpoint {
    /// The file's name.
    pub const FILE: &str = "checkpoint.safetensors";

    /// A run as it is now.
    ///
    /// # Errors
    /// A failing device.
    pub fn of(
        record: &impl Serialize,
        parameters: &mut impl Parameters,
        optimizer: &Optimizer,
        tables: Tables,
    ) -> Result<Self, Failure> {
        Ok(Self {
            record: serde_json::to_string(record).map_err(Failure::fault)?,
            parameters: save_parameters(parameters).map_err(Failure::fault)?,
            optimizer: optimizer.to_bytes().map_err(Failure::fault)?,
            tables: tables.into_iter().map(|(name, rows)| (name.to_owned(), rows)).collect(),
        })
    }

    /// Writes it into a run's directory, to survive a crash of the machine.
    ///
    /// # Errors
    /// The directory cannot be written to.
    pub fn write(&self, output: &Path) -> Result<(), Failure> {
        let bytes = self.to_bytes()?;
        write_atomic(&output.join(Self::FILE), &bytes, true).map_err(Failure::fault)
    }

    /// That of a run's directory, if it has one: rank 0 reads it, and every rank gets it.
    ///
    /// # Errors
    /// It is damaged; a rank that fails.
    pub fn read(output: &Path, ranks: &mut Ranks) -> Result<Option<Self>, Failure> {
        let path = output.join(Self::FILE);
        let wrong = |problem: String| Failure::Mistake(format!("{}: {problem}", path.display()));
        let mut bytes = Vec::new();
        if ranks.leads() {
            match fs::read(&path) {
                Ok(read) => bytes = read,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(wrong(error.to_string())),
            }
        }
        ranks.broadcast(&mut bytes)?;
        if bytes.is_empty() {
            return Ok(None);
        }
        Self::from_bytes(&bytes)
            .map(Some)
            .map_err(|problem| wrong(format!("{problem}; remove it to start anew")))
    }

    fn to_bytes(&self) -> Result<Vec<u8>, Failure> {
        let tables: Vec<(&String, Vec<usize>, Vec<u8>)> = self
            .tables
            .iter()
            .map(|(name, rows)| {
                let shape = vec![rows.len(), rows.first().map_or(0, Vec::len)];
                (name, shape, rows.iter().flatten().flat_map(|it| it.to_le_bytes()).collect())
            })
            .collect();
        let mut views = BTreeMap::new();
        for (name, bytes) in [(PARAMETERS, &self.parameters), (OPTIMIZER, &self.optimizer)] {
            let view = TensorView::new(Dtype::U8, vec![bytes.len()], bytes);
            views.insert(name.to_owned(), view.map_err(Failure::fault)?);
        }
        for (name, shape, bytes) in &tables {
            let view = TensorView::new(Dtype::F64, shape.clone(), bytes).map_err(Failure::fault)?;
            views.insert(format!("table.{name}"), view);
        }
        let metadata = HashMap::from([(RECORD.to_owned(), self.record.clone())]);
        safetensors::serialize(&views, Some(metadata)).map_err(Failure::fault)
    }

    fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        let text = |error: safetensors::SafeTensorError| error.to_string();
        let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(text)?;
        let record = metadata.metadata().as_ref().and_then(|it| it.get(RECORD)).cloned();
        let file = SafeTensors::deserialize(bytes).map_err(text)?;
        let mut tables = BTreeMap::new();
        for (name, view) in file.iter() {
            let Some(name) = name.strip_prefix("table.") else { continue };
            let (Dtype::F64, &[rows, columns]) = (view.dtype(), view.shape()) else {
                return Err(format!("{name:?} is no table of f64"));
            };
            let (floats, _) = view.data().as_chunks::<8>();
            let floats: Vec<f64> = floats.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect();
            let table = (0..rows).map(|row| floats[row * columns..(row + 1) * columns].to_vec());
            tables.insert(name.to_owned(), table.collect());
        }
        let blob = |name: &str| -> Result<Vec<u8>, String> {
            Ok(file.tensor(name).map_err(text)?.data().to_vec())
        };
        Ok(Self {
            record: record.ok_or("it is of another program")?,
            parameters: blob(PARAMETERS)?,
            optimizer: blob(OPTIMIZER)?,
            tables,
        })
    }

    /// The counters.
    ///
    /// # Errors
    /// They are those of another kind of run.
    pub fn record<T: DeserializeOwned>(&self, output: &Path) -> Result<T, Failure> {
        serde_json::from_str(&self.record).map_err(|error| {
            Failure::Mistake(format!(
                "{}: it is no run of this kind ({error}); resume with its own recipe",
                output.join(Self::FILE).display()
            ))
        })
    }

    /// A table, empty where there is none.
    pub fn table(&self, name: &str) -> Vec<Vec<f64>> {
        self.tables.get(name).cloned().unwrap_or_default()
    }

    /// Puts parameters and optimizer back.
    ///
    /// # Errors
    /// They are those of another model.
    pub fn restore(
        &self,
        parameters: &mut impl Parameters,
        optimizer: &mut Optimizer,
        device: &Device,
    ) -> Result<(), Failure> {
        load_parameters(parameters, &self.parameters).map_err(Failure::mistake)?;
        optimizer.load_for(&self.optimizer, parameters, device).map_err(Failure::mistake)
    }
}

/// Refuses to go on with a run that had other settings.
///
/// # Errors
/// It had.
pub fn check_settings(output: &Path, same: bool) -> Result<(), Failure> {
    if same {
        return Ok(());
    }
    Err(Failure::Mistake(format!(
        "{}: the run that stopped had other rows, adapters or settings; resume with its own recipe",
        output.join(TrainingCheckpoint::FILE).display()
    )))
}

/// Refuses to go on with a run on another number of ranks: an update would be made of other rows.
///
/// # Errors
/// It had another one.
pub fn check_ranks(output: &Path, had: usize, has: usize) -> Result<(), Failure> {
    if had == has {
        return Ok(());
    }
    Err(Failure::Mistake(format!(
        "{}: the run that stopped had {had} ranks, and this one has {has}; resume with as many",
        output.join(TrainingCheckpoint::FILE).display()
    )))
}

/// Cuts a file of lines back to the length that it had at a checkpoint, so that no line stands in it
/// twice.
///
/// # Errors
/// It cannot be written.
pub fn cut_back(path: &Path, length: u64) -> Result<(), Failure> {
    let fault = |e: std::io::Error| Failure::Fault(format!("{}: {e}", path.display()));
    match fs::OpenOptions::new().write(true).open(path) {
        Ok(file) if file.metadata().map_err(fault)?.len() > length => {
            file.set_len(length).map_err(fault)
        }
        Ok(_) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(fault(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_is_read_back_as_it_was_and_damage_is_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let checkpoint = TrainingCheckpoint {
            record: "{\"updates\":3}".into(),
            parameters: vec![1, 2, 3],
            optimizer: vec![4],
            tables: BTreeMap::from([
                ("epoch".to_owned(), vec![vec![0.25, -1.5], vec![f64::MAX, 0.0]]),
                ("none".to_owned(), Vec::new()),
            ]),
        };
        checkpoint.write(dir.path()).expect("written");
        let read = TrainingCheckpoint::read(dir.path(), &mut Ranks::alone()).expect("read");
        assert_eq!(read, Some(checkpoint));
        let path = dir.path().join(TrainingCheckpoint::FILE);
        let bytes = fs::read(&path).expect("read");
        for end in 0..bytes.len() {
            fs::write(&path, &bytes[..end]).expect("written");
            match TrainingCheckpoint::read(dir.path(), &mut Ranks::alone()) {
                Ok(None) => assert_eq!(end, 0),
                Ok(Some(_)) => panic!("{end} bytes of it are read"),
                Err(error) => assert!(error.to_string().contains("remove it"), "{error}"),
            }
        }
        fs::remove_file(&path).expect("removed");
        assert_eq!(TrainingCheckpoint::read(dir.path(), &mut Ranks::alone()).expect("none"), None);
    }
}
