//! A session with an MCP server, whatever carries it: JSON-RPC 2.0, one request at a time, each under a
//! deadline. Requests of the server's own are refused, but for `ping`.

use std::{
    fmt,
    time::{Duration, Instant},
};

use serde_json::{Map, Value, json};

use crate::{ToolSpec, tool::inlined};

/// The version of the protocol that is asked for. Servers answer with one that they have.
const PROTOCOL: &str = "2025-06-18";
/// Most pages of a list of tools.
const MOST_PAGES: usize = 64;
/// JSON-RPC's codes for a method that is not there, and for a server's own failure.
const NO_METHOD: i64 = -32601;
const INTERNAL: i64 = -32603;

/// Why a request has no result.
#[derive(Debug)]
pub(super) enum Failed {
    /// The server refused it.
    Refused(String),
    /// The server has no room for another session.
    #[cfg_attr(
        not(feature = "mcp-http"),
        expect(dead_code, reason = "only servers at a URL say so")
    )]
    Full(String),
    /// The session is of no more use.
    Broken(String),
}

impl Failed {
    pub(super) fn reason(self) -> String {
        match self {
            Self::Refused(reason) | Self::Full(reason) | Self::Broken(reason) => reason,
        }
    }
}

impl From<String> for Failed {
    fn from(what: String) -> Self {
        Self::Broken(what)
    }
}

impl From<&str> for Failed {
    fn from(what: &str) -> Self {
        Self::Broken(what.into())
    }
}

/// Until when a request is waited for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadline {
    until: Instant,
    /// How long that was at the start.
    pub(super) patience: Duration,
}

impl Deadline {
    pub(super) fn within(patience: Duration) -> Self {
        Self { until: Instant::now() + patience, patience }
    }

    /// What is left; zero when it is over.
    pub(super) fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }
}

/// What carries messages to a server and back.
pub(super) trait Link: fmt::Debug + Send {
    /// Takes a message to the server.
    fn send(&mut self, message: &Value, deadline: Deadline) -> Result<(), Failed>;

    /// The next message of the server's.
    fn receive(&mut self, deadline: Deadline) -> Result<Map<String, Value>, Failed>;

    /// The server has answered the first request, with this version of the protocol.
    fn agreed(&mut self, version: &str) -> Result<(), Failed>;

    /// What is wrong, on one line, with what else is known of the server.
    fn with_words(&mut self, what: &str) -> String;
}

/// After [`Failed::Broken`] it is of no more use and must be dropped.
#[derive(Debug)]
pub(super) struct Session {
    link: Box<dyn Link>,
    requests: u64,
}

impl Session {
    /// Introduces itself to a server.
    ///
    /// # Errors
    /// What is wrong, with a remedy.
    pub(super) fn start(link: Box<dyn Link>, patience: Duration) -> Result<Self, Failed> {
        let mut session = Self { link, requests: 0 };
        let hello = json!({
            "protocolVersion": PROTOCOL,
            "capabilities": {},
            "clientInfo": {"name": "rollcall", "version": env!("CARGO_PKG_VERSION")},
        });
        let said = session.request("initialize", hello, patience)?;
        let version = said.get("protocolVersion").and_then(Value::as_str);
        let agreed = version.ok_or_else(|| "it does not say its protocol's version".into());
        let ready = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
        agreed
            .and_then(|version| session.link.agreed(version))
            .and_then(|()| session.link.send(&ready, Deadline::within(patience)))
            .map_err(|failed| session.worded(failed))?;
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
        let deadline = Deadline::within(patience);
        self.requests += 1;
        let id = self.requests;
        let request = json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params});
        let sent = self.link.send(&request, deadline);
        let answer = sent.and_then(|()| self.answer(id, deadline));
        let mut answer = answer.map_err(|failed| self.worded(failed))?;
        let Some(error) = answer.get("error") else {
            return Ok(answer.get_mut("result").map(Value::take).unwrap_or_default());
        };
        let message = error.get("message").and_then(Value::as_str).unwrap_or_default();
        // What it says about this request; that it failed itself is another matter.
        Err(match error.get("code").and_then(Value::as_i64) {
            Some(INTERNAL) | None => self.worded(Failed::Broken(format!("it failed: {message}"))),
            Some(_) => Failed::Refused(message.into()),
        })
    }

    /// The answer to a request. Everything else that comes before it is seen to.
    fn answer(&mut self, id: u64, deadline: Deadline) -> Result<Map<String, Value>, Failed> {
        loop {
            let message = self.link.receive(deadline)?;
            match (message.get("method").and_then(Value::as_str), message.get("id")) {
                (None, Some(answered)) if answered.as_u64() == Some(id) => return Ok(message),
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
                    self.link.send(&answer, deadline)?;
                }
                // A notification.
                (_, None) => {}
            }
        }
    }

    fn worded(&mut self, failed: Failed) -> Failed {
        match failed {
            Failed::Broken(what) => Failed::Broken(self.link.with_words(&what)),
            other => other,
        }
    }
}

fn read_tool(tool: &Value) -> Option<ToolSpec> {
    let text = |key: &str| tool.get(key).and_then(Value::as_str);
    let description = text("description").unwrap_or_default().trim();
    Some(ToolSpec::new(text("name")?, description, inlined(tool.get("inputSchema")?)))
}
