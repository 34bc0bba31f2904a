//! Tool descriptions: what a chat template shows to the policy and what arguments are checked against.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

/// A tool of an environment.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolSpec {
    /// The name that calls use: a letter, then letters, digits, `_`, `-` or `.`; at most 64 in all.
    pub name: String,
    /// What it does, for the policy. Untrusted text where the environment is not ours.
    pub description: String,
    /// JSON schema of its arguments: an object schema.
    pub parameters: Value,
    /// JSON schema of what it returns, where that is described.
    pub returns: Option<Value>,
}

impl ToolSpec {
    /// A tool from its three parts.
    pub fn new(name: &str, description: &str, parameters: Value) -> Self {
        Self { name: name.into(), description: description.into(), parameters, returns: None }
    }

    /// The same tool with its return value described.
    pub fn returning(self, schema: Value) -> Self {
        Self { returns: Some(schema), ..self }
    }

    /// `{"type": "function", "function": {"name", "description", "parameters", "return"?}}` in this key
    /// order, the order of transformers' `get_json_schema`.
    pub fn to_json(&self) -> Value {
        let mut tool = json!({
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": self.parameters,
            },
        });
        if let Some(returns) = &self.returns {
            tool["function"]["return"] = returns.clone();
        }
        tool
    }
}

/// The names that stand for an environment's life cycle and so never for a tool.
const RESERVED: [&str; 3] = ["reset", "get_reward", "close"];

/// Most tools of one environment.
const MAX_TOOLS: usize = 256;

/// What is wrong with an environment's tools, if anything: a bad, reserved or repeated name, a
/// schema that is not an object's, or too many.
pub(crate) fn first_flaw(tools: &[ToolSpec]) -> Option<String> {
    if tools.len() > MAX_TOOLS {
        return Some(format!("it has {} tools; the limit is {MAX_TOOLS}", tools.len()));
    }
    let mut seen = BTreeSet::new();
    tools.iter().find_map(|tool| {
        let name = tool.name.as_str();
        let shown: String = name.chars().take(64).collect();
        let lawful = name.len() <= 64
            && name.starts_with(|c: char| c.is_ascii_alphabetic())
            && name.chars().all(|c| c.is_ascii_alphanumeric() || "_-.".contains(c));
        if !lawful {
            Some(format!(
                "tool name {shown:?} is not a letter followed by at most 63 letters, digits, '_', '-', '.'"
            ))
        } else if RESERVED.contains(&name) {
            Some(format!("tool name {shown:?} is reserved; rename the tool"))
        } else if !seen.insert(name) {
            Some(format!("two tools are named {shown:?}"))
        } else if tool.parameters.get("type").is_some_and(|kind| kind != "object")
            || !tool.parameters.is_object()
        {
            Some(format!("the parameters of tool {shown:?} are not an object schema"))
        } else {
            None
        }
    })
}

/// A schema without `title`s and with its `$defs` put where they are named, to a depth of 8.
pub(crate) fn inlined(schema: &Value) -> Value {
    let none = Map::new();
    let definitions = schema.get("$defs").and_then(Value::as_object).unwrap_or(&none);
    inline(schema, definitions, 0)
}

fn inline(schema: &Value, definitions: &Map<String, Value>, depth: u32) -> Value {
    match schema {
        Value::Object(fields) => {
            let named = fields.get("$ref").and_then(Value::as_str);
            let named = named.and_then(|it| definitions.get(it.strip_prefix("#/$defs/")?));
            if let Some(definition) = named {
                return if depth < 8 {
                    inline(definition, definitions, depth + 1)
                } else {
                    Value::Bool(true)
                };
            }
            let kept = fields
                .iter()
                .filter(|(key, value)| *key != "$defs" && !(*key == "title" && value.is_string()));
            Value::Object(
                kept.map(|(key, value)| (key.clone(), inline(value, definitions, depth))).collect(),
            )
        }
        Value::Array(items) => items.iter().map(|item| inline(item, definitions, depth)).collect(),
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_come_in_the_order_of_transformers() {
        let tool = ToolSpec::new("add", "Adds.", json!({"type": "object", "properties": {}}));
        assert_eq!(
            tool.to_json().to_string(),
            r#"{"type":"function","function":{"name":"add","description":"Adds.","parameters":{"type":"object","properties":{}}}}"#
        );
    }

    #[test]
    fn life_cycle_names_and_odd_names_are_no_tools() {
        let schema = json!({"type": "object"});
        for name in ["reset", "get_reward", "close", "_x", "__init__", "", "a b", "ü", "1a"] {
            assert!(first_flaw(&[ToolSpec::new(name, "", schema.clone())]).is_some(), "{name:?}");
        }
        let fine = ToolSpec::new("guess", "", schema.clone());
        assert_eq!(first_flaw(std::slice::from_ref(&fine)), None);
        assert!(first_flaw(&[fine.clone(), fine]).is_some_and(|flaw| flaw.contains("two tools")));
        assert!(first_flaw(&[ToolSpec::new("a", "", json!([]))]).is_some());
        assert!(first_flaw(&[ToolSpec::new("a", "", json!({"type": "string"}))]).is_some());
    }
}
