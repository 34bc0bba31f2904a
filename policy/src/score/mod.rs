//! Log-probabilities of given ids, and their gradients. Rows that continue one shared prefix (a
//! group's prompt) are scored together and the prefix is computed once. The loss stays outside: a
//! [`Tape`] gives log-probabilities, plain code turns them into `dL/dlogp`, and the tape turns that
//! into gradients.

mod attention;
mod embed;
mod evidence;
mod gradients;
mod graph;
mod head;
mod host;
#[cfg(test)]
mod image_tests;
mod layout;
mod optimizer;
mod parameters;
#[cfg(test)]
mod tests;
mod value;

pub use gradients::{Gradients, Parameters};
pub use optimizer::{AdamWSettings, Optimizer};
pub use parameters::{load_parameters, save_parameters};
pub use value::ValueHead;

use burn::tensor::DType;
use protocol::{NoiseKey, Sampling};

use self::{graph::GraphTape, host::HostTape, layout::Layout};
use crate::{
    model::{Adapter, Decoder, ModelError},
    sampling::TokenEvidence,
    vision::PlacedImage,
};

/// One continuation of the batch's prefix.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScoreRow {
    /// The ids after the prefix; at least one.
    pub ids: Vec<u32>,
    /// For each id, whether its log-probability is wanted. The first id of a batch without a prefix
    /// has nothing before it and cannot be scored.
    pub scored: Vec<bool>,
    /// Keys the noise that the scored ids were sampled with, where they shall be examined
    /// ([`ScoreConfig::examine`]).
    pub noise: Option<NoiseKey>,
    /// Images, by the index in `ids` of their first image-pad id.
    pub images: Vec<PlacedImage>,
}

/// Rows that continue one shared prefix.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScoreBatch {
    /// Ids before every row; may be empty.
    pub prefix: Vec<u32>,
    /// The continuations: each sees the prefix and itself.
    pub rows: Vec<ScoreRow>,
    /// Images in the prefix, by the index in it of their first image-pad id.
    pub images: Vec<PlacedImage>,
}

/// How to score.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScoreConfig {
    /// Divides the logits.
    pub temperature: f32,
    /// Keep only each layer's input and compute the layer again in backward: less memory, a third
    /// more work.
    pub checkpointing: bool,
    /// Scored positions whose logits exist at one time; 0 chooses about 64 MiB of logits.
    pub head_chunk: usize,
    /// Whether the entropy at each scored position is wanted too.
    pub entropy: bool,
    /// How rows with a noise key were sampled, to examine each of their scored ids by the same
    /// logits. `temperature` above must be this one's (1 if that is greedy).
    pub examine: Option<Sampling>,
}

impl Default for ScoreConfig {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            checkpointing: false,
            head_chunk: 0,
            entropy: false,
            examine: None,
        }
    }
}

impl ScoreConfig {
    pub(crate) fn check(&self) -> Result<(), ModelError> {
        if !(self.temperature.is_finite() && self.temperature > 0.0) {
            let reason = format!("temperature {} is not a positive number", self.temperature);
            return Err(ModelError::Input(reason));
        }
        match self.examine.map(|it| if it.temperature == 0.0 { 1.0 } else { it.temperature }) {
            Some(sampled) if sampled != self.temperature => Err(ModelError::Input(format!(
                "ids sampled at temperature {sampled} cannot be examined at {}",
                self.temperature
            ))),
            _ => Ok(()),
        }
    }
}

/// What gets gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trainable {
    /// The adapter's matrices; the base is frozen.
    Adapter,
    /// Every weight of the base, a tied embedding included; an adapter, if given, is frozen.
    Base,
}

/// Log-probabilities by row, one for each scored id in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scores {
    /// `ln p(id | everything before it)` at the configured temperature.
    pub log_probs: Vec<Vec<f32>>,
    /// Entropy in nats of the distribution that each scored id came from, where asked for.
    pub entropies: Option<Vec<Vec<f32>>>,
    /// What the logits say about each scored id as a sampled one, where asked for: one vector a row,
    /// empty for rows without a noise key.
    pub evidence: Option<Vec<Vec<TokenEvidence>>>,
}

/// Scores without gradients.
///
/// # Errors
/// An empty or malformed batch, ids outside of the vocabulary, sequences beyond the model's
/// positions, or a failing device.
pub fn log_probs(
    decoder: &Decoder,
    adapter: Option<&Adapter>,
    batch: &ScoreBatch,
    config: &ScoreConfig,
) -> Result<Scores, ModelError> {
    Ok(score(decoder, adapter, None, batch, config)?.0)
}

/// Scores without gradients, and a value for each scored id: `head` on the normed hidden state that
/// predicts it.
///
/// # Errors
/// As [`log_probs`].
pub fn log_probs_and_values(
    decoder: &Decoder,
    adapter: Option<&Adapter>,
    head: &ValueHead,
    batch: &ScoreBatch,
    config: &ScoreConfig,
) -> Result<(Scores, Vec<Vec<f32>>), ModelError> {
    let (scores, values) = score(decoder, adapter, Some(head), batch, config)?;
    Ok((scores, values.unwrap_or_default()))
}

