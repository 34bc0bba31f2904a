//! Digests of a checkpoint directory: what two machines compare before they work together.

use std::{fs, io, path::Path};

use protocol::Digest;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use super::{config::read_object, error::ModelError};

/// Files that decide what the model computes, beside the weights themselves.
const WEIGHTS: [&[u8]; 4] = [
    b"config.json",
    b"model.safetensors.index.json",
    b"processor_config.json",
    b"preprocessor_config.json",
];

/// What identifies a checkpoint, as a whole and by its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckpointDigests {
    /// SHA-256 of what `LC_ALL=C sha256sum *` prints in the directory.
    pub all: Digest,
    /// The same over `config.json`, `*.safetensors`, `model.safetensors.index.json`, and what decides
    /// how images become numbers: `processor_config.json` and `preprocessor_config.json`.
    pub weights: Digest,
    /// SHA-256 of `tokenizer.json`; of nothing where there is none.
    pub tokenizer: Digest,
    /// SHA-256 of the chat template's text; of nothing where there is none.
    pub template: Digest,
}

/// Computes the digests of the checkpoint in `dir`. Hidden files and subdirectories do not count.
///
/// # Errors
/// A file that cannot be read, or a `tokenizer_config.json` that is not JSON.
pub fn checkpoint_digests(dir: &Path) -> Result<CheckpointDigests, ModelError> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).map_err(ModelError::io(dir))? {
        let name = entry.map_err(ModelError::io(dir))?.file_name();
        let hidden = name.as_encoded_bytes().starts_with(b".");
        if !hidden && dir.join(&name).is_file() {
            names.push(name);
        }
    }
    names.sort_unstable_by(|a, b| a.as_encoded_bytes().cmp(b.as_encoded_bytes()));
    let (mut all, mut weights) = (Sha256::new(), Sha256::new());
    let mut tokenizer = Digest::of(b"");
    for name in names {
        let path = dir.join(&name);
        let digest = file_digest(&path)?;
        let bytes = name.as_encoded_bytes();
        let mut line = format!("{digest}  ").into_bytes();
        line.extend_from_slice(bytes);
        line.push(b'\n');
        all.update(&line);
        if WEIGHTS.contains(&bytes) || bytes.ends_with(b".safetensors") {
            weights.update(&line);
        }
        if bytes == b"tokenizer.json" {
            tokenizer = digest;
        }
    }
    Ok(CheckpointDigests {
        all: Digest(all.finalize().into()),
        weights: Digest(weights.finalize().into()),
        tokenizer,
        template: Digest::of(chat_template(dir)?.unwrap_or_default().as_bytes()),
    })
}

fn file_digest(path: &Path) -> Result<Digest, ModelError> {
    let mut hash = Sha256::new();
    let mut file = fs::File::open(path).map_err(ModelError::io(path))?;
    io::copy(&mut file, &mut hash).map_err(ModelError::io(path))?;
    Ok(Digest(hash.finalize().into()))
}

/// The text of the checkpoint's chat template: `chat_template.jinja`, else the field of
/// `tokenizer_config.json`; of a list of named templates its JSON, so that every one of them counts.
pub fn chat_template(dir: &Path) -> Result<Option<String>, ModelError> {
    let file = dir.join("chat_template.jinja");
    if file.is_file() {
        return fs::read_to_string(&file).map(Some).map_err(ModelError::io(file));
    }
    let config = dir.join("tokenizer_config.json");
    if !config.is_file() {
        return Ok(None);
    }
    let map = read_object(&config, 64 << 20)?;
    Ok(match map.get("chat_template") {
        Some(Value::String(text)) => Some(text.clone()),
        Some(named @ Value::Array(_)) => Some(named.to_string()),
        _ => None,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_whole_digest_is_what_sha256sum_prints() {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in
            [("b.txt", "b"), ("B.txt", "B"), (".hidden", "x"), ("config.json", "{}")]
        {
            fs::write(dir.path().join(name), text).unwrap();
        }
        fs::create_dir(dir.path().join("folder")).unwrap();
        let line = |text: &str, name: &str| format!("{}  {name}\n", Digest::of(text.as_bytes()));
        let config = line("{}", "config.json");
        let printed = [line("B", "B.txt"), line("b", "b.txt"), config.clone()].concat();
        let digests = checkpoint_digests(dir.path()).unwrap();
        assert_eq!(digests.all, Digest::of(printed.as_bytes()));
        assert_eq!(digests.weights, Digest::of(config.as_bytes()));
        assert_eq!(digests.template, Digest::of(b""));
    }

    #[test]
    fn the_template_is_found_in_either_file() {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("tokenizer_config.json");
        let named = r#"[{"name":"default","template":"T"},{"name":"tool_use","template":"W"}]"#;
        fs::write(&config, format!(r#"{{"chat_template": {named}}}"#)).unwrap();
        assert_eq!(chat_template(dir.path()).unwrap().as_deref(), Some(named));
        fs::write(&config, r#"{"chat_template": "U"}"#).unwrap();
        assert_eq!(chat_template(dir.path()).unwrap().as_deref(), Some("U"));
        fs::write(dir.path().join("chat_template.jinja"), "V").unwrap();
        assert_eq!(chat_template(dir.path()).unwrap().as_deref(), Some("V"));
        assert_eq!(checkpoint_digests(dir.path()).unwrap().template, Digest::of(b"V"));
    }
}
