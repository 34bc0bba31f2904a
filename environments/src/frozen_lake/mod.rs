//! `frozen_lake`: cross a frozen lake on a map of text, one step a call, without falling into a hole.
//!
//! Settings: `size` (2 to 16, default 4), tiles of a side; `holes_percent` (0 to 40, default 20), the
//! chance of a hole on each tile; `slip_percent` (0 to 50, default 0), the chance that a step goes to one
//! of the two sides instead; `max_moves` (1 to 512, default 50); `reward`, `goal` (the default) or
//! `progress`.
//!
//! The map is drawn from the task's `map` (a whole number), else from the seed, again and again until the
//! goal can be reached; slips are drawn from the seed. The start is the upper left tile, the goal the
//! lower right one. A step against the edge stays where it is and counts. The episode ends at the goal,
//! in a hole, or after `max_moves`.
//!
//! Milestones, each when the shortest way from a tile that was reached is at most that part of the whole
//! way: `three_quarters`, `half`, `quarter` of it left; and `goal`. Reward 1 for `goal`, else 0, or with
//! `progress` 0.2 for each of the others.

mod board;

use std::{collections::BTreeSet, sync::Arc};

use protocol::{Digest, Split, Task, TraceRow};
use serde_json::{Map, Value, json};

use self::board::{Board, DIRECTIONS};
use crate::{
    Blueprint, Description, Environment, Fault, Move, Player, Raised, Score, Simulated, Simulation,
    SpecError, ToolSpec,
    draws::Draws,
    fields::{Fields, task_fields},
    spec,
};

/// Its name in recipes.
pub const NAME: &str = "frozen_lake";

const VERSION: &str = "frozen_lake-1";
const STEP: &str = "move";
const GOAL: &str = "goal";
/// What is left of the way, in quarters.
const LEFT: [(&str, usize); 3] = [("three_quarters", 3), ("half", 2), ("quarter", 1)];
/// The largest map number: what every reader of JSON keeps.
const LARGEST: u64 = (1 << 53) - 1;

/// The lake's settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Settings {
    size: usize,
    holes_percent: u64,
    slip_percent: u64,
    max_moves: u64,
    /// Whether coming closer pays.
    progress: bool,
}

pub(crate) fn parse(fields: &mut Fields<'_>) -> Result<Arc<dyn Blueprint>, SpecError> {
    Ok(Arc::new(Settings {
        size: usize::try_from(fields.integer("size", 4, 2..=16)?).unwrap_or(4),
        holes_percent: fields.integer("holes_percent", 20, 0..=40)?,
        slip_percent: fields.integer("slip_percent", 0, 0..=50)?,
        max_moves: fields.integer("max_moves", 50, 1..=512)?,
        progress: fields.choice("reward", false, &[("goal", false), ("progress", true)])?,
    }))
}

/// The map that a task asks for, by its number.
fn asked(task: &Map<String, Value>) -> Result<Option<u64>, SpecError> {
    let mut fields = Fields::new("task", task);
    let number = fields.integer("map", 0, 0..=LARGEST)?;
    Ok(task.contains_key("map").then_some(number))
}

impl Settings {
    fn board(&self, number: u64) -> Board {
        Board::draw(self.size, self.holes_percent, number)
    }

    fn score(&self, reached: impl Fn(&str) -> bool) -> Score {
        let goal = reached(GOAL);
        let parts = LEFT.iter().filter(|(name, _)| reached(name)).count();
        let partial = if self.progress { parts as f64 / 5.0 } else { 0.0 };
        Score::new(if goal { 1.0 } else { partial }, goal, milestones(), reached)
    }
}

fn milestones() -> impl Iterator<Item = &'static str> {
    LEFT.into_iter().map(|(name, _)| name).chain([GOAL])
}

impl Blueprint for Settings {
    fn name(&self) -> &str {
        NAME
    }

    fn version(&self) -> String {
        VERSION.into()
    }

    fn settings(&self) -> Map<String, Value> {
        spec::settings(json!({
            "size": self.size,
            "holes_percent": self.holes_percent,
            "slip_percent": self.slip_percent,
            "max_moves": self.max_moves,
            "reward": if self.progress { "progress" } else { "goal" },
        }))
    }

    fn check_task(&self, task: &Task) -> Result<(), SpecError> {
        asked(&task_fields(task)?).map(|_| ())
    }

    fn open(&self) -> Result<Box<dyn Environment>, Fault> {
        let tool = ToolSpec::new(
            STEP,
            "Move one tile. Answers with the map: P you, G goal, O hole, . ice.",
            json!({
                "type": "object",
                "properties": {
                    "direction": {
                        "type": "string", "enum": DIRECTIONS, "description": "Where to go.",
                    },
                },
                "required": ["direction"],
            }),
        );
        let description = Description::of_game(NAME, VERSION, tool, milestones());
        Ok(Box::new(Simulated::new(Lake::new(*self), description)))
    }

