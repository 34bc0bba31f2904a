//! Images of 8-bit RGB, read from PNG and JPEG files. What is not RGB becomes RGB as by PIL's
//! `convert("RGB")`: grey is copied to the channels, alpha is dropped, palettes are looked up, and of 16
//! bits the high 8 count (of 16-bit grey alone PIL keeps the low ones, clipped).

use std::io::Cursor;

use zune_jpeg::{
    JpegDecoder,
    zune_core::{bytestream::ZCursor, colorspace::ColorSpace, options::DecoderOptions},
};

use super::error::VisionError;

/// The longest side that is read, in pixels.
const LONGEST: u32 = 1 << 14;
/// The most pixels that are read.
const MOST: u64 = 1 << 26;
/// What a PNG decoder may allocate: the largest image in four channels of 16 bits, and some.
const MEMORY: usize = 640 << 20;

/// An image of 8-bit RGB.
#[derive(Clone, PartialEq, Eq)]
pub struct Rgb {
    /// Pixels in a row.
    pub width: u32,
    /// Rows.
    pub height: u32,
    /// Row-major, 3 bytes each.
    pub pixels: Vec<u8>,
}

impl std::fmt::Debug for Rgb {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Rgb({} x {})", self.width, self.height)
    }
}

fn wrong(reason: impl std::fmt::Display) -> VisionError {
    let text = reason.to_string();
    VisionError::Image(text.lines().next().unwrap_or_default().chars().take(200).collect())
}

impl From<&protocol::Image> for Rgb {
    fn from(image: &protocol::Image) -> Self {
        let (width, height) = (image.width(), image.height());
        Self { width, height, pixels: image.pixels().to_vec() }
    }
}

impl Rgb {
    /// Decodes a PNG or JPEG file, whichever its content is. Of an animation it is the first frame;
    /// an orientation noted beside the pixels is not applied, as in PIL.
    ///
    /// # Errors
    /// Neither of the two, damaged, in a colour space that is not read (CMYK), or larger than 16,384
    /// pixels a side or 2²⁶ in all.
    pub fn decode(bytes: &[u8]) -> Result<Self, VisionError> {
        let image = match bytes {
            [0x89, b'P', b'N', b'G', ..] => png(bytes),
            [0xff, 0xd8, 0xff, ..] => jpeg(bytes),
            _ => Err(wrong("neither a PNG nor a JPEG file; convert it")),
        }?;
        image.check()?;
        Ok(image)
    }

    /// The image as a PNG file.
    ///
    /// # Errors
    /// An image without pixels, or with another number than its sides say.
    pub fn to_png(&self) -> Result<Vec<u8>, VisionError> {
        self.check()?;
        let mut bytes = Vec::new();
        let mut encoder = ::png::Encoder::new(&mut bytes, self.width, self.height);
        encoder.set_color(::png::ColorType::Rgb);
        encoder.set_depth(::png::BitDepth::Eight);
        let mut writer = encoder.write_header().map_err(wrong)?;
        writer.write_image_data(&self.pixels).map_err(wrong)?;
        writer.finish().map_err(wrong)?;
        Ok(bytes)
    }

    /// Checks that sides and pixels are in bounds and agree.
    pub(super) fn check(&self) -> Result<(), VisionError> {
        bounded(self.width, self.height)?;
        let expected = u64::from(self.width) * u64::from(self.height) * 3;
        if self.pixels.len() as u64 == expected {
            return Ok(());
        }
        let (width, height, found) = (self.width, self.height, self.pixels.len());
        Err(wrong(format!("{found} bytes do not make {width} x {height} pixels of 3")))
    }
}

fn bounded(width: u32, height: u32) -> Result<(), VisionError> {
    let sides = 1..=LONGEST;
    let pixels = u64::from(width) * u64::from(height);
    if sides.contains(&width) && sides.contains(&height) && pixels <= MOST {
        return Ok(());
    }
    Err(wrong(format!(
        "{width} x {height} pixels are not between 1 and {LONGEST} a side and at most {MOST} in all"
    )))
}

fn png(bytes: &[u8]) -> Result<Rgb, VisionError> {
    let limits = ::png::Limits { bytes: MEMORY };
    let mut decoder = ::png::Decoder::new_with_limits(Cursor::new(bytes), limits);
    decoder.set_transformations(::png::Transformations::IDENTITY);
    decoder.set_ignore_text_chunk(true);
    let mut reader = decoder.read_info().map_err(wrong)?;
    let (width, height) = reader.info().size();
    bounded(width, height)?;
    let size = reader.output_buffer_size().ok_or_else(|| wrong("its size overflows"))?;
    let mut raw = vec![0; size];
    let frame = reader.next_frame(&mut raw).map_err(wrong)?;
    let palette = reader.info().palette.clone().unwrap_or_default();
    let channels = frame.color_type.samples();
    let bits = frame.bit_depth as usize;
    let grey = frame.color_type == ::png::ColorType::Grayscale;
    // The value of a sample, in the file's bits.
    let value = |row: &[u8], index: usize| -> u16 {
        let byte = |at: usize| u16::from(row.get(at).copied().unwrap_or_default());
        match bits {
            16 => byte(2 * index) << 8 | byte(2 * index + 1),
            8 => byte(index),
            _ => {
                let shift = 8 - bits - index * bits % 8;
                byte(index * bits / 8) >> shift & ((1 << bits) - 1)
            }
        }
    };
    let narrow = |value: u16| -> u8 {
        let narrowed = match bits {
            16 if grey => value.min(255),
            16 => value >> 8,
            8 => value,
            _ => value * (255 / ((1 << bits) - 1)),
        };
        narrowed as u8
    };
    let mut pixels = Vec::with_capacity(width as usize * height as usize * 3);
    for row in raw.chunks(frame.line_size.max(1)).take(height as usize) {
        for x in 0..width as usize {
            let first = x * channels;
            pixels.extend(match frame.color_type {
                ::png::ColorType::Indexed => {
                    let index = value(row, first);
                    let entry = palette.get(3 * index as usize..).and_then(<[u8]>::first_chunk);
                    // As in PIL, a short palette goes on in black.
                    entry.copied().unwrap_or_default()
                }
                ::png::ColorType::Grayscale | ::png::ColorType::GrayscaleAlpha => {
                    [narrow(value(row, first)); 3]
                }
                ::png::ColorType::Rgb | ::png::ColorType::Rgba => {
                    [0, 1, 2].map(|channel| narrow(value(row, first + channel)))
                }
            });
        }
    }
    Ok(Rgb { width, height, pixels })
}

fn jpeg(bytes: &[u8]) -> Result<Rgb, VisionError> {
    let options = DecoderOptions::default()
        .set_max_width(LONGEST as usize)
        .set_max_height(LONGEST as usize)
        .set_strict_mode(true)
        .jpeg_set_out_colorspace(ColorSpace::RGB);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options);
    decoder.decode_headers().map_err(wrong)?;
    let info = decoder.info().ok_or_else(|| wrong("a JPEG file without a header"))?;
    let (width, height) = (u32::from(info.width), u32::from(info.height));
    bounded(width, height)?;
    match decoder.input_colorspace() {
        Some(ColorSpace::Luma | ColorSpace::YCbCr | ColorSpace::RGB) => {}
        other => {
            let found = other.map(|space| format!("{space:?}")).unwrap_or_default();
            return Err(wrong(format!("a JPEG file in {found}; grey, YCbCr and RGB are read")));
        }
    }
    let pixels = decoder.decode().map_err(wrong)?;
    Ok(Rgb { width, height, pixels })
}
