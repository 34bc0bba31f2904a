//! Random call sequences never panic, always make a consistent trace, and replay identically.

mod support;

use environments::{
    CallPermit, Claim, EnvironmentSpec, RecordedCall, Recorder, arguments, check_trace, replay,
    verify_replay,
};
use proptest::{collection::vec, prelude::*};
use protocol::ParsedCall;
use serde_json::json;
use support::{Vice, key, odd, spec, task};

fn arguments_text() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => (-2i64..12).prop_map(|n| format!("{{\"value\":{n}}}")),
        2 => (-2i64..12).prop_map(|n| format!("{{\"n\":\"{n}\"}}")),
        1 => any::<String>().prop_map(|text| json!({"text": text}).to_string()),
        1 => any::<f64>().prop_map(|n| format!("{{\"value\":{n:e}}}")),
        1 => any::<String>(),
        1 => Just("{}".to_owned()),
        1 => (0usize..400).prop_map(|depth| {
            format!("{{\"value\":{}{}}}", "[".repeat(depth), "]".repeat(depth))
        }),
    ]
}

fn parsed() -> impl Strategy<Value = ParsedCall> {
    let name = prop_oneof![
        6 => Just("guess".to_owned()),
        6 => prop_oneof![Just("add"), Just("add_then_fail"), Just("say")].prop_map(str::to_owned),
        1 => Just("win".to_owned()),
        1 => any::<String>(),
    ];
    prop_oneof![
        8 => (name, arguments_text())
            .prop_map(|(name, arguments)| ParsedCall::Call { name, arguments }),
        1 => (any::<String>(), any::<String>())
            .prop_map(|(raw, reason)| ParsedCall::Malformed { raw, reason }),
    ]
}

fn office_call() -> impl Strategy<Value = ParsedCall> {
    let numbers = prop_oneof![Just(417i64), any::<i64>(), 0i64..1000];
    let expression =
        prop_oneof!["[0-9]{1,3}[*+-][0-9]{1,3}", "[-+*()0-9 a]{0,40}", any::<String>()];
    prop_oneof![
        4 => Just(("lookup", json!({"order": 417}))),
        2 => numbers.clone().prop_map(|number| ("lookup", json!({"order": number}))),
        4 => expression.prop_map(|text| ("calculate", json!({"expression": text}))),
        1 => numbers.prop_map(|number| ("submit", json!({"answer": number.to_string()}))),
    ]
    .prop_map(|(name, arguments)| ParsedCall::Call {
        name: name.into(),
        arguments: arguments.to_string(),
    })
}

fn script() -> impl Strategy<Value = Vec<(u32, ParsedCall, bool)>> {
    vec((0u32..2, parsed(), proptest::bool::weighted(0.9)), 0..40).prop_map(|steps| {
        let mut turn = 0;
        steps
            .into_iter()
            .map(|(step, call, run)| {
                turn += step;
                (turn, call, run)
            })
            .collect()
    })
}

fn holds(spec: &EnvironmentSpec, seed: u64, script: &[(u32, ParsedCall, bool)]) {
    let task = task(r#"{"reset":"seed SEED"}"#);
    let key = key(&task, seed);
    let mut episode =
        Recorder::start(spec.open().expect("opens"), key, spec.limits()).expect("resets");
    let mut given = Vec::new();
    for (turn, call, run) in script {
        let permit = if *run { CallPermit::Run } else { CallPermit::OverLimit };
        episode.call(*turn, call, permit).expect("no fault");
        given.push(RecordedCall { turn: *turn, call: call.clone(), permit });
    }
    let recording = episode.finish().expect("scores");
    let description = spec.describe().expect("opens");
    let claim = Claim::from(&recording);
    assert_eq!(check_trace(key, &description, &spec.limits(), claim), Ok(()));
    assert_eq!(replay(spec, key, &given, None).as_ref(), Ok(&recording));
    assert_eq!(verify_replay(spec, key, claim).as_ref(), Ok(&recording), "from the rows alone");
    if let Some(score) = spec.score_trace(&recording.rows) {
        assert_eq!(score, recording.score);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn random_guessing_replays_identically(seed in any::<u64>(), script in script()) {
        let limits = json!({"calls_per_turn": 3, "observation_chars": 64, "reset_chars": 64});
        holds(&spec(json!({"name": "guess", "n": 8, "max_turns": 20, "limits": limits})), seed, &script);
    }

    #[test]
    fn random_calls_of_a_raising_environment_replay_identically(
        seed in any::<u64>(), script in script(),
    ) {
        holds(&odd(Vice::None), seed, &script);
    }

    #[test]
    fn random_office_work_replays_identically(
        seed in any::<u64>(), calls in vec(office_call(), 0..20),
    ) {
        let script: Vec<_> = (0..).zip(calls).map(|(turn, call)| (turn, call, true)).collect();
        let section = json!({"name": "office", "level": 3, "error_percent": 50, "max_calls": 12});
        holds(&spec(section), seed, &script);
    }

    #[test]
    fn fitted_arguments_fit_again(text in arguments_text()) {
        for tool in odd(Vice::None).tools().expect("opens") {
            if let Ok(fitted) = arguments::fit(&tool, &text) {
                let again = serde_json::Value::Object(fitted.clone()).to_string();
                prop_assert_eq!(arguments::fit(&tool, &again), Ok(fitted));
            }
        }
    }
}
