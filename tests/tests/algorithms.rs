//! Every algorithm on real rollouts of the demo's checkpoint: what an update changes, what it leaves
//! alone, and a whole run with a value head in two processes.

#[path = "../../learner/tests/support/on_ranks.rs"]
mod on_ranks;

use std::process::Command;

use learner::{
    loss::KlEstimator,
    ranks::Ranks,
    recipe::{Algorithm, AlgorithmSettings, ValueSettings},
    train::update::{
        Critic, Outcome, Student, UpdateError, UpdateGroup, UpdateReport, UpdateSettings, adamw,
        update,
    },
};
use on_ranks::on_ranks;
use policy::{
    model::Adapter,
    score::{Optimizer, ValueHead},
};
use protocol::{Digest, Episode};
use serde_json::{Value, json};
use tests::{
    Demo, finish, programs,
    rollouts::{Conduct, Stage, shifted},
    start, workspace,
};

const VALUE: ValueSettings = ValueSettings {
    gamma: 1.0,
    lam: 0.95,
    vf_coef: 0.1,
    cliprange_value: 0.2,
    learning_rate: 1e-2,
};

/// The demo with an adapter that matters, and two groups that it played.
struct Class {
    stage: Stage,
    groups: Vec<Vec<Episode>>,
    adapter: Adapter,
    optimizer: Optimizer,
    critic: Option<Critic>,
}

impl Class {
    fn new() -> Self {
        let recipe = workspace().join("examples/guess/recipe.json");
        let mut stage = Stage::open(&recipe, None, None);
        let adapter = shifted(&stage.plan.recipe.lora.to_config(), &stage.decoder, 0.05);
        stage.adapter = Some(adapter.clone());
        stage.sampling = stage.plan.recipe.training.sampling();
        let groups = stage.play(&Conduct::Honest, 0..2, 4);
        let optimizer = adamw(&stage.plan.recipe.training.optimizer);
        Self { stage, groups, adapter, optimizer, critic: None }
    }

    fn algorithm(&self, algorithm: Algorithm) -> AlgorithmSettings {
        AlgorithmSettings { algorithm, ..self.stage.plan.recipe.training.algorithm }
    }

    fn with_critic(&mut self) {
        let optimizer = adamw(&self.stage.plan.recipe.training.optimizer);
        let head = ValueHead::zeros(&self.stage.decoder);
        self.critic = Some(Critic { head, optimizer });
    }

    /// Learns from the groups, as if each rollout were better than the one before it.
    fn learn(
        &mut self,
        algorithm: AlgorithmSettings,
        rate: f64,
        reference: Option<&Adapter>,
    ) -> Result<Outcome, UpdateError> {
        self.learn_on(&mut Ranks::alone(), algorithm, rate, reference)
    }

    fn learn_on(
        &mut self,
        ranks: &mut Ranks,
        algorithm: AlgorithmSettings,
        rate: f64,
        reference: Option<&Adapter>,
    ) -> Result<Outcome, UpdateError> {
        let training = self.stage.plan.recipe.training;
        let groups: Vec<UpdateGroup<'_>> = self
            .groups
            .iter()
            .map(|group| {
                let rewards: Vec<f64> = (0..group.len()).map(|i| i as f64 / 4.0).collect();
                let advantages = training.advantages(&rewards).expect("finite").advantages;
                UpdateGroup {
                    episodes: group.iter().collect(),
                    rewards,
                    advantages,
                    images: None,
                    behaviour: None,
                }
            })
            .collect();
        let settings = UpdateSettings {
            algorithm,
            learning_rates: (rate, VALUE.learning_rate),
            ..UpdateSettings::of(&training, 0)
        };
        let student = Student {
            decoder: &self.stage.decoder,
            reference,
            adapter: &mut self.adapter,
            optimizer: &mut self.optimizer,
            critic: self.critic.as_mut(),
        };
        update(student, &settings, &groups, &mut |_, _, _| Ok(()), ranks)
    }

    fn report(
        &mut self,
        algorithm: AlgorithmSettings,
        rate: f64,
        reference: Option<&Adapter>,
    ) -> UpdateReport {
        match self.learn(algorithm, rate, reference).expect("learns") {
            Outcome::Updated(report) => report,
            refused @ Outcome::Refused(_) => panic!("{refused:?}"),
        }
    }

    /// Everything that learns, as bytes.
    fn state(&self) -> Vec<Vec<u8>> {
        let mut state = vec![
            self.adapter.to_safetensors().expect("serializes"),
            self.optimizer.to_bytes().expect("serializes"),
        ];
        if let Some(critic) = &self.critic {
            state.push(critic.head.to_safetensors().expect("serializes"));
            state.push(critic.optimizer.to_bytes().expect("serializes"));
        }
        state
    }
}

