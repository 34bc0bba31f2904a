//! Where a chat template comes from, and its rewriting for the template engine.
//!
//! Two things that Jinja2 as transformers sets it up knows and minijinja does not are rewritten in the
//! source: `{% generation %}` blocks (they only track positions for loss masks) become `{% with %}`
//! blocks, which scope alike, and every `{% for x in e %}` iterates over `e` through a filter that
//! refuses `None` as Python does.

use std::{fs, path::Path};

use serde_json::{Map, Value};

use super::{ChatError, filters::ITERABLE};

/// Files of chat settings larger than this are refused.
const MAX_TEXT_FILE: u64 = 16 << 20;

/// Reads a JSON object from `path`, or `None` where there is no such file.
pub(super) fn read_json(path: &Path) -> Result<Option<Map<String, Value>>, ChatError> {
    let Some(text) = read_text(path)? else { return Ok(None) };
    let bad = |detail: String| ChatError::File { path: path.to_owned(), detail };
    match serde_json::from_str(&text) {
        Ok(Value::Object(map)) => Ok(Some(map)),
        Ok(_) => Err(bad("not a JSON object".into())),
        Err(error) => Err(bad(format!("not JSON: {error}"))),
    }
}

/// Reads a text file, or `None` where there is none.
pub(super) fn read_text(path: &Path) -> Result<Option<String>, ChatError> {
    let bad = |detail: String| ChatError::File { path: path.to_owned(), detail };
    let size = match fs::metadata(path) {
        Ok(meta) => meta.len(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(bad(error.to_string())),
    };
    if size > MAX_TEXT_FILE {
        return Err(bad(format!("{size} bytes are more than the {MAX_TEXT_FILE} allowed here")));
    }
    fs::read_to_string(path).map(Some).map_err(|error| bad(error.to_string()))
}

/// The checkpoint's chat template: `chat_template.jinja`, else `tokenizer_config.json`'s
/// `chat_template`, a string or a list of named ones (`tool_use` where tools are given and it is there,
/// else `default`), else that of `chat_template.json`. Returns the text and where it was read.
pub(super) fn find_template(
    dir: &Path,
    config: &Map<String, Value>,
    with_tools: bool,
) -> Result<(String, String), ChatError> {
    let jinja = dir.join("chat_template.jinja");
    if let Some(text) = read_text(&jinja)? {
        return Ok((text, jinja.display().to_string()));
    }
    let path = dir.join("tokenizer_config.json");
    let bad = |detail: &str| ChatError::File { path: path.clone(), detail: detail.to_owned() };
    let origin = path.display().to_string();
    match config.get("chat_template") {
        Some(Value::String(text)) => Ok((text.clone(), origin)),
        Some(Value::Array(named)) => {
            let find = |name: &str| {
                named
                    .iter()
                    .find(|t| t.get("name").and_then(Value::as_str) == Some(name))
                    .and_then(|t| t.get("template").and_then(Value::as_str))
            };
            let text = if with_tools {
                find("tool_use").or_else(|| find("default"))
            } else {
                find("default")
            };
            let text =
                text.ok_or_else(|| bad("`chat_template` lists no template named `default`"))?;
            Ok((text.to_owned(), origin))
        }
        Some(_) => Err(bad("`chat_template` is neither a string nor a list of named templates")),
        None => {
            Err(bad("no `chat_template` here and no chat_template.jinja: add the model's template"))
        }
    }
}

/// Rewrites a template: see the module.
pub(super) fn rewrite(source: &str) -> String {
    let mut out = String::with_capacity(source.len() + 256);
    let mut rest = source;
    while let Some(at) = rest.find('{') {
        let (text, tail) = rest.split_at(at);
        out.push_str(text);
        let end = match tail.as_bytes().get(1) {
            Some(b'%') => tag_end(tail, "%}"),
            Some(b'{') => tag_end(tail, "}}"),
            Some(b'#') => tail.find("#}").map(|at| at + 2),
            _ => Some(1),
        };
        let Some(end) = end else {
            out.push_str(tail);
            return out;
        };
        let (tag, next) = tail.split_at(end);
        rest = next;
        match tag_word(tag) {
            "raw" => {
                let (raw, next) = rest.split_at(raw_end(rest));
                out.push_str(tag);
                out.push_str(raw);
                rest = next;
            }
            "generation" => out.push_str(&tag.replacen("generation", "with", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endwith", 1)),
            "for" => rewrite_for(&mut out, tag),
            _ => out.push_str(tag),
        }
    }
    out.push_str(rest);
    out
}

/// Offset of the `{% endraw %}` tag, or the text's end.
fn raw_end(text: &str) -> usize {
    let mut starts = text.match_indices("{%");
    starts.find(|(at, _)| tag_word(&text[*at..]) == "endraw").map_or(text.len(), |(at, _)| at)
}

/// The keyword of a `{% … %}` tag; empty for anything else.
fn tag_word(tag: &str) -> &str {
    let Some(inner) = tag.strip_prefix("{%") else { return "" };
    let inner = inner.trim_start_matches(['-', '+']).trim_start();
    let end = inner.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(inner.len());
    &inner[..end]
}

/// Offset after the `close` that ends the tag at the start of `tag`, strings skipped.
fn tag_end(tag: &str, close: &str) -> Option<usize> {
    let bytes = tag.as_bytes();
    let mut i = 2;
    let mut braces = 0usize;
    while i < bytes.len() {
        match bytes[i] {
            quote @ (b'"' | b'\'') => i = string_end(bytes, i, quote)?,
            b'}' if braces > 0 => {
                braces -= 1;
                i += 1;
            }
            b'{' => {
                braces += 1;
                i += 1;
            }
            _ if bytes[i..].starts_with(close.as_bytes()) => return Some(i + close.len()),
            _ => i += 1,
        }
    }
    None
}

/// Offset after the string literal that starts at `start`.
fn string_end(bytes: &[u8], start: usize, quote: u8) -> Option<usize> {
    let mut i = start + 1;
    while i < bytes.len() {
        match bytes[i] {
            b'\\' => i += 2,
            b if b == quote => return Some(i + 1),
            _ => i += 1,
        }
    }
    None
}

/// Writes `{% for x in (e)|iterable if … recursive %}` for a `for` tag; the tag itself where its parts
/// cannot be told apart (the engine will then say what is wrong with it).
fn rewrite_for(out: &mut String, tag: &str) {
    let Some((start, end)) = loop_expression(tag) else {
        out.push_str(tag);
        return;
    };
    out.push_str(&tag[..start]);
    out.push_str(" (");
    out.push_str(tag[start..end].trim());
    out.push_str(")|");
    out.push_str(ITERABLE);
    out.push(' ');
    out.push_str(&tag[end..]);
}

/// The byte range of the iterated expression inside a `for` tag.
fn loop_expression(tag: &str) -> Option<(usize, usize)> {
    let bytes = tag.as_bytes();
    let close = tag.len() - 2;
    let close = if bytes.get(close - 1) == Some(&b'-') || bytes.get(close - 1) == Some(&b'+') {
        close - 1
    } else {
        close
    };
    let mut i = tag.find("for")? + 3;
    let mut depth = 0usize;
    let mut start = None;
    while i < close {
        match bytes[i] {
            quote @ (b'"' | b'\'') => i = string_end(bytes, i, quote)?,
            b'(' | b'[' | b'{' => {
                depth += 1;
                i += 1;
            }
            b')' | b']' | b'}' => {
                depth = depth.checked_sub(1)?;
                i += 1;
            }
            b if b.is_ascii_alphabetic() || b == b'_' => {
                let word_start = i;
                while i < close && (bytes[i].is_ascii_alphanumeric() || bytes[i] == b'_') {
                    i += 1;
                }
                let attribute = tag[..word_start].trim_end().ends_with('.');
                if depth == 0 && !attribute {
                    match (&tag[word_start..i], start) {
                        ("in", None) => start = Some(i),
                        ("if" | "recursive", Some(start)) => return Some((start, word_start)),
                        _ => {}
                    }
                }
            }
            _ => i += 1,
        }
    }
    start.filter(|start| *start < close).map(|start| (start, close))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loops_go_through_the_filter_that_refuses_none() {
        let cases = [
            ("{% for x in y %}", "{% for x in (y)|rollcall_iterable %}"),
            (
                "{%- for a, b in y.items() if a in z -%}",
                "{%- for a, b in (y.items())|rollcall_iterable if a in z -%}",
            ),
            (
                "{% for x in [1 if a else 2] recursive %}",
                "{% for x in ([1 if a else 2])|rollcall_iterable recursive %}",
            ),
            ("{% for x in y.if['in %} '] %}", "{% for x in (y.if['in %} '])|rollcall_iterable %}"),
            (
                "{% for x %}{{ '{% for x in y %}' }}{# {% for x in y %} #}",
                "{% for x %}{{ '{% for x in y %}' }}{# {% for x in y %} #}",
            ),
        ];
        for (source, expected) in cases {
            let squeezed: Vec<String> =
                rewrite(source).split(' ').filter(|w| !w.is_empty()).map(str::to_owned).collect();
            let wanted: Vec<&str> = expected.split(' ').filter(|w| !w.is_empty()).collect();
            assert_eq!(squeezed, wanted, "{source}");
        }
    }

    #[test]
    fn generation_blocks_scope_and_raw_text_stays() {
        assert_eq!(rewrite("{%- generation -%}x{% endgeneration %}"), "{%- with -%}x{% endwith %}");
        let raw = "{% raw %}it's {% for x in y %} {{ {%- endraw %}{ {";
        assert_eq!(rewrite(raw), raw);
        for cut in [
            "{% for x in y",
            "{{ 'a",
            "{#",
            "{%",
            "{",
            "{% raw %}{%",
            "{%for%}",
            "{%-%}",
            "{% for in %}",
        ] {
            rewrite(cut);
        }
    }
}
