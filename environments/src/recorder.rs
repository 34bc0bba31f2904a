//! The recorder: stands between policy and environment, decides what becomes of every call, and
//! writes the trace. Neither side can write a row.
//!
//! What becomes of a call is the first that applies:
//! 1. `Malformed`: the parser found a block that is no call.
//! 2. `AfterDone`: the environment's episode had ended.
//! 3. `OverLimit`: the caller gave no permit (its token budget is nearly gone, or its turns are), or
//!    the turn had used up [`Limits::calls_per_turn`].
//! 4. `UnknownTool`: no tool has exactly this name.
//! 5. `BadArgs`: the arguments do not fit the tool's schema, by the table of [`crate::arguments`].
//! 6. `Ok` or `Raised`: the tool ran. Nothing runs in any other case.
//!
//! An environment that takes answers is given the text of a turn without calls ([`Recorder::answer`]),
//! which gets a row of its own and ends the episode. The row's text is bounded like an observation.
//!
//! Every parsed call of a turn gets a row, so that a trace can be compared with what the policy
//! wrote; a caller that ends episodes at malformed calls records the turn and then ends. What the
//! policy is shown follows the rules of [`crate::text`]; a refusal is an error text whose message
//! this module decides. These rules, the table and the texts are one format, [`FORMAT`].

use std::{collections::BTreeSet, fmt};

use protocol::{
    CallKind, CallPermit, Digest, Image, Lease, LeaseId, ParsedCall, RunId, Task, TraceChain,
    TraceRow,
    wire::{MAX_IMAGE_BYTES, MAX_IMAGES},
};
use serde_json::{Map, Value};

use crate::{Description, Environment, Fault, Limits, Score, ToolSpec, arguments, text, tool};

/// Names everything that decides a row besides the environment. Part of an environment's digest.
pub const FORMAT: &str = "rollcall-recorder-1";

/// Which episode a trace belongs to: what the chain starts from and the environment is reset with.
#[derive(Clone, Copy, Debug)]
pub struct EpisodeKey<'a> {
    /// The run.
    pub run: RunId,
    /// Group and generation.
    pub lease: LeaseId,
    /// The dataset row.
    pub task: &'a Task,
    /// Seed of the reset.
    pub seed: u64,
}

impl<'a> From<&'a Lease> for EpisodeKey<'a> {
    fn from(lease: &'a Lease) -> Self {
        Self { run: lease.run, lease: lease.id, task: &lease.task, seed: lease.seed }
    }
}

impl EpisodeKey<'_> {
    /// The chain of this episode's trace, at its start.
    pub fn chain(&self, reset_text: &str, reset_images: &[Digest]) -> TraceChain {
        TraceChain::start(&self.run, self.lease, &self.task.id, self.seed, reset_text, reset_images)
    }
}

/// A finished episode's trace and score. Equal recordings are the same episode.
#[derive(Clone, Debug, PartialEq)]
pub struct Recording {
    /// What the reset said; empty when it said nothing.
    pub reset_text: String,
    /// Addresses of the images that it showed, in order.
    pub reset_images: Vec<Digest>,
    /// Each of these images once, in the order in which they were first shown.
    pub images: Vec<Image>,
    /// One row a call, in order, and one for the answer.
    pub rows: Vec<TraceRow>,
    /// Chain value after the last row (of the reset, where there is no row).
    pub head: Digest,
    /// The environment's score, checked against its declared range and the rows' milestones.
    pub score: Score,
}

/// Records one episode.
pub struct Recorder {
    environment: Box<dyn Environment>,
    description: Description,
    limits: Limits,
    chain: TraceChain,
    reset_text: String,
    shown: Vec<Image>,
    reset_images: Vec<Digest>,
    rows: Vec<TraceRow>,
    reached: BTreeSet<String>,
    done: bool,
    void: bool,
}

impl Recorder {
    /// Resets `environment` for the episode of `lease`.
    ///
    /// # Errors
    /// A fault: the row does not fit, or the environment is broken or badly described.
    pub fn reset(
        environment: Box<dyn Environment>,
        lease: &Lease,
        limits: Limits,
    ) -> Result<Self, Fault> {
        Self::start(environment, EpisodeKey::from(lease), limits)
    }

    /// [`Recorder::reset`] for whoever has no lease at hand, as in replay.
    ///
    /// # Errors
    /// As [`Recorder::reset`].
    pub fn start(
        mut environment: Box<dyn Environment>,
        key: EpisodeKey<'_>,
        limits: Limits,
    ) -> Result<Self, Fault> {
        let description = environment.describe().clone();
        check_description(&description)?;
        let reset_text = environment.reset(key.task, key.seed)?.unwrap_or_default();
        let reset_text = text::observation(reset_text, limits.reset_chars);
        let shown = environment.images()?;
        check_images(&description, &shown)?;
        let reset_images: Vec<Digest> = shown.iter().map(Image::digest).collect();
        Ok(Self {
            environment,
            description,
            limits,
            chain: key.chain(&reset_text, &reset_images),
            reset_text,
            shown,
            reset_images,
            rows: Vec::new(),
            reached: BTreeSet::new(),
            done: false,
            void: false,
        })
    }

