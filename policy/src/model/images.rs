//! Images among packed ids: checked, each content through the tower once, put where their ids are, and
//! the positions of the ids around them.

use std::{collections::BTreeMap, sync::Arc};

use burn::tensor::Tensor;

use super::{
    adapter::Adapter,
    config::ModelConfig,
    decoder::{Decoder, Position},
    error::ModelError,
    ops::from_f32,
    tower::{Tower, Visual},
    vision::VisionConfig,
};
use crate::vision::{Patches, PlacedImage};

/// What the vision tower makes of images, one after another.
#[derive(Debug)]
pub struct VisionOutput {
    /// The last block's output, `[patches, vision hidden]`.
    pub hidden: Tensor<2>,
    /// What replaces the embeddings of image-pad ids, `[ids, hidden]`.
    pub merged: Tensor<2>,
}

/// Images among packed ids.
#[derive(Clone, Debug, Default)]
pub(crate) struct Placement {
    /// Each content once, those of equal size together.
    images: Vec<Arc<Patches>>,
    /// First packed row and number of the image.
    rows: Vec<(usize, usize)>,
}

impl Placement {
    /// The placement of images by the packed row of their first id.
    pub(crate) fn new(placed: impl IntoIterator<Item = PlacedImage>) -> Self {
        let mut contents = BTreeMap::new();
        let mut rows = Vec::new();
        for PlacedImage { at, patches } in placed {
            let key = (patches.count(), patches.digest());
            contents.entry(key).or_insert(patches);
            rows.push((at, key));
        }
        let numbers: BTreeMap<_, usize> = contents.keys().copied().zip(0..).collect();
        let number = |(at, key)| Some((at, *numbers.get(&key)?));
        Self {
            rows: rows.into_iter().filter_map(number).collect(),
            images: contents.into_values().collect(),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The tower over the images.
    pub(crate) fn tower<'a>(
        &self,
        decoder: &'a Decoder,
        adapter: Option<&'a Adapter>,
    ) -> Result<Tower<'a>, ModelError> {
        Tower::new(decoder, adapter, &self.images)
    }

    /// For each image in order, the tower's rows that are its own.
    fn spans(&self) -> Vec<(usize, usize)> {
        let mut start = 0;
        let span = |image: &Arc<Patches>| {
            let own = (start, start + image.tokens());
            start = own.1;
            own
        };
        self.images.iter().map(span).collect()
    }

    /// The embeddings `x` with the tower's output `merged` in place of the images' ids.
    pub(crate) fn put(&self, mut x: Tensor<2>, merged: &Tensor<2>) -> Tensor<2> {
        let (width, dtype) = (x.dims()[1], x.dtype());
        let merged = from_f32(merged.clone(), dtype);
        let spans = self.spans();
        for &(row, image) in &self.rows {
            let Some(&(from, to)) = spans.get(image) else { continue };
            let own = merged.clone().slice([from..to, 0..width]);
            x = x.slice_assign([row..row + (to - from), 0..width], own);
        }
        x
    }

    /// The gradient by the tower's output, given that by the embeddings with images put in.
    pub(crate) fn take(&self, dx: &Tensor<2>) -> Tensor<2> {
        let width = dx.dims()[1];
        let mut sums: Vec<Option<Tensor<2>>> = vec![None; self.images.len()];
        for &(row, image) in &self.rows {
            let (Some(patches), Some(sum)) = (self.images.get(image), sums.get_mut(image)) else {
                continue;
            };
            let own = dx.clone().slice([row..row + patches.tokens(), 0..width]);
            *sum = Some(match sum.take() {
                None => own,
                Some(sum) => sum.add(own),
            });
        }
        Tensor::cat(sums.into_iter().flatten().collect(), 0)
    }

    /// The packed rows of `count` that are no image's.
    pub(crate) fn others(&self, count: usize) -> Vec<u32> {
        let mut text = vec![true; count];
        for &(row, image) in &self.rows {
            let tokens = self.images.get(image).map_or(0, |patches| patches.tokens());
            text.iter_mut().skip(row).take(tokens).for_each(|text| *text = false);
        }
        (0..count as u32).zip(text).filter(|(_, text)| *text).map(|(row, _)| row).collect()
    }
}

