//! The rollouts of one prompt as a batch to score.

use policy::{
    model::ModelError,
    score::{ScoreBatch, ScoreRow},
    vision::{PlacedImage, PromptImages},
};
use protocol::{Episode, NoiseKey};

/// The prompt once, and every rollout's continuation with its loss mask and the noise key of its
/// lease. The rollouts have one prompt and its images: audited ones of a group.
///
/// # Errors
/// Rollouts with another start than the first's; images that are not those of the prompt, or for a
/// checkpoint that is shown none.
pub(crate) fn group_batch(
    episodes: &[&Episode],
    reader: Option<&PromptImages>,
) -> Result<ScoreBatch, ModelError> {
    let prompt = |episode: &Episode| {
        episode.spans.first().map_or(0, |span| span.offset as usize).min(episode.tokens.len())
    };
    let prefix = episodes.first().map_or_else(Vec::new, |e| e.tokens[..prompt(e)].to_vec());
    let first = episodes.first();
    let alike = |episode: &&Episode| {
        first.is_some_and(|it| it.reset_images == episode.reset_images)
            && episode.tokens.starts_with(&prefix)
            && prompt(episode) == prefix.len()
    };
    if !episodes.iter().all(alike) {
        return Err(ModelError::Input("the rollouts of a group start differently".into()));
    }
    let images = match first {
        Some(first) => images(first, &prefix, reader)?,
        None => Vec::new(),
    };
    let rows = episodes.iter().map(|episode| ScoreRow {
        ids: episode.tokens[prompt(episode)..].to_vec(),
        scored: episode.loss_mask[prompt(episode)..].iter().map(|mask| *mask == 1).collect(),
        noise: Some(NoiseKey::derive(&episode.run, episode.lease)),
        images: Vec::new(),
    });
    Ok(ScoreBatch { rows: rows.collect(), prefix, images })
}

/// The images of an episode's prompt, where they lie in it.
fn images(
    episode: &Episode,
    prompt: &[u32],
    reader: Option<&PromptImages>,
) -> Result<Vec<PlacedImage>, ModelError> {
    if episode.reset_images.is_empty() {
        return Ok(Vec::new());
    }
    let wrong = |problem: String| ModelError::Input(problem);
    let reader =
        reader.ok_or_else(|| wrong("an episode with images, and no image processor".into()))?;
    let shown = episode.shown_images().map_err(|error| wrong(error.to_string()))?;
    reader.place(prompt, &shown).map_err(|error| wrong(error.to_string()))
}
