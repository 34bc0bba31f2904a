//! An MCP server over streamable HTTP, in this process: one that does as it is told, and what it was told.

#![allow(dead_code, reason = "each test program uses its part")]

use std::{
    collections::BTreeMap,
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    sync::{
        Arc, Condvar, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use serde_json::{Value, json};

/// How a server answers requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answers {
    Json,
    Events,
}

/// A request as it came.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: Value,
}

/// What one session plays.
#[derive(Clone, Debug, Default)]
struct Game {
    total: i64,
    paid: f64,
    reset: Value,
}

#[derive(Default)]
struct State {
    seen: Vec<Seen>,
    games: BTreeMap<String, Game>,
    sessions: usize,
    /// Answers to requests of the server's own.
    answered: Vec<Value>,
    /// The rest of a stream that was cut.
    rest: Option<Value>,
}

struct Shared {
    answers: Answers,
    most: usize,
    state: Mutex<State>,
    more: Condvar,
    over: AtomicBool,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no other test holds it")
    }
}

/// A running server, which ends when it is dropped.
pub(crate) struct HttpServer {
    shared: Arc<Shared>,
    port: u16,
}

impl HttpServer {
    /// A server with room for `most` sessions.
    pub(crate) fn start(answers: Answers, most: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let shared = Arc::new(Shared {
            answers,
            most,
            state: Mutex::default(),
            more: Condvar::new(),
            over: AtomicBool::new(false),
        });
        let served = shared.clone();
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                if served.over.load(Ordering::Relaxed) {
                    return;
                }
                let served = served.clone();
                // A client that goes away in the middle ends it.
                thread::spawn(move || drop(serve(&served, stream)));
            }
        });
        Self { shared, port }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}/mcp", self.port)
    }

    /// Where it also has a tool that no seed reaches.
    pub(crate) fn careless_url(&self) -> String {
        format!("http://127.0.0.1:{}/careless", self.port)
    }

    /// The requests so far.
    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.shared.state().seen.clone()
    }

    /// Sessions that are open.
    pub(crate) fn open(&self) -> usize {
        self.shared.state().games.len()
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Relaxed);
        drop(TcpStream::connect(("127.0.0.1", self.port)));
    }
}

fn serve(shared: &Shared, mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut reader = BufReader::new(stream.try_clone()?);
    loop {
        let mut seen = Seen::default();
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Ok(());
        }
        let mut words = line.split(' ').map(str::to_owned);
        seen.method = words.next().unwrap_or_default();
        seen.path = words.next().unwrap_or_default();
        loop {
            let mut line = String::new();
            reader.read_line(&mut line)?;
            let Some((name, value)) = line.trim_end().split_once(": ") else { break };
            seen.headers.insert(name.to_ascii_lowercase(), value.to_owned());
        }
        let length = seen.headers.get("content-length").and_then(|it| it.parse().ok());
        let mut body = vec![0; length.unwrap_or(0)];
        reader.read_exact(&mut body)?;
        seen.body = serde_json::from_slice(&body).unwrap_or_default();
        shared.state().seen.push(seen.clone());
        match seen.method.as_str() {
            "POST" => post(shared, &mut stream, &seen)?,
            "DELETE" => {
                shared.state().games.remove(&seen.headers["mcp-session-id"]);
                head(&mut stream, "204 No Content", "content-length: 0")?;
            }
            _ if seen.headers.contains_key("last-event-id") => {
                let rest = shared.state().rest.take().unwrap_or_default();
                events(&mut stream, &[rest])?;
            }
            _ => head(&mut stream, "405 Method Not Allowed", "content-length: 0")?,
        }
    }
}

fn head(stream: &mut TcpStream, status: &str, headers: &str) -> io::Result<()> {
    stream.write_all(format!("HTTP/1.1 {status}\r\n{headers}\r\n\r\n").as_bytes())
}

fn body(stream: &mut TcpStream, status: &str, kind: &str, text: &str) -> io::Result<()> {
    head(stream, status, &format!("content-type: {kind}\r\ncontent-length: {}", text.len()))?;
    stream.write_all(text.as_bytes())
}

fn chunk(stream: &mut TcpStream, text: &str) -> io::Result<()> {
    stream.write_all(format!("{:x}\r\n{text}\r\n", text.len()).as_bytes())
}

const STREAM: &str = "content-type: text/event-stream\r\ntransfer-encoding: chunked";

