//! How a program becomes one rank of a run: found by its launcher's variables, connected, and ended
//! with one line when another rank fails.

use std::{str::FromStr, time::Duration};

use policy::device::DeviceChoice;
use protocol::Digest;
use terminal::{Failure, Interrupt};

use super::{
    Collective, Launcher, Local, Meeting, Place, RankError, RankSecret, agree, meet,
    rendezvous::SECRET, spawn,
};

/// What adds up gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backend {
    /// NCCL on CUDA devices where this program has it, else TCP.
    #[default]
    Auto,
    /// Through rank 0, in the order of the ranks.
    Tcp,
    /// Between GPUs.
    Nccl,
}

impl FromStr for Backend {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "tcp" => Ok(Self::Tcp),
            "nccl" if cfg!(feature = "nccl") => Ok(Self::Nccl),
            "nccl" => Err("this program was built without NCCL: use tcp, or build with --features learner/nccl".into()),
            _ => Err("not one of auto, tcp, nccl".into()),
        }
    }
}

/// What the command line says about ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankOptions {
    /// Ranks to start on this machine.
    pub nproc_per_node: Option<usize>,
    /// What adds up gradients.
    pub collective: Backend,
    /// How long ranks have to find each other.
    pub meeting: Duration,
    /// The longest wait for a rank in one operation.
    pub timeout: Duration,
}

impl Default for RankOptions {
    fn default() -> Self {
        Self {
            nproc_per_node: None,
            collective: Backend::Auto,
            meeting: Duration::from_secs(300),
            timeout: Duration::from_secs(1800),
        }
    }
}

/// What this process is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// It started the ranks, which have all ended well: nothing is left to do.
    Parent,
    /// One rank of a run, perhaps the only one.
    Rank(Place),
}

impl RankOptions {
    /// Finds out which rank this is, or starts the ranks and waits for them.
    ///
    /// # Errors
    /// Half of a launcher's variables, two launchers at once, ranks that end badly.
    pub fn role(&self, interrupt: &Interrupt) -> Result<Role, Failure> {
        let place = Place::discover().map_err(Failure::mistake)?;
        match (self.nproc_per_node, place.launcher) {
            (Some(count), None) => spawn::run(count, interrupt).map(|()| Role::Parent),
            (Some(_), Some(launcher)) if launcher != Launcher::Rollcall => {
                Err(Failure::Mistake(format!(
                    "--nproc-per-node: {} has started the ranks already; leave it out",
                    launcher.name()
                )))
            }
            _ => {
                spawn::follow_parent();
                Ok(Role::Rank(place))
            }
        }
    }

    /// Meets the other ranks of `run`: everything that all ranks must have in common.
    ///
    /// # Errors
    /// Ranks that do not come, are refused, or cannot be summed over as asked.
    pub fn connect(
        &self,
        place: &Place,
        run: Digest,
        device: DeviceChoice,
    ) -> Result<Ranks, Failure> {
        let secret = std::env::var(SECRET).ok();
        let secret = RankSecret::choose(place, secret).map_err(Failure::mistake)?;
        if place.world > 1 {
            tracing::info!("{place}");
        }
        let voice = Voice {
            others: place.rank == 0 || !place.one_machine,
            has_parent: spawn::has_parent(),
            leads: place.rank == 0,
        };
        let meeting = Meeting {
            place: place.clone(),
            secret,
            run,
            deadline: self.meeting,
            timeout: self.timeout,
            on_failure: Box::new(move |error| end(error, voice)),
        };
        let ranks = meet(meeting).map_err(failure)?;
        Ok(Ranks { inner: self.backend(ranks, device)?, voice })
    }

    #[cfg(feature = "nccl")]
    fn backend(
        &self,
        ranks: Box<dyn Collective>,
        device: DeviceChoice,
    ) -> Result<Box<dyn Collective>, Failure> {
        match (self.collective, device) {
            (Backend::Auto, DeviceChoice::Cuda(_)) if ranks.world() == 1 => Ok(ranks),
            (Backend::Auto | Backend::Nccl, DeviceChoice::Cuda(index)) => {
                let nccl = super::NcclCollective::over(ranks, index).map_err(Failure::mistake)?;
                Ok(Box::new(nccl))
            }
            (Backend::Nccl, device) => Err(Failure::Mistake(format!(
                "--collective nccl needs CUDA devices, and this rank computes on {device}"
            ))),
            _ => Ok(ranks),
        }
    }

    #[cfg(not(feature = "nccl"))]
    #[allow(clippy::unused_self, clippy::unnecessary_wraps, reason = "as with NCCL")]
    fn backend(
        &self,
        ranks: Box<dyn Collective>,
        _: DeviceChoice,
    ) -> Result<Box<dyn Collective>, Failure> {
        Ok(ranks)
    }
}

/// Whose fault it is that ranks do not meet.
fn failure(error: RankError) -> Failure {
    match error {
        RankError::Missing { .. }
        | RankError::NoRoot { .. }
        | RankError::Refused { .. }
        | RankError::Listen { .. } => Failure::mistake(error),
        _ => Failure::fault(error),
    }
}

