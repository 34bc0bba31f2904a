//! The log of who joined: `joins.jsonl` in the run's directory, one line a peer that came or was
//! turned away. Bounded on disk and in memory: strangers decide how often they knock, not how much is
//! written.

use std::{
    collections::VecDeque,
    fs,
    io::Write as _,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use protocol::{ActorId, JoinFailure};
use serde::Serialize;
use tracing::warn;

use crate::files::utc_now;

/// The file's name.
pub const JOINS: &str = "joins.jsonl";
/// What it was renamed to when it grew too long.
pub(crate) const EARLIER: &str = "joins.1.jsonl";
/// The length at which that happens: twice as much is kept in all.
const MAX_BYTES: u64 = 8 << 20;
/// Lines that wait to be written; more are counted instead.
const WAITING: usize = 1024;
/// Refusals written a second; more are counted instead.
const REFUSALS_A_SECOND: u32 = 50;

/// One line.
#[derive(Debug, Serialize)]
struct Line {
    time: String,
    address: SocketAddr,
    actor: Option<String>,
    outcome: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    /// Lines before this one that were not written.
    #[serde(skip_serializing_if = "is_zero")]
    unwritten: u64,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

enum Order {
    Write(Line),
    Open(PathBuf),
}

/// Writes the log from a thread of its own, so that no disk holds the network up.
pub struct JoinLog {
    orders: Option<SyncSender<Order>>,
    unwritten: Arc<AtomicU64>,
    writer: Option<JoinHandle<()>>,
    second: std::sync::Mutex<(Instant, u32)>,
}

impl JoinLog {
    /// A log that keeps its lines until it is told where to write them.
    ///
    /// # Errors
    /// The operating system gives no thread.
    pub fn start() -> std::io::Result<Self> {
        Self::with_limit(MAX_BYTES)
    }

    fn with_limit(limit: u64) -> std::io::Result<Self> {
        let (orders, inbox) = sync_channel(WAITING);
        let writer = thread::Builder::new().name("joins".into());
        let writer = writer.spawn(move || write(&inbox, limit))?;
        Ok(Self {
            orders: Some(orders),
            unwritten: Arc::default(),
            writer: Some(writer),
            second: std::sync::Mutex::new((Instant::now(), 0)),
        })
    }

    /// From now on lines go to the run's directory.
    pub fn open(&self, run: &Path) {
        if let Some(orders) = &self.orders {
            // The thread lives as long as this.
            let _ = orders.send(Order::Open(run.to_owned()));
        }
    }

    /// An actor was let in.
    pub fn joined(&self, address: SocketAddr, actor: ActorId) {
        self.put(address, Some(actor), "joined", None);
    }

    /// A peer was turned away.
    pub fn refused(&self, address: SocketAddr, actor: Option<ActorId>, failure: &JoinFailure) {
        {
            let mut second = self.second.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            if second.0.elapsed() >= Duration::from_secs(1) {
                *second = (Instant::now(), 0);
            }
            second.1 += 1;
            if second.1 > REFUSALS_A_SECOND {
                self.unwritten.fetch_add(1, Ordering::Relaxed);
                return;
            }
        }
        self.put(address, actor, failure.name(), Some(failure.to_string()));
    }

    fn put(
        &self,
        address: SocketAddr,
        actor: Option<ActorId>,
        outcome: &'static str,
        reason: Option<String>,
    ) {
        let unwritten = self.unwritten.swap(0, Ordering::Relaxed);
        let actor = actor.map(|actor| actor.0.to_string());
        let line = Line { time: utc_now(), address, actor, outcome, reason, unwritten };
        let orders = self.orders.as_ref();
        if orders.is_none_or(|orders| orders.try_send(Order::Write(line)).is_err()) {
            self.unwritten.fetch_add(unwritten + 1, Ordering::Relaxed);
        }
    }
}

impl Drop for JoinLog {
    fn drop(&mut self) {
        drop(self.orders.take());
        if let Some(writer) = self.writer.take() {
            // It ends with the last order.
            let _ = writer.join();
        }
    }
}

fn write(orders: &Receiver<Order>, limit: u64) {
    let mut early = VecDeque::new();
    let mut log: Option<Log> = None;
    for order in orders {
        match order {
            Order::Open(run) => {
                let mut opened = Log { run, file: None, bytes: 0, limit, broken: false };
                early.drain(..).for_each(|line| opened.append(&line));
                log = Some(opened);
            }
            Order::Write(line) => match &mut log {
                Some(log) => log.append(&line),
                None => {
                    early.push_back(line);
                    if early.len() > WAITING {
                        early.pop_front();
                    }
                }
            },
        }
    }
}

struct Log {
    run: PathBuf,
    file: Option<fs::File>,
    bytes: u64,
    limit: u64,
    /// It could not be written, which was said.
    broken: bool,
}

impl Log {
    fn append(&mut self, line: &Line) {
        if let Err(error) = self.try_append(line)
            && !std::mem::replace(&mut self.broken, true)
        {
            warn!("{}: {error}; joins are not logged", self.run.join(JOINS).display());
        }
    }

    fn try_append(&mut self, line: &Line) -> std::io::Result<()> {
        let mut text = serde_json::to_vec(line)?;
        text.push(b'\n');
        if self.bytes > 0 && self.bytes + text.len() as u64 > self.limit {
            self.file = None;
            fs::rename(self.run.join(JOINS), self.run.join(EARLIER))?;
        }
        let file = match &mut self.file {
            Some(file) => file,
            None => {
                let options = fs::OpenOptions::new().create(true).append(true).to_owned();
                let file = options.open(self.run.join(JOINS))?;
                self.bytes = file.metadata()?.len();
                self.file.insert(file)
            }
        };
        file.write_all(&text)?;
        self.bytes += text.len() as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use protocol::Digest;
    use serde_json::Value;

    use super::*;

    fn lines(path: &Path) -> Vec<Value> {
        let text = fs::read_to_string(path).expect("there");
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    }

    #[test]
    fn who_came_and_who_was_turned_away_is_written_with_time_address_and_id() {
        let dir = tempfile::tempdir().expect("a directory");
        let log = JoinLog::start().expect("a thread");
        let address = SocketAddr::from(([10, 0, 0, 7], 4242));
        let actor = ActorId(Digest::of(b"an actor"));
        // Before the run's directory is there, too.
        log.joined(address, actor);
        log.open(dir.path());
        log.refused(address, Some(actor), &JoinFailure::Proof);
        log.refused(address, None, &JoinFailure::NoCertificate);
        drop(log);
        let lines = lines(&dir.path().join(JOINS));
        let outcomes: Vec<&str> = lines.iter().filter_map(|it| it["outcome"].as_str()).collect();
        assert_eq!(outcomes, ["joined", "proof", "no_certificate"]);
        for line in &lines {
            assert_eq!(line["address"], "10.0.0.7:4242");
            assert!(line["time"].as_str().is_some_and(|time| time.ends_with('Z')), "{line}");
        }
        assert_eq!(lines[0]["actor"], actor.0.to_string());
        assert!(lines[0].get("reason").is_none() && lines[2]["actor"].is_null());
        assert!(lines[1]["reason"].as_str().expect("why").contains("wrong secret"));
    }

    #[test]
    fn a_flood_is_counted_and_the_disk_is_not_filled() {
        let dir = tempfile::tempdir().expect("a directory");
        let log = JoinLog::with_limit(2000).expect("a thread");
        log.open(dir.path());
        let address = SocketAddr::from(([10, 0, 0, 7], 1));
        for _ in 0..10_000 {
            log.refused(address, None, &JoinFailure::Busy);
        }
        let actor = ActorId(Digest::of(b"an actor"));
        log.joined(address, actor);
        drop(log);
        let size = |name: &str| fs::metadata(dir.path().join(name)).expect("there").len();
        assert!(size(JOINS) <= 2000 && size(EARLIER) <= 2000);
        assert_eq!(fs::read_dir(dir.path()).expect("there").count(), 2);
        let last = lines(&dir.path().join(JOINS)).pop().expect("the last line");
        assert_eq!(last["outcome"], "joined", "an honest actor is not lost in the noise");
        assert!(last["unwritten"].as_u64().is_some_and(|count| count > 9000), "{last}");
    }
}
