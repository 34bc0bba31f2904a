//! The other ranks of an online run. Rank 0 alone meets actors, audits episodes and writes files; it
//! hands every rank the audited groups of a step, each computes its part of the update, and all end up
//! with the same policy.

use std::collections::VecDeque;

use policy::{
    device::DeviceChoice,
    model::{Adapter, Checkpoint, Decoder, ModelError},
    score::{Optimizer, ValueHead},
};
use protocol::Episode;
use serde::{Deserialize, Serialize};
use terminal::Failure;

use super::{
    online::{Recent, first_adapter, reference},
    update::{Critic, Outcome, Student, UpdateGroup, UpdateSettings, adamw, update},
};
use crate::{plan::Plan, ranks::Ranks, sft::load_dtype};

/// What rank 0 has the others do.
#[derive(Serialize, Deserialize)]
enum Word {
    /// Start from this policy.
    Start {
        /// Its adapter's bytes.
        adapter: Vec<u8>,
        /// The optimizer's state.
        optimizer: Vec<u8>,
        /// The value head's bytes and those of its optimizer.
        critic: Option<[Vec<u8>; 2]>,
        /// Adapters of policies before it that groups may have been played by, oldest first.
        older: Vec<Vec<u8>>,
    },
    /// Make a step's updates.
    Update {
        /// Optimizer steps made before it.
        step: u64,
        /// Whether to examine how ids were sampled.
        examine: bool,
        /// The groups, in order.
        groups: Vec<Group>,
    },
    /// The run is over.
    Finish,
}

/// An audited group.
#[derive(Serialize, Deserialize)]
struct Group {
    /// Episodes in the form in which they travel.
    episodes: Vec<Vec<u8>>,
    rewards: Vec<f64>,
    advantages: Vec<f64>,
    /// Updates between the policy that played it and the newest.
    behind: u64,
}

fn say(ranks: &mut Ranks, word: &Word) -> Result<(), Failure> {
    let config = bincode::config::standard();
    let mut bytes = bincode::serde::encode_to_vec(word, config).map_err(Failure::fault)?;
    ranks.command(&mut bytes)
}

fn hear(ranks: &mut Ranks) -> Result<Word, Failure> {
    let mut bytes = Vec::new();
    ranks.command(&mut bytes)?;
    let (word, _) = bincode::serde::decode_from_slice(&bytes, bincode::config::standard())
        .map_err(|e| Failure::Fault(format!("rank 0 sent what is no command: {e}")))?;
    Ok(word)
}

/// At rank 0: has the others start from this policy.
pub(super) fn share_start(
    ranks: &mut Ranks,
    adapter: &Adapter,
    optimizer: &Optimizer,
    critic: Option<&Critic>,
    recent: &VecDeque<Recent>,
) -> Result<(), Failure> {
    if ranks.world() == 1 {
        return Ok(());
    }
    let critic = critic.map(|critic| -> Result<_, ModelError> {
        Ok([critic.head.to_safetensors()?, critic.optimizer.to_bytes()?])
    });
    let start = Word::Start {
        adapter: adapter.to_safetensors().map_err(Failure::fault)?,
        optimizer: optimizer.to_bytes().map_err(Failure::fault)?,
        critic: critic.transpose().map_err(Failure::fault)?,
        older: recent.iter().rev().skip(1).rev().map(|it| it.bytes.clone()).collect(),
    };
    say(ranks, &start)
}

