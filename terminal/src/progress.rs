//! What a run shows while it runs: a progress bar on a terminal, plain lines elsewhere, one JSON
//! object a line for machines.

use std::{
    io::{self, IsTerminal as _, Write as _},
    time::Duration,
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

/// Who reads the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Audience {
    /// A person at a terminal, or reading a log.
    Person,
    /// A program: JSON lines on standard output, nothing else there.
    Machine,
    /// Nobody: another process of the same run speaks.
    Nobody,
}

/// Shows progress to one [`Audience`].
pub struct Progress {
    audience: Audience,
    bar: Option<ProgressBar>,
}

impl Progress {
    /// For `audience`, decided once.
    pub fn new(audience: Audience) -> Self {
        Self { audience, bar: None }
    }

    /// A line of news: standard error for machines, standard output for people.
    pub fn note(&self, text: &str) {
        match (&self.bar, self.audience) {
            (Some(bar), _) => bar.println(text),
            (None, Audience::Person) => print_line(text),
            (None, Audience::Machine) => drop(writeln!(io::stderr(), "{text}")),
            (None, Audience::Nobody) => {}
        }
    }

    /// Starts counting to `total` of something named `what`.
    pub fn start(&mut self, what: &str, total: u64) {
        self.end();
        if self.audience != Audience::Person || !io::stdout().is_terminal() {
            return;
        }
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stdout());
        let style = "{prefix:>8} {bar:24} {pos}/{len} {msg} [{elapsed} < {eta}]";
        if let Ok(style) = ProgressStyle::with_template(style) {
            bar.set_style(style.progress_chars("━╸ "));
        }
        bar.set_prefix(what.to_string());
        bar.enable_steady_tick(Duration::from_millis(250));
        self.bar = Some(bar);
    }

    /// Reached `position`: `line` for people, `record` for machines.
    pub fn at(&self, position: u64, line: &str, event: &str, record: &impl Serialize) {
        match (&self.bar, self.audience) {
            (Some(bar), _) => {
                bar.set_message(line.to_string());
                bar.set_position(position);
            }
            (None, Audience::Person) => print_line(line),
            (None, Audience::Machine) => self.record(event, record),
            (None, Audience::Nobody) => {}
        }
    }

    /// A position with nothing to say for people who read a log.
    pub fn tick(&self, position: u64, line: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(line.to_string());
            bar.set_position(position);
        }
    }

    /// One JSON object a line with an `event` field, for machines only.
    pub fn record(&self, event: &str, record: &impl Serialize) {
        if self.audience != Audience::Machine {
            return;
        }
        let mut object = serde_json::Map::new();
        object.insert("event".into(), event.into());
        if let Ok(serde_json::Value::Object(fields)) = serde_json::to_value(record) {
            object.extend(fields);
        }
        print_line(&serde_json::Value::Object(object).to_string());
    }

    /// Ends the current count, leaving its last state on the screen.
    pub fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.abandon();
        }
    }

    /// Whether the reader is a person.
    pub fn for_person(&self) -> bool {
        self.audience == Audience::Person
    }
}

/// A line on standard output. A reader that has gone away is no fault: a closed pipe must not end a
/// program with a panic.
pub fn print_line(text: &str) {
    let mut stdout = io::stdout().lock();
    drop(writeln!(stdout, "{text}"));
    drop(stdout.flush());
}
