//! The two ways to score agree, and neither depends on how a batch is put together.
#![allow(clippy::unwrap_used)]

use burn::tensor::Tensor;

mod derivatives;

use super::{graph::GraphTape, host::HostTape, *};
use crate::{
    device::Device,
    model::{
        Architecture, FullInput, Hybrid, LoraConfig, ModelConfig, RopeConfig, RopeScaling,
        TargetModules,
    },
};

fn config(architecture: Architecture) -> ModelConfig {
    let llama = architecture == Architecture::Llama;
    ModelConfig {
        layers: if matches!(architecture, Architecture::Qwen3_5(_)) { 3 } else { 2 },
        architecture,
        hidden: 40,
        ffn: 56,
        heads: 6,
        kv_heads: if llama { 6 } else { 3 },
        head_dim: 8,
        vocab: 97,
        norm_eps: 1e-6,
        attention_bias: llama,
        mlp_bias: llama,
        tied: !llama,
        max_positions: 512,
        rope: RopeConfig { theta: 1e4, scaling: RopeScaling::Default },
    }
}

fn qwen3_5() -> Architecture {
    Architecture::Qwen3_5(Box::new(Hybrid {
        full: vec![false, true, false],
        rotary: 4,
        sections: [1, 1, 0],
        kernel: 4,
        key_heads: 2,
        value_heads: 4,
        key_dim: 5,
        value_dim: 6,
        vision_language: true,
        vision: None,
    }))
}

/// A decoder with spread-out weights, so that every part of the computation matters.
fn decoder(architecture: Architecture) -> Decoder {
    let mut decoder = Decoder::random(config(architecture), 5, &Device::flex());
    let mut salt = 0.0;
    Parameters::update(&mut decoder, &mut |_, value| {
        salt += 0.37;
        let wave: Vec<f32> = (0..value.dims()[0]).map(|i| (i as f32 * 0.7 + salt).sin()).collect();
        value.clone().mul_scalar(3.0) + Tensor::from_floats(wave.as_slice(), &value.device()) * 0.2
    });
    decoder
}

fn adapter(decoder: &Decoder) -> Adapter {
    let names = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"];
    let target_modules = match decoder.config().hybrid() {
        Some(_) => TargetModules::AllLinear,
        None => TargetModules::Names(names.map(String::from).into()),
    };
    let settings = LoraConfig { r: 3, alpha: 5.0, target_modules, use_rslora: true };
    let mut adapter = Adapter::init(&settings, decoder, 3).unwrap();
    Parameters::update(&mut adapter, &mut |name, value| match name.contains("lora_B") {
        false => value,
        true => {
            let wave: Vec<f32> = (0..value.dims()[0]).map(|i| (i as f32).cos() * 0.2).collect();
            Tensor::from_floats(wave.as_slice(), &value.device())
        }
    });
    adapter
}

fn ids(count: usize, salt: usize) -> Vec<u32> {
    (0..count).map(|i| ((i * 31 + salt * 57 + i * i) % 97) as u32).collect()
}

/// Rows of unequal lengths; the first id of one is scored, some are not.
fn batch(prefix: usize) -> ScoreBatch {
    let row = |len: usize, salt: usize| ScoreRow {
        ids: ids(len, salt),
        scored: (0..len).map(|i| (i > 0 || (salt == 1 && prefix > 0)) && i % 3 != salt).collect(),
        ..ScoreRow::default()
    };
    ScoreBatch {
        prefix: ids(prefix, 9),
        rows: vec![row(7, 1), row(1, 2), row(12, 0)],
        images: Vec::new(),
    }
}

/// Any smooth function of the log-probabilities will do.
fn derivative(log_probs: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let of = |row: &Vec<f32>| row.iter().map(|l| 0.1 + l.sin()).collect();
    log_probs.iter().map(of).collect()
}

fn near(what: &str, found: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let scale = expected.iter().fold(1e-3f32, |m, v| m.max(v.abs()));
    for (f, e) in found.iter().zip(expected) {
        assert!((f - e).abs() <= tolerance * scale, "{what}: {f} and {e}, of {scale}");
    }
}

fn same(what: &str, found: &Gradients, expected: &Gradients, tolerance: f32) {
    let names = |g: &Gradients| g.iter().map(|(name, _)| name.to_owned()).collect::<Vec<_>>();
    assert_eq!(names(found), names(expected), "{what}");
    for (name, _) in expected.iter() {
        let (f, e) = (found.values(name).unwrap(), expected.values(name).unwrap());
        near(&format!("{what} {name}"), &f, &e, tolerance);
    }
}

