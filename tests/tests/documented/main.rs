//! Every command line in the README, the docs and the programs' own help holds what it promises. Those of
//! `learner` and `actor` are run, in the order of the pages, on the demos cut down to a step; blocks that need
//! more are marked with it, as `<!-- needs: gpu -->` on the line before, and are read as the programs would read
//! them. Scripts, tests and examples that are named must be there.

mod blocks;
mod desk;

use std::{collections::BTreeSet, fs, path::Path};

use clap::{Command as Cli, CommandFactory as _, error::ErrorKind};
use tests::workspace;

use self::{
    blocks::{Block, after, commands, plain, read},
    desk::Desk,
};

/// What a block may need that a test does not have.
const NEEDS: [&str; 6] = ["build", "docker", "files", "gpu", "machines", "server"];

/// The command line of a program, from its own definition.
fn program(word: &str) -> Option<(&'static str, Cli)> {
    match word.rsplit('/').next() {
        Some("learner") => Some(("learner", learner::cli::Cli::command())),
        Some("actor") => Some(("actor", actor::cli::Cli::command())),
        _ => None,
    }
}

/// Whether a program would take these words.
fn parses(place: &str, words: &[String]) {
    let Some((name, cli)) = words.first().and_then(|word| program(word)) else { return };
    if let Err(error) = cli.try_get_matches_from(words) {
        let shown = [ErrorKind::DisplayHelp, ErrorKind::DisplayVersion];
        assert!(shown.contains(&error.kind()), "{place}: {name} refuses {words:?}: {error}");
    }
}

/// Cargo's packages, examples, tests, benches and features, and scripts, are those of the workspace.
fn is_there(place: &str, words: &[String]) {
    let root = workspace();
    let exists = |path: &str| assert!(root.join(path).exists(), "{place}: there is no {path}");
    match words.first().map(String::as_str) {
        Some("cargo") => {
            let package = after(words, "-p").or_else(|| after(words, "--path"));
            if let Some(package) = package {
                exists(&format!("{package}/Cargo.toml"));
                for (flag, folder) in
                    [("--example", "examples"), ("--test", "tests"), ("--bench", "benches")]
                {
                    let Some(target) = after(words, flag) else { continue };
                    let file = format!("{package}/{folder}/{target}.rs");
                    let folder = format!("{package}/{folder}/{target}/main.rs");
                    let found = [&file, &folder].into_iter().any(|path| root.join(path).exists());
                    assert!(found, "{place}: there is no {file}");
                }
            }
            for feature in after(words, "--features").into_iter().flat_map(|it| it.split(',')) {
                let (package, feature) = match (feature.split_once('/'), package) {
                    (Some(named), _) => named,
                    (None, Some(package)) => (package, feature),
                    (None, None) => panic!("{place}: the feature {feature} of no package"),
                };
                let manifest = fs::read_to_string(root.join(package).join("Cargo.toml"));
                let manifest = manifest.expect("a manifest");
                let line = format!("\n{feature} = [");
                assert!(manifest.contains(&line), "{place}: {package} has no feature {feature}");
            }
        }
        Some("python3" | "python" | "bash" | "sh" | "sbatch" | "kubectl" | "torchrun") => {
            for word in words.iter().skip(1).filter(|word| word.starts_with("scripts/")) {
                exists(word);
            }
        }
        Some(script) if script.starts_with("scripts/") => exists(script),
        Some("git" | "docker" | "export" | "cd" | "pip" | "tensorboard") | None => {}
        Some(other) => panic!("{place}: nothing here knows {other:?}"),
    }
}

/// The pages in reading order, which is that of the index: each with its text.
fn pages() -> Vec<(String, String)> {
    let index = fs::read_to_string(workspace().join("docs/README.md")).expect("an index");
    let links = index.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let pages = links.filter(|link| link.ends_with(".md") && !link.contains('/'));
    let mut names = vec!["README.md".to_owned(), "docs/README.md".to_owned()];
    names.extend(pages.map(|name| format!("docs/{name}")));
    names.push("CONTRIBUTING.md".to_owned());
    let text = |name: &String| fs::read_to_string(workspace().join(name));
    let read = |name: String| {
        let text = text(&name).unwrap_or_else(|error| panic!("{name}: {error}"));
        (name, text)
    };
    names.into_iter().map(read).collect()
}

#[test]
fn every_page_is_in_the_index() {
    let listed: BTreeSet<String> = pages().into_iter().map(|(name, _)| name).collect();
    for entry in fs::read_dir(workspace().join("docs")).expect("docs") {
        let name = format!("docs/{}", entry.expect("an entry").file_name().to_string_lossy());
        assert!(!name.ends_with(".md") || listed.contains(&name), "docs/README.md has no {name}");
    }
}

#[test]
fn every_link_between_pages_leads_somewhere() {
    for (name, text) in pages() {
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let file = link.split('#').next().unwrap_or_default();
            if file.is_empty() || link.contains("://") {
                continue;
            }
            let target = workspace().join(&name).with_file_name(file);
            assert!(target.exists(), "{name} links to {link}");
            let Some((_, anchor)) = link.split_once('#') else { continue };
            let text = fs::read_to_string(&target).expect("a page");
            let headings = text.lines().filter(|line| line.starts_with('#')).map(anchor_of);
            assert!(headings.into_iter().any(|it| it == anchor), "{name} links to {link}");
        }
    }
}

