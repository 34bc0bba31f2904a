//! The programs under a killer: learner and actors are killed (SIGKILL) at random instants and started again
//! with the very same commands, until the run is complete.

use std::{
    net::UdpSocket,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::{Demo, finish, programs, start};

/// No round takes longer.
const PATIENCE: Duration = Duration::from_secs(600);

/// Random numbers of a seed (splitmix64).
#[derive(Clone, Debug)]
pub struct Dice(pub u64);

impl Dice {
    /// From `low` to below `high`.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        low + (z ^ (z >> 31)) % (high - low).max(1)
    }
}

/// What came of one run under the killer.
#[derive(Clone, Debug)]
pub struct Round {
    /// Learners killed.
    pub learner_kills: u64,
    /// Actors killed.
    pub actor_kills: u64,
    /// The last line of the learner that completed the run.
    pub end: Value,
}

/// A run with two actors elsewhere, each with a spool, on a port and an identity that stay.
struct Stage<'a> {
    demo: &'a Demo,
    dir: PathBuf,
    port: u16,
    learner: Option<Child>,
    actors: [Option<Child>; 2],
}

impl Stage<'_> {
    fn learner(&self) -> Child {
        let mut command = Command::new(&programs().learner);
        command.arg("train").arg(self.demo.write()).arg("--output").arg(self.dir.join("run"));
        command.args(["--device", "cpu", "--json", "--resume", "--listen"]);
        command.arg(format!("127.0.0.1:{}", self.port));
        command.arg("--identity").arg(self.dir.join("identity"));
        let log = std::fs::File::options().create(true).append(true).open(self.dir.join("out"));
        command.stdout(log.expect("a log")).stderr(self.log("learner.log")).stdin(Stdio::null());
        command.spawn().expect("the learner starts")
    }

    fn log(&self, name: &str) -> std::fs::File {
        let log = std::fs::File::options().create(true).append(true).open(self.dir.join(name));
        log.expect("a log")
    }

    fn actor(&self, number: usize) -> Option<Child> {
        let join = self.dir.join("identity/join");
        // Before the learner has said where it is, nobody can join.
        join.is_file().then(|| {
            let mut command = Command::new(&programs().actor);
            command.args(["join", "--device", "cpu", "--slots", "8", "--join-file"]).arg(join);
            command.arg("--model").arg(self.demo.recipe["model"]["path"].as_str().expect("a path"));
            command.arg("--spool").arg(self.dir.join(format!("spool-{number}")));
            let log = self.log(&format!("actor-{number}.log"));
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
            command.spawn().expect("the actor starts")
        })
    }

    /// The status of the learner, if it ended.
    fn ended(&mut self) -> Option<std::process::ExitStatus> {
        self.learner.as_mut()?.try_wait().expect("a child")
    }
}

impl Drop for Stage<'_> {
    fn drop(&mut self) {
        for child in self.learner.iter_mut().chain(self.actors.iter_mut().flatten()) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn kill(child: &mut Option<Child>) -> bool {
    let Some(mut child) = child.take() else { return false };
    let running = matches!(child.try_wait(), Ok(None));
    let _ = child.kill();
    let _ = child.wait();
    running
}

/// The adapter's digest of an undisturbed run of a demo, with local actors.
///
/// # Panics
/// When it fails.
pub fn undisturbed(demo: &Demo) -> Value {
    let mut command = Command::new(&programs().learner);
    command.arg("train").arg(demo.write()).arg("--output").arg(demo.dir.path().join("quiet"));
    command.args(["--device", "cpu", "--json", "--local-actors", "1"]);
    let finished = finish(start(&mut command));
    assert!(finished.status.success(), "{}{}", finished.stdout, finished.stderr);
    let line = finished.stdout.lines().last().expect("some output");
    serde_json::from_str(line).expect("JSON")
}

/// One run in `dir` with up to `kills` kills, most seconds apart at most `pause`. Returns what came of it
/// once `learner audit` holds.
///
/// # Panics
/// When a program fails by itself, or the run does not end.
pub fn round(demo: &Demo, dir: &Path, kills: u64, pause: Duration, dice: &mut Dice) -> Round {
    std::fs::create_dir_all(dir).expect("created");
    let free = UdpSocket::bind("127.0.0.1:0").and_then(|socket| socket.local_addr());
    let port = free.expect("a free port").port();
    let dir = dir.to_owned();
    let mut stage = Stage { demo, dir: dir.clone(), port, learner: None, actors: [None, None] };
    let (mut learner_kills, mut actor_kills) = (0, 0);
    let began = Instant::now();
    let longest = u64::try_from(pause.as_millis()).unwrap_or(u64::MAX).max(2);
    let mut next = Instant::now() + Duration::from_millis(dice.between(1, longest));
    loop {
        assert!(began.elapsed() < PATIENCE, "the run does not end; see {}", dir.display());
        if let Some(status) = stage.ended() {
            let log = || std::fs::read_to_string(dir.join("learner.log")).unwrap_or_default();
            assert!(status.success(), "the learner ended with {status}: {}", log());
            break;
        }
        if stage.learner.is_none() {
            stage.learner = Some(stage.learner());
        }
        for number in 0..2 {
            let over = stage.actors[number].as_mut().and_then(|it| it.try_wait().ok().flatten());
            if stage.actors[number].is_none() || over.is_some() {
                stage.actors[number] = stage.actor(number);
            }
        }
        if learner_kills + actor_kills < kills && Instant::now() >= next {
            match dice.between(0, 4) {
                0 | 1 => learner_kills += u64::from(kill(&mut stage.learner)),
                victim => {
                    let victim = &mut stage.actors[victim as usize - 2];
                    actor_kills += u64::from(kill(victim));
                }
            }
            next = Instant::now() + Duration::from_millis(dice.between(1, longest));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(stage);
    let out = std::fs::read_to_string(dir.join("out")).expect("there");
    let end: Value = serde_json::from_str(out.lines().last().expect("a line")).expect("JSON");
    let mut audit = Command::new(&programs().learner);
    let audited = finish(start(audit.arg("audit").arg(dir.join("run"))));
    assert!(audited.status.success(), "{}{}", audited.stdout, audited.stderr);
    Round { learner_kills, actor_kills, end }
}
