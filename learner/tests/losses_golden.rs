//! Losses, gradients and statistics equal PyTorch's float64 (`scripts/golden/losses.py`, which also
//! compares with TRL's own code).

use learner::{
    advantage::{Baseline, ScaleRewards, gae, relative_advantages, whiten},
    loss::{
        Advantage, Aggregation, Denominator, KlEstimator, LossConfig, LossRow, Ratio, StepTotals,
        Surrogate, ValueConfig, ValueRow, ValueStats, policy_loss, value_loss,
    },
};
use serde::Deserialize;

/// Far inside of the 1e-6 that is promised.
const TOLERANCE: f64 = 1e-12;

type Rows = Vec<Vec<f64>>;

#[derive(Deserialize)]
struct Golden {
    max_completion_length: u32,
    batches: Vec<Batch>,
    policy: Vec<PolicyCase>,
    value: Vec<ValueCase>,
    advantages: Vec<AdvantageCase>,
}

#[derive(Deserialize)]
struct Batch {
    logp: Rows,
    old: Rows,
    r#ref: Rows,
    entropy: Rows,
    mask: Vec<Vec<bool>>,
    advantages: Vec<f64>,
    token_advantages: Rows,
}

#[derive(Deserialize)]
struct PolicyCase {
    batch: usize,
    surrogate: Surrogate,
    ratio: Ratio,
    aggregation: Aggregation,
    epsilon: f64,
    epsilon_high: f64,
    delta: Option<f64>,
    beta: f64,
    kl_estimator: KlEstimator,
    entropy_coef: f64,
    token_advantages: bool,
    loss: f64,
    policy: f64,
    kl: f64,
    entropy: f64,
    gradient: Rows,
    entropy_gradient: Option<Rows>,
    clipped: [u64; 3],
    ratios: u64,
    mean_kl: f64,
    mean_approx_kl: f64,
}

#[derive(Deserialize)]
struct ValueCase {
    gamma: f64,
    lam: f64,
    vf_coef: f64,
    cliprange_value: Option<f64>,
    rewards: Vec<f64>,
    old: Rows,
    values: Rows,
    advantages: Rows,
    returns: Rows,
    whitened: Vec<f64>,
    loss: f64,
    gradient: Rows,
    explained_variance: f64,
}

#[derive(Deserialize)]
struct AdvantageCase {
    rewards: Rows,
    baseline: Baseline,
    scale: ScaleRewards,
    advantages: Rows,
}

fn golden() -> Golden {
    serde_json::from_str(include_str!("golden/losses.json")).expect("the golden file")
}

fn near(what: &str, found: f64, expected: f64) {
    assert!((found - expected).abs() <= TOLERANCE, "{what}: {found} and {expected}");
}

fn all_near(what: &str, found: &[Vec<f64>], expected: &[Vec<f64>]) {
    let lengths = |rows: &[Vec<f64>]| rows.iter().map(Vec::len).collect::<Vec<_>>();
    assert_eq!(lengths(found), lengths(expected), "{what}");
    for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
        near(what, *found, *expected);
    }
}

fn rows<'a>(batch: &'a Batch, case: &PolicyCase) -> Vec<LossRow<'a>> {
    (0..batch.logp.len())
        .map(|i| LossRow {
            logp: &batch.logp[i],
            logp_old: &batch.old[i],
            logp_ref: Some(&batch.r#ref[i]),
            mask: Some(&batch.mask[i]),
            entropy: Some(&batch.entropy[i]),
            advantage: match case.token_advantages {
                true => Advantage::Tokens(&batch.token_advantages[i]),
                false => batch.advantages[i].into(),
            },
            importance: None,
        })
        .collect()
}

