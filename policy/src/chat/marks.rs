//! Where untrusted text lies in a rendered template.
//!
//! The template is rendered twice: plainly, and with marks in every untrusted string. If the second
//! rendering without its marks is the first one, the marks tell which bytes are untrusted; otherwise the
//! template reshapes what it is given, and it is refused rather than guessed at. Three rules make
//! ordinary templates pass:
//!
//! - marks go inside the whitespace at a string's ends, so that `trim` and `strip` work as before, and a
//!   string that is empty or all whitespace is not marked, so that tests for emptiness do. Such
//!   whitespace counts as scaffold; no control token has any;
//! - marks are letters that occur in none of the texts (letters, so that `repr` and `json.dumps` print
//!   them as they are), the same two for all strings, so that equal strings stay equal;
//! - what stands between two marks must be the string itself or its JSON or `repr` escape.
//!
//! The methods `startswith` and `endswith` do not see the marks, so a template may ask whether a message
//! is a `<tool_response>`. Where the renderings still differ, a second attempt marks only strings that
//! have a sign of control tokens (such as `<` or `|`) or are a piece of one: whatever a template does with
//! the others, no control token comes of it, and it may compare a tool's name or cut a description.

use std::{
    collections::{BTreeSet, HashSet},
    ops::Range,
};

use serde_json::{Map, Value};

use super::{
    ChatError, ChatTokenizer, Template,
    python::{json_string, string_repr},
    untrusted::Marker,
};

/// The variable of a marked context that holds the two marks.
pub(super) const MARKS: &str = "rollcall_marks";

/// A rendered template and the byte ranges of it that are untrusted text, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    /// The text, as Python renders it.
    pub text: String,
    /// Byte ranges of `text`, sorted and disjoint.
    pub untrusted: Vec<Range<usize>>,
}

impl Rendered {
    /// Renders `context` (`messages`, `tools`, …) and finds its untrusted text: what user and tool
    /// messages say, every string of the tools, and of a leading system message the byte ranges `system`.
    ///
    /// # Errors
    /// [`ChatError::Render`] where Python raises, [`ChatError::Reshaped`] where the template does more
    /// with untrusted text than print it.
    pub fn new(
        template: &Template,
        tokenizer: &ChatTokenizer,
        context: &Map<String, Value>,
        system: &[Range<usize>],
    ) -> Result<Self, ChatError> {
        let text = template.render(context)?;
        let marks = Marks::choose(template.source(), context)?;
        let mut problem = None;
        for only_dangerous in [false, true] {
            let (mut marked, strings) =
                Marker::new(marks, tokenizer, only_dangerous).mark(context, system);
            marked
                .insert(MARKS.into(), Value::String(String::from_iter([marks.open, marks.close])));
            match marks.locate(template, &marked, &text, &strings) {
                Ok(untrusted) => return Ok(Self { text, untrusted }),
                Err(error @ (ChatError::Reshaped { .. } | ChatError::Render { .. })) => {
                    problem.get_or_insert(error);
                }
                Err(error) => return Err(error),
            }
        }
        Err(match problem {
            // Python would not raise on the unmarked conversation: the marks are at fault.
            Some(ChatError::Render { detail }) => ChatError::Reshaped { detail },
            Some(error) => error,
            None => reshaped("no placement of marks was tried"),
        })
    }
}

/// The two letters that enclose untrusted text.
#[derive(Clone, Copy, Debug)]
pub(super) struct Marks {
    pub(super) open: char,
    pub(super) close: char,
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
        // Scripts without case that few write: Anatolian hieroglyphs, cuneiform, Egyptian
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

    /// Renders the marked context, compares it with the plain rendering and returns the ranges of the
    /// marked strings.
    fn locate(
        self,
        template: &Template,
        marked: &Map<String, Value>,
        plain: &str,
        strings: &HashSet<String>,
    ) -> Result<Vec<Range<usize>>, ChatError> {
        if strings.is_empty() {
            return Ok(Vec::new());
        }
        let rendered = self.unescape(template.render(marked)?);
        let (text, ranges) = self.strip(&rendered)?;
        if text != plain {
            return Err(reshaped("without its marks the rendering differs"));
        }
        let mut forms: Option<HashSet<String>> = None;
        for range in &ranges {
            let piece = text.get(range.clone()).unwrap_or_default();
            let known = strings.contains(piece)
                || forms.get_or_insert_with(|| escapes(strings)).contains(piece);
            if !known {
                return Err(reshaped("a marked stretch is not what was marked"));
            }
        }
        Ok(ranges)
    }

    /// `json.dumps(ensure_ascii=True)` writes the marks as escapes: back to letters.
    fn unescape(self, text: String) -> String {
        let mut text = text;
        for mark in [self.open, self.close] {
            let letter = mark.to_string();
            let escape = json_escape(&letter, true);
            if text.contains(&escape) {
                text = text.replace(&escape, &letter);
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
fn escapes(strings: &HashSet<String>) -> HashSet<String> {
    let mut out = HashSet::new();
    for text in strings {
        out.insert(json_escape(text, false));
        out.insert(json_escape(text, true));
        out.insert(inner(|out| string_repr(out, text)));
    }
    out
}

fn json_escape(text: &str, ensure_ascii: bool) -> String {
    inner(|out| json_string(out, text, ensure_ascii))
}

/// What a printer writes, without the quotes at its ends.
fn inner(print: impl Fn(&mut String)) -> String {
    let mut quoted = String::new();
    print(&mut quoted);
    let mut chars = quoted.chars();
    chars.next();
    chars.next_back();
    chars.as_str().to_owned()
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
