//! Tool calls in sampled turns: every odd input has one decided outcome.

mod common;

use std::time::{Duration, Instant};

use policy::chat::{
    Dialect, MAX_CHARS, MAX_IDS, MAX_RAW, ParseRules, Turn, parse_turn, read_calls,
};
use protocol::{FinishReason, ParsedCall};
use serde_json::{Map, Value, json};

fn rules(dialect: Dialect) -> ParseRules {
    let schema = json!({"type": "object", "properties": {
        "n": {"type": "integer"}, "x": {"type": "number"}, "yes": {"type": "boolean"}, "s": {"type": "string"},
        "list": {"type": "array"}, "map": {"type": "object"}, "any": {}, "maybe": {"type": "integer", "nullable": true},
        "word": {"type": ["string", "null"]}, "either": {"anyOf": [{"type": "integer"}, {"type": "boolean"}]},
        "pick": {"enum": [1, 2]}}});
    let schemas: Map<String, Value> = [("f".to_owned(), schema)].into_iter().collect();
    ParseRules { dialect, opens_think: false, schemas }
}

fn turn(text: &str, dialect: Dialect) -> Turn {
    parse_turn(text.to_owned(), text.len().min(MAX_IDS), FinishReason::Stop, &rules(dialect))
}

/// `name(arguments)` for a call, `!reason` for a malformed one.
fn shown(turn: &Turn) -> Vec<String> {
    turn.calls
        .iter()
        .map(|call| match call {
            ParsedCall::Call { name, arguments } => format!("{name}({arguments})"),
            ParsedCall::Malformed { reason, .. } => format!("!{reason}"),
        })
        .collect()
}

