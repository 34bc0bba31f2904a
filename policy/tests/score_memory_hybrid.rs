//! Scoring a Qwen3.5 decoder against its real vocabulary stays small: no full set of logits ever
//! exists, nor a state for every row. A test binary of its own, since the peak is the whole process's.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

use policy::{
    device::DeviceChoice,
    model::{
        Adapter, Architecture, Decoder, Hybrid, LoraConfig, ModelConfig, RopeConfig, RopeScaling,
        TargetModules,
    },
    score::{self, ScoreBatch, ScoreConfig, ScoreRow, Trainable},
};

/// The process's peak resident memory in bytes.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().unwrap() * 1024
}

#[test]
fn scoring_4_rows_of_1024_ids_over_248320_with_a_hybrid_decoder_stays_under_1_gib() {
    let vocab = 248_320;
    let hybrid = Hybrid {
        full: vec![false, false, false, true],
        rotary: 16,
        sections: [3, 3, 2],
        kernel: 4,
        key_heads: 4,
        value_heads: 8,
        key_dim: 32,
        value_dim: 32,
        vision_language: true,
        vision: None,
    };
    let config = ModelConfig {
        architecture: Architecture::Qwen3_5(Box::new(hybrid)),
        hidden: 256,
        ffn: 768,
        layers: 4,
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        vocab,
        norm_eps: 1e-6,
        attention_bias: false,
        mlp_bias: false,
        tied: true,
        max_positions: 4096,
        rope: RopeConfig { theta: 1e7, scaling: RopeScaling::Default },
    };
    let decoder = Decoder::random(config, 1, &DeviceChoice::Cpu.open().unwrap());
    let settings = LoraConfig {
        r: 16,
        alpha: 32.0,
        target_modules: TargetModules::AllLinear,
        use_rslora: false,
    };
    let adapter = Adapter::init(&settings, &decoder, 1).unwrap();
    let ids = |salt: u32, from: u32, to: u32| -> Vec<u32> {
        (from..to).map(|i| (i * 7919 + salt * 104_729) % vocab as u32).collect()
    };
    let row =
        |r| ScoreRow { ids: ids(r, 256, 1024), scored: vec![true; 768], ..Default::default() };
    let batch =
        ScoreBatch { prefix: ids(9, 0, 256), rows: (0..4).map(row).collect(), images: Vec::new() };
    let config = ScoreConfig { checkpointing: true, ..ScoreConfig::default() };
    let tape =
        score::forward(&decoder, Some(&adapter), Trainable::Adapter, &batch, &config).unwrap();
    let dlogp: Vec<Vec<f32>> = tape.log_probs().iter().map(|row| vec![-0.001; row.len()]).collect();
    let gradients = tape.backward(&dlogp).unwrap();
    assert!(gradients.norm().unwrap() > 0.0);
    let peak = peak();
    eprintln!("peak: {} MiB", peak >> 20);
    assert!(peak < 1 << 30, "{} MiB", peak >> 20);
}
