//! The sampler against brute force in f64, transformers' own answers and its own frequencies.

use proptest::prelude::*;
use protocol::{Digest, NoiseKey, Sampling};
use serde::Deserialize;

use super::{BORDER, Choice, Sampler, SamplingError, TokenEvidence, noise};

const PLAIN: Sampling = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 };

fn sampler(sampling: Sampling) -> Sampler {
    Sampler::new(&sampling).expect("valid settings")
}

fn key(text: &str) -> NoiseKey {
    NoiseKey(Digest::of(text.as_bytes()))
}

/// A row of `n` logits from the noise itself, with standard deviation about `scale`.
fn row(seed: &str, n: usize, scale: f64) -> Vec<f32> {
    (0..n as u32).map(|id| (noise(&key(seed), 0, id) * scale) as f32).collect()
}

/// The definition, spelled out: full sort, all noise, f64 but where transformers rounds to f32.
fn brute_survivors(row: &[f32], s: &Sampling) -> Vec<u32> {
    brute_survivors_within(row, s, 0.0)
}

/// With the borders of top-p and min-p moved inwards.
fn brute_survivors_within(row: &[f32], s: &Sampling, by: f32) -> Vec<u32> {
    let mut order: Vec<usize> = (0..row.len()).collect();
    order.sort_by(|&a, &b| row[a].partial_cmp(&row[b]).expect("finite"));
    let t = f64::from(s.temperature);
    if s.top_k > 0 && (s.top_k as usize) < row.len() {
        let border = row[order[row.len() - s.top_k as usize]];
        order.retain(|&i| row[i] >= border);
    }
    let max = order.iter().map(|&i| f64::from(row[i]) / t).fold(f64::MIN, f64::max);
    let weight = |i: usize| (f64::from(row[i]) / t - max).exp();
    if s.top_p < 1.0 {
        let total: f64 = order.iter().map(|&i| weight(i)).sum();
        let rest = 1.0 - s.top_p.to_string().parse::<f64>().expect("a number");
        let mut cumulated = 0.0;
        let last = *order.last().expect("not empty");
        order.retain(|&i| {
            cumulated += f64::from((weight(i) / total) as f32);
            cumulated as f32 > rest as f32 + by || i == last
        });
    }
    order.retain(|&i| weight(i) as f32 >= (s.min_p + s.min_p * by).min(1.0));
    let mut ids: Vec<u32> = order.into_iter().map(|i| i as u32).collect();
    ids.sort_unstable();
    ids
}

fn brute_scores(row: &[f32], s: &Sampling, k: &NoiseKey, position: u32) -> Vec<(u32, f64)> {
    let t: f64 = s.temperature.to_string().parse().expect("a number");
    brute_survivors(row, s)
        .into_iter()
        .map(|id| (id, f64::from(row[id as usize]) / t + noise(k, position, id)))
        .collect()
}

fn brute_choose(row: &[f32], s: &Sampling, k: &NoiseKey, position: u32) -> (u32, f64, f64) {
    let scores = brute_scores(row, s, k, position);
    let best = scores.iter().map(|&(_, score)| score).fold(f64::MIN, f64::max);
    let id = scores.iter().find(|&&(_, score)| score == best).expect("a winner").0;
    let lse = |ids: &mut dyn Iterator<Item = u32>, t: f64| {
        let ids: Vec<u32> = ids.collect();
        let max = ids.iter().map(|&i| f64::from(row[i as usize]) / t).fold(f64::MIN, f64::max);
        max + ids.iter().map(|&i| (f64::from(row[i as usize]) / t - max).exp()).sum::<f64>().ln()
    };
    let t: f64 = s.temperature.to_string().parse().expect("a number");
    let logit = f64::from(row[id as usize]);
    let raw = logit - lse(&mut (0..row.len() as u32), 1.0);
    (id, raw, logit / t - lse(&mut scores.iter().map(|&(id, _)| id), t))
}

