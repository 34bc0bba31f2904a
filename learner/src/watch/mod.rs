//! `learner watch`: a run while it runs, or afterwards: a screen on a terminal, lines elsewhere.
//!
//! It reads the run's directory and nothing else, so it can be started before the run, beside it, or on
//! another machine that sees the files, and it disturbs nobody.

mod lines;
mod screen;
mod state;

use std::{
    io::{self, IsTerminal as _},
    path::PathBuf,
    time::Duration,
};

use terminal::{Failure, Interrupt};

use self::state::State;

/// How often the files are looked at.
const LOOK: Duration = Duration::from_millis(400);

/// What the command line says.
#[derive(Clone, Debug)]
pub struct WatchOptions {
    /// The run's directory, which may not be there yet.
    pub run: PathBuf,
    /// One JSON object a line.
    pub json: bool,
}

/// Shows a run until the user leaves; where lines are written, until the run ends.
///
/// # Errors
/// The path is no directory, a file cannot be read, or the terminal fails.
pub fn watch(options: &WatchOptions, interrupt: &Interrupt) -> Result<(), Failure> {
    let state = State::new(&options.run)?;
    if !options.json && io::stdout().is_terminal() {
        screen::show(state, interrupt)
    } else {
        lines::follow(state, options.json, interrupt)
    }
}

/// Text of an episode or a peer as a terminal may be shown it: nothing in it controls anything.
fn plain(text: &str) -> String {
    let harmless = |c: char| if c.is_control() { ' ' } else { c };
    text.chars().map(harmless).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_controls_no_terminal() {
        assert_eq!(plain("a\u{1b}[2J\r\n\u{9b}1mb\u{7}"), "a [2J   1mb ");
    }
}
