//! Token streams: prompts, suffixes and their control tokens.

mod common;

use policy::chat::{ChatFormat, ChatOptions};
use protocol::FinishReason;
use serde_json::json;

fn add_tool() -> serde_json::Value {
    json!({"type": "function", "function": {"name": "add", "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"]}}})
}

#[test]
fn prompt_and_suffix_are_the_templates_text() {
    let Some(root) = common::data_root() else { return };
    let dir = root.join("checkpoints/qwen3-tiny");
    let format =
        ChatFormat::load(&dir, ChatOptions { tools: vec![add_tool()], ..ChatOptions::default() })
            .expect("loads");
    let prompt = format.prompt("2+3?", " Go.").expect("renders");
    let text = format.decode(&prompt);
    assert!(
        text.ends_with("<|im_end|>\n<|im_start|>user\n2+3? Go.<|im_end|>\n<|im_start|>assistant\n"),
        "{text}"
    );
    let suffix = format.suffix(FinishReason::Stop, &["5", "6"]).expect("renders");
    assert_eq!(
        format.decode(&suffix),
        "\n<|im_start|>user\n<tool_response>\n5\n</tool_response>\n<tool_response>\n6\n</tool_response>\
         <|im_end|>\n<|im_start|>assistant\n"
    );
    let turn = format
        .turn("<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 2}}\n</tool_call>")
        .expect("encodes");
    let parsed = format.parse(&turn, FinishReason::Stop);
    assert_eq!(parsed.calls.len(), 1, "{parsed:?}");
}
