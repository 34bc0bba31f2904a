//! What a run takes, by arithmetic: memory of a learner and of an actor and the operations of a step, part by
//! part and in words. The formulas are those of docs/performance.md and docs/scaling.md.

use std::fmt;

use policy::model::{Architecture, LoraConfig, ModelConfig, weights::LinearInfo};
use serde_json::{Value, json};

use crate::{
    plan::{Plan, weight_bytes},
    ppo::plan::PpoPlan,
    recipe::Trainable,
    rows::Example,
    sft::plan::SftPlan,
};

/// f32 values of each element that a layer's linears give which the backward graph keeps, at most.
const KEPT: f64 = 5.0;
/// Logits that exist at one time, about.
const LOGITS: usize = 16 << 20;
/// Operations a second to compare with, and what reaches them with a model that is large enough.
const RATES: [(f64, &str); 2] =
    [(1e11, "about one processor core"), (3.5e14, "about a third of an H100's bf16 peak")];
/// Episodes in flight at an actor where nothing else is said.
const SLOTS: u64 = 64;
/// Where the paths of a vision tower's linears begin.
const TOWER: &str = "model.visual.";

/// A number of bytes or operations and where it comes from.
#[derive(Clone, Debug)]
struct Part {
    name: &'static str,
    amount: f64,
    why: String,
}

/// What is trained, as far as it takes memory.
#[derive(Clone, Copy, Debug)]
enum Trained<'a> {
    /// An adapter beside frozen weights.
    Adapter(&'a LoraConfig),
    /// Every weight.
    Weights,
}

/// What an estimate is made from.
#[derive(Clone, Copy, Debug)]
struct Load<'a> {
    /// The model.
    model: &'a ModelConfig,
    /// Bytes of a weight in memory.
    weight_bytes: usize,
    /// What is trained.
    trained: Trained<'a>,
    /// Whether there is a second, frozen adapter.
    reference_adapter: bool,
    /// Whether activations are computed again in the backward pass.
    checkpointing: bool,
    /// Ids that pass through the model at one time, at most.
    ids_at_once: usize,
    /// What these ids are, in words.
    at_once: &'a str,
    /// Ids that a step learns from, at most.
    ids_per_step: f64,
    /// Of these, the scored ones.
    scored_per_step: f64,
    /// Forward and backward passes over them.
    passes: f64,
    /// Forward passes beside those: of the old policy, of the reference.
    forward_passes: f64,
    /// Steps of the run.
    steps: u64,
    /// What an actor plays, where there are actors.
    rollouts: Option<Rollouts>,
}

/// What an actor plays.
#[derive(Clone, Copy, Debug)]
struct Rollouts {
    /// Episodes of a step.
    episodes: f64,
    /// Episodes in flight at one actor.
    in_flight: usize,
    /// Ids of the longest episode.
    longest: usize,
    /// Ids that a step's rollouts feed to the model, shared prompts once.
    ids: f64,
}

/// The estimate.
#[derive(Clone, Debug)]
pub struct Estimate {
    learner: Vec<Part>,
    actor: Vec<Part>,
    step: Vec<Part>,
    steps: u64,
}

fn sum(parts: &[Part]) -> f64 {
    parts.iter().map(|part| part.amount).sum()
}

