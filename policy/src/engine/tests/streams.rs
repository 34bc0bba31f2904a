//! Each id is fed once, prompts are shared, contexts are hashed as they are fed.

use super::*;
use protocol::{FinishReason, StreamHasher};

#[test]
fn an_append_feeds_the_appended_ids_and_nothing_again() {
    for pass in BOTH {
        let mut engine = engine(qwen3(), limits(pass));
        let rollout =
            Rollout { turns: (0..8).map(|t| (6, ids(t, 5))).collect(), ..Rollout::new("a", 2) };
        let results = play(&mut engine, &[(0, rollout.clone())]);
        let sampled: usize = results[0].iter().map(|g| g.ids.len()).sum();
        let appended: usize = rollout.turns.iter().take(7).map(|(_, ids)| ids.len()).sum();
        let stats = engine.stats();
        // The last sampled id of the last turn is never needed.
        assert_eq!(stats.fed as usize, rollout.prompt.len() + sampled + appended - 1);
        assert_eq!((stats.sampled as usize, stats.fed_again, stats.shared), (sampled, 0, 0));
    }
}

#[test]
fn a_group_computes_its_prompt_once() {
    let hybrid = [(qwen3_5(), Pass::Auto)];
    for (config, pass) in BOTH.map(|pass| (qwen3(), pass)).into_iter().chain(hybrid) {
        let prompt = ids(3, 50);
        let rollout = |name: &str, i: usize| Rollout {
            prompt: prompt.clone(),
            key: key(&format!("{name} {i}")),
            turns: vec![(5, vec![])],
            ..Rollout::new(name, 0)
        };
        // Two groups of eight, all at once, and a late comer.
        let mut group: Vec<_> =
            (0..16).map(|i| (0, rollout(if i < 8 { "a" } else { "b" }, i))).collect();
        group.push((20, rollout("a", 99)));
        let mut engine = engine(config.clone(), limits(pass));
        let results = play(&mut engine, &group);
        let stats = engine.stats();
        assert_eq!(stats.shared, 15 * 49, "{pass:?}");
        // Twice the prompt, its last id fifteen more times, four sampled ids each.
        assert_eq!(stats.fed, 2 * 50 + 15 + 17 * 4);
        for (result, (_, rollout)) in results.iter().zip(&group) {
            let mut fresh = super::engine(config.clone(), limits(pass));
            let alone = play(&mut fresh, &[(0, rollout.clone())]);
            assert_eq!(alone[0][0].ids, result[0].ids);
            assert_eq!(alone[0][0].context, result[0].context);
        }
    }
}

#[test]
fn a_common_beginning_is_shared_and_what_follows_is_not() {
    let mut engine = engine(qwen3(), limits(Pass::Auto));
    let [mut first, mut second] = [Rollout::new("a", 1), Rollout::new("a", 2)];
    first.prompt = ids(9, 40);
    second.prompt = [&first.prompt[..35], &[1, 2, 3]].concat();
    let together = play(&mut engine, &[(0, first.clone()), (9, second.clone())]);
    assert_eq!(engine.stats().shared, 35);
    for (rollout, result) in [first, second].into_iter().zip(together) {
        let mut fresh = super::engine(qwen3(), limits(Pass::Auto));
        assert_eq!(contents(&play(&mut fresh, &[(0, rollout)])[0]), contents(&result));
    }
}

#[test]
fn the_context_digest_is_that_of_the_stream_before_the_span() {
    for pass in BOTH {
        let rollouts: Vec<_> = (0..4).map(|i| (0, Rollout::new("a", i / 2))).collect();
        let results = play(&mut engine(qwen3(), limits(pass)), &rollouts);
        for ((_, rollout), result) in rollouts.iter().zip(results) {
            let mut hasher = StreamHasher::default();
            hasher.feed(&rollout.prompt);
            for (generated, (_, appended)) in result.iter().zip(&rollout.turns) {
                assert_eq!(generated.context, hasher.digest());
                assert_eq!(generated.offset as usize, hasher.len());
                assert_eq!(generated.policy, rollout.policy);
                assert_eq!(generated.ids.len(), generated.logp_raw.len());
                assert_eq!(generated.ids.len(), generated.logp_sampling.len());
                hasher.feed(&generated.ids);
                hasher.feed(appended);
            }
        }
    }
}

#[test]
fn a_stop_id_ends_a_call_and_is_its_last_id_even_at_the_budget() {
    let mut engine = engine(qwen3(), limits(Pass::Auto));
    let rollout = Rollout { turns: vec![(10, vec![])], ..Rollout::new("base", 4) };
    let free = play(&mut engine, &[(0, rollout.clone())])[0][0].ids.clone();
    let stop = free[3];
    let first = free.iter().position(|id| *id == stop).expect("sampled");
    let mut call = |budget: u32, stop_ids: &[u32]| {
        let id = engine.open(rollout.policy, rollout.key, rollout.sampling).expect("open");
        engine.append(id, &rollout.prompt).expect("append");
        engine.generate(id, budget, stop_ids).expect("generate");
        while engine.has_work() {
            if let Some(generated) = engine.step().expect("step").pop() {
                assert_eq!(engine.stream(id).expect("open")[rollout.prompt.len()..], generated.ids);
                engine.close(id);
                return (generated.ids, generated.finish);
            }
        }
        panic!("the call does not end");
    };
    assert_eq!(call(10, &[200, stop]), (free[..=first].to_vec(), FinishReason::Stop));
    assert_eq!(call(first as u32 + 1, &[stop]), (free[..=first].to_vec(), FinishReason::Stop));
    assert_eq!(call(10, &[]), (free.clone(), FinishReason::Length));
    assert_eq!(call(1, &[]), (free[..1].to_vec(), FinishReason::Length));
}

#[test]
fn raw_and_sampling_log_probabilities_are_both_reported() {
    let mut engine = engine(qwen3(), limits(Pass::Auto));
    let sampling = Sampling { temperature: 0.8, top_k: 5, top_p: 0.9, min_p: 0.01 };
    let rollout = Rollout { sampling, ..Rollout::new("a", 6) };
    let greedy = Sampling { temperature: 0.0, ..PLAIN };
    let greedy = Rollout { sampling: greedy, ..Rollout::new("a", 6) };
    let results = play(&mut engine, &[(0, rollout), (0, greedy)]);
    for generated in &results[0] {
        for (raw, renormalised) in generated.logp_raw.iter().zip(&generated.logp_sampling) {
            assert!(raw < renormalised && *renormalised <= 0.0);
        }
    }
    assert!(results[1].iter().all(|g| g.logp_sampling.iter().all(|logp| *logp == 0.0)));
    assert!(results[1].iter().all(|g| g.logp_raw.iter().all(|logp| *logp < 0.0)));
}
