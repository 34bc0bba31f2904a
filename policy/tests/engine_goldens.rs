//! The engine gives the reference stack's greedy ids on every checkpoint under the data roots, in
//! one call and over many turns, on both passes; where its two best ids are as good as equal, either.
#![allow(clippy::unwrap_used)]

mod support;

use policy::{
    device::DeviceChoice,
    engine::{Engine, EngineConfig, Pass},
    model::{Decoder, FullInput, LoadDtype},
};
use protocol::{Digest, FinishReason, NoiseKey, PolicyDigest, Sampling};
use support::{folders, goldens, open, tolerance, values};

const GREEDY: Sampling = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0 };

/// The engine's greedy ids after `prompt`, in calls of 1, 2, 3, … ids, and how many ids it was fed.
fn greedy(decoder: Decoder, pass: Pass, prompt: &[u32], len: usize) -> (Vec<u32>, u64) {
    let mut engine =
        Engine::new(decoder, EngineConfig { pass, ..EngineConfig::default() }).unwrap();
    let policy = PolicyDigest(Digest::of(b"base"));
    engine.add_adapter(policy, None).unwrap();
    let id = engine.open(policy, NoiseKey(Digest::of(b"unused")), GREEDY).unwrap();
    engine.append(id, prompt).unwrap();
    let mut stream = prompt.to_vec();
    for budget in 1.. {
        let budget = budget.min(len - stream.len());
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
    (stream, engine.stats().fed)
}

#[test]
fn greedy_ids_are_those_of_transformers() {
    let device = DeviceChoice::Cpu.open().unwrap();
    for dir in folders("checkpoints") {
        let Some(checkpoint) = open(&dir) else { continue };
        let golden = goldens(&dir);
        let Some(expected) = golden.get("greedy").map(|greedy| greedy.ids()) else { continue };
        let prompt = golden["input_ids"].ids();
        for pass in [Pass::Auto, Pass::Tensors] {
            let decoder = checkpoint.load(&device, LoadDtype::File).unwrap();
            // From each id at which the two may part, on along the reference's stream.
            let mut from = prompt.len();
            while from < expected.len() {
                let (stream, fed) =
                    greedy(decoder.clone(), pass, &expected[..from], expected.len());
                assert_eq!(fed as usize, expected.len() - 1);
                let same = |i: &usize| stream[*i] == expected[*i];
                let Some(at) = (from..expected.len()).find(|i| !same(i)) else { break };
                let input = FullInput {
                    ids: &expected[..at],
                    batch: 1,
                    mask: None,
                    hidden: false,
                    images: &[],
                };
                let logits = values(decoder.forward(None, input).unwrap().logits);
                let last = &logits[logits.len() - decoder.config().vocab..];
                let (ours, theirs) = (last[stream[at] as usize], last[expected[at] as usize]);
                let largest = last.iter().fold(f32::MIN_POSITIVE, |m, l| m.max(l.abs()));
                let gap = f64::from((ours - theirs).abs() / largest);
                let name = dir.display();
                eprintln!("{name} {pass:?}: parts at {at} with a gap of {gap:.1e}");
                assert!(gap <= tolerance(&decoder), "{name} {pass:?} at {at}: {gap}");
                from = at + 1;
            }
        }
    }
}
