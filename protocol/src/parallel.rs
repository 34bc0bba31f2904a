//! Work on the chunks of an adapter by several threads: hashing and packing half a gigabyte on one
//! would hold a learner up between two steps.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

/// More do not help: memory is the limit then.
const MAX_THREADS: usize = 8;

/// Both, at the same time.
pub(crate) fn both<A: Send, B>(a: impl FnOnce() -> A + Send, b: impl FnOnce() -> B) -> (A, B) {
    thread::scope(|scope| {
        let a = scope.spawn(a);
        let b = b();
        match a.join() {
            Ok(a) => (a, b),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// `f` of each item and its index, in order.
pub(crate) fn map<T: Sync, R: Send>(items: &[T], f: impl Fn(usize, &T) -> R + Sync) -> Vec<R> {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let threads = cores.min(MAX_THREADS).min(items.len());
    if threads < 2 {
        return items.iter().enumerate().map(|(index, item)| f(index, item)).collect();
    }
    let next = AtomicUsize::new(0);
    let found = Mutex::new(Vec::with_capacity(items.len()));
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(item) = items.get(index) else { return };
                    let result = f(index, item);
                    found.lock().unwrap_or_else(PoisonError::into_inner).push((index, result));
                }
            });
        }
    });
    let mut found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    found.sort_by_key(|(index, _)| *index);
    found.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn results_stand_in_the_order_of_their_items() {
        let items: Vec<usize> = (0..1000).collect();
        let doubled = super::map(&items, |index, item| index + item);
        assert_eq!(doubled, items.iter().map(|item| 2 * item).collect::<Vec<_>>());
        assert!(super::map(&[] as &[u8], |_, item| *item).is_empty());
        assert_eq!(super::both(|| 1, || 2), (1, 2));
    }
}
