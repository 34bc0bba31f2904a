//! One Python process tree: started with next to nothing of our environment, asked one thing at a time
//! under a deadline, and gone as a whole when it is dropped.
//!
//! Dropping closes its standard input. That ends the guardian of `host.py`, which kills everything below
//! itself; the same happens when this program is killed, as the system then closes the pipe.

use std::{
    collections::VecDeque,
    env,
    io::{BufRead, BufReader, Read, Write},
    os::unix::process::CommandExt as _,
    path::Path,
    process::{Child, ChildStdin, Command, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    thread,
    time::Duration,
};

use serde::Deserialize;
use serde_json::Value;

/// Names another interpreter than `python3`, as that of a virtual environment.
pub const PYTHON_VARIABLE: &str = "ROLLCALL_PYTHON";

const HOST: &str = include_str!("host.py");
/// Longest reply, in bytes.
const MOST_LINE: u64 = 1 << 22;
/// Bytes of standard error that are kept, the last ones.
const KEPT_WORDS: usize = 4096;
/// A request of so many bytes always fits an empty pipe: writing it cannot wait.
const ALWAYS_FITS: usize = 4096;
/// How long a tree may take to go away before its guardian is killed itself.
const PARTING: Duration = Duration::from_secs(3);
/// Of our own variables, what Python needs to find its packages and its temporary files.
const INHERITED: [&str; 3] = ["PATH", "HOME", "TMPDIR"];
/// What makes two processes alike: hashes, encodings, time zone, one thread for linear algebra.
const FIXED: [(&str, &str); 8] = [
    ("PYTHONHASHSEED", "0"),
    ("PYTHONUTF8", "1"),
    ("PYTHONDONTWRITEBYTECODE", "1"),
    ("LC_ALL", "C.UTF-8"),
    ("TZ", "UTC"),
    ("OMP_NUM_THREADS", "1"),
    ("OPENBLAS_NUM_THREADS", "1"),
    ("MKL_NUM_THREADS", "1"),
];

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

enum Line {
    Whole(Vec<u8>),
    TooLong,
}

/// A running tree. After an error it is of no more use and must be dropped.
#[derive(Debug)]
pub(super) struct Process {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<Line>,
    /// Tells that every process of the tree has closed its standard error: the tree is gone.
    gone: Receiver<()>,
    words: Arc<Mutex<VecDeque<u8>>>,
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
        let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (tell_line, lines) = mpsc::channel();
        let (tell_gone, gone) = mpsc::channel();
        let words = Arc::new(Mutex::new(VecDeque::new()));
        let kept = words.clone();
        let (stdin, Some(stdout), Some(stderr)) = pipes else {
            return Err("it has no pipes".into());
        };
        let threads = thread::Builder::new()
            .name("python-replies".into())
            .spawn(move || read_lines(stdout, &tell_line))
            .and_then(|_| {
                thread::Builder::new()
                    .name("python-words".into())
                    .spawn(move || keep_words(stderr, &kept, &tell_gone))
            });
        let process = Self { child, stdin, lines, gone, words, requests: 0, episodes: 0 };
        threads.map(|_| process).map_err(|error| format!("no thread to read its replies: {error}"))
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
        self.send(line, patience).map_err(|what| self.with_words(what))?;
        let answer = self.receive(patience).map_err(|what| self.with_words(what))?;
        match (answer.fault, answer.ended) {
            (Some(fault), _) => Err(self.with_words(fault)),
            (None, Some(how)) if closing && how == "exit status 0" => Ok(Answer::default()),
            (None, Some(how)) => Err(self.with_words(format!("its process ended ({how})"))),
            (None, None) if closing || answer.id != Some(self.requests) => {
                Err(self.with_words("it answered another request than it was asked".into()))
            }
            (None, None) => Ok(Answer { fault: None, ended: None, ..answer }),
        }
    }

    fn send(&mut self, line: Vec<u8>, patience: Duration) -> Result<(), String> {
        let lost = "its process ended";
        let mut stdin = self.stdin.take().ok_or(lost)?;
        if line.len() <= ALWAYS_FITS {
            stdin.write_all(&line).map_err(|_| lost)?;
            self.stdin = Some(stdin);
            return Ok(());
        }
        // A process that stopped reading must not hold us: the thread ends with the pipe.
        let (tell, written) = mpsc::channel();
        thread::Builder::new()
            .name("python-request".into())
            .spawn(move || {
                let result = stdin.write_all(&line);
                drop(tell.send(result.map(|()| stdin)));
            })
            .map_err(|error| format!("no thread to write a long request: {error}"))?;
        let result = written.recv_timeout(patience);
        let result = result.map_err(|_| format!("it did not read its request for {patience:?}"))?;
        self.stdin = Some(result.map_err(|_| lost)?);
        Ok(())
    }

    fn receive(&mut self, patience: Duration) -> Result<Answer, String> {
        match self.lines.recv_timeout(patience) {
            Ok(Line::Whole(line)) => serde_json::from_slice(&line)
                .map_err(|error| format!("its reply is not one of the protocol: {error}")),
            Ok(Line::TooLong) => Err("its reply is too long".into()),
            Err(RecvTimeoutError::Timeout) => Err(format!("no answer for {patience:?}")),
            Err(RecvTimeoutError::Disconnected) => Err("its process ended".into()),
        }
    }

    fn with_words(&self, what: String) -> String {
        let words = self.words.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes: Vec<u8> = words.iter().copied().collect();
        let text: Vec<String> =
            String::from_utf8_lossy(&bytes).split_whitespace().map(one_line).collect();
        let text = text.join(" ");
        let what = one_line(&what);
        if text.is_empty() {
            return what;
        }
        let skipped = text.chars().count().saturating_sub(400);
        let last: String = text.chars().skip(skipped).collect();
        format!("{what}; its last words: {last}")
    }
}

fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(1000).collect()
}

impl Drop for Process {
    fn drop(&mut self) {
        self.stdin = None;
        if self.gone.recv_timeout(PARTING) == Err(RecvTimeoutError::Timeout) {
            // Its worker and player are set to end with it.
            drop(self.child.kill());
        }
        drop(self.child.wait());
    }
}

fn read_lines(stdout: impl Read, tell: &Sender<Line>) {
    let mut reader = BufReader::new(stdout);
    loop {
        let mut line = Vec::new();
        let read = reader.by_ref().take(MOST_LINE).read_until(b'\n', &mut line);
        let whole = line.last() == Some(&b'\n');
        let sent = match read {
            Ok(length) if length > 0 && whole => tell.send(Line::Whole(line)),
            Ok(length) if length as u64 == MOST_LINE => tell.send(Line::TooLong),
            _ => return,
        };
        if sent.is_err() || !whole {
            return;
        }
    }
}

fn keep_words(mut stderr: impl Read, kept: &Mutex<VecDeque<u8>>, gone: &Sender<()>) {
    let mut buffer = [0; 4096];
    while let Ok(length) = stderr.read(&mut buffer)
        && length > 0
    {
        let mut words = kept.lock().unwrap_or_else(PoisonError::into_inner);
        words.extend(buffer.get(..length).unwrap_or_default());
        let surplus = words.len().saturating_sub(KEPT_WORDS);
        words.drain(..surplus);
    }
    // Nobody waits where the process was never dropped in time.
    let _ = gone.send(());
}
