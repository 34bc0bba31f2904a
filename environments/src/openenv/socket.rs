//! Bytes to and from a server, under a deadline: a TCP stream, in TLS or not, one WebSocket over it, and
//! one GET over HTTP.
//!
//! A deadline holds for everything that a request needs, however slowly the server drips its bytes. After
//! any error the connection is of no more use: a reply that comes late would be taken for the next one.

use std::{
    fmt,
    io::{self, Read, Write},
    net::{TcpStream, ToSocketAddrs as _},
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned, pki_types::ServerName};
use serde_json::Value;
use tungstenite::{
    Message, WebSocket, client::client_with_config, http::Uri, protocol::WebSocketConfig,
};

use crate::{json, trust};

/// Longest message or HTTP body, in bytes.
const MOST_BYTES: usize = 4 << 20;
/// Most headers of an HTTP reply.
const MOST_HEADERS: usize = 64;

/// Where a server is: what a section's URL says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Address {
    secure: bool,
    host: String,
    port: u16,
    /// Without a slash at the end.
    path: String,
}

impl Address {
    /// Reads `ws://`, `wss://`, `http://` and `https://` URLs; a path of `/ws` at the end is the same as
    /// none.
    pub(super) fn read(url: &str) -> Option<Self> {
        let uri: Uri = url.parse().ok()?;
        let secure = match uri.scheme_str()? {
            "ws" | "http" => false,
            "wss" | "https" => true,
            _ => return None,
        };
        let host = uri.host().filter(|host| !host.is_empty())?.to_owned();
        let plain = uri.query().is_none() && !uri.authority()?.as_str().contains('@');
        let path = uri.path().trim_end_matches('/');
        let path = path.strip_suffix("/ws").unwrap_or(path).to_owned();
        let port = uri.port_u16().unwrap_or(if secure { 443 } else { 80 });
        plain.then_some(Self { secure, host, port, path })
    }

    fn authority(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.authority())
    }
}

/// A stream whose every read and write ends at a deadline.
#[derive(Debug)]
struct Timed {
    stream: TcpStream,
    until: Instant,
}

impl Timed {
    fn left(&self) -> io::Result<Duration> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
    }
}

/// A time-out of the system's says `WouldBlock`, which the layers above would take for "ask again".
fn late(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
        _ => error,
    }
}

impl Read for Timed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(self.left()?))?;
        self.stream.read(buffer).map_err(late)
    }
}

impl Write for Timed {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(self.left()?))?;
        self.stream.write(buffer).map_err(late)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

#[derive(Debug)]
enum Channel {
    Plain(Timed),
    Tls(Box<StreamOwned<ClientConnection, Timed>>),
}

impl Channel {
    fn open(address: &Address, patience: Duration) -> Result<Self, String> {
        let cannot = |error: &dyn fmt::Display| {
            format!("cannot connect to {address}: {error}; start the server or mend the URL")
        };
        let until = Instant::now() + patience;
        let name = address.host.trim_start_matches('[').trim_end_matches(']');
        let found = (name, address.port).to_socket_addrs().map_err(|error| cannot(&error))?;
        let mut failed = cannot(&"it has no address");
        for socket in found {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            match TcpStream::connect_timeout(&socket, left) {
                Err(error) => failed = cannot(&error),
                Ok(stream) => {
                    stream.set_nodelay(true).map_err(|error| cannot(&error))?;
                    let timed = Timed { stream, until };
                    if !address.secure {
                        return Ok(Self::Plain(timed));
                    }
                    let server = ServerName::try_from(name.to_owned()).map_err(|e| cannot(&e))?;
                    let connection = ClientConnection::new(settings()?, server);
                    let connection = connection.map_err(|error| cannot(&error))?;
                    return Ok(Self::Tls(Box::new(StreamOwned::new(connection, timed))));
                }
            }
        }
        Err(failed)
    }

    fn wait_until(&mut self, until: Instant) {
        match self {
            Self::Plain(timed) => timed.until = until,
            Self::Tls(stream) => stream.sock.until = until,
        }
    }
}

/// The settings of TLS, made once.
fn settings() -> Result<Arc<ClientConfig>, String> {
    static SETTINGS: OnceLock<Result<Arc<ClientConfig>, String>> = OnceLock::new();
    let make = || {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(trust::certificates()?.iter().cloned());
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?;
        Ok(Arc::new(config.with_root_certificates(roots).with_no_client_auth()))
    };
    SETTINGS.get_or_init(make).clone()
}

impl Read for Channel {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(timed) => timed.read(buffer),
            Self::Tls(stream) => stream.read(buffer),
        }
    }
}

impl Write for Channel {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(timed) => timed.write(buffer),
            Self::Tls(stream) => stream.write(buffer),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(timed) => timed.flush(),
            Self::Tls(stream) => stream.flush(),
        }
    }
}

/// One session: one environment of the server's.
pub(super) struct Socket(WebSocket<Channel>);

impl Socket {
    /// # Errors
    /// What is wrong, with a remedy.
    pub(super) fn connect(address: &Address, patience: Duration) -> Result<Self, String> {
        let channel = Channel::open(address, patience)?;
        // The scheme has no say here: the channel is open already.
        let url = format!("ws://{}{}/ws", address.authority(), address.path);
        let config = WebSocketConfig::default()
            .max_message_size(Some(MOST_BYTES))
            .max_frame_size(Some(MOST_BYTES));
        client_with_config(url, channel, Some(config)).map(|(socket, _)| Self(socket)).map_err(
            |error| format!("{address} opens no WebSocket at {}/ws: {error}", address.path),
        )
    }

