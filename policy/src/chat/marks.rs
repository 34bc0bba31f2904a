//! Where untrusted text lies in a rendered template.
//!
//! The template is rendered twice: plainly, and with a mark before and after every untrusted string.
//! If the second rendering without its marks is the first one, the marks tell which bytes are
//! untrusted; otherwise the template reshapes what it is given, and it is refused rather than guessed
//! at. Three rules make ordinary templates pass:
//!
//! - marks go inside the whitespace at a string's ends, so that `trim` and `strip` work as before, and a
//!   string that is empty or all whitespace is not marked, so that tests for emptiness do. Such
//!   whitespace counts as scaffold; no control token has any;
//! - marks are letters that occur in none of the texts (letters, so that `repr` and `json.dumps` print
//!   them as they are), the same two for all strings, so that equal strings stay equal;
//! - what stands between two marks must be the string itself or its JSON or `repr` escape.
//!
//! In tools every string is untrusted but the fixed vocabulary of JSON schemas. If a template does more
//! with tools than print them (say it compares a name), a second attempt marks only the strings that
//! share a piece with a control token; the others cannot matter.

use std::{
    collections::{BTreeSet, HashSet},
    ops::Range,
};

use serde_json::{Map, Value};

use super::{
    ChatError, Template,
    python::{is_space, json_string, string_repr},
};

/// A rendered template and the byte ranges of it that are untrusted text, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    /// The text, as Python renders it.
    pub text: String,
    /// Byte ranges of `text`, sorted and disjoint.
    pub untrusted: Vec<Range<usize>>,
}

/// Renders `context` and finds its untrusted text: the content of user and tool messages and every
/// string of the tools, and of the first system message the byte ranges `system`. `dangerous` says whether a string shares a piece with a control token.
pub(super) fn render(
    template: &Template,
    context: &Map<String, Value>,
    system: &[Range<usize>],
    dangerous: impl Fn(&str) -> bool,
) -> Result<Rendered, ChatError> {
    let text = template.render(context)?;
    let marks = Marks::choose(template.source(), context)?;
    let locate = |wanted: &dyn Fn(&str) -> bool| {
        let mut marker = Marker { marks, wanted, cores: HashSet::new() };
        let marked = marker.context(context, system);
        marks.locate(template, &marked, &text, &marker.cores)
    };
    let untrusted = match locate(&|_| true) {
        Err(ChatError::Reshaped { .. } | ChatError::Render { .. }) => locate(&dangerous)?,
        found => found?,
    };
    Ok(Rendered { text, untrusted })
}

#[derive(Clone, Copy)]
struct Marks {
    open: char,
    close: char,
}

impl Marks {
    /// Two letters that are in none of the texts.
    fn choose(source: &str, context: &Map<String, Value>) -> Result<Self, ChatError> {
        let mut used = BTreeSet::new();
        let mut note = |text: &str| used.extend(text.chars().filter(|c| *c >= '\u{10000}'));
        note(source);
        for (key, value) in context {
            note(key);
            visit_strings(value, &mut note);
        }
        // Scripts without case that no model writes: Anatolian hieroglyphs, cuneiform, Egyptian
        // hieroglyphs, then the rare ideographs.
        let letters = ('\u{14400}'..='\u{14646}')
            .chain('\u{12000}'..='\u{12399}')
            .chain('\u{13000}'..='\u{1342e}')
            .chain('\u{20000}'..='\u{2a6d6}')
            .chain('\u{30000}'..='\u{3134a}');
        let mut free = letters.filter(|c| !used.contains(c));
        match (free.next(), free.next()) {
            (Some(open), Some(close)) => Ok(Self { open, close }),
            _ => Err(ChatError::NoMark),
        }
    }

