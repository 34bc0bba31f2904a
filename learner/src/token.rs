//! `learner token`: the join string, a new secret, and actors that are shut out.

use std::path::PathBuf;

use clap::Subcommand;
use protocol::{ActorId, Digest};
use terminal::{Failure, print_line};

use crate::keys;

/// What is done to an identity directory. A learner that uses it sees the change within a second.
#[derive(Debug, Subcommand)]
pub enum TokenCommand {
    /// Print the join string.
    Show {
        /// The directory that `learner train --identity` uses.
        identity: PathBuf,
    },
    /// Replace the join secret and print the new join string.
    ///
    /// Links that exist stay, and an actor that joined since the learner started may connect again with
    /// the secret that it has. Everybody else needs the new string.
    Rotate {
        /// The directory that `learner train --identity` uses.
        identity: PathBuf,
    },
    /// Shut an actor out, now and after every start, until its line in DIR/revoked is removed.
    ///
    /// An actor without an --identity directory is another one at each start: replace the secret too.
    Revoke {
        /// The directory that `learner train --identity` uses.
        identity: PathBuf,
        /// The actor's id, 64 hex digits: joins.jsonl of the run has it.
        actor: Digest,
    },
}

/// Carries it out.
///
/// # Errors
/// There is no identity in the directory, or a file of it cannot be read or written.
pub fn run(command: &TokenCommand) -> Result<(), Failure> {
    match command {
        TokenCommand::Show { identity } => {
            print_line(&keys::show(identity).map_err(Failure::mistake)?.reveal());
        }
        TokenCommand::Rotate { identity } => {
            match keys::rotate(identity).map_err(Failure::mistake)? {
                Some(join) => print_line(&join.reveal()),
                None => print_line(
                    "the secret is replaced; the join string is printed when a learner starts",
                ),
            }
        }
        TokenCommand::Revoke { identity, actor } => {
            let new = keys::revoke(identity, ActorId(*actor)).map_err(Failure::mistake)?;
            let word = if new { "shut out" } else { "was shut out already" };
            print_line(&format!("actor {actor} {word}"));
        }
    }
    Ok(())
}