/// Scores, and values where a value head was given.
type Scored = (Scores, Option<Vec<Vec<f32>>>);

fn score(
    decoder: &Decoder,
    adapter: Option<&Adapter>,
    value: Option<&ValueHead>,
    batch: &ScoreBatch,
    config: &ScoreConfig,
) -> Result<Scored, ModelError> {
    config.check()?;
    if host::serves(decoder) {
        host::score(decoder, adapter, value, batch, config)
    } else {
        graph::score(decoder, adapter, value, batch, config)
    }
}

/// Scores and keeps what [`Tape::backward`] needs.
///
/// # Errors
/// As [`log_probs`]; also [`Trainable::Adapter`] without an adapter, and [`Trainable::Base`] over
/// weights that are not f32.
pub fn forward(
    decoder: &Decoder,
    adapter: Option<&Adapter>,
    trainable: Trainable,
    batch: &ScoreBatch,
    config: &ScoreConfig,
) -> Result<Tape, ModelError> {
    config.check()?;
    if trainable == Trainable::Adapter && adapter.is_none() {
        return Err(ModelError::Input("no adapter to compute gradients for".into()));
    }
    if trainable == Trainable::Base && decoder.dtype() != DType::F32 {
        let reason = "training all weights needs them in f32; load the checkpoint as f32";
        return Err(ModelError::Input(reason.into()));
    }
    Ok(Tape(if host::serves(decoder) {
        Recorded::Host(Box::new(HostTape::record(decoder, adapter, trainable, batch, config)?))
    } else {
        Recorded::Graph(Box::new(GraphTape::record(decoder, adapter, trainable, batch, config)?))
    }))
}

/// A recorded pass: its scores, and what the backward pass needs.
pub struct Tape(Recorded);

enum Recorded {
    Host(Box<HostTape>),
    Graph(Box<GraphTape>),
}

impl Tape {
    /// The scores.
    pub fn scores(&self) -> &Scores {
        match &self.0 {
            Recorded::Host(tape) => tape.scores(),
            Recorded::Graph(tape) => tape.scores(),
        }
    }

    /// Log-probabilities by row, one for each scored id in order.
    pub fn log_probs(&self) -> &[Vec<f32>] {
        &self.scores().log_probs
    }

    /// A value for each scored id: `head` on the normed hidden state that predicts it.
    ///
    /// # Errors
    /// A head of another width, or a failing device.
    pub fn values(&self, head: &ValueHead) -> Result<Vec<Vec<f32>>, ModelError> {
        match &self.0 {
            Recorded::Host(tape) => tape.values(head),
            Recorded::Graph(tape) => tape.values(head),
        }
    }

    /// Gradients of a loss, given its derivatives (those by log-probabilities alone, or all). A value
    /// head's own are among them, under its parameters' names.
    ///
    /// # Errors
    /// Another shape, values that are not finite, derivatives by entropies that were not asked for,
    /// or a failing device.
    pub fn backward<'a>(
        self,
        derivatives: impl Into<Derivatives<'a>>,
    ) -> Result<Gradients, ModelError> {
        match self.0 {
            Recorded::Host(tape) => tape.backward(derivatives.into()),
            Recorded::Graph(tape) => tape.backward(derivatives.into()),
        }
    }
}

/// A loss's derivatives by what a [`Tape`] gave, in the shape of [`Tape::log_probs`].
#[derive(Clone, Copy)]
pub struct Derivatives<'a> {
    /// By each log-probability.
    pub log_probs: &'a [Vec<f32>],
    /// By each entropy.
    pub entropies: Option<&'a [Vec<f32>]>,
    /// By each value of a value head.
    pub values: Option<(&'a ValueHead, &'a [Vec<f32>])>,
}

impl<'a> From<&'a [Vec<f32>]> for Derivatives<'a> {
    fn from(log_probs: &'a [Vec<f32>]) -> Self {
        Self { log_probs, entropies: None, values: None }
    }
}

impl<'a> From<&'a Vec<Vec<f32>>> for Derivatives<'a> {
    fn from(log_probs: &'a Vec<Vec<f32>>) -> Self {
        log_probs.as_slice().into()
    }
}

/// Checked derivatives, one value a scored id.
struct Slopes<'a> {
    log_probs: Vec<f32>,
    entropies: Option<Vec<f32>>,
    values: Option<(&'a ValueHead, Vec<f32>)>,
}

impl<'a> Slopes<'a> {
    fn new(
        given: Derivatives<'a>,
        layout: &Layout,
        scores: &Scores,
        width: usize,
    ) -> Result<Self, ModelError> {
        if given.entropies.is_some() && scores.entropies.is_none() {
            let reason = "dL/dentropy is given, and the pass recorded no entropies";
            return Err(ModelError::Input(reason.into()));
        }
        let values = given.values.map(|(head, rows)| {
            head.check_width(width)?;
            Ok((head, layout.join("value", rows)?))
        });
        Ok(Self {
            log_probs: layout.join("logp", given.log_probs)?,
            entropies: given.entropies.map(|rows| layout.join("entropy", rows)).transpose()?,
            values: values.transpose()?,
        })
    }
}
