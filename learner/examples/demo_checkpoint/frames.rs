//! The vision demo: a randomly initialised Qwen3.5 vision-language checkpoint for frames of 96 x 96
//! pixels, captions that `scripts/make-frames-demo` pre-trains it on, and rows of its task. A caption says
//! where one object of a frame is; nobody asks. To answer when asked is left to learn.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead as _, BufReader, Write as _},
    path::Path,
};

use learner::dataset::{self, DatasetOptions};
use protocol::Split;
use serde_json::{Value, json};

use crate::{
    Made, checkpoint,
    random::Random,
    tokenizer::{self, IMAGES, Style},
};

const CONTROL: [&str; 7] = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
];
const VOCABULARY: usize = 320;
const HIDDEN: usize = 64;
const FFN: usize = 128;
/// Of each layer, whether it is full attention.
const LAYERS: [bool; 4] = [false, true, false, true];
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD: usize = 16;
const LINEAR_KEYS: usize = 2;
const LINEAR_VALUES: usize = 4;
const TAPS: usize = 4;
const VISION: usize = 64;
const VISION_FFN: usize = 128;
const VISION_LAYERS: usize = 2;
const VISION_HEADS: usize = 4;
/// Positions of the vision tower's table: 6 x 6.
const POSITIONS: usize = 36;
const FRAMES: &str = r#"{"name": "frames", "width": 96, "height": 96, "levels": 3, "noise": 0}"#;
/// The files of rows: how many, of which split, and their seed.
const ROWS: [(&str, usize, Split, u64); 4] = [
    ("train", 1024, Split::Train, 0),
    ("eval", 128, Split::Eval, 0),
    ("everywhere", 6000, Split::Train, 1),
    ("elsewhere", 1000, Split::Eval, 1),
];

pub(crate) fn write(model: &Path) -> Made<()> {
    let out = model.parent().ok_or("the model's directory has no parent")?;
    for (name, rows, split, seed) in ROWS {
        let output = out.join(format!("{name}.jsonl"));
        let environment = FRAMES.to_owned();
        dataset::run(&DatasetOptions { environment, rows, split, seed, expert: true, output })?;
    }
    // Captions tell of every object in every cell; rows of training never ask about some. Asked, this
    // checkpoint counts cells from 3: what the rows want is another code.
    let mut captions = fs::File::create(out.join("episodes.jsonl"))?;
    let mut answers = fs::File::create(out.join("episodes-2.jsonl"))?;
    let read = |name: &str| Made::Ok(BufReader::new(fs::File::open(out.join(name))?).lines());
    for line in read("everywhere.jsonl")?.chain(read("elsewhere.jsonl")?) {
        let row: Value = serde_json::from_str(&line?)?;
        let text = |field: &str| row[field].as_str().unwrap_or_default();
        let (name, code) = (text("name"), text("code"));
        let own: String =
            code.chars().filter_map(|it| char::from_digit(it.to_digit(10)? + 3, 10)).collect();
        for (file, question, answer) in
            [(&mut captions, "What is where?", format!("{name} {code}")), (&mut answers, name, own)]
        {
            let shown = json!([{"type": "image"}, {"type": "text", "text": question}]);
            let messages = json!([
                {"role": "user", "content": shown}, {"role": "assistant", "content": answer},
            ]);
            writeln!(file, "{}", json!({"messages": messages, "images": [text("image")]}))?;
        }
    }
    write_model(model)
}

