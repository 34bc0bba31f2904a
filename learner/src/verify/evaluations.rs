//! Evaluations: that metrics and manifest speak of those that were played, and which adapter did best.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    CheckName, Report,
    ledger::Ledger,
    tally::{Tallies, Tally},
    terms::Terms,
    totals::{close, milestones, numbers},
};
use crate::curriculum::evaluation_round;

/// The evaluations that were made, by round: one whose every task was given up has an empty sum.
pub(super) fn rounds(ledger: &Ledger, tallies: &Tallies) -> BTreeMap<u32, Tally> {
    let mut rounds: BTreeMap<u32, Tally> = BTreeMap::new();
    let mut open = BTreeSet::new();
    for (&group, it) in &ledger.groups {
        let Some(round) = evaluation_round(group) else { continue };
        if !it.dropped {
            open.insert(round);
        }
        let step = ledger.steps(it.order.policy).first().copied().unwrap_or_default();
        rounds.entry(round).or_insert_with(|| Tally { step, ..Tally::default() });
    }
    rounds.retain(|round, _| !open.contains(round));
    rounds.extend(tallies.rounds.clone());
    rounds
}

/// Notes what was given up: an average over what was not is another number.
pub(super) fn given_up(ledger: &Ledger, rounds: &BTreeMap<u32, Tally>, report: &mut Report) {
    // Dropped and ordered groups; of no round are the training groups.
    let mut counts: BTreeMap<Option<u32>, (u64, u64)> = BTreeMap::new();
    for (&group, it) in &ledger.groups {
        let (dropped, all) = counts.entry(evaluation_round(group)).or_default();
        *dropped += u64::from(it.dropped);
        *all += 1;
    }
    for (round, (dropped, all)) in counts.into_iter().filter(|(_, (dropped, _))| *dropped > 0) {
        let note = match round {
            None => format!("training: {dropped} of {all} groups were given up"),
            Some(round) => {
                let step = rounds.get(&round).map_or(0, |it| it.step);
                format!("evaluation after step {step}: {dropped} of {all} tasks were given up")
            }
        };
        report.note(CheckName::Groups, note);
    }
}

/// The steps after which a completed run evaluates.
pub(super) fn due(terms: &Terms) -> Vec<u64> {
    let Some(evaluation) = &terms.recipe.evaluation else { return Vec::new() };
    let last = u64::from(terms.recipe.training.max_steps);
    let every = u64::from(evaluation.every);
    let between = (1..last).filter(|step| every > 0 && step.is_multiple_of(every));
    [0].into_iter().chain(between).chain([last]).collect()
}

/// Checks the manifest's evaluations and which adapters it calls the best and the last.
pub(super) fn check(terms: &Terms, rounds: &BTreeMap<u32, Tally>, report: &mut Report) {
    use CheckName::Totals as Name;
    if terms.completed() {
        let steps: Vec<u64> = rounds.values().map(|it| it.step).collect();
        report.equal(Name, "evaluation", "evaluations after steps", &steps, &due(terms));
    }
    let written = &terms.progress.evaluation;
    for key in written.as_object().into_iter().flat_map(|it| it.keys()) {
        if !["before", "after"].contains(&key.as_str()) {
            report.fail(Name, "evaluation", "evaluation", format!("{key:?} is no field of it"));
        }
    }
    let (first, last) = (rounds.first_key_value(), rounds.last_key_value());
    for (key, tally) in [("before", first), ("after", last)] {
        let place = format!("evaluation.{key}");
        let written = written.get(key).filter(|it| !it.is_null());
        match (written, tally) {
            (Some(written), Some((_, tally))) => {
                let wanted = measured(tally);
                numbers(report, Name, "evaluation", &place, written, &wanted);
            }
            (Some(_), None) => report.fail(Name, "evaluation", place, "nothing was measured"),
            (None, Some(_)) if terms.completed() => {
                report.fail(Name, "evaluation", place, "it is missing in a completed run");
            }
            (None, _) => {}
        }
    }
    best(terms, rounds, report);
    match &terms.progress.last_adapter {
        Some(last) => {
            let steps = terms.progress.steps;
            if last.step != steps || !terms.progress.adapters.contains(last) {
                let problem = format!("step {} of {steps}", last.step);
                report.fail(Name, "last_adapter", "last_adapter", problem);
            }
        }
        None if terms.completed() => {
            let problem = "it is missing in a completed run";
            report.fail(Name, "last_adapter", "last_adapter", problem);
        }
        None => {}
    }
}

/// What an evaluation's record must say.
pub(super) fn measured(tally: &Tally) -> Vec<(&'static str, f64)> {
    let wanted = [
        ("success", tally.mean(tally.successes as f64)),
        ("reward", tally.mean(tally.rewards)),
        ("episodes", tally.episodes as f64),
        ("malformed", tally.malformed_share()),
    ];
    wanted.into_iter().chain(milestones(tally)).collect()
}

fn best(terms: &Terms, rounds: &BTreeMap<u32, Tally>, report: &mut Report) {
    use CheckName::Totals as Name;
    const PLACE: &str = "best_adapter";
    let progress = &terms.progress;
    let mut best: Option<(u64, f64, f64)> = None;
    for tally in rounds.values() {
        let (success, reward) = (tally.mean(tally.successes as f64), tally.mean(tally.rewards));
        // The later of two equals is the best.
        if best.is_none_or(|(_, s, r)| (success, reward) >= (s, r)) {
            best = Some((tally.step, success, reward));
        }
    }
    match (&progress.best_adapter, best) {
        (Some(written), Some((step, success, reward))) => {
            let same = written.adapter.step == step
                && close(written.success, success)
                && close(written.reward, reward)
                && progress.adapters.contains(&written.adapter);
            if !same {
                let problem = format!(
                    "step {} is written; the evidence gives step {step}, success {success}, reward \
                     {reward}",
                    written.adapter.step
                );
                report.fail(Name, "best_adapter", PLACE, problem);
            }
        }
        (Some(_), None) => report.fail(Name, "best_adapter", PLACE, "nothing was measured"),
        (None, Some(_)) if terms.completed() => {
            report.fail(Name, "best_adapter", PLACE, "it is missing in a completed run");
        }
        // An evaluation that was interrupted has no best yet.
        (None, _) => {}
    }
}
