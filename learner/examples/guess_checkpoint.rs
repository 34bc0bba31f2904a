//! Makes the untrained half of the guessing demo: a byte-level BPE tokenizer trained on the game's own
//! text, a chat template, a randomly initialised Qwen3 checkpoint, and the scripted games that
//! `learner sft` pre-trains it on.
//!
//! The scripted player is bad on purpose: most of its games ignore the feedback, so that a success rate
//! of about 0.4 leaves reinforcement learning something to find.
//!
//! Usage: `guess_checkpoint OUT_DIR`, which must not exist.

use std::{
    collections::BTreeMap,
    error::Error,
    fs,
    io::Write as _,
    path::{Path, PathBuf},
};

use environments::{
    EnvironmentSpec, Simulation as _,
    guess::{Guess, Settings},
};
use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Map, Value, json};
use tokenizers::{
    AddedToken, DecoderWrapper, ModelWrapper, NormalizerWrapper, PostProcessorWrapper,
    PreTokenizerWrapper, SplitDelimiterBehavior, TokenizerBuilder,
    models::{TrainerWrapper, bpe::BPE, bpe::BpeTrainer},
    pre_tokenizers::{
        byte_level::ByteLevel,
        sequence::Sequence,
        split::{Split, SplitPattern},
    },
};

const GAMES: u64 = 6000;
const VOCABULARY: usize = 400;
const HIDDEN: usize = 64;
const LAYERS: usize = 3;
const FFN: usize = 192;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 16;

/// How a scripted game is played, with its share of the games in percent.
#[derive(Clone, Copy)]
enum Style {
    /// Halves what the feedback has left.
    Halving,
    /// Says the same number again and again.
    Stubborn,
    /// Says anything, whatever the feedback.
    Random,
}

const STYLES: [(Style, i64); 3] =
    [(Style::Halving, 22), (Style::Stubborn, 40), (Style::Random, 38)];

const PROMPT: &str = "Let us play.\n";
const TEMPLATE: &str = include_str!("guess_template.jinja");
const CONTROL: [&str; 7] = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
];

