//! A trace that was altered by one value is told apart, and by a name of its own: by the pure check
//! where the trace contradicts itself, else by replay, even where the forger re-builds the chain.

mod support;

use environments::{
    CallPermit, Claim, EnvironmentSpec, EpisodeKey, RecordedCall, Recording, ReplayError,
    ReplayMismatch, TraceError, check::Expected, check_trace, replay, verify_replay,
};
use protocol::{CallKind, Digest, LeaseId, ParsedCall, RunId, TraceRow};
use support::{Vice, call, guess, key, malformed, odd, recorder, spec, task};

fn game() -> EnvironmentSpec {
    let limits =
        serde_json::json!({"calls_per_turn": 3, "observation_chars": 64, "reset_chars": 64});
    spec(serde_json::json!({"name": "guess", "n": 8, "max_turns": 3, "limits": limits}))
}

/// One row of every kind, in this order: Ok, BadArgs, UnknownTool, Malformed, OverLimit (permit),
/// Ok, Ok, AfterDone.
fn honest() -> Recording {
    let mut episode = recorder(&game(), 8);
    let calls: [(u32, ParsedCall, CallPermit); 8] = [
        (0, guess(1), CallPermit::Run),
        (0, call("guess", "{}"), CallPermit::Run),
        (0, call("gues", "{}"), CallPermit::Run),
        (1, malformed("{", "not JSON"), CallPermit::Run),
        (1, guess(2), CallPermit::OverLimit),
        (2, guess(2), CallPermit::Run),
        (2, guess(3), CallPermit::Run),
        (2, guess(4), CallPermit::Run),
    ];
    for (turn, made, permit) in &calls {
        episode.call(*turn, made, *permit).expect("no fault");
    }
    let recording = episode.finish().expect("scores");
    let kinds: Vec<CallKind> = recording.rows.iter().map(|row| row.kind).collect();
    use CallKind::{AfterDone, BadArgs, Malformed, Ok, OverLimit, UnknownTool};
    assert_eq!(kinds, [Ok, BadArgs, UnknownTool, Malformed, OverLimit, Ok, Ok, AfterDone]);
    recording
}

fn check(recording: &Recording) -> Result<(), TraceError> {
    let description = game().describe().expect("opens");
    check_trace(key(&task("{}"), 8), &description, &game().limits(), Claim::from(recording))
}

fn verify(recording: &Recording) -> Result<Recording, ReplayError> {
    verify_replay(&game(), key(&task("{}"), 8), Claim::from(recording))
}

fn rechained(mut recording: Recording) -> Recording {
    let task = task("{}");
    let mut chain = key(&task, 8).chain(&recording.reset_text, &[]);
    for row in &mut recording.rows {
        row.chain = chain.push(row);
    }
    recording.head = chain.head();
    recording
}

#[test]
fn an_honest_trace_passes_and_replays_equal() {
    let recording = honest();
    assert_eq!(check(&recording), Ok(()));
    assert_eq!(verify(&recording).as_ref(), Ok(&recording));
    let calls: Vec<_> = recording.rows.iter().map(RecordedCall::from_row).collect();
    assert_eq!(replay(&game(), key(&task("{}"), 8), &calls, None), Ok(recording));
}

type Forge = fn(&mut Vec<TraceRow>);

