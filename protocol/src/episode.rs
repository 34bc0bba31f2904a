//! Episodes: what an actor answers a lease with.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Digest, Image, LeaseId, PolicyDigest, RunId, TraceRow};

/// Why a generation call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// The model sampled an end-of-turn id, which is the span's last id.
    Stop,
    /// The token budget ran out. Nothing of a cut turn is executed.
    Length,
}

/// Why an episode ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EpisodeEnd {
    /// The environment said that it is done.
    Done,
    /// The policy made a turn without a tool call; where the environment takes one, it is its answer.
    NoCall,
    /// The last allowed turn was made; its calls were not executed.
    Turns,
    /// The token budget ran out.
    Length,
    /// A malformed call ended it, where the run asks for that.
    Malformed,
}

impl fmt::Display for EpisodeEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Done => "done",
            Self::NoCall => "no_call",
            Self::Turns => "turns",
            Self::Length => "length",
            Self::Malformed => "malformed",
        })
    }
}

/// The ids of one generation call. All columns have the length of `ids`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// Index of the first id in the episode's stream.
    pub offset: u32,
    /// Sampled ids, as sampled, the end-of-turn id included.
    pub ids: Vec<u32>,
    /// log softmax(logits) of each sampled id, at temperature 1 and untruncated. Nats.
    pub logp_raw: Vec<f32>,
    /// Log-probability of each sampled id under the distribution that was sampled from: after
    /// temperature and truncation, renormalised. Nats.
    pub logp_sampling: Vec<f32>,
    /// Why it ended.
    pub finish: FinishReason,
    /// The policy that sampled it.
    pub policy: PolicyDigest,
    /// SHA-256 of the ids that the engine was conditioned on, each as four little-endian bytes.
    pub context: Digest,
}

/// One rollout: the token stream, what of it was sampled, and what the tools answered.
///
/// Nothing in it depends on who played it or when, so equal rollouts have equal ids.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Episode {
    /// The run of its lease.
    pub run: RunId,
    /// The lease that it answers.
    pub lease: LeaseId,
    /// The task's id.
    pub task: String,
    /// The seed that the environment was reset with.
    pub seed: u64,
    /// The policy that played it.
    pub policy: PolicyDigest,
    /// What the environment's reset said to the policy; empty when it said nothing.
    pub reset_text: String,
    /// Addresses of the images that the reset showed, in order: those of [`Episode::images`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reset_images: Vec<Digest>,
    /// The whole stream: prompt, sampled ids and external ids in the order that the model saw them.
    pub tokens: Vec<u32>,
    /// 1 where the id was sampled, 0 elsewhere; as long as `tokens`.
    pub loss_mask: Vec<u8>,
    /// The generation calls, in order.
    pub spans: Vec<Span>,
    /// The tool calls, in order, and the answer, where the environment takes one.
    pub trace: Vec<TraceRow>,
    /// Chain value after the last row (of the reset, where there is no row).
    pub trace_head: Digest,
    /// Why it ended.
    pub end: EpisodeEnd,
    /// The environment's score as the actor saw it. Never used: the learner recomputes it.
    pub reward: f64,
    /// Each image that is shown once, in the order in which they are first shown.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<Image>,
}

/// Why an episode's images are not those that it says it showed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// An address without its image.
    #[error("it shows image {0}, which is not in it")]
    Missing(Digest),
    /// An image that nothing shows.
    #[error("image {0} is in it, and is not shown")]
    Unshown(Digest),
    /// An image that is there twice.
    #[error("image {0} is in it twice")]
    Repeated(Digest),
    /// Images in another order than they are shown in.
    #[error("image {0} is not in its place")]
    Order(Digest),
}

impl Episode {
    /// The images that the reset showed, in order, each found by its address.
    ///
    /// # Errors
    /// An image that is missing, not shown, there twice or out of order.
    pub fn shown_images(&self) -> Result<Vec<&Image>, AddressError> {
        let found: Vec<(Digest, &Image)> = self.images.iter().map(|it| (it.digest(), it)).collect();
        let mut first_shown = Vec::new();
        let mut shown = Vec::with_capacity(self.reset_images.len());
        for address in &self.reset_images {
            let image = found.iter().find(|(digest, _)| digest == address);
            shown.push(image.ok_or(AddressError::Missing(*address))?.1);
            if !first_shown.contains(address) {
                first_shown.push(*address);
            }
        }
        for (place, (digest, _)) in found.iter().enumerate() {
            match first_shown.iter().position(|address| address == digest) {
                None => return Err(AddressError::Unshown(*digest)),
                Some(first) if first == place => {}
                Some(_) if found.iter().take(place).any(|(earlier, _)| earlier == digest) => {
                    return Err(AddressError::Repeated(*digest));
                }
                Some(_) => return Err(AddressError::Order(*digest)),
            }
        }
        Ok(shown)
    }
}
