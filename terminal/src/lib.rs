//! What the two programs share at the terminal: how they fail, how they are interrupted, and how they
//! show progress.

mod failure;
mod interrupt;
mod progress;

pub use failure::Failure;
pub use interrupt::Interrupt;
pub use progress::{Audience, Progress, print_line};