#[test]
fn self_contradicting_traces_are_named_by_the_pure_check() {
    let kind = |row, found, expected| TraceError::Kind { row, found, expected };
    let only = Expected::Only;
    let table: Vec<(&str, Forge, TraceError)> = vec![
        ("ok becomes raised", |r| r[0].kind = CallKind::Raised, TraceError::NotAnError { row: 0 }),
        (
            "refused becomes ok",
            |r| r[1].kind = CallKind::Ok,
            kind(1, CallKind::Ok, only(CallKind::BadArgs)),
        ),
        (
            "ok becomes refused",
            |r| r[0].kind = CallKind::BadArgs,
            kind(0, CallKind::BadArgs, Expected::Ran),
        ),
        (
            "unknown becomes bad arguments",
            |r| r[2].kind = CallKind::BadArgs,
            kind(2, CallKind::BadArgs, only(CallKind::UnknownTool)),
        ),
        (
            "a call after the end that ran",
            |r| r[7].kind = CallKind::Ok,
            kind(7, CallKind::Ok, only(CallKind::AfterDone)),
        ),
        (
            "an early after-done",
            |r| r[5].kind = CallKind::AfterDone,
            kind(5, CallKind::AfterDone, Expected::Ran),
        ),
        (
            "one call over the turn's limit that ran",
            |r| {
                r[7].done = false;
                r[6].done = false;
                let mut more = r[6].clone();
                more.call = 3;
                r[7] = TraceRow { call: 2, ..r[6].clone() };
                r.push(more);
            },
            kind(8, CallKind::Ok, only(CallKind::OverLimit)),
        ),
        (
            "a malformed call with a name",
            |r| r[3].tool = "guess".into(),
            TraceError::MalformedTool { row: 3 },
        ),
        (
            "a softened refusal",
            |r| r[1].observation = "correct".into(),
            TraceError::RefusalText { row: 1 },
        ),
        (
            "a malformed call that is shown no error",
            |r| r[3].observation = "fine".into(),
            TraceError::RefusalText { row: 3 },
        ),
        (
            "an over-long observation",
            |r| r[0].observation = "x".repeat(65),
            TraceError::ObservationTooLong { row: 0, limit: 64 },
        ),
        (
            "an unknown milestone",
            |r| r[0].milestones.push("rich".into()),
            TraceError::MilestoneUnknown { row: 0 },
        ),
        (
            "a milestone on a refused call",
            |r| r[1].milestones.push("solved".into()),
            TraceError::MilestoneNotRun { row: 1 },
        ),
        (
            "a milestone twice",
            |r| {
                r[0].milestones.push("solved".into());
                r[5].milestones.push("solved".into());
            },
            TraceError::MilestoneRepeated { row: 5, name: "solved".into() },
        ),
        ("done at a refused call", |r| r[4].done = true, TraceError::DoneNotRun { row: 4 }),
        ("done taken back", |r| r[7].done = false, TraceError::DoneTakenBack { row: 7 }),
        ("turns swapped", |r| r.swap(0, 5), TraceError::TurnOrder { row: 1 }),
        (
            "calls swapped",
            |r| r.swap(0, 1),
            TraceError::CallOrder { row: 0, expected: 0, found: 1 },
        ),
        (
            "a row removed",
            |r| drop(r.remove(1)),
            TraceError::CallOrder { row: 1, expected: 1, found: 2 },
        ),
    ];
    for (name, forge, expected) in table {
        let mut forged = honest();
        forge(&mut forged.rows);
        assert_eq!(check(&forged), Err(expected.clone()), "{name}");
        assert_eq!(check(&rechained(forged)), Err(expected), "{name}, chain re-built");
    }
}

