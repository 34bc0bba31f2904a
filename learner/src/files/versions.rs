//! What a run was made with.

use std::{collections::BTreeMap, fs, io};

use protocol::Digest;
use sha2::{Digest as _, Sha256};

/// The lock file that this program was built from.
const LOCK: &str = include_str!("../../../Cargo.lock");

/// Crates that decide numbers, tokens or bytes.
const NAMED: [&str; 24] = [
    "actor",
    "bincode",
    "burn",
    "burn-autodiff",
    "burn-backend",
    "burn-core",
    "burn-flex",
    "burn-optim",
    "burn-store",
    "burn-tensor",
    "cubecl",
    "environments",
    "gemm",
    "half",
    "learner",
    "minijinja",
    "minijinja-contrib",
    "policy",
    "protocol",
    "pulp",
    "safetensors",
    "serde_json",
    "sha2",
    "tokenizers",
];

/// Versions of this program and of the crates that decide what it computes, by name.
pub fn dependency_versions() -> BTreeMap<String, String> {
    let mut versions: BTreeMap<String, String> = BTreeMap::new();
    for (name, version) in locked(LOCK).filter(|(name, _)| NAMED.contains(name)) {
        // A crate that is there in several versions names them all.
        let known = versions.entry(name.into()).or_default();
        let separator = if known.is_empty() { "" } else { ", " };
        *known += &format!("{separator}{version}");
    }
    versions.insert("rollcall".into(), env!("CARGO_PKG_VERSION").into());
    versions
}

/// Name and version of each package of a lock file.
fn locked(lock: &str) -> impl Iterator<Item = (&str, &str)> {
    lock.split("[[package]]").filter_map(|package| {
        let field = |key: &str| {
            let line = package.lines().find_map(|line| line.strip_prefix(key))?;
            line.strip_prefix(" = \"")?.strip_suffix('"')
        };
        Some((field("name")?, field("version")?))
    })
}

/// SHA-256 of the program's file, where the system lets it be read.
pub fn program_sha256() -> Option<Digest> {
    let mut hash = Sha256::new();
    let mut file = fs::File::open(std::env::current_exe().ok()?).ok()?;
    io::copy(&mut file, &mut hash).ok()?;
    Some(Digest(hash.finalize().into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_come_from_the_lock_file() {
        let versions = dependency_versions();
        for name in NAMED.into_iter().chain(["rollcall"]) {
            assert!(versions.contains_key(name), "{name} is not in {versions:?}");
        }
        assert!(versions["burn"].starts_with("0.22."), "{versions:?}");
    }

    #[test]
    fn the_program_has_a_digest() {
        assert!(program_sha256().is_some());
    }
}
