//! Metrics, adapters and the manifest's totals, against what the evidence amounts to.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use policy::{
    model::{LoraConfig, TargetModules, target_name},
    score::ValueHead,
};
use protocol::Digest;
use safetensors::SafeTensors;
use serde_json::Value;

use super::{
    CheckName, Report, evaluations,
    ledger::Ledger,
    tally::{Tallies, Tally},
    terms::Terms,
};
use crate::{
    files::{AdapterRecord, GroupRecord, METRICS, PolicyStore, compare_adapters},
    leases::LeaseCounts,
};

/// Numbers that were written and read as decimal text.
const CLOSE: f64 = 1e-9;

pub(super) fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= CLOSE * a.abs().max(b.abs()).max(1.0)
}

/// Compares the numbers of a JSON object with what they should be.
pub(super) fn numbers(
    report: &mut Report,
    name: CheckName,
    reason: &'static str,
    place: &str,
    object: &Value,
    wanted: &[(&str, f64)],
) {
    for (key, wanted) in wanted {
        match object.get(key).and_then(Value::as_f64) {
            Some(found) if close(found, *wanted) => {}
            Some(found) => {
                let problem = format!("{key} is {found}; the evidence gives {wanted}");
                report.fail(name, reason, place, problem);
            }
            None => report.fail(name, reason, place, format!("{key} is missing")),
        }
    }
}

/// The mean reward by milestones, where there is one, as [`numbers`] takes it.
pub(super) fn milestones(tally: &Tally) -> impl Iterator<Item = (&'static str, f64)> {
    tally.milestone_rewards.map(|sum| ("milestone_reward", tally.mean(sum))).into_iter()
}

/// Checks `metrics.jsonl`; returns how many steps had a gradient.
pub(super) fn metrics(
    terms: &Terms,
    tallies: &Tallies,
    rounds: &BTreeMap<u32, Tally>,
    report: &mut Report,
) -> u64 {
    use CheckName::Metrics as Name;
    let text = match fs::read(terms.directory.join(METRICS)) {
        Ok(text) => text,
        Err(error) => {
            report.fail(Name, "metrics_missing", METRICS, error);
            return 0;
        }
    };
    if terms.closed() {
        let written = terms.progress.metrics.as_ref().map(|it| it.sha256);
        report.equal(Name, "metrics_digest", METRICS, &written, &Some(Digest::of(&text)));
    }
    let (mut steps, mut due, mut gradients) = (0_u64, rounds.values(), 0);
    let training = &terms.recipe.training;
    for (line, text) in (1..).zip(text.split(|byte| *byte == b'\n')) {
        if text.is_empty() {
            continue;
        }
        let place = format!("{METRICS} line {line}");
        let value: Value = match serde_json::from_slice(text) {
            Ok(value) => value,
            Err(error) => {
                if terms.closed() {
                    report.fail(Name, "metrics_line", place, error);
                }
                continue;
            }
        };
        if let Some(evaluation) = value.get("evaluation") {
            let Some(tally) = due.next() else {
                report.fail(Name, "metrics_evaluation", place, "the evidence has no such round");
                continue;
            };
            let step = value.get("step").and_then(Value::as_u64);
            if (step, steps) != (Some(tally.step), tally.step) {
                let problem = format!(
                    "after step {}, of {steps} lines of steps; the evidence's is after step {}",
                    step.map_or_else(|| "null".into(), |step| step.to_string()),
                    tally.step
                );
                report.fail(Name, "metrics_evaluation", &place, problem);
            }
            if !tally.broken {
                let wanted = evaluations::measured(tally);
                numbers(report, Name, "metrics_evaluation", &place, evaluation, &wanted);
            }
            continue;
        }
        let Some(tally) = tallies.steps.get(&steps) else {
            report.fail(Name, "metrics_step", place, "the evidence has no such step");
            steps += 1;
            continue;
        };
        let groups = tally.groups.max(1) as f64;
        let rate = training.optimizer.learning_rate_at(steps, u64::from(training.max_steps));
        let staleness = steps - training.played_at(steps);
        steps += 1;
        let norm = value.get("grad_norm").and_then(Value::as_f64).unwrap_or_default();
        gradients += u64::from(norm > 0.0);
        if tally.broken {
            report.note(Name, format!("{place} is not compared: episodes of its step fail"));
            continue;
        }
        let wanted = [
            ("step", steps as f64),
            ("reward", tally.mean(tally.rewards)),
            ("reward_std", tally.stds / groups),
            ("success", tally.mean(tally.successes as f64)),
            ("mixed_groups", tally.mixed as f64 / groups),
            ("learning_rate", rate),
            ("staleness", staleness as f64),
            ("episodes", tally.episodes as f64),
            ("stream_tokens", tally.stream_tokens as f64),
            ("completions/mean_length", tally.mean(tally.sampled_tokens as f64)),
            ("malformed", tally.malformed_share()),
        ];
        let wanted: Vec<_> = wanted.into_iter().chain(milestones(tally)).collect();
        numbers(report, Name, "metrics_step", &place, &value, &wanted);
        let policy = tally.policy.map(|policy| policy.to_string());
        let written = value.get("policy").and_then(Value::as_str).map(str::to_owned);
        report.equal(Name, "metrics_step", format!("{place}, policy"), &written, &policy);
    }
    let lacking = due.len();
    let found = rounds.len() - lacking;
    report.looked_at(Name, format!("{steps} steps, {found} evaluations"));
    if terms.completed() && lacking > 0 {
        let problem = format!("{lacking} evaluations of the evidence stand in no line");
        report.fail(Name, "metrics_evaluation", METRICS, problem);
    }
    let used = tallies.steps.len() as u64;
    if terms.completed() {
        report.equal(Name, "metrics_length", METRICS, &steps, &used);
    }
    if terms.closed() {
        report.equal(CheckName::Totals, "total", "steps", &terms.progress.steps, &steps);
    }
    gradients
}

