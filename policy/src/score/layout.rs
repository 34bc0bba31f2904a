//! How a batch lies in the packed `[rows, hidden]` of a pass: the prefix, then each continuation,
//! without padding, and which packed row predicts which scored id.

use super::ScoreBatch;
use crate::{
    model::{Decoder, ModelError, Placement, Position, positions},
    vision::PlacedImage,
};

/// The places of a batch's ids.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    /// Ids in packed order.
    pub(crate) ids: Vec<u32>,
    /// Where each id stands for the rotations.
    pub(crate) positions: Vec<Position>,
    /// Images by packed row.
    pub(crate) images: Placement,
    /// Length of the prefix.
    pub(crate) prefix: usize,
    /// First packed row and length of each continuation.
    pub(crate) rows: Vec<(usize, usize)>,
    /// For each scored id in order, the packed row that predicts it.
    pub(crate) predictors: Vec<u32>,
    /// The scored ids in order.
    pub(crate) targets: Vec<u32>,
    /// Index of each scored id in its sequence, in order.
    pub(crate) offsets: Vec<u32>,
    /// Scored ids of each row.
    pub(crate) counts: Vec<usize>,
}

impl Layout {
    pub(crate) fn new(decoder: &Decoder, batch: &ScoreBatch) -> Result<Self, ModelError> {
        let wrong = |reason: String| Err(ModelError::Input(reason));
        let prefix = batch.prefix.len();
        decoder.check_ids(&batch.prefix)?;
        if batch.rows.is_empty() {
            return wrong("a batch to score has no rows".into());
        }
        let mut images = decoder.check_images(&batch.prefix, &batch.images)?;
        let (places, next) = positions(prefix, &images, 0);
        let mut layout = Self {
            ids: batch.prefix.clone(),
            positions: places,
            images: Placement::default(),
            prefix,
            rows: Vec::new(),
            predictors: Vec::new(),
            targets: Vec::new(),
            offsets: Vec::new(),
            counts: Vec::new(),
        };
        for (number, row) in batch.rows.iter().enumerate() {
            if row.ids.is_empty() || row.ids.len() != row.scored.len() {
                let (ids, flags) = (row.ids.len(), row.scored.len());
                return wrong(format!("row {number} to score has {ids} ids and {flags} flags"));
            }
            if prefix == 0 && row.scored.first() == Some(&true) {
                return wrong(format!("row {number} to score: nothing precedes its first id"));
            }
            decoder.check_ids(&row.ids)?;
            decoder.check_len(prefix + row.ids.len())?;
            let start = layout.ids.len();
            layout.rows.push((start, row.ids.len()));
            layout.ids.extend_from_slice(&row.ids);
            let own = decoder.check_images(&row.ids, &row.images)?;
            layout.positions.extend(positions(row.ids.len(), &own, next).0);
            images.extend(own.into_iter().map(|it| PlacedImage { at: start + it.at, ..it }));
            let before = layout.targets.len();
            for (i, (&id, _)) in
                row.ids.iter().zip(&row.scored).enumerate().filter(|(_, (_, s))| **s)
            {
                layout.predictors.push(if i == 0 { prefix - 1 } else { start + i - 1 } as u32);
                layout.targets.push(id);
                layout.offsets.push((prefix + i) as u32);
            }
            layout.counts.push(layout.targets.len() - before);
        }
        layout.images = Placement::new(images);
        Ok(layout)
    }

    /// Values of the scored ids, split by row.
    pub(crate) fn split<T: Clone>(&self, values: &[T]) -> Vec<Vec<T>> {
        let mut rest = values;
        let take = |&count: &usize| {
            let (row, after) = rest.split_at(count.min(rest.len()));
            rest = after;
            row.to_vec()
        };
        self.counts.iter().map(take).collect()
    }

    /// The inverse of [`Layout::split`] for the derivative by `what`, checked.
    pub(crate) fn join(&self, what: &str, rows: &[Vec<f32>]) -> Result<Vec<f32>, ModelError> {
        let lengths: Vec<usize> = rows.iter().map(Vec::len).collect();
        if lengths != self.counts {
            let reason = format!("dL/d{what} must have one value for each scored id of each row");
            return Err(ModelError::Input(reason));
        }
        if rows.iter().flatten().any(|v| !v.is_finite()) {
            return Err(ModelError::Input(format!("dL/d{what} holds a value that is not finite")));
        }
        Ok(rows.concat())
    }
}
