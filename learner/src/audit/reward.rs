//! Rung 7: the reward is computed by the learner. What the actor claims must equal it, as a sign that
//! both saw the same episode, and is not used for anything else.

use super::{
    Reason,
    auditor::{Auditor, Case, Findings, Rung},
};

#[derive(Debug)]
pub(super) struct Recompute;

impl Rung for Recompute {
    fn check(
        &self,
        auditor: &Auditor,
        case: Case<'_>,
        findings: &mut Findings,
    ) -> Result<(), Reason> {
        let score = findings.score.as_ref().ok_or(Reason::NoScore)?;
        let (claimed, computed) = (case.episode.reward, score.reward);
        if claimed != computed {
            return Err(Reason::RewardMismatch { claimed, computed });
        }
        let range = &auditor.description.reward_range;
        let reward = auditor
            .terms
            .reward
            .reward(range, score, &case.episode.trace)
            .map_err(Reason::RewardInvalid)?;
        findings.reward = Some(reward);
        Ok(())
    }
}
