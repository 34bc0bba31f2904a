//! A server on its standard input and output: a process that is started with next to nothing of our
//! environment, and is gone with everything that it started when it is dropped.
//!
//! Messages are lines. What is no JSON on the server's standard output (something that a tool printed) is
//! passed over, as other clients do.

use std::{
    path::Path,
    process::{Child, Command, Stdio},
};

use serde_json::{Map, Value};

use super::session::{Deadline, Failed, Link};
use crate::{json, lines::Lines, tree};

/// What is started.
#[derive(Clone, Debug)]
pub(super) struct Program<'a> {
    pub(super) command: &'a [String],
    pub(super) folder: &'a Path,
    /// Names of our variables that it may see.
    pub(super) variables: &'a [String],
    /// Variables that are set for it.
    pub(super) set: Vec<(String, String)>,
}

/// A running server.
#[derive(Debug)]
pub(super) struct Pipes {
    process: Process,
    lines: Lines,
}

/// The server's first process.
#[derive(Debug)]
struct Process {
    child: Child,
    mark: String,
}

impl Drop for Process {
    fn drop(&mut self) {
        tree::end(&mut self.child, &self.mark);
    }
}

impl Pipes {
    /// Starts a server.
    ///
    /// # Errors
    /// What is wrong, with a remedy.
    pub(super) fn start(program: &Program<'_>) -> Result<Self, String> {
        let (name, arguments) = program.command.split_first().ok_or("its command is empty")?;
        let mark = tree::new_mark()?;
        let mut command = Command::new(name);
        tree::prepare(&mut command, &mark, program.variables);
        command.args(arguments).current_dir(program.folder);
        command.envs(program.set.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().map_err(|error| {
            format!("cannot start {name}: {error}; mend environment.mcp.command or install it")
        })?;
        let mut process = Process { child, mark };
        let lines = Lines::of(&mut process.child, "mcp")?;
        Ok(Self { process, lines })
    }
}

impl Link for Pipes {
    fn send(&mut self, message: &Value, deadline: Deadline) -> Result<(), Failed> {
        let mut line = message.to_string().into_bytes();
        line.push(b'\n');
        Ok(self.lines.send(line, deadline.patience)?)
    }

    fn receive(&mut self, deadline: Deadline) -> Result<Map<String, Value>, Failed> {
        loop {
            let line = self.lines.receive(deadline.left(), deadline.patience)?;
            if let Ok(Value::Object(message)) = json::read(&line) {
                return Ok(message);
            }
        }
    }

    fn agreed(&mut self, _: &str) -> Result<(), Failed> {
        Ok(())
    }

    fn with_words(&mut self, what: &str) -> String {
        // Its end may be seen a moment before its exit status is there.
        match self.process.child.try_wait() {
            Ok(Some(status)) => self.lines.with_words(&format!("{what} ({})", tree::how(status))),
            _ => self.lines.with_words(what),
        }
    }
}
