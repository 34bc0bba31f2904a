//! The collective over TCP: a star with rank 0 in the middle, which adds up in the order of the ranks.
//!
//! A thread reads each connection all the time, so the end of a rank is noticed at once, whatever
//! the others are doing: rank 0 tells everybody, and [`OnFailure`] is called on every rank.

use std::{
    collections::VecDeque,
    net::{Shutdown, TcpStream},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    time::{Duration, Instant},
};

use socket2::{SockRef, TcpKeepalive};

use super::{
    Collective, RankError,
    wire::{self, Frame, Kind, Operation},
};

/// How long a rank waits for rank 0's next command: its end shows in the connection.
const FOREVER: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// How a machine that has gone without a word is noticed: probes after so much silence, so far apart.
const SILENCE: Duration = Duration::from_secs(30);
const PROBES: Duration = Duration::from_secs(10);

/// Called once, on a thread of its own, when the run fails because of a rank.
pub type OnFailure = Box<dyn Fn(&RankError) + Send + Sync>;

/// Ranks connected over TCP. Made by [`super::meet`].
pub struct TcpCollective {
    rank: usize,
    world: usize,
    /// The longest wait in an operation.
    timeout: Duration,
    number: u64,
    /// At rank 0 one to each other rank, in order; elsewhere the one to rank 0.
    links: Vec<Arc<Link>>,
    inbox: Receiver<(usize, Frame)>,
    /// By link: what came before it was wanted.
    pending: Vec<VecDeque<Frame>>,
    state: Arc<State>,
    finished: bool,
}

struct Link {
    rank: usize,
    /// Locked while a frame is written.
    writer: Mutex<TcpStream>,
    /// The same connection, to end it while someone writes.
    socket: TcpStream,
    /// Its rank has said that it leaves.
    left: AtomicBool,
}

struct State {
    rank: usize,
    failure: Mutex<Option<RankError>>,
    links: Mutex<Vec<Arc<Link>>>,
    on_failure: OnFailure,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    fn failure(&self) -> Option<RankError> {
        locked(&self.failure).clone()
    }

    /// The run has failed: the first reason counts, everybody is told, all connections end.
    fn fail(&self, error: RankError) -> RankError {
        {
            let mut failure = locked(&self.failure);
            if let Some(first) = &*failure {
                return first.clone();
            }
            *failure = Some(error.clone());
        }
        let links = locked(&self.links).clone();
        let text = match (&error, self.rank) {
            (RankError::Ended(text), _) => text.clone(),
            (error, _) => error.to_string(),
        };
        for link in links {
            // Who is being written to gets no word any more: it sees the connection end.
            if let Ok(mut writer) = link.writer.try_lock() {
                let operation = Operation { kind: Kind::Abort, number: 0 };
                drop(writer.set_write_timeout(Some(Duration::from_secs(2))));
                drop(wire::write(&mut *writer, operation, text.as_bytes()));
                drop(link.socket.shutdown(Shutdown::Write));
            } else {
                drop(link.socket.shutdown(Shutdown::Both));
            }
        }
        (self.on_failure)(&error);
        error
    }
}

impl TcpCollective {
    /// Over connections that have met: at rank 0 those to ranks 1, 2, …; elsewhere the one to rank 0.
    pub(super) fn new(
        rank: usize,
        world: usize,
        streams: Vec<TcpStream>,
        timeout: Duration,
        on_failure: OnFailure,
    ) -> std::io::Result<Self> {
        let (send, inbox) = channel();
        let state =
            State { rank, failure: Mutex::new(None), links: Mutex::new(Vec::new()), on_failure };
        let state = Arc::new(state);
        let mut links = Vec::new();
        let mut readers = Vec::new();
        for (at, stream) in streams.into_iter().enumerate() {
            stream.set_nodelay(true)?;
            let keepalive = TcpKeepalive::new().with_time(SILENCE).with_interval(PROBES);
            SockRef::from(&stream).set_tcp_keepalive(&keepalive)?;
            stream.set_read_timeout(None)?;
            stream.set_write_timeout(Some(timeout))?;
            readers.push(stream.try_clone()?);
            let socket = stream.try_clone()?;
            let peer = if rank == 0 { at + 1 } else { 0 };
            let (writer, left) = (Mutex::new(stream), AtomicBool::new(false));
            links.push(Arc::new(Link { rank: peer, writer, socket, left }));
        }
        *locked(&state.links) = links.clone();
        for (at, stream) in readers.into_iter().enumerate() {
            let reader =
                Reader { at, link: links[at].clone(), state: state.clone(), inbox: send.clone() };
            std::thread::Builder::new()
                .name(format!("rank-{}", reader.link.rank))
                .spawn(move || reader.run(stream))?;
        }
        let pending = links.iter().map(|_| VecDeque::new()).collect();
        Ok(Self { rank, world, timeout, number: 0, links, inbox, pending, state, finished: false })
    }

