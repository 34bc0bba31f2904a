//! A checkpoint's image processor, as `processor_config.json` or `preprocessor_config.json` sets it:
//! the size within a budget of pixels, resizing, normalising, and the cut into patches. Settings that
//! would do anything else are refused by name.

use std::path::Path;

use serde_json::Value;

use super::{Patches, error::VisionError, resize::resize, rgb::Rgb};
use crate::model::{Fields, ModelError, brief, read_object};

/// The largest ratio of an image's sides.
const RATIO: f64 = 200.0;
/// The most values of an image's patches.
const MOST: usize = 1 << 28;
/// The classes whose arithmetic this is.
const CLASSES: [&str; 2] = ["Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast"];

/// Turns images into the patches that a checkpoint's vision tower takes.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageProcessor {
    min_pixels: usize,
    max_pixels: usize,
    patch: usize,
    time: usize,
    merge: usize,
    resizes: bool,
    /// Of each channel, for values of 0 to 255.
    mean: [f32; 3],
    std: [f32; 3],
}

impl ImageProcessor {
    /// Reads the processor of the checkpoint in `dir`.
    ///
    /// # Errors
    /// No such file, or a field that is malformed or asks for what is not done here.
    pub fn load(dir: &Path) -> Result<Self, VisionError> {
        let path = dir.join("processor_config.json");
        if path.is_file() {
            let map = read_object(&path, 1 << 20)?;
            if let Some(inner) = map.get("image_processor").and_then(Value::as_object) {
                let prefix = "image_processor.";
                return Ok(Self::read(&Fields { path: &path, prefix, map: inner })?);
            }
        }
        let path = dir.join("preprocessor_config.json");
        if !path.is_file() {
            let reason = "no processor_config.json with an \"image_processor\" and no \
                          preprocessor_config.json: a vision-language checkpoint has one of them";
            return Err(ModelError::File { path: dir.into(), reason: reason.into() }.into());
        }
        let map = read_object(&path, 1 << 20)?;
        Ok(Self::read(&Fields { path: &path, prefix: "", map: &map })?)
    }

    fn read(fields: &Fields<'_>) -> Result<Self, ModelError> {
        let class = fields.get("image_processor_type");
        if class.is_some_and(|class| !CLASSES.iter().any(|known| class == known)) {
            let reason = format!("only {} is supported", CLASSES.join(" and "));
            return Err(fields.error("image_processor_type", reason));
        }
        for (field, only) in [
            ("do_convert_rgb", true),
            ("do_rescale", true),
            ("do_normalize", true),
            ("do_center_crop", false),
            ("do_pad", false),
        ] {
            if fields.get(field).is_some() && fields.flag(field)? != only {
                return Err(fields.error(field, format!("only {only} is supported")));
            }
        }
        if fields.get("resample").is_some_and(|kind| kind.as_u64() != Some(3)) {
            return Err(fields.error("resample", "only 3 (bicubic) is supported"));
        }
        let size = match fields.get("size") {
            None => None,
            Some(Value::Object(map)) => Some(map),
            Some(_) => return Err(fields.error("size", "not an object")),
        };
        // As transformers has it: the older fields win, and what is missing is Qwen2-VL's.
        let budget = |old: &str, new: &str, default: usize| -> Result<usize, ModelError> {
            let prefix = format!("{}size.", fields.prefix);
            let inner = match size {
                None => Some(default),
                Some(map) => Fields { path: fields.path, prefix: &prefix, map }.size(new)?,
            };
            let missing = || fields.error("size", format!("has no {new:?}"));
            fields.size(old)?.or(inner).ok_or_else(missing)
        };
        let sized = |field: &str, default: usize, most: usize| match fields.size(field)? {
            Some(size) if size > most => Err(fields.error(field, format!("{size} exceeds {most}"))),
            size => Ok(size.unwrap_or(default)),
        };
        let min_pixels = budget("min_pixels", "shortest_edge", 56 * 56)?;
        let max_pixels = budget("max_pixels", "longest_edge", 28 * 28 * 1280)?;
        if min_pixels > max_pixels {
            let reason = format!("at least {min_pixels} pixels exceed at most {max_pixels}");
            return Err(fields.error("size", reason));
        }
        let rescale = fields.positive("rescale_factor")?.unwrap_or(1.0 / 255.0);
        let channels = |field: &str, default: [f64; 3]| -> Result<[f32; 3], ModelError> {
            let values = match fields.get(field) {
                None => Some(default),
                Some(Value::Array(list)) => {
                    let list: Option<Vec<f64>> = list.iter().map(Value::as_f64).collect();
                    list.and_then(|list| list.try_into().ok())
                }
                Some(one) => one.as_f64().map(|value| [value; 3]),
            };
            let values = values.map(|v| v.map(|value| value as f32 * (1.0 / rescale) as f32));
            let found = fields.get(field).map(brief).unwrap_or_default();
            values
                .filter(|values| values.iter().all(|value| value.is_finite()))
                .ok_or_else(|| fields.error(field, format!("{found} is not three numbers")))
        };
        let processor = Self {
            min_pixels,
            max_pixels,
            patch: sized("patch_size", 14, 256)?,
            time: sized("temporal_patch_size", 2, 16)?,
            merge: sized("merge_size", 2, 16)?,
            resizes: fields.get("do_resize").is_none() || fields.flag("do_resize")?,
            mean: channels("image_mean", [0.481_454_66, 0.457_827_5, 0.408_210_73])?,
            std: channels("image_std", [0.268_629_54, 0.261_302_58, 0.275_777_11])?,
        };
        match processor.std.iter().all(|std| *std > 0.0) {
            true => Ok(processor),
            false => Err(fields.error("image_std", "not positive")),
        }
    }

