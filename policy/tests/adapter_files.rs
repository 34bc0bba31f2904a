//! Adapters as bytes and as PEFT directories: deterministic, complete, and refused where they do not
//! fit or ask for what is not done.
#![allow(clippy::unwrap_used)]

mod support;

use std::fs;

use policy::{
    device::DeviceChoice,
    model::{Adapter, Checkpoint, Decoder, LoadDtype, LoraConfig, TargetModules},
};
use serde_json::{Value, json};
use support::own_root;

fn decoder() -> Decoder {
    let device = DeviceChoice::Cpu.open().unwrap();
    let dir = own_root().join("checkpoints/qwen3-plain");
    Checkpoint::open(dir).unwrap().load(&device, LoadDtype::File).unwrap()
}

fn settings(target_modules: TargetModules) -> LoraConfig {
    LoraConfig { r: 2, alpha: 4.5, target_modules, use_rslora: true }
}

fn names(names: &[&str]) -> TargetModules {
    TargetModules::Names(names.iter().map(|&n| n.into()).collect())
}

#[test]
fn the_same_adapter_is_the_same_bytes_and_they_are_complete() {
    let decoder = decoder();
    let pattern = TargetModules::Pattern(r"model\.layers\.[01]\.mlp\.(up|down)_proj".into());
    for targets in [TargetModules::AllLinear, names(&["q_proj", "1.mlp.up_proj"]), pattern] {
        let adapter = Adapter::init(&settings(targets), &decoder, 9).unwrap();
        let bytes = adapter.to_safetensors().unwrap();
        let again = Adapter::init(adapter.config(), &decoder, 9).unwrap();
        assert_eq!(again.to_safetensors().unwrap(), bytes, "fresh from the same seed");
        let other = Adapter::init(adapter.config(), &decoder, 10).unwrap();
        assert_ne!(other.to_safetensors().unwrap(), bytes, "fresh from another seed");
        let read = Adapter::from_safetensors(&bytes, &decoder).unwrap();
        assert_eq!(read.config(), adapter.config());
        assert_eq!(read.to_safetensors().unwrap(), bytes, "read from bytes");
        let dir = tempfile::tempdir().unwrap();
        read.save_peft(dir.path(), "base").unwrap();
        let loaded = Adapter::load_peft(dir.path(), &decoder).unwrap();
        assert_eq!(loaded.named().len(), adapter.named().len());
        assert_eq!(loaded.to_safetensors().unwrap(), bytes, "loaded and saved again");
        assert_eq!(fs::read(dir.path().join("adapter_model.safetensors")).unwrap(), bytes);
    }
}

#[test]
fn targets_are_chosen_as_peft_chooses_them() {
    let decoder = decoder();
    let count = |targets| match Adapter::init(&settings(targets), &decoder, 1) {
        Ok(adapter) => adapter.named().len() / 2,
        Err(_) => 0,
    };
    assert_eq!(count(TargetModules::AllLinear), 14);
    assert_eq!(count(names(&["q_proj"])), 2);
    assert_eq!(count(names(&["layers.1.mlp.up_proj", "k_proj"])), 3);
    assert_eq!(count(names(&["proj"])), 0, "a name is a whole component");
    assert_eq!(count(names(&["lm_head"])), 0);
    assert_eq!(count(TargetModules::Pattern(r".*\.q_proj".into())), 2);
    assert_eq!(count(TargetModules::Pattern("q_proj".into())), 0, "a pattern matches whole paths");
    assert_eq!(count(TargetModules::Pattern("model.layers.0.mlp.up_proj|x".into())), 1);
    assert_eq!(count(TargetModules::Pattern("(".into())), 0);
}

