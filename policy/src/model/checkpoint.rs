//! A Hugging Face model directory: configuration and headers are read and checked against each
//! other before any weight is, so that loading cannot fail half-way for a wrong file.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use burn::tensor::{DType, Device, Tensor, TensorData};

use super::{
    config::{Architecture, ModelConfig},
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
        let mut config = ModelConfig::read(&dir.join("config.json"))?;
        let entries = checkpoint_entries(&dir)?;
        let seeing = entries.keys().any(|name| name.starts_with("model.visual."));
        if config.vision().is_some() && !seeing {
            let dir = dir.display();
            tracing::info!("{dir}: no tensors of a vision tower (model.visual.*): text only");
            config = config.without_vision();
        }
        let mut check = Check { dir: &dir, entries: &entries, names: Vec::new() };
        check.walk(&config)?;
        let used: BTreeSet<&String> = check.names.iter().collect();
        for name in entries.keys().filter(|name| !used.contains(name)) {
            let spare = (config.tied && name == "lm_head.weight")
                || name.ends_with("inv_freq")
                || name.starts_with("mtp.");
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
        let embed = self.entries.get(&format!("{}.embed_tokens.weight", self.config.prefix()));
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
        let mut names = Vec::new();
        let mut add = |name: String, shape: &[usize]| names.push((name, shape.to_vec()));
        let prefix = self.prefix();
        let embed = [self.vocab, self.hidden];
        add(format!("{prefix}.embed_tokens.weight"), &embed);
        for i in 0..self.layers {
            let layer = format!("{prefix}.layers.{i}");
            add(format!("{layer}.input_layernorm.weight"), &[self.hidden]);
            add(format!("{layer}.post_attention_layernorm.weight"), &[self.hidden]);
            for (name, shape) in self.layer_linears(i) {
                add(format!("{layer}.{name}.weight"), &shape);
                if self.biased(name) {
                    add(format!("{layer}.{name}.bias"), &shape[..1]);
                }
            }
            if let Some(delta) = self.delta(i) {
                let layer = format!("{layer}.linear_attn");
                add(format!("{layer}.conv1d.weight"), &[delta.channels(), 1, delta.kernel]);
                add(format!("{layer}.dt_bias"), &[delta.value_heads]);
                add(format!("{layer}.A_log"), &[delta.value_heads]);
                add(format!("{layer}.norm.weight"), &[delta.value_dim]);
            } else if self.architecture != Architecture::Llama {
                add(format!("{layer}.self_attn.q_norm.weight"), &[self.head_dim]);
                add(format!("{layer}.self_attn.k_norm.weight"), &[self.head_dim]);
            }
        }
        add(format!("{prefix}.norm.weight"), &[self.hidden]);
        if !self.tied {
            add("lm_head.weight".into(), &embed);
        }
        names.extend(self.vision().into_iter().flat_map(|vision| vision.tensors(self.hidden)));
        names
    }
}

struct Loader<'a> {
    dir: &'a Path,
    entries: &'a BTreeMap<String, Entry>,
    device: &'a Device,
    dtype: DType,
}

impl Source for Loader<'_> {
    type Error = ModelError;

    fn tensor<const D: usize>(
        &mut self,
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
