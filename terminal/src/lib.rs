//! What the two programs share towards whoever runs them: how they fail, how they are interrupted, how
//! they show progress, how they serve metrics, and what they make of their command lines.

mod command_line;
mod exposition;
mod failure;
mod interrupt;
mod progress;

pub use clap_complete::Shell;
pub use command_line::{arguments, print_completions, version, write_manual};
pub use exposition::{metrics_address, serve_metrics};
pub use failure::{Failure, remedy};
pub use interrupt::Interrupt;
pub use progress::{Audience, Progress, print_line};
