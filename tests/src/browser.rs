//! A headless Chromium, driven over the DevTools protocol: pages are opened as a person opens them.

use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead as _, BufReader},
    net::TcpStream,
    path::Path,
    process::{Child, Command, Stdio},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde_json::{Value, json};
use tempfile::TempDir;
use tungstenite::{Message, WebSocket};

use crate::PATIENCE;

/// Names under which distributions install it.
const NAMES: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "chrome"];

/// A browser with one page.
pub struct Browser {
    process: Child,
    page: WebSocket<TcpStream>,
    calls: u64,
    /// What the page asked for by itself.
    asked: BTreeSet<String>,
    _profile: TempDir,
}

impl Browser {
    /// Starts one; says so and gives nothing where there is none.
    ///
    /// # Panics
    /// When it does not start.
    pub fn start() -> Option<Self> {
        let found = NAMES.into_iter().find(|name| {
            let asked = Command::new(name).arg("--version").output();
            asked.is_ok_and(|it| it.status.success())
        });
        let Some(name) = found else {
            println!("skipped: there is no chromium");
            return None;
        };
        let profile = tempfile::tempdir().expect("a directory");
        let mut process = Command::new(name)
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
            .args(["--hide-scrollbars", "--remote-debugging-port=0", "--window-size=1200,900"])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .arg("about:blank")
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        let stderr = BufReader::new(process.stderr.take().expect("captured"));
        let mut lines = stderr.lines().map_while(Result::ok);
        let listening = "DevTools listening on ";
        let address = lines.find_map(|line| Some(line.split_once(listening)?.1.trim().to_owned()));
        let address = address.expect("it says where it listens");
        // It goes on talking.
        std::thread::spawn(move || lines.for_each(drop));
        let mut browser = connect(&address);
        let targets = call(&mut browser, 1, "Target.getTargets", json!({}), &mut |_| {});
        let targets = targets["targetInfos"].as_array().expect("targets").clone();
        let page = targets.iter().find(|it| it["type"] == "page").expect("a page");
        let id = page["targetId"].as_str().expect("an id");
        let (host, _) = address.split_once("/devtools/").expect("an address");
        let page = connect(&format!("{host}/devtools/page/{id}"));
        let mut this = Self { process, page, calls: 0, asked: BTreeSet::new(), _profile: profile };
        this.call("Page.enable", json!({}));
        this.call("Network.enable", json!({}));
        Some(this)
    }

    /// A command of the protocol, and its result.
    ///
    /// # Panics
    /// When it fails.
    pub fn call(&mut self, method: &str, parameters: Value) -> Value {
        self.calls += 1;
        let asked = &mut self.asked;
        let mut heard = |event: &Value| {
            if event["method"] == "Network.requestWillBeSent" {
                let url = event["params"]["request"]["url"].as_str().unwrap_or_default();
                asked.insert(url.chars().take(80).collect());
            }
        };
        call(&mut self.page, self.calls, method, parameters, &mut heard)
    }

    /// Opens a file, with a fragment, and waits until it is loaded.
    ///
    /// # Panics
    /// When it cannot be opened.
    pub fn open(&mut self, file: &Path, fragment: &str) {
        let file = file.canonicalize().expect("the page is there");
        let mut url = String::from("file://");
        for byte in file.as_os_str().as_encoded_bytes() {
            match byte {
                b'/' | b'.' | b'-' | b'_' | b'0'..=b'9' | b'A'..=b'Z' | b'a'..=b'z' => {
                    url.push(char::from(*byte));
                }
                byte => url.push_str(&format!("%{byte:02X}")),
            }
        }
        // Another fragment of the same page is no new page.
        self.call("Page.navigate", json!({"url": "about:blank"}));
        let opened = self.call("Page.navigate", json!({"url": format!("{url}{fragment}")}));
        assert!(opened.get("errorText").is_none(), "{opened}");
        let loaded = "new Promise(done => document.readyState === 'complete' ? done(true) : \
                      addEventListener('load', () => done(true)))";
        assert_eq!(self.evaluate(loaded), true);
    }

    /// The value of an expression in the page.
    ///
    /// # Panics
    /// When it throws.
    pub fn evaluate(&mut self, expression: &str) -> Value {
        let parameters =
            json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let said = self.call("Runtime.evaluate", parameters);
        assert!(said.get("exceptionDetails").is_none(), "{expression}: {said}");
        said["result"]["value"].clone()
    }

    /// The URLs that were asked for since it started.
    pub fn asked(&self) -> &BTreeSet<String> {
        &self.asked
    }

    /// Takes a picture of what matches a selector: so high at most, into a file.
    ///
    /// # Panics
    /// When it cannot be taken.
    pub fn picture(&mut self, selector: &str, height: f64, file: &Path) {
        let found = self.evaluate(&format!(
            "(() => {{ const it = document.querySelector({selector:?}).getBoundingClientRect(); \
             return [it.x + scrollX, it.y + scrollY, it.width, it.height]; }})()"
        ));
        let number = |at: usize| found[at].as_f64().expect("a number");
        let clip = json!({"x": number(0), "y": number(1), "width": number(2),
            "height": number(3).min(height), "scale": 0.8});
        let taken = self.call(
            "Page.captureScreenshot",
            json!({"format": "png", "clip": clip, "captureBeyondViewport": true}),
        );
        let png = STANDARD.decode(taken["data"].as_str().expect("data")).expect("base64");
        assert!(png.starts_with(b"\x89PNG") && png.len() > 2000, "{} bytes", png.len());
        fs::write(file, png).expect("written");
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn connect(address: &str) -> WebSocket<TcpStream> {
    let rest = address.strip_prefix("ws://").expect("a socket's address");
    let host = rest.split('/').next().expect("a host");
    let stream = TcpStream::connect(host).expect("it listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
    tungstenite::client(address, stream).expect("a socket").0
}

fn call(
    socket: &mut WebSocket<TcpStream>,
    id: u64,
    method: &str,
    parameters: Value,
    heard: &mut dyn FnMut(&Value),
) -> Value {
    let request = json!({"id": id, "method": method, "params": parameters}).to_string();
    socket.send(Message::text(request)).expect("sent");
    loop {
        let Message::Text(text) = socket.read().expect("an answer") else { continue };
        let said: Value = serde_json::from_str(&text).expect("JSON");
        if said["id"] == id {
            assert!(said.get("error").is_none(), "{method}: {said}");
            return said["result"].clone();
        }
        heard(&said);
    }
}
