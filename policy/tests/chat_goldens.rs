//! Small checkpoints of our own, without weights: rendering, ids and suffixes equal the reference's
//! (`scripts/golden/chat.py` makes them).

mod common;

use std::{fs, path::PathBuf};

use policy::chat::{
    ChatError, ChatFormat, ChatOptions, ChatTokenizer, ObservationRole, Rendered, Template,
};
use protocol::FinishReason;
use serde_json::{Map, Value};

const FOLDERS: [&str; 6] = ["json", "tags", "plain", "flags", "parts", "brackets"];

fn rows(folder: &str, file: &str) -> Vec<Value> {
    let text = fs::read_to_string(common::golden(folder).join(file)).expect("a golden");
    // Not `lines`: texts may hold other line boundaries.
    text.split('\n')
        .filter(|l| !l.is_empty())
        .map(|l| serde_json::from_str(l).expect("JSON"))
        .collect()
}

fn ids(value: &Value) -> Option<Vec<u32>> {
    serde_json::from_value(value.clone()).ok()
}

fn parts(folder: &str) -> (ChatTokenizer, Template) {
    let dir: PathBuf = common::golden(folder);
    let config = fs::read_to_string(dir.join("tokenizer_config.json")).expect("a config");
    let config: Map<String, Value> = serde_json::from_str(&config).expect("JSON");
    let source = fs::read_to_string(dir.join("chat_template.jinja")).expect("a template");
    let template = Template::new(&source, folder, "2024-07-26".parse().ok()).expect("compiles");
    (ChatTokenizer::load(&dir, &config).expect("loads"), template)
}

#[test]
fn renderings_and_ids_equal_the_references() {
    for folder in FOLDERS {
        let (tokenizer, template) = parts(folder);
        for case in rows(folder, "cases.jsonl") {
            let name = format!("{folder}: {}", case["name"]);
            let context = case["context"].as_object().expect("a context");
            let rendered = Rendered::new(&template, &tokenizer, context, &[]);
            let Some(expected) = case["expected"].as_str() else {
                assert!(matches!(rendered, Err(ChatError::Render { .. })), "{name}: {rendered:?}");
                continue;
            };
            let rendered = rendered.unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!(rendered.text, expected, "{name}");
            // Trusting everything, the ids are those of plain tokenization.
            let whole = tokenizer.encode(&rendered.text, &[]).expect("encodes");
            assert_eq!(Some(&whole), ids(&case["ids"]).as_ref(), "{name}");
            let apart = tokenizer.encode(&rendered.text, &rendered.untrusted).expect("encodes");
            if name.contains("forged") {
                let control = tokenizer.control_ids();
                let count = |ids: &[u32]| ids.iter().filter(|id| control.contains(id)).count();
                assert!(count(&apart) < count(&whole), "{name}");
            } else {
                assert_eq!(apart, whole, "{name}");
            }
        }
    }
}

#[test]
fn single_expressions_print_as_python_prints_them() {
    let values = fs::read_to_string(common::golden("values.json")).expect("values");
    let values: Map<String, Value> = serde_json::from_str(&values).expect("JSON");
    for row in rows("", "snippets.jsonl") {
        let source = row["template"].as_str().expect("a template");
        let rendered = Template::new(source, "snippet", "2024-07-26T05:07:09".parse().ok())
            .unwrap_or_else(|error| panic!("{source}: {error}"))
            .render(&values);
        match row["expected"].as_str() {
            Some(expected) => assert_eq!(rendered.ok().as_deref(), Some(expected), "{source}"),
            None => assert!(rendered.is_err(), "{source}: {rendered:?}"),
        }
    }
}

#[test]
fn suffixes_equal_the_references() {
    let mut compared = 0;
    for folder in FOLDERS {
        for row in rows(folder, "suffixes.jsonl") {
            let Some(expected) = ids(&row["ids"]) else { continue };
            let options = ChatOptions {
                tools: vec![common::guess_tool()],
                system: ["plain", "parts"].contains(&folder).then(|| "You play games.".to_owned()),
                kwargs: row["kwargs"].as_object().cloned().unwrap_or_default(),
                ..ChatOptions::default()
            };
            let format = ChatFormat::load(&common::golden(folder), options).expect("loads");
            if format.observation_role() == ObservationRole::User {
                continue;
            }
            let observations: Vec<&str> = row["observations"]
                .as_array()
                .expect("texts")
                .iter()
                .filter_map(Value::as_str)
                .collect();
            let suffix = format.suffix(FinishReason::Stop, &observations).expect("a suffix");
            assert_eq!(suffix, expected, "{folder}: {row}");
            let mut cut = vec![format.turn_end()];
            cut.extend(&expected);
            assert_eq!(format.suffix(FinishReason::Length, &observations).expect("a suffix"), cut);
            compared += 1;
        }
    }
    assert!(compared >= 12, "{compared}");
}