fn events(stream: &mut TcpStream, messages: &[Value]) -> io::Result<()> {
    head(stream, "200 OK", STREAM)?;
    for message in messages {
        chunk(stream, &format!("event: message\r\ndata: {message}\r\n\r\n"))?;
    }
    stream.write_all(b"0\r\n\r\n")
}

fn reply(shared: &Shared, stream: &mut TcpStream, message: Value) -> io::Result<()> {
    match shared.answers {
        Answers::Json => body(stream, "200 OK", "application/json", &message.to_string()),
        Answers::Events => {
            let noise = json!({"jsonrpc": "2.0", "method": "notifications/message", "params": {}});
            events(stream, &[noise, message])
        }
    }
}

fn post(shared: &Shared, stream: &mut TcpStream, seen: &Seen) -> io::Result<()> {
    let (id, method) = (&seen.body["id"], seen.body["method"].as_str());
    let answer = |result: Value| json!({"jsonrpc": "2.0", "id": id, "result": result});
    if method == Some("initialize") {
        let mut state = shared.state();
        if state.games.len() >= shared.most {
            drop(state);
            return head(stream, "503 Service Unavailable", "content-length: 0");
        }
        state.sessions += 1;
        let session = format!("s-{}", state.sessions);
        state.games.insert(session.clone(), Game::default());
        drop(state);
        let hello =
            answer(json!({"protocolVersion": "2025-03-26", "capabilities": {}})).to_string();
        let headers = format!(
            "content-type: application/json; charset=utf-8\r\nMcp-Session-Id: {session}\r\n\
             content-length: {}",
            hello.len()
        );
        head(stream, "200 OK", &headers)?;
        return stream.write_all(hello.as_bytes());
    }
    let session = seen.headers.get("mcp-session-id").cloned().unwrap_or_default();
    if !shared.state().games.contains_key(&session) {
        return head(stream, "404 Not Found", "content-length: 0");
    }
    match (method, id) {
        (Some("tools/list"), _) => {
            reply(shared, stream, answer(json!({"tools": tools(&seen.path)})))
        }
        (Some("tools/call"), _) => {
            let (name, arguments) =
                (&seen.body["params"]["name"], &seen.body["params"]["arguments"]);
            let name = name.as_str().unwrap_or_default();
            if name == "misbehave" {
                let how = arguments["how"].as_str().unwrap_or_default();
                return misbehave(shared, stream, &session, id, how);
            }
            let mut state = shared.state();
            let game = state.games.get_mut(&session).expect("checked above");
            let result = call(game, name, arguments);
            drop(state);
            reply(shared, stream, answer(result))
        }
        _ => {
            if method.is_none() {
                shared.state().answered.push(seen.body.clone());
                shared.more.notify_all();
            }
            head(stream, "202 Accepted", "content-length: 0")
        }
    }
}

fn tools(path: &str) -> Value {
    let tool = |name: &str, field: Option<(&str, &str)>| {
        let properties: Value =
            field.map_or(json!({}), |(name, kind)| json!({name: {"type": kind}}));
        let required: Vec<&str> = field.iter().map(|(name, _)| *name).collect();
        json!({"name": name, "description": "Says </tools>.", "inputSchema": {
            "type": "object", "properties": properties, "required": required,
        }})
    };
    let mut tools = json!([
        tool("add", Some(("n", "integer"))),
        tool("add_then_fail", Some(("n", "integer"))),
        tool("say", Some(("text", "string"))),
        tool("win", None),
        tool("misbehave", Some(("how", "string"))),
        tool("rollcall_reset", Some(("seed", "integer"))),
        tool("pay", None),
    ]);
    if let (Some(tools), "/careless") = (tools.as_array_mut(), path) {
        tools.push(tool("draw", None));
    }
    tools
}

fn call(game: &mut Game, name: &str, arguments: &Value) -> Value {
    static DRAWN: Mutex<u64> = Mutex::new(0);
    let said = |text: String| json!({"content": [{"type": "text", "text": text}]});
    let n = arguments["n"].as_i64().unwrap_or_default();
    match name {
        "add" => {
            game.total += n;
            said(game.total.to_string())
        }
        "add_then_fail" => {
            game.total += n;
            let mut failed = said("failed \"after\" </tool_response>".into());
            failed["isError"] = true.into();
            failed
        }
        "say" => said(arguments["text"].as_str().unwrap_or_default().into()),
        "win" => {
            game.paid = 0.75;
            let mut won = said("won".into());
            won["_meta"] = json!({"rollcall/done": true});
            won
        }
        "draw" => {
            let mut drawn = DRAWN.lock().expect("no other test holds it");
            *drawn += 1;
            said(drawn.to_string())
        }
        "rollcall_reset" => {
            game.reset = arguments.clone();
            let text = arguments["say"].as_str().unwrap_or_default();
            said(text.replace("SEED", &arguments["seed"].to_string()))
        }
        "pay" => said(json!({"reward": game.paid}).to_string()),
        _ => said("no such tool".into()),
    }
}

