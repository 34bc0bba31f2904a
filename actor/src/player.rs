//! Plays leased episodes: environment, recorder, chat format and generation engine together.
//!
//! No network and no clock: leases go in, episodes come out, and the same leases in the same order
//! give the same bytes. The rules of an episode are [`EpisodeScript`]'s; this file only carries them
//! out.

use std::{collections::BTreeMap, sync::Arc};

use environments::{EnvironmentSpec, Recorder};
use policy::{
    chat::ChatFormat,
    engine::{Engine, Generated, SequenceId},
    episode_script::{EpisodeLimits, EpisodeScript},
    vision::{PromptImages, episode_prompt},
};
use protocol::{Episode, EpisodeEnd, Image, Lease, LeaseAttempt, Span};

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
    recorder: Recorder,
    tokens: Vec<u32>,
    loss_mask: Vec<u8>,
    spans: Vec<Span>,
}

/// Plays up to as many episodes as it is given, in lockstep on one engine.
pub struct Player {
    engine: Engine,
    format: Arc<ChatFormat>,
    images: Option<PromptImages>,
    environment: EnvironmentSpec,
    limits: EpisodeLimits,
    playing: BTreeMap<SequenceId, Playing>,
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
    /// Why it cannot be played, one line.
    pub fn start(&mut self, lease: Lease) -> Result<(), String> {
        let environment = self.environment.open().map_err(|e| e.to_string())?;
        let recorder = Recorder::reset(environment, &lease, self.environment.limits())
            .map_err(|e| e.to_string())?;
        let shown: Vec<&Image> = recorder.images().iter().collect();
        let (task_prompt, reader) = (&lease.task.prompt, self.images.as_ref());
        let prompt =
            episode_prompt(&self.format, reader, task_prompt, recorder.reset_text(), &shown)
                .map_err(|e| e.to_string())?;
        let placed = match reader {
            Some(reader) => reader.place(&prompt, &shown).map_err(|e| e.to_string())?,
            None => Vec::new(),
        };
        let script = EpisodeScript::new(self.limits);
        let sequence = self
            .engine
            .open(lease.policy, lease.noise_key, lease.sampling)
            .map_err(|e| e.to_string())?;
        let started = self
            .engine
            .append_images(sequence, &prompt, placed)
            .and_then(|()| self.engine.generate(sequence, script.budget(), self.format.stop_ids()));
        if let Err(error) = started {
            self.engine.close(sequence);
            return Err(error.to_string());
        }
        let loss_mask = vec![0; prompt.len()];
        let playing =
            Playing { lease, script, recorder, tokens: prompt, loss_mask, spans: Vec::new() };
        self.playing.insert(sequence, playing);
        Ok(())
    }

    /// Gives up an episode, leaving no trace of it. Unknown leases are none of its business.
    pub fn abandon(&mut self, lease: LeaseAttempt) {
        let found = self.playing.iter().find(|(_, p)| LeaseAttempt::from(&p.lease) == lease);
        if let Some(sequence) = found.map(|(sequence, _)| *sequence) {
            self.playing.remove(&sequence);
            self.engine.close(sequence);
        }
    }

    /// The leases in flight.
    pub fn leases(&self) -> impl Iterator<Item = LeaseAttempt> {
        self.playing.values().map(|playing| LeaseAttempt::from(&playing.lease))
    }

    /// One step of the engine, and the tool calls of every turn that it ended.
    ///
    /// # Errors
    /// The engine itself failed; every episode in flight is lost.
    pub fn step(&mut self) -> Result<Vec<Outcome>, policy::engine::EngineError> {
        let mut outcomes = Vec::new();
        for generated in self.engine.step()? {
            let sequence = generated.sequence;
            let Some(mut playing) = self.playing.remove(&sequence) else {
                self.engine.close(sequence);
                continue;
            };
            self.sampled += generated.ids.len() as u64;
            let lease = LeaseAttempt::from(&playing.lease);
            match self.turn(&mut playing, generated) {
                Ok(None) => {
                    self.playing.insert(sequence, playing);
                }
                Ok(Some(end)) => {
                    self.engine.close(sequence);
                    outcomes.push(match playing.finish(end) {
                        Ok(episode) => Outcome::Played { lease, episode: Box::new(episode) },
                        Err(reason) => Outcome::Failed { lease, reason },
                    });
                }
                Err(reason) => {
                    self.engine.close(sequence);
                    outcomes.push(Outcome::Failed { lease, reason });
                }
            }
        }
        Ok(outcomes)
    }

    /// Takes one generated turn, runs its calls and starts the next. Returns the end, if this is it.
    fn turn(
        &mut self,
        playing: &mut Playing,
        generated: Generated,
    ) -> Result<Option<EpisodeEnd>, String> {
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
        let mut observations = Vec::with_capacity(plan.permits.len());
        let mut done = false;
        for (call, permit) in parsed.calls.iter().zip(&plan.permits) {
            let row = playing.recorder.call(turn, call, *permit).map_err(|e| e.to_string())?;
            done = row.done;
            observations.push(row.observation.clone());
        }
        if plan.answers() {
            playing.recorder.answer(turn, &parsed.content).map_err(|e| e.to_string())?;
        }
        if plan.end.is_some() {
            return Ok(plan.end);
        }
        let observations: Vec<&str> = observations.iter().map(String::as_str).collect();
        let suffix = self.format.suffix(finish, &observations).map_err(|e| e.to_string())?;
        if let Some(end) = playing.script.observe(done, suffix.len()) {
            return Ok(Some(end));
        }
        playing.tokens.extend_from_slice(&suffix);
        playing.loss_mask.resize(playing.tokens.len(), 0);
        self.engine
            .append(generated.sequence, &suffix)
            .and_then(|()| {
                let budget = playing.script.budget();
                self.engine.generate(generated.sequence, budget, self.format.stop_ids())
            })
            .map_err(|e| e.to_string())?;
        Ok(None)
    }
}

impl Playing {
    fn finish(self, end: EpisodeEnd) -> Result<Episode, String> {
        let recording = self.recorder.finish().map_err(|e| e.to_string())?;
        Ok(Episode {
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
        })
    }
}
