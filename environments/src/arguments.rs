//! Do a call's arguments fit the tool's schema? The one table of what is accepted and what is turned
//! into what. It is a pure function of schema and text, so replay decides the same.
//!
//! The text must be one JSON object, nested at most 127 levels deep. `NaN`, `Infinity` and numbers
//! beyond a double (`1e400`) are not JSON; of a repeated key the last value counts, as in Python's
//! `json`.
//!
//! | schema | accepted as it is | turned into what the schema says | refused |
//! |---|---|---|---|
//! | `integer` | integers from -2^63 to 2^63 - 1 | `5.0`, `1e3` → 5, 1000 (no fraction, at most 2^53 in size); `"5"`, `"-5"` → 5, -5 (digits without leading zeros, blanks or `+`, in range) | `5.5`, `true`, `"5.0"`, `" 5"`, 2^63 |
//! | `number` | numbers | `"5"`, `"-2.5e3"` (a JSON number as text, finite) | `true`, `"NaN"`, `"1e400"` |
//! | `boolean` | `true`, `false` | `"true"`, `"false"` | `1`, `0`, `"True"` |
//! | `string` | texts | nothing | numbers, booleans: their spelling is not unique |
//! | `array` | arrays; items by `items` | each item by this table | texts that hold an array |
//! | `object` | objects; values by `properties`, `additionalProperties` | each value by this table | texts that hold an object |
//! | `null`, `nullable: true`, `null` in a list of types | `null` | nothing | |
//! | a list of types, `anyOf`, `oneOf` | what fits one of them as it is | else by the first that turns it into something that fits | |
//! | `enum`, `const` | one of the values, compared after the type has been applied | | all else |
//! | no `type` | everything | nothing | |
//!
//! Keys: one that `required` lists must be there. A key that `properties` does not list is refused,
//! as a Python function refuses it, unless `additionalProperties` is `true` or a schema; an object
//! schema without `properties` below the top accepts all keys. Absent optional keys stay absent.
//! Other keywords (bounds, lengths, patterns, references) are the tool's own business.

use std::fmt;

use serde_json::{Map, Number, Value};

use crate::{ToolSpec, fields::shown};

/// Arguments that do not fit; what the policy is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadArguments(String);

impl fmt::Display for BadArguments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BadArguments {}

/// The arguments that `tool` is called with for the text `arguments`, by the table above.
///
/// # Errors
/// They do not fit: the message names the argument, what it must be and what it is.
pub fn fit(tool: &ToolSpec, arguments: &str) -> Result<Map<String, Value>, BadArguments> {
    let value: Value = serde_json::from_str(arguments)
        .map_err(|error| BadArguments(format!("the arguments are not valid JSON: {error}")))?;
    let Value::Object(object) = value else {
        return Err(BadArguments(format!(
            "the arguments must be a JSON object, not {}",
            shown(&value)
        )));
    };
    fit_object(&tool.parameters, object, "", false)
}

/// The largest integer up to which every integer is a double of its own.
const EXACT: f64 = 9_007_199_254_740_992.0;

fn fit_value(schema: &Value, value: Value, path: &str) -> Result<Value, BadArguments> {
    let schema = match schema {
        Value::Object(schema) => schema,
        Value::Bool(false) => return Err(wrong(path, "absent", &value)),
        _ => return Ok(value),
    };
    if value.is_null() && schema.get("nullable") == Some(&Value::Bool(true)) {
        return Ok(value);
    }
    let value = match schema.get("type") {
        Some(Value::String(kind)) => fit_type(kind, schema, value, path)?,
        Some(Value::Array(kinds)) => {
            let kinds: Vec<&str> = kinds.iter().filter_map(Value::as_str).collect();
            let expected = kinds.join(" or ");
            first_fit(kinds.iter(), &value, |kind| fit_type(kind, schema, value.clone(), path))
                .ok_or_else(|| wrong(path, &expected, &value))?
        }
        _ => value,
    };
    let mut value = value;
    for key in ["anyOf", "oneOf"] {
        if let Some(Value::Array(branches)) = schema.get(key) {
            value =
                first_fit(branches.iter(), &value, |branch| fit_value(branch, value.clone(), path))
                    .ok_or_else(|| wrong(path, "one of the schema's alternatives", &value))?;
        }
    }
    if let Some(Value::Array(allowed)) = schema.get("enum")
        && !allowed.contains(&value)
    {
        let listed: Vec<String> = allowed.iter().take(20).map(shown).collect();
        return Err(wrong(path, &format!("one of {}", listed.join(", ")), &value));
    }
    if let Some(only) = schema.get("const")
        && *only != value
    {
        return Err(wrong(path, &shown(only), &value));
    }
    Ok(value)
}