    /// Renders the marked context and compares it with the plain rendering.
    fn locate(
        self,
        template: &Template,
        marked: &Map<String, Value>,
        plain: &str,
        cores: &HashSet<String>,
    ) -> Result<Vec<Range<usize>>, ChatError> {
        if cores.is_empty() {
            return Ok(Vec::new());
        }
        let rendered = self.unescape(template.render(marked)?);
        let (text, ranges) = self.strip(&rendered)?;
        if text != plain {
            return Err(reshaped("without its marks the rendering differs"));
        }
        let mut escaped: Option<HashSet<String>> = None;
        for range in &ranges {
            let piece = text.get(range.clone()).unwrap_or_default();
            let known = cores.contains(piece)
                || escaped.get_or_insert_with(|| escapes(cores)).contains(piece);
            if !known {
                return Err(reshaped("a marked stretch is not the text that was marked"));
            }
        }
        Ok(ranges)
    }

    /// `json.dumps(ensure_ascii=True)` writes the marks as escapes: back to letters.
    fn unescape(self, text: String) -> String {
        let mut text = text;
        for mark in [self.open, self.close] {
            let mut quoted = String::new();
            json_string(&mut quoted, mark.encode_utf8(&mut [0; 4]), true);
            let escape = quoted.trim_matches('"');
            if text.contains(escape) {
                text = text.replace(escape, mark.encode_utf8(&mut [0; 4]));
            }
        }
        text
    }

    /// The text without marks, and the ranges that they enclosed.
    fn strip(self, marked: &str) -> Result<(String, Vec<Range<usize>>), ChatError> {
        let mut text = String::with_capacity(marked.len());
        let mut ranges = Vec::new();
        let mut open = None;
        for c in marked.chars() {
            if c == self.open {
                if open.replace(text.len()).is_some() {
                    return Err(reshaped("marks nest"));
                }
            } else if c == self.close {
                let start = open.take().ok_or_else(|| reshaped("a mark lost its partner"))?;
                ranges.push(start..text.len());
            } else {
                text.push(c);
            }
        }
        if open.is_some() {
            return Err(reshaped("a mark lost its partner"));
        }
        Ok((text, ranges))
    }
}

fn reshaped(detail: &str) -> ChatError {
    ChatError::Reshaped { detail: detail.to_owned() }
}

/// Every way in which the strings may be printed other than as they are.
fn escapes(cores: &HashSet<String>) -> HashSet<String> {
    let mut out = HashSet::new();
    let inner = |quoted: String| {
        let mut chars = quoted.chars();
        chars.next();
        chars.next_back();
        chars.as_str().to_owned()
    };
    for core in cores {
        for ensure_ascii in [false, true] {
            let mut quoted = String::new();
            json_string(&mut quoted, core, ensure_ascii);
            out.insert(inner(quoted));
        }
        let mut quoted = String::new();
        string_repr(&mut quoted, core);
        out.insert(inner(quoted));
    }
    out
}

fn visit_strings(value: &Value, note: &mut impl FnMut(&str)) {
    match value {
        Value::String(text) => note(text),
        Value::Array(items) => items.iter().for_each(|item| visit_strings(item, note)),
        Value::Object(map) => map.iter().for_each(|(key, item)| {
            note(key);
            visit_strings(item, note);
        }),
        _ => {}
    }
}

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

struct Marker<'a> {
    marks: Marks,
    wanted: &'a dyn Fn(&str) -> bool,
    /// The marked strings, without the whitespace at their ends.
    cores: HashSet<String>,
}

impl Marker<'_> {
    fn context(
        &mut self,
        context: &Map<String, Value>,
        system: &[Range<usize>],
    ) -> Map<String, Value> {
        context
            .iter()
            .map(|(key, value)| {
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
                (key.clone(), value)
            })
            .collect()
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
        if core.is_empty() || !(self.wanted)(core) {
            return text.to_owned();
        }
        let (head, tail) = (&text[..text.len() - left.len()], &left[core.len()..]);
        let mut out = String::with_capacity(text.len() + 8);
        out.push_str(head);
        out.push(self.marks.open);
        out.push_str(core);
        out.push(self.marks.close);
        out.push_str(tail);
        if !self.cores.contains(core) {
            self.cores.insert(core.to_owned());
        }
        out
    }
}
