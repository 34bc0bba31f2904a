//! Encoding: benign text gets the ids of ordinary tokenization, untrusted text no control ids.

mod common;

use std::{collections::BTreeMap, fs, path::Path};

use policy::chat::{ChatFormat, ChatOptions, ChatTokenizer, Rendered, Template};
use protocol::FinishReason;
use serde_json::{Map, Value, json};
use tokenizers::Tokenizer;

fn config(dir: &Path) -> Map<String, Value> {
    let text = fs::read_to_string(dir.join("tokenizer_config.json")).expect("a config");
    serde_json::from_str(&text).expect("a JSON object")
}

#[test]
fn every_case_gets_the_ids_of_its_text_unless_untrusted_text_forges_control_tokens() {
    let Some(root) = common::data_root() else { return };
    let (cases, tokenizers) = (root.join("chat/cases.jsonl"), root.join("tokenizers"));
    if !cases.is_file() || !tokenizers.is_dir() {
        eprintln!("skipped: no chat cases or no tokenizers");
        return;
    }
    let cases = fs::read_to_string(cases).expect("cases");
    let cases: Vec<Value> = cases.lines().map(|l| serde_json::from_str(l).expect("JSON")).collect();
    let mut templates: BTreeMap<&str, Template> = BTreeMap::new();
    for case in &cases {
        let name = case["template"].as_str().expect("a name");
        templates.entry(name).or_insert_with(|| {
            let path = root.join("chat").join(format!("{name}.jinja"));
            Template::new(&fs::read_to_string(path).expect("a template"), name, None)
                .expect("compiles")
        });
    }
    for entry in fs::read_dir(tokenizers).expect("tokenizers") {
        let dir = entry.expect("an entry").path();
        let ours = ChatTokenizer::load(&dir, &config(&dir)).expect("loads");
        let theirs = Tokenizer::from_file(dir.join("tokenizer.json")).expect("loads");
        let control = ours.control_ids();
        let (mut equal, mut forged) = (0, 0);
        for case in cases.iter().filter(|case| case["expected"].is_string()) {
            let template = &templates[case["template"].as_str().expect("a name")];
            let context = case["context"].as_object().expect("a context");
            let rendered = Rendered::new(template, &ours, context, &[])
                .unwrap_or_else(|error| panic!("{}: {error}", case["name"]));
            assert_eq!(rendered.text, case["expected"].as_str().unwrap_or_default());
            let ids = ours.encode(&rendered.text, &rendered.untrusted).expect("encodes");
            let plain = theirs.encode(rendered.text.as_str(), false).expect("encodes");
            assert_eq!(ours.decode(&ids), ours.decode(plain.get_ids()), "{}", case["name"]);
            let forges = rendered.untrusted.iter().any(|range| {
                let ids = theirs.encode(&rendered.text[range.clone()], false).expect("encodes");
                ids.get_ids().iter().any(|id| control.contains(id))
            });
            if forges {
                let count = |ids: &[u32]| ids.iter().filter(|id| control.contains(id)).count();
                assert!(count(&ids) < count(plain.get_ids()), "{}", case["name"]);
                forged += 1;
            } else {
                assert_eq!(ids, plain.get_ids(), "{} with {}", case["name"], dir.display());
                equal += 1;
            }
        }
        println!("{}: {equal} equal, {forged} with forged control tokens", dir.display());
        assert!(equal > 0);
    }
}

/// Whole, in halves over two observations, doubled, and nested in one another.
#[test]
fn no_added_token_of_a_real_tokenizer_can_be_written_by_untrusted_text() {
    let Some(root) = common::data_root() else { return };
    let Ok(tokenizers) = fs::read_dir(root.join("tokenizers")) else {
        eprintln!("skipped: no tokenizers");
        return;
    };
    for entry in tokenizers {
        let dir = entry.expect("an entry").path();
        let load = |description: &str| {
            let mut tool = common::guess_tool();
            tool["function"]["description"] = json!(description);
            tool["function"]["parameters"]["properties"]["how"]["enum"] = json!([description]);
            let options = ChatOptions { tools: vec![tool], ..ChatOptions::default() };
            ChatFormat::load(&dir, options).unwrap_or_else(|e| panic!("{}: {e}", dir.display()))
        };
        let format = load("x");
        let control = format.control_ids();
        let controls = |ids: Vec<u32>| -> Vec<u32> {
            ids.into_iter().filter(|id| control.contains(id)).collect()
        };
        let prompt = controls(format.prompt("x", "x").expect("renders"));
        let suffix = controls(format.suffix(FinishReason::Stop, &["x", "x"]).expect("renders"));
        let tokens: Vec<String> =
            control.iter().filter_map(|id| format.tokenizer().token(*id)).collect();
        assert!(tokens.len() > 10, "{}", dir.display());
        for token in &tokens {
            let (left, right) = token.split_at(token.len() / 2);
            let nested = format!("{left}{token}{right}");
            let doubled = format!("{token}{token}\n{token}");
            for (a, b) in
                [(token.as_str(), "x"), (left, right), (&nested, &nested), (&doubled, token)]
            {
                let ids = format.prompt(a, b).expect("renders");
                assert!(format.decode(&ids).contains(&format!("{a}{b}")), "{a:?} {b:?}");
                assert_eq!(controls(ids), prompt, "{}: {a:?} {b:?}", dir.display());
                let ids = format.suffix(FinishReason::Stop, &[a, b]).expect("renders");
                let text = format.decode(&ids);
                assert!(text.contains(a) && text.contains(b), "{a:?} {b:?}");
                assert_eq!(controls(ids), suffix, "{}: {a:?} {b:?}", dir.display());
            }
        }
        let hostile = load(&tokens.concat());
        assert_eq!(controls(hostile.prompt("x", "x").expect("renders")), prompt, "tools");
    }
}
