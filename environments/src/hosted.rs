//! What all environments that run outside this program have in common: how long they may take, what
//! their reward means, and that their claim to be deterministic is tested before anything relies on it.

use std::{collections::BTreeSet, fmt, sync::Arc, time::Duration};

use protocol::{Split, Task};
use serde_json::{Map, Value, json};

use crate::{
    Blueprint, Description, Determinism, Environment, EnvironmentSpec, Fault, Limits, Score,
    SpecError, ToolSpec,
    fields::{Fields, task_fields},
    probe, spec,
};

/// The settings that such sections share.
#[derive(Clone, Debug)]
pub(crate) struct Common {
    reward_range: (f64, f64),
    /// The least reward that counts as strict success.
    success_reward: f64,
    call_seconds: u64,
    reset_seconds: u64,
    claimed: Determinism,
    probe_task: Map<String, Value>,
}

impl Common {
    pub(crate) fn parse(fields: &mut Fields<'_>) -> Result<Self, SpecError> {
        let determinisms =
            [("deterministic", Determinism::Deterministic), ("recorded", Determinism::Recorded)];
        let reward_range = fields.range("reward_range", (0.0, 1.0))?;
        Ok(Self {
            reward_range,
            success_reward: fields.number("success_reward", reward_range.1, reward_range)?,
            call_seconds: fields.integer("call_seconds", 30, 1..=3600)?,
            reset_seconds: fields.integer("reset_seconds", 60, 1..=3600)?,
            claimed: fields.choice("determinism", Determinism::Deterministic, &determinisms)?,
            probe_task: fields.object("probe_task")?.cloned().unwrap_or_default(),
        })
    }

    pub(crate) fn settings(&self) -> Map<String, Value> {
        spec::settings(json!({
            "reward_range": [self.reward_range.0, self.reward_range.1],
            "success_reward": self.success_reward,
            "call_seconds": self.call_seconds,
            "reset_seconds": self.reset_seconds,
            "determinism": self.claimed,
            "probe_task": self.probe_task,
        }))
    }

    /// How long a call may take.
    pub(crate) fn call(&self) -> Duration {
        Duration::from_secs(self.call_seconds)
    }

    /// How long a reset may take.
    pub(crate) fn reset(&self) -> Duration {
        Duration::from_secs(self.reset_seconds)
    }

    /// What a reward is worth; nothing where it is not one that this section allows.
    pub(crate) fn score(&self, reward: f64) -> Option<Score> {
        let (low, high) = self.reward_range;
        let success = reward >= self.success_reward;
        (low..=high).contains(&reward).then(|| Score {
            reward,
            success,
            milestones: Default::default(),
        })
    }

    pub(crate) fn describe(
        &self,
        name: &str,
        version: String,
        tools: Vec<ToolSpec>,
    ) -> Description {
        Description {
            name: name.into(),
            version,
            tools,
            milestones: Vec::new(),
            reward_range: self.reward_range.0..=self.reward_range.1,
            determinism: self.claimed,
            images: false,
            answers: false,
        }
    }
}

/// One that plays episodes outside this program.
pub(crate) trait Host: fmt::Debug + Send + Sync + 'static {
    /// As it stands in the section.
    fn name(&self) -> &str;
    fn version(&self) -> String;
    fn common(&self) -> &Common;
    /// An episode, from its reset on. One that is played `beside` others of this program
    /// does not wait until they end.
    fn play(self: &Arc<Self>, description: Description, beside: bool) -> Box<dyn Environment>;

    /// The score of an episode whose reward is `reward`.
    fn score(&self, reward: f64) -> Result<Score, Fault> {
        self.common().score(reward).ok_or_else(|| {
            let (low, high) = self.common().reward_range;
            Fault::Contract {
                environment: self.name().into(),
                what: format!(
                    "reward {reward} is outside environment.reward_range, {low} to {high}: widen it"
                ),
            }
        })
    }
}

/// The same description with its claim tested: what does not repeat its episodes is only recorded.
pub(crate) fn tested<H: Host>(
    host: &Arc<H>,
    mut description: Description,
) -> Result<Description, Fault> {
    let common = host.common();
    if common.claimed == Determinism::Recorded {
        return Ok(description);
    }
    let claim = Claim { host: host.clone(), description: description.clone() };
    let spec = EnvironmentSpec::custom(Arc::new(claim), Limits::default());
    let task = Task {
        id: "probe".into(),
        prompt: String::new(),
        fields: Value::Object(common.probe_task.clone()).to_string(),
        split: Split::Train,
    };
    let report = probe(&spec, &task, 0).map_err(|fault| match fault {
        busy @ Fault::Busy { .. } => busy,
        fault => Fault::Probe { environment: host.name().into(), fault: Box::new(fault) },
    })?;
    description.determinism = report.verdict();
    Ok(description)
}

/// The row that a reset is given: the task's fields over what every episode has.
pub(crate) fn row(task: &Task, mut row: Map<String, Value>) -> Result<Map<String, Value>, Fault> {
    row.extend(task_fields(task).map_err(|error| Fault::Task { task: task.id.clone(), error })?);
    Ok(row)
}

/// A host before its claim was tested: what the probe plays.
#[derive(Debug)]
struct Claim<H> {
    host: Arc<H>,
    description: Description,
}

impl<H: Host> Blueprint for Claim<H> {
    fn name(&self) -> &str {
        self.host.name()
    }

    fn version(&self) -> String {
        self.host.version()
    }

    fn settings(&self) -> Map<String, Value> {
        Map::new()
    }

    fn check_task(&self, _: &Task) -> Result<(), SpecError> {
        Ok(())
    }

    fn open(&self) -> Result<Box<dyn Environment>, Fault> {
        Ok(self.host.play(self.description.clone(), false))
    }

    fn open_beside(&self) -> Result<Box<dyn Environment>, Fault> {
        Ok(self.host.play(self.description.clone(), true))
    }

    fn score(&self, _: &BTreeSet<&str>) -> Option<Score> {
        None
    }
}
