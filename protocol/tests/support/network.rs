//! A network in memory: loss, duplication, reordering and partitions from a seed, on tokio's clock.

use std::{
    collections::{BTreeMap, HashMap},
    fmt, io,
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard},
    task::{Context, Poll, Waker},
    time::Duration,
};

use quinn::{
    AsyncUdpSocket, UdpPoller,
    udp::{RecvMeta, Transmit},
};
use tokio::time::{Instant, Sleep};

/// What happens to packets, in thousandths.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weather {
    pub(crate) loss: u64,
    pub(crate) duplication: u64,
    /// Each packet takes 1 to this many milliseconds, so later ones overtake.
    pub(crate) delay_ms: u64,
}

type Packet = (SocketAddr, Vec<u8>);

#[derive(Default)]
struct Inbox {
    due: BTreeMap<(Instant, u64), Packet>,
    waker: Option<Waker>,
}

struct State {
    random: u64,
    weather: Weather,
    partitioned: bool,
    sent: u64,
    inboxes: HashMap<SocketAddr, Inbox>,
    /// When, from, to and how long: one entry a packet handed to the network.
    trace: Vec<(Duration, SocketAddr, SocketAddr, usize)>,
    began: Instant,
}

impl State {
    /// splitmix64.
    fn draw(&mut self, below: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % below
    }
}

#[derive(Clone)]
pub(crate) struct Network(Arc<Mutex<State>>);

impl Network {
    pub(crate) fn new(seed: u64, weather: Weather) -> Self {
        Self(Arc::new(Mutex::new(State {
            random: seed,
            weather,
            partitioned: false,
            sent: 0,
            inboxes: HashMap::new(),
            trace: Vec::new(),
            began: Instant::now(),
        })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no panic under it")
    }

    pub(crate) fn socket(&self, addr: SocketAddr) -> Arc<dyn AsyncUdpSocket> {
        self.state().inboxes.insert(addr, Inbox::default());
        let timer = Mutex::new(Box::pin(tokio::time::sleep(Duration::ZERO)));
        Arc::new(Socket { network: self.clone(), addr, timer })
    }

    pub(crate) fn partition(&self, partitioned: bool) {
        self.state().partitioned = partitioned;
    }

    pub(crate) fn trace(&self) -> Vec<(Duration, SocketAddr, SocketAddr, usize)> {
        self.state().trace.clone()
    }
}

struct Socket {
    network: Network,
    addr: SocketAddr,
    timer: Mutex<Pin<Box<Sleep>>>,
}

impl fmt::Debug for Socket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Socket({})", self.addr)
    }
}

#[derive(Debug)]
struct AlwaysWritable;

impl UdpPoller for AlwaysWritable {
    fn poll_writable(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

impl AsyncUdpSocket for Socket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Box::pin(AlwaysWritable)
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        let mut state = self.network.state();
        let elapsed = state.began.elapsed();
        let (to, len) = (transmit.destination, transmit.contents.len());
        state.trace.push((elapsed, self.addr, to, len));
        let Weather { loss, duplication, delay_ms } = state.weather;
        let copies = 1 + u64::from(state.draw(1000) < duplication);
        for _ in 0..copies {
            if state.draw(1000) < loss || state.partitioned {
                continue;
            }
            let at = Instant::now() + Duration::from_millis(1 + state.draw(delay_ms));
            state.sent += 1;
            let order = state.sent;
            let packet = (self.addr, transmit.contents.to_vec());
            if let Some(inbox) = state.inboxes.get_mut(&to) {
                inbox.due.insert((at, order), packet);
                if let Some(waker) = inbox.waker.take() {
                    waker.wake();
                }
            }
        }
        Ok(())
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [io::IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        loop {
            let mut state = self.network.state();
            let inbox = state.inboxes.get_mut(&self.addr).expect("registered");
            inbox.waker = Some(cx.waker().clone());
            let Some(entry) = inbox.due.first_entry() else { return Poll::Pending };
            let at = entry.key().0;
            if at <= Instant::now() {
                let (addr, bytes) = entry.remove();
                let len = bytes.len();
                bufs[0][..len].copy_from_slice(&bytes);
                meta[0] = RecvMeta { addr, len, stride: len, ecn: None, dst_ip: None };
                return Poll::Ready(Ok(1));
            }
            drop(state);
            let mut timer = self.timer.lock().expect("no panic under it");
            timer.as_mut().reset(at);
            if timer.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.addr)
    }
}
