//! A randomly initialised Qwen3 checkpoint.

use std::{collections::BTreeMap, error::Error, fs, path::Path};

use safetensors::{Dtype, tensor::TensorView};
use serde_json::json;

use crate::{random::Random, tokenizer::CONTROL};

const HEAD_DIM: usize = 16;

/// The size of a model.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    /// Ids, control tokens included.
    pub(crate) vocabulary: usize,
    pub(crate) hidden: usize,
    pub(crate) layers: usize,
    pub(crate) ffn: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
}

/// Writes the configuration and N(0, 0.02)-like weights scaled for so small a width.
pub(crate) fn write(model: &Path, shape: Shape, random: &mut Random) -> Result<(), Box<dyn Error>> {
    let Shape { vocabulary, hidden, layers, ffn, heads, kv_heads } = shape;
    let end = vocabulary - CONTROL.len() + 2;
    let config = json!({
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": false,
        "dtype": "float32",
        "eos_token_id": end,
        "pad_token_id": end - 2,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "max_position_embeddings": 1024,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "sliding_window": null,
        "use_sliding_window": false,
        "tie_word_embeddings": true,
        "vocab_size": vocabulary,
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
    let (q, kv) = (heads * HEAD_DIM, kv_heads * HEAD_DIM);
    matrix("model.embed_tokens.weight".into(), vocabulary, hidden, random);
    for i in 0..layers {
        let name = |part: &str| format!("model.layers.{i}.{part}.weight");
        matrix(name("self_attn.q_proj"), q, hidden, random);
        matrix(name("self_attn.k_proj"), kv, hidden, random);
        matrix(name("self_attn.v_proj"), kv, hidden, random);
        matrix(name("self_attn.o_proj"), hidden, q, random);
        matrix(name("mlp.gate_proj"), ffn, hidden, random);
        matrix(name("mlp.up_proj"), ffn, hidden, random);
        matrix(name("mlp.down_proj"), hidden, ffn, random);
    }
    let mut ones = |name: String, len: usize| {
        tensors.insert(name, (vec![len], 1f32.to_le_bytes().repeat(len)));
    };
    for i in 0..layers {
        for (part, len) in [
            ("input_layernorm", hidden),
            ("post_attention_layernorm", hidden),
            ("self_attn.q_norm", HEAD_DIM),
            ("self_attn.k_norm", HEAD_DIM),
        ] {
            ones(format!("model.layers.{i}.{part}.weight"), len);
        }
    }
    ones("model.norm.weight".into(), hidden);
    save(model, tensors)
}

/// Writes `model.safetensors`.
pub(crate) fn save(
    model: &Path,
    tensors: BTreeMap<String, (Vec<usize>, Vec<u8>)>,
) -> Result<(), Box<dyn Error>> {
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
