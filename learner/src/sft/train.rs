//! Supervised updates: the mean cross entropy of the scored ids.

use policy::{
    model::{Adapter, Decoder},
    score::{Gradients, Optimizer, ScoreConfig, Trainable, forward, log_probs},
};
use terminal::Failure;

use crate::rows::{Example, Images, batches, shared_batch};

/// What is trained, with its optimizer.
pub enum Student {
    /// A LoRA adapter over a frozen base.
    Adapter(Box<Adapter>),
    /// All weights of the base.
    Base,
}

impl Student {
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

/// One update on `micro_batches`, whose scored ids weigh the same wherever they stand.
///
/// # Errors
/// A gradient that is not finite, a failing device, an image that changed, or rows that the model
/// cannot take.
pub fn supervised_update(
    decoder: &mut Decoder,
    student: &mut Student,
    optimizer: &mut Optimizer,
    learning_rate: f64,
    micro_batches: &[&[&Example]],
    images: &Images,
    checkpointing: bool,
) -> Result<SupervisedReport, Failure> {
    let total: usize = micro_batches.iter().map(|rows| scored(rows)).sum();
    let weight = 1.0 / total.max(1) as f64;
    let config = ScoreConfig { checkpointing, ..ScoreConfig::default() };
    let (mut loss, mut tokens, mut sum) = (0.0, 0, None::<Gradients>);
    for rows in micro_batches {
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
    let grad_norm = match (sum, student) {
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
/// An image that changed; as [`supervised_update`].
pub fn supervised_loss(
    decoder: &Decoder,
    student: &Student,
    examples: &[Example],
    images: &Images,
    batch_size: usize,
) -> Result<f64, Failure> {
    let (mut sum, mut count) = (0.0, 0usize);
    for rows in batches(examples, batch_size) {
        let rows = Example::score_rows(&rows, images).map_err(Failure::Fault)?;
        let config = ScoreConfig::default();
        let scores = log_probs(decoder, student.adapter(), &shared_batch(rows), &config)
            .map_err(Failure::fault)?;
        let values = scores.log_probs.iter().flatten();
        count += values.clone().count();
        sum -= values.map(|lp| f64::from(*lp)).sum::<f64>();
    }
    Ok(sum / count.max(1) as f64)
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
