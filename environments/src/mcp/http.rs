//! A server at a URL: the protocol's streamable HTTP transport, of its versions from 2025-03-26 on.
//!
//! Every message of ours is a POST. What answers a request is one JSON body, or a stream of events that
//! ends with the answer; a stream that breaks off after an event with a name is asked for again from there.
//! The session that the server gave is named in every request after the first and ended by DELETE. A server
//! without sessions is refused: it could not tell one episode from another.
//!
//! Redirects are not followed: a recipe names the server that is asked, and the one that is told its token.

use std::{
    collections::VecDeque,
    env, fmt,
    io::{self, Read},
    sync::{Arc, OnceLock},
    thread,
    time::Duration,
};

use serde_json::{Map, Value};
use ureq::{
    Agent, Body, BodyReader,
    http::{HeaderName, HeaderValue, Method, Request, Response, Uri, header},
    tls::{Certificate, RootCerts, TlsConfig},
};

use super::{
    events::Events,
    session::{Deadline, Failed, Link},
};
use crate::{
    SpecError,
    fields::{Fields, shown},
    json,
    lines::one_line,
    trust,
};

/// Longest body or event, in bytes.
pub(super) const MOST_BYTES: u64 = 4 << 20;
/// How much of what an error says is read.
const MOST_WORDS: u64 = 1000;
const SESSION: HeaderName = HeaderName::from_static("mcp-session-id");
const VERSION: HeaderName = HeaderName::from_static("mcp-protocol-version");
const LAST_EVENT: HeaderName = HeaderName::from_static("last-event-id");
const JSON: &str = "application/json";
const EVENTS: &str = "text/event-stream";
/// Connections are used again only so soon that no server has closed them meanwhile: what was sent on one
/// that breaks may have run, and is not sent twice.
const MOST_IDLE: Duration = Duration::from_secs(2);
/// How long a server may take to be told that a session is over.
const PARTING: Duration = Duration::from_secs(1);
/// How long to wait before a stream is asked for again, where the server does not say.
const RETRY: Duration = Duration::from_secs(1);

/// A server, as a section names it.
#[derive(Debug)]
pub(super) struct Endpoint {
    url: String,
    /// The variable that holds the token which the server wants.
    token: Option<String>,
    agent: OnceLock<Result<Agent, String>>,
}

impl Endpoint {
    /// Reads `url` and `bearer_token_env_var`. `place` stands for an episode's seed.
    pub(super) fn read(fields: &mut Fields<'_>, place: &str) -> Result<Self, SpecError> {
        let expected = "a server's URL, as \"http://localhost:8000/mcp\"";
        let url = fields.text("url", expected)?;
        let lawful = |uri: &Uri| {
            let plain = |it: &str| !it.contains('@');
            matches!(uri.scheme_str(), Some("http" | "https"))
                && uri.host().is_some_and(|host| !host.is_empty())
                && uri.authority().is_some_and(|it| plain(it.as_str()))
        };
        let read = url.replace(place, "0").parse().ok();
        if !read.as_ref().is_some_and(lawful) || url.contains('#') {
            return Err(SpecError::Value {
                field: "environment.mcp.url".into(),
                expected: expected.into(),
                found: shown(&url.into()),
            });
        }
        let token = fields.optional_text("bearer_token_env_var", "the name of a variable")?;
        Ok(Self { url: url.into(), token: token.map(str::to_owned), agent: OnceLock::new() })
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    /// A connection for the session of an episode, whose seed replaces `place`. Nothing is sent yet.
    ///
    /// # Errors
    /// The token is not there, or there are no certificates to trust.
    pub(super) fn connect(&self, place: &str, seed: &str) -> Result<Connection, String> {
        let agent = self
            .agent
            .get_or_init(|| {
                agent(self.url.get(..6).is_some_and(|it| it.eq_ignore_ascii_case("https:")))
            })
            .clone()?;
        let mut authorization = None;
        if let Some(name) = &self.token {
            let wrong = |how: &str| {
                format!(
                    "its token: the variable {name} {how}: mend it, or name another in environment.mcp.bearer_token_env_var"
                )
            };
            let token = env::var(name).map_err(|_| wrong("is not set"))?;
            let mut value = HeaderValue::from_str(&format!("Bearer {token}"))
                .map_err(|_| wrong("holds what cannot be in a header"))?;
            value.set_sensitive(true);
            authorization = Some(value);
        }
        Ok(Connection {
            agent,
            url: self.url.replace(place, seed),
            authorization,
            session: None,
            version: None,
            stream: None,
            waiting: VecDeque::new(),
        })
    }
}

fn agent(secure: bool) -> Result<Agent, String> {
    let mut tls = TlsConfig::builder();
    if secure {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let roots = trust::certificates()?;
        let roots = roots.iter().map(|it| Certificate::from_der(it).to_owned());
        tls = tls.unversioned_rustls_crypto_provider(provider).root_certs(RootCerts::from(roots));
    }
    let config = Agent::config_builder()
        .tls_config(tls.build())
        .http_status_as_error(false)
        .max_redirects(0)
        .max_redirects_will_error(false)
        .proxy(None)
        .max_idle_age(MOST_IDLE)
        .user_agent(concat!("rollcall/", env!("CARGO_PKG_VERSION")));
    Ok(config.build().into())
}

/// A session, ended when it is dropped.
pub(super) struct Connection {
    agent: Agent,
    url: String,
    /// Marked as not to be shown.
    authorization: Option<HeaderValue>,
    session: Option<HeaderValue>,
    /// The protocol's, once it is agreed upon.
    version: Option<HeaderValue>,
    stream: Option<Events<BodyReader<'static>>>,
    /// Messages that came together and are still to be taken.
    waiting: VecDeque<Map<String, Value>>,
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("url", &self.url).finish_non_exhaustive()
    }
}