#[test]
fn a_vision_tower_is_targeted_as_peft_targets_it_but_for_its_convolution() {
    let device = DeviceChoice::Cpu.open().unwrap();
    let dir = own_root().join("checkpoints/qwen3_5-sighted");
    let decoder = Checkpoint::open(dir).unwrap().load(&device, LoadDtype::File).unwrap();
    let count = |targets| Adapter::init(&settings(targets), &decoder, 1).map(|it| it.named().len());
    let pattern = |text: &str| TargetModules::Pattern(text.into());
    // A recurrent layer, one with attention, three blocks and the merger.
    assert_eq!(count(TargetModules::AllLinear).unwrap(), 2 * (8 + 7 + 3 * 4 + 2));
    assert_eq!(count(names(&["attn.proj", "merger.linear_fc2"])).unwrap(), 2 * (3 + 1));
    assert_eq!(count(pattern(r"model\.visual\.blocks\.1\..*")).unwrap(), 2 * 4);
    assert_eq!(count(pattern(r"model\.language_model.*\.q_proj")).unwrap(), 2);
    for targets in [names(&["proj", "q_proj"]), pattern(".*"), pattern(r".*\.proj")] {
        let message = count(targets).unwrap_err().to_string();
        assert!(message.contains("model.visual.patch_embed.proj"), "{message}");
    }
    let adapter = Adapter::init(&settings(TargetModules::AllLinear), &decoder, 1).unwrap();
    let out = tempfile::tempdir().unwrap();
    adapter.save_peft(out.path(), "base").unwrap();
    let config = fs::read(out.path().join("adapter_config.json")).unwrap();
    let config: Value = serde_json::from_slice(&config).unwrap();
    let listed = config["target_modules"].as_array().unwrap();
    assert!(listed.contains(&json!("attn.proj")) && !listed.contains(&json!("proj")));
    let again = Adapter::load_peft(out.path(), &decoder).unwrap();
    assert_eq!(again.to_safetensors().unwrap(), adapter.to_safetensors().unwrap());
}

#[test]
fn hostile_bytes_are_refused_in_one_line() {
    let decoder = decoder();
    let good = Adapter::init(&settings(TargetModules::AllLinear), &decoder, 1).unwrap();
    let good = good.to_safetensors().unwrap();
    let header = u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    let with_header = |change: &dyn Fn(&mut Value)| {
        let mut value: Value = serde_json::from_slice(&good[8..8 + header]).unwrap();
        change(&mut value);
        let text = value.to_string().into_bytes();
        [&(text.len() as u64).to_le_bytes()[..], &text, &good[8 + header..]].concat()
    };
    let lora = |value: &Value| value["__metadata__"]["lora_config"].as_str().unwrap().to_owned();
    let with_settings = |from: &str, to: &str| {
        with_header(&|value| {
            value["__metadata__"]["lora_config"] = json!(lora(value).replace(from, to));
        })
    };
    let a = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight";
    let mut infinite = good.clone();
    let end = infinite.len();
    infinite[end - 4..].copy_from_slice(&f32::INFINITY.to_le_bytes());
    for (bytes, says) in [
        (Vec::new(), "safetensors"),
        (good[..good.len() - 4].to_vec(), "safetensors"),
        (infinite, "not finite"),
        (with_header(&|v| v["__metadata__"] = json!({"format": "pt"})), "lora_config"),
        (with_settings("\"r\":2", "\"r\":3"), "shape"),
        (with_settings("\"r\":2", "\"r\":0"), "r 0"),
        (with_settings("\"r\":2", "\"r\":-1"), "\"r\""),
        (with_settings("4.5", "1e999"), "JSON"),
        (with_settings("4.5", "-4.5"), "lora_alpha"),
        (with_settings("\"all-linear\"", "[\"up_proj\"]"), "belongs to no"),
        (with_settings("\"all-linear\"", "\"nothing\""), "matches no"),
        (with_header(&|v| v[a]["shape"] = json!([16, 2])), "shape"),
        (with_header(&|v| v[a]["dtype"] = json!("I32")), "I32"),
    ] {
        let message = Adapter::from_safetensors(&bytes, &decoder).unwrap_err().to_string();
        assert!(message.contains(says) && !message.contains('\n'), "{says}: {message}");
    }
}

