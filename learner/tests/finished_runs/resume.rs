//! A run whose learner ended goes on from its last commit, whatever a crash left, or says why not.

use std::{fs, path::Path};

use learner::{
    files::{Begun, Resumed, RunDirectory, begun},
    plan::Plan,
    verify::verify,
};

use crate::{bench::Bench, player::Player, tools::copy_tree};

/// A plan of the same run in another directory.
fn at(plan: &Plan, run: &Path) -> Plan {
    Plan { output: run.to_owned(), ..plan.clone() }
}

fn resume(plan: &Plan) -> Result<Resumed, String> {
    match begun(plan).map_err(|error| error.to_string())? {
        Begun::Going => RunDirectory::resume(plan).map_err(|error| error.to_string()),
        other => Err(format!("{other:?}")),
    }
}

#[test]
fn what_came_in_after_the_last_commit_is_known_and_counted_once() {
    let mut bench = Bench::new();
    let (plan, run) = Player::stop_in_the_middle(&mut bench);
    let before = fs::read(run.join("evidence.jsonl")).expect("read");
    // Lines of a step that was not committed.
    fs::write(run.join("evidence.jsonl"), [&before[..], b"{\"previous\":1}\n{"].concat())
        .expect("written");
    let metrics = fs::read(run.join("metrics.jsonl")).expect("read");
    fs::write(run.join("metrics.jsonl"), [&metrics[..], b"{}\n"].concat()).expect("written");
    fs::write(run.join("policies/.x.partial"), "torn").expect("written");
    for resumes in 1..3 {
        let Resumed { files, checkpoint, replayed } = resume(&plan).expect("resumed");
        assert_eq!((checkpoint.state.steps, checkpoint.state.rounds), (1, 1));
        assert_eq!(checkpoint.part("adapter"), Some(&b"weights"[..]));
        // A step of two groups of two, three held-out games, and the group in the middle.
        let counts = replayed.book.counts();
        assert_eq!((counts.accepted, counts.consumed), (4 + 3 + 2, 4 + 3));
        // The group before the last commit had a refusal and one taken back, and so has this one.
        assert_eq!((counts.rejected, counts.received), (4, 13));
        assert_eq!(replayed.refused_since.len(), 2);
        let balance = replayed.book.balance();
        assert!(balance.holds() && balance.ready == 2, "{balance}");
        assert_eq!(replayed.accepted.len(), 2);
        assert_eq!(files.progress().resumes, resumes);
        assert_eq!(files.progress().task_coverage.rejected_rollouts, 4);
        assert_eq!(files.progress().reward_groups.len(), 2);
        assert_eq!(fs::read(run.join("evidence.jsonl")).expect("read"), before);
        assert_eq!(fs::read(run.join("metrics.jsonl")).expect("read"), metrics);
        drop(files);
        let report = verify(&run, None).expect("a run");
        assert!(report.holds, "{report}");
    }
}

#[test]
fn a_journal_cut_at_any_byte_is_gone_on_with_or_refused_by_name() {
    let mut bench = Bench::new();
    let (plan, run) = Player::stop_in_the_middle(&mut bench);
    let journal = Path::new("journal/00000000.segment");
    let whole = fs::read(run.join(journal)).expect("read");
    let dir = tempfile::tempdir().expect("a directory");
    let copy = dir.path().join("copy");
    copy_tree(&run, &copy);
    let plan = at(&plan, &copy);
    let mut last = u64::MAX;
    let (mut gone_on, mut refused) = (0, 0);
    // Every byte of the last record and the one before it, some of the rest.
    let some = (0..whole.len()).rev().filter(|cut| cut + 400 > whole.len() || cut % 97 == 0);
    for cut in some {
        // Files of refusals whose records are gone are of no harm; the journal is what is cut.
        fs::write(copy.join(journal), &whole[..cut]).expect("written");
        let manifest = fs::read(copy.join("manifest.json")).expect("read");
        match resume(&plan) {
            Ok(Resumed { replayed, .. }) => {
                assert_eq!(replayed.commit.number, 2, "cut at {cut}");
                assert!(replayed.book.balance().holds());
                let received = replayed.book.counts().received;
                assert!(received <= last, "a shorter journal knows more");
                last = received;
                gone_on += 1;
            }
            Err(error) => {
                let named = ["00000", "checkpoint", "journal", "without a commit", "Nothing"];
                assert!(named.iter().any(|name| error.contains(name)), "cut at {cut}: {error}");
                refused += 1;
                if !copy.is_dir() {
                    copy_tree(&run, &copy);
                }
            }
        }
        fs::write(copy.join("manifest.json"), manifest).expect("written");
    }
    assert!(gone_on > 400 && refused > 100, "{gone_on} gone on with, {refused} refused");
    assert_eq!(last, 9, "what was committed is never lost");
}

