//! How long a broadcast takes when actors pass verified chunks on, against the learner serving all: a
//! model of links and chunks, and the closed formula beside it.
//!
//! `cargo run -p protocol --example relay_tree`
//!
//! Every machine has one network port that sends and one that receives, of the same speed. An adapter
//! is cut into chunks; a machine passes a chunk on when it has all of it, to one child after the
//! other. In the star the learner is everybody's parent. The k-ary tree is filled level by level: actor
//! i fetches from actor i / k - 1, the first k from the learner. The simulation counts each chunk's
//! way; the formula is bytes × children / speed for the learner, and for each further level the time
//! that a chunk takes to all children.

const CHUNK: f64 = 4.0 * 1024.0 * 1024.0;

/// Seconds until the last actor has every chunk. `parent(i)` is the parent of actor i, if it is not
/// the learner.
fn simulate(
    actors: usize,
    bytes: f64,
    speed: f64,
    latency: f64,
    parent: impl Fn(usize) -> Option<usize>,
) -> f64 {
    let chunks = (bytes / CHUNK).ceil() as usize;
    let chunk = bytes / chunks as f64;
    let mut children = vec![Vec::new(); actors + 1];
    for actor in 0..actors {
        children[parent(actor).map_or(0, |it| it + 1)].push(actor + 1);
    }
    // When each machine has each chunk; the learner has all from the start.
    let mut has = vec![vec![0.0_f64; chunks]; actors + 1];
    // Parents come before their children.
    for machine in 0..=actors {
        let mut sent = 0.0_f64;
        let mut received = vec![0.0_f64; children[machine].len()];
        let here = has[machine].clone();
        for (index, ready) in here.into_iter().enumerate() {
            for (at, child) in children[machine].iter().enumerate() {
                // The sender's port is free, the chunk is here, and the child's port is free.
                let start = sent.max(ready).max(received[at] - chunk / speed);
                sent = start + chunk / speed;
                received[at] = sent;
                has[*child][index] = sent + latency;
            }
        }
    }
    has.iter().flatten().copied().fold(0.0, f64::max)
}

fn main() {
    let speed = 10e9 / 8.0;
    let latency = 0.5e-3;
    println!("10 Gb/s ports, {} ms a hop; seconds until the last actor has it", latency * 1e3);
    println!(
        "{:>7} {:>9} {:>6} {:>10} {:>10}",
        "actors", "MB sent", "tree", "simulated", "formula"
    );
    for actors in [100_usize, 1000] {
        // A 100 MB adapter whole, and as a delta of 15 %.
        for megabytes in [100.0, 15.0] {
            let bytes = megabytes * 1e6;
            let chunks = (bytes / CHUNK).ceil();
            let star = simulate(actors, bytes, speed, latency, |_| None);
            let formula = actors as f64 * bytes / speed + latency;
            println!("{actors:>7} {megabytes:>9} {:>6} {star:>10.2} {formula:>10.2}", "star");
            for fan_out in [2_usize, 4, 8] {
                let parent = |actor: usize| (actor / fan_out).checked_sub(1);
                let tree = simulate(actors, bytes, speed, latency, parent);
                let mut levels = 0;
                let mut reached = 0;
                while reached < actors {
                    levels += 1;
                    reached += fan_out.pow(levels);
                }
                let chunk = bytes / chunks / speed;
                let formula = fan_out as f64 * bytes / speed
                    + f64::from(levels - 1) * (fan_out as f64 * chunk + latency)
                    + latency;
                println!(
                    "{actors:>7} {megabytes:>9} {:>6} {tree:>10.2} {formula:>10.2}",
                    format!("k={fan_out}")
                );
            }
        }
    }
}
