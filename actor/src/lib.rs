//! The rollout actor: plays leased episodes and sends them to the learner. Knows no optimizer.
