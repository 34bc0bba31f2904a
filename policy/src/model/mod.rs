//! Decoders, LoRA adapters and their files.
