//! Writes a PEFT adapter with non-zero matrices over a checkpoint, and the logits that this crate
//! computes with it, for `scripts/check_peft.py` to compare with PEFT's: over text, and over two images
//! where the checkpoint takes some.
//!
//! `cargo run -p policy --example write_adapter -- MODEL OUT (all-linear | REGEX) [--rslora]`
#![allow(clippy::unwrap_used)]

use std::{path::Path, sync::Arc};

use burn::tensor::Tensor;
use policy::{
    device::DeviceChoice,
    model::{Adapter, Checkpoint, Decoder, FullInput, LoadDtype, LoraConfig, TargetModules},
    score::Parameters,
    vision::{Patches, PlacedImage},
};
use safetensors::{Dtype, tensor::TensorView};

/// A tensor to write: its name, type, shape and bytes.
type File = (String, Dtype, Vec<usize>, Vec<u8>);

/// Ids and the logits over them.
fn expected(
    prefix: &str,
    decoder: &Decoder,
    adapter: &Adapter,
    ids: &[u32],
    images: &[PlacedImage],
) -> [File; 2] {
    let input = FullInput { ids, batch: 1, mask: None, hidden: false, images };
    let logits = decoder.forward(Some(adapter), input).unwrap().logits;
    let logits: Vec<f32> = logits.into_data().try_into_vec().unwrap();
    let logits = logits.iter().flat_map(|v| v.to_le_bytes()).collect();
    let bytes = ids.iter().flat_map(|&id| i64::from(id).to_le_bytes()).collect();
    let shape = vec![1, ids.len(), decoder.config().vocab];
    [
        (format!("{prefix}input_ids"), Dtype::I64, vec![1, ids.len()], bytes),
        (format!("{prefix}logits"), Dtype::F32, shape, logits),
    ]
}

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
    let mut files = Vec::new();
    files.extend(expected("", &decoder, &adapter, &ids, &[]));
    if let Some((pad, vision)) = decoder.image_pad().zip(decoder.config().vision()) {
        let mut ids: Vec<u32> = ids.into_iter().filter(|id| *id != pad).collect();
        let (mut images, mut pixels, mut grids) = (Vec::new(), Vec::new(), Vec::new());
        for (at, [high, wide]) in [(15, [2, 1]), (4, [1, 3])] {
            let merge = vision.merge as u32;
            let grid = [1, high * merge, wide * merge];
            let count = vision.patch_values() * (grid[1] * grid[2]) as usize;
            let values: Vec<f32> =
                (0..count).map(|i| (i as f32 * 0.37 + at as f32).sin()).collect();
            let patches = Arc::new(Patches::new(grid, merge, values).unwrap());
            ids.splice(at..at, vec![pad; patches.tokens()]);
            images.push(PlacedImage { at, patches });
        }
        // The one put in last lies first, and moves the other.
        images.reverse();
        images[1].at += images[0].patches.tokens();
        for image in &images {
            pixels.extend_from_slice(image.patches.values());
            grids.extend(image.patches.grid().map(i64::from));
        }
        files.extend(expected("mm_", &decoder, &adapter, &ids, &images));
        let bytes = pixels.iter().flat_map(|v| v.to_le_bytes()).collect();
        let shape = vec![pixels.len() / vision.patch_values(), vision.patch_values()];
        files.push(("mm_pixel_values".into(), Dtype::F32, shape, bytes));
        let bytes = grids.iter().flat_map(|v| v.to_le_bytes()).collect();
        files.push(("mm_image_grid_thw".into(), Dtype::I64, vec![2, 3], bytes));
    }
    let tensors: Vec<_> = files
        .iter()
        .map(|(name, dtype, shape, bytes)| {
            (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        })
        .collect();
    let path = Path::new(out).join("expected.safetensors");
    safetensors::serialize_to_file(tensors, None, &path).unwrap();
}
