//! The two ways in which a call can go wrong, kept apart: a tool's error, which the policy is shown,
//! and a fault, which voids the episode.

use std::fmt;

use crate::SpecError;

/// A tool ran and raised. What it changed before that stays changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Raised(
    /// The message that the policy is shown, inside the error text of [`crate::text`].
    pub String,
);

impl Raised {
    /// An error with this message.
    pub fn new(message: impl fmt::Display) -> Self {
        Self(message.to_string())
    }
}

/// The environment broke, or was used against its contract. The episode is void: it is never scored,
/// and its lease is failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// The dataset row does not fit the environment.
    #[error("task {task:?}: {error}")]
    Task {
        /// The row's id.
        task: String,
        /// What is wrong, with field and remedy.
        error: SpecError,
    },
    /// The environment went against the contract of [`crate::Environment`].
    #[error("environment {environment}: {what}")]
    Contract {
        /// Its name.
        environment: String,
        /// What it did.
        what: String,
    },
    /// The environment's code panicked.
    #[error("environment {environment} panicked in {during}: {message}; this is a bug in it")]
    Panicked {
        /// Its name.
        environment: String,
        /// The method that it was in.
        during: &'static str,
        /// The panic's message, at most 200 characters.
        message: String,
    },
    /// The environment's process or server broke, did not answer in time, or said what is not in the
    /// protocol.
    #[error("environment {environment}: {during}: {what}")]
    Process {
        /// Its name.
        environment: String,
        /// What it was asked for.
        during: &'static str,
        /// What happened, one line, with the last that it wrote to standard error.
        what: String,
    },
    /// As many episodes are played as its server or its section allows, and were for all the time that
    /// this one could wait.
    #[error(
        "environment {environment}: {what}; raise its capacity or environment.capacity_seconds"
    )]
    Busy {
        /// Its name.
        environment: String,
        /// What it said.
        what: String,
    },
    /// The test whether the environment repeats its episodes met a fault.
    #[error(
        "environment {environment}: its probe: {fault}; where reset needs a row's fields, set \
         environment.probe_task to a task object"
    )]
    Probe {
        /// Its name.
        environment: String,
        /// The fault.
        fault: Box<Fault>,
    },
    /// A recorder was given a call of a turn that lies behind it.
    #[error("a call of turn {turn} came after turn {last}: give calls in the order of their turns")]
    TurnOrder {
        /// The late call's turn.
        turn: u32,
        /// The last turn that has a row.
        last: u32,
    },
    /// A recorder was used after a fault.
    #[error("the episode is void since an earlier fault: reset a new environment")]
    Void,
}
