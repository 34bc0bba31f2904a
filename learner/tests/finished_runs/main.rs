//! A run's directory is enough to verify the run, and whoever changes it is found out by name.

#[path = "../support/bench.rs"]
mod bench;
#[path = "../support/image_model.rs"]
mod image_model;
mod images;
mod player;
mod resume;
#[path = "../support/mod.rs"]
mod support;
mod tampering;
mod tools;

use std::{fs, path::Path};

use bench::Bench;
use learner::{
    files::{Status, read_manifest},
    verify::{Archive, CheckName, Report, verify},
};
use player::Player;
use protocol::{Digest, Episode, EpisodeId, PolicyDigest};
use serde_json::json;
use tampering::TAMPERINGS;
use tools::{copy_tree, manifest};

fn audit(run: &Path) -> Report {
    verify(run, None).expect("a run")
}

fn reasons(report: &Report) -> Vec<&'static str> {
    report.findings().map(|finding| finding.reason).collect()
}

#[test]
fn an_untouched_run_holds_with_and_without_its_data_and_model() {
    let mut bench = Bench::new();
    let run = Player::finish(&mut bench);
    let report = verify(&run, Some(&bench.path("model"))).expect("a run");
    assert!(report.holds, "{report}");
    // Scoring again needs weights, and is asked for apart.
    let made: Vec<CheckName> = report.checks.iter().map(|check| check.name).collect();
    let all = CheckName::ALL.into_iter().filter(|name| *name != CheckName::Sampling);
    assert_eq!(made, all.collect::<Vec<_>>());
    assert!(report.summary().ends_with("holds: 13 of 13 checks"), "{}", report.summary());
    let text = report.to_string();
    assert!(text.contains("14 episodes accepted, 2 refused"), "{text}");
    assert!(text.contains("tasks by the data sets"), "{text}");
    // Elsewhere, long after: only the directory is there.
    let elsewhere = tempfile::tempdir().expect("a directory");
    let copy = elsewhere.path().join("copy");
    copy_tree(&run, &copy);
    drop(bench);
    let report = audit(&copy);
    assert!(report.holds, "{report}");
    assert!(report.to_string().contains("order of tasks only"), "{report}");
}

#[test]
fn a_run_that_was_killed_holds_as_far_as_it_came() {
    let mut bench = Bench::new();
    let player = Player::play(&mut bench);
    let run = player.files.path().to_owned();
    drop(player);
    let segment = run.join("journal/00000000.segment");
    let mut bytes = fs::read(&segment).expect("read");
    bytes.extend_from_slice(&[7; 5]);
    fs::write(&segment, &bytes).expect("written");
    let mut evidence = fs::read(run.join("evidence.jsonl")).expect("read");
    evidence.extend_from_slice(b"{\"previous\":\"to");
    fs::write(run.join("evidence.jsonl"), evidence).expect("written");
    assert_eq!(read_manifest(&run).expect("there").status, Status::Running);
    let report = audit(&run);
    assert!(report.holds, "{report}");
    assert!(report.to_string().contains("torn record"), "{report}");
}

#[test]
fn episodes_and_adapters_can_be_taken_out_again() {
    let mut bench = Bench::new();
    let run = Player::finish(&mut bench);
    let archive = Archive::open(&run).expect("a run");
    let chosen = archive.choose(5, 7);
    assert_eq!((archive.episodes().len(), chosen.len()), (14, 5));
    assert_eq!(chosen, archive.choose(5, 7));
    assert_ne!(chosen, archive.choose(5, 8));
    assert_eq!(archive.choose(99, 0).len(), 14);
    for id in chosen {
        let taken = archive.episode(&id).expect("there");
        let episode = Episode::decode(&taken.body).expect("an episode");
        assert_eq!((episode.lease, episode.policy), (taken.lease.id, taken.lease.policy));
        assert_eq!(archive.lease_of(&id), Some(episode.lease));
        let bytes = archive.adapter_bytes(&taken.lease.policy).expect("archived");
        let base = archive.manifest().model.weights_sha256;
        assert_eq!(PolicyDigest::new(&base, &Digest::of(&bytes)), episode.policy);
    }
    let unknown = EpisodeId(Digest::of(b"unknown"));
    assert!(archive.episode(&unknown).is_err());
}

#[test]
fn without_room_in_the_archive_the_audit_says_what_it_lacks() {
    let mut bench = Bench::new();
    bench.recipe["evidence"] = json!({"archive_mib": 0});
    let run = Player::finish(&mut bench);
    let report = audit(&run);
    assert!(report.holds, "{report}");
    assert!(report.to_string().contains("3 policies that played are not archived"), "{report}");
    let policies = read_manifest(&run).expect("there").progress.expect("it ran").policies;
    assert_eq!((policies.announced, policies.archived, policies.bytes), (3, 0, 0));
    let archive = Archive::open(&run).expect("a run");
    let lease = archive.episode(&archive.choose(1, 0)[0]).expect("there").lease;
    // The last adapter is saved in any case.
    if let Err(error) = archive.adapter_bytes(&lease.policy) {
        assert!(error.to_string().contains("evidence.archive_mib"), "{error}");
    }
}