/// SplitMix64: small, seeded, the same everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in (0, 1).
    fn unit(&mut self) -> f64 {
        ((self.next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// Uniform in lo..=hi.
    fn between(&mut self, lo: i64, hi: i64) -> i64 {
        lo + ((self.unit() * (hi - lo + 1) as f64) as i64).min(hi - lo)
    }

    fn normal(&mut self) -> f64 {
        (-2.0 * self.unit().ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos()
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let out = PathBuf::from(std::env::args().nth(1).ok_or("usage: guess_checkpoint OUT_DIR")?);
    let model = out.join("model");
    fs::create_dir(&out)?;
    fs::create_dir(&model)?;

    let environment = json!({"name": "guess", "n": 8, "max_turns": 3});
    let spec = EnvironmentSpec::parse(&environment)?;
    let tools: Vec<Value> = spec.tools()?.iter().map(|tool| tool.to_json()).collect();
    let mut random = Random(20);
    let games: Vec<Value> =
        (0..GAMES).map(|i| game(&mut random, i, &tools)).collect::<Result<_, _>>()?;

    let mut rows = fs::File::create(out.join("games.jsonl"))?;
    for row in &games {
        writeln!(rows, "{row}")?;
    }
    tokenizer(&model, &games)?;
    checkpoint(&model, &mut random)?;
    fs::write(model.join("chat_template.jinja"), TEMPLATE)?;
    dataset(&out.join("train.jsonl"), "train", 0, 512)?;
    dataset(&out.join("eval.jsonl"), "eval", 1_000_000, 200)?;
    Ok(())
}

/// One scripted game as a conversation row, played against the real environment.
fn game(random: &mut Random, index: u64, tools: &[Value]) -> Result<Value, Box<dyn Error>> {
    let mut game = Guess::new(Settings::default());
    // Seeds far from those of the datasets below.
    let reset = game.reset(&Map::new(), (1 << 40) + index)?.unwrap_or_default();
    let (mut lo, mut hi) = (1, 8);
    let mut draw = random.between(1, 100);
    let style = STYLES
        .iter()
        .find(|(_, share)| {
            draw -= share;
            draw <= 0
        })
        .map_or(Style::Random, |(style, _)| *style);
    let stubborn = random.between(1, 8);
    let mut messages = vec![json!({"role": "user", "content": format!("{PROMPT}{reset}")})];
    loop {
        let guess = match style {
            Style::Halving => (lo + hi) / 2,
            Style::Stubborn => stubborn,
            Style::Random => random.between(1, 8),
        };
        let arguments = json!({"value": guess});
        messages.push(json!({"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": "guess", "arguments": arguments}}]}));
        let arguments: Map<String, Value> =
            [("value".to_owned(), guess.into())].into_iter().collect();
        let answer = game.call("guess", &arguments).map_err(|raised| raised.0)?;
        if game.done() {
            return Ok(
                json!({"id": format!("game-{index}"), "messages": messages, "tools": tools}),
            );
        }
        match answer.as_str() {
            "higher" => lo = lo.max(guess + 1),
            _ => hi = hi.min(guess - 1),
        }
        messages.push(json!({"role": "tool", "content": answer}));
    }
}

/// Trains the tokenizer on the games' text, every merge inside Qwen-like word boundaries.
fn tokenizer(model: &Path, games: &[Value]) -> Result<(), Box<dyn Error>> {
    let plain = |e: tokenizers::Error| e.to_string();
    let words = Split::new(
        SplitPattern::Regex(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
                .into(),
        ),
        SplitDelimiterBehavior::Isolated,
        false,
    )
    .map_err(plain)?;
    let bytes = ByteLevel::new(false, false, false);
    let mut tokenizer = TokenizerBuilder::<
        ModelWrapper,
        NormalizerWrapper,
        PreTokenizerWrapper,
        PostProcessorWrapper,
        DecoderWrapper,
    >::new()
    .with_model(ModelWrapper::BPE(BPE::default()))
    .with_normalizer(None)
    .with_pre_tokenizer(Some(PreTokenizerWrapper::Sequence(Sequence::new(vec![
        PreTokenizerWrapper::Split(words),
        PreTokenizerWrapper::ByteLevel(bytes),
    ]))))
    .with_post_processor(None)
    .with_decoder(Some(DecoderWrapper::ByteLevel(bytes)))
    .build()
    .map_err(plain)?;
    let mut trainer = TrainerWrapper::BpeTrainer(
        BpeTrainer::builder()
            .vocab_size(VOCABULARY - CONTROL.len())
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .show_progress(false)
            .build(),
    );
    let text = games.iter().take(500).map(|row| {
        let mut text = TEMPLATE.to_string();
        text.push_str(&row["tools"].to_string().replace("\":", "\": ").replace(",\"", ", \""));
        for message in row["messages"].as_array().into_iter().flatten() {
            text.push_str(message["role"].as_str().unwrap_or_default());
            text.push('\n');
            text.push_str(message["content"].as_str().unwrap_or_default());
            if let Some(call) = message.pointer("/tool_calls/0/function/arguments/value") {
                text.push_str(&format!(
                    "\n{{\"name\": \"guess\", \"arguments\": {{\"value\": {call}}}}}\n"
                ));
            }
            text.push('\n');
        }
        text
    });
    tokenizer.train(&mut trainer, text).map_err(plain)?;
    let control: Vec<AddedToken> = CONTROL
        .iter()
        .map(|text| AddedToken::from(*text, text.starts_with("<|")).normalized(false))
        .collect();
    tokenizer.add_tokens(&control);
    tokenizer.save(model.join("tokenizer.json"), false).map_err(plain)?;
    let config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": false,
        "model_max_length": 1024,
    });
    fs::write(model.join("tokenizer_config.json"), serde_json::to_string_pretty(&config)?)?;
    let vocabulary = tokenizer.get_vocab_size(true);
    if vocabulary != VOCABULARY {
        return Err(format!("the tokenizer has {vocabulary} ids instead of {VOCABULARY}").into());
    }
    Ok(())
}

