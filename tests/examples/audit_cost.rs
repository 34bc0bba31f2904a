//! Measures what the audit costs: tokens a second of the exact rungs on one thread, and the share that
//! rung 9 adds to an update whose policy is the one that played.
//!
//! ```text
//! cargo run --release -p tests --example audit_cost -- examples/guess/recipe.json
//! cargo run --release -p tests --example audit_cost -- examples/guess/recipe.json --random 384x6
//! ```

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use clap::Parser;
use learner::{
    advantage::{ScaleRewards, group_advantages},
    audit::{Auditor, Presented, sampling::SamplingBounds},
    curriculum::TaskOrder,
    leases::Standing,
    ranks::Ranks,
    train::update::{Outcome, Student, UpdateGroup, UpdateSettings, adamw, update},
};
use protocol::{Episode, EpisodeId, Lease};
use tests::rollouts::{Conduct, Stage};

#[derive(Parser)]
struct Arguments {
    /// The recipe whose tasks are played.
    recipe: PathBuf,
    /// A random model in place of the recipe's: HIDDENxLAYERS.
    #[arg(long)]
    random: Option<String>,
    /// Groups of 8 rollouts.
    #[arg(long, default_value_t = 16)]
    groups: u64,
    /// Pairs of updates, with rung 9 and without.
    #[arg(long, default_value_t = 15)]
    pairs: usize,
}

fn main() {
    let arguments = Arguments::parse();
    let mut stage = Stage::open(&arguments.recipe, None, arguments.random.as_deref());
    let fresh =
        policy::model::Adapter::init(&stage.plan.recipe.lora.to_config(), &stage.decoder, 1);
    stage.adapter.get_or_insert(fresh.expect("fits"));
    stage.sampling = stage.plan.recipe.training.sampling();
    let groups = stage.play(&Conduct::Honest, 0..arguments.groups, 8);
    exact_rungs(&stage, &groups);
    sampling_rung(&stage, &groups, arguments.pairs);
}

fn exact_rungs(stage: &Stage, groups: &[Vec<Episode>]) {
    let auditor = Auditor::new(stage.plan.audit_terms()).expect("opens");
    let mut order = TaskOrder::new(stage.plan.run, &stage.plan.train);
    let presented: Vec<(EpisodeId, Vec<u8>, Lease, usize)> = groups
        .iter()
        .flatten()
        .map(|episode| {
            let body = episode.encode().expect("encodes");
            let lease = stage.lease(&mut order, episode.lease);
            (EpisodeId::of_body(&body), body, lease, episode.tokens.len())
        })
        .collect();
    let mut rates = Vec::new();
    for _ in 0..7 {
        let (started, mut tokens) = (Instant::now(), 0);
        while started.elapsed() < Duration::from_millis(400) {
            for (id, body, lease, count) in &presented {
                let standing = Standing::Open(Box::new(lease.clone()));
                let presented = Presented { id: *id, body, standing: &standing, behind: 0 };
                auditor.audit(presented).expect("an honest episode");
                tokens += count;
            }
        }
        rates.push(tokens as f64 / started.elapsed().as_secs_f64());
    }
    let episodes = presented.len();
    println!("exact rungs: {:.2e} tokens/s on one thread ({episodes} episodes)", median(rates));
}

fn sampling_rung(stage: &Stage, groups: &[Vec<Episode>], pairs: usize) {
    let settings = stage.plan.recipe.training;
    let update_groups: Vec<UpdateGroup<'_>> = groups.iter().map(|group| ranked(group)).collect();
    let seconds = |examine: bool| {
        let mut adapter = stage.adapter.clone().expect("one");
        let mut optimizer = adamw(&settings.optimizer);
        let update_settings = UpdateSettings {
            temperature: stage.sampling.temperature,
            examine: examine.then_some(stage.sampling),
            learning_rates: (1e-5, 0.0),
            ..UpdateSettings::of(&settings, 0)
        };
        let started = Instant::now();
        let outcome = update(
            Student {
                decoder: &stage.decoder,
                reference: None,
                adapter: &mut adapter,
                optimizer: &mut optimizer,
                critic: None,
            },
            &update_settings,
            &update_groups,
            &mut |_, _, evidence| SamplingBounds::F32_CPU.check(evidence),
            &mut Ranks::alone(),
        );
        let seconds = started.elapsed().as_secs_f64();
        assert!(matches!(outcome, Ok(Outcome::Updated(_))), "{outcome:?}");
        seconds
    };
    seconds(true);
    let measured: Vec<(f64, f64)> = (0..pairs).map(|_| (seconds(false), seconds(true))).collect();
    let ratio = median(measured.iter().map(|(without, with)| with / without).collect());
    let without = median(measured.iter().map(|(without, _)| *without).collect());
    let ids: usize = groups.iter().flatten().flat_map(|it| &it.spans).map(|it| it.ids.len()).sum();
    println!(
        "rung 9: an update with it takes {ratio:.3} times one without ({without:.3} s, {ids} sampled ids, \
         {} ids in the vocabulary, median of {pairs} pairs)",
        stage.decoder.config().vocab
    );
}

/// A group whose rewards are the places of its rollouts.
fn ranked(group: &[Episode]) -> UpdateGroup<'_> {
    let rewards: Vec<f64> = (0..group.len()).map(|i| i as f64).collect();
    let advantages = group_advantages(&rewards, ScaleRewards::Group).expect("finite").advantages;
    UpdateGroup {
        episodes: group.iter().collect(),
        rewards,
        advantages,
        images: None,
        behaviour: None,
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
