//! The audit ladder: no token is learned from before it has answered for itself.
//!
//! An audit is a pure function of the run's [`Auditor`], what the lease book says about the lease, and
//! the episode's bytes. It runs the same at ingest, in tests, and later from a run's directory. The
//! rungs are tried in order and the first that fails refuses the episode with a [`Reason`] of its own:
//!
//! 1. `frame`: limits, schema, hash. 2. `lease`: known, unspent, same task, seed and policy.
//! 3. `tokens`: the learner renders the prompt and encodes every external text itself. 4. `calls`:
//!    the trace's calls are what the sampled ids say, and the episode's rules were kept. 5. `trace`:
//!    chain, milestones and flags. 6. `replay`: deterministic environments are played again.
//! 7. `reward`: recomputed; the actor's number is compared, never used. 8. `group`: the rollouts
//!    that are compared belong together.
//!
//! Each of these is exact: an honest episode never fails. The ninth, [`sampling`], is statistical
//! and is climbed in the scoring pass, where the policy's logits are.

mod auditor;
mod calls;
mod frame;
mod group;
mod lease;
mod memo;
mod pool;
mod reason;
mod replay;
mod report;
mod reward;
pub mod sampling;
mod tokens;
mod trace;

pub use auditor::{AuditTerms, Audited, Auditor, Presented, Rejected};
pub use group::check_group;
pub use pool::{AuditPool, Judged, Submitted};
pub use reason::{Reason, RungName};
pub use report::{PolicyAudit, SpanReport};
