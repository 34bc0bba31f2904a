//! Policies: models, adapters, tokens, sampling and scoring. Knows no rewards and no network.

pub mod chat;
pub mod device;
pub mod engine;
pub mod episode_script;
pub mod model;
pub mod sampling;
pub mod score;
pub mod vision;

mod simd;
