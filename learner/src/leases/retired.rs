//! Groups that are over: remembered so that nothing is counted or opened twice.

use std::collections::BTreeMap;

use protocol::{ActorId, EpisodeId, LeaseId};

use super::{Submission, group::Answer, group::Group};

/// Groups whose answers are remembered one by one; of older ones, only that they were.
const REMEMBERED: usize = 4096;

#[derive(Debug, Default)]
pub(super) struct Retired {
    /// Runs of group numbers: first to last.
    ranges: BTreeMap<u64, u64>,
    answers: BTreeMap<u64, Vec<Option<Answer>>>,
    pending: usize,
}

impl Retired {
    pub(super) fn contains(&self, group: u64) -> bool {
        self.ranges.range(..=group).next_back().is_some_and(|(_, last)| group <= *last)
    }

    pub(super) fn add(&mut self, group: u64, over: &Group) {
        let answers: Vec<Option<Answer>> =
            over.slots().map(|(_, slot)| slot.answer().copied()).collect();
        self.pending += answers.iter().flatten().filter(|answer| !answer.accepted).count();
        self.answers.insert(group, answers);
        if self.answers.len() > REMEMBERED {
            self.answers.pop_first();
        }
        let mut first = group;
        let mut last = group;
        let before = self.ranges.range(..=group).next_back().map(|(first, last)| (*first, *last));
        if let Some((start, end)) = before
            && end.checked_add(1) >= Some(group)
        {
            first = start;
            last = end.max(group);
        }
        if let Some(end) = group.checked_add(1).and_then(|next| self.ranges.remove(&next)) {
            last = end;
        }
        self.ranges.insert(first, last);
    }

    /// Answers that wait for a verdict.
    pub(super) fn pending(&self) -> usize {
        self.pending
    }

    fn answer(&self, lease: LeaseId) -> Option<&Answer> {
        let slot = usize::try_from(lease.generation).ok()?;
        self.answers.get(&lease.group)?.get(slot)?.as_ref()
    }

    pub(super) fn is_pending(&self, lease: LeaseId, episode: EpisodeId) -> bool {
        self.answer(lease).is_some_and(|it| !it.accepted && it.episode == episode)
    }

    /// The verdict on an answer came after its group was over. Returns whether one waited for it.
    pub(super) fn judged(&mut self, lease: LeaseId) -> bool {
        let Ok(slot) = usize::try_from(lease.generation) else { return false };
        let answers = self.answers.get_mut(&lease.group);
        match answers.and_then(|answers| answers.get_mut(slot)) {
            Some(Some(answer)) if !answer.accepted => {
                answer.accepted = true;
                self.pending -= 1;
                true
            }
            _ => false,
        }
    }

    /// What an answer to a lease is whose group is not open.
    pub(super) fn submission(
        &self,
        lease: LeaseId,
        actor: ActorId,
        episode: EpisodeId,
    ) -> Submission {
        if !self.contains(lease.group) {
            return Submission::Unknown;
        }
        let answers = self.answers.get(&lease.group);
        let slot = usize::try_from(lease.generation).ok();
        match answers.zip(slot).map(|(answers, slot)| answers.get(slot)) {
            // The group had no such generation.
            Some(None) => Submission::Unknown,
            Some(Some(Some(answer))) => answer.beside(actor, true, episode),
            // Dropped without an answer, or too long ago to say more.
            Some(Some(None)) | None => Submission::Late,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::leases::tests::order;

    #[test]
    fn group_numbers_are_kept_as_ranges() {
        let mut retired = Retired::default();
        let group = Group::new(order(1));
        for number in [5, 3, 4, 9, 0, u64::MAX, u64::MAX - 1, 4] {
            retired.add(number, &group);
        }
        let ranges: Vec<_> = retired.ranges.into_iter().collect();
        assert_eq!(ranges, [(0, 0), (3, 5), (9, 9), (u64::MAX - 1, u64::MAX)]);
    }

    #[test]
    fn memory_stays_bounded_and_old_groups_stay_known() {
        let mut retired = Retired::default();
        let group = Group::new(order(2));
        for number in 0..10_000 {
            retired.add(number, &group);
        }
        assert_eq!((retired.answers.len(), retired.ranges.len()), (REMEMBERED, 1));
        assert!(retired.contains(0) && !retired.contains(10_000));
    }
}
