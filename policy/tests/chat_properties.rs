//! Properties of token streams over random conversations, tool outputs and sampled ids.

mod common;

use policy::chat::{ChatFormat, ChatOptions, Dialect, MAX_RAW, ParseRules, parse_turn, read_calls};
use proptest::prelude::*;
use protocol::{FinishReason, ParsedCall};
use serde_json::{Map, Value};

/// Two formats that were loaded apart: the actor's and the learner's.
fn pair(folder: &str) -> (ChatFormat, ChatFormat) {
    let load = || {
        let options = ChatOptions {
            tools: vec![common::guess_tool()],
            system: (folder == "plain").then(|| "Play. {tools}".into()),
            ..ChatOptions::default()
        };
        ChatFormat::load(&common::golden(folder), options).expect("loads")
    };
    (load(), load())
}

/// A piece of text that some tool might print.
fn piece() -> impl Strategy<Value = String> {
    let fixed = [
        "<|im_end|>",
        "<|im_start|>",
        "<|im_",
        "end|>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
        "<think>",
        "</think>",
        "<|endoftext|>",
        "<",
        "|>",
        "\u{0}",
        "\\ud800",
        "\\u0000",
        "🙂",
        "👩\u{200d}🚀",
        "\r\n",
        "\n\n",
        "   ",
        "\t",
        "\u{2028}",
        "\u{14400}",
        "\u{14401}\u{12000}",
        "{\"a\": [1.0]}",
        "None",
        "user\n",
        "{{ x }}",
        "{% raw %}",
    ];
    prop_oneof![
        4 => proptest::sample::select(fixed.to_vec()).prop_map(str::to_owned),
        2 => "[a-zäß你 ]{0,12}",
        1 => any::<char>().prop_map(String::from),
    ]
}

fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        20 => proptest::collection::vec(piece(), 0..12).prop_map(|pieces| pieces.concat()),
        1 => (piece(), 1..400usize).prop_map(|(piece, n)| piece.repeat(n)),
    ]
}

#[derive(Clone, Debug)]
struct Step {
    sampled: Vec<u32>,
    finish: FinishReason,
    observations: Vec<String>,
}

fn step() -> impl Strategy<Value = Step> {
    let sampled = proptest::collection::vec(0..600u32, 0..30);
    let finish = prop_oneof![Just(FinishReason::Stop), Just(FinishReason::Length)];
    (sampled, finish, proptest::collection::vec(text(), 1..4))
        .prop_map(|(sampled, finish, observations)| Step { sampled, finish, observations })
}

/// The stream of an episode with its mask: 1 where the id was sampled.
fn stream(format: &ChatFormat, task: &str, reset: &str, steps: &[Step]) -> (Vec<u32>, Vec<u8>) {
    let mut ids = format.prompt(task, reset).expect("a prompt");
    let mut mask = vec![0; ids.len()];
    for step in steps {
        ids.extend(&step.sampled);
        mask.resize(ids.len(), 1);
        if step.finish == FinishReason::Stop {
            ids.push(format.turn_end());
            mask.push(1);
        }
        ids.extend(format.suffix(step.finish, &step.observations).expect("a suffix"));
        mask.resize(ids.len(), 0);
    }
    (ids, mask)
}

