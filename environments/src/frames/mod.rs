//! `frames`: a small picture of coloured shapes and the name of one of them; the answer is a short code
//! of digits that says where it is. One turn, no tools.
//!
//! Settings: `width` and `height` (multiples of 32 from 32 to 512, default 64), `digits` (1 to 3,
//! default 2), `levels` (2 to 10, default 4), `objects` (1 to 16, default 3), `colours` (1 to 8, default
//! 4), `shapes` (1 to 6, default 3), `noise` (0 to 64, default 16; how much brighter a pixel of the
//! ground can be; 0 is plain), `prompt` (the text of drawn tasks; `{name}` or
//! `{{ name }}` stands for the target).
//!
//! The frame is a grid of `levels` columns and rows. Digit 1 is the target's column from the left,
//! digit 2 its row from the top, digit 3 its size from the smallest, each from 0 to `levels` - 1. Every
//! object has another name and another cell. Task fields: `target`, a name (`red square`); without it
//! the seed chooses one and the reset says its name. Where `split` stands in the task, about a seventh
//! of the cells, others for each target, is asked about in evaluation only.
//!
//! The answer is the text of the turn without reasoning, trimmed. Its characters are compared with the
//! code one by one: a character that is another digit, or none, is wrong at its place; what is missing
//! at the end is wrong; more characters than digits are all wrong, so that guessing on does not pay. A
//! turn cut by the token budget, or one that calls tools, gives no answer. Milestones `digit_1` to
//! `digit_3` for right digits; the reward is their share, success is all of them.

mod paint;
mod scene;

use std::{collections::BTreeSet, sync::Arc};

use protocol::{Image, Split, Task};
use serde_json::{Map, Value, json};

use self::scene::{Object, Scene};
use crate::{
    Blueprint, Description, Determinism, Environment, Fault, Raised, Score, Simulated, Simulation,
    Solution, SpecError,
    draws::Draws,
    fields::{Fields, task_fields},
    spec,
};

/// Its name in recipes.
pub const NAME: &str = "frames";

const VERSION: &str = "frames-1";
const MILESTONES: [&str; 3] = ["digit_1", "digit_2", "digit_3"];
/// Stand for the target's name in a prompt: the first are how templates of rows are written.
const HERE: [&str; 3] = ["{{ name }}", "{{name}}", "{name}"];
const PROMPT: &str = "Where is the {name}? Answer with its code.";
/// Longest prompt, in bytes.
const MAX_PROMPT: usize = 4096;

/// The environment's settings.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Settings {
    width: u64,
    height: u64,
    digits: usize,
    levels: u64,
    objects: usize,
    colours: usize,
    shapes: usize,
    noise: u64,
    prompt: String,
}

pub(crate) fn parse(fields: &mut Fields<'_>) -> Result<Arc<dyn Blueprint>, SpecError> {
    let count = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
    let settings = Settings {
        width: fields.multiple("width", 64, 32, 32..=512)?,
        height: fields.multiple("height", 64, 32, 32..=512)?,
        digits: count(fields.integer("digits", 2, 1..=3)?),
        levels: fields.integer("levels", 4, 2..=10)?,
        objects: count(fields.integer("objects", 3, 1..=16)?),
        colours: count(fields.integer("colours", 4, 1..=8)?),
        shapes: count(fields.integer("shapes", 3, 1..=6)?),
        noise: fields.integer("noise", 16, 0..=64)?,
        prompt: fields
            .optional_text("prompt", "a text with {name} in it")?
            .unwrap_or(PROMPT)
            .to_owned(),
    };
    settings.check()?;
    Ok(Arc::new(settings))
}

impl Settings {
    /// What no field decides alone.
    fn check(&self) -> Result<(), SpecError> {
        let wrong = |field: &str, expected: String, found: Value| {
            Err(SpecError::Value {
                field: format!("environment.{field}"),
                expected,
                found: found.to_string(),
            })
        };
        let smallest = paint::smallest_cell(self.levels, self.digits >= 3);
        let most = self.width.min(self.height) / smallest;
        if self.cell() < smallest {
            let expected = format!(
                "at most {most} where a frame has {} x {} pixels and a code {} digits",
                self.width, self.height, self.digits
            );
            return wrong("levels", expected, self.levels.into());
        }
        let names = self.names().len();
        let cells = usize::try_from(self.levels * self.levels).unwrap_or(usize::MAX);
        let most = names.min(cells);
        if self.objects > most {
            let expected =
                format!("at most {most} where there are {names} names and {cells} cells");
            return wrong("objects", expected, self.objects.into());
        }
        let placed = HERE.iter().any(|here| self.prompt.contains(here));
        if !placed || self.prompt.len() > MAX_PROMPT {
            let expected = format!("a text of at most {MAX_PROMPT} bytes with {{name}} in it");
            let shown: String = self.prompt.chars().take(60).collect();
            return wrong("prompt", expected, shown.into());
        }
        Ok(())
    }

    /// The shorter side of a cell, in pixels.
    fn cell(&self) -> u64 {
        self.width.min(self.height) / self.levels
    }

    fn names(&self) -> Vec<String> {
        scene::names(self.colours, self.shapes)
    }

