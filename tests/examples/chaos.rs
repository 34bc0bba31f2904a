//! Kills learner and actors of the guessing demo at random instants, again and again, and says whether it made
//! a difference: `scripts/chaos`.

use std::time::{Duration, Instant};

use clap::Parser;
use tests::{
    Demo,
    chaos::{Dice, round, undisturbed},
};

/// Runs the guessing demo under a killer.
#[derive(Debug, Parser)]
struct Arguments {
    /// Runs.
    #[arg(long, default_value_t = 50)]
    rounds: u64,
    /// Kills of a run at most.
    #[arg(long, default_value_t = 6)]
    kills: u64,
    /// Optimizer steps of a run.
    #[arg(long, default_value_t = 10)]
    steps: u32,
    /// Milliseconds between two kills at most.
    #[arg(long, default_value_t = 700)]
    pause: u64,
    /// Updates that actors play ahead.
    #[arg(long, default_value_t = 0)]
    staleness: u32,
    /// Decides who is killed when.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

fn main() {
    let arguments = Arguments::parse();
    let mut demo = Demo::new(arguments.steps);
    demo.recipe["training"]["staleness"] = arguments.staleness.into();
    let quiet = undisturbed(&demo);
    println!("undisturbed: adapter {}", quiet["adapter_sha256"]);
    let mut dice = Dice(arguments.seed);
    let (mut same, mut learners, mut actors) = (0, 0, 0);
    let began = Instant::now();
    for number in 0..arguments.rounds {
        let dir = demo.dir.path().join(format!("round-{number}"));
        let pause = Duration::from_millis(arguments.pause);
        let round = round(&demo, &dir, arguments.kills, pause, &mut dice);
        let equal = round.end["adapter_sha256"] == quiet["adapter_sha256"];
        same += u64::from(equal);
        learners += round.learner_kills;
        actors += round.actor_kills;
        println!(
            "round {number}: {} learners and {} actors killed, resumed {} times, {}; {}",
            round.learner_kills,
            round.actor_kills,
            round.end["resumes"],
            if equal { "the same adapter" } else { "ANOTHER ADAPTER" },
            round.end["balance"]
        );
        let _ = std::fs::remove_dir_all(dir);
    }
    println!(
        "{same} of {} runs made the undisturbed run's adapter; {learners} learners and {actors} actors \
         killed in {:.0} s",
        arguments.rounds,
        began.elapsed().as_secs_f64()
    );
    if same < arguments.rounds {
        std::process::exit(1);
    }
}