/// Which failures this rank says itself: ranks that share a terminal say each once.
#[derive(Clone, Copy, Debug)]
struct Voice {
    /// Those that come from other ranks.
    others: bool,
    /// A process of this machine waits for all ranks, and says who was ended by a signal.
    has_parent: bool,
    /// This is rank 0, which hears of all.
    leads: bool,
}

impl Voice {
    /// A failure because of another rank.
    fn of_other(self, error: RankError) -> Failure {
        match error {
            RankError::Gone { .. } if self.has_parent => Failure::Said(1),
            RankError::Ended(_) | RankError::Gone { .. } | RankError::Hangs { .. }
                if !self.others =>
            {
                Failure::Said(1)
            }
            error => Failure::fault(error),
        }
    }

    /// A failure of this rank, of which rank 0 has heard.
    fn of_own(self, failure: Failure) -> Failure {
        if self.has_parent && !self.leads { Failure::Said(failure.status()) } else { failure }
    }
}

/// Ends this process because of another rank. The main thread may be in the middle of a long
/// computation, or about to say the same: it gets a moment for an orderly end.
fn end(error: &RankError, voice: Voice) {
    let error = error.clone();
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(5));
        voice.of_other(error).report();
        std::process::exit(1);
    });
}

/// This process among the ranks of its run: the [`Collective`], with failures as a program reports them.
pub struct Ranks {
    inner: Box<dyn Collective>,
    voice: Voice,
}

impl std::fmt::Debug for Ranks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {} of {}", self.rank(), self.world())
    }
}

impl Ranks {
    /// A run of one rank.
    pub fn alone() -> Self {
        Self::over(Box::new(Local))
    }

    /// Ranks that have met.
    pub fn over(inner: Box<dyn Collective>) -> Self {
        let leads = inner.rank() == 0;
        Self { inner, voice: Voice { others: true, has_parent: false, leads } }
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.inner.rank()
    }

    /// How many there are.
    pub fn world(&self) -> usize {
        self.inner.world()
    }

    /// Whether this is rank 0, which alone writes files and speaks.
    pub fn leads(&self) -> bool {
        self.rank() == 0
    }

    fn done<T>(&self, result: Result<T, RankError>) -> Result<T, Failure> {
        result.map_err(|error| self.voice.of_other(error))
    }

    /// See [`Collective::all_reduce`].
    ///
    /// # Errors
    /// As there.
    pub fn all_reduce(&mut self, values: &mut [f32]) -> Result<(), Failure> {
        let result = self.inner.all_reduce(values);
        self.done(result)
    }

    /// See [`Collective::all_reduce_wide`].
    ///
    /// # Errors
    /// As there.
    pub fn all_reduce_wide(&mut self, values: &mut [f64]) -> Result<(), Failure> {
        let result = self.inner.all_reduce_wide(values);
        self.done(result)
    }

    /// See [`Collective::all_gather`].
    ///
    /// # Errors
    /// As there.
    pub fn all_gather(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Failure> {
        let result = self.inner.all_gather(bytes);
        self.done(result)
    }

    /// See [`Collective::broadcast`].
    ///
    /// # Errors
    /// As there.
    pub fn broadcast(&mut self, bytes: &mut Vec<u8>) -> Result<(), Failure> {
        let result = self.inner.broadcast(bytes);
        self.done(result)
    }

    /// See [`Collective::command`].
    ///
    /// # Errors
    /// As there.
    pub fn command(&mut self, bytes: &mut Vec<u8>) -> Result<(), Failure> {
        let result = self.inner.command(bytes);
        self.done(result)
    }

    /// What rank 0 says: whether to stop, for example.
    ///
    /// # Errors
    /// As [`Collective::broadcast`].
    pub fn decided(&mut self, decision: bool) -> Result<bool, Failure> {
        if self.world() == 1 {
            return Ok(decision);
        }
        let mut bytes = vec![u8::from(decision)];
        self.broadcast(&mut bytes)?;
        Ok(bytes == [1])
    }

    /// See [`agree`].
    ///
    /// # Errors
    /// As there.
    pub fn agree(&mut self, what: &'static str, digest: Digest) -> Result<(), Failure> {
        let result = agree(&mut *self.inner, what, digest);
        self.done(result)
    }

    /// Ends this rank's part: with the others where `result` is good, else ending theirs too.
    ///
    /// # Errors
    /// That of `result`, or a rank that fails.
    pub fn finish<T>(mut self, result: Result<T, Failure>) -> Result<T, Failure> {
        match result {
            Ok(value) => {
                let finished = self.inner.finish();
                self.done(finished).map(|()| value)
            }
            Err(failure @ Failure::Said(_)) => Err(failure),
            Err(failure) => {
                self.inner.abort(&failure.to_string());
                Err(self.voice.of_own(failure))
            }
        }
    }
}
