//! What the trainer sees of the other ranks.

use protocol::Digest;

use super::RankError;

/// Operations that all ranks of a run take part in, in the same order.
///
/// Sums are formed in the order of the ranks, so all ranks get the same bits, and the same ones again
/// in a run with as many ranks.
///
/// `learner/examples/own_collective.rs` is one of threads.
pub trait Collective: Send {
    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// How many ranks there are.
    fn world(&self) -> usize;

    /// Replaces `values` by their sums over all ranks.
    ///
    /// # Errors
    /// A rank that is gone, hangs, or does something else.
    fn all_reduce(&mut self, values: &mut [f32]) -> Result<(), RankError>;

    /// Replaces `values` by their sums over all ranks, in 64-bit floats: counts and metrics.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    fn all_reduce_wide(&mut self, values: &mut [f64]) -> Result<(), RankError>;

    /// Replaces `bytes` on every rank by those of rank 0.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    fn broadcast(&mut self, bytes: &mut Vec<u8>) -> Result<(), RankError>;

    /// [`broadcast`](Self::broadcast) of what to do next, for which the other ranks wait as long as rank
    /// 0 lives.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), but for time.
    fn command(&mut self, bytes: &mut Vec<u8>) -> Result<(), RankError> {
        self.broadcast(bytes)
    }

    /// Everybody's bytes, in the order of the ranks.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    fn all_gather(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, RankError>;

    /// Returns once every rank has called it.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    fn barrier(&mut self) -> Result<(), RankError> {
        self.all_gather(&[]).map(drop)
    }

    /// Waits for every rank to be finished, after which a rank may end without ending the others.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    fn finish(&mut self) -> Result<(), RankError> {
        Ok(())
    }

    /// Ends the run on all ranks because this one cannot go on.
    fn abort(&mut self, reason: &str) {
        let _ = reason;
    }
}

/// A run of one rank.
#[derive(Clone, Copy, Debug, Default)]
pub struct Local;

impl Collective for Local {
    fn rank(&self) -> usize {
        0
    }

    fn world(&self) -> usize {
        1
    }

    fn all_reduce(&mut self, _: &mut [f32]) -> Result<(), RankError> {
        Ok(())
    }

    fn all_reduce_wide(&mut self, _: &mut [f64]) -> Result<(), RankError> {
        Ok(())
    }

    fn broadcast(&mut self, _: &mut Vec<u8>) -> Result<(), RankError> {
        Ok(())
    }

    fn all_gather(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, RankError> {
        Ok(vec![bytes.to_vec()])
    }
}

/// Makes sure that all ranks hold the same `what`.
///
/// # Errors
/// The first rank that holds another one; or as [`Collective::all_reduce`].
pub fn agree(
    ranks: &mut dyn Collective,
    what: &'static str,
    digest: Digest,
) -> Result<(), RankError> {
    let all = ranks.all_gather(&digest.0)?;
    let Some(ours) = all.first() else { return Ok(()) };
    match all.iter().position(|theirs| theirs != ours) {
        None => Ok(()),
        Some(rank) => {
            let short = |bytes: &[u8]| -> String {
                bytes.iter().take(6).map(|byte| format!("{byte:02x}")).collect()
            };
            let theirs = short(&all[rank]);
            Err(RankError::Disagree { rank, what, theirs, ours: short(ours) })
        }
    }
}
