//! A collective of one's own: ranks that are threads of one process and meet at a barrier. What a run of
//! several devices in one process would start from.
//!
//! ```text
//! cargo run -p learner --example own_collective
//! ```

use std::{
    sync::{Arc, Barrier, Mutex, PoisonError},
    thread,
};

use learner::ranks::{Collective, RankError};

/// What the ranks share: everybody's bytes of the operation under way.
struct Board {
    slots: Mutex<Vec<Vec<u8>>>,
    barrier: Barrier,
}

/// One of the threads.
struct Thread {
    rank: usize,
    world: usize,
    board: Arc<Board>,
}

impl Thread {
    /// As many ranks as threads, which must all be used.
    fn of(world: usize) -> Vec<Self> {
        let slots = Mutex::new(vec![Vec::new(); world]);
        let board = Arc::new(Board { slots, barrier: Barrier::new(world) });
        (0..world).map(|rank| Self { rank, world, board: board.clone() }).collect()
    }
}

impl Collective for Thread {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.world
    }

    fn all_gather(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, RankError> {
        let slots = || self.board.slots.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(slot) = slots().get_mut(self.rank) {
            *slot = bytes.to_vec();
        }
        self.board.barrier.wait();
        let all = slots().clone();
        // Nobody writes the next operation's bytes before all have read these.
        self.board.barrier.wait();
        Ok(all)
    }

    fn all_reduce(&mut self, values: &mut [f32]) -> Result<(), RankError> {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        values.fill(0.0);
        for theirs in self.all_gather(&bytes)? {
            let (floats, _) = theirs.as_chunks::<4>();
            for (sum, value) in values.iter_mut().zip(floats) {
                *sum += f32::from_le_bytes(*value);
            }
        }
        Ok(())
    }

    fn all_reduce_wide(&mut self, values: &mut [f64]) -> Result<(), RankError> {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        values.fill(0.0);
        for theirs in self.all_gather(&bytes)? {
            let (floats, _) = theirs.as_chunks::<8>();
            for (sum, value) in values.iter_mut().zip(floats) {
                *sum += f64::from_le_bytes(*value);
            }
        }
        Ok(())
    }

    fn broadcast(&mut self, bytes: &mut Vec<u8>) -> Result<(), RankError> {
        *bytes = self.all_gather(bytes)?.swap_remove(0);
        Ok(())
    }
}

fn main() -> Result<(), RankError> {
    let ranks = Thread::of(3).into_iter().map(|mut rank| {
        thread::spawn(move || {
            let mut gradients = [1.0, rank.rank() as f32];
            rank.all_reduce(&mut gradients)?;
            let mut word = if rank.rank() == 0 { b"stop".to_vec() } else { Vec::new() };
            rank.broadcast(&mut word)?;
            Ok::<_, RankError>((gradients, word))
        })
    });
    let ranks: Vec<_> = ranks.collect();
    for (rank, thread) in ranks.into_iter().enumerate() {
        let Ok(result) = thread.join() else { continue };
        let (gradients, word) = result?;
        assert_eq!((gradients, word.as_slice()), ([3.0, 3.0], &b"stop"[..]));
        println!("rank {rank}: sums {gradients:?}, told {:?}", String::from_utf8_lossy(&word));
    }
    Ok(())
}
