//! What can be wrong with an image or with a checkpoint's image processor.

use crate::model::ModelError;

/// An error of images or of their processor.
#[derive(Debug, thiserror::Error)]
pub enum VisionError {
    /// Bytes that are no image that is read here, or an image that the processor does not take.
    #[error("image: {0}")]
    Image(String),
    /// The processor's file is malformed or asks for what is not done here.
    #[error(transparent)]
    Config(#[from] ModelError),
    /// A prompt has another number of places for images than there are images.
    #[error("{pads} image-pad ids for {images} images; each image needs one")]
    Count {
        /// Places.
        pads: usize,
        /// Images.
        images: usize,
    },
}
