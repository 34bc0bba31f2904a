//! Plays an episode again from its task, seed and calls, and names the first difference.
//!
//! Replay uses the same [`Recorder`] as the episode did, so that equal [`Recording`]s are the whole
//! check. Of the claimed rows it uses the calls only.

use protocol::{CallKind, Digest, Episode, ParsedCall, TraceRow};

use crate::{
    CallPermit, Determinism, EnvironmentSpec, EpisodeKey, Fault, Recorder, Recording, text,
};

/// A trace as someone claims it. Nothing in it is trusted.
#[derive(Clone, Copy, Debug)]
pub struct Claim<'a> {
    /// What the reset said; empty when it said nothing.
    pub reset_text: &'a str,
    /// Addresses of the images that it showed, in order.
    pub reset_images: &'a [Digest],
    /// The rows.
    pub rows: &'a [TraceRow],
    /// The chain's value after the last row.
    pub head: Digest,
}

impl<'a> From<&'a Episode> for Claim<'a> {
    fn from(episode: &'a Episode) -> Self {
        Self {
            reset_text: &episode.reset_text,
            reset_images: &episode.reset_images,
            rows: &episode.trace,
            head: episode.trace_head,
        }
    }
}

impl<'a> From<&'a Recording> for Claim<'a> {
    fn from(recording: &'a Recording) -> Self {
        Self {
            reset_text: &recording.reset_text,
            reset_images: &recording.reset_images,
            rows: &recording.rows,
            head: recording.head,
        }
    }
}

/// A call of an episode, as the recorder was given it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedCall {
    /// Index of the sampled span that made it.
    pub turn: u32,
    /// What the parser read.
    pub call: ParsedCall,
    /// Whether the caller let it run. A learner that knows the budgets decides this by itself.
    pub permit: CallPermit,
}

impl RecordedCall {
    /// The call that a row claims to answer, and the permit that it claims.
    pub fn from_row(row: &TraceRow) -> Self {
        let call = if row.kind == CallKind::Malformed {
            ParsedCall::Malformed {
                raw: row.arguments.clone(),
                reason: text::error_message(&row.observation).unwrap_or_default(),
            }
        } else {
            ParsedCall::Call { name: row.tool.clone(), arguments: row.arguments.clone() }
        };
        let permit = match row.kind {
            CallKind::OverLimit => CallPermit::OverLimit,
            _ => CallPermit::Run,
        };
        Self { turn: row.turn, call, permit }
    }
}

/// An answer of an episode, as the recorder was given it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedAnswer {
    /// Index of the sampled span that made it.
    pub turn: u32,
    /// The text.
    pub text: String,
}

/// Plays `calls`, and `answer` after them, in a newly opened environment.
///
/// # Errors
/// A fault of the environment, or calls whose turns go backwards.
pub fn replay<'a>(
    spec: &EnvironmentSpec,
    key: EpisodeKey<'_>,
    calls: impl IntoIterator<Item = &'a RecordedCall>,
    answer: Option<&RecordedAnswer>,
) -> Result<Recording, Fault> {
    let mut recorder = Recorder::start(spec.open()?, key, spec.limits())?;
    for call in calls {
        recorder.call(call.turn, &call.call, call.permit)?;
    }
    if let Some(answer) = answer {
        recorder.answer(answer.turn, &answer.text)?;
    }
    recorder.finish()
}

