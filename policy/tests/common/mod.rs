//! Where shared test data lies, and small helpers of the chat tests.

#![allow(dead_code, reason = "each test binary uses a part")]

use std::path::PathBuf;

/// The data root: `ROLLCALL_DATA`, else `shared/data` beside the workspace. `None`, with a message, where
/// there is none.
pub(crate) fn data_root() -> Option<PathBuf> {
    let root = std::env::var_os("ROLLCALL_DATA").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../shared/data"),
        PathBuf::from,
    );
    if root.is_dir() {
        return Some(root);
    }
    eprintln!("skipped: no test data at {} (set ROLLCALL_DATA)", root.display());
    None
}

/// A golden checkpoint folder.
pub(crate) fn golden(folder: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/chat").join(folder)
}

/// The tool that the goldens are made with.
pub(crate) fn guess_tool() -> serde_json::Value {
    serde_json::json!({"type": "function", "function": {
        "name": "guess", "description": "Submit a guess – \"quoted\" <b>&'x' 你好", "parameters": {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "description": "The number."},
                "sure": {"type": "boolean", "default": true},
                "share": {"type": "number", "default": 1.0},
                "how": {"type": "string", "enum": ["quick", "slow"]}},
            "required": ["value"]}}})
}

/// Texts whose repetition is hard on a reader of tool calls.
pub(crate) const HOSTILE_UNITS: [&str; 16] = [
    "<tool_call>",
    "</tool_call>",
    "<tool_call>a</tool_call>",
    "<tool_call>{\"name\":\"f\",\"arguments\":{\"s\":\"</tool_call>",
    "<tool_call>[\"</tool_call>",
    "<tool_call>[\",\",\"</tool_call>,",
    "<tool_call>{\"a\":[[[[[[[[",
    "<tool_call>{\"name\":\"f\"} </tool_call>",
    "<think>",
    "</think>",
    "<think></think>",
    "<tool_call><function=f><parameter=s>",
    "<tool_call><function=f><parameter=s></parameter>x</tool_call>",
    "<tool_call><function=f><parameter=s>x</parameter> </function></tool_call>",
    "<tool_call><function=f><parameter=a>x</parameter><parameter=b>",
    "<<<<        ",
];

/// Copies a golden checkpoint's files into `target`.
pub(crate) fn copy_golden(folder: &str, target: &std::path::Path) {
    for name in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
        std::fs::copy(golden(folder).join(name), target.join(name)).expect("copies a golden");
    }
}
