//! Tool calls in what a policy wrote.
//!
//! The text of a sampled turn is read once, left to right, in time linear in its length; the same code
//! runs at the actor and at the learner. Calls are found in the decoded text, so a `<tool_call>` spelled
//! with ordinary ids counts as much as the control token: the policy is the only author of its turn, and
//! checkpoints without such tokens work alike.
//!
//! # What becomes of odd turns
//!
//! | turn | outcome |
//! |---|---|
//! | cut by the length limit | no calls, whatever it holds |
//! | more than [`MAX_IDS`] ids or [`MAX_CHARS`] characters | one `Malformed` |
//! | `<tool_call>` between `<think>` and `</think>` | reasoning, not a call |
//! | the prompt ended with `<think>`, or the turn starts with it, and no `</think>` follows | all of it is reasoning |
//! | a first `</think>` that nothing opened | what stands before it is reasoning, calls included |
//! | a further one | text |
//! | `<tool_call>` that is never closed | `Malformed`, up to the turn's end |
//! | `</tool_call>` that nothing opened; a call without tags | text |
//! | text between, before and after blocks | kept as text, does not matter |
//! | several blocks | several calls, in order; a malformed one does not hide its neighbours |
//! | `<tool_call>` inside a block | part of that block, which is `Malformed` unless it stands in a JSON string |
//!
//! JSON blocks (Qwen3, Hermes): `{"name": …, "arguments": {…}}`
//!
//! | block | outcome |
//! |---|---|
//! | not JSON, an array, several values, text around it | `Malformed` |
//! | `"name"` missing or not a string | `Malformed` |
//! | `"name": ""` or any other text | a call; the recorder knows the tools |
//! | no `"arguments"`, or `null` | `{}` |
//! | `"arguments": "{\"n\": 5}"` (an object as text) | that object |
//! | `"arguments": [5]`, `"x"`, `3` | `Malformed` |
//! | other keys beside these | ignored |
//! | the same key twice, at any depth | the last value counts |
//! | `</tool_call>` in a JSON string | part of the string |
//! | `NaN`, `Infinity`, `1e400`, `01`, a raw newline in a string, a lone `\ud800` | `Malformed` |
//! | 2^63 and larger integers | kept digit for digit, up to the range of a double |
//! | a tool name longer than [`MAX_NAME`] bytes | `Malformed` |
//! | nested deeper than [`MAX_DEPTH`](super::MAX_DEPTH) | `Malformed` |
//!
//! Tag blocks (Qwen3.5, Qwen3.6): `<function=f>` with `<parameter=k>` values
//!
//! | block | outcome |
//! |---|---|
//! | ends | at the first `</tool_call>` |
//! | no `<function=f>` or `</function>`, text between tags, two functions | `Malformed` |
//! | a value | ends at the first `</parameter>` that another parameter or `</function>` follows; one newline at each end is framing |
//! | a value whose schema allows a string | that text (`null` and `None` are null where the schema allows null) |
//! | a value whose schema has other types | `true`/`True`, numbers, JSON arrays and objects as such; what does not read as its type stays text, for the recorder to refuse |
//! | a value without a type in the schema, or an unknown parameter | a JSON number, `true`, `false`, `null`, array or object as such, else text |
//! | the same parameter twice | the last value counts |

mod function_tags;
mod json_block;

use protocol::{FinishReason, ParsedCall};
use serde_json::{Map, Value};

/// A turn of more ids than this is not searched for calls.
pub const MAX_IDS: usize = 8_192;
/// A turn of more characters than this is not searched for calls.
pub const MAX_CHARS: usize = 131_072;
/// A malformed block is kept up to this many bytes.
pub const MAX_RAW: usize = 2_048;
/// Longest name of a called tool, in bytes; no tool has one near it.
pub const MAX_NAME: usize = 1_024;

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
const THINK: &str = "<think>";
const END_THINK: &str = "</think>";

/// How a checkpoint writes tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Qwen2.5, Qwen3, Hermes.
    Json,
    /// `<tool_call><function=f><parameter=k>v</parameter></function></tool_call>`: Qwen3.5, Qwen3.6.
    FunctionTags,
}

impl Dialect {
    /// The dialect that a chat template teaches: the tags where it writes them, else JSON.
    pub fn of_template(source: &str) -> Self {
        if source.contains("<function=") && source.contains("<parameter=") {
            Self::FunctionTags
        } else {
            Self::Json
        }
    }
}

