//! Rung 5: the trace is one that a recorder could have written for this lease, and its chain holds.

use environments::{Claim, EpisodeKey, check_trace};

use super::{
    Reason,
    auditor::{Auditor, Case, Findings, Rung},
};

#[derive(Debug)]
pub(super) struct Trace;

impl Rung for Trace {
    fn check(
        &self,
        auditor: &Auditor,
        case: Case<'_>,
        _findings: &mut Findings,
    ) -> Result<(), Reason> {
        check_trace(
            EpisodeKey::from(case.lease),
            &auditor.description,
            &auditor.terms.environment.limits(),
            Claim::from(case.episode),
        )
        .map_err(Reason::Trace)
    }
}
