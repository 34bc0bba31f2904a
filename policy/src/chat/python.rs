//! Template values as Python prints them: `str`, `repr` and `json.dumps`.
//!
//! Chat templates are written for Jinja2, where `{{ x }}` is `str(x)` and `tojson` is `json.dumps`
//! without HTML escapes. Token streams must be the same to the byte, so these rules are spelled out
//! here instead of using the template engine's own. Rules: CPython 3.11 `float.__repr__`,
//! `str.__repr__` and `json.encoder`.

use std::fmt::Write;

use minijinja::{
    Error, ErrorKind, Value,
    value::{Kwargs, Rest, ValueKind, from_args},
};

use super::ChatError;

/// Containers nested deeper than this are refused rather than printed.
const MAX_DEPTH: usize = 256;

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// Python's name of a value's type, for messages.
pub(super) fn type_name(value: &Value) -> &'static str {
    match value.kind() {
        ValueKind::Undefined => "Undefined",
        ValueKind::None => "NoneType",
        ValueKind::Bool => "bool",
        ValueKind::Number if value.is_integer() => "int",
        ValueKind::Number => "float",
        ValueKind::String => "str",
        ValueKind::Bytes => "bytes",
        ValueKind::Seq | ValueKind::Iterable => "list",
        ValueKind::Map => "dict",
        _ => "object",
    }
}

