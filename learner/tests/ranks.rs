//! Training over several ranks is training on one: the same gradient, the same adapter, whatever the
//! rows' lengths and however the last update comes out.

#[path = "support/on_ranks.rs"]
mod on_ranks;

use std::{
    fs,
    path::{Path, PathBuf},
};

use learner::{
    ppo::{self, PpoOptions},
    recipe::PpoInputs,
    rows::{Example, Images},
    sft::{
        self, SftOptions,
        train::{Computation, Student, supervised_gradients},
    },
};
use on_ranks::on_ranks;
use policy::{
    device::{Device, DeviceChoice},
    model::{Adapter, Checkpoint, LoadDtype, LoraConfig, TargetModules, checkpoint_digests},
};
use protocol::Digest;
use safetensors::SafeTensors;
use serde_json::{Value, json};
use terminal::{Audience, Interrupt, Progress};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/rows")
}

fn frozen(path: &Path) -> Value {
    let sha256 = if path.is_dir() {
        checkpoint_digests(path).expect("a checkpoint").all
    } else {
        Digest::of(&fs::read(path).expect("a file"))
    };
    json!({"path": path, "sha256": sha256})
}

fn values(path: &Path) -> Vec<f32> {
    let bytes = fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let mut names = file.names();
    names.sort_unstable();
    names
        .into_iter()
        .flat_map(|name| {
            let data = file.tensor(name).expect("a tensor").data().to_vec();
            data.chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect::<Vec<f32>>()
        })
        .collect()
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Rows of text with so many learned ids each.
fn rows(learned: &[usize]) -> Vec<Example> {
    let row = |(at, count): (usize, &usize)| {
        let len = count + 5 + at;
        Example {
            ids: (0..len).map(|i| ((i * 31 + at * 7) % 200 + 3) as u32).collect(),
            scored: (0..len).map(|i| i >= len - count).collect(),
            images: Vec::new(),
        }
    };
    learned.iter().enumerate().map(row).collect()
}

#[test]
fn ranks_with_uneven_rows_have_the_gradient_of_one_rank_with_all_rows() {
    // The last case has fewer rows than ranks.
    for learned in [&[10, 90][..], &[10, 90, 40, 3, 60, 1, 25], &[17]] {
        let gradient = |world: usize| {
            let learned = learned.to_vec();
            let all = on_ranks(world, move |meet, _| {
                let mut ranks = meet(Digest::of(b"gradient")).expect("ranks");
                let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/guess/model");
                let checkpoint = Checkpoint::open(&model).expect("a checkpoint");
                let mut decoder =
                    checkpoint.load(&Device::flex(), LoadDtype::F32).expect("weights");
                let target_modules = TargetModules::AllLinear;
                let lora = LoraConfig { r: 8, alpha: 16.0, target_modules, use_rslora: false };
                let adapter = Adapter::init(&lora, &decoder, 3).expect("an adapter");
                let mut student = Student::Adapter(Box::new(adapter));
                let rows = rows(&learned);
                let rows: Vec<&Example> = rows.iter().collect();
                let how = Computation { micro_batch: 2, checkpointing: false };
                let (loss, tokens, gradients) = supervised_gradients(
                    &mut decoder,
                    &mut student,
                    &rows,
                    &Images::none(),
                    how,
                    &mut ranks,
                )
                .expect("a gradient");
                let flat = gradients.expect("gradients").flatten().expect("values");
                ranks.finish(Ok(())).expect("ends");
                (loss, tokens, flat)
            });
            assert!(all.iter().all(|it| *it == all[0]), "ranks differ");
            all.into_iter().next().expect("a rank")
        };
        let (loss, _, whole) = gradient(1);
        let size = whole.iter().fold(0.0_f32, |most, v| most.max(v.abs()));
        assert!(size > 1e-3, "{size}");
        for world in [2, 3] {
            let (other, _, parts) = gradient(world);
            assert!((loss - other).abs() < 1e-6, "{loss} {other}");
            let off = largest_difference(&whole, &parts);
            println!("{learned:?} over {world} ranks: off by {off:.1e} of {size:.1e}");
            assert!(off <= 1e-6 * size.max(1.0), "off by {off}");
        }
    }
}

fn sft_recipe(batch: u32) -> Value {
    let numbers: Value =
        serde_json::from_slice(&fs::read(golden().join("golden.json")).expect("goldens"))
            .expect("JSON");
    json!({
        "schema_version": 1,
        "model": frozen(&golden().join("model")),
        "dataset": frozen(&golden().join("sft.jsonl")),
        "valid": frozen(&golden().join("valid.jsonl")),
        "prompt": numbers["prompt"],
        "lora": {"r": 4, "alpha": 8, "target_modules": numbers["modules"]},
        "training": {
            "num_train_epochs": 20, "per_device_train_batch_size": batch, "max_updates": 20,
            "learning_rate": 1e-3,
        },
    })
}

/// Supervised rows over so many ranks: the adapter, and what all ranks saw.
fn sft(dir: &Path, world: usize, batch: u32) -> Vec<f32> {
    let dir = dir.join(format!("sft-{world}"));
    fs::create_dir(&dir).expect("made");
    let recipe = dir.join("recipe.json");
    fs::write(&recipe, sft_recipe(batch).to_string()).expect("written");
    let output = dir.join("run");
    let at = output.clone();
    let summaries = on_ranks(world, move |meet, rank| {
        let options = SftOptions {
            output: Some(output.clone()),
            resume: false,
            device: DeviceChoice::Cpu,
            tensorboard: false,
        };
        let audience = if rank == 0 { Audience::Machine } else { Audience::Nobody };
        let mut progress = Progress::new(audience);
        sft::run(&recipe, &options, &Interrupt::default(), &mut progress, meet)
            .unwrap_or_else(|e| panic!("rank {rank}: {e}"))
    });
    assert!(summaries.iter().all(|it| it.updates == 20 && it.accuracy == summaries[0].accuracy));
    values(&at.join("adapter/adapter_model.safetensors"))
}

#[test]
fn twenty_supervised_updates_end_with_the_same_adapter_on_one_two_and_three_ranks() {
    let dir = tempfile::tempdir().expect("a directory");
    // Rows come out unevenly: the last update of an epoch is a small one.
    let one = sft(dir.path(), 1, 6);
    for (world, batch) in [(2, 3), (3, 2)] {
        let off = largest_difference(&one, &sft(dir.path(), world, batch));
        println!("sft over {world} ranks: off by {off:.1e}");
        assert!(off <= 1e-5, "{world} ranks: off by {off}");
    }
}

fn ppo(dir: &Path, world: usize, batch: u32) -> (Vec<f32>, Value) {
    let dir = dir.join(format!("ppo-{world}"));
    fs::create_dir(&dir).expect("made");
    let mut recipe = sft_recipe(batch);
    let object = recipe.as_object_mut().expect("an object");
    object.retain(|key, _| ["schema_version", "model", "prompt"].contains(&key.as_str()));
    object.insert("rows".into(), frozen(&golden().join("ppo.jsonl")));
    object.insert("adapter".into(), frozen(&golden().join("start")));
    object.insert("reference".into(), frozen(&golden().join("reference")));
    object.insert(
        "training".into(),
        json!({
            "num_train_epochs": 20, "per_device_train_batch_size": batch, "max_updates": 20,
            "gradient_accumulation_steps": 2, "learning_rate": 1e-3,
        }),
    );
    let path = dir.join("recipe.json");
    fs::write(&path, recipe.to_string()).expect("written");
    let output = dir.join("run");
    let at = output.clone();
    on_ranks(world, move |meet, rank| {
        let options = PpoOptions {
            inputs: PpoInputs::default(),
            output: Some(output.clone()),
            resume: false,
            device: DeviceChoice::Cpu,
            no_tensorboard: true,
        };
        let mut progress = Progress::new(Audience::Nobody);
        ppo::run(&path, &options, &Interrupt::default(), &mut progress, meet)
            .unwrap_or_else(|e| panic!("rank {rank}: {e}"))
    });
    let mut stats: Value =
        serde_json::from_slice(&fs::read(at.join("stats.json")).expect("stats")).expect("JSON");
    stats["train_s"] = Value::Null;
    (values(&at.join("adapter/adapter_model.safetensors")), stats)
}

#[test]
fn twenty_ppo_updates_end_with_the_same_adapter_on_one_two_and_three_ranks() {
    let dir = tempfile::tempdir().expect("a directory");
    let (one, stats) = ppo(dir.path(), 1, 6);
    for (world, batch) in [(2, 3), (3, 2)] {
        let (adapter, other) = ppo(dir.path(), world, batch);
        let off = largest_difference(&one, &adapter);
        println!("ppo over {world} ranks: off by {off:.1e}; {other}");
        assert!(off <= 1e-5, "{world} ranks: off by {off}");
        assert_eq!(other, stats);
    }
}
