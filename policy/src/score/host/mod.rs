//! Scoring on the CPU in f32 with the backward pass written by hand. Matrix products are Burn's; all
//! between them is fused loops over rows, vectorised and spread over threads, so a pass touches memory
//! a few times where a graph of single operations touches it dozens of times. Every sum has a fixed
//! order: the same input gives the same bits.

mod attention;
mod head;
mod heads;
mod layer;
mod linear;
mod mat;
mod math;
mod rows;

use burn::tensor::DType;

use self::{
    layer::{Frame, Layer, Rope, Saved},
    linear::{Sink, host},
    mat::Mat,
    rows::{rms_norm, rms_norm_backward},
};
use super::{Gradients, ScoreBatch, ScoreConfig, Scores, Trainable, layout::Layout};
use crate::{
    device::Device,
    model::{Adapter, Decoder, ModelError},
};

/// Whether this path serves the decoder.
pub(super) fn serves(decoder: &Decoder) -> bool {
    decoder.dtype() == DType::F32 && *decoder.device() == Device::flex()
}

/// A recorded pass.
pub(super) struct HostTape {
    decoder: Decoder,
    layers: Vec<Layer>,
    rope: Rope,
    trainable: Trainable,
    config: ScoreConfig,
    layout: Layout,
    saved: Vec<Kept>,
    /// The last layer's output at the rows that predict scored ids, its norm, and the norm's scales.
    last: Mat,
    normed: Mat,
    scales: Vec<f32>,
    sums: Vec<f32>,
    scores: Scores,
}

/// What is kept of a layer.
enum Kept {
    /// With checkpointing: its input alone.
    Input(Mat),
    /// Everything.
    All(Box<Saved>),
}

/// Scores without gradients.
pub(super) fn score(
    decoder: &Decoder,
    adapter: Option<&Adapter>,
    batch: &ScoreBatch,
    config: &ScoreConfig,
) -> Result<Scores, ModelError> {
    let layout = Layout::new(decoder, batch)?;
    let rope = decoder.rope_at(&layout.positions);
    let frame = Frame { decoder, layout: &layout, rope: &rope };
    let mut x = Mat::from_tensor(decoder.embed(&layout.ids), decoder.config().hidden)?;
    for index in 0..decoder.config().layers {
        (x, _) = Layer::new(decoder, adapter, index)?.forward(frame, x)?;
    }
    let last = pick(&x, &layout.predictors)?;
    let (normed, _) = final_norm(decoder, &last)?;
    let scored = head::forward(decoder, &normed, &layout.targets, config)?;
    Ok(scored.output.split(&layout))
}

fn final_norm(decoder: &Decoder, x: &Mat) -> Result<(Mat, Vec<f32>), ModelError> {
    let weight = host(decoder.weights.model.norm.weight.val())?;
    rms_norm(x, &weight, decoder.config().norm_eps as f32)
}

/// Rows `rows` of `x`.
fn pick(x: &Mat, rows: &[u32]) -> Result<Mat, ModelError> {
    let (values, cols) = (x.read()?, x.cols);
    let picked = rows.iter().flat_map(|&row| &values[row as usize * cols..][..cols]);
    Ok(Mat::new(picked.copied().collect(), rows.len(), cols))
}

impl HostTape {
    pub(super) fn record(
        decoder: &Decoder,
        adapter: Option<&Adapter>,
        trainable: Trainable,
        batch: &ScoreBatch,
        config: &ScoreConfig,
    ) -> Result<Self, ModelError> {
        let layout = Layout::new(decoder, batch)?;
        let rope = decoder.rope_at(&layout.positions);
        let frame = Frame { decoder, layout: &layout, rope: &rope };
        let layers: Vec<Layer> = (0..decoder.config().layers)
            .map(|index| Layer::new(decoder, adapter, index))
            .collect::<Result<_, _>>()?;
        let mut saved = Vec::with_capacity(layers.len());
        let mut x = Mat::from_tensor(decoder.embed(&layout.ids), decoder.config().hidden)?;
        for layer in &layers {
            let input = config.checkpointing.then(|| x.copy()).transpose()?;
            let (y, all) = layer.forward(frame, x)?;
            saved.push(input.map_or_else(|| Kept::All(Box::new(all)), Kept::Input));
            x = y;
        }
        let last = pick(&x, &layout.predictors)?;
        let (normed, scales) = final_norm(decoder, &last)?;
        let scored = head::forward(decoder, &normed, &layout.targets, config)?;
        let scores = scored.output.split(&layout);
        let (decoder, config, sums) = (decoder.clone(), *config, scored.sums);
        Ok(Self {
            decoder,
            layers,
            rope,
            trainable,
            config,
            layout,
            saved,
            last,
            normed,
            scales,
            sums,
            scores,
        })
    }

    pub(super) fn scores(&self) -> &Scores {
        &self.scores
    }

    pub(super) fn backward(self, dlogp: &[Vec<f32>]) -> Result<Gradients, ModelError> {
        let Self { decoder, layers, rope, trainable, layout, saved, last, normed, scales, .. } =
            self;
        let dlogp = layout.join(dlogp)?;
        let mut gradients = Gradients::default();
        let sink = &mut Sink { gradients: &mut gradients, trainable };
        let base = sink.base();
        let scored = (layout.targets.as_slice(), self.sums.as_slice());
        let (dnormed, dhead) =
            head::backward(&decoder, &normed, scored, &dlogp, &self.config, base)?;
        if let Some(dhead) = dhead {
            sink.gradients.insert(decoder.head_name().into(), dhead);
        }
        let weight = host(decoder.weights.model.norm.weight.val())?;
        let mut dlast = Mat::zeros(last.rows, last.cols);
        let dnorm = rms_norm_backward(&last, &weight, &scales, &dnormed, &mut dlast, base)?;
        sink.vector("model.norm.weight".into(), dnorm);
        let mut dx = Mat::zeros(layout.ids.len(), last.cols);
        scatter(&mut dx, &dlast, &layout.predictors)?;
        let frame = Frame { decoder: &decoder, layout: &layout, rope: &rope };
        for (index, (layer, kept)) in layers.iter().zip(saved).enumerate().rev() {
            let saved = match kept {
                Kept::All(saved) => *saved,
                Kept::Input(x) => layer.forward(frame, x)?.1,
            };
            dx = layer.backward(frame, saved, dx, base || index > 0, sink)?;
        }
        if base {
            let c = decoder.config();
            let mut dembed = Mat::zeros(c.vocab, c.hidden);
            scatter(&mut dembed, &dx, &layout.ids)?;
            let dembed = dembed.into_tensor([c.vocab, c.hidden]);
            sink.gradients.insert("model.embed_tokens.weight".into(), dembed);
        }
        Ok(gradients)
    }
}

/// Adds each row of `from` to row `rows[i]` of `to`, in order.
fn scatter(to: &mut Mat, from: &Mat, rows: &[u32]) -> Result<(), ModelError> {
    let cols = from.cols;
    let to = to.write()?;
    for (&row, from) in rows.iter().zip(from.read()?.chunks_exact(cols)) {
        let to = &mut to[row as usize * cols..][..cols];
        to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
    }
    Ok(())
}
