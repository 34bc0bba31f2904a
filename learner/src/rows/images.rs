//! The images of a data set. Their patches are much larger than their files, so only so many are kept;
//! the others are read again for each batch, and must still be the files that were checked.

use std::{
    collections::{BTreeSet, HashMap},
    fs,
    io::Read as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use policy::{
    model::ModelConfig,
    vision::{ImageProcessor, Patches, Rgb},
};
use protocol::Digest;
use rayon::prelude::*;

/// Largest image file, in bytes.
const MAX_FILE: u64 = 64 << 20;
/// Patches that are kept, in bytes.
const KEPT: usize = 512 << 20;
/// Files that are read at a time.
const AT_A_TIME: usize = 8;

/// An image of [`Images`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ImageId(usize);

/// The images of a data set, each file once.
#[derive(Debug)]
pub struct Images {
    eyes: Eyes,
    files: Vec<ImageFile>,
    by_path: HashMap<PathBuf, ImageId>,
    room: usize,
}

/// What a checkpoint makes of images.
#[derive(Debug)]
enum Eyes {
    /// It has no vision tower.
    None,
    /// Its tower and its processor fit.
    Open { processor: ImageProcessor, pad: u32 },
    /// They do not, which matters to rows with images only.
    Shut(String),
}

#[derive(Debug)]
struct ImageFile {
    path: PathBuf,
    sha256: Digest,
    tokens: usize,
    kept: Option<Arc<Patches>>,
}

impl Images {
    /// No images yet, for the checkpoint in `dir`, which has this shape. What its tower cannot take of
    /// its processor is said of the first image.
    pub fn of_model(dir: &Path, config: &ModelConfig) -> Self {
        let Some(tower) = config.vision() else { return Self::none() };
        let takes = (tower.patch_values(), tower.merge);
        let eyes = match ImageProcessor::load(dir) {
            Ok(processor) if processor.shape() == takes => {
                Eyes::Open { processor, pad: tower.image_pad }
            }
            Ok(processor) => Eyes::Shut(format!(
                "the checkpoint's vision tower takes patches of {} values and {} a side of an id, its \
                 processor makes {} and {}: use the processor's file that belongs to the checkpoint",
                takes.0,
                takes.1,
                processor.shape().0,
                processor.shape().1
            )),
            Err(error) => Eyes::Shut(error.to_string()),
        };
        Self { eyes, ..Self::none() }
    }

    /// For a checkpoint that does not see.
    pub fn none() -> Self {
        Self { eyes: Eyes::None, files: Vec::new(), by_path: HashMap::new(), room: KEPT }
    }

    /// Whether the checkpoint sees.
    pub fn sees(&self) -> bool {
        !matches!(self.eyes, Eyes::None)
    }

    /// The id that stands for a part of an image in the model's eyes.
    pub fn pad(&self) -> Option<u32> {
        if let Eyes::Open { pad, .. } = self.eyes { Some(pad) } else { None }
    }

    /// Reads image files, several at a time. What cannot be read is left to [`Images::add`], which
    /// says why.
    pub fn prepare<'a>(&mut self, paths: impl Iterator<Item = &'a Path>) {
        let new: BTreeSet<&Path> = paths.filter(|path| !self.by_path.contains_key(*path)).collect();
        let new: Vec<&Path> = new.into_iter().collect();
        for paths in new.chunks(AT_A_TIME) {
            let read: Vec<_> = paths.par_iter().map(|path| self.read(path)).collect();
            for (path, read) in paths.iter().zip(read) {
                if let Ok((sha256, patches)) = read {
                    self.insert(path, sha256, patches);
                }
            }
        }
    }

    /// The image of a file, read and checked now where it was not before.
    ///
    /// # Errors
    /// It cannot be read, is too large, or is no image that the checkpoint takes: names the file.
    pub fn add(&mut self, path: &Path) -> Result<ImageId, String> {
        if let Some(&id) = self.by_path.get(path) {
            return Ok(id);
        }
        let (sha256, patches) = self.read(path)?;
        Ok(self.insert(path, sha256, patches))
    }

    fn insert(&mut self, path: &Path, sha256: Digest, patches: Patches) -> ImageId {
        let (tokens, size) = (patches.tokens(), size_of_val(patches.values()));
        let kept = (size <= self.room).then(|| Arc::new(patches));
        self.room -= if kept.is_some() { size } else { 0 };
        let id = ImageId(self.files.len());
        self.files.push(ImageFile { path: path.to_owned(), sha256, tokens, kept });
        self.by_path.insert(path.to_owned(), id);
        id
    }

    /// Image pads that an image takes.
    pub fn tokens(&self, id: ImageId) -> usize {
        self.files.get(id.0).map_or(0, |file| file.tokens)
    }

    /// The patches of an image that was added.
    ///
    /// # Errors
    /// Its file is no longer what it was: names it.
    pub fn patches(&self, id: ImageId) -> Result<Arc<Patches>, String> {
        let file = self.files.get(id.0).ok_or("no such image")?;
        if let Some(patches) = &file.kept {
            return Ok(Arc::clone(patches));
        }
        let (sha256, patches) = self.read(&file.path)?;
        if sha256 != file.sha256 {
            return Err(format!("image {} changed while it was used", file.path.display()));
        }
        Ok(Arc::new(patches))
    }

    fn read(&self, path: &Path) -> Result<(Digest, Patches), String> {
        let at = |problem: String| format!("image {}: {problem}", path.display());
        let processor = match &self.eyes {
            Eyes::Open { processor, .. } => processor,
            Eyes::Shut(problem) => return Err(at(problem.clone())),
            Eyes::None => {
                return Err(at("the model has no vision tower; train one that has".into()));
            }
        };
        let read = || {
            let mut bytes = Vec::new();
            fs::File::open(path)?.take(MAX_FILE + 1).read_to_end(&mut bytes)?;
            Ok::<_, std::io::Error>(bytes)
        };
        let bytes = read()
            .map_err(|error| at(format!("{error}; name it as it lies from the file of rows")))?;
        if bytes.len() as u64 > MAX_FILE {
            return Err(at(format!("it is larger than {MAX_FILE} bytes")));
        }
        let image = Rgb::decode(&bytes).map_err(|error| at(error.to_string()))?;
        let patches = processor.patches(&image).map_err(|error| at(error.to_string()))?;
        Ok((Digest::of(&bytes), patches))
    }

    /// How many files there are, and the SHA-256 over their digests, sorted: what was seen, whatever the
    /// files are called.
    pub fn digest(&self) -> (usize, Digest) {
        let mut digests: Vec<&[u8]> = self.files.iter().map(|file| &file.sha256.0[..]).collect();
        digests.sort_unstable();
        (self.files.len(), Digest::of_parts("rollcall-images-v1", &digests))
    }
}
