//! Writes a PEFT adapter with non-zero matrices over a checkpoint, and the logits that this crate
//! computes with it, for `scripts/check_peft.py` to compare with PEFT's.
//!
//! `cargo run -p policy --example write_adapter -- MODEL OUT (all-linear | REGEX) [--rslora]`
#![allow(clippy::unwrap_used)]

use std::path::Path;

use burn::tensor::Tensor;
use policy::{
    device::DeviceChoice,
    model::{Adapter, Checkpoint, FullInput, LoadDtype, LoraConfig, TargetModules},
    score::Parameters,
};
use safetensors::{Dtype, tensor::TensorView};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, out, targets, rest @ ..] = args.as_slice() else {
        eprintln!("usage: write_adapter MODEL OUT (all-linear | REGEX) [--rslora]");
        std::process::exit(2);
    };
    let device = DeviceChoice::Cpu.open().unwrap();
    let decoder = Checkpoint::open(model).unwrap().load(&device, LoadDtype::F32).unwrap();
    let settings = LoraConfig {
        r: 5,
        alpha: 8.0,
        target_modules: TargetModules::from_json(&serde_json::json!(targets)).unwrap(),
        use_rslora: rest.contains(&"--rslora".to_owned()),
    };
    let mut adapter = Adapter::init(&settings, &decoder, 1).unwrap();
    adapter.update(&mut |name, value| match name.contains("lora_B") {
        false => value,
        true => {
            let wave: Vec<f32> =
                (0..value.dims()[0]).map(|i| 0.2 * (i as f32 * 1.3).sin()).collect();
            Tensor::from_floats(wave.as_slice(), &value.device())
        }
    });
    adapter.save_peft(Path::new(out), model).unwrap();
    let vocab = decoder.config().vocab as u32;
    let ids: Vec<u32> = (0..24).map(|i| (i * 7 + 3) % vocab).collect();
    let input = FullInput { ids: &ids, batch: 1, mask: None, hidden: false, images: &[] };
    let logits = decoder.forward(Some(&adapter), input).unwrap().logits;
    let logits: Vec<f32> = logits.into_data().try_into_vec().unwrap();
    let logits: Vec<u8> = logits.iter().flat_map(|v| v.to_le_bytes()).collect();
    let ids: Vec<u8> = ids.iter().flat_map(|&id| i64::from(id).to_le_bytes()).collect();
    let shape = vec![1, 24, decoder.config().vocab];
    let tensors = [
        ("input_ids", TensorView::new(Dtype::I64, vec![1, 24], &ids).unwrap()),
        ("logits", TensorView::new(Dtype::F32, shape, &logits).unwrap()),
    ];
    let path = Path::new(out).join("expected.safetensors");
    safetensors::serialize_to_file(tensors, None, &path).unwrap();
}
