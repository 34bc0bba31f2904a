//! The tokenizer and its chat template.

use std::{error::Error, fs, path::Path};

use serde_json::{Value, json};
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

/// A template with tools.
pub(crate) const TOOLS: &str = include_str!("template.jinja");
/// A template with images.
pub(crate) const IMAGES: &str = include_str!("images.jinja");

/// How a checkpoint writes conversations.
pub(crate) struct Style<'a> {
    pub(crate) template: &'a str,
    /// Its control tokens, the last ids of the vocabulary: padding first, the end of a turn third.
    pub(crate) control: &'a [&'a str],
}

/// Control tokens of a policy that calls tools.
pub(crate) const CONTROL: [&str; 7] = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
];

/// Trains the tokenizer on the episodes' text, every merge inside Qwen-like word boundaries.
pub(crate) fn write(
    model: &Path,
    style: &Style<'_>,
    episodes: &[Value],
    vocabulary: usize,
) -> Result<(), Box<dyn Error>> {
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
            .vocab_size(vocabulary - style.control.len())
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .show_progress(false)
            .build(),
    );
    let text = episodes.iter().take(500).map(|row| {
        let mut text = style.template.to_string();
        text.push_str(&spaced(&row["tools"]));
        for message in row["messages"].as_array().into_iter().flatten() {
            text.push_str(message["role"].as_str().unwrap_or_default());
            text.push('\n');
            text.push_str(message["content"].as_str().unwrap_or_default());
            if let Some(call) = message.pointer("/tool_calls/0/function") {
                let arguments = spaced(&call["arguments"]);
                text.push_str(&format!(
                    "\n{{\"name\": {}, \"arguments\": {arguments}}}\n",
                    call["name"]
                ));
            }
            text.push('\n');
        }
        text
    });
    tokenizer.train(&mut trainer, text).map_err(plain)?;
    let control: Vec<AddedToken> = style
        .control
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
    fs::write(model.join("chat_template.jinja"), style.template)?;
    fs::write(model.join("tokenizer_config.json"), serde_json::to_string_pretty(&config)?)?;
    let ids = tokenizer.get_vocab_size(true);
    if ids != vocabulary {
        return Err(format!("the tokenizer has {ids} ids instead of {vocabulary}").into());
    }
    Ok(())
}

/// JSON as templates write it: with blanks after colons and commas.
fn spaced(value: &Value) -> String {
    value.to_string().replace("\":", "\": ").replace(",\"", ", \"")
}