#[test]
fn json_calls_have_the_documented_outcomes() {
    let wrong =
        |place: usize, what: &str| format!("!the JSON is wrong at character {place}: {what}");
    let cases: Vec<(&str, String)> = vec![
        (r#"{"name": "f", "arguments": {"n": 5}}"#, r#"f({"n":5})"#.into()),
        (
            r#"{"arguments": {"b": 1, "a": [true, null, "é\u00e9\n"]}, "name": "f"}"#,
            r#"f({"b":1,"a":[true,null,"éé\n"]})"#.into(),
        ),
        (r#"{"name": "f"}"#, "f({})".into()),
        (r#"{"name": "f", "arguments": null}"#, "f({})".into()),
        (r#"{"name": "f", "arguments": {}, "id": 7}"#, "f({})".into()),
        (r#"{"name": "f", "arguments": "{\"n\": 5}"}"#, r#"f({"n":5})"#.into()),
        (
            r#"{"name": "f", "arguments": "[5]"}"#,
            "!\"arguments\" is a string that holds no JSON object".into(),
        ),
        (
            r#"{"name": "f", "arguments": "n=5"}"#,
            "!\"arguments\" is a string that holds no JSON object".into(),
        ),
        (r#"{"name": "f", "arguments": [5]}"#, "!\"arguments\" is not an object".into()),
        (r#"{"name": "f", "arguments": 3}"#, "!\"arguments\" is not an object".into()),
        (r#"{"name": 3, "arguments": {}}"#, "!\"name\" is not a string".into()),
        (r#"{"arguments": {}}"#, "!\"name\" is missing".into()),
        (r#"{"name": "", "arguments": {}}"#, "({})".into()),
        (r#"{"name": "reset"}"#, "reset({})".into()),
        (r#"{"name": "__init__"}"#, "__init__({})".into()),
        ("[1,2]", "!the call is not a JSON object".into()),
        ("\"f\"", "!the call is not a JSON object".into()),
        (r#"{"name": "f"} {"name": "g"}"#, "!there is text after the JSON object".into()),
        (r#"call {"name": "f"}"#, wrong(0, "expected a value")),
        ("", wrong(0, "expected a value")),
        (r#"{"name": "f", "arguments": {"n": 5}"#, wrong(36, "expected `,` or `}`")),
        (r#"{'name': 'f'}"#, wrong(1, "expected a key in double quotes")),
        (r#"{"name": "f", "arguments": {"n": "5"}}"#, r#"f({"n":"5"})"#.into()),
        (
            r#"{"name": "f", "arguments": {"n": 5.0, "x": 1E2, "y": -0}}"#,
            r#"f({"n":5.0,"x":1E2,"y":-0})"#.into(),
        ),
        (r#"{"name": "f", "arguments": {"n": true}}"#, r#"f({"n":true})"#.into()),
        (r#"{"name": "f", "arguments": {"n": NaN}}"#, wrong(33, "NaN and Infinity are not JSON")),
        (r#"{"name": "f", "arguments": {"n": -Infinity}}"#, wrong(34, "expected a digit")),
        (r#"{"name": "f", "arguments": {"n": 1e400}}"#, wrong(33, "a number is out of range")),
        (r#"{"name": "f", "arguments": {"n": 01}}"#, wrong(33, "a number has a leading zero")),
        (
            r#"{"name": "f", "arguments": {"n": 9223372036854775808}}"#,
            r#"f({"n":9223372036854775808})"#.into(),
        ),
        (
            r#"{"name": "f", "arguments": {"n": 123456789012345678901234567890}}"#,
            r#"f({"n":123456789012345678901234567890})"#.into(),
        ),
        (
            r#"{"name": "f", "name": "g", "arguments": {"a": 1, "b": 2, "a": 3}}"#,
            r#"g({"a":3,"b":2})"#.into(),
        ),
        (
            r#"{"name": "f", "arguments": {"s": "</tool_call>"}}"#,
            r#"f({"s":"</tool_call>"})"#.into(),
        ),
        (
            r#"{"name": "f", "arguments": {"s": "<tool_call>{}</tool_call>"}}"#,
            r#"f({"s":"<tool_call>{}</tool_call>"})"#.into(),
        ),
        (r#"{"name": "f", "arguments": {"s": "\ud83d\ude42"}}"#, r#"f({"s":"🙂"})"#.into()),
        (r#"{"name": "f", "arguments": {"s": "\ud800"}}"#, wrong(40, "a lone surrogate escape")),
        (
            r#"{"name": "f", "arguments": {"s": "\ud800\u0041"}}"#,
            wrong(46, "a lone surrogate escape"),
        ),
        (
            r#"{"name": "f", "arguments": {"s": "\x41"}}"#,
            wrong(35, "an unknown escape in a string"),
        ),
        (r#"{"name": "f", "arguments": {"s": "\u00zz"}}"#, wrong(38, "\\u needs four hex digits")),
        (
            "{\"name\": \"f\", \"arguments\": {\"s\": \"a\nb\"}}",
            wrong(35, "a raw control character in a string (write \\n for a newline)"),
        ),
        (r#"{"name": "f", "arguments": {"s": "\u0000 /\/"}}"#, r#"f({"s":"\u0000 //"})"#.into()),
        ("{\r\n\t\"name\" :\r\n\"f\"\r\n}\r\n", "f({})".into()),
        (r#"{"na\u006de": "f", "arguments": {"\u0061": 1, "a": 2}}"#, r#"f({"a":2})"#.into()),
        (r#"{"name": "f", "arguments": {"n": 1}, "arguments": {"n": 2}}"#, r#"f({"n":2})"#.into()),
        (r#"{"name": "f", "arguments": {"n": 1}, "arguments": null}"#, "f({})".into()),
        (r#"{"name": "f", "arguments": "{\"n\": 1, \"n\": 2}"}"#, r#"f({"n":2})"#.into()),
        (
            r#"{"name": "f", "arguments": "\"{}\""}"#,
            "!\"arguments\" is a string that holds no JSON object".into(),
        ),
        (
            r#"{"name": "f", "arguments": ""}"#,
            "!\"arguments\" is a string that holds no JSON object".into(),
        ),
        (
            r#"{"name": "f", "arguments": "{\"n\": NaN}"}"#,
            "!\"arguments\" is a string that holds no JSON object".into(),
        ),
        (r#"{"name": null}"#, "!\"name\" is not a string".into()),
        (r#"{"name": ["f"]}"#, "!\"name\" is not a string".into()),
        ("{}", "!\"name\" is missing".into()),
        ("null", "!the call is not a JSON object".into()),
        (r#"{"name": "f",}"#, wrong(13, "expected a key in double quotes")),
        (r#"{"name": "f" "arguments": {}}"#, wrong(13, "expected `,` or `}`")),
        (r#"{"name": "f"} // why"#, "!there is text after the JSON object".into()),
        (r#"// why {"name": "f"}"#, wrong(0, "expected a value")),
        ("\u{feff}{\"name\": \"f\"}", wrong(0, "expected a value")),
        ("{\u{a0}\"name\": \"f\"}", wrong(1, "expected a key in double quotes")),
        (r#"{"name": "f", "arguments": {"n": True}}"#, wrong(33, "expected a value")),
        (r#"{"name": "f", "arguments": {"n": +5}}"#, wrong(33, "expected a value")),
        (r#"{"name": "f", "arguments": {"n": .5}}"#, wrong(33, "expected a value")),
        (r#"{"name": "f", "arguments": {"n": 5.}}"#, wrong(35, "expected a digit")),
        (r#"{"name": "f", "arguments": {"n": 5e}}"#, wrong(35, "expected a digit")),
        (r#"{"name": "f", "arguments": {"n": 0x10}}"#, wrong(34, "expected `,` or `}`")),
        (r#"{"name": "f", "arguments": {"n": 1_000}}"#, wrong(34, "expected `,` or `}`")),
        (r#"{"name": "f", "arguments": {"n": -1e400}}"#, wrong(33, "a number is out of range")),
        (r#"{"name": "f", "arguments": {"n": 1e-400}}"#, r#"f({"n":1e-400})"#.into()),
        (
            r#"{"name": "f", "arguments": {"s": "\udc00\ud800"}}"#,
            wrong(40, "a lone surrogate escape"),
        ),
        ("```json\n{\"name\": \"f\"}\n```", wrong(0, "expected a value")),
    ];
    for (block, expected) in cases {
        let text = format!("<tool_call>\n{block}\n</tool_call>");
        let turn = turn(&text, Dialect::Json);
        assert_eq!(shown(&turn), [expected], "{block}");
        for call in &turn.calls {
            if let ParsedCall::Call { arguments, .. } = call {
                assert!(
                    serde_json::from_str::<Map<String, Value>>(arguments).is_ok(),
                    "{arguments}"
                );
            }
        }
    }
}

#[test]
fn any_name_is_a_call_for_the_recorder_to_judge() {
    for name in ["reset", "get_reward", "_x", "__init__", "close", "Guess", ""] {
        let json = format!("<tool_call>{{\"name\": \"{name}\"}}</tool_call>");
        assert_eq!(shown(&turn(&json, Dialect::Json)), [format!("{name}({{}})")]);
        let tags = format!("<tool_call><function={name}></function></tool_call>");
        assert_eq!(shown(&turn(&tags, Dialect::FunctionTags)), [format!("{name}({{}})")]);
    }
}

#[test]
fn depth_is_bounded_and_documented() {
    let nested = |levels: usize| {
        format!(
            "<tool_call>{{\"name\":\"f\",\"arguments\":{{\"a\":{}1{}}}}}</tool_call>",
            "[".repeat(levels),
            "]".repeat(levels)
        )
    };
    assert!(shown(&turn(&nested(60), Dialect::Json))[0].starts_with("f("));
    for levels in [64, 10_000] {
        let shown = shown(&turn(&nested(levels), Dialect::Json));
        assert!(shown[0].ends_with("nested too deep"), "{shown:?}");
    }
}

#[test]
fn tagged_calls_are_typed_by_the_schema() {
    let cases = [
        ("<function=f>\n<parameter=n>\n5\n</parameter>\n</function>", r#"f({"n":5})"#),
        ("<function=f></function>", "f({})"),
        ("<function=f>\n</function>\n", "f({})"),
        ("<function=f><parameter=n> 5.0 </parameter></function>", r#"f({"n":5.0})"#),
        ("<function=f><parameter=n>five</parameter></function>", r#"f({"n":"five"})"#),
        ("<function=f><parameter=n>true</parameter></function>", r#"f({"n":"true"})"#),
        ("<function=f><parameter=n>1e400</parameter></function>", r#"f({"n":"1e400"})"#),
        ("<function=f><parameter=n>NaN</parameter></function>", r#"f({"n":"NaN"})"#),
        (
            "<function=f><parameter=n>9223372036854775808</parameter></function>",
            r#"f({"n":9223372036854775808})"#,
        ),
        ("<function=f><parameter=x>1e5</parameter></function>", r#"f({"x":1e5})"#),
        ("<function=f><parameter=yes>True</parameter></function>", r#"f({"yes":true})"#),
        ("<function=f><parameter=yes>false</parameter></function>", r#"f({"yes":false})"#),
        ("<function=f><parameter=yes>1</parameter></function>", r#"f({"yes":"1"})"#),
        ("<function=f><parameter=s>\n 5\n\n</parameter></function>", r#"f({"s":" 5\n"})"#),
        (
            "<function=f><parameter=s>\"q\" \\ <b></parameter></function>",
            r#"f({"s":"\"q\" \\ <b>"})"#,
        ),
        ("<function=f><parameter=s>null</parameter></function>", r#"f({"s":"null"})"#),
        ("<function=f><parameter=word>None</parameter></function>", r#"f({"word":null})"#),
        ("<function=f><parameter=maybe>null</parameter></function>", r#"f({"maybe":null})"#),
        (
            "<function=f><parameter=list>[1, {\"a\": 2}]</parameter></function>",
            r#"f({"list":[1,{"a":2}]})"#,
        ),
        ("<function=f><parameter=list>[1</parameter></function>", r#"f({"list":"[1"})"#),
        (
            "<function=f><parameter=map>{\"b\": 1, \"a\": 2}</parameter></function>",
            r#"f({"map":{"b":1,"a":2}})"#,
        ),
        ("<function=f><parameter=any>[1]</parameter></function>", r#"f({"any":[1]})"#),
        ("<function=f><parameter=any>word</parameter></function>", r#"f({"any":"word"})"#),
        ("<function=f><parameter=zzz>3</parameter></function>", r#"f({"zzz":3})"#),
        ("<function=f><parameter=either>True</parameter></function>", r#"f({"either":true})"#),
        ("<function=f><parameter=either>7</parameter></function>", r#"f({"either":7})"#),
        ("<function=f><parameter=pick>2</parameter></function>", r#"f({"pick":2})"#),
        ("<function=g><parameter=n>5</parameter></function>", r#"g({"n":5})"#),
        ("<function=><parameter=>x</parameter></function>", r#"({"":"x"})"#),
        (
            "<function=f><parameter=s>a</parameter>b</parameter></function>",
            r#"f({"s":"a</parameter>b"})"#,
        ),
        (
            "<function=f><parameter=s>1</parameter><parameter=n>2</parameter><parameter=s>3</parameter></function>",
            r#"f({"s":"3","n":2})"#,
        ),
        (r#"{"name": "f", "arguments": {}}"#, "!the block has no <function=…>"),
        ("", "!the block has no <function=…>"),
        ("<function=f", "!<function=…> is not closed"),
        ("<function=f\n></function>", "!<function=…> is not closed"),
        ("<function=f><parameter=n>5</function>", "!a parameter has no </parameter>"),
        ("<function=f><parameter=n</parameter></function>", "!<parameter=…> is not closed"),
        ("<function=f><parameter=n>5</parameter>", "!a parameter has no </parameter>"),
        (
            "<function=f>text</function>",
            "!expected <parameter=…> or </function>, each on its own line",
        ),
        ("<function=f></function><function=g></function>", "!there is text after </function>"),
        (
            "<function=f>\r\n<parameter=s>\r\na\r\n</parameter>\r\n</function>\r\n",
            r#"f({"s":"\r\na\r"})"#,
        ),
        ("<function=f><parameter=n>\r\n5\r\n</parameter></function>", r#"f({"n":5})"#),
        ("<function= f ><parameter= n >5</parameter></function>", r#" f ({" n ":5})"#),
        ("<function=f><parameter=n></parameter></function>", r#"f({"n":""})"#),
        ("<function=f><parameter=s>\n\n</parameter></function>", r#"f({"s":""})"#),
        ("<function=f><parameter=n>01</parameter></function>", r#"f({"n":"01"})"#),
        ("<function=f><parameter=n>5 6</parameter></function>", r#"f({"n":"5 6"})"#),
        ("<function=f><parameter=n>\"5\"</parameter></function>", r#"f({"n":"\"5\""})"#),
        ("<function=f><parameter=n>null</parameter></function>", r#"f({"n":"null"})"#),
        ("<function=f><parameter=x>-Infinity</parameter></function>", r#"f({"x":"-Infinity"})"#),
        ("<function=f><parameter=yes>TRUE</parameter></function>", r#"f({"yes":"TRUE"})"#),
        (
            "<function=f><parameter=map>{\"a\":1,\"a\":2}</parameter></function>",
            r#"f({"map":{"a":2}})"#,
        ),
        ("<function=f><parameter=map>[]</parameter></function>", r#"f({"map":"[]"})"#),
        ("<function=f><parameter=list>('a',)</parameter></function>", r#"f({"list":"('a',)"})"#),
        (
            "<function=f><parameter=s><function=g></function></parameter></function>",
            r#"f({"s":"<function=g></function>"})"#,
        ),
        (
            "<function=f><parameter=s><parameter=n></parameter></function>",
            r#"f({"s":"<parameter=n>"})"#,
        ),
        ("</function><function=f></function>", "!the block has no <function=…>"),
        ("text <function=f></function>", "!the block has no <function=…>"),
        ("<Function=f></Function>", "!the block has no <function=…>"),
        ("<function=f><parameter=s>\u{0}🙂</parameter></function>", r#"f({"s":"\u0000🙂"})"#),
    ];
    for (block, expected) in cases {
        let text = format!("<tool_call>\n{block}\n</tool_call>");
        assert_eq!(shown(&turn(&text, Dialect::FunctionTags)), [expected], "{block}");
    }
    // A value cannot hold the block's own end.
    let text =
        "<tool_call><function=f><parameter=s></tool_call></parameter></function></tool_call>";
    assert_eq!(shown(&turn(text, Dialect::FunctionTags)), ["!a parameter has no </parameter>"]);
}

#[test]
fn turns_have_the_documented_outcomes() {
    let call = |name: &str| format!("<tool_call>{{\"name\":\"{name}\"}}</tool_call>");
    let (f, g) = (call("f"), call("g"));
    let cases: Vec<(String, Vec<&str>, &str, &str)> = vec![
        (String::new(), vec![], "", ""),
        ("just text".into(), vec![], "", "just text"),
        (
            r#"{"name": "f", "arguments": {}}"#.into(),
            vec![],
            "",
            r#"{"name": "f", "arguments": {}}"#,
        ),
        (format!("a {f} b\n{g} c"), vec!["f({})", "g({})"], "", "a  b\n c"),
        (format!("<think>\n{f}\n</think>\n\n{g}"), vec!["g({})"], &f, ""),
        (format!("<think>never {f}"), vec![], "never <tool_call>{\"name\":\"f\"}</tool_call>", ""),
        (
            format!("was open {f}</think>{g}"),
            vec!["g({})"],
            "was open <tool_call>{\"name\":\"f\"}</tool_call>",
            "",
        ),
        (
            format!("<think>a</think>x<think>{f}</think>y"),
            vec![],
            "a<tool_call>{\"name\":\"f\"}</tool_call>",
            "xy",
        ),
        (format!("<think>a</think>{f}</think>"), vec!["f({})"], "a", "</think>"),
        (format!("{f}</tool_call>"), vec!["f({})"], "", "</tool_call>"),
        (
            format!("<tool_call>{f}"),
            vec!["!the JSON is wrong at character 0: expected a value"],
            "",
            "",
        ),
        (
            format!("<tool_call>{{\"name\":\"f\" {f}"),
            vec!["!the JSON is wrong at character 12: expected `,` or `}`"],
            "",
            "",
        ),
        ("<tool_call>{\"name\":\"f\"}".into(), vec!["!the block has no </tool_call>"], "", ""),
        ("<tool_call>".into(), vec!["!the block has no </tool_call>"], "", ""),
        (
            format!("{f}<tool_call>{{\"name\":"),
            vec!["f({})", "!the block has no </tool_call>"],
            "",
            "",
        ),
        ("a < b <tool_cal> <|im_start|>".into(), vec![], "", "a < b <tool_cal> <|im_start|>"),
    ];
    for (text, calls, reasoning, content) in cases {
        let turn = turn(&text, Dialect::Json);
        let expected: Vec<String> = calls.iter().map(|c| (*c).to_owned()).collect();
        let shown: Vec<String> = shown(&turn);
        assert_eq!(shown, expected, "{text}");
        assert_eq!(
            (turn.reasoning.as_str(), turn.content.as_str()),
            (reasoning, content),
            "{text}"
        );
        assert_eq!(turn.text, text);
    }
}

#[test]
fn an_open_thought_without_an_end_is_all_reasoning() {
    let rules = ParseRules { opens_think: true, ..rules(Dialect::Json) };
    let read = |text: &str| parse_turn(text.to_owned(), 5, FinishReason::Stop, &rules);
    let turn = read("hm <tool_call>{\"name\":\"f\"}</tool_call>");
    assert!(turn.calls.is_empty() && turn.content.is_empty() && turn.reasoning.starts_with("hm"));
    let turn = read("hm</think>\n\n<tool_call>{\"name\":\"f\"}</tool_call>");
    assert_eq!((shown(&turn), turn.reasoning.as_str()), (vec!["f({})".to_owned()], "hm"));
}

#[test]
fn a_turn_cut_by_the_length_limit_calls_nothing() {
    for dialect in [Dialect::Json, Dialect::FunctionTags] {
        for text in [
            "<tool_call>{\"name\":\"f\"}</tool_call>",
            "<tool_call>{\"name\":\"f\"}</tool_call><tool_call>{\"name\":",
            "<tool_call><function=f></function></tool_call>",
        ] {
            let turn = parse_turn(text.to_owned(), 10, FinishReason::Length, &rules(dialect));
            assert!(turn.calls.is_empty(), "{text}");
            assert_eq!(turn.text, text);
        }
    }
}

#[test]
fn turns_beyond_the_bounds_are_one_malformed_call() {
    let good = "<tool_call>{\"name\":\"f\"}</tool_call>";
    let rules = rules(Dialect::Json);
    let long = good.to_owned() + &"é".repeat(MAX_CHARS);
    let turn = parse_turn(long.clone(), 9, FinishReason::Stop, &rules);
    assert_eq!(shown(&turn), [format!("!the turn is longer than {MAX_CHARS} characters")]);
    let [ParsedCall::Malformed { raw, .. }] = &turn.calls[..] else { panic!("one call") };
    assert!(raw.len() <= MAX_RAW && raw.starts_with(good));
    assert!(parse_turn(long, 9, FinishReason::Length, &rules).calls.is_empty());
    let turn = parse_turn(good.to_owned(), MAX_IDS + 1, FinishReason::Stop, &rules);
    assert_eq!(shown(&turn), [format!("!the turn is longer than {MAX_IDS} ids")]);
    let fits = "é".repeat(MAX_CHARS - good.len()) + good;
    assert_eq!(shown(&parse_turn(fits, MAX_IDS, FinishReason::Stop, &rules)), ["f({})"]);
}

#[test]
fn repeated_and_cut_blocks_do_not_hang() {
    let start = Instant::now();
    for dialect in [Dialect::Json, Dialect::FunctionTags] {
        let repeated = "<tool_call>a</tool_call>".repeat(23) + "X";
        assert_eq!(turn(&repeated, dialect).calls.len(), 23);
        let cut = "<tool_call>a</tool_call>".repeat(22) + "<tool_call>a</tool_ca";
        assert_eq!(turn(&cut, dialect).calls.len(), 23);
        let cut = parse_turn(cut, 99, FinishReason::Length, &rules(dialect));
        assert!(cut.calls.is_empty());
    }
    assert!(start.elapsed() < Duration::from_secs(1));
}

#[test]
fn time_is_linear_on_a_megabyte_of_hostile_blocks() {
    let start = Instant::now();
    for unit in common::HOSTILE_UNITS {
        let text = unit.repeat((1 << 20) / unit.len());
        for dialect in [Dialect::Json, Dialect::FunctionTags] {
            read_calls(&text, &rules(dialect));
        }
    }
    // Linear, this takes well under a second; quadratic, hours.
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
}