fn settings() -> impl Strategy<Value = Sampling> {
    (
        prop_oneof![Just(1.0f32), 0.1f32..3.0],
        prop_oneof![Just(0u32), 1u32..60, Just(400)],
        prop_oneof![Just(1.0f32), 0.0f32..1.0],
        prop_oneof![Just(0.0f32), 0.0f32..1.0],
    )
        .prop_map(|(temperature, top_k, top_p, min_p)| Sampling {
            temperature,
            top_k,
            top_p,
            min_p,
        })
}

/// Random rows; on a grid half of the time, so that equal logits are common.
fn rows() -> impl Strategy<Value = Vec<f32>> {
    let free = prop::collection::vec(-12.0f32..12.0, 1..400);
    let grid = prop::collection::vec((-6i8..6).prop_map(f32::from), 1..400);
    prop_oneof![free, grid]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn truncation_equals_the_naive_reference(row in rows(), s in settings()) {
        let ours = sampler(s).survivors(&row).expect("finite");
        prop_assert!(!ours.is_empty());
        prop_assert_eq!(ours, brute_survivors(&row, &s));
    }

    #[test]
    fn the_choice_equals_brute_force(row in rows(), s in settings(), position: u32, seed: u8) {
        let k = NoiseKey(Digest::of(&[seed]));
        let Choice { id, logp_raw, logp_sampling } =
            sampler(s).choose(&row, &k, position).expect("finite");
        let (best, raw, sampling) = brute_choose(&row, &s, &k, position);
        prop_assert_eq!(id, best);
        prop_assert!((f64::from(logp_raw) - raw).abs() < 1e-6 * (1.0 + raw.abs()));
        prop_assert!((f64::from(logp_sampling) - sampling).abs() < 1e-6 * (1.0 + sampling.abs()));
    }

    #[test]
    fn the_deficit_is_the_least_rise_that_makes_the_id_win(
        row in rows(),
        s in settings(),
        at: prop::sample::Index,
        position: u32,
    ) {
        let k = key("deficit");
        let chosen = sampler(s).choose(&row, &k, position).expect("finite");
        for id in [at.index(row.len()) as u32, chosen.id] {
            let found = examine(&row, &s, &k, position, id);
            let t: f64 = s.temperature.to_string().parse().expect("a number");
            let tempered = |id: u32| f64::from(row[id as usize]) / t;
            let [inner, outer] = [BORDER, -BORDER].map(|by| brute_survivors_within(&row, &s, by));
            let rivals = inner.iter().filter(|&&other| other != id);
            let best = rivals.map(|&other| tempered(other) + noise(&k, position, other));
            let gap = best.fold(f64::NEG_INFINITY, f64::max) - tempered(id) - noise(&k, position, id);
            let least = outer.iter().map(|&id| tempered(id)).fold(f64::INFINITY, f64::min);
            let expected = gap.max(least - tempered(id)).max(0.0);
            prop_assert!((found.deficit - expected).abs() < 1e-9, "{} {}", found.deficit, expected);
            if id == chosen.id {
                prop_assert_eq!(found.deficit, 0.0);
                let rounding = 1e-5 * (1.0 - chosen.logp_raw);
                prop_assert!((found.logp_raw - chosen.logp_raw).abs() < rounding);
                let [low, high] = found.logp_sampling;
                prop_assert!(low - rounding <= chosen.logp_sampling);
                prop_assert!(chosen.logp_sampling <= high + rounding);
                prop_assert!(high - low < 0.75, "{} {}", low, high);
            }
        }
    }
}

fn examine(row: &[f32], s: &Sampling, k: &NoiseKey, position: u32, id: u32) -> TokenEvidence {
    let t = if s.temperature == 0.0 { 1.0 } else { f64::from(s.temperature) };
    let scaled = |logit: &f32| f64::from(*logit) / t;
    let max = row.iter().map(scaled).fold(f64::MIN, f64::max);
    let sum: f64 = row.iter().map(|logit| (scaled(logit) - max).exp()).sum();
    let log_softmax = scaled(&row[id as usize]) - max - sum.ln();
    sampler(*s).examine(row, k, position, id).expect("finite").with(log_softmax as f32)
}

