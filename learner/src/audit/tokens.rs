//! Rung 3: every id of the stream is accounted for.
//!
//! An image is so many image-pad ids as its size takes; whether it is the one that the environment
//! showed is for the replay to see.
//!
//! The stream is prompt, span, external ids, span, ..., span, and nothing else. The learner renders
//! the prompt itself and encodes the framing and the trace's observations itself, so an external id
//! that untrusted text smuggled in cannot pass: [`policy::chat::ChatFormat`] never makes a control
//! token of such text. Each span must be the stream's own ids, conditioned on exactly the ids before
//! it, within the budget, and ended as it says.

use protocol::{CallKind, Episode, FinishReason, Span, StreamHasher, TraceRow};

use super::{
    Reason,
    auditor::{Auditor, Case, Findings, Rung},
};

/// Softmax in 32-bit floats may round to just above 1.
const LOG_ONE: f32 = 1e-4;

#[derive(Debug)]
pub(super) struct Tokens;

impl Rung for Tokens {
    fn check(
        &self,
        auditor: &Auditor,
        case: Case<'_>,
        findings: &mut Findings,
    ) -> Result<(), Reason> {
        let episode = case.episode;
        check_vocabulary(auditor, episode)?;
        let shown = episode.shown_images().map_err(Reason::Images)?;
        let prompt = auditor.prompt(&case.lease.task.prompt, &episode.reset_text, &shown)?;
        if let Some(at) = difference(&prompt, &episode.tokens) {
            return Err(Reason::PromptMismatch { at });
        }
        findings.prompt_tokens = prompt.len();
        let mut walk = Walk {
            auditor,
            case,
            at: prompt.len(),
            prompt: prompt.len(),
            hasher: StreamHasher::default(),
        };
        walk.hasher.feed(&prompt);
        let last = episode.spans.len().checked_sub(1).ok_or(Reason::NoSpans)?;
        for (index, span) in episode.spans.iter().enumerate() {
            walk.span(index, span)?;
            if index < last {
                walk.external(index, span.finish)?;
            }
        }
        if walk.at < episode.tokens.len() {
            return Err(Reason::TrailingIds { count: episode.tokens.len() - walk.at });
        }
        check_mask(episode)
    }
}

/// Goes through the stream once.
struct Walk<'a> {
    auditor: &'a Auditor,
    case: Case<'a>,
    at: usize,
    prompt: usize,
    hasher: StreamHasher,
}

impl Walk<'_> {
    fn rest(&self) -> &[u32] {
        self.case.episode.tokens.get(self.at..).unwrap_or_default()
    }

    fn span(&mut self, index: usize, span: &Span) -> Result<(), Reason> {
        let offset = usize::try_from(span.offset).unwrap_or(usize::MAX);
        if offset != self.at {
            return Err(Reason::SpanOffset { span: index, expected: self.at, found: offset });
        }
        if let Some(at) = difference(&span.ids, self.rest()) {
            return Err(Reason::SpanIds { span: index, at: self.at + at });
        }
        let expected = self.case.lease.policy;
        if span.policy != expected {
            return Err(Reason::SpanPolicy { span: index, expected, found: span.policy });
        }
        if span.context != self.hasher.digest() {
            return Err(Reason::ContextMismatch { span: index });
        }
        let columns = span.logp_raw.iter().zip(&span.logp_sampling);
        if let Some(token) = columns.into_iter().position(|(raw, s)| *raw > LOG_ONE || *s > LOG_ONE)
        {
            return Err(Reason::LogProbability { span: index, token });
        }
        self.finish(index, span)?;
        self.hasher.feed(&span.ids);
        self.at += span.ids.len();
        Ok(())
    }

    /// The span ends where it must, and not before.
    fn finish(&self, index: usize, span: &Span) -> Result<(), Reason> {
        let completion = usize::try_from(self.auditor.terms.limits.max_completion);
        let budget = completion.unwrap_or(usize::MAX).saturating_sub(self.at - self.prompt);
        let found = span.ids.len();
        if found > budget {
            return Err(Reason::OverBudget { span: index, found, budget });
        }
        let stop = span.ids.iter().position(|id| self.auditor.stop_ids.contains(id));
        match (stop, span.finish) {
            (Some(token), _) if token + 1 < found => {
                Err(Reason::StopIgnored { span: index, token })
            }
            (Some(token), FinishReason::Length) => Err(Reason::StopIgnored { span: index, token }),
            (None, FinishReason::Stop) => Err(Reason::StopMissing { span: index }),
            (None, FinishReason::Length) if found < budget => {
                Err(Reason::LengthMismatch { span: index, left: budget - found })
            }
            _ => Ok(()),
        }
    }

    /// The external ids between a turn and the next.
    fn external(&mut self, turn: usize, finish: FinishReason) -> Result<(), Reason> {
        let observations = observations(&self.case.episode.trace, turn);
        if observations.is_empty() {
            return Err(Reason::NothingToAnswer { turn });
        }
        let suffix = self.auditor.suffix(finish, &observations)?;
        if let Some(at) = difference(&suffix, self.rest()) {
            return Err(Reason::SuffixMismatch { turn, at: self.at + at });
        }
        self.hasher.feed(&suffix);
        self.at += suffix.len();
        Ok(())
    }
}

/// What the rows of a turn showed the policy, in order.
pub(super) fn observations(trace: &[TraceRow], turn: usize) -> Vec<&str> {
    let of_turn =
        |row: &&TraceRow| usize::try_from(row.turn) == Ok(turn) && row.kind != CallKind::Answer;
    trace.iter().filter(of_turn).map(|row| row.observation.as_str()).collect()
}

/// Where `stream` stops being `expected`, if it does before `expected` ends.
fn difference(expected: &[u32], stream: &[u32]) -> Option<usize> {
    let equal = expected.iter().zip(stream).take_while(|(a, b)| a == b).count();
    (equal < expected.len()).then_some(equal)
}

fn check_vocabulary(auditor: &Auditor, episode: &Episode) -> Result<(), Reason> {
    let vocabulary = auditor.terms.vocabulary;
    match episode.tokens.iter().enumerate().find(|(_, id)| **id >= vocabulary) {
        None => Ok(()),
        Some((at, &id)) => Err(Reason::OutOfVocabulary { at, id, vocabulary }),
    }
}

fn check_mask(episode: &Episode) -> Result<(), Reason> {
    let mut sampled = vec![0_u8; episode.tokens.len()];
    for span in &episode.spans {
        let offset = usize::try_from(span.offset).unwrap_or(usize::MAX);
        sampled.iter_mut().skip(offset).take(span.ids.len()).for_each(|bit| *bit = 1);
    }
    if sampled == episode.loss_mask {
        return Ok(());
    }
    let differs = |(a, b): (&u8, &u8)| a != b;
    let at = sampled.iter().zip(&episode.loss_mask).position(differs);
    Err(Reason::MaskMismatch { at: at.unwrap_or(sampled.len().min(episode.loss_mask.len())) })
}
