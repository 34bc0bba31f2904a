//! One group's way through the model: what it looks like before the updates, and its gradient in one.

use policy::{
    model::{Adapter, Decoder},
    score::{
        Derivatives, Gradients, ScoreBatch, ScoreConfig, Scores, Trainable, ValueHead, forward,
        log_probs, log_probs_and_values,
    },
};
use protocol::Episode;

use super::{
    ImportanceReport, UpdateError, UpdateGroup, UpdateReport, UpdateSettings, ValueReport,
    parts::{Examined, Part},
};
use crate::{
    advantage::TokenAdvantages,
    audit::sampling::{SamplingEvidence, deviations},
    group_batch::group_batch,
    loss::{
        Advantage, Denominator, LossRow, LossStats, ValueRow, ValueStats, importance_weights,
        policy_loss, value_loss,
    },
    ranks::Ranks,
};

type Rows = Vec<Vec<f64>>;

/// What a pass before the updates found out about one rollout: columns of its scored ids.
#[derive(Clone, Default)]
pub(super) struct Seen {
    /// Log-probabilities under the policy that sampled.
    logp: Vec<f64>,
    /// Under the reference, where there is a KL term.
    reference: Option<Vec<f64>>,
    /// Values before the step; empty without a value head.
    pub(super) values: Vec<f64>,
    /// Advantages and returns of those.
    pub(super) judged: Option<TokenAdvantages>,
    /// Importance weights, where an older policy sampled it.
    importance: Option<Vec<f64>>,
}

impl Seen {
    /// What the model gave, in the precision in which it gave it.
    #[allow(clippy::cast_possible_truncation, reason = "they were f32")]
    pub(super) fn to_floats(&self) -> Vec<f32> {
        let columns = [Some(&self.logp), self.reference.as_ref(), Some(&self.values)];
        let importance = self.importance.iter();
        columns.into_iter().flatten().chain(importance).flatten().map(|it| *it as f32).collect()
    }

    /// The same back, for a rollout of so many scored ids.
    pub(super) fn from_floats(
        floats: &mut impl Iterator<Item = f32>,
        scored: usize,
        settings: &UpdateSettings,
        older: bool,
    ) -> Self {
        let mut column = || floats.by_ref().take(scored).map(f64::from).collect::<Vec<f64>>();
        let logp = column();
        let reference = (settings.algorithm.beta != 0.0).then(&mut column);
        let values = settings.algorithm.value.map_or_else(Vec::new, |_| column());
        let importance = older.then(&mut column);
        Self { logp, reference, values, judged: None, importance }
    }
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
    importance: [f64; 3],
    /// Those of the next update.
    pub(super) gradients: Option<Gradients>,
    pub(super) grad_norm: f64,
    pub(super) value_grad_norm: f64,
    pub(super) updates: u32,
    pub(super) moved: u32,
    /// What rung 9 looks at.
    pub(super) examined: Vec<Examined>,
}

