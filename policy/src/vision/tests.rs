//! Images give the pixels, sizes and patches that PIL, torch and transformers give.
#![allow(clippy::unwrap_used)]

use std::{
    fs,
    path::{Path, PathBuf},
};

use proptest::prelude::*;
use serde_json::{Value, json};

use super::{resize::resize, *};

fn own() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/vision")
}

fn golden() -> Value {
    serde_json::from_slice(&fs::read(own().join("golden.json")).unwrap()).unwrap()
}

fn number(value: &Value) -> u32 {
    u32::try_from(value.as_u64().unwrap()).unwrap()
}

fn pair(value: &Value) -> (u32, u32) {
    (number(&value[0]), number(&value[1]))
}

/// The formula of scripts/golden/vision.py.
fn picture((width, height): (u32, u32), seed: u32) -> Rgb {
    let noise = |i: u64| ((i * i * 31 + i * 57 + u64::from(seed) * 101) >> 3) as u8;
    let value = |i| match (seed % 2, noise(i)) {
        (0, noise) => noise,
        (_, noise) => {
            if noise > 127 {
                255
            } else {
                0
            }
        }
    };
    Rgb { width, height, pixels: (0..u64::from(width * height * 3)).map(value).collect() }
}

/// A processor of these settings, from a file.
fn processor(settings: &Value) -> Result<ImageProcessor, VisionError> {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("preprocessor_config.json"), settings.to_string()).unwrap();
    ImageProcessor::load(dir.path())
}

#[test]
fn resized_pixels_are_those_of_torch() {
    for case in golden()["resizes"].as_array().unwrap() {
        let image = picture(pair(&case["from"]), number(&case["seed"]));
        let (width, height) = pair(&case["to"]);
        let resized = resize(&image, width, height);
        assert_eq!((resized.width, resized.height), (width, height));
        assert_eq!(json!(Digest::of(&resized.pixels).to_string()), case["sha256"], "{case}");
    }
}

#[test]
fn patches_are_those_of_transformers() {
    let golden = golden();
    for case in golden["processed"].as_array().unwrap() {
        let settings = &golden["processors"][case["processor"].as_str().unwrap()];
        let image = picture(pair(&case["size"]), number(&case["seed"]));
        let patches = processor(settings).unwrap().patches(&image).unwrap();
        assert_eq!(json!(patches.grid()), case["grid"], "{case}");
        let bytes: Vec<u8> = patches.values().iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(json!(Digest::of(&bytes).to_string()), case["sha256"], "{case}");
    }
}

#[test]
fn sizes_are_those_of_transformers() {
    for case in golden()["budgets"].as_array().unwrap() {
        let at = |i: usize| number(&case[i]);
        let settings = json!({
            "patch_size": at(2) / 4, "merge_size": 4, "min_pixels": at(3), "max_pixels": at(4)
        });
        let found = processor(&settings).unwrap().size(at(0), at(1));
        match &case[5] {
            Value::Null => assert!(found.unwrap_err().to_string().contains("200 times"), "{case}"),
            to => assert_eq!(found.unwrap(), pair(to), "{case}"),
        }
    }
}

#[test]
fn files_of_every_kind_are_read_as_by_pil() {
    for (name, expected) in golden()["files"].as_object().unwrap() {
        let image = Rgb::decode(&fs::read(own().join(name)).unwrap()).unwrap();
        assert_eq!((image.width, image.height), pair(&expected["size"]), "{name}");
        let Some(stem) = name.strip_suffix(".jpg") else {
            assert_eq!(json!(Digest::of(&image.pixels).to_string()), expected["sha256"], "{name}");
            continue;
        };
        // Decoders of JPEG may differ in the last bits.
        let theirs = fs::read(own().join(format!("as-{stem}.png"))).unwrap();
        let theirs = Rgb::decode(&theirs).unwrap();
        let pairs = image.pixels.iter().zip(&theirs.pixels);
        let off: Vec<u8> = pairs.map(|(a, b)| a.abs_diff(*b)).collect();
        let mean = off.iter().map(|&d| f64::from(d)).sum::<f64>() / off.len() as f64;
        let worst = off.iter().max().unwrap();
        eprintln!("{name}: off by {worst} at most, {mean:.3} in the mean");
        assert!(*worst <= 12 && mean < 0.5, "{name}: off by {worst} at most, {mean} in the mean");
    }
}

