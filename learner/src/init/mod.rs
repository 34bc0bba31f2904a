//! `learner init`: a commented recipe to start from.

use std::{
    fs::OpenOptions,
    io::{ErrorKind, Write as _},
    path::{Path, PathBuf},
};

use clap::{Args, ValueEnum};
use protocol::Digest;
use serde_json::json;
use terminal::{Failure, print_line};

use crate::recipe::now;

/// What the recipe is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Template {
    /// Reinforcement learning of an agent that calls tools (learner train).
    Agent,
    /// Supervised rows of an image, a name and a code (learner sft).
    Vision,
    /// Rounds of PPO after those (learner ppo).
    Ppo,
    /// Supervised conversations (learner sft).
    Sft,
}

impl Template {
    fn text(self) -> &'static str {
        match self {
            Self::Agent => include_str!("agent.json"),
            Self::Vision => include_str!("vision.json"),
            Self::Ppo => include_str!("ppo.json"),
            Self::Sft => include_str!("sft.json"),
        }
    }

    /// What stands for the checkpoint until it is named.
    fn model(self) -> &'static str {
        match self {
            Self::Agent | Self::Sft => "Qwen3-0.6B",
            Self::Vision | Self::Ppo => "Qwen3.5-9B",
        }
    }
}

/// What to write, and where.
#[derive(Clone, Debug, Args)]
pub struct InitOptions {
    /// What the recipe is for.
    #[arg(value_enum)]
    pub template: Template,
    /// The file to write.
    #[arg(default_value = "recipe.json")]
    pub path: PathBuf,
    /// The model directory, written into the recipe with its SHA-256.
    #[arg(long)]
    pub model: Option<PathBuf>,
    /// The training tasks or rows, likewise.
    #[arg(long)]
    pub dataset: Option<PathBuf>,
    /// The held-out tasks or rows, likewise.
    #[arg(long)]
    pub valid: Option<PathBuf>,
    /// The adapter that `ppo` goes on from and holds to, likewise.
    #[arg(long)]
    pub adapter: Option<PathBuf>,
    /// Write over a file that exists.
    #[arg(long)]
    pub force: bool,
}

/// Writes the recipe and says what to do next.
///
/// # Errors
/// The file exists or cannot be written; what it is to name cannot be read.
pub fn run(options: &InitOptions) -> Result<(), Failure> {
    let path = &options.path;
    let text = text(options)?;
    let wrong = |error: std::io::Error| {
        let remedy = match error.kind() {
            ErrorKind::AlreadyExists => "name another file, or write over it with --force",
            ErrorKind::NotFound => "make its directory first",
            _ => "name another file",
        };
        Failure::Mistake(format!("{}: {error}; {remedy}", path.display()))
    };
    let mut open = OpenOptions::new();
    open.write(true).create(options.force).truncate(options.force).create_new(!options.force);
    open.open(path).and_then(|mut file| file.write_all(text.as_bytes())).map_err(wrong)?;
    let zeros = Digest([0; 32]).to_string();
    let mut lines = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    let todo = if lines.any(|line| line.contains(&zeros)) {
        "put in what is still zeros, then "
    } else {
        ""
    };
    print_line(&format!("{0} is written; next: {todo}learner plan {0}", path.display()));
    Ok(())
}

/// The recipe with what is named put in its places, and zeros for digests that are not known.
fn text(options: &InitOptions) -> Result<String, Failure> {
    if options.adapter.is_some() && options.template != Template::Ppo {
        return Err(Failure::Mistake("--adapter: only ppo goes on from one; leave it out".into()));
    }
    let mut text = options.template.text().to_owned();
    for (mark, key, given, example) in [
        ("MODEL", "model", &options.model, options.template.model()),
        ("DATASET", "dataset", &options.dataset, "train.jsonl"),
        ("VALID", "valid", &options.valid, "eval.jsonl"),
        ("ADAPTER", "adapter", &options.adapter, "runs/vision/adapter"),
    ] {
        let (path, sha256) = match given {
            Some(found) => {
                let sha256 = now(key, found).map_err(Failure::mistake)?.sha256;
                (from(&options.path, found)?, sha256)
            }
            None => (example.into(), Digest([0; 32])),
        };
        let frozen = json!({"path": path.to_string_lossy(), "sha256": sha256}).to_string();
        text = text.replace(&format!("\": {mark}"), &format!("\": {frozen}"));
        if mark == "VALID" && given.is_none() {
            // It may be left out, and is, until there is one.
            text = text.replace("\n  \"valid\"", "\n  // \"valid\"");
            text = text.replace("\n  \"evaluation\"", "\n  // \"evaluation\"");
        }
    }
    Ok(text)
}

/// A path that is meant from the working directory as the recipe must say it, from its own.
fn from(recipe: &Path, path: &Path) -> Result<PathBuf, Failure> {
    match recipe.parent() {
        None => Ok(path.to_owned()),
        Some(folder) if folder.as_os_str().is_empty() => Ok(path.to_owned()),
        Some(_) => std::path::absolute(path).map_err(Failure::fault),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::{Kind, PpoInputs, PpoRecipe, Recipe, SftRecipe};

    fn options(template: Template, path: PathBuf) -> InitOptions {
        InitOptions {
            template,
            path,
            model: None,
            dataset: None,
            valid: None,
            adapter: None,
            force: false,
        }
    }

    #[test]
    fn every_template_is_a_valid_recipe_of_its_kind() {
        let dir = tempfile::tempdir().expect("a directory");
        for template in Template::value_variants() {
            let path = dir.path().join(format!("{template:?}.json"));
            run(&options(*template, path.clone())).expect("written");
            let kind = Kind::of(&path).expect("JSON with comments");
            match template {
                Template::Agent => drop(Recipe::read(&path).expect("valid")),
                Template::Ppo => {
                    drop(PpoRecipe::read(&path, &PpoInputs::default()).expect("valid"));
                }
                Template::Vision | Template::Sft => drop(SftRecipe::read(&path).expect("valid")),
            }
            let expected = match template {
                Template::Agent => Kind::Online,
                Template::Ppo => Kind::Ppo,
                Template::Vision | Template::Sft => Kind::Sft,
            };
            assert_eq!(kind, expected);
        }
    }

    #[test]
    fn a_file_is_written_over_only_when_that_is_asked_for() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("recipe.json");
        std::fs::write(&path, "mine").expect("written");
        let refused = run(&options(Template::Sft, path.clone())).expect_err("it exists");
        assert!(refused.to_string().contains("--force"), "{refused}");
        assert_eq!(std::fs::read(&path).expect("there"), b"mine");
        let forced = InitOptions { force: true, ..options(Template::Sft, path.clone()) };
        run(&forced).expect("written over");
        SftRecipe::read(&path).expect("valid, and nothing of the old text is left");
    }

    #[test]
    fn what_is_named_is_frozen_as_it_is() {
        let dir = tempfile::tempdir().expect("a directory");
        let rows = dir.path().join("rows.jsonl");
        std::fs::write(&rows, "{}").expect("written");
        let path = dir.path().join("recipe.json");
        let named =
            InitOptions { dataset: Some(rows.clone()), ..options(Template::Sft, path.clone()) };
        run(&named).expect("written");
        let recipe = SftRecipe::read(&path).expect("valid");
        assert_eq!((recipe.dataset.path, recipe.dataset.sha256), (rows, Digest::of(b"{}")));
    }
}
