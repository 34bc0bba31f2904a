//! What the two programs do alike with their command lines: mistakes in one line, the version line,
//! completions for shells, manual pages.

use std::{fs, io, path::Path};

use clap::{Command, Parser, error::ErrorKind};
use clap_complete::Shell;

use crate::{Failure, print_line};

/// Reads the command line. `--help` and `--version` print and end the process.
///
/// # Errors
/// A mistake, as one line where clap has several.
pub fn arguments<C: Parser>() -> Result<C, Failure> {
    C::try_parse().map_err(|error| match error.kind() {
        ErrorKind::DisplayHelp
        | ErrorKind::DisplayVersion
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => error.exit(),
        _ => Failure::Mistake(one_line(&error.render().to_string())),
    })
}

/// Clap's message without its label: what stands on lines of its own, one after the other.
fn one_line(message: &str) -> String {
    let lines = message.lines().map(str::trim).filter(|line| !line.is_empty());
    let mut said = String::new();
    for line in lines {
        let line = line.strip_prefix("error: ").unwrap_or(line);
        let line = line.strip_prefix("For more information, ").unwrap_or(line);
        let joint = match said.chars().last() {
            None => "",
            Some(':') => " ",
            Some(_) => "; ",
        };
        said.push_str(joint);
        said.push_str(line.strip_suffix('.').unwrap_or(line));
    }
    said
}

/// `0.1.0 (commit abc1234, features: cpu, cuda)`: the release, the commit of a release build, and of the
/// features those that are on; `cpu` always is.
pub fn version(features: &[(&str, bool)]) -> String {
    let on = features.iter().filter(|(_, on)| *on).map(|(name, _)| *name);
    let names: Vec<&str> = std::iter::once("cpu").chain(on).collect();
    let (release, build) = (env!("CARGO_PKG_VERSION"), env!("ROLLCALL_BUILD"));
    let joint = if build.is_empty() { "" } else { ", " };
    format!("{release} ({build}{joint}features: {})", names.join(", "))
}

/// Prints a shell's completions of the program that is called `name`.
pub fn print_completions(command: Command, name: &str, shell: Shell) {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut command.display_name(name), name, &mut text);
    print_line(String::from_utf8_lossy(&text).trim_end());
}

/// Writes the manual pages of the program that is called `name` and of each of its commands.
///
/// # Errors
/// The folder or a page cannot be written.
pub fn write_manual(command: Command, name: &'static str, folder: &Path) -> Result<(), Failure> {
    let wrong = |error: io::Error| {
        Failure::Mistake(format!(
            "{}: {error}; name a folder that can be written",
            folder.display()
        ))
    };
    fs::create_dir_all(folder).map_err(wrong)?;
    clap_mangen::generate_to(command.display_name(name), folder).map_err(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Parser)]
    #[command(name = "program", display_name = "rollcall")]
    struct Cli {
        file: std::path::PathBuf,
        #[arg(long, value_parser = ["a", "b"])]
        device: Option<String>,
    }

    fn said(arguments: &[&str]) -> String {
        one_line(&Cli::try_parse_from(arguments).expect_err("refused").render().to_string())
    }

    #[test]
    fn a_mistake_in_arguments_is_one_line_with_a_remedy() {
        assert_eq!(
            said(&["program"]),
            "the following required arguments were not provided: <FILE>; Usage: program <FILE>; try '--help'"
        );
        assert_eq!(
            said(&["program", "f", "--device", "c"]),
            "invalid value 'c' for '--device <DEVICE>'; [possible values: a, b]; try '--help'"
        );
        let misspelt = said(&["program", "f", "--devise", "a"]);
        assert!(misspelt.contains("'--device'") && !misspelt.contains('\n'), "{misspelt}");
    }

    #[test]
    fn a_version_names_what_is_built_in() {
        let said = version(&[("cuda", true), ("nccl", false)]);
        assert!(said.starts_with("0.1.0 (") && said.ends_with(" features: cpu, cuda)"), "{said}");
    }

    #[test]
    fn there_is_a_page_for_the_program_under_its_own_name() {
        use clap::CommandFactory as _;
        let dir = tempfile::tempdir().expect("a folder");
        write_manual(Cli::command(), "program", dir.path()).expect("written");
        let page = fs::read_to_string(dir.path().join("program.1")).expect("a page");
        assert!(page.contains("device"), "{page}");
    }
}