/// `repr(float)`: the shortest digits that read back, positional from 1e-4 up to 1e16.
pub(super) fn float_repr(x: f64) -> String {
    if x.is_nan() {
        return "nan".into();
    }
    if x.is_infinite() {
        return if x > 0.0 { "inf".into() } else { "-inf".into() };
    }
    let scientific = format!("{x:e}");
    let Some((mantissa, exponent)) = scientific.split_once('e') else { return scientific };
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if x == 0.0 || (-4..16).contains(&exponent) {
        let positional = format!("{x}");
        return if positional.contains('.') { positional } else { positional + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{mantissa}e{sign}{:02}", exponent.abs())
}

fn number(value: &Value) -> Result<String, Error> {
    if value.is_integer() {
        Ok(value.to_string())
    } else {
        Ok(float_repr(f64::try_from(value.clone())?))
    }
}

/// `str(value)`, with Jinja's undefined as the empty string.
pub(super) fn to_str(value: &Value) -> Result<String, Error> {
    if let Some(text) = value.as_str() {
        return Ok(text.to_owned());
    }
    if value.is_undefined() {
        return Ok(String::new());
    }
    let mut out = String::new();
    repr(&mut out, value, 0)?;
    Ok(out)
}

fn repr(out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(invalid("a value is nested too deep to print"));
    }
    match value.kind() {
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => out.push_str(&number(value)?),
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::String => string_repr(out, value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            for (i, item) in value.try_iter()?.enumerate() {
                if i > 0 {
                    out.push_str(", ");
                }
                repr(out, &item, depth + 1)?;
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter()?.enumerate() {
                if i > 0 {
                    out.push_str(", ");
                }
                repr(out, &key, depth + 1)?;
                out.push_str(": ");
                repr(out, &value.get_item(&key)?, depth + 1)?;
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
    Ok(())
}

/// `repr(str)`: single quotes unless the text has them and no double ones; unprintables escaped.
pub(super) fn string_repr(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    let mut probe = String::new();
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            ' '..='~' => out.push(c),
            c => {
                // `str::escape_debug` knows which characters print; combining marks count as such
                // only after another character, as here.
                probe.clear();
                probe.push('a');
                probe.push(c);
                let printable = probe.escape_debug().eq(probe.chars());
                if printable {
                    out.push(c);
                } else {
                    let code = u32::from(c);
                    let _ = match code {
                        0..=0xff => write!(out, "\\x{code:02x}"),
                        0x100..=0xffff => write!(out, "\\u{code:04x}"),
                        _ => write!(out, "\\U{code:08x}"),
                    };
                }
            }
        }
    }
    out.push(quote);
}

/// Appends `text` as a JSON string in quotes, as `json.dumps` does.
pub(super) fn json_string(out: &mut String, text: &str, ensure_ascii: bool) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            '\0'..='\u{1f}' => drop(write!(out, "\\u{:04x}", u32::from(c))),
            ' '..='~' => out.push(c),
            c if ensure_ascii => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

/// The keyword arguments of the `tojson` filter.
struct Dumps {
    ensure_ascii: bool,
    /// The text of one level of indentation; `None` prints on one line.
    indent: Option<String>,
    item: String,
    key: String,
    sort_keys: bool,
}

impl Dumps {
    fn new(args: &[Value]) -> Result<Self, Error> {
        let (positional, kwargs): (&[Value], Kwargs) = from_args(args)?;
        let argument = |index: usize, name: &str| -> Result<Option<Value>, Error> {
            match positional.get(index) {
                Some(value) => Ok(Some(value.clone())),
                None if kwargs.has(name) => kwargs.get::<Value>(name).map(Some),
                None => Ok(None),
            }
        };
        let ensure_ascii = argument(0, "ensure_ascii")?.is_some_and(|v| v.is_true());
        let indent = match argument(1, "indent")? {
            Some(v) if v.kind() == ValueKind::String => {
                Some(v.as_str().unwrap_or_default().to_owned())
            }
            Some(v) if matches!(v.kind(), ValueKind::Number | ValueKind::Bool) => {
                let width = i64::try_from(v)?.clamp(0, 64);
                Some(" ".repeat(usize::try_from(width).unwrap_or(0)))
            }
            _ => None,
        };
        let (mut item, mut key) =
            (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned());
        if let Some(pair) = argument(2, "separators")?.filter(|v| !v.is_none()) {
            let parts: Vec<Value> = pair.try_iter()?.collect();
            match parts.as_slice() {
                [a, b] if a.as_str().is_some() && b.as_str().is_some() => {
                    item = a.as_str().unwrap_or_default().to_owned();
                    key = b.as_str().unwrap_or_default().to_owned();
                }
                _ => return Err(invalid("tojson: separators are a pair of strings")),
            }
        }
        let sort_keys = argument(3, "sort_keys")?.is_some_and(|v| v.is_true());
        kwargs.assert_all_used()?;
        Ok(Self { ensure_ascii, indent, item, key, sort_keys })
    }

    fn newline(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            for _ in 0..depth {
                out.push_str(indent);
            }
        }
    }

    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(invalid("a value is nested too deep for tojson"));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&json_number(value)?),
            ValueKind::String => {
                json_string(out, value.as_str().unwrap_or_default(), self.ensure_ascii)
            }
            ValueKind::Seq | ValueKind::Iterable => {
                let mut empty = true;
                out.push('[');
                for item in value.try_iter()? {
                    if !empty {
                        out.push_str(&self.item);
                    }
                    empty = false;
                    self.newline(out, depth + 1);
                    self.write(out, &item, depth + 1)?;
                }
                if !empty {
                    self.newline(out, depth);
                }
                out.push(']');
            }
            ValueKind::Map => {
                let mut entries = Vec::new();
                for key in value.try_iter()? {
                    entries.push((self.key_text(&key)?, value.get_item(&key)?));
                }
                if self.sort_keys {
                    entries.sort_by(|a, b| a.0.cmp(&b.0));
                }
                out.push('{');
                for (i, (key, item)) in entries.iter().enumerate() {
                    if i > 0 {
                        out.push_str(&self.item);
                    }
                    self.newline(out, depth + 1);
                    json_string(out, key, self.ensure_ascii);
                    out.push_str(&self.key);
                    self.write(out, item, depth + 1)?;
                }
                if !entries.is_empty() {
                    self.newline(out, depth);
                }
                out.push('}');
            }
            _ => {
                return Err(invalid(format!(
                    "Object of type {} is not JSON serializable",
                    type_name(value)
                )));
            }
        }
        Ok(())
    }

    fn key_text(&self, key: &Value) -> Result<String, Error> {
        match key.kind() {
            ValueKind::String => Ok(key.as_str().unwrap_or_default().to_owned()),
            ValueKind::None => Ok("null".into()),
            ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.into()),
            ValueKind::Number => json_number(key),
            _ => Err(invalid("keys must be str, int, float, bool or None")),
        }
    }
}

fn json_number(value: &Value) -> Result<String, Error> {
    Ok(match number(value)?.as_str() {
        "nan" => "NaN".into(),
        "inf" => "Infinity".into(),
        "-inf" => "-Infinity".into(),
        text => text.to_owned(),
    })
}

/// The `tojson` filter of transformers: `json.dumps(x, ensure_ascii=False, …)`.
pub(super) fn tojson(value: &Value, args: Rest<Value>) -> Result<Value, Error> {
    let dumps = Dumps::new(&args)?;
    let mut out = String::new();
    dumps.write(&mut out, value, 0)?;
    Ok(Value::from(out))
}

/// `json.dumps(value, ensure_ascii=False)`.
pub(super) fn dumps(value: &serde_json::Value) -> Result<String, ChatError> {
    tojson(&Value::from_serialize(value), Rest(Vec::new()))
        .and_then(|text| to_str(&text))
        .map_err(|error| ChatError::Render { detail: error.to_string() })
}

/// Whitespace as `str.strip` and `str.split` see it.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}
