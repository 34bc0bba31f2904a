//! A small vision-language checkpoint with random weights.

use std::{fs, path::Path};

use burn::tensor::Tensor;
use policy::{
    device::DeviceChoice,
    model::{Decoder, ModelConfig},
    score::Parameters as _,
};
use serde_json::json;

use crate::support::{IMAGE_PAD, IMAGE_VOCABULARY, write_image_tokenizer};

/// Ids that the untrained policy prefers: the digits of the code and the end of the turn.
const LIKELY: [usize; 3] = [b'0' as usize, b'1' as usize, 258];

/// By how much, in logits for each element of the hidden state.
const LEAN: f32 = 0.25;

/// A vision-language model with random weights that mostly writes digits and ends its turn, so that
/// some of its answers are right.
pub(crate) fn write_image_model(dir: &Path) {
    write_image_tokenizer(dir);
    let config = json!({
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
        "image_token_id": IMAGE_PAD, "vision_start_token_id": 263, "vision_end_token_id": 264,
        "tie_word_embeddings": false,
        "text_config": {
            "model_type": "qwen3_5_text", "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_num_key_heads": 2,
            "linear_num_value_heads": 2, "linear_value_head_dim": 8, "rms_norm_eps": 1e-6,
            "vocab_size": IMAGE_VOCABULARY, "max_position_embeddings": 1024,
            "tie_word_embeddings": false, "hidden_act": "silu", "attention_bias": false,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5,
                "mrope_interleaved": true, "mrope_section": [2, 1, 1],
            },
        },
        "vision_config": {
            "model_type": "qwen3_5_vision", "depth": 1, "hidden_size": 16, "num_heads": 2,
            "intermediate_size": 24, "patch_size": 16, "temporal_patch_size": 2,
            "spatial_merge_size": 2, "in_channels": 3, "out_hidden_size": 32,
            "num_position_embeddings": 16, "hidden_act": "gelu_pytorch_tanh",
        },
    });
    fs::write(dir.join("config.json"), config.to_string()).expect("written");
    let config = ModelConfig::read(&dir.join("config.json")).expect("a configuration");
    let device = DeviceChoice::Cpu.open().expect("the processor");
    let mut decoder = Decoder::random(config, 5, &device);
    decoder.update(&mut |name, value| {
        if name.ends_with("embed_tokens.weight") {
            // Every hidden state has this direction in common, which the head can then lean on.
            return value.add_scalar(1.0);
        }
        if !name.ends_with("lm_head.weight") {
            return value;
        }
        let device = value.device();
        let mut values = value.to_data().try_to_vec::<f32>().expect("f32 weights");
        let width = values.len() / IMAGE_VOCABULARY as usize;
        for id in LIKELY {
            values[id * width..(id + 1) * width].iter_mut().for_each(|x| *x += LEAN);
        }
        Tensor::<1>::from_floats(values.as_slice(), &device)
    });
    decoder.save_weights(&dir.join("model.safetensors")).expect("written");
}
