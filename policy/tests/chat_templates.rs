//! Chat templates render as Python renders them.

mod common;

use std::{collections::BTreeMap, fs, path::Path};

use policy::chat::{ChatError, Template};
use serde_json::Value;

/// Renders every case of a `cases.jsonl` whose templates lie in `dir`; returns how many were tried and
/// the failures.
fn check_cases(dir: &Path) -> (usize, Vec<String>) {
    let mut templates: BTreeMap<String, Result<Template, ChatError>> = BTreeMap::new();
    let mut failures = Vec::new();
    let text = fs::read_to_string(dir.join("cases.jsonl")).expect("cases.jsonl");
    let mut tried = 0;
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        let case: Value = serde_json::from_str(line).expect("a case is JSON");
        let name = case["template"].as_str().expect("a template name");
        let template = templates.entry(name.to_owned()).or_insert_with(|| {
            let source = fs::read_to_string(dir.join(format!("{name}.jinja"))).expect("a template");
            Template::new(&source, name, "2024-07-26T05:07:09".parse().ok())
        });
        let context = case["context"].as_object().expect("a context");
        let rendered = match template {
            Ok(template) => template.render(context).map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        tried += 1;
        match (case["expected"].as_str(), rendered) {
            (Some(expected), Ok(text)) if text == expected => {}
            (None, Err(_)) => {}
            (expected, rendered) => failures.push(format!(
                "{}\n  expected {:?}\n  got      {:?}",
                case["name"], expected, rendered
            )),
        }
    }
    (tried, failures)
}

#[test]
fn every_case_renders_as_python_does() {
    let Some(root) = common::data_root() else { return };
    let dir = root.join("chat");
    if !dir.join("cases.jsonl").is_file() {
        eprintln!("skipped: no chat/cases.jsonl");
        return;
    }
    let (tried, failures) = check_cases(&dir);
    assert!(tried > 0);
    assert!(failures.is_empty(), "{} of {tried} differ:\n{}", failures.len(), failures.join("\n"));
}

/// A template that counts to ten thousand million would hang whoever opens the checkpoint.
#[test]
fn a_template_that_never_ends_is_stopped() {
    let endless =
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}x";
    let template = Template::new(endless, "endless", None).expect("it is a template");
    let error = template.render(&serde_json::Map::new()).expect_err("it must not end");
    assert!(error.to_string().contains("fuel"), "{error}");
}
