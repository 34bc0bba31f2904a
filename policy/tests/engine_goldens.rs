//! The engine gives the reference stack's greedy ids on every checkpoint under the data roots, in
//! one call and over many turns, on both passes.
#![allow(clippy::unwrap_used)]

mod support;

use policy::{
    device::DeviceChoice,
    engine::{Engine, EngineConfig, Pass},
    model::LoadDtype,
};
use protocol::{Digest, FinishReason, NoiseKey, PolicyDigest, Sampling};
use support::{folders, goldens, open};

const GREEDY: Sampling = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0 };

#[test]
fn greedy_ids_are_those_of_transformers() {
    let device = DeviceChoice::Cpu.open().unwrap();
    for dir in folders("checkpoints") {
        let Some(checkpoint) = open(&dir) else { continue };
        let golden = goldens(&dir);
        let (prompt, expected) = (golden["input_ids"].ids(), golden["greedy"].ids());
        for pass in [Pass::Auto, Pass::Tensors] {
            let decoder = checkpoint.load(&device, LoadDtype::File).unwrap();
            let mut engine =
                Engine::new(decoder, EngineConfig { pass, ..EngineConfig::default() }).unwrap();
            let policy = PolicyDigest(Digest::of(b"base"));
            engine.add_adapter(policy, None).unwrap();
            let id = engine.open(policy, NoiseKey(Digest::of(b"unused")), GREEDY).unwrap();
            engine.append(id, &prompt).unwrap();
            let mut stream = prompt.clone();
            // Budgets of 1, 2, 3, … until the reference ends.
            for budget in 1.. {
                let budget = budget.min(expected.len() - stream.len());
                if budget == 0 {
                    break;
                }
                engine.generate(id, u32::try_from(budget).unwrap(), &[]).unwrap();
                let generated = loop {
                    if let Some(generated) = engine.step().unwrap().pop() {
                        break generated;
                    }
                    assert!(engine.has_work());
                };
                assert_eq!(generated.finish, FinishReason::Length);
                assert_eq!(generated.offset as usize, stream.len());
                stream.extend(generated.ids);
            }
            assert_eq!(stream, expected, "{} {pass:?}", dir.display());
            assert_eq!(engine.stats().fed as usize, expected.len() - 1);
        }
    }
}
