//! JSON as recipes and data sets are read: a key that stands twice is refused, not silently
//! overwritten; and the one canonical text that digests are made of.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{Error as _, MapAccess, SeqAccess, Visitor},
};
use serde_json::{Map, Number, Value};

/// Text that is not JSON, with line and column.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not valid JSON: {0}")]
pub struct JsonError(String);

/// Reads one JSON value.
///
/// # Errors
/// The text is not JSON, starts with a byte order mark, is nested deeper than 127 levels, or has an object with a repeated key.
pub fn parse(text: &[u8]) -> Result<Value, JsonError> {
    if text.starts_with(b"\xef\xbb\xbf") {
        return Err(JsonError(
            "it starts with a byte order mark; save it as UTF-8 without one".into(),
        ));
    }
    match serde_json::from_slice::<Strict>(text) {
        Ok(Strict(value)) => Ok(value),
        Err(error) => Err(JsonError(error.to_string())),
    }
}

/// Compact JSON with the keys of every object sorted bytewise: equal values have equal texts.
pub fn canonical(value: &Value) -> String {
    sorted(value).to_string()
}

fn sorted(value: &Value) -> Value {
    match value {
        Value::Array(items) => items.iter().map(sorted).collect(),
        Value::Object(object) => {
            let mut entries: Vec<(&String, &Value)> = object.iter().collect();
            entries.sort_unstable_by(|a, b| a.0.cmp(b.0));
            let entries = entries.into_iter().map(|(key, value)| (key.clone(), sorted(value)));
            Value::Object(entries.collect())
        }
        plain => plain.clone(),
    }
}

/// A JSON value for a message: one line of at most 60 characters.
pub(crate) fn shown(value: &Value) -> String {
    clipped(&value.to_string())
}

/// A text for a message: at most 60 characters.
pub(crate) fn clipped(text: &str) -> String {
    if text.chars().count() <= 60 {
        return text.to_owned();
    }
    text.chars().take(57).chain("...".chars()).collect()
}

struct Strict(Value);

impl<'de> Deserialize<'de> for Strict {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(StrictVisitor).map(Self)
    }
}

struct StrictVisitor;

impl<'de> Visitor<'de> for StrictVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(Value::String(value))
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut array = Vec::new();
        while let Some(Strict(item)) = items.next_element()? {
            array.push(item);
        }
        Ok(Value::Array(array))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            if object.contains_key(&key) {
                return Err(A::Error::custom(format!("the key {:?} stands twice", clipped(&key))));
            }
            let Strict(value) = entries.next_value()?;
            object.insert(key, value);
        }
        Ok(Value::Object(object))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_are_read_as_serde_json_reads_them() {
        let text =
            r#"{"b": [1, -2, 3.5, 18446744073709551615], "a": {"x": null, "y": true, "z": "ü"}}"#;
        let plain: Value = serde_json::from_str(text).expect("JSON");
        assert_eq!(parse(text.as_bytes()).expect("JSON"), plain);
        assert_eq!(parse(text.as_bytes()).expect("JSON").to_string(), plain.to_string());
    }

    #[test]
    fn repeated_keys_are_refused_at_any_depth_with_their_place() {
        let error = parse(b"{\"a\": [{\n\"k\": 1, \"k\": 2}]}").expect_err("refused").to_string();
        assert_eq!(error, r#"not valid JSON: the key "k" stands twice at line 2 column 11"#);
    }

    #[test]
    fn hostile_texts_get_an_error() {
        let deep = "[".repeat(100_000);
        for text in [deep.as_str(), "", "{", "NaN", "1e400", "{\"a\":1}x", "\"\\ud800\""] {
            let error = parse(text.as_bytes()).expect_err(text).to_string();
            assert!(error.len() < 200 && !error.contains('\n'), "{error}");
        }
        assert!(parse(b"\"\xff\"").is_err());
    }

    #[test]
    fn the_canonical_text_does_not_depend_on_the_order_of_keys() {
        let (a, b) = (
            json!({"x": {"b": 1, "a": [2]}, "c": 0.00001}),
            json!({"c": 1e-5, "x": {"a": [2], "b": 1}}),
        );
        assert_eq!(canonical(&a), canonical(&b));
        assert_eq!(canonical(&a), r#"{"c":0.00001,"x":{"a":[2],"b":1}}"#);
    }
}
