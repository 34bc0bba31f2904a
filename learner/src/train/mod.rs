//! `learner train`: the online loop.

pub mod calibrate;
pub mod collect;
pub mod earlier;
mod evaluate;
pub mod follow;
pub mod intake;
mod measured;
pub mod online;
pub mod record;
pub mod replay;
pub mod run;
mod step;
pub mod update;
pub mod watcher;
