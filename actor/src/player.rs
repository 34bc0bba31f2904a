//! Plays leased episodes: environment, recorder, chat format and generation engine together.
//!
//! No network, and no clock but for [`environments::Limits::episode_seconds`]: leases go in, episodes come
//! out, and the same leases in the same order give the same bytes. The rules of an episode are
//! [`EpisodeScript`]'s; this file only carries them out.
//!
//! An episode is sampled or asks its environment (`asks`), never both. While some wait for slow
//! tools, the others are sampled; which is which changes no episode.

use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use environments::{EnvironmentSpec, Recorder, Recording};
use policy::{
    chat::ChatFormat,
    engine::{Engine, Generated, SequenceId},
    episode_script::{EpisodeLimits, EpisodeScript},
    vision::{PromptImages, episode_prompt},
};
use protocol::{Episode, EpisodeEnd, FinishReason, Image, Lease, LeaseAttempt, LeaseId, Span};

use crate::asks::{Ask, Asks, GivenUp, Told};

/// How long a step waits for environments where there is nothing to sample: as long as the thread that
/// plays may be deaf to commands.
const LISTENING: Duration = Duration::from_millis(20);

/// What became of a lease.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// Played to its end.
    Played {
        /// Which issue of the lease.
        lease: LeaseAttempt,
        /// The episode.
        episode: Box<Episode>,
    },
    /// Could not be played: nothing of it may count.
    Failed {
        /// Which issue of the lease.
        lease: LeaseAttempt,
        /// Why, one line.
        reason: String,
    },
}

/// One episode in flight.
struct Playing {
    lease: Lease,
    script: EpisodeScript,
    stage: Stage,
    tokens: Vec<u32>,
    loss_mask: Vec<u8>,
    spans: Vec<Span>,
    since: Instant,
}

/// Who is at work on an episode.
enum Stage {
    /// The engine. Nothing while it is handed over.
    Sampling(Option<Box<Recorder>>),
    /// The environment, on another thread, before the next of these steps.
    Asking(GivenUp, Step),
}

/// What is done with what an environment says.
#[derive(Clone, Copy)]
enum Step {
    Start,
    /// The turn was finished so, and the episode has come to this end, if to any.
    Turn(FinishReason, Option<EpisodeEnd>),
    Finish(EpisodeEnd),
}

/// Plays up to as many episodes as it is given, in lockstep on one engine.
pub struct Player {
    engine: Engine,
    format: Arc<ChatFormat>,
    images: Option<PromptImages>,
    environment: EnvironmentSpec,
    limits: EpisodeLimits,
    playing: BTreeMap<SequenceId, Playing>,
    asks: Asks<SequenceId>,
    sampled: u64,
}

impl Player {
    /// A player of one run's episodes.
    pub fn new(
        engine: Engine,
        format: Arc<ChatFormat>,
        environment: EnvironmentSpec,
        limits: EpisodeLimits,
    ) -> Self {
        Self {
            engine,
            format,
            images: None,
            environment,
            limits,
            playing: BTreeMap::new(),
            asks: Asks::new(),
            sampled: 0,
        }
    }

    /// The same, reading the images that the environment shows.
    #[must_use]
    pub fn with_images(mut self, images: Option<PromptImages>) -> Self {
        self.images = images;
        self
    }

    /// The engine, for its adapters.
    pub fn engine(&mut self) -> &mut Engine {
        &mut self.engine
    }

    /// Episodes in flight.
    pub fn in_flight(&self) -> usize {
        self.playing.len()
    }

    /// Ids sampled so far.
    pub fn sampled(&self) -> u64 {
        self.sampled
    }

    /// Starts a leased episode. Its policy must be in the engine.
    ///
    /// # Errors
    /// Why it cannot be played, one line. What an environment that waits has to say comes with a step.
    pub fn start(&mut self, lease: Lease) -> Result<(), String> {
        // First of all, so that its policy stays in the engine.
        let sequence = self
            .engine
            .open(lease.policy, lease.noise_key, lease.sampling)
            .map_err(|e| e.to_string())?;
        let ask = Ask::Start(self.environment.clone(), Box::new(lease.clone()));
        let playing = Playing {
            lease,
            script: EpisodeScript::new(self.limits),
            stage: Stage::Sampling(None),
            tokens: Vec::new(),
            loss_mask: Vec::new(),
            spans: Vec::new(),
            since: Instant::now(),
        };
        self.playing.insert(sequence, playing);
        match self.ask(sequence, ask, Step::Start) {
            Some(Outcome::Failed { reason, .. }) => Err(reason),
            _ => Ok(()),
        }
    }

    /// Asks the environment of an episode, on this thread where that takes no time. Returns what became of
    /// the episode, if that ended it.
    fn ask(&mut self, sequence: SequenceId, ask: Ask, step: Step) -> Option<Outcome> {
        if !self.environment.waits() {
            return self.told(sequence, ask.perform(), step);
        }
        match self.asks.ask(sequence, ask) {
            Ok(given_up) => {
                let playing = self.playing.get_mut(&sequence)?;
                playing.stage = Stage::Asking(given_up, step);
                None
            }
            Err(reason) => self.failed(sequence, reason),
        }
    }