    fn next(&mut self, kind: Kind) -> Operation {
        self.number += 1;
        Operation { kind, number: self.number }
    }

    fn send(&self, link: &Link, operation: Operation, body: &[u8]) -> Result<(), RankError> {
        if let Some(failure) = self.state.failure() {
            return Err(failure);
        }
        let written = wire::write(&mut *locked(&link.writer), operation, body);
        written.map_err(|e| {
            let stuck =
                matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut);
            let error = if stuck {
                let (ranks, operation) = (vec![link.rank], operation.to_string());
                RankError::Hangs { ranks, operation, deadline: self.timeout }
            } else {
                RankError::Gone { rank: link.rank, detail: e.to_string() }
            };
            self.state.fail(error)
        })
    }

    /// One frame of `operation` from every link, in the order of the links.
    fn receive(&mut self, operation: Operation) -> Result<Vec<Vec<u8>>, RankError> {
        // Rank 0 notices first who is missing, and says so to the others.
        self.receive_within(
            operation,
            match self.rank {
                0 => self.timeout,
                _ => self.timeout + self.timeout / 4 + Duration::from_secs(5),
            },
        )
    }

    fn receive_within(
        &mut self,
        operation: Operation,
        patience: Duration,
    ) -> Result<Vec<Vec<u8>>, RankError> {
        let deadline = Instant::now() + patience;
        loop {
            // What has come counts, even where its sender has ended since.
            while let Ok((at, frame)) = self.inbox.try_recv() {
                self.pending[at].push_back(frame);
            }
            if self.pending.iter().all(|frames| !frames.is_empty()) {
                break;
            }
            if let Some(failure) = self.state.failure() {
                return Err(failure);
            }
            match self.inbox.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok((at, frame)) => self.pending[at].push_back(frame),
                Err(RecvTimeoutError::Timeout) if Instant::now() >= deadline => {
                    let missing = self.pending.iter().zip(&self.links);
                    let missing = missing.filter(|(frames, _)| frames.is_empty());
                    let error = RankError::Hangs {
                        ranks: missing.map(|(_, link)| link.rank).collect(),
                        operation: operation.to_string(),
                        deadline: patience,
                    };
                    return Err(self.state.fail(error));
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    let detail = "its connection has ended".to_owned();
                    let error = RankError::Gone { rank: self.links[0].rank, detail };
                    return Err(self.state.fail(error));
                }
            }
        }
        let mut bodies = Vec::with_capacity(self.pending.len());
        for (frames, link) in self.pending.iter_mut().zip(&self.links) {
            let Some(frame) = frames.pop_front() else { continue };
            if frame.operation != operation {
                let detail = match frame.operation.kind {
                    Kind::Leave => {
                        Err(RankError::Gone { rank: link.rank, detail: "it had finished".into() })
                    }
                    _ => Ok(()),
                };
                let (ours, theirs) = (operation.to_string(), frame.operation.to_string());
                // Messages speak of the rank that is not rank 0.
                let (rank, theirs, ours) = match self.rank {
                    0 => (link.rank, theirs, ours),
                    rank => (rank, ours, theirs),
                };
                let error = detail.err().unwrap_or(RankError::Diverged { rank, theirs, ours });
                return Err(self.state.fail(error));
            }
            bodies.push(frame.body);
        }
        Ok(bodies)
    }

    /// Sums little-endian values of `N` bytes over all ranks.
    fn sum<T: Copy, const N: usize>(
        &mut self,
        kind: Kind,
        values: &mut [T],
        to_bytes: fn(T) -> [u8; N],
        from_bytes: fn([u8; N]) -> T,
        add: fn(T, T) -> T,
    ) -> Result<(), RankError> {
        let operation = self.next(kind);
        let bytes = |values: &[T]| values.iter().flat_map(|v| to_bytes(*v)).collect::<Vec<u8>>();
        let read = |body: &[u8], rank: usize| -> Result<Vec<T>, RankError> {
            if body.len() != N * values.len() {
                return Err(RankError::Diverged {
                    rank,
                    theirs: format!("{operation} of {} values", body.len() / N),
                    ours: format!("one of {}", values.len()),
                });
            }
            let value = |chunk: &[u8]| {
                let mut bytes = [0; N];
                bytes.copy_from_slice(chunk);
                from_bytes(bytes)
            };
            Ok(body.chunks_exact(N).map(value).collect())
        };
        if self.rank != 0 {
            let body = bytes(values);
            for link in self.links.clone() {
                self.send(&link, operation, &body)?;
            }
            let bodies = self.receive(operation)?;
            let sums = read(bodies.first().map_or(&[][..], Vec::as_slice), self.rank)
                .map_err(|e| self.state.fail(e))?;
            values.copy_from_slice(&sums);
            return Ok(());
        }
        let bodies = self.receive(operation)?;
        let mut parts = Vec::with_capacity(bodies.len());
        for (body, link) in bodies.into_iter().zip(&self.links) {
            parts.push(read(&body, link.rank).map_err(|e| self.state.fail(e))?);
        }
        for part in parts {
            for (sum, value) in values.iter_mut().zip(part) {
                *sum = add(*sum, value);
            }
        }
        let body = bytes(values);
        for link in self.links.clone() {
            self.send(&link, operation, &body)?;
        }
        Ok(())
    }
}

