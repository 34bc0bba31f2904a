//! Actor processes that the learner starts and keeps alive on its own host.
//!
//! Each child gets the join string through its environment or a private file (an argument would show in `ps`), runs in
//! its own process group (so that Ctrl-C reaches the learner alone, which then ends its actors in
//! order), and watches its standard input: when the learner dies, however it dies, the pipe closes and
//! the child leaves.

use std::{
    ffi::OsString,
    io,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

/// The environment variable that carries a join string.
pub const JOIN_VARIABLE: &str = "ROLLCALL_JOIN";

/// A child that dies sooner than this after its start counts as a failed start.
const QUICK_DEATH: Duration = Duration::from_secs(5);
/// Failed starts in a row, over all children, after which starting again is pointless.
const MAX_QUICK_DEATHS: u32 = 5;

/// What every local actor is started with.
#[derive(Clone, Debug)]
pub struct LocalActorConfig {
    /// The actor program.
    pub program: PathBuf,
    /// The learner's join string.
    pub join: String,
    /// A file that holds it as it is at any time, instead.
    pub join_file: Option<PathBuf>,
    /// The model directory.
    pub model: PathBuf,
    /// One device each, used round robin.
    pub devices: Vec<String>,
    /// Episodes in flight per actor.
    pub slots: u32,
    /// Variables with which the actor may open the run's environment, where it is not part of it.
    pub variables: Vec<(&'static str, OsString)>,
    /// A directory in which each has one for its episodes, where they shall outlive it.
    pub spools: Option<PathBuf>,
    /// Extra arguments.
    pub arguments: Vec<String>,
}

/// Local actors could not be started or kept alive.
#[derive(Debug, thiserror::Error)]
pub enum LocalActorError {
    /// The program could not be executed.
    #[error(
        "cannot start the actor program {program}: {source}; build it with `cargo build --release` or name it with --actor-program"
    )]
    Start {
        /// What was executed.
        program: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// The program runs but ends at once, again and again.
    #[error(
        "local actor {index} ended with {status} right after its start, {times} times in a row: its own message stands above"
    )]
    KeepsDying {
        /// Which actor.
        index: usize,
        /// How it ended last.
        status: ExitStatus,
        /// How often.
        times: u32,
    },
}

struct Running {
    child: Child,
    started: Instant,
}

/// Supervises the local actors of one learner.
pub struct LocalActors {
    config: LocalActorConfig,
    running: Vec<Running>,
    quick_deaths: u32,
    restarts: u64,
}

impl LocalActors {
    /// Starts `count` actors.
    ///
    /// # Errors
    /// When the program cannot be executed.
    pub fn start(config: LocalActorConfig, count: usize) -> Result<Self, LocalActorError> {
        let mut actors = Self { config, running: Vec::new(), quick_deaths: 0, restarts: 0 };
        for index in 0..count {
            let running = actors.spawn(index)?;
            actors.running.push(running);
        }
        Ok(actors)
    }

    /// The actor program that was installed beside this one.
    pub fn sibling_program() -> PathBuf {
        let own = std::env::current_exe().unwrap_or_default();
        own.parent().unwrap_or(Path::new("")).join("actor")
    }

    /// Process ids, in order.
    pub fn pids(&self) -> Vec<u32> {
        self.running.iter().map(|running| running.child.id()).collect()
    }

    /// How many were started again after a death.
    pub fn restarts(&self) -> u64 {
        self.restarts
    }

    /// Starts again those that died; returns how each of them had ended.
    ///
    /// # Errors
    /// When starting fails, or children keep dying right after their start.
    pub fn tend(&mut self) -> Result<Vec<ExitStatus>, LocalActorError> {
        let mut deaths = Vec::new();
        for index in 0..self.running.len() {
            let Ok(Some(status)) = self.running[index].child.try_wait() else {
                continue;
            };
            if self.running[index].started.elapsed() < QUICK_DEATH {
                self.quick_deaths += 1;
            } else {
                self.quick_deaths = 1;
            }
            // Exit status 2 is a mistake that starting again does not mend.
            if self.quick_deaths >= MAX_QUICK_DEATHS || status.code() == Some(2) {
                let times = self.quick_deaths;
                return Err(LocalActorError::KeepsDying { index, status, times });
            }
            deaths.push(status);
            self.running[index] = self.spawn(index)?;
            self.restarts += 1;
        }
        Ok(deaths)
    }

    /// Waits for all to leave by themselves, then kills what is left. Call after the learner told its
    /// actors that the run is over.
    pub fn stop(&mut self, patience: Duration) {
        let deadline = Instant::now() + patience;
        for running in &mut self.running {
            drop(running.child.stdin.take());
        }
        for running in &mut self.running {
            while Instant::now() < deadline && matches!(running.child.try_wait(), Ok(None)) {
                std::thread::sleep(Duration::from_millis(10));
            }
            if matches!(running.child.try_wait(), Ok(None)) {
                // Already gone is as good as killed.
                let _ = running.child.kill();
            }
            let _ = running.child.wait();
        }
        self.running.clear();
    }

    fn spawn(&self, index: usize) -> Result<Running, LocalActorError> {
        let config = &self.config;
        let mut command = Command::new(&config.program);
        command
            .arg("join")
            .arg("--model")
            .arg(&config.model)
            .arg("--slots")
            .arg(config.slots.to_string())
            .arg("--leave-with-stdin")
            .stdin(Stdio::piped())
            .process_group(0);
        match &config.join_file {
            Some(file) => command.arg("--join-file").arg(file).env_remove(JOIN_VARIABLE),
            None => command.env(JOIN_VARIABLE, &config.join),
        };
        if !config.devices.is_empty() {
            command.arg("--device").arg(&config.devices[index % config.devices.len()]);
        }
        command.envs(config.variables.iter().map(|(name, value)| (name, value)));
        if let Some(spools) = &config.spools {
            command.arg("--spool").arg(spools.join(index.to_string()));
        }
        command.args(&config.arguments);
        let child = command
            .spawn()
            .map_err(|source| LocalActorError::Start { program: config.program.clone(), source })?;
        Ok(Running { child, started: Instant::now() })
    }
}

impl Drop for LocalActors {
    fn drop(&mut self) {
        self.stop(Duration::from_millis(500));
    }
}