/// As GitHub makes them.
fn anchor_of(heading: &str) -> String {
    let text = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = text.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[test]
fn what_pages_and_help_name_is_there_and_parses() {
    for (name, text) in pages() {
        let (blocks, spans) = read(&name, &text);
        for block in &blocks {
            for need in block.needs.iter().flat_map(|it| it.split(',')) {
                let need = need.trim();
                assert!(NEEDS.contains(&need), "{}: {need:?} is no need", block.place);
            }
            for words in commands(block) {
                let (_, words) = plain(&words);
                match words.first().and_then(|word| program(word)) {
                    Some(_) => parses(&block.place, &words),
                    None => is_there(&block.place, &words),
                }
            }
        }
        for (place, span) in spans {
            let first = span.split_whitespace().next().unwrap_or_default();
            let (words, many) = (shlex::split(&span), span.contains(' '));
            let Some(words) = words.filter(|_| many) else { continue };
            if first == "cargo" || first.starts_with("scripts/") {
                is_there(&place, &words);
            }
            if let Some((_, cli)) = program(first) {
                names_what_is_there(&place, &cli, &words[1..]);
            }
        }
    }
    for cli in [learner::cli::Cli::command(), actor::cli::Cli::command()] {
        help_parses(&cli);
    }
}

/// The commands and options that a code span names, whose other words may stand for something.
fn names_what_is_there(place: &str, cli: &Cli, words: &[String]) {
    let mut cli = cli;
    for word in words {
        let word = word.trim_end_matches(['.', ',', '…']);
        if let Some(flag) = word.strip_prefix("--") {
            let flag = flag.split('=').next().unwrap_or_default();
            let known = cli.get_arguments().any(|it| it.get_long() == Some(flag));
            let known = known || ["", "help", "version"].contains(&flag);
            assert!(known, "{place}: {} has no --{flag}", cli.get_name());
        } else if let Some(found) = cli.find_subcommand(word) {
            cli = found;
        } else {
            let whole = !cli.has_subcommands() || word.chars().any(|c| !c.is_ascii_lowercase());
            assert!(whole, "{place}: {} has no command {word}", cli.get_name());
        }
    }
}

/// The examples at the end of `--help`, of a program and each of its commands.
fn help_parses(cli: &Cli) {
    let help = cli.get_after_help().unwrap_or_else(|| panic!("{}: no examples", cli.get_name()));
    let lines: Vec<String> = help.to_string().lines().skip(1).map(str::to_owned).collect();
    assert!(!lines.is_empty(), "{}", cli.get_name());
    let block = Block { place: format!("{} --help", cli.get_name()), needs: None, lines };
    for words in commands(&block) {
        let (_, words) = plain(&words);
        assert!(program(&words[0]).is_some(), "{}: {words:?}", block.place);
        parses(&block.place, &words);
    }
    let commands = cli.get_subcommands().filter(|it| it.get_name() != "help");
    for command in commands {
        if cli.get_name() != "token" {
            help_parses(command);
        }
    }
}

#[test]
fn every_command_line_that_needs_nothing_runs() {
    let desk = Desk::set_up();
    for (name, text) in pages() {
        let (blocks, _) = read(&name, &text);
        for block in blocks.iter().filter(|block| block.needs.is_none()) {
            for words in commands(block) {
                let (variables, words) = plain(&words);
                desk.run(&block.place, variables, &words);
            }
        }
    }
}

/// The sources of the programs as one text, with the line breaks of long literals taken out.
fn sources() -> String {
    fn walk(folder: &Path, all: &mut String) {
        for entry in fs::read_dir(folder).expect("a folder").filter_map(Result::ok) {
            let path = entry.path();
            if path.is_dir() {
                walk(&path, all);
            } else if path.extension().is_some_and(|it| it == "rs") {
                all.push_str(&fs::read_to_string(path).expect("a source"));
            }
        }
    }
    let mut all = String::new();
    for package in ["terminal", "protocol", "environments", "policy", "actor", "learner"] {
        walk(&workspace().join(package).join("src"), &mut all);
    }
    let mut joined = String::with_capacity(all.len());
    let mut rest = all.as_str();
    while let Some((before, after)) = rest.split_once("\\\n") {
        joined.push_str(before);
        rest = after.trim_start();
    }
    joined + rest
}

#[test]
fn every_message_of_the_troubleshooting_page_is_one_of_the_programs() {
    let text = fs::read_to_string(workspace().join("docs/troubleshooting.md")).expect("the page");
    let sources = sources();
    let mut messages = 0;
    for line in text.lines().filter_map(|line| line.strip_prefix("| `")) {
        let message = line.split('`').next().unwrap_or_default();
        let parts = message.split('…').map(|part| part.trim_matches([' ', ';', ':', '.', ',']));
        let parts: Vec<&str> = parts.filter(|part| part.len() > 3).collect();
        // Names of metrics and of settings are no messages.
        if !message.contains(' ') || message.ends_with("near 0") {
            continue;
        }
        assert!(!parts.is_empty(), "{message}");
        for part in parts {
            assert!(sources.contains(part), "no program says {part:?} ({message})");
        }
        messages += 1;
    }
    assert!(messages > 30, "{messages}");
}
