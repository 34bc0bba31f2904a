use super::*;

const CONFIG: LossConfig = LossConfig {
    surrogate: Surrogate::Clipped,
    ratio: Ratio::Token,
    epsilon: 0.2,
    epsilon_high: 0.28,
    delta: None,
    beta: 0.04,
    kl_estimator: KlEstimator::K3,
    entropy_coef: 0.0,
};

/// A rollout that owns its columns.
#[derive(Clone)]
struct Rollout {
    logp: Vec<f64>,
    old: Vec<f64>,
    reference: Vec<f64>,
    mask: Vec<bool>,
    advantage: f64,
}

impl Rollout {
    fn row(&self) -> LossRow<'_> {
        LossRow {
            logp: &self.logp,
            logp_old: &self.old,
            logp_ref: Some(&self.reference),
            mask: Some(&self.mask),
            entropy: None,
            advantage: self.advantage.into(),
            importance: None,
        }
    }
}

/// A small generator of reproducible numbers in [0, 1).
struct Draws(u64);

impl Draws {
    fn next(&mut self) -> f64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1_u64 << 53) as f64
    }
}

fn rollouts(seed: u64, lengths: &[usize]) -> Vec<Rollout> {
    let mut draws = Draws(seed);
    lengths
        .iter()
        .map(|&length| {
            let logp: Vec<f64> = (0..length).map(|_| -3.0 * draws.next()).collect();
            let mut near = |spread: f64| -> Vec<f64> {
                logp.iter().map(|lp| lp + spread * (draws.next() - 0.5)).collect()
            };
            let (old, reference) = (near(1.0), near(0.8));
            Rollout {
                old,
                reference,
                mask: (0..length).map(|_| draws.next() < 0.8).collect(),
                advantage: 4.0 * draws.next() - 2.0,
                logp,
            }
        })
        .collect()
}

fn rows(rollouts: &[Rollout]) -> Vec<LossRow<'_>> {
    rollouts.iter().map(Rollout::row).collect()
}

fn run(aggregation: Aggregation, rollouts: &[Rollout]) -> Loss {
    let rows = rows(rollouts);
    let denominator = Denominator::new(aggregation, StepTotals::of(&rows), 64).expect("tokens");
    policy_loss(&CONFIG, &denominator, &rows).expect("finite")
}

/// The formulas as papers write them, with no shared code.
fn brute_force(aggregation: Aggregation, rollouts: &[Rollout]) -> f64 {
    let mut per_rollout = Vec::new();
    for rollout in rollouts {
        let mut tokens = Vec::new();
        for t in 0..rollout.logp.len() {
            if !rollout.mask[t] {
                continue;
            }
            let ratio = (rollout.logp[t] - rollout.old[t]).exp();
            let clip = ratio.clamp(0.8, 1.28);
            let surrogate = (ratio * rollout.advantage).min(clip * rollout.advantage);
            let d = rollout.reference[t] - rollout.logp[t];
            tokens.push(-surrogate + 0.04 * (d.exp() - d - 1.0));
        }
        per_rollout.push(tokens);
    }
    let sum = |tokens: &Vec<f64>| tokens.iter().sum::<f64>();
    let n = per_rollout.iter().filter(|tokens| !tokens.is_empty()).count() as f64;
    match aggregation {
        Aggregation::SeqMeanTokenMean => {
            per_rollout
                .iter()
                .filter(|t| !t.is_empty())
                .map(|t| sum(t) / t.len() as f64)
                .sum::<f64>()
                / n
        }
        Aggregation::SeqMeanTokenSumNorm => per_rollout.iter().map(sum).sum::<f64>() / (n * 64.0),
        Aggregation::SeqMeanTokenSum => per_rollout.iter().map(sum).sum::<f64>() / n,
        Aggregation::TokenMean => {
            let tokens: usize = per_rollout.iter().map(Vec::len).sum();
            per_rollout.iter().map(sum).sum::<f64>() / tokens as f64
        }
    }
}

