//! Scoring against a real vocabulary stays small: no full set of logits ever exists.
//! A test binary of its own, since the peak is the whole process's.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

use policy::{
    device::DeviceChoice,
    model::{
        Adapter, Architecture, Decoder, LoraConfig, ModelConfig, RopeConfig, RopeScaling,
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
fn scoring_4_rows_of_1024_ids_over_151669_stays_under_2_gib() {
    let vocab = 151_669;
    let config = ModelConfig {
        architecture: Architecture::Qwen3,
        hidden: 256,
        ffn: 768,
        layers: 4,
        heads: 8,
        kv_heads: 4,
        head_dim: 32,
        vocab,
        norm_eps: 1e-6,
        attention_bias: false,
        mlp_bias: false,
        tied: true,
        max_positions: 4096,
        rope: RopeConfig { theta: 1e6, scaling: RopeScaling::Default },
    };
    let decoder = Decoder::random(config, 1, &DeviceChoice::Cpu.open().unwrap());
    let settings = LoraConfig {
        r: 16,
        alpha: 32.0,
        target_modules: TargetModules::AllLinear,
        use_rslora: false,
    };
    let adapter = Adapter::init(&settings, &decoder, 1).unwrap();
    let row = |r: u32| ScoreRow {
        ids: (0..1024).map(|i| (i * 7919 + r * 104_729) % vocab as u32).collect(),
        scored: (0..1024).map(|i| i > 0).collect(),
        ..ScoreRow::default()
    };
    let batch = ScoreBatch { rows: (0..4).map(row).collect(), ..ScoreBatch::default() };
    let config = ScoreConfig::default();
    let tape =
        score::forward(&decoder, Some(&adapter), Trainable::Adapter, &batch, &config).unwrap();
    let dlogp: Vec<Vec<f32>> = tape.log_probs().iter().map(|row| vec![-0.001; row.len()]).collect();
    let gradients = tape.backward(&dlogp).unwrap();
    assert!(gradients.norm().unwrap() > 0.0);
    let peak = peak();
    eprintln!("peak: {} MiB", peak >> 20);
    assert!(peak < 2 << 30, "{} MiB", peak >> 20);
}
