//! Rows of the vision policy as token streams: an image, a prompt and a code of digits, as the
//! checkpoint's chat template writes them, and the images that belong to them.

mod accuracy;
mod example;
mod format;
mod images;
mod metrics;

pub(crate) use accuracy::four_places;
pub use accuracy::{Accuracy, Tally, teacher_forced_accuracy};
pub use example::{Example, batches, mine, shared_batch};
pub use format::{RowFormat, Scored};
pub use images::{ImageId, Images};
pub use metrics::MetricsLog;

/// The most memory that this process has had so far, in GiB, where the system tells.
pub(crate) fn peak_memory_gib() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: f64 = line.trim().trim_end_matches("kB").trim_end().parse().ok()?;
    Some(kib / f64::from(1 << 20))
}
