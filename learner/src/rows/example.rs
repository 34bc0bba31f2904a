//! Token streams that wait for a batch: ids, what of them is scored, and which images they show.

use policy::{
    score::{ScoreBatch, ScoreRow},
    vision::PlacedImage,
};
use rayon::prelude::*;

use super::{ImageId, Images};
use crate::ranks::{Ranks, share};

/// Shorter beginnings are not worth a pass of their own.
const SHORT: usize = 16;

/// A row to learn from, without its pixels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Example {
    /// The ids, image pads repeated as often as their images take.
    pub ids: Vec<u32>,
    /// For each id, whether it is learned.
    pub scored: Vec<bool>,
    /// Index of the first pad of each image, and the image.
    pub images: Vec<(usize, ImageId)>,
}

impl Example {
    /// Ids with one pad for each image, and which of them are learned, with as many pads as `shown` take.
    ///
    /// # Errors
    /// Another number of pads than of images.
    pub fn placing(
        ids: &[u32],
        scored: &[bool],
        image_pad: Option<u32>,
        shown: &[ImageId],
        images: &Images,
    ) -> Result<Self, String> {
        if let (Some(ours), Some(tower), false) = (image_pad, images.pad(), shown.is_empty())
            && ours != tower
        {
            return Err(format!(
                "config.json's image_token_id is {tower}, and the tokenizer's image token is {ours}: use \
                 the files of one checkpoint"
            ));
        }
        let mut example = Self::default();
        let mut left = shown.iter();
        for (&id, &flag) in ids.iter().zip(scored) {
            let mut size = 1;
            if Some(id) == image_pad {
                let image = *left.next().ok_or("it has an image pad without an image")?;
                example.images.push((example.ids.len(), image));
                size = images.tokens(image);
            }
            example.ids.extend(std::iter::repeat_n(id, size));
            example.scored.resize(example.ids.len(), flag);
        }
        match left.len() {
            0 => Ok(example),
            more => Err(format!(
                "{more} of its images have no image pad: show them in turns up to the last one that is \
                 learned"
            )),
        }
    }

    /// Ids before the first scored one.
    pub fn prompt(&self) -> &[u32] {
        let end = self.scored.iter().position(|scored| *scored).unwrap_or(self.ids.len());
        &self.ids[..end]
    }

    /// Where its images stand.
    ///
    /// # Errors
    /// An image file that changed.
    pub fn placed(&self, images: &Images) -> Result<Vec<PlacedImage>, String> {
        let place =
            |&(at, id): &(usize, ImageId)| Ok(PlacedImage { at, patches: images.patches(id)? });
        self.images.iter().map(place).collect()
    }

    /// As models score it.
    ///
    /// # Errors
    /// As [`Example::placed`].
    pub fn score_row(&self, images: &Images) -> Result<ScoreRow, String> {
        Ok(ScoreRow {
            ids: self.ids.clone(),
            scored: self.scored.clone(),
            images: self.placed(images)?,
            noise: None,
        })
    }

    /// The same for several, their images read at one time.
    ///
    /// # Errors
    /// As [`Example::placed`].
    pub fn score_rows(examples: &[&Self], images: &Images) -> Result<Vec<ScoreRow>, String> {
        examples.par_iter().map(|example| example.score_row(images)).collect()
    }

    fn asks_the_same(&self, other: &Self) -> bool {
        self.images == other.images && self.prompt() == other.prompt()
    }
}

/// Cuts examples into batches of at most `size`, in order, so that neighbours that ask the same
/// are computed with one prompt.
pub fn batches<'a>(examples: &'a [Example], size: usize) -> Vec<Vec<&'a Example>> {
    let mut all: Vec<Vec<&'a Example>> = Vec::new();
    let mut singles: Vec<&'a Example> = Vec::new();
    for run in examples.chunk_by(Example::asks_the_same) {
        match run {
            [single] => singles.push(single),
            run => {
                all.extend((!singles.is_empty()).then(|| std::mem::take(&mut singles)));
                all.extend(run.chunks(size.max(1)).map(|chunk| chunk.iter().collect()));
            }
        }
        if singles.len() >= size {
            all.push(std::mem::take(&mut singles));
        }
    }
    all.extend((!singles.is_empty()).then_some(singles));
    all
}

/// A batch whose rows share what they all begin with.
pub fn shared_batch(rows: Vec<ScoreRow>) -> ScoreBatch {
    let shared = shared_prefix(&rows);
    let shared = if shared < SHORT { 0 } else { shared };
    let Some(first) = rows.first() else { return ScoreBatch::default() };
    let prefix = first.ids[..shared].to_vec();
    let images = first.images.iter().filter(|image| image.at < shared).cloned().collect();
    let rest = |row: ScoreRow| ScoreRow {
        ids: row.ids[shared..].to_vec(),
        scored: row.scored[shared..].to_vec(),
        images: row
            .images
            .into_iter()
            .filter_map(|it| Some(PlacedImage { at: it.at.checked_sub(shared)?, ..it }))
            .collect(),
        noise: row.noise,
    };
    ScoreBatch { rows: rows.into_iter().map(rest).collect(), prefix, images }
}

