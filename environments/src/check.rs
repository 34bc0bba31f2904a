//! Is a trace consistent in itself? Pure: no environment runs.
//!
//! What can be known without playing is recomputed: which kinds are possible for a call, what a
//! refusal says, where milestones and the done flag may change, and the chain. What only the
//! environment knows (is this observation the true one?) is left to [`mod@crate::replay`].

use std::collections::BTreeSet;

use protocol::{CallKind, CallPermit, TraceRow};

use crate::{Claim, Description, EpisodeKey, Limits, RecordedCall, recorder::refusal, text};

/// The first inconsistency of a trace. `row` counts from 0.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TraceError {
    /// The reset text is longer than the recorder lets through.
    #[error("the reset text is over its limit of {limit} characters")]
    ResetTooLong {
        /// The limit.
        limit: usize,
    },
    /// Turns go backwards.
    #[error("row {row}: its turn lies before the last row's")]
    TurnOrder {
        /// The row.
        row: usize,
    },
    /// The calls of a turn do not count 0, 1, 2, …
    #[error("row {row}: its call index is {found}, not {expected}")]
    CallOrder {
        /// The row.
        row: usize,
        /// What it must be.
        expected: u32,
        /// What it is.
        found: u32,
    },
    /// A malformed call that names a tool.
    #[error("row {row}: a malformed call has no tool name")]
    MalformedTool {
        /// The row.
        row: usize,
    },
    /// The kind is not one that the call can have had, given the tools, the rows before and the limits.
    #[error("row {row}: its kind is {found}; it must be {expected}")]
    Kind {
        /// The row.
        row: usize,
        /// What it says.
        found: CallKind,
        /// What it must be; nothing where the call must have run (`Ok` or `Raised`).
        expected: Expected,
    },
    /// A refused call whose observation is not the recorder's.
    #[error("row {row}: its observation is not what the recorder says to a call of its kind")]
    RefusalText {
        /// The row.
        row: usize,
    },
    /// A raised error whose observation is not an error text.
    #[error("row {row}: the tool raised, yet its observation is no error text")]
    NotAnError {
        /// The row.
        row: usize,
    },
    /// The observation is longer than the recorder lets through.
    #[error("row {row}: its observation is over its limit of {limit} characters")]
    ObservationTooLong {
        /// The row.
        row: usize,
        /// The limit.
        limit: usize,
    },
    /// An answer to an environment that takes none, or has ended.
    #[error("row {row}: an answer, and the environment takes none here")]
    AnswerNotTaken {
        /// The row.
        row: usize,
    },
    /// An answer that no recorder writes.
    #[error("row {row}: an answer names no tool, shows nothing, ends the episode and is bounded")]
    AnswerShape {
        /// The row.
        row: usize,
    },
    /// A milestone on a call that did not run.
    #[error("row {row}: a milestone on a call that did not run")]
    MilestoneNotRun {
        /// The row.
        row: usize,
    },
    /// A milestone that the environment does not have.
    #[error("row {row}: a milestone that the environment does not have")]
    MilestoneUnknown {
        /// The row.
        row: usize,
    },
    /// A milestone reached twice.
    #[error("row {row}: milestone {name} was reached before")]
    MilestoneRepeated {
        /// The row.
        row: usize,
        /// The milestone.
        name: String,
    },
    /// Milestones of one row in another order than declared.
    #[error("row {row}: its milestones are not in their declared order")]
    MilestoneOrder {
        /// The row.
        row: usize,
    },
    /// The episode ended at a call that did not run.
    #[error("row {row}: the episode ends at a call that did not run")]
    DoneNotRun {
        /// The row.
        row: usize,
    },
    /// An ended episode went on.
    #[error("row {row}: the episode had ended and goes on")]
    DoneTakenBack {
        /// The row.
        row: usize,
    },
    /// The chain does not lead from the reset to this row's value.
    #[error("row {row}: its chain value does not follow from the reset and the rows up to it")]
    Chain {
        /// The row.
        row: usize,
    },
    /// The head is not the chain's last value.
    #[error("the trace head is not the chain's last value")]
    Head,
}

/// The kind that a call must have had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// Exactly this one.
    Only(CallKind),
    /// The tool ran.
    Ran,
}

impl std::fmt::Display for Expected {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Only(kind) => kind.fmt(f),
            Self::Ran => f.write_str("Ok or Raised"),
        }
    }
}

/// Whether a kind means that the tool ran.
fn ran(kind: CallKind) -> bool {
    matches!(kind, CallKind::Ok | CallKind::Raised)
}

/// Whether a kind means that the environment was told.
fn acted(kind: CallKind) -> bool {
    ran(kind) || kind == CallKind::Answer
}

