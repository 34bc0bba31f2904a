//! Rung 9 on real rollouts of the demo's checkpoint: honest ones pass, and what no exact rung can see
//! is refused under its own name, before anything is learned from it.

use std::path::{Path, PathBuf};

#[path = "../../learner/tests/support/on_ranks.rs"]
mod on_ranks;

use learner::{
    audit::{
        Auditor, Presented, RungName,
        sampling::{Deviation, SamplingBounds, SamplingEvidence, examine},
    },
    curriculum::TaskOrder,
    leases::Standing,
    ranks::Ranks,
    train::update::{Outcome, Student, UpdateGroup, UpdateSettings, adamw, update},
};
use on_ranks::on_ranks;
use protocol::{Digest, Episode, EpisodeId, Sampling};
use tests::{
    rollouts::{Conduct, Stage, shifted},
    workspace,
};

const GROUPS: u64 = 10;
const GENERATIONS: u32 = 8;

fn recipe() -> PathBuf {
    workspace().join("examples/guess/recipe.json")
}

/// The demo with an adapter that matters.
fn stage(recipe: &Path) -> Stage {
    let mut stage = Stage::open(recipe, None, None);
    stage.adapter = Some(shifted(&stage.plan.recipe.lora.to_config(), &stage.decoder, 0.05));
    stage.sampling = Sampling { temperature: 0.9, top_k: 40, top_p: 0.98, min_p: 0.0 };
    stage
}

/// Every exact rung passes these: what is wrong with them is not in their bytes.
fn assert_exact_rungs_pass(stage: &Stage, episodes: &[Vec<Episode>]) {
    let mut terms = stage.plan.audit_terms();
    terms.max_staleness = 0;
    let auditor = Auditor::new(terms).expect("opens");
    let mut order = TaskOrder::new(stage.plan.run, &stage.plan.train);
    for episode in episodes.iter().flatten() {
        let body = episode.encode().expect("encodes");
        let standing = Standing::Open(Box::new(stage.lease(&mut order, episode.lease)));
        let id = EpisodeId::of_body(&body);
        let verdict = auditor.audit(Presented { id, body: &body, standing: &standing, behind: 0 });
        assert!(verdict.is_ok(), "{}", verdict.expect_err("refused").reason);
    }
}

fn deviations(stage: &Stage, episodes: &[Vec<Episode>]) -> Vec<Vec<Deviation>> {
    episodes
        .iter()
        .flat_map(|group| {
            let group: Vec<&Episode> = group.iter().collect();
            let adapter = stage.adapter.as_ref();
            examine(&stage.decoder, adapter, stage.plan.images.as_ref(), stage.sampling, &group)
                .expect("scores")
        })
        .collect()
}

/// Why episodes are refused, by code; the empty code for those that pass.
fn codes(deviations: &[Vec<Deviation>]) -> Vec<&'static str> {
    let bounds = SamplingBounds::F32_CPU;
    let code = |ids: &Vec<Deviation>| {
        bounds.check(&SamplingEvidence::of(ids)).err().map_or("", |reason| reason.code())
    };
    deviations.iter().map(code).collect()
}

#[test]
fn honest_rollouts_pass() {
    let stage = stage(&recipe());
    let episodes = stage.play(&Conduct::Honest, 0..GROUPS, GENERATIONS);
    assert_exact_rungs_pass(&stage, &episodes);
    let found = deviations(&stage, &episodes);
    assert!(found.iter().flatten().count() > 500);
    assert!(codes(&found).iter().all(|code| code.is_empty()), "{:?}", codes(&found));
    let most = found.iter().flatten().map(|id| id.deficit.max(id.logp_gap)).fold(0.0, f64::max);
    assert!(most < 1e-3, "honest rollouts are {most} off: the bounds leave too little room");
}