#[test]
fn every_algorithm_moves_the_policy_with_each_of_its_updates() {
    use Algorithm as A;
    for algorithm in [A::Grpo, A::DrGrpo, A::Dapo, A::Gspo, A::Cispo, A::Rloo, A::Ppo] {
        let mut class = Class::new();
        let ratio = match algorithm {
            A::Gspo => learner::loss::Ratio::SequenceMean,
            A::Rloo => learner::loss::Ratio::SequenceProduct,
            _ => learner::loss::Ratio::Token,
        };
        let settings = AlgorithmSettings {
            ratio,
            num_iterations: 2,
            num_mini_batches: 2,
            entropy_coef: 0.01,
            ..class.algorithm(algorithm)
        };
        let before = class.state();
        let report = class.report(settings, 1e-2, None);
        assert_eq!((report.updates, report.stepped), (4, true), "{algorithm:?}");
        assert!(report.approx_kl > 0.0 && report.grad_norm > 0.0, "{algorithm:?}: {report:?}");
        assert!(report.entropy > Some(0.0) && report.kl > Some(0.0), "{algorithm:?}: {report:?}");
        assert_eq!(report.value, None);
        assert_ne!(class.state(), before, "{algorithm:?}");
    }
}

#[test]
fn a_policy_that_does_not_move_has_ratios_of_exactly_one() {
    let mut class = Class::new();
    let settings = AlgorithmSettings { num_iterations: 3, ..class.algorithm(Algorithm::Ppo) };
    let report = class.report(settings, 0.0, None);
    assert_eq!((report.approx_kl, report.clip_fraction, report.updates), (0.0, 0.0, 3));
    let once = class.report(class.algorithm(Algorithm::Ppo), 0.0, None);
    assert!((report.loss - once.loss).abs() < 1e-9, "{} {}", report.loss, once.loss);
    assert!((report.grad_norm - once.grad_norm).abs() < 1e-9 * once.grad_norm);
    assert_eq!(report.logp_gap, once.logp_gap);
}

#[test]
fn the_kl_term_holds_to_the_frozen_adapter_or_to_the_base() {
    let mut class = Class::new();
    let own = class.adapter.clone();
    for kl_estimator in [KlEstimator::K1, KlEstimator::K2, KlEstimator::K3] {
        let settings =
            AlgorithmSettings { kl_estimator, beta: 0.1, ..class.algorithm(Algorithm::Grpo) };
        assert_eq!(class.report(settings, 0.0, Some(&own)).kl, Some(0.0), "{kl_estimator:?}");
        let base = class.report(settings, 0.0, None).kl.expect("a KL term");
        assert!(base.abs() > 1e-3, "{kl_estimator:?}: {base}");
        let none = AlgorithmSettings { beta: 0.0, ..settings };
        assert_eq!(class.report(none, 0.0, None).kl, None);
    }
}

#[test]
fn a_value_head_learns_beside_the_policy_and_comes_to_explain_the_returns() {
    let mut class = Class::new();
    class.with_critic();
    let settings = AlgorithmSettings {
        value: Some(ValueSettings { cliprange_value: 0.0, ..VALUE }),
        num_iterations: 2,
        ..class.algorithm(Algorithm::Ppo)
    };
    let mut reports = Vec::new();
    for _ in 0..40 {
        reports.push(class.report(settings, 0.0, None).value.expect("a value head"));
    }
    let (first, last) = (reports[0], reports[39]);
    assert_eq!(first.explained_variance, Some(0.0), "it starts by saying 0");
    assert!(last.value_loss < 0.5 * first.value_loss, "{first:?} {last:?}");
    assert!(last.explained_variance > Some(0.05), "{last:?}");
    assert!(first.value_grad_norm > 0.0);
    let before = class.state();
    assert!(class.report(settings, 1e-3, None).grad_norm > 0.0);
    let after = class.state();
    assert!(before.iter().zip(&after).all(|(before, after)| before != after));
}

#[test]
fn a_step_that_fails_after_some_of_its_updates_changes_nothing() {
    let mut class = Class::new();
    class.with_critic();
    let settings = AlgorithmSettings {
        value: Some(VALUE),
        num_iterations: 4,
        ..class.algorithm(Algorithm::Ppo)
    };
    let before = class.state();
    let error = class.learn(settings, 1e30, None).expect_err("the policy is no policy any more");
    assert!(!error.to_string().contains('\n'), "{error}");
    assert_eq!(class.state(), before);
    class.report(settings, 1e-3, None);
    assert_ne!(class.state(), before, "it was not for want of a gradient");
}

/// Values of safetensors bytes, in the order of the file.
fn values(bytes: &[u8]) -> Vec<f32> {
    let header = u64::from_le_bytes(bytes[..8].try_into().expect("a length")) as usize;
    let (floats, _) = bytes[8 + header..].as_chunks::<4>();
    floats.iter().map(|float| f32::from_le_bytes(*float)).collect()
}