    /// What the reset said, cut to its limit; empty when it said nothing.
    pub fn reset_text(&self) -> &str {
        &self.reset_text
    }

    /// The images that the reset showed, in order.
    pub fn images(&self) -> &[Image] {
        &self.shown
    }

    /// The environment's tools.
    pub fn tools(&self) -> &[ToolSpec] {
        &self.description.tools
    }

    /// Whether the environment's episode has ended.
    pub fn done(&self) -> bool {
        self.done
    }

    /// The rows so far.
    pub fn rows(&self) -> &[TraceRow] {
        &self.rows
    }

    /// Records a call of turn `turn` (index of the sampled span), running it where it may.
    ///
    /// # Errors
    /// A fault; the recorder is then of no more use, and the episode is void.
    pub fn call(
        &mut self,
        turn: u32,
        call: &ParsedCall,
        permit: CallPermit,
    ) -> Result<&TraceRow, Fault> {
        if self.void {
            return Err(Fault::Void);
        }
        // Only a call that completes leaves the recorder usable.
        self.void = true;
        let index = self.next_index(turn)?;
        let (tool, arguments) = match call {
            ParsedCall::Call { name, arguments } => (name.clone(), arguments.clone()),
            ParsedCall::Malformed { raw, .. } => (String::new(), raw.clone()),
        };
        let over = permit == CallPermit::OverLimit || index >= self.limits.calls_per_turn;
        let (kind, observation, milestones) =
            match refusal(&self.description.tools, self.done, over, call) {
                Err((kind, message)) => {
                    (kind, text::error(&message, self.limits.observation_chars), Vec::new())
                }
                Ok(fitted) => self.run(&tool, &fitted)?,
            };
        self.push(TraceRow {
            turn,
            call: index,
            tool,
            arguments,
            kind,
            milestones,
            observation,
            done: self.done,
            chain: self.chain.head(),
        })
    }

    /// Records the text of turn `turn`, which made no call, as the policy's answer and ends the episode.
    /// Nothing where the environment takes no answers, or has ended.
    ///
    /// # Errors
    /// As [`Recorder::call`].
    pub fn answer(&mut self, turn: u32, text: &str) -> Result<Option<&TraceRow>, Fault> {
        if self.void {
            return Err(Fault::Void);
        }
        if !self.description.answers || self.done {
            return Ok(None);
        }
        self.void = true;
        let index = self.next_index(turn)?;
        let text = answer_text(text, &self.limits);
        let reached = self.environment.answer(&text)?;
        let milestones = self.reach(reached)?;
        self.done = true;
        self.push(TraceRow {
            turn,
            call: index,
            tool: String::new(),
            arguments: text,
            kind: CallKind::Answer,
            milestones,
            observation: String::new(),
            done: true,
            chain: self.chain.head(),
        })
        .map(Some)
    }

    /// The place in its turn of the next row.
    fn next_index(&self, turn: u32) -> Result<u32, Fault> {
        match self.rows.last() {
            Some(last) if last.turn > turn => Err(Fault::TurnOrder { turn, last: last.turn }),
            Some(last) if last.turn == turn => Ok(last.call.saturating_add(1)),
            _ => Ok(0),
        }
    }

    /// Chains a row and keeps it.
    fn push(&mut self, mut row: TraceRow) -> Result<&TraceRow, Fault> {
        row.chain = self.chain.push(&row);
        self.rows.push(row);
        self.void = false;
        self.rows.last().ok_or(Fault::Void)
    }

    fn run(
        &mut self,
        tool: &str,
        arguments: &Map<String, Value>,
    ) -> Result<(CallKind, String, Vec<String>), Fault> {
        let reply = self.environment.call(tool, arguments)?;
        let limit = self.limits.observation_chars;
        let (kind, observation) = match reply.result {
            Ok(said) => (CallKind::Ok, text::observation(said, limit)),
            Err(raised) => (CallKind::Raised, text::error(&raised.0, limit)),
        };
        let milestones = self.reach(reply.reached)?;
        self.done = reply.done;
        Ok((kind, observation, milestones))
    }

    /// Takes all milestones reached so far and returns the new ones, in their declared order.
    fn reach(&mut self, reached: Vec<String>) -> Result<Vec<String>, Fault> {
        let reached: BTreeSet<String> = reached.into_iter().collect();
        if let Some(stray) = reached.iter().find(|name| !self.description.milestones.contains(name))
        {
            return Err(
                self.contract(format!("milestone {stray:?} is not among those it declares"))
            );
        }
        if let Some(lost) = self.reached.iter().find(|name| !reached.contains(*name)) {
            return Err(self.contract(format!("it took milestone {lost:?} back")));
        }
        let new = self.description.milestones.iter();
        let new: Vec<String> = new
            .filter(|name| reached.contains(*name) && !self.reached.contains(*name))
            .cloned()
            .collect();
        self.reached = reached;
        Ok(new)
    }

