//! Every checkpoint under the data roots gives the reference stack's numbers.
#![allow(clippy::unwrap_used)]

mod support;

use policy::{
    device::DeviceChoice,
    model::{Adapter, Checkpoint, Feed, FullInput, KvCache, LoadDtype, LoraConfig, TargetModules},
    score::{self, Parameters, ScoreBatch, ScoreConfig, ScoreRow, Trainable},
};
use support::{base_of, close, folders, goldens, load, own_root, tolerance, values};

#[test]
fn logits_and_hidden_states_are_those_of_transformers() {
    for dir in folders("checkpoints") {
        let Some(decoder) = load(&dir) else { continue };
        let golden = goldens(&dir);
        let ids = golden["input_ids"].ids();
        let input = FullInput { ids: &ids, batch: 1, mask: None, hidden: true, images: &[] };
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
            let Some(golden) = golden.get(&key) else { continue };
            close(&format!("{name} {key}"), &values(hidden), &golden.values, tolerance);
        }
    }
}

#[test]
fn left_padding_changes_nothing_for_the_ids_that_count() {
    for dir in folders("checkpoints") {
        let Some(decoder) = load(&dir) else { continue };
        let golden = goldens(&dir);
        let Some(ids) = golden.get("batch_input_ids") else { continue };
        let (batch, ids) = (ids.shape[0], ids.ids());
        let mask = golden["batch_mask"].flags();
        let input = FullInput { ids: &ids, batch, mask: Some(&mask), hidden: false, images: &[] };
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
        let Some(expected) = golden.get("greedy").map(|greedy| greedy.ids()) else { continue };
        let prompt = golden["input_ids"].ids().len();
        let mut cache = KvCache::new(&decoder, 1024);
        let sequence = cache.open();
        let mut fed = 0;
        for (i, &id) in expected.iter().enumerate().skip(prompt) {
            let feed = Feed { sequence, ids: &expected[fed..i], logits: true, images: &[] };
            let logits = decoder.advance(None, &mut cache, &[feed]).unwrap();
            let row = logits.rows().next().unwrap();
            let best = row.iter().copied().fold(f32::MIN, f32::max);
            let largest = row.iter().fold(f32::MIN_POSITIVE, |m, l| m.max(l.abs()));
            // Logits that round alike may swap places.
            let gap = f64::from((best - row[id as usize]) / largest);
            assert!(gap <= tolerance(&decoder), "{} at {i}: {gap}", dir.display());
            fed = i;
        }
    }
}

/// Every id but the first of one row, scored.
fn whole(ids: &[u32]) -> ScoreBatch {
    let mut scored = vec![true; ids.len()];
    scored[0] = false;
    ScoreBatch {
        rows: vec![ScoreRow { ids: ids.to_vec(), scored, ..ScoreRow::default() }],
        ..ScoreBatch::default()
    }
}

/// The mean next-token cross entropy and its derivative by each log-probability.
fn mean_loss(log_probs: &[Vec<f32>]) -> (f32, Vec<Vec<f32>>) {
    let count: usize = log_probs.iter().map(Vec::len).sum();
    let sum: f64 = log_probs.iter().flatten().map(|&l| f64::from(l)).sum();
    let each = -1.0 / count as f32;
    let dlogp = log_probs.iter().map(|row| vec![each; row.len()]).collect();
    ((-sum / count as f64) as f32, dlogp)
}

#[test]
fn the_loss_and_every_weight_gradient_are_those_of_torch() {
    for dir in folders("checkpoints") {
        let Some(decoder) = load(&dir) else { continue };
        let golden = goldens(&dir);
        let Some(loss) = golden.get("loss") else { continue };
        let batch = whole(&golden["input_ids"].ids());
        for checkpointing in [false, true] {
            let config = ScoreConfig { checkpointing, ..Default::default() };
            let tape = score::forward(&decoder, None, Trainable::Base, &batch, &config).unwrap();
            let (found, dlogp) = mean_loss(tape.log_probs());
            close(&format!("{} loss", dir.display()), &[found], &loss.values, 1e-4);
            let gradients = tape.backward(&dlogp).unwrap();
            for (key, expected) in &golden {
                let Some(name) = key.strip_prefix("grad.") else { continue };
                close(key, &gradients.values(name).unwrap(), &expected.values, 1e-4);
            }
        }
    }
}

