//! `learner train`: the online loop.

pub mod collect;
pub mod online;
pub mod record;
pub mod run;
pub mod update;
