//! Which strings of a template's context are untrusted, and their marking.
//!
//! Untrusted are the contents of user and tool messages (of every role but system, developer and
//! assistant), the tools' JSON inside a system text, and every string of the tools but the fixed
//! vocabulary of JSON schemas.

use std::{collections::HashSet, ops::Range};

use serde_json::{Map, Value};

use super::{ChatTokenizer, marks::Marks, python::is_space};

/// Names that JSON schemas and tool lists are made of; they come from a specification, not from a
/// tool's author.
const KEYWORDS: [&str; 45] = [
    "type",
    "function",
    "name",
    "description",
    "parameters",
    "strict",
    "return",
    "returns",
    "properties",
    "required",
    "items",
    "enum",
    "default",
    "nullable",
    "additionalProperties",
    "anyOf",
    "oneOf",
    "allOf",
    "not",
    "const",
    "format",
    "title",
    "examples",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "minLength",
    "maxLength",
    "pattern",
    "minItems",
    "maxItems",
    "uniqueItems",
    "prefixItems",
    "minProperties",
    "maxProperties",
    "propertyNames",
    "$ref",
    "$defs",
    "definitions",
    "$schema",
    "$id",
    "deprecated",
    "readOnly",
];
const TYPES: [&str; 8] =
    ["string", "integer", "number", "boolean", "array", "object", "null", "function"];
/// Keywords whose value maps names of the author's choice to schemas.
const NAME_MAPS: [&str; 4] = ["properties", "$defs", "definitions", "patternProperties"];
/// Keywords whose value is data of the author's choice.
const DATA: [&str; 4] = ["enum", "const", "default", "examples"];

/// Puts marks into the untrusted strings of a context.
pub(super) struct Marker<'a> {
    marks: Marks,
    tokenizer: &'a ChatTokenizer,
    only_dangerous: bool,
    /// The strings between marks.
    strings: HashSet<String>,
}

impl<'a> Marker<'a> {
    /// `only_dangerous` leaves strings alone that no control token can come of.
    pub(super) fn new(marks: Marks, tokenizer: &'a ChatTokenizer, only_dangerous: bool) -> Self {
        Self { marks, tokenizer, only_dangerous, strings: HashSet::new() }
    }

    /// The marked context and the strings that were marked. `system` are the untrusted byte ranges of a
    /// leading system message.
    pub(super) fn mark(
        mut self,
        context: &Map<String, Value>,
        system: &[Range<usize>],
    ) -> (Map<String, Value>, HashSet<String>) {
        let mut marked = Map::new();
        for (key, value) in context {
            let value = match (key.as_str(), value) {
                ("messages", Value::Array(messages)) => {
                    let mut messages: Vec<Value> =
                        messages.iter().map(|message| self.message(message)).collect();
                    if let Some(message) = messages.first_mut() {
                        self.system(message, system);
                    }
                    Value::Array(messages)
                }
                ("tools", Value::Array(tools)) => {
                    tools.iter().map(|tool| self.schema(tool)).collect()
                }
                _ => value.clone(),
            };
            marked.insert(key.clone(), value);
        }
        (marked, self.strings)
    }

    fn message(&mut self, message: &Value) -> Value {
        let Value::Object(map) = message else { return message.clone() };
        let mut map = map.clone();
        let role = map.get("role").and_then(Value::as_str).unwrap_or_default();
        if !matches!(role, "system" | "developer" | "assistant")
            && let Some(content) = map.get_mut("content")
        {
            match content {
                Value::String(text) => *text = self.wrap(text),
                Value::Array(blocks) => {
                    for block in blocks {
                        match block {
                            Value::String(text) => *text = self.wrap(text),
                            Value::Object(block) => {
                                if let Some(Value::String(text)) = block.get_mut("text") {
                                    *text = self.wrap(text);
                                }
                            }
                            _ => {}
                        }
                    }
                }
                _ => {}
            }
        }
        Value::Object(map)
    }

    /// Marks the untrusted ranges of a system message.
    fn system(&mut self, message: &mut Value, untrusted: &[Range<usize>]) {
        if message.get("role").and_then(Value::as_str) != Some("system") || untrusted.is_empty() {
            return;
        }
        let Some(Value::String(text)) = message.get_mut("content") else { return };
        let (mut out, mut at) = (String::new(), 0);
        for range in untrusted {
            out.push_str(text.get(at..range.start).unwrap_or_default());
            out.push_str(&self.wrap(text.get(range.clone()).unwrap_or_default()));
            at = range.end;
        }
        out.push_str(text.get(at..).unwrap_or_default());
        *text = out;
    }

    fn schema(&mut self, value: &Value) -> Value {
        let Value::Object(map) = value else { return self.data(value) };
        let marked = map.iter().map(|(key, value)| {
            let keyword = KEYWORDS.contains(&key.as_str());
            let item = match value {
                Value::Object(names) if NAME_MAPS.contains(&key.as_str()) => Value::Object(
                    names
                        .iter()
                        .map(|(name, schema)| (self.wrap(name), self.schema(schema)))
                        .collect(),
                ),
                _ if DATA.contains(&key.as_str()) || !keyword => self.data(value),
                Value::String(text) if key == "type" && TYPES.contains(&text.as_str()) => {
                    value.clone()
                }
                Value::Array(types) if key == "type" => types
                    .iter()
                    .map(|t| match t.as_str() {
                        Some(text) if TYPES.contains(&text) => t.clone(),
                        _ => self.data(t),
                    })
                    .collect(),
                Value::Array(items) => items.iter().map(|item| self.schema(item)).collect(),
                _ => self.schema(value),
            };
            (if keyword { key.clone() } else { self.wrap(key) }, item)
        });
        Value::Object(marked.collect())
    }

    fn data(&mut self, value: &Value) -> Value {
        match value {
            Value::String(text) => Value::String(self.wrap(text)),
            Value::Array(items) => items.iter().map(|item| self.data(item)).collect(),
            Value::Object(map) => Value::Object(
                map.iter().map(|(key, item)| (self.wrap(key), self.data(item))).collect(),
            ),
            _ => value.clone(),
        }
    }

    fn wrap(&mut self, text: &str) -> String {
        let left = text.trim_start_matches(is_space);
        let core = left.trim_end_matches(is_space);
        if core.is_empty() || (self.only_dangerous && !self.tokenizer.touches_control(core)) {
            return text.to_owned();
        }
        let (before, after) = (&text[..text.len() - left.len()], &left[core.len()..]);
        self.strings.insert(core.to_owned());
        format!("{before}{}{core}{}{after}", self.marks.open, self.marks.close)
    }
}
