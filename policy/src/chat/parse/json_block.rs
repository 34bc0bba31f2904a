//! `{"name": …, "arguments": {…}}` between tool-call tags.
//!
//! The JSON reader says where the object ends, so strings may hold `</tool_call>`. Linear: a reader that
//! runs past a later `<tool_call>` is inside a string there, and the later block's own reader is not, so
//! of all the readers that fail at most two pass over any one character.

use protocol::ParsedCall;

use super::{
    super::json::{self, Json},
    CLOSE, block, malformed,
};

/// Reads the block whose text starts `body`; returns the call and the length up to its end.
pub(super) fn read(body: &str) -> (ParsedCall, usize) {
    let failed = |reason: String| {
        let (inside, length) = block(body);
        match inside {
            Some(inside) => (malformed(inside, reason), length),
            None => (malformed(body, "the block has no </tool_call>"), length),
        }
    };
    let (value, end) = match json::parse_prefix(body) {
        Ok(parsed) => parsed,
        Err(error) => {
            let head = body.get(..error.at).unwrap_or_default().trim_start();
            let place = head.chars().count();
            return failed(format!("the JSON is wrong at character {place}: {}", error.reason));
        }
    };
    let rest = body.get(end..).unwrap_or_default();
    let after = rest.trim_start();
    if !after.starts_with(CLOSE) {
        return failed("there is text after the JSON object".into());
    }
    let length = end + (rest.len() - after.len()) + CLOSE.len();
    match call(value) {
        Ok(call) => (call, length),
        Err(reason) => (malformed(body.get(..end).unwrap_or_default(), reason), length),
    }
}

fn call(value: Json) -> Result<ParsedCall, &'static str> {
    let Json::Object(object) = value else { return Err("the call is not a JSON object") };
    let name = match object.get("name") {
        Some(Json::String(name)) => name.clone(),
        Some(_) => return Err("\"name\" is not a string"),
        None => return Err("\"name\" is missing"),
    };
    let mut arguments = String::new();
    match object.get("arguments") {
        None | Some(Json::Null) => arguments.push_str("{}"),
        Some(Json::Object(map)) => map.write(&mut arguments),
        Some(Json::String(text)) => match json::parse(text) {
            Ok(Json::Object(map)) => map.write(&mut arguments),
            _ => return Err("\"arguments\" is a string that holds no JSON object"),
        },
        Some(_) => return Err("\"arguments\" is not an object"),
    }
    Ok(ParsedCall::Call { name, arguments })
}
