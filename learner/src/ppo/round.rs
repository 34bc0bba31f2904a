//! One round: old and reference log-probabilities once, then epochs of clipped updates on the same
//! rows. Everything about it follows from its rows, adapters, optimizer and settings, so it can stop
//! after any update and go on as if it had not.

use std::time::Instant;

use policy::{
    model::{Adapter, Decoder},
    score::{Gradients, Optimizer, ScoreConfig, Trainable, forward, log_probs},
};
use protocol::Digest;
use serde::{Deserialize, Serialize};
use terminal::{Failure, Interrupt};

use crate::{
    loss::{Advantage, Aggregation, Denominator, LossRow, StepTotals, policy_loss},
    ranks::{self, Ranks, gradients, split_even},
    recipe::{PpoSettings, Sampled},
    rows::{Example, Images, batches, four_places, shared_batch},
    sft::train::epoch_order,
    train::update::wide,
};

/// The rows of a round as token streams, and what they say about their codes.
#[derive(Debug)]
pub struct RoundRows<'a> {
    /// Scored are the digits of the codes.
    pub examples: &'a [Example],
    /// One an example.
    pub sampled: &'a [Sampled],
    /// Their images.
    pub images: &'a Images,
}

/// What does not change during a round: log-probabilities of each row's digits, nats.
#[derive(Clone, Debug, PartialEq)]
pub struct Anchors {
    /// Under the policy at the round's start.
    pub old: Vec<Vec<f32>>,
    /// Under the reference.
    pub reference: Vec<Vec<f32>>,
}

impl Anchors {
    /// Scores the rows without gradients.
    ///
    /// # Errors
    /// An image that changed, or a failing device.
    pub fn compute(
        decoder: &Decoder,
        adapter: &Adapter,
        reference: &Adapter,
        rows: &RoundRows<'_>,
        batch_size: usize,
        ranks: &mut Ranks,
    ) -> Result<Self, Failure> {
        let mut anchors = Self { old: Vec::new(), reference: Vec::new() };
        let mine = split_even(rows.examples.len(), ranks.rank(), ranks.world());
        for batch in batches(&rows.examples[mine], batch_size) {
            let batch = Example::score_rows(&batch, rows.images).map_err(Failure::Fault)?;
            let batch = shared_batch(batch);
            for (adapter, all) in [(adapter, &mut anchors.old), (reference, &mut anchors.reference)]
            {
                let scores = log_probs(decoder, Some(adapter), &batch, &ScoreConfig::default());
                all.extend(scores.map_err(Failure::fault)?.log_probs);
            }
        }
        anchors.gather(rows.examples, ranks)?;
        Ok(anchors)
    }

    /// The same from a checkpoint's tables.
    #[allow(clippy::cast_possible_truncation, reason = "they were f32")]
    pub fn from_tables(old: &[Vec<f64>], reference: &[Vec<f64>]) -> Self {
        let narrow = |rows: &[Vec<f64>]| -> Vec<Vec<f32>> {
            rows.iter().map(|row| row.iter().map(|value| *value as f32).collect()).collect()
        };
        Self { old: narrow(old), reference: narrow(reference) }
    }

    /// Puts together what each rank scored: its part of the rows, in the order of the ranks.
    fn gather(&mut self, examples: &[Example], ranks: &mut Ranks) -> Result<(), Failure> {
        if ranks.world() == 1 {
            return Ok(());
        }
        for all in [&mut self.old, &mut self.reference] {
            let bytes: Vec<u8> = all.iter().flatten().flat_map(|it| it.to_le_bytes()).collect();
            let bytes = ranks.all_gather(&bytes)?.concat();
            let float = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            let mut values = bytes.chunks_exact(4).map(float);
            *all = examples
                .iter()
                .map(|row| {
                    let digits = row.scored.iter().filter(|scored| **scored).count();
                    values.by_ref().take(digits).collect()
                })
                .collect();
        }
        Ok(())
    }

