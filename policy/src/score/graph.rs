//! The pass over a packed batch with Burn's autodiff, on any device: as one graph, or layer by layer
//! with only the layers' inputs kept (activation checkpointing). Base weights stay outside of the
//! graph unless they are trained, so no weight-sized gradient is made for them.

use burn::tensor::Tensor;

use super::{
    Derivatives, Gradients, ScoreBatch, ScoreConfig, Scored, Scores, Slopes, Trainable, ValueHead,
    attention, embed::Embedding, evidence::Examiner, head, layout::Layout,
};
use crate::model::{
    Adapter, Decoder, DeltaRows, DeltaRule, DeltaState, ModelError, Runs, Sequences,
};

/// A recorded pass: its scores, and what the backward pass needs.
pub(super) struct GraphTape {
    decoder: Decoder,
    adapter: Option<Adapter>,
    trainable: Trainable,
    config: ScoreConfig,
    layout: Layout,
    embedding: Embedding,
    saved: Saved,
    /// The normed hidden states that predict scored ids, outside of the graph.
    hidden: Tensor<2>,
    scores: Scores,
}

enum Saved {
    /// The whole graph, from the first layer's input, where that wants a gradient, up to the normed
    /// hidden states that predict scored ids.
    Graph(Option<Box<Tensor<2>>>, Box<Tensor<2>>),
    /// The input of each layer, and of the final norm.
    Inputs(Vec<Tensor<2>>),
}

/// Scores without gradients, and values by a value head.
pub(super) fn score(
    decoder: &Decoder,
    adapter: Option<&Adapter>,
    value: Option<&ValueHead>,
    batch: &ScoreBatch,
    config: &ScoreConfig,
) -> Result<Scored, ModelError> {
    let layout = Layout::new(decoder, batch)?;
    let examiner = Examiner::new(batch, &layout, config)?;
    let pass = Pass::new(decoder, adapter, &layout);
    let mut x = Embedding::new(decoder, adapter, None, &layout, false)?.rows();
    for index in 0..decoder.config().layers {
        x = pass.layer(index, x);
    }
    let hidden = pass.last(x);
    let values = value.map(|head| Ok(layout.split(&head.values(&hidden)?)));
    Ok((scores(decoder, &hidden, &layout, config, examiner.as_ref())?, values.transpose()?))
}

fn scores(
    decoder: &Decoder,
    hidden: &Tensor<2>,
    layout: &Layout,
    config: &ScoreConfig,
    examiner: Option<&Examiner>,
) -> Result<Scores, ModelError> {
    Ok(head::forward(decoder, hidden, &layout.targets, config, examiner)?.split(layout))
}

/// One pass over a layout: the same code with and without gradients.
struct Pass<'a> {
    decoder: &'a Decoder,
    adapter: Option<&'a Adapter>,
    layout: &'a Layout,
    rope: crate::model::Rotations,
    masks: attention::Masks,
    /// The prefix, where there is one, and the continuations.
    runs: (Option<Runs>, Runs),
}

impl Sequences for &Pass<'_> {
    fn attend(&mut self, _layer: usize, q: Tensor<3>, k: Tensor<3>, v: Tensor<3>) -> Tensor<2> {
        self.masks.attend(self.decoder, self.layout, q, k, v)
    }

    /// The continuations go on from the prefix's state.
    fn recur(&mut self, _layer: usize, rule: &DeltaRule<'_>, rows: DeltaRows) -> Tensor<2> {
        let (prefix, own) = &self.runs;
        let Some(prefix) = prefix else {
            return own.join(rule.run(own.split(&rows), DeltaState::default()).0);
        };
        let (out, state) = rule.run(prefix.split(&rows), DeltaState::default());
        let own_out = own.join(rule.run(own.split(&rows), state.repeat(own.count())).0);
        Tensor::cat(vec![prefix.join(out), own_out], 0)
    }
}

impl<'a> Pass<'a> {
    fn new(decoder: &'a Decoder, adapter: Option<&'a Adapter>, layout: &'a Layout) -> Self {
        let rope = decoder.rotations(&layout.positions);
        let masks = attention::Masks::new(decoder, layout);
        let lens: Vec<usize> = layout.rows.iter().map(|row| row.1).collect();
        let prefix = (layout.prefix > 0).then(|| Runs::new(decoder, 0, &[layout.prefix]));
        let runs = (prefix, Runs::new(decoder, layout.prefix, &lens));
        Self { decoder, adapter, layout, rope, masks, runs }
    }

    fn layer(&self, index: usize, x: Tensor<2>) -> Tensor<2> {
        self.decoder.layer(index, self.adapter, x, &self.rope, &mut &*self)
    }

    /// The final norm at the rows that predict scored ids.
    fn last(&self, x: Tensor<2>) -> Tensor<2> {
        let rows = x.select(0, self.decoder.int(&self.layout.predictors));
        self.decoder.final_norm(rows)
    }
}