    fn contract(&self, what: String) -> Fault {
        Fault::Contract { environment: self.description.name.clone(), what }
    }

    /// Asks for the score and closes the environment.
    ///
    /// # Errors
    /// A fault, among them a score that is not finite, outside the declared range, or at odds with
    /// the milestones of the rows.
    pub fn finish(self) -> Result<Recording, Fault> {
        self.release().map(|(recording, _)| recording)
    }

    /// [`Recorder::finish`], keeping the environment open, to see what another reset makes of it.
    pub(crate) fn release(mut self) -> Result<(Recording, Box<dyn Environment>), Fault> {
        if self.void {
            return Err(Fault::Void);
        }
        let score = self.environment.score()?;
        let range = &self.description.reward_range;
        // NaN is in no range.
        if !score.reward.is_finite() || !range.contains(&score.reward) {
            return Err(self.contract(format!(
                "reward {} is outside its declared range of {} to {}",
                score.reward,
                range.start(),
                range.end()
            )));
        }
        let declared = self.description.milestones.iter().map(String::as_str);
        let expected =
            Score::new(0.0, false, declared, |name| self.reached.contains(name)).milestones;
        if score.milestones != expected {
            return Err(self.contract("its score's milestones differ from those it reached".into()));
        }
        let mut images: Vec<Image> = Vec::new();
        for (place, (image, address)) in self.shown.into_iter().zip(&self.reset_images).enumerate()
        {
            if !self.reset_images.iter().take(place).any(|earlier| earlier == address) {
                images.push(image);
            }
        }
        let recording = Recording {
            reset_text: self.reset_text,
            reset_images: self.reset_images,
            images,
            rows: self.rows,
            head: self.chain.head(),
            score,
        };
        Ok((recording, self.environment))
    }
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorder")
            .field("environment", &self.description.name)
            .field("rows", &self.rows.len())
            .field("done", &self.done)
            .finish_non_exhaustive()
    }
}

/// The arguments to run a call with, or why it may not run and what the policy is told.
pub(crate) fn refusal(
    tools: &[ToolSpec],
    done: bool,
    over: bool,
    call: &ParsedCall,
) -> Result<Map<String, Value>, (CallKind, String)> {
    let (name, given) = match call {
        ParsedCall::Malformed { reason, .. } => return Err((CallKind::Malformed, reason.clone())),
        ParsedCall::Call { name, arguments } => (name, arguments),
    };
    if done {
        return Err((CallKind::AfterDone, "The episode is over.".into()));
    }
    if over {
        return Err((CallKind::OverLimit, "Over the limit: this call was not run.".into()));
    }
    let Some(tool) = tools.iter().find(|tool| tool.name == *name) else {
        let name: String = name.chars().take(100).collect();
        return Err((CallKind::UnknownTool, format!("Tool {name} not found.")));
    };
    arguments::fit(tool, given).map_err(|error| (CallKind::BadArgs, error.to_string()))
}

/// The text of an answer as its row holds it: over-long ones are cut, as observations are.
pub fn answer_text(text: &str, limits: &Limits) -> String {
    text::observation(text.to_owned(), limits.observation_chars)
}

/// What an episode's frame can hold.
fn check_images(description: &Description, images: &[Image]) -> Result<(), Fault> {
    let bytes: usize = images.iter().map(|it| it.pixels().len()).sum();
    let what = if !description.images && !images.is_empty() {
        "its reset shows images, and it says that it shows none".into()
    } else if images.len() > MAX_IMAGES {
        format!("its reset shows {} images, the limit is {MAX_IMAGES}", images.len())
    } else if bytes > MAX_IMAGE_BYTES {
        format!("its reset shows {bytes} bytes of pixels, the limit is {MAX_IMAGE_BYTES}")
    } else {
        return Ok(());
    };
    Err(Fault::Contract { environment: description.name.clone(), what })
}

fn check_description(description: &Description) -> Result<(), Fault> {
    let names = &description.milestones;
    let distinct: BTreeSet<&String> = names.iter().collect();
    let range = &description.reward_range;
    let what = if let Some(flaw) = tool::first_flaw(&description.tools) {
        flaw
    } else if names.len() > 64 || names.iter().any(|name| name.is_empty() || name.len() > 64) {
        "it declares more than 64 milestones, or one whose name is not 1 to 64 bytes".into()
    } else if distinct.len() != names.len() {
        "it declares a milestone twice".into()
    } else if !(range.start().is_finite() && range.end().is_finite() && !range.is_empty()) {
        "its declared reward range is empty or not finite".into()
    } else {
        return Ok(());
    };
    Err(Fault::Contract { environment: description.name.clone(), what })
}