/// Checks the archive of adapters, the saved adapters and the update evidence.
pub(super) fn adapters(terms: &Terms, ledger: &Ledger, store: &PolicyStore, report: &mut Report) {
    use CheckName::Adapters as Name;
    let played: BTreeSet<_> = ledger.groups.values().map(|it| it.order.policy).collect();
    let (mut bytes, mut lacking) = (0, 0_u64);
    let mut announced = BTreeMap::new();
    for it in &ledger.policies {
        let base = terms.manifest.model.weights_sha256;
        let policy = protocol::PolicyDigest::new(&base, &it.adapter);
        let place = format!("policy {} of step {}", it.policy, it.step);
        report.equal(Name, "adapter_digest", place, &it.policy, &policy);
        announced.insert(it.policy, *it);
    }
    for it in announced.values() {
        let place = store
            .path(&it.policy)
            .strip_prefix(&terms.directory)
            .map_or_else(|_| it.policy.to_string(), |path| path.display().to_string());
        if !it.archived {
            lacking += u64::from(played.contains(&it.policy));
            continue;
        }
        bytes += it.bytes;
        if !store.holds(&it.policy) {
            report.fail(Name, "adapter_missing", place, "the archive had this adapter");
            continue;
        }
        match store.adapter_bytes(&it.policy) {
            Ok(found) => {
                let found = found.len() as u64;
                report.equal(Name, "adapter_length", place, &it.bytes, &found);
            }
            Err(error) => report.fail(Name, "adapter_digest", place, error),
        }
    }
    report.looked_at(
        Name,
        format!("{} policies, {} played; {bytes} bytes archived", announced.len(), played.len()),
    );
    if lacking > 0 {
        let note = format!(
            "{lacking} policies that played are not archived (evidence.archive_mib): their episodes \
             cannot be scored again"
        );
        report.note(Name, note);
    }
    let written = terms.progress.policies;
    let archived = announced.values().filter(|it| it.archived).count() as u64;
    let found = (announced.len() as u64, archived, bytes);
    let written = (written.announced, written.archived, written.bytes);
    if terms.closed() {
        report.equal(CheckName::Totals, "total", "policies", &written, &found);
    }
    for adapter in &terms.progress.adapters {
        let path = adapter.path.join("adapter_model.safetensors");
        let place = path.display().to_string();
        match fs::read(terms.directory.join(&path)) {
            Ok(bytes) => {
                let found = Digest::of(&bytes);
                report.equal(Name, "adapter_digest", &place, &adapter.sha256, &found);
                adapter_config(terms, adapter, &bytes, report);
            }
            Err(error) => report.fail(Name, "adapter_missing", &place, error),
        }
        if let Some(sha256) = adapter.value_head_sha256 {
            let path = adapter.path.join(ValueHead::FILE);
            let place = path.display().to_string();
            match fs::read(terms.directory.join(&path)) {
                Ok(bytes) => report.equal(Name, "value_head", &place, &sha256, &Digest::of(&bytes)),
                Err(error) => report.fail(Name, "value_head", &place, error),
            }
        }
        let known = ledger
            .policies
            .iter()
            .any(|it| (it.step, it.adapter) == (adapter.step, adapter.sha256));
        if !known {
            let step = adapter.step;
            let problem = format!("no policy of step {step} was announced with this adapter");
            report.fail(Name, "adapter_unknown", place, problem);
        }
    }
}

