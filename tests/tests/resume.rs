//! A learner that is killed goes on where it was, with the very same command.

use std::{path::Path, process::Command, time::Duration};

use serde_json::Value;
use tests::{
    Demo, Finished,
    chaos::{Dice, round, undisturbed},
    finish, programs, start,
};

fn train(demo: &Demo, output: &Path) -> Command {
    let mut command = Command::new(&programs().learner);
    command.arg("train").arg(demo.write()).arg("--output").arg(output);
    command.args(["--device", "cpu", "--json", "--resume", "--local-actors", "1"]);
    command
}

fn last(finished: &Finished) -> Value {
    assert!(finished.status.success(), "{}{}", finished.stdout, finished.stderr);
    let line = finished.stdout.lines().last().expect("some output");
    serde_json::from_str(line).expect("JSON")
}

fn audited(run: &Path) {
    let audited = finish(start(Command::new(&programs().learner).arg("audit").arg(run)));
    assert_eq!(audited.status.code(), Some(0), "{}{}", audited.stdout, audited.stderr);
}

#[test]
fn a_learner_killed_again_and_again_makes_the_same_adapter_and_a_run_that_holds() {
    let mut demo = Demo::new(12);
    demo.recipe["evaluation"]["every"] = 2.into();
    let quiet = demo.dir.path().join("quiet");
    let undisturbed = last(&finish(start(&mut train(&demo, &quiet))));
    let run = demo.run();
    let mut kills = 0;
    for (event, after) in [("step", 3), ("evaluation", 11), ("step", 29), ("resumed", 60)] {
        let mut learner = start(&mut train(&demo, &run));
        learner.event(event);
        std::thread::sleep(Duration::from_millis(after));
        learner.child.kill().expect("it runs");
        kills += 1;
        finish(learner);
        audited(&run);
    }
    let end = last(&finish(start(&mut train(&demo, &run))));
    assert_eq!(end["adapter_sha256"], undisturbed["adapter_sha256"]);
    assert_eq!(end["balance"], undisturbed["balance"]);
    assert_eq!(end["resumes"], kills);
    for count in ["accepted", "received", "consumed", "rejected", "groups_completed"] {
        assert_eq!(end["counts"][count], undisturbed["counts"][count], "{count}");
    }
    audited(&run);
    let evidence = |dir: &Path| std::fs::read(dir.join("evidence.jsonl")).expect("there");
    assert!(evidence(&run) == evidence(&quiet), "the evidence differs");
    // Once more, as a launcher would: it is complete.
    let again = last(&finish(start(&mut train(&demo, &run))));
    assert_eq!(again["adapter_sha256"], end["adapter_sha256"]);
    assert_eq!(again["steps"], 12);
    demo.recipe["training"]["learning_rate"] = 0.5.into();
    let other = finish(start(&mut train(&demo, &run)));
    assert_eq!(other.status.code(), Some(2));
    assert!(other.stderr.contains("training.learning_rate differ"), "{}", other.stderr);
}

#[test]
fn three_runs_under_a_killer_make_the_undisturbed_adapter() {
    let demo = Demo::new(6);
    let quiet = undisturbed(&demo);
    let mut dice = Dice(7);
    for number in 0..3 {
        let dir = demo.dir.path().join(format!("round-{number}"));
        let round = round(&demo, &dir, 4, Duration::from_millis(1500), &mut dice);
        assert_eq!(round.end["adapter_sha256"], quiet["adapter_sha256"], "{round:?}");
        assert_eq!(round.end["balance"], quiet["balance"], "{round:?}");
    }
}

#[test]
fn a_run_that_plays_ahead_repeats_itself_is_audited_and_goes_on_after_a_kill() {
    let mut demo = Demo::new(7);
    demo.recipe["training"]["staleness"] = 2.into();
    demo.recipe["audit"] = serde_json::json!({"sampling": "enforce"});
    demo.recipe["evaluation"]["every"] = 3.into();
    let quiet = undisturbed(&demo);
    assert_eq!(quiet["counts"]["rejected"], 0);
    let metrics = std::fs::read_to_string(demo.dir.path().join("quiet/metrics.jsonl"));
    let lines = metrics.expect("there");
    let steps = lines.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let steps: Vec<Value> = steps.filter(|it| it["evaluation"].is_null()).collect();
    let staleness: Vec<u64> = steps.iter().filter_map(|it| it["staleness"].as_u64()).collect();
    assert_eq!(staleness, [0, 1, 2, 2, 2, 2, 2]);
    for step in &steps[1..] {
        // Nothing honest is flagged under the policy that sampled, and the weights are near 1.
        assert_eq!(step["sampling"]["flagged"], 0, "{step}");
        let mean = step["importance_mean"].as_f64().expect("a number");
        assert!((mean - 1.0).abs() < 0.1, "{step}");
    }
    assert!(steps[0].get("importance_mean").is_none(), "{}", steps[0]);
    let model = demo.recipe["model"]["path"].as_str().expect("a path").to_owned();
    let mut audit = Command::new(&programs().learner);
    audit.arg("audit").arg(demo.dir.path().join("quiet")).args(["--model", &model]);
    let audited = finish(start(audit.args(["--sampling", "24", "--device", "cpu"])));
    assert!(audited.status.success(), "{}{}", audited.stdout, audited.stderr);
    let mut dice = Dice(3);
    let dir = demo.dir.path().join("killed");
    let round = round(&demo, &dir, 5, Duration::from_millis(1500), &mut dice);
    assert_eq!(round.end["adapter_sha256"], quiet["adapter_sha256"], "{round:?}");
}

#[test]
fn an_actor_that_is_asked_to_leave_finishes_what_it_has_in_hand() {
    let demo = Demo::new(4);
    let quiet = undisturbed(&demo);
    let identity = demo.dir.path().join("identity");
    let mut learner = Command::new(&programs().learner);
    learner.arg("train").arg(demo.write()).args(["--device", "cpu", "--json", "--identity"]);
    let learner = start(learner.arg(&identity));
    learner.event("listening");
    let actor = |name: &str| {
        let mut command = Command::new(&programs().actor);
        command.args(["join", "--device", "cpu", "--slots", "4", "--join-file"]);
        command.arg(identity.join("join")).arg("--spool").arg(demo.dir.path().join(name));
        let model = demo.recipe["model"]["path"].as_str().expect("a path");
        start(command.args(["--model", model]))
    };
    let first = actor("one");
    learner.event("step");
    first.signal("TERM");
    let first = finish(first);
    assert_eq!(first.status.code(), Some(0), "{}", first.stderr);
    assert!(first.stderr.contains("0 leases went back"), "{}", first.stderr);
    let spool = std::fs::read_dir(demo.dir.path().join("one")).expect("a spool");
    let names = spool.map(|it| it.expect("an entry").file_name().to_string_lossy().into_owned());
    let left: Vec<String> = names.filter(|name| name.ends_with(".episode")).collect();
    assert!(left.is_empty(), "{left:?} are not acknowledged");
    // Its spool is another's only when it has let go of it.
    let second = actor("one");
    let end = last(&finish(learner));
    assert_eq!(finish(second).status.code(), Some(0));
    assert_eq!(end["adapter_sha256"], quiet["adapter_sha256"]);
    assert_eq!((&end["counts"]["failed"], &end["counts"]["expired"]), (&0.into(), &0.into()));
}