#[derive(Deserialize)]
struct Golden {
    logits: Vec<f32>,
    temperature: f32,
    top_k: u32,
    top_p: f32,
    min_p: f32,
    kept: Vec<u32>,
    logp: Vec<f64>,
}

/// `golden.json` is made by `scripts/golden/sampling.py`.
#[test]
fn survivors_and_their_probabilities_are_those_of_transformers() {
    let cases: Vec<Golden> =
        serde_json::from_str(include_str!("golden.json")).expect("committed file");
    for (i, g) in cases.iter().enumerate() {
        let &Golden { temperature, top_k, top_p, min_p, .. } = g;
        let s = Sampling { temperature, top_k, top_p, min_p };
        let sampler = sampler(s);
        assert_eq!(sampler.survivors(&g.logits).expect("finite"), g.kept, "case {i}: {s:?}");
        for position in 0..20 {
            let choice = sampler.choose(&g.logits, &key("golden"), position).expect("finite");
            let at = g.kept.binary_search(&choice.id).expect("a survivor");
            assert!((f64::from(choice.logp_sampling) - g.logp[at]).abs() < 2e-6, "case {i}");
        }
    }
}

/// Logits [2, 1, 0] at temperature 0.5: log p(0) = −0.1429.
#[test]
fn temperature_enters_the_sampling_log_probability_only() {
    let s = sampler(Sampling { temperature: 0.5, ..PLAIN });
    let choice = first_with_id_zero(&s);
    assert!((choice.logp_sampling + 0.142_931_6).abs() < 1e-6, "{choice:?}");
    assert!((choice.logp_raw + 0.407_605_96).abs() < 1e-6, "{choice:?}");
}

/// The same logits, top-k 2: the survivors hold S = 0.90997, so the raw log-probability is lower
/// than the renormalised one by 0.0943.
#[test]
fn truncation_renormalises_the_sampling_log_probability() {
    let choice = first_with_id_zero(&sampler(Sampling { top_k: 2, ..PLAIN }));
    let bias = f64::from(choice.logp_raw) - f64::from(choice.logp_sampling);
    assert!((bias + 0.0943).abs() < 1e-4 && (bias.exp() - 0.909_97).abs() < 1e-5, "{bias}");
}

fn first_with_id_zero(sampler: &Sampler) -> Choice {
    let choices = (0..).map(|p| sampler.choose(&[2.0, 1.0, 0.0], &key("bias"), p).expect("finite"));
    choices.into_iter().find(|choice| choice.id == 0).expect("likely")
}

#[test]
fn greedy_takes_the_lowest_id_of_equals_and_reads_no_noise() {
    let s = sampler(Sampling { temperature: 0.0, top_k: 1, top_p: 0.1, min_p: 0.9 });
    let row = [0.0, 3.0, 3.0, -1.0, 3.0];
    for position in 0..50 {
        let choice = s.choose(&row, &key("greedy"), position).expect("finite");
        assert_eq!((choice.id, choice.logp_sampling), (1, 0.0));
    }
    let deficit = |id| s.examine(&row, &key("greedy"), 3, id).expect("finite").with(0.0).deficit;
    assert_eq!((deficit(1), deficit(0), deficit(3)), (0.0, 3.0, 4.0));
}