#[test]
fn what_is_no_image_that_is_read_is_refused() {
    let says = |bytes: &[u8], says: &str| {
        let message = Rgb::decode(bytes).unwrap_err().to_string();
        assert!(message.contains(says) && !message.contains('\n'), "{message}");
    };
    says(b"", "neither a PNG nor a JPEG");
    says(b"GIF89a", "neither a PNG nor a JPEG");
    says(&fs::read(own().join("cmyk.jpg")).unwrap(), "grey, YCbCr and RGB are read");
    for name in ["RGB.png", "P4.png", "420.jpg", "progressive.jpg"] {
        let whole = fs::read(own().join(name)).unwrap();
        for cut in 0..whole.len() * 3 / 4 {
            assert!(Rgb::decode(&whole[..cut]).is_err(), "{name} cut to {cut} bytes");
        }
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x55;
            // Any answer but a panic.
            drop(Rgb::decode(&damaged));
        }
    }
    let mut large = fs::read(own().join("RGB.png")).unwrap();
    large[16..24].copy_from_slice(&[0, 0, 0x40, 1, 0, 0, 0, 1]);
    assert!(Rgb::decode(&large).is_err());
    let short = Rgb { width: 2, height: 2, pixels: vec![0; 11] };
    assert!(short.to_png().is_err());
}

#[test]
fn a_png_that_was_written_is_read_again() {
    let image = picture((23, 17), 2);
    assert_eq!(Rgb::decode(&image.to_png().unwrap()).unwrap(), image);
}

#[test]
fn a_processor_that_does_something_else_is_refused_by_name() {
    for (field, value) in [
        ("image_processor_type", json!("SiglipImageProcessor")),
        ("do_convert_rgb", json!(false)),
        ("do_rescale", json!(false)),
        ("do_normalize", json!(false)),
        ("do_center_crop", json!(true)),
        ("resample", json!(2)),
        ("size", json!({"height": 224, "width": 224})),
        ("size", json!(224)),
        ("size", json!({"shortest_edge": 4096, "longest_edge": 1024})),
        ("patch_size", json!(0)),
        ("merge_size", json!(1000)),
        ("image_mean", json!([0.5])),
        ("image_std", json!([0.5, 0.5, 0.0])),
        ("rescale_factor", json!(-1)),
    ] {
        let message = processor(&json!({field: value})).unwrap_err().to_string();
        assert!(message.contains(field) && !message.contains('\n'), "{message}");
    }
    let dir = tempfile::tempdir().unwrap();
    let message = ImageProcessor::load(dir.path()).unwrap_err().to_string();
    assert!(message.contains("preprocessor_config.json"), "{message}");
    let fixed = processor(&json!({"do_resize": false, "patch_size": 16})).unwrap();
    assert_eq!(fixed.size(64, 32).unwrap(), (64, 32));
    assert!(fixed.size(64, 33).unwrap_err().to_string().contains("do_resize"));
}

#[test]
fn an_image_takes_one_id_a_block_wherever_its_place_is() {
    let image = |h: u32, w: u32| {
        let values = vec![0.25; (h * w) as usize * 6];
        Arc::new(Patches::new([1, h, w], 2, values).unwrap())
    };
    let images = [image(2, 4), image(4, 4)];
    let (ids, placed) = expand(&[9, 5, 9, 9, 7], 5, &images[..1]).unwrap();
    assert_eq!((ids.as_slice(), placed.len()), (&[9, 5, 5, 9, 9, 7][..], 1));
    let (ids, placed) = expand(&[5, 5, 9], 5, &images).unwrap();
    assert_eq!(ids, [5, 5, 5, 5, 5, 5, 9]);
    let places: Vec<_> = placed.iter().map(|it| (it.at, it.end())).collect();
    assert_eq!(places, [(0, 2), (2, 6)]);
    assert!(Arc::ptr_eq(&placed[1].patches, &images[1]));
    let error = expand(&[9, 5], 5, &images).unwrap_err().to_string();
    assert!(error.contains("1 image-pad ids for 2 images"), "{error}");
    assert!(expand(&[9, 5], 5, &[]).is_err());
    assert!(Patches::new([1, 3, 2], 2, vec![0.0; 6]).is_err());
    assert!(Patches::new([1, 2, 2], 2, vec![0.0; 6]).is_err());
    assert!(Patches::new([1, 2, 2], 2, vec![f32::NAN; 4]).is_err());
    assert_ne!(images[0].digest(), images[1].digest());
}