const TYPES: [Aggregation; 4] = [
    Aggregation::SeqMeanTokenMean,
    Aggregation::SeqMeanTokenSumNorm,
    Aggregation::TokenMean,
    Aggregation::SeqMeanTokenSum,
];

#[test]
fn losses_equal_their_papers_formulas() {
    for aggregation in TYPES {
        for seed in 0..20 {
            let rollouts = rollouts(seed, &[1, 7, 20, 3]);
            let (got, want) =
                (run(aggregation, &rollouts).value, brute_force(aggregation, &rollouts));
            assert!((got - want).abs() < 1e-12, "{aggregation:?} {seed}: {got} {want}");
        }
    }
}

#[test]
fn gradients_equal_numeric_differentiation() {
    for aggregation in TYPES {
        let rollouts = rollouts(3, &[5, 9, 2]);
        let gradient = run(aggregation, &rollouts).gradient;
        let step = 1e-6;
        for (i, rollout) in rollouts.iter().enumerate() {
            for (t, &got) in gradient[i].iter().enumerate() {
                let at = |delta: f64| {
                    let mut moved = rollouts.clone();
                    moved[i].logp[t] += delta;
                    run(aggregation, &moved).value
                };
                let numeric = (at(step) - at(-step)) / (2.0 * step);
                assert!((got - numeric).abs() < 1e-7, "{aggregation:?} {i},{t}: {got} {numeric}");
                assert!(rollout.mask[t] || got == 0.0, "a masked token has no gradient");
            }
        }
    }
}

#[test]
fn ranks_of_10_and_90_tokens_add_up_to_one_rank_of_100() {
    for aggregation in TYPES {
        let mut rollouts = rollouts(9, &[10, 90]);
        rollouts.iter_mut().for_each(|r| r.mask.fill(true));
        let whole = run(aggregation, &rollouts);
        let all = rows(&rollouts);
        let totals = StepTotals::of(&all[..1]).plus(StepTotals::of(&all[1..]));
        let denominator = Denominator::new(aggregation, totals, 64).expect("tokens");
        let parts: Vec<Loss> = all
            .chunks(1)
            .map(|part| policy_loss(&CONFIG, &denominator, part).expect("finite"))
            .collect();
        let sum: f64 = parts.iter().map(|p| p.value).sum();
        assert!((sum - whole.value).abs() < 1e-12);
        let gradient: Vec<Vec<f64>> = parts.iter().flat_map(|p| p.gradient.clone()).collect();
        assert_eq!(gradient, whole.gradient);
        let mut stats = parts[0].stats;
        stats.merge(&parts[1].stats);
        assert_eq!((stats.tokens, stats.clip_fraction()), (100, whole.stats.clip_fraction()));
    }
}

#[test]
fn reordered_rows_give_the_same_gradient_by_row() {
    let rollouts = rollouts(4, &[4, 6, 8, 5]);
    let order = [2, 0, 3, 1];
    let shuffled: Vec<Rollout> = order.iter().map(|&i| rollouts[i].clone()).collect();
    for aggregation in TYPES {
        let (plain, moved) = (run(aggregation, &rollouts), run(aggregation, &shuffled));
        for (place, &i) in order.iter().enumerate() {
            assert_eq!(moved.gradient[place], plain.gradient[i]);
        }
        assert!((moved.value - plain.value).abs() < 1e-12);
    }
}

fn one(logp: f64, old: f64, reference: Option<f64>, advantage: f64, beta: f64) -> Loss {
    let reference = reference.map(|value| [value]);
    let row = LossRow {
        logp: &[logp],
        logp_old: &[old],
        logp_ref: reference.as_ref().map(|value| value.as_slice()),
        mask: None,
        entropy: None,
        advantage: advantage.into(),
        importance: None,
    };
    let denominator =
        Denominator::new(Aggregation::SeqMeanTokenMean, StepTotals::of(&[row]), 1).expect("tokens");
    policy_loss(&LossConfig { beta, ..CONFIG }, &denominator, &[row]).expect("finite")
}

