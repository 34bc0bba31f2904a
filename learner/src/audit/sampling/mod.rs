//! Rung 9: evidence that the ids were sampled, honestly, from the policy of the lease.
//!
//! The scoring pass under the behaviour adapter has each position's logits. With the lease's noise made
//! again, each sampled id must be the winner there, and the log-probabilities that came with it must
//! be the learner's own. Floating point differs between devices and batches, so both hold up to
//! rounding: an id's **deficit** is by how much its logit / T would have to rise for honest sampling to
//! give it, and an episode is judged by the largest and the mean of its deficits and of its
//! log-probability gaps, against [`SamplingBounds`] with a measured rate of false alarms
//! ([`Calibration`]). The margin under regenerated noise is that of Token-DiFR (arXiv:2511.20621).
//!
//! This is evidence, not proof. What it cannot see: a policy whose logits stay within rounding of the
//! right one's.

mod bounds;
mod calibration;
mod evidence;

pub use bounds::{SamplingBounds, SamplingTest};
pub use calibration::{Calibration, CalibrationError, FalsePositives, Pair, PairId, device_kind};
pub use evidence::{
    Deviation, Flagged, SamplingEvidence, SamplingJudge, SamplingMode, deviations, examine,
};
