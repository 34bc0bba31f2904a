//! Rollouts in this process, honest ones and every kind that rung 9 of the audit is there to notice:
//! what a cheating actor could send under a lease without any exact rung seeing it.

use std::{ops::Range, path::Path};

use actor::player::{Outcome, Player};
use burn::tensor::Tensor;
use learner::{
    curriculum::{TaskOrder, episode_seed},
    plan::{Plan, plan_inputs},
};
use policy::{
    device::{Device, DeviceChoice},
    engine::{Engine, EngineConfig},
    model::{Adapter, Checkpoint, Decoder, LoadDtype, LoraConfig, ModelConfig},
    score::Parameters,
};
use protocol::{
    Digest, Episode, Lease, LeaseId, NoiseKey, PolicyDigest, RunId, Sampling, StreamHasher,
};

/// Episodes in flight at a time.
const IN_FLIGHT: usize = 64;

/// What is played, and by which policy the leases say.
pub struct Stage {
    /// Recipe, tasks, format and environment.
    pub plan: Plan,
    /// The base model.
    pub decoder: Decoder,
    /// The leases' adapter; none where the base plays.
    pub adapter: Option<Adapter>,
    /// How the leases say that it is sampled.
    pub sampling: Sampling,
}

/// How an actor plays.
#[derive(Clone)]
pub enum Conduct {
    /// As the lease says.
    Honest,
    /// With another adapter, or with none.
    OtherAdapter(Option<Adapter>),
    /// With other settings.
    OtherSampling(Sampling),
    /// With more in the prompt than it admits.
    EditedContext,
    /// With weights rounded to this many bits, in blocks of 32 with one scale each.
    Rounded(u32),
    /// As often as this, with noise of its own, to submit the best.
    BestOf(u64),
}

impl Stage {
    /// The tasks of a recipe, played by its model with the adapter of a PEFT directory, at temperature
    /// 0.6, top-k 20 and top-p 0.95. With `random` (HIDDENxLAYERS) a random model of that size stands in,
    /// whose logits spread as far as a trained model's do.
    ///
    /// # Panics
    /// Where something cannot be read.
    pub fn open(recipe: &Path, adapter: Option<&Path>, random: Option<&str>) -> Self {
        let plan = plan_inputs(recipe).expect("a valid recipe");
        let device = DeviceChoice::Cpu.open().expect("the processor");
        let checkpoint = Checkpoint::open(&plan.recipe.model.path).expect("a checkpoint");
        let decoder = match random {
            None => checkpoint.load(&device, LoadDtype::F32).expect("loads"),
            Some(size) => random_decoder(size, checkpoint.config(), &device),
        };
        let adapter = match (adapter, random) {
            (Some(dir), _) => Some(Adapter::load_peft(dir, &decoder).expect("an adapter")),
            (None, Some(_)) => Some(shifted(&plan.recipe.lora.to_config(), &decoder, 1e-3)),
            (None, None) => None,
        };
        let sampling = Sampling { temperature: 0.6, top_k: 20, top_p: 0.95, min_p: 0.0 };
        Self { plan, decoder, adapter, sampling }
    }

    /// The digest of the policy that the leases name.
    pub fn policy(&self) -> PolicyDigest {
        let bytes = self.adapter.as_ref().map(|it| it.to_safetensors().expect("serializes"));
        let adapter = Digest::of(&bytes.unwrap_or_default());
        PolicyDigest::new(&self.plan.model.weights, &adapter)
    }

    /// The lease of one rollout.
    pub fn lease(&self, order: &mut TaskOrder, id: LeaseId) -> Lease {
        let row = &self.plan.train[order.row(id.group).expect("there are tasks")];
        Lease {
            run: self.plan.run,
            id,
            attempt: 0,
            task: row.task.clone(),
            seed: episode_seed(self.plan.run, row, id.group),
            noise_key: NoiseKey::derive(&self.plan.run, id),
            policy: self.policy(),
            sampling: self.sampling,
            deadline_ms: 60_000,
        }
    }

    /// Plays the rollouts of these groups.
    ///
    /// # Panics
    /// Where an episode cannot be played.
    pub fn play(
        &self,
        conduct: &Conduct,
        groups: Range<u64>,
        generations: u32,
    ) -> Vec<Vec<Episode>> {
        let mut order = TaskOrder::new(self.plan.run, &self.plan.train);
        let leases: Vec<Vec<Lease>> = groups
            .map(|group| {
                let ids = (0..generations).map(|generation| LeaseId { group, generation });
                ids.map(|id| self.lease(&mut order, id)).collect()
            })
            .collect();
        let mut player = self.player(conduct);
        let all = leases.iter().flatten();
        let played = match conduct {
            Conduct::BestOf(count) => {
                let rounds = (0..*count).map(|round| {
                    let run = RunId(Digest::of_parts("another run", &[&round.to_le_bytes()]));
                    run_through(
                        &mut player,
                        all.clone().map(|lease| Lease {
                            noise_key: NoiseKey::derive(&run, lease.id),
                            ..lease.clone()
                        }),
                    )
                });
                best(rounds.collect())
            }
            Conduct::OtherSampling(sampling) => run_through(
                &mut player,
                all.map(|lease| Lease { sampling: *sampling, ..lease.clone() }),
            ),
            Conduct::EditedContext => {
                let mut edited = run_through(
                    &mut player,
                    all.clone().map(|lease| {
                        let mut lease = lease.clone();
                        lease.task.prompt.push_str(" Think before you answer.");
                        lease
                    }),
                );
                for (episode, lease) in edited.iter_mut().zip(all) {
                    self.hide_edit(episode, lease);
                }
                edited
            }
            _ => run_through(&mut player, all.cloned()),
        };
        let mut played = played.into_iter();
        leases.iter().map(|group| played.by_ref().take(group.len()).collect()).collect()
    }

