//! A rollout is the same whoever is beside it.

use proptest::prelude::*;

use super::*;
use crate::{
    engine::{
        backend::{Backend, SlotFeed, TensorBackend},
        host::HostBackend,
    },
    model::FullInput,
    sampling::Sampler,
};

fn alone(config: ModelConfig, limits: EngineConfig, rollout: &Rollout) -> Vec<Generated> {
    let results = play(&mut engine(config, limits), &[(0, rollout.clone())]);
    contents(&results[0])
}

fn ids_of(results: &[Generated]) -> Vec<Vec<u32>> {
    results.iter().map(|g| g.ids.clone()).collect()
}

/// Sixteen rollouts of three policies that start at different steps.
fn crowd() -> Vec<(usize, Rollout)> {
    let names = ["base", "a", "b"];
    (0..16).map(|i| (i / 3, Rollout::new(names[i % 3], i as u32))).collect()
}

#[test]
fn packed_weights_give_the_logits_of_the_tensor_pass() {
    for config in [qwen3(), llama()] {
        let decoder = decoder(config);
        let mut host = HostBackend::new(&decoder).expect("f32 on the processor");
        let mut tensors = TensorBackend::new(decoder.clone(), 4096);
        let mut worst = 0.0f64;
        for (name, adapter) in [("base", None), ("a", Some(adapter(&decoder, 1)))] {
            host.add(policy(name), adapter.clone()).expect("fits");
            tensors.add(policy(name), adapter).expect("fits");
            let mut all: [&mut dyn Backend; 2] = [&mut host, &mut tensors];
            let rows = all.each_mut().map(|backend| {
                let slots = [backend.open(), backend.open(), backend.open()];
                let mut rows = Vec::new();
                for (step, counts) in
                    [[33, 5, 1], [1, 1, 1], [1, 20, 17], [1, 1, 1]].iter().enumerate()
                {
                    let ids: Vec<Vec<u32>> =
                        counts.iter().map(|&n| ids(step as u32 * 3 + n as u32, n)).collect();
                    let feeds: Vec<SlotFeed<'_>> = slots
                        .iter()
                        .zip(&ids)
                        .map(|(&slot, ids)| SlotFeed {
                            slot,
                            ids,
                            images: Vec::new(),
                            logits: true,
                        })
                        .collect();
                    let logits = backend.advance(&policy(name), &feeds).expect("room");
                    for i in 0..3 {
                        rows.push(logits.read(i, &mut Vec::new()).to_vec());
                    }
                }
                rows
            });
            for (a, b) in rows[0].iter().flatten().zip(rows[1].iter().flatten()) {
                worst = worst.max(f64::from((a - b).abs()));
            }
        }
        assert!(worst < 2e-5, "{worst}");
    }
}

/// Token by token from whole-sequence passes without any cache.
#[test]
fn the_engine_samples_what_uncached_passes_sample() {
    let rollout = Rollout { turns: vec![(12, vec![])], ..Rollout::new("a", 3) };
    for config in [qwen3(), llama(), qwen3_5()] {
        let decoder = decoder(config.clone());
        let adapter = adapter(&decoder, 1);
        let sampler = Sampler::new(&rollout.sampling).expect("valid");
        let mut stream = rollout.prompt.clone();
        let mut raw = Vec::new();
        for _ in 0..12 {
            let input =
                FullInput { ids: &stream, batch: 1, mask: None, hidden: false, images: &[] };
            let logits = decoder.forward(Some(&adapter), input).expect("short").logits;
            let logits: Vec<f32> = logits.into_data().try_into_vec().expect("f32");
            let last = &logits[logits.len() - config.vocab..];
            let choice = sampler.choose(last, &rollout.key, stream.len() as u32).expect("finite");
            stream.push(choice.id);
            raw.push(choice.logp_raw);
        }
        for pass in BOTH {
            let found = alone(config.clone(), limits(pass), &rollout);
            assert_eq!(found[0].ids, stream[rollout.prompt.len()..], "{pass:?}");
            for (found, expected) in found[0].logp_raw.iter().zip(&raw) {
                assert!((found - expected).abs() < 1e-5);
            }
        }
    }
}

