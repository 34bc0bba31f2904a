//! Losses of log-probabilities, entropies and values: both backward passes give the derivative that a
//! difference quotient finds, and the heads' is autodiff's.

use super::{super::layout::Layout, *};

/// A smooth loss of what a pass gives, with its derivatives.
struct Given {
    loss: f64,
    log_probs: Vec<Vec<f32>>,
    entropies: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
}

fn given(scores: &Scores, values: &[Vec<f32>]) -> Given {
    let entropies = scores.entropies.as_deref().unwrap();
    let map = |rows: &[Vec<f32>], f: fn(f32) -> f32| -> Vec<Vec<f32>> {
        rows.iter().map(|row| row.iter().map(|&x| f(x)).collect()).collect()
    };
    let sum = |rows: &[Vec<f32>], f: fn(f64) -> f64| -> f64 {
        rows.iter().flatten().map(|&x| f(x.into())).sum()
    };
    Given {
        loss: sum(&scores.log_probs, |l| 0.1 * l - l.cos())
            + sum(entropies, |h| 3.0 * h + h.sin())
            + sum(values, |v| 0.5 * v * v + 0.3 * v),
        log_probs: map(&scores.log_probs, |l| 0.1 + l.sin()),
        entropies: map(entropies, |h| 3.0 + h.cos()),
        values: map(values, |v| v + 0.3),
    }
}

fn value_head(decoder: &Decoder) -> ValueHead {
    let mut head = ValueHead::zeros(decoder);
    Parameters::update(&mut head, &mut |_, value| {
        let wave: Vec<f32> = (0..value.dims()[0]).map(|i| (i as f32 * 1.3).sin() * 0.2).collect();
        Tensor::from_floats(wave.as_slice(), &value.device())
    });
    head
}

const CONFIG: ScoreConfig = ScoreConfig {
    temperature: 0.8,
    checkpointing: false,
    head_chunk: 4,
    entropy: true,
    examine: None,
};

/// The loss, and the gradients of what is trainable and of the value head.
fn run(
    decoder: &Decoder,
    adapter: &Adapter,
    head: &ValueHead,
    trainable: Trainable,
    batch: &ScoreBatch,
) -> (f64, Gradients) {
    let tape = forward(decoder, Some(adapter), trainable, batch, &CONFIG).unwrap();
    let it = given(tape.scores(), &tape.values(head).unwrap());
    let derivatives = Derivatives {
        log_probs: &it.log_probs,
        entropies: Some(&it.entropies),
        values: Some((head, &it.values)),
    };
    (it.loss, tape.backward(derivatives).unwrap())
}

#[test]
fn both_passes_agree_on_entropies_and_values() {
    for (architecture, trainable) in EACH {
        let decoder = decoder(architecture);
        let (adapter, head) = (adapter(&decoder), value_head(&decoder));
        for (prefix, checkpointing) in [(0, true), (5, false), (150, true)] {
            let batch = batch(prefix);
            let config = ScoreConfig { checkpointing, ..CONFIG };
            let args = (&decoder, Some(&adapter), trainable, &batch, &config);
            let graph = GraphTape::record(args.0, args.1, args.2, args.3, args.4).unwrap();
            let host = HostTape::record(args.0, args.1, args.2, args.3, args.4).unwrap();
            let (ours, theirs) = (host.values(&head).unwrap(), graph.values(&head).unwrap());
            near("values", &ours.concat(), &theirs.concat(), 1e-5);
            let plain = log_probs_and_values(&decoder, args.1, &head, &batch, &config).unwrap();
            assert_eq!((&plain.0, &plain.1), (host.scores(), &ours), "the same without gradients");
            let it = given(graph.scores(), &theirs);
            let derivatives = Derivatives {
                log_probs: &it.log_probs,
                entropies: Some(&it.entropies),
                values: Some((&head, &it.values)),
            };
            let found = host.backward(derivatives).unwrap();
            let expected = graph.backward(derivatives).unwrap();
            same(&format!("{trainable:?}"), &found, &expected, 3e-4);
        }
    }
}

/// Steps along its own gradient g change a loss by |g|² times their length.
#[test]
fn gradients_are_what_difference_quotients_find() {
    for (architecture, trainable) in every() {
        let decoder = decoder(architecture);
        let (adapter, head) = (adapter(&decoder), value_head(&decoder));
        let batch = batch(7);
        let (_, gradients) = run(&decoder, &adapter, &head, trainable, &batch);
        let square = gradients.norm().unwrap().powi(2);
        // The loss moves by this much to either side: far above rounding, small against its bends,
        // which are sharp where decays are trained.
        let decays = decoder.config().hybrid().is_some();
        let (change, tolerance) = if decays { (0.005, 1e-2) } else { (0.05, 1e-3) };
        let step = change / square;
        let at = |step: f64| {
            let (mut decoder, mut adapter, mut head) =
                (decoder.clone(), adapter.clone(), head.clone());
            let mut moved = |name: &str, value: Tensor<1>| match gradients.get(name) {
                Some(gradient) => value + gradient.clone().mul_scalar(step),
                None => value,
            };
            match trainable {
                Trainable::Adapter => Parameters::update(&mut adapter, &mut moved),
                Trainable::Base => Parameters::update(&mut decoder, &mut moved),
            }
            Parameters::update(&mut head, &mut moved);
            run(&decoder, &adapter, &head, trainable, &batch).0
        };
        let quotient = (at(step) - at(-step)) / (2.0 * step);
        let error = (quotient - square).abs() / square;
        assert!(error < tolerance, "{trainable:?}: {quotient} and {square}");
    }
}

