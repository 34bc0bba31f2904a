//! The generation engine: batched, KV-cached sampling for many episodes at once.
