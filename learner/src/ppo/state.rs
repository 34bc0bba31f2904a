//! What a round leaves behind, so that the next one, or the rest of this one, goes on from it: the
//! adapter in PEFT's format with the optimizer's state beside it, and how far the round has come with
//! the log-probabilities that do not change during it.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::{Path, PathBuf},
};

use policy::{
    model::{Adapter, Decoder},
    score::Optimizer,
};
use protocol::Digest;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use terminal::Failure;

use super::round::{Anchors, MicroStats, Place};
use crate::{files::write_atomic, recipe::OptimizerSettings, train::update::adamw};

/// The optimizer's state in an adapter's directory.
pub const OPTIMIZER: &str = "optimizer.safetensors";
/// The state of PyTorch's optimizer, as other trainers leave it.
const TORCH_OPTIMIZER: &str = "optimizer.pt";
/// How far a round has come, in the run's directory.
const ROUND: &str = "round.safetensors";
/// The adapter in the run's directory.
pub const ADAPTER: &str = "adapter";

/// An adapter with the optimizer that trains it: fresh where the directory has no state of one.
///
/// # Errors
/// The adapter does not fit, or the state is not ours.
pub fn load_policy(
    dir: &Path,
    decoder: &Decoder,
    settings: &OptimizerSettings,
) -> Result<(Adapter, Optimizer), Failure> {
    let adapter = Adapter::load_peft(dir, decoder).map_err(Failure::mistake)?;
    let mut optimizer = adamw(settings);
    let path = dir.join(OPTIMIZER);
    if path.is_file() {
        let bytes = fs::read(&path)
            .map_err(|error| Failure::Mistake(format!("{}: {error}", path.display())))?;
        let named = adapter.named();
        let len_of = |name: &str| named.get(name).map(|tensor| tensor.shape().num_elements());
        optimizer
            .load(&bytes, decoder.device(), len_of)
            .map_err(|error| Failure::Mistake(format!("{}: {error}", path.display())))?;
    } else if dir.join(TORCH_OPTIMIZER).exists() {
        return Err(Failure::Mistake(format!(
            "adapter.path {}: {TORCH_OPTIMIZER} is PyTorch's and is not read here; move it away to start \
             with fresh moments",
            dir.display()
        )));
    }
    Ok((adapter, optimizer))
}

/// Writes both into `dir`, and gives the digests of what was written.
///
/// # Errors
/// The directory cannot be written to, or a failing device.
pub fn save_policy(
    dir: &Path,
    adapter: &Adapter,
    optimizer: &Optimizer,
    base_model: &str,
) -> Result<[Digest; 2], Failure> {
    adapter.save_peft(dir, base_model).map_err(Failure::fault)?;
    let weights = adapter.to_safetensors().map_err(Failure::fault)?;
    let state = optimizer.to_bytes().map_err(Failure::fault)?;
    write_atomic(&dir.join(OPTIMIZER), &state, false).map_err(Failure::fault)?;
    Ok([Digest::of(&weights), Digest::of(&state)])
}

/// What [`save_policy`] would give for what lies in `dir`.
fn saved_digests(dir: &Path) -> Option<[Digest; 2]> {
    let digest = |name: &str| fs::read(dir.join(name)).ok().map(|bytes| Digest::of(&bytes));
    Some([digest("adapter_model.safetensors")?, digest(OPTIMIZER)?])
}

/// A round that stopped, in a run's directory.
#[derive(Debug)]
pub struct Stopped {
    path: PathBuf,
    metadata: HashMap<String, String>,
    /// Rounds that were sampled and finished.
    pub rounds: u64,
    /// How far it came in the round of a file.
    pub place: Place,
    /// What does not change.
    pub anchors: Anchors,
}