#[test]
fn every_policy_loss_equals_float64_autograd() {
    let golden = golden();
    assert!(golden.policy.len() > 300, "the grid is there");
    for (number, case) in golden.policy.iter().enumerate() {
        let rows = rows(&golden.batches[case.batch], case);
        let config = LossConfig {
            surrogate: case.surrogate,
            ratio: case.ratio,
            epsilon: case.epsilon,
            epsilon_high: case.epsilon_high,
            delta: case.delta,
            beta: case.beta,
            kl_estimator: case.kl_estimator,
            entropy_coef: case.entropy_coef,
        };
        let totals = StepTotals::of(&rows);
        let denominator = Denominator::new(case.aggregation, totals, golden.max_completion_length)
            .expect("tokens");
        let loss = policy_loss(&config, &denominator, &rows).expect("finite");
        let what = format!("case {number}, {:?}, {config:?}", case.aggregation);
        near(&what, loss.value, case.loss);
        near(&what, loss.policy_value, case.policy);
        near(&what, loss.kl_value, case.kl);
        near(&what, loss.entropy_value, case.entropy);
        all_near(&what, &loss.gradient, &case.gradient);
        assert_eq!(loss.entropy_gradient.is_some(), case.entropy_gradient.is_some());
        if let (Some(found), Some(expected)) = (&loss.entropy_gradient, &case.entropy_gradient) {
            all_near(&what, found, expected);
        }
        let stats = &loss.stats;
        let clipped = [stats.clipped_low, stats.clipped_high, stats.clipped_dual];
        assert_eq!((clipped, stats.ratios), (case.clipped, case.ratios), "{what}");
        near(&what, stats.mean_kl().expect("a reference"), case.mean_kl);
        near(&what, stats.mean_approx_kl().expect("tokens"), case.mean_approx_kl);

        // The parts of a step, as micro-batches or ranks have them, add up to it.
        let mut sum = 0.0;
        for (i, part) in rows.chunks(1).enumerate() {
            let part = policy_loss(&config, &denominator, part).expect("finite");
            assert_eq!(part.gradient[0], loss.gradient[i], "{what}");
            sum += part.value;
        }
        near(&what, sum, loss.value);
    }
}

#[test]
fn value_losses_and_their_advantages_equal_float64_autograd() {
    for case in golden().value {
        let mut tokens: Vec<_> = case
            .old
            .iter()
            .zip(&case.rewards)
            .map(|(values, reward)| gae(*reward, values, case.gamma, case.lam))
            .collect();
        let advantages: Rows = tokens.iter().map(|it| it.advantages.clone()).collect();
        let returns: Rows = tokens.iter().map(|it| it.returns.clone()).collect();
        all_near("advantages", &advantages, &case.advantages);
        all_near("returns", &returns, &case.returns);
        whiten(tokens.iter_mut());
        let whitened: Vec<f64> = tokens.iter().flat_map(|it| it.advantages.clone()).collect();
        all_near("whitened", &[whitened], &[case.whitened]);

        let rows: Vec<ValueRow<'_>> = case
            .values
            .iter()
            .zip(case.old.iter().zip(&returns))
            .map(|(values, (values_old, returns))| ValueRow { values, values_old, returns })
            .collect();
        let totals = case.values.iter().map(Vec::len).fold(StepTotals::default(), StepTotals::with);
        let denominator = Denominator::new(Aggregation::TokenMean, totals, 1).expect("tokens");
        let config = ValueConfig { vf_coef: case.vf_coef, cliprange_value: case.cliprange_value };
        let loss = value_loss(&config, &denominator, &rows).expect("finite");
        near("value loss", loss.value, case.loss);
        all_near("value gradient", &loss.gradient, &case.gradient);
        let explained = loss.stats.explained_variance().expect("returns vary");
        near("explained variance", explained, case.explained_variance);

        let mut stats = ValueStats::default();
        let parts = rows.chunks(1).map(|part| value_loss(&config, &denominator, part));
        let sum: f64 = parts
            .map(|part| {
                let part = part.expect("finite");
                stats.merge(&part.stats);
                part.value
            })
            .sum();
        near("the sum of the parts", sum, loss.value);
        assert_eq!((stats.tokens, stats.clipped), (loss.stats.tokens, loss.stats.clipped));
    }
}

#[test]
fn advantages_equal_their_formulas() {
    for case in golden().advantages {
        let found: Rows = case
            .rewards
            .iter()
            .map(|rewards| relative_advantages(rewards, case.baseline, case.scale))
            .map(|group| group.expect("finite").advantages)
            .collect();
        all_near(&format!("{:?} {:?}", case.baseline, case.scale), &found, &case.advantages);
    }
}