/// Each is refused within a few rollouts even where its log-probabilities are those of the right
/// policy, as a careful cheat would send them.
#[test]
fn what_was_not_sampled_from_the_leases_policy_is_refused() {
    let stage = stage(&recipe());
    let close = shifted(&stage.plan.recipe.lora.to_config(), &stage.decoder, 0.04);
    let cheats = [
        ("no adapter", Conduct::OtherAdapter(None)),
        ("a slightly different adapter", Conduct::OtherAdapter(Some(close))),
        (
            "a higher temperature",
            Conduct::OtherSampling(Sampling { temperature: 1.0, ..stage.sampling }),
        ),
        (
            "greedy decoding",
            Conduct::OtherSampling(Sampling { temperature: 0.0, ..stage.sampling }),
        ),
        (
            "no truncation",
            Conduct::OtherSampling(Sampling { top_k: 0, top_p: 1.0, ..stage.sampling }),
        ),
        ("an edited context", Conduct::EditedContext),
        ("weights of 4 bits", Conduct::Rounded(4)),
        ("the best of 4", Conduct::BestOf(4)),
    ];
    for (what, conduct) in cheats {
        let episodes = stage.play(&conduct, 0..GROUPS, GENERATIONS);
        assert_exact_rungs_pass(&stage, &episodes);
        let mut found = deviations(&stage, &episodes);
        let refused = codes(&found).iter().filter(|code| !code.is_empty()).count();
        found.iter_mut().flatten().for_each(|id| id.logp_gap = 0.0);
        let by_ids = codes(&found);
        let careful = by_ids.iter().filter(|code| !code.is_empty()).count();
        assert!(by_ids.iter().all(|code| ["", "unlikely_token"].contains(code)), "{by_ids:?}");
        println!("{what}: {refused} of {} refused, {careful} by ids alone", found.len());
        assert!(careful >= 2 && refused >= careful, "{what}: {refused} {careful}");
    }
}

#[test]
fn altered_log_probabilities_are_refused_whichever_column_and_wherever() {
    let stage = stage(&recipe());
    let honest = stage.play(&Conduct::Honest, 0..1, GENERATIONS);
    let count = honest[0][0].spans[0].ids.len();
    for at in 0..count {
        for raw in [true, false] {
            let mut forged = honest.clone();
            let span = &mut forged[0][0].spans[0];
            let column = if raw { &mut span.logp_raw } else { &mut span.logp_sampling };
            column[at] -= 0.05;
            assert_exact_rungs_pass(&stage, &forged);
            let found = codes(&deviations(&stage, &forged));
            assert_eq!(found[0], "log_probability_gap", "id {at}, raw {raw}");
            assert!(found[1..].iter().all(|code| code.is_empty()));
        }
    }
}

#[test]
fn an_update_with_a_refused_rollout_changes_nothing() {
    refuses_and_then_updates(&mut Ranks::alone());
}

#[test]
fn a_rollout_that_rank_0_refuses_is_refused_on_every_rank() {
    on_ranks(2, |meet, _| {
        let mut ranks = meet(Digest::of(b"refusal")).expect("ranks");
        refuses_and_then_updates(&mut ranks);
        ranks.finish(Ok(())).expect("ends");
    });
}

fn refuses_and_then_updates(ranks: &mut Ranks) {
    let stage = stage(&recipe());
    let settings = stage.plan.recipe.training;
    let leads = ranks.leads();
    let (mut adapter, mut optimizer) =
        (stage.adapter.clone().expect("one"), adamw(&settings.optimizer));
    let before = adapter.to_safetensors().expect("serializes");
    let mut groups = stage.play(&Conduct::Honest, 0..2, GENERATIONS);
    let cheat = Conduct::OtherSampling(Sampling { temperature: 0.0, ..stage.sampling });
    groups[1][3] = stage.play(&cheat, 1..2, GENERATIONS).remove(0).remove(3);
    let mut step = |groups: &[Vec<Episode>]| {
        let update_groups: Vec<UpdateGroup<'_>> = groups
            .iter()
            .map(|group| {
                let rewards: Vec<f64> = (0..group.len()).map(|i| i as f64).collect();
                let advantages = settings.advantages(&rewards).expect("finite").advantages;
                UpdateGroup {
                    episodes: group.iter().collect(),
                    rewards,
                    advantages,
                    images: None,
                    behaviour: None,
                }
            })
            .collect();
        let update_settings = UpdateSettings {
            temperature: stage.sampling.temperature,
            examine: Some(stage.sampling),
            learning_rates: (1e-3, 0.0),
            ..UpdateSettings::of(&settings, 0)
        };
        update(
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
            ranks,
        )
        .map(|outcome| (outcome, adapter.to_safetensors().expect("serializes")))
        .expect("updates")
    };
    let (outcome, after) = step(&groups);
    let Outcome::Refused(refusals) = outcome else { panic!("{outcome:?}") };
    let places: Vec<(usize, usize)> = refusals.iter().map(|it| (it.group, it.row)).collect();
    if leads {
        assert_eq!(places, [(1, 3)]);
        assert_eq!(refusals[0].reason.rung(), RungName::Sampling, "{:?}", refusals[0].reason);
    }
    assert!(after == before, "the adapter is what it was");
    groups[1] = stage.play(&Conduct::Honest, 1..2, GENERATIONS).remove(0);
    let (outcome, after) = step(&groups);
    assert!(matches!(outcome, Outcome::Updated(_)) && after != before);
}