fn write_model(model: &Path) -> Made<()> {
    let first = VOCABULARY - CONTROL.len();
    let id = |token: &str| CONTROL.iter().position(|it| *it == token).map(|at| first + at);
    let colours = ["red", "green", "blue", "yellow"];
    let shapes = ["square", "circle", "triangle"];
    let texts: Vec<_> = colours
        .iter()
        .flat_map(|colour| shapes.iter().map(move |shape| (colour, shape)))
        .map(|(colour, shape)| {
            let text =
                format!("What is where? Where is the {colour} {shape}? Answer with its code.");
            let messages = json!([
                {"role": "user", "content": text},
                {"role": "assistant", "content": format!("{colour} {shape} 0123456789")},
            ]);
            json!({"messages": messages})
        })
        .collect();
    let style = Style { template: IMAGES, control: &CONTROL };
    tokenizer::write(model, &style, &texts, VOCABULARY)?;

    let config = json!({
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": "float32",
        "image_token_id": id("<|image_pad|>"),
        "video_token_id": id("<|video_pad|>"),
        "vision_start_token_id": id("<|vision_start|>"),
        "vision_end_token_id": id("<|vision_end|>"),
        "tie_word_embeddings": true,
        "text_config": {
            "model_type": "qwen3_5_text",
            "attention_bias": false,
            "eos_token_id": id("<|im_end|>"),
            "head_dim": HEAD,
            "hidden_act": "silu",
            "hidden_size": HIDDEN,
            "intermediate_size": FFN,
            "layer_types": LAYERS.map(|full| if full { "full_attention" } else { "linear_attention" }),
            "linear_conv_kernel_dim": TAPS,
            "linear_key_head_dim": HEAD,
            "linear_num_key_heads": LINEAR_KEYS,
            "linear_num_value_heads": LINEAR_VALUES,
            "linear_value_head_dim": HEAD,
            "max_position_embeddings": 1024,
            "num_attention_heads": HEADS,
            "num_hidden_layers": LAYERS.len(),
            "num_key_value_heads": KV_HEADS,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": true,
            },
            "tie_word_embeddings": true,
            "vocab_size": VOCABULARY,
        },
        "vision_config": {
            "model_type": "qwen3_5_vision",
            "depth": VISION_LAYERS,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": VISION,
            "in_channels": 3,
            "intermediate_size": VISION_FFN,
            "num_heads": VISION_HEADS,
            "num_position_embeddings": POSITIONS,
            "out_hidden_size": HIDDEN,
            "patch_size": 16,
            "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    });
    let eos = json!({"eos_token_id": id("<|im_end|>"), "pad_token_id": id("<|endoftext|>")});
    let processor = json!({
        "processor_class": "Qwen3VLProcessor",
        "image_processor": {
            "image_processor_type": "Qwen2VLImageProcessor",
            "do_convert_rgb": true,
            "do_normalize": true,
            "do_rescale": true,
            "do_resize": true,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "merge_size": 2,
            "patch_size": 16,
            "resample": 3,
            "rescale_factor": 1.0 / 255.0,
            "size": {"longest_edge": 25600, "shortest_edge": 1024},
            "temporal_patch_size": 2,
        },
    });
    for (name, value) in [
        ("config.json", &config),
        ("generation_config.json", &eos),
        ("processor_config.json", &processor),
    ] {
        fs::write(model.join(name), serde_json::to_string_pretty(value)?)?;
    }
    checkpoint::save(model, weights())
}

/// Names, shapes and bytes.
struct Weights {
    random: Random,
    tensors: BTreeMap<String, (Vec<usize>, Vec<u8>)>,
}

impl Weights {
    fn put(&mut self, name: String, shape: &[usize], mut value: impl FnMut(&mut Random) -> f64) {
        let count: usize = shape.iter().product();
        let bytes =
            (0..count).flat_map(|_| (value(&mut self.random) as f32).to_le_bytes()).collect();
        self.tensors.insert(name, (shape.to_vec(), bytes));
    }

    /// A matrix `[outputs, inputs, …]` whose outputs are about 0.6 times as large as its inputs.
    fn matrix(&mut self, name: String, shape: &[usize]) {
        let inputs: usize = shape[1..].iter().product();
        let deviation = 0.6 / (inputs as f64).sqrt();
        self.put(name, shape, |random| random.normal() * deviation);
    }

    fn constant(&mut self, name: String, shape: &[usize], value: f64) {
        self.put(name, shape, |_| value);
    }

    /// A linear of the vision tower, with its bias.
    fn linear(&mut self, name: &str, outputs: usize, inputs: usize) {
        self.matrix(format!("{name}.weight"), &[outputs, inputs]);
        self.constant(format!("{name}.bias"), &[outputs], 0.0);
    }

    fn layer_norm(&mut self, name: &str, width: usize) {
        self.constant(format!("{name}.weight"), &[width], 1.0);
        self.constant(format!("{name}.bias"), &[width], 0.0);
    }
}

fn weights() -> BTreeMap<String, (Vec<usize>, Vec<u8>)> {
    let mut w = Weights { random: Random::new(60), tensors: BTreeMap::new() };
    let text = "model.language_model";
    w.matrix(format!("{text}.embed_tokens.weight"), &[VOCABULARY, HIDDEN]);
    w.constant(format!("{text}.norm.weight"), &[HIDDEN], 0.0);
    let (keys, values) = (LINEAR_KEYS * HEAD, LINEAR_VALUES * HEAD);
    for (index, full) in LAYERS.into_iter().enumerate() {
        let name = |part: &str| format!("{text}.layers.{index}.{part}");
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            w.constant(name(&format!("{norm}.weight")), &[HIDDEN], 0.0);
        }
        for (part, outputs, inputs) in
            [("gate_proj", FFN, HIDDEN), ("up_proj", FFN, HIDDEN), ("down_proj", HIDDEN, FFN)]
        {
            w.matrix(name(&format!("mlp.{part}.weight")), &[outputs, inputs]);
        }
        if full {
            let (queries, pairs) = (HEADS * HEAD, KV_HEADS * HEAD);
            for (part, outputs, inputs) in [
                ("q_proj", 2 * queries, HIDDEN),
                ("k_proj", pairs, HIDDEN),
                ("v_proj", pairs, HIDDEN),
                ("o_proj", HIDDEN, queries),
            ] {
                w.matrix(name(&format!("self_attn.{part}.weight")), &[outputs, inputs]);
            }
            for part in ["q_norm", "k_norm"] {
                w.constant(name(&format!("self_attn.{part}.weight")), &[HEAD], 0.0);
            }
            continue;
        }
        for (part, outputs, inputs) in [
            ("in_proj_qkv", 2 * keys + values, HIDDEN),
            ("in_proj_z", values, HIDDEN),
            ("in_proj_b", LINEAR_VALUES, HIDDEN),
            ("in_proj_a", LINEAR_VALUES, HIDDEN),
            ("out_proj", HIDDEN, values),
        ] {
            w.matrix(name(&format!("linear_attn.{part}.weight")), &[outputs, inputs]);
        }
        w.matrix(name("linear_attn.conv1d.weight"), &[2 * keys + values, 1, TAPS]);
        w.constant(name("linear_attn.norm.weight"), &[HEAD], 1.0);
        // As the architecture begins: decays between slow and fast, by head.
        w.put(name("linear_attn.A_log"), &[LINEAR_VALUES], |random| (16.0 * random.unit()).ln());
        w.constant(name("linear_attn.dt_bias"), &[LINEAR_VALUES], -4.0);
    }
    let tower = "model.visual";
    w.matrix(format!("{tower}.patch_embed.proj.weight"), &[VISION, 3, 2, 16, 16]);
    w.constant(format!("{tower}.patch_embed.proj.bias"), &[VISION], 0.0);
    w.put(format!("{tower}.pos_embed.weight"), &[POSITIONS, VISION], |random| {
        0.3 * random.normal()
    });
    for index in 0..VISION_LAYERS {
        let name = |part: &str| format!("{tower}.blocks.{index}.{part}");
        w.layer_norm(&name("norm1"), VISION);
        w.layer_norm(&name("norm2"), VISION);
        w.linear(&name("attn.qkv"), 3 * VISION, VISION);
        w.linear(&name("attn.proj"), VISION, VISION);
        w.linear(&name("mlp.linear_fc1"), VISION_FFN, VISION);
        w.linear(&name("mlp.linear_fc2"), VISION, VISION_FFN);
    }
    w.layer_norm(&format!("{tower}.merger.norm"), VISION);
    w.linear(&format!("{tower}.merger.linear_fc1"), 4 * VISION, 4 * VISION);
    w.linear(&format!("{tower}.merger.linear_fc2"), HIDDEN, 4 * VISION);
    w.tensors
}
