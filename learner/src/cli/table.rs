//! What a person sees when a run has ended.

use std::path::Path;

use crate::train::{record::Evaluated, run::Summary};

/// The table at the end of a run.
pub(super) fn table(summary: &Summary, recipe: &Path) -> String {
    let held_out = |value: fn(&Evaluated) -> Option<f64>| {
        let shown = |evaluated: Option<&Evaluated>| {
            evaluated.and_then(value).map_or_else(|| "-".into(), |it| format!("{it:.3}"))
        };
        let (before, after) = (shown(summary.before.as_ref()), shown(summary.after.as_ref()));
        format!("{before} before, {after} after")
    };
    let leases = &summary.counts.leases;
    let last = format!("{} (loads in PEFT and vLLM)", summary.adapter.display());
    let best = summary.best_adapter.as_ref().map(|best| {
        let path = summary.run.join(&best.adapter.path);
        let text =
            format!("{} (step {}, success {:.3})", path.display(), best.adapter.step, best.success);
        (path, text)
    });
    let mut rows = vec![
        ("held-out success", held_out(|it| Some(it.success))),
        ("held-out reward", held_out(|it| Some(it.reward))),
    ];
    if summary.after.is_some_and(|after| after.milestone_reward.is_some()) {
        rows.push(("milestone reward", held_out(|it| it.milestone_reward)));
    }
    rows.push(("steps", format!("{} in {:.1} s", summary.steps, summary.seconds)));
    rows.push((
        "episodes",
        format!("{} accepted, {} rejected by the audit", leases.accepted, leases.rejected),
    ));
    rows.push(("accounts", summary.balance.to_string()));
    if summary.resumes > 0 {
        rows.push(("resumed", format!("{} times", summary.resumes)));
    }
    rows.push(("last adapter", last));
    rows.push(("its sha256", summary.adapter_sha256.to_string()));
    let adapter = match best {
        Some((path, text)) => {
            rows.push(("best adapter", text));
            path
        }
        None => summary.adapter.clone(),
    };
    rows.push(("evidence", summary.run.join("evidence.jsonl").display().to_string()));
    rows.push((
        "go on",
        format!("learner eval {} --adapter {}", recipe.display(), adapter.display()),
    ));
    let lines: Vec<String> =
        rows.iter().map(|(name, value)| format!("  {name:<17} {value}")).collect();
    lines.join("\n")
}