    fn player(&self, conduct: &Conduct) -> Player {
        let decoder = match conduct {
            Conduct::Rounded(bits) => rounded(&self.decoder, *bits),
            _ => self.decoder.clone(),
        };
        let adapter = match conduct {
            Conduct::OtherAdapter(adapter) => adapter.clone(),
            _ => self.adapter.clone(),
        };
        let mut engine = Engine::new(decoder, EngineConfig::default()).expect("an engine");
        engine.add_adapter(self.policy(), adapter).expect("fits");
        let recipe = &self.plan.recipe;
        let limits = recipe.training.episode_limits();
        Player::new(engine, self.plan.format.clone(), recipe.environment.clone(), limits)
            .with_images(self.plan.images.clone())
    }

    /// Puts the honest prompt in place of the one that was played, and everything else in its place.
    fn hide_edit(&self, episode: &mut Episode, lease: &Lease) {
        let honest =
            self.plan.format.prompt(&lease.task.prompt, &episode.reset_text).expect("renders");
        let edited = episode.spans.first().map_or(0, |span| span.offset as usize);
        episode.tokens.splice(..edited, honest.iter().copied());
        episode.loss_mask.splice(..edited, vec![0; honest.len()]);
        let mut hasher = StreamHasher::default();
        let mut fed = 0;
        for span in &mut episode.spans {
            let offset = span.offset as usize - edited + honest.len();
            hasher.feed(&episode.tokens[fed..offset]);
            fed = offset;
            span.offset = u32::try_from(offset).expect("small");
            span.context = hasher.digest();
        }
    }
}

fn random_decoder(size: &str, of: &ModelConfig, device: &Device) -> Decoder {
    let (hidden, layers) = size.split_once('x').expect("HIDDENxLAYERS");
    let hidden: usize = hidden.parse().expect("a number");
    let config = ModelConfig {
        hidden,
        ffn: hidden * 3,
        layers: layers.parse().expect("a number"),
        heads: hidden / 64,
        kv_heads: hidden / 128,
        head_dim: 64,
        ..of.clone()
    };
    let mut decoder = Decoder::random(config, 11, device);
    decoder.update(&mut |name, value| match name.ends_with("model.norm.weight") {
        true => value.mul_scalar(8.0),
        false => value,
    });
    decoder
}

/// A fresh adapter whose second factors are this everywhere, so that it moves the logits.
///
/// # Panics
/// Where it does not fit the model.
pub fn shifted(config: &LoraConfig, decoder: &Decoder, by: f32) -> Adapter {
    let mut adapter = Adapter::init(config, decoder, 7).expect("fits");
    adapter.update(&mut |name, value| match name.contains("lora_B") {
        true => value.add_scalar(by),
        false => value,
    });
    adapter
}

/// Plays leases, and returns their episodes in the same order.
fn run_through(player: &mut Player, leases: impl Iterator<Item = Lease>) -> Vec<Episode> {
    let leases: Vec<Lease> = leases.collect();
    let mut waiting = leases.iter();
    let mut played: Vec<Episode> = Vec::with_capacity(leases.len());
    while played.len() < leases.len() {
        while player.in_flight() < IN_FLIGHT
            && let Some(lease) = waiting.next()
        {
            player.start(lease.clone()).expect("starts");
        }
        for outcome in player.step().expect("steps") {
            match outcome {
                Outcome::Played { episode, .. } => played.push(*episode),
                Outcome::Failed { reason, .. } => panic!("an episode failed: {reason}"),
            }
        }
    }
    let place = |id: LeaseId| leases.iter().position(|lease| lease.id == id);
    played.sort_by_key(|episode| place(episode.lease));
    played
}

/// Of each lease's episodes the one with the highest reward; of equals, the first.
fn best(rounds: Vec<Vec<Episode>>) -> Vec<Episode> {
    rounds
        .into_iter()
        .reduce(|best, round| {
            let pairs = best.into_iter().zip(round);
            pairs.map(|(a, b)| if b.reward > a.reward { b } else { a }).collect()
        })
        .unwrap_or_default()
}

/// The weights of all matrices in blocks of 32, each value the nearest of `2^bits − 1` steps of the
/// block's largest, as in GGUF's Q8_0 and Q4_0.
///
/// # Panics
/// On weights that are not f32.
pub fn rounded(decoder: &Decoder, bits: u32) -> Decoder {
    let steps = f32::from((1_i16 << (bits - 1)) - 1);
    let mut decoder = decoder.clone();
    decoder.update(&mut |name, value| {
        if !name.contains("proj") && !name.contains("embed") && !name.contains("lm_head") {
            return value;
        }
        let device = value.device();
        let mut values = value.to_data().try_to_vec::<f32>().expect("f32 weights");
        for block in values.chunks_mut(32) {
            let scale = block.iter().fold(0.0_f32, |most, x| most.max(x.abs())) / steps;
            if scale > 0.0 {
                block.iter_mut().for_each(|x| *x = (*x / scale).round() * scale);
            }
        }
        Tensor::<1>::from_floats(values.as_slice(), &device)
    });
    decoder
}
