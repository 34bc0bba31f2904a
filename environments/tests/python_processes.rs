//! Nothing that a hosted class starts outlives its episode's end, a fault, or the program itself.

#[path = "python/hosted.rs"]
mod hosted;
mod support;

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use environments::{CallPermit, EnvironmentSpec, Recorder};
use hosted::{class, said, started};
use protocol::CallKind;
use serde_json::json;
use support::{call, key, task};

/// Set where this program stands in for an actor that will be killed.
const ROLE: &str = "ROLLCALL_TEST_LEAVES";

fn spec(seconds: u64) -> Option<EnvironmentSpec> {
    class("odd:Odd", json!({"call_seconds": seconds, "determinism": "recorded"}))
}

/// Waits for what another process does, no longer than a minute.
#[track_caller]
fn eventually(what: &str, done: impl Fn() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < Duration::from_secs(60), "{what}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// The processes that wrote their ids to `path`: player, worker, a child, a child with its own session.
fn ids(path: &Path) -> Vec<u32> {
    let text = fs::read_to_string(path).expect("written");
    text.split(' ').map(|id| id.parse().expect("an id")).collect()
}

/// Running, and not a zombie.
fn alive(id: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(" Z"))
}

fn leave(episode: &mut Recorder, path: &Path) -> Vec<u32> {
    let arguments = json!({"path": path}).to_string();
    let row = episode.call(0, &call("leave", &arguments), CallPermit::Run).expect("runs");
    assert_eq!((row.kind, row.observation.as_str()), (CallKind::Ok, "left"));
    let ids = ids(path);
    assert!(ids.iter().all(|id| alive(*id)), "{ids:?}");
    ids
}

fn file(dir: &tempfile::TempDir) -> PathBuf {
    dir.path().join("ids")
}