    /// Width of a row of patches, and patches along a side that share an id: what the vision tower
    /// must take.
    pub fn shape(&self) -> (usize, usize) {
        (3 * self.time * self.patch * self.patch, self.merge)
    }

    /// Width and height that an image of these sides is resized to.
    ///
    /// # Errors
    /// Sides whose ratio exceeds 200; without resizing, sides that are not made of whole blocks.
    pub fn size(&self, width: u32, height: u32) -> Result<(u32, u32), VisionError> {
        let factor = self.patch * self.merge;
        let wrong =
            |reason: &str| Err(VisionError::Image(format!("{width} x {height} pixels: {reason}")));
        if width == 0 || height == 0 {
            return wrong("no pixels");
        }
        if !self.resizes {
            let whole = |side: u32| (side as usize).is_multiple_of(factor);
            return match whole(width) && whole(height) {
                true => Ok((width, height)),
                false => wrong(&format!(
                    "do_resize is false in its processor, and a side is no multiple of {factor}"
                )),
            };
        }
        let (w, h, f) = (f64::from(width), f64::from(height), factor as f64);
        if w.max(h) / w.min(h) > RATIO {
            return wrong("one side is more than 200 times the other");
        }
        let round = |side: f64| (side / f).round_ties_even() * f;
        let (least, most) = (self.min_pixels as f64, self.max_pixels as f64);
        let (mut wide, mut high) = (round(w), round(h));
        if wide * high > most {
            let shrink = ((h * w) / most).sqrt();
            let fit = |side: f64| f.max((side / shrink / f).floor() * f);
            (wide, high) = (fit(w), fit(h));
        } else if wide * high < least {
            let grow = (least / (h * w)).sqrt();
            let fit = |side: f64| (side * grow / f).ceil() * f;
            (wide, high) = (fit(w), fit(h));
        }
        Ok((wide as u32, high as u32))
    }

    /// Image-pad ids that an image of these sides takes.
    ///
    /// # Errors
    /// As [`ImageProcessor::size`].
    pub fn tokens(&self, width: u32, height: u32) -> Result<usize, VisionError> {
        let (width, height) = self.size(width, height)?;
        let factor = self.patch * self.merge;
        Ok((width as usize / factor) * (height as usize / factor))
    }

    /// The image's patches.
    ///
    /// # Errors
    /// An image whose pixels do not make its sides, or that has no fitting size.
    pub fn patches(&self, image: &Rgb) -> Result<Patches, VisionError> {
        image.check()?;
        let (width, height) = self.size(image.width, image.height)?;
        let (patch, merge, time) = (self.patch, self.merge, self.time);
        let [wide, high] = [width, height].map(|side| side as usize / patch);
        if wide * high > MOST / self.shape().0 {
            let reason = format!("{width} x {height} pixels make more than {MOST} values");
            return Err(VisionError::Image(reason));
        }
        let image = resize(image, width, height);
        let table: [Vec<f32>; 3] = std::array::from_fn(|channel| {
            let [mean, std] = [self.mean[channel], self.std[channel]];
            (0u8..=255).map(|value| (f32::from(value) - mean) / std).collect()
        });
        let mut values = Vec::with_capacity(wide * high * self.shape().0);
        for block in 0..wide * high / (merge * merge) {
            let [block_row, block_column] = [block / (wide / merge), block % (wide / merge)];
            for inner in 0..merge * merge {
                let top = (block_row * merge + inner / merge) * patch;
                let left = (block_column * merge + inner % merge) * patch;
                for (channel, table) in table.iter().enumerate() {
                    let start = values.len();
                    for y in top..top + patch {
                        let row = 3 * (y * width as usize + left) + channel;
                        let pixels = image.pixels.get(row..).unwrap_or_default().iter().step_by(3);
                        values.extend(pixels.take(patch).map(|&value| table[usize::from(value)]));
                    }
                    // The same frame at every moment of a patch.
                    let frame = start..values.len();
                    (1..time).for_each(|_| values.extend_from_within(frame.clone()));
                }
            }
        }
        Patches::new([1, high as u32, wide as u32], merge as u32, values)
    }
}
