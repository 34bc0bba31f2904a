//! The rollout actor: plays leased episodes and sends them to the learner. Knows no optimizer.

pub mod adapters;
mod asks;
mod check;
pub mod cli;
pub mod desk;
mod examples;
pub mod metrics;
pub mod player;
pub mod sample;
pub mod session;
pub mod spool;
pub mod worker;
