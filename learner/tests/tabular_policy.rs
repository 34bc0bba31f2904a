//! The learner's advantages and loss teach a table to play: no neural network, no tokens, only the
//! guessing game and the code that real runs are trained with.

use environments::{
    Simulation as _,
    guess::{Guess, Settings},
};
use learner::{
    advantage::{ScaleRewards, group_advantages},
    loss::{Aggregation, Denominator, LossConfig, LossRow, StepTotals, policy_loss},
};
use serde_json::{Map, json};

const N: usize = 8;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// A softmax over guesses for every pair of bounds that the feedback so far leaves.
struct Table(Vec<[f64; N]>);

impl Table {
    fn at(low: usize, high: usize) -> usize {
        low * (N + 2) + high
    }

    fn probabilities(&self, state: usize) -> [f64; N] {
        let logits = self.0[state];
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let exp = logits.map(|logit| (logit - max).exp());
        let sum: f64 = exp.iter().sum();
        exp.map(|e| e / sum)
    }
}

struct Rollout {
    reward: f64,
    /// State, action and log-probability of every guess.
    guesses: Vec<(usize, usize, f64)>,
}

fn rollout(table: &Table, seed: u64, random: &mut Random) -> Rollout {
    let mut game = Guess::new(Settings::default());
    game.reset(&Map::new(), seed).expect("resets");
    let (mut low, mut high, mut guesses) = (1, N, Vec::new());
    while !game.done() {
        let state = Table::at(low, high);
        let probabilities = table.probabilities(state);
        let mut left = random.unit();
        let action = probabilities
            .iter()
            .position(|p| {
                left -= p;
                left < 0.0
            })
            .unwrap_or(N - 1);
        guesses.push((state, action, probabilities[action].ln()));
        let value = action + 1;
        let arguments = json!({"value": value}).as_object().cloned().unwrap_or_default();
        match game.call("guess", &arguments).expect("plays").as_str() {
            "higher" => low = low.max(value + 1),
            "lower" => high = high.min(value - 1),
            _ => {}
        }
    }
    Rollout { reward: game.score().reward, guesses }
}

fn success_rate(table: &Table, random: &mut Random) -> f64 {
    (0..400).map(|i| rollout(table, 10_000 + i, random).reward).sum::<f64>() / 400.0
}

/// One group of one seed, and one step of plain gradient descent.
fn step(table: &mut Table, seed: u64, random: &mut Random) {
    let rollouts: Vec<Rollout> = (0..8).map(|_| rollout(table, seed, random)).collect();
    let rewards: Vec<f64> = rollouts.iter().map(|rollout| rollout.reward).collect();
    let group = group_advantages(&rewards, ScaleRewards::Group).expect("finite");
    let logp: Vec<Vec<f64>> = rollouts
        .iter()
        .map(|rollout| rollout.guesses.iter().map(|guess| guess.2).collect())
        .collect();
    let rows: Vec<LossRow<'_>> = logp
        .iter()
        .zip(&group.advantages)
        .map(|(logp, advantage)| LossRow {
            logp,
            logp_old: logp,
            logp_ref: None,
            mask: None,
            entropy: None,
            advantage: (*advantage).into(),
            importance: None,
        })
        .collect();
    let config = LossConfig::default();
    // Dr. GRPO's constant 1: the loss is minus the mean of advantage times log-probability.
    let denominator = Denominator::new(Aggregation::SeqMeanTokenSumNorm, StepTotals::of(&rows), 1)
        .expect("tokens");
    let loss = policy_loss(&config, &denominator, &rows).expect("finite");
    for (rollout, slopes) in rollouts.iter().zip(&loss.gradient) {
        for ((state, action, _), slope) in rollout.guesses.iter().zip(slopes) {
            let probabilities = table.probabilities(*state);
            for (value, probability) in probabilities.iter().enumerate() {
                let indicator = if value == *action { 1.0 } else { 0.0 };
                table.0[*state][value] -= 5.0 * slope * (indicator - probability);
            }
        }
    }
}

#[test]
fn a_table_learns_the_guessing_game() {
    // At this learning rate a single run may settle on a poor opening: the claim is about the mean.
    const STARTS: u64 = 10;
    let (mut before, mut after) = (0.0, 0.0);
    for start in 1..=STARTS {
        let mut random = Random(start);
        let mut table = Table(vec![[0.0; N]; (N + 2) * (N + 2)]);
        before += success_rate(&table, &mut random) / STARTS as f64;
        for seed in 0..100 {
            step(&mut table, seed, &mut random);
        }
        after += success_rate(&table, &mut random) / STARTS as f64;
    }
    assert!(before < 0.45, "before {before}");
    assert!(after > 0.6, "after {after}");
}