fn external(ids: &[u32], mask: &[u8]) -> Vec<u32> {
    ids.iter().zip(mask).filter(|(_, mask)| **mask == 0).map(|(id, _)| *id).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn actor_and_learner_derive_the_same_stream(
        folder in proptest::sample::select(vec!["json", "tags", "plain", "flags"]),
        task in text(), reset in text(), steps in proptest::collection::vec(step(), 0..4),
    ) {
        let (actor, learner) = pair(folder);
        let (ids, mask) = stream(&actor, &task, &reset, &steps);
        let again = stream(&learner, &task, &reset, &steps);
        prop_assert_eq!((&ids, &mask), (&again.0, &again.1));
        // The mask is exactly the sampled ids.
        let sampled: Vec<u32> = steps
            .iter()
            .flat_map(|s| s.sampled.iter().copied().chain((s.finish == FinishReason::Stop).then(|| actor.turn_end())))
            .collect();
        let masked: Vec<u32> = ids.iter().zip(&mask).filter(|(_, m)| **m == 1).map(|(id, _)| *id).collect();
        prop_assert_eq!(masked, sampled);
        // Hostile or not, the external text has the control tokens of the scaffold and no others.
        let control = actor.control_ids();
        let benign: Vec<Step> = steps
            .iter()
            .map(|s| Step { observations: s.observations.iter().map(|_| "x".into()).collect(), ..s.clone() })
            .collect();
        let (plain_ids, plain_mask) = stream(&actor, "x", "", &benign);
        let only_control = |ids: Vec<u32>| -> Vec<u32> { ids.into_iter().filter(|id| control.contains(id)).collect() };
        prop_assert_eq!(
            only_control(external(&ids, &mask)),
            only_control(external(&plain_ids, &plain_mask))
        );
    }

    #[test]
    fn texts_round_trip(task in text(), reset in text(), observation in text()) {
        let (format, _) = pair("json");
        let prompt = format.decode(&format.prompt(&task, &reset).expect("a prompt"));
        let expected = format!("<|im_start|>user\n{task}{reset}<|im_end|>\n<|im_start|>assistant\n");
        prop_assert!(prompt.ends_with(&expected), "{:?} does not end with {:?}", prompt, expected);
        let suffix = format.decode(&format.suffix(FinishReason::Stop, &[&observation]).expect("a suffix"));
        prop_assert_eq!(
            suffix,
            format!("\n<|im_start|>user\n<tool_response>\n{observation}\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
        );
    }

    #[test]
    fn any_sampled_ids_are_read_alike_and_within_bounds(
        folder in proptest::sample::select(vec!["json", "tags"]),
        ids in proptest::collection::vec(prop_oneof![0..600u32, 560..569u32, any::<u32>()], 0..200),
        cut in any::<bool>(),
    ) {
        let (actor, learner) = pair(folder);
        let finish = if cut { FinishReason::Length } else { FinishReason::Stop };
        let turn = actor.parse(&ids, finish);
        prop_assert_eq!(&turn, &learner.parse(&ids, finish));
        if cut {
            prop_assert!(turn.calls.is_empty());
        }
    }

    #[test]
    fn any_text_is_read_without_a_panic(
        pieces in proptest::collection::vec(prop_oneof![
            proptest::sample::select(vec![
                "<tool_call>", "</tool_call>", "<think>", "</think>", "{", "}", "[", "]", "\"", "\\", ":", ",", "\"name\"",
                "\"arguments\"", "\"f\"", "1", "-", "e9", "<function=f>", "<function=", "</function>", "<parameter=value>",
                "<parameter=", "</parameter>", "\n", " ", "\\ud83d", "null", "true", "NaN", "é",
            ]).prop_map(str::to_owned),
            piece(),
        ], 0..60),
        tags in any::<bool>(), opens_think in any::<bool>(),
    ) {
        let text = pieces.concat();
        let dialect = if tags { Dialect::FunctionTags } else { Dialect::Json };
        let schemas: Map<String, Value> = Map::new();
        let rules = ParseRules { dialect, opens_think, schemas };
        let turn = parse_turn(text.clone(), 10, FinishReason::Stop, &rules);
        prop_assert_eq!(&read_calls(&text, &rules).2, &turn.calls);
        for call in &turn.calls {
            match call {
                ParsedCall::Call { arguments, .. } => {
                    let value: Result<Map<String, Value>, _> = serde_json::from_str(arguments);
                    prop_assert!(value.is_ok(), "{}", arguments);
                }
                ParsedCall::Malformed { raw, reason } => {
                    prop_assert!(raw.len() <= MAX_RAW && !reason.is_empty());
                }
            }
        }
    }
}

fn json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        text().prop_map(Value::from),
    ];
    leaf.prop_recursive(6, 40, 5, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            proptest::collection::vec((piece(), inner), 0..5)
                .prop_map(|entries| Value::Object(entries.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn arguments_come_back_in_order_and_compact(
        entries in proptest::collection::vec((piece(), json()), 0..4), pretty in any::<bool>(),
    ) {
        let arguments = Value::Object(entries.into_iter().collect());
        let call = serde_json::json!({"name": "f", "arguments": arguments});
        let block = if pretty { serde_json::to_string_pretty(&call) } else { serde_json::to_string(&call) };
        let text = format!("<tool_call>\n{}\n</tool_call>", block.expect("JSON"));
        let rules = ParseRules { dialect: Dialect::Json, opens_think: false, schemas: Map::new() };
        let turn = parse_turn(text, 10, FinishReason::Stop, &rules);
        prop_assert_eq!(turn.calls, [ParsedCall::Call { name: "f".into(), arguments: arguments.to_string() }]);
    }
}

#[test]
fn two_hundred_kilobytes_make_a_stream() {
    let (format, _) = pair("json");
    for piece in ["<|im_end|>", "a", " ", "🙂", "word ", "\r\n", "\u{0}"] {
        let text = piece.repeat(200_000 / piece.len());
        let ids = format.suffix(FinishReason::Stop, &[&text]).expect("a suffix");
        assert!(format.decode(&ids).contains(&text), "{piece:?}");
        let control = format.control_ids();
        let count = ids.iter().filter(|id| control.contains(id)).count();
        assert_eq!(count, 5, "{piece:?}: two turns and one response");
    }
}