    fn score(&self, reached: &BTreeSet<&str>) -> Option<Score> {
        Some(self.score(|name| reached.contains(name)))
    }

    /// A fifth of all maps, by their layout, is asked in evaluation only. Where a size has too few maps
    /// for that, the last one drawn is taken.
    fn draw_task(&self, split: Split, draws: &mut Draws) -> Option<(String, Map<String, Value>)> {
        let mut number = 0;
        for _ in 0..100 {
            number = draws.bits() >> 11;
            let layout = Digest::of(self.board(number).show(0).as_bytes());
            let held_out = layout.0.first().is_some_and(|byte| byte.is_multiple_of(5));
            if held_out == (split == Split::Eval) {
                break;
            }
        }
        let task = spec::settings(json!({"map": number}));
        Some(("Reach the goal without falling into a hole.\n".into(), task))
    }

    /// Takes a shortest way by the map that it was shown last.
    fn expert(&self, task: &Task) -> Result<Option<Player>, SpecError> {
        asked(&task_fields(task)?)?;
        Ok(Some(Box::new(next_move)))
    }
}

fn next_move(reset: &str, rows: &[TraceRow]) -> Option<Move> {
    let (board, player) = Board::read(rows.last().map_or(reset, |row| &row.observation))?;
    let open = (0..DIRECTIONS.len()).filter_map(|direction| {
        let tile = board.beside(player, direction)?;
        Some((board.distance(tile)?, direction))
    });
    let (_, direction) = open.min()?;
    Some(Move::new(STEP, json!({"direction": DIRECTIONS.get(direction)?})))
}

/// The game.
struct Lake {
    settings: Settings,
    board: Board,
    slips: Draws,
    player: usize,
    moves: u64,
    /// The shortest way left from any tile that was reached.
    nearest: usize,
}

impl Lake {
    /// A lake that no one has set foot on: play starts with a reset.
    fn new(settings: Settings) -> Self {
        let board = Board::new(settings.size, vec![false; settings.size * settings.size]);
        let slips = Draws::new("rollcall-frozen-lake-slips-v1", 0);
        let nearest = usize::MAX;
        Self { settings, board, slips, player: 0, moves: settings.max_moves, nearest }
    }

    fn step(&mut self, direction: usize) -> String {
        self.moves += 1;
        // Drawn at every step, so that the slips of a seed do not depend on the map.
        let slips = self.slips.chance(self.settings.slip_percent * 10);
        let side = if self.slips.chance(500) { 1 } else { 3 };
        let taken = if slips { (direction + side) % DIRECTIONS.len() } else { direction };
        let next = self.board.beside(self.player, taken);
        self.player = next.unwrap_or(self.player);
        if let Some(distance) = self.board.distance(self.player) {
            self.nearest = self.nearest.min(distance);
        }
        let said = if self.board.hole(self.player) {
            "You fell into a hole."
        } else if self.player == self.board.goal() {
            "You reached the goal."
        } else if slips {
            "You slipped."
        } else if next.is_none() {
            "There is the edge."
        } else {
            "You moved."
        };
        format!("{said}\n{}", self.board.show(self.player))
    }
}

impl Simulation for Lake {
    fn reset(&mut self, task: &Map<String, Value>, seed: u64) -> Result<Option<String>, SpecError> {
        let board = self.settings.board(asked(task)?.unwrap_or(seed));
        let nearest = board.distance(0).unwrap_or(usize::MAX);
        let slips = Draws::new("rollcall-frozen-lake-slips-v1", seed);
        *self = Self { settings: self.settings, board, slips, player: 0, moves: 0, nearest };
        Ok(Some(self.board.show(0)))
    }

    fn call(&mut self, _: &str, arguments: &Map<String, Value>) -> Result<String, Raised> {
        if self.done() {
            return Err(Raised::new("Game over."));
        }
        let asked = arguments.get("direction").and_then(Value::as_str);
        let direction = DIRECTIONS.iter().position(|name| Some(*name) == asked);
        direction.map(|direction| self.step(direction)).ok_or_else(|| Raised::new("No direction."))
    }

    fn done(&self) -> bool {
        self.moves >= self.settings.max_moves
            || self.board.hole(self.player)
            || self.player == self.board.goal()
    }

    fn reached(&self) -> Vec<String> {
        let whole = self.board.distance(0).unwrap_or_default();
        let near = |quarters: usize| self.nearest.saturating_mul(4) <= whole * quarters;
        let parts = LEFT.into_iter().filter(|(_, quarters)| near(*quarters));
        let goal = (self.nearest == 0).then_some(GOAL);
        parts.map(|(name, _)| name).chain(goal).map(str::to_owned).collect()
    }

    fn score(&self) -> Score {
        let reached = self.reached();
        self.settings.score(|name| reached.iter().any(|known| known == name))
    }
}
