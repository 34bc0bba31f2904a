//! The rollouts of one prompt as a batch to score.

use policy::score::{ScoreBatch, ScoreRow};
use protocol::{Episode, NoiseKey};

/// The prompt once, and every rollout's continuation with its loss mask and the noise key of its
/// lease. The rollouts have one prompt: audited ones of a group.
pub(crate) fn group_batch(episodes: &[&Episode]) -> ScoreBatch {
    let prompt = |episode: &Episode| {
        episode.spans.first().map_or(0, |span| span.offset as usize).min(episode.tokens.len())
    };
    let prefix = episodes.first().map_or_else(Vec::new, |e| e.tokens[..prompt(e)].to_vec());
    let rows = episodes.iter().map(|episode| ScoreRow {
        ids: episode.tokens[prompt(episode)..].to_vec(),
        scored: episode.loss_mask[prompt(episode)..].iter().map(|mask| *mask == 1).collect(),
        noise: Some(NoiseKey::derive(&episode.run, episode.lease)),
    });
    ScoreBatch { rows: rows.collect(), prefix }
}
