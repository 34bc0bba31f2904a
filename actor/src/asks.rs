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
use policy::engine::SequenceId;
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

type Answer = (SequenceId, Result<Told, String>);

struct Job {
    sequence: SequenceId,
    ask: Ask,
    given_up: GivenUp,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
    ended: bool,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    more: Condvar,
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The life of a thread.
    fn serve(&self, tell: &Sender<Answer>) {
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

/// Threads that ask environments, started as they are needed.
pub(crate) struct Asks {
    shared: Arc<Shared>,
    tell: Sender<Answer>,
    told: Receiver<Answer>,
}

impl Asks {
    pub(crate) fn new() -> Self {
        let (tell, told) = mpsc::channel();
        Self { shared: Arc::default(), tell, told }
    }

    /// Asks for `sequence`. The answer comes from [`Asks::told`], unless it is given up.
    ///
    /// # Errors
    /// There is no thread to do it, and none to be had.
    pub(crate) fn ask(&self, sequence: SequenceId, ask: Ask) -> Result<GivenUp, String> {
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
    pub(crate) fn told(&self, patience: Duration) -> Option<Answer> {
        self.told.recv_timeout(patience).ok()
    }
}

impl Drop for Asks {
    fn drop(&mut self) {
        let mut queue = self.shared.queue();
        queue.ended = true;
        queue.jobs.clear();
        drop(queue);
        self.shared.more.notify_all();
    }
}
