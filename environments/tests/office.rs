//! The office keeps its rules: milestones follow from what was done, and strict success excludes errors.

mod support;

use std::collections::BTreeSet;

use environments::{
    CallPermit, Claim, Determinism, EnvironmentSpec, Move, Recorder, Recording, dataset, office,
    play, probe, verify_replay,
};
use protocol::{CallKind, ParsedCall, Split, Task};
use serde_json::{Value, json};
use support::{call, key, spec};

fn office_spec(more: Value) -> EnvironmentSpec {
    let mut section = json!({"name": "office"});
    for (key, value) in more.as_object().expect("an object") {
        section[key] = value.clone();
    }
    spec(section)
}

fn ask(fields: Value) -> Task {
    support::task(&fields.to_string())
}

fn total(order: u64) -> Task {
    ask(json!({"question": "total", "orders": [order]}))
}

fn lookup(order: u64) -> ParsedCall {
    call("lookup", &json!({"order": order}).to_string())
}

fn calculate(expression: &str) -> ParsedCall {
    call("calculate", &json!({"expression": expression}).to_string())
}

fn submit(answer: i64) -> ParsedCall {
    call("submit", &json!({"answer": answer}).to_string())
}

/// Quantity and price of an order, as a look-up shows them.
fn figures(spec: &EnvironmentSpec, task: &Task, seed: u64, order: u64) -> (i64, i64) {
    let mut episode = start(spec, task, seed);
    let row = episode.call(0, &lookup(order), CallPermit::Run).expect("runs");
    let shown: Value = serde_json::from_str(&row.observation).expect("JSON");
    let figure = |name: &str| shown[name].as_i64().expect("a number");
    (figure("quantity"), figure("price"))
}

fn start(spec: &EnvironmentSpec, task: &Task, seed: u64) -> Recorder {
    Recorder::start(spec.open().expect("opens"), key(task, seed), spec.limits()).expect("resets")
}

fn run(spec: &EnvironmentSpec, task: &Task, seed: u64, calls: &[ParsedCall]) -> Recording {
    let mut episode = start(spec, task, seed);
    for (turn, made) in (0..).zip(calls) {
        episode.call(turn, made, CallPermit::Run).expect("no fault");
    }
    let recording = episode.finish().expect("scores");
    assert_eq!(spec.score_trace(&recording.rows).as_ref(), Some(&recording.score));
    recording
}

fn reached(recording: &Recording) -> Vec<&str> {
    let flags = recording.score.milestones.iter().filter(|(_, reached)| **reached);
    flags.map(|(name, _)| name.as_str()).collect()
}

#[test]
fn the_way_through_earns_each_milestone_once_and_then_success() {
    let spec = office_spec(json!({}));
    let task = total(417);
    let (quantity, price) = figures(&spec, &task, 5, 417);
    let expression = format!("{quantity} * {price}");
    let calls = [
        lookup(417),
        lookup(417),
        calculate(&expression),
        calculate(&expression),
        submit(quantity * price),
        submit(quantity * price),
    ];
    let recording = run(&spec, &task, 5, &calls);
    let milestones: Vec<_> = recording.rows.iter().map(|row| row.milestones.join(" ")).collect();
    assert_eq!(milestones, ["lookup_success", "", "calculation_success", "", "success", ""]);
    let observations: Vec<_> = recording.rows.iter().map(|row| row.observation.as_str()).collect();
    assert_eq!(observations[2], (quantity * price).to_string());
    assert_eq!(observations[4], "accepted");
    assert_eq!(recording.rows[5].kind, CallKind::AfterDone);
    assert_eq!((recording.score.reward, recording.score.success), (1.0, true));
    let again = verify_replay(&spec, key(&task, 5), Claim::from(&recording));
    assert_eq!(again, Ok(recording));
}

#[test]
fn the_expert_solves_every_kind_in_both_languages() {
    let spec = office_spec(json!({"level": 3}));
    for task in spec.draw_dataset(Split::Train, 1, 60).expect("draws") {
        let recording =
            play(&spec, key(&task, 9), 10, office::expert(&task).expect("asks")).expect("no fault");
        assert!(recording.score.success, "{}: {:?}", task.prompt, recording.rows);
        assert_eq!(recording.reset_text, "", "the prompt asks");
    }
}