/// Checks that the settings beside an adapter's weights are the recipe's: they scale what it does.
fn adapter_config(terms: &Terms, adapter: &AdapterRecord, weights: &[u8], report: &mut Report) {
    use CheckName::Adapters as Name;
    let path = adapter.path.join("adapter_config.json");
    let place = path.display().to_string();
    let mut expected = terms.recipe.lora.to_config();
    if expected.target_modules == TargetModules::AllLinear {
        // PEFT is told the names of the linears, which are those of the weights.
        let names = SafeTensors::deserialize(weights).map(|file| {
            let paths = file.names().into_iter().filter_map(|it| it.strip_suffix(".lora_A.weight"));
            paths.map(|it| target_name(it).to_owned()).collect()
        });
        let names: BTreeSet<String> = names.unwrap_or_default();
        expected.target_modules = TargetModules::Names(names.into_iter().collect());
    }
    match LoraConfig::read_peft(&terms.directory.join(path)) {
        Ok(found) => report.equal(Name, "adapter_config", place, &found, &expected),
        Err(error) => report.fail(Name, "adapter_config", place, error),
    }
}

/// Checks what the manifest sums up.
pub(super) fn totals(
    terms: &Terms,
    ledger: &Ledger,
    tallies: &Tallies,
    rounds: &BTreeMap<u32, Tally>,
    gradients: u64,
    report: &mut Report,
) {
    use CheckName::Totals as Name;
    if tallies.broken() {
        report.looked_at(Name, "not compared: episodes fail");
        return;
    }
    report.looked_at(Name, "coverage, groups, refusals, leases, evaluations");
    let mut total = |place: &str, written: u64, found: u64| {
        report.equal(Name, "total", place, &written, &found);
    };
    let progress = &terms.progress;
    let coverage = &progress.task_coverage;
    let sum = |it: &mut dyn Iterator<Item = u64>| it.sum::<u64>();
    let trained = sum(&mut tallies.steps.values().map(|it| it.episodes));
    let evaluated = sum(&mut tallies.rounds.values().map(|it| it.episodes));
    let mixed = sum(&mut tallies.steps.values().map(|it| it.mixed));
    let kept = sum(&mut ledger.refused.iter().filter_map(|it| it.kept));
    // A run that was killed wrote more than its last manifest knows of.
    if terms.closed() {
        total("task_coverage.total_rollouts", coverage.total_rollouts, trained);
        let groups = tallies.groups.len() as u64;
        total("task_coverage.optimizer_groups", coverage.optimizer_groups, groups);
        total("task_coverage.evaluation_rollouts", coverage.evaluation_rollouts, evaluated);
        let refused = ledger.refused.len() as u64;
        total("task_coverage.rejected_rollouts", coverage.rejected_rollouts, refused);
        total("task_coverage.rejected_bytes", coverage.rejected_bytes, kept);
        let unique = tallies.tasks.len() as u64;
        let consumed = coverage.consumed_unique_tasks as u64;
        total("task_coverage.consumed_unique_tasks", consumed, unique);
        let rows = terms.manifest.dataset.rows as u64;
        total("task_coverage.training_pool_rows", coverage.training_pool_rows as u64, rows);
        let evidence = &progress.update_evidence;
        total("update_evidence.mixed_reward_groups", evidence.mixed_reward_groups, mixed);
        let place = "update_evidence.nonzero_gradient_steps";
        total(place, evidence.nonzero_gradient_steps, gradients);
        let ids: Vec<String> = tallies.tasks.iter().cloned().collect();
        let place = "task_coverage.consumed_unique_task_ids";
        report.equal(Name, "total", place, &coverage.consumed_unique_task_ids, &ids);
        refusals(terms, ledger, report);
        groups_written(&progress.reward_groups, &tallies.groups, report);
        leases(terms, ledger, report);
        evaluations::check(terms, rounds, report);
    }
}

fn refusals(terms: &Terms, ledger: &Ledger, report: &mut Report) {
    let mut found: BTreeMap<String, u64> = BTreeMap::new();
    for it in &ledger.refused {
        *found.entry(it.reason.clone()).or_default() += 1;
    }
    let written = &terms.progress.rejections;
    report.equal(CheckName::Totals, "total", "rejections", written, &found);
}

