//! What a supervised run leaves: an adapter, or a whole checkpoint.

use std::{
    fs,
    path::{Path, PathBuf},
};

use policy::model::{Decoder, ModelError};

use super::train::Student;
use crate::recipe::SftRecipe;

/// Writes the adapter, or a whole checkpoint: the weights anew, everything else as it was.
pub(super) fn save(
    recipe: &SftRecipe,
    decoder: &Decoder,
    student: &Student,
    output: &Path,
) -> Result<(PathBuf, protocol::Digest), SaveError> {
    let dir = match student {
        Student::Adapter(adapter) => {
            let dir = output.join("adapter");
            adapter.save_peft(&dir, &recipe.model.path.to_string_lossy())?;
            dir
        }
        Student::Base => {
            let dir = output.join("checkpoint");
            save_checkpoint(&recipe.model.path, decoder, &dir)?;
            dir
        }
    };
    let digest = policy::model::checkpoint_digests(&dir)?.all;
    Ok((dir, digest))
}

fn save_checkpoint(model: &Path, decoder: &Decoder, dir: &Path) -> Result<(), SaveError> {
    fs::create_dir_all(dir)?;
    for entry in fs::read_dir(model)? {
        let entry = entry?;
        let name = entry.file_name();
        let text = name.to_string_lossy();
        // Old weights must not stand beside the new ones.
        let weights = text.ends_with(".safetensors") || text.ends_with(".safetensors.index.json");
        if entry.file_type()?.is_file() && !weights && !text.starts_with('.') {
            fs::copy(entry.path(), dir.join(name))?;
        }
    }
    Ok(decoder.save_weights(&dir.join("model.safetensors"))?)
}

/// What was trained could not be saved.
#[derive(Debug, thiserror::Error)]
pub(super) enum SaveError {
    #[error("the checkpoint cannot be written: {0}")]
    Io(#[from] std::io::Error),
    #[error(transparent)]
    Model(#[from] ModelError),
}