#[test]
fn milestones_need_the_deed_not_the_claim() {
    let spec = office_spec(json!({}));
    let task = total(417);
    let (quantity, price) = figures(&spec, &task, 5, 417);
    let answer = quantity * price;
    let right = format!("{quantity}*{price}");
    let play = |calls: &[ParsedCall]| run(&spec, &task, 5, calls);

    let guessed = play(&[submit(answer)]);
    assert_eq!((reached(&guessed), guessed.score.reward), (vec![], 0.0));
    assert_eq!(guessed.rows[0].observation, "accepted", "right, and yet no strict success");

    let blind = play(&[calculate(&right), submit(answer)]);
    assert!(reached(&blind).is_empty(), "a calculation needs a look-up first");

    let late = play(&[calculate(&right), lookup(417), submit(answer)]);
    assert_eq!(reached(&late), ["lookup_success"]);

    for expression in [
        answer.to_string(),
        format!("{answer}+0"),
        format!("-(-{answer})"),
        format!("{}+{price}", answer - price),
    ] {
        let faked = play(&[lookup(417), calculate(&expression), submit(answer)]);
        assert_eq!(reached(&faked), ["lookup_success"], "{expression}");
        assert_eq!(faked.rows[1].observation, answer.to_string());
    }

    let skipped = play(&[lookup(417), submit(answer)]);
    assert_eq!(reached(&skipped), ["lookup_success"]);

    let wrong = play(&[lookup(417), calculate(&right), submit(answer + 1), submit(answer)]);
    assert_eq!(reached(&wrong), ["calculation_success", "lookup_success"]);
    assert_eq!(wrong.rows[2].observation, "rejected");
    assert_eq!(wrong.rows[3].kind, CallKind::AfterDone, "one answer only");
}

#[test]
fn a_calculation_may_go_by_steps() {
    let spec = office_spec(json!({"level": 3}));
    let task = ask(json!({"question": "sum", "orders": [417, 532]}));
    let (q1, p1) = figures(&spec, &task, 2, 417);
    let (q2, p2) = figures(&spec, &task, 2, 532);
    let answer = q1 * p1 + q2 * p2;
    let recording = run(
        &spec,
        &task,
        2,
        &[
            lookup(417),
            calculate(&format!("{q1}*{p1}")),
            lookup(532),
            calculate(&format!("{q2}*{p2}")),
            calculate(&format!("{}+{}", q1 * p1, q2 * p2)),
            submit(answer),
        ],
    );
    let milestones: Vec<_> = recording.rows.iter().map(|row| row.milestones.join(" ")).collect();
    assert_eq!(milestones, ["", "", "lookup_success", "", "calculation_success", "success"]);
}

#[test]
fn a_right_sum_from_one_order_alone_is_no_calculation() {
    let spec = office_spec(json!({"level": 3}));
    let task = ask(json!({"question": "sum", "orders": [417, 532]}));
    let total = |seed, order| {
        let (quantity, price) = figures(&spec, &task, seed, order);
        quantity * price
    };
    let seed = (0..).find(|seed| total(*seed, 417) == total(*seed, 532)).expect("some");
    let (quantity, price) = figures(&spec, &task, seed, 417);
    let twice = calculate(&format!("{quantity}*{price}+{quantity}*{price}"));
    let early =
        run(&spec, &task, seed, &[lookup(417), twice.clone(), submit(2 * quantity * price)]);
    assert_eq!(early.rows[2].observation, "accepted");
    assert!(reached(&early).is_empty());
    let late = run(&spec, &task, seed, &[lookup(417), lookup(532), twice]);
    assert_eq!(reached(&late), ["calculation_success", "lookup_success"]);
}

