//! One Python process tree: started with next to nothing of our environment, asked one thing at a time
//! under a deadline, and gone as a whole when it is dropped.
//!
//! Dropping closes its standard input. That ends the guardian of `host.py`, which kills everything below
//! itself; the same happens when this program is killed, as the system then closes the pipe.

use std::{
    env,
    os::unix::process::CommandExt as _,
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use serde::Deserialize;
use serde_json::Value;

use crate::{
    lines::Lines,
    tree::{FIXED, INHERITED},
};

/// Names another interpreter than `python3`, as that of a virtual environment.
pub const PYTHON_VARIABLE: &str = "ROLLCALL_PYTHON";

const HOST: &str = include_str!("host.py");
/// How long a tree may take to go away before its guardian is killed itself.
const PARTING: Duration = Duration::from_secs(3);
/// A reply's line. Which fields are there depends on the request.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Answer {
    id: Option<u64>,
    fault: Option<String>,
    /// How the player ended: the answer to `close`.
    ended: Option<String>,
    pub(super) tools: Vec<Tool>,
    pub(super) text: Option<String>,
    pub(super) raised: Option<String>,
    pub(super) done: bool,
    pub(super) reward: Option<f64>,
}

/// A tool as the class describes it.
#[derive(Debug, Deserialize)]
pub(super) struct Tool {
    pub(super) name: String,
    pub(super) description: String,
    pub(super) parameters: Value,
    #[serde(rename = "return")]
    pub(super) returns: Option<Value>,
}

/// A running tree. After an error it is of no more use and must be dropped.
#[derive(Debug)]
pub(super) struct Process {
    child: Child,
    lines: Lines,
    requests: u64,
    /// Episodes that it has played.
    pub(super) episodes: u64,
}

impl Process {
    /// Starts one in `folder`, with the named variables of our environment besides what it needs.
    ///
    /// # Errors
    /// What is wrong, with a remedy.
    pub(super) fn start(folder: &Path, variables: &[String]) -> Result<Self, String> {
        let python = env::var_os(PYTHON_VARIABLE).unwrap_or_else(|| "python3".into());
        let mut command = Command::new(&python);
        command.args(["-u", "-c", HOST]).current_dir(folder).env_clear().process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let inherited = INHERITED.into_iter().chain(variables.iter().map(String::as_str));
        command.envs(inherited.filter_map(|name| Some((name, env::var_os(name)?))));
        command.envs(FIXED);
        let mut child = command.spawn().map_err(|error| {
            let python = python.to_string_lossy();
            format!("cannot start {python}: {error}; name an interpreter in {PYTHON_VARIABLE}")
        })?;
        let lines = Lines::of(&mut child, "python")?;
        Ok(Self { child, lines, requests: 0, episodes: 0 })
    }

    /// Sends a request and waits for its reply.
    ///
    /// # Errors
    /// What went wrong, with its last words.
    pub(super) fn ask(&mut self, mut request: Value, patience: Duration) -> Result<Answer, String> {
        self.requests += 1;
        let closing = request.get("op").is_some_and(|op| op == "close");
        if let Value::Object(fields) = &mut request {
            fields.insert("id".into(), self.requests.into());
        }
        let mut line = request.to_string().into_bytes();
        line.push(b'\n');
        self.lines.send(line, patience).map_err(|what| self.with_words(&what))?;
        let answer = self.receive(patience).map_err(|what| self.with_words(&what))?;
        match (answer.fault, answer.ended) {
            (Some(fault), _) => Err(self.with_words(&fault)),
            (None, Some(how)) if closing && how == "exit status 0" => Ok(Answer::default()),
            (None, Some(how)) => Err(self.with_words(&format!("its process ended ({how})"))),
            (None, None) if closing || answer.id != Some(self.requests) => {
                Err(self.with_words("it answered another request than it was asked"))
            }
            (None, None) => Ok(Answer { fault: None, ended: None, ..answer }),
        }
    }

    fn receive(&mut self, patience: Duration) -> Result<Answer, String> {
        let line = self.lines.receive(patience, patience)?;
        serde_json::from_slice(&line)
            .map_err(|error| format!("its reply is not one of the protocol: {error}"))
    }

    fn with_words(&self, what: &str) -> String {
        self.lines.with_words(what)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if !self.lines.part(PARTING) {
            // Its worker and player are set to end with it.
            drop(self.child.kill());
        }
        drop(self.child.wait());
    }
}
