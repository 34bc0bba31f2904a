//! The engine on small random models, on both passes.

mod admission;
mod evidence;
mod images;
mod invariance;
mod refusals;
mod streams;

use burn::{
    module::{Module, ModuleMapper, Param},
    tensor::{Device, Tensor, TensorData},
};
use protocol::{Digest, NoiseKey, PolicyDigest, Sampling};

use super::{Engine, EngineConfig, Generated, Pass, SequenceId};
use crate::{
    model::{
        Adapter, Architecture, Decoder, Hybrid, LoraConfig, ModelConfig, RopeConfig, RopeScaling,
        TargetModules,
    },
    sampling::noise,
};

pub(super) const PLAIN: Sampling = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 };

/// Odd sizes on purpose: nothing is a multiple of a panel.
pub(super) fn qwen3() -> ModelConfig {
    ModelConfig {
        architecture: Architecture::Qwen3,
        hidden: 40,
        ffn: 56,
        layers: 2,
        heads: 6,
        kv_heads: 2,
        head_dim: 12,
        vocab: 97,
        norm_eps: 1e-6,
        attention_bias: false,
        mlp_bias: false,
        tied: true,
        max_positions: 300,
        rope: RopeConfig { theta: 1e4, scaling: RopeScaling::Default },
    }
}

pub(super) fn llama() -> ModelConfig {
    ModelConfig {
        architecture: Architecture::Llama,
        hidden: 64,
        heads: 8,
        kv_heads: 1,
        head_dim: 16,
        attention_bias: true,
        mlp_bias: true,
        tied: false,
        ..qwen3()
    }
}

/// One layer of attention between two recurrent ones.
pub(super) fn qwen3_5() -> ModelConfig {
    let hybrid = Hybrid {
        full: vec![false, true, false],
        rotary: 6,
        sections: [1, 1, 1],
        kernel: 4,
        key_heads: 2,
        value_heads: 4,
        key_dim: 10,
        value_dim: 7,
        vision_language: true,
        vision: None,
    };
    ModelConfig { architecture: Architecture::Qwen3_5(Box::new(hybrid)), layers: 3, ..qwen3() }
}

/// Random values in place of all weights: larger than fresh ones, biases and norms included.
struct Shake(u32);

impl ModuleMapper for Shake {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.0 += 1;
        let key = NoiseKey(Digest::of(b"shake"));
        let shape = param.val().dims();
        let centre = if D == 1 { 0.7 } else { 0.0 };
        let count: usize = shape.iter().product();
        let draw = |i| (noise(&key, self.0, i) as f32 - 0.577) * 0.15 + centre;
        let values: Vec<f32> = (0..count as u32).map(draw).collect();
        let tensor = Tensor::from_data(TensorData::new(values, shape), &param.val().device());
        Param::initialized(param.id, tensor.set_require_grad(false))
    }
}

pub(super) fn decoder(config: ModelConfig) -> Decoder {
    let mut decoder = Decoder::random(config, 1, &Device::flex());
    decoder.weights = decoder.weights.clone().map(&mut Shake(0));
    decoder
}

pub(super) fn adapter(decoder: &Decoder, seed: u32) -> Adapter {
    let config = LoraConfig {
        r: 3,
        alpha: 5.0,
        target_modules: TargetModules::AllLinear,
        use_rslora: false,
    };
    let fresh = Adapter::init(&config, decoder, u64::from(seed)).expect("fits");
    fresh.map(&mut Shake(seed * 1000))
}

pub(super) fn policy(name: &str) -> PolicyDigest {
    PolicyDigest(Digest::of(name.as_bytes()))
}

pub(super) fn key(name: &str) -> NoiseKey {
    NoiseKey(Digest::of(name.as_bytes()))
}

/// Ids that differ with `seed`.
pub(super) fn ids(seed: u32, count: usize) -> Vec<u32> {
    let word = |i: u32| (i + 1 + seed * 1_000_003).wrapping_mul(0x9E37_79B9) >> 7;
    (0..count as u32).map(|i| word(i) % 97).collect()
}

/// An engine with the policies "base", "a" and "b".
pub(super) fn engine(config: ModelConfig, limits: EngineConfig) -> Engine {
    let decoder = decoder(config);
    let (a, b) = (adapter(&decoder, 1), adapter(&decoder, 2));
    let mut engine = Engine::new(decoder, limits).expect("valid limits");
    engine.add_adapter(policy("base"), None).expect("new");
    engine.add_adapter(policy("a"), a).expect("new");
    engine.add_adapter(policy("b"), b).expect("new");
    engine
}

pub(super) const BOTH: [Pass; 2] = [Pass::Auto, Pass::Tensors];

pub(super) fn limits(pass: Pass) -> EngineConfig {
    EngineConfig { pass, ..EngineConfig::default() }
}

/// A rollout: a prompt, then turns of a budget and what is appended after them.
#[derive(Clone)]
pub(super) struct Rollout {
    pub policy: PolicyDigest,
    pub key: NoiseKey,
    pub sampling: Sampling,
    pub prompt: Vec<u32>,
    pub turns: Vec<(u32, Vec<u32>)>,
}

impl Rollout {
    pub(super) fn new(policy_name: &str, number: u32) -> Self {
        let turns = (0..3).map(|t| (4 + (number + t) % 5, ids(number * 7 + t, 3))).collect();
        Self {
            policy: policy(policy_name),
            key: key(&format!("lease {number}")),
            sampling: PLAIN,
            prompt: ids(number, 9 + number as usize % 40),
            turns,
        }
    }
}

/// Plays rollouts together, each from its own start step on; returns their results in order.
pub(super) fn play(engine: &mut Engine, rollouts: &[(usize, Rollout)]) -> Vec<Vec<Generated>> {
    let mut results: Vec<Vec<Generated>> = vec![Vec::new(); rollouts.len()];
    let mut open: Vec<Option<SequenceId>> = vec![None; rollouts.len()];
    for step in 0..10_000 {
        for (i, (start, rollout)) in rollouts.iter().enumerate() {
            if *start == step {
                let id = engine.open(rollout.policy, rollout.key, rollout.sampling).expect("open");
                engine.append(id, &rollout.prompt).expect("append");
                engine.generate(id, rollout.turns[0].0, &[]).expect("generate");
                open[i] = Some(id);
            }
        }
        for generated in engine.step().expect("step") {
            let i = open.iter().position(|id| *id == Some(generated.sequence)).expect("ours");
            let (id, turns) = (generated.sequence, &rollouts[i].1.turns);
            results[i].push(generated);
            let done = results[i].len();
            if let Some((budget, _)) = turns.get(done) {
                engine.append(id, &turns[done - 1].1).expect("append");
                engine.generate(id, *budget, &[]).expect("generate");
            } else {
                engine.close(id);
            }
        }
        if !engine.has_work() && rollouts.iter().all(|(start, _)| *start <= step) {
            return results;
        }
    }
    panic!("the rollouts do not end");
}

/// What must not depend on the company: everything but the sequence's number.
pub(super) fn contents(results: &[Generated]) -> Vec<Generated> {
    results.iter().map(|g| Generated { sequence: SequenceId(0), ..g.clone() }).collect()
}
