//! The shipped recipe with a Python class is one that runs: it passes every check of a plan.

use std::{path::Path, process::Command};

use environments::Determinism;
use learner::plan::plan_inputs;

#[test]
fn a_recipe_finds_the_python_class_beside_it() {
    if Command::new("python3").arg("--version").output().is_err() {
        println!("skipped: there is no python3");
        return;
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/python-guess");
    let plan = plan_inputs(&folder.join("recipe.json")).expect("a plan");
    let environment = &plan.recipe.environment;
    let description = environment.describe().expect("opens");
    assert_eq!(description.name, "guess_game:GuessGame");
    assert_eq!(description.determinism, Determinism::Deterministic);
    assert_eq!(environment.folder(), folder.canonicalize().ok().as_deref());
    let section = environment.to_json().to_string();
    assert!(!section.contains("examples"), "where it lies is nobody's business: {section}");
}
