//! Measures how much rung 9 of the audit sees: honest rollouts against the bounds, and for each kind
//! of dishonest ones the share that is detected against the sampled ids seen. Prints the tables of
//! docs/audit.md.
//!
//! ```text
//! cargo run --release -p tests --example detection -- examples/guess/recipe.json --adapter runs/guess/adapters/150-…
//! cargo run --release -p tests --example detection -- examples/guess/recipe.json --random 512x8
//! ```

use std::{collections::BTreeMap, path::PathBuf};

use clap::Parser;
use learner::audit::sampling::{Deviation, Pair, SamplingBounds, SamplingEvidence, examine};
use policy::model::Adapter;
use protocol::{Episode, Sampling};
use tests::rollouts::{Conduct, Stage};

/// Sampled ids after which detection is measured.
const SEEN: [usize; 9] = [1, 4, 16, 32, 64, 128, 256, 512, 1024];

#[derive(Parser)]
struct Arguments {
    /// The recipe whose tasks are played.
    recipe: PathBuf,
    /// The leases' adapter, a PEFT directory; the base plays without.
    #[arg(long)]
    adapter: Option<PathBuf>,
    /// An adapter of another step, a file of a run's policies/, for the cheat that plays an old policy.
    #[arg(long)]
    stale: Option<PathBuf>,
    /// A random model in place of the recipe's: HIDDENxLAYERS.
    #[arg(long)]
    random: Option<String>,
    /// Honest episodes.
    #[arg(long, default_value_t = 4096)]
    episodes: u64,
    /// Episodes of each cheat.
    #[arg(long, default_value_t = 1024)]
    cheats: u64,
    /// Rollouts of a group.
    #[arg(long, default_value_t = 8)]
    generations: u32,
}

fn main() {
    let arguments = Arguments::parse();
    let (adapter, random) = (arguments.adapter.as_deref(), arguments.random.as_deref());
    let stage = Stage::open(&arguments.recipe, adapter, random);
    let groups_of = |episodes: u64| episodes.div_ceil(u64::from(arguments.generations));
    let groups = groups_of(arguments.episodes);
    let honest = deviations(&stage, &Conduct::Honest, groups, arguments.generations);
    let bounds = SamplingBounds::F32_CPU;
    report_honest(&stage, &honest, &bounds);

    let plain = stage.sampling;
    let stale = arguments.stale.as_ref().map(|file| {
        let bytes = std::fs::read(file).expect("reads");
        let adapter = Adapter::from_safetensors(&bytes, &stage.decoder).expect("an adapter");
        ("adapter of another step", Conduct::OtherAdapter(Some(adapter)))
    });
    let other = |sampling| Conduct::OtherSampling(sampling);
    let cheats = [
        ("no adapter", Conduct::OtherAdapter(None)),
        ("temperature 0.7 for 0.6", other(Sampling { temperature: 0.7, ..plain })),
        ("top-k off", other(Sampling { top_k: 0, ..plain })),
        ("top-k and top-p off", other(Sampling { top_k: 0, top_p: 1.0, ..plain })),
        ("greedy", other(Sampling { temperature: 0.0, ..plain })),
        ("context edited", Conduct::EditedContext),
        ("weights of 8 bits", Conduct::Rounded(8)),
        ("weights of 4 bits", Conduct::Rounded(4)),
        ("best of 4", Conduct::BestOf(4)),
    ];
    println!("| what was played | judged by | {} |", SEEN.map(|n| n.to_string()).join(" | "));
    println!("|---|---|{}", "---|".repeat(SEEN.len()));
    for (what, conduct) in cheats.into_iter().chain(stale) {
        let played =
            deviations(&stage, &conduct, groups_of(arguments.cheats), arguments.generations);
        let mut ids = played.concat();
        println!("| {what} | ids and log-probabilities | {} |", curve(&ids, &bounds));
        // A careful cheat sends the log-probabilities that the right policy gives.
        ids.iter_mut().for_each(|id| id.logp_gap = 0.0);
        println!("| | ids alone | {} |", curve(&ids, &bounds));
    }
}

/// Deviations by episode.
fn deviations(
    stage: &Stage,
    conduct: &Conduct,
    groups: u64,
    generations: u32,
) -> Vec<Vec<Deviation>> {
    let played = stage.play(conduct, 0..groups, generations);
    played
        .iter()
        .flat_map(|group| {
            let group: Vec<&Episode> = group.iter().collect();
            examine(
                &stage.decoder,
                stage.adapter.as_ref(),
                stage.plan.images.as_ref(),
                stage.sampling,
                &group,
            )
            .expect("scores")
        })
        .collect()
}

fn report_honest(stage: &Stage, honest: &[Vec<Deviation>], bounds: &SamplingBounds) {
    let evidence: Vec<SamplingEvidence> = honest.iter().map(SamplingEvidence::of).collect();
    let mut flagged: BTreeMap<&str, usize> = BTreeMap::new();
    for reason in evidence.iter().filter_map(|it| bounds.check(it).err()) {
        *flagged.entry(reason.code()).or_default() += 1;
    }
    let pair = Pair::calibrate(stage.plan.pair("cpu", "cpu"), &evidence, 1e-3).expect("enough");
    let ids: usize = evidence.iter().map(|it| it.tokens).sum();
    let unexplained: usize = evidence.iter().map(|it| it.unexplained).sum();
    println!(
        "honest: {} episodes, {ids} sampled ids, {unexplained} of them unexplained; {:?} flagged by the \
         built-in bounds; largest {:?}; calibrated {:?}, {:?}\n",
        evidence.len(),
        flagged,
        pair.honest_most,
        pair.bounds,
        pair.false_positives,
    );
}

/// The share of windows of so many ids that break a bound.
fn curve(ids: &[Deviation], bounds: &SamplingBounds) -> String {
    let share = |seen: usize| {
        let windows = ids.chunks_exact(seen);
        let count = windows.len();
        let flagged =
            windows.filter(|it| bounds.check(&SamplingEvidence::of(*it)).is_err()).count();
        match count {
            0 => "–".into(),
            count => format!("{:.3}", flagged as f64 / count as f64),
        }
    };
    SEEN.map(share).join(" | ")
}