/// The first thing in which a claimed trace differs from its replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplayMismatch {
    /// The reset said something else.
    #[error("the reset text differs from the replayed one")]
    ResetText,
    /// More or fewer images.
    #[error("the reset shows {claimed} images, the replayed one {replayed}")]
    Images {
        /// Images of the episode.
        claimed: usize,
        /// Images of the replay.
        replayed: usize,
    },
    /// The reset showed something else.
    #[error("image {0} of the reset differs from the replayed one")]
    Image(usize),
    /// More or fewer rows than calls.
    #[error("the trace has {claimed} rows, its replay {replayed}")]
    Rows {
        /// Rows of the trace.
        claimed: usize,
        /// Rows of the replay.
        replayed: usize,
    },
    /// Row `0`: the turn.
    #[error("row {0}: the turn differs from the replayed one")]
    Turn(usize),
    /// The index in the turn.
    #[error("row {0}: the call index differs from the replayed one")]
    Call(usize),
    /// The tool's name.
    #[error("row {0}: the tool differs from the replayed one")]
    Tool(usize),
    /// The arguments.
    #[error("row {0}: the arguments differ from the replayed ones")]
    Arguments(usize),
    /// What became of the call.
    #[error("row {0}: the kind differs from the replayed one")]
    Kind(usize),
    /// The milestones.
    #[error("row {0}: the milestones differ from the replayed ones")]
    Milestones(usize),
    /// What the policy was shown.
    #[error("row {0}: the observation differs from the replayed one")]
    Observation(usize),
    /// Whether the episode had ended.
    #[error("row {0}: the done flag differs from the replayed one")]
    Done(usize),
    /// Everything in the row is equal and its chain value is not: another run, lease, task or seed.
    #[error("row {0}: the chain value differs from the replayed one")]
    Chain(usize),
    /// The head of the chain.
    #[error("the trace head differs from the replayed one")]
    Head,
}

/// Compares a claimed trace with a replay, field by field in the order of the variants.
///
/// # Errors
/// The first difference.
pub fn compare(claim: Claim<'_>, replayed: &Recording) -> Result<(), ReplayMismatch> {
    use ReplayMismatch as Differs;
    if claim.reset_text != replayed.reset_text {
        return Err(Differs::ResetText);
    }
    let (shown, truth) = (claim.reset_images, &replayed.reset_images);
    if let Some(index) = shown.iter().zip(truth).position(|(claimed, truth)| claimed != truth) {
        return Err(Differs::Image(index));
    }
    if shown.len() != truth.len() {
        return Err(Differs::Images { claimed: shown.len(), replayed: truth.len() });
    }
    for (index, (row, truth)) in claim.rows.iter().zip(&replayed.rows).enumerate() {
        let fields = [
            (row.turn == truth.turn, Differs::Turn as fn(usize) -> Differs),
            (row.call == truth.call, Differs::Call),
            (row.tool == truth.tool, Differs::Tool),
            (row.arguments == truth.arguments, Differs::Arguments),
            (row.kind == truth.kind, Differs::Kind),
            (row.milestones == truth.milestones, Differs::Milestones),
            (row.observation == truth.observation, Differs::Observation),
            (row.done == truth.done, Differs::Done),
            (row.chain == truth.chain, Differs::Chain),
        ];
        if let Some((_, differs)) = fields.into_iter().find(|(equal, _)| !equal) {
            return Err(differs(index));
        }
    }
    if claim.rows.len() != replayed.rows.len() {
        return Err(Differs::Rows { claimed: claim.rows.len(), replayed: replayed.rows.len() });
    }
    if claim.head != replayed.head {
        return Err(Differs::Head);
    }
    Ok(())
}

/// Why a replay does not confirm a trace.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    /// The environment cannot be played again.
    #[error("environment {0} is recorded, not deterministic: it cannot be replayed")]
    Recorded(String),
    /// The environment broke in replay.
    #[error("replay: {0}")]
    Fault(#[from] Fault),
    /// It went otherwise.
    #[error("replay: {0}")]
    Differs(#[from] ReplayMismatch),
}

/// Replays the rows' own calls and compares. Returns the replay, whose score is to be trusted.
///
/// # Errors
/// The environment is not deterministic, broke, or gave something else.
pub fn verify_replay(
    spec: &EnvironmentSpec,
    key: EpisodeKey<'_>,
    claim: Claim<'_>,
) -> Result<Recording, ReplayError> {
    let environment = spec.open()?;
    let description = environment.describe();
    if description.determinism != Determinism::Deterministic {
        return Err(ReplayError::Recorded(description.name.clone()));
    }
    let mut recorder = Recorder::start(environment, key, spec.limits())?;
    for row in claim.rows {
        if row.kind == CallKind::Answer {
            recorder.answer(row.turn, &row.arguments)?;
        } else {
            let call = RecordedCall::from_row(row);
            recorder.call(call.turn, &call.call, call.permit)?;
        }
    }
    let replayed = recorder.finish()?;
    compare(claim, &replayed)?;
    Ok(replayed)
}