/// Writes the configuration and N(0, 0.02)-like weights scaled for so small a width.
fn checkpoint(model: &Path, random: &mut Random) -> Result<(), Box<dyn Error>> {
    let end = VOCABULARY - CONTROL.len() + 2;
    let config = json!({
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": false,
        "dtype": "float32",
        "eos_token_id": end,
        "pad_token_id": end - 2,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "max_position_embeddings": 1024,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "sliding_window": null,
        "use_sliding_window": false,
        "tie_word_embeddings": true,
        "vocab_size": VOCABULARY,
    });
    fs::write(model.join("config.json"), serde_json::to_string_pretty(&config)?)?;
    let generation = json!({"eos_token_id": end, "pad_token_id": end - 2});
    fs::write(model.join("generation_config.json"), serde_json::to_string_pretty(&generation)?)?;

    let mut tensors: BTreeMap<String, (Vec<usize>, Vec<u8>)> = BTreeMap::new();
    let mut matrix = |name: String, rows: usize, columns: usize, random: &mut Random| {
        let deviation = 0.6 / (columns as f64).sqrt();
        let bytes = (0..rows * columns)
            .flat_map(|_| ((random.normal() * deviation) as f32).to_le_bytes())
            .collect();
        tensors.insert(name, (vec![rows, columns], bytes));
    };
    let (q, kv) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
    matrix("model.embed_tokens.weight".into(), VOCABULARY, HIDDEN, random);
    for i in 0..LAYERS {
        let name = |part: &str| format!("model.layers.{i}.{part}.weight");
        matrix(name("self_attn.q_proj"), q, HIDDEN, random);
        matrix(name("self_attn.k_proj"), kv, HIDDEN, random);
        matrix(name("self_attn.v_proj"), kv, HIDDEN, random);
        matrix(name("self_attn.o_proj"), HIDDEN, q, random);
        matrix(name("mlp.gate_proj"), FFN, HIDDEN, random);
        matrix(name("mlp.up_proj"), FFN, HIDDEN, random);
        matrix(name("mlp.down_proj"), HIDDEN, FFN, random);
    }
    let mut ones = |name: String, len: usize| {
        tensors.insert(name, (vec![len], 1f32.to_le_bytes().repeat(len)));
    };
    for i in 0..LAYERS {
        for (part, len) in [
            ("input_layernorm", HIDDEN),
            ("post_attention_layernorm", HIDDEN),
            ("self_attn.q_norm", HEAD_DIM),
            ("self_attn.k_norm", HEAD_DIM),
        ] {
            ones(format!("model.layers.{i}.{part}.weight"), len);
        }
    }
    ones("model.norm.weight".into(), HIDDEN);
    let views = tensors
        .iter()
        .map(|(name, (shape, bytes))| {
            Ok((name, TensorView::new(Dtype::F32, shape.clone(), bytes)?))
        })
        .collect::<Result<Vec<_>, safetensors::SafeTensorError>>()?;
    let metadata = Some([("format".to_string(), "pt".to_string())].into());
    safetensors::serialize_to_file(views, metadata, &model.join("model.safetensors"))?;
    Ok(())
}

/// Writes task rows with the given split, one seed each.
fn dataset(path: &Path, split: &str, first_seed: u64, rows: u64) -> Result<(), Box<dyn Error>> {
    let mut file = fs::File::create(path)?;
    for seed in first_seed..first_seed + rows {
        let row = json!({"id": format!("guess-{split}-{seed}"), "prompt": PROMPT,
            "task": {"split": split, "episode_seed": seed}});
        writeln!(file, "{row}")?;
    }
    Ok(())
}
