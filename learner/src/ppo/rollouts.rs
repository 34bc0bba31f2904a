//! Rounds that are sampled here: codes for each task, what they were worth, and their advantages
//! within the task, written down as rows that `learner ppo` takes on their own.

use std::path::Path;

use protocol::{Digest, RunId};
use serde::{Deserialize, Serialize};
use serde_json::json;
use terminal::Failure;

use super::{
    plan::PpoPlan,
    sampling::{CodeSampler, SampledCode, SamplingPlan, right_digits},
};
use crate::{
    advantage::group_advantages,
    files::write_atomic,
    ranks::{Ranks, split_even},
    recipe::{CodeReward, CodeRow, Columns, Frozen, RolloutSettings, Sampled, parse_code_rows},
    rows::{Example, Images, Scored},
    sft::{data::examples, train::epoch_order},
};

/// A sampled round.
#[derive(Debug)]
pub struct SampledRound {
    /// The rows as token streams.
    pub examples: Vec<Example>,
    /// What they say about their codes.
    pub sampled: Vec<Sampled>,
    /// What came of sampling.
    pub record: RolloutRecord,
}

/// What came of sampling a round.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RolloutRecord {
    /// The round, from 1.
    pub round: u64,
    /// Tasks.
    pub tasks: usize,
    /// Codes that were sampled.
    pub codes: usize,
    /// Of those, that were no code: an id that is no digit, or an early end. They earn 0 and are not
    /// learned from.
    pub malformed: usize,
    /// Mean reward over all of them.
    pub reward: f64,
    /// Share of tasks whose codes earned unequally.
    pub mixed_groups: f64,
}

/// The rows that a round takes up: in an order of the seed's, each once before any comes again.
fn tasks_of(round: u64, seed: u64, rows: usize, settings: &RolloutSettings) -> Vec<usize> {
    let each = settings.tasks(rows) as u64;
    let mut order = (u64::MAX, Vec::new());
    (round * each..(round + 1) * each)
        .filter_map(|at| {
            let (pass, place) = (at / rows.max(1) as u64, at % rows.max(1) as u64);
            if order.0 != pass {
                order = (pass, epoch_order(seed, pass, rows));
            }
            order.1.get(usize::try_from(place).ok()?).copied()
        })
        .collect()
}

/// The rows of round `round` (from 0), which rank 0 writes into `dir`; it is made.
///
/// # Errors
/// The directory cannot be written to, or a failing device.
pub fn sample_round(
    plan: &PpoPlan,
    images: &mut Images,
    sampled: &[Vec<SampledCode>],
    tasks: &[usize],
    round: u64,
    dir: &Path,
    ranks: &Ranks,
) -> Result<SampledRound, Failure> {
    let rollouts =
        plan.recipe.rollouts.ok_or_else(|| Failure::Fault("the recipe samples nothing".into()))?;
    let mut text = String::new();
    let mut record = RolloutRecord {
        round: round + 1,
        tasks: tasks.len(),
        codes: 0,
        malformed: 0,
        reward: 0.0,
        mixed_groups: 0.0,
    };
    for (task, codes) in tasks.iter().filter_map(|task| plan.rows.get(*task)).zip(sampled) {
        record.codes += codes.len();
        // What is no code earns nothing, and the others are compared with it too.
        let earned = |it: &SampledCode| {
            it.code.as_deref().map_or(0.0, |code| reward(rollouts.reward, code, &task.code))
        };
        let rewards: Vec<f64> = codes.iter().map(earned).collect();
        let group = group_advantages(&rewards, rollouts.scale_rewards).map_err(Failure::fault)?;
        record.reward += rewards.iter().sum::<f64>();
        record.mixed_groups += f64::from(u8::from(group.mixed()));
        for ((it, reward), adv) in codes.iter().zip(rewards).zip(&group.advantages) {
            let Some(code) = &it.code else {
                record.malformed += 1;
                continue;
            };
            text.push_str(&row_line(task, code, *adv, it.logp, reward)?);
            text.push('\n');
        }
    }
    record.reward /= record.codes.max(1) as f64;
    record.mixed_groups /= record.tasks.max(1) as f64;
    let path = dir.join("train.jsonl");
    if ranks.leads() {
        std::fs::create_dir_all(dir)
            .map_err(|error| Failure::Fault(format!("{}: {error}", dir.display())))?;
        write_atomic(&path, text.as_bytes(), false).map_err(Failure::fault)?;
    }
    if text.is_empty() {
        return Err(Failure::Fault(format!(
            "round {}: the policy wrote no code at all; train it with learner sft first",
            round + 1
        )));
    }
    // Read back, so that the round is that of its file.
    let file = Frozen { field: "rows".into(), path, sha256: Digest::of(text.as_bytes()) };
    let rows =
        parse_code_rows(text.as_bytes(), &file.path, Columns::Round).map_err(Failure::fault)?;
    let examples =
        examples(&file, &rows, &plan.format, images, Scored::Code).map_err(Failure::fault)?;
    let sampled = rows.iter().filter_map(|row| row.scored).collect();
    Ok(SampledRound { examples, sampled, record })
}