fn gradients(
    decoder: &Decoder,
    trainable: Trainable,
    batch: &ScoreBatch,
    config: &ScoreConfig,
) -> (Scores, Gradients) {
    let adapter = adapter(decoder);
    let tape = forward(decoder, Some(&adapter), trainable, batch, config).unwrap();
    let scores = tape.scores().clone();
    let dlogp = derivative(&scores.log_probs);
    (scores, tape.backward(&dlogp).unwrap())
}

const EACH: [(Architecture, Trainable); 4] = [
    (Architecture::Qwen3, Trainable::Adapter),
    (Architecture::Qwen3, Trainable::Base),
    (Architecture::Llama, Trainable::Adapter),
    (Architecture::Llama, Trainable::Base),
];

fn every() -> impl Iterator<Item = (Architecture, Trainable)> {
    let hybrid = [Trainable::Adapter, Trainable::Base].map(|trainable| (qwen3_5(), trainable));
    EACH.into_iter().chain(hybrid)
}

#[test]
fn the_hand_written_pass_equals_autodiff() {
    for (architecture, trainable) in every() {
        let decoder = decoder(architecture);
        let adapter = Some(&adapter(&decoder)).cloned();
        for prefix in [0, 5, 150] {
            let batch = batch(prefix);
            let config = ScoreConfig { entropy: true, temperature: 0.8, ..Default::default() };
            let args = (&decoder, adapter.as_ref(), trainable, &batch, &config);
            let graph = GraphTape::record(args.0, args.1, args.2, args.3, args.4).unwrap();
            let host = HostTape::record(args.0, args.1, args.2, args.3, args.4).unwrap();
            let (found, expected) = (host.scores().clone(), graph.scores().clone());
            near("log-probs", &found.log_probs.concat(), &expected.log_probs.concat(), 1e-5);
            let entropies = |s: &Scores| s.entropies.clone().unwrap().concat();
            near("entropies", &entropies(&found), &entropies(&expected), 1e-5);
            let dlogp = derivative(&expected.log_probs);
            let (found, expected) =
                (host.backward((&dlogp).into()), graph.backward((&dlogp).into()));
            same(&format!("{trainable:?}"), &found.unwrap(), &expected.unwrap(), 3e-4);
        }
    }
}

#[test]
fn a_shared_prefix_changes_neither_scores_nor_gradients() {
    for (architecture, trainable) in every() {
        // A decay's gradient is a small sum of large terms.
        let tolerance = if matches!(architecture, Architecture::Qwen3_5(_)) { 1e-3 } else { 1e-4 };
        let decoder = decoder(architecture);
        let (batch, config) = (batch(20), ScoreConfig::default());
        let (together, sum) = gradients(&decoder, trainable, &batch, &config);
        let (mut apart, mut parts) = (Vec::new(), Gradients::default());
        for row in &batch.rows {
            let ids = [batch.prefix.clone(), row.ids.clone()].concat();
            let scored = [vec![false; batch.prefix.len()], row.scored.clone()].concat();
            let whole = ScoreBatch {
                rows: vec![ScoreRow { ids, scored, ..ScoreRow::default() }],
                ..ScoreBatch::default()
            };
            let (scores, part) = gradients(&decoder, trainable, &whole, &config);
            apart.extend(scores.log_probs);
            parts.add(part);
        }
        near("log-probs", &together.log_probs.concat(), &apart.concat(), 1e-5);
        same(&format!("{trainable:?}"), &sum, &parts, tolerance);
    }
}

#[test]
fn checkpointing_and_chunks_change_no_bit_and_neither_does_a_second_run() {
    for (architecture, trainable) in EACH {
        let decoder = decoder(architecture);
        let batch = batch(33);
        let (scores, expected) = gradients(&decoder, trainable, &batch, &ScoreConfig::default());
        for (checkpointing, entropy) in [(true, false), (false, true), (false, false)] {
            let config = ScoreConfig { checkpointing, entropy, ..Default::default() };
            let (found, gradients) = gradients(&decoder, trainable, &batch, &config);
            assert_eq!(found.log_probs, scores.log_probs);
            assert_eq!(gradients.flatten().unwrap(), expected.flatten().unwrap());
        }
        let config = ScoreConfig { head_chunk: 2, ..Default::default() };
        let (found, gradients) = gradients(&decoder, trainable, &batch, &config);
        near("chunks", &found.log_probs.concat(), &scores.log_probs.concat(), 1e-5);
        same("chunks", &gradients, &expected, 1e-4);
    }
}

