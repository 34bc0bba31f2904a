//! What the two programs share towards whoever runs them: how they fail, how they are interrupted, how
//! they show progress, and how they serve metrics.

mod exposition;
mod failure;
mod interrupt;
mod progress;

pub use exposition::{metrics_address, serve_metrics};
pub use failure::Failure;
pub use interrupt::Interrupt;
pub use progress::{Audience, Progress, print_line};
