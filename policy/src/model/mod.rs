//! Qwen3, Qwen3.5 and Llama-type decoders: Hugging Face checkpoints and PEFT adapters in, logits out.
//! One loaded [`Decoder`] serves any number of [`Adapter`]s, given to each pass.

mod adapter;
mod adapter_bytes;
mod bytes;
mod checkpoint;
mod config;
mod decoder;
mod delta;
mod digest;
mod error;
mod fresh;
mod header;
mod hybrid;
mod images;
mod kv;
mod layer;
mod ops;
mod peft;
mod random;
mod rope;
mod rows;
mod runs;
mod target;
mod tower;
mod tracked;
mod vision;
pub mod weights;

pub use adapter::{Adapter, Lora, LoraConfig};
pub use checkpoint::{Checkpoint, LoadDtype};
pub use config::{Architecture, ModelConfig};
pub(crate) use config::{Fields, brief, read_object};
pub use decoder::{Decoder, FullInput, FullOutput};
pub use digest::{CheckpointDigests, chat_template, checkpoint_digests};
pub use error::{ARCHITECTURES, ModelError};
pub use hybrid::Hybrid;
pub use images::VisionOutput;
pub use kv::{Feed, KvCache, Logits};
pub use peft::target_name;
pub(crate) use rope::RopeTable;
pub use rope::{RopeConfig, RopeScaling};
pub use rows::KvId;
pub(crate) use runs::Runs;
pub use target::TargetModules;
pub use vision::VisionConfig;

pub(crate) use adapter_bytes::lora_key;
pub(crate) use bytes::safetensors_bytes;
pub(crate) use decoder::{MASKED, Position, Rotations};
pub(crate) use delta::{DeltaRows, DeltaRule, DeltaState};
pub(crate) use images::{Placement, positions};
pub(crate) use layer::Sequences;
pub(crate) use ops::{attend, from_f32, to_f32};
pub(crate) use tower::Tower;