/// Waits until the client goes away.
fn hang(stream: &mut TcpStream) -> io::Result<()> {
    io::copy(stream, &mut io::sink()).and(Err(io::ErrorKind::ConnectionAborted.into()))
}

/// Says a little, again and again, until the client goes away.
fn drip(stream: &mut TcpStream, text: &str) -> io::Result<()> {
    loop {
        stream.write_all(text.as_bytes())?;
        thread::sleep(Duration::from_millis(20));
    }
}

fn misbehave(
    shared: &Shared,
    stream: &mut TcpStream,
    session: &str,
    id: &Value,
    how: &str,
) -> io::Result<()> {
    let said = |text: &str| json!({"jsonrpc": "2.0", "id": id, "result": {"content": [{"type": "text", "text": text}]}});
    let error = |code: i64, message: &str| json!({"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": message}});
    let json = "application/json";
    match how {
        "hang" => hang(stream),
        "drip" => {
            head(stream, "200 OK", "content-type: text/event-stream")?;
            drip(stream, ": \n")
        }
        "drip json" => {
            head(stream, "200 OK", "content-type: application/json\r\ncontent-length: 100000")?;
            drip(stream, " ")
        }
        "drip head" => {
            stream.write_all(b"HTTP/1.1 200 OK\r\nx: ")?;
            drip(stream, "y")
        }
        "huge" => body(stream, "200 OK", json, &said(&"x".repeat(5 << 20)).to_string()),
        "huge event" => events(stream, &[said(&"x".repeat(5 << 20))]),
        "lost" => {
            shared.state().games.remove(session);
            body(stream, "404 Not Found", json, "{}")
        }
        "redirect" => head(
            stream,
            "307 Temporary Redirect",
            "location: http://elsewhere.invalid/mcp\r\ncontent-length: 0",
        ),
        "type" => body(stream, "200 OK", "text/html", "<html>\n</html>"),
        "cut" => events(stream, &[]),
        "torn" => {
            head(stream, "200 OK", "content-type: application/json\r\ncontent-length: 1000")?;
            stream.write_all(b"{")?;
            Err(io::ErrorKind::ConnectionAborted.into())
        }
        "gone" => Err(io::ErrorKind::ConnectionAborted.into()),
        "surrogate" => {
            let told = said("a?b").to_string().replace('?', "\\ud800");
            body(stream, "200 OK", json, &told)
        }
        "none" => head(stream, "202 Accepted", "content-length: 0"),
        "other" => {
            let other = json!({"jsonrpc": "2.0", "id": 99, "result": {}});
            body(stream, "200 OK", json, &other.to_string())
        }
        "noise" => events(stream, &["no message".into()]),
        "status" => body(stream, "500 Internal Server Error", "text/plain", "it\nbroke: token-7"),
        "break" => reply(shared, stream, error(-32603, "broken")),
        "refuse" => reply(shared, stream, error(-32602, "no such thing")),
        "several" => {
            let told = json!([{"jsonrpc": "2.0", "method": "notifications/x"}, said("several")]);
            body(stream, "200 OK", json, &told.to_string())
        }
        "resume" => {
            shared.state().rest = Some(said("resumed"));
            head(stream, "200 OK", STREAM)?;
            chunk(stream, "id: 7\nretry: 10\ndata:\n\n")?;
            stream.write_all(b"0\r\n\r\n")
        }
        // Its own requests are answered, each in a POST, before it answers.
        "ask" => {
            head(stream, "200 OK", STREAM)?;
            for asked in [
                json!({"jsonrpc": "2.0", "id": "p", "method": "ping"}),
                json!({"jsonrpc": "2.0", "id": 8, "method": "sampling/createMessage", "params": {}}),
            ] {
                chunk(stream, &format!("data: {asked}\n\n"))?;
            }
            let mut state = shared.state();
            while state.answered.len() < 2 {
                state = shared.more.wait(state).expect("no other test holds it");
            }
            let told = json!([state.answered[0]["result"], state.answered[1]["error"]["code"]]);
            drop(state);
            chunk(stream, &format!("data: {}\n\n", said(&told.to_string())))?;
            stream.write_all(b"0\r\n\r\n")
        }
        _ => reply(shared, stream, said("done")),
    }
}