#[test]
fn any_tool_error_excludes_strict_success_and_keeps_milestones() {
    let spec = office_spec(json!({}));
    let task = total(417);
    let (quantity, price) = figures(&spec, &task, 5, 417);
    let right = calculate(&format!("{quantity}*{price}"));
    let answer = submit(quantity * price);
    let missing = (100..1000).find(|order| {
        start(&spec, &task, 5)
            .call(0, &lookup(*order), CallPermit::Run)
            .is_ok_and(|row| row.kind == CallKind::Raised)
    });
    for (error, message) in [
        (lookup(missing.expect("some")), "There is no order"),
        (lookup(0), "There is no order 0."),
        (call("lookup", r#"{"order":-1}"#), "There is no order -1."),
        (calculate("1/0"), "Unexpected '/'"),
        (calculate(""), "A number is missing."),
    ] {
        let recording = run(&spec, &task, 5, &[error, lookup(417), right.clone(), answer.clone()]);
        assert_eq!(recording.rows[0].kind, CallKind::Raised);
        assert!(recording.rows[0].observation.contains(message));
        assert_eq!(reached(&recording), ["calculation_success", "lookup_success"]);
        assert_eq!((recording.score.reward, recording.score.success), (0.0, false));
    }
    for refused in [call("look", "{}"), call("lookup", "{}"), call("lookup", r#"{"order":"x"}"#)] {
        let recording =
            run(&spec, &task, 5, &[refused, lookup(417), right.clone(), answer.clone()]);
        assert!(recording.score.success, "a call that never ran is no tool error");
    }
}

#[test]
fn injected_failures_raise_once_and_come_from_the_seed() {
    let spec = office_spec(json!({"error_percent": 20}));
    let fails = |seed| {
        let task = total(417);
        let recording =
            play(&spec, key(&task, seed), 10, office::expert(&task).expect("asks")).expect("plays");
        let raised = recording.rows.iter().filter(|row| row.kind == CallKind::Raised).count();
        assert!(raised <= 1);
        assert_eq!(recording.score.success, raised == 0);
        assert!(recording.score.milestones[office::CALCULATION_SUCCESS], "the expert tries again");
        raised
    };
    let share: usize = (0..500).map(fails).sum();
    assert!((70..130).contains(&share), "{share} of 500 at 20 %");
    assert_eq!((0..50).map(fails).collect::<Vec<_>>(), (0..50).map(fails).collect::<Vec<_>>());

    let sure = office_spec(json!({}));
    for tool in ["lookup", "calculate"] {
        let task = ask(json!({"question": "total", "orders": [417], "error": tool}));
        let expert = office::expert(&task).expect("asks");
        let recording = play(&sure, key(&task, 1), 10, expert).expect("plays");
        let raised: Vec<_> =
            recording.rows.iter().filter(|row| row.kind == CallKind::Raised).collect();
        assert_eq!(raised.len(), 1);
        assert_eq!(raised[0].tool, tool);
        assert!(raised[0].observation.contains("not available right now"));
    }
    let none = ask(json!({"question": "total", "orders": [417], "error": "none"}));
    let always = office_spec(json!({"error_percent": 50}));
    for seed in 0..20 {
        let expert = office::expert(&none).expect("asks");
        assert!(play(&always, key(&none, seed), 10, expert).expect("plays").score.success);
    }
}

#[test]
fn a_task_without_a_question_gets_one_from_the_seed() {
    let ask_in = |language: &str, seed| {
        let spec = office_spec(json!({"language": language, "level": 3}));
        start(&spec, &ask(json!({})), seed).reset_text().to_owned()
    };
    for seed in 0..20 {
        assert!(ask_in("en", seed).ends_with("Look up, calculate, then submit the result."));
        assert!(ask_in("de", seed).ends_with("und reiche dann das Ergebnis ein."));
    }
    let both: BTreeSet<bool> = (0..20).map(|seed| ask_in("both", seed).contains("Look")).collect();
    assert_eq!(both.len(), 2);
    let spec = office_spec(json!({}));
    let german = start(&spec, &ask(json!({"language": "de"})), 1).reset_text().to_owned();
    assert!(german.contains("Auftrag"));
}

#[test]
fn the_table_follows_from_the_seed_and_not_from_the_prompt() {
    let spec = office_spec(json!({}));
    let shown: BTreeSet<(i64, i64)> =
        (0..50).map(|seed| figures(&spec, &total(417), seed, 417)).collect();
    assert!(shown.len() > 40, "an answer cannot be learned by heart");
    assert_eq!(figures(&spec, &total(417), 3, 417), figures(&spec, &total(417), 3, 417));
}

#[test]
fn the_episode_ends_after_its_calls() {
    let spec = office_spec(json!({"max_calls": 3}));
    let recording = run(&spec, &total(417), 1, &[lookup(417), lookup(417), lookup(0), submit(1)]);
    let done: Vec<bool> = recording.rows.iter().map(|row| row.done).collect();
    assert_eq!(done, [false, false, true, true]);
    assert_eq!(recording.rows[3].kind, CallKind::AfterDone);
}

#[test]
fn bad_tasks_and_settings_are_refused_by_field() {
    let spec = office_spec(json!({}));
    for (fields, message) in [
        (
            json!({"question": "average"}),
            r#"task.question must be one of "total", "rebate", "sum", not "average""#,
        ),
        (
            json!({"question": "total"}),
            "task.orders is missing: set it to a list of one integer from 100 to 999",
        ),
        (
            json!({"question": "total", "orders": [1]}),
            "task.orders must be a list of one integer from 100 to 999, not [1]",
        ),
        (
            json!({"question": "total", "orders": [100, 101]}),
            "task.orders must be a list of one integer from 100 to 999, not [100,101]",
        ),
        (
            json!({"question": "sum", "orders": [100, 100]}),
            "task.orders must be a list of 2 different integers from 100 to 999, not [100,100]",
        ),
        (json!({"language": "fr"}), r#"task.language must be one of "en", "de", not "fr""#),
        (
            json!({"error": "submit"}),
            r#"task.error must be one of "none", "lookup", "calculate", not "submit""#,
        ),
    ] {
        let error = spec.check_task(&ask(fields)).expect_err("refused");
        assert_eq!(error.to_string(), message);
    }
    let error = EnvironmentSpec::parse(&json!({"name": "office", "language": "fr"}));
    assert_eq!(
        error.map_err(|error| error.to_string()),
        Err(r#"environment.language must be one of "en", "de", "both", not "fr""#.into())
    );
    assert!(office::expert(&ask(json!({}))).is_err());
}

#[test]
fn datasets_have_unique_ids_and_disjoint_splits() {
    let spec = office_spec(json!({"level": 3, "language": "both"}));
    let draw = |split, seed, count| spec.draw_dataset(split, seed, count).expect("draws");
    let train = draw(Split::Train, 7, 500);
    let eval = draw(Split::Eval, 7, 200);
    let more = draw(Split::Train, 8, 500);
    assert_eq!(train, draw(Split::Train, 7, 500));
    let all: Vec<&Task> = train.iter().chain(&eval).chain(&more).collect();
    let ids: BTreeSet<&str> = all.iter().map(|task| task.id.as_str()).collect();
    assert_eq!(ids.len(), all.len());
    let orders = |tasks: &[Task]| -> BTreeSet<u64> {
        let fields = tasks.iter().map(|task| {
            serde_json::from_str::<Value>(&task.fields).expect("JSON")["orders"].clone()
        });
        fields
            .flat_map(|orders| serde_json::from_value::<Vec<u64>>(orders).expect("numbers"))
            .collect()
    };
    assert!(orders(&train).is_disjoint(&orders(&eval)), "held-out orders stay held out");
    for task in &all {
        assert_eq!(spec.check_task(task), Ok(()));
        let name = if task.split == Split::Train { "train" } else { "eval" };
        assert!(task.fields.starts_with(&format!("{{\"split\":\"{name}\"")));
    }
    let german = train.iter().filter(|task| task.prompt.contains("Ergebnis")).count();
    assert!((200..300).contains(&german), "{german} of 500");

    let guessing = support::guessing().draw_dataset(Split::Eval, 0, 3).expect("draws");
    assert_eq!(
        dataset::row(&guessing[2]).to_string(),
        r#"{"id":"guess-eval-0-2","prompt":"Find the hidden number.\n","task":{"split":"eval","episode_seed":5512061427504065}}"#
    );
    assert_eq!(support::odd(support::Vice::None).draw_dataset(Split::Train, 0, 3), None);
}

#[test]
fn the_office_is_repeatable_isolated_and_forgetful() {
    let spec = office_spec(json!({"level": 3, "error_percent": 50, "max_calls": 64}));
    for seed in 0..10 {
        let report = probe(&spec, &total(417), seed).expect("no fault");
        assert_eq!(report.verdict(), Determinism::Deterministic, "{report:?}");
    }
    let wrong = play(&spec, key(&total(417), 1), 3, |_, _| Some(Move::new("lookup", json!(3))));
    assert!(wrong.is_ok_and(|recording| recording.rows[0].kind == CallKind::BadArgs));
}