fn groups_written(written: &[GroupRecord], found: &[GroupRecord], report: &mut Report) {
    use CheckName::Totals as Name;
    let count = (written.len(), found.len());
    report.equal(Name, "reward_groups", "reward_groups", &count.0, &count.1);
    for (index, (written, found)) in written.iter().zip(found).enumerate() {
        let floats = |it: &GroupRecord| -> Vec<f64> {
            [&it.rewards[..], &it.strict_rewards, &[it.reward_std]].concat()
        };
        let (a, b) = (floats(written), floats(found));
        let near = a.len() == b.len() && a.iter().zip(&b).all(|(a, b)| close(*a, *b));
        let plain = |it: &GroupRecord| {
            let ids = (it.optimizer_step, it.group, it.task_id.clone(), it.episode_seed);
            (ids, it.strict_successes, it.policy)
        };
        if !near || plain(written) != plain(found) {
            let problem = format!("it is not what group {} gives", found.group);
            report.fail(Name, "reward_groups", format!("reward_groups[{index}]"), problem);
        }
    }
}

fn leases(terms: &Terms, ledger: &Ledger, report: &mut Report) {
    use CheckName::Totals as Name;
    let written = &terms.progress.leases;
    let Ok(counts) = serde_json::from_value::<LeaseCounts>(written.clone()) else {
        return report.fail(Name, "lease_counts", "leases", "they are no lease counts");
    };
    let pending = counts.received.checked_sub(counts.accepted + counts.rejected);
    if pending.is_none() {
        let problem = "more answers were judged than received";
        report.fail(Name, "lease_counts", "leases", problem);
    }
    let ended = counts.submitted + counts.failed + counts.expired;
    if ended > counts.granted || (terms.completed() && ended != counts.granted) {
        let problem = format!("{} grants, and {ended} ends of grants", counts.granted);
        report.fail(Name, "lease_counts", "leases", problem);
    }
    let found = ledger.accepted.len() as u64;
    report.equal(Name, "lease_counts", "leases.accepted", &counts.accepted, &found);
    let refused = ledger.refused.len() as u64;
    report.equal(Name, "lease_counts", "leases.rejected", &counts.rejected, &refused);
    if let Some(balance) = &terms.progress.balance {
        let counted = (balance.received_unique, balance.accepted, balance.rejected);
        let same = counted == (counts.received, counts.accepted, counts.rejected);
        if !same || !balance.holds() {
            report.fail(Name, "balance", "balance", format!("it does not add up: {balance}"));
        }
    }
    report.equal(Name, "total", "resumes", &terms.progress.resumes, &ledger.resumes);
    let dropped = ledger.groups.values().filter(|it| it.dropped).count() as u64;
    report.equal(Name, "lease_counts", "leases.groups_dropped", &counts.groups_dropped, &dropped);
}

/// Compares the first and the last adapter of a completed run again.
pub(super) fn update_evidence(
    terms: &Terms,
    ledger: &Ledger,
    store: &PolicyStore,
    report: &mut Report,
) {
    use CheckName::Totals as Name;
    let first = ledger.policies.iter().min_by_key(|it| it.step);
    let last = ledger.policies.iter().max_by_key(|it| it.step);
    let (Some(first), Some(last)) = (first, last) else { return };
    if !terms.completed() {
        return;
    }
    let bytes = (store.adapter_bytes(&first.policy), store.adapter_bytes(&last.policy));
    let (Ok(first), Ok(last)) = bytes else {
        report.note(Name, "update evidence: the first or the last adapter is not there");
        return;
    };
    let written = terms.progress.update_evidence;
    match compare_adapters(&first, &last) {
        Ok(found) => {
            let counts = (found.trainable_tensors, found.changed_trainable_tensors);
            let claimed = (written.trainable_tensors, written.changed_trainable_tensors);
            let delta = (written.max_abs_parameter_delta, found.max_abs_parameter_delta);
            if claimed != counts || !close(delta.0, delta.1) {
                let problem = format!(
                    "{} of {} tensors changed by at most {}; the adapters give {} of {} by at most {}",
                    claimed.1, claimed.0, delta.0, counts.1, counts.0, delta.1
                );
                report.fail(Name, "update_evidence", "update_evidence", problem);
            }
        }
        Err(problem) => report.fail(Name, "update_evidence", "policies", problem),
    }
}