#[test]
fn autodiff_with_checkpointing_equals_autodiff_without() {
    for (architecture, trainable) in every() {
        let decoder = decoder(architecture);
        let (adapter, batch) = (adapter(&decoder), batch(11));
        let run = |checkpointing| {
            let config = ScoreConfig { checkpointing, ..Default::default() };
            let tape = GraphTape::record(&decoder, Some(&adapter), trainable, &batch, &config);
            let tape = tape.unwrap();
            let dlogp = derivative(&tape.scores().log_probs);
            tape.backward((&dlogp).into()).unwrap()
        };
        same("checkpointing", &run(true), &run(false), 1e-4);
    }
}

#[test]
fn scores_are_those_of_the_full_pass() {
    [Architecture::Qwen3, qwen3_5()].into_iter().for_each(full_pass_scores);
}

fn full_pass_scores(architecture: Architecture) {
    let decoder = decoder(architecture);
    let ids = ids(30, 4);
    let input = FullInput { ids: &ids, batch: 1, mask: None, hidden: false, images: &[] };
    let logits = decoder.forward(None, input).unwrap().logits;
    let logits: Vec<f32> = logits.into_data().try_into_vec().unwrap();
    let temperature = 1.7;
    let mut expected = (Vec::new(), Vec::new());
    for (i, row) in logits.chunks(97).take(29).enumerate() {
        let scaled: Vec<f64> = row.iter().map(|&x| f64::from(x) / temperature).collect();
        let max = scaled.iter().copied().fold(f64::MIN, f64::max);
        let sum = max + scaled.iter().map(|x| (x - max).exp()).sum::<f64>().ln();
        expected.0.push((scaled[ids[i + 1] as usize] - sum) as f32);
        expected.1.push(scaled.iter().map(|x| (sum - x) * (x - sum).exp()).sum::<f64>() as f32);
    }
    let row = ScoreRow { ids: ids[10..].to_vec(), scored: vec![true; 20], ..ScoreRow::default() };
    let batch = ScoreBatch { prefix: ids[..10].to_vec(), rows: vec![row], images: Vec::new() };
    let temperature = temperature as f32;
    let config = ScoreConfig { temperature, entropy: true, ..Default::default() };
    let scores = log_probs(&decoder, None, &batch, &config).unwrap();
    near("log-probs", &scores.log_probs[0], &expected.0[9..], 1e-5);
    near("entropies", &scores.entropies.unwrap()[0], &expected.1[9..], 1e-5);
}

#[test]
fn malformed_batches_are_refused_in_one_line() {
    let decoder = decoder(Architecture::Qwen3);
    let row = |ids: Vec<u32>, scored: Vec<bool>| ScoreRow { ids, scored, ..ScoreRow::default() };
    let batch =
        |prefix: Vec<u32>, rows: Vec<ScoreRow>| ScoreBatch { prefix, rows, images: Vec::new() };
    for (batch, says) in [
        (batch(vec![1], vec![]), "no rows"),
        (batch(vec![1], vec![row(vec![], vec![])]), "0 ids"),
        (batch(vec![1], vec![row(vec![1, 2], vec![true])]), "2 ids and 1 flags"),
        (batch(vec![], vec![row(vec![1], vec![true])]), "nothing precedes"),
        (batch(vec![97], vec![row(vec![1], vec![true])]), "97"),
        (batch(vec![1], vec![row(vec![1; 512], vec![true; 512])]), "512 positions"),
    ] {
        let error = log_probs(&decoder, None, &batch, &ScoreConfig::default()).unwrap_err();
        let message = error.to_string();
        assert!(message.contains(says) && !message.contains('\n'), "{message}");
    }
    let good = batch(vec![1], vec![row(vec![1, 2], vec![true, true])]);
    let config = ScoreConfig { temperature: 0.0, ..Default::default() };
    assert!(log_probs(&decoder, None, &good, &config).is_err());
    let config = ScoreConfig::default();
    assert!(forward(&decoder, None, Trainable::Adapter, &good, &config).is_err());
    for wrong in [vec![], vec![vec![1.0]], vec![vec![1.0, f32::NAN]]] {
        let tape = forward(&decoder, None, Trainable::Base, &good, &config).unwrap();
        assert!(tape.backward(&wrong).is_err());
    }
}

#[test]
fn nothing_scored_gives_no_scores_and_zero_gradients() {
    let decoder = decoder(Architecture::Qwen3);
    let row = ScoreRow { ids: vec![1, 2, 3], scored: vec![false; 3], ..ScoreRow::default() };
    let batch = ScoreBatch { prefix: vec![4], rows: vec![row], images: Vec::new() };
    let (scores, gradients) =
        gradients(&decoder, Trainable::Adapter, &batch, &ScoreConfig::default());
    assert_eq!(scores.log_probs, [Vec::<f32>::new()]);
    assert_eq!(gradients.norm().unwrap(), 0.0);
}

