//! The frozen lake keeps its rules.

mod support;

use std::collections::BTreeSet;

use environments::{CallPermit, EnvironmentSpec, Recorder, Recording, draws::Draws, play};
use protocol::{CallKind, ParsedCall, Split};
use serde_json::{Value, json};
use support::{call, key, recorder, spec, task};

fn lake(size: u64, slip: u64) -> EnvironmentSpec {
    spec(json!({
        "name": "frozen_lake", "size": size, "slip_percent": slip, "max_moves": 200,
        "reward": "progress",
    }))
}

fn step(direction: &str) -> ParsedCall {
    call("move", &json!({"direction": direction}).to_string())
}

fn grid(text: &str) -> Vec<Vec<char>> {
    let rows = text.lines().filter(|line| !line.contains("ou") && !line.contains("edge"));
    rows.map(|row| row.split(' ').filter_map(|tile| tile.chars().next()).collect()).collect()
}

fn place(grid: &[Vec<char>], wanted: char) -> Option<(usize, usize)> {
    let tiles = grid.iter().enumerate().flat_map(|(row, tiles)| {
        tiles.iter().enumerate().map(move |(column, tile)| ((row, column), *tile))
    });
    tiles.filter(|(_, tile)| *tile == wanted).map(|(place, _)| place).next()
}

#[test]
fn steps_go_where_they_say_and_end_in_holes_at_the_goal_and_at_the_limit() {
    let spec = lake(4, 0);
    let moves = [("up", -1, 0), ("right", 0, 1), ("down", 1, 0), ("left", 0, -1)];
    let mut ends = BTreeSet::new();
    for seed in 0..300u64 {
        let mut episode = recorder(&spec, seed);
        let start = grid(episode.reset_text());
        let (mut row, mut column) = place(&start, 'P').expect("a player");
        assert_eq!((row, column), (0, 0));
        let mut wandering = Draws::new("wandering", seed);
        for turn in 0..60u32 {
            let (name, down, right) = *wandering.pick(&moves).expect("four");
            let inside = |at: usize, by: i64| {
                usize::try_from(i64::try_from(at).expect("small") + by).ok().filter(|at| *at < 4)
            };
            if let (Some(next_row), Some(next_column)) = (inside(row, down), inside(column, right))
            {
                (row, column) = (next_row, next_column);
            }
            let said = episode.call(turn, &step(name), CallPermit::Run).expect("runs").clone();
            assert_eq!(place(&grid(&said.observation), 'P'), Some((row, column)), "{seed}");
            let (fell, won) = (start[row][column] == 'O', start[row][column] == 'G');
            assert_eq!(said.done, fell || won);
            assert_eq!(said.milestones.contains(&"goal".to_owned()), won);
            assert_eq!(said.observation.starts_with("You fell"), fell);
            if said.done {
                ends.insert(fell);
                break;
            }
        }
        let score = episode.finish().expect("scores").score;
        assert_eq!(score.success, start[row][column] == 'G');
    }
    assert_eq!(ends.len(), 2, "some fell and some arrived");
}

#[test]
fn the_expert_reaches_the_goal_on_long_maps() {
    for size in [2, 4, 8, 16] {
        let spec = lake(size, 0);
        for task in spec.draw_dataset(Split::Train, 0, 20).expect("tasks") {
            let player = spec.expert(&task).expect("can play").expect("there is one");
            let recording = play(&spec, key(&task, 9), 400, player).expect("plays");
            assert!(recording.score.success);
            assert!(recording.rows.len() as u64 >= 2 * size - 2);
            assert!(recording.rows.iter().all(|row| row.kind == CallKind::Ok));
            assert!(recording.score.milestones.values().all(|reached| *reached));
            assert_eq!(spec.score_trace(&recording.rows), Some(recording.score));
        }
    }
}

#[test]
fn slips_follow_from_the_seed_and_come_as_often_as_they_should() {
    let spec = spec(json!({
        "name": "frozen_lake", "size": 16, "holes_percent": 0, "slip_percent": 50, "max_moves": 512,
    }));
    let wander = |seed| -> Recording {
        let mut episode = recorder(&spec, seed);
        for turn in 0..100 {
            let direction = if turn % 2 == 0 { "right" } else { "left" };
            episode.call(turn, &step(direction), CallPermit::Run).expect("runs");
        }
        episode.finish().expect("scores")
    };
    assert_eq!(wander(4).rows, wander(4).rows);
    assert_ne!(wander(4).rows, wander(5).rows);
    let slipped = (0..20).flat_map(|seed| wander(seed).rows);
    let slipped = slipped.filter(|row| row.observation.starts_with("You slipped")).count();
    assert!((900..1100).contains(&slipped), "{slipped} of 2000");
}

#[test]
fn maps_of_one_split_are_never_asked_in_the_other() {
    let spec = lake(4, 0);
    let maps = |split| -> BTreeSet<String> {
        let tasks = spec.draw_dataset(split, 3, 60).expect("tasks");
        let shown = |task: &protocol::Task| {
            spec.check_task(task).expect("fits");
            let environment = spec.open().expect("opens");
            let episode = Recorder::start(environment, key(task, 77), spec.limits());
            episode.expect("resets").reset_text().to_owned()
        };
        tasks.iter().map(shown).collect()
    };
    assert!(maps(Split::Train).is_disjoint(&maps(Split::Eval)));
    for (fields, fits) in [(r#"{"map":7}"#, true), ("{}", true), (r#"{"map":-1}"#, false)] {
        assert_eq!(spec.check_task(&task(fields)).is_ok(), fits);
    }
    let other: Value = json!({"name": "frozen_lake", "size": 17});
    let error = EnvironmentSpec::parse(&other).expect_err("refused").to_string();
    assert_eq!(error, "environment.size must be an integer from 2 to 16, not 17");
}
