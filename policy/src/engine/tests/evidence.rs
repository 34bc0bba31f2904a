//! What the engine samples, the scoring pass recognises; what it did not sample, it does not.

use super::{BOTH, PLAIN, Rollout, adapter, decoder, engine, limits, llama, play, qwen3};
use crate::{
    engine::Generated,
    model::{Adapter, ModelConfig},
    sampling::TokenEvidence,
    score::{ScoreBatch, ScoreConfig, ScoreRow, log_probs},
};
use protocol::{NoiseKey, Sampling};

/// The stream of a rollout, with a mask of what was sampled.
fn stream(rollout: &Rollout, turns: &[Generated]) -> (Vec<u32>, Vec<bool>) {
    let mut ids = rollout.prompt.clone();
    let mut scored = vec![false; ids.len()];
    for (i, (turn, (_, appended))) in turns.iter().zip(&rollout.turns).enumerate() {
        ids.extend(&turn.ids);
        scored.resize(ids.len(), true);
        if i + 1 < turns.len() {
            ids.extend(appended);
            scored.resize(ids.len(), false);
        }
    }
    (ids, scored)
}

fn examine(
    config: ModelConfig,
    adapter: Option<&Adapter>,
    (rollout, turns): (&Rollout, &[Generated]),
    (key, sampling): (NoiseKey, Sampling),
) -> Vec<TokenEvidence> {
    let (ids, scored) = stream(rollout, turns);
    let split = rollout.prompt.len();
    let row = ScoreRow {
        ids: ids[split..].to_vec(),
        scored: scored[split..].to_vec(),
        noise: Some(key),
        ..ScoreRow::default()
    };
    let batch =
        ScoreBatch { prefix: ids[..split].to_vec(), rows: vec![row], ..ScoreBatch::default() };
    let settings = ScoreConfig {
        temperature: if sampling.temperature == 0.0 { 1.0 } else { sampling.temperature },
        examine: Some(sampling),
        ..ScoreConfig::default()
    };
    let scores = log_probs(&decoder(config), adapter, &batch, &settings).expect("scores");
    scores.evidence.expect("asked for").concat()
}

#[test]
fn an_honest_rollout_answers_for_every_token() {
    let settings = [
        PLAIN,
        Sampling { temperature: 0.7, ..PLAIN },
        Sampling { temperature: 0.9, top_k: 20, top_p: 0.9, min_p: 0.02 },
        Sampling { temperature: 0.0, ..PLAIN },
    ];
    for (config, pass) in [qwen3(), llama()].into_iter().zip(BOTH) {
        let a = adapter(&decoder(config.clone()), 1);
        for sampling in settings {
            let rollouts: Vec<(usize, Rollout)> =
                (0..6).map(|i| (i, Rollout { sampling, ..Rollout::new("a", i as u32) })).collect();
            let played = play(&mut engine(config.clone(), limits(pass)), &rollouts);
            for ((_, rollout), turns) in rollouts.iter().zip(&played) {
                let found =
                    examine(config.clone(), Some(&a), (rollout, turns), (rollout.key, sampling));
                let raw = turns.iter().flat_map(|t| &t.logp_raw);
                let renormalised = turns.iter().flat_map(|t| &t.logp_sampling);
                assert_eq!(found.len(), raw.clone().count());
                for ((token, raw), sampled) in found.iter().zip(raw).zip(renormalised) {
                    assert!(token.deficit < 1e-4, "{sampling:?}: {token:?}");
                    assert!((token.logp_raw - raw).abs() < 1e-4, "{sampling:?}: {token:?} {raw}");
                    let [low, high] = token.logp_sampling;
                    assert!(low - 1e-4 < *sampled && *sampled < high + 1e-4, "{token:?} {sampled}");
                }
            }
        }
    }
}

#[test]
fn another_policy_key_or_temperature_shows_within_a_few_rollouts() {
    let config = qwen3();
    let a = adapter(&decoder(config.clone()), 1);
    let rollouts: Vec<(usize, Rollout)> =
        (0..12).map(|i| (0, Rollout::new("a", i as u32))).collect();
    let played = play(&mut engine(config.clone(), limits(BOTH[0])), &rollouts);
    let worst = |adapter: Option<&Adapter>, other_key: bool, sampling: Sampling| {
        let all = rollouts.iter().zip(&played).flat_map(|((_, rollout), turns)| {
            let key = if other_key { super::key("another lease") } else { rollout.key };
            examine(config.clone(), adapter, (rollout, turns), (key, sampling))
        });
        all.map(|token| token.deficit).fold(0.0, f64::max)
    };
    assert!(worst(Some(&a), false, PLAIN) < 1e-4);
    assert!(worst(None, false, PLAIN) > 0.01, "the base in place of the adapter");
    assert!(worst(Some(&a), true, PLAIN) > 0.5, "noise of another lease");
    let hotter = Sampling { temperature: 1.3, ..PLAIN };
    assert!(worst(Some(&a), false, hotter) > 0.01, "another temperature");
    let truncated = Sampling { top_k: 5, ..PLAIN };
    assert!(worst(Some(&a), false, truncated) > 0.01, "top-k left out");
}
