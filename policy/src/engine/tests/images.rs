//! Streams with images: the full pass's logits, sharing by content, and pads that are no images.

use std::sync::Arc;

use super::*;
use crate::{
    model::{FullInput, VisionConfig},
    vision::{Patches, PlacedImage},
};

const PAD: u32 = 11;

fn seeing() -> ModelConfig {
    let mut config = qwen3_5();
    if let Architecture::Qwen3_5(hybrid) = &mut config.architecture {
        hybrid.vision = Some(VisionConfig {
            depth: 2,
            hidden: 24,
            ffn: 20,
            heads: 3,
            patch: 2,
            time: 1,
            merge: 2,
            positions: 16,
            theta: 100.0,
            image_pad: PAD,
        });
    }
    config
}

fn image(seed: u32, height: u32, width: u32) -> Arc<Patches> {
    let value = |i: u32| ((i * 37 + seed * 101) as f32 * 0.1).sin();
    let values = (0..height * width * 12).map(value).collect();
    Arc::new(Patches::new([1, height, width], 2, values).expect("whole blocks"))
}

/// Text, an image, text.
fn prompt(seed: u32, before: usize, image: &Arc<Patches>, after: usize) -> (Vec<u32>, PlacedImage) {
    let pads = vec![PAD; image.tokens()];
    let all = [ids(seed, before), pads, ids(seed + 1, after)].concat();
    (all, PlacedImage { at: before, patches: Arc::clone(image) })
}

fn finish(engine: &mut Engine) -> Vec<Generated> {
    let mut all = Vec::new();
    while engine.has_work() {
        all.append(&mut engine.step().expect("step"));
    }
    all
}

#[test]
fn a_stream_with_images_samples_what_the_full_pass_samples_however_it_is_cut() {
    let small = decoder(seeing());
    let tuned = adapter(&small, 1);
    for chunk in [512, 7, 1] {
        let mut engine =
            engine(seeing(), EngineConfig { prefill_chunk: chunk, ..limits(Pass::Auto) });
        let (large, tiny) = (image(1, 8, 4), image(2, 2, 2));
        let key = key("lease");
        let mut open = Vec::new();
        for (seed, name) in [(1, "base"), (5, "a")] {
            let (first, mut placed) = prompt(seed, 6, &large, 5);
            let id = engine.open(policy(name), key, PLAIN).expect("open");
            engine.append_images(id, &first, vec![placed.clone()]).expect("append");
            // A turn later another image, and ids of image pads that are text.
            let (second, mut later) = prompt(seed + 9, 3, &tiny, 2);
            let second = [second, vec![PAD, PAD]].concat();
            engine.generate(id, 6, &[]).expect("generate");
            let generated = finish(&mut engine).pop().expect("one");
            let mut stream = [first.clone(), generated.ids].concat();
            later.at += stream.len();
            let moved = PlacedImage { at: later.at - stream.len(), ..later.clone() };
            engine.append_images(id, &second, vec![moved]).expect("append");
            stream.extend(&second);
            engine.generate(id, 6, &[]).expect("generate");
            let generated = finish(&mut engine).pop().expect("one");
            stream.extend(&generated.ids);
            placed.at = 6;
            open.push((name, stream, vec![placed, later], first.len()));
        }
        for (name, stream, images, start) in open {
            let adapter = (name == "a").then_some(&tuned);
            let input =
                FullInput { ids: &stream, batch: 1, mask: None, hidden: false, images: &images };
            let logits = small.forward(adapter, input).expect("fits").logits;
            let logits: Vec<f32> = logits.into_data().try_into_vec().expect("f32");
            let sampler = crate::sampling::Sampler::new(&PLAIN).expect("valid");
            let sampled = (start..start + 6).chain(stream.len() - 6..stream.len());
            for at in sampled {
                let row = &logits[(at - 1) * 97..at * 97];
                let choice = sampler.choose(row, &key, at as u32).expect("finite");
                assert_eq!(choice.id, stream[at], "{name} at {at} in chunks of {chunk}");
            }
        }
    }
}

#[test]
fn prompts_are_shared_where_their_images_are_the_same_too() {
    let mut engine = engine(seeing(), limits(Pass::Auto));
    let (one, other) = (image(1, 4, 4), image(2, 4, 4));
    let mut play = |image: &Arc<Patches>, name: &str, number: u32| {
        let (ids, placed) = prompt(3, 20, image, 9);
        let id = engine.open(policy(name), key(&format!("{number}")), PLAIN).expect("open");
        engine.append_images(id, &ids, vec![placed]).expect("append");
        engine.generate(id, 4, &[]).expect("generate");
        finish(&mut engine);
        engine.close(id);
        engine.stats().shared
    };
    assert_eq!(play(&one, "base", 0), 0);
    // The same content in another allocation.
    assert_eq!(play(&image(1, 4, 4), "base", 1), 32);
    assert_eq!(play(&other, "base", 2), 32);
    assert_eq!(play(&other, "base", 3), 64);
    assert_eq!(play(&one, "a", 4), 64);
    // The same ids without an image.
    let (ids, _) = prompt(3, 20, &one, 9);
    let id = engine.open(policy("base"), key("5"), PLAIN).expect("open");
    engine.append(id, &ids).expect("append");
    engine.generate(id, 4, &[]).expect("generate");
    finish(&mut engine);
    assert_eq!(engine.stats().shared, 64);
}

