//! How ranks meet: rank 0 listens, the others connect and prove that they know the job's secret, each
//! side with an HMAC over both sides' random numbers. Strangers are turned away without holding up the
//! ranks, and whoever is missing at the deadline is named.

use std::{
    fmt,
    io::{self, Read as _, Write as _},
    net::{TcpListener, TcpStream, ToSocketAddrs as _},
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use hmac::{Hmac, Mac as _, digest::KeyInit};
use protocol::Digest;
use sha2::Sha256;

use super::{
    Collective, Local, OnFailure, Place, RankError, TcpCollective,
    discovery::{self, RENDEZVOUS},
};

/// The variable that holds the secret.
pub(super) const SECRET: &str = "ROLLCALL_RANK_SECRET";
const MAGIC: [u8; 8] = *b"RCRANK01";
/// How long one connection may take to prove itself.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Connections that prove themselves at one time.
const STRANGERS: usize = 64;

/// What ranks of one job share. Never printed.
#[derive(Clone)]
pub struct RankSecret(Vec<u8>);

impl fmt::Debug for RankSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RankSecret(…)")
    }
}

impl RankSecret {
    /// The secret that the environment holds. Ranks on one machine can do without: theirs follows from
    /// the job and keeps jobs apart, not people.
    ///
    /// # Errors
    /// A secret of fewer than 16 characters; none where ranks are on several machines.
    pub fn choose(place: &Place, said: Option<String>) -> Result<Self, RankError> {
        match said {
            Some(text) if text.len() >= 16 => Ok(Self(text.into_bytes())),
            Some(text) => Err(RankError::Variable {
                name: SECRET,
                value: "…".into(),
                problem: format!("has {} characters; it needs 16 or more", text.len()),
            }),
            None if place.one_machine => {
                Ok(Self(format!("one machine {}", place.job).into_bytes()))
            }
            None => Err(RankError::NoSecret { variable: SECRET }),
        }
    }

    fn proof(&self, whose: &str, parts: &[&[u8]]) -> Hmac<Sha256> {
        let digest = Digest::of_parts("rollcall-rank-secret-v1", &[&self.0]);
        let mut key = hmac::digest::Key::<Hmac<Sha256>>::default();
        key[..digest.0.len()].copy_from_slice(&digest.0);
        let mut mac = <Hmac<Sha256> as KeyInit>::new(&key);
        mac.update(whose.as_bytes());
        for part in parts {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        mac
    }
}

/// How ranks meet.
pub struct Meeting {
    /// Who this one is.
    pub place: Place,
    /// What they share.
    pub secret: RankSecret,
    /// Recipe and data: ranks of another run are refused.
    pub run: Digest,
    /// How long all of them have.
    pub deadline: Duration,
    /// The longest wait in one operation afterwards.
    pub timeout: Duration,
    /// Called when a rank fails later on.
    pub on_failure: OnFailure,
}

/// Meets the other ranks.
///
/// # Errors
/// Rank 0 cannot listen, somebody is missing at the deadline, or this rank is refused.
pub fn meet(meeting: Meeting) -> Result<Box<dyn Collective>, RankError> {
    if meeting.place.world == 1 {
        return Ok(Box::new(Local));
    }
    let streams = match meeting.place.rank {
        0 => gather(&meeting)?,
        _ => vec![join(&meeting)?],
    };
    let Meeting { place, timeout, on_failure, .. } = meeting;
    let ranks = TcpCollective::new(place.rank, place.world, streams, timeout, on_failure);
    ranks
        .map(|it| Box::new(it) as Box<dyn Collective>)
        .map_err(|e| RankError::Gone { rank: place.rank, detail: e.to_string() })
}

/// What a rank says of itself, and proves.
struct Hello {
    rank: u32,
    terms: Digest,
    /// Rank 0's random number.
    root: [u8; 16],
    /// The other's.
    own: [u8; 16],
}

impl Hello {
    fn parts(&self) -> [Vec<u8>; 4] {
        [
            self.rank.to_le_bytes().to_vec(),
            self.terms.0.to_vec(),
            self.root.to_vec(),
            self.own.to_vec(),
        ]
    }

    fn proof(&self, secret: &RankSecret, whose: &str) -> Hmac<Sha256> {
        let parts = self.parts();
        let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        secret.proof(whose, &parts)
    }
}

fn random() -> Result<[u8; 16], io::Error> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|e| io::Error::other(e.to_string()))?;
    Ok(bytes)
}

