//! Scoring over images: a shared prefix, checkpointing and frozen parts change nothing, and gradients
//! are those that differences give.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use burn::tensor::Tensor;

use super::{graph::GraphTape, *};
use crate::{
    device::Device,
    model::{
        Architecture, Hybrid, LoraConfig, ModelConfig, RopeConfig, RopeScaling, TargetModules,
        VisionConfig,
    },
    vision::{Patches, PlacedImage},
};

const PAD: u32 = 3;

fn decoder() -> Decoder {
    let vision = VisionConfig {
        depth: 3,
        hidden: 24,
        ffn: 20,
        heads: 3,
        patch: 2,
        time: 1,
        merge: 2,
        positions: 10,
        theta: 100.0,
        image_pad: PAD,
    };
    let hybrid = Hybrid {
        full: vec![false, true],
        rotary: 6,
        sections: [1, 1, 1],
        kernel: 4,
        key_heads: 2,
        value_heads: 4,
        key_dim: 5,
        value_dim: 6,
        vision_language: true,
        vision: Some(vision),
    };
    let config = ModelConfig {
        architecture: Architecture::Qwen3_5(Box::new(hybrid)),
        layers: 2,
        hidden: 40,
        ffn: 56,
        heads: 6,
        kv_heads: 3,
        head_dim: 8,
        vocab: 97,
        norm_eps: 1e-6,
        attention_bias: false,
        mlp_bias: false,
        tied: true,
        max_positions: 512,
        rope: RopeConfig { theta: 1e4, scaling: RopeScaling::Default },
    };
    let mut decoder = Decoder::random(config, 5, &Device::flex());
    let mut salt = 0.0;
    Parameters::update(&mut decoder, &mut |_, value| {
        salt += 0.37;
        let wave = |i: usize| (i as f32 * 0.7 + salt).sin();
        let wave: Vec<f32> = (0..value.dims()[0]).map(wave).collect();
        value.clone().mul_scalar(3.0) + Tensor::from_floats(wave.as_slice(), &value.device()) * 0.15
    });
    decoder
}

fn adapter(decoder: &Decoder, target_modules: TargetModules) -> Adapter {
    let settings = LoraConfig { r: 3, alpha: 5.0, target_modules, use_rslora: false };
    let mut adapter = Adapter::init(&settings, decoder, 3).unwrap();
    Parameters::update(&mut adapter, &mut |name, value| match name.contains("lora_B") {
        false => value,
        true => {
            let wave: Vec<f32> = (0..value.dims()[0]).map(|i| (i as f32).cos() * 0.1).collect();
            Tensor::from_floats(wave.as_slice(), &value.device())
        }
    });
    adapter
}

fn image(seed: u32, height: u32, width: u32) -> Arc<Patches> {
    let value = |i: u32| ((i * 37 + seed * 101) as f32 * 0.1).sin();
    let values = (0..height * width * 12).map(value).collect();
    Arc::new(Patches::new([1, height, width], 2, values).unwrap())
}

/// Text of `parts[0]` ids, an image, more text, and so on; an image-pad id of text among it.
fn ids(salt: usize, parts: &[usize], images: &[Arc<Patches>]) -> (Vec<u32>, Vec<PlacedImage>) {
    let (mut ids, mut placed) = (Vec::new(), Vec::new());
    for (part, &count) in parts.iter().enumerate() {
        ids.extend((0..count).map(|i| ((i * 31 + salt * 57 + i * i) % 97) as u32));
        if let Some(patches) = images.get(part) {
            placed.push(PlacedImage { at: ids.len(), patches: Arc::clone(patches) });
            ids.resize(ids.len() + patches.tokens(), PAD);
            ids.push(PAD);
        }
    }
    (ids, placed)
}

/// A prefix with two images, and rows with and without: one shows an image of the prefix again.
fn batch() -> ScoreBatch {
    let (first, second, third) = (image(1, 4, 6), image(2, 2, 2), image(3, 4, 6));
    let (prefix, images) = ids(1, &[4, 2, 3], &[first.clone(), second]);
    let row = |salt: usize, parts: &[usize], images: &[Arc<Patches>]| {
        let (ids, images) = ids(salt, parts, images);
        let scored = (0..ids.len()).map(|i| !(i + salt).is_multiple_of(3)).collect();
        ScoreRow { ids, scored, images, noise: None }
    };
    let rows = vec![row(2, &[3, 4], &[third]), row(4, &[9], &[]), row(3, &[0, 5], &[first])];
    ScoreBatch { prefix, rows, images }
}

