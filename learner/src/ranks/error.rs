//! How ranks fail: every message names the rank and the remedy.

use std::time::Duration;

/// A run over several ranks cannot begin or go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RankError {
    /// Half of a launcher's variables.
    #[error(
        "{launcher} sets {present} but not {missing}: start every rank through it, or unset {present}"
    )]
    Incomplete {
        /// Whose variables they are.
        launcher: &'static str,
        /// One that is set.
        present: &'static str,
        /// One that is not.
        missing: &'static str,
    },
    /// A variable that holds something else.
    #[error("{name}={value:?} {problem}")]
    Variable {
        /// The variable.
        name: &'static str,
        /// The start of its value.
        value: String,
        /// What is wrong with it.
        problem: String,
    },
    /// Nobody said where rank 0 is.
    #[error(
        "{launcher} does not say where rank 0 listens: set {variable}=HOST:PORT, the same for all ranks"
    )]
    NoAddress {
        /// The launcher.
        launcher: &'static str,
        /// The variable that says it.
        variable: &'static str,
    },
    /// Ranks on several machines without a secret.
    #[error(
        "ranks on several machines need a secret: set {variable} to the same 16 characters or more for all of them"
    )]
    NoSecret {
        /// The variable that holds it.
        variable: &'static str,
    },
    /// Rank 0 cannot listen.
    #[error("rank 0 cannot listen on {address}: {reason}; set {variable}=HOST:PORT to a free port")]
    Listen {
        /// Where.
        address: String,
        /// Why not.
        reason: String,
        /// The variable that says where.
        variable: &'static str,
    },
    /// Some ranks did not come.
    #[error("rank{} {} of {world} did not come within {} s{notes}: see their own logs, and whether {address} can be reached from there",
        if ranks.len() == 1 { "" } else { "s" }, listed(ranks), deadline.as_secs())]
    Missing {
        /// Who.
        ranks: Vec<usize>,
        /// All ranks.
        world: usize,
        /// The time that they had.
        deadline: Duration,
        /// Where rank 0 listens.
        address: String,
        /// What happened meanwhile.
        notes: String,
    },
    /// Rank 0 was not found.
    #[error("rank {rank} found no rank 0 at {address} within {} s: {reason}", deadline.as_secs())]
    NoRoot {
        /// Who looked.
        rank: usize,
        /// Where.
        address: String,
        /// The time that it had.
        deadline: Duration,
        /// The last problem.
        reason: String,
    },
    /// Rank 0 let this rank not in, or is not who it should be.
    #[error("rank {rank} was refused by rank 0 at {address}: {reason}")]
    Refused {
        /// Who.
        rank: usize,
        /// Where.
        address: String,
        /// Why.
        reason: String,
    },
    /// A rank went away.
    #[error("rank {rank} is gone ({detail}): the run ends on all ranks; its own log says why")]
    Gone {
        /// Who.
        rank: usize,
        /// How it was noticed.
        detail: String,
    },
    /// A rank is there and does not come along.
    #[error("rank{} {} did not reach {operation} within {} s: the run ends on all ranks; look for a hanging or much slower process there",
        if ranks.len() == 1 { "" } else { "s" }, listed(ranks), deadline.as_secs())]
    Hangs {
        /// Who.
        ranks: Vec<usize>,
        /// What the others wait in.
        operation: String,
        /// The time that it had.
        deadline: Duration,
    },
    /// Ranks do different things.
    #[error(
        "rank {rank} is at {theirs} where rank 0 is at {ours}: the ranks run different programs or recipes"
    )]
    Diverged {
        /// Who.
        rank: usize,
        /// Where it is.
        theirs: String,
        /// Where rank 0 is.
        ours: String,
    },
    /// Ranks hold different values where they must be equal.
    #[error(
        "rank {rank} holds another {what} than rank 0 ({theirs} instead of {ours}): nothing was written; the ranks' machines compute differently"
    )]
    Disagree {
        /// Who.
        rank: usize,
        /// What should be the same.
        what: &'static str,
        /// Its value.
        theirs: String,
        /// Rank 0's.
        ours: String,
    },
    /// CUDA or NCCL fails.
    #[error("NCCL: {0}")]
    Device(String),
    /// Rank 0, or whoever noticed first, ended the run.
    #[error("{0}")]
    Ended(String),
}

fn listed(ranks: &[usize]) -> String {
    let mut text = String::new();
    for (i, rank) in ranks.iter().take(16).enumerate() {
        text.push_str(if i == 0 { "" } else { ", " });
        text.push_str(&rank.to_string());
    }
    if ranks.len() > 16 {
        text.push_str(&format!(" and {} more", ranks.len() - 16));
    }
    text
}
