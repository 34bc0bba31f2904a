//! Paints a scene with whole numbers only: the same pixels on every machine.

use protocol::{Image, ImageError};

use super::{Settings, scene};
use crate::draws::Draws;

/// Colours by name.
pub(super) const COLOURS: [(&str, [u8; 3]); 8] = [
    ("red", [220, 50, 47]),
    ("green", [60, 180, 75]),
    ("blue", [50, 100, 220]),
    ("yellow", [240, 220, 60]),
    ("white", [245, 245, 245]),
    ("purple", [160, 60, 200]),
    ("orange", [245, 140, 30]),
    ("cyan", [70, 215, 220]),
];

/// Shapes by name.
pub(super) const SHAPES: [&str; 6] = ["square", "circle", "triangle", "cross", "diamond", "ring"];

/// The darkest ground.
const GROUND: u64 = 32;

/// Whether the shape covers the pixel `x`, `y` from its centre, where it reaches `radius` pixels.
fn covers(shape: usize, x: i64, y: i64, radius: i64) -> bool {
    let (right, down) = (x.abs(), y.abs());
    let distance = x * x + y * y;
    let inside = right <= radius && down <= radius;
    match shape {
        0 => inside,
        1 => distance <= radius * (radius + 1),
        2 => inside && 2 * right <= y + radius,
        3 => inside && (3 * right <= radius || 3 * down <= radius),
        4 => right + down <= radius,
        _ => distance <= radius * (radius + 1) && 4 * distance >= radius * radius,
    }
}

/// The radius of the largest object of a size, in pixels.
pub(super) fn radius(settings: &Settings, size: u64) -> i64 {
    // One pixel of ground on each side of the largest.
    let largest = settings.cell() / 2 - 1;
    // Where size is no part of the code, nothing is smaller than two thirds of the largest.
    let smaller =
        if settings.digits >= 3 { settings.levels - 1 - size } else { size % 2 * largest / 3 };
    i64::try_from(largest - smaller.min(largest - 1)).unwrap_or(1)
}

/// The smallest cell, in pixels, in which objects of `levels` sizes can be told apart.
pub(super) fn smallest_cell(levels: u64, sized: bool) -> u64 {
    if sized { 2 * (levels + 2) } else { 8 }
}

/// Paints the scene of a seed.
pub(super) fn paint(
    settings: &Settings,
    scene: &scene::Scene,
    seed: u64,
) -> Result<Image, ImageError> {
    let mut draws = Draws::new("rollcall-frames-ground-v1", seed);
    let shade = GROUND + draws.below(32);
    let (width, height) = (settings.width, settings.height);
    let mut pixels = Vec::new();
    let mut noise = 0_u64;
    for index in 0..width * height * 3 {
        // Eight bytes of noise a draw.
        if settings.noise > 0 && index % 8 == 0 {
            noise = draws.bits();
        }
        let byte = noise & 0xff;
        noise >>= 8;
        let raised = shade + byte * (settings.noise + 1) / 256;
        pixels.push(u8::try_from(raised).unwrap_or(u8::MAX));
    }
    for object in &scene.objects {
        let (colour, shape) = scene::look(settings, object.name);
        let colour = COLOURS.get(colour).map_or([255; 3], |(_, rgb)| *rgb);
        let radius = radius(settings, object.size);
        let centre = |place: u64, side: u64| {
            let cell = side / settings.levels;
            i64::try_from(place * cell + cell / 2).unwrap_or_default()
        };
        let (x, y) = (centre(object.column, width), centre(object.row, height));
        for down in -radius..=radius {
            for right in -radius..=radius {
                if !covers(shape, right, down, radius) {
                    continue;
                }
                let (Ok(x), Ok(y)) = (u64::try_from(x + right), u64::try_from(y + down)) else {
                    continue;
                };
                let start = usize::try_from((y * width + x) * 3).unwrap_or(usize::MAX);
                let place = start..start.saturating_add(3);
                if let Some(pixel) = pixels.get_mut(place).filter(|_| x < width && y < height) {
                    pixel.copy_from_slice(&colour);
                }
            }
        }
    }
    let side = |length: u64| u32::try_from(length).unwrap_or(u32::MAX);
    Image::new(side(width), side(height), pixels)
}
