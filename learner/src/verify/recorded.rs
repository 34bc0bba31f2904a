//! The sampling evidence that a run wrote down, as far as it can be checked without weights: bounds,
//! presence, consistency in itself, and the verdict that follows from it.

use protocol::ComputeDtype;

use super::{CheckName, Report, terms::Terms};
use crate::{
    audit::{
        Audited,
        sampling::{SamplingBounds, SamplingEvidence, SamplingJudge, SamplingMode, device_kind},
    },
    files::{DeviceBounds, SamplingRecord},
};

/// The caps of maxima and of what one id adds to a mean, as [`SamplingEvidence`] documents them.
const MOST: f64 = 1e3;
const MOST_IN_MEAN: f64 = 4.0;
/// Relative rounding of a mean's sum.
const ROUNDING: f64 = 1e-9;

/// Checks the bounds in the manifest. Those of a calibration are only known by its digest.
pub(super) fn bounds(terms: &Terms, report: &mut Report) {
    const PLACE: &str = "sampling_bounds";
    use CheckName::Manifest as Name;
    let written = &terms.progress.sampling_bounds;
    let audit = &terms.recipe.audit;
    if audit.calibration.is_some() {
        let fine = |it: &DeviceBounds| {
            let it = it.bounds;
            [it.deficit_max, it.deficit_mean, it.logp_gap_max, it.logp_gap_mean]
                .iter()
                .all(|bound| bound.is_finite() && *bound > 0.0)
        };
        if !written.iter().all(fine) {
            report.fail(Name, "sampling_bounds", PLACE, "a bound is no positive number");
        }
        report.note(Name, "sampling_bounds are those of a calibration that is not in the run");
    } else {
        let built_in =
            vec![DeviceBounds { actor_device: "cpu".into(), bounds: SamplingBounds::F32_CPU }];
        let plain = terms.recipe.training.compute_dtype == ComputeDtype::F32;
        let on_cpu = terms.progress.host.as_ref().map(|it| device_kind(&it.device) == "cpu");
        let holds = match (plain, on_cpu) {
            (true, Some(true)) => *written == built_in,
            // A run that was killed before it said where it computes.
            (true, None) if !terms.completed() => written.is_empty() || *written == built_in,
            _ => written.is_empty(),
        };
        if !holds {
            let problem = "without audit.calibration there are the built-in bounds for f32 on \
                           processors, and no others";
            report.fail(Name, "sampling_bounds", PLACE, problem);
        }
    }
    if audit.sampling == SamplingMode::Enforce && terms.completed() && written.is_empty() {
        report.fail(Name, "sampling_bounds", PLACE, "enforce was asked, and there are no bounds");
    }
}

/// The judge that the run had, by its manifest.
pub(super) fn judge(terms: &Terms) -> SamplingJudge {
    let bounds = &terms.progress.sampling_bounds;
    let bounds = bounds.iter().map(|it| (it.actor_device.clone(), it.bounds)).collect();
    SamplingJudge::new(terms.recipe.audit.sampling, bounds)
}

/// What is wrong with the record of an episode that was sampled on `device`, if anything is.
/// `examined` is whether the run examined it, where that can be told.
pub(super) fn problem(
    judge: &SamplingJudge,
    record: Option<&SamplingRecord>,
    audited: &Audited,
    device: &str,
    examined: Option<bool>,
) -> Option<String> {
    let Some(record) = record else {
        let missing = examined == Some(true);
        return missing.then(|| "sampling is absent; the run examined this episode".into());
    };
    if examined == Some(false) {
        return Some("sampling stands there; the run did not examine this episode".into());
    }
    let evidence = &record.evidence;
    if let Some(problem) = inconsistent(evidence, audited) {
        return Some(format!("sampling: {problem}"));
    }
    let flagged = judge.judge(device_kind(device), *evidence);
    let flag = SamplingRecord::of(&flagged).flag;
    if flag != record.flag {
        let (written, found) = (&record.flag, &flag);
        return Some(format!("sampling: flag {written:?} is written; the bounds give {found:?}"));
    }
    judge.refuses(&flagged).map(|reason| format!("sampling: {reason}; enforce refuses this"))
}

fn inconsistent(evidence: &SamplingEvidence, audited: &Audited) -> Option<String> {
    let tokens = audited.policy_audit.assistant_tokens;
    if evidence.tokens != tokens {
        return Some(format!("{} ids; the episode has {tokens} sampled ids", evidence.tokens));
    }
    let unexplained = evidence.unexplained;
    if unexplained > tokens {
        return Some(format!("{unexplained} unexplained ids of {tokens}"));
    }
    let spans = &audited.episode.spans;
    let sampled = |at: usize| {
        spans.iter().any(|span| {
            at.checked_sub(span.offset as usize).is_some_and(|within| within < span.ids.len())
        })
    };
    let deficit = (evidence.deficit_max, evidence.deficit_mean, evidence.deficit_at, unexplained);
    let gap = (evidence.logp_gap_max, evidence.logp_gap_mean, evidence.logp_gap_at, tokens);
    for (name, (max, mean, at, count)) in [("deficit", deficit), ("logp_gap", gap)] {
        let caps = [("max", max, MOST), ("mean", mean, MOST_IN_MEAN)];
        if let Some((which, value, cap)) =
            caps.into_iter().find(|(_, value, cap)| !(0.0..=*cap).contains(value))
        {
            return Some(format!("{name}_{which} {value} is not in 0 to {cap}"));
        }
        // The largest adds to the sum of its mean, and none of `count` ids more than the largest.
        let (sum, largest) = (mean * tokens as f64, max.min(MOST_IN_MEAN));
        let most = largest * count as f64;
        if sum < largest * (1.0 - ROUNDING) || sum > most * (1.0 + ROUNDING) {
            return Some(format!("{name}_mean {mean} cannot be with {name}_max {max}"));
        }
        if (max > 0.0 && !sampled(at)) || (max == 0.0 && at != 0) {
            return Some(format!("{name}_at {at} is no sampled id"));
        }
    }
    let none = evidence.deficit_max == 0.0;
    (none != (unexplained == 0))
        .then(|| format!("{unexplained} unexplained ids with deficit_max {}", evidence.deficit_max))
}