/// The rows of a batch, each whole, by itself.
fn apart(batch: &ScoreBatch) -> Vec<ScoreBatch> {
    let len = batch.prefix.len();
    let whole = |row: &ScoreRow| {
        let moved = row.images.iter().map(|it| PlacedImage { at: len + it.at, ..it.clone() });
        let row = ScoreRow {
            ids: [&batch.prefix[..], &row.ids].concat(),
            scored: [&vec![false; len][..], &row.scored].concat(),
            images: batch.images.iter().cloned().chain(moved).collect(),
            noise: None,
        };
        ScoreBatch { rows: vec![row], ..ScoreBatch::default() }
    };
    batch.rows.iter().map(whole).collect()
}

fn derivative(log_probs: &[Vec<f32>]) -> Vec<Vec<f32>> {
    log_probs.iter().map(|row| row.iter().map(|l| 0.1 + l.sin()).collect()).collect()
}

/// What [`derivative`] is the derivative of.
fn loss(log_probs: &[Vec<f32>]) -> f64 {
    log_probs.iter().flatten().map(|&l| 0.1 * f64::from(l) - f64::from(l).cos()).sum()
}

fn near(what: &str, found: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let scale = expected.iter().fold(1e-3f32, |m, v| m.max(v.abs()));
    for (f, e) in found.iter().zip(expected) {
        assert!((f - e).abs() <= tolerance * scale, "{what}: {f} and {e}, of {scale}");
    }
}

fn same(what: &str, found: &Gradients, expected: &Gradients) {
    let names = |g: &Gradients| g.iter().map(|(name, _)| name.to_owned()).collect::<Vec<_>>();
    assert_eq!(names(found), names(expected), "{what}");
    for (name, _) in expected.iter() {
        let (f, e) = (found.values(name).unwrap(), expected.values(name).unwrap());
        near(&format!("{what} {name}"), &f, &e, 1e-3);
    }
}

fn run(
    decoder: &Decoder,
    adapter: Option<&Adapter>,
    batch: &ScoreBatch,
    checkpointing: bool,
) -> (Vec<Vec<f32>>, Gradients) {
    let trainable = if adapter.is_some() { Trainable::Adapter } else { Trainable::Base };
    let config = ScoreConfig { checkpointing, ..ScoreConfig::default() };
    let tape = forward(decoder, adapter, trainable, batch, &config).unwrap();
    let log_probs = tape.log_probs().to_vec();
    let plain = log_probs_of(decoder, adapter, batch);
    near("without gradients", &log_probs.concat(), &plain.concat(), 1e-4);
    let dlogp = derivative(&log_probs);
    let gradients = tape.backward(&dlogp).unwrap();
    // The other devices' way.
    let tape = GraphTape::record(decoder, adapter, trainable, batch, &config).unwrap();
    near("autodiff", &tape.scores().log_probs.concat(), &log_probs.concat(), 1e-4);
    same("autodiff", &tape.backward((&dlogp).into()).unwrap(), &gradients);
    (log_probs, gradients)
}

fn log_probs_of(decoder: &Decoder, adapter: Option<&Adapter>, batch: &ScoreBatch) -> Vec<Vec<f32>> {
    log_probs(decoder, adapter, batch, &ScoreConfig::default()).unwrap().log_probs
}

/// No adapter (so that everything is trained), and adapters here and there.
fn adapters(decoder: &Decoder) -> Vec<Option<Adapter>> {
    let pattern = |text: &str| TargetModules::Pattern(text.into());
    let kinds = [
        TargetModules::AllLinear,
        pattern(r"model\.visual\.merger\.linear_fc1"),
        pattern(r"model\.visual\.blocks\.1\.(attn\.qkv|attn\.proj|mlp\.linear_fc2)"),
        pattern(r"model\.language_model.*"),
    ];
    let some = kinds.into_iter().map(|kind| Some(adapter(decoder, kind)));
    std::iter::once(None).chain(some).collect()
}

