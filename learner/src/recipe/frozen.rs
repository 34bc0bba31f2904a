//! Frozen files: a path and the SHA-256 that the file must have, and the directory that a run writes.

use std::path::{Component, Path, PathBuf};

use policy::model::{CheckpointDigests, LoraConfig, ModelError, checkpoint_digests};
use protocol::Digest;

use super::{RecipeError, section::Section};

/// A file or model directory that a recipe freezes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frozen {
    /// The recipe's field, as `dataset`.
    pub field: String,
    /// Where it is: the recipe's directory joined with what the recipe says.
    pub path: PathBuf,
    /// What it must be.
    pub sha256: Digest,
}

impl Frozen {
    /// The keys of such a section.
    pub(super) const KEYS: &'static [&'static str] = &["path", "sha256"];

    pub(super) fn read(
        section: &Section<'_>,
        field: &str,
        base: &Path,
    ) -> Result<Self, RecipeError> {
        Ok(Self {
            field: field.into(),
            path: base.join(section.path("path")?),
            sha256: section.sha256("sha256")?,
        })
    }

    /// A required section of this kind.
    pub(super) fn required(
        parent: &Section<'_>,
        key: &str,
        base: &Path,
    ) -> Result<Self, RecipeError> {
        match parent.section(key, Self::KEYS)? {
            Some(section) => Self::read(&section, &parent.at(key), base),
            None => Err(RecipeError::Missing {
                field: parent.at(key),
                expected: "an object with path and sha256".into(),
            }),
        }
    }

    /// Compares a digest with the frozen one.
    ///
    /// # Errors
    /// They differ.
    pub fn verify(&self, found: Digest) -> Result<(), RecipeError> {
        if found == self.sha256 {
            return Ok(());
        }
        Err(RecipeError::Sha256 {
            field: self.field.clone(),
            path: self.path.clone(),
            expected: self.sha256,
            found,
        })
    }

    /// Verifies a model directory: a full checkpoint of its own with the frozen digest.
    ///
    /// # Errors
    /// It is no directory, is an adapter, cannot be read, or has another digest.
    pub fn verify_model(&self) -> Result<CheckpointDigests, RecipeError> {
        let model = |problem: String| RecipeError::Model { path: self.path.clone(), problem };
        if !self.path.is_dir() {
            return Err(model("there is no such directory; name a Hugging Face checkpoint".into()));
        }
        if self.path.join("adapter_config.json").exists() {
            return Err(model(
                "it holds an adapter (adapter_config.json); name the full checkpoint".into(),
            ));
        }
        let digests =
            checkpoint_digests(&self.path).map_err(|e: ModelError| model(e.to_string()))?;
        self.verify(digests.all)?;
        Ok(digests)
    }

    /// Verifies an adapter's directory in PEFT's format, with the digest that `learner digest` prints
    /// of it, and gives the adapter's settings.
    ///
    /// # Errors
    /// It is no such directory, cannot be read, or has another digest.
    pub fn verify_adapter(&self) -> Result<LoraConfig, RecipeError> {
        let wrong = |error: ModelError| {
            let remedy = "`learner digest` with that directory prints its sha256";
            RecipeError::conflict(&format!("{}.path", self.field), error.to_string(), remedy)
        };
        let config =
            LoraConfig::read_peft(&self.path.join("adapter_config.json")).map_err(wrong)?;
        self.verify(checkpoint_digests(&self.path).map_err(wrong)?.all)?;
        Ok(config)
    }
}

/// The directory that a run writes: fresh, and apart from everything that the recipe reads.
///
/// # Errors
/// It exists, or contains or lies inside of one of `inputs`.
pub(crate) fn check_output(output: &Path, inputs: &[&Frozen]) -> Result<PathBuf, RecipeError> {
    check_apart(output, inputs, false)
}

/// The same; with `resume` it may be there already.
///
/// # Errors
/// As [`check_output`].
pub(crate) fn check_apart(
    output: &Path,
    inputs: &[&Frozen],
    resume: bool,
) -> Result<PathBuf, RecipeError> {
    let output = resolved(output);
    if !resume && output.symlink_metadata().is_ok() {
        return Err(RecipeError::conflict(
            "output_dir",
            format!("{} exists already", output.display()),
            "name a new directory, here or with --output, or go on with a run by --resume",
        ));
    }
    for input in inputs {
        let path = resolved(&input.path);
        if output.starts_with(&path) || path.starts_with(&output) {
            return Err(RecipeError::conflict(
                "output_dir",
                format!("{} and {}.path {} overlap", output.display(), input.field, path.display()),
                "name a directory apart from models and data",
            ));
        }
    }
    Ok(output)
}

/// The real path of the part that exists, and the rest with `.` and `..` taken out.
fn resolved(path: &Path) -> PathBuf {
    let mut real = PathBuf::new();
    for component in std::path::absolute(path).unwrap_or_else(|_| path.to_owned()).components() {
        match component {
            Component::ParentDir => drop(real.pop()),
            Component::CurDir => {}
            other => real.push(other),
        }
        if let Ok(canonical) = real.canonicalize() {
            real = canonical;
        }
    }
    real
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frozen(path: PathBuf) -> Frozen {
        Frozen { field: "model".into(), path, sha256: Digest::of(b"") }
    }

    #[test]
    fn outputs_must_be_fresh_and_apart_from_inputs() {
        let dir = tempfile::tempdir().expect("a directory");
        let model = dir.path().join("model");
        std::fs::create_dir(&model).expect("created");
        let input = frozen(model.clone());
        let refused =
            |output: PathBuf| check_output(&output, &[&input]).expect_err("refused").to_string();
        assert!(refused(model.clone()).contains("exists already"));
        assert!(refused(model.join("run")).contains("overlap"));
        assert!(refused(dir.path().join("new/../model/run")).contains("overlap"));
        let parent = frozen(dir.path().join("new/model"));
        assert!(check_output(&dir.path().join("new"), &[&parent]).is_err());
        check_output(&dir.path().join("model-run"), &[&input]).expect("a sibling is apart");
    }

    #[test]
    #[cfg(unix)]
    fn links_do_not_hide_an_overlap() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::create_dir(dir.path().join("model")).expect("created");
        std::os::unix::fs::symlink(dir.path().join("model"), dir.path().join("link"))
            .expect("linked");
        let input = frozen(dir.path().join("model"));
        assert!(check_output(&dir.path().join("link/run"), &[&input]).is_err());
    }

    #[test]
    fn model_directories_are_named_in_their_errors() {
        let dir = tempfile::tempdir().expect("a directory");
        let absent =
            frozen(dir.path().join("none")).verify_model().expect_err("absent").to_string();
        assert!(absent.contains("there is no such directory"), "{absent}");
        std::fs::write(dir.path().join("adapter_config.json"), "{}").expect("written");
        let adapter = frozen(dir.path().into()).verify_model().expect_err("adapter").to_string();
        assert!(adapter.contains("name the full checkpoint"), "{adapter}");
        std::fs::remove_file(dir.path().join("adapter_config.json")).expect("removed");
        std::fs::write(dir.path().join("config.json"), "{}").expect("written");
        let other = frozen(dir.path().into()).verify_model().expect_err("other").to_string();
        assert!(other.starts_with("model.sha256 is e3b0c44298fc"), "{other}");
    }
}