#[test]
fn beginnings_are_shared_up_to_the_first_image_that_differs() {
    let mut config = seeing();
    if let Architecture::Qwen3_5(hybrid) = &mut config.architecture {
        // Nothing recurrent, so that a past can be cut back.
        hybrid.full = vec![true; 3];
    }
    let mut engine = engine(config.clone(), limits(Pass::Auto));
    let (one, other) = (image(1, 4, 4), image(2, 4, 4));
    let (whole, placed) = prompt(3, 20, &one, 9);
    let tail = [&whole[..28], &ids(50, 6)].concat();
    let cases = [(&whole, &one, 0), (&tail, &one, 28), (&whole, &other, 20), (&tail, &other, 28)];
    let mut shared = 0;
    for (number, (ids, image, expected)) in cases.into_iter().enumerate() {
        let play = |engine: &mut Engine| {
            let key = key(&format!("{number}"));
            let id = engine.open(policy("a"), key, PLAIN).expect("open");
            let placed = PlacedImage { at: placed.at, patches: Arc::clone(image) };
            engine.append_images(id, ids, vec![placed]).expect("append");
            engine.generate(id, 6, &[]).expect("generate");
            let generated = finish(engine).pop().expect("one");
            engine.close(id);
            generated.ids
        };
        let found = play(&mut engine);
        assert_eq!(found, play(&mut super::engine(config.clone(), limits(Pass::Auto))));
        shared += expected;
        assert_eq!(engine.stats().shared, shared, "prompt {number}");
    }
}

#[test]
fn a_stream_that_gave_up_its_places_sees_its_images_again() {
    let limits = EngineConfig { max_tokens: 60, ..limits(Pass::Auto) };
    let play = |together: bool| {
        let mut engine = engine(seeing(), limits);
        let mut results = Vec::new();
        let mut sequences = Vec::new();
        for number in 0..if together { 3 } else { 1 } {
            let (ids, placed) = prompt(number, 8, &image(number, 4, 4), 6);
            let id = engine.open(policy("base"), key(&format!("{number}")), PLAIN).expect("open");
            engine.append_images(id, &ids, vec![placed]).expect("append");
            engine.generate(id, 8, &[]).expect("generate");
            sequences.push(id);
        }
        finish(&mut engine);
        for &id in sequences.iter().rev() {
            engine.append(id, &[1, 2, 3]).expect("append");
            engine.generate(id, 8, &[]).expect("generate");
            results.append(&mut finish(&mut engine));
        }
        (results.pop().expect("the first stream's").ids, engine.stats().fed_again)
    };
    let (alone, again) = play(false);
    assert_eq!(again, 0);
    let (crowded, again) = play(true);
    assert!(again > 0);
    assert_eq!(crowded, alone);
}

#[test]
fn images_are_refused_before_anything_is_taken() {
    let (ids, placed) = prompt(1, 4, &image(1, 4, 4), 2);
    let mut text = engine(qwen3_5(), limits(Pass::Auto));
    let id = text.open(policy("base"), key("k"), PLAIN).expect("open");
    let message = text.append_images(id, &ids, vec![placed.clone()]).expect_err("no tower");
    assert!(message.to_string().contains("takes no images"), "{message}");
    for pass in BOTH {
        let mut plain = engine(qwen3(), limits(pass));
        let id = plain.open(policy("base"), key("k"), PLAIN).expect("open");
        assert!(plain.append_images(id, &ids, vec![placed.clone()]).is_err());
        assert_eq!(plain.stream(id).expect("open"), [0u32; 0]);
    }
    let mut engine = engine(seeing(), limits(Pass::Auto));
    let id = engine.open(policy("base"), key("k"), PLAIN).expect("open");
    let shifted = PlacedImage { at: 5, ..placed.clone() };
    let message = engine.append_images(id, &ids, vec![shifted]).expect_err("not at its ids");
    assert!(message.to_string().contains("image-pad ids (11)"), "{message}");
    assert_eq!(engine.stream(id).expect("open"), [0u32; 0]);
    engine.append_images(id, &ids, vec![placed]).expect("append");
}
