//! Rung 4: the trace's calls are exactly what the sampled ids say, and the episode went on and ended
//! as its rules say.
//!
//! The learner parses the sampled ids itself and follows the same [`EpisodeScript`] as the actor. What
//! it parsed, not what the trace says, is what the next rungs replay.

use environments::{RecordedAnswer, RecordedCall, answer_text};
use policy::episode_script::EpisodeScript;
use protocol::{CallKind, CallPermit, EpisodeEnd, ParsedCall, TraceRow};

use super::{
    Reason,
    auditor::{Auditor, Case, Findings, Rung},
    tokens::observations,
};

#[derive(Debug)]
pub(super) struct Calls;

impl Rung for Calls {
    fn check(
        &self,
        auditor: &Auditor,
        case: Case<'_>,
        findings: &mut Findings,
    ) -> Result<(), Reason> {
        let episode = case.episode;
        let spans = episode.spans.len();
        let mut script = EpisodeScript::new(auditor.terms.limits);
        let mut rows = episode.trace.iter().enumerate().peekable();
        let mut ended = None;
        for (turn, span) in episode.spans.iter().enumerate() {
            if let Some(end) = ended {
                return Err(Reason::TurnAfterEnd { turn: turn.saturating_sub(1), end });
            }
            let parsed = auditor.terms.format.parse(&span.ids, span.finish);
            let framing = auditor.framing(span.finish, parsed.calls.len())?;
            let plan = script.turn(span.finish, span.ids.len(), &parsed.calls, framing);
            let mut own = Vec::new();
            while let Some(row) = rows.next_if(|(_, row)| usize::try_from(row.turn) == Ok(turn)) {
                own.push(row);
            }
            if plan.answers() && auditor.description.answers {
                let limits = auditor.terms.environment.limits();
                let answer = RecordedAnswer {
                    turn: u32::try_from(turn).unwrap_or(u32::MAX),
                    text: answer_text(&parsed.content, &limits),
                };
                check_answer(turn, &own, &answer)?;
                findings.answer = Some(answer);
                own.clear();
            }
            if own.len() != plan.permits.len() {
                let (parsed, rows) = (plan.permits.len(), own.len());
                return Err(Reason::CallCount { turn, parsed, rows });
            }
            let mut done = false;
            for ((call, permit), (index, row)) in parsed.calls.iter().zip(plan.permits).zip(own) {
                check_row(auditor, turn, index, row, call, permit)?;
                let turn = row.turn;
                findings.calls.push(RecordedCall { turn, call: call.clone(), permit });
                done = row.done;
            }
            ended = match plan.end {
                Some(end) => Some(end),
                None if done => script.observe(true, 0),
                None => {
                    let shown = observations(&episode.trace, turn);
                    script.observe(false, auditor.suffix(span.finish, &shown)?.len())
                }
            };
        }
        if let Some((row, of)) = rows.next() {
            return Err(Reason::RowWithoutTurn { row, turn: of.turn, spans });
        }
        check_end(ended, episode.end, spans.saturating_sub(1))
    }
}

/// The one row of a turn that answers is its text.
fn check_answer(
    turn: usize,
    own: &[(usize, &TraceRow)],
    answer: &RecordedAnswer,
) -> Result<(), Reason> {
    match own {
        [(_, row)] if row.kind == CallKind::Answer && row.arguments == answer.text => Ok(()),
        [(index, row)] if row.kind == CallKind::Answer => {
            Err(Reason::AnswerMismatch { turn, row: *index })
        }
        [] => Err(Reason::AnswerMissing { turn }),
        _ => Err(Reason::CallCount { turn, parsed: 0, rows: own.len() }),
    }
}

fn check_end(ended: Option<EpisodeEnd>, found: EpisodeEnd, turn: usize) -> Result<(), Reason> {
    match ended {
        None => Err(Reason::EndedEarly { turn }),
        Some(expected) if expected != found => Err(Reason::EndMismatch { expected, found }),
        Some(_) => Ok(()),
    }
}

fn check_row(
    auditor: &Auditor,
    turn: usize,
    index: usize,
    row: &TraceRow,
    call: &ParsedCall,
    permit: CallPermit,
) -> Result<(), Reason> {
    let same = match call {
        ParsedCall::Call { name, arguments } => {
            !matches!(row.kind, CallKind::Malformed | CallKind::Answer)
                && row.tool == *name
                && row.arguments == *arguments
        }
        ParsedCall::Malformed { raw, .. } => {
            row.kind == CallKind::Malformed && row.tool.is_empty() && row.arguments == *raw
        }
    };
    if !same {
        return Err(Reason::CallMismatch { turn, row: index });
    }
    let found = row.kind;
    let forbidden = permit == CallPermit::OverLimit
        || row.call >= auditor.terms.environment.limits().calls_per_turn;
    match found {
        CallKind::OverLimit if !forbidden => {
            Err(Reason::PermitMismatch { row: index, found, rule: "allow" })
        }
        CallKind::Ok | CallKind::Raised | CallKind::BadArgs | CallKind::UnknownTool
            if forbidden =>
        {
            Err(Reason::PermitMismatch { row: index, found, rule: "forbid" })
        }
        _ => Ok(()),
    }
}
