//! Supervised updates: the mean cross entropy of the scored ids.

use super::conversation::shared_prefix;
use policy::{
    model::{Adapter, Decoder, ModelError},
    score::{
        Gradients, Optimizer, ScoreBatch, ScoreConfig, ScoreRow, Trainable, forward, log_probs,
    },
    vision::PlacedImage,
};

/// What is trained, with its optimizer.
pub enum Student {
    /// A LoRA adapter over a frozen base.
    Adapter(Box<Adapter>),
    /// All weights of the base.
    Base,
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

/// A forward pass that several rows share a prefix in.
fn batch(rows: &[&ScoreRow]) -> ScoreBatch {
    let shared = shared_prefix(rows);
    let prefix = rows.first().map_or_else(Vec::new, |row| row.ids[..shared].to_vec());
    let rows = rows.iter().map(|row| ScoreRow {
        ids: row.ids[shared..].to_vec(),
        scored: row.scored[shared..].to_vec(),
        images: (row.images.iter().cloned())
            .map(|image| PlacedImage { at: image.at - shared, ..image })
            .collect(),
        noise: None,
    });
    ScoreBatch { rows: rows.collect(), prefix, images: Vec::new() }
}

fn scored(rows: &[&ScoreRow]) -> usize {
    rows.iter().flat_map(|row| &row.scored).filter(|scored| **scored).count()
}

/// One update on `micro_batches`, whose scored ids weigh the same wherever they stand.
///
/// # Errors
/// A gradient that is not finite, a failing device, or rows that the model cannot take.
pub fn supervised_update(
    decoder: &mut Decoder,
    student: &mut Student,
    optimizer: &mut Optimizer,
    learning_rate: f64,
    micro_batches: &[Vec<&ScoreRow>],
    checkpointing: bool,
) -> Result<SupervisedReport, ModelError> {
    let total: usize = micro_batches.iter().map(|rows| scored(rows)).sum();
    let weight = 1.0 / total.max(1) as f64;
    let config = ScoreConfig { checkpointing, ..ScoreConfig::default() };
    let (mut loss, mut tokens, mut sum) = (0.0, 0, None::<Gradients>);
    for rows in micro_batches {
        let batch = batch(rows);
        tokens +=
            (batch.prefix.len() + batch.rows.iter().map(|r| r.ids.len()).sum::<usize>()) as u64;
        let (adapter, trainable) = match student {
            Student::Adapter(adapter) => (Some(&**adapter), Trainable::Adapter),
            Student::Base => (None, Trainable::Base),
        };
        let tape = forward(decoder, adapter, trainable, &batch, &config)?;
        let logp = tape.log_probs();
        loss -= logp.iter().flatten().map(|lp| f64::from(*lp)).sum::<f64>() * weight;
        #[allow(clippy::cast_possible_truncation, reason = "gradients enter the model in f32")]
        let slope: Vec<Vec<f32>> = logp.iter().map(|row| vec![-weight as f32; row.len()]).collect();
        let gradients = tape.backward(&slope)?;
        match &mut sum {
            None => sum = Some(gradients),
            Some(sum) => sum.add(gradients),
        }
    }
    let grad_norm = match (sum, student) {
        (None, _) => 0.0,
        (Some(gradients), Student::Adapter(adapter)) => {
            optimizer.step(learning_rate, &mut **adapter, gradients)?
        }
        (Some(gradients), Student::Base) => optimizer.step(learning_rate, decoder, gradients)?,
    };
    Ok(SupervisedReport { loss, grad_norm, tokens })
}

/// Mean cross entropy of the scored ids of `rows`, nats, without training.
///
/// # Errors
/// As [`supervised_update`].
pub fn supervised_loss(
    decoder: &Decoder,
    student: &Student,
    rows: &[ScoreRow],
    batch_size: usize,
) -> Result<f64, ModelError> {
    let adapter = match student {
        Student::Adapter(adapter) => Some(&**adapter),
        Student::Base => None,
    };
    let (mut sum, mut count) = (0.0, 0usize);
    for rows in rows.chunks(batch_size.max(1)) {
        let rows: Vec<&ScoreRow> = rows.iter().collect();
        let scores = log_probs(decoder, adapter, &batch(&rows), &ScoreConfig::default())?;
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
