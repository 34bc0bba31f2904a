//! Metrics for operators: an HTTP server that answers `GET /metrics` and nothing else, with bounds on
//! everything that a client decides.

use std::{
    io::{self, ErrorKind},
    net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr},
    sync::Arc,
    time::Duration,
};

use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    task::JoinSet,
    time::timeout,
};

/// The request, its headers included.
const MAX_REQUEST: usize = 8 << 10;
/// Connections at a time; more wait to be accepted.
const MAX_CONNECTIONS: usize = 8;
/// A connection has this long for all it wants.
const PATIENCE: Duration = Duration::from_secs(5);

/// An address for metrics as a command line gives it: `HOST:PORT` with a numeric host, or a port of the
/// loopback device.
///
/// # Errors
/// The text is neither.
pub fn metrics_address(text: &str) -> Result<SocketAddr, String> {
    if let Ok(port) = text.parse::<u16>() {
        return Ok(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port));
    }
    text.parse().map_err(|_| "give a port (of 127.0.0.1) or ADDRESS:PORT".to_owned())
}

/// Serves what `render` writes until the runtime ends. Returns the address, with the port that was
/// taken where it was 0.
///
/// # Errors
/// The address cannot be had: one line.
pub async fn serve_metrics(
    addr: SocketAddr,
    content_type: &'static str,
    render: impl Fn() -> String + Send + Sync + 'static,
) -> Result<SocketAddr, String> {
    let failed = |error: io::Error| match error.kind() {
        ErrorKind::AddrInUse => {
            format!("metrics address {addr}: the port is in use: choose another, or port 0")
        }
        _ => format!("metrics address {addr}: {error}"),
    };
    let listener = TcpListener::bind(addr).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    let render = Arc::new(render);
    tokio::spawn(async move {
        let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        let mut running = JoinSet::new();
        while let Ok(place) = places.clone().acquire_owned().await {
            while running.try_join_next().is_some() {}
            let Ok((stream, _)) = listener.accept().await else {
                // No file descriptors, perhaps: they come back.
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            let render = render.clone();
            running.spawn(async move {
                // Whoever is slow or gone gets nothing.
                let _ = timeout(PATIENCE, answer(stream, content_type, render.as_ref())).await;
                drop(place);
            });
        }
    });
    Ok(bound)
}

async fn answer(
    stream: TcpStream,
    content_type: &str,
    render: &(impl Fn() -> String + Sync),
) -> io::Result<()> {
    let mut request = Vec::new();
    let (status, more, body) = loop {
        if request.len() >= MAX_REQUEST {
            break ("431 Request Header Fields Too Large", "", String::new());
        }
        let mut part = [0; 1024];
        let room = part.len().min(MAX_REQUEST - request.len());
        let read = read(&stream, &mut part[..room]).await?;
        if read == 0 {
            return Ok(());
        }
        request.extend_from_slice(&part[..read]);
        if request.windows(4).any(|it| it == b"\r\n\r\n") {
            break judge(&request, render);
        }
    };
    let head_only = request.starts_with(b"HEAD ");
    let length = body.len();
    let text = if head_only { "" } else { body.as_str() };
    let kind = if status.starts_with("200") { content_type } else { "text/plain" };
    let answer = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\
         Connection: close\r\n{more}\r\n{text}"
    );
    let mut rest = answer.as_bytes();
    while !rest.is_empty() {
        stream.writable().await?;
        match stream.try_write(rest) {
            Ok(written) => rest = rest.get(written..).unwrap_or_default(),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    stream.into_std()?.shutdown(Shutdown::Write)
}

async fn read(stream: &TcpStream, into: &mut [u8]) -> io::Result<usize> {
    loop {
        stream.readable().await?;
        match stream.try_read(into) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            read => return read,
        }
    }
}

/// Status, further headers and body.
fn judge(request: &[u8], render: &impl Fn() -> String) -> (&'static str, &'static str, String) {
    let line = request.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let mut words = line.split(|byte| *byte == b' ');
    let (method, target, version) = (words.next(), words.next(), words.next());
    let path = target.and_then(|it| it.split(|byte| *byte == b'?').next());
    let known = version.is_some_and(|it| it.starts_with(b"HTTP/1.")) && words.next().is_none();
    match (method, path) {
        _ if !known => ("400 Bad Request", "", String::new()),
        (Some(b"GET" | b"HEAD"), Some(b"/metrics")) => ("200 OK", "", render()),
        (Some(b"GET" | b"HEAD"), _) => ("404 Not Found", "", "see /metrics\n".to_owned()),
        _ => ("405 Method Not Allowed", "Allow: GET, HEAD\r\n", String::new()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use super::*;

    async fn ask(addr: SocketAddr, request: &[u8]) -> String {
        let request = request.to_vec();
        let asking = tokio::task::spawn_blocking(move || {
            let mut stream = std::net::TcpStream::connect(addr).expect("listening");
            let mut answer = String::new();
            // A server that has heard enough may close before everything is written.
            let _ = stream.write_all(&request);
            let _ = stream.read_to_string(&mut answer);
            answer
        });
        asking.await.expect("no panic")
    }

    async fn server() -> SocketAddr {
        let any = metrics_address("0").expect("a port");
        assert!(any.ip().is_loopback());
        serve_metrics(any, "text/x", || "steps 7\n".to_owned()).await.expect("a port")
    }

    #[tokio::test]
    async fn the_metrics_and_nothing_else_are_served() {
        let addr = server().await;
        let got = ask(addr, b"GET /metrics?x=1 HTTP/1.1\r\nHost: h\r\n\r\n").await;
        assert!(got.starts_with("HTTP/1.1 200 OK\r\nContent-Type: text/x\r\n"), "{got}");
        assert!(got.ends_with("Content-Length: 8\r\nConnection: close\r\n\r\nsteps 7\n"), "{got}");
        let cases: [(&[u8], &str); 6] = [
            (b"HEAD /metrics HTTP/1.0\r\n\r\n", "200"),
            (b"GET / HTTP/1.1\r\n\r\n", "404"),
            (b"GET /../etc/passwd HTTP/1.1\r\n\r\n", "404"),
            (b"POST /metrics HTTP/1.1\r\n\r\n", "405"),
            (b"GET /metrics\r\n\r\n", "400"),
            (b"\x16\x03\x01\xff\r\n\r\n", "400"),
        ];
        for (request, status) in cases {
            let got = ask(addr, request).await;
            assert!(got.starts_with(&format!("HTTP/1.1 {status} ")), "{got}");
            assert!(!got.ends_with("steps 7\n"), "{got}");
        }
        let taken = serve_metrics(addr, "", String::new).await.expect_err("taken");
        assert!(taken.contains("in use"), "{taken}");
        assert!(metrics_address("localhost").is_err() && metrics_address("70000").is_err());
    }

    #[tokio::test]
    async fn long_requests_and_slow_clients_are_bounded() {
        let addr = server().await;
        let long = ask(addr, &b"GET /metrics HTTP/1.1\r\nX: ".repeat(1000)).await;
        assert!(long.is_empty() || long.starts_with("HTTP/1.1 431 "), "{long}");
        // They say nothing and keep all places for a while; then somebody is heard again.
        let mut idle = Vec::new();
        for _ in 0..3 * MAX_CONNECTIONS {
            idle.push(TcpStream::connect(addr).await.expect("a backlog"));
        }
        let asked = ask(addr, b"GET /metrics HTTP/1.1\r\n\r\n");
        let heard = timeout(5 * PATIENCE, asked).await.expect("in time");
        assert!(heard.ends_with("steps 7\n"), "{heard}");
    }
}