/// One axis in f64: an antialiased cubic, by its definition.
fn exact(values: &[u8], to: usize) -> Vec<f64> {
    let scale = values.len() as f64 / to as f64;
    let stretch = scale.max(1.0);
    let cubic = |x: f64| match x.abs() {
        x if x < 1.0 => 1.5 * x.powi(3) - 2.5 * x.powi(2) + 1.0,
        x if x < 2.0 => -0.5 * x.powi(3) + 2.5 * x.powi(2) - 4.0 * x + 2.0,
        _ => 0.0,
    };
    let place = |i: usize| {
        let centre = (i as f64 + 0.5) * scale;
        let weight = |j: usize| cubic((j as f64 + 0.5 - centre) / stretch);
        let total: f64 = (0..values.len()).map(weight).sum();
        let sum: f64 = values.iter().enumerate().map(|(j, v)| weight(j) * f64::from(*v)).sum();
        (sum / total).clamp(0.0, 255.0)
    };
    (0..to).map(place).collect()
}

fn transposed(image: &Rgb) -> Rgb {
    let (width, height) = (image.height, image.width);
    let place = |i: usize| {
        let (pixel, channel) = (i / 3, i % 3);
        let (y, x) = (pixel / width as usize, pixel % width as usize);
        image.pixels[3 * (x * image.width as usize + y) + channel]
    };
    Rgb { width, height, pixels: (0..image.pixels.len()).map(place).collect() }
}

proptest! {
    #[test]
    fn resizing_is_an_antialiased_cubic_along_each_axis(
        width in 1u32..90, height in 1u32..8, to in 1u32..90, seed in 0u32..40,
    ) {
        let image = picture((width, height), seed);
        let wide = resize(&image, to, height);
        for y in 0..height as usize {
            for channel in 0..3 {
                let line = |image: &Rgb| -> Vec<u8> {
                    let row = image.pixels.chunks(3 * image.width as usize).nth(y).unwrap();
                    row.iter().skip(channel).step_by(3).copied().collect()
                };
                for (found, exact) in line(&wide).iter().zip(exact(&line(&image), to as usize)) {
                    prop_assert!((f64::from(*found) - exact).abs() < 0.6, "{found} and {exact}");
                }
            }
        }
        let high = resize(&transposed(&image), height, to);
        prop_assert_eq!(&transposed(&high), &wide);
        let both = resize(&image, to, 2 * height);
        prop_assert_eq!(both, resize(&wide, to, 2 * height));
    }
}

#[test]
fn patches_of_the_shared_images_are_exact() {
    let root = std::env::var_os("ROLLCALL_DATA").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data"),
        Into::into,
    );
    let listed = |kind: &str| -> Vec<PathBuf> {
        let entries = fs::read_dir(root.join(kind)).into_iter().flatten();
        entries.map(|entry| entry.unwrap().path()).collect()
    };
    let images: Vec<Rgb> = listed("images")
        .iter()
        .map(|path| Rgb::decode(&fs::read(path).unwrap()).unwrap())
        .collect();
    if images.is_empty() {
        eprintln!("skipped: no images under {}", root.display());
    }
    for dir in listed("checkpoints") {
        let Ok(bytes) = fs::read(dir.join("golden.safetensors")) else { continue };
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let Ok(expected) = file.tensor("mm_pixel_values") else { continue };
        // A sibling in another type goes without a processor of its own.
        let plain = dir.display().to_string().replace("-bf16", "");
        let Ok(processor) = ImageProcessor::load(&dir).or(ImageProcessor::load(Path::new(&plain)))
        else {
            eprintln!("skipped: no processor in {}", dir.display());
            continue;
        };
        let all: Vec<Patches> = images.iter().map(|it| processor.patches(it).unwrap()).collect();
        let grids = file.tensor("mm_image_grid_thw").unwrap();
        let mut rest = expected.data();
        for grid in grids.data().chunks(24) {
            let grid = [0, 8, 16].map(|i| u32::from_le_bytes(grid[i..i + 4].try_into().unwrap()));
            let same = |patches: &&Patches| {
                let bytes = patches.values().iter().flat_map(|value| value.to_le_bytes());
                patches.grid() == grid
                    && bytes.eq(rest.iter().take(4 * patches.values().len()).copied())
            };
            let found = all.iter().find(same);
            let found =
                found.unwrap_or_else(|| panic!("{}: no image gives {grid:?}", dir.display()));
            rest = &rest[4 * found.values().len()..];
        }
        assert!(rest.is_empty(), "{}", dir.display());
        eprintln!("{}: pixel values exact", dir.display());
    }
}