/// The first alternative that leaves `value` as it is, else the first that it can be turned into.
fn first_fit<I>(
    alternatives: impl Iterator<Item = I>,
    value: &Value,
    fit: impl Fn(I) -> Result<Value, BadArguments>,
) -> Option<Value> {
    let mut turned = None;
    for alternative in alternatives {
        match fit(alternative) {
            Ok(fitted) if fitted == *value => return Some(fitted),
            Ok(fitted) => turned = turned.or(Some(fitted)),
            Err(_) => {}
        }
    }
    turned
}

fn fit_type(
    kind: &str,
    schema: &Map<String, Value>,
    value: Value,
    path: &str,
) -> Result<Value, BadArguments> {
    match (kind, value) {
        ("integer", Value::Number(number)) => match integer_of(&number) {
            Some(integer) => Ok(integer.into()),
            None => Err(wrong(path, "an integer of 64 bits", &Value::Number(number))),
        },
        ("integer", Value::String(text)) => match integer_of_text(&text) {
            Some(integer) => Ok(integer.into()),
            None => Err(wrong(path, "an integer", &Value::String(text))),
        },
        ("number", Value::String(text)) => match serde_json::from_str::<Number>(&text) {
            // The reader skips blanks around a number; we do not.
            Ok(number) if !text.contains(|c: char| c.is_ascii_whitespace()) => {
                Ok(Value::Number(number))
            }
            _ => Err(wrong(path, "a number", &Value::String(text))),
        },
        ("boolean", Value::String(text)) if text == "true" || text == "false" => {
            Ok(Value::Bool(text == "true"))
        }
        ("array", Value::Array(items)) => match schema.get("items") {
            None => Ok(Value::Array(items)),
            Some(each) => items
                .into_iter()
                .enumerate()
                .map(|(index, item)| fit_value(each, item, &format!("{path}[{index}]")))
                .collect::<Result<_, _>>()
                .map(Value::Array),
        },
        ("object", Value::Object(object)) => {
            let schema = Value::Object(schema.clone());
            fit_object(&schema, object, path, true).map(Value::Object)
        }
        ("number", value @ Value::Number(_))
        | ("boolean", value @ Value::Bool(_))
        | ("string", value @ Value::String(_))
        | ("null", value @ Value::Null) => Ok(value),
        ("integer", value) => Err(wrong(path, "an integer", &value)),
        ("array" | "object", value) => Err(wrong(path, &format!("an {kind}"), &value)),
        ("number" | "boolean" | "string" | "null", value) => {
            Err(wrong(path, &format!("a {kind}"), &value))
        }
        // A type that JSON schema does not have says nothing.
        (_, value) => Ok(value),
    }
}

fn fit_object(
    schema: &Value,
    object: Map<String, Value>,
    path: &str,
    nested: bool,
) -> Result<Map<String, Value>, BadArguments> {
    let at = |key: &str| {
        let key: String = key.chars().take(60).collect();
        if path.is_empty() { key } else { format!("{path}.{key}") }
    };
    let properties = schema.get("properties").and_then(Value::as_object);
    let others = schema.get("additionalProperties");
    let open = match others {
        None => nested && properties.is_none(),
        Some(Value::Bool(open)) => *open,
        Some(_) => true,
    };
    if let Some(Value::Array(required)) = schema.get("required") {
        let absent =
            required.iter().filter_map(Value::as_str).find(|key| !object.contains_key(*key));
        if let Some(key) = absent {
            return Err(BadArguments(format!("argument `{}` is required", at(key))));
        }
    }
    object
        .into_iter()
        .map(|(key, value)| {
            let fitted = match (properties.and_then(|known| known.get(&key)), others) {
                (Some(schema), _) => fit_value(schema, value, &at(&key))?,
                (None, Some(schema)) if open => fit_value(schema, value, &at(&key))?,
                (None, _) if open => value,
                (None, _) => {
                    return Err(BadArguments(format!("there is no argument `{}`", at(&key))));
                }
            };
            Ok((key, fitted))
        })
        .collect()
}

