//! Prints how long a step of a 9 B policy takes on 1 to 128 ranks, by the formulas of docs/scaling.md
//! and with rows dealt to ranks as the trainer deals them.
//!
//! Usage: `scaling [ROLLOUTS] [ACTORS]`, 256 rollouts of about 1,000 ids and 16 actors by default.

use environments::draws::Draws;
use learner::ranks::share;

/// A policy and what trains it.
struct Machine {
    /// Weights of the base.
    weights: f64,
    /// Elements of the adapter.
    adapter: f64,
    /// Products and sums a second that a GPU really does.
    flops: f64,
    /// GPUs of a node.
    node: usize,
    /// Bytes a second of a GPU's link inside of a node, and of its share of the network.
    links: [f64; 2],
    /// Seconds until a small message has arrived.
    latency: f64,
    /// Ids that rank 0 audits in a second.
    audit: f64,
    /// Bytes a second that rank 0 sends to actors.
    egress: f64,
}

/// Elements of rank 16 adapters on every linear of Qwen3.5-9B's language model: hidden 4096, ffn 12288,
/// 24 layers with gated DeltaNet (16 key and 32 value heads of 128) and 8 with gated attention (16 query
/// and 4 key-value heads of 256).
fn adapter() -> f64 {
    let (hidden, ffn, rank) = (4096.0, 12288.0, 16.0);
    let linear = |inputs: f64, outputs: f64| rank * (inputs + outputs);
    let mlp = 2.0 * linear(hidden, ffn) + linear(ffn, hidden);
    let (keys, values, heads) = (16.0 * 128.0, 32.0 * 128.0, 32.0);
    let delta = linear(hidden, 2.0 * keys + values)
        + linear(hidden, values)
        + 2.0 * linear(hidden, heads)
        + linear(values, hidden);
    let (queries, pairs) = (16.0 * 256.0, 4.0 * 256.0);
    let attention =
        linear(hidden, 2.0 * queries) + 2.0 * linear(hidden, pairs) + linear(queries, hidden);
    24.0 * (delta + mlp) + 8.0 * (attention + mlp)
}

/// Lengths of rollouts: 1,000 ids on average, many of 400, some of 2,200.
fn lengths(rollouts: usize) -> Vec<usize> {
    let mut draws = Draws::new("rollcall-scaling-v1", 1);
    let mut length = || {
        let draw = draws.below(1_000);
        400 + usize::try_from(draw * draw * 1_800 / 1_000_000).unwrap_or_default()
    };
    (0..rollouts).map(|_| length()).collect()
}

impl Machine {
    /// Seconds to compute `ids`: forward, forward again in backward, backward through the activations
    /// (the base has no gradients of its own), and the reference's forward.
    fn compute(&self, ids: f64) -> f64 {
        (2.0 + 2.0 + 2.0 + 2.0) * self.weights * ids / self.flops
    }

    /// Seconds to add up the adapter's gradient around a ring, and through rank 0.
    fn reduce(&self, ranks: usize) -> [f64; 2] {
        if ranks == 1 {
            return [0.0; 2];
        }
        let (n, bytes) = (ranks as f64, 4.0 * self.adapter);
        let link = self.links[usize::from(ranks > self.node)];
        let ring = 2.0 * (n - 1.0) / n * bytes / link + 2.0 * (n - 1.0) * self.latency;
        let star = 2.0 * (n - 1.0) * bytes / self.links[1] + 2.0 * self.latency;
        [ring, star]
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1).map(|text| text.parse::<usize>());
    let mut next = |default: usize| match arguments.next() {
        None => default,
        Some(Ok(value)) if value > 0 => value,
        Some(_) => {
            eprintln!("error: usage: scaling [ROLLOUTS] [ACTORS], numbers above 0");
            std::process::exit(2);
        }
    };
    let (rollouts, actors) = (next(256), next(16));
    let machine = Machine {
        weights: 9.0e9,
        adapter: adapter(),
        // An H100's 989 TFLOP/s in bf16, of which 35 % are reached.
        flops: 3.5e14,
        node: 8,
        links: [2.0e11, 2.5e10],
        latency: 2.0e-5,
        audit: 1.4e7,
        egress: 1.25e9,
    };
    let lengths = lengths(rollouts);
    let ids: usize = lengths.iter().sum();
    let audit = ids as f64 / machine.audit;
    let broadcast = 4.0 * machine.adapter * actors as f64 / machine.egress;
    println!(
        "{rollouts} rollouts, {ids} ids; adapter of {:.1} M elements, {:.0} MB; {actors} actors",
        machine.adapter / 1e6,
        4.0 * machine.adapter / 1e6
    );
    println!("seconds: audit {audit:.3}, broadcast {broadcast:.2} (both once a step, on rank 0)");
    println!("ranks  compute  waiting   ring    star    step   speed-up  efficiency");
    let mut one = None;
    for ranks in [1, 2, 4, 8, 16, 32, 64, 128] {
        let load = |rank: usize| -> f64 {
            share(&lengths, rank, ranks).into_iter().map(|row| lengths[row] as f64).sum()
        };
        let longest = (0..ranks).map(load).fold(0.0, f64::max);
        let even = machine.compute(ids as f64 / ranks as f64);
        let waiting = machine.compute(longest) - even;
        let [ring, star] = machine.reduce(ranks);
        let step = even + waiting + ring + audit + broadcast;
        let speedup = *one.get_or_insert(step) / step;
        println!(
            "{ranks:>5}  {even:>7.2}  {waiting:>7.3}  {ring:>6.3}  {star:>6.3}  {step:>6.2}  \
             {speedup:>8.1}  {:>9.0}%",
            100.0 * speedup / ranks as f64
        );
    }
}
