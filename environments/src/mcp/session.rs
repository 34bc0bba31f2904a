//! A running MCP server: started with next to nothing of our environment, asked one thing at a time under
//! a deadline, and gone with everything that it started when it is dropped.
//!
//! The protocol is lines of JSON-RPC 2.0. What is no JSON on the server's standard output (something that
//! a tool printed) is passed over, as other clients do; requests of the server's own are refused, but for
//! `ping`.

use std::{
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::{Map, Value, json};

use crate::{ToolSpec, lines::Lines, tool::inlined, tree};

/// The version of the protocol that is asked for. Servers answer with one that they have.
const PROTOCOL: &str = "2025-06-18";
/// Most pages of a list of tools.
const MOST_PAGES: usize = 64;
/// JSON-RPC's codes for a method that is not there, and for a server's own failure.
const NO_METHOD: i64 = -32601;
const INTERNAL: i64 = -32603;

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

/// Why a request has no result.
#[derive(Debug)]
pub(super) enum Failed {
    /// The server refused it.
    Refused(String),
    /// The session is of no more use.
    Broken(String),
}

impl Failed {
    fn reason(self) -> String {
        match self {
            Self::Refused(reason) | Self::Broken(reason) => reason,
        }
    }
}

/// A running server. After [`Failed::Broken`] it is of no more use and must be dropped.
#[derive(Debug)]
pub(super) struct Session {
    process: Process,
    lines: Lines,
    requests: u64,
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

impl Session {
    /// Starts a server and introduces itself.
    ///
    /// # Errors
    /// What is wrong, with a remedy.
    pub(super) fn start(program: &Program<'_>, patience: Duration) -> Result<Self, String> {
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
        let mut session = Self { process, lines, requests: 0 };
        let hello = json!({
            "protocolVersion": PROTOCOL,
            "capabilities": {},
            "clientInfo": {"name": "rollcall", "version": env!("CARGO_PKG_VERSION")},
        });
        let said = session.request("initialize", hello, patience).map_err(Failed::reason)?;
        if said.get("protocolVersion").and_then(Value::as_str).is_none() {
            return Err(session.with_words("it does not say its protocol's version"));
        }
        let ready = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
        session.send(&ready, patience).map_err(|what| session.with_words(&what))?;
        Ok(session)
    }

    /// The tools that it lists, all pages.
    ///
    /// # Errors
    /// What went wrong.
    pub(super) fn tools(&mut self, patience: Duration) -> Result<Vec<ToolSpec>, String> {
        let mut tools = Vec::new();
        let mut page = json!({});
        for _ in 0..MOST_PAGES {
            let said = self.request("tools/list", page, patience).map_err(Failed::reason)?;
            let listed = said.get("tools").and_then(Value::as_array).map(Vec::as_slice);
            for tool in listed.ok_or("it lists no tools")? {
                tools.push(read_tool(tool).ok_or("a tool that it lists has no name or no schema")?);
            }
            match said.get("nextCursor").and_then(Value::as_str) {
                None => return Ok(tools),
                Some(cursor) => page = json!({"cursor": cursor}),
            }
        }
        Err(format!("it lists more than {MOST_PAGES} pages of tools"))
    }

    /// Calls a tool and returns its result as it came.
    ///
    /// # Errors
    /// The server refused it, or the session broke.
    pub(super) fn call(
        &mut self,
        tool: &str,
        arguments: &Map<String, Value>,
        patience: Duration,
    ) -> Result<Value, Failed> {
        self.request("tools/call", json!({"name": tool, "arguments": arguments}), patience)
    }

    fn request(
        &mut self,
        method: &str,
        params: Value,
        patience: Duration,
    ) -> Result<Value, Failed> {
        let until = Instant::now() + patience;
        self.requests += 1;
        let id = self.requests;
        let request = json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params});
        let sent = self.send(&request, patience);
        let answer = sent.and_then(|()| self.answer(id, until, patience));
        let mut answer = answer.map_err(|what| Failed::Broken(self.with_words(&what)))?;
        let Some(error) = answer.get("error") else {
            return Ok(answer.get_mut("result").map(Value::take).unwrap_or_default());
        };
        let message = error.get("message").and_then(Value::as_str).unwrap_or_default();
        // What it says about this request; that it failed itself is another matter.
        Err(match error.get("code").and_then(Value::as_i64) {
            Some(INTERNAL) | None => {
                Failed::Broken(self.with_words(&format!("it failed: {message}")))
            }
            Some(_) => Failed::Refused(message.into()),
        })
    }

    /// The answer to a request. Everything else that comes before it is seen to.
    fn answer(&mut self, id: u64, until: Instant, patience: Duration) -> Result<Value, String> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let line = self.lines.receive(left, patience)?;
            let Ok(Value::Object(message)) = serde_json::from_slice::<Value>(&line) else {
                continue;
            };
            match (message.get("method").and_then(Value::as_str), message.get("id")) {
                (None, Some(answered)) if answered.as_u64() == Some(id) => {
                    return Ok(Value::Object(message));
                }
                (None, Some(_)) => {
                    return Err("it answered another request than it was asked".into());
                }
                // Its own request.
                (Some(method), Some(theirs)) => {
                    let answer = if method == "ping" {
                        json!({"jsonrpc": "2.0", "id": theirs, "result": {}})
                    } else {
                        let error = json!({"code": NO_METHOD, "message": "Method not found"});
                        json!({"jsonrpc": "2.0", "id": theirs, "error": error})
                    };
                    self.send(&answer, left)?;
                }
                // A notification.
                (_, None) => {}
            }
        }
    }

    fn send(&mut self, message: &Value, patience: Duration) -> Result<(), String> {
        let mut line = message.to_string().into_bytes();
        line.push(b'\n');
        self.lines.send(line, patience)
    }

    fn with_words(&mut self, what: &str) -> String {
        // Its end may be seen a moment before its exit status is there.
        match self.process.child.try_wait() {
            Ok(Some(status)) => self.lines.with_words(&format!("{what} ({})", tree::how(status))),
            _ => self.lines.with_words(what),
        }
    }
}

fn read_tool(tool: &Value) -> Option<ToolSpec> {
    let text = |key: &str| tool.get(key).and_then(Value::as_str);
    let description = text("description").unwrap_or_default().trim();
    Some(ToolSpec::new(text("name")?, description, inlined(tool.get("inputSchema")?)))
}
