//! The methods of Python's `str` and `list` that chat templates call.
//!
//! What is not here falls back to `minijinja_contrib::pycompat`.

use std::borrow::Cow;

use minijinja::{
    Error, ErrorKind, State, Value,
    value::{Kwargs, ValueKind, from_args},
};

use super::{
    filters::iterate,
    marks::MARKS,
    python::{is_space, type_name},
};

pub(super) fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// Calls a method of a string or a list.
pub(super) fn method(
    state: &State,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let ours = match value.kind() {
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default();
            match name {
                "startswith" | "endswith" => Some(affix(&without_marks(state, text), name, args)?),
                _ => string_method(text, name, args)?,
            }
        }
        ValueKind::Seq | ValueKind::Iterable => list_method(value, name, args)?,
        _ => None,
    };
    match ours {
        Some(result) => Ok(result),
        None => minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args),
    }
}

fn list_method(value: &Value, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    match name {
        "index" => {
            let (what,): (&Value,) = from_args(args)?;
            match value.try_iter()?.position(|item| item == *what) {
                Some(index) => Ok(Some(Value::from(index))),
                None => Err(invalid("value is not in list")),
            }
        }
        "count" => {
            let (what,): (&Value,) = from_args(args)?;
            Ok(Some(Value::from(value.try_iter()?.filter(|item| item == what).count())))
        }
        // The sandbox that transformers renders in forbids these.
        "append" | "extend" | "insert" | "pop" | "remove" | "clear" | "sort" | "reverse" => {
            Err(invalid(format!("access to attribute '{name}' of 'list' object is unsafe")))
        }
        _ => Ok(None),
    }
}

/// `text` without the given characters (whitespace if none) at its ends.
pub(super) fn strip<'a>(text: &'a str, chars: Option<&str>, left: bool, right: bool) -> &'a str {
    let matches = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let text = if left { text.trim_start_matches(matches) } else { text };
    if right { text.trim_end_matches(matches) } else { text }
}

/// An optional string argument, where `None` counts as absent.
fn text_argument(args: &[Value], index: usize) -> Result<Option<&str>, Error> {
    match args.get(index) {
        None => Ok(None),
        Some(value) if value.is_none() => Ok(None),
        Some(value) => value
            .as_str()
            .map(Some)
            .ok_or_else(|| invalid(format!("expected str, got {}", type_name(value)))),
    }
}

fn required<'a>(args: &'a [Value], name: &str) -> Result<&'a str, Error> {
    text_argument(args, 0)?.ok_or_else(|| invalid(format!("{name}: expected a str argument")))
}

fn string_method(text: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match name {
        "strip" => Value::from(strip(text, text_argument(args, 0)?, true, true)),
        "lstrip" => Value::from(strip(text, text_argument(args, 0)?, true, false)),
        "rstrip" => Value::from(strip(text, text_argument(args, 0)?, false, true)),
        "split" => split(text, args, false)?,
        "rsplit" => split(text, args, true)?,
        "splitlines" => {
            let keep = args.first().is_some_and(Value::is_true);
            strings(&split_lines(text, keep))
        }
        "partition" => {
            let sep = separator(required(args, name)?)?;
            let (head, sep, tail) =
                text.split_once(sep).map_or((text, "", ""), |(head, tail)| (head, sep, tail));
            strings(&[head, sep, tail])
        }
        "rpartition" => {
            let sep = separator(required(args, name)?)?;
            let (head, sep, tail) =
                text.rsplit_once(sep).map_or(("", "", text), |(head, tail)| (head, sep, tail));
            strings(&[head, sep, tail])
        }
        "removeprefix" => Value::from(text.strip_prefix(required(args, name)?).unwrap_or(text)),
        "removesuffix" => Value::from(text.strip_suffix(required(args, name)?).unwrap_or(text)),
        "find" => {
            position(text, text.find(required(args, name)?)).map_or(Value::from(-1), Value::from)
        }
        "rfind" => {
            position(text, text.rfind(required(args, name)?)).map_or(Value::from(-1), Value::from)
        }
        "index" => match position(text, text.find(required(args, name)?)) {
            Some(index) => Value::from(index),
            None => return Err(invalid("substring not found")),
        },
        "count" => {
            let what = required(args, name)?;
            Value::from(match what {
                "" => text.chars().count() + 1,
                what => text.matches(what).count(),
            })
        }
        "isspace" => Value::from(!text.is_empty() && text.chars().all(is_space)),
        "isdigit" | "isnumeric" | "isdecimal" => {
            Value::from(!text.is_empty() && text.chars().all(char::is_numeric))
        }
        "isalpha" => Value::from(!text.is_empty() && text.chars().all(char::is_alphabetic)),
        "isalnum" => Value::from(!text.is_empty() && text.chars().all(char::is_alphanumeric)),
        "isupper" | "islower" => {
            let (upper, lower) =
                (text.chars().any(char::is_uppercase), text.chars().any(char::is_lowercase));
            Value::from(if name == "isupper" { upper && !lower } else { lower && !upper })
        }
        "capitalize" => Value::from(capitalize(text)),
        "title" => Value::from(title(text)),
        "zfill" => {
            let (width,): (usize,) = from_args(args)?;
            let missing = width.min(1 << 16).saturating_sub(text.chars().count());
            let (sign, digits) = match text.strip_prefix(['+', '-']) {
                Some(rest) => (&text[..1], rest),
                None => ("", text),
            };
            Value::from(format!("{sign}{}{digits}", "0".repeat(missing)))
        }
        "join" => {
            let (items,): (&Value,) = from_args(args)?;
            let mut parts = Vec::new();
            for item in iterate(items)? {
                match item.as_str() {
                    Some(part) => parts.push(part.to_owned()),
                    None => {
                        return Err(invalid(format!(
                            "sequence item {}: expected str instance, {} found",
                            parts.len(),
                            type_name(&item)
                        )));
                    }
                }
            }
            Value::from(parts.join(text))
        }
        _ => return Ok(None),
    }))
}