#[test]
fn consistent_forgeries_break_the_chain() {
    let table: Vec<(&str, Forge, usize)> = vec![
        ("an edited observation", |r| r[0].observation = "correct".into(), 0),
        ("an added milestone", |r| r[5].milestones.push("solved".into()), 5),
        ("edited arguments", |r| r[5].arguments = r#"{"value":7}"#.into(), 5),
        ("another turn", |r| r[7].turn = 2, 8),
        (
            "two rows' contents reordered",
            |r| {
                r.swap(5, 6);
                r[5].call = 0;
                r[6].call = 1;
                r[5].done = false;
                r[6].done = true;
            },
            5,
        ),
        ("an edited chain value", |r| r[2].chain = Digest::of(b"x"), 2),
    ];
    for (name, forge, row) in table {
        let mut forged = honest();
        forge(&mut forged.rows);
        let expected =
            if row < forged.rows.len() { Err(TraceError::Chain { row }) } else { Ok(()) };
        assert_eq!(check(&forged), expected, "{name}");
    }
    let mut forged = honest();
    forged.rows.pop();
    assert_eq!(check(&forged), Err(TraceError::Head));
    let mut forged = honest();
    forged.head = Digest::of(b"x");
    assert_eq!(check(&forged), Err(TraceError::Head));
    let mut forged = honest();
    forged.reset_text.push('!');
    assert_eq!(check(&forged), Err(TraceError::Chain { row: 0 }));
    forged.reset_text = "x".repeat(65);
    assert_eq!(check(&forged), Err(TraceError::ResetTooLong { limit: 64 }));
}

#[test]
fn replay_names_the_field_even_where_the_chain_was_rebuilt() {
    let table: Vec<(&str, Forge, ReplayMismatch)> = vec![
        ("kind", |r| r[0].kind = CallKind::Raised, ReplayMismatch::Kind(0)),
        ("milestone", |r| r[5].milestones.push("solved".into()), ReplayMismatch::Milestones(5)),
        ("observation", |r| r[0].observation = "lower".into(), ReplayMismatch::Observation(0)),
        ("done", |r| r[5].done = true, ReplayMismatch::Done(5)),
        ("call index", |r| r[0].call = 1, ReplayMismatch::Call(0)),
        ("malformed tool", |r| r[3].tool = "guess".into(), ReplayMismatch::Tool(3)),
    ];
    for (name, forge, expected) in table {
        let mut forged = honest();
        forge(&mut forged.rows);
        let found = verify(&rechained(forged));
        assert_eq!(found, Err(ReplayError::Differs(expected)), "{name}");
    }
    let mut forged = honest();
    forged.reset_text.push('!');
    assert_eq!(verify(&rechained(forged)), Err(ReplayError::Differs(ReplayMismatch::ResetText)));
    let mut forged = honest();
    forged.rows[2].chain = Digest::of(b"x");
    assert_eq!(verify(&forged), Err(ReplayError::Differs(ReplayMismatch::Chain(2))));
    forged = honest();
    forged.rows.clear();
    assert_eq!(verify(&forged), Err(ReplayError::Differs(ReplayMismatch::Head)));
    forged = honest();
    forged.rows[7].turn = 0;
    assert!(matches!(verify(&forged), Err(ReplayError::Fault(_))));
}

#[test]
fn reordered_calls_of_an_environment_with_state_do_not_replay() {
    let odd = odd(Vice::None);
    let task = task("{}");
    let mut episode = recorder(&odd, 8);
    for (turn, n) in [(0, 1), (1, 2)] {
        let made = call("add", &format!("{{\"n\":{n}}}"));
        episode.call(turn, &made, CallPermit::Run).expect("runs");
    }
    let mut forged = episode.finish().expect("scores");
    forged.rows.swap(0, 1);
    (forged.rows[0].turn, forged.rows[1].turn) = (0, 1);
    let forged = rechained(forged);
    let description = odd.describe().expect("opens");
    let claim = Claim::from(&forged);
    assert_eq!(check_trace(key(&task, 8), &description, &odd.limits(), claim), Ok(()));
    let found = verify_replay(&odd, key(&task, 8), claim);
    assert_eq!(found, Err(ReplayError::Differs(ReplayMismatch::Observation(0))));
}

#[test]
fn a_trace_belongs_to_its_run_lease_task_and_seed() {
    let recording = honest();
    let task_a = task("{}");
    let mut task_b = task("{}");
    task_b.id = "t-2".into();
    let true_key = key(&task_a, 8);
    let others: [(&str, EpisodeKey<'_>); 5] = [
        ("run", EpisodeKey { run: RunId(Digest::of(b"other")), ..true_key }),
        ("group", EpisodeKey { lease: LeaseId { group: 4, generation: 1 }, ..true_key }),
        ("generation", EpisodeKey { lease: LeaseId { group: 3, generation: 2 }, ..true_key }),
        ("task", EpisodeKey { task: &task_b, ..true_key }),
        ("seed", key(&task_a, 9)),
    ];
    let description = game().describe().expect("opens");
    for (name, other) in others {
        let checked = check_trace(other, &description, &game().limits(), Claim::from(&recording));
        assert_eq!(checked, Err(TraceError::Chain { row: 0 }), "{name}");
        let replayed = verify_replay(&game(), other, Claim::from(&recording));
        assert!(matches!(replayed, Err(ReplayError::Differs(_))), "{name}");
    }
}

#[test]
fn raised_rows_are_checked_too() {
    let odd = odd(Vice::None);
    let mut episode = recorder(&odd, 1);
    episode.call(0, &call("add_then_fail", r#"{"n":10}"#), CallPermit::Run).expect("runs");
    episode.call(1, &call("win", "{}"), CallPermit::Run).expect("runs");
    let mut recording = episode.finish().expect("scores");
    let task = task("{}");
    let check = |recording: &Recording| {
        let description = odd.describe().expect("opens");
        check_trace(key(&task, 1), &description, &odd.limits(), Claim::from(recording))
    };
    assert_eq!(check(&recording), Ok(()));
    recording.rows[1].milestones = vec!["won".into(), "ten".into()];
    recording.rows[0].milestones.clear();
    assert_eq!(check(&recording), Err(TraceError::MilestoneOrder { row: 1 }));
    recording.rows[0].observation = r#"{"error":"no space"}"#.into();
    assert_eq!(check(&recording), Err(TraceError::NotAnError { row: 0 }));
}
