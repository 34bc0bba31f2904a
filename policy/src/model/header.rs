//! The headers of safetensors files, single or sharded with an index: which tensor lies where. Read
//! and checked before any data, so that loading meets no surprise.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

use burn::tensor::DType;
use safetensors::{Dtype, tensor::Metadata};
use serde_json::Value;

use super::{config::read_object, error::ModelError};

/// Larger headers are refused unread; the largest models' are below 1 MiB.
const HEADER_LIMIT: u64 = 64 << 20;

/// One tensor of a file.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) file: PathBuf,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    /// First byte, from the start of the file.
    pub(crate) offset: u64,
    pub(crate) bytes: usize,
}

impl Entry {
    pub(crate) fn float(&self) -> Option<DType> {
        match self.dtype {
            Dtype::F32 => Some(DType::F32),
            Dtype::BF16 => Some(DType::BF16),
            Dtype::F16 => Some(DType::F16),
            _ => None,
        }
    }

    /// The tensor's bytes, little-endian and row-major.
    pub(crate) fn read(&self) -> Result<Vec<u8>, ModelError> {
        let mut file = File::open(&self.file).map_err(ModelError::io(&self.file))?;
        file.seek(SeekFrom::Start(self.offset)).map_err(ModelError::io(&self.file))?;
        let mut bytes = vec![0; self.bytes];
        file.read_exact(&mut bytes).map_err(ModelError::io(&self.file))?;
        Ok(bytes)
    }
}

/// The tensors of the checkpoint in `dir` by name: of `model.safetensors`, or of the shards that
/// `model.safetensors.index.json` lists.
pub(crate) fn checkpoint_entries(dir: &Path) -> Result<BTreeMap<String, Entry>, ModelError> {
    let single = dir.join("model.safetensors");
    let index = dir.join("model.safetensors.index.json");
    if single.is_file() || !index.is_file() {
        return file_entries(&single);
    }
    let wrong = |reason: String| ModelError::File { path: index.clone(), reason };
    let map = read_object(&index, 64 << 20)?;
    let Some(Value::Object(weights)) = map.get("weight_map") else {
        return Err(wrong("no \"weight_map\" object".into()));
    };
    let mut shards: BTreeMap<&str, BTreeMap<String, Entry>> = BTreeMap::new();
    let mut entries = BTreeMap::new();
    for (tensor, shard) in weights {
        let plain = |name: &&str| Path::new(name).file_name().is_some_and(|n| n == *name);
        let Some(shard) = shard.as_str().filter(plain) else {
            return Err(wrong(format!("the shard of {tensor:?} is not a plain file name")));
        };
        if !shards.contains_key(shard) {
            shards.insert(shard, file_entries(&dir.join(shard))?);
        }
        match shards.get_mut(shard).and_then(|entries| entries.remove(tensor)) {
            Some(entry) => entries.insert(tensor.clone(), entry),
            None => return Err(wrong(format!("{shard} does not hold {tensor:?}"))),
        };
    }
    Ok(entries)
}

/// The tensors of one safetensors file by name.
pub(crate) fn file_entries(path: &Path) -> Result<BTreeMap<String, Entry>, ModelError> {
    let wrong = |reason: String| ModelError::File { path: path.into(), reason };
    let mut file = File::open(path).map_err(ModelError::io(path))?;
    let len = file.metadata().map_err(ModelError::io(path))?.len();
    let mut size = [0; 8];
    file.read_exact(&mut size).map_err(|_| wrong("shorter than a safetensors header".into()))?;
    let header = u64::from_le_bytes(size);
    if header > HEADER_LIMIT || header.saturating_add(8) > len {
        return Err(wrong(format!(
            "a header of {header} bytes does not fit a file of {len} bytes: it is cut short or damaged; copy it again"
        )));
    }
    let mut bytes = Vec::new();
    file.take(header).read_to_end(&mut bytes).map_err(ModelError::io(path))?;
    let metadata: Metadata =
        serde_json::from_slice(&bytes).map_err(|e| wrong(format!("bad header: {e}")))?;
    let mut entries = BTreeMap::new();
    let mut end = 8 + header;
    for (name, info) in metadata.tensors() {
        let (from, to) = info.data_offsets;
        let offset = 8 + header + from as u64;
        end = end.max(8 + header + to as u64);
        let entry = Entry {
            file: path.into(),
            dtype: info.dtype,
            shape: info.shape.clone(),
            offset,
            bytes: to - from,
        };
        entries.insert(name, entry);
    }
    if end != len {
        return Err(wrong(format!(
            "{len} bytes long, its header says {end} (an incomplete copy?)"
        )));
    }
    Ok(entries)
}
