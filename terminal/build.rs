//! Tells the version line which commit a build was made of.
//!
//! Release builds ask git, and are looked at again when another commit is checked out. Development builds
//! do not: each commit would have both programs, and all that is tested with them, built again.

use std::{env, path::Path, process::Command};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=ROLLCALL_COMMIT");
    let given = env::var("ROLLCALL_COMMIT").ok().filter(|commit| !commit.is_empty());
    let release = env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let build = match given.or_else(|| release.then(checked_out).flatten()) {
        Some(commit) => format!("commit {commit}"),
        None if release => String::new(),
        None => "development build".into(),
    };
    println!("cargo::rustc-env=ROLLCALL_BUILD={build}");
}

/// The commit of the checkout that this is in, if it is one.
fn checked_out() -> Option<String> {
    let commit = git(&["rev-parse", "--short=10", "HEAD"])?;
    let branch = git(&["symbolic-ref", "--quiet", "HEAD"]);
    for name in ["HEAD", "packed-refs"].into_iter().chain(branch.as_deref()) {
        let file = git(&["rev-parse", "--git-path", name]).filter(|file| Path::new(file).exists());
        if let Some(file) = file {
            println!("cargo::rerun-if-changed={file}");
        }
    }
    Some(commit)
}

fn git(arguments: &[&str]) -> Option<String> {
    let said = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(said.stdout).ok()?;
    (said.status.success() && !text.trim().is_empty()).then(|| text.trim().to_owned())
}
