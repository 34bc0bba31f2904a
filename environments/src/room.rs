//! Servers that play so many episodes and no more: how many this program has there, and how one without room
//! is asked again.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crate::Fault;

/// The first pause before a server without room is asked again, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// Counts the sessions that this program has on a server.
#[derive(Debug, Default)]
pub(crate) struct Room(Arc<AtomicU64>);

/// Stands for one of these sessions while it lives.
#[derive(Debug)]
pub(crate) struct Place(Arc<AtomicU64>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Room {
    /// What `ask` gives, asked again with growing pauses while it says (as the inner error) that the server
    /// has no room. Who plays `beside` sessions of this program that do not end before it is not kept waiting
    /// for them.
    ///
    /// # Errors
    /// A fault of `ask`'s, or that there was no room for all of `patience`.
    pub(crate) fn find<T>(
        &self,
        name: &str,
        patience: Duration,
        beside: bool,
        mut ask: impl FnMut() -> Result<Result<T, String>, Fault>,
    ) -> Result<(T, Place), Fault> {
        let since = Instant::now();
        let (mut pause, longest) = PAUSES;
        loop {
            let others = self.0.fetch_add(1, Ordering::Relaxed);
            let place = Place(self.0.clone());
            let what = match ask()? {
                Ok(found) => return Ok((found, place)),
                Err(what) => what,
            };
            drop(place);
            let waited = since.elapsed();
            // Who is in its own way would wait for itself.
            if (beside && others > 0) || waited >= patience {
                let what = format!("{what}, and did so for {} s", waited.as_secs());
                return Err(Fault::Busy { environment: name.into(), what });
            }
            thread::sleep(pause);
            pause = (pause * 2).min(longest);
        }
    }
}