#[test]
fn a_flipped_byte_anywhere_is_refused_or_cuts_off_what_was_not_acknowledged() {
    let mut bench = Bench::new();
    let (plan, run) = Player::stop_in_the_middle(&mut bench);
    let dir = tempfile::tempdir().expect("a directory");
    let copy = dir.path().join("copy");
    copy_tree(&run, &copy);
    let plan = at(&plan, &copy);
    for name in ["journal/00000000.segment", "checkpoint/00000002.checkpoint", "metrics.jsonl"] {
        let path = copy.join(name);
        let whole = fs::read(&path).expect("read");
        for at in (0..whole.len()).step_by(if name.starts_with('j') { 61 } else { 7 }) {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x20;
            fs::write(&path, bytes).expect("written");
            match resume(&plan) {
                // Only the last record can be taken for one that a crash tore.
                Ok(Resumed { replayed, .. }) => {
                    assert!(name.starts_with('j') && at + 5000 > whole.len(), "{name} byte {at}");
                    assert!(replayed.book.balance().holds());
                }
                Err(error) => assert!(error.contains(&*copy.to_string_lossy()), "{error}"),
            }
            fs::write(&path, &whole).expect("written");
        }
    }
}

#[test]
fn another_recipes_run_and_what_is_no_run_are_refused_and_an_unbegun_one_is_begun_anew() {
    let mut bench = Bench::new();
    let (plan, run) = Player::stop_in_the_middle(&mut bench);
    bench.recipe["training"]["learning_rate"] = 0.5.into();
    let dir = tempfile::tempdir().expect("a directory");
    let elsewhere = dir.path().join("new");
    let other = bench.plan_to(Some(&elsewhere)).expect("valid");
    assert!(matches!(begun(&other), Ok(Begun::Nothing)), "nothing is there");
    let error = begun(&at(&other, &run)).expect_err("refused").to_string();
    assert!(error.contains("training.learning_rate differ"), "{error}");
    assert!(error.contains("--output"), "{error}");
    fs::create_dir(&elsewhere).expect("created");
    fs::write(elsewhere.join("thesis.tex"), "precious").expect("written");
    let error = begun(&other).expect_err("refused").to_string();
    assert!(error.contains("thesis.tex is no file of a run"), "{error}");
    assert!(elsewhere.join("thesis.tex").is_file());
    fs::remove_file(elsewhere.join("thesis.tex")).expect("removed");
    assert!(matches!(begun(&other), Ok(Begun::Nothing)), "an empty directory");
    // A learner that ended before its first commit.
    drop(RunDirectory::create(&at(&plan, &elsewhere)).expect("created"));
    assert!(matches!(begun(&at(&plan, &elsewhere)), Ok(Begun::Nothing)));
    assert!(!elsewhere.exists(), "removed, to be made again");
}

#[test]
fn a_complete_run_is_told_from_one_that_goes_on() {
    let mut bench = Bench::new();
    let plan = {
        bench.recipe["training"]["max_steps"] = 2.into();
        let run = Player::finish(&mut bench);
        let elsewhere = run.with_extension("elsewhere");
        at(&bench.plan_to(Some(&elsewhere)).expect("valid"), &run)
    };
    match begun(&plan).expect("a run") {
        Begun::Complete(manifest) => assert_eq!(manifest.run, plan.run),
        other => panic!("{other:?}"),
    }
}
