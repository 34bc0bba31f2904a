//! Environments: what an episode is played in, the recorder of its trusted trace, and replay.
//!
//! The way of one episode: a recipe's `environment` section is parsed into an [`EnvironmentSpec`],
//! which opens an [`Environment`] for each episode. A [`Recorder`] resets it, takes the policy's calls
//! one by one, decides what becomes of each ([`arguments`] holds the one coercion table), writes the
//! hash-chained rows that neither the environment nor the policy can write to, and ends with a
//! [`Recording`]. [`check_trace`] and [`mod@replay`] are how a learner re-checks one without trusting who
//! made it.
//!
//! A tool's error is an observation, part of the game. A [`Fault`] is the environment breaking: it
//! voids the episode, which is never scored.
//!
//! Built-in games are [`Simulation`]s, pure and deterministic; [`Simulated`] is the one adapter that
//! makes an [`Environment`] of them. Nothing here talks to a learner.

pub mod add;
pub mod allow;
pub mod arguments;
pub mod check;
mod comments;
pub mod dataset;
pub mod draws;
pub mod environment;
pub mod fault;
mod fields;
pub mod frames;
pub mod frozen_lake;
pub mod guess;
mod hosted;
mod json;
pub mod limits;
mod lines;
pub mod mcp;
pub mod office;
pub mod openenv;
pub mod play;
pub mod probe;
pub mod python;
pub mod recorder;
pub mod replay;
mod room;
pub mod simulation;
pub mod spec;
pub mod text;
pub mod tool;
mod tree;
mod trust;
pub mod wordle;

pub use protocol::CallPermit;

pub use check::{TraceError, check_trace};
pub use comments::without_comments;
pub use environment::{Description, Determinism, Environment, Reply, Score, Solution};
pub use fault::{Fault, Raised};
pub use fields::SpecError;
pub use limits::Limits;
pub use play::{Move, Player, play};
pub use probe::{ProbeReport, Spent, probe};
pub use recorder::{EpisodeKey, Recorder, Recording, answer_text};
pub use replay::{
    Claim, RecordedAnswer, RecordedCall, ReplayError, ReplayMismatch, replay, verify_replay,
};
pub use simulation::{Simulated, Simulation};
pub use spec::{Blueprint, EnvironmentSpec};
pub use tool::ToolSpec;