/// How rank 0 answers.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Answer {
    Welcome = 0,
    Secret = 1,
    Terms = 2,
    Taken = 3,
    Number = 4,
}

impl Answer {
    fn of(byte: u8) -> Option<Self> {
        [Self::Welcome, Self::Secret, Self::Terms, Self::Taken, Self::Number]
            .into_iter()
            .find(|answer| *answer as u8 == byte)
    }

    fn reason(self) -> &'static str {
        match self {
            Self::Welcome => "it was welcome",
            Self::Secret => "it holds another secret: give all ranks the same ROLLCALL_RANK_SECRET",
            Self::Terms => {
                "it was started with another recipe, data, number of ranks, job or release"
            }
            Self::Taken => "another process with this rank is there already",
            Self::Number => "there is no such rank",
        }
    }
}

fn gather(meeting: &Meeting) -> Result<Vec<TcpStream>, RankError> {
    let Place { host, port, world, one_machine, .. } = &meeting.place;
    let address = format!("{host}:{port}");
    let listener = match one_machine {
        true => TcpListener::bind(("127.0.0.1", *port)),
        // Both families where the machine has them.
        false => {
            TcpListener::bind(("::", *port)).or_else(|_| TcpListener::bind(("0.0.0.0", *port)))
        }
    };
    let listen = |e: io::Error| RankError::Listen {
        address: address.clone(),
        reason: match e.kind() {
            io::ErrorKind::AddrInUse => "the port is in use".into(),
            _ => e.to_string(),
        },
        variable: RENDEZVOUS,
    };
    let listener = listener.map_err(listen)?;
    listener.set_nonblocking(true).map_err(listen)?;
    let end = Instant::now() + meeting.deadline;
    let terms = discovery::terms(&meeting.place, meeting.run);
    let (send, proved) = mpsc::channel::<Result<(u32, TcpStream), Answer>>();
    let mut ranks: Vec<Option<TcpStream>> = (1..*world).map(|_| None).collect();
    let (busy, mut refused) = (Arc::new(()), [0u32; 5]);
    while ranks.iter().any(Option::is_none) {
        if Instant::now() >= end {
            let missing = (1..*world).filter(|rank| ranks[rank - 1].is_none());
            return Err(RankError::Missing {
                ranks: missing.collect(),
                world: *world,
                deadline: meeting.deadline,
                address,
                notes: notes(&refused),
            });
        }
        let mut idle = true;
        match listener.accept() {
            Ok((stream, _)) if Arc::strong_count(&busy) <= STRANGERS => {
                idle = false;
                let (send, secret, busy) = (send.clone(), meeting.secret.clone(), busy.clone());
                let world = *world;
                std::thread::spawn(move || {
                    let _busy = busy;
                    if let Ok(proved) = receive(stream, &secret, terms, world) {
                        drop(send.send(proved));
                    }
                });
            }
            Ok(_) => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(listen(e)),
        }
        while let Ok(result) = proved.try_recv() {
            idle = false;
            match result {
                Err(answer) => refused[answer as usize] += 1,
                Ok((rank, mut stream)) => {
                    let Some(seat) = ranks.get_mut((rank as usize).wrapping_sub(1)) else {
                        continue;
                    };
                    let answer = if seat.is_some() { Answer::Taken } else { Answer::Welcome };
                    let told = stream.write_all(&[answer as u8]);
                    if answer == Answer::Taken {
                        refused[answer as usize] += 1;
                    } else if told.is_ok() {
                        *seat = Some(stream);
                    }
                }
            }
        }
        if idle {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    Ok(ranks.into_iter().flatten().collect())
}

fn notes(refused: &[u32; 5]) -> String {
    let mut notes = String::new();
    for (answer, what) in [
        (Answer::Secret, "held another secret"),
        (Answer::Terms, "came with another recipe, job or release"),
        (Answer::Taken, "came twice"),
        (Answer::Number, "had a rank that does not exist"),
    ] {
        match refused[answer as usize] {
            0 => {}
            times => notes.push_str(&format!(" ({times} {what})")),
        }
    }
    notes
}

/// Rank 0's side of one connection, up to its answer to a good one.
fn receive(
    mut stream: TcpStream,
    secret: &RankSecret,
    terms: Digest,
    world: usize,
) -> io::Result<Result<(u32, TcpStream), Answer>> {
    stream.set_nonblocking(false)?;
    let end = Instant::now() + HANDSHAKE;
    stream.set_write_timeout(Some(HANDSHAKE))?;
    let ours = random()?;
    stream.write_all(&MAGIC)?;
    stream.write_all(&ours)?;
    let mut hello = [0; 8 + 4 + 32 + 16 + 32];
    read_until(&mut stream, &mut hello, end)?;
    let (head, rest) = hello.split_at(8);
    if head != MAGIC {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let take = |at: usize, len: usize| &rest[at..at + len];
    let mut said = Hello { rank: 0, terms: Digest([0; 32]), root: ours, own: [0; 16] };
    let mut rank = [0; 4];
    rank.copy_from_slice(take(0, 4));
    said.rank = u32::from_le_bytes(rank);
    said.terms.0.copy_from_slice(take(4, 32));
    said.own.copy_from_slice(take(36, 16));
    let answer = if said.proof(secret, "rank").verify_slice(take(52, 32)).is_err() {
        Answer::Secret
    } else if said.terms != terms {
        Answer::Terms
    } else if !(1..world).contains(&(said.rank as usize)) {
        Answer::Number
    } else {
        stream.write_all(&said.proof(secret, "rank 0").finalize().into_bytes())?;
        return Ok(Ok((said.rank, stream)));
    };
    // As long as a proof, so that who reads it knows what follows.
    stream.write_all(&[0; 32])?;
    stream.write_all(&[answer as u8])?;
    Ok(Err(answer))
}

fn read_until(stream: &mut TcpStream, mut buffer: &mut [u8], end: Instant) -> io::Result<()> {
    while !buffer.is_empty() {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(buffer) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(got) => buffer = &mut buffer[got..],
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Finds rank 0 and proves itself.
fn join(meeting: &Meeting) -> Result<TcpStream, RankError> {
    let Place { host, port, rank, .. } = &meeting.place;
    let address = format!("{host}:{port}");
    let end = Instant::now() + meeting.deadline;
    loop {
        let refused = |reason: &str| RankError::Refused {
            rank: *rank,
            address: address.clone(),
            reason: reason.to_owned(),
        };
        let problem = match knock(meeting, end) {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(Some(answer))) => return Err(refused(answer.reason())),
            Ok(Err(None)) => {
                return Err(refused("what answers there does not know the ranks' secret"));
            }
            Err(e) => e.to_string(),
        };
        // Rank 0 may start later than we do, or listen on a port that an earlier job still holds.
        if Instant::now() + Duration::from_millis(200) >= end {
            return Err(RankError::NoRoot {
                rank: *rank,
                address,
                deadline: meeting.deadline,
                reason: problem,
            });
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// One attempt: a connection, an answer that is no welcome (none: a proof that is none), or a problem
/// that may pass.
fn knock(meeting: &Meeting, end: Instant) -> io::Result<Result<TcpStream, Option<Answer>>> {
    let Place { host, port, rank, .. } = &meeting.place;
    let mut last = io::Error::other("the name has no address");
    let mut found = None;
    for address in (host.as_str(), *port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, HANDSHAKE) {
            Ok(stream) => {
                found = Some(stream);
                break;
            }
            Err(e) => last = e,
        }
    }
    let Some(mut stream) = found else { return Err(last) };
    stream.set_write_timeout(Some(HANDSHAKE))?;
    let soon = (Instant::now() + HANDSHAKE).min(end);
    let mut greeting = [0; 24];
    read_until(&mut stream, &mut greeting, soon)?;
    if greeting[..8] != MAGIC {
        return Err(io::Error::other("something else listens there"));
    }
    let mut hello = Hello {
        rank: u32::try_from(*rank).unwrap_or(u32::MAX),
        terms: discovery::terms(&meeting.place, meeting.run),
        root: [0; 16],
        own: random()?,
    };
    hello.root.copy_from_slice(&greeting[8..]);
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&hello.rank.to_le_bytes());
    bytes.extend_from_slice(&hello.terms.0);
    bytes.extend_from_slice(&hello.own);
    bytes.extend_from_slice(&hello.proof(&meeting.secret, "rank").finalize().into_bytes());
    stream.write_all(&bytes)?;
    let mut proof = [0; 32];
    read_until(&mut stream, &mut proof, soon)?;
    let mut answer = [0];
    // Rank 0 answers a good proof once it comes to it.
    read_until(&mut stream, &mut answer, soon)?;
    match Answer::of(answer[0]) {
        Some(Answer::Welcome) => {
            let known = hello.proof(&meeting.secret, "rank 0").verify_slice(&proof).is_ok();
            Ok(if known { Ok(stream) } else { Err(None) })
        }
        Some(answer) => Ok(Err(Some(answer))),
        None => Err(io::Error::other("something else listens there")),
    }
}
