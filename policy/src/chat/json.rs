//! A strict JSON reader for what models write, and its canonical text.
//!
//! It differs from `serde_json` in three points that matter for evidence: it tells where a value ends (so
//! a call's arguments may contain any text), numbers keep the digits that were written, and duplicate
//! keys have a defined outcome (the last value, at the first one's place, as in Python). Its depth is
//! bounded, its time is linear in what it reads.

use std::collections::HashMap;

use super::python::json_string;

/// Arrays and objects nested deeper than this are refused.
pub const MAX_DEPTH: usize = 64;

/// A JSON value. Numbers are the text that was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Json {
    Null,
    Bool(bool),
    Number(String),
    String(String),
    Array(Vec<Json>),
    Object(Object),
}

/// An object: entries in the order of their keys' first appearance.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Object {
    entries: Vec<(String, Json)>,
    index: HashMap<String, usize>,
}

impl Object {
    pub(super) fn insert(&mut self, key: String, value: Json) {
        match self.index.get(&key).and_then(|i| self.entries.get_mut(*i)) {
            Some(entry) => entry.1 = value,
            None => {
                self.index.insert(key.clone(), self.entries.len());
                self.entries.push((key, value));
            }
        }
    }

    pub(super) fn get(&self, key: &str) -> Option<&Json> {
        self.index.get(key).and_then(|i| self.entries.get(*i)).map(|(_, value)| value)
    }

    pub(super) fn write(&self, out: &mut String) {
        out.push('{');
        for (i, (key, value)) in self.entries.iter().enumerate() {
            if i > 0 {
                out.push(',');
            }
            json_string(out, key, false);
            out.push(':');
            value.write(out);
        }
        out.push('}');
    }
}

impl Json {
    /// Appends the compact text: no spaces, keys in order, only the escapes that JSON asks for.
    pub(super) fn write(&self, out: &mut String) {
        match self {
            Self::Null => out.push_str("null"),
            Self::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
            Self::Number(text) => out.push_str(text),
            Self::String(text) => json_string(out, text, false),
            Self::Array(items) => {
                out.push('[');
                for (i, item) in items.iter().enumerate() {
                    if i > 0 {
                        out.push(',');
                    }
                    item.write(out);
                }
                out.push(']');
            }
            Self::Object(object) => object.write(out),
        }
    }
}

/// Why a text is not JSON: the place in bytes, and what is wrong there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct JsonError {
    pub(super) at: usize,
    pub(super) reason: &'static str,
}

/// Reads one value at the start of `text` (whitespace before it is skipped) and returns it with the byte
/// offset of its end.
pub(super) fn parse_prefix(text: &str) -> Result<(Json, usize), JsonError> {
    let mut reader = Reader { text, at: 0 };
    reader.skip_space();
    let value = reader.value(0)?;
    Ok((value, reader.at))
}

/// Reads `text` as one value with nothing but whitespace around it.
pub(super) fn parse(text: &str) -> Result<Json, JsonError> {
    let (value, end) = parse_prefix(text)?;
    let mut reader = Reader { text, at: end };
    reader.skip_space();
    if reader.at < text.len() {
        return Err(reader.fail("text after the value"));
    }
    Ok(value)
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
}