    /// Mean of what the old policy gives a code's log-probability more than its sampler gave it, and mean
    /// of that difference's size.
    fn gaps(&self, sampled: &[Sampled]) -> (f64, f64) {
        let gaps =
            self.old.iter().zip(sampled).map(|(old, row)| {
                old.iter().map(|logp| f64::from(*logp)).sum::<f64>() - row.vllm_logp
            });
        let (sum, size) = gaps.fold((0.0, 0.0), |(sum, size), gap| (sum + gap, size + gap.abs()));
        let rows = sampled.len().max(1) as f64;
        (sum / rows, size / rows)
    }
}

/// Means over one micro-batch.
pub(super) type MicroStats = [f64; 5];

/// How far a round has come.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Place {
    /// Updates made.
    pub updates: u64,
    /// pg_loss, kl, clip_frac, approx_kl and entropy of each micro-batch of the epoch so far; of the last epoch at the end.
    pub epoch: Vec<MicroStats>,
}

impl Place {
    /// The same from a checkpoint's table.
    pub fn from_table(updates: u64, epoch: &[Vec<f64>]) -> Self {
        let micro =
            |row: &Vec<f64>| [0, 1, 2, 3, 4].map(|at| row.get(at).copied().unwrap_or_default());
        Self { updates, epoch: epoch.iter().map(micro).collect() }
    }
}

/// What an update leaves.
pub struct Policy<'a> {
    /// The adapter.
    pub adapter: &'a mut Adapter,
    /// Its optimizer.
    pub optimizer: &'a Optimizer,
    /// How far the round has come.
    pub place: &'a Place,
}

/// `stats.json`: what the last epoch of a round did.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RoundStats {
    /// Mean over micro-batches of the mean surrogate loss.
    pub pg_loss: f64,
    /// The same of k3, summed over a code's digits.
    pub kl: f64,
    /// The same of the share of ratios outside of the clip's range.
    pub clip_frac: f64,
    /// Mean over the rows of the old log-probability of the code less `vllm_logp`.
    pub logp_gap: f64,
    /// Mean of its size.
    pub logp_gap_abs: f64,
    /// Rows of the round.
    pub rows: usize,
    /// Seconds of the updates.
    pub train_s: u64,
}

impl RoundStats {
    /// Rounded to four places, as they are written down.
    pub fn new(place: &Place, anchors: &Anchors, rows: &RoundRows<'_>, seconds: f64) -> Self {
        let count = place.epoch.len().max(1) as f64;
        let mean = |part: usize| {
            four_places(place.epoch.iter().map(|micro| micro[part]).sum::<f64>() / count)
        };
        let (gap, gap_abs) = anchors.gaps(rows.sampled);
        Self {
            pg_loss: mean(0),
            kl: mean(1),
            clip_frac: mean(2),
            logp_gap: four_places(gap),
            logp_gap_abs: four_places(gap_abs),
            rows: rows.examples.len(),
            train_s: seconds.round() as u64,
        }
    }
}

/// One update.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct PpoUpdate {
    /// Updates made in this round, this one included.
    pub update: u64,
    /// Epoch, from 1.
    pub epoch: u64,
    /// Means over its micro-batches, as in [`RoundStats`].
    pub pg_loss: f64,
    /// See there.
    pub kl: f64,
    /// See there.
    pub clip_frac: f64,
    /// Mean over its micro-batches of `r - 1 - ln r` a digit: how far the policy moved from the one at the
    /// round's start.
    pub approx_kl: f64,
    /// The same of the entropy a digit, nats.
    pub entropy: f64,
    /// Norm of the gradient before clipping.
    pub grad_norm: f64,
    /// The learning rate.
    pub learning_rate: f64,
    /// Ids that went through the model a second.
    pub tokens_per_second: f64,
}