/// What a turn is read with.
#[derive(Clone, Debug)]
pub struct ParseRules {
    /// How calls are written.
    pub dialect: Dialect,
    /// Whether the generation prompt ends inside an open `<think>`.
    pub opens_think: bool,
    /// Tool name to JSON schema of its arguments: types the values of [`Dialect::FunctionTags`].
    pub schemas: Map<String, Value>,
}

/// A sampled turn, read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Turn {
    /// The decoded text without the stop token that ended it.
    pub text: String,
    /// What the policy thought, without the think tags.
    pub reasoning: String,
    /// The rest of the text without tool-call blocks, trimmed.
    pub content: String,
    /// The calls, in order. Empty for a turn that the length limit cut.
    pub calls: Vec<ParsedCall>,
}

/// Reads a turn of `n_ids` ids that decode to `text`, within the bounds.
pub fn parse_turn(text: String, n_ids: usize, finish: FinishReason, rules: &ParseRules) -> Turn {
    let oversize = if n_ids > MAX_IDS {
        Some(format!("the turn is longer than {MAX_IDS} ids"))
    } else if text.len() > MAX_CHARS && text.chars().count() > MAX_CHARS {
        Some(format!("the turn is longer than {MAX_CHARS} characters"))
    } else {
        None
    };
    if let Some(reason) = oversize {
        let calls = match finish {
            FinishReason::Stop => vec![malformed(&text, reason)],
            FinishReason::Length => Vec::new(),
        };
        return Turn { content: text.clone(), text, reasoning: String::new(), calls };
    }
    let (reasoning, content, mut calls) = read_calls(&text, rules);
    if finish == FinishReason::Length {
        calls.clear();
    }
    Turn { text, reasoning, content, calls }
}

/// Reads a text of any length: its reasoning, its content and its calls. Takes time linear in the text.
pub fn read_calls(text: &str, rules: &ParseRules) -> (String, String, Vec<ParsedCall>) {
    let mut reasoning = String::new();
    let mut content = String::new();
    let mut calls = Vec::new();
    let mut at = 0;
    // Only the first end of thought can be one that nothing opened.
    let mut thought = rules.opens_think;
    if rules.opens_think {
        at = think(text, 0, &mut reasoning);
    }
    while let Some(found) = text[at..].find('<').map(|i| at + i) {
        content.push_str(&text[at..found]);
        let rest = &text[found..];
        if rest.starts_with(OPEN) {
            let body = found + OPEN.len();
            let (call, length) = match rules.dialect {
                Dialect::Json => json_block::read(&text[body..]),
                Dialect::FunctionTags => function_tags::read(&text[body..], &rules.schemas),
            };
            calls.push(match call {
                ParsedCall::Call { name, .. } if name.len() > MAX_NAME => {
                    malformed(&name, format!("the tool's name is longer than {MAX_NAME} bytes"))
                }
                call => call,
            });
            at = body + length;
        } else if rest.starts_with(THINK) {
            at = think(text, found + THINK.len(), &mut reasoning);
            thought = true;
        } else if rest.starts_with(END_THINK) && !thought {
            reasoning.push_str(&text[..found]);
            content.clear();
            calls.clear();
            thought = true;
            at = found + END_THINK.len();
        } else {
            content.push('<');
            at = found + 1;
        }
    }
    content.push_str(&text[at..]);
    (reasoning.trim().to_owned(), content.trim().to_owned(), calls)
}

/// Takes the reasoning that starts at `start` and returns where it ends, its closing tag included.
fn think(text: &str, start: usize, reasoning: &mut String) -> usize {
    let rest = &text[start..];
    let end = rest.find(END_THINK);
    reasoning.push_str(&rest[..end.unwrap_or(rest.len())]);
    start + end.map_or(rest.len(), |end| end + END_THINK.len())
}

/// A block that is not a call, its text bounded by [`MAX_RAW`].
fn malformed(raw: &str, reason: impl Into<String>) -> ParsedCall {
    let raw = raw.trim();
    let mut end = raw.len().min(MAX_RAW);
    while !raw.is_char_boundary(end) {
        end -= 1;
    }
    ParsedCall::Malformed { raw: raw[..end].to_owned(), reason: reason.into() }
}

/// Splits `body` (the text after `<tool_call>`) at the block's end: the block, and the length up to and
/// with `</tool_call>`; no block where it is never closed.
fn block(body: &str) -> (Option<&str>, usize) {
    match body.find(CLOSE) {
        Some(end) => (Some(&body[..end]), end + CLOSE.len()),
        None => (None, body.len()),
    }
}
