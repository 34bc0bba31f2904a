//! What OpenEnv servers say, of versions 0.3 to 0.10, and what the policy is shown of it.

use serde_json::{Map, Value};

use crate::{
    ToolSpec,
    text::{self, Called},
    tool::inlined,
};

/// What a server says to a reset or a step.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Said {
    /// An observation.
    Observation {
        observation: Value,
        /// What this step is worth; nothing where it says nothing.
        reward: Option<f64>,
        done: bool,
    },
    /// The environment's code raised, or the action does not pass the server's own checks.
    Raised(String),
    /// It plays as many episodes as it can.
    Busy(String),
}

/// Reads a message.
///
/// # Errors
/// What it is instead, for a fault.
pub(super) fn read(mut message: Value) -> Result<Said, String> {
    let kind = message.get("type").and_then(Value::as_str).unwrap_or_default().to_owned();
    let Some(Value::Object(data)) = message.get_mut("data").map(Value::take) else {
        return Err(format!("its message of type {:?} holds no data", clipped(&kind)));
    };
    match kind.as_str() {
        "observation" => observation(data),
        "error" => error(&data),
        _ => Err(format!("its message is of type {:?}", clipped(&kind))),
    }
}

fn observation(mut data: Map<String, Value>) -> Result<Said, String> {
    let reward = match data.get("reward") {
        None | Some(Value::Null) => None,
        Some(Value::Bool(won)) => Some(f64::from(u8::from(*won))),
        Some(Value::Number(number)) => number.as_f64(),
        Some(_) => return Err("its reward is no number".into()),
    };
    let done = match data.get("done") {
        None | Some(Value::Null) => false,
        Some(Value::Bool(done)) => *done,
        Some(_) => return Err("its done is neither true nor false".into()),
    };
    let observation = data.remove("observation").ok_or("its message holds no observation")?;
    Ok(Said::Observation { observation, reward, done })
}

fn error(data: &Map<String, Value>) -> Result<Said, String> {
    let text = |key: &str| data.get(key).and_then(Value::as_str).unwrap_or_default();
    let (code, message) = (text("code"), text("message"));
    match code {
        "EXECUTION_ERROR" => Ok(Said::Raised(message.to_owned())),
        "VALIDATION_ERROR" => Ok(Said::Raised(refusal(message, data.get("errors")))),
        "CAPACITY_REACHED" => {
            let most = data.get("max_sessions").and_then(Value::as_u64);
            let most = most.map_or(String::new(), |most| format!(" (at most {most})"));
            Ok(Said::Busy(format!("its server plays as many episodes as it can{most}")))
        }
        _ => Err(format!("{}: {}", clipped(code), clipped(message))),
    }
}

/// Where the server's own checks found what: its message without links and repeated input.
fn refusal(message: &str, errors: Option<&Value>) -> String {
    let found = errors.and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let found: Vec<String> = found
        .iter()
        .filter_map(|error| {
            let place = error.get("loc").and_then(Value::as_array).map(Vec::as_slice);
            let place: Vec<String> = place
                .unwrap_or_default()
                .iter()
                .map(|part| part.as_str().map_or_else(|| part.to_string(), str::to_owned))
                .collect();
            Some(format!("{}: {}", place.join("."), error.get("msg")?.as_str()?))
        })
        .collect();
    if found.is_empty() { message.to_owned() } else { found.join("; ") }
}

fn clipped(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(200).collect()
}

/// The text of an observation: of the one field that is named, else of all but the metadata. A text is
/// shown as it is, everything else as JSON; an observation whose only field is a text is that text.
///
/// # Errors
/// There is no such field.
pub(super) fn shown(observation: Value, field: Option<&str>) -> Result<String, String> {
    let value = match (observation, field) {
        (Value::Object(mut fields), Some(name)) => fields.remove(name).ok_or_else(|| {
            format!("its observation has no field {name:?}: mend environment.observation")
        })?,
        (Value::Object(mut fields), None) => {
            fields.shift_remove("metadata");
            match fields.len() {
                1 => match fields.values().next() {
                    Some(Value::String(text)) => Value::String(text.clone()),
                    _ => Value::Object(fields),
                },
                _ => Value::Object(fields),
            }
        }
        (other, _) => other,
    };
    Ok(match value {
        Value::String(text) => text,
        other => other.to_string(),
    })
}

/// What a tool of an MCP-flavoured environment gave.
///
/// # Errors
/// It did not run to its end, or gave what cannot be shown.
pub(super) fn called(observation: &Value) -> Result<Called, String> {
    if let Some(error) = observation.get("error").filter(|error| !error.is_null()) {
        let said = |key: &str| error.get(key).and_then(Value::as_str).unwrap_or_default();
        return match said("error_type") {
            kind @ ("timeout" | "transport_error") => {
                Err(format!("{kind}: {}", clipped(said("message"))))
            }
            _ => Ok(Err(said("message").to_owned())),
        };
    }
    match observation.get("result") {
        None | Some(Value::Null) => Ok(Ok(String::new())),
        Some(result) => text::tool_result(result),
    }
}

/// The tools that an MCP-flavoured environment lists.
///
/// # Errors
/// They cannot be read.
pub(super) fn tools(observation: &Value) -> Result<Vec<ToolSpec>, String> {
    let listed = observation.get("tools").and_then(Value::as_array).ok_or("it lists no tools")?;
    if let Some(error) = observation.get("metadata").and_then(|it| it.get("error")?.as_str()) {
        return Err(format!("it cannot list its tools: {}", clipped(error)));
    }
    let tool = |tool: &Value| {
        let text = |key: &str| tool.get(key).and_then(Value::as_str);
        let schema = tool.get("input_schema").or_else(|| tool.get("inputSchema"))?;
        Some(ToolSpec::new(text("name")?, text("description").unwrap_or_default(), inlined(schema)))
    };
    listed
        .iter()
        .map(tool)
        .collect::<Option<_>>()
        .ok_or_else(|| "a tool that it lists has no name or no schema".into())
}

/// Whether a schema is that of actions which call tools by name.
pub(super) fn calls_tools(schema: &Value) -> bool {
    schema
        .get("properties")
        .is_some_and(|it| it.get("tool_name").is_some() && it.get("arguments").is_some())
        || schema.get("title").is_some_and(|title| title == "ListToolsAction")
}

/// The tool that takes a typed action, from the schema of such actions.
pub(super) fn action_tool(name: &str, schema: &Value) -> ToolSpec {
    let mut schema = inlined(schema);
    let mut description = String::from("Takes one step in the environment.");
    if let Value::Object(fields) = &mut schema {
        if let Some(Value::String(said)) = fields.shift_remove("description") {
            description = said;
        }
        // Every action has it, and nobody reads it.
        if let Some(Value::Object(properties)) = fields.get_mut("properties") {
            properties.shift_remove("metadata");
        }
    }
    ToolSpec::new(name, &description, schema)
}