impl Load<'_> {
    fn estimate(&self) -> Estimate {
        Estimate {
            learner: self.learner(),
            actor: self.rollouts.map(|it| self.actor(it)).unwrap_or_default(),
            step: self.step(),
            steps: self.steps,
        }
    }

    fn weights(&self) -> Part {
        let elements = |(_, shape): (String, Vec<usize>)| shape.iter().product::<usize>() as f64;
        let all: f64 = self.model.tensors().into_iter().map(elements).sum();
        Part {
            name: "weights",
            amount: all * self.weight_bytes as f64,
            why: format!("{} weights of {} bytes", count(all), self.weight_bytes),
        }
    }

    /// Elements of the trained adapter; none where every weight is trained.
    fn adapter(&self) -> f64 {
        let Trained::Adapter(config) = self.trained else { return 0.0 };
        let linears = self.model.linears();
        let hits = config.target_modules.select(&linears).unwrap_or_default();
        let sides = |linear: &LinearInfo| linear.inputs + linear.outputs;
        let targeted = linears.iter().zip(hits).filter(|(_, hit)| *hit);
        targeted.map(|(linear, _)| (config.r * sides(linear)) as f64).sum()
    }

    fn learner(&self) -> Vec<Part> {
        let model = self.model;
        let (ids, hidden) = (self.ids_at_once as f64, model.hidden as f64);
        let weights = self.weights();
        let elements = self.adapter();
        let mut parts = Vec::new();
        match self.trained {
            Trained::Adapter(config) => {
                parts.push(weights);
                parts.push(Part {
                    name: "adapter",
                    amount: 16.0 * elements,
                    why: format!(
                        "{} elements at rank {}, their gradient and AdamW's two moments, 4 bytes each",
                        count(elements),
                        config.r
                    ),
                });
            }
            Trained::Weights => {
                let amount = 3.0 * weights.amount;
                parts.push(weights);
                parts.push(Part {
                    name: "optimizer",
                    amount,
                    why: "the gradient and AdamW's two moments of every weight".into(),
                });
            }
        }
        if self.reference_adapter {
            parts.push(Part {
                name: "reference",
                amount: 4.0 * elements,
                why: "the frozen adapter that the KL term holds to, if it is as large".into(),
            });
        }
        let widths = (0..model.layers).map(|layer| self.width(layer));
        let (all, widest) = widths.fold((0.0, 0.0_f64), |(all, most), it| (all + it, most.max(it)));
        if self.checkpointing {
            let layers = model.layers as f64 + 1.0;
            parts.push(Part {
                name: "layer inputs",
                amount: ids * self.weight_bytes as f64 * hidden * layers,
                why: format!(
                    "of {} layers for {} ids at one time: {}",
                    model.layers, self.ids_at_once, self.at_once
                ),
            });
            parts.push(Part {
                name: "one layer again",
                amount: ids * 4.0 * KEPT * widest,
                why: "activations of the layer that the backward pass computes again, at most"
                    .into(),
            });
        } else {
            parts.push(Part {
                name: "activations",
                amount: ids * 4.0 * KEPT * all,
                why: format!(
                    "of all layers for {} ids at one time: {}; at most; gradient_checkpointing: true keeps one \
                     layer's",
                    self.ids_at_once, self.at_once
                ),
            });
        }
        let positions = (LOGITS / model.vocab.max(1)).clamp(1, 4096);
        parts.push(Part {
            name: "logits",
            amount: 12.0 * (positions * model.vocab) as f64,
            why: format!(
                "of {positions} positions at one time over {} ids, with softmax and gradient",
                model.vocab
            ),
        });
        parts
    }

    /// Elements that the linears of a layer give for an id.
    fn width(&self, layer: usize) -> f64 {
        let name = format!(".layers.{layer}.");
        let own = self.model.linears();
        let own = own.iter().filter(|it| !it.path.starts_with(TOWER) && it.path.contains(&name));
        own.map(|linear| linear.outputs as f64).sum()
    }

    fn actor(&self, rollouts: Rollouts) -> Vec<Part> {
        let model = self.model;
        let full = match &model.architecture {
            Architecture::Qwen3_5(hybrid) => hybrid.full.iter().filter(|full| **full).count(),
            Architecture::Qwen3 | Architecture::Llama => model.layers,
        };
        let an_id = (2 * full * model.kv_heads * model.head_dim * self.weight_bytes) as f64;
        let mut parts = vec![
            self.weights(),
            Part {
                name: "keys and values",
                amount: an_id * (rollouts.in_flight * rollouts.longest) as f64,
                why: format!(
                    "{} episodes in flight (--slots) of at most {} ids",
                    rollouts.in_flight, rollouts.longest
                ),
            },
        ];
        if let Some(hybrid) = model.hybrid() {
            let state = hybrid.value_heads * hybrid.key_dim * hybrid.value_dim;
            let layers = model.layers - full.min(model.layers);
            parts.push(Part {
                name: "states",
                amount: 4.0 * (layers * state * rollouts.in_flight) as f64,
                why: format!("of {layers} linear-attention layers, one an episode"),
            });
        }
        parts.push(Part {
            name: "adapter",
            amount: 4.0 * self.adapter(),
            why: "of each policy that leases may name".into(),
        });
        parts
    }

    fn step(&self) -> Vec<Part> {
        let linears = self.model.linears();
        let own = linears.iter().filter(|it| !it.path.starts_with(TOWER));
        let layers: f64 = own.map(|it| it.inputs as f64 * it.outputs as f64).sum();
        let head = (self.model.vocab * self.model.hidden) as f64;
        // Two operations a weight and id.
        let once = 2.0 * (layers * self.ids_per_step + head * self.scored_per_step);
        let trained = match self.trained {
            Trained::Adapter(_) => 2.0,
            Trained::Weights => 3.0,
        };
        let again = if self.checkpointing { 1.0 } else { 0.0 };
        let ids = count(self.ids_per_step);
        let mut parts = Vec::new();
        if let Some(rollouts) = self.rollouts {
            parts.push(Part {
                name: "rollouts",
                amount: 2.0 * (layers + head) * rollouts.ids,
                why: format!(
                    "{} episodes feed at most {} ids to the actors' models",
                    count(rollouts.episodes),
                    count(rollouts.ids)
                ),
            });
        }
        if self.forward_passes > 0.0 {
            parts.push(Part {
                name: "references",
                amount: once * self.forward_passes,
                why: format!("forward for the reference or the old policy, over {ids} ids"),
            });
        }
        parts.push(Part {
            name: "update",
            amount: once * self.passes * (trained + again),
            why: format!(
                "{}forward{} and backward over {ids} ids",
                if self.passes > 1.0 { format!("{} times ", self.passes) } else { String::new() },
                if self.checkpointing { ", forward again" } else { "" },
            ),
        });
        parts
    }
}

