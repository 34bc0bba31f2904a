//! Who may come in: the secrets that let actors in, and the actors that are shut out.

use std::collections::{BTreeSet, HashSet, VecDeque};

use crate::{
    ActorId, Secret,
    admission::{Binding, PROOF_LEN},
};

/// Earlier secrets that are remembered, and actors that joined with them.
const MAX_EARLIER: usize = 8;
const MAX_KNOWN: usize = 1 << 14;

/// What lets actors in.
pub(super) struct Secrets {
    current: Secret,
    /// Newest last: they let in nobody new.
    earlier: VecDeque<Secret>,
    /// Actors that joined since this learner started.
    known: HashSet<ActorId>,
}

impl Secrets {
    pub(super) fn new(current: Secret) -> Self {
        Self { current, earlier: VecDeque::new(), known: HashSet::new() }
    }

    pub(super) fn current(&self) -> &Secret {
        &self.current
    }

    pub(super) fn replace(&mut self, secret: Secret) {
        if self.current == secret {
            return;
        }
        let earlier = std::mem::replace(&mut self.current, secret);
        self.earlier.push_back(earlier);
        if self.earlier.len() > MAX_EARLIER {
            self.earlier.pop_front();
        }
    }

    /// Whether a proof holds for the secret of now, or for an earlier one by an actor that joined
    /// before: a new secret keeps strangers out and turns nobody away who is at work.
    pub(super) fn hold(&self, actor: &ActorId, binding: &Binding, proof: &[u8; PROOF_LEN]) -> bool {
        let earlier = self.earlier.iter().filter(|_| self.known.contains(actor));
        earlier.chain([&self.current]).any(|secret| binding.verify(secret, proof))
    }

    pub(super) fn joined(&mut self, actor: ActorId) {
        if self.known.len() < MAX_KNOWN {
            self.known.insert(actor);
        }
    }
}

/// Who is not let in.
#[derive(Default)]
pub(super) struct ShutOut {
    /// For as long as this learner runs.
    pub(super) now: HashSet<ActorId>,
    /// By a list that somebody keeps.
    pub(super) listed: BTreeSet<ActorId>,
}

impl ShutOut {
    pub(super) fn refuses(&self, actor: &ActorId) -> bool {
        self.now.contains(actor) || self.listed.contains(actor)
    }
}
