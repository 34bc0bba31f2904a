//! Who computes which rollouts of an update, and how all ranks learn what each found out.

use std::ops::Range;

use terminal::Failure;

use super::{Refusal, UpdateGroup, UpdateSettings, Verdict, pass::Seen};
use crate::{
    audit::sampling::SamplingEvidence,
    ranks::{Ranks, share, split_even},
};

/// Padded ids of one forward pass; more are scored in parts.
const FORWARD_IDS: usize = 32_768;

/// Rollouts of one group that pass through the model together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// Place of the group in the step.
    pub(super) group: usize,
    /// Its rollouts.
    pub(super) rows: Range<usize>,
}

/// What each rank computes of these groups, by rank. Groups stay whole, as their prompt is computed once
/// for all of their rollouts, unless there are fewer groups than ranks.
pub(super) fn parts(groups: &[UpdateGroup<'_>], batch: &[usize], world: usize) -> Vec<Vec<Part>> {
    let pieces = world.div_ceil(batch.len().max(1));
    let mut parts = Vec::new();
    let mut costs = Vec::new();
    for &group in batch {
        let Some(members) = groups.get(group) else { continue };
        let count = members.episodes.len();
        for piece in 0..pieces.min(count) {
            let rows = split_even(count, piece, pieces.min(count));
            costs.push(cost(members, &rows));
            parts.push(Part { group, rows });
        }
    }
    (0..world)
        .map(|rank| {
            let mine = share(&costs, rank, world).into_iter();
            mine.flat_map(|at| passes(groups, &parts[at])).collect()
        })
        .collect()
}

/// Ids that go through the model: the prompt once.
fn cost(group: &UpdateGroup<'_>, rows: &Range<usize>) -> usize {
    let episodes = group.episodes.get(rows.clone()).unwrap_or_default();
    let prompt = |spans: &[protocol::Span]| spans.first().map_or(0, |span| span.offset as usize);
    let first = episodes.first().map_or(0, |it| prompt(&it.spans));
    first + episodes.iter().map(|it| it.tokens.len().saturating_sub(first)).sum::<usize>()
}

/// A part as forward passes that fit into memory.
fn passes(groups: &[UpdateGroup<'_>], part: &Part) -> Vec<Part> {
    let episodes = groups.get(part.group).and_then(|it| it.episodes.get(part.rows.clone()));
    let longest = episodes.unwrap_or_default().iter().map(|e| e.tokens.len()).max().unwrap_or(0);
    let rows = (FORWARD_IDS / longest.max(1)).max(1);
    let Range { start, end } = part.rows;
    (start..end)
        .step_by(rows)
        .map(|first| Part { group: part.group, rows: first..(first + rows).min(end) })
        .collect()
}

/// What the first pass found out about each rollout, by group: that of all ranks, where `mine` is that of
/// this rank's parts in their order.
pub(super) fn gathered(
    ranks: &mut Ranks,
    parts: &[Vec<Part>],
    mine: Vec<Seen>,
    groups: &[UpdateGroup<'_>],
    settings: &UpdateSettings,
) -> Result<Vec<Vec<Seen>>, Failure> {
    let mut seen: Vec<Vec<Seen>> =
        groups.iter().map(|group| vec![Seen::default(); group.episodes.len()]).collect();
    let mut put = |part: &Part, found: &mut dyn Iterator<Item = Seen>| {
        if let Some(rows) = seen.get_mut(part.group).and_then(|it| it.get_mut(part.rows.clone())) {
            rows.iter_mut().zip(found).for_each(|(row, found)| *row = found);
        }
    };
    if ranks.world() == 1 {
        let mut mine = mine.into_iter();
        parts.iter().flatten().for_each(|part| put(part, &mut mine));
        return Ok(seen);
    }
    let bytes: Vec<u8> = mine.iter().flat_map(Seen::to_floats).flat_map(f32::to_le_bytes).collect();
    for (parts, bytes) in parts.iter().zip(ranks.all_gather(&bytes)?) {
        let (floats, _) = bytes.as_chunks::<4>();
        let mut floats = floats.iter().map(|bytes| f32::from_le_bytes(*bytes));
        for part in parts {
            let older = groups.get(part.group).is_some_and(|it| it.behaviour.is_some());
            let episodes = groups.get(part.group).map(|it| it.episodes.as_slice());
            let episodes = episodes.and_then(|it| it.get(part.rows.clone())).unwrap_or_default();
            let mut found = episodes.iter().map(|episode| {
                let scored = episode.spans.iter().map(|span| span.ids.len()).sum();
                Seen::from_floats(&mut floats, scored, settings, older)
            });
            put(part, &mut found);
        }
        if floats.next().is_some() {
            return Err(Failure::Fault("ranks found out about other rollouts".into()));
        }
    }
    Ok(seen)
}

/// Evidence about one rollout, by its group and its place there.
pub(super) type Examined = (usize, usize, SamplingEvidence);

/// Which rollouts rank 0 refuses on the evidence of all ranks, and whether there are any, which all ranks
/// hear.
pub(super) fn refusals(
    ranks: &mut Ranks,
    mine: &[Examined],
    verdict: &mut Verdict<'_>,
) -> Result<(Vec<Refusal>, bool), Failure> {
    let mut all = mine.to_vec();
    if ranks.world() > 1 {
        let bytes = serde_json::to_vec(mine).map_err(Failure::fault)?;
        all.clear();
        for bytes in ranks.all_gather(&bytes)? {
            all.extend(serde_json::from_slice::<Vec<Examined>>(&bytes).map_err(Failure::fault)?);
        }
        all.sort_by_key(|(group, row, _)| (*group, *row));
    }
    let mut refused = Vec::new();
    if ranks.leads() {
        for (group, row, evidence) in all {
            if let Err(reason) = verdict(group, row, &evidence) {
                refused.push(Refusal { group, row, reason });
            }
        }
    }
    let any = ranks.decided(!refused.is_empty())?;
    Ok((refused, any))
}