/// Ids of the longest row, ids of the mean row, and of these the scored ones.
fn lengths(rows: &[Example]) -> (usize, f64, f64) {
    let ids: usize = rows.iter().map(|row| row.ids.len()).sum();
    let scored: usize = rows.iter().map(|row| row.scored.iter().filter(|it| **it).count()).sum();
    let many = rows.len().max(1) as f64;
    let longest = rows.iter().map(|row| row.ids.len()).max().unwrap_or_default();
    (longest, ids as f64 / many, scored as f64 / many)
}

impl Estimate {
    /// Of a run that plays.
    pub(crate) fn online(plan: &Plan) -> Self {
        let (training, derived) = (&plan.recipe.training, &plan.derived);
        let lora = plan.recipe.lora.to_config();
        let algorithm = &training.algorithm;
        let groups = f64::from(derived.groups_per_step);
        let completions =
            derived.rollouts_per_step as f64 * f64::from(training.max_completion_length);
        let prompts = groups * derived.longest_prompt_tokens as f64;
        let several = algorithm.num_iterations * algorithm.num_mini_batches > 1;
        let old = several || algorithm.value.is_some() || training.staleness > 0;
        let forward = [old, algorithm.beta > 0.0].into_iter().filter(|it| *it).count();
        let generations = training.num_generations as usize;
        Load {
            model: &plan.shape,
            weight_bytes: plan.weight_bytes,
            trained: Trained::Adapter(&lora),
            reference_adapter: plan.recipe.reference.is_some(),
            checkpointing: training.gradient_checkpointing,
            ids_at_once: derived.longest_prompt_tokens
                + generations * training.max_completion_length as usize,
            at_once: "a group's prompt and its completions",
            ids_per_step: prompts + completions,
            scored_per_step: completions,
            passes: f64::from(algorithm.num_iterations),
            forward_passes: forward as f64,
            steps: training.max_steps.into(),
            rollouts: Some(Rollouts {
                episodes: derived.rollouts_per_step as f64,
                in_flight: derived.rollouts_per_step.min(SLOTS) as usize,
                longest: derived.longest_episode_tokens,
                ids: prompts + completions,
            }),
        }
        .estimate()
    }

    /// Of a supervised run.
    pub(crate) fn sft(plan: &SftPlan) -> Self {
        let (recipe, training) = (&plan.recipe, &plan.recipe.training);
        let lora = recipe.lora.to_config();
        let (longest, mean, scored) = lengths(&plan.data.train);
        let batch = training.per_device_train_batch_size as usize;
        let rows = (batch * training.gradient_accumulation_steps as usize) as f64;
        Load {
            model: plan.checkpoint.config(),
            weight_bytes: weight_bytes(&plan.checkpoint, training.compute_dtype),
            trained: match recipe.trainable {
                Trainable::Lora => Trained::Adapter(&lora),
                Trainable::All => Trained::Weights,
            },
            reference_adapter: false,
            checkpointing: training.gradient_checkpointing,
            ids_at_once: batch * longest,
            at_once: "a micro-batch of the longest rows",
            ids_per_step: rows * mean,
            scored_per_step: rows * scored,
            passes: 1.0,
            forward_passes: 0.0,
            steps: training.updates(plan.data.train.len()),
            rollouts: None,
        }
        .estimate()
    }

