//! Which rank this process is, from the variables that launchers set. The first launcher that set any
//! of its variables decides, and must have set all of them.

use std::fmt;

use protocol::Digest;

use super::RankError;

/// Who started the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// `--nproc-per-node`, or the same variables set by hand.
    Rollcall,
    /// `torchrun` and everything that sets its variables.
    Torchrun,
    /// `srun`.
    Slurm,
    /// Open MPI's `mpirun`.
    Mpi,
    /// A LeaderWorkerSet of Kubernetes.
    LeaderWorkerSet,
    /// An Indexed Job of Kubernetes.
    IndexedJob,
}

impl Launcher {
    /// Its name, for messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Rollcall => "Rollcall",
            Self::Torchrun => "torchrun",
            Self::Slurm => "Slurm",
            Self::Mpi => "MPI",
            Self::LeaderWorkerSet => "LeaderWorkerSet",
            Self::IndexedJob => "the Indexed Job",
        }
    }
}

/// Where rank 0 listens, whoever started the ranks: `HOST:PORT`.
pub(super) const RENDEZVOUS: &str = "ROLLCALL_RENDEZVOUS";
/// The variables of [`Launcher::Rollcall`].
pub(super) const OWN: [&str; 3] = ["ROLLCALL_RANK", "ROLLCALL_WORLD_SIZE", "ROLLCALL_LOCAL_RANK"];

/// Ports are drawn from here on where the launcher names none.
const PORTS: u16 = 29_400;

/// This process's place among the ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Who started it; nobody where it is alone.
    pub launcher: Option<Launcher>,
    /// From 0.
    pub rank: usize,
    /// How many there are.
    pub world: usize,
    /// Its number on its machine, from 0: which GPU it takes.
    pub local_rank: usize,
    /// Whether all ranks are on this machine.
    pub one_machine: bool,
    /// Rank 0's host.
    pub host: String,
    /// Rank 0's port.
    pub port: u16,
    /// Tells this job's ranks from another's.
    pub job: String,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.launcher {
            None => f.write_str("one rank"),
            Some(launcher) => write!(
                f,
                "rank {} of {}, local rank {}, started by {}, meeting at {}:{}",
                self.rank,
                self.world,
                self.local_rank,
                launcher.name(),
                self.host,
                self.port
            ),
        }
    }
}

impl Place {
    /// A process alone.
    pub fn alone() -> Self {
        Self {
            launcher: None,
            rank: 0,
            world: 1,
            local_rank: 0,
            one_machine: true,
            host: "127.0.0.1".into(),
            port: 0,
            job: String::new(),
        }
    }

    /// Reads this process's place from its environment.
    ///
    /// # Errors
    /// Half of a launcher's variables, values that are no numbers, a rank that is not below the number
    /// of ranks, or no address of rank 0.
    pub fn discover() -> Result<Self, RankError> {
        Self::from_variables(&|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    /// The same from any variables.
    ///
    /// # Errors
    /// As [`discover`](Self::discover).
    pub fn from_variables(get: &dyn Fn(&str) -> Option<String>) -> Result<Self, RankError> {
        let seen = Variables { get };
        let place = match () {
            // A job of actors, or of anything else, says nothing of our ranks.
            () if seen.any(&["JOB_COMPLETION_INDEX"])
                && seen.any(&OWN[1..2])
                && !seen.any(&OWN[..1]) =>
            {
                seen.indexed_job()?
            }
            () if seen.any(&OWN) => seen.own()?,
            () if seen.any(&TORCHRUN) => seen.torchrun()?,
            // A step of `srun`; a batch script's own process is no rank.
            () if seen.any(&["SLURM_STEP_ID"]) && seen.any(&SLURM[..1]) => seen.slurm()?,
            () if seen.any(&MPI) => seen.mpi()?,
            () if seen.any(&LEADER_WORKER_SET) => seen.leader_worker_set()?,
            () => return Ok(Self::alone()),
        };
        if place.rank >= place.world {
            return Err(RankError::Variable {
                name: "the rank",
                value: place.rank.to_string(),
                problem: format!("is not below the number of ranks ({})", place.world),
            });
        }
        Ok(place)
    }
}

const TORCHRUN: [&str; 5] = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"];
const SLURM: [&str; 4] = ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID"];
const MPI: [&str; 3] =
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"];
const LEADER_WORKER_SET: [&str; 3] = ["LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS"];

struct Variables<'a> {
    get: &'a dyn Fn(&str) -> Option<String>,
}

impl Variables<'_> {
    fn any(&self, names: &[&str]) -> bool {
        names.iter().any(|name| (self.get)(name).is_some())
    }

