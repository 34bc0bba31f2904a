//! What can go wrong with a model's files and inputs, each as one line: what, where, remedy.

use std::path::{Path, PathBuf};

/// The architectures that this crate runs.
pub const ARCHITECTURES: &[&str] = &[
    "Qwen3ForCausalLM",
    "LlamaForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
];

/// An error of the model's files or of what it is fed.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file cannot be read or written.
    #[error("{path}: {source}{}", remedy(path, source), path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file of the checkpoint or adapter is malformed.
    #[error("{path}: {reason}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// `config.json` names an architecture that this crate does not have.
    #[error(
        "{path}: architecture {found:?} is not supported; supported: {}",
        ARCHITECTURES.join(", "), path = path.display()
    )]
    Architecture {
        /// The `config.json`.
        path: PathBuf,
        /// What it names.
        found: String,
    },
    /// A field of a JSON file has a value that is malformed or not supported.
    #[error("{path}: field {field:?}: {reason}", path = path.display())]
    Field {
        /// The file.
        path: PathBuf,
        /// The field, dotted.
        field: String,
        /// What is wrong and what is accepted.
        reason: String,
    },
    /// A tensor is missing or has another shape or type than the configuration says.
    #[error("{path}: tensor {tensor:?}: {reason}", path = path.display())]
    Tensor {
        /// The file (or directory, for a missing tensor).
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        reason: String,
    },
    /// An adapter does not fit the model, or its settings are not supported.
    #[error("adapter: {0}")]
    Adapter(String),
    /// A token id outside of the vocabulary.
    #[error("token id {id} is outside of the model's vocabulary of {vocab}")]
    TokenId {
        /// The id.
        id: u32,
        /// The vocabulary's size.
        vocab: usize,
    },
    /// A sequence longer than the model's positions.
    #[error(
        "a sequence of {len} ids exceeds the model's {max} positions (max_position_embeddings)"
    )]
    TooLong {
        /// The length that was asked for.
        len: usize,
        /// The model's limit.
        max: usize,
    },
    /// The key-value cache has no room.
    #[error("the key-value cache is full: {needed} more ids needed, {free} free of {capacity}")]
    CacheFull {
        /// Ids that were to be added.
        needed: usize,
        /// Free places.
        free: usize,
        /// All places.
        capacity: usize,
    },
    /// A malformed request to the model.
    #[error("{0}")]
    Input(String),
    /// The device failed.
    #[error("the device failed: {0}")]
    Device(String),
}

/// What to do about a file of a checkpoint or adapter that is not there.
fn remedy(path: &Path, source: &std::io::Error) -> &'static str {
    if source.kind() != std::io::ErrorKind::NotFound {
        return "";
    }
    match path.file_name().and_then(|name| name.to_str()) {
        Some("adapter_config.json" | "adapter_model.safetensors") => {
            "; name a PEFT adapter's directory, as learner sft writes one"
        }
        _ => "; name a Hugging Face directory with config.json, tokenizer.json and *.safetensors",
    }
}

impl ModelError {
    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { path, source }
    }
}
