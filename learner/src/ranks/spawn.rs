//! `--nproc-per-node N`: this process starts N ranks of itself on this machine and waits for them.

use std::{
    os::unix::process::ExitStatusExt as _,
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use terminal::{Failure, Interrupt};

use super::{
    discovery::{OWN, RENDEZVOUS},
    rendezvous::SECRET,
};

/// Set for ranks that are to end when their standard input does: when their parent is gone.
const PARENT: &str = "ROLLCALL_RANK_PARENT";
/// How many threads a process computes with on the CPU.
const THREADS: &str = "RAYON_NUM_THREADS";
/// What rank 0's failure has to reach the terminal before the others are ended: they own no files, and
/// would only say the same.
const LAST_WORDS: Duration = Duration::from_millis(300);
/// How long the other ranks keep a failure to themselves that rank 0 may be about to say.
const TURN: Duration = Duration::from_secs(2);
/// What the other ranks have to end by themselves once one has failed.
const GRACE: Duration = Duration::from_secs(15);

struct Ranks(Vec<Child>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.0 {
            if !matches!(child.try_wait(), Ok(Some(_))) {
                drop(child.kill());
                drop(child.wait());
            }
        }
    }
}

/// Starts `count` ranks with this process's own arguments and waits until all have ended.
///
/// # Errors
/// A rank cannot be started, or ended badly: the exit status of the first that did.
pub(super) fn run(count: usize, interrupt: &Interrupt) -> Result<(), Failure> {
    let program = std::env::current_exe()
        .map_err(|e| Failure::Fault(format!("cannot find this program again: {e}")))?;
    let mut secret = [0u8; 16];
    getrandom::fill(&mut secret).map_err(Failure::fault)?;
    let secret: String = secret.iter().map(|byte| format!("{byte:02x}")).collect();
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .map_err(|e| Failure::Fault(format!("no port on the loopback interface: {e}")))?
        .port();
    // Ranks that compute on the CPU shall not get in each other's way.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = (cores / count.max(1)).max(1).to_string();
    let mut ranks = Ranks(Vec::new());
    for rank in 0..count {
        let number = rank.to_string();
        let mut command = Command::new(&program);
        command
            .args(std::env::args_os().skip(1))
            .env(OWN[0], &number)
            .env(OWN[1], count.to_string())
            .env(OWN[2], &number)
            .env(RENDEZVOUS, format!("127.0.0.1:{port}"))
            .env(SECRET, &secret)
            .env(PARENT, "1")
            .stdin(Stdio::piped());
        if std::env::var_os(THREADS).is_none() {
            command.env(THREADS, &threads);
        }
        let child = command
            .spawn()
            .map_err(|e| Failure::Fault(format!("cannot start rank {rank}: {e}")))?;
        ranks.0.push(child);
    }
    wait(&mut ranks, interrupt)
}

fn wait(ranks: &mut Ranks, interrupt: &Interrupt) -> Result<(), Failure> {
    let mut ended: Vec<Option<ExitStatus>> = vec![None; ranks.0.len()];
    let mut failed: Option<(usize, ExitStatus, Instant)> = None;
    let mut killed: Option<(usize, i32)> = None;
    let mut told = false;
    loop {
        for (rank, child) in ranks.0.iter_mut().enumerate() {
            if ended[rank].is_none() {
                ended[rank] = child.try_wait().map_err(Failure::fault)?;
                if let Some(signal) = ended[rank].and_then(|status| status.signal()) {
                    killed.get_or_insert((rank, signal));
                }
                if let Some(status) = ended[rank]
                    && !status.success()
                    && failed.is_none()
                {
                    failed = Some((rank, status, Instant::now()));
                }
            }
        }
        if ended.iter().all(Option::is_some) {
            break;
        }
        if interrupt.raised() && !told {
            // Ctrl-C reaches them by themselves; SIGTERM reaches only this process.
            told = true;
            for child in &ranks.0 {
                if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
                    let _ = kill_process(pid, Signal::TERM);
                }
            }
        }
        let grace = match ended.first() {
            Some(Some(status)) if !status.success() => LAST_WORDS,
            _ => GRACE,
        };
        if failed.is_some_and(|(_, _, since)| since.elapsed() > grace) {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    // The others end because of it, and may have been seen to end before it.
    if let Some((rank, signal)) = killed {
        return Err(Failure::Fault(format!(
            "rank {rank} was ended by signal {signal}: the run ends on all ranks"
        )));
    }
    match failed {
        None => Ok(()),
        Some((_, status, _)) => {
            // It has said why.
            let status = status.code().and_then(|code| u8::try_from(code).ok());
            Err(Failure::Said(status.unwrap_or(1)))
        }
    }
}

/// What a rank says at its end: where it is not the first of those that `run` started, only what rank 0
/// has not said, as it says every mistake in a recipe.
///
/// # Errors
/// That of `result`.
pub fn in_turn<T>(result: Result<T, Failure>) -> Result<T, Failure> {
    let other = has_parent() && std::env::var(OWN[0]).is_ok_and(|rank| rank != "0");
    if other && result.as_ref().is_err_and(|failure| !matches!(failure, Failure::Said(_))) {
        std::thread::sleep(TURN);
    }
    result
}

/// Whether this process was started by [`run`].
pub(super) fn has_parent() -> bool {
    std::env::var_os(PARENT).is_some()
}

/// In a rank that `--nproc-per-node` started: ends it when its parent is gone, however it went.
pub(super) fn follow_parent() {
    if !has_parent() {
        return;
    }
    std::thread::spawn(|| {
        let ended = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        drop(ended);
        std::process::exit(1);
    });
}