impl GraphTape {
    pub(super) fn record(
        decoder: &Decoder,
        adapter: Option<&Adapter>,
        trainable: Trainable,
        batch: &ScoreBatch,
        config: &ScoreConfig,
    ) -> Result<Self, ModelError> {
        let layout = Layout::new(decoder, batch)?;
        let examiner = Examiner::new(batch, &layout, config)?;
        let embedding =
            Embedding::new(decoder, adapter, Some(trainable), &layout, config.checkpointing)?;
        let (decoder, adapter) = match (trainable, adapter) {
            (Trainable::Adapter, Some(adapter)) => (decoder.clone(), Some(adapter.tracked())),
            (_, adapter) => (decoder.tracked(), adapter.cloned()),
        };
        let layers = decoder.config().layers;
        let (saved, hidden) = if config.checkpointing {
            let (plain, frozen) = (decoder.untracked(), adapter.as_ref().map(Adapter::untracked));
            let pass = Pass::new(&plain, frozen.as_ref(), &layout);
            let mut inputs = vec![embedding.rows()];
            for index in 0..layers {
                let x = inputs[index].clone();
                inputs.push(pass.layer(index, x));
            }
            let hidden = pass.last(inputs[layers].clone());
            (Saved::Inputs(inputs), hidden)
        } else {
            let pass = Pass::new(&decoder, adapter.as_ref(), &layout);
            let leaf = embedding.trained().then(|| embedding.rows().autodiff().require_grad());
            let mut x = leaf.clone().unwrap_or_else(|| embedding.rows());
            for index in 0..layers {
                x = pass.layer(index, x);
            }
            let output = pass.last(x);
            (Saved::Graph(leaf.map(Box::new), Box::new(output.clone())), output.inner())
        };
        let scores = scores(&decoder.untracked(), &hidden, &layout, config, examiner.as_ref())?;
        let config = *config;
        Ok(Self { decoder, adapter, trainable, config, layout, embedding, saved, hidden, scores })
    }

    pub(super) fn scores(&self) -> &Scores {
        &self.scores
    }

    pub(super) fn values(&self, head: &ValueHead) -> Result<Vec<Vec<f32>>, ModelError> {
        Ok(self.layout.split(&head.values(&self.hidden)?))
    }

    pub(super) fn backward(self, derivatives: Derivatives<'_>) -> Result<Gradients, ModelError> {
        let Self { decoder, adapter, trainable, config, layout, embedding, saved, hidden, scores } =
            self;
        let slopes = Slopes::new(derivatives, &layout, &scores, decoder.config().hidden)?;
        let mut gradients = Gradients::default();
        if layout.targets.is_empty() {
            return Ok(gradients);
        }
        let base = trainable == Trainable::Base;
        let plain = decoder.untracked();
        let (mut dhidden, dhead) =
            head::backward(&plain, &hidden, &layout.targets, &slopes, &config, base);
        if let Some((value, slopes)) = &slopes.values {
            dhidden = value.backward(&hidden, slopes, dhidden, &mut gradients);
        }
        if let Some(dhead) = dhead {
            gradients.insert(plain.head_name(), dhead);
        }
        let collect =
            |gradients: &mut Gradients, graph: &mut burn::tensor::Gradients| match &adapter {
                Some(adapter) if !base => adapter.collect(graph, gradients),
                _ => decoder.collect(graph, gradients),
            };
        let lost = || ModelError::Device("a layer gave no gradient for its input".into());
        match saved {
            Saved::Graph(leaf, output) => {
                let mut graph = output.mul(dhidden.autodiff()).sum().backward();
                collect(&mut gradients, &mut graph);
                if let Some(leaf) = leaf {
                    let dx = leaf.grad_remove(&mut graph).ok_or_else(lost)?;
                    embedding.backward(dx, &mut gradients)?;
                }
            }
            Saved::Inputs(mut inputs) => {
                let pass = Pass::new(&decoder, adapter.as_ref(), &layout);
                let mut segment =
                    |input: Tensor<2>, dout: Tensor<2>, f: &dyn Fn(Tensor<2>) -> Tensor<2>| {
                        let leaf = input.autodiff().require_grad();
                        let mut graph = f(leaf.clone()).mul(dout.autodiff()).sum().backward();
                        collect(&mut gradients, &mut graph);
                        leaf.grad_remove(&mut graph)
                    };
                let input = inputs.pop().ok_or_else(lost)?;
                let mut dx = segment(input, dhidden, &|x| pass.last(x)).ok_or_else(lost)?;
                for index in (0..inputs.len()).rev() {
                    let input = inputs.pop().ok_or_else(lost)?;
                    dx = segment(input, dx, &|x| pass.layer(index, x)).ok_or_else(lost)?;
                }
                embedding.backward(dx, &mut gradients)?;
            }
        }
        Ok(gradients)
    }
}
