//! Rung 6: a deterministic environment, played again from task, seed and the calls and the answer that
//! the learner itself parsed, gives the same trace and shows the same images. Its score is the one that counts.
//!
//! An environment that cannot be replayed passes only where the run allows it, and is marked so in the
//! evidence. It is scored by what its checked trace alone decides; where its reward is all that there is
//! to a score, by the reward that the actor recorded.

use environments::{Claim, Determinism, EpisodeKey};

use super::{
    Reason,
    auditor::{Auditor, Case, Findings, Rung},
};

#[derive(Debug)]
pub(super) struct Replay;

impl Rung for Replay {
    fn check(
        &self,
        auditor: &Auditor,
        case: Case<'_>,
        findings: &mut Findings,
    ) -> Result<(), Reason> {
        let environment = &auditor.terms.environment;
        if auditor.description.determinism == Determinism::Recorded {
            if !auditor.terms.allow_recorded {
                return Err(Reason::RecordedNotAllowed);
            }
            findings.score = environment
                .score_trace(&case.episode.trace)
                .or_else(|| environment.score_claim(case.episode.reward));
            return Ok(());
        }
        let key = EpisodeKey::from(case.lease);
        let replayed =
            environments::replay(environment, key, &findings.calls, findings.answer.as_ref())
                .map_err(|fault| Reason::ReplayFault { problem: fault.to_string() })?;
        environments::replay::compare(Claim::from(case.episode), &replayed)
            .map_err(Reason::Replay)?;
        findings.replayed = true;
        findings.score = Some(replayed.score);
        Ok(())
    }
}