    /// Goes on with an episode after its environment has answered. Returns what became of it, if it ended.
    fn told(
        &mut self,
        sequence: SequenceId,
        told: Result<Told, String>,
        step: Step,
    ) -> Option<Outcome> {
        let next = match (step, told) {
            (_, Err(reason)) => Err(reason),
            (Step::Start, Ok(Told::Started(recorder))) => {
                self.begin(sequence, recorder).map(|()| None)
            }
            (Step::Turn(finish, end), Ok(Told::Called { recorder, observations, done })) => {
                self.answered(sequence, recorder, (finish, end), (&observations, done))
            }
            (Step::Finish(end), Ok(Told::Finished(recording))) => {
                return self.finished(sequence, *recording, end);
            }
            _ => Err("its environment answered something else than it was asked".into()),
        };
        match next {
            Ok(None) => None,
            Ok(Some((ask, step))) => self.ask(sequence, ask, step),
            Err(reason) => self.failed(sequence, reason),
        }
    }

    /// Goes on after the calls of a turn. Returns what the environment is asked for at the episode's end.
    fn answered(
        &mut self,
        sequence: SequenceId,
        recorder: Box<Recorder>,
        (finish, end): (FinishReason, Option<EpisodeEnd>),
        (observations, done): (&[String], bool),
    ) -> Result<Option<(Ask, Step)>, String> {
        let end = match end {
            Some(end) => Some(end),
            None => self.observe(sequence, finish, observations, done)?,
        };
        if let Some(end) = end {
            return Ok(Some((Ask::Finish(recorder), Step::Finish(end))));
        }
        let playing = self.playing.get_mut(&sequence).ok_or("its episode is gone")?;
        playing.stage = Stage::Sampling(Some(recorder));
        Ok(None)
    }

    fn failed(&mut self, sequence: SequenceId, reason: String) -> Option<Outcome> {
        self.engine.close(sequence);
        let playing = self.playing.remove(&sequence)?;
        Some(Outcome::Failed { lease: LeaseAttempt::from(&playing.lease), reason })
    }

    /// Renders the prompt after a reset and lets the engine sample.
    fn begin(&mut self, sequence: SequenceId, recorder: Box<Recorder>) -> Result<(), String> {
        let playing = self.playing.get_mut(&sequence).ok_or("its episode is gone")?;
        let shown: Vec<&Image> = recorder.images().iter().collect();
        let (task_prompt, reader) = (&playing.lease.task.prompt, self.images.as_ref());
        let prompt =
            episode_prompt(&self.format, reader, task_prompt, recorder.reset_text(), &shown)
                .map_err(|e| e.to_string())?;
        let placed = match reader {
            Some(reader) => reader.place(&prompt, &shown).map_err(|e| e.to_string())?,
            None => Vec::new(),
        };
        let budget = playing.script.budget();
        self.engine
            .append_images(sequence, &prompt, placed)
            .and_then(|()| self.engine.generate(sequence, budget, self.format.stop_ids()))
            .map_err(|e| e.to_string())?;
        playing.loss_mask = vec![0; prompt.len()];
        playing.tokens = prompt;
        playing.stage = Stage::Sampling(Some(recorder));
        Ok(())
    }

    /// Gives up an episode, leaving no trace of it. Unknown leases are none of its business.
    pub fn abandon(&mut self, lease: LeaseId) {
        let found = self.playing.iter().find(|(_, p)| p.lease.id == lease);
        if let Some(sequence) = found.map(|(sequence, _)| *sequence) {
            self.give_up(sequence);
        }
    }

    /// Ends an episode wherever it is, and returns its lease.
    fn give_up(&mut self, sequence: SequenceId) -> Option<LeaseAttempt> {
        self.engine.close(sequence);
        let playing = self.playing.remove(&sequence)?;
        let lease = LeaseAttempt::from(&playing.lease);
        match playing.stage {
            Stage::Asking(given_up, _) => given_up.store(true, Ordering::Relaxed),
            // Closing may take a while too.
            Stage::Sampling(recorder) if self.environment.waits() => {
                drop(self.asks.ask(sequence, Ask::Close(recorder)));
            }
            Stage::Sampling(recorder) => drop(recorder),
        }
        Some(lease)
    }

    /// Gives up the episodes that have taken longer than they may. Such an episode is void: how fast a
    /// machine is says nothing about its policy.
    fn late(&mut self) -> Vec<Outcome> {
        let Some(seconds) = self.environment.limits().episode_seconds else { return Vec::new() };
        let over = |playing: &Playing| playing.since.elapsed() >= Duration::from_secs(seconds);
        let late: Vec<SequenceId> = self
            .playing
            .iter()
            .filter(|(_, playing)| over(playing))
            .map(|(sequence, _)| *sequence)
            .collect();
        let reason = format!(
            "the episode took longer than environment.limits.episode_seconds, {seconds} s: raise it, \
             or play fewer at a time"
        );
        late.into_iter()
            .filter_map(|sequence| self.give_up(sequence))
            .map(|lease| Outcome::Failed { lease, reason: reason.clone() })
            .collect()
    }