    /// Sends a message and waits for the next one.
    ///
    /// # Errors
    /// What happened.
    pub(super) fn ask(&mut self, message: &Value, patience: Duration) -> Result<Value, String> {
        self.0.get_mut().wait_until(Instant::now() + patience);
        // A server that has refused the session may be gone, with its reason still to be read.
        let sent = self.0.send(Message::text(message.to_string()));
        loop {
            let read = self.0.read().map_err(|error| match (&sent, error) {
                (Err(earlier), _) => lost(earlier, patience),
                (Ok(()), error) => lost(&error, patience),
            })?;
            return match read {
                Message::Text(text) => json::read(text.as_bytes())
                    .map_err(|error| format!("its message is no JSON: {error}")),
                Message::Ping(_) | Message::Pong(_) => continue,
                Message::Close(Some(frame)) => Err(format!(
                    "it closed the session ({}: {})",
                    frame.code,
                    clipped(&frame.reason)
                )),
                Message::Close(None) => Err("it closed the session".into()),
                Message::Binary(_) | Message::Frame(_) => Err("its message is no text".into()),
            };
        }
    }

    /// Says goodbye. Nobody waits for an answer, and a session that cannot be told ends with its stream.
    pub(super) fn part(mut self, patience: Duration) {
        self.0.get_mut().wait_until(Instant::now() + patience);
        drop(self.0.send(Message::text(r#"{"type":"close"}"#)));
        drop(self.0.close(None));
    }
}

impl fmt::Debug for Socket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Socket")
    }
}

fn lost(error: &tungstenite::Error, patience: Duration) -> String {
    match error {
        tungstenite::Error::Io(error) if error.kind() == io::ErrorKind::TimedOut => {
            format!("no answer for {patience:?}")
        }
        error => format!("its connection broke: {error}"),
    }
}

fn clipped(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(200).collect()
}

/// The JSON that a server answers to GET `path`; nothing where it knows no such path.
///
/// # Errors
/// What is wrong, with a remedy.
pub(super) fn get(
    address: &Address,
    path: &str,
    patience: Duration,
) -> Result<Option<Value>, String> {
    let mut channel = Channel::open(address, patience)?;
    let broke = |error: io::Error| format!("{address}{path}: {}", late(error));
    let request = format!(
        "GET {}{path} HTTP/1.1\r\nHost: {}\r\nAccept: application/json\r\nConnection: close\r\n\r\n",
        address.path,
        address.authority()
    );
    channel.write_all(request.as_bytes()).and_then(|()| channel.flush()).map_err(broke)?;
    let mut reply = Vec::new();
    match channel.take(MOST_BYTES as u64 + 1).read_to_end(&mut reply) {
        Ok(length) if length > MOST_BYTES => {
            return Err(format!("{address}{path}: its reply is too long"));
        }
        // Some servers end TLS without saying so; a body that was cut is no JSON.
        Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => return Err(broke(error)),
        _ => {}
    }
    let odd = |what: &dyn fmt::Display| format!("{address}{path}: {what}");
    let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
    let mut parsed = httparse::Response::new(&mut headers);
    let head = match parsed.parse(&reply).map_err(|error| odd(&error))? {
        httparse::Status::Complete(length) => length,
        httparse::Status::Partial => return Err(odd(&"its reply ends early")),
    };
    match parsed.code {
        Some(200) => {}
        Some(404 | 405) => return Ok(None),
        code => return Err(odd(&format!("status {}", code.unwrap_or_default()))),
    }
    let body = reply.get(head..).unwrap_or_default();
    let chunked = parsed.headers.iter().any(|header| {
        header.name.eq_ignore_ascii_case("transfer-encoding")
            && header.value.eq_ignore_ascii_case(b"chunked")
    });
    let body = if chunked {
        unchunked(body).ok_or_else(|| odd(&"its chunks do not fit"))?
    } else {
        body.to_vec()
    };
    json::read(&body).map(Some).map_err(|error| odd(&error))
}

fn unchunked(mut body: &[u8]) -> Option<Vec<u8>> {
    let mut whole = Vec::new();
    loop {
        let httparse::Status::Complete((start, size)) = httparse::parse_chunk_size(body).ok()?
        else {
            return None;
        };
        let size = usize::try_from(size).ok()?;
        if size == 0 {
            return Some(whole);
        }
        let end = start.checked_add(size)?;
        whole.extend_from_slice(body.get(start..end)?);
        body = body.get(end..)?.strip_prefix(b"\r\n")?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_of_four_schemes_name_a_server() {
        let read = |url: &str| Address::read(url).map(|it| (it.secure, it.authority(), it.path));
        assert_eq!(read("ws://localhost:8000"), Some((false, "localhost:8000".into(), "".into())));
        assert_eq!(read("http://a/ws"), Some((false, "a:80".into(), "".into())));
        assert_eq!(read("wss://a.b/x/ws"), Some((true, "a.b:443".into(), "/x".into())));
        assert_eq!(read("https://[::1]:7/"), Some((true, "[::1]:7".into(), "".into())));
        for url in
            ["", "localhost:8000", "ftp://a", "ws://", "ws://a?b=1", "ws://u:p@a", "ws://a b"]
        {
            assert_eq!(read(url), None, "{url}");
        }
    }

    #[test]
    fn chunks_are_put_together_or_refused() {
        assert_eq!(unchunked(b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"), Some(b"abcde".to_vec()));
        assert_eq!(unchunked(b"3\r\nab"), None);
        assert_eq!(unchunked(b"ffffffffffffffff\r\nab\r\n0\r\n\r\n"), None);
        assert_eq!(unchunked(b""), None);
    }
}