#[test]
fn two_and_three_and_five_ranks_update_as_one_does() {
    let value = Some(ValueSettings { cliprange_value: 0.2, ..VALUE });
    for (name, algorithm, value, several) in [
        ("grpo", Algorithm::Grpo, None, false),
        ("dr_grpo", Algorithm::DrGrpo, None, true),
        ("gspo", Algorithm::Gspo, None, true),
        ("ppo with a value head", Algorithm::Ppo, value, true),
    ] {
        let on = |world: usize| {
            let all = on_ranks(world, move |meet, _| {
                let mut ranks = meet(Digest::of(b"update")).expect("ranks");
                let mut class = Class::new();
                if value.is_some() {
                    class.with_critic();
                }
                let count = if several { 2 } else { 1 };
                let settings = AlgorithmSettings {
                    value,
                    beta: 0.05,
                    entropy_coef: 0.01,
                    num_iterations: count,
                    num_mini_batches: count,
                    ..class.algorithm(algorithm)
                };
                let mut reports = Vec::new();
                for _ in 0..3 {
                    match class.learn_on(&mut ranks, settings, 1e-3, None).expect("learns") {
                        Outcome::Updated(report) => reports.push(report),
                        refused @ Outcome::Refused(_) => panic!("{refused:?}"),
                    }
                }
                ranks.finish(Ok(())).expect("ends");
                (class.state(), reports)
            });
            assert!(all.iter().all(|it| *it == all[0]), "{name}: {world} ranks differ");
            all.into_iter().next().expect("a rank")
        };
        let (one, reports) = on(1);
        // Of two groups, so that they are cut where there are more ranks.
        for world in [2, 3, 5] {
            let (other, others) = on(world);
            let off = values(&one[0])
                .iter()
                .zip(values(&other[0]))
                .map(|(a, b)| (a - b).abs())
                .fold(0.0, f32::max);
            println!("{name} over {world} ranks: adapters differ by {off:.1e}");
            assert!(off <= 1e-5, "{name}, {world} ranks: {off}");
            for (a, b) in reports.iter().zip(&others) {
                let close = |a: f64, b: f64| (a - b).abs() <= 1e-4 * a.abs().max(1e-2);
                assert!(close(a.loss, b.loss) && close(a.grad_norm, b.grad_norm), "{a:?} {b:?}");
                assert!(close(a.approx_kl, b.approx_kl), "{a:?} {b:?}");
                assert!(close(a.kl.unwrap_or(0.0), b.kl.unwrap_or(0.0)), "{a:?} {b:?}");
                assert_eq!((a.updates, a.clip_fraction), (b.updates, b.clip_fraction), "{name}");
                assert_eq!(a.value.is_some(), b.value.is_some(), "{name}");
            }
        }
    }
}

#[test]
fn a_run_with_a_value_head_and_a_reference_is_written_and_audited() {
    let mut demo = Demo::new(2);
    let reference = demo.dir.path().join("reference");
    let stage = Stage::open(&workspace().join("examples/guess/recipe.json"), None, None);
    shifted(&stage.plan.recipe.lora.to_config(), &stage.decoder, 0.02)
        .save_peft(&reference, "model")
        .expect("written");
    demo.recipe["reference"] = json!({"path": reference, "sha256": tests::digest(&reference)});
    let training = &mut demo.recipe["training"];
    for (key, value) in [
        ("algorithm", json!("ppo")),
        ("value", json!({"learning_rate": 0.01})),
        ("num_iterations", json!(2)),
        ("num_mini_batches", json!(2)),
        ("entropy_coef", json!(0.001)),
        ("delta", json!(3)),
    ] {
        training[key] = value;
    }
    let learner = &programs().learner;
    let mut train = Command::new(learner);
    train.arg("train").arg(demo.write()).args(["--device", "cpu", "--json", "--local-actors", "1"]);
    let finished = finish(start(&mut train));
    assert!(finished.status.success(), "{}", finished.stderr);
    let manifest = demo.manifest();
    let adapter = &manifest["last_adapter"];
    let head = demo.run().join(adapter["path"].as_str().expect("a path")).join(ValueHead::FILE);
    assert_eq!(adapter["value_head_sha256"], tests::digest(&head));
    assert!(manifest["reference_policy"].as_str().expect("a text").contains("frozen adapter"));
    let metrics = std::fs::read_to_string(demo.run().join("metrics.jsonl")).expect("metrics");
    let steps: Vec<Value> = metrics
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .filter(|line: &Value| line.get("grad_norm").is_some())
        .collect();
    assert_eq!(steps.len(), 2);
    for step in &steps {
        assert_eq!(step["updates"], 4);
        for key in ["value_loss", "value_grad_norm", "clip_ratio/dual_mean", "approx_kl", "kl"] {
            assert!(step[key].is_number(), "{key}: {step}");
        }
    }
    let audit = |expected: bool| {
        let audited = finish(start(Command::new(learner).arg("audit").arg(demo.run())));
        assert_eq!(audited.status.success(), expected, "{}{}", audited.stdout, audited.stderr);
        audited.stdout
    };
    audit(true);
    std::fs::write(&head, b"another head").expect("written");
    assert!(audit(false).contains("value_head"));
}
