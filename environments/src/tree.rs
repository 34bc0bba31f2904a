//! Programs that are started for one episode, and nothing of which may outlive it.
//!
//! Each has a process group of its own, and a mark in its environment that everything which it starts
//! inherits. When it is ended, its group and, on Linux, whatever bears the mark is killed, sessions of
//! their own included. Should this program be killed itself, a guardian does the same: a shell that waits
//! for the end of a pipe which only this program holds.

use std::{
    env, fs,
    io::{self, Read as _},
    os::unix::process::{CommandExt as _, ExitStatusExt as _},
    process::{Child, ChildStdin, Command, ExitStatus, Stdio},
    sync::{
        Mutex, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};

/// The variable that bears the mark.
const MARK: &str = "ROLLCALL_TREE";

/// Of our own variables, what programs need to find their packages and their temporary files.
pub(crate) const INHERITED: [&str; 3] = ["PATH", "HOME", "TMPDIR"];
/// What makes two processes alike: hashes, encodings, time zone, one thread for linear algebra.
pub(crate) const FIXED: [(&str, &str); 8] = [
    ("PYTHONHASHSEED", "0"),
    ("PYTHONUTF8", "1"),
    ("PYTHONDONTWRITEBYTECODE", "1"),
    ("LC_ALL", "C.UTF-8"),
    ("TZ", "UTC"),
    ("OMP_NUM_THREADS", "1"),
    ("OPENBLAS_NUM_THREADS", "1"),
    ("MKL_NUM_THREADS", "1"),
];

/// Waits for the end of its input, and kills what bears the mark in its first argument.
const GUARDIAN: &str = r#"
trap '' HUP INT TERM
while read -r _; do :; done
tries=0
while [ "$tries" -lt 100 ]; do
  found=$(grep -ls "ROLLCALL_TREE=$1" /proc/[0-9]*/environ 2>/dev/null)
  [ -z "$found" ] && exit 0
  for file in $found; do
    id=${file#/proc/}
    kill -9 "${id%/environ}" 2>/dev/null
  done
  tries=$((tries + 1))
done
"#;

/// How long killed processes may take to go away.
const PARTING: Duration = Duration::from_secs(5);

/// The mark of this program's trees, with a guardian that knows it.
fn mark() -> Result<&'static str, String> {
    static GUARDED: Mutex<Option<(&'static str, Child, ChildStdin)>> = Mutex::new(None);
    static MADE: OnceLock<String> = OnceLock::new();
    let mark = MADE.get_or_init(|| {
        let mut drawn = [0; 16];
        let read = fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut drawn));
        let drawn: String = drawn.iter().map(|byte| format!("{byte:02x}")).collect();
        // Without it, ids and time are all that is needed: nobody gains by guessing.
        let drawn = if read.is_ok() { drawn } else { String::new() };
        format!("{}-{drawn}", std::process::id())
    });
    let mut guarded = GUARDED.lock().unwrap_or_else(PoisonError::into_inner);
    if guarded.as_mut().is_some_and(|(_, child, _)| matches!(child.try_wait(), Ok(None))) {
        return Ok(mark);
    }
    let mut command = Command::new("sh");
    command.args(["-c", GUARDIAN, "rollcall-guardian", mark]).process_group(0).env_clear();
    command.envs(env::var_os("PATH").map(|path| ("PATH", path)));
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child =
        command.spawn().map_err(|error| format!("cannot start sh to guard it: {error}"))?;
    let stdin = child.stdin.take().ok_or("its guardian has no pipe")?;
    *guarded = Some((mark, child, stdin));
    Ok(mark)
}

/// A mark for one tree.
///
/// # Errors
/// There can be no guardian.
pub(crate) fn new_mark() -> Result<String, String> {
    static TREES: AtomicU64 = AtomicU64::new(0);
    Ok(format!("{}.{}", mark()?, TREES.fetch_add(1, Ordering::Relaxed)))
}

/// What every tree's program is started with: next to nothing of our environment, and the mark.
pub(crate) fn prepare(command: &mut Command, mark: &str, variables: &[String]) {
    command.process_group(0).env_clear();
    let inherited = INHERITED.into_iter().chain(variables.iter().map(String::as_str));
    command.envs(inherited.filter_map(|name| Some((name, env::var_os(name)?))));
    command.envs(FIXED).env(MARK, mark);
}

/// Kills all of a tree whose first process is `child`, and waits until it is gone.
pub(crate) fn end(child: &mut Child, mark: &str) {
    let since = Instant::now();
    let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let mut clear = false;
    while since.elapsed() < PARTING {
        if let Some(group) = group {
            // It may be gone already.
            let _ = kill_process_group(group, Signal::KILL);
        }
        let left = marked(mark);
        for id in &left {
            let _ = kill_process(*id, Signal::KILL);
        }
        let _ = child.kill();
        let ended = matches!(child.try_wait(), Ok(Some(_)) | Err(_));
        // Twice, as a process may have forked while it was looked for.
        if left.is_empty() && ended && clear {
            return;
        }
        clear = left.is_empty() && ended;
        if !clear {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The processes that bear a mark; none where there is no `/proc`.
fn marked(mark: &str) -> Vec<Pid> {
    let variable = format!("{MARK}={mark}");
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| {
            let id: i32 = entry.file_name().to_str()?.parse().ok()?;
            let environment = read_start(&entry.path().join("environ")).ok()?;
            let bears = environment.split(|byte| *byte == 0).any(|it| it == variable.as_bytes());
            bears.then(|| Pid::from_raw(id))?
        })
        .collect()
}

/// At most a MiB of a file.
fn read_start(path: &std::path::Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    fs::File::open(path)?.take(1 << 20).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// How a process ended, in words.
pub(crate) fn how(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => format!("killed by signal {signal}"),
        (None, None) => "ended".into(),
    }
}