/// Positions of `count` ids of a sequence, the first at `next`, and that of the id that follows. Images
/// are in order and within the ids.
pub(crate) fn positions(count: usize, images: &[PlacedImage], next: u32) -> (Vec<Position>, u32) {
    let mut next = next;
    let mut positions: Vec<Position> = Vec::with_capacity(count);
    for image in images {
        let text = image.at.saturating_sub(positions.len()) as u32;
        positions.extend((next..next + text).map(|position| [position; 3]));
        next += text;
        let [_, height, width] = image.patches.grid().map(|side| side / image.patches.merge());
        positions.extend((0..height * width).map(|i| [next, next + i / width, next + i % width]));
        next += height.max(width);
    }
    let text = count.saturating_sub(positions.len()) as u32;
    positions.extend((next..next + text).map(|position| [position; 3]));
    (positions, next + text)
}

impl ModelConfig {
    /// Refuses images.
    pub(crate) fn no_images(&self) -> ModelError {
        let name = self.architecture.name();
        ModelError::Input(format!("the model ({name}) has no vision tower and takes no images"))
    }
}

impl Decoder {
    /// The id whose embeddings images replace; `None` where the checkpoint has no vision tower.
    pub fn image_pad(&self) -> Option<u32> {
        self.config().vision().map(|vision| vision.image_pad)
    }

    /// The vision tower alone over images.
    ///
    /// # Errors
    /// A checkpoint without one, no images, or images of another processor.
    pub fn see(
        &self,
        adapter: Option<&Adapter>,
        images: &[Arc<Patches>],
    ) -> Result<VisionOutput, ModelError> {
        if images.is_empty() {
            return Err(ModelError::Input("no images to see".into()));
        }
        let tower = Tower::new(self, adapter, images)?;
        let hidden = (0..tower.depth()).fold(tower.enter(), |x, i| tower.block(i, x));
        Ok(VisionOutput { merged: tower.merge(hidden.clone()), hidden })
    }

    pub(crate) fn visual(&self) -> Result<(&VisionConfig, &Visual), ModelError> {
        let visual = self.config().vision().zip(self.weights.visual.as_ref());
        visual.ok_or_else(|| self.config().no_images())
    }

    /// Checks that an image was made for this tower.
    pub(crate) fn check_image(&self, image: &Patches) -> Result<(), ModelError> {
        let (config, _) = self.visual()?;
        let [values, merge] = [image.values().len() / image.count(), image.merge() as usize];
        let [expected, own] = [config.patch_values(), config.merge];
        if (values, merge) == (expected, own) {
            return Ok(());
        }
        Err(ModelError::Input(format!(
            "an image in patches of {values} values, {merge} x {merge} to an id; the vision tower \
             takes {expected}, {own} x {own}: use the checkpoint's own image processor"
        )))
    }