#[test]
fn what_is_no_run_is_a_mistake() {
    let dir = tempfile::tempdir().expect("a directory");
    let error = verify(dir.path(), None).expect_err("refused").to_string();
    assert!(error.contains("is no run: manifest.json cannot be read"), "{error}");
    let mut bench = Bench::new();
    let run = Player::finish(&mut bench);
    let error = verify(&run, Some(dir.path())).expect_err("refused").to_string();
    assert!(error.starts_with("--model "), "{error}");
}

#[test]
fn every_tampering_is_found_under_its_own_name() {
    let mut bench = Bench::new();
    let run = Player::finish(&mut bench);
    let mut wrong = Vec::new();
    for (index, (what, tamper, reason)) in TAMPERINGS.iter().enumerate() {
        let copy = bench.path(&format!("tampered-{index}"));
        copy_tree(&run, &copy);
        tamper(&copy);
        let report = audit(&copy);
        let found = reasons(&report);
        if report.holds || !found.contains(reason) {
            wrong.push(format!("{what}: {found:?}, not {reason}\n{report}"));
        }
        for finding in report.findings() {
            let line = format!("{}: {}", finding.place, finding.problem);
            assert!(!line.contains('\n') && line.len() < 600, "{what}: {line}");
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn an_unreadable_field_of_the_manifest_is_named() {
    let mut bench = Bench::new();
    let run = Player::finish(&mut bench);
    manifest(&run, |it| it["policies"]["bytes"] = json!("many"));
    let text = audit(&run).to_string();
    assert!(text.contains("policies: invalid type: string"), "{text}");
}

#[test]
fn code_that_a_run_names_is_not_run_and_the_audit_says_where_it_lay() {
    let mut bench = Bench::new();
    let run = Player::finish(&mut bench);
    let (code, left) = (bench.path("game.py"), bench.path("it ran"));
    fs::write(&code, format!("open({:?}, 'w')", left.display().to_string())).expect("written");
    let recipe = bench.path("recipe.json");
    manifest(&run, |it| {
        it["settings"]["environment"] = json!({"python": "game:Game"});
        it["recipe"]["path"] = json!(recipe);
    });
    let text = audit(&run).to_string();
    let folder = code.parent().expect("a folder").display().to_string();
    let remedy = format!(
        "its recipe lay in {folder}: to run what is there now, set ROLLCALL_ENVIRONMENTS to that"
    );
    assert!(text.contains(&remedy), "{text}");
    assert!(!left.exists(), "whoever audits has not said that it may");
}

#[test]
fn totals_that_were_edited_are_found_by_field() {
    let mut bench = Bench::new();
    let run = Player::finish(&mut bench);
    for (index, (pointer, value)) in [
        ("/task_coverage/total_rollouts", json!(99)),
        ("/task_coverage/rejected_rollouts", json!(0)),
        ("/task_coverage/consumed_unique_task_ids", json!(["task"])),
        ("/update_evidence/changed_trainable_tensors", json!(0)),
        ("/update_evidence/max_abs_parameter_delta", json!(0.0)),
        ("/update_evidence/nonzero_gradient_steps", json!(1)),
        ("/reward_groups/0/rewards/1", json!(1.0)),
        ("/rejections", json!({})),
        ("/leases/accepted", json!(13)),
        ("/leases/rejected", json!(0)),
        ("/evaluation/after/success", json!(0.99)),
        ("/steps", json!(3)),
        ("/best_adapter/success", json!(0.99)),
        ("/last_adapter/step", json!(1)),
        ("/policies/archived", json!(2)),
        ("/policy_format/stop_ids", json!([1])),
        ("/environment/version", json!("9")),
        ("/model/sha256", json!(Digest::of(b"other"))),
        ("/reward_protocol/formula", json!("1")),
    ]
    .into_iter()
    .enumerate()
    {
        let copy = bench.path(&format!("edited-{index}"));
        copy_tree(&run, &copy);
        manifest(&copy, |it| *it.pointer_mut(pointer).expect("a field") = value);
        let report = audit(&copy);
        let field = pointer.trim_start_matches('/').split('/').next().expect("a field");
        let named = report.findings().any(|it| it.place.contains(field) || it.place == field);
        assert!(!report.holds && named, "{pointer}: {report}");
    }
}
