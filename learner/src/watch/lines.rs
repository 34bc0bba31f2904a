//! A run as lines, for logs and for machines.

use std::thread;

use serde_json::{Value, json};
use terminal::{Audience, Failure, Interrupt, Progress};

use super::{
    LOOK, plain,
    state::{State, Update},
};
use crate::scalars::{position, scalars};

/// What a line says of a record, and how it is called there.
const SAID: [(&str, &str); 20] = [
    ("reward", "reward"),
    ("success", "success"),
    ("milestones", "milestone_reward"),
    ("held-out success", "evaluation/success"),
    ("held-out reward", "evaluation/reward"),
    ("held-out loss", "evaluation/loss"),
    ("right codes", "evaluation/code_acc"),
    ("reward", "rollouts/reward"),
    ("loss", "loss"),
    ("pg", "pg_loss"),
    ("kl", "kl"),
    ("clip", "clip_ratio/region_mean"),
    ("clip", "clip_frac"),
    ("entropy", "entropy"),
    ("grad", "grad_norm"),
    ("staleness", "staleness"),
    ("rollout tok/s", "rollout_tokens_per_second"),
    ("update tok/s", "update_tokens_per_second"),
    ("tok/s", "tokens_per_second"),
    ("seconds", "step_time"),
];

/// Writes what is new until the run ends.
pub(super) fn follow(mut state: State, json: bool, interrupt: &Interrupt) -> Result<(), Failure> {
    let audience = if json { Audience::Machine } else { Audience::Person };
    let progress = Progress::new(audience);
    let (mut status, mut refused) = (String::new(), 0);
    loop {
        let update = state.refresh()?;
        if let Some(problem) = state.problem.take() {
            progress.note(&problem);
        }
        let anew = update.anew;
        if anew {
            progress.note("the run went back to its last commit");
        }
        write(&progress, update);
        let refusals: u64 = state.rejections().values().sum();
        if refusals > refused {
            let rungs: Vec<String> =
                state.rejections().iter().map(|(rung, count)| format!("{rung} {count}")).collect();
            let last = state.refusals().next_back().unwrap_or_default();
            progress.record("rejections", &json!({"rejections": state.rejections(), "last": last}));
            if !json {
                progress
                    .note(&format!("refused by the audit: {}; the last: {last}", rungs.join(", ")));
            }
        }
        refused = refusals;
        if state.status() != status {
            state.status().clone_into(&mut status);
            let (steps, total) = state.steps();
            let run = state.name();
            progress.record(
                "status",
                &json!({"run": run, "status": status, "steps": steps, "max_steps": total}),
            );
            if !json {
                progress.note(&format!("{run}: {status}, {steps} steps"));
            }
        }
        if state.ended() {
            return Ok(());
        }
        if interrupt.raised() {
            return Err(Failure::Interrupted("stopped watching; the run goes on".into()));
        }
        thread::sleep(LOOK);
    }
}

fn write(progress: &Progress, update: Update) {
    for record in &update.records {
        let event = match record {
            it if it["evaluation"].is_object() => "evaluation",
            it if it["update"].is_u64() => "update",
            _ => "step",
        };
        progress.record(event, record);
        if progress.for_person() {
            progress.note(&line(record));
        }
    }
    for join in &update.joins {
        progress.record("join", join);
        if progress.for_person() {
            let text = |key: &str| plain(join[key].as_str().unwrap_or_default());
            progress.note(&format!("{} {} {}", text("outcome"), text("actor"), text("address")));
        }
    }
    if let Some(episode) = &update.episode {
        let of = ["task_id", "optimizer_step", "split", "end", "training_reward", "score"];
        let fields = of.iter().map(|key| ((*key).to_owned(), episode[*key].clone()));
        progress.record("episode", &Value::Object(fields.collect()));
    }
}

/// A record of `metrics.jsonl` for people.
fn line(record: &Value) -> String {
    let numbers = scalars(record);
    let what = if record["update"].is_u64() { "update" } else { "step" };
    let at = position(record).unwrap_or_default();
    let mut text = record["round"].as_u64().map_or_else(String::new, |it| format!("round {it}  "));
    text.push_str(&format!("{what} {at}"));
    for (said, name) in SAID {
        if let Some((_, number)) = numbers.iter().find(|(it, _)| it == name) {
            text.push_str(&format!("  {said} {}", crate::report::number(*number)));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_a_line_of_what_it_has() {
        let step = json!({"step": 3, "reward": 0.5, "kl": null, "clip_ratio/region_mean": 0.0});
        assert_eq!(line(&step), "step 3  reward 0.5  clip 0");
        let update = json!({"step": 9, "update": 2, "round": 4, "pg_loss": -0.25});
        assert_eq!(line(&update), "round 4  update 9  pg -0.25");
        let held = json!({"step": 3, "evaluation": {"success": 0.125}});
        assert_eq!(line(&held), "step 3  held-out success 0.125");
    }
}
