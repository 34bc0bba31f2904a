//! Ranks: the processes that share one training run, one for each device, started by torchrun, Slurm,
//! MPI, Kubernetes or `--nproc-per-node`.
//!
//! Training knows only the [`Collective`]: sums over all ranks, one rank's bytes to all, everybody's
//! bytes to everybody. Which ranks there are comes from the launcher's environment ([`Place`]), how
//! they meet from `rendezvous`, how bytes travel from [`TcpCollective`].

mod collective;
mod discovery;
mod error;
pub mod gradients;
#[cfg(feature = "nccl")]
mod nccl;
mod rendezvous;
mod session;
mod share;
mod spawn;
mod tcp;
mod wire;

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::cast_possible_wrap)]
mod tests;

pub use collective::{Collective, Local, agree};
pub use discovery::{Launcher, Place};
pub use error::RankError;
#[cfg(feature = "nccl")]
pub use nccl::NcclCollective;
pub use rendezvous::{Meeting, RankSecret, meet};
pub use session::{Backend, RankOptions, Ranks, Role};
pub use share::{share, split_even};
pub use spawn::in_turn;
pub use tcp::{OnFailure, TcpCollective};
