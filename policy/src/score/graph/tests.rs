//! The language model of a vision-language checkpoint over text and images: with the reference
//! stack's image embeddings and positions of three axes it gives its logits and gradients.
#![allow(clippy::unwrap_used)]

use std::{collections::BTreeMap, fs, path::Path};

use burn::tensor::{Tensor, TensorData, activation};
use safetensors::{Dtype, SafeTensors};

use super::*;
use crate::{
    device::Device,
    model::{Checkpoint, LoadDtype},
    score::ScoreRow,
};

fn goldens(dir: &Path) -> BTreeMap<String, Vec<f64>> {
    let bytes = fs::read(dir.join("golden.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut values = BTreeMap::new();
    for (name, view) in file.tensors() {
        let float = |b: &[u8]| f64::from(f32::from_le_bytes(b.try_into().unwrap()));
        let integer = |b: &[u8]| i64::from_le_bytes(b.try_into().unwrap()) as f64;
        match view.dtype() {
            Dtype::F32 => values.insert(name, view.data().chunks(4).map(float).collect()),
            Dtype::I64 => values.insert(name, view.data().chunks(8).map(integer).collect()),
            _ => None,
        };
    }
    values
}

fn near(what: &str, found: &[f32], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let scale = expected.iter().fold(0.0f64, |m, v| m.max(v.abs()));
    let off = found.iter().zip(expected).map(|(f, e)| (f64::from(*f) - e).abs());
    let off = off.fold(0.0f64, |m, d| if d.is_nan() { f64::INFINITY } else { m.max(d) }) / scale;
    eprintln!("{what}: off by {off:.1e} of {scale:.3}");
    assert!(off <= 1e-4, "{what}: off by {off:.1e} of {scale}");
}

fn values<const D: usize>(x: Tensor<D>) -> Vec<f32> {
    x.into_data().try_into_vec().unwrap()
}

/// Checks logits, loss and gradients against `golden`; inputs are the checkpoint's.
fn check(dir: &Path, golden: &BTreeMap<String, Vec<f64>>, adapter: Option<&Path>) {
    let decoder = Checkpoint::open(dir).unwrap().load(&Device::flex(), LoadDtype::File).unwrap();
    let inputs = goldens(dir);
    let config = fs::read(dir.join("config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    let image = config["image_token_id"].as_f64().unwrap();
    let ids: Vec<u32> = inputs["mm_input_ids"].iter().map(|&id| id as u32).collect();
    let positions = &inputs["mm_position_ids"];
    let axes = |i: usize| [0, 1, 2].map(|axis| positions[axis * ids.len() + i] as u32);
    let axes: Vec<[u32; 3]> = (0..ids.len()).map(axes).collect();
    let width = decoder.config().hidden;
    let mut embedded = values(decoder.embed(&ids));
    let mut images = inputs["mm_vision_merged"].chunks(width);
    for (row, id) in embedded.chunks_mut(width).zip(&ids) {
        if f64::from(*id) == image {
            let image = images.next().unwrap();
            row.iter_mut().zip(image).for_each(|(to, from)| *to = *from as f32);
        }
    }
    assert!(images.next().is_none(), "one image token for each embedding");
    let adapter = adapter.map(|dir| Adapter::load_peft(dir, &decoder).unwrap().tracked());
    let decoder = if adapter.is_some() { decoder } else { decoder.tracked() };
    let mut scored = vec![true; ids.len()];
    scored[0] = false;
    let rows = vec![ScoreRow { ids: ids.clone(), scored, noise: None }];
    let layout = Layout::new(&decoder, &ScoreBatch { prefix: Vec::new(), rows }).unwrap();
    let mut pass = Pass::new(&decoder, adapter.as_ref(), &layout);
    pass.rope = decoder.rotations(&axes);
    let embedded = TensorData::new(embedded, [ids.len(), width]);
    let mut x = Tensor::from_data(embedded, decoder.device());
    for index in 0..decoder.config().layers {
        x = pass.layer(index, x);
    }
    let head = decoder.untracked().head().transpose();
    let normed = decoder.final_norm(x);
    near("logits", &values(normed.clone().inner().matmul(head.clone())), &golden["mm_logits"]);
    let last = normed.slice([0..ids.len() - 1, 0..width]).matmul(head);
    let targets = decoder.int(&layout.targets).unsqueeze_dim(1);
    let loss = activation::log_softmax(last, 1).gather(1, targets).mean().neg();
    near("loss", &values(loss.clone().inner()), &golden["mm_loss"]);
    let mut graph = loss.backward();
    let mut gradients = Gradients::default();
    match &adapter {
        Some(adapter) => adapter.collect(&mut graph, &mut gradients),
        None => decoder.collect(&mut graph, &mut gradients),
    }
    let mut count = 0;
    for (key, expected) in golden {
        let Some(name) = key.strip_prefix("grad.") else { continue };
        if name.starts_with("model.visual.") {
            continue;
        }
        near(key, &gradients.values(name).unwrap(), expected);
        count += 1;
    }
    assert!(adapter.is_none() || count == gradients.iter().count(), "every LoRA gradient");
}

#[test]
fn text_with_images_gives_the_reference_logits_and_gradients() {
    let root = std::env::var_os("ROLLCALL_DATA").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data"),
        Into::into,
    );
    for kind in ["checkpoints", "adapters"] {
        let Ok(entries) = fs::read_dir(root.join(kind)) else {
            eprintln!("skipped: no {}", root.join(kind).display());
            continue;
        };
        for dir in entries.map(|entry| entry.unwrap().path()) {
            if !dir.join("golden.safetensors").is_file() {
                continue;
            }
            let golden = goldens(&dir);
            if !(golden.contains_key("mm_logits") && golden.contains_key("mm_loss")) {
                continue;
            }
            if kind == "checkpoints" {
                check(&dir, &golden, None);
                continue;
            }
            let config = fs::read(dir.join("adapter_config.json")).unwrap();
            let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
            let base = root.join(config["base_model_name_or_path"].as_str().unwrap());
            check(&base, &golden, Some(&dir));
        }
    }
}
