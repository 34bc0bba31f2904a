//! Rung 8: the rollouts whose rewards are compared with each other are exactly one group.

use super::{Audited, Reason};

/// Checks that `episodes` are the `generations` rollouts of `group`, in order of generation, of one
/// task and seed under one policy.
///
/// # Errors
/// The first thing in which they differ.
pub fn check_group(group: u64, generations: u32, episodes: &[&Audited]) -> Result<(), Reason> {
    let expected = usize::try_from(generations).unwrap_or(usize::MAX);
    if episodes.len() != expected {
        return Err(Reason::GroupSize { expected, found: episodes.len() });
    }
    for (expected, audited) in (0..).zip(episodes) {
        let lease = audited.episode.lease;
        if lease.group != group || lease.generation != expected {
            return Err(Reason::GroupGenerations { group, expected, lease });
        }
    }
    let Some((first, others)) = episodes.split_first() else { return Ok(()) };
    let all = |equal: fn(&Audited, &Audited) -> bool| others.iter().all(|it| equal(first, it));
    if !all(|a, b| a.episode.task == b.episode.task) {
        return Err(Reason::GroupTasks { group });
    }
    if !all(|a, b| a.episode.seed == b.episode.seed) {
        return Err(Reason::GroupSeeds { group });
    }
    if !all(|a, b| a.episode.policy == b.episode.policy) {
        return Err(Reason::GroupPolicies { group });
    }
    Ok(())
}
