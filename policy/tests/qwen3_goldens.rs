//! Every checkpoint under the data roots gives the reference stack's numbers.

mod support;

use burn::tensor::DType;
use policy::model::{Decoder, Feed, FullInput, KvCache};
use support::{close, folders, goldens, load, values};

/// Of max |value|: f32 rounding, or a few units in the last place of bf16 through all layers.
fn tolerance(decoder: &Decoder) -> f64 {
    if decoder.dtype() == DType::F32 { 1e-4 } else { 3e-2 }
}

#[test]
fn logits_and_hidden_states_are_those_of_transformers() {
    for dir in folders("checkpoints") {
        let Some(decoder) = load(&dir) else { continue };
        let golden = goldens(&dir);
        let ids = golden["input_ids"].ids();
        let input = FullInput { ids: &ids, batch: 1, mask: None, hidden: true };
        let output = decoder.forward(None, input).unwrap();
        let name = dir.display();
        let tolerance = tolerance(&decoder);
        close(
            &format!("{name} logits"),
            &values(output.logits),
            &golden["logits"].values,
            tolerance,
        );
        for (i, hidden) in output.hidden.into_iter().enumerate() {
            let key = format!("hidden_{i}");
            close(&format!("{name} {key}"), &values(hidden), &golden[&key].values, tolerance);
        }
    }
}

#[test]
fn left_padding_changes_nothing_for_the_ids_that_count() {
    for dir in folders("checkpoints") {
        let Some(decoder) = load(&dir) else { continue };
        let golden = goldens(&dir);
        let (ids, mask) = (golden["batch_input_ids"].ids(), golden["batch_mask"].flags());
        let batch = golden["batch_input_ids"].shape[0];
        let input = FullInput { ids: &ids, batch, mask: Some(&mask), hidden: false };
        let logits = values(decoder.forward(None, input).unwrap().logits);
        let vocab = decoder.config().vocab;
        let expected = &golden["batch_logits"].values;
        let kept = |i: &usize| mask[i / vocab];
        let found: Vec<f32> = (0..logits.len()).filter(kept).map(|i| logits[i]).collect();
        let wanted: Vec<f64> = (0..logits.len()).filter(kept).map(|i| expected[i]).collect();
        close(&format!("{} batch", dir.display()), &found, &wanted, tolerance(&decoder));
    }
}

#[test]
fn greedy_decoding_with_the_cache_gives_the_reference_ids() {
    for dir in folders("checkpoints") {
        let Some(decoder) = load(&dir) else { continue };
        let golden = goldens(&dir);
        let expected = golden["greedy"].ids();
        let prompt = golden["input_ids"].ids();
        let mut cache = KvCache::new(&decoder, 1024);
        let sequence = cache.open();
        let mut ids = prompt.clone();
        let mut next = prompt;
        while ids.len() < expected.len() {
            let feed = Feed { sequence, ids: &next, logits: true };
            let logits = decoder.advance(None, &mut cache, &[feed]).unwrap();
            let row = logits.rows().next().unwrap();
            let best = (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap();
            next = vec![u32::try_from(best).unwrap()];
            ids.extend(&next);
        }
        assert_eq!(ids, expected, "{}", dir.display());
    }
}
