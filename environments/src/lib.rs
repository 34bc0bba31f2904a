//! Tool environments: what an episode is played in, the recorder of its trusted trace, and replay.
//!
//! Nothing here talks to a learner.