#[test]
fn equal_policies_have_ratio_one_and_the_plain_policy_gradient() {
    let loss = one(-1.3, -1.3, None, 0.7, 0.0);
    assert_eq!((loss.value, loss.gradient[0][0]), (-0.7, -0.7));
    assert_eq!((loss.stats.mean_ratio(), loss.stats.clip_fraction()), (Some(1.0), 0.0));
    assert_eq!(loss.stats.mean_kl(), None);
}

#[test]
fn clipping_is_one_sided_and_counted_by_side() {
    let up = 1.5_f64.ln();
    let high = one(up, 0.0, None, 1.0, 0.0);
    assert_eq!((high.gradient[0][0], high.stats.clipped_high), (0.0, 1));
    assert!((high.value + 1.28).abs() < 1e-12);
    let low = one(0.5_f64.ln(), 0.0, None, -1.0, 0.0);
    assert_eq!((low.gradient[0][0], low.stats.clipped_low), (0.0, 1));
    assert!((low.value - 0.8).abs() < 1e-12);
    let free = one(up, 0.0, None, -1.0, 0.0);
    assert!((free.gradient[0][0] - 1.5).abs() < 1e-12, "a bad token that grew is pushed back");
    assert_eq!(free.stats.clip_fraction(), 0.0);
}

#[test]
fn k3_has_its_known_values_and_vanishes_at_the_reference() {
    for (gap, k3) in [(0.5, 0.1487), (-0.5, 0.1065), (0.0, 0.0)] {
        let loss = one(-1.0, -1.0, Some(-1.0 + gap), 0.0, 2.0);
        let got = loss.stats.mean_kl().expect("has a reference");
        assert!((got - k3).abs() < 5e-5, "{gap}: {got}");
        assert!((loss.value - 2.0 * got).abs() < 1e-15 && loss.kl_value == loss.value);
        assert!((loss.gradient[0][0] - 2.0 * (1.0 - f64::exp(gap))).abs() < 1e-12);
    }
}

#[test]
fn a_group_without_advantages_still_feels_the_kl_term() {
    let loss = one(-1.0, -1.0, Some(-2.0), 0.0, 0.1);
    assert!(loss.gradient[0][0] > 0.0, "descent lowers logp towards the reference");
    let without = one(-1.0, -1.0, Some(-2.0), 0.0, 0.0);
    assert_eq!(without.gradient[0][0], 0.0);
    assert!(without.stats.mean_kl().is_some(), "the KL is still reported");
}

#[test]
fn rollouts_without_tokens_weigh_nothing_and_an_empty_step_is_refused() {
    let mut rollouts = rollouts(5, &[4, 4]);
    let alone = run(Aggregation::SeqMeanTokenMean, &rollouts[..1]);
    rollouts[1].mask.fill(false);
    let both = run(Aggregation::SeqMeanTokenMean, &rollouts);
    assert_eq!((alone.value, &alone.gradient[0]), (both.value, &both.gradient[0]));
    assert_eq!(
        Denominator::new(Aggregation::SeqMeanTokenMean, StepTotals::default(), 8),
        Err(LossError::Empty)
    );
}

#[test]
fn columns_that_do_not_fit_and_overflow_are_errors_that_name_the_place() {
    let rollout = rollouts(6, &[10]).remove(0);
    let denominator =
        Denominator::new(Aggregation::SeqMeanTokenMean, StepTotals { rollouts: 1, tokens: 10 }, 8)
            .expect("tokens");
    let error = |row: LossRow<'_>| policy_loss(&CONFIG, &denominator, &[row]).expect_err("refused");
    let short = LossRow { mask: Some(&rollout.mask[..9]), ..rollout.row() };
    assert_eq!(error(short).to_string(), "row 0: mask has 9 values for 10 tokens");
    let bare = LossRow { logp_ref: None, ..rollout.row() };
    assert_eq!(error(bare), LossError::Missing { row: 0, setting: "beta", column: "logp_ref" });
    let far = vec![-2000.0; 10];
    let far = LossRow { logp_old: &far, mask: None, ..rollout.row() };
    assert_eq!(error(far).to_string(), "row 0, token 0: the ratio is not finite");
}

