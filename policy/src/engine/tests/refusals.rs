//! What the engine refuses, by named errors that leave it usable.

use super::*;
use crate::{engine::EngineError, model::ModelError, sampling::SamplingError};

fn message<T: std::fmt::Debug>(result: Result<T, EngineError>) -> String {
    let message = result.expect_err("refused").to_string();
    assert!(!message.contains('\n'), "{message}");
    message
}

#[test]
fn limits_of_zero_are_refused_by_name() {
    let cases = [
        ("max_batch", EngineConfig { max_batch: 0, ..EngineConfig::default() }),
        ("max_tokens", EngineConfig { max_tokens: 0, ..EngineConfig::default() }),
        ("prefill_chunk", EngineConfig { prefill_chunk: 0, ..EngineConfig::default() }),
    ];
    for (field, config) in cases {
        assert!(message(Engine::new(decoder(qwen3()), config)).contains(field));
    }
}

#[test]
fn policies_are_known_unknown_or_in_use() {
    let mut engine = engine(qwen3(), limits(Pass::Auto));
    let again = engine.add_adapter(policy("a"), None);
    assert!(matches!(again, Err(EngineError::KnownPolicy(p)) if p == policy("a")));
    let unknown = engine.open(policy("z"), key("k"), PLAIN);
    assert!(matches!(unknown, Err(EngineError::UnknownPolicy(p)) if p == policy("z")));
    assert!(message(engine.drop_adapter(&policy("z"))).contains("not in the engine"));
    let id = engine.open(policy("a"), key("k"), PLAIN).expect("open");
    let dropped = engine.drop_adapter(&policy("a"));
    assert!(matches!(dropped, Err(EngineError::PolicyInUse { open: 1, .. })));
    engine.close(id);
    engine.drop_adapter(&policy("a")).expect("closed");
    assert_eq!(engine.policies().count(), 2);
}

#[test]
fn an_adapter_of_another_model_is_refused() {
    let other = decoder(llama());
    let mut engine = Engine::new(decoder(qwen3()), limits(Pass::Auto)).expect("valid limits");
    let added = engine.add_adapter(policy("a"), adapter(&other, 1));
    assert!(matches!(added, Err(EngineError::Model(ModelError::Adapter(_)))));
    assert_eq!(engine.policies().count(), 0);
}

#[test]
fn calls_out_of_turn_are_refused() {
    let mut engine = engine(qwen3(), limits(Pass::Auto));
    let id = engine.open(policy("a"), key("k"), PLAIN).expect("open");
    assert!(matches!(engine.generate(id, 4, &[]), Err(EngineError::Empty(_))));
    engine.append(id, &[1, 2, 3]).expect("append");
    assert!(matches!(engine.generate(id, 0, &[]), Err(EngineError::NoBudget(_))));
    engine.generate(id, 4, &[]).expect("generate");
    assert!(matches!(engine.append(id, &[1]), Err(EngineError::Busy(_))));
    assert!(matches!(engine.generate(id, 4, &[]), Err(EngineError::Busy(_))));
    engine.close(id);
    engine.close(id);
    assert!(matches!(engine.append(id, &[1]), Err(EngineError::UnknownSequence(_))));
    assert!(matches!(engine.stream(id), Err(EngineError::UnknownSequence(_))));
    let hot = Sampling { temperature: f32::NAN, ..PLAIN };
    assert!(message(engine.open(policy("a"), key("k"), hot)).contains("sampling.temperature"));
}

#[test]
fn ids_and_lengths_beyond_the_model_are_refused_before_they_are_taken() {
    let mut engine = engine(qwen3(), limits(Pass::Auto));
    let id = engine.open(policy("a"), key("k"), PLAIN).expect("open");
    let outside = engine.append(id, &[1, 97]);
    assert!(matches!(outside, Err(EngineError::Model(ModelError::TokenId { id: 97, vocab: 97 }))));
    assert!(engine.stream(id).expect("open").is_empty());
    let long = engine.append(id, &[1; 301]);
    assert!(matches!(long, Err(EngineError::Context { len: 0, more: 301, max: 300, .. })));
    engine.append(id, &[1; 290]).expect("append");
    assert!(message(engine.generate(id, 11, &[])).contains("max_position_embeddings"));
    assert!(matches!(engine.generate(id, u32::MAX, &[]), Err(EngineError::Context { .. })));
    engine.generate(id, 10, &[]).expect("fits exactly");
    while engine.has_work() {
        engine.step().expect("step");
    }
    assert_eq!(engine.stream(id).expect("open").len(), 300);
}

#[test]
fn a_call_that_cannot_fit_alone_is_refused() {
    let limits = EngineConfig { max_tokens: 64, ..limits(Pass::Auto) };
    let mut engine = engine(qwen3(), limits);
    let id = engine.open(policy("a"), key("k"), PLAIN).expect("open");
    engine.append(id, &ids(1, 40)).expect("append");
    assert!(message(engine.generate(id, 40, &[])).contains("engine.max_tokens"));
    engine.generate(id, 8, &[]).expect("fits");
    while engine.has_work() {
        engine.step().expect("step");
    }
}

#[test]
fn a_damaged_adapter_ends_its_own_calls_only() {
    for pass in BOTH {
        let decoder = decoder(qwen3());
        let mut engine = engine(qwen3(), limits(pass));
        struct Nan;
        impl ModuleMapper for Nan {
            fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
                let value = param.val();
                Param::initialized(param.id, value.mul_scalar(f32::NAN))
            }
        }
        let damaged = adapter(&decoder, 1).map(&mut Nan);
        engine.add_adapter(policy("damaged"), damaged).expect("shapes fit");
        let mut open = |name: &str, budget: u32| {
            let id = engine.open(policy(name), key("k"), PLAIN).expect("open");
            engine.append(id, &[1, 2, 3]).expect("append");
            engine.generate(id, budget, &[]).expect("generate");
            id
        };
        let (bad, short, long) = (open("damaged", 3), open("a", 1), open("a", 3));
        let error = engine.step().expect_err("NaN");
        let EngineError::Sampling { sequence, position: 3, source } = error else {
            panic!("{error}");
        };
        assert_eq!((sequence, source), (bad, SamplingError::Logits));
        let mut ended = Vec::new();
        while engine.has_work() {
            ended.extend(engine.step().expect("the others go on").into_iter().map(|g| g.sequence));
        }
        assert_eq!(ended, [short, long]);
        engine.close(bad);
        engine.drop_adapter(&policy("damaged")).expect("closed");
    }
}
