//! Which task and which seed a group plays: decided by the run alone, so that the same recipe asks
//! for the same episodes whoever plays them.

use protocol::{Digest, LeaseId, RunId};

use crate::recipe::TaskRow;

/// Groups from here on are evaluations; below it they are training groups, counted from 0.
pub const EVALUATION_GROUPS: u64 = 1 << 63;

/// The group of data set row `row` in evaluation `round` (0 is the one before training).
pub fn evaluation_group(round: u32, row: u32) -> u64 {
    EVALUATION_GROUPS | (u64::from(round & 0x7fff_ffff) << 32) | u64::from(row)
}

/// Whether a lease is one of an evaluation.
pub fn is_evaluation(lease: LeaseId) -> bool {
    lease.group >= EVALUATION_GROUPS
}

/// The order in which training tasks are played: each epoch is a shuffle of its own.
#[derive(Clone, Debug)]
pub struct TaskOrder {
    run: RunId,
    ids: Vec<String>,
    epoch: u64,
    order: Vec<usize>,
}

impl TaskOrder {
    /// The order of a run over its rows.
    pub fn new(run: RunId, rows: &[TaskRow]) -> Self {
        let ids = rows.iter().map(|row| row.task.id.clone()).collect();
        let mut this = Self { run, ids, epoch: 0, order: Vec::new() };
        this.shuffle(0);
        this
    }

    /// The row that training group `group` plays. None where there are no rows.
    pub fn row(&mut self, group: u64) -> Option<usize> {
        let rows = self.ids.len() as u64;
        let epoch = group.checked_div(rows)?;
        if epoch != self.epoch {
            self.shuffle(epoch);
        }
        self.order.get(usize::try_from(group % rows).ok()?).copied()
    }

    fn shuffle(&mut self, epoch: u64) {
        let key = |id: &String| order_key(self.run, epoch, id);
        let mut order: Vec<(Digest, usize)> =
            self.ids.iter().enumerate().map(|(row, id)| (key(id), row)).collect();
        order.sort_unstable();
        self.order = order.into_iter().map(|(_, row)| row).collect();
        self.epoch = epoch;
    }
}

/// What decides a task's place in an epoch: tasks are played in the order of their keys.
pub fn order_key(run: RunId, epoch: u64, id: &str) -> Digest {
    let parts: [&[u8]; 3] = [&run.0.0, &epoch.to_le_bytes(), id.as_bytes()];
    Digest::of_parts("rollcall-order-v1", &parts)
}

/// The round that a group is an evaluation of; none for training groups.
pub fn evaluation_round(group: u64) -> Option<u32> {
    let round = u32::try_from((group & !EVALUATION_GROUPS) >> 32).ok()?;
    (group >= EVALUATION_GROUPS).then_some(round)
}

/// The seed that the environment is reset with: the row's own where it fixes one, else one drawn for
/// this group, so that a task without a seed is another game each time it comes up. All rollouts of
/// a group share it.
pub fn episode_seed(run: RunId, row: &TaskRow, group: u64) -> u64 {
    row.episode_seed.unwrap_or_else(|| {
        let parts: [&[u8]; 3] = [&run.0.0, &group.to_le_bytes(), row.task.id.as_bytes()];
        let Digest(bytes) = Digest::of_parts("rollcall-episode-seed-v1", &parts);
        bytes.iter().take(8).fold(0, |seed, byte| (seed << 8) | u64::from(*byte))
    })
}

#[cfg(test)]
mod tests {
    use protocol::{Split, Task};

    use super::*;

    fn rows(n: usize) -> Vec<TaskRow> {
        let task = |i: usize| Task {
            id: format!("t{i}"),
            prompt: "p".into(),
            fields: "{}".into(),
            split: Split::Train,
        };
        (0..n).map(|i| TaskRow { task: task(i), episode_seed: None }).collect()
    }

    fn run(name: &str) -> RunId {
        RunId(Digest::of(name.as_bytes()))
    }

    #[test]
    fn every_epoch_plays_every_task_once_in_an_order_of_its_own() {
        let mut order = TaskOrder::new(run("a"), &rows(7));
        let mut epochs = Vec::new();
        for epoch in 0..3 {
            let played: Vec<usize> = (0..7).filter_map(|i| order.row(epoch * 7 + i)).collect();
            let mut sorted = played.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, [0, 1, 2, 3, 4, 5, 6]);
            epochs.push(played);
        }
        assert!(epochs[0] != epochs[1] && epochs[1] != epochs[2]);
        assert_eq!(order.row(3), Some(epochs[0][3]), "going back gives the same row");
        assert_ne!(epochs[0], (0..7).collect::<Vec<_>>());
        assert_eq!(TaskOrder::new(run("a"), &[]).row(3), None);
    }

    #[test]
    fn seeds_are_the_rows_own_or_drawn_for_the_group() {
        let row = rows(1).remove(0);
        let seed = episode_seed(run("a"), &row, 5);
        assert_eq!(seed, episode_seed(run("a"), &row, 5));
        assert_ne!(seed, episode_seed(run("a"), &row, 6));
        assert_ne!(seed, episode_seed(run("b"), &row, 5));
        assert_eq!(episode_seed(run("a"), &TaskRow { episode_seed: Some(9), ..row }, 5), 9);
    }

    #[test]
    fn evaluation_groups_never_meet_training_groups_or_each_other() {
        let lease = |group| LeaseId { group, generation: 0 };
        assert!(is_evaluation(lease(evaluation_group(0, 0))));
        assert!(!is_evaluation(lease(u64::MAX >> 1)));
        assert_ne!(evaluation_group(0, 1), evaluation_group(1, 0));
    }
}
