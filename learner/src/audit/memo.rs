//! Remembers encoded texts: the episodes of a group share their prompt, and games say few things.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use protocol::Digest;

/// Ids that are remembered before everything is forgotten.
const CAPACITY: usize = 1 << 20;

/// A bounded map from texts to their ids. A verdict never depends on what is in it.
#[derive(Debug, Default)]
pub(super) struct Memo {
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    ids: HashMap<Digest, Arc<[u32]>>,
    size: usize,
}

impl Memo {
    /// The ids of `texts`, encoded by `encode` where they are not known.
    pub(super) fn get<E>(
        &self,
        kind: &str,
        texts: &[&str],
        encode: impl FnOnce() -> Result<Vec<u32>, E>,
    ) -> Result<Arc<[u32]>, E> {
        let parts: Vec<&[u8]> = texts.iter().map(|text| text.as_bytes()).collect();
        let key = Digest::of_parts(kind, &parts);
        let known = |memo: &Self| -> Option<Arc<[u32]>> {
            memo.known.lock().unwrap_or_else(PoisonError::into_inner).ids.get(&key).cloned()
        };
        if let Some(ids) = known(self) {
            return Ok(ids);
        }
        // Encoded without the lock: two threads may do the same work, and get the same ids.
        let ids: Arc<[u32]> = encode()?.into();
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.size.saturating_add(ids.len()) > CAPACITY {
            *known = Known::default();
        }
        if ids.len() <= CAPACITY && known.ids.insert(key, ids.clone()).is_none() {
            // An entry costs something even where it is short.
            known.size += ids.len() + 32;
        }
        Ok(ids)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn texts_are_encoded_once_and_memory_is_bounded() {
        let memo = Memo::default();
        let calls = Cell::new(0);
        let get = |kind: &str, texts: &[&str], length: usize| {
            let encode = || {
                calls.set(calls.get() + 1);
                Ok::<_, ()>(vec![0; length])
            };
            memo.get(kind, texts, encode).expect("encodes").len()
        };
        assert_eq!((get("a", &["x", "y"], 3), get("a", &["x", "y"], 9)), (3, 3));
        assert_eq!((get("a", &["xy", ""], 4), get("b", &["x", "y"], 5)), (4, 5));
        assert_eq!(calls.get(), 3);
        for i in 0..40 {
            get("c", &[&i.to_string()], CAPACITY / 10);
        }
        let known = memo.known.lock().expect("not poisoned");
        assert!(known.ids.len() < 12 && known.size <= CAPACITY + 320, "{}", known.size);
    }

    #[test]
    fn failures_are_not_remembered() {
        let memo = Memo::default();
        assert_eq!(memo.get("a", &["x"], || Err("no")).map(|ids| ids.len()), Err("no"));
        assert_eq!(memo.get("a", &["x"], || Ok::<_, &str>(vec![1])).map(|ids| ids.len()), Ok(1));
    }
}
