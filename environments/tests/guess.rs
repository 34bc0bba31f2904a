//! The guessing game keeps its rules.

mod support;

use environments::{
    CallPermit, Move, Recorder, Simulation,
    guess::{Guess, Settings},
    play,
};
use protocol::{CallKind, TraceRow};
use serde_json::{Map, json};
use support::{guess, guessing, key, recorder, spec, task};

fn target(seed: u64, settings: Settings) -> u64 {
    let mut game = Guess::new(settings);
    game.reset(&Map::new(), seed).expect("resets");
    game.target()
}

/// The guess that halves what the answers so far leave of 1..=n.
fn halving(n: i64, rows: &[TraceRow]) -> Move {
    let (mut low, mut high) = (1, n);
    for row in rows {
        let middle = (low + high) / 2;
        match row.observation.as_str() {
            "higher" => low = middle + 1,
            _ => high = middle - 1,
        }
    }
    Move::new("guess", json!({"value": (low + high) / 2}))
}

#[test]
fn binary_search_finds_every_target_of_eight_but_one() {
    let spec = guessing();
    let task = task("{}");
    let mut solved = [None; 9];
    let mut successes = 0;
    for seed in 0..200 {
        let recording =
            play(&spec, key(&task, seed), 10, |_, rows| Some(halving(8, rows))).expect("no fault");
        let success = recording.score.success;
        assert_eq!(recording.score.reward, f64::from(u8::from(success)));
        assert_eq!(recording.score.milestones["solved"], success);
        successes += usize::from(success);
        let target = target(seed, Settings::default());
        let place = &mut solved[usize::try_from(target).expect("small")];
        assert!(place.is_none_or(|known| known == success), "the target decides");
        *place = Some(success);
    }
    assert_eq!(solved.iter().filter(|known| **known == Some(true)).count(), 7);
    assert_eq!(solved[8], Some(false), "1 to 7 are the seven halvings");
    let rate = f64::from(successes as u32) / 200.0;
    assert!((0.8..0.95).contains(&rate), "{rate}");
}

#[test]
fn a_seed_hides_one_number_and_targets_are_uniform_over_seeds() {
    for n in [1, 7, 8, 1_000_000] {
        let settings = Settings { n, max_turns: 3 };
        for seed in [0, 1, u64::MAX] {
            let hidden = target(seed, settings);
            assert_eq!(hidden, target(seed, settings));
            assert!((1..=n).contains(&hidden));
        }
    }
    let (seeds, n) = (8000_u32, 8_usize);
    let mut counts = vec![0.0; n];
    for seed in 0..seeds {
        let hidden = target(seed.into(), Settings::default());
        counts[usize::try_from(hidden).expect("small") - 1] += 1.0;
    }
    let expected = f64::from(seeds) / n as f64;
    let chi_square: f64 = counts.iter().map(|count| (count - expected).powi(2) / expected).sum();
    // 7 degrees of freedom: 24.3 is exceeded once in a thousand times.
    assert!(chi_square < 24.3, "{chi_square}");
}

#[test]
fn answers_end_and_milestone_are_those_of_the_rules() {
    let spec = guessing();
    let seed = (0..).find(|seed| target(*seed, Settings::default()) == 4).expect("some");
    let mut episode = recorder(&spec, seed);
    assert_eq!(episode.reset_text(), "The number is between 1 and 8. You have 3 guesses.");
    for (turn, value, answer, done) in [(0, -100, "higher", false), (1, 8, "lower", false)] {
        let row = episode.call(turn, &guess(value), CallPermit::Run).expect("runs");
        assert_eq!((row.observation.as_str(), row.done, row.kind), (answer, done, CallKind::Ok));
        assert!(row.milestones.is_empty());
    }
    let row = episode.call(2, &guess(4), CallPermit::Run).expect("runs");
    assert_eq!((row.observation.as_str(), row.done), ("correct", true));
    assert_eq!(row.milestones, ["solved"]);
    let row = episode.call(3, &guess(4), CallPermit::Run).expect("records");
    assert_eq!(row.kind, CallKind::AfterDone);
    assert_eq!(row.observation, r#"{"error": "The episode is over."}"#);
    let recording = episode.finish().expect("scores");
    assert!(recording.score.success);
    assert_eq!(spec.score_trace(&recording.rows), Some(recording.score));
}

#[test]
fn the_episode_ends_with_the_last_guess_and_a_later_one_is_an_error() {
    let seed = (0..).find(|seed| target(*seed, Settings::default()) == 8).expect("some");
    let mut episode = recorder(&guessing(), seed);
    for (turn, value) in [(0, 1), (1, -5), (2, i64::MIN)] {
        let row = episode.call(turn, &guess(value), CallPermit::Run).expect("runs");
        assert_eq!((row.observation.as_str(), row.done), ("higher", turn == 2));
    }
    let score = episode.finish().expect("scores").score;
    assert_eq!((score.reward, score.success), (0.0, false));

    let mut game = Guess::new(Settings::default());
    game.reset(&Map::new(), seed).expect("resets");
    let arguments = json!({"value": 8}).as_object().cloned().expect("an object");
    assert_eq!(game.call("guess", &arguments), Ok("correct".into()));
    let over = game.call("guess", &arguments).expect_err("over");
    assert_eq!(over.0, "Game over.");
    let fresh = Guess::new(Settings::default()).call("guess", &arguments);
    assert!(fresh.is_err(), "a game that was never reset is over");
}

#[test]
fn refused_calls_do_not_use_up_guesses() {
    let mut episode = recorder(&guessing(), 1);
    for bad in [support::call("guess", "{}"), support::call("Guess", "{}")] {
        episode.call(0, &bad, CallPermit::Run).expect("records");
    }
    episode.call(0, &guess(1), CallPermit::OverLimit).expect("records");
    assert!(!episode.done());
    assert!(episode.rows().iter().all(|row| !row.done));
}

#[test]
fn a_task_overrides_the_settings_within_their_bounds() {
    let spec = guessing();
    let start = |fields: &str| {
        let task = task(fields);
        let environment = spec.open().expect("opens");
        let checked = spec.check_task(&task).map_err(|error| error.to_string());
        let started = Recorder::start(environment, key(&task, 5), spec.limits());
        assert_eq!(checked.is_ok(), started.is_ok());
        started.map(|r| r.reset_text().to_owned()).map_err(|e| e.to_string())
    };
    assert_eq!(
        start(r#"{"n":100,"max_turns":1,"split":"train","more":[1]}"#),
        Ok("The number is between 1 and 100. You have 1 guess.".into())
    );
    for (fields, message) in [
        (r#"{"n":0}"#, "task \"t-1\": task.n must be an integer from 1 to 1000000, not 0"),
        (r#"{"n":null}"#, "task \"t-1\": task.n must be an integer from 1 to 1000000, not null"),
        (
            r#"{"max_turns":101}"#,
            "task \"t-1\": task.max_turns must be an integer from 1 to 100, not 101",
        ),
    ] {
        assert_eq!(start(fields), Err(message.into()));
    }
    for fields in ["", "[]", "3", "{", &"[".repeat(100_000)] {
        assert!(start(fields).is_err_and(|error| error.contains("the task object cannot be read")));
    }
}

#[test]
fn the_prompt_says_what_the_settings_are() {
    let large = spec(json!({"name": "guess", "n": 1_000_000, "max_turns": 20}));
    let episode = recorder(&large, 0);
    assert_eq!(episode.reset_text(), "The number is between 1 and 1000000. You have 20 guesses.");
    assert_eq!(episode.tools()[0].parameters["properties"]["value"]["type"], "integer");
}