/// The tasks of a round, and codes for them: each rank samples for a part of the tasks.
///
/// # Errors
/// As [`CodeSampler::sample`].
pub fn sample_codes(
    plan: &PpoPlan,
    sampler: &mut CodeSampler<'_>,
    images: &Images,
    round: u64,
    ranks: &mut Ranks,
) -> Result<(Vec<usize>, Vec<Vec<SampledCode>>), Failure> {
    let rollouts =
        plan.recipe.rollouts.ok_or_else(|| Failure::Fault("the recipe samples nothing".into()))?;
    let tasks = tasks_of(round, plan.recipe.seed, plan.rows.len(), &rollouts);
    let examples: Vec<&Example> =
        tasks.iter().filter_map(|task| plan.examples.get(*task)).collect();
    let mine = split_even(examples.len(), ranks.rank(), ranks.world());
    let how = SamplingPlan {
        first: mine.start as u64,
        generations: rollouts.num_generations,
        temperature: rollouts.temperature,
        run: RunId(plan.identity),
        round,
    };
    let mut codes = sampler.sample(&examples[mine], images, &how)?;
    if ranks.world() > 1 {
        let bytes = serde_json::to_vec(&codes).map_err(Failure::fault)?;
        codes = Vec::with_capacity(tasks.len());
        for bytes in ranks.all_gather(&bytes)? {
            let part: Vec<Vec<SampledCode>> =
                serde_json::from_slice(&bytes).map_err(Failure::fault)?;
            codes.extend(part);
        }
    }
    Ok((tasks, codes))
}

fn reward(kind: CodeReward, found: &str, right: &str) -> f64 {
    let count = right_digits(found, right).filter(|right| *right).count();
    match kind {
        CodeReward::Digits => count as f64 / right.len().max(1) as f64,
        CodeReward::Exact => f64::from(u8::from(count == right.len())),
    }
}

fn row_line(
    task: &CodeRow,
    code: &str,
    adv: f64,
    logp: f64,
    reward: f64,
) -> Result<String, Failure> {
    // Rounding of the last digit: a probability is at most 1.
    let mut row = json!({
        "name": task.name, "code": code, "adv": adv, "vllm_logp": logp.min(0.0), "reward": reward,
        "target": task.code,
    });
    if let Some(object) = row.as_object_mut() {
        object.extend(task.image.as_ref().map(|it| ("image".to_owned(), json!(it))));
        object.extend(task.memory.as_ref().map(|it| ("memory".to_owned(), json!(it))));
    }
    serde_json::to_string(&row).map_err(Failure::fault)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_earns_its_right_digits_or_only_the_whole() {
        assert_eq!(reward(CodeReward::Digits, "417", "407"), 2.0 / 3.0);
        assert_eq!(reward(CodeReward::Exact, "417", "407"), 0.0);
        assert_eq!(reward(CodeReward::Exact, "407", "407"), 1.0);
        assert_eq!(reward(CodeReward::Digits, "", "407"), 0.0);
    }

    #[test]
    fn rounds_take_up_every_task_once_before_any_comes_again() {
        let settings = RolloutSettings {
            rounds: 4,
            rows_per_round: 3,
            num_generations: 2,
            temperature: 1.0,
            reward: CodeReward::Digits,
            scale_rewards: crate::advantage::ScaleRewards::Group,
        };
        let all: Vec<usize> = (0..5).flat_map(|round| tasks_of(round, 7, 5, &settings)).collect();
        assert_eq!(all.len(), 15);
        for pass in all.chunks(5) {
            let mut pass = pass.to_vec();
            pass.sort_unstable();
            assert_eq!(pass, [0, 1, 2, 3, 4]);
        }
        let whole = RolloutSettings { rows_per_round: 0, ..settings };
        assert_eq!(tasks_of(0, 7, 5, &whole).len(), 5);
    }
}
