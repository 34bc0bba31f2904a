//! `learner train`: the online loop.

pub mod calibrate;
pub mod collect;
pub mod online;
pub mod record;
pub mod run;
pub mod update;
mod watcher;
