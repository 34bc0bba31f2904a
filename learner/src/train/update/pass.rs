//! One group's way through the model: what it looks like before the updates, and its gradient in one.

use std::ops::Range;

use policy::{
    model::{Adapter, Decoder},
    score::{
        Derivatives, Gradients, ScoreBatch, ScoreConfig, Scores, Trainable, ValueHead, forward,
        log_probs, log_probs_and_values,
    },
};
use protocol::Episode;

use super::{
    Refusal, UpdateError, UpdateGroup, UpdateReport, UpdateSettings, ValueReport, part_ranges,
};
use crate::{
    advantage::TokenAdvantages,
    audit::sampling::{SamplingEvidence, deviations},
    group_batch::group_batch,
    loss::{
        Advantage, Denominator, LossRow, LossStats, ValueRow, ValueStats, policy_loss, value_loss,
    },
};

type Rows = Vec<Vec<f64>>;

/// Decides on the evidence about a row of the group.
type Judge<'a> = dyn FnMut(usize, &SamplingEvidence) -> Result<(), Refusal> + 'a;

/// What a pass before the updates found out about one part of a group. All rows are of scored ids.
#[derive(Clone, Default)]
pub(super) struct Seen {
    /// Log-probabilities under the policy that sampled.
    logp: Rows,
    /// Under the reference, where there is a KL term.
    reference: Option<Rows>,
    /// Values before the step; empty without a value head.
    pub(super) values: Rows,
    /// Advantages and returns of those.
    pub(super) judged: Vec<TokenAdvantages>,
}

/// Sums over the parts and updates of a step.
#[derive(Default)]
pub(super) struct Sums {
    loss: f64,
    stats: LossStats,
    value: Option<ValueStats>,
    gap: f64,
    gap_tokens: u64,
    ids: u64,
    /// Those of the next update.
    pub(super) gradients: Option<Gradients>,
    pub(super) grad_norm: f64,
    pub(super) value_grad_norm: f64,
    pub(super) updates: u32,
    pub(super) moved: u32,
    pub(super) refused: Vec<Refusal>,
}

impl Sums {
    pub(super) fn report(&self, settings: &UpdateSettings) -> UpdateReport {
        let (stats, updates) = (&self.stats, f64::from(self.updates.max(1)));
        UpdateReport {
            loss: self.loss / updates,
            grad_norm: self.grad_norm / updates,
            kl: stats.mean_kl(),
            approx_kl: stats.mean_approx_kl().unwrap_or_default(),
            clip_fraction: stats.clip_fraction(),
            clip_fraction_low: stats.clip_fraction_low(),
            clip_fraction_high: stats.clip_fraction_high(),
            clip_fraction_dual: settings.algorithm.delta.map(|_| stats.clip_fraction_dual()),
            entropy: stats.mean_entropy(),
            logp_gap: (self.gap_tokens > 0).then(|| self.gap / self.gap_tokens as f64),
            value: self.value.map(|value| ValueReport {
                value_loss: value.mean_loss().unwrap_or_default(),
                value_clip_fraction: value.clip_fraction().unwrap_or_default(),
                explained_variance: value.explained_variance(),
                value_grad_norm: self.value_grad_norm / updates,
            }),
            tokens: self.ids,
            updates: self.updates,
            stepped: self.moved > 0,
        }
    }

    fn add_gap(&mut self, settings: &UpdateSettings, episodes: &[&Episode], logp: &Rows) {
        if settings.temperature != 1.0 {
            return;
        }
        for (episode, logp) in episodes.iter().zip(logp) {
            let sampled = episode.spans.iter().flat_map(|span| &span.logp_raw);
            for (ours, theirs) in logp.iter().zip(sampled) {
                self.gap += (ours - f64::from(*theirs)).abs();
                self.gap_tokens += 1;
            }
        }
    }

    fn add_ids(&mut self, batch: &ScoreBatch) {
        let ids = batch.prefix.len() + batch.rows.iter().map(|r| r.ids.len()).sum::<usize>();
        self.ids += ids as u64;
    }
}

/// The models of a pass.
pub(super) struct Pass<'a> {
    pub(super) decoder: &'a Decoder,
    pub(super) adapter: &'a Adapter,
    pub(super) reference: Option<&'a Adapter>,
    pub(super) head: Option<&'a ValueHead>,
    pub(super) settings: &'a UpdateSettings,
}