/// Checks that `claim` is a trace that a recorder could have written for the episode of `key` in an
/// environment that is as described. A permit that a row claims to have lacked is believed here: who
/// knows the budgets compares [`CallKind::OverLimit`] with them.
///
/// # Errors
/// The first inconsistency: of the rows' content first, then of the chain.
pub fn check_trace(
    key: EpisodeKey<'_>,
    description: &Description,
    limits: &Limits,
    claim: Claim<'_>,
) -> Result<(), TraceError> {
    if too_long(claim.reset_text, limits.reset_chars) {
        return Err(TraceError::ResetTooLong { limit: limits.reset_chars });
    }
    let mut reached = BTreeSet::new();
    let mut last: Option<&TraceRow> = None;
    for (index, row) in claim.rows.iter().enumerate() {
        check_order(index, row, last)?;
        let done = last.is_some_and(|row| row.done);
        check_call(index, row, done, description, limits)?;
        check_milestones(index, row, description, &mut reached)?;
        if done && !row.done {
            return Err(TraceError::DoneTakenBack { row: index });
        }
        if row.done && !done && !acted(row.kind) {
            return Err(TraceError::DoneNotRun { row: index });
        }
        last = Some(row);
    }
    let mut chain = key.chain(claim.reset_text, claim.reset_images);
    for (index, row) in claim.rows.iter().enumerate() {
        if chain.push(row) != row.chain {
            return Err(TraceError::Chain { row: index });
        }
    }
    if chain.head() == claim.head { Ok(()) } else { Err(TraceError::Head) }
}

fn too_long(text: &str, limit: usize) -> bool {
    text.chars().nth(limit).is_some()
}

fn check_order(index: usize, row: &TraceRow, last: Option<&TraceRow>) -> Result<(), TraceError> {
    let expected = match last {
        Some(last) if row.turn < last.turn => return Err(TraceError::TurnOrder { row: index }),
        Some(last) if row.turn == last.turn => last.call.saturating_add(1),
        _ => 0,
    };
    if row.call == expected {
        Ok(())
    } else {
        Err(TraceError::CallOrder { row: index, expected, found: row.call })
    }
}

fn check_call(
    index: usize,
    row: &TraceRow,
    done: bool,
    description: &Description,
    limits: &Limits,
) -> Result<(), TraceError> {
    if row.kind == CallKind::Answer {
        return check_answer(index, row, done, description, limits);
    }
    if row.kind == CallKind::Malformed && !row.tool.is_empty() {
        return Err(TraceError::MalformedTool { row: index });
    }
    let recorded = RecordedCall::from_row(row);
    let over = recorded.permit == CallPermit::OverLimit || row.call >= limits.calls_per_turn;
    let wrong = |expected| Err(TraceError::Kind { row: index, found: row.kind, expected });
    match refusal(&description.tools, done, over, &recorded.call) {
        Err((kind, _)) if kind != row.kind => wrong(Expected::Only(kind)),
        Err((_, message)) if text::error(&message, limits.observation_chars) != row.observation => {
            Err(TraceError::RefusalText { row: index })
        }
        Err(_) => Ok(()),
        Ok(_) if !ran(row.kind) => wrong(Expected::Ran),
        Ok(_) if too_long(&row.observation, limits.observation_chars) => {
            Err(TraceError::ObservationTooLong { row: index, limit: limits.observation_chars })
        }
        Ok(_)
            if row.kind == CallKind::Raised && text::error_message(&row.observation).is_none() =>
        {
            Err(TraceError::NotAnError { row: index })
        }
        Ok(_) => Ok(()),
    }
}

fn check_answer(
    index: usize,
    row: &TraceRow,
    done: bool,
    description: &Description,
    limits: &Limits,
) -> Result<(), TraceError> {
    if done || !description.answers {
        return Err(TraceError::AnswerNotTaken { row: index });
    }
    let sound = row.tool.is_empty()
        && row.observation.is_empty()
        && row.done
        && !too_long(&row.arguments, limits.observation_chars);
    if sound { Ok(()) } else { Err(TraceError::AnswerShape { row: index }) }
}

fn check_milestones<'a>(
    index: usize,
    row: &'a TraceRow,
    description: &Description,
    reached: &mut BTreeSet<&'a str>,
) -> Result<(), TraceError> {
    if !row.milestones.is_empty() && !acted(row.kind) {
        return Err(TraceError::MilestoneNotRun { row: index });
    }
    let mut last = None;
    for name in &row.milestones {
        let Some(place) = description.milestones.iter().position(|known| known == name) else {
            return Err(TraceError::MilestoneUnknown { row: index });
        };
        if !reached.insert(name) {
            return Err(TraceError::MilestoneRepeated { row: index, name: name.clone() });
        }
        if last.is_some_and(|last| place < last) {
            return Err(TraceError::MilestoneOrder { row: index });
        }
        last = Some(place);
    }
    Ok(())
}
