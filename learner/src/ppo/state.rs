//! What a round leaves behind: the adapter in PEFT's format with the optimizer's state beside it, from
//! which another run may start; and the counters of a checkpoint, from which this one goes on.

use std::{fs, path::Path};

use policy::{
    model::{Adapter, Decoder},
    score::Optimizer,
};
use protocol::Digest;
use serde::{Deserialize, Serialize};
use terminal::Failure;

use super::{rollouts::RolloutRecord, round::RoundStats};
use crate::{
    checkpoint::{check_ranks, check_settings},
    files::write_atomic,
    recipe::OptimizerSettings,
    rows::Accuracy,
    train::update::adamw,
};

/// The optimizer's state in an adapter's directory.
pub const OPTIMIZER: &str = "optimizer.safetensors";
/// The state of PyTorch's optimizer, as other trainers leave it.
const TORCH_OPTIMIZER: &str = "optimizer.pt";
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
    let mut adapter = Adapter::load_peft(dir, decoder).map_err(Failure::mistake)?;
    let mut optimizer = adamw(settings);
    let path = dir.join(OPTIMIZER);
    if path.is_file() {
        let bytes = fs::read(&path)
            .map_err(|error| Failure::Mistake(format!("{}: {error}", path.display())))?;
        optimizer
            .load_for(&bytes, &mut adapter, decoder.device())
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

/// Writes both into `dir`.
///
/// # Errors
/// The directory cannot be written to, or a failing device.
pub fn save_policy(
    dir: &Path,
    adapter: &Adapter,
    optimizer: &Optimizer,
    base_model: &str,
) -> Result<(), Failure> {
    let fault = |e: &dyn std::fmt::Display| Failure::Fault(format!("{}: {e}", dir.display()));
    adapter.save_peft(dir, base_model).map_err(|e| fault(&e))?;
    let state = optimizer.to_bytes().map_err(Failure::fault)?;
    write_atomic(&dir.join(OPTIMIZER), &state, false).map_err(|e| fault(&e))
}

/// The counters of a run's checkpoint. Beside them it has adapter and optimizer, and of a round of a file
/// the tables `epoch`, `old` and `reference`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PpoState {
    /// The digest of what decides the run, but where it ends.
    pub settings: Digest,
    /// Ranks, which decide what a micro-batch is.
    pub ranks: usize,
    /// Rounds that were sampled here and finished.
    pub rounds: Vec<RolloutRecord>,
    /// What the last of them did.
    pub stats: Option<RoundStats>,
    /// Updates made in the round of a file.
    pub updates: u64,
    /// Greedy accuracy before the run.
    pub before: Option<Accuracy>,
    /// Bytes of `metrics.jsonl`.
    pub metrics: u64,
}

impl PpoState {
    /// Refuses to go on with other rows or settings, or on other ranks.
    ///
    /// # Errors
    /// They are others.
    pub fn check(&self, output: &Path, settings: Digest, ranks: usize) -> Result<(), Failure> {
        check_settings(output, self.settings == settings)?;
        check_ranks(output, self.ranks, ranks)
    }
}