#[test]
fn peft_settings_that_would_change_the_computation_are_refused_by_name() {
    let decoder = decoder();
    let adapter = Adapter::init(&settings(TargetModules::AllLinear), &decoder, 1).unwrap();
    let dir = tempfile::tempdir().unwrap();
    adapter.save_peft(dir.path(), "base").unwrap();
    let path = dir.path().join("adapter_config.json");
    let good: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for (field, value) in [
        ("use_dora", json!(true)),
        ("modules_to_save", json!(["lm_head"])),
        ("bias", json!("all")),
        ("lora_bias", json!(true)),
        ("rank_pattern", json!({"q_proj": 8})),
        ("alpha_pattern", json!({"q_proj": 8})),
        ("fan_in_fan_out", json!(true)),
        ("layers_to_transform", json!([0])),
        ("layer_replication", json!([[0, 1]])),
        ("trainable_token_indices", json!([1])),
        ("target_parameters", json!(["x"])),
        ("exclude_modules", json!(["q_proj"])),
        ("use_qalora", json!(true)),
        ("init_lora_weights", json!("pissa")),
        ("peft_type", json!("IA3")),
        ("a_field_of_the_future", json!(1)),
        ("r", json!("2")),
        ("r", Value::Null),
        ("lora_alpha", json!(0)),
        ("target_modules", json!([])),
        ("target_modules", Value::Null),
        ("use_rslora", json!("yes")),
    ] {
        let mut config = good.clone();
        config[field] = value;
        fs::write(&path, config.to_string()).unwrap();
        let message = Adapter::load_peft(dir.path(), &decoder).unwrap_err().to_string();
        let named = message.contains(field) && message.contains("adapter_config.json");
        assert!(named && !message.contains('\n'), "{field}: {message}");
    }
    for (field, value) in [
        ("lora_dropout", json!(0.05)),
        ("peft_version", json!("9.9")),
        ("eva_config", Value::Null),
        ("loftq_config", json!({})),
        ("init_lora_weights", json!("gaussian")),
        ("use_a_thing_of_the_future", json!(false)),
    ] {
        let mut config = good.clone();
        config[field] = value;
        fs::write(&path, config.to_string()).unwrap();
        Adapter::load_peft(dir.path(), &decoder).unwrap();
    }
}

#[test]
fn a_fresh_adapter_changes_nothing_and_its_spread_is_that_of_peft() {
    let decoder = decoder();
    let adapter = Adapter::init(&settings(TargetModules::AllLinear), &decoder, 1).unwrap();
    for (name, tensor) in adapter.named() {
        let [_, inputs] = tensor.dims();
        let values: Vec<f32> = tensor.into_data().try_into_vec().unwrap();
        if name.contains("lora_B") {
            assert!(values.iter().all(|&v| v == 0.0));
        } else {
            let bound = 1.0 / (inputs as f32).sqrt();
            let largest = values.iter().fold(0.0f32, |m, v| m.max(v.abs()));
            assert!(largest <= bound && largest > 0.8 * bound, "{name}: {largest} of {bound}");
        }
    }
}

#[test]
fn all_linears_of_a_hybrid_are_written_by_their_names() {
    let device = DeviceChoice::Cpu.open().unwrap();
    let dir = own_root().join("checkpoints/qwen3_5-text");
    let decoder = Checkpoint::open(dir).unwrap().load(&device, LoadDtype::File).unwrap();
    let adapter = Adapter::init(&settings(TargetModules::AllLinear), &decoder, 1).unwrap();
    let dir = tempfile::tempdir().unwrap();
    adapter.save_peft(dir.path(), "base").unwrap();
    let config = fs::read(dir.path().join("adapter_config.json")).unwrap();
    let config: Value = serde_json::from_slice(&config).unwrap();
    let names = [
        "down_proj",
        "gate_proj",
        "in_proj_a",
        "in_proj_b",
        "in_proj_qkv",
        "in_proj_z",
        "k_proj",
        "o_proj",
        "out_proj",
        "q_proj",
        "up_proj",
        "v_proj",
    ];
    assert_eq!(config["target_modules"], json!(names));
    let loaded = Adapter::load_peft(dir.path(), &decoder).unwrap();
    assert_eq!(loaded.to_safetensors().unwrap(), adapter.to_safetensors().unwrap());
}