/// Weights as TRL and verl write them, and the surrogate that they multiply.
#[test]
fn what_an_older_policy_sampled_is_weighed_by_truncated_importance() {
    let rollouts = rollouts(11, &[7, 12, 5]);
    let mut draws = Draws(5);
    // Some far below and some far above the cap.
    let behaviour: Vec<Vec<f64>> = rollouts
        .iter()
        .map(|it| it.old.iter().map(|old| old + 4.0 * (draws.next() - 0.5)).collect())
        .collect();
    let weights: Vec<Vec<f64>> = rollouts
        .iter()
        .zip(&behaviour)
        .map(|(it, mu)| importance_weights(&it.old, mu, 2.0))
        .collect();
    for (rollout, (weights, mu)) in rollouts.iter().zip(weights.iter().zip(&behaviour)) {
        for (t, weight) in weights.iter().enumerate() {
            let exact = (rollout.old[t].exp() / mu[t].exp()).min(2.0);
            assert!((weight - exact).abs() < 1e-12, "{weight} is not {exact}");
        }
    }
    let capped = weights.iter().flatten().filter(|it| **it == 2.0).count();
    assert!(capped > 0 && capped < 24, "{capped} of 24");
    for ratio in [Ratio::Token, Ratio::SequenceMean] {
        let config = LossConfig { ratio, ..CONFIG };
        let loss = |rollouts: &[Rollout]| {
            let rows: Vec<LossRow<'_>> = rollouts
                .iter()
                .zip(&weights)
                .map(|(it, weights)| LossRow { importance: Some(weights), ..it.row() })
                .collect();
            let totals = StepTotals::of(&rows);
            let mean = Aggregation::SeqMeanTokenMean;
            let denominator = Denominator::new(mean, totals, 64).expect("tokens");
            policy_loss(&config, &denominator, &rows).expect("finite")
        };
        let found = loss(&rollouts);
        let mut expected = 0.0;
        for (rollout, weights) in rollouts.iter().zip(&weights) {
            let own: Vec<usize> = (0..rollout.logp.len()).filter(|t| rollout.mask[*t]).collect();
            let gap = |t: usize| rollout.logp[t] - rollout.old[t];
            let mean = own.iter().map(|t| gap(*t)).sum::<f64>() / own.len() as f64;
            let tokens = own.iter().map(|&t| {
                let r = if ratio == Ratio::Token { gap(t).exp() } else { mean.exp() };
                let a = rollout.advantage;
                let surrogate = (r * a).min(r.clamp(0.8, 1.28) * a);
                let d = rollout.reference[t] - rollout.logp[t];
                -weights[t] * surrogate + 0.04 * (d.exp() - d - 1.0)
            });
            expected += tokens.sum::<f64>() / own.len() as f64 / 3.0;
        }
        assert!((found.value - expected).abs() < 1e-12, "{ratio:?}: {} {expected}", found.value);
        for (i, rollout) in rollouts.iter().enumerate() {
            for t in 0..rollout.logp.len() {
                let moved = |by: f64| {
                    let mut rollouts = rollouts.clone();
                    rollouts[i].logp[t] += by;
                    loss(&rollouts).value
                };
                let slope = (moved(1e-6) - moved(-1e-6)) / 2e-6;
                let gradient = found.gradient[i][t];
                assert!((slope - gradient).abs() < 1e-7, "{ratio:?} {i} {t}: {slope} {gradient}");
            }
        }
    }
    let row = LossRow { importance: Some(&weights[0][..3]), ..rollouts[0].row() };
    let denominator =
        Denominator::new(Aggregation::TokenMean, StepTotals::of(std::slice::from_ref(&row)), 64);
    let error = policy_loss(&CONFIG, &denominator.expect("tokens"), &[row]).expect_err("short");
    assert!(error.to_string().contains("the importance weights has 3 values"), "{error}");
}
