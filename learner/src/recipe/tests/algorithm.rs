//! Algorithms: what each name stands for, what goes together, and that older recipes stay the same
//! runs.

use super::*;
use crate::{
    advantage::{Baseline, ScaleRewards},
    loss::{Aggregation, KlEstimator, Ratio, Surrogate},
};

fn training(settings: Value) -> TrainingSettings {
    read(&with("training", settings)).expect("valid").training
}

#[test]
fn each_algorithm_is_a_ratio_an_aggregation_a_surrogate_and_a_baseline() {
    use {Aggregation as A, Baseline as B, Ratio as R, Surrogate as S};
    for (name, ratio, aggregation, surrogate, baseline) in [
        ("grpo", R::Token, A::SeqMeanTokenMean, S::Clipped, B::Mean),
        ("dr_grpo", R::Token, A::SeqMeanTokenSumNorm, S::Clipped, B::Mean),
        ("dapo", R::Token, A::TokenMean, S::Clipped, B::Mean),
        ("gspo", R::SequenceMean, A::SeqMeanTokenMean, S::Clipped, B::Mean),
        ("cispo", R::Token, A::TokenMean, S::Cispo, B::Mean),
        ("rloo", R::SequenceProduct, A::SeqMeanTokenSum, S::Clipped, B::LeaveOneOut),
        ("ppo", R::Token, A::TokenMean, S::Clipped, B::Mean),
    ] {
        let it = training(json!({"algorithm": name})).algorithm;
        let found = (it.loss().ratio, it.aggregation(), it.loss().surrogate, it.baseline());
        assert_eq!(found, (ratio, aggregation, surrogate, baseline), "{name}");
        let scale = if name == "rloo" { ScaleRewards::None } else { ScaleRewards::Group };
        assert_eq!((it.scale_rewards, it.value), (scale, None), "{name}");
        let clips = if name == "cispo" { (0.2, 5.0) } else { (0.2, 0.2) };
        assert_eq!((it.epsilon, it.epsilon_high), clips, "{name}");
    }
}

#[test]
fn loss_type_means_what_it_means_in_trl_and_not_two_things_at_once() {
    for name in ["grpo", "dr_grpo", "dapo", "cispo"] {
        let (named, typed) =
            (training(json!({"algorithm": name})), training(json!({"loss_type": name})));
        assert_eq!(named, typed);
    }
    refused(
        "training",
        json!({"algorithm": "ppo", "loss_type": "grpo"}),
        "training.loss_type: algorithm says it too; remove one of them",
    );
}

#[test]
fn ratios_of_sequences_are_the_algorithms_or_the_recipes() {
    let ratio = |settings: Value| training(settings).algorithm.ratio;
    for (algorithm, sequence) in [
        ("grpo", Ratio::SequenceMean),
        ("cispo", Ratio::SequenceMean),
        ("rloo", Ratio::SequenceProduct),
        ("ppo", Ratio::SequenceProduct),
    ] {
        let level = json!({"algorithm": algorithm, "importance_sampling_level": "sequence"});
        assert_eq!(ratio(level), sequence, "{algorithm}");
    }
    let product = json!({"importance_sampling_level": "sequence", "sequence_ratio": "product"});
    assert_eq!(ratio(product), Ratio::SequenceProduct);
    let token = json!({"algorithm": "rloo", "importance_sampling_level": "token"});
    assert_eq!(ratio(token), Ratio::Token);
    assert_eq!(ratio(json!({"algorithm": "rloo", "sequence_ratio": "mean"})), Ratio::SequenceMean);
}

#[test]
fn settings_that_do_not_go_together_are_refused_with_a_remedy() {
    for (settings, message) in [
        (
            json!({"algorithm": "cispo", "delta": 8}),
            "delta: cispo bounds ratios from above alone, by epsilon_high itself; remove it",
        ),
        (
            json!({"epsilon_high": 0.28, "delta": 1.2}),
            "delta: 1.2 is within the clip, which ends at 1 + epsilon_high; set it above 1.28",
        ),
        (
            json!({"algorithm": "gspo", "importance_sampling_level": "token"}),
            "importance_sampling_level: gspo has one ratio a sequence; choose grpo",
        ),
        (
            json!({"algorithm": "gspo", "sequence_ratio": "product"}),
            "sequence_ratio: gspo's is the mean; remove it or choose rloo",
        ),
        (
            json!({"sequence_ratio": "mean"}),
            "sequence_ratio: each token has its own ratio; set importance_sampling_level to \
             sequence or remove it",
        ),
        (json!({"value": {}}), "value: only ppo has a value head; set algorithm to ppo"),
        (
            json!({"algorithm": "ppo", "value": {}, "importance_sampling_level": "sequence"}),
            "importance_sampling_level: a value head gives each token its advantage, a sequence \
             has one; set it to token",
        ),
        (
            json!({"algorithm": "ppo", "value": {}, "scale_rewards": "none"}),
            "scale_rewards: a value head's advantages are scaled over all tokens of the step; \
             remove it",
        ),
        (
            json!({"per_device_train_batch_size": 12, "num_mini_batches": 2}),
            "num_mini_batches: a step's 3 groups are not divided by 2; use a divisor of them, or \
             another batch",
        ),
    ] {
        refused("training", settings, &format!("training.{message}"));
    }
    refused(
        "training",
        json!({"algorithm": "ppo", "value": {"vf_coeff": 1}}),
        "training.value.vf_coeff is unknown: did you mean training.value.vf_coef?",
    );
    let mut recipe = with("training", json!({"beta": 0}));
    recipe["reference"] = json!({"path": "sft", "sha256": HASH});
    assert_eq!(
        read(&recipe).expect_err("refused"),
        "reference: nothing holds to it where training.beta is 0; remove it or set training.beta"
    );
}

