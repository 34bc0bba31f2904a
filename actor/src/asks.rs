//! What environments are asked for: on the thread that asks, or, where an environment may wait for
//! something outside this program, on threads of their own, so that a slow tool holds up no other episode.

use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Receiver, Sender},
    },
    thread,
    time::Duration,
};

use environments::{EnvironmentSpec, Recorder, Recording};
use protocol::{CallPermit, Lease, ParsedCall};

/// Most threads. What comes in while all of them wait for tools waits for one of them.
const MOST_THREADS: usize = 128;

/// Something to do with an episode's environment.
pub(crate) enum Ask {
    /// Open one and reset it.
    Start(EnvironmentSpec, Box<Lease>),
    /// Run the calls of a turn, or take its answer.
    Turn {
        recorder: Box<Recorder>,
        turn: u32,
        calls: Vec<(ParsedCall, CallPermit)>,
        answer: Option<String>,
    },
    /// Ask for the score and close it.
    Finish(Box<Recorder>),
    /// Close it: nobody wants its score.
    Close(Option<Box<Recorder>>),
}

/// What came of it.
pub(crate) enum Told {
    Started(Box<Recorder>),
    Called { recorder: Box<Recorder>, observations: Vec<String>, done: bool },
    Finished(Box<Recording>),
    Closed,
}

impl Ask {
    /// Does it.
    ///
    /// # Errors
    /// A fault, one line.
    pub(crate) fn perform(self) -> Result<Told, String> {
        match self {
            Self::Start(environment, lease) => {
                let opened = environment.open().map_err(|e| e.to_string())?;
                Recorder::reset(opened, &lease, environment.limits())
                    .map(|recorder| Told::Started(Box::new(recorder)))
                    .map_err(|e| e.to_string())
            }
            Self::Turn { mut recorder, turn, calls, answer } => {
                let mut observations = Vec::with_capacity(calls.len());
                let mut done = false;
                for (call, permit) in &calls {
                    let row = recorder.call(turn, call, *permit).map_err(|e| e.to_string())?;
                    done = row.done;
                    observations.push(row.observation.clone());
                }
                if let Some(answer) = answer {
                    recorder.answer(turn, &answer).map_err(|e| e.to_string())?;
                }
                Ok(Told::Called { recorder, observations, done })
            }
            Self::Finish(recorder) => recorder
                .finish()
                .map(|recording| Told::Finished(Box::new(recording)))
                .map_err(|e| e.to_string()),
            Self::Close(recorder) => {
                drop(recorder);
                Ok(Told::Closed)
            }
        }
    }
}

/// Says that nobody waits for an answer any more.
pub(crate) type GivenUp = Arc<AtomicBool>;

type Answer<K> = (K, Result<Told, String>);

struct Job<K> {
    sequence: K,
    ask: Ask,
    given_up: GivenUp,
}

struct Queue<K> {
    jobs: VecDeque<Job<K>>,
    threads: usize,
    idle: usize,
    ended: bool,
}

struct Shared<K> {
    queue: Mutex<Queue<K>>,
    more: Condvar,
}

impl<K> Shared<K> {
    fn queue(&self) -> MutexGuard<'_, Queue<K>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The life of a thread.
    fn serve(&self, tell: &Sender<Answer<K>>) {
        let mut queue = self.queue();
        while !queue.ended {
            let Some(Job { sequence, ask, given_up }) = queue.jobs.pop_front() else {
                queue.idle += 1;
                queue = self.more.wait(queue).unwrap_or_else(PoisonError::into_inner);
                queue.idle -= 1;
                continue;
            };
            drop(queue);
            if given_up.load(Ordering::Relaxed) {
                drop(ask);
            } else {
                let answer = catch_unwind(AssertUnwindSafe(|| ask.perform()));
                let answer = answer.unwrap_or_else(|_| Err("the environment panicked".into()));
                // A recorder that nobody takes back is closed here.
                if !given_up.load(Ordering::Relaxed) {
                    drop(tell.send((sequence, answer)));
                }
            }
            queue = self.queue();
        }
        queue.threads -= 1;
    }
}

/// Threads that ask environments, started as they are needed. Episodes are told apart by a `K`.
pub(crate) struct Asks<K> {
    shared: Arc<Shared<K>>,
    tell: Sender<Answer<K>>,
    told: Receiver<Answer<K>>,
}

impl<K: Send + 'static> Asks<K> {
    pub(crate) fn new() -> Self {
        let (tell, told) = mpsc::channel();
        let queue = Queue { jobs: VecDeque::new(), threads: 0, idle: 0, ended: false };
        Self {
            shared: Arc::new(Shared { queue: Mutex::new(queue), more: Condvar::new() }),
            tell,
            told,
        }
    }

    /// Asks for `sequence`. The answer comes from [`Asks::told`], unless it is given up.
    ///
    /// # Errors
    /// There is no thread to do it, and none to be had.
    pub(crate) fn ask(&self, sequence: K, ask: Ask) -> Result<GivenUp, String> {
        let given_up = GivenUp::default();
        let mut queue = self.shared.queue();
        if queue.idle <= queue.jobs.len() && queue.threads < MOST_THREADS {
            let (shared, tell) = (self.shared.clone(), self.tell.clone());
            let started = thread::Builder::new()
                .name("environment".into())
                .spawn(move || shared.serve(&tell));
            match started {
                Ok(_) => queue.threads += 1,
                Err(_) if queue.threads > 0 => {}
                Err(error) => return Err(format!("no thread for the environment: {error}")),
            }
        }
        queue.jobs.push_back(Job { sequence, ask, given_up: given_up.clone() });
        drop(queue);
        self.shared.more.notify_one();
        Ok(given_up)
    }

    /// An answer, if there is one within `patience`.
    pub(crate) fn told(&self, patience: Duration) -> Option<Answer<K>> {
        self.told.recv_timeout(patience).ok()
    }
}

