//! Supervised updates: the mean cross entropy of the scored ids.

use policy::{
    model::{Adapter, Decoder},
    score::{Gradients, Optimizer, ScoreConfig, Trainable, forward, log_probs},
};
use protocol::Digest;
use terminal::Failure;

use crate::{
    ranks::{Ranks, gradients, split_even},
    rows::{Example, Images, batches, mine, shared_batch},
};

/// What is trained, with its optimizer.
pub enum Student {
    /// A LoRA adapter over a frozen base.
    Adapter(Box<Adapter>),
    /// All weights of the base.
    Base,
}

impl Student {
    /// What is the same on all ranks after each update: the adapter, or what all weights were changed by.
    ///
    /// # Errors
    /// A failing device.
    pub fn digest(&self, report: &SupervisedReport) -> Result<Digest, Failure> {
        Ok(match self {
            Self::Adapter(adapter) => {
                Digest::of(&adapter.to_safetensors().map_err(Failure::fault)?)
            }
            Self::Base => Digest::of(&report.grad_norm.to_le_bytes()),
        })
    }

    /// The adapter, where one is trained.
    pub fn adapter(&self) -> Option<&Adapter> {
        match self {
            Self::Adapter(adapter) => Some(adapter),
            Self::Base => None,
        }
    }
}

/// What one supervised update did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SupervisedReport {
    /// Mean cross entropy of the scored ids, nats.
    pub loss: f64,
    /// Norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Ids that went through the model.
    pub tokens: u64,
}

fn scored(rows: &[&Example]) -> usize {
    rows.iter().flat_map(|row| &row.scored).filter(|scored| **scored).count()
}

/// How an update is computed.
#[derive(Clone, Copy, Debug)]
pub struct Computation {
    /// Rows of a forward pass.
    pub micro_batch: usize,
    /// Recompute activations in the backward pass.
    pub checkpointing: bool,
}

/// Loss, ids that went through the model, and gradients of some rows.
pub type Slope = (f64, u64, Option<Gradients>);

/// The gradient over `rows`, which all ranks know and each computes a part of. Scored ids weigh the same
/// wherever they stand.
///
/// # Errors
/// A failing device, an image that changed, rows that the model cannot take, or a rank that fails.
pub fn supervised_gradients(
    decoder: &mut Decoder,
    student: &mut Student,
    rows: &[&Example],
    images: &Images,
    how: Computation,
    ranks: &mut Ranks,
) -> Result<Slope, Failure> {
    let weight = 1.0 / scored(rows).max(1) as f64;
    let config = ScoreConfig { checkpointing: how.checkpointing, ..ScoreConfig::default() };
    let (mut loss, mut tokens, mut sum) = (0.0, 0u64, None::<Gradients>);
    for rows in mine(rows, ranks).chunks(how.micro_batch.max(1)) {
        let batch = shared_batch(Example::score_rows(rows, images).map_err(Failure::Fault)?);
        tokens +=
            (batch.prefix.len() + batch.rows.iter().map(|r| r.ids.len()).sum::<usize>()) as u64;
        let adapter = student.adapter();
        let trainable = if adapter.is_some() { Trainable::Adapter } else { Trainable::Base };
        let tape = forward(decoder, adapter, trainable, &batch, &config).map_err(Failure::fault)?;
        let logp = tape.log_probs();
        loss -= logp.iter().flatten().map(|lp| f64::from(*lp)).sum::<f64>() * weight;
        #[allow(clippy::cast_possible_truncation, reason = "gradients enter the model in f32")]
        let slope: Vec<Vec<f32>> = logp.iter().map(|row| vec![-weight as f32; row.len()]).collect();
        let gradients = tape.backward(&slope).map_err(Failure::fault)?;
        match &mut sum {
            None => sum = Some(gradients),
            Some(sum) => sum.add(gradients),
        }
    }
    let mut sums = [loss, tokens as f64];
    ranks.all_reduce_wide(&mut sums)?;
    let sum = match student {
        Student::Adapter(adapter) => gradients::summed(ranks, sum, &mut **adapter)?,
        Student::Base => gradients::summed(ranks, sum, decoder)?,
    };
    Ok((sums[0], sums[1] as u64, sum))
}

/// One update with the gradient of [`supervised_gradients`].
///
/// # Errors
/// A gradient that is not finite, or a failing device.
pub fn supervised_step(
    decoder: &mut Decoder,
    student: &mut Student,
    optimizer: &mut Optimizer,
    learning_rate: f64,
    (loss, tokens, gradients): Slope,
) -> Result<SupervisedReport, Failure> {
    let grad_norm = match (gradients, student) {
        (None, _) => Ok(0.0),
        (Some(gradients), Student::Adapter(adapter)) => {
            optimizer.step(learning_rate, &mut **adapter, gradients)
        }
        (Some(gradients), Student::Base) => optimizer.step(learning_rate, decoder, gradients),
    };
    let grad_norm = grad_norm.map_err(Failure::fault)?;
    Ok(SupervisedReport { loss, grad_norm, tokens })
}

/// Mean cross entropy of the scored ids of `examples`, nats, without training.
///
/// # Errors
/// An image that changed; as [`supervised_gradients`].
pub fn supervised_loss(
    decoder: &Decoder,
    student: &Student,
    examples: &[Example],
    images: &Images,
    batch_size: usize,
    ranks: &mut Ranks,
) -> Result<f64, Failure> {
    let (mut sum, mut count) = (0.0, 0usize);
    let mine = split_even(examples.len(), ranks.rank(), ranks.world());
    for rows in batches(&examples[mine], batch_size) {
        let rows = Example::score_rows(&rows, images).map_err(Failure::Fault)?;
        let config = ScoreConfig::default();
        let scores = log_probs(decoder, student.adapter(), &shared_batch(rows), &config)
            .map_err(Failure::fault)?;
        let values = scores.log_probs.iter().flatten();
        count += values.clone().count();
        sum -= values.map(|lp| f64::from(*lp)).sum::<f64>();
    }
    let mut sums = [sum, count as f64];
    ranks.all_reduce_wide(&mut sums)?;
    Ok(sums[0] / sums[1].max(1.0))
}

/// The order in which an epoch visits `len` rows: a Fisher-Yates shuffle that depends on the seed and
/// the epoch alone.
pub fn epoch_order(seed: u64, epoch: u64, len: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..len).collect();
    let mut draws =
        environments::draws::Draws::new("rollcall-sft-order-v1", seed ^ epoch.rotate_left(32));
    for last in (1..len).rev() {
        let other = usize::try_from(draws.within(0, last as u64)).unwrap_or(last);
        order.swap(last, other);
    }
    order
}
