//! `<function=f><parameter=k>v</parameter></function>` between tool-call tags.
//!
//! The values are bare text; the tool's JSON schema says what they are. Linear: a block ends at the first
//! `</tool_call>` and nothing looks beyond it.

use protocol::ParsedCall;
use serde_json::{Map, Value};

use super::{
    super::json::{self, Json, Object},
    block, malformed,
};

const FUNCTION: &str = "<function=";
const END_FUNCTION: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const END_PARAMETER: &str = "</parameter>";

/// Reads the block whose text starts `body`; returns the call and the length up to its end.
pub(super) fn read(body: &str, schemas: &Map<String, Value>) -> (ParsedCall, usize) {
    let (inside, length) = block(body);
    let Some(inside) = inside else {
        return (malformed(body, "the block has no </tool_call>"), length);
    };
    match call(inside, schemas) {
        Ok(call) => (call, length),
        Err(reason) => (malformed(inside, reason), length),
    }
}

fn call(block: &str, schemas: &Map<String, Value>) -> Result<ParsedCall, &'static str> {
    let rest = block.trim_start().strip_prefix(FUNCTION).ok_or("the block has no <function=…>")?;
    let (name, mut rest) = tag_name(rest).ok_or("<function=…> is not closed")?;
    let properties = schemas.get(name).and_then(|schema| schema.get("properties"));
    let mut arguments = Object::default();
    loop {
        rest = rest.trim_start();
        if let Some(after) = rest.strip_prefix(END_FUNCTION) {
            if !after.trim().is_empty() {
                return Err("there is text after </function>");
            }
            break;
        }
        let after = rest
            .strip_prefix(PARAMETER)
            .ok_or("expected <parameter=…> or </function>, each on its own line")?;
        let (key, after) = tag_name(after).ok_or("<parameter=…> is not closed")?;
        let (value, after) = value(after).ok_or("a parameter has no </parameter>")?;
        let schema = properties.and_then(|p| p.get(key));
        arguments.insert(key.to_owned(), typed(value, schema));
        rest = after;
    }
    let mut text = String::new();
    arguments.write(&mut text);
    Ok(ParsedCall::Call { name: name.to_owned(), arguments: text })
}

/// The name up to `>`, which a newline or another tag must not interrupt.
fn tag_name(text: &str) -> Option<(&str, &str)> {
    let end = text.find(['>', '\n', '<'])?;
    Some((text.get(..end)?, text.get(end..)?.strip_prefix('>')?))
}

/// A parameter's text and what follows its end tag.
fn value(text: &str) -> Option<(&str, &str)> {
    let mut from = 0;
    loop {
        let end = from + text.get(from..)?.find(END_PARAMETER)?;
        let after = text.get(end + END_PARAMETER.len()..)?;
        let next = after.trim_start();
        if next.starts_with(PARAMETER) || next.starts_with(END_FUNCTION) {
            let value = text.get(..end)?;
            let value = value.strip_prefix('\n').unwrap_or(value);
            return Some((value.strip_suffix('\n').unwrap_or(value), after));
        }
        from = end + END_PARAMETER.len();
    }
}

/// The JSON types that a schema allows; all false where it names none.
#[derive(Clone, Copy, Default)]
struct Types {
    string: bool,
    number: bool,
    boolean: bool,
    array: bool,
    object: bool,
    null: bool,
}

impl Types {
    fn add(&mut self, schema: &Value, depth: usize) {
        if depth > 8 {
            return;
        }
        match schema.get("type") {
            Some(Value::String(name)) => self.name(name),
            Some(Value::Array(names)) => {
                names.iter().filter_map(Value::as_str).for_each(|name| self.name(name));
            }
            _ => {}
        }
        for key in ["anyOf", "oneOf", "allOf"] {
            for option in schema.get(key).and_then(Value::as_array).into_iter().flatten() {
                self.add(option, depth + 1);
            }
        }
        let members = schema.get("enum").and_then(Value::as_array).into_iter().flatten();
        if schema.get("type").is_none() {
            for member in members.chain(schema.get("const")) {
                match member {
                    Value::String(_) => self.string = true,
                    Value::Number(_) => self.number = true,
                    Value::Bool(_) => self.boolean = true,
                    Value::Array(_) => self.array = true,
                    Value::Object(_) => self.object = true,
                    Value::Null => self.null = true,
                }
            }
        }
        self.null |= schema.get("nullable").and_then(Value::as_bool).unwrap_or(false);
    }

    fn name(&mut self, name: &str) {
        match name {
            "string" => self.string = true,
            "integer" | "number" => self.number = true,
            "boolean" => self.boolean = true,
            "array" => self.array = true,
            "object" => self.object = true,
            "null" => self.null = true,
            _ => {}
        }
    }

    fn is_empty(self) -> bool {
        !(self.string || self.number || self.boolean || self.array || self.object)
    }
}

fn typed(text: &str, schema: Option<&Value>) -> Json {
    let mut types = Types::default();
    if let Some(schema) = schema {
        types.add(schema, 0);
    }
    let trimmed = text.trim();
    let as_text = || Json::String(text.to_owned());
    if types.null && matches!(trimmed, "null" | "None") {
        return Json::Null;
    }
    if types.string {
        return as_text();
    }
    let any = types.is_empty();
    if types.boolean && matches!(trimmed, "True" | "False") {
        return Json::Bool(trimmed == "True");
    }
    match json::parse(trimmed) {
        Ok(Json::String(_)) | Err(_) => as_text(),
        Ok(value) => {
            let fits = match &value {
                Json::Number(_) => types.number,
                Json::Bool(_) => types.boolean,
                Json::Array(_) => types.array,
                Json::Object(_) => types.object,
                Json::Null | Json::String(_) => false,
            };
            if fits || any { value } else { as_text() }
        }
    }
}
