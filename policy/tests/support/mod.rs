//! Golden files made by the reference stack: finding them, reading them, comparing with them.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use burn::tensor::DType;
use policy::model::{Checkpoint, Decoder, LoadDtype, ModelError};
use safetensors::{Dtype, SafeTensors};

/// The data root: `ROLLCALL_DATA`, or `../shared/data` beside the workspace.
pub fn data_root() -> PathBuf {
    match std::env::var_os("ROLLCALL_DATA") {
        Some(root) => root.into(),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data"),
    }
}

/// Our own goldens, committed.
pub fn own_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/model")
}

/// The folders with a golden file below `kind` of both roots; says so where a root is absent.
pub fn folders(kind: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for root in [own_root(), data_root()] {
        let Ok(entries) = fs::read_dir(root.join(kind)) else {
            eprintln!("skipped: no {}", root.join(kind).display());
            continue;
        };
        let mut folders: Vec<PathBuf> = entries.filter_map(|e| Some(e.ok()?.path())).collect();
        folders.sort();
        found.extend(folders.into_iter().filter(|f| f.join("golden.safetensors").is_file()));
    }
    found
}

/// The checkpoint, or `None` with a message where its architecture is not ours.
pub fn open(dir: &Path) -> Option<Checkpoint> {
    match Checkpoint::open(dir) {
        Ok(checkpoint) => Some(checkpoint),
        Err(error @ ModelError::Architecture { .. }) => {
            eprintln!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// The checkpoint on the CPU in its own type.
pub fn load(dir: &Path) -> Option<Decoder> {
    let device = policy::device::DeviceChoice::Cpu.open().unwrap();
    open(dir).map(|checkpoint| checkpoint.load(&device, LoadDtype::File).unwrap())
}

/// A tensor of a golden file; integers are kept exactly in `f64` too.
#[derive(Clone, Debug)]
pub struct Golden {
    pub shape: Vec<usize>,
    pub values: Vec<f64>,
}

impl Golden {
    pub fn ids(&self) -> Vec<u32> {
        self.values.iter().map(|&v| v as u32).collect()
    }

    pub fn flags(&self) -> Vec<bool> {
        self.values.iter().map(|&v| v != 0.0).collect()
    }
}

/// Tensors by name. Those that a vision-language folder has for its text alone go without their
/// `text_`.
pub fn goldens(dir: &Path) -> BTreeMap<String, Golden> {
    let bytes = fs::read(dir.join("golden.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let read = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
        let values = match view.dtype() {
            Dtype::F32 => (view.data().chunks_exact(4))
                .map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap())))
                .collect(),
            Dtype::BF16 => (view.data().chunks_exact(2))
                .map(|b| f64::from(half::bf16::from_le_bytes(b.try_into().unwrap())))
                .collect(),
            Dtype::I64 => (view.data().chunks_exact(8))
                .map(|b| i64::from_le_bytes(b.try_into().unwrap()) as f64)
                .collect(),
            other => panic!("{name}: {other:?}"),
        };
        let name = name.strip_prefix("text_").map(str::to_owned).unwrap_or(name);
        (name, Golden { shape: view.shape().to_vec(), values })
    };
    file.tensors().into_iter().map(read).collect()
}

/// Of max |value|: f32 rounding; in bf16 transformers' own eager and fused attention differ by 1.4e-2.
pub fn tolerance(decoder: &Decoder) -> f64 {
    if decoder.dtype() == DType::F32 { 1e-4 } else { 3e-2 }
}

/// Fails unless every value is within `tolerance * max |expected|`.
pub fn close(what: &str, found: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{what}: length");
    let scale = expected.iter().fold(0.0f64, |m, v| m.max(v.abs()));
    let worst = (found.iter().zip(expected)).map(|(f, e)| (f64::from(*f) - e).abs());
    let worst = worst.fold(0.0f64, |m, d| if d.is_nan() { f64::INFINITY } else { m.max(d) });
    let ratio = worst / scale.max(f64::MIN_POSITIVE);
    eprintln!("{what}: off by {ratio:.1e} of max |value| {scale:.3}");
    assert!(ratio <= tolerance, "{what}: off by {ratio:.2e} of max |value|, more than {tolerance}");
}

pub fn values<const D: usize>(tensor: burn::tensor::Tensor<D>) -> Vec<f32> {
    tensor.into_data().convert::<f32>().try_into_vec().unwrap()
}

/// The checkpoint that an adapter's configuration names, relative to its data root.
pub fn base_of(adapter: &Path) -> PathBuf {
    let text = fs::read(adapter.join("adapter_config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let base = config["base_model_name_or_path"].as_str().unwrap().to_owned();
    adapter.parent().and_then(Path::parent).unwrap().join(base)
}