    /// All of a launcher's variables, or none.
    fn all<const N: usize>(
        &self,
        launcher: Launcher,
        names: [&'static str; N],
    ) -> Result<[String; N], RankError> {
        let present = names.iter().copied().find(|name| (self.get)(name).is_some());
        let present = present.unwrap_or_default();
        let mut values = [const { String::new() }; N];
        for (value, name) in values.iter_mut().zip(names) {
            let missing =
                || RankError::Incomplete { launcher: launcher.name(), present, missing: name };
            *value = (self.get)(name).ok_or_else(missing)?;
        }
        Ok(values)
    }

    /// Where rank 0 listens, if the user said so.
    fn rendezvous(&self) -> Result<Option<(String, u16)>, RankError> {
        let Some(text) = (self.get)(RENDEZVOUS) else { return Ok(None) };
        let parts = text.rsplit_once(':').and_then(|(host, port)| {
            let host = host.trim_start_matches('[').trim_end_matches(']');
            (!host.is_empty()).then_some(())?;
            Some((host.to_owned(), port.parse().ok().filter(|port| *port > 0)?))
        });
        parts.map(Some).ok_or_else(|| RankError::Variable {
            name: RENDEZVOUS,
            value: short(&text),
            problem: "is not HOST:PORT".into(),
        })
    }

    fn own(&self) -> Result<Place, RankError> {
        let launcher = Launcher::Rollcall;
        let [rank, world, local] = self.all(launcher, OWN)?;
        let world = count(OWN[1], &world)?;
        let missing = || RankError::NoAddress { launcher: launcher.name(), variable: RENDEZVOUS };
        let (host, port) = self.rendezvous()?.ok_or_else(missing)?;
        let one_machine = host == "127.0.0.1" || host == "localhost" || host == "::1";
        Ok(Place {
            launcher: Some(launcher),
            rank: number(OWN[0], &rank)?,
            world,
            local_rank: number(OWN[2], &local)?,
            one_machine,
            host,
            port,
            job: (self.get)("ROLLCALL_JOB").unwrap_or_default(),
        })
    }

    fn torchrun(&self) -> Result<Place, RankError> {
        let [rank, world, local, host, port] = self.all(Launcher::Torchrun, TORCHRUN)?;
        let master: u16 = number(TORCHRUN[4], &port)?;
        let world = count(TORCHRUN[1], &world)?;
        let local_world = match (self.get)("LOCAL_WORLD_SIZE") {
            Some(text) => number("LOCAL_WORLD_SIZE", &text)?,
            None => 0,
        };
        let one_machine = local_world == world;
        let restart = (self.get)("TORCHELASTIC_RESTART_COUNT").unwrap_or_default();
        let run = (self.get)("TORCHELASTIC_RUN_ID").unwrap_or_default();
        // torchrun's own agent listens on MASTER_PORT.
        let port = master.checked_add(1).unwrap_or(master - 1);
        let (host, port) = match self.rendezvous()? {
            Some(said) => said,
            None if one_machine => ("127.0.0.1".into(), port),
            None => (host, port),
        };
        Ok(Place {
            launcher: Some(Launcher::Torchrun),
            rank: number(TORCHRUN[0], &rank)?,
            world,
            local_rank: number(TORCHRUN[2], &local)?,
            one_machine,
            host,
            port,
            job: format!("torchrun {run} {restart}"),
        })
    }

    fn slurm(&self) -> Result<Place, RankError> {
        let [rank, tasks, local, job] = self.all(Launcher::Slurm, SLURM)?;
        let step = (self.get)("SLURM_STEP_ID").unwrap_or_default();
        let restart = (self.get)("SLURM_RESTART_COUNT").unwrap_or_default();
        // A step may have fewer tasks than the job.
        let world = match (self.get)("SLURM_STEP_NUM_TASKS") {
            Some(tasks) => count("SLURM_STEP_NUM_TASKS", &tasks)?,
            None => count(SLURM[1], &tasks)?,
        };
        let nodes = (self.get)("SLURM_STEP_NODELIST").or_else(|| (self.get)("SLURM_JOB_NODELIST"));
        let first = nodes.as_deref().and_then(first_node);
        let one_machine = ["SLURM_STEP_NUM_NODES", "SLURM_NNODES"]
            .into_iter()
            .find_map(|name| (self.get)(name))
            .is_some_and(|nodes| nodes == "1");
        let id: u64 = number(SLURM[3], &job)?;
        // Jobs that share a machine shall not share a port.
        let port = PORTS + u16::try_from(id % 2_000).unwrap_or_default();
        let (host, port) = match (self.rendezvous()?, first) {
            (Some(said), _) => said,
            (None, _) if one_machine => ("127.0.0.1".into(), port),
            (None, Some(first)) => (first, port),
            (None, None) => {
                let launcher = Launcher::Slurm.name();
                return Err(RankError::NoAddress { launcher, variable: RENDEZVOUS });
            }
        };
        Ok(Place {
            launcher: Some(Launcher::Slurm),
            rank: number(SLURM[0], &rank)?,
            world,
            local_rank: number(SLURM[2], &local)?,
            one_machine,
            host,
            port,
            job: format!("slurm {job}.{step} {restart}"),
        })
    }

    fn mpi(&self) -> Result<Place, RankError> {
        let launcher = Launcher::Mpi;
        let [rank, world, local] = self.all(launcher, MPI)?;
        let world = count(MPI[1], &world)?;
        let here = match (self.get)("OMPI_COMM_WORLD_LOCAL_SIZE") {
            Some(text) => number("OMPI_COMM_WORLD_LOCAL_SIZE", &text)?,
            None => 0,
        };
        let one_machine = here == world;
        let (host, port) = match self.rendezvous()? {
            Some(said) => said,
            None if one_machine => ("127.0.0.1".into(), PORTS),
            None => {
                let launcher = launcher.name();
                return Err(RankError::NoAddress { launcher, variable: RENDEZVOUS });
            }
        };
        Ok(Place {
            launcher: Some(launcher),
            rank: number(MPI[0], &rank)?,
            world,
            local_rank: number(MPI[2], &local)?,
            one_machine,
            host,
            port,
            job: (self.get)("PMIX_NAMESPACE").unwrap_or_default(),
        })
    }

    fn leader_worker_set(&self) -> Result<Place, RankError> {
        let launcher = Launcher::LeaderWorkerSet;
        let [index, size, leader] = self.all(launcher, LEADER_WORKER_SET)?;
        let (host, port) = self.rendezvous()?.unwrap_or((leader, PORTS));
        Ok(Place {
            launcher: Some(launcher),
            rank: number(LEADER_WORKER_SET[0], &index)?,
            world: count(LEADER_WORKER_SET[1], &size)?,
            local_rank: 0,
            one_machine: false,
            host,
            port,
            job: (self.get)("LWS_GROUP_INDEX").unwrap_or_default(),
        })
    }

    fn indexed_job(&self) -> Result<Place, RankError> {
        let launcher = Launcher::IndexedJob;
        let [rank, world] = self.all(launcher, ["JOB_COMPLETION_INDEX", "ROLLCALL_WORLD_SIZE"])?;
        let missing = || RankError::NoAddress { launcher: launcher.name(), variable: RENDEZVOUS };
        let (host, port) = self.rendezvous()?.ok_or_else(missing)?;
        Ok(Place {
            launcher: Some(launcher),
            rank: number("JOB_COMPLETION_INDEX", &rank)?,
            world: count("ROLLCALL_WORLD_SIZE", &world)?,
            local_rank: 0,
            one_machine: false,
            host,
            port,
            job: (self.get)("JOB_NAME").unwrap_or_default(),
        })
    }
}

fn short(text: &str) -> String {
    text.chars().take(60).collect()
}

fn number<T: std::str::FromStr>(name: &'static str, text: &str) -> Result<T, RankError> {
    let wrong = || RankError::Variable {
        name,
        value: short(text),
        problem: "is not a whole number in range".into(),
    };
    text.trim().parse().map_err(|_| wrong())
}

/// A number of ranks.
fn count(name: &'static str, text: &str) -> Result<usize, RankError> {
    match number(name, text)? {
        count @ 1..=4096 => Ok(count),
        _ => Err(RankError::Variable {
            name,
            value: short(text),
            problem: "is not a number of ranks from 1 to 4096".into(),
        }),
    }
}

/// The first host of a list as Slurm writes it: `gpu[03-05,9],login` is `gpu03`.
fn first_node(list: &str) -> Option<String> {
    let end = list.find([',', '[']).unwrap_or(list.len());
    let (name, rest) = list.split_at(end);
    let Some(inside) = rest.strip_prefix('[') else {
        return (!name.is_empty()).then(|| name.to_owned());
    };
    let digits: String = inside.chars().take_while(char::is_ascii_digit).collect();
    let after = inside.split_once(']')?.1;
    // `rack[1-2]node[3-4]`: the first of the second list too.
    let after = after.split(',').next().unwrap_or_default();
    let tail = if after.is_empty() { String::new() } else { first_node(after)? };
    (!digits.is_empty()).then(|| format!("{name}{digits}{tail}"))
}

/// What ranks of one job have in common, so that two jobs on one port do not mix.
pub(super) fn terms(place: &Place, run: Digest) -> Digest {
    let world = (place.world as u64).to_le_bytes();
    let version = env!("CARGO_PKG_VERSION").as_bytes();
    Digest::of_parts("rollcall-ranks-v1", &[place.job.as_bytes(), &world, version, &run.0])
}