#[test]
fn every_setting_reads_back_to_itself_and_makes_another_run() {
    let mut runs = vec![];
    for settings in [
        json!({}),
        json!({"algorithm": "dr_grpo"}),
        json!({"algorithm": "dapo", "epsilon_high": 0.28, "delta": 4}),
        json!({"algorithm": "gspo", "epsilon": 3e-4, "epsilon_high": 4e-4}),
        json!({"algorithm": "cispo"}),
        json!({"algorithm": "cispo", "importance_sampling_level": "sequence"}),
        json!({"algorithm": "rloo"}),
        json!({"algorithm": "rloo", "sequence_ratio": "mean"}),
        json!({"algorithm": "rloo", "importance_sampling_level": "token"}),
        json!({"algorithm": "rloo", "scale_rewards": "group"}),
        json!({"importance_sampling_level": "sequence"}),
        json!({"importance_sampling_level": "sequence", "sequence_ratio": "product"}),
        json!({"kl_estimator": "k1"}),
        json!({"kl_estimator": "k2"}),
        json!({"entropy_coef": 0.01}),
        json!({"num_iterations": 2}),
        json!({"per_device_train_batch_size": 8, "num_mini_batches": 2}),
        json!({"algorithm": "ppo"}),
        json!({"algorithm": "ppo", "value": {}}),
        json!({"algorithm": "ppo", "value": {"gamma": 0.99, "cliprange_value": 0}}),
    ] {
        let recipe = read(&with("training", settings)).expect("valid");
        let again = Recipe::from_settings(&recipe.settings(), Path::new("m")).expect("valid");
        assert_eq!(again.training, recipe.training);
        assert_eq!(again.settings(), recipe.settings());
        runs.push(run_id("online", &recipe.settings(), None));
    }
    let mut recipe = minimal();
    recipe["reference"] = json!({"path": "sft", "sha256": HASH});
    let recipe = read(&recipe).expect("valid");
    let again = Recipe::from_settings(&recipe.settings(), Path::new("m")).expect("valid");
    assert_eq!(again.settings()["reference"], json!({"sha256": HASH}));
    runs.push(run_id("online", &recipe.settings(), None));
    let distinct: std::collections::BTreeSet<_> = runs.iter().map(|run| run.0).collect();
    assert_eq!(distinct.len(), runs.len());
}

#[test]
fn recipes_of_before_there_were_algorithms_keep_their_settings() {
    let keys = |recipe: &Value| -> Vec<String> {
        let settings = read(recipe).expect("valid").settings();
        settings["training"].as_object().expect("an object").keys().cloned().collect()
    };
    for new in [
        "algorithm",
        "importance_sampling_level",
        "sequence_ratio",
        "delta",
        "kl_estimator",
        "entropy_coef",
        "num_mini_batches",
        "value",
    ] {
        assert!(!keys(&minimal()).contains(&new.to_owned()), "{new}");
    }
    assert_eq!(keys(&minimal()).len(), 28);
    assert!(read(&minimal()).expect("valid").settings().get("reference").is_none());
}

#[test]
fn a_group_without_advantages_teaches_only_what_is_asked_for() {
    let has =
        |settings: Value, advantages: &[f64]| training(settings).algorithm.has_gradient(advantages);
    assert!(!has(json!({"beta": 0}), &[0.0, 0.0]));
    assert!(has(json!({"beta": 0}), &[0.5, -0.5]));
    assert!(has(json!({"beta": 0.1}), &[0.0, 0.0]));
    assert!(has(json!({"beta": 0, "entropy_coef": 0.1}), &[0.0, 0.0]));
    assert!(has(json!({"algorithm": "ppo", "beta": 0, "value": {}}), &[0.0, 0.0]));
    assert_eq!(
        KlEstimator::default(),
        training(json!({})).algorithm.kl_estimator,
        "the default stays k3"
    );
}