#[test]
fn the_heads_derivatives_are_those_of_autodiff() {
    let decoder = decoder(Architecture::Qwen3);
    let (head, batch) = (value_head(&decoder), batch(3));
    let layout = Layout::new(&decoder, &batch).unwrap();
    let count = layout.targets.len();
    let wave: Vec<f32> = (0..count * 40).map(|i| (i as f32 * 0.37).sin()).collect();
    let hidden = Tensor::<1>::from_floats(wave.as_slice(), decoder.device()).reshape([count, 40]);
    let column = |salt: f32| -> Vec<f32> { (0..count).map(|i| (i as f32 + salt).cos()).collect() };
    let (dlogp, dentropy, dvalue) = (column(0.0), column(1.0), column(2.0));

    let leaf = hidden.clone().autodiff().require_grad();
    let logits = leaf.clone().matmul(decoder.head().transpose().autodiff());
    let log = burn::tensor::activation::log_softmax(logits.div_scalar(CONFIG.temperature), 1);
    let picked = log.clone().gather(1, decoder.int(&layout.targets).unsqueeze_dim(1).autodiff());
    let entropy = log.clone().exp().mul(log).sum_dim(1).neg();
    let mut weight = None;
    Parameters::update(&mut head.clone(), &mut |name, value| {
        if name.ends_with("weight") {
            weight = Some(value.clone());
        }
        value
    });
    let value = leaf.clone().matmul(weight.unwrap().unsqueeze_dim::<2>(1).autodiff());
    let slopes = |values: &[f32]| {
        Tensor::<1>::from_floats(values, decoder.device()).unsqueeze_dim::<2>(1).autodiff()
    };
    let loss = picked.mul(slopes(&dlogp)) + entropy.mul(slopes(&dentropy));
    let mut graph = (loss + value.mul(slopes(&dvalue))).sum().backward();
    let expected = leaf.grad_remove(&mut graph).unwrap();

    let given = Slopes {
        log_probs: dlogp,
        entropies: Some(dentropy),
        values: Some((&head, dvalue.clone())),
    };
    let (found, _) = head::backward(&decoder, &hidden, &layout.targets, &given, &CONFIG, false);
    let found = head.backward(&hidden, &dvalue, found, &mut Gradients::default());
    let flat = |t: Tensor<2>| -> Vec<f32> { t.into_data().try_into_vec().unwrap() };
    near("dL/dhidden", &flat(found), &flat(expected), 1e-5);
}

#[test]
fn a_value_head_saves_trains_alone_and_refuses_what_does_not_fit() {
    let decoder = decoder(Architecture::Qwen3);
    let (adapter, mut head, batch) = (adapter(&decoder), value_head(&decoder), batch(3));
    let (_, mut gradients) = run(&decoder, &adapter, &head, Trainable::Adapter, &batch);
    let all = gradients.iter().count();
    let own = gradients.take_value_head();
    let names: Vec<&str> = own.iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["value_head.bias", "value_head.weight"]);
    assert_eq!(gradients.iter().count(), all - 2);
    let before = head.to_safetensors().unwrap();
    Optimizer::new(AdamWSettings::default()).step(0.01, &mut head, own).unwrap();
    let bytes = head.to_safetensors().unwrap();
    assert_ne!(bytes, before);
    let back = ValueHead::from_safetensors(&bytes, &decoder).unwrap();
    assert_eq!(back.to_safetensors().unwrap(), bytes);
    assert!(ValueHead::from_safetensors(&bytes[..bytes.len() - 4], &decoder).is_err());
    let narrow = Decoder::random(
        ModelConfig { hidden: 24, ..config(Architecture::Qwen3) },
        5,
        &Device::flex(),
    );
    assert!(ValueHead::from_safetensors(&bytes, &narrow).is_err());

    let tape = |entropy| {
        let config = ScoreConfig { entropy, ..CONFIG };
        forward(&decoder, Some(&adapter), Trainable::Adapter, &batch, &config).unwrap()
    };
    assert!(tape(true).values(&ValueHead::zeros(&narrow)).is_err());
    let zeros: Vec<Vec<f32>> =
        tape(true).log_probs().iter().map(|row| vec![0.0; row.len()]).collect();
    let none = Derivatives::from(&zeros);
    let entropies = Derivatives { entropies: Some(&zeros), ..none };
    assert!(tape(false).backward(entropies).is_err(), "no entropies were recorded");
    let other = ValueHead::zeros(&narrow);
    let values = Derivatives { values: Some((&other, &zeros)), ..none };
    assert!(tape(true).backward(values).is_err(), "a head of another width");
}