/// The longest run of ids and images that all rows start with and none of them scores, leaving each
/// row at least one id: what a batch needs to compute only once.
fn shared_prefix(rows: &[ScoreRow]) -> usize {
    let Some((first, others)) = rows.split_first() else {
        return 0;
    };
    let bound = rows
        .iter()
        .map(|row| {
            let unscored = row.scored.iter().position(|scored| *scored).unwrap_or(row.ids.len());
            unscored.min(row.ids.len().saturating_sub(1))
        })
        .min()
        .unwrap_or(0);
    let agrees = |at: &usize| others.iter().all(|row| row.ids[*at] == first.ids[*at]);
    let shared = (0..bound).take_while(agrees).count();
    let image = |row: &'_ ScoreRow, at: usize| {
        row.images.get(at).map(|image| (image.at, image.patches.digest()))
    };
    // The first image that is not everywhere, or that the end would cut, stays with its row.
    let images = first.images.iter().enumerate().find(|(at, it)| {
        it.end() > shared || others.iter().any(|row| image(row, *at) != image(first, *at))
    });
    let elsewhere = others.iter().flat_map(|row| row.images.get(first.images.len()));
    let cuts = images.map(|(_, image)| image.at).into_iter().chain(elsewhere.map(|it| it.at));
    cuts.fold(shared, usize::min)
}

/// The rows of an update that this rank computes: their ids come out as even as whole rows let them.
pub fn mine<'a>(rows: &[&'a Example], ranks: &Ranks) -> Vec<&'a Example> {
    let costs: Vec<usize> = rows.iter().map(|row| row.ids.len()).collect();
    share(&costs, ranks.rank(), ranks.world()).into_iter().map(|at| rows[at]).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use policy::vision::Patches;

    use super::*;

    fn row(ids: &[u32], from: usize) -> ScoreRow {
        let scored = (0..ids.len()).map(|i| i >= from).collect();
        ScoreRow { ids: ids.to_vec(), scored, ..ScoreRow::default() }
    }

    #[test]
    fn a_shared_prefix_never_holds_a_scored_id_or_a_whole_row() {
        let (a, b) = (row(&[1, 2, 3, 4], 3), row(&[1, 2, 3, 5], 2));
        assert_eq!(shared_prefix(&[a.clone(), b]), 2);
        let c = row(&[1, 2, 9, 5], 3);
        assert_eq!(shared_prefix(&[a.clone(), c]), 2);
        assert_eq!(shared_prefix(&[a]), 3);
        let silent = row(&[1, 2], 2);
        assert_eq!(shared_prefix(&[silent]), 1);
        assert_eq!(shared_prefix(&[]), 0);
    }

    /// Two pads of an image of 2 x 4 patches.
    fn image(value: f32) -> Arc<Patches> {
        Arc::new(Patches::new([1, 2, 4], 2, vec![value; 8 * 3]).expect("whole blocks"))
    }

    #[test]
    fn only_equal_images_are_shared_and_none_is_cut() {
        let with = |at: usize, patches: &Arc<Patches>| ScoreRow {
            images: vec![PlacedImage { at, patches: Arc::clone(patches) }],
            ..row(&[1, 9, 9, 2, 3], 4)
        };
        let (one, other) = (image(0.0), image(1.0));
        assert_eq!(shared_prefix(&[with(1, &one), with(1, &one)]), 4);
        assert_eq!(shared_prefix(&[with(1, &one), with(1, &image(0.0))]), 4);
        assert_eq!(shared_prefix(&[with(1, &one), with(1, &other)]), 1);
        assert_eq!(shared_prefix(&[with(1, &one), row(&[1, 9, 9, 2, 3], 4)]), 1);
        assert_eq!(shared_prefix(&[row(&[1, 9, 9, 2, 3], 4), with(1, &one)]), 1);
        assert_eq!(shared_prefix(&[with(2, &one), with(2, &one)]), 4);
        // Other ids after the first pad.
        let mut short = with(1, &one);
        short.ids[2] = 4;
        assert_eq!(shared_prefix(&[with(1, &one), short]), 1);
    }

    #[test]
    fn images_move_with_what_they_stand_in() {
        let patches = image(0.0);
        let mut ids = vec![7; SHORT];
        ids.extend([9, 9, 5, 6]);
        let whole = ScoreRow {
            images: vec![PlacedImage { at: SHORT, patches: Arc::clone(&patches) }],
            ..row(&ids, SHORT + 3)
        };
        let batch = shared_batch(vec![whole.clone(), whole.clone()]);
        assert_eq!((batch.prefix.len(), batch.images[0].at), (SHORT + 3, SHORT));
        assert!(batch.rows[0].images.is_empty());
        let mut other = whole.clone();
        other.images[0].patches = image(1.0);
        let batch = shared_batch(vec![whole, other]);
        assert_eq!((batch.prefix.len(), batch.images.len()), (SHORT, 0));
        assert_eq!((batch.rows[1].images[0].at, batch.rows[1].ids.len()), (0, 4));
    }

    #[test]
    fn pads_are_repeated_with_their_flags_and_counted() {
        let images = Images::none();
        let placing = |pad, shown: &[ImageId]| {
            Example::placing(&[1, 9, 2], &[false, false, true], pad, shown, &images)
        };
        let example = placing(None, &[]).expect("no images");
        assert_eq!((example.ids.len(), example.prompt()), (3, &[1, 9][..]));
        assert!(placing(Some(9), &[]).expect_err("a pad").contains("without an image"));
    }

    #[test]
    fn rows_that_ask_the_same_are_scored_together_and_the_others_in_full_batches() {
        let example = |first: u32, answer: u32| Example {
            ids: vec![first, answer],
            scored: vec![false, true],
            images: Vec::new(),
        };
        let rows = [(1, 5), (2, 5), (3, 5), (4, 5), (4, 6), (4, 7), (8, 5), (9, 5)];
        let rows = rows.map(|(first, answer)| example(first, answer));
        let sizes: Vec<usize> = batches(&rows, 2).iter().map(Vec::len).collect();
        assert_eq!(sizes, [2, 1, 2, 1, 2]);
        let order: Vec<&Example> = batches(&rows, 2).concat();
        assert_eq!(order, rows.iter().collect::<Vec<_>>());
    }
}