/// Trains a policy on the rows of a round.
pub struct Round<'a> {
    /// The base.
    pub decoder: &'a Decoder,
    /// What is learned from.
    pub rows: RoundRows<'a>,
    /// What does not change.
    pub anchors: &'a Anchors,
    /// How.
    pub settings: &'a PpoSettings,
    /// Decides the order of rows, with the epoch.
    pub seed: u64,
}

impl Round<'_> {
    /// Goes on from `place` to the round's end, or to an interrupt. Tells `report` of every update.
    ///
    /// # Errors
    /// A gradient that is not finite, an image that changed, a failing device.
    pub fn train(
        &self,
        adapter: &mut Adapter,
        optimizer: &mut Optimizer,
        place: &mut Place,
        interrupt: &Interrupt,
        ranks: &mut Ranks,
        report: &mut dyn FnMut(&PpoUpdate, Policy<'_>) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let count = self.rows.examples.len();
        let (total, each) = (self.settings.updates(count), self.settings.updates_per_epoch(count));
        let whole = self.settings.whole_updates(count);
        let micro = self.settings.per_device_train_batch_size as usize;
        let accumulation = self.settings.gradient_accumulation_steps as usize;
        let mut stop = ranks.decided(interrupt.raised())?;
        while place.updates < total && !stop {
            let (epoch, start) = (place.updates / each.max(1), place.updates % each.max(1));
            let order = epoch_order(self.seed, epoch, count);
            let micro_batches: Vec<&[usize]> = order.chunks(micro).collect();
            let groups = micro_batches.chunks(accumulation).skip(start as usize);
            if start == 0 {
                place.epoch.clear();
            }
            for group in groups {
                if place.updates >= total || stop {
                    break;
                }
                let learning_rate = self.settings.optimizer.learning_rate_at(place.updates, whole);
                let began = Instant::now();
                let ids = group
                    .iter()
                    .flat_map(|chosen| *chosen)
                    .filter_map(|row| self.rows.examples.get(*row).map(|it| it.ids.len()));
                let ids = ids.sum::<usize>() as f64;
                let (stats, grad_norm) =
                    self.update(adapter, optimizer, learning_rate, group, ranks)?;
                stop = ranks.decided(interrupt.raised())?;
                place.updates += 1;
                let mean = |part: usize| {
                    stats.iter().map(|it| it[part]).sum::<f64>() / stats.len().max(1) as f64
                };
                place.epoch.extend(&stats);
                let update = PpoUpdate {
                    update: place.updates,
                    epoch: epoch + 1,
                    pg_loss: mean(0),
                    kl: mean(1),
                    clip_frac: mean(2),
                    approx_kl: mean(3),
                    entropy: mean(4),
                    grad_norm,
                    learning_rate,
                    tokens_per_second: ids / began.elapsed().as_secs_f64(),
                };
                report(&update, Policy { adapter, optimizer, place })?;
            }
        }
        Ok(())
    }

    /// One update on some micro-batches, of which each rank computes a part. Each is a mean over its rows and weighs one part in
    /// `gradient_accumulation_steps`, however many there are.
    fn update(
        &self,
        adapter: &mut Adapter,
        optimizer: &mut Optimizer,
        learning_rate: f64,
        group: &[&[usize]],
        ranks: &mut Ranks,
    ) -> Result<(Vec<MicroStats>, f64), Failure> {
        let share = 1.0 / f64::from(self.settings.gradient_accumulation_steps);
        let (mut stats, mut sum) = (Vec::new(), None::<Gradients>);
        for chosen in group {
            let (mut micro, gradients) = self.micro_batch(adapter, chosen, share, ranks)?;
            ranks.all_reduce_wide(&mut micro)?;
            stats.push(micro);
            match (&mut sum, gradients) {
                (None, gradients) => sum = gradients,
                (Some(sum), Some(gradients)) => sum.add(gradients),
                (Some(_), None) => {}
            }
        }
        let sum = gradients::summed(ranks, sum, adapter)?;
        let step = sum.map(|gradients| optimizer.step(learning_rate, adapter, gradients));
        let grad_norm = step.transpose().map_err(Failure::fault)?.unwrap_or_default();
        if ranks.world() > 1 {
            let bytes = adapter.to_safetensors().map_err(Failure::fault)?;
            ranks.agree("adapter", Digest::of(&bytes))?;
        }
        Ok((stats, grad_norm))
    }

    fn micro_batch(
        &self,
        adapter: &Adapter,
        chosen: &[usize],
        share: f64,
        ranks: &Ranks,
    ) -> Result<(MicroStats, Option<Gradients>), Failure> {
        let costs: Vec<usize> = chosen
            .iter()
            .map(|row| self.rows.examples.get(*row).map_or(0, |it| it.ids.len()))
            .collect();
        let digits = |row: &usize| {
            let scored = self.rows.examples.get(*row).map(|it| it.scored.iter());
            scored.into_iter().flatten().filter(|scored| **scored).count()
        };
        let totals = chosen.iter().map(digits).fold(StepTotals::default(), StepTotals::with);
        let each = 1.0 / chosen.len().max(1) as f64;
        let each_digit = 1.0 / chosen.iter().map(digits).sum::<usize>().max(1) as f64;
        let chosen: Vec<usize> = ranks::share(&costs, ranks.rank(), ranks.world())
            .into_iter()
            .map(|at| chosen[at])
            .collect();
        let chosen = &chosen;
        if chosen.is_empty() {
            return Ok(([0.0; 5], None));
        }
        let examples: Vec<&Example> =
            chosen.iter().filter_map(|row| self.rows.examples.get(*row)).collect();
        let batch = Example::score_rows(&examples, self.rows.images).map_err(Failure::Fault)?;
        let checkpointing = self.settings.gradient_checkpointing;
        let config = ScoreConfig { checkpointing, entropy: true, ..ScoreConfig::default() };
        let trainable = Trainable::Adapter;
        let tape = forward(self.decoder, Some(adapter), trainable, &shared_batch(batch), &config)
            .map_err(Failure::fault)?;
        let logp = wide(tape.log_probs());
        let of = |all: &[Vec<f32>]| -> Vec<Vec<f64>> {
            chosen
                .iter()
                .map(|row| all.get(*row).map(|it| wide_row(it)).unwrap_or_default())
                .collect()
        };
        let (old, reference) = (of(&self.anchors.old), of(&self.anchors.reference));
        let rows: Vec<LossRow<'_>> = chosen
            .iter()
            .zip(&logp)
            .zip(old.iter().zip(&reference))
            .map(|((row, logp), (old, reference))| LossRow {
                logp,
                logp_old: old,
                logp_ref: Some(reference),
                mask: None,
                entropy: None,
                advantage: Advantage::Rollout(self.rows.sampled.get(*row).map_or(0.0, |it| it.adv)),
                importance: None,
            })
            .collect();
        let denominator =
            Denominator::new(Aggregation::SeqMeanTokenSum, totals, 1).map_err(Failure::fault)?;
        let loss =
            policy_loss(&self.settings.loss(), &denominator, &rows).map_err(Failure::fault)?;
        let entropies = tape.scores().entropies.iter().flatten().flatten();
        let micro = [
            loss.policy_value,
            loss.stats.kl * each,
            loss.stats.outside as f64 * each,
            loss.stats.approx_kl * each_digit,
            entropies.map(|it| f64::from(*it)).sum::<f64>() * each_digit,
        ];
        #[allow(clippy::cast_possible_truncation, reason = "gradients enter the model in f32")]
        let slope: Vec<Vec<f32>> = loss
            .gradient
            .iter()
            .map(|row| row.iter().map(|slope| (slope * share) as f32).collect())
            .collect();
        Ok((micro, Some(tape.backward(&slope).map_err(Failure::fault)?)))
    }
}

fn wide_row(row: &[f32]) -> Vec<f64> {
    row.iter().copied().map(f64::from).collect()
}
