//! Plays an episode with a program in the policy's place: for baselines, scripted games to learn from,
//! and tests.

use protocol::{ParsedCall, TraceRow};
use serde_json::{Map, Value};

use crate::{CallPermit, EnvironmentSpec, EpisodeKey, Fault, Recorder, Recording};

/// A call that a scripted player makes: one a turn.
#[derive(Clone, Debug, PartialEq)]
pub struct Move {
    /// The tool's name.
    pub tool: String,
    /// Its arguments.
    pub arguments: Map<String, Value>,
}

impl Move {
    /// A call of `tool` with arguments given as a JSON object; any other JSON value counts as none.
    pub fn new(tool: &str, arguments: Value) -> Self {
        let arguments = match arguments {
            Value::Object(map) => map,
            _ => Map::new(),
        };
        Self { tool: tool.into(), arguments }
    }

    /// The call as the recorder takes it.
    pub fn to_call(&self) -> ParsedCall {
        ParsedCall::Call {
            name: self.tool.clone(),
            arguments: Value::Object(self.arguments.clone()).to_string(),
        }
    }
}

/// A program in the policy's place: it is shown the reset text and the rows so far, and makes a move
/// or none.
pub type Player = Box<dyn FnMut(&str, &[TraceRow]) -> Option<Move>>;

/// Plays one episode, asking `player` for a move until the episode ends, the player has none, or
/// `max_turns` are made. The player is shown the reset text and the rows so far.
///
/// # Errors
/// A fault of the environment.
pub fn play(
    spec: &EnvironmentSpec,
    key: EpisodeKey<'_>,
    max_turns: u32,
    mut player: impl FnMut(&str, &[TraceRow]) -> Option<Move>,
) -> Result<Recording, Fault> {
    let mut recorder = Recorder::start(spec.open()?, key, spec.limits())?;
    for turn in 0..max_turns {
        if recorder.done() {
            break;
        }
        let Some(chosen) = player(recorder.reset_text(), recorder.rows()) else { break };
        recorder.call(turn, &chosen.to_call(), CallPermit::Run)?;
    }
    recorder.finish()
}
