//! The frames environment: what it draws, what an answer is worth, and that all of it is held to the
//! trace.

mod support;

use std::collections::{BTreeMap, BTreeSet};

use environments::{
    CallPermit, Claim, Determinism, EnvironmentSpec, Recorder, Recording, ReplayError,
    ReplayMismatch, TraceError, check_trace, probe, verify_replay,
};
use protocol::{CallKind, Digest, Image, Split, Task};
use serde_json::{Value, json};
use support::{call, guessing, key, spec, task};

fn frames() -> EnvironmentSpec {
    spec(json!({"name": "frames"}))
}

fn red_square() -> Task {
    task(r#"{"target": "red square"}"#)
}

fn start(spec: &EnvironmentSpec, task: &Task, seed: u64) -> Recorder {
    Recorder::start(spec.open().expect("opens"), key(task, seed), spec.limits()).expect("resets")
}

fn answered(spec: &EnvironmentSpec, task: &Task, seed: u64, text: &str) -> Recording {
    let mut episode = start(spec, task, seed);
    episode.answer(0, text).expect("no fault").expect("an answer");
    episode.finish().expect("scores")
}

fn image(spec: &EnvironmentSpec, task: &Task, seed: u64) -> Image {
    start(spec, task, seed).images().first().expect("a frame").clone()
}

fn code(spec: &EnvironmentSpec, task: &Task, seed: u64) -> String {
    spec.solution(task, seed).expect("fits").expect("known").answer
}

#[test]
fn a_frame_is_a_function_of_settings_task_and_seed_on_every_machine() {
    let frame = image(&frames(), &red_square(), 7);
    assert_eq!((frame.width(), frame.height()), (64, 64));
    // From a second implementation of the same definition, in Python.
    assert_eq!(
        frame.digest().to_string(),
        "823cfefabf916840d2e1563839440fffc1221608c73fa5400f6be63b5c9f675f"
    );
    let wide = spec(json!({"name": "frames", "width": 128, "height": 32, "noise": 0}));
    assert_eq!(
        image(&wide, &red_square(), 7).digest().to_string(),
        "e9a6f7f9939e67bd979b25d773f8392c03bc9ca71faa0c52b61be1e1028218cf"
    );
    let all: BTreeSet<Digest> =
        (0..50).map(|seed| image(&frames(), &red_square(), seed).digest()).collect();
    assert_eq!(all.len(), 50);
}

/// Reads the code off the pixels: the box around the target's colour.
fn read_off(frame: &Image, colour: [u8; 3], levels: u32) -> String {
    let (mut left, mut right, mut top, mut bottom) = (u32::MAX, 0, u32::MAX, 0);
    for (index, pixel) in (0_u32..).zip(frame.pixels().chunks(3)) {
        let (x, y) = (index % frame.width(), index / frame.width());
        if pixel == colour {
            (left, right) = (left.min(x), right.max(x));
            (top, bottom) = (top.min(y), bottom.max(y));
        }
    }
    let (width, height) = (frame.width() / levels, frame.height() / levels);
    let radius = (right - left) / 2;
    let size = radius + levels - width.min(height) / 2;
    let (column, row) = ((left + right) / 2 / width, (top + bottom) / 2 / height);
    format!("{column}{row}{size}")
}

#[test]
fn the_code_can_be_read_off_the_pixels() {
    // One shape: every colour is there once at most.
    let spec =
        spec(json!({"name": "frames", "digits": 3, "shapes": 1, "colours": 5, "objects": 4}));
    let targets = [("red", [220, 50, 47]), ("blue", [50, 100, 220]), ("white", [245, 245, 245])];
    for (name, colour) in targets {
        let task = task(&json!({"target": format!("{name} square")}).to_string());
        for seed in 0..60 {
            let frame = image(&spec, &task, seed);
            assert_eq!(
                read_off(&frame, colour, 4),
                code(&spec, &task, seed),
                "{name}, seed {seed}"
            );
        }
    }
}

#[test]
fn every_code_occurs_about_equally_often() {
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    for seed in 0..1600 {
        *seen.entry(code(&frames(), &red_square(), seed)).or_default() += 1;
    }
    assert_eq!(seen.len(), 16);
    assert!(seen.values().all(|count| (60..=150).contains(count)), "{seen:?}");
}

#[test]
fn training_and_evaluation_ask_about_different_cells_of_each_target() {
    for levels in [2, 3, 4, 7, 8] {
        let spec = spec(json!({"name": "frames", "levels": levels, "colours": 5}));
        let asked = |split: Split| {
            let rows = spec.draw_dataset(split, 1, 1500).expect("drawn");
            let pairs = rows.iter().enumerate().map(|(index, task)| {
                let solution = spec.solution(task, index as u64).expect("fits").expect("known");
                assert!(task.prompt.contains(&solution.name), "{}", task.prompt);
                (solution.name, solution.answer)
            });
            pairs.collect::<BTreeSet<_>>()
        };
        let (train, eval) = (asked(Split::Train), asked(Split::Eval));
        assert!(train.is_disjoint(&eval), "{levels} levels");
        let names = |pairs: &BTreeSet<(String, String)>| {
            pairs.iter().map(|(name, _)| name.clone()).collect::<BTreeSet<_>>().len()
        };
        assert_eq!((names(&train), names(&eval)), (15, 15), "{levels} levels");
    }
}

#[test]
fn a_prompt_is_written_as_for_rows_or_shorter() {
    for prompt in ["Find the {name}.", "Find the {{ name }}.", "Find the {{name}}."] {
        let spec = spec(json!({"name": "frames", "prompt": prompt}));
        for task in spec.draw_dataset(Split::Train, 0, 5).expect("drawn") {
            let name = spec.solution(&task, 0).expect("fits").expect("known").name;
            assert_eq!(task.prompt, format!("Find the {name}."));
        }
    }
}

#[test]
fn an_answer_scores_by_its_digits_and_by_nothing_else() {
    let (spec, task) = (frames(), red_square());
    let right = code(&spec, &task, 5);
    let wrong = |digit: char| if digit == '0' { '1' } else { '0' };
    let [first, second] = [right.chars().next().expect("two"), right.chars().nth(1).expect("two")];
    for (text, reward) in [
        (right.clone(), 1.0),
        (format!("{first}{}", wrong(second)), 0.5),
        (format!("{}{second}", wrong(first)), 0.5),
        // Too short: what is missing is wrong.
        (first.to_string(), 0.5),
        (String::new(), 0.0),
        // Too long, with text around it or with a space in it: guessing on does not pay.
        (format!("{right}0"), 0.0),
        (format!("{first} {second}"), 0.0),
        (format!("The code is {right}."), 0.0),
        // No digit is wrong at its place.
        (format!("x{second}"), 0.5),
        ("１２".into(), 0.0),
    ] {
        let recording = answered(&spec, &task, 5, &text);
        assert_eq!(recording.score.reward, reward, "{text:?}");
        assert_eq!(recording.score.success, reward == 1.0, "{text:?}");
        let row = &recording.rows[0];
        let half = recording.score.milestones["digit_1"] as usize
            + recording.score.milestones["digit_2"] as usize;
        assert_eq!(row.milestones.len(), half);
        assert_eq!((row.kind, row.arguments.as_str(), row.done), (CallKind::Answer, &*text, true));
        assert_eq!(spec.score_trace(&recording.rows).as_ref(), Some(&recording.score));
    }
    let silent = start(&spec, &task, 5).finish().expect("scores");
    assert_eq!((silent.score.reward, silent.rows.len()), (0.0, 0));
}

#[test]
fn a_target_that_the_task_does_not_name_is_named_by_the_reset() {
    let spec = frames();
    let unnamed = task("{}");
    let mut names = BTreeSet::new();
    for seed in 0..40 {
        let solution = spec.solution(&unnamed, seed).expect("fits").expect("known");
        let said = start(&spec, &unnamed, seed).reset_text().to_owned();
        assert_eq!(said, format!("The target is the {}.", solution.name));
        names.insert(solution.name);
    }
    assert!(names.len() > 5, "{names:?}");
    assert_eq!(start(&spec, &red_square(), 1).reset_text(), "");
}

#[test]
fn an_answer_is_recorded_chained_checked_and_replayed() {
    let (spec, task) = (frames(), red_square());
    let honest = answered(&spec, &task, 5, &code(&spec, &task, 5));
    let description = spec.describe().expect("opens");
    let check = |recording: &Recording| {
        check_trace(key(&task, 5), &description, &spec.limits(), Claim::from(recording))
    };
    let verify =
        |recording: &Recording| verify_replay(&spec, key(&task, 5), Claim::from(recording));
    let rechained = |mut recording: Recording| {
        let mut chain = key(&task, 5).chain(&recording.reset_text, &recording.reset_images);
        for row in &mut recording.rows {
            row.chain = chain.push(row);
        }
        recording.head = chain.head();
        recording
    };
    assert_eq!(check(&honest), Ok(()));
    assert_eq!(verify(&honest).as_ref(), Ok(&honest));
    let forged = |change: fn(&mut Recording)| {
        let mut recording = honest.clone();
        change(&mut recording);
        rechained(recording)
    };
    for (recording, error) in [
        (forged(|it| it.rows[0].tool = "move".into()), TraceError::AnswerShape { row: 0 }),
        (forged(|it| it.rows[0].observation = "right".into()), TraceError::AnswerShape { row: 0 }),
        (forged(|it| it.rows[0].done = false), TraceError::AnswerShape { row: 0 }),
        (forged(|it| it.rows[0].arguments = "0".repeat(9000)), TraceError::AnswerShape { row: 0 }),
        (
            forged(|it| {
                let mut again = it.rows[0].clone();
                (again.call, again.milestones) = (1, Vec::new());
                it.rows.push(again);
            }),
            TraceError::AnswerNotTaken { row: 1 },
        ),
    ] {
        assert_eq!(check(&recording), Err(error));
        assert!(verify(&recording).is_err());
    }
    let differs = |recording: Recording| match verify(&recording) {
        Err(ReplayError::Differs(differs)) => differs,
        other => panic!("{other:?}"),
    };
    let claimed = forged(|it| it.rows[0].arguments = "99".into());
    assert_eq!(check(&claimed), Ok(()));
    assert_eq!(differs(claimed), ReplayMismatch::Milestones(0));
}

#[test]
fn images_are_part_of_the_chain_and_of_the_replay() {
    let (spec, task) = (frames(), red_square());
    let honest = answered(&spec, &task, 5, "00");
    assert_eq!(honest.reset_images, [honest.images[0].digest()]);
    let plain = key(&task, 5).chain("", &[]);
    assert_ne!(plain.head(), key(&task, 5).chain("", &honest.reset_images).head());
    let other = image(&spec, &task, 6).digest();
    let differs = |images: Vec<Digest>| {
        let claim = Claim { reset_images: &images, ..Claim::from(&honest) };
        match verify_replay(&spec, key(&task, 5), claim) {
            Err(ReplayError::Differs(differs)) => differs,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(differs(vec![other]), ReplayMismatch::Image(0));
    assert_eq!(differs(vec![]), ReplayMismatch::Images { claimed: 0, replayed: 1 });
    let twice = vec![honest.reset_images[0]; 2];
    assert_eq!(differs(twice), ReplayMismatch::Images { claimed: 2, replayed: 1 });
}

#[test]
fn environments_that_take_no_answers_have_no_answer_rows() {
    let game = guessing();
    let plain = task("{}");
    let mut episode = start(&game, &plain, 1);
    let guess = call("guess", r#"{"value":1}"#);
    episode.call(0, &guess, CallPermit::Run).expect("no fault");
    assert_eq!(episode.answer(1, "I give up."), Ok(None));
    let recording = episode.finish().expect("scores");
    assert_eq!(recording.rows.len(), 1);
    let mut forged = recording;
    forged.rows[0] = protocol::TraceRow {
        kind: CallKind::Answer,
        tool: String::new(),
        observation: String::new(),
        done: true,
        ..forged.rows[0].clone()
    };
    let description = game.describe().expect("opens");
    let found = check_trace(key(&plain, 1), &description, &game.limits(), Claim::from(&forged));
    assert_eq!(found, Err(TraceError::AnswerNotTaken { row: 0 }));
}

#[test]
fn after_an_answer_nothing_runs() {
    let (spec, task) = (frames(), red_square());
    let mut episode = start(&spec, &task, 5);
    episode.answer(0, "00").expect("no fault");
    assert!(episode.done());
    assert_eq!(episode.answer(1, "11"), Ok(None));
    let row = episode.call(1, &call("look", "{}"), CallPermit::Run).expect("no fault");
    assert_eq!(row.kind, CallKind::AfterDone);
}

#[test]
fn a_probe_finds_it_fit_to_train_on() {
    let report = probe(&frames(), &task("{}"), 3).expect("no fault");
    assert_eq!((report.verdict(), report.calls), (Determinism::Deterministic, 0));
    assert!(report.answered);
}

#[test]
fn mistakes_name_the_field_and_a_remedy() {
    let error = |section: Value| {
        let mut section = section;
        section["name"] = "frames".into();
        EnvironmentSpec::parse(&section).expect_err("refused").to_string()
    };
    for (section, message) in [
        (json!({"width": 48}), "environment.width must be a multiple of 32 from 32 to 512, not 48"),
        (
            json!({"height": 544}),
            "environment.height must be a multiple of 32 from 32 to 512, not 544",
        ),
        (json!({"digits": 4}), "environment.digits must be an integer from 1 to 3, not 4"),
        (
            json!({"levels": 10}),
            "environment.levels must be at most 8 where a frame has 64 x 64 pixels and a code 2 \
             digits, not 10",
        ),
        (
            json!({"levels": 5, "digits": 3}),
            "environment.levels must be at most 4 where a frame has 64 x 64 pixels and a code 3 \
             digits, not 5",
        ),
        (
            json!({"objects": 9, "shapes": 2}),
            "environment.objects must be at most 8 where there are 8 names and 16 cells, not 9",
        ),
        (
            json!({"prompt": "Where is it?"}),
            "environment.prompt must be a text of at most 4096 bytes with {name} in it, not \
             \"Where is it?\"",
        ),
    ] {
        assert_eq!(error(section), message);
    }
    let wrong = frames().check_task(&task(r#"{"target": "red house"}"#)).expect_err("refused");
    let wrong = wrong.to_string();
    assert!(wrong.starts_with("task.target must be one of red square, green square,"), "{wrong}");
    assert!(wrong.ends_with("not \"red house\""), "{wrong}");
}
