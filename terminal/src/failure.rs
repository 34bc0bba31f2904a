//! How a program ends when it cannot go on: whose fault it is decides the exit status.

use std::{fmt, io, process::ExitCode};

/// What a user can do about a file that cannot be read.
pub fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => "name one that is there",
        io::ErrorKind::IsADirectory => "name a file",
        io::ErrorKind::PermissionDenied => "let this user read it",
        _ => "name another",
    }
}

/// Why the program stops.
#[derive(Debug)]
pub enum Failure {
    /// The user can mend it: a wrong path, field, device, port. Exit status 2.
    Mistake(String),
    /// Something broke while running. Exit status 1.
    Fault(String),
    /// The user asked it to stop. Exit status 130, as shells report an interrupt.
    Interrupted(String),
    /// Another process has said why: only the exit status is passed on.
    Said(u8),
}

impl Failure {
    /// A mistake, from any error that says what is wrong and what to do.
    pub fn mistake(error: impl fmt::Display) -> Self {
        Self::Mistake(error.to_string())
    }

    /// A fault, from any error.
    pub fn fault(error: impl fmt::Display) -> Self {
        Self::Fault(error.to_string())
    }

    /// The exit status.
    pub fn status(&self) -> u8 {
        match self {
            Self::Mistake(_) => 2,
            Self::Fault(_) => 1,
            Self::Interrupted(_) => 130,
            Self::Said(status) => *status,
        }
    }

    /// Prints the one line and gives the exit status.
    pub fn report(&self) -> ExitCode {
        let text = match self {
            Self::Mistake(text) | Self::Fault(text) => format!("error: {text}"),
            Self::Interrupted(text) => text.clone(),
            Self::Said(_) => return ExitCode::from(self.status()),
        };
        // One line, whatever a library put into its message.
        eprintln!("{}", text.replace('\n', " "));
        ExitCode::from(self.status())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mistake(text) | Self::Fault(text) | Self::Interrupted(text) => f.write_str(text),
            Self::Said(status) => write!(f, "exit status {status}"),
        }
    }
}

impl std::error::Error for Failure {}