    /// The leases in flight.
    pub fn leases(&self) -> impl Iterator<Item = LeaseAttempt> {
        self.playing.values().map(|playing| LeaseAttempt::from(&playing.lease))
    }

    /// One step of the engine, and what environments have said since the last one. Where there is nothing
    /// to sample, it waits a moment for environments.
    ///
    /// # Errors
    /// The engine itself failed; every episode in flight is lost.
    pub fn step(&mut self) -> Result<Vec<Outcome>, policy::engine::EngineError> {
        let mut outcomes = self.late();
        let mut patience = Duration::ZERO;
        if !self.engine.has_work() && !self.playing.is_empty() {
            patience = LISTENING;
        }
        while let Some((sequence, told)) = self.asks.told(patience) {
            patience = Duration::ZERO;
            let asking = self.playing.get(&sequence).map(|playing| &playing.stage);
            // An episode that was given up in the meantime is gone.
            if let Some(Stage::Asking(_, step)) = asking {
                let step = *step;
                outcomes.extend(self.told(sequence, told, step));
            }
        }
        for generated in self.engine.step()? {
            let sequence = generated.sequence;
            if !self.playing.contains_key(&sequence) {
                self.engine.close(sequence);
                continue;
            }
            self.sampled += generated.ids.len() as u64;
            outcomes.extend(match self.turn(generated) {
                Ok((ask, step)) => self.ask(sequence, ask, step),
                Err(reason) => self.failed(sequence, reason),
            });
        }
        Ok(outcomes)
    }

    /// Takes one generated turn. Returns what its environment is to be asked for.
    fn turn(&mut self, generated: Generated) -> Result<(Ask, Step), String> {
        let playing = self.playing.get_mut(&generated.sequence).ok_or("its episode is gone")?;
        let turn = playing.script.next_turn();
        let parsed = self.format.parse(&generated.ids, generated.finish);
        let framing = if parsed.calls.is_empty() {
            0
        } else {
            let empty = vec![""; parsed.calls.len()];
            self.format.suffix(generated.finish, &empty).map_err(|e| e.to_string())?.len()
        };
        let plan =
            playing.script.turn(generated.finish, generated.ids.len(), &parsed.calls, framing);
        playing.tokens.extend_from_slice(&generated.ids);
        playing.loss_mask.resize(playing.tokens.len(), 1);
        let finish = generated.finish;
        playing.spans.push(Span {
            offset: generated.offset,
            ids: generated.ids,
            logp_raw: generated.logp_raw,
            logp_sampling: generated.logp_sampling,
            finish,
            policy: playing.lease.policy,
            context: generated.context,
        });
        let Stage::Sampling(handed) = &mut playing.stage else {
            return Err("its environment is busy".into());
        };
        let recorder = handed.take().ok_or("its environment is busy")?;
        let answer = plan.answers().then_some(parsed.content);
        let calls = parsed.calls.into_iter().zip(plan.permits).collect();
        let ask = Ask::Turn { recorder, turn, calls, answer };
        Ok((ask, Step::Turn(finish, plan.end)))
    }

    /// Shows a turn's observations to the policy and lets it go on. Returns the end, if this is it.
    fn observe(
        &mut self,
        sequence: SequenceId,
        finish: FinishReason,
        observations: &[String],
        done: bool,
    ) -> Result<Option<EpisodeEnd>, String> {
        let playing = self.playing.get_mut(&sequence).ok_or("its episode is gone")?;
        let observations: Vec<&str> = observations.iter().map(String::as_str).collect();
        let suffix = self.format.suffix(finish, &observations).map_err(|e| e.to_string())?;
        if let Some(end) = playing.script.observe(done, suffix.len()) {
            return Ok(Some(end));
        }
        playing.tokens.extend_from_slice(&suffix);
        playing.loss_mask.resize(playing.tokens.len(), 0);
        let budget = playing.script.budget();
        self.engine
            .append(sequence, &suffix)
            .and_then(|()| self.engine.generate(sequence, budget, self.format.stop_ids()))
            .map_err(|e| e.to_string())?;
        Ok(None)
    }

    fn finished(
        &mut self,
        sequence: SequenceId,
        recording: Recording,
        end: EpisodeEnd,
    ) -> Option<Outcome> {
        self.engine.close(sequence);
        let playing = self.playing.remove(&sequence)?;
        let lease = LeaseAttempt::from(&playing.lease);
        Some(Outcome::Played { lease, episode: Box::new(playing.finish(recording, end)) })
    }
}

impl Playing {
    fn finish(self, recording: Recording, end: EpisodeEnd) -> Episode {
        Episode {
            run: self.lease.run,
            lease: self.lease.id,
            task: self.lease.task.id,
            seed: self.lease.seed,
            policy: self.lease.policy,
            reset_text: recording.reset_text,
            reset_images: recording.reset_images,
            tokens: self.tokens,
            loss_mask: self.loss_mask,
            spans: self.spans,
            trace: recording.rows,
            trace_head: recording.head,
            end,
            reward: recording.score.reward,
            images: recording.images,
        }
    }
}