    /// Checks the images among `ids` and gives them in order. An image-pad id outside of them is an
    /// ordinary id.
    pub(crate) fn check_images(
        &self,
        ids: &[u32],
        images: &[PlacedImage],
    ) -> Result<Vec<PlacedImage>, ModelError> {
        if images.is_empty() {
            return Ok(Vec::new());
        }
        let pad = self.visual()?.0.image_pad;
        let mut sorted = images.to_vec();
        sorted.sort_by_key(|image| image.at);
        let mut free = 0;
        for image in &sorted {
            self.check_image(&image.patches)?;
            let (at, end) = (image.at, image.end());
            let own = ids.get(at..end).filter(|own| own.iter().all(|id| *id == pad));
            if at < free || own.is_none() {
                let tokens = image.patches.tokens();
                return Err(ModelError::Input(format!(
                    "an image of {tokens} ids at {at} of {} is not at as many image-pad ids ({pad}) \
                     of its own",
                    ids.len()
                )));
            }
            free = end;
        }
        Ok(sorted)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::{fs, path::Path};

    use safetensors::SafeTensors;

    use super::*;

    #[test]
    fn positions_are_those_of_transformers() {
        let root = std::env::var_os("ROLLCALL_DATA").map_or_else(
            || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data"),
            Into::into,
        );
        let Ok(entries) = fs::read_dir(root.join("checkpoints")) else {
            eprintln!("skipped: no {}", root.join("checkpoints").display());
            return;
        };
        for dir in entries.map(|entry| entry.unwrap().path()) {
            let Ok(bytes) = fs::read(dir.join("golden.safetensors")) else { continue };
            let file = SafeTensors::deserialize(&bytes).unwrap();
            let read = |name: &str| -> Option<Vec<i64>> {
                let number = |b: &[u8]| i64::from_le_bytes(b.try_into().unwrap());
                Some(file.tensor(name).ok()?.data().chunks(8).map(number).collect())
            };
            let (Some(expected), Some(kinds)) =
                (read("mm_position_ids"), read("mm_mm_token_type_ids"))
            else {
                continue;
            };
            let grids = read("mm_image_grid_thw").unwrap();
            let merge = ModelConfig::read(&dir.join("config.json"));
            let merge = merge.unwrap().vision().unwrap().merge as u32;
            let mut at = 0;
            let place = |grid: &[i64]| {
                let grid = [0, 1, 2].map(|axis| grid[axis] as u32);
                let values = vec![0.0; grid.iter().product::<u32>() as usize];
                let patches = Patches::new(grid, merge, values).unwrap();
                let start = at + kinds[at..].iter().position(|kind| *kind == 1).unwrap();
                let placed = PlacedImage { at: start, patches: Arc::new(patches) };
                at = placed.end();
                placed
            };
            let images: Vec<PlacedImage> = grids.chunks(3).map(place).collect();
            let (found, next) = positions(kinds.len(), &images, 0);
            let axis = |axis: usize| found.iter().map(move |place| i64::from(place[axis]));
            let found: Vec<i64> = (0..3).flat_map(axis).collect();
            assert_eq!(found, expected, "{}", dir.display());
            let delta = i64::from(next) - i64::try_from(kinds.len()).unwrap();
            assert_eq!(read("mm_rope_deltas").unwrap(), [delta], "{}", dir.display());
        }
    }

    #[test]
    fn rows_of_one_content_share_the_tower_and_sum_their_gradients() {
        let image = |seed: f32, side: u32| {
            let values = (0..side * side).map(|i| seed + i as f32).collect();
            Arc::new(Patches::new([1, side, side], 2, values).unwrap())
        };
        let (small, large, other) = (image(1.0, 2), image(2.0, 4), image(3.0, 4));
        let again = image(2.0, 4);
        let places = [(9, &large), (0, &small), (14, &again), (2, &other)];
        let placed = places.map(|(at, it)| PlacedImage { at, patches: Arc::clone(it) });
        let placement = Placement::new(placed);
        assert_eq!(placement.images.len(), 3);
        assert_eq!(placement.images[0], small);
        let device = burn::tensor::Device::flex();
        let rows = |count: usize, from: f32| {
            let values: Vec<f32> = (0..count * 2).map(|i| from + i as f32).collect();
            Tensor::<2>::from_data(burn::tensor::TensorData::new(values, [count, 2]), &device)
        };
        let values = |x: Tensor<2>| x.into_data().try_into_vec::<f32>().unwrap();
        let merged = rows(9, 100.0);
        let put = values(placement.put(rows(19, 0.0), &merged));
        let merged = values(merged);
        let span = |number: usize| {
            let before: usize = placement.images[..number].iter().map(|it| it.tokens()).sum();
            2 * before..2 * (before + placement.images[number].tokens())
        };
        for &(row, number) in &placement.rows {
            let own = &merged[span(number)];
            assert_eq!(&put[2 * row..2 * row + own.len()], own);
        }
        assert_eq!(placement.others(19), [1, 6, 7, 8, 13, 18]);
        assert_eq!(put[2 * 7..2 * 9], [14.0, 15.0, 16.0, 17.0]);
        let taken = values(placement.take(&rows(19, 0.0)));
        let twice = placement.rows.iter().find(|row| row.0 == 9).unwrap().1;
        let sum: Vec<f32> = (18..26).map(|i| (i + i + 10) as f32).collect();
        assert_eq!(taken[span(twice)], sum);
    }
}