#[test]
fn a_rollout_is_the_same_alone_and_among_sixteen() {
    for config in [qwen3(), llama(), qwen3_5()] {
        for pass in BOTH {
            let together = play(&mut engine(config.clone(), limits(pass)), &crowd());
            for (i, (_, rollout)) in crowd().into_iter().enumerate() {
                let alone = alone(config.clone(), limits(pass), &rollout);
                let among = contents(&together[i]);
                match pass {
                    // To the bit, log-probabilities included.
                    Pass::Auto if config.hybrid().is_none() => {
                        assert_eq!(alone, among, "rollout {i}");
                    }
                    _ => assert_eq!(ids_of(&alone), ids_of(&among), "rollout {i}"),
                }
            }
        }
    }
}

#[test]
fn a_rollout_is_the_same_after_an_adapter_swap_and_swap_back() {
    for pass in BOTH {
        let decoder = decoder(qwen3());
        let mut engine = Engine::new(decoder.clone(), limits(pass)).expect("valid limits");
        let rollout = Rollout::new("policy", 5);
        let mut results = Vec::new();
        for seed in [1, 2, 1] {
            // The same digest on purpose: nothing cached may survive the drop.
            engine.add_adapter(policy("policy"), adapter(&decoder, seed)).expect("new");
            results.push(contents(&play(&mut engine, &[(0, rollout.clone())])[0]));
            engine.drop_adapter(&policy("policy")).expect("closed");
        }
        assert_eq!(results[0], results[2]);
        assert_ne!(ids_of(&results[0]), ids_of(&results[1]));
        assert_eq!(engine.used_tokens(), 0);
    }
}

#[test]
fn the_cut_of_a_prompt_into_steps_changes_no_bit() {
    let expected = play(&mut engine(qwen3(), limits(Pass::Auto)), &crowd());
    for prefill_chunk in [1, 7, 40] {
        let limits = EngineConfig { prefill_chunk, ..limits(Pass::Auto) };
        let found = play(&mut engine(qwen3(), limits), &crowd());
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!(contents(found), contents(expected), "chunks of {prefill_chunk}");
        }
    }
}

#[test]
fn the_same_submissions_give_the_same_bits() {
    for pass in BOTH {
        let results = [0, 1].map(|_| play(&mut engine(llama(), limits(pass)), &crowd()));
        assert_eq!(results[0], results[1]);
    }
}

#[test]
fn each_lease_has_its_own_noise() {
    let mut engine = engine(qwen3(), limits(Pass::Auto));
    let same = Rollout::new("base", 1);
    let group: Vec<(usize, Rollout)> = (0..8)
        .map(|i| (0, Rollout { key: key(&format!("generation {i}")), ..same.clone() }))
        .collect();
    let results = play(&mut engine, &group);
    for (i, a) in results.iter().enumerate() {
        assert!(results.iter().skip(i + 1).all(|b| ids_of(a) != ids_of(b)));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// Whatever the limits and the arrivals: the same bits.
    #[test]
    fn limits_and_arrivals_change_no_result(
        max_batch in 1usize..8,
        max_tokens in 112usize..400,
        prefill_chunk in 1usize..64,
        starts in prop::collection::vec(0usize..30, 6),
    ) {
        let names = ["base", "a", "b"];
        // Every second one has the prompt of the one before.
        let rollout = |i: usize| {
            let twin = Rollout::new(names[i / 2 % 3], i as u32 / 2 * 2);
            Rollout { key: key(&format!("lease {i}")), ..twin }
        };
        let limits = EngineConfig { max_batch, max_tokens, prefill_chunk, pass: Pass::Auto };
        let rollouts: Vec<_> = starts.iter().enumerate().map(|(i, &s)| (s, rollout(i))).collect();
        let found = play(&mut engine(qwen3(), limits), &rollouts);
        for (i, found) in found.iter().enumerate() {
            let alone = alone(qwen3(), super::limits(Pass::Auto), &rollout(i));
            prop_assert_eq!(contents(found), alone);
        }
    }
}
