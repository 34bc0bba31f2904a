//! Conversations as data: what a chat template takes, a row a conversation.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::{
    Frozen, RecipeError,
    dataset::read_rows,
    json::{clipped, shown},
};

/// One conversation: what the chat template takes.
#[derive(Clone, Debug, PartialEq)]
pub struct Conversation {
    /// Its line in the file, from 1.
    pub line: u64,
    /// The messages, as the template takes them.
    pub messages: Vec<Value>,
    /// The tools, as the template takes them.
    pub tools: Vec<Value>,
    /// The files of the images that the messages show, in order.
    pub images: Vec<PathBuf>,
}

/// The conversations of a frozen file: `{"messages", "tools"?, "images"?}` a line. Image paths are
/// relative to it. Other columns are ignored.
///
/// # Errors
/// The file cannot be read or is not the frozen one; a row that is no conversation, by line.
pub fn read_conversations(file: &Frozen) -> Result<Vec<Conversation>, RecipeError> {
    let base = file.path.parent().unwrap_or(Path::new(""));
    read_rows(file, |line, row| conversation(line, row, base))
}

fn conversation(line: u64, row: &Map<String, Value>, base: &Path) -> Result<Conversation, String> {
    let messages = match row.get("messages") {
        Some(Value::Array(messages)) if !messages.is_empty() => messages.clone(),
        Some(other) => {
            return Err(format!("messages must be a list of messages, not {}", shown(other)));
        }
        None => return Err("messages is missing: add a list of messages".into()),
    };
    let (mut learned, mut shown_images) = (false, 0);
    for (index, message) in messages.iter().enumerate() {
        let role = message.get("role").and_then(Value::as_str);
        match role {
            Some("assistant") => learned = true,
            Some("system" | "user" | "tool") => {}
            Some(role) => {
                return Err(format!(
                    "messages[{index}].role must be system, user, assistant or tool, not {:?}",
                    clipped(role)
                ));
            }
            None => return Err(format!("messages[{index}] must be an object with a role")),
        }
        let calls = message.get("tool_calls").is_some_and(|calls| !calls.is_null());
        match message.get("content") {
            Some(Value::String(_)) => {}
            Some(Value::Array(parts)) if role == Some("user") => {
                shown_images += parts_of(parts).map_err(|(part, problem)| {
                    format!("messages[{index}].content[{part}] {problem}")
                })?;
            }
            None | Some(Value::Null) if role == Some("assistant") && calls => {}
            found => {
                return Err(format!(
                    "messages[{index}].content must be a text, not {}",
                    found.map_or_else(|| "absent".into(), shown)
                ));
            }
        }
    }
    if !learned {
        return Err("messages have no assistant turn: there is nothing to learn; add one or take the row out".into());
    }
    let tools = match row.get("tools") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(tools)) if tools.iter().all(Value::is_object) => tools.clone(),
        Some(other) => {
            return Err(format!("tools must be a list of objects, not {}", shown(other)));
        }
    };
    let images = match row.get("images") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(paths)) => paths
            .iter()
            .map(|path| path.as_str().filter(|it| !it.is_empty()).map(|path| base.join(path)))
            .collect::<Option<Vec<PathBuf>>>()
            .ok_or("images must be a list of paths")?,
        Some(other) => return Err(format!("images must be a list of paths, not {}", shown(other))),
    };
    if images.len() != shown_images {
        return Err(format!(
            "images has {} paths and the messages show {shown_images} images: give one for each \
             {{\"type\": \"image\"}}",
            images.len()
        ));
    }
    Ok(Conversation { line, messages, tools, images })
}

/// The number of images among a content's parts, or which part is none and why.
fn parts_of(parts: &[Value]) -> Result<usize, (usize, String)> {
    let mut images = 0;
    for (at, part) in parts.iter().enumerate() {
        match part.get("type").and_then(Value::as_str) {
            Some("image") => images += 1,
            Some("text") if part.get("text").is_some_and(Value::is_string) => {}
            _ => {
                let wants = r#"must be {"type": "image"} or {"type": "text", "text": ...}"#;
                return Err((at, format!("{wants}, not {}", shown(part))));
            }
        }
    }
    Ok(images)
}