impl Reader<'_> {
    fn fail(&self, reason: &'static str) -> JsonError {
        JsonError { at: self.at, reason }
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn skip_space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn value(&mut self, depth: usize) -> Result<Json, JsonError> {
        if depth >= MAX_DEPTH {
            return Err(self.fail("nested too deep"));
        }
        match self.peek() {
            Some(b'{') => self.object(depth).map(Json::Object),
            Some(b'[') => self.array(depth).map(Json::Array),
            Some(b'"') => self.string().map(Json::String),
            Some(b'-' | b'0'..=b'9') => self.number().map(Json::Number),
            Some(b't') => self.word("true", Json::Bool(true)),
            Some(b'f') => self.word("false", Json::Bool(false)),
            Some(b'n') => self.word("null", Json::Null),
            Some(b'N' | b'I') => Err(self.fail("NaN and Infinity are not JSON")),
            Some(_) => Err(self.fail("expected a value")),
            None => Err(self.fail("ends in the middle of a value")),
        }
    }

    fn word(&mut self, word: &str, value: Json) -> Result<Json, JsonError> {
        let rest = self.text.as_bytes().get(self.at..).unwrap_or_default();
        if !rest.starts_with(word.as_bytes()) {
            return Err(self.fail("expected a value"));
        }
        self.at += word.len();
        Ok(value)
    }

    fn array(&mut self, depth: usize) -> Result<Vec<Json>, JsonError> {
        let mut items = Vec::new();
        self.at += 1;
        self.skip_space();
        if self.peek() == Some(b']') {
            self.at += 1;
            return Ok(items);
        }
        loop {
            self.skip_space();
            items.push(self.value(depth + 1)?);
            self.skip_space();
            match self.peek() {
                Some(b',') => self.at += 1,
                Some(b']') => {
                    self.at += 1;
                    return Ok(items);
                }
                Some(_) => return Err(self.fail("expected `,` or `]`")),
                None => return Err(self.fail("ends in the middle of an array")),
            }
        }
    }

    fn object(&mut self, depth: usize) -> Result<Object, JsonError> {
        let mut object = Object::default();
        self.at += 1;
        self.skip_space();
        if self.peek() == Some(b'}') {
            self.at += 1;
            return Ok(object);
        }
        loop {
            self.skip_space();
            match self.peek() {
                Some(b'"') => {}
                Some(_) => return Err(self.fail("expected a key in double quotes")),
                None => return Err(self.fail("ends in the middle of an object")),
            }
            let key = self.string()?;
            self.skip_space();
            if self.peek() != Some(b':') {
                return Err(self.fail("expected `:`"));
            }
            self.at += 1;
            self.skip_space();
            object.insert(key, self.value(depth + 1)?);
            self.skip_space();
            match self.peek() {
                Some(b',') => self.at += 1,
                Some(b'}') => {
                    self.at += 1;
                    return Ok(object);
                }
                Some(_) => return Err(self.fail("expected `,` or `}`")),
                None => return Err(self.fail("ends in the middle of an object")),
            }
        }
    }

    fn number(&mut self) -> Result<String, JsonError> {
        let start = self.at;
        let digits = |reader: &mut Self| {
            let from = reader.at;
            while matches!(reader.peek(), Some(b'0'..=b'9')) {
                reader.at += 1;
            }
            if reader.at == from {
                Err(reader.fail("expected a digit"))
            } else {
                Ok(reader.at - from)
            }
        };
        if self.peek() == Some(b'-') {
            self.at += 1;
        }
        let leading_zero = self.peek() == Some(b'0');
        if digits(self)? > 1 && leading_zero {
            return Err(JsonError { at: start, reason: "a number has a leading zero" });
        }
        if self.peek() == Some(b'.') {
            self.at += 1;
            digits(self)?;
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            self.at += 1;
            if matches!(self.peek(), Some(b'+' | b'-')) {
                self.at += 1;
            }
            digits(self)?;
        }
        let text = self.text.get(start..self.at).unwrap_or_default();
        match text.parse::<f64>() {
            Ok(value) if value.is_finite() => Ok(text.to_owned()),
            _ => Err(JsonError { at: start, reason: "a number is out of range" }),
        }
    }

    fn string(&mut self) -> Result<String, JsonError> {
        self.at += 1;
        let mut out = String::new();
        loop {
            let rest = self.text.get(self.at..).unwrap_or_default();
            let Some(stop) = rest.find(|c: char| matches!(c, '"' | '\\' | '\0'..='\u{1f}')) else {
                self.at = self.text.len();
                return Err(self.fail("ends in the middle of a string"));
            };
            out.push_str(&rest[..stop]);
            self.at += stop;
            match self.peek() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(out);
                }
                Some(b'\\') => self.escape(&mut out)?,
                _ => {
                    return Err(
                        self.fail("a raw control character in a string (write \\n for a newline)")
                    );
                }
            }
        }
    }

    fn escape(&mut self, out: &mut String) -> Result<(), JsonError> {
        self.at += 1;
        let plain = match self.peek() {
            Some(c @ (b'"' | b'\\' | b'/')) => char::from(c),
            Some(b'b') => '\u{8}',
            Some(b'f') => '\u{c}',
            Some(b'n') => '\n',
            Some(b'r') => '\r',
            Some(b't') => '\t',
            Some(b'u') => {
                self.at += 1;
                let high = self.hex4()?;
                let code = if (0xd800..0xdc00).contains(&high) {
                    if !self.text.as_bytes().get(self.at..).unwrap_or_default().starts_with(b"\\u")
                    {
                        return Err(self.fail("a lone surrogate escape"));
                    }
                    self.at += 2;
                    let low = self.hex4()?;
                    if !(0xdc00..0xe000).contains(&low) {
                        return Err(self.fail("a lone surrogate escape"));
                    }
                    0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00)
                } else {
                    high
                };
                out.push(char::from_u32(code).ok_or_else(|| self.fail("a lone surrogate escape"))?);
                return Ok(());
            }
            _ => return Err(self.fail("an unknown escape in a string")),
        };
        out.push(plain);
        self.at += 1;
        Ok(())
    }

    fn hex4(&mut self) -> Result<u32, JsonError> {
        let mut code = 0;
        for _ in 0..4 {
            let digit = self.peek().and_then(|b| char::from(b).to_digit(16));
            code = code * 16 + digit.ok_or_else(|| self.fail("\\u needs four hex digits"))?;
            self.at += 1;
        }
        Ok(code)
    }
}