fn hang() -> protocol::ParsedCall {
    call("misbehave", r#"{"how":"hang"}"#)
}

#[test]
fn a_hang_ends_the_whole_tree_and_its_late_reply_is_never_seen() {
    let Some(spec) = spec(1) else { return };
    let dir = tempfile::tempdir().expect("a directory");
    let task = task("{}");
    let mut episode = started(&spec, &task);
    let left = leave(&mut episode, &file(&dir));
    let fault = episode.call(1, &hang(), CallPermit::Run).expect_err("a fault").to_string();
    assert!(fault.contains("no answer for 1s"), "{fault}");
    // The fault comes back when all of it is killed.
    eventually("all that it started is gone", || !left.iter().any(|id| alive(*id)));
    drop(episode);
    let rows = said(&spec, &[("add", r#"{"n":1}"#.into()), ("add", r#"{"n":1}"#.into())]);
    assert_eq!(rows[1].observation, "2 1 1.0 False");
}

#[test]
fn an_episode_s_end_ends_what_it_left_in_its_group_and_the_host_s_end_the_rest() {
    let Some(spec) = spec(30) else { return };
    let dir = tempfile::tempdir().expect("a directory");
    let task = task("{}");
    let mut episode = started(&spec, &task);
    let left = leave(&mut episode, &file(&dir));
    drop(episode);
    let [player, worker, child, apart] = left[..] else { panic!("four") };
    eventually("the group is gone", || !alive(player) && !alive(child));
    assert!(alive(worker), "the worker waits for another episode");
    drop(spec);
    eventually("nothing is left", || !alive(worker) && !alive(apart));
}

#[test]
fn nothing_outlives_a_program_that_is_killed_in_a_call() {
    if env::var_os(ROLE).is_some() {
        return;
    }
    let Some(_) = spec(30) else { return };
    let dir = tempfile::tempdir().expect("a directory");
    let mut actor = Command::new(env::current_exe().expect("this program"))
        .args(["--exact", "stands_in_for_an_actor", "--nocapture"])
        .env(ROLE, file(&dir))
        .stdout(Stdio::null())
        .spawn()
        .expect("starts");
    eventually("the actor's episode runs", || file(&dir).exists());
    let left = ids(&file(&dir));
    assert!(left.iter().all(|id| alive(*id)));
    actor.kill().expect("killed");
    actor.wait().expect("reaped");
    eventually("its processes are gone", || left.iter().all(|id| !alive(*id)));
}

/// Plays an episode that hangs, when it is told to.
#[test]
fn stands_in_for_an_actor() {
    let Some(path) = env::var_os(ROLE) else { return };
    let spec = spec(600).expect("Python is here");
    let task = task("{}");
    let mut episode = started(&spec, &task);
    let arguments = json!({"path": Path::new(&path)}).to_string();
    episode.call(0, &call("leave", &arguments), CallPermit::Run).expect("runs");
    drop(episode.call(1, &hang(), CallPermit::Run));
}

#[test]
fn no_more_processes_run_than_the_section_allows() {
    let Some(spec) = class("odd:Odd", json!({"processes": 2})) else { return };
    let report = environments::probe(&spec, &task("{}"), 0).expect("no fault");
    assert_eq!(report.isolated, Some(true));
    let Some(one) = class("odd:Odd", json!({"processes": 1})) else { return };
    let report = environments::probe(&one, &task("{}"), 0).expect("no fault");
    assert_eq!(report.isolated, None, "two cannot be compared");
    let playing = std::sync::atomic::AtomicI64::new(0);
    thread::scope(|scope| {
        for seed in 0..6 {
            let (spec, playing) = (&spec, &playing);
            scope.spawn(move || {
                let task = task("{}");
                let opened = spec.open().expect("opens");
                let mut episode =
                    Recorder::start(opened, key(&task, seed), spec.limits()).expect("resets");
                let others = playing.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                assert!(others < 2, "{others} others");
                for turn in 0..5 {
                    episode.call(turn, &call("add", r#"{"n":1}"#), CallPermit::Run).expect("runs");
                }
                playing.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                episode.finish().expect("scores");
            });
        }
    });
}

/// Names a folder where this program stands in for an actor with many episodes.
const MANY: &str = "ROLLCALL_TEST_MANY";
const EPISODES: u64 = 64;

/// Another program, which ends with the test.
struct Actor(Child);

impl Drop for Actor {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// The KiB that processes hold together, shared pages in shares.
fn memory(ids: impl Iterator<Item = u32>) -> u64 {
    ids.filter_map(|id| {
        let text = fs::read_to_string(format!("/proc/{id}/smaps_rollup")).ok()?;
        let line = text.lines().find(|line| line.starts_with("Pss:"))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok()
    })
    .sum()
}

/// Every process below one.
fn below(root: u32) -> Vec<u32> {
    let parent = |id: u32| -> Option<u32> {
        let stat = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
        stat.rsplit(')').next()?.split_whitespace().nth(1)?.parse().ok()
    };
    let all = fs::read_dir("/proc").expect("Linux").flatten();
    let all: Vec<u32> = all.filter_map(|it| it.file_name().to_str()?.parse().ok()).collect();
    let mut found = vec![root];
    let mut place = 0;
    while let Some(above) = found.get(place).copied() {
        found.extend(all.iter().copied().filter(|id| parent(*id) == Some(above)));
        place += 1;
    }
    found.split_off(1)
}

#[test]
fn sixty_four_episodes_at_once_are_bounded_and_leave_nothing_when_the_actor_is_killed() {
    if env::var_os(MANY).is_some() || !Path::new("/proc/self/smaps_rollup").exists() {
        return;
    }
    let Some(_) = spec(30) else { return };
    let dir = tempfile::tempdir().expect("a directory");
    let actor = Command::new(env::current_exe().expect("this program"))
        .args(["--exact", "stands_in_for_an_actor_with_many_episodes", "--nocapture"])
        .env(MANY, dir.path())
        .stdout(Stdio::null())
        .spawn();
    let mut actor = Actor(actor.expect("starts"));
    let file = |episode: u64| dir.path().join(episode.to_string());
    let running = || (0..EPISODES).filter(|episode| file(*episode).exists()).count() as u64;
    let started = Instant::now();
    while running() < EPISODES && started.elapsed() < Duration::from_secs(300) {
        thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(running(), EPISODES, "episodes run");
    println!("{EPISODES} episodes: all run after {:.1?}", started.elapsed());
    let mut tree = below(actor.0.id());
    // Sessions of their own, which their player may not be above of.
    tree.extend((0..EPISODES).flat_map(|episode| ids(&file(episode))));
    tree.sort_unstable();
    tree.dedup();
    // A guardian, a worker, a player and what each left.
    assert!(tree.len() as u64 >= 5 * EPISODES, "{} processes", tree.len());
    let held = memory(tree.iter().copied()) / 1024;
    println!("{EPISODES} episodes: {} processes, {held} MiB", tree.len());
    assert!(held < 32 * EPISODES, "{held} MiB");
    actor.0.kill().expect("killed");
    actor.0.wait().expect("reaped");
    eventually("its processes are gone", || !tree.iter().any(|id| alive(*id)));
    // What the guardians leave is reaped by whoever takes orphans.
    let there = |id: &u32| Path::new(&format!("/proc/{id}")).exists();
    eventually("no zombie is left", || !tree.iter().any(there));
}

/// Plays many episodes that hang, when it is told to.
#[test]
fn stands_in_for_an_actor_with_many_episodes() {
    let Some(folder) = env::var_os(MANY) else { return };
    let spec = spec(600).expect("Python is here");
    let play = |number: u64| {
        let task = task("{}");
        let opened = spec.open().expect("opens");
        let mut episode =
            Recorder::start(opened, key(&task, number), spec.limits()).expect("resets");
        let arguments = json!({"path": Path::new(&folder).join(number.to_string())}).to_string();
        episode.call(0, &call("leave", &arguments), CallPermit::Run).expect("runs");
        drop(episode.call(1, &hang(), CallPermit::Run));
    };
    thread::scope(|scope| {
        for number in 0..EPISODES {
            let play = &play;
            scope.spawn(move || play(number));
        }
    });
}

#[test]
fn episodes_run_side_by_side_and_leave_no_process() {
    let Some(spec) = spec(60) else { return };
    let players: Vec<u32> = thread::scope(|scope| {
        let play = |seed| {
            let spec = &spec;
            move || {
                let task = task("{}");
                let environment = spec.open().expect("opens");
                let mut episode =
                    Recorder::start(environment, key(&task, seed), spec.limits()).expect("resets");
                for turn in 0..20u32 {
                    let row = episode
                        .call(turn, &call("add", r#"{"n":1}"#), CallPermit::Run)
                        .expect("runs");
                    assert!(row.observation.starts_with(&format!("{} ", turn + 1)));
                }
                let row = episode
                    .call(20, &call("misbehave", r#"{"how":"process"}"#), CallPermit::Run)
                    .expect("runs");
                let id = row.observation.parse().expect("an id");
                episode.finish().expect("scores");
                id
            }
        };
        let threads: Vec<_> = (0..16).map(|seed| scope.spawn(play(seed))).collect();
        threads.into_iter().map(|thread| thread.join().expect("plays")).collect()
    });
    assert_eq!(players.len(), 16);
    drop(spec);
    assert!(players.iter().all(|id| !Path::new(&format!("/proc/{id}")).exists()), "no zombie");
}