impl Sums {
    /// Adds up what each rank has counted by itself.
    pub(super) fn over_ranks(&mut self, ranks: &mut Ranks) -> Result<(), UpdateError> {
        if ranks.world() == 1 {
            return Ok(());
        }
        let has_values = self.value.is_some();
        let value = self.value.unwrap_or_default();
        let (gap_tokens, ids) = (self.gap_tokens as f64, self.ids as f64);
        let [weights, capped, tokens] = self.importance;
        let has_values = f64::from(u8::from(has_values));
        let own = [self.loss, self.gap, gap_tokens, ids, has_values, weights, capped, tokens];
        let mut all = [&own[..], &self.stats.to_numbers(), &value.to_numbers()].concat();
        ranks.all_reduce_wide(&mut all)?;
        let (own, rest) = all.split_at(own.len());
        let (stats, value) = rest.split_at(LossStats::NUMBERS);
        (self.loss, self.gap) = (own[0], own[1]);
        (self.gap_tokens, self.ids) = (own[2] as u64, own[3] as u64);
        self.importance = [own[5], own[6], own[7]];
        self.stats = LossStats::from_numbers(stats);
        self.value = (own[4] > 0.0).then(|| ValueStats::from_numbers(value));
        Ok(())
    }

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
            importance: (self.importance[2] > 0.0).then(|| ImportanceReport {
                importance_mean: self.importance[0] / self.importance[2],
                importance_capped: self.importance[1] / self.importance[2],
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

    /// Scores rollouts of a group under the policy that sampled them, examines them, and asks reference
    /// and value head.
    pub(super) fn look(
        &self,
        groups: &[UpdateGroup<'_>],
        part: &Part,
        sums: &mut Sums,
    ) -> Result<Vec<Seen>, UpdateError> {
        let Some((group, episodes)) = members(groups, part) else { return Ok(Vec::new()) };
        let batch = group_batch(episodes, group.images)?;
        sums.add_ids(&batch);
        let sampled = self.sampled(group, episodes, part, &batch, sums)?;
        let examine_now = self.settings.examine.filter(|_| sampled.is_none());
        let config = ScoreConfig { entropy: false, examine: examine_now, ..self.config() };
        let (decoder, adapter) = (self.decoder, Some(self.adapter));
        let (scores, values) = match self.head {
            Some(head) => log_probs_and_values(decoder, adapter, head, &batch, &config)?,
            None => (log_probs(decoder, adapter, &batch, &config)?, Vec::new()),
        };
        examine(episodes, part, &scores, sums);
        let logp = wide(&scores.log_probs);
        let cap = self.settings.importance_cap;
        let mut importance: Option<std::vec::IntoIter<Vec<f64>>> = None;
        match &sampled {
            None => sums.add_gap(self.settings, episodes, &logp),
            Some(sampled) => {
                let rows = logp.iter().zip(sampled);
                let weights: Rows =
                    rows.map(|(logp, old)| importance_weights(logp, old, cap)).collect();
                for weight in weights.iter().flatten() {
                    sums.importance[0] += weight;
                    sums.importance[1] += f64::from(u8::from(*weight >= cap));
                    sums.importance[2] += 1.0;
                }
                importance = Some(weights.into_iter());
            }
        }
        let mut reference = self.reference_scores(&batch)?.map(Vec::into_iter);
        let mut values = wide(&values).into_iter();
        let seen = logp.into_iter().map(|logp| Seen {
            logp,
            reference: reference.as_mut().and_then(Iterator::next),
            values: values.next().unwrap_or_default(),
            judged: None,
            importance: importance.as_mut().and_then(Iterator::next),
        });
        Ok(seen.collect())
    }

    /// Log-probabilities under the older policy that sampled these rollouts, by which they are examined;
    /// nothing where it is the student's own.
    fn sampled(
        &self,
        group: &UpdateGroup<'_>,
        episodes: &[&Episode],
        part: &Part,
        batch: &ScoreBatch,
        sums: &mut Sums,
    ) -> Result<Option<Rows>, UpdateError> {
        let Some(behaviour) = group.behaviour else { return Ok(None) };
        let config =
            ScoreConfig { entropy: false, examine: self.settings.examine, ..self.config() };
        let scores = log_probs(self.decoder, Some(behaviour), batch, &config)?;
        sums.add_ids(batch);
        examine(episodes, part, &scores, sums);
        let logp = wide(&scores.log_probs);
        sums.add_gap(self.settings, episodes, &logp);
        Ok(Some(logp))
    }

    fn reference_scores(&self, batch: &ScoreBatch) -> Result<Option<Rows>, UpdateError> {
        if self.settings.algorithm.beta == 0.0 {
            return Ok(None);
        }
        let plain = ScoreConfig { entropy: false, ..self.config() };
        let scores = log_probs(self.decoder, self.reference, batch, &plain)?;
        Ok(Some(wide(&scores.log_probs)))
    }

    /// Adds the share that rollouts of a group have in an update's gradient. Where nothing is `known` of
    /// them, this pass examines them and is its own old policy.
    pub(super) fn learn(
        &self,
        groups: &[UpdateGroup<'_>],
        part: &Part,
        known: &[Seen],
        denominator: &Denominator,
        sums: &mut Sums,
    ) -> Result<(), UpdateError> {
        let Some((group, episodes)) = members(groups, part) else { return Ok(()) };
        let advantages = group.advantages.get(part.rows.clone()).unwrap_or_default();
        let batch = group_batch(episodes, group.images)?;
        sums.add_ids(&batch);
        let first = known.is_empty();
        // Before the tape, which holds the activations.
        let reference = if first { self.reference_scores(&batch)? } else { None };
        let examine_now = if first { self.settings.examine } else { None };
        let config = ScoreConfig { examine: examine_now, ..self.config() };
        let tape = forward(self.decoder, Some(self.adapter), Trainable::Adapter, &batch, &config)?;
        examine(episodes, part, tape.scores(), sums);
        let logp = wide(tape.log_probs());
        if first {
            sums.add_gap(self.settings, episodes, &logp);
        }
        let entropies = tape.scores().entropies.as_deref().map(wide);
        let loss_rows: Vec<LossRow<'_>> = (logp.iter().zip(advantages).enumerate())
            .map(|(row, (logp, advantage))| {
                let known = known.get(row);
                LossRow {
                    logp,
                    logp_old: known.map_or(logp, |it| &it.logp),
                    logp_ref: match known {
                        Some(known) => known.reference.as_deref(),
                        None => at(reference.as_ref(), row),
                    },
                    mask: None,
                    entropy: at(entropies.as_ref(), row),
                    advantage: match known.and_then(|it| it.judged.as_ref()) {
                        Some(tokens) => Advantage::Tokens(&tokens.advantages),
                        None => Advantage::Rollout(*advantage),
                    },
                    importance: known.and_then(|it| it.importance.as_deref()),
                }
            })
            .collect();
        let loss = policy_loss(&self.settings.algorithm.loss(), denominator, &loss_rows)?;
        sums.loss += loss.value;
        sums.stats.merge(&loss.stats);
        let dvalues = match self.head {
            Some(head) if !first => {
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
        Ok(())
    }

    fn value_gradient(
        &self,
        head: &ValueHead,
        tape: &policy::score::Tape,
        known: &[Seen],
        denominator: &Denominator,
        sums: &mut Sums,
    ) -> Result<Vec<Vec<f32>>, UpdateError> {
        let Some(settings) = self.settings.algorithm.value else { return Ok(Vec::new()) };
        let values = wide(&tape.values(head)?);
        let rows: Vec<ValueRow<'_>> = (values.iter().zip(known))
            .map(|(values, known)| ValueRow {
                values,
                values_old: &known.values,
                returns: known.judged.as_ref().map_or(&[], |judged| &judged.returns),
            })
            .collect();
        let loss = value_loss(&settings.loss(), denominator, &rows)?;
        sums.value.get_or_insert_default().merge(&loss.stats);
        Ok(narrow(&loss.gradient))
    }
}

/// A part's group and rollouts.
fn members<'g, 'e>(
    groups: &'g [UpdateGroup<'e>],
    part: &Part,
) -> Option<(&'g UpdateGroup<'e>, &'g [&'e Episode])> {
    let group = groups.get(part.group)?;
    Some((group, group.episodes.get(part.rows.clone())?))
}

/// Keeps what the scores say about how ids were sampled.
fn examine(episodes: &[&Episode], part: &Part, scores: &Scores, sums: &mut Sums) {
    let rows = part.rows.clone();
    for ((episode, row), tokens) in episodes.iter().zip(rows).zip(scores.evidence.iter().flatten())
    {
        let evidence = SamplingEvidence::of(&deviations(episode, tokens));
        sums.examined.push((part.group, row, evidence));
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
