//! What a frame shows: which objects, in which cells, how large. Drawn from the seed, and told by the
//! split of the task, so that no (target, cell) of training is asked about in evaluation.

use protocol::Split;

use super::{
    Settings,
    paint::{COLOURS, SHAPES},
};
use crate::draws::Draws;

/// Something with a name: an index into the names of the settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Object {
    /// Its name.
    pub(super) name: usize,
    /// Its cell's column.
    pub(super) column: u64,
    /// Its cell's row.
    pub(super) row: u64,
    /// Its size, 0 is the smallest. One of `levels`.
    pub(super) size: u64,
}

impl Object {
    /// Its values, digit by digit.
    pub(super) fn code(&self) -> [u64; 3] {
        [self.column, self.row, self.size]
    }
}

/// One frame's contents. The target is the first object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Scene {
    pub(super) objects: Vec<Object>,
}

/// Whether a cell is asked about in evaluation only, for a target. About one cell in seven, another
/// one for each target; with two levels one of the four.
fn held_out(settings: &Settings, target: usize, column: u64, row: u64) -> bool {
    let (weight, modulus) = if settings.levels == 2 { (2, 4) } else { (3, 7) };
    (column + weight * row + target as u64).is_multiple_of(modulus)
}

impl Scene {
    /// The scene of a seed for a target. Without a split every cell can be asked about.
    pub(super) fn draw(
        settings: &Settings,
        target: usize,
        split: Option<Split>,
        seed: u64,
    ) -> Self {
        let mut draws = Draws::new("rollcall-frames-scene-v1", seed);
        let levels = settings.levels;
        let cells: Vec<(u64, u64)> =
            (0..levels * levels).map(|cell| (cell % levels, cell / levels)).collect();
        let fits = |(column, row): &&(u64, u64)| {
            let held_out = held_out(settings, target, *column, *row);
            split.is_none_or(|split| (split == Split::Eval) == held_out)
        };
        let asked: Vec<(u64, u64)> = cells.iter().filter(fits).copied().collect();
        let place = draws.pick(&asked).copied().unwrap_or_default();
        let mut free: Vec<(u64, u64)> = cells.into_iter().filter(|cell| *cell != place).collect();
        let mut names: Vec<usize> =
            (0..settings.names().len()).filter(|name| *name != target).collect();
        draws.shuffle(&mut free);
        draws.shuffle(&mut names);
        let places = std::iter::once((target, place)).chain(names.into_iter().zip(free));
        let objects = places
            .take(settings.objects)
            .map(|(name, (column, row))| Object { name, column, row, size: draws.below(levels) })
            .collect();
        Self { objects }
    }
}

/// Colour and shape of a name.
pub(super) fn look(settings: &Settings, name: usize) -> (usize, usize) {
    (name % settings.colours, name / settings.colours)
}

/// The names of all objects that there can be: every colour of the first shape, then of the second.
pub(super) fn names(colours: usize, shapes: usize) -> Vec<String> {
    let colours = COLOURS.iter().take(colours);
    SHAPES
        .iter()
        .take(shapes)
        .flat_map(|shape| colours.clone().map(move |colour| format!("{} {shape}", colour.0)))
        .collect()
}