    /// The frame of a task and seed.
    fn round(&self, task: &Map<String, Value>, seed: u64) -> Result<Round, SpecError> {
        let names = self.names();
        let asked = self.asked(task, &names)?;
        let target = asked.unwrap_or_else(|| {
            let drawn = Draws::new("rollcall-frames-target-v1", seed).below(names.len() as u64);
            usize::try_from(drawn).unwrap_or_default()
        });
        let split = match task.get("split").and_then(Value::as_str) {
            Some("train") => Some(Split::Train),
            Some("eval") => Some(Split::Eval),
            _ => None,
        };
        let scene = Scene::draw(self, target, split, seed);
        let name = names.into_iter().nth(target).unwrap_or_default();
        let code = scene.objects.first().map_or([0; 3], Object::code);
        let code = code.iter().take(self.digits).map(u64::to_string).collect();
        Ok(Round { scene, name, named: asked.is_some(), code })
    }

    /// The target that a task names, as an index of `names`.
    fn asked(
        &self,
        task: &Map<String, Value>,
        names: &[String],
    ) -> Result<Option<usize>, SpecError> {
        let expected = format!("one of {}", names.join(", "));
        let Some(name) = Fields::new("task", task).optional_text("target", &expected)? else {
            return Ok(None);
        };
        match names.iter().position(|known| known == name) {
            Some(index) => Ok(Some(index)),
            None => Err(SpecError::Value {
                field: "task.target".into(),
                expected,
                found: Value::from(name.chars().take(60).collect::<String>()).to_string(),
            }),
        }
    }

    fn score(&self, reached: impl Fn(&str) -> bool) -> Score {
        let right = self.milestones().filter(|name| reached(name)).count();
        let reward = right as f64 / self.digits as f64;
        Score::new(reward, right == self.digits, self.milestones(), reached)
    }

    fn milestones(&self) -> impl Iterator<Item = &'static str> + use<> {
        MILESTONES.into_iter().take(self.digits)
    }
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
            "width": self.width,
            "height": self.height,
            "digits": self.digits,
            "levels": self.levels,
            "objects": self.objects,
            "colours": self.colours,
            "shapes": self.shapes,
            "noise": self.noise,
            "prompt": self.prompt,
        }))
    }

    fn check_task(&self, task: &Task) -> Result<(), SpecError> {
        self.asked(&task_fields(task)?, &self.names()).map(|_| ())
    }

    fn open(&self) -> Result<Box<dyn Environment>, Fault> {
        let description = Description {
            name: NAME.into(),
            version: VERSION.into(),
            tools: Vec::new(),
            milestones: self.milestones().map(str::to_owned).collect(),
            reward_range: 0.0..=1.0,
            determinism: Determinism::Deterministic,
            images: true,
            answers: true,
        };
        let frames = Frames {
            settings: self.clone(),
            code: String::new(),
            image: None,
            right: [false; 3],
            done: false,
        };
        Ok(Box::new(Simulated::new(frames, description)))
    }

    fn score(&self, reached: &BTreeSet<&str>) -> Option<Score> {
        Some(self.score(|name| reached.contains(name)))
    }

    /// What is held out are cells, and the reset sees to that: every target is asked for on both sides.
    fn draw_task(&self, _: Split, draws: &mut Draws) -> Option<(String, Map<String, Value>)> {
        let names = self.names();
        let name = draws.pick(&names)?;
        let prompt =
            HERE.iter().fold(self.prompt.clone(), |prompt, here| prompt.replace(here, name));
        Some((prompt, spec::settings(json!({"target": name}))))
    }

    fn solution(&self, task: &Task, seed: u64) -> Result<Option<Solution>, SpecError> {
        let round = self.round(&task_fields(task)?, seed)?;
        Ok(Some(Solution { name: round.name, answer: round.code }))
    }
}

/// One episode.
#[derive(Debug)]
struct Round {
    scene: Scene,
    /// The target's name.
    name: String,
    /// Whether the task says it.
    named: bool,
    code: String,
}

#[derive(Debug)]
struct Frames {
    settings: Settings,
    code: String,
    image: Option<Image>,
    /// Which digits the answer has right.
    right: [bool; 3],
    done: bool,
}

impl Simulation for Frames {
    fn reset(&mut self, task: &Map<String, Value>, seed: u64) -> Result<Option<String>, SpecError> {
        let round = self.settings.round(task, seed)?;
        let says = (!round.named).then(|| format!("The target is the {}.", round.name));
        let image = paint::paint(&self.settings, &round.scene, seed).map_err(|error| {
            let expected = "a side that a frame can have".into();
            let field = "environment.width".into();
            SpecError::Value { field, expected, found: error.to_string() }
        })?;
        (self.right, self.done) = ([false; 3], false);
        (self.code, self.image) = (round.code, Some(image));
        Ok(says)
    }

    fn images(&self) -> Vec<Image> {
        self.image.iter().cloned().collect()
    }

    fn answer(&mut self, text: &str) {
        self.done = true;
        if text.chars().nth(self.settings.digits).is_some() {
            return;
        }
        for ((right, given), wanted) in
            self.right.iter_mut().zip(text.chars()).zip(self.code.chars())
        {
            *right = given == wanted;
        }
    }

    fn call(&mut self, _: &str, _: &Map<String, Value>) -> Result<String, Raised> {
        Err(Raised::new("There are no tools."))
    }

    fn done(&self) -> bool {
        self.done
    }

    fn reached(&self) -> Vec<String> {
        let all = MILESTONES.into_iter().zip(self.right);
        all.filter(|(_, right)| *right).map(|(name, _)| name.to_owned()).collect()
    }

    fn score(&self) -> Score {
        let reached = self.reached();
        self.settings.score(|name| reached.iter().any(|known| known == name))
    }
}
