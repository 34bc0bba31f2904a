//! Lines to and from a program on its standard input and output, under deadlines, and the last that it
//! wrote to standard error.

use std::{
    collections::VecDeque,
    io::{BufRead, BufReader, Read, Write},
    process::{Child, ChildStdin},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender},
    },
    thread,
    time::Duration,
};

/// Longest line that is read, in bytes.
const MOST_LINE: u64 = 1 << 22;
/// Lines that wait to be taken before the program has to wait.
const WAITING_LINES: usize = 4;
/// Bytes of standard error that are kept, the last ones.
const KEPT_WORDS: usize = 4096;
/// A request of so many bytes always fits an empty pipe: writing it cannot wait.
const ALWAYS_FITS: usize = 4096;
const LOST: &str = "its process ended";

enum Line {
    Whole(Vec<u8>),
    TooLong,
}

/// The three pipes of a program. After an error they are of no more use.
#[derive(Debug)]
pub(crate) struct Lines {
    stdin: Option<ChildStdin>,
    lines: Receiver<Line>,
    /// Tells that every process which held it has closed its standard error.
    gone: Receiver<()>,
    words: Arc<Mutex<VecDeque<u8>>>,
}

impl Lines {
    /// Takes the pipes of a program that has just been started; its threads are named after `name`.
    ///
    /// # Errors
    /// It has no pipes, or there are no threads to read them.
    pub(crate) fn of(child: &mut Child, name: &str) -> Result<Self, String> {
        let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(stdin), Some(stdout), Some(stderr)) = pipes else {
            return Err("it has no pipes".into());
        };
        let (tell_line, lines) = mpsc::sync_channel(WAITING_LINES);
        let (tell_gone, gone) = mpsc::channel();
        let words = Arc::new(Mutex::new(VecDeque::new()));
        let kept = words.clone();
        thread::Builder::new()
            .name(format!("{name}-replies"))
            .spawn(move || read_lines(stdout, &tell_line))
            .and_then(|_| {
                thread::Builder::new()
                    .name(format!("{name}-words"))
                    .spawn(move || keep_words(stderr, &kept, &tell_gone))
            })
            .map_err(|error| format!("no thread to read its replies: {error}"))?;
        Ok(Self { stdin: Some(stdin), lines, gone, words })
    }

    /// Writes a line, which ends in a newline.
    ///
    /// # Errors
    /// The program is gone, or did not read it.
    pub(crate) fn send(&mut self, line: Vec<u8>, patience: Duration) -> Result<(), String> {
        let mut stdin = self.stdin.take().ok_or(LOST)?;
        if line.len() <= ALWAYS_FITS {
            stdin.write_all(&line).map_err(|_| LOST)?;
            self.stdin = Some(stdin);
            return Ok(());
        }
        // A process that stopped reading must not hold us: the thread ends with the pipe.
        let (tell, written) = mpsc::channel();
        thread::Builder::new()
            .name("long-request".into())
            .spawn(move || {
                let result = stdin.write_all(&line);
                drop(tell.send(result.map(|()| stdin)));
            })
            .map_err(|error| format!("no thread to write a long request: {error}"))?;
        let result = written.recv_timeout(patience);
        let result = result.map_err(|_| format!("it did not read its request for {patience:?}"))?;
        self.stdin = Some(result.map_err(|_| LOST)?);
        Ok(())
    }

    /// The next line, without waiting longer than `left` of a `patience`.
    ///
    /// # Errors
    /// There is none in time, it is too long, or the program is gone.
    pub(crate) fn receive(
        &mut self,
        left: Duration,
        patience: Duration,
    ) -> Result<Vec<u8>, String> {
        match self.lines.recv_timeout(left) {
            Ok(Line::Whole(line)) => Ok(line),
            Ok(Line::TooLong) => Err("its reply is too long".into()),
            Err(RecvTimeoutError::Timeout) => Err(format!("no answer for {patience:?}")),
            Err(RecvTimeoutError::Disconnected) => Err(LOST.into()),
        }
    }

    /// Closes its standard input and waits until everything that holds its standard error is gone; false
    /// where that is not so in time.
    pub(crate) fn part(&mut self, patience: Duration) -> bool {
        self.stdin = None;
        self.gone.recv_timeout(patience) != Err(RecvTimeoutError::Timeout)
    }

    /// A message on one line, with the last that the program wrote to standard error.
    pub(crate) fn with_words(&self, what: &str) -> String {
        let words = self.words.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes: Vec<u8> = words.iter().copied().collect();
        drop(words);
        let text: Vec<String> =
            String::from_utf8_lossy(&bytes).split_whitespace().map(one_line).collect();
        let text = text.join(" ");
        let what = one_line(what);
        if text.is_empty() {
            return what;
        }
        let skipped = text.chars().count().saturating_sub(400);
        let last: String = text.chars().skip(skipped).collect();
        format!("{what}; its last words: {last}")
    }
}

/// A text that a message can hold.
pub(crate) fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(1000).collect()
}

fn read_lines(stdout: impl Read, tell: &SyncSender<Line>) {
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
