//! The adapters that a run writes for users, in PEFT's format.

use std::{
    fs,
    path::{Path, PathBuf},
};

use policy::{model::Adapter, score::ValueHead};
use protocol::Digest;

use super::{AdapterRecord, BestAdapter, FileError, RunDirectory, compare_adapters};
use crate::train::record::Evaluated;

/// A policy to write.
#[derive(Clone, Copy)]
pub struct PolicyFiles<'a> {
    /// Its adapter.
    pub adapter: &'a Adapter,
    /// SHA-256 of the adapter's `adapter_model.safetensors`.
    pub digest: Digest,
    /// What PEFT shall load it onto.
    pub base: &'a str,
    /// The value head that was trained beside it, if there is one: written into the same directory.
    pub value_head: Option<&'a ValueHead>,
}

impl RunDirectory {
    /// Writes an adapter in PEFT's format and returns its directory.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn adapter(&mut self, step: u32, policy: PolicyFiles<'_>) -> Result<PathBuf, FileError> {
        let record = self.write_adapter(step, policy)?;
        let path = self.path.join(&record.path);
        self.progress.last_adapter = Some(record);
        self.write_manifest(true)?;
        Ok(path)
    }

    /// Writes an adapter that did at least as well on held-out tasks as every one before it: by strict
    /// success, then by reward. Others are not written.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn keep_best(
        &mut self,
        step: u32,
        policy: PolicyFiles<'_>,
        evaluated: &Evaluated,
    ) -> Result<(), FileError> {
        let Evaluated { success, reward, .. } = *evaluated;
        let best = self.progress.best_adapter.as_ref();
        if best.is_some_and(|best| (best.success, best.reward) > (success, reward)) {
            return Ok(());
        }
        let adapter = self.write_adapter(step, policy)?;
        self.progress.best_adapter = Some(BestAdapter { adapter, success, reward });
        self.write_manifest(true)
    }

    fn write_adapter(
        &mut self,
        step: u32,
        policy: PolicyFiles<'_>,
    ) -> Result<AdapterRecord, FileError> {
        let PolicyFiles { adapter, digest, base, value_head } = policy;
        let name = Path::new("adapters").join(format!("{step}-{}", digest.short()));
        let path = self.path.join(&name);
        let failed = |source| FileError::Adapter { path: path.clone(), source };
        let value_head = value_head.map(ValueHead::to_safetensors).transpose().map_err(failed)?;
        let record = AdapterRecord {
            step: u64::from(step),
            path: name,
            sha256: digest,
            value_head_sha256: value_head.as_deref().map(Digest::of),
        };
        if path.exists() {
            return Ok(record);
        }
        let parent = self.path.join("adapters");
        let partial = parent.join(format!(".{step}-{}.partial", digest.short()));
        fs::create_dir_all(&parent).map_err(FileError::io("create", &parent))?;
        adapter.save_peft(&partial, base).map_err(failed)?;
        if let Some(bytes) = value_head {
            let file = partial.join(ValueHead::FILE);
            fs::write(&file, bytes).map_err(FileError::io("write", &file))?;
        }
        fs::rename(&partial, &path).map_err(FileError::io("write", &path))?;
        self.progress.adapters.push(record.clone());
        Ok(record)
    }

    /// Compares the adapter of the start with the one of the end.
    ///
    /// # Errors
    /// They are not adapters of one shape, or hold weights that are not finite.
    pub fn update_evidence(&mut self, first: &Adapter, last: &Adapter) -> Result<(), FileError> {
        let bytes = |adapter: &Adapter| {
            adapter
                .to_safetensors()
                .map_err(|source| FileError::Adapter { path: self.path.clone(), source })
        };
        let found = compare_adapters(&bytes(first)?, &bytes(last)?).map_err(|problem| {
            FileError::Damaged { path: self.path.join("adapters"), line: None, problem }
        })?;
        let evidence = &mut self.progress.update_evidence;
        evidence.trainable_tensors = found.trainable_tensors;
        evidence.changed_trainable_tensors = found.changed_trainable_tensors;
        evidence.max_abs_parameter_delta = found.max_abs_parameter_delta;
        Ok(())
    }
}
