//! What the engine refuses, each as one line: what, where, remedy.

use protocol::PolicyDigest;

use super::SequenceId;
use crate::{model::ModelError, sampling::SamplingError};

/// An error of the generation engine.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A setting of [`super::EngineConfig`] is out of range.
    #[error("engine.{field} is {value}; give at least {least}")]
    Config {
        /// The field.
        field: &'static str,
        /// Its value.
        value: usize,
        /// The least that it may be.
        least: usize,
    },
    /// No adapter was added under this digest.
    #[error("policy {} is not in the engine; add its adapter first", .0.0.short())]
    UnknownPolicy(PolicyDigest),
    /// An adapter was added under this digest before.
    #[error("policy {} is in the engine already; drop it before adding it again", .0.0.short())]
    KnownPolicy(PolicyDigest),
    /// The adapter has open sequences.
    #[error(
        "policy {} has {open} open sequences; close them before dropping it", policy.0.short()
    )]
    PolicyInUse {
        /// The policy.
        policy: PolicyDigest,
        /// How many sequences are open under it.
        open: usize,
    },
    /// The sequence was never opened, or was closed.
    #[error("sequence {0} is not open")]
    UnknownSequence(SequenceId),
    /// The sequence has a generation call in progress.
    #[error("sequence {0} is generating; wait for its result, or close it")]
    Busy(SequenceId),
    /// Nothing to condition on.
    #[error("sequence {0} has no ids yet; append the prompt before generating")]
    Empty(SequenceId),
    /// A generation call for no ids.
    #[error("sequence {0}: a generation call needs a budget of at least 1 id")]
    NoBudget(SequenceId),
    /// The stream would outgrow the model's positions.
    #[error(
        "sequence {sequence} has {len} ids; {more} more exceed the model's {max} positions \
         (max_position_embeddings); shorten the episode's limits"
    )]
    Context {
        /// The sequence.
        sequence: SequenceId,
        /// Ids that it has.
        len: usize,
        /// Ids asked for.
        more: usize,
        /// The model's limit.
        max: usize,
    },
    /// The stream could not fit in the cache even if it were alone.
    #[error(
        "sequence {sequence} needs {needed} places in the key-value cache, which has {max}; raise \
         engine.max_tokens or shorten the episode's limits"
    )]
    Cache {
        /// The sequence.
        sequence: SequenceId,
        /// Places for all its ids and its budget.
        needed: usize,
        /// All places.
        max: usize,
    },
    /// Settings that cannot be sampled with.
    #[error(transparent)]
    Setting(#[from] SamplingError),
    /// A row of logits that cannot be sampled from. The call is cancelled, its sequence stays open.
    #[error("sequence {sequence}, position {position}: {source}")]
    Sampling {
        /// The sequence.
        sequence: SequenceId,
        /// Position of the token that was to be sampled.
        position: usize,
        /// What is wrong.
        source: SamplingError,
    },
    /// The model refused or failed.
    #[error(transparent)]
    Model(#[from] ModelError),
}
