//! What the scoring pass found out about an episode's sampled ids.

use policy::{
    model::{Adapter, Decoder, ModelError},
    sampling::TokenEvidence,
    score::{ScoreConfig, log_probs},
    vision::PromptImages,
};
use protocol::{Episode, Sampling};
use serde::{Deserialize, Serialize};

use super::SamplingBounds;
use crate::{audit::Reason, group_batch::group_batch};

/// A deficit or gap beyond this counts as this in maxima: it stays a number in every file.
const MOST: f64 = 1e3;
/// A deficit or gap beyond this counts as this in means, so that one outlier of an honest episode in
/// low precision does not decide about it.
const MOST_IN_MEAN: f64 = 4.0;

/// The sampled ids of one episode beside honest sampling from its policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SamplingEvidence {
    /// Sampled ids.
    pub tokens: usize,
    /// Of these, the ids that honest sampling on this device would not have given.
    pub unexplained: usize,
    /// The largest deficit, in units of logit / T, to 1,000.
    pub deficit_max: f64,
    /// Position in the stream of that id.
    pub deficit_at: usize,
    /// The mean deficit, each counted to 4.
    pub deficit_mean: f64,
    /// The largest difference, in nats, of a log-probability (raw, or of the distribution that was
    /// sampled from) to the learner's own, to 1,000.
    pub logp_gap_max: f64,
    /// Position in the stream of that id.
    pub logp_gap_at: usize,
    /// The mean over the ids of the larger of their two differences, each counted to 4.
    pub logp_gap_mean: f64,
}

/// How far one sampled id is from honest sampling.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Deviation {
    /// Its position in the stream.
    pub at: usize,
    /// [`TokenEvidence::deficit`].
    pub deficit: f64,
    /// The larger of the differences of its two log-probabilities to the learner's own, nats.
    pub logp_gap: f64,
}

/// What the scoring pass says about each sampled id of an episode, in order, beside what the episode
/// says.
pub fn deviations(episode: &Episode, tokens: &[TokenEvidence]) -> Vec<Deviation> {
    let ids = episode.spans.iter().flat_map(|span| {
        let claims = span.logp_raw.iter().copied().zip(span.logp_sampling.iter().copied());
        (span.offset as usize..).zip(claims)
    });
    ids.zip(tokens)
        .map(|((at, (raw, sampling)), token)| {
            let [low, high] = token.logp_sampling;
            let nearest = if sampling < low { low } else { sampling.min(high) };
            let logp_gap = gap(raw, token.logp_raw).max(gap(sampling, nearest));
            Deviation { at, deficit: token.deficit, logp_gap }
        })
        .collect()
}

impl SamplingEvidence {
    /// Sums up an episode's ids.
    pub fn of<'a>(ids: impl IntoIterator<Item = &'a Deviation>) -> Self {
        let mut sum = Self::default();
        for &Deviation { at, deficit, logp_gap } in ids {
            sum.tokens += 1;
            sum.unexplained += usize::from(deficit > 0.0);
            if deficit > sum.deficit_max {
                (sum.deficit_max, sum.deficit_at) = (deficit.min(MOST), at);
            }
            if logp_gap > sum.logp_gap_max {
                (sum.logp_gap_max, sum.logp_gap_at) = (logp_gap.min(MOST), at);
            }
            sum.deficit_mean += deficit.min(MOST_IN_MEAN);
            sum.logp_gap_mean += logp_gap.min(MOST_IN_MEAN);
        }
        let count = sum.tokens.max(1) as f64;
        sum.deficit_mean /= count;
        sum.logp_gap_mean /= count;
        sum
    }
}

/// The difference of two log-probabilities; of what is no number, as large as can be.
fn gap(claimed: f32, own: f32) -> f64 {
    let gap = (f64::from(claimed) - f64::from(own)).abs();
    if gap.is_nan() { MOST } else { gap.min(MOST) }
}

/// Scores the rollouts of one prompt under the adapter that played them (the base where there is
/// none), and nothing else: for whoever does not train on them.
///
/// # Errors
/// Ids that the model does not have, or a failing device.
pub fn examine(
    decoder: &Decoder,
    adapter: Option<&Adapter>,
    images: Option<&PromptImages>,
    sampling: Sampling,
    episodes: &[&Episode],
) -> Result<Vec<Vec<Deviation>>, ModelError> {
    let config = ScoreConfig {
        temperature: if sampling.temperature == 0.0 { 1.0 } else { sampling.temperature },
        examine: Some(sampling),
        ..ScoreConfig::default()
    };
    let scores = log_probs(decoder, adapter, &group_batch(episodes, images)?, &config)?;
    let evidence = scores.evidence.unwrap_or_default();
    Ok(episodes.iter().zip(&evidence).map(|(it, tokens)| deviations(it, tokens)).collect())
}

/// What sampling evidence does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SamplingMode {
    /// It is not looked for.
    Off,
    /// It is written down, and refuses nothing.
    #[default]
    Report,
    /// An episode that fails the bounds is refused.
    Enforce,
}

/// An episode's evidence, and which bound it breaks.
#[derive(Clone, Debug, PartialEq)]
pub struct Flagged {
    /// The evidence.
    pub evidence: SamplingEvidence,
    /// The first bound that it breaks, if any, or that there are no bounds.
    pub reason: Option<Reason>,
}

/// Judges evidence by the bounds of an actor's device.
#[derive(Clone, Debug, Default)]
pub struct SamplingJudge {
    /// What evidence does.
    pub mode: SamplingMode,
    bounds: Vec<(String, SamplingBounds)>,
}

impl SamplingJudge {
    /// A judge with bounds for actors' kinds of device.
    pub fn new(mode: SamplingMode, bounds: Vec<(String, SamplingBounds)>) -> Self {
        Self { mode, bounds }
    }

    /// All bounds, by kind of device.
    pub fn all(&self) -> &[(String, SamplingBounds)] {
        &self.bounds
    }

    /// The bounds for a kind of device.
    pub fn bounds(&self, kind: &str) -> Option<&SamplingBounds> {
        self.bounds.iter().find(|(known, _)| known == kind).map(|(_, bounds)| bounds)
    }

    /// Judges an episode that a device of this kind sampled.
    pub fn judge(&self, kind: &str, evidence: SamplingEvidence) -> Flagged {
        let reason = match self.bounds(kind) {
            Some(bounds) => bounds.check(&evidence).err(),
            None => Some(Reason::UncalibratedDevice { device: kind.to_owned() }),
        };
        Flagged { evidence, reason }
    }

    /// Why an episode is refused, if it is: for a broken bound, and only where that is enforced.
    pub fn refuses(&self, flagged: &Flagged) -> Option<Reason> {
        (self.mode == SamplingMode::Enforce).then(|| flagged.reason.clone()).flatten()
    }
}