/// At rank 0: has the others take part in [`update`].
pub(super) fn share_update(
    ranks: &mut Ranks,
    settings: &UpdateSettings,
    groups: &[UpdateGroup<'_>],
    behind: &[u64],
) -> Result<(), Failure> {
    if ranks.world() == 1 {
        return Ok(());
    }
    let mut shared = Vec::with_capacity(groups.len());
    for (group, behind) in groups.iter().zip(behind) {
        let episodes = group.episodes.iter().map(|episode| episode.encode());
        shared.push(Group {
            episodes: episodes.collect::<Result<_, _>>().map_err(Failure::fault)?,
            rewards: group.rewards.clone(),
            advantages: group.advantages.clone(),
            behind: *behind,
        });
    }
    let examine = settings.examine.is_some();
    say(ranks, &Word::Update { step: settings.step, examine, groups: shared })
}

/// At rank 0: ends the others' part.
pub(super) fn share_end(ranks: &mut Ranks) -> Result<(), Failure> {
    if ranks.world() == 1 { Ok(()) } else { say(ranks, &Word::Finish) }
}

/// Takes part in a run as another rank than 0, to its end.
///
/// # Errors
/// A mistake in the recipe, a failing device or rank.
pub fn follow(plan: &Plan, device: DeviceChoice, mut ranks: Ranks) -> Result<(), Failure> {
    let result = Follower::load(plan, device).and_then(|mut it| it.run(plan, &mut ranks));
    ranks.finish(result)
}

struct Follower {
    decoder: Decoder,
    reference: Option<Adapter>,
    adapter: Adapter,
    optimizer: Optimizer,
    critic: Option<Critic>,
    /// Policies before this one that groups may have been played by, oldest first.
    older: VecDeque<Adapter>,
}

impl Follower {
    fn load(plan: &Plan, device: DeviceChoice) -> Result<Self, Failure> {
        let recipe = &plan.recipe;
        let device = device.resolve().open().map_err(Failure::mistake)?;
        let checkpoint = Checkpoint::open(&recipe.model.path).map_err(Failure::mistake)?;
        let dtype = load_dtype(recipe.training.compute_dtype);
        let decoder = checkpoint.load(&device, dtype).map_err(Failure::mistake)?;
        let adapter = first_adapter(recipe, &decoder);
        Ok(Self {
            adapter: adapter.map_err(Failure::mistake)?,
            optimizer: adamw(&recipe.training.optimizer),
            critic: Critic::of(&recipe.training, &decoder),
            reference: reference(recipe, &decoder)?,
            older: VecDeque::new(),
            decoder,
        })
    }

    fn run(&mut self, plan: &Plan, ranks: &mut Ranks) -> Result<(), Failure> {
        loop {
            match hear(ranks)? {
                Word::Start { adapter, optimizer, critic, older } => {
                    self.start(&adapter, &optimizer, critic)?;
                    let older = older.iter().map(|it| Adapter::from_safetensors(it, &self.decoder));
                    self.older = older.collect::<Result<_, _>>().map_err(Failure::fault)?;
                }
                Word::Update { step, examine, groups } => {
                    self.update(plan, step, examine, &groups, ranks)?;
                }
                Word::Finish => return Ok(()),
            }
        }
    }

    fn start(
        &mut self,
        adapter: &[u8],
        optimizer: &[u8],
        critic: Option<[Vec<u8>; 2]>,
    ) -> Result<(), Failure> {
        let decoder = &self.decoder;
        self.adapter = Adapter::from_safetensors(adapter, decoder).map_err(Failure::fault)?;
        let device = decoder.device();
        self.optimizer.load_for(optimizer, &mut self.adapter, device).map_err(Failure::fault)?;
        if let (Some(own), Some([head, optimizer])) = (&mut self.critic, critic) {
            own.head = ValueHead::from_safetensors(&head, decoder).map_err(Failure::fault)?;
            own.optimizer.load_for(&optimizer, &mut own.head, device).map_err(Failure::fault)?;
        }
        Ok(())
    }

    fn update(
        &mut self,
        plan: &Plan,
        step: u64,
        examine: bool,
        groups: &[Group],
        ranks: &mut Ranks,
    ) -> Result<(), Failure> {
        let training = &plan.recipe.training;
        let settings = UpdateSettings {
            examine: examine.then(|| training.sampling()),
            ..UpdateSettings::of(training, step)
        };
        let mut episodes: Vec<Vec<Episode>> = Vec::with_capacity(groups.len());
        for group in groups {
            let decoded = group.episodes.iter().map(|body| Episode::decode(body));
            episodes.push(decoded.collect::<Result<_, _>>().map_err(Failure::fault)?);
        }
        let older = &self.older;
        let behaviour = |behind: u64| {
            let at = older.len().checked_sub(usize::try_from(behind).unwrap_or(usize::MAX))?;
            older.get(at)
        };
        let groups: Vec<UpdateGroup<'_>> = groups
            .iter()
            .zip(&episodes)
            .map(|(group, episodes)| UpdateGroup {
                episodes: episodes.iter().collect(),
                rewards: group.rewards.clone(),
                advantages: group.advantages.clone(),
                images: plan.images.as_ref(),
                behaviour: behaviour(group.behind),
            })
            .collect();
        let before = self.adapter.clone();
        let student = Student {
            decoder: &self.decoder,
            reference: self.reference.as_ref(),
            adapter: &mut self.adapter,
            optimizer: &mut self.optimizer,
            critic: self.critic.as_mut(),
        };
        // Rank 0 decides on the evidence, and is not here.
        let outcome = update(student, &settings, &groups, &mut |_, _, _| Ok(()), ranks)?;
        if let Outcome::Updated(_) = outcome {
            self.older.push_back(before);
            while self.older.len() > training.staleness as usize {
                self.older.pop_front();
            }
        }
        Ok(())
    }
}
