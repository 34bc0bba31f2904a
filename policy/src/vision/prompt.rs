//! The images of an episode's start: how many ids each takes, and where they lie, for the actor that
//! plays it and for the learner that audits and scores it.

use std::{path::Path, sync::Arc};

use protocol::Image;

use super::{ImageProcessor, Patches, PlacedImage, Rgb, VisionError, expand_by};
use crate::{
    chat::{ChatError, ChatFormat},
    model::ModelConfig,
};

/// What a checkpoint makes of the images of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptImages {
    processor: ImageProcessor,
    image_pad: u32,
}

/// Why a checkpoint cannot be shown images.
#[derive(Debug, thiserror::Error)]
pub enum NoImages {
    /// Its files name no id that stands for an image.
    #[error("neither its config.json (image_token_id) nor its tokenizer names an id for images")]
    NoPad,
    /// The checkpoint is a language model alone.
    #[error("it has no vision tower")]
    NoTower,
    /// Tower and processor are not made for each other.
    #[error(
        "its vision tower takes {tower:?} (values of a patch, patches along a side of an id, image-pad \
         id), and its processor and tokenizer give {found:?}"
    )]
    Unfit {
        /// What the tower takes.
        tower: (usize, usize, u32),
        /// What the processor and the tokenizer give.
        found: (usize, usize, u32),
    },
    /// No image processor, or one that is not read here.
    #[error(transparent)]
    Processor(#[from] VisionError),
}

impl PromptImages {
    /// Reads the image processor of the checkpoint in `dir`, whose conversations `format` writes.
    ///
    /// # Errors
    /// The checkpoint knows no images, or its processor cannot be read.
    pub fn load(dir: &Path, format: &ChatFormat) -> Result<Self, NoImages> {
        let image_pad = format.image_pad().ok_or(NoImages::NoPad)?;
        Ok(Self { processor: ImageProcessor::load(dir)?, image_pad })
    }

    /// Whether the model can be shown what this makes of images.
    ///
    /// # Errors
    /// The model has no vision tower, or one for other patches.
    pub fn check(&self, model: &ModelConfig) -> Result<(), NoImages> {
        let vision = model.vision().ok_or(NoImages::NoTower)?;
        let tower = (vision.patch_values(), vision.merge, vision.image_pad);
        let (values, merge) = self.processor.shape();
        let found = (values, merge, self.image_pad);
        if tower == found { Ok(()) } else { Err(NoImages::Unfit { tower, found }) }
    }

    /// The processor.
    pub fn processor(&self) -> &ImageProcessor {
        &self.processor
    }

    /// Repeats the one image-pad id that the template wrote for each image as often as the image
    /// takes. Needs no pixels: an image's size decides.
    ///
    /// # Errors
    /// Another number of pad ids than of images; an image whose size does not fit the processor.
    pub fn expand(&self, ids: &[u32], images: &[&Image]) -> Result<Vec<u32>, VisionError> {
        let counts = images
            .iter()
            .map(|image| self.processor.tokens(image.width(), image.height()))
            .collect::<Result<Vec<_>, _>>()?;
        expand_by(ids, self.image_pad, &counts).map(|(ids, _)| ids)
    }

    /// The images among the ids of a prompt that [`Self::expand`] gave.
    ///
    /// # Errors
    /// The ids hold other images than these; an image whose size does not fit the processor.
    pub fn place(&self, ids: &[u32], images: &[&Image]) -> Result<Vec<PlacedImage>, VisionError> {
        let mut placed: Vec<PlacedImage> = Vec::with_capacity(images.len());
        let mut from = 0;
        for image in images {
            let patches = self.patches(image)?;
            let rest = ids.get(from..).unwrap_or_default();
            let at = rest.iter().position(|id| *id == self.image_pad).map(|at| from + at);
            let image = at.map(|at| PlacedImage { at, patches });
            let pads = |it: &PlacedImage| {
                ids.get(it.at..it.end())
                    .is_some_and(|ids| ids.iter().all(|id| *id == self.image_pad))
            };
            let image = image.filter(pads).ok_or_else(|| self.other(ids, images.len()))?;
            from = image.end();
            placed.push(image);
        }
        if ids.get(from..).unwrap_or_default().contains(&self.image_pad) {
            return Err(self.other(ids, images.len()));
        }
        Ok(placed)
    }

