//! Maps of the frozen lake: drawn so that the goal can be reached, with every tile's distance to it.

use std::collections::VecDeque;

use crate::draws::Draws;

/// Maps drawn before one with too many holes is cleared along its edge.
const ATTEMPTS: usize = 200;

/// The four ways to go.
pub(super) const DIRECTIONS: [&str; 4] = ["up", "right", "down", "left"];

/// A square map. Tiles are counted row by row; the start is the first and the goal is the last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Board {
    size: usize,
    holes: Vec<bool>,
    /// Moves to the goal; nothing for holes and for tiles that it cannot be reached from.
    distances: Vec<Option<usize>>,
}

impl Board {
    /// The map of a seed. `size` is at least 2.
    pub(super) fn draw(size: usize, holes_percent: u64, seed: u64) -> Self {
        let mut draws = Draws::new("rollcall-frozen-lake-map-v1", seed);
        let tiles = size * size;
        let mut holes = vec![false; tiles];
        for _ in 0..ATTEMPTS {
            for (tile, hole) in holes.iter_mut().enumerate() {
                let drawn = draws.chance(holes_percent * 10);
                *hole = drawn && tile != 0 && tile + 1 != tiles;
            }
            let board = Self::new(size, holes.clone());
            if board.distance(0).is_some() {
                return board;
            }
        }
        for (tile, hole) in holes.iter_mut().enumerate() {
            *hole &= tile >= size && tile % size + 1 != size;
        }
        Self::new(size, holes)
    }

    /// The map with these holes.
    pub(super) fn new(size: usize, holes: Vec<bool>) -> Self {
        let distances = vec![None; holes.len()];
        let mut board = Self { size, holes, distances };
        let goal = board.goal();
        let mut queue = VecDeque::from([(goal, 0)]);
        while let Some((tile, distance)) = queue.pop_front() {
            let known = board.distances.get_mut(tile).filter(|known| known.is_none());
            let Some(known) = known else { continue };
            *known = Some(distance);
            let next = (0..DIRECTIONS.len()).filter_map(|direction| board.beside(tile, direction));
            queue.extend(next.filter(|tile| !board.hole(*tile)).map(|tile| (tile, distance + 1)));
        }
        board
    }

    /// The map that [`Board::show`] wrote, and the player's tile; nothing for any other text.
    pub(super) fn read(text: &str) -> Option<(Self, usize)> {
        let lines = text.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        let rows: Vec<Vec<&str>> = lines
            .filter(|line| line.len() > 1 && line.iter().all(|tile| tile.len() == 1))
            .collect();
        let size = rows.len();
        let square = size > 1 && rows.iter().all(|row| row.len() == size);
        let tiles: Vec<&str> = rows.concat();
        let player = tiles.iter().position(|tile| *tile == "P")?;
        let holes = tiles.iter().map(|tile| *tile == "O").collect();
        square.then(|| (Self::new(size, holes), player))
    }

    /// The tile of the goal.
    pub(super) fn goal(&self) -> usize {
        self.holes.len().saturating_sub(1)
    }

    /// Whether a tile is a hole.
    pub(super) fn hole(&self, tile: usize) -> bool {
        self.holes.get(tile).copied().unwrap_or_default()
    }

    /// Moves from a tile to the goal, by a shortest way.
    pub(super) fn distance(&self, tile: usize) -> Option<usize> {
        self.distances.get(tile).copied().flatten()
    }

    /// The tile that lies in a direction; nothing beyond the edge.
    pub(super) fn beside(&self, tile: usize, direction: usize) -> Option<usize> {
        let (row, column) = (tile / self.size, tile % self.size);
        match direction {
            0 => tile.checked_sub(self.size),
            1 => (column + 1 < self.size).then_some(tile + 1),
            2 => (row + 1 < self.size).then_some(tile + self.size),
            _ => (column > 0).then(|| tile.saturating_sub(1)),
        }
    }

    /// The map as text, one line a row: `P` player, `G` goal, `O` hole, `.` ice.
    pub(super) fn show(&self, player: usize) -> String {
        let tile = |tile: usize| match tile {
            tile if tile == player => "P",
            tile if tile == self.goal() => "G",
            tile if self.hole(tile) => "O",
            _ => ".",
        };
        let row = |row: usize| {
            let tiles: Vec<&str> =
                (0..self.size).map(|column| tile(row * self.size + column)).collect();
            tiles.join(" ")
        };
        (0..self.size).map(row).collect::<Vec<_>>().join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Relaxes every pair of neighbours until nothing changes.
    fn reference(size: usize, holes: &[bool]) -> Vec<Option<usize>> {
        let tiles = size * size;
        let mut distances = vec![None; tiles];
        distances[tiles - 1] = Some(0);
        for _ in 0..tiles {
            for a in 0..tiles {
                for b in 0..tiles {
                    let apart = (a / size).abs_diff(b / size) + (a % size).abs_diff(b % size);
                    if apart != 1 || holes[a] || holes[b] {
                        continue;
                    }
                    if let Some(via) = distances[b]
                        && distances[a].is_none_or(|known: usize| known > via + 1)
                    {
                        distances[a] = Some(via + 1);
                    }
                }
            }
        }
        distances
    }

    #[test]
    fn distances_are_those_of_a_reference_and_the_goal_can_be_reached() {
        for (seed, (size, percent)) in
            (0u64..).zip([(2, 40), (3, 40), (4, 20), (5, 40), (8, 0), (8, 30), (8, 40), (12, 40)])
        {
            for seed in (0..20).map(|n| seed * 1000 + n) {
                let board = Board::draw(size, percent, seed);
                assert_eq!(board.distances, reference(size, &board.holes));
                assert!(board.distance(0).is_some_and(|moves| moves >= 2 * size - 2));
                assert!(!board.hole(0) && !board.hole(board.goal()));
                assert_eq!(board, Board::draw(size, percent, seed));
            }
        }
    }

    #[test]
    fn a_map_that_no_draw_leaves_open_is_cleared_along_its_edge() {
        let board = Board::draw(16, 100, 0);
        assert_eq!(board.distance(0), Some(30));
        assert_eq!(board.holes.iter().filter(|hole| **hole).count(), 15 * 15);
    }

    #[test]
    fn a_shown_map_is_read_back() {
        for seed in 0..50 {
            let board = Board::draw(6, 30, seed);
            let text = format!("You moved.\n{}", board.show(0));
            assert_eq!(Board::read(&text), Some((board.clone(), 0)));
        }
        for text in ["", "P", "P .\n.", "P . .\n. .", ". .\n. G", "a b\nc d"] {
            assert_eq!(Board::read(text), None, "{text:?}");
        }
    }

    #[test]
    fn every_neighbour_is_one_move_away_and_edges_hold() {
        let board = Board::new(3, vec![false; 9]);
        let around = |tile| [0, 1, 2, 3].map(|direction| board.beside(tile, direction));
        assert_eq!(around(0), [None, Some(1), Some(3), None]);
        assert_eq!(around(4), [Some(1), Some(5), Some(7), Some(3)]);
        assert_eq!(around(8), [Some(5), None, None, Some(7)]);
    }
}