/// Writes how far a run has come: whole rounds, or the place in the round of a file. `policy` are the digests of adapter and optimizer at that place,
/// `settings` the digest of what decides the round.
///
/// # Errors
/// The directory cannot be written to.
pub fn save_place(
    output: &Path,
    rounds: u64,
    place: &Place,
    anchors: &Anchors,
    settings: Digest,
    policy: [Digest; 2],
) -> Result<(), Failure> {
    let metadata = HashMap::from([
        ("rounds".to_owned(), rounds.to_string()),
        ("updates".to_owned(), place.updates.to_string()),
        ("settings".to_owned(), settings.to_string()),
        ("adapter".to_owned(), policy[0].to_string()),
        ("optimizer".to_owned(), policy[1].to_string()),
    ]);
    let floats = |rows: &[Vec<f32>]| -> Vec<u8> {
        rows.iter().flatten().flat_map(|it| it.to_le_bytes()).collect()
    };
    let digits = anchors.old.first().map_or(0, Vec::len);
    let shape = vec![anchors.old.len(), digits];
    let micro: Vec<u8> = place.epoch.iter().flatten().flat_map(|it| it.to_le_bytes()).collect();
    let (old, reference) = (floats(&anchors.old), floats(&anchors.reference));
    let view = |dtype, shape: Vec<usize>, bytes| {
        TensorView::new(dtype, shape, bytes).map_err(Failure::fault)
    };
    let tensors = BTreeMap::from([
        ("epoch", view(Dtype::F64, vec![place.epoch.len(), 3], &micro)?),
        ("old", view(Dtype::F32, shape.clone(), &old)?),
        ("reference", view(Dtype::F32, shape, &reference)?),
    ]);
    let bytes = safetensors::serialize(&tensors, Some(metadata)).map_err(Failure::fault)?;
    write_atomic(&output.join(ROUND), &bytes, false).map_err(Failure::fault)
}

impl Stopped {
    /// Reads the round that stopped in `output`.
    ///
    /// # Errors
    /// There is none, or its files are not of one save.
    pub fn read(output: &Path) -> Result<Self, Failure> {
        let path = output.join(ROUND);
        let wrong = |problem: String| Failure::Mistake(format!("{}: {problem}", path.display()));
        let bytes = fs::read(&path).map_err(|error| {
            wrong(format!(
                "{error}; --resume goes on with a run that stopped, leave it out to start one"
            ))
        })?;
        let metadata = SafeTensors::read_metadata(&bytes).map_err(|e| wrong(e.to_string()))?.1;
        let metadata = metadata.metadata().clone().unwrap_or_default();
        let count = |key: &str| {
            let count = metadata.get(key).and_then(|it| it.parse::<u64>().ok());
            count.ok_or_else(|| wrong(format!("it counts no {key}")))
        };
        let (rounds, updates) = (count("rounds")?, count("updates")?);
        let file = SafeTensors::deserialize(&bytes).map_err(|e| wrong(e.to_string()))?;
        let rows = |name: &str| -> Result<Vec<Vec<f32>>, Failure> {
            let view = file.tensor(name).map_err(|e| wrong(e.to_string()))?;
            match (view.dtype(), view.shape()) {
                (Dtype::F32, &[0, _]) => Ok(Vec::new()),
                (Dtype::F32, &[_, digits]) if digits > 0 => Ok(view
                    .data()
                    .chunks_exact(4 * digits)
                    .map(|row| row.chunks_exact(4).map(f32_of).collect())
                    .collect()),
                _ => Err(wrong(format!("{name:?} is no table of f32"))),
            }
        };
        let epoch = file.tensor("epoch").map_err(|e| wrong(e.to_string()))?;
        if epoch.dtype() != Dtype::F64 || epoch.shape().get(1) != Some(&3) {
            return Err(wrong("\"epoch\" is no table of three f64".into()));
        }
        let epoch: Vec<MicroStats> = epoch
            .data()
            .chunks_exact(24)
            .map(|row| [0, 1, 2].map(|part| f64_of(&row[8 * part..8 * part + 8])))
            .collect();
        let anchors = Anchors { old: rows("old")?, reference: rows("reference")? };
        let stopped =
            Self { path: path.clone(), metadata, rounds, place: Place { updates, epoch }, anchors };
        let saved = saved_digests(&output.join(ADAPTER));
        if saved.is_none_or(|saved| {
            !stopped.is("adapter", saved[0]) || !stopped.is("optimizer", saved[1])
        }) {
            return Err(wrong(
                "adapter and optimizer beside it are not those of this place; start anew".into(),
            ));
        }
        Ok(stopped)
    }

    fn is(&self, key: &str, digest: Digest) -> bool {
        self.metadata.get(key) == Some(&digest.to_string())
    }

    /// Refuses to go on with other rows or settings.
    ///
    /// # Errors
    /// They are others.
    pub fn check(&self, settings: Digest, rows: usize) -> Result<(), Failure> {
        if self.is("settings", settings)
            && self.anchors.old.len() == rows
            && self.anchors.reference.len() == rows
        {
            return Ok(());
        }
        Err(Failure::Mistake(format!(
            "{}: the run that stopped had other rows, adapters or settings; resume with its own recipe",
            self.path.display()
        )))
    }
}

fn f32_of(bytes: &[u8]) -> f32 {
    bytes.try_into().map_or(f32::NAN, f32::from_le_bytes)
}

fn f64_of(bytes: &[u8]) -> f64 {
    bytes.try_into().map_or(f64::NAN, f64::from_le_bytes)
}
