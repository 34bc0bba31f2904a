//! Built-in games: pure, deterministic, in this process, and the one adapter that makes an
//! [`Environment`] of them.

use std::panic::{AssertUnwindSafe, catch_unwind};

use protocol::{Image, Task};
use serde_json::{Map, Value};

use crate::{
    Description, Environment, Fault, Raised, Reply, Score, SpecError, fields::task_fields,
};

/// A game whose every observation follows from task, seed and calls.
///
/// An implementation reads no clock, no file, no environment variable and no generator but
/// [`crate::draws::Draws`], and iterates over ordered collections only.
pub trait Simulation: Send {
    /// Starts an episode and forgets every earlier one. `task` is the row's task object; fields that
    /// the game does not know are none of its business.
    ///
    /// # Errors
    /// A task field that does not fit.
    fn reset(&mut self, task: &Map<String, Value>, seed: u64) -> Result<Option<String>, SpecError>;

    /// The images that the reset showed, in order.
    fn images(&self) -> Vec<Image> {
        Vec::new()
    }

    /// Takes the policy's answer, where the game asks for one.
    fn answer(&mut self, _text: &str) {}

    /// Runs a tool with arguments that fit its schema.
    ///
    /// # Errors
    /// The tool's own error, which the policy is shown.
    fn call(&mut self, tool: &str, arguments: &Map<String, Value>) -> Result<String, Raised>;

    /// Whether the episode has ended.
    fn done(&self) -> bool;

    /// The milestones reached so far.
    fn reached(&self) -> Vec<String>;

    /// The score so far.
    fn score(&self) -> Score;
}

/// A [`Simulation`] as an [`Environment`]. Its panics become faults.
#[derive(Debug)]
pub struct Simulated<S> {
    simulation: S,
    description: Description,
}

impl<S: Simulation> Simulated<S> {
    /// Wraps `simulation`, which `description` is true of.
    pub fn new(simulation: S, description: Description) -> Self {
        Self { simulation, description }
    }

    fn guarded<T>(
        &mut self,
        during: &'static str,
        run: impl FnOnce(&mut S) -> T,
    ) -> Result<T, Fault> {
        let simulation = &mut self.simulation;
        // A broken simulation is never used again: the recorder refuses to go on after a fault.
        catch_unwind(AssertUnwindSafe(|| run(simulation))).map_err(|payload| {
            let message = payload
                .downcast_ref::<&str>()
                .map(|text| (*text).to_owned())
                .or_else(|| payload.downcast_ref::<String>().cloned())
                .unwrap_or_else(|| "no message".into());
            Fault::Panicked {
                environment: self.description.name.clone(),
                during,
                message: message.chars().map(one_line).take(200).collect(),
            }
        })
    }
}

fn one_line(c: char) -> char {
    if c.is_control() { ' ' } else { c }
}

impl<S: Simulation> Environment for Simulated<S> {
    fn describe(&self) -> &Description {
        &self.description
    }

    fn reset(&mut self, task: &Task, seed: u64) -> Result<Option<String>, Fault> {
        let fault = |error| Fault::Task { task: task.id.clone(), error };
        let fields = task_fields(task).map_err(fault)?;
        self.guarded("reset", |simulation| simulation.reset(&fields, seed))?.map_err(fault)
    }

    fn images(&mut self) -> Result<Vec<Image>, Fault> {
        self.guarded("reset", |simulation| simulation.images())
    }

    fn answer(&mut self, text: &str) -> Result<Vec<String>, Fault> {
        self.guarded("an answer", |simulation| {
            simulation.answer(text);
            simulation.reached()
        })
    }

    fn call(&mut self, tool: &str, arguments: &Map<String, Value>) -> Result<Reply, Fault> {
        self.guarded("a call", |simulation| {
            let result = simulation.call(tool, arguments);
            Reply { result, reached: simulation.reached(), done: simulation.done() }
        })
    }

    fn score(&mut self) -> Result<Score, Fault> {
        self.guarded("score", |simulation| simulation.score())
    }
}