    /// Of rounds on rows.
    pub(crate) fn ppo(plan: &PpoPlan) -> Self {
        let (recipe, training) = (&plan.recipe, &plan.recipe.training);
        let (longest, mean, scored) = lengths(&plan.examples);
        let batch = training.per_device_train_batch_size as usize;
        let rows = (batch * training.gradient_accumulation_steps as usize) as f64;
        let (rounds, of_a_round) = match recipe.rollouts {
            None => (1, plan.rows.len()),
            Some(it) => (it.rounds, it.tasks(plan.rows.len()) * it.num_generations as usize),
        };
        // Once a round for the old policy, for the reference, and where codes are sampled for that.
        let once = if recipe.rollouts.is_some() { 3.0 } else { 2.0 };
        Load {
            model: plan.checkpoint.config(),
            weight_bytes: weight_bytes(&plan.checkpoint, training.compute_dtype),
            trained: Trained::Adapter(&plan.lora),
            reference_adapter: true,
            checkpointing: training.gradient_checkpointing,
            ids_at_once: batch * longest,
            at_once: "a micro-batch of the longest rows",
            ids_per_step: rows * mean,
            scored_per_step: rows * scored,
            passes: 1.0,
            forward_passes: once / f64::from(training.num_train_epochs),
            steps: training.updates(of_a_round) * u64::from(rounds),
            rollouts: None,
        }
        .estimate()
    }

    /// For machines: as it stands under `estimate` in a plan.
    pub fn to_json(&self) -> Value {
        let parts = |parts: &[Part], unit: &str| -> Vec<Value> {
            let one = |it: &Part| json!({"part": it.name, unit: it.amount.round(), "why": it.why});
            parts.iter().map(one).collect()
        };
        let operations = sum(&self.step);
        let actor = (!self.actor.is_empty()).then(
            || json!({"bytes": sum(&self.actor).round(), "parts": parts(&self.actor, "bytes")}),
        );
        json!({
            "learner_memory": {
                "bytes": sum(&self.learner).round(),
                "parts": parts(&self.learner, "bytes"),
            },
            "actor_memory": actor,
            "step": {"operations": operations, "parts": parts(&self.step, "operations")},
            "seconds_a_step": RATES.map(|(rate, what)| {
                json!({"operations_a_second": rate, "what": what, "seconds": operations / rate})
            }),
            "steps": self.steps,
            "note": NOTE,
        })
    }
}

/// What the numbers are not.
const NOTE: &str = "by arithmetic: episodes as long as they may be, rows of mean length, memory for the longest; not \
                    counted are attention over earlier ids, the vision tower's activations, what the program takes \
                    (about 0.1 GiB, with CUDA about 1 GiB) and environments' time";

/// For people: a line a part.
impl fmt::Display for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let section = |f: &mut fmt::Formatter<'_>, title: &str, parts: &[Part], unit: &str| {
            writeln!(f, "{title}: {}{unit}", shown(sum(parts), unit))?;
            for part in parts {
                writeln!(
                    f,
                    "  {:<16} {:>12}{unit}  {}",
                    part.name,
                    shown(part.amount, unit),
                    part.why
                )?;
            }
            Ok(())
        };
        section(f, "memory of the learner", &self.learner, "B")?;
        if !self.actor.is_empty() {
            section(f, "memory of an actor", &self.actor, "B")?;
        }
        section(f, "a step", &self.step, " operations")?;
        for (rate, what) in RATES {
            let seconds = sum(&self.step) / rate;
            writeln!(
                f,
                "  at {} operations a second ({what}): {} a step, {} for {} steps",
                count(rate),
                time(seconds),
                time(seconds * self.steps as f64),
                self.steps
            )?;
        }
        writeln!(f, "{NOTE}")
    }
}

/// A number with a unit of 1,024s for bytes, of 1,000s for others.
fn shown(amount: f64, unit: &str) -> String {
    if unit != "B" {
        return count(amount);
    }
    let mut amount = amount;
    for prefix in ["", "Ki", "Mi", "Gi"] {
        if amount < 1024.0 {
            return format!("{amount:.1} {prefix}");
        }
        amount /= 1024.0;
    }
    format!("{amount:.1} Ti")
}

/// A count in words' length: `43.3 M`.
fn count(amount: f64) -> String {
    for (factor, suffix) in [(1e15, " P"), (1e12, " T"), (1e9, " G"), (1e6, " M")] {
        if amount >= factor {
            return format!("{:.1}{suffix}", amount / factor);
        }
    }
    format!("{amount:.0}")
}

fn time(seconds: f64) -> String {
    match seconds {
        s if s < 0.1 => format!("{:.1} ms", s * 1e3),
        s if s < 120.0 => format!("{s:.1} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}