#[test]
fn images_in_a_shared_prefix_and_checkpointing_change_nothing() {
    let (decoder, batch) = (decoder(), batch());
    for (number, adapter) in adapters(&decoder).iter().enumerate() {
        let (scores, gradients) = run(&decoder, adapter.as_ref(), &batch, false);
        let (again, kept) = run(&decoder, adapter.as_ref(), &batch, true);
        near("checkpointing", &again.concat(), &scores.concat(), 1e-4);
        same(&format!("checkpointing {number}"), &kept, &gradients);
        let mut sum = Gradients::default();
        for (row, batch) in apart(&batch).iter().enumerate() {
            let (own, part) = run(&decoder, adapter.as_ref(), batch, false);
            near("apart", &own[0], &scores[row], 1e-4);
            sum.add(part);
        }
        same(&format!("apart {number}"), &sum, &gradients);
        let seen = gradients.iter().any(|(name, _)| name.contains("model.visual."));
        assert_eq!(seen, number != 4, "a frozen tower has no gradients");
    }
}

#[test]
fn gradients_of_the_tower_are_those_that_differences_give() {
    let (decoder, batch) = (decoder(), batch());
    for adapter in adapters(&decoder).iter().take(4) {
        let (_, gradients) = run(&decoder, adapter.as_ref(), &batch, false);
        let names: Vec<&str> =
            gradients.iter().map(|it| it.0).filter(|name| name.contains("model.visual.")).collect();
        assert!(!names.is_empty());
        for name in names {
            let gradient = gradients.values(name).unwrap();
            let norm = gradient.iter().map(|g| g * g).sum::<f32>().sqrt();
            // Along the gradient itself, where the difference is largest.
            let along = |step: f32| {
                let (mut decoder, mut adapter) = (decoder.clone(), adapter.clone());
                let direction: Vec<f32> = gradient.iter().map(|g| g / norm * step).collect();
                let mut move_ = |own: &str, value: Tensor<1>| match own == name {
                    false => value,
                    true => {
                        let device = value.device();
                        value + Tensor::from_floats(direction.as_slice(), &device)
                    }
                };
                match &mut adapter {
                    Some(adapter) => Parameters::update(adapter, &mut move_),
                    None => Parameters::update(&mut decoder, &mut move_),
                }
                loss(&log_probs_of(&decoder, adapter.as_ref(), &batch))
            };
            let step = 4e-3;
            let slope = (along(step) - along(-step)) / (2.0 * f64::from(step));
            let off = (slope / f64::from(norm) - 1.0).abs();
            assert!(off < 0.05, "{name}: {slope} by differences, {norm} by the gradient");
        }
    }
}

#[test]
fn images_that_are_not_at_their_ids_are_refused_in_one_line() {
    let decoder = decoder();
    let whole = batch();
    let score =
        |batch: &ScoreBatch| log_probs(&decoder, None, batch, &ScoreConfig::default()).map(drop);
    score(&whole).unwrap();
    let says = |change: &dyn Fn(&mut ScoreBatch), says: &str| {
        let mut batch = whole.clone();
        change(&mut batch);
        let message = score(&batch).unwrap_err().to_string();
        assert!(message.contains(says) && !message.contains('\n'), "{message}");
    };
    says(&|batch| batch.images[0].at += 2, "image-pad ids (3)");
    says(&|batch| batch.images[1].at = 9000, "image-pad ids (3)");
    says(&|batch| batch.images[0].at = usize::MAX, "image-pad ids (3)");
    says(&|batch| batch.images.push(batch.images[0].clone()), "of its own");
    says(&|batch| batch.rows[1].images = whole.images.clone(), "image-pad ids (3)");
    let other = Arc::new(Patches::new([1, 4, 6], 2, vec![0.0; 24 * 7]).unwrap());
    says(&|batch| batch.images[0].patches = Arc::clone(&other), "7 values");
    let blocks = Arc::new(Patches::new([1, 3, 3], 3, vec![0.0; 9 * 12]).unwrap());
    says(&|batch| batch.images[1].patches = Arc::clone(&blocks), "3 x 3 to an id");
    // An image-pad id without an image is an ordinary id.
    let plain = ScoreBatch { images: Vec::new(), ..whole.clone() };
    assert_ne!(log_probs_of(&decoder, None, &plain), log_probs_of(&decoder, None, &whole));
}
