//! Bicubic resizing with antialiasing in fixed point, bit for bit as torch does it for 8-bit images:
//! first along the width, then along the height, each rounded and clamped; an axis that keeps its
//! length is not touched.

use rayon::prelude::*;

use super::rgb::Rgb;

/// The cubic's parameter.
const A: f64 = -0.5;

fn cubic(x: f64) -> f64 {
    let x = x.abs();
    if x < 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        (((x - 5.0) * x + 8.0) * x - 4.0) * A
    } else {
        0.0
    }
}

/// For each place of a resized axis, where it reads and with which weights.
struct Axis {
    /// First index that is read, and the weights from there on.
    taps: Vec<(usize, Vec<i32>)>,
    precision: u32,
}

impl Axis {
    fn new(from: usize, to: usize) -> Self {
        let scale = from as f64 / to as f64;
        let stretch = scale.max(1.0);
        let support = 2.0 * stretch;
        let weights = |place: usize| {
            let centre = scale * (place as f64 + 0.5);
            let low = ((centre - support + 0.5) as i64).max(0) as usize;
            let high = ((centre + support + 0.5) as i64).max(0) as usize;
            let at = |j: usize| cubic((j as f64 - centre + 0.5) * (1.0 / stretch));
            let weights: Vec<f64> = (low..high.min(from)).map(at).collect();
            let total: f64 = weights.iter().sum();
            let scaled = |w: f64| if total == 0.0 { w } else { w / total };
            (low, weights.into_iter().map(scaled).collect::<Vec<f64>>())
        };
        let exact: Vec<(usize, Vec<f64>)> = (0..to).map(weights).collect();
        let largest = exact.iter().flat_map(|(_, weights)| weights).fold(0.0f64, |m, w| m.max(*w));
        let fits = |bits: u32| (0.5 + largest * f64::from(1u32 << (bits + 1))) as i64 >= 1 << 15;
        let precision = (0..22).find(|&bits| fits(bits)).unwrap_or(22);
        let fixed = |w: f64| {
            let scaled = w * f64::from(1u32 << precision);
            (scaled + if w < 0.0 { -0.5 } else { 0.5 }) as i32
        };
        let fix =
            |(low, weights): (usize, Vec<f64>)| (low, weights.into_iter().map(fixed).collect());
        Self { taps: exact.into_iter().map(fix).collect(), precision }
    }

    fn round(&self, sum: i32) -> u8 {
        (sum >> self.precision).clamp(0, 255) as u8
    }

    fn half(&self) -> i32 {
        // A precision of 0 would need weights in the thousands, and their sum is 1.
        1 << self.precision.saturating_sub(1)
    }
}

/// The image at another size. Both sizes are at least 1.
pub(super) fn resize(image: &Rgb, width: u32, height: u32) -> Rgb {
    let stride = 3 * image.width as usize;
    let new_stride = 3 * width as usize;
    let mut pixels = image.pixels.clone();
    if width != image.width {
        let axis = Axis::new(image.width as usize, width as usize);
        let mut wide = vec![0; new_stride * image.height as usize];
        (wide.par_chunks_mut(new_stride)).zip(pixels.par_chunks(stride)).for_each(|(out, row)| {
            for (out, (low, weights)) in out.chunks_exact_mut(3).zip(&axis.taps) {
                let mut sums = [axis.half(); 3];
                let read = row.get(3 * low..).unwrap_or_default().chunks_exact(3);
                for (pixel, weight) in read.zip(weights) {
                    for (sum, value) in sums.iter_mut().zip(pixel) {
                        *sum += i32::from(*value) * weight;
                    }
                }
                out.iter_mut().zip(sums).for_each(|(out, sum)| *out = axis.round(sum));
            }
        });
        pixels = wide;
    }
    if height != image.height {
        let axis = Axis::new(image.height as usize, height as usize);
        let mut high = vec![0; new_stride * height as usize];
        high.par_chunks_mut(new_stride).zip(&axis.taps).for_each(|(out, (low, weights))| {
            let mut sums = vec![axis.half(); new_stride];
            let read = pixels.get(low * new_stride..).unwrap_or_default().chunks_exact(new_stride);
            for (row, weight) in read.zip(weights) {
                for (sum, value) in sums.iter_mut().zip(row) {
                    *sum += i32::from(*value) * weight;
                }
            }
            out.iter_mut().zip(sums).for_each(|(out, sum)| *out = axis.round(sum));
        });
        pixels = high;
    }
    Rgb { width, height, pixels }
}