    fn other(&self, ids: &[u32], images: usize) -> VisionError {
        VisionError::Count { pads: ids.iter().filter(|id| **id == self.image_pad).count(), images }
    }

    fn patches(&self, image: &Image) -> Result<Arc<Patches>, VisionError> {
        self.processor.patches(&Rgb::from(image)).map(Arc::new)
    }
}

/// Why an episode's start cannot become ids.
#[derive(Debug, thiserror::Error)]
pub enum PromptError {
    /// The conversation cannot be rendered.
    #[error(transparent)]
    Chat(#[from] ChatError),
    /// An image does not fit.
    #[error(transparent)]
    Vision(#[from] VisionError),
    /// Images for a checkpoint that cannot be shown any.
    #[error("it shows images, and this checkpoint is shown none")]
    NoImages,
}

/// The ids of an episode's start: [`ChatFormat::prompt`], or where the reset shows images,
/// [`ChatFormat::prompt_with_images`] with every image's ids.
///
/// # Errors
/// The template cannot render it, an image does not fit the processor, or there is none.
pub fn episode_prompt(
    format: &ChatFormat,
    reader: Option<&PromptImages>,
    task_prompt: &str,
    reset_text: &str,
    shown: &[&Image],
) -> Result<Vec<u32>, PromptError> {
    if shown.is_empty() {
        return Ok(format.prompt(task_prompt, reset_text)?);
    }
    let reader = reader.ok_or(PromptError::NoImages)?;
    let rendered = format.prompt_with_images(task_prompt, reset_text, shown.len())?;
    Ok(reader.expand(&rendered, shown)?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const PAD: u32 = 9;

    /// Every block of 32 x 32 pixels takes an id, and nothing is resized.
    fn reader() -> PromptImages {
        let dir = tempfile::tempdir().unwrap();
        let config = r#"{"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2,
                         "size": {"shortest_edge": 1024, "longest_edge": 65536}}"#;
        std::fs::write(dir.path().join("preprocessor_config.json"), config).unwrap();
        PromptImages { processor: ImageProcessor::load(dir.path()).unwrap(), image_pad: PAD }
    }

    fn image(width: u32, height: u32) -> Image {
        Image::new(width, height, vec![100; (3 * width * height) as usize]).unwrap()
    }

    #[test]
    fn an_image_takes_the_ids_that_its_size_says_and_lies_where_they_are() {
        let (small, wide) = (image(32, 32), image(64, 96));
        let shown = [&wide, &small, &small];
        let ids = reader().expand(&[1, PAD, 2, PAD, PAD, 3], &shown).unwrap();
        assert_eq!(ids, [&[1][..], &[PAD; 6], &[2], &[PAD; 2], &[3]].concat());
        let placed = reader().place(&ids, &shown).unwrap();
        assert_eq!(placed.iter().map(|it| it.at).collect::<Vec<_>>(), [1, 8, 9]);
        for (placed, image) in placed.iter().zip(shown) {
            let size = (image.width(), image.height());
            assert_eq!(reader().processor.tokens(size.0, size.1).unwrap(), placed.patches.tokens());
        }
    }

    #[test]
    fn ids_that_are_of_other_images_are_refused() {
        let (small, wide) = (image(32, 32), image(64, 32));
        let place = |ids: &[u32], shown: &[&Image]| reader().place(ids, shown).is_ok();
        assert!(place(&[1, PAD, PAD, 2], &[&wide]));
        assert!(place(&[1, PAD, PAD, 2], &[&small, &small]));
        for (ids, shown) in [
            (&[1, PAD, 2][..], &[&wide][..]),
            (&[1, PAD, PAD, PAD], &[&wide]),
            (&[1, PAD, 2, PAD], &[&wide]),
            (&[1, PAD], &[]),
            (&[1, 2], &[&small]),
            (&[1, PAD], &[&small, &small]),
        ] {
            assert!(!place(ids, shown), "{ids:?}");
        }
        assert!(reader().expand(&[1, PAD], &[]).is_err());
        assert!(reader().expand(&[1], &[&small]).is_err());
        // One side is more than 200 times the other.
        let error = reader().expand(&[PAD], &[&image(4096, 16)]).unwrap_err().to_string();
        assert!(error.contains("4096 x 16"), "{error}");
    }
}