#[test]
fn gradients_flatten_and_come_back() {
    let decoder = decoder(Architecture::Qwen3);
    let (_, mut gradients) =
        gradients(&decoder, Trainable::Adapter, &batch(3), &ScoreConfig::default());
    let flat = gradients.flatten().unwrap();
    let norm = gradients.norm().unwrap();
    let doubled: Vec<f32> = flat.iter().map(|v| v * 2.0).collect();
    gradients.unflatten(&doubled).unwrap();
    assert!((gradients.norm().unwrap() - 2.0 * norm).abs() < 1e-9 * norm);
    gradients.scale(0.5);
    assert_eq!(gradients.flatten().unwrap(), flat);
    assert!(gradients.unflatten(&flat[1..]).is_err());
}

#[test]
fn adamw_clips_and_steps_as_its_formula_says() {
    let decoder = decoder(Architecture::Qwen3);
    let mut adapter = adapter(&decoder);
    let settings =
        AdamWSettings { weight_decay: 0.1, max_grad_norm: Some(0.5), ..Default::default() };
    let mut optimizer = Optimizer::new(settings);
    let name = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight";
    let value =
        |adapter: &Adapter| -> Vec<f32> { adapter.named()[name].to_data().try_into_vec().unwrap() };
    let mut expected = value(&adapter);
    let (mut first, mut second) = (vec![0.0f64; expected.len()], vec![0.0f64; expected.len()]);
    for step in 1..=3_u8 {
        let (batch, config) = (batch(step.into()), ScoreConfig::default());
        let tape = forward(&decoder, Some(&adapter), Trainable::Adapter, &batch, &config).unwrap();
        let dlogp = derivative(tape.log_probs());
        let gradients = tape.backward(&dlogp).unwrap();
        let gradient = gradients.values(name).unwrap();
        let norm = optimizer.step(0.01, &mut adapter, gradients).unwrap();
        assert!(norm > 0.5, "the test needs clipping");
        for (i, gradient) in gradient.iter().enumerate() {
            let g = f64::from(*gradient) * 0.5 / (norm + 1e-6);
            first[i] = 0.9 * first[i] + 0.1 * g;
            second[i] = 0.999 * second[i] + 0.001 * g * g;
            let corrected = |m: f64, beta: f64| m / (1.0 - beta.powi(step.into()));
            let update = corrected(first[i], 0.9) / (corrected(second[i], 0.999).sqrt() + 1e-8);
            expected[i] = (f64::from(expected[i]) * (1.0 - 0.01 * 0.1) - 0.01 * update) as f32;
        }
        near("AdamW", &value(&adapter), &expected, 1e-4);
    }
}

#[test]
fn a_saved_optimizer_continues_bit_for_bit() {
    let decoder = decoder(Architecture::Qwen3);
    let mut adapter = adapter(&decoder);
    let mut optimizer = Optimizer::new(AdamWSettings::default());
    let step = |adapter: &mut Adapter, optimizer: &mut Optimizer, salt| {
        let config = ScoreConfig::default();
        let tape = forward(&decoder, Some(adapter), Trainable::Adapter, &batch(salt), &config);
        let tape = tape.unwrap();
        let dlogp = derivative(tape.log_probs());
        optimizer.step(0.01, adapter, tape.backward(&dlogp).unwrap()).unwrap();
    };
    step(&mut adapter, &mut optimizer, 4);
    step(&mut adapter, &mut optimizer, 5);
    let saved = (adapter.to_safetensors().unwrap(), optimizer.to_bytes().unwrap());
    let mut adapter2 = Adapter::from_safetensors(&saved.0, &decoder).unwrap();
    let mut optimizer2 = Optimizer::new(AdamWSettings::default());
    let named = adapter2.named();
    let len_of = |name: &str| named.get(name).map(|tensor| tensor.shape().num_elements());
    optimizer2.load(&saved.1, decoder.device(), len_of).unwrap();
    step(&mut adapter, &mut optimizer, 6);
    step(&mut adapter2, &mut optimizer2, 6);
    assert_eq!(adapter.to_safetensors().unwrap(), adapter2.to_safetensors().unwrap());
    assert_eq!(optimizer.to_bytes().unwrap(), optimizer2.to_bytes().unwrap());
    let mut refused = |bytes: &[u8], len_of: &dyn Fn(&str) -> Option<usize>| {
        optimizer2.load(bytes, decoder.device(), len_of).unwrap_err().to_string()
    };
    refused(&saved.1[..saved.1.len() - 1], &len_of);
    assert!(refused(&saved.1, &|_| None).contains("no parameter is called"));
    assert!(refused(&saved.1, &|_| Some(1)).contains("its moments do not"));
}
