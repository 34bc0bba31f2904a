//! Scoring on the CPU in f32 with the backward pass written by hand: fused loops over rows, vectorised
//! and spread over threads, so a pass touches memory a few times where a graph of single operations
//! touches it dozens of times. Every sum has a fixed order: the same input gives the same bits.

mod attention;
mod convolution;
mod delta;
mod delta_net;
mod gates;
mod gemm;
mod head;
mod heads;
mod layer;
mod linear;
mod mat;
mod math;
mod rows;
mod self_attention;

use burn::tensor::{DType, Device, Tensor};

use self::{
    layer::{Frame, Layer, Rope, Saved, norm_weight},
    linear::Sink,
    mat::Mat,
    rows::{rms_norm, rms_norm_backward},
};
use super::{
    Derivatives, Gradients, ScoreBatch, ScoreConfig, Scored, Scores, Slopes, Trainable, ValueHead,
    embed::Embedding, evidence::Examiner, layout::Layout,
};
use crate::model::{Adapter, Decoder, ModelError};

/// Whether this path serves the decoder.
pub(super) fn serves(decoder: &Decoder) -> bool {
    decoder.dtype() == DType::F32 && *decoder.device() == Device::flex()
}

/// A recorded pass.
pub(super) struct HostTape {
    decoder: Decoder,
    layers: Vec<Layer>,
    rope: Rope,
    embedding: Embedding,
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
    let rope = decoder.rope_at(&layout.positions);
    let frame = Frame { decoder, layout: &layout, rope: &rope };
    let (ends, layers) = (Ends::new(&layout), decoder.config().layers);
    let embedding = Embedding::new(decoder, adapter, None, &layout, config.checkpointing)?;
    let mut x = embedded(embedding.rows())?;
    for index in 0..layers {
        let layer = Layer::new(decoder, adapter, index)?;
        (x, _) = layer.forward(frame, x, ends.of(index, layers))?;
    }
    let last = x.pick(&ends.predictors)?;
    let (normed, _) = final_norm(decoder, &last)?;
    let scored = head::forward(decoder, &normed, &layout.targets, config, examiner.as_ref())?;
    let values =
        value.map(|head| Ok(layout.split(&head.values_on_host(normed.read()?, normed.cols)?)));
    Ok((scored.output.split(&layout), values.transpose()?))
}

fn embedded(rows: Tensor<2>) -> Result<Mat, ModelError> {
    let cols = rows.dims()[1];
    Mat::from_tensor(rows, cols)
}

fn final_norm(decoder: &Decoder, x: &Mat) -> Result<(Mat, Vec<f32>), ModelError> {
    let weight = norm_weight(&decoder.weights.model.norm)?;
    rms_norm(x, &weight, decoder.config().norm_eps as f32)
}

/// Which rows the last layer must give, and which of those predicts each scored id.
struct Ends {
    kept: Option<Vec<u32>>,
    predictors: Vec<u32>,
}

impl Ends {
    fn new(layout: &Layout) -> Self {
        let mut kept = layout.predictors.clone();
        kept.sort_unstable();
        kept.dedup();
        if kept.is_empty() {
            return Self { kept: None, predictors: Vec::new() };
        }
        let place = |row| kept.partition_point(|k| k < row) as u32;
        let predictors = layout.predictors.iter().map(place).collect();
        Self { kept: Some(kept), predictors }
    }

    /// What layer `index` of `layers` keeps.
    fn of(&self, index: usize, layers: usize) -> Option<&[u32]> {
        self.kept.as_deref().filter(|_| index + 1 == layers)
    }
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
        let examiner = Examiner::new(batch, &layout, config)?;
        let rope = decoder.rope_at(&layout.positions);
        let frame = Frame { decoder, layout: &layout, rope: &rope };
        let layers: Vec<Layer> = (0..decoder.config().layers)
            .map(|index| Layer::new(decoder, adapter, index))
            .collect::<Result<_, _>>()?;
        let mut saved = Vec::with_capacity(layers.len());
        let checkpointing = config.checkpointing;
        let embedding = Embedding::new(decoder, adapter, Some(trainable), &layout, checkpointing)?;
        let mut x = embedded(embedding.rows())?;
        let ends = Ends::new(&layout);
        for (index, layer) in layers.iter().enumerate() {
            let input = config.checkpointing.then(|| x.copy()).transpose()?;
            let (y, all) = layer.forward(frame, x, ends.of(index, layers.len()))?;
            saved.push(input.map_or_else(|| Kept::All(Box::new(all)), Kept::Input));
            x = y;
        }
        let last = x.pick(&ends.predictors)?;
        let (normed, scales) = final_norm(decoder, &last)?;
        let scored = head::forward(decoder, &normed, &layout.targets, config, examiner.as_ref())?;
        let scores = scored.output.split(&layout);
        let (decoder, config, sums) = (decoder.clone(), *config, scored.sums);
        Ok(Self {
            decoder,
            layers,
            rope,
            embedding,
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

    pub(super) fn values(&self, head: &ValueHead) -> Result<Vec<Vec<f32>>, ModelError> {
        Ok(self.layout.split(&head.values_on_host(self.normed.read()?, self.normed.cols)?))
    }

    pub(super) fn backward(self, derivatives: Derivatives<'_>) -> Result<Gradients, ModelError> {
        let Self { decoder, layers, rope, embedding, trainable, layout, saved, last, .. } = self;
        let (normed, scales) = (self.normed, self.scales);
        let slopes = Slopes::new(derivatives, &layout, &self.scores, normed.cols)?;
        let mut gradients = Gradients::default();
        let sink = &mut Sink { gradients: &mut gradients, trainable };
        let base = sink.base();
        let entropies = self.scores.entropies.map(|rows| rows.concat()).unwrap_or_default();
        let (targets, sums) = (layout.targets.as_slice(), self.sums.as_slice());
        let known = head::Known { targets, sums, entropies: &entropies };
        let (mut dnormed, dhead) =
            head::backward(&decoder, &normed, known, &slopes, &self.config, base)?;
        if let Some((value, slopes)) = &slopes.values {
            value.backward_on_host(normed.read()?, slopes, dnormed.write()?, sink.gradients)?;
        }
        if let Some(dhead) = dhead {
            sink.gradients.insert(decoder.head_name(), dhead);
        }
        let weight = norm_weight(&decoder.weights.model.norm)?;
        let prefix = decoder.config().prefix();
        let mut dlast = Mat::zeros(last.rows, last.cols);
        let dnorm = rms_norm_backward(&last, &weight, &scales, &dnormed, &mut dlast, base)?;
        sink.vector(format!("{prefix}.norm.weight"), dnorm);
        let ends = Ends::new(&layout);
        let height = ends.kept.as_ref().map_or(layout.ids.len(), Vec::len);
        let mut dx = dlast.spread(&ends.predictors, height)?;
        let frame = Frame { decoder: &decoder, layout: &layout, rope: &rope };
        for (index, (layer, kept)) in layers.iter().zip(saved).enumerate().rev() {
            let saved = match kept {
                Kept::All(saved) => *saved,
                Kept::Input(x) => layer.forward(frame, x, ends.of(index, layers.len()))?.1,
            };
            dx = layer.backward(frame, saved, dx, embedding.trained() || index > 0, sink)?;
        }
        if embedding.trained() {
            let shape = [dx.rows, dx.cols];
            embedding.backward(dx.into_tensor(shape), &mut gradients)?;
        }
        Ok(gradients)
    }
}
