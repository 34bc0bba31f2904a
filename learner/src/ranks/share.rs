//! Which rank works on what: every item on exactly one rank.

use std::ops::Range;

/// The part of `0..len` that belongs to a rank where all ranks get equally many, the first ones one
/// more where it does not come out even.
pub fn split_even(len: usize, rank: usize, world: usize) -> Range<usize> {
    let (each, more) = (len / world.max(1), len % world.max(1));
    let start = rank * each + rank.min(more);
    start.min(len)..(start + each + usize::from(rank < more)).min(len)
}

/// Which items a rank works on where they cost differently: the dearest first, each to the rank that
/// has least to do. Items keep their order within a rank; all ranks compute the same shares.
pub fn share(costs: &[usize], rank: usize, world: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..costs.len()).collect();
    order.sort_by_key(|&item| (std::cmp::Reverse(costs[item]), item));
    let mut loads = vec![0usize; world.max(1)];
    let mut mine = Vec::new();
    for item in order {
        let least = (0..loads.len()).min_by_key(|&rank| (loads[rank], rank)).unwrap_or(0);
        // A floor, so that items without a cost are spread too.
        loads[least] += costs[item].max(1);
        if least == rank {
            mine.push(item);
        }
    }
    mine.sort_unstable();
    mine
}
