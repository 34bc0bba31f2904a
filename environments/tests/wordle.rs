//! Wordle keeps its rules.

mod support;

use environments::{CallPermit, EnvironmentSpec, Recorder, play};
use protocol::{CallKind, ParsedCall, Split};
use serde_json::json;
use support::{call, key, recorder, spec, task};

fn wordle() -> EnvironmentSpec {
    spec(json!({"name": "wordle", "reward": "places"}))
}

fn asking(word: &str) -> protocol::Task {
    task(&json!({"word": word}).to_string())
}

fn guess(word: &str) -> ParsedCall {
    call("guess", &json!({"word": word}).to_string())
}

#[test]
fn answers_milestones_and_reward_are_those_of_the_rules() {
    let (spec, task) = (wordle(), asking("abide"));
    let mut episode =
        Recorder::start(spec.open().expect("opens"), key(&task, 1), spec.limits()).expect("resets");
    assert_eq!(episode.reset_text(), "A word of five letters is hidden. You have 6 guesses.");
    let row = episode.call(0, &guess("SPEED"), CallPermit::Run).expect("runs").clone();
    assert_eq!(row.observation, "S P E E D\nX X Y X Y");
    assert!(row.milestones.is_empty() && !row.done);
    let row = episode.call(1, &guess("aside"), CallPermit::Run).expect("runs").clone();
    assert_eq!(row.observation, "A S I D E\nG X G G G");
    assert_eq!(row.milestones, ["place_1", "place_3", "place_4", "place_5"]);
    let row = episode.call(2, &guess("abide"), CallPermit::Run).expect("runs").clone();
    assert_eq!((row.milestones, row.done), (vec!["place_2".to_owned(), "solved".into()], true));
    let row = episode.call(3, &guess("abide"), CallPermit::Run).expect("runs").clone();
    assert_eq!(row.kind, CallKind::AfterDone);
    let recording = episode.finish().expect("scores");
    assert_eq!((recording.score.reward, recording.score.success), (1.0, true));
    assert_eq!(spec.score_trace(&recording.rows), Some(recording.score));
}

#[test]
fn guesses_and_errors_both_end_the_episode() {
    let (spec, task) = (wordle(), asking("abide"));
    for (word, kind) in [("aside", CallKind::Ok), ("zzzzz", CallKind::Raised)] {
        let mut episode =
            Recorder::start(spec.open().expect("opens"), key(&task, 1), spec.limits())
                .expect("resets");
        for turn in 0..6 {
            assert!(!episode.done());
            let row = episode.call(turn, &guess(word), CallPermit::Run).expect("runs");
            assert_eq!(row.kind, kind);
        }
        assert!(episode.done());
        let score = episode.finish().expect("scores").score;
        let reward = if kind == CallKind::Ok { 0.4 } else { 0.0 };
        assert_eq!((score.reward, score.success), (reward, false));
    }
    let mut episode = recorder(&spec, 0);
    for text in ["", "cran", "crän", "<|im_end|>", &"x".repeat(10_000)] {
        let row = episode.call(0, &guess(text), CallPermit::Run).expect("records");
        assert_eq!(row.kind, CallKind::Raised);
        assert!(row.observation.chars().count() < 100);
    }
}

#[test]
fn the_expert_finds_nearly_every_word() {
    let spec = wordle();
    let tasks = spec.draw_dataset(Split::Train, 0, 200).expect("tasks");
    let mut solved = 0;
    for task in &tasks {
        spec.check_task(task).expect("fits");
        let player = spec.expert(task).expect("can play").expect("there is one");
        solved += usize::from(play(&spec, key(task, 0), 9, player).expect("plays").score.success);
    }
    assert!(solved >= 180, "{solved} of 200");
}

#[test]
fn words_of_one_split_are_never_asked_in_the_other() {
    let small = spec(json!({"name": "wordle", "words": 40}));
    let words = |split| -> std::collections::BTreeSet<String> {
        let tasks = small.draw_dataset(split, 1, 400).expect("tasks");
        let word = |task: &protocol::Task| {
            let fields: serde_json::Value = serde_json::from_str(&task.fields).expect("JSON");
            fields["word"].as_str().expect("a word").to_owned()
        };
        tasks.iter().map(word).collect()
    };
    let (train, eval) = (words(Split::Train), words(Split::Eval));
    assert_eq!((train.len(), eval.len()), (32, 8));
    assert!(train.is_disjoint(&eval));
    let outside = asking("zebra");
    for (fields, fits) in
        [(asking("sheep").fields, true), ("{}".into(), true), (r#"{"word":"zzzzz"}"#.into(), false)]
    {
        assert_eq!(wordle().check_task(&task(&fields)).is_ok(), fits, "{fields}");
    }
    let error = small.check_task(&outside).map_err(|error| error.to_string());
    let message = "task.word must be one of the 40 words that can be hidden, not \"zebra\"";
    assert!(train.contains("zebra") || eval.contains("zebra") || error == Err(message.into()));
}

#[test]
fn a_seed_hides_one_word_and_seeds_hide_many() {
    let spec = spec(json!({"name": "wordle", "words": 8}));
    let first = |seed| {
        let mut episode = recorder(&spec, seed);
        let row = episode.call(0, &guess("raise"), CallPermit::Run).expect("runs");
        row.observation.clone()
    };
    let seen: std::collections::BTreeSet<String> = (0..60).map(first).collect();
    assert!(seen.len() > 3, "{seen:?}");
    assert_eq!(first(3), first(3));
}

#[test]
fn built_in_games_of_this_kind_keep_their_word_under_a_probe() {
    let lake = spec(json!({"name": "frozen_lake", "size": 8, "slip_percent": 30}));
    for spec in [wordle(), lake] {
        let report = environments::probe(&spec, &task("{}"), 5).expect("no fault");
        assert!(report.findings().is_empty(), "{:?}", report.findings());
        assert_eq!(report.verdict(), environments::Determinism::Deterministic);
    }
}