fn integer_of(number: &Number) -> Option<i64> {
    if let Some(integer) = number.as_i64() {
        return Some(integer);
    }
    if number.is_u64() {
        return None;
    }
    let float = number.as_f64()?;
    // Within ±2^53 the conversion is exact.
    #[allow(clippy::cast_possible_truncation)]
    (float.fract() == 0.0 && float.abs() <= EXACT).then_some(float as i64)
}

fn integer_of_text(text: &str) -> Option<i64> {
    let digits = text.strip_prefix('-').unwrap_or(text);
    let plain = digits.bytes().all(|b| b.is_ascii_digit());
    let leading_zero = digits.len() > 1 && digits.starts_with('0');
    (plain && !leading_zero).then(|| text.parse().ok()).flatten()
}

fn wrong(path: &str, expected: &str, found: &Value) -> BadArguments {
    BadArguments(format!("argument `{path}` must be {expected}, not {}", shown(found)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn tool(schema: Value) -> ToolSpec {
        let parameters = json!({"type": "object", "properties": {"n": schema}, "required": ["n"]});
        ToolSpec::new("t", "", parameters)
    }

    fn one(schema: Value, value: &str) -> Result<Value, String> {
        fit(&tool(schema), &format!("{{\"n\":{value}}}"))
            .map(|mut fitted| fitted.remove("n").unwrap_or(Value::Null))
            .map_err(|error| error.to_string())
    }

    #[track_caller]
    fn accepts(schema: Value, value: &str, expected: Value) {
        assert_eq!(one(schema, value), Ok(expected), "{value}");
    }

    #[track_caller]
    fn refuses(schema: Value, value: &str, word: &str) {
        let error = one(schema, value).expect_err(value);
        assert!(error.contains(word) && !error.contains('\n'), "{value}: {error}");
    }

    #[test]
    fn integers() {
        let int = || json!({"type": "integer"});
        for (text, value) in [
            ("5", 5),
            ("\"5\"", 5),
            ("\"-5\"", -5),
            ("5.0", 5),
            ("1e3", 1000),
            ("-0", 0),
            ("\"-0\"", 0),
            ("9007199254740992.0", 9_007_199_254_740_992),
            ("9223372036854775807", i64::MAX),
            ("-9223372036854775808", i64::MIN),
            ("\"9223372036854775807\"", i64::MAX),
        ] {
            accepts(int(), text, json!(value));
        }
        for text in [
            "5.5",
            "true",
            "null",
            "[5]",
            "{}",
            "9223372036854775808",
            "-9223372036854775809",
            "1e30",
            "9007199254740994.0",
            "\"5.0\"",
            "\" 5\"",
            "\"+5\"",
            "\"05\"",
            "\"\"",
            "\"-\"",
            "\"５\"",
            "\"9223372036854775808\"",
            "\"NaN\"",
        ] {
            refuses(int(), text, "argument `n` must be an integer");
        }
    }

    #[test]
    fn numbers_booleans_texts_and_null() {
        let number = || json!({"type": "number"});
        accepts(number(), "5", json!(5));
        accepts(number(), "\"-2.5e3\"", json!(-2500.0));
        for text in ["true", "\"NaN\"", "\"1e400\"", "\" 5\"", "\"5 \"", "\"0x5\"", "null"] {
            refuses(number(), text, "a number");
        }
        accepts(json!({"type": "boolean"}), "\"false\"", json!(false));
        for text in ["1", "0", "\"True\"", "null"] {
            refuses(json!({"type": "boolean"}), text, "a boolean");
        }
        accepts(json!({"type": "string"}), "\"\\u0000<|im_end|>\"", json!("\0<|im_end|>"));
        for text in ["5", "true", "null", "[]"] {
            refuses(json!({"type": "string"}), text, "a string");
        }
        accepts(json!({"type": "null"}), "null", Value::Null);
        accepts(json!({"type": "integer", "nullable": true}), "null", Value::Null);
        accepts(json!({"type": "integer", "nullable": true}), "\"7\"", json!(7));
        accepts(json!({"type": ["integer", "null"]}), "null", Value::Null);
        accepts(json!({"type": "fancy"}), "[1]", json!([1]));
        accepts(json!({}), "{\"a\":1}", json!({"a": 1}));
        accepts(json!(true), "1", json!(1));
        refuses(json!(false), "1", "absent");
    }

    #[test]
    fn alternatives_prefer_what_fits_as_it_is() {
        accepts(json!({"type": ["integer", "string"]}), "\"5\"", json!("5"));
        accepts(json!({"type": ["integer", "boolean"]}), "\"5\"", json!(5));
        let either = json!({"anyOf": [{"type": "integer"}, {"type": "string"}]});
        accepts(either.clone(), "\"5\"", json!("5"));
        accepts(either.clone(), "5.0", json!(5));
        refuses(either, "[]", "alternatives");
        refuses(json!({"type": ["integer", "boolean"]}), "\"x\"", "integer or boolean");
    }

    #[test]
    fn enums_compare_after_the_type() {
        let levels = json!({"type": "integer", "enum": [1, 2]});
        accepts(levels.clone(), "\"2\"", json!(2));
        refuses(levels, "3", "one of 1, 2");
        accepts(json!({"enum": ["a", null]}), "null", Value::Null);
        refuses(json!({"enum": ["a"]}), "\"A\"", "one of \"a\"");
        refuses(json!({"const": 1}), "2", "must be 1");
    }

    #[test]
    fn nested_values_follow_the_same_table() {
        let list = json!({"type": "array", "items": {"type": "integer"}});
        accepts(list.clone(), "[\"1\", 2.0]", json!([1, 2]));
        refuses(list.clone(), "[1, \"x\"]", "`n[1]`");
        refuses(list, "\"[1]\"", "an array");
        accepts(json!({"type": "array"}), "[1, \"x\"]", json!([1, "x"]));
        let point = json!({"type": "object", "properties": {"x": {"type": "integer"}}});
        accepts(point.clone(), "{\"x\":\"1\"}", json!({"x": 1}));
        refuses(point.clone(), "{\"y\":1}", "no argument `n.y`");
        refuses(point, "{\"x\":[]}", "`n.x`");
        accepts(json!({"type": "object"}), "{\"any\":1}", json!({"any": 1}));
        let typed = json!({"type": "object", "additionalProperties": {"type": "integer"}});
        accepts(typed.clone(), "{\"k\":\"1\"}", json!({"k": 1}));
        refuses(typed, "{\"k\":true}", "`n.k`");
    }

    #[test]
    fn keys_must_be_those_of_the_schema() {
        let int = tool(json!({"type": "integer"}));
        let error = |text: &str| fit(&int, text).expect_err(text).to_string();
        assert_eq!(error("{}"), "argument `n` is required");
        assert_eq!(error(r#"{"n":1,"m":2}"#), "there is no argument `m`");
        assert!(error(r#"{"N":1}"#).contains("`n` is required"));
        let duplicate = fit(&int, r#"{"n":"x","n":2}"#).map(Value::Object);
        assert_eq!(duplicate, Ok(json!({"n": 2})), "the last of a repeated key counts");
        let no_schema = ToolSpec::new("t", "", json!({"type": "object"}));
        assert_eq!(fit(&no_schema, "{}"), Ok(Map::new()));
        assert!(fit(&no_schema, r#"{"a":1}"#).is_err());
        let open = json!({"type": "object", "additionalProperties": true});
        assert!(fit(&ToolSpec::new("t", "", open), r#"{"a":1}"#).is_ok());
    }

    #[test]
    fn what_is_no_json_object_is_refused() {
        let int = tool(json!({"type": "integer"}));
        let deep = format!("{{\"n\":{}1{}}}", "[".repeat(10_000), "]".repeat(10_000));
        for text in [
            "",
            "[5]",
            "\"{}\"",
            "null",
            "5",
            "{\"n\":NaN}",
            "{\"n\":1e400}",
            "{\"n\":1",
            "{n:1}",
            "{\"n\":\"\\ud800\"}",
            "{} {}",
            &deep,
        ] {
            let error = fit(&int, text).expect_err("refused").to_string();
            assert!(error.starts_with("the arguments "), "{error}");
            assert!(error.len() < 200, "{error}");
        }
    }
}