impl Connection {
    fn exchange(
        &self,
        method: Method,
        own: &[(HeaderName, HeaderValue)],
        body: Option<Vec<u8>>,
        within: Duration,
    ) -> Result<Response<Body>, ureq::Error> {
        let mut request = Request::builder().method(method).uri(&self.url);
        let named = [
            (header::AUTHORIZATION, &self.authorization),
            (SESSION, &self.session),
            (VERSION, &self.version),
        ];
        for (name, value) in named.into_iter().filter_map(|(name, it)| Some((name, it.as_ref()?))) {
            request = request.header(name, value);
        }
        for (name, value) in own {
            request = request.header(name, value);
        }
        let agent = &self.agent;
        let within = Some(within);
        match body {
            Some(body) => {
                let request = agent.configure_request(request.body(body)?).timeout_global(within);
                agent.run(request.build())
            }
            None => {
                let request = agent.configure_request(request.body(())?).timeout_global(within);
                agent.run(request.build())
            }
        }
    }

    /// What the server answers to a request over HTTP, which it took.
    fn ask(
        &mut self,
        method: Method,
        own: &[(HeaderName, HeaderValue)],
        body: Option<Vec<u8>>,
        deadline: Deadline,
    ) -> Result<Response<Body>, Failed> {
        let reply = self.exchange(method, own, body, deadline.left());
        let mut reply = reply.map_err(|error| self.lost(error, deadline))?;
        let status = reply.status();
        if status.is_success() {
            return Ok(reply);
        }
        let known = self.session.is_some();
        Err(Failed::Broken(match status.as_u16() {
            404 if known => {
                self.session = None;
                "it no longer knows the session (status 404): it ended it, or was started again"
                    .into()
            }
            404 | 405 => {
                format!("it takes no messages there (status {status}): mend environment.mcp.url")
            }
            401 | 403 => format!(
                "it refuses us (status {status}): name a variable with a token that it takes in \
                 environment.mcp.bearer_token_env_var"
            ),
            429 | 503 if !known => {
                return Err(Failed::Full(format!("its server has no room (status {status})")));
            }
            300..=399 => {
                let to = reply.headers().get(header::LOCATION);
                let to = String::from_utf8_lossy(to.map(HeaderValue::as_bytes).unwrap_or_default());
                format!(
                    "it redirects to {to:?}: if that is the server, set environment.mcp.url to it"
                )
            }
            _ => {
                let mut words = Vec::new();
                drop(reply.body_mut().as_reader().take(MOST_WORDS).read_to_end(&mut words));
                format!("status {status}: {}", String::from_utf8_lossy(&words))
            }
        }))
    }

