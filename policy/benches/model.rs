//! Times of scoring, updating and decoding with random weights, run by hand:
//! `cargo bench -p policy --bench model -- score` (or `score-plain`, `score-large`, `decode`, or nothing for all). Prints numbers,
//! passes no judgement.

use std::time::Instant;

use policy::{
    device::DeviceChoice,
    model::{
        Adapter, Architecture, Decoder, Feed, KvCache, LoraConfig, ModelConfig, RopeConfig,
        RopeScaling, TargetModules,
    },
    score::{self, AdamWSettings, Optimizer, ScoreBatch, ScoreConfig, ScoreRow, Trainable},
};

fn config(hidden: usize, layers: usize, vocab: usize) -> ModelConfig {
    ModelConfig {
        architecture: Architecture::Qwen3,
        hidden,
        ffn: hidden * 3,
        layers,
        heads: (hidden / 32).max(1),
        kv_heads: (hidden / 64).max(1),
        head_dim: 32,
        vocab,
        norm_eps: 1e-6,
        attention_bias: false,
        mlp_bias: false,
        tied: true,
        max_positions: 4096,
        rope: RopeConfig { theta: 1e6, scaling: RopeScaling::Default },
    }
}

fn decoder(hidden: usize, layers: usize, vocab: usize) -> Decoder {
    let device = DeviceChoice::Auto.open().expect("a device");
    Decoder::random(config(hidden, layers, vocab), 1, &device)
}

fn adapter(decoder: &Decoder) -> Adapter {
    let settings = LoraConfig {
        r: 16,
        alpha: 32.0,
        target_modules: TargetModules::AllLinear,
        use_rslora: false,
    };
    Adapter::init(&settings, decoder, 1).expect("an adapter")
}

fn ids(count: usize, salt: usize, vocab: usize) -> Vec<u32> {
    (0..count).map(|i| ((i * 7919 + salt * 104_729) % vocab) as u32).collect()
}

/// Seconds of processor time that this process has used, all threads; 0 where unknown. Steadier than
/// the clock on a machine that others use too.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
    let ticks = |i: usize| fields.get(i).and_then(|f| f.parse::<f64>().ok()).unwrap_or(0.0);
    (ticks(11) + ticks(12)) / 100.0
}

/// Rows of `len` ids after a shared prompt: the update of one group.
fn score_times(vocab: usize, prompt: usize, rows: usize, len: usize) {
    let decoder = decoder(256, 4, vocab);
    let mut adapter = adapter(&decoder);
    let scored: Vec<bool> = (0..len).map(|i| i > 0 || prompt > 0).collect();
    let row =
        |r| ScoreRow { ids: ids(len, r, vocab), scored: scored.clone(), ..ScoreRow::default() };
    let batch = ScoreBatch {
        prefix: ids(prompt, 99, vocab),
        rows: (1..=rows).map(row).collect(),
        ..ScoreBatch::default()
    };
    let mut optimizer = Optimizer::new(AdamWSettings::default());
    for checkpointing in [false, true] {
        let config = ScoreConfig { checkpointing, ..Default::default() };
        let (rounds, mut best) = (6, f64::MAX);
        let mut processor = 0.0;
        for round in 0..=rounds {
            let plain = score::log_probs(&decoder, None, &batch, &config).expect("scores");
            let (start, before) = (Instant::now(), cpu_seconds());
            let tape =
                score::forward(&decoder, Some(&adapter), Trainable::Adapter, &batch, &config)
                    .expect("a tape");
            let forward = start.elapsed();
            let dlogp: Vec<Vec<f32>> =
                plain.log_probs.iter().map(|row| vec![-0.001; row.len()]).collect();
            let gradients = tape.backward(&dlogp).expect("gradients");
            let backward = start.elapsed() - forward;
            optimizer.step(1e-4, &mut adapter, gradients).expect("a step");
            let update = start.elapsed();
            println!(
                "score vocab {vocab} checkpointing {checkpointing}: forward {forward:.1?}, backward \
                 {backward:.1?}, with AdamW {update:.1?}"
            );
            if round > 0 {
                processor += cpu_seconds() - before;
                best = best.min(update.as_secs_f64());
            }
        }
        println!(
            "score vocab {vocab} {rows}x{len} after {prompt} checkpointing {checkpointing}: best update {:.0} ms, {:.0} ms of \
             processor time on average",
            best * 1e3,
            processor / f64::from(rounds) * 1e3
        );
    }
}

fn decode_times(hidden: usize, layers: usize, vocab: usize) {
    let decoder = decoder(hidden, layers, vocab);
    let adapter = adapter(&decoder);
    for adapter in [None, Some(&adapter)] {
        for batch in [1, 8, 32, 64] {
            let mut cache = KvCache::new(&decoder, 1 << 16);
            let prompt = ids(128, 3, vocab);
            let start = Instant::now();
            let first = cache.open();
            let feed = Feed { sequence: first, ids: &prompt, logits: true, images: &[] };
            decoder.advance(adapter, &mut cache, &[feed]).expect("prefill");
            let prefill = start.elapsed();
            let sequences: Vec<_> = (0..batch).map(|_| cache.fork(first).expect("fork")).collect();
            let steps = 64;
            let start = Instant::now();
            for step in 0..steps {
                let next: Vec<[u32; 1]> =
                    (0..batch).map(|b| [((step * 31 + b * 17) % vocab) as u32]).collect();
                let feeds: Vec<Feed<'_>> = (sequences.iter().zip(&next))
                    .map(|(&sequence, ids)| Feed { sequence, ids, logits: true, images: &[] })
                    .collect();
                decoder.advance(adapter, &mut cache, &feeds).expect("a step");
            }
            let each = start.elapsed() / steps as u32;
            println!(
                "decode hidden {hidden} layers {layers} vocab {vocab} lora {} batch {batch}: prefill \
                 of 128 {prefill:.1?}, step {each:.1?}, {:.0} tok/s",
                adapter.is_some(),
                batch as f64 / each.as_secs_f64()
            );
        }
    }
}

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let on = |name: &str| wanted.is_empty() || wanted.iter().any(|w| w == name);
    if on("score") {
        score_times(1026, 250, 8, 100);
    }
    if on("score-plain") {
        score_times(1026, 0, 8, 256);
    }
    if on("score-large") {
        score_times(151_669, 250, 8, 100);
    }
    if on("decode") {
        decode_times(64, 2, 300);
        decode_times(256, 4, 1026);
        decode_times(576, 12, 49_152);
    }
}