impl Pass<'_> {
    fn config(&self) -> ScoreConfig {
        ScoreConfig {
            temperature: self.settings.temperature,
            checkpointing: self.settings.checkpointing,
            entropy: true,
            ..ScoreConfig::default()
        }
    }

    /// Scores a group under the policy that sampled it, examines it, and asks reference and value head.
    pub(super) fn look(
        &self,
        group: &UpdateGroup<'_>,
        judge: &mut Judge<'_>,
        sums: &mut Sums,
    ) -> Result<Vec<Seen>, UpdateError> {
        let mut seen = Vec::new();
        for rows in part_ranges(group) {
            let Some(episodes) = group.episodes.get(rows.clone()) else { continue };
            let batch = group_batch(episodes, group.images)?;
            sums.add_ids(&batch);
            let config =
                ScoreConfig { entropy: false, examine: self.settings.examine, ..self.config() };
            let (decoder, adapter) = (self.decoder, Some(self.adapter));
            let (scores, values) = match self.head {
                Some(head) => log_probs_and_values(decoder, adapter, head, &batch, &config)?,
                None => (log_probs(decoder, adapter, &batch, &config)?, Vec::new()),
            };
            examine(episodes, rows, &scores, judge, sums);
            if !sums.refused.is_empty() {
                continue;
            }
            let logp = wide(&scores.log_probs);
            sums.add_gap(self.settings, episodes, &logp);
            let reference = self.reference_scores(&batch)?;
            let values = wide(&values);
            seen.push(Seen { logp, reference, values, judged: Vec::new() });
        }
        Ok(seen)
    }

    fn reference_scores(&self, batch: &ScoreBatch) -> Result<Option<Rows>, UpdateError> {
        if self.settings.algorithm.beta == 0.0 {
            return Ok(None);
        }
        let plain = ScoreConfig { entropy: false, ..self.config() };
        let scores = log_probs(self.decoder, self.reference, batch, &plain)?;
        Ok(Some(wide(&scores.log_probs)))
    }

    /// Adds a group's share of an update's gradient. Without `seen` this pass examines the group and
    /// is its own old policy.
    pub(super) fn learn(
        &self,
        group: &UpdateGroup<'_>,
        seen: &[Seen],
        denominator: &Denominator,
        judge: &mut Judge<'_>,
        sums: &mut Sums,
    ) -> Result<(), UpdateError> {
        let mut seen = seen.iter();
        for rows in part_ranges(group) {
            let (Some(episodes), Some(advantages)) =
                (group.episodes.get(rows.clone()), group.advantages.get(rows.clone()))
            else {
                continue;
            };
            let known = seen.next();
            let batch = group_batch(episodes, group.images)?;
            sums.add_ids(&batch);
            // Before the tape, which holds the activations.
            let reference = match known {
                None if sums.refused.is_empty() => self.reference_scores(&batch)?,
                _ => None,
            };
            let examine_now = if known.is_none() { self.settings.examine } else { None };
            let config = ScoreConfig { examine: examine_now, ..self.config() };
            let tape =
                forward(self.decoder, Some(self.adapter), Trainable::Adapter, &batch, &config)?;
            examine(episodes, rows, tape.scores(), judge, sums);
            if !sums.refused.is_empty() {
                // The rest is scored to find whatever else must be refused, and for nothing else.
                continue;
            }
            let logp = wide(tape.log_probs());
            if known.is_none() {
                sums.add_gap(self.settings, episodes, &logp);
            }
            let old = known.map_or(&logp, |it| &it.logp);
            let reference = known.map_or(reference.as_ref(), |it| it.reference.as_ref());
            let entropies = tape.scores().entropies.as_deref().map(wide);
            let judged = known.map(|it| it.judged.as_slice()).unwrap_or_default();
            let loss_rows: Vec<LossRow<'_>> = (logp.iter().zip(old).zip(advantages).enumerate())
                .map(|(row, ((logp, logp_old), advantage))| LossRow {
                    logp,
                    logp_old,
                    logp_ref: at(reference, row),
                    mask: None,
                    entropy: at(entropies.as_ref(), row),
                    advantage: match judged.get(row) {
                        Some(tokens) => Advantage::Tokens(&tokens.advantages),
                        None => Advantage::Rollout(*advantage),
                    },
                })
                .collect();
            let loss = policy_loss(&self.settings.algorithm.loss(), denominator, &loss_rows)?;
            sums.loss += loss.value;
            sums.stats.merge(&loss.stats);
            let dvalues = match (self.head, known) {
                (Some(head), Some(known)) => {
                    Some((head, self.value_gradient(head, &tape, known, denominator, sums)?))
                }
                _ => None,
            };
            let dlogp = narrow(&loss.gradient);
            let dentropy = loss.entropy_gradient.as_ref().map(|rows| narrow(rows));
            let gradients = tape.backward(Derivatives {
                log_probs: &dlogp,
                entropies: dentropy.as_deref(),
                values: dvalues.as_ref().map(|(head, rows)| (*head, rows.as_slice())),
            })?;
            match &mut sums.gradients {
                None => sums.gradients = Some(gradients),
                Some(sum) => sum.add(gradients),
            }
        }
        Ok(())
    }

    fn value_gradient(
        &self,
        head: &ValueHead,
        tape: &policy::score::Tape,
        known: &Seen,
        denominator: &Denominator,
        sums: &mut Sums,
    ) -> Result<Vec<Vec<f32>>, UpdateError> {
        let Some(settings) = self.settings.algorithm.value else { return Ok(Vec::new()) };
        let values = wide(&tape.values(head)?);
        let rows: Vec<ValueRow<'_>> = (values.iter().zip(&known.values).zip(&known.judged))
            .map(|((values, values_old), judged)| ValueRow {
                values,
                values_old,
                returns: &judged.returns,
            })
            .collect();
        let loss = value_loss(&settings.loss(), denominator, &rows)?;
        sums.value.get_or_insert_default().merge(&loss.stats);
        Ok(narrow(&loss.gradient))
    }
}

/// Judges the rows of a part, which are these of their group.
fn examine(
    episodes: &[&Episode],
    rows: Range<usize>,
    scores: &Scores,
    judge: &mut Judge<'_>,
    sums: &mut Sums,
) {
    for ((episode, row), tokens) in episodes.iter().zip(rows).zip(scores.evidence.iter().flatten())
    {
        if let Err(refusal) = judge(row, &SamplingEvidence::of(&deviations(episode, tokens))) {
            sums.refused.push(refusal);
        }
    }
}

fn at(rows: Option<&Rows>, row: usize) -> Option<&[f64]> {
    rows?.get(row).map(Vec::as_slice)
}

/// Log-probabilities as the loss takes them.
pub(crate) fn wide(rows: &[Vec<f32>]) -> Rows {
    rows.iter().map(|row| row.iter().copied().map(f64::from).collect()).collect()
}

#[allow(clippy::cast_possible_truncation, reason = "gradients enter the model in f32")]
fn narrow(rows: &[Vec<f64>]) -> Vec<Vec<f32>> {
    rows.iter().map(|row| row.iter().map(|value| *value as f32).collect()).collect()
}
