//! Examines scored ids as sampled ones while their logits pass through the head.

use super::{ScoreBatch, ScoreConfig, layout::Layout};
use crate::{
    model::ModelError,
    sampling::{Examined, Sampler},
};
use protocol::NoiseKey;

/// How the scored ids of a batch were sampled.
pub(super) struct Examiner {
    sampler: Sampler,
    /// For each scored id in order, its noise key and stream position.
    draws: Vec<Option<(NoiseKey, u32)>>,
}

impl Examiner {
    /// The examiner of a batch; none where the configuration asks for none.
    pub(super) fn new(
        batch: &ScoreBatch,
        layout: &Layout,
        config: &ScoreConfig,
    ) -> Result<Option<Self>, ModelError> {
        let Some(sampling) = config.examine else { return Ok(None) };
        let sampler =
            Sampler::new(&sampling).map_err(|error| ModelError::Input(error.to_string()))?;
        let keys = batch.rows.iter().zip(&layout.counts);
        let keys = keys.flat_map(|(row, &count)| std::iter::repeat_n(row.noise, count));
        let draws = keys.zip(&layout.offsets).map(|(key, &at)| Some((key?, at))).collect();
        Ok(Some(Self { sampler, draws }))
    }

    /// Examines scored id `index`, which is `id`, by its logits.
    pub(super) fn examine(
        &self,
        index: usize,
        id: u32,
        logits: &[f32],
    ) -> Result<Option<Examined>, ModelError> {
        let Some((key, position)) = self.draws.get(index).copied().flatten() else {
            return Ok(None);
        };
        self.sampler
            .examine(logits, &key, position, id)
            .map(Some)
            .map_err(|error| ModelError::Input(error.to_string()))
    }
}