impl<K> Drop for Asks<K> {
    fn drop(&mut self) {
        let mut queue = self.shared.queue();
        queue.ended = true;
        queue.jobs.clear();
        drop(queue);
        self.shared.more.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, time::Instant};

    use environments::{
        Blueprint, Description, Determinism, Environment, Fault, Limits, Reply, Score, SpecError,
        ToolSpec,
    };
    use protocol::{Digest, LeaseId, NoiseKey, PolicyDigest, RunId, Sampling, Split, Task};
    use serde_json::{Map, Value, json};

    use super::*;

    /// Takes its time.
    #[derive(Debug)]
    struct Slow;

    struct Game(Description);

    impl Blueprint for Slow {
        fn name(&self) -> &str {
            "slow"
        }
        fn version(&self) -> String {
            "slow-1".into()
        }
        fn settings(&self) -> Map<String, Value> {
            Map::new()
        }
        fn check_task(&self, _: &Task) -> Result<(), SpecError> {
            Ok(())
        }
        fn open(&self) -> Result<Box<dyn Environment>, Fault> {
            Ok(Box::new(Game(Description {
                name: "slow".into(),
                version: "slow-1".into(),
                tools: vec![ToolSpec::new("wait", "Waits.", json!({"type": "object"}))],
                milestones: Vec::new(),
                reward_range: 0.0..=1.0,
                determinism: Determinism::Deterministic,
                images: false,
                answers: false,
            })))
        }
        fn score(&self, _: &BTreeSet<&str>) -> Option<Score> {
            None
        }
        fn waits(&self) -> bool {
            true
        }
    }

    impl Environment for Game {
        fn describe(&self) -> &Description {
            &self.0
        }
        fn reset(&mut self, task: &Task, _: u64) -> Result<Option<String>, Fault> {
            match task.id.as_str() {
                "panics" => panic!("on purpose"),
                "long" => thread::sleep(Duration::from_secs(1)),
                _ => thread::sleep(Duration::from_millis(200)),
            }
            Ok(None)
        }
        fn call(&mut self, _: &str, _: &Map<String, Value>) -> Result<Reply, Fault> {
            Ok(Reply { result: Ok(String::new()), reached: Vec::new(), done: false })
        }
        fn score(&mut self) -> Result<Score, Fault> {
            Ok(Score { reward: 0.0, success: false, milestones: Default::default() })
        }
    }

    fn start(task: &str) -> Ask {
        let (run, id) = (RunId(Digest::of(b"")), LeaseId { group: 0, generation: 0 });
        let task = Task {
            id: task.into(),
            prompt: String::new(),
            fields: "{}".into(),
            split: Split::Train,
        };
        let lease = Lease {
            run,
            id,
            attempt: 0,
            task,
            seed: 0,
            noise_key: NoiseKey::derive(&run, id),
            policy: PolicyDigest(Digest::of(b"")),
            sampling: Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 },
            deadline_ms: 0,
        };
        Ask::Start(EnvironmentSpec::custom(Arc::new(Slow), Limits::default()), Box::new(lease))
    }

    #[test]
    fn slow_environments_are_asked_side_by_side() {
        let asks = Asks::new();
        let started = Instant::now();
        for sequence in 0..16 {
            asks.ask(sequence, start("short")).expect("a thread");
        }
        let told: BTreeSet<i32> = (0..16)
            .map(|_| {
                let (sequence, told) = asks.told(Duration::from_secs(30)).expect("an answer");
                assert!(matches!(told, Ok(Told::Started(_))));
                sequence
            })
            .collect();
        assert_eq!(told, (0..16).collect());
        // One after another they would take 3.2 seconds.
        assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    }

    #[test]
    fn nobody_is_told_of_what_was_given_up_and_a_panic_is_a_fault() {
        let asks = Asks::new();
        let given_up = asks.ask(1, start("long")).expect("a thread");
        asks.ask(2, start("panics")).expect("a thread");
        given_up.store(true, Ordering::Relaxed);
        let (sequence, told) = asks.told(Duration::from_secs(30)).expect("an answer");
        assert_eq!((sequence, told.err()), (2, Some("the environment panicked".into())));
        assert!(asks.told(Duration::from_secs(2)).is_none());
        asks.ask(3, start("short")).expect("a thread");
        assert!(asks.told(Duration::from_secs(30)).is_some_and(|(sequence, _)| sequence == 3));
    }
}
