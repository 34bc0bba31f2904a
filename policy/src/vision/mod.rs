//! Images for a vision-language policy: decoded, resized and cut into patches bit for bit as the
//! reference processor does it, and placed among the ids of a prompt.

mod error;
mod processor;
mod prompt;
mod resize;
mod rgb;

#[cfg(test)]
mod tests;

pub use error::VisionError;
pub use processor::ImageProcessor;
pub use prompt::{NoImages, PromptError, PromptImages, episode_prompt};
pub use rgb::Rgb;

use std::sync::Arc;

use protocol::Digest;

/// An image as rows of patches, in the order in which the vision tower takes them: block by block of
/// `merge` × `merge` patches, which become one id's embedding.
#[derive(Clone)]
pub struct Patches {
    grid: [u32; 3],
    merge: u32,
    values: Vec<f32>,
    digest: Digest,
}

impl std::fmt::Debug for Patches {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [t, h, w] = self.grid;
        write!(f, "Patches({t} x {h} x {w}, {})", self.digest.short())
    }
}

impl PartialEq for Patches {
    fn eq(&self, other: &Self) -> bool {
        self.digest == other.digest
    }
}

impl Eq for Patches {}

impl Patches {
    /// Patches of a grid of time, height and width, whose blocks of `merge` × `merge` share an id.
    ///
    /// # Errors
    /// A grid that is empty or not made of whole blocks, values that do not fill it evenly or are
    /// not finite.
    pub fn new(grid: [u32; 3], merge: u32, values: Vec<f32>) -> Result<Self, VisionError> {
        let wrong = |reason: String| Err(VisionError::Image(reason));
        let [t, h, w] = grid;
        let whole = |n: u32| n > 0 && n.is_multiple_of(merge);
        if merge == 0 || t == 0 || !whole(h) || !whole(w) {
            return wrong(format!("{t} x {h} x {w} patches are not blocks of {merge} x {merge}"));
        }
        let count = grid.iter().try_fold(1usize, |n, &side| n.checked_mul(side as usize));
        if values.is_empty() || !count.is_some_and(|count| values.len().is_multiple_of(count)) {
            return wrong(format!("{} values do not fill {t} x {h} x {w} patches", values.len()));
        }
        if values.iter().any(|value| !value.is_finite()) {
            return wrong("a patch holds a value that is not finite".into());
        }
        let header: Vec<u8> = [t, h, w, merge].iter().flat_map(|n| n.to_le_bytes()).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let digest = Digest::of_parts("rollcall-patches-v1", &[&header, &bytes]);
        Ok(Self { grid, merge, values, digest })
    }

    /// Patches along time, height and width.
    pub fn grid(&self) -> [u32; 3] {
        self.grid
    }

    /// Patches that share an id, along height and along width.
    pub fn merge(&self) -> u32 {
        self.merge
    }

    /// `[patches, channels * time * height * width of a patch]`, row-major.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// Patches.
    pub fn count(&self) -> usize {
        self.grid.iter().map(|&side| side as usize).product()
    }

    /// Image-pad ids that it takes.
    pub fn tokens(&self) -> usize {
        let merge = self.merge as usize;
        self.count() / (merge * merge).max(1)
    }

    /// Of its content: equal images have equal digests.
    pub fn digest(&self) -> Digest {
        self.digest
    }
}

/// An image among ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedImage {
    /// Index of its first image-pad id in the ids that carry it.
    pub at: usize,
    /// The image.
    pub patches: Arc<Patches>,
}

impl PlacedImage {
    /// Index after its last id.
    pub fn end(&self) -> usize {
        self.at.saturating_add(self.patches.tokens())
    }
}

/// Replaces each image-pad id of a rendered prompt by as many as its image takes. Other ids stay as
/// they are; text never becomes an image-pad id, so whoever rendered the prompt placed them.
///
/// # Errors
/// Another number of image-pad ids than of images.
pub fn expand(
    ids: &[u32],
    image_pad: u32,
    images: &[Arc<Patches>],
) -> Result<(Vec<u32>, Vec<PlacedImage>), VisionError> {
    let counts: Vec<usize> = images.iter().map(|patches| patches.tokens()).collect();
    let (expanded, places) = expand_by(ids, image_pad, &counts)?;
    let placed = places.into_iter().zip(images);
    let placed = placed.map(|(at, patches)| PlacedImage { at, patches: Arc::clone(patches) });
    Ok((expanded, placed.collect()))
}

/// [`expand`] by the ids that each image takes: the ids, and where each image's begin.
pub(crate) fn expand_by(
    ids: &[u32],
    image_pad: u32,
    counts: &[usize],
) -> Result<(Vec<u32>, Vec<usize>), VisionError> {
    let pads = ids.iter().filter(|id| **id == image_pad).count();
    if pads != counts.len() {
        return Err(VisionError::Count { pads, images: counts.len() });
    }
    let (mut expanded, mut places) = (Vec::with_capacity(ids.len()), Vec::new());
    let mut counts = counts.iter();
    for &id in ids {
        match counts.as_slice().first().filter(|_| id == image_pad) {
            None => expanded.push(id),
            Some(&count) => {
                counts.next();
                places.push(expanded.len());
                expanded.resize(expanded.len() + count, image_pad);
            }
        }
    }
    Ok((expanded, places))
}