    fn lost(&self, error: ureq::Error, deadline: Deadline) -> Failed {
        let late = |error: &io::Error| {
            matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock)
        };
        Failed::Broken(match error {
            ureq::Error::Timeout(_) => format!("no answer for {:?}", deadline.patience),
            ureq::Error::Io(error) if late(&error) => {
                format!("no answer for {:?}", deadline.patience)
            }
            ureq::Error::Io(error) if error.kind() == io::ErrorKind::FileTooLarge => {
                "its reply is too long".into()
            }
            error if self.version.is_none() => {
                format!("cannot ask it: {error}; start the server or mend environment.mcp.url")
            }
            error => format!("its connection broke: {error}"),
        })
    }

    /// Takes up what answers a request.
    fn open(&mut self, mut reply: Response<Body>, deadline: Deadline) -> Result<(), Failed> {
        let kind = reply.body().mime_type().unwrap_or_default().to_ascii_lowercase();
        match kind.as_str() {
            EVENTS => self.stream = Some(Events::new(reply.into_body().into_reader())),
            JSON => {
                let mut body = Vec::new();
                let read = reply.body_mut().as_reader().take(MOST_BYTES + 1).read_to_end(&mut body);
                read.map_err(|error| self.lost(error.into(), deadline))?;
                if body.len() as u64 > MOST_BYTES {
                    return Err("its reply is too long".into());
                }
                self.take(&body)?;
            }
            _ => {
                return Err(Failed::Broken(format!(
                    "it answers with content of type {kind:?}, not {JSON} or {EVENTS}: see that \
                     environment.mcp.url is that of an MCP server"
                )));
            }
        }
        Ok(())
    }

    /// Takes a message, or several in a list as the protocol's first version has them.
    fn take(&mut self, text: &[u8]) -> Result<(), Failed> {
        let odd = || Failed::from("its message is no JSON object");
        let messages = match json::read(text).map_err(|_| odd())? {
            Value::Array(messages) => messages,
            message => vec![message],
        };
        for message in messages {
            let Value::Object(message) = message else { return Err(odd()) };
            self.waiting.push_back(message);
        }
        Ok(())
    }

    /// Asks for the rest of a stream that ended before the answer.
    fn resume(&mut self, deadline: Deadline) -> Result<(), Failed> {
        let ended = self.stream.take();
        let early = || Failed::from("its answer ended early");
        let (last, retry) = ended.map(|it| (it.last_id, it.retry)).ok_or_else(early)?;
        let last = last.ok_or_else(early)?;
        let value = HeaderValue::from_str(&last).map_err(|_| early())?;
        thread::sleep(retry.unwrap_or(RETRY).min(deadline.left()));
        let own = [(header::ACCEPT, HeaderValue::from_static(EVENTS)), (LAST_EVENT, value)];
        let reply = self.ask(Method::GET, &own, None, deadline)?;
        self.open(reply, deadline)?;
        if let Some(stream) = &mut self.stream {
            // Until the server names another one.
            (stream.last_id, stream.retry) = (Some(last), retry);
        }
        Ok(())
    }
}

impl Link for Connection {
    fn send(&mut self, message: &Value, deadline: Deadline) -> Result<(), Failed> {
        let own = [
            (header::CONTENT_TYPE, HeaderValue::from_static(JSON)),
            (header::ACCEPT, HeaderValue::from_static("application/json, text/event-stream")),
        ];
        let body = message.to_string().into_bytes();
        let reply = self.ask(Method::POST, &own, Some(body), deadline)?;
        let text = |key: &str| message.get(key).and_then(Value::as_str);
        if text("method") == Some("initialize") {
            self.session = reply.headers().get(SESSION).cloned();
        }
        // Notifications and answers of ours are not answered.
        match text("method").is_some() && message.get("id").is_some() {
            true => self.open(reply, deadline),
            false => Ok(()),
        }
    }

    fn receive(&mut self, deadline: Deadline) -> Result<Map<String, Value>, Failed> {
        loop {
            if let Some(message) = self.waiting.pop_front() {
                return Ok(message);
            }
            let Some(stream) = &mut self.stream else {
                return Err("it did not answer the request".into());
            };
            match stream.next(deadline) {
                Ok(Some(data)) => self.take(&data)?,
                Ok(None) => self.resume(deadline)?,
                Err(error) if cut(&error) => self.resume(deadline)?,
                Err(error) => return Err(self.lost(error.into(), deadline)),
            }
        }
    }

    fn agreed(&mut self, version: &str) -> Result<(), Failed> {
        let plain = |it: &HeaderValue| it.len() <= 1024 && it.to_str().is_ok();
        let version = HeaderValue::from_str(version).ok().filter(plain);
        self.version = Some(version.ok_or("its protocol's version is none")?);
        if !self.session.as_ref().is_some_and(plain) {
            return Err(
                "it gave no session (Mcp-Session-Id): an episode needs one of its own, so \
                        run the server with sessions (not stateless)"
                    .into(),
            );
        }
        Ok(())
    }

    fn with_words(&mut self, what: &str) -> String {
        let what = one_line(what);
        let token = self.authorization.as_ref().and_then(|it| it.to_str().ok()?.split_once(' '));
        match token.map(|(_, token)| token).filter(|token| !token.is_empty()) {
            Some(token) => what.replace(token, "[token]"),
            None => what,
        }
    }
}

/// Whether a stream was cut off, which is no more than its end.
fn cut(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), UnexpectedEof | ConnectionAborted | ConnectionReset)
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.stream = None;
        if self.session.is_some() {
            // A server that cannot be told, or takes no DELETE, ends sessions in its own time.
            drop(self.exchange(Method::DELETE, &[], None, PARTING));
        }
    }
}
