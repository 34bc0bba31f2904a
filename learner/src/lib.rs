//! The learner: leases, audit, advantages, losses, training, broadcast and the files of a run.

pub mod advantage;
pub mod audit;
pub mod checkpoint;
pub mod cli;
pub mod curriculum;
pub mod dataset;
pub mod files;
mod group_batch;
pub mod joins;
pub mod journal;
pub mod keys;
pub mod leases;
pub mod local_actors;
pub mod loss;
pub mod metrics;
pub mod plan;
pub mod ppo;
pub mod ranks;
pub mod recipe;
pub mod reward;
pub mod rows;
pub mod score;
pub mod serve;
pub mod sft;
pub mod token;
pub mod train;
pub mod verify;
