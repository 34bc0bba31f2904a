//! Wrong checkpoint files are refused before anything is loaded, in one line that says which file
//! and what in it.
#![allow(clippy::unwrap_used)]

mod support;

use std::{fs, path::Path};

use policy::{
    device::DeviceChoice,
    model::{Checkpoint, Decoder, LoadDtype, checkpoint_digests},
};
use serde_json::{Value, json};
use support::own_root;

fn copy(name: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(own_root().join("checkpoints").join(name)).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    dir
}

fn change_json(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut value: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    change(&mut value);
    fs::write(path, value.to_string()).unwrap();
}

fn refused(dir: &Path, says: &[&str]) {
    let message = Checkpoint::open(dir).unwrap_err().to_string();
    assert!(says.iter().all(|s| message.contains(s)) && !message.contains('\n'), "{message}");
}

#[test]
fn shapes_and_names_are_checked_against_the_configuration() {
    for (field, value, says) in [
        ("intermediate_size", json!(25), "mlp.gate_proj.weight"),
        ("vocab_size", json!(49), "embed_tokens.weight"),
        ("num_hidden_layers", json!(3), "model.layers.2"),
        ("tie_word_embeddings", json!(false), "lm_head.weight"),
        ("attention_bias", json!(true), "q_proj.bias"),
        ("num_key_value_heads", json!(4), "k_proj.weight"),
    ] {
        let dir = copy("qwen3-plain");
        change_json(&dir.path().join("config.json"), |config| config[field] = value);
        refused(dir.path(), &["tensor", says]);
    }
}

#[test]
fn broken_weight_files_are_refused() {
    let dir = copy("qwen3-plain");
    let path = dir.path().join("model.safetensors");
    let good = fs::read(&path).unwrap();
    for (bytes, says) in [
        (good[..good.len() - 1].to_vec(), "incomplete"),
        ([&good[..], &[0]].concat(), "header says"),
        (good[..4].to_vec(), "shorter than"),
        (vec![255; 100], "does not fit"),
        ([&30u64.to_le_bytes()[..], &[b'{'; 40]].concat(), "bad header"),
        (Vec::new(), "shorter than"),
    ] {
        fs::write(&path, bytes).unwrap();
        refused(dir.path(), &["model.safetensors", says]);
    }
    fs::remove_file(&path).unwrap();
    refused(dir.path(), &["model.safetensors"]);
    refused(&dir.path().join("absent"), &["not a directory"]);
    fs::write(dir.path().join("config.json"), "[]").unwrap();
    refused(dir.path(), &["config.json", "not a JSON object"]);
}

#[test]
fn integer_weights_are_refused() {
    let dir = copy("llama-f16");
    let path = dir.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let at = text.find("\"F16\"").unwrap();
    let mut bytes = bytes;
    bytes[at..at + 5].copy_from_slice(b"\"I16\"");
    fs::write(&path, bytes).unwrap();
    refused(dir.path(), &["I16", "F32, BF16, F16"]);
}

#[test]
fn a_shard_index_cannot_lead_astray() {
    let index = "model.safetensors.index.json";
    let change = |shard: &'static str| {
        let dir = copy("qwen3-yarn-bias-shards");
        change_json(&dir.path().join(index), |value| {
            value["weight_map"]["model.norm.weight"] = json!(shard);
        });
        dir
    };
    refused(change("../secret.safetensors").path(), &[index, "plain file name"]);
    refused(change("/etc/passwd").path(), &[index, "plain file name"]);
    refused(change("absent.safetensors").path(), &["absent.safetensors"]);
    refused(change("model-00001-of-00003.safetensors").path(), &[index, "model.norm.weight"]);
    let dir = copy("qwen3-yarn-bias-shards");
    change_json(&dir.path().join(index), |value| value["weight_map"] = json!(7));
    refused(dir.path(), &[index, "weight_map"]);
}

#[test]
fn saved_weights_come_back_bit_for_bit() {
    let dir = copy("qwen3-plain");
    let device = DeviceChoice::Cpu.open().unwrap();
    let config = Checkpoint::open(dir.path()).unwrap().config().clone();
    let decoder = Decoder::random(config, 11, &device);
    let path = dir.path().join("model.safetensors");
    decoder.save_weights(&path).unwrap();
    let bytes = fs::read(&path).unwrap();
    let digests = checkpoint_digests(dir.path()).unwrap();
    let loaded = Checkpoint::open(dir.path()).unwrap().load(&device, LoadDtype::File).unwrap();
    loaded.save_weights(&path).unwrap();
    assert_eq!(fs::read(&path).unwrap(), bytes);
    assert_eq!(checkpoint_digests(dir.path()).unwrap(), digests);
}