fn strings(parts: &[&str]) -> Value {
    parts.iter().map(|part| Value::from(*part)).collect()
}

fn separator(sep: &str) -> Result<&str, Error> {
    if sep.is_empty() { Err(invalid("empty separator")) } else { Ok(sep) }
}

/// A byte offset as a count of characters.
fn position(text: &str, byte: Option<usize>) -> Option<usize> {
    byte.and_then(|byte| text.get(..byte)).map(|head| head.chars().count())
}

/// The text as a question about its ends should see it: see [`super::marks`].
fn without_marks<'a>(state: &State, text: &'a str) -> Cow<'a, str> {
    match state.lookup(MARKS) {
        Some(marks) => {
            let is_mark = |c: char| marks.as_str().is_some_and(|marks| marks.contains(c));
            Cow::Owned(text.chars().filter(|c| !is_mark(*c)).collect())
        }
        None => Cow::Borrowed(text),
    }
}

fn affix(text: &str, name: &str, args: &[Value]) -> Result<Value, Error> {
    let (what,): (&Value,) = from_args(args)?;
    let test = |affix: &Value| match affix.as_str() {
        Some(affix) if name == "startswith" => Ok(text.starts_with(affix)),
        Some(affix) => Ok(text.ends_with(affix)),
        None => Err(invalid(format!(
            "{name} first arg must be str or a tuple of str, not {}",
            type_name(affix)
        ))),
    };
    if matches!(what.kind(), ValueKind::Seq | ValueKind::Iterable) {
        for affix in what.try_iter()? {
            if test(&affix)? {
                return Ok(Value::from(true));
            }
        }
        return Ok(Value::from(false));
    }
    test(what).map(Value::from)
}

fn split(text: &str, args: &[Value], from_right: bool) -> Result<Value, Error> {
    let (positional, kwargs): (&[Value], Kwargs) = from_args(args)?;
    let sep = match positional.first() {
        Some(_) => text_argument(positional, 0)?.map(str::to_owned),
        None => kwargs.get::<Option<String>>("sep")?,
    };
    let limit = match positional.get(1) {
        Some(limit) => i64::try_from(limit.clone())?,
        None => kwargs.get::<Option<i64>>("maxsplit")?.unwrap_or(-1),
    };
    kwargs.assert_all_used()?;
    let limit = usize::try_from(limit).unwrap_or(usize::MAX - 1);
    let parts: Vec<&str> = match (&sep, from_right) {
        (Some(sep), false) => text.splitn(limit + 1, separator(sep)?).collect(),
        (Some(sep), true) => {
            let mut parts: Vec<_> = text.rsplitn(limit + 1, separator(sep)?).collect();
            parts.reverse();
            parts
        }
        (None, false) => {
            let mut parts = Vec::new();
            let mut rest = text.trim_start_matches(is_space);
            while !rest.is_empty() {
                let end = if parts.len() < limit { rest.find(is_space) } else { None };
                let end = end.unwrap_or(rest.len());
                let (word, tail) = rest.split_at(end);
                parts.push(word);
                rest = tail.trim_start_matches(is_space);
            }
            parts
        }
        (None, true) => {
            let mut parts = Vec::new();
            let mut rest = text.trim_end_matches(is_space);
            while !rest.is_empty() {
                if parts.len() >= limit {
                    parts.push(rest);
                    break;
                }
                let start = rest
                    .char_indices()
                    .rev()
                    .find(|(_, c)| is_space(*c))
                    .map_or(0, |(i, c)| i + c.len_utf8());
                let (head, word) = rest.split_at(start);
                parts.push(word);
                rest = head.trim_end_matches(is_space);
            }
            parts.reverse();
            parts
        }
    };
    Ok(strings(&parts))
}

/// `str.splitlines`: at all of Python's line boundaries, `\r\n` being one.
fn split_lines(text: &str, keep: bool) -> Vec<&str> {
    let is_boundary = |c: char| {
        matches!(
            c,
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'
                ..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let mut lines = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find(is_boundary) {
        let mut next = at + rest.get(at..).and_then(|s| s.chars().next()).map_or(1, char::len_utf8);
        if rest.get(at..).is_some_and(|s| s.starts_with("\r\n")) {
            next = at + 2;
        }
        lines.push(&rest[..if keep { next } else { at }]);
        rest = &rest[next..];
    }
    if !rest.is_empty() {
        lines.push(rest);
    }
    lines
}

pub(super) fn capitalize(text: &str) -> String {
    let mut chars = text.chars();
    let head = chars.next().map(|c| c.to_uppercase().to_string()).unwrap_or_default();
    head + &chars.as_str().to_lowercase()
}

/// `str.title`: a letter after anything uncased becomes upper case, other letters lower case.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut in_word = false;
    for c in text.chars() {
        let cased = c.is_lowercase() || c.is_uppercase();
        if in_word {
            out.extend(c.to_lowercase());
        } else {
            let mut upper = c.to_uppercase();
            out.extend(upper.next());
            out.extend(upper.flat_map(char::to_lowercase));
        }
        in_word = cased;
    }
    out
}