#[test]
fn adapters_give_the_logits_and_gradients_of_peft() {
    for dir in folders("adapters") {
        let Some(decoder) = load(&base_of(&dir)) else { continue };
        let adapter = Adapter::load_peft(&dir, &decoder).unwrap();
        let golden = goldens(&dir);
        // Where the adapter's folder names no inputs, they are the checkpoint's.
        let base = goldens(&base_of(&dir));
        let ids = golden.get("input_ids").unwrap_or(&base["input_ids"]).ids();
        let input = FullInput { ids: &ids, batch: 1, mask: None, hidden: false, images: &[] };
        let logits = values(decoder.forward(Some(&adapter), input).unwrap().logits);
        let name = dir.display();
        for key in ["logits", "merged_logits"] {
            let Some(expected) = golden.get(key) else { continue };
            close(&format!("{name} {key}"), &logits, &expected.values, tolerance(&decoder));
        }
        let Some(loss) = golden.get("loss") else { continue };
        let (batch, config) = (whole(&ids), ScoreConfig::default());
        let tape =
            score::forward(&decoder, Some(&adapter), Trainable::Adapter, &batch, &config).unwrap();
        let (found, dlogp) = mean_loss(tape.log_probs());
        close(&format!("{name} loss"), &[found], &loss.values, tolerance(&decoder));
        let gradients = tape.backward(&dlogp).unwrap();
        let expected = golden.iter().filter_map(|(k, v)| Some((k.strip_prefix("grad.")?, v)));
        let expected: Vec<_> = expected.collect();
        assert_eq!(gradients.iter().count(), expected.len(), "every LoRA gradient");
        // Rounding its weights moves gradients of a hybrid's committed golden by up to 1.7e-4 even in
        // f64: where keys are nearly zero, normalising them multiplies every error.
        let hybrid = decoder.config().hybrid().is_some();
        let tolerance = tolerance(&decoder).max(if hybrid { 3e-4 } else { 0.0 });
        for (key, expected) in expected {
            close(key, &gradients.values(key).unwrap(), &expected.values, tolerance);
        }
    }
}

#[test]
fn half_precision_bases_train_adapters_like_f32_ones() {
    let device = DeviceChoice::Cpu.open().unwrap();
    for name in ["qwen3-bf16", "llama-f16"] {
        let checkpoint = Checkpoint::open(own_root().join("checkpoints").join(name)).unwrap();
        let settings = LoraConfig {
            r: 3,
            alpha: 6.0,
            target_modules: TargetModules::AllLinear,
            use_rslora: false,
        };
        let row = |salt: u32| ScoreRow {
            ids: (0..9).map(|i| (i * 5 + salt) % 48).collect(),
            scored: vec![true; 9],
            ..ScoreRow::default()
        };
        let batch = ScoreBatch {
            prefix: vec![3, 1, 4, 1, 5],
            rows: vec![row(1), row(2)],
            images: Vec::new(),
        };
        let run = |dtype| {
            let decoder = checkpoint.load(&device, dtype).unwrap();
            let mut adapter = Adapter::init(&settings, &decoder, 1).unwrap();
            adapter.update(&mut |name, value| match name.contains("lora_B") {
                true => value.add_scalar(0.05),
                false => value,
            });
            let config = ScoreConfig::default();
            let tape =
                score::forward(&decoder, Some(&adapter), Trainable::Adapter, &batch, &config);
            let tape = tape.unwrap();
            let log_probs = tape.log_probs().concat();
            let (_, dlogp) = mean_loss(tape.log_probs());
            (log_probs, tape.backward(&dlogp).unwrap().flatten().unwrap())
        };
        let (half, full) = (run(LoadDtype::File), run(LoadDtype::F32));
        let wide = |values: Vec<f32>| values.into_iter().map(f64::from).collect::<Vec<_>>();
        close(&format!("{name} log-probs"), &half.0, &wide(full.0), 3e-2);
        close(&format!("{name} gradients"), &half.1, &wide(full.1), 5e-2);
    }
}
