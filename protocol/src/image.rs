//! Images: what an environment's reset may show beside its text.
//!
//! An image is its pixels, and its address is the digest of its size and pixels. Files and their
//! formats are for people: what travels and is hashed is 8-bit RGB, so that there is one spelling, no
//! decoder that bytes from the network reach, and nothing to blow up.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

use crate::Digest;

/// The longest side, in pixels.
pub const MAX_SIDE: u32 = 4096;

/// An image of 8-bit RGB: never empty, as many bytes as its size says.
#[derive(Clone, PartialEq, Eq)]
pub struct Image {
    width: u32,
    height: u32,
    pixels: Vec<u8>,
}

/// Why a size and bytes are no image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// No pixels, or a side that is too long.
    #[error("an image of {width} x {height} pixels: each side has 1 to {MAX_SIDE}")]
    Size {
        /// Pixels of a row.
        width: u32,
        /// Rows.
        height: u32,
    },
    /// Size and bytes disagree.
    #[error("{got} bytes of pixels; an image of {width} x {height} has {want}")]
    Bytes {
        /// Pixels of a row.
        width: u32,
        /// Rows.
        height: u32,
        /// Bytes that such an image has.
        want: u64,
        /// Bytes that were given.
        got: usize,
    },
}

impl Image {
    /// An image of `width` times `height` pixels, row by row from the top, three bytes each: red,
    /// green, blue.
    ///
    /// # Errors
    /// A side of 0 or more than [`MAX_SIDE`] pixels; more or fewer bytes than that.
    pub fn new(width: u32, height: u32, pixels: Vec<u8>) -> Result<Self, ImageError> {
        let want = u64::from(width) * u64::from(height) * 3;
        let sides = 1..=MAX_SIDE;
        if !sides.contains(&width) || !sides.contains(&height) {
            return Err(ImageError::Size { width, height });
        }
        if pixels.len() as u64 != want {
            return Err(ImageError::Bytes { width, height, want, got: pixels.len() });
        }
        Ok(Self { width, height, pixels })
    }

    /// Pixels of a row.
    pub fn width(&self) -> u32 {
        self.width
    }

    /// Rows.
    pub fn height(&self) -> u32 {
        self.height
    }

    /// Row by row from the top, red, green and blue of each pixel.
    pub fn pixels(&self) -> &[u8] {
        &self.pixels
    }

    /// The image's address: SHA-256 over width, height and pixels.
    pub fn digest(&self) -> Digest {
        let (width, height) = (self.width.to_le_bytes(), self.height.to_le_bytes());
        Digest::of_parts("rollcall-image-v1", &[&width, &height, &self.pixels])
    }
}

impl fmt::Debug for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Image({} x {}, {})", self.width, self.height, self.digest().short())
    }
}

/// In JSON the pixels are base64.
#[derive(Serialize, Deserialize)]
struct Written {
    width: u32,
    height: u32,
    pixels: String,
}

impl Serialize for Image {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use base64::Engine as _;
        let pixels = base64::engine::general_purpose::STANDARD.encode(&self.pixels);
        Written { width: self.width, height: self.height, pixels }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Image {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        use base64::Engine as _;
        let Written { width, height, pixels } = Written::deserialize(deserializer)?;
        let pixels = base64::engine::general_purpose::STANDARD.decode(pixels);
        Self::new(width, height, pixels.map_err(D::Error::custom)?).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_as_large_as_it_says() {
        assert_eq!(Image::new(2, 1, vec![0; 6]).map(|it| it.pixels().len()), Ok(6));
        for (width, height, bytes) in [(0, 1, 0), (1, 0, 0), (MAX_SIDE + 1, 1, 12_291)] {
            let error = Image::new(width, height, vec![0; bytes]);
            assert_eq!(error, Err(ImageError::Size { width, height }));
        }
        // A few bytes that claim to be many.
        let want = 3 * u64::from(MAX_SIDE) * u64::from(MAX_SIDE);
        let error = Image::new(MAX_SIDE, MAX_SIDE, vec![0; 12]);
        let bomb = ImageError::Bytes { width: MAX_SIDE, height: MAX_SIDE, want, got: 12 };
        assert_eq!(error, Err(bomb));
    }

    #[test]
    fn the_address_covers_size_and_pixels() {
        let image = |width, height, first| {
            let mut pixels = vec![7; 24];
            pixels[0] = first;
            Image::new(width, height, pixels).expect("an image").digest()
        };
        let all = [image(4, 2, 7), image(2, 4, 7), image(8, 1, 7), image(4, 2, 8)];
        for (at, digest) in all.iter().enumerate() {
            assert!(!all[at + 1..].contains(digest));
        }
        // From a second implementation of the same definition, in Python.
        assert_eq!(
            all[0].to_string(),
            "d0923895f9a91f5c9f2a2524c14a62320265e1ecfc5cdc21c2c87e0f3a7ed2fb"
        );
    }

    #[test]
    fn json_gives_an_image_back_and_refuses_what_is_none() {
        let image = Image::new(1, 2, vec![1, 2, 3, 4, 5, 255]).expect("an image");
        let text = serde_json::to_string(&image).expect("JSON");
        assert_eq!(text, r#"{"width":1,"height":2,"pixels":"AQIDBAX/"}"#);
        assert_eq!(serde_json::from_str::<Image>(&text).expect("an image"), image);
        assert!(
            serde_json::from_str::<Image>(&text.replace("\"width\":1", "\"width\":2")).is_err()
        );
    }
}