/// χ² over the survivors against the exact distribution, at several settings.
#[test]
fn sampled_frequencies_follow_the_distribution() {
    let row = row("frequencies", 12, 1.0);
    for s in [
        PLAIN,
        Sampling { temperature: 0.7, ..PLAIN },
        Sampling { temperature: 1.4, top_k: 8, top_p: 0.9, min_p: 0.05 },
    ] {
        let sampler = sampler(s);
        let draws = 40_000u32;
        let mut counts = vec![0u32; row.len()];
        let mut probability = vec![0.0f64; row.len()];
        for position in 0..draws {
            let choice = sampler.choose(&row, &key("χ²"), position).expect("finite");
            counts[choice.id as usize] += 1;
            probability[choice.id as usize] = f64::from(choice.logp_sampling).exp();
        }
        assert!((probability.iter().sum::<f64>() - 1.0).abs() < 1e-5);
        let terms = counts.iter().zip(&probability).filter(|&(_, &p)| p > 0.0);
        let chi2: f64 = terms
            .map(|(&n, &p)| (f64::from(n) - p * f64::from(draws)).powi(2) / (p * f64::from(draws)))
            .sum();
        // 99.9 % of χ² with 11 degrees of freedom lie below 31.3.
        assert!(chi2 < 31.3, "{chi2} at {s:?}");
    }
}

/// At the size of Qwen3's vocabulary, where the race takes its logarithms for few ids only.
#[test]
fn a_long_row_gives_what_brute_force_gives() {
    let row = row("long", 151_669, 1.5);
    let settings = [
        PLAIN,
        Sampling { temperature: 0.6, ..PLAIN },
        Sampling { top_k: 20, ..PLAIN },
        Sampling { top_k: 60_000, ..PLAIN },
        Sampling { top_p: 0.95, ..PLAIN },
        Sampling { temperature: 0.6, top_k: 20, top_p: 0.95, min_p: 0.1 },
    ];
    for s in settings {
        for position in 0..3 {
            let choice = sampler(s).choose(&row, &key("long"), position).expect("finite");
            let (id, raw, sampling) = brute_choose(&row, &s, &key("long"), position);
            assert_eq!(choice.id, id, "{s:?}");
            assert!((f64::from(choice.logp_raw) - raw).abs() < 2e-6, "{s:?}");
            assert!((f64::from(choice.logp_sampling) - sampling).abs() < 2e-6, "{s:?}");
        }
    }
}

#[test]
fn rows_that_are_no_distribution_are_refused() {
    let s = sampler(Sampling { top_k: 2, top_p: 0.9, min_p: 0.1, temperature: 0.8 });
    for row in [&[][..], &[f32::NAN, 1.0], &[f32::INFINITY, 1.0], &[f32::NEG_INFINITY; 4]] {
        assert_eq!(s.choose(row, &key("bad"), 0), Err(SamplingError::Logits), "{row:?}");
    }
    let masked = [f32::NEG_INFINITY, 0.5, f32::NEG_INFINITY];
    for s in [PLAIN, Sampling { top_k: 2, ..PLAIN }, Sampling { top_p: 0.5, ..PLAIN }] {
        for position in 0..30 {
            assert_eq!(sampler(s).choose(&masked, &key("bad"), position).expect("one").id, 1);
        }
    }
    let outside = s.examine(&[1.0, 2.0], &key("bad"), 0, 2);
    assert_eq!(outside, Err(SamplingError::Id { id: 2, vocab: 2 }));
}

#[test]
fn settings_outside_their_range_are_refused_by_name() {
    let cases = [
        ("temperature", Sampling { temperature: -1.0, ..PLAIN }),
        ("temperature", Sampling { temperature: f32::NAN, ..PLAIN }),
        ("temperature", Sampling { temperature: f32::INFINITY, ..PLAIN }),
        ("temperature", Sampling { temperature: 1e-9, ..PLAIN }),
        ("top_p", Sampling { top_p: 1.5, ..PLAIN }),
        ("top_p", Sampling { top_p: f32::NAN, ..PLAIN }),
        ("min_p", Sampling { min_p: -0.1, ..PLAIN }),
    ];
    for (name, s) in cases {
        let error = Sampler::new(&s).expect_err("out of range").to_string();
        assert!(error.contains(&format!("sampling.{name} ")), "{error}");
    }
}
