//! `learner train`: the online loop.

pub mod calibrate;
pub mod collect;
pub mod follow;
pub mod online;
pub mod record;
pub mod run;
mod step;
pub mod update;
pub mod watcher;
