//! A Hugging Face model directory: configuration and headers are read and checked against each
//! other before any weight is, so that loading cannot fail half-way for a wrong file.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use burn::tensor::{DType, Device, Tensor, TensorData};

use super::{
    config::ModelConfig,
    decoder::Decoder,
    error::ModelError,
    header::{Entry, checkpoint_entries},
    weights::{Source, Weights},
};

/// In which type the base weights are kept and computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoadDtype {
    /// The type of the file's embedding.
    #[default]
    File,
    /// f32 whatever the file holds: exact for bf16 and f16 files, and the fastest on the CPU.
    F32,
}

/// A checked checkpoint whose weights are not loaded yet.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    config: ModelConfig,
    entries: BTreeMap<String, Entry>,
}

impl Checkpoint {
    /// Reads and checks `config.json` and the headers of the safetensors files in `dir`.
    ///
    /// # Errors
    /// Names the file, and the field or tensor.
    pub fn open(dir: impl Into<PathBuf>) -> Result<Self, ModelError> {
        let dir = dir.into();
        if !dir.is_dir() {
            let reason = "not a directory; a Hugging Face model directory is needed".into();
            return Err(ModelError::File { path: dir, reason });
        }
        let config = ModelConfig::read(&dir.join("config.json"))?;
        let entries = checkpoint_entries(&dir)?;
        let mut check = Check { dir: &dir, entries: &entries, names: Vec::new() };
        check.walk(&config)?;
        for name in entries.keys().filter(|name| !check.names.contains(name)) {
            let spare = (config.tied && name == "lm_head.weight") || name.ends_with("inv_freq");
            if !spare {
                tracing::warn!("{}: tensor {name:?} is not used", dir.display());
            }
        }
        Ok(Self { dir, config, entries })
    }

    /// The model's shape.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The type that [`LoadDtype::File`] gives.
    pub fn file_dtype(&self) -> DType {
        let embed = self.entries.get("model.embed_tokens.weight");
        embed.and_then(Entry::float).unwrap_or(DType::F32)
    }

    /// Loads the weights onto `device`.
    ///
    /// # Errors
    /// A file that changed or vanished since [`Checkpoint::open`].
    pub fn load(&self, device: &Device, dtype: LoadDtype) -> Result<Decoder, ModelError> {
        let dtype = match dtype {
            LoadDtype::File => self.file_dtype(),
            LoadDtype::F32 => DType::F32,
        };
        let mut loader = Loader { dir: &self.dir, entries: &self.entries, device, dtype };
        let weights = Weights::build(&self.config, &mut loader)?;
        Ok(Decoder::new(self.config.clone(), weights, device.clone(), dtype))
    }
}

/// Checks shapes and types against the configuration.
struct Check<'a> {
    dir: &'a Path,
    entries: &'a BTreeMap<String, Entry>,
    names: Vec<String>,
}

impl Check<'_> {
    /// Visits each name and shape that the configuration implies.
    fn walk(&mut self, config: &ModelConfig) -> Result<(), ModelError> {
        for (name, shape) in config.tensors() {
            let Some(entry) = self.entries.get(&name) else {
                let reason = "missing".into();
                return Err(ModelError::Tensor { path: self.dir.into(), tensor: name, reason });
            };
            let wrong = |reason: String| ModelError::Tensor {
                path: entry.file.clone(),
                tensor: name.clone(),
                reason,
            };
            if entry.shape != shape {
                let found = &entry.shape;
                return Err(wrong(format!("shape {found:?}, config.json implies {shape:?}")));
            }
            if entry.float().is_none() {
                let reason = format!("type {:?} is not one of F32, BF16, F16", entry.dtype);
                return Err(wrong(reason));
            }
            self.names.push(name);
        }
        Ok(())
    }
}

impl ModelConfig {
    /// Every weight by its name in the file, with its shape.
    pub fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        struct Names(Vec<(String, Vec<usize>)>);
        impl Names {
            fn norm(&mut self, name: String, len: usize) {
                self.0.push((format!("{name}.weight"), vec![len]));
            }
        }
        let mut names = Names(Vec::new());
        let embed = vec![self.vocab, self.hidden];
        names.0.push(("model.embed_tokens.weight".into(), embed.clone()));
        let linears = self.linears();
        for (i, slots) in linears.chunks(super::weights::LINEARS.len()).enumerate() {
            let layer = format!("model.layers.{i}");
            names.norm(format!("{layer}.input_layernorm"), self.hidden);
            names.norm(format!("{layer}.post_attention_layernorm"), self.hidden);
            if self.architecture == super::Architecture::Qwen3 {
                names.norm(format!("{layer}.self_attn.q_norm"), self.head_dim);
                names.norm(format!("{layer}.self_attn.k_norm"), self.head_dim);
            }
            for (j, linear) in slots.iter().enumerate() {
                let shape = vec![linear.outputs, linear.inputs];
                names.0.push((format!("{}.weight", linear.path), shape));
                if if j < 4 { self.attention_bias } else { self.mlp_bias } {
                    names.0.push((format!("{}.bias", linear.path), vec![linear.outputs]));
                }
            }
        }
        names.norm("model.norm".into(), self.hidden);
        if !self.tied {
            names.0.push(("lm_head.weight".into(), embed));
        }
        names.0
    }
}

struct Loader<'a> {
    dir: &'a Path,
    entries: &'a BTreeMap<String, Entry>,
    device: &'a Device,
    dtype: DType,
}

impl Loader<'_> {
    fn tensor<const D: usize>(
        &self,
        name: &str,
        shape: [usize; D],
    ) -> Result<Tensor<D>, ModelError> {
        let wrong = |reason: String| ModelError::Tensor {
            path: self.dir.into(),
            tensor: name.into(),
            reason,
        };
        let entry = self.entries.get(name).ok_or_else(|| wrong("missing".into()))?;
        let dtype = entry.float().ok_or_else(|| wrong("not a float tensor".into()))?;
        let bytes = burn::tensor::Bytes::from_bytes_vec(entry.read()?);
        let data = TensorData::try_from_bytes(bytes, shape, dtype)
            .map_err(|e| wrong(e.to_string()))?
            .try_cast(self.dtype)
            .map_err(|e| wrong(e.to_string()))?;
        Ok(Tensor::from_data(data, (self.device, self.dtype)))
    }
}

impl Source for Loader<'_> {
    type Error = ModelError;

    fn vector(&mut self, name: &str, len: usize) -> Result<Tensor<1>, ModelError> {
        self.tensor(name, [len])
    }

    fn matrix(&mut self, name: &str, shape: [usize; 2]) -> Result<Tensor<2>, ModelError> {
        self.tensor(name, shape)
    }
}
