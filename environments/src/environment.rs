//! What an episode talks to, wherever it runs: in this process, in a child process, behind a socket.
//!
//! Methods may block; whoever must not wait calls them from a thread of its own. An environment is
//! opened for one episode and dropped after it: dropping is closing.

use std::{collections::BTreeMap, fmt, ops::RangeInclusive};

use protocol::{Image, Task};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{Fault, Raised, ToolSpec};

/// Whether a learner can play an episode again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Determinism {
    /// Task, seed and calls decide every observation: replay must give the same rows.
    Deterministic,
    /// What happened is only known from its recording.
    Recorded,
}

impl fmt::Display for Determinism {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Deterministic => "deterministic",
            Self::Recorded => "recorded",
        })
    }
}

/// What an environment says about itself. Stays the same for as long as it is open.
#[derive(Clone, Debug, PartialEq)]
pub struct Description {
    /// Its name, for messages.
    pub name: String,
    /// Changes whenever the same task, seed and calls could give other rows.
    pub version: String,
    /// Its tools, in the order in which the policy is shown them.
    pub tools: Vec<ToolSpec>,
    /// Every milestone that it can ever set, in order. At most 64 of at most 64 bytes.
    pub milestones: Vec<String>,
    /// The bounds of its reward.
    pub reward_range: RangeInclusive<f64>,
    /// Whether replay is possible.
    pub determinism: Determinism,
    /// Whether its resets show images.
    pub images: bool,
    /// Whether it takes the text of a turn without calls as the policy's answer.
    pub answers: bool,
}

impl Description {
    /// A built-in game: deterministic, with one tool and a reward of 0 to 1.
    pub(crate) fn of_game(
        name: &str,
        version: &str,
        tool: ToolSpec,
        milestones: impl IntoIterator<Item = &'static str>,
    ) -> Self {
        Self {
            name: name.into(),
            version: version.into(),
            tools: vec![tool],
            milestones: milestones.into_iter().map(str::to_owned).collect(),
            reward_range: 0.0..=1.0,
            determinism: Determinism::Deterministic,
            images: false,
            answers: false,
        }
    }
}

/// What became of a call that ran.
#[derive(Clone, Debug, PartialEq)]
pub struct Reply {
    /// The tool's text, or its error.
    pub result: Result<String, Raised>,
    /// All milestones reached so far in this episode; the recorder finds the new ones.
    pub reached: Vec<String>,
    /// Whether the episode has ended.
    pub done: bool,
}

/// What an episode was worth to its environment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// Finite, within [`Description::reward_range`].
    pub reward: f64,
    /// Strict success: the task is solved, nothing less.
    pub success: bool,
    /// Every declared milestone and whether it was reached.
    pub milestones: BTreeMap<String, bool>,
}

impl Score {
    /// A score over the declared milestones.
    pub fn new<'a>(
        reward: f64,
        success: bool,
        declared: impl IntoIterator<Item = &'a str>,
        reached: impl Fn(&str) -> bool,
    ) -> Self {
        let milestones =
            declared.into_iter().map(|name| (name.to_owned(), reached(name))).collect();
        Self { reward, success, milestones }
    }
}

/// What an episode asks for and the right answer: for baselines, and rows to learn from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Solution {
    /// What is asked for.
    pub name: String,
    /// The answer that solves the episode.
    pub answer: String,
}

/// What is played: tools to call, a question to answer, or both.
///
/// Games are better written as a [`Simulation`](crate::Simulation), which is made one of these. What lives
/// outside of this program implements it directly:
///
/// ```
/// use std::collections::BTreeMap;
///
/// use environments::{Description, Determinism, Environment, Fault, Reply, Score, ToolSpec};
/// use protocol::{Split, Task};
/// use serde_json::{Map, Value, json};
///
/// /// A bell that wants to be rung.
/// struct Bell {
///     about: Description,
///     rung: bool,
/// }
///
/// impl Environment for Bell {
///     fn describe(&self) -> &Description {
///         &self.about
///     }
///
///     fn reset(&mut self, _: &Task, _seed: u64) -> Result<Option<String>, Fault> {
///         self.rung = false;
///         Ok(Some("There is a bell.".into()))
///     }
///
///     fn call(&mut self, _tool: &str, _: &Map<String, Value>) -> Result<Reply, Fault> {
///         self.rung = true;
///         Ok(Reply { result: Ok("Ding.".into()), reached: Vec::new(), done: true })
///     }
///
///     fn score(&mut self) -> Result<Score, Fault> {
///         let reward = if self.rung { 1.0 } else { 0.0 };
///         Ok(Score { reward, success: self.rung, milestones: BTreeMap::new() })
///     }
/// }
///
/// let ring = ToolSpec::new("ring", "Rings the bell.", json!({"type": "object", "properties": {}}));
/// let about = Description {
///     name: "bell".into(),
///     version: "1".into(),
///     tools: vec![ring],
///     milestones: Vec::new(),
///     reward_range: 0.0..=1.0,
///     determinism: Determinism::Deterministic,
///     images: false,
///     answers: false,
/// };
/// let task = Task { id: "1".into(), prompt: "Ring it.".into(), fields: "{}".into(), split: Split::Train };
/// let mut bell = Bell { about, rung: false };
/// bell.reset(&task, 7)?;
/// bell.call("ring", &Map::new())?;
/// assert!(bell.score()?.success);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Environment: Send {
    /// What it is.
    fn describe(&self) -> &Description;

    /// Starts an episode and forgets every earlier one.
    ///
    /// Returns the text that the policy is shown after the task's prompt, if any.
    ///
    /// # Errors
    /// A fault: the row does not fit, or the environment broke.
    fn reset(&mut self, task: &Task, seed: u64) -> Result<Option<String>, Fault>;

    /// The images that the reset showed the policy, in order; before its text. Asked for once, right
    /// after the reset.
    ///
    /// # Errors
    /// A fault.
    fn images(&mut self) -> Result<Vec<Image>, Fault> {
        Ok(Vec::new())
    }

    /// Takes the policy's answer, which ends the episode: the text of a turn without calls, as the chat
    /// format reads it (without reasoning, trimmed). Returns all milestones reached so far.
    ///
    /// # Errors
    /// A fault. A wrong answer is no fault.
    fn answer(&mut self, _text: &str) -> Result<Vec<String>, Fault> {
        Ok(Vec::new())
    }

    /// Runs a tool that it has, with arguments that fit the tool's schema. What the call changed
    /// counts, even where it raised.
    ///
    /// # Errors
    /// A fault. A tool's own error is no fault: it is in the reply.
    fn call(&mut self, tool: &str, arguments: &Map<String, Value>) -> Result<Reply, Fault>;

    /// The score of the episode so far.
    ///
    /// # Errors
    /// A fault.
    fn score(&mut self) -> Result<Score, Fault>;
}
