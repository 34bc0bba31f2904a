//! Learner and actors over a network, disks and machines that fail, a thousand times: every lease ends, every
//! answer is accounted for, what was acknowledged is never lost, nothing is trained on twice, and the last
//! policy is that of a run that nothing disturbs. The state machines, the journal and its replay, the
//! checkpoints and the spool are the real ones; planted mistakes are found.

mod disk;
mod game;
mod learner;
mod world;

use ::learner::train::intake::Flaws;
use world::{Settings, Stats, World};

fn settings(seed: u64, flaws: Flaws) -> Settings {
    Settings {
        seed,
        actors: 1 + seed as usize % 8,
        steps: 4,
        staleness: (seed / 8 % 3) as u32,
        loss: [0, 5, 20, 50][seed as usize / 3 % 4],
        duplication: [0, 10, 50][seed as usize % 3],
        mixed: seed % 5 == 4,
        flaws,
    }
}

fn simulate(seed: u64, flaws: Flaws) -> Result<Stats, String> {
    let mut world = World::new(settings(seed, flaws));
    world.run().map(|()| world.stats)
}

#[test]
fn a_thousand_bad_days_lose_nothing_and_train_nothing_twice() {
    let mut sum = Stats::default();
    for seed in 0..1000 {
        let stats = simulate(seed, Flaws::default()).unwrap_or_else(|problem| {
            panic!("seed {seed}: {problem}; {:?}", settings(seed, Flaws::default()))
        });
        sum.learner_crashes += stats.learner_crashes;
        sum.actor_crashes += stats.actor_crashes;
        sum.cuts += stats.cuts;
        sum.left += stats.left;
        sum.duplicates += stats.duplicates;
        sum.late += stats.late;
        sum.rejected += stats.rejected;
        sum.restored += stats.restored;
        sum.events += stats.events;
    }
    println!("{sum:?}");
    // They were bad.
    let counts = [sum.learner_crashes, sum.actor_crashes, sum.cuts, sum.duplicates, sum.rejected];
    assert!(counts.iter().all(|count| *count > 500), "{sum:?}");
    assert!([sum.left, sum.late, sum.restored].iter().all(|count| *count > 100), "{sum:?}");
}

#[test]
fn a_seed_decides_everything() {
    for seed in [3, 77] {
        let run = || format!("{:?}", simulate(seed, Flaws::default()));
        assert_eq!(run(), run());
    }
}

/// The first seed that finds a mistake, and what it says.
fn found(flaws: Flaws) -> (u64, String) {
    let found = (0..1000).find_map(|seed| Some((seed, simulate(seed, flaws).err()?)));
    found.expect("a thousand seeds find it")
}

#[test]
fn an_acknowledgement_before_the_sync_is_found() {
    let (seed, problem) = found(Flaws { acknowledge_before_sync: true, ..Flaws::default() });
    println!("seed {seed}: {problem}");
    assert!(problem.contains("was acknowledged, and is lost"), "{problem}");
}

#[test]
fn an_acknowledgement_of_a_copy_that_is_still_in_the_audit_is_found() {
    let (seed, problem) = found(Flaws { acknowledge_in_audit: true, ..Flaws::default() });
    println!("seed {seed}: {problem}");
    assert!(problem.contains("was acknowledged, and is lost"), "{problem}");
}

#[test]
fn a_forgotten_watermark_is_found() {
    let (seed, problem) = found(Flaws { forget_watermark: true, ..Flaws::default() });
    println!("seed {seed}: {problem}");
}