impl Collective for TcpCollective {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.world
    }

    fn all_reduce(&mut self, values: &mut [f32]) -> Result<(), RankError> {
        self.sum(Kind::Sum, values, f32::to_le_bytes, f32::from_le_bytes, |a, b| a + b)
    }

    fn all_reduce_wide(&mut self, values: &mut [f64]) -> Result<(), RankError> {
        self.sum(Kind::WideSum, values, f64::to_le_bytes, f64::from_le_bytes, |a, b| a + b)
    }

    fn broadcast(&mut self, bytes: &mut Vec<u8>) -> Result<(), RankError> {
        let operation = self.next(Kind::Broadcast);
        if self.rank == 0 {
            for link in self.links.clone() {
                self.send(&link, operation, bytes)?;
            }
        } else {
            *bytes = self.receive(operation)?.pop().unwrap_or_default();
        }
        Ok(())
    }

    fn command(&mut self, bytes: &mut Vec<u8>) -> Result<(), RankError> {
        if self.rank == 0 {
            return self.broadcast(bytes);
        }
        let operation = self.next(Kind::Broadcast);
        *bytes = self.receive_within(operation, FOREVER)?.pop().unwrap_or_default();
        Ok(())
    }

    fn all_gather(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, RankError> {
        let operation = self.next(Kind::Gather);
        if self.rank != 0 {
            for link in self.links.clone() {
                self.send(&link, operation, bytes)?;
            }
            let body = self.receive(operation)?.pop().unwrap_or_default();
            return split(&body, self.world).ok_or_else(|| {
                self.state.fail(RankError::Diverged {
                    rank: self.rank,
                    theirs: format!("{operation} of {} ranks", self.world),
                    ours: format!("one of {} bytes", body.len()),
                })
            });
        }
        let mut all = self.receive(operation)?;
        all.insert(0, bytes.to_vec());
        let mut body = Vec::new();
        for part in &all {
            body.extend_from_slice(&(part.len() as u64).to_le_bytes());
            body.extend_from_slice(part);
        }
        for link in self.links.clone() {
            self.send(&link, operation, &body)?;
        }
        Ok(all)
    }

    fn finish(&mut self) -> Result<(), RankError> {
        self.barrier()?;
        let operation = Operation { kind: Kind::Leave, number: 0 };
        for link in self.links.clone() {
            // Nothing is lost any more, whoever has closed first.
            drop(wire::write(&mut *locked(&link.writer), operation, &[]));
        }
        self.finished = true;
        Ok(())
    }

    fn abort(&mut self, reason: &str) {
        let text = format!("rank {}: {reason}", self.rank);
        self.state.fail(RankError::Ended(text));
    }
}

impl Drop for TcpCollective {
    fn drop(&mut self) {
        if self.finished {
            self.links.iter().for_each(|link| drop(link.socket.shutdown(Shutdown::Write)));
        } else {
            self.abort("ended before the run was finished: its own log says why");
        }
    }
}

fn split(mut body: &[u8], parts: usize) -> Option<Vec<Vec<u8>>> {
    let mut all = Vec::with_capacity(parts);
    for _ in 0..parts {
        let (len, rest) = body.split_first_chunk::<8>()?;
        let len = usize::try_from(u64::from_le_bytes(*len)).ok()?;
        let (part, rest) = rest.split_at_checked(len)?;
        all.push(part.to_vec());
        body = rest;
    }
    body.is_empty().then_some(all)
}

/// Reads one connection until it ends.
struct Reader {
    at: usize,
    link: Arc<Link>,
    state: Arc<State>,
    inbox: Sender<(usize, Frame)>,
}

impl Reader {
    fn run(self, mut stream: TcpStream) {
        let rank = self.link.rank;
        loop {
            let frame = match wire::read(&mut stream) {
                Ok(Some(frame)) => frame,
                Ok(None) if self.link.left.load(Ordering::SeqCst) => return,
                Ok(None) => {
                    let detail = "its process has ended".to_owned();
                    self.state.fail(RankError::Gone { rank, detail });
                    return;
                }
                Err(e) => {
                    if !self.link.left.load(Ordering::SeqCst) {
                        self.state.fail(RankError::Gone { rank, detail: e.to_string() });
                    }
                    return;
                }
            };
            match frame.operation.kind {
                Kind::Abort => {
                    let text: String =
                        String::from_utf8_lossy(&frame.body).chars().take(2_000).collect();
                    self.state.fail(RankError::Ended(text));
                    return;
                }
                Kind::Leave => self.link.left.store(true, Ordering::SeqCst),
                _ => {}
            }
            if self.inbox.send((self.at, frame)).is_err() {
                return;
            }
        }
    }
}
