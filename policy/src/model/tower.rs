//! The vision tower and its merger: patches of images in, embeddings for the decoder out. Patches of
//! all images are packed for the linears; each image attends to itself only.

use std::sync::Arc;

use burn::{
    module::{Module, Param},
    tensor::{Int, Tensor, TensorData},
};

use super::{
    adapter::Adapter,
    decoder::{Decoder, Rotations},
    error::ModelError,
    ops::{attend, from_f32, gelu, gelu_tanh, layer_norm, linear, rotate, to_f32},
    vision::VisionConfig,
    weights::{Build, Linear, LinearInfo, Source, Table},
};
use crate::vision::Patches;

/// Scores of an attention that exist at one time.
const SCORES: usize = 1 << 26;

/// A layer norm.
#[derive(Module, Debug)]
pub struct LayerNorm {
    /// `[width]`.
    pub weight: Param<Tensor<1>>,
    /// `[width]`.
    pub bias: Param<Tensor<1>>,
}

/// What a patch is multiplied by.
#[derive(Module, Debug)]
pub struct PatchProjection {
    /// `[hidden, 3, time, patch, patch]`.
    pub weight: Param<Tensor<5>>,
    /// `[hidden]`.
    pub bias: Param<Tensor<1>>,
}

/// From patches to the residual stream.
#[derive(Module, Debug)]
pub struct PatchEmbed {
    /// A convolution whose steps do not overlap: a linear over each patch.
    pub proj: PatchProjection,
}

/// Attention of the patches of an image to each other.
#[derive(Module, Debug)]
pub struct VisionAttention {
    /// `[3 * hidden, hidden]`: queries, keys, values.
    pub qkv: Linear,
    /// `[hidden, hidden]`.
    pub proj: Linear,
}

/// A feed-forward layer.
#[derive(Module, Debug)]
pub struct VisionMlp {
    /// `[ffn, hidden]`.
    pub linear_fc1: Linear,
    /// `[hidden, ffn]`.
    pub linear_fc2: Linear,
}

/// One pre-norm block.
#[derive(Module, Debug)]
pub struct Block {
    /// Before the attention.
    pub norm1: LayerNorm,
    /// Before the feed-forward layer.
    pub norm2: LayerNorm,
    /// The attention.
    pub attn: VisionAttention,
    /// The feed-forward layer.
    pub mlp: VisionMlp,
}

/// From blocks of patches to embeddings of the decoder.
#[derive(Module, Debug)]
pub struct Merger {
    /// Of each patch.
    pub norm: LayerNorm,
    /// `[merged, merged]`, over the patches of a block together.
    pub linear_fc1: Linear,
    /// `[decoder's hidden, merged]`.
    pub linear_fc2: Linear,
}

/// `model.visual.*`
#[derive(Module, Debug)]
pub struct Visual {
    /// From pixels.
    pub patch_embed: PatchEmbed,
    /// Learned positions, a square grid that is stretched over each image.
    pub pos_embed: Table,
    /// From the patches up.
    pub blocks: Vec<Block>,
    /// To the decoder.
    pub merger: Merger,
}

/// What the names of the tower's modules start with.
pub(crate) const PREFIX: &str = "model.visual";
/// The path of what patches are multiplied by, a convolution.
pub(crate) const PATCHES: &str = "model.visual.patch_embed.proj";
/// Linears of a block, in the order of their slots; the merger's two follow the last block's.
const LINEARS: [&str; 4] = ["attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2"];

impl VisionConfig {
    /// Name and `[outputs, inputs]` of every linear, in the order of their slots.
    fn shapes(&self, out: usize) -> Vec<(String, [usize; 2])> {
        let (h, f, merged) = (self.hidden, self.ffn, self.merged());
        let block = |i: usize| {
            let shapes = [[3 * h, h], [h, h], [f, h], [h, f]];
            let name = move |name| format!("{PREFIX}.blocks.{i}.{name}");
            LINEARS.into_iter().map(name).zip(shapes)
        };
        let merger = [("linear_fc1", [merged, merged]), ("linear_fc2", [out, merged])];
        let merger = merger.map(|(name, shape)| (format!("{PREFIX}.merger.{name}"), shape));
        (0..self.depth).flat_map(block).chain(merger).collect()
    }

    /// Its linears, in the order of their slots.
    pub(crate) fn linears(&self, out: usize) -> impl Iterator<Item = LinearInfo> {
        let shapes = self.shapes(out).into_iter();
        shapes.map(|(path, [outputs, inputs])| LinearInfo { path, inputs, outputs })
    }

    /// Every weight by its name in the file, with its shape.
    pub(crate) fn tensors(&self, out: usize) -> Vec<(String, Vec<usize>)> {
        let h = self.hidden;
        let patch = vec![h, 3, self.time, self.patch, self.patch];
        let mut names = vec![
            (format!("{PATCHES}.weight"), patch),
            (format!("{PATCHES}.bias"), vec![h]),
            (format!("{PREFIX}.pos_embed.weight"), vec![self.positions, h]),
        ];
        for (path, shape) in self.shapes(out) {
            names.push((format!("{path}.weight"), shape.to_vec()));
            names.push((format!("{path}.bias"), vec![shape[0]]));
        }
        let norms = (0..self.depth).flat_map(|i| [1, 2].map(|n| format!("blocks.{i}.norm{n}")));
        for norm in norms.chain(["merger.norm".into()]) {
            for part in ["weight", "bias"] {
                names.push((format!("{PREFIX}.{norm}.{part}"), vec![h]));
            }
        }
        names
    }
}

impl<S: Source> Build<'_, S> {
    pub(super) fn visual(&mut self, config: &VisionConfig) -> Result<Visual, S::Error> {
        let shapes = config.shapes(self.config.hidden);
        let mut linears = shapes.iter().map(|(path, shape)| (path.as_str(), *shape));
        let h = config.hidden;
        let patch = [h, 3, config.time, config.patch, config.patch];
        let mut next = |build: &mut Self| {
            let (path, shape) = linears.next().unwrap_or_default();
            Ok(Linear {
                weight: build.param(&format!("{path}.weight"), shape)?,
                bias: Some(build.param(&format!("{path}.bias"), [shape[0]])?),
            })
        };
        let mut block = |i: usize| {
            Ok(Block {
                norm1: self.layer_norm(&format!("blocks.{i}.norm1"), h)?,
                norm2: self.layer_norm(&format!("blocks.{i}.norm2"), h)?,
                attn: VisionAttention { qkv: next(self)?, proj: next(self)? },
                mlp: VisionMlp { linear_fc1: next(self)?, linear_fc2: next(self)? },
            })
        };
        let blocks = (0..config.depth).map(&mut block).collect::<Result<_, S::Error>>()?;
        Ok(Visual {
            blocks,
            merger: Merger {
                linear_fc1: next(self)?,
                linear_fc2: next(self)?,
                norm: self.layer_norm("merger.norm", h)?,
            },
            patch_embed: PatchEmbed {
                proj: PatchProjection {
                    weight: self.param(&format!("{PATCHES}.weight"), patch)?,
                    bias: self.param(&format!("{PATCHES}.bias"), [h])?,
                },
            },
            pos_embed: Table {
                weight: self.param(&format!("{PREFIX}.pos_embed.weight"), [config.positions, h])?,
            },
        })
    }

    fn layer_norm(&mut self, name: &str, width: usize) -> Result<LayerNorm, S::Error> {
        Ok(LayerNorm {
            weight: self.param(&format!("{PREFIX}.{name}.weight"), [width])?,
            bias: self.param(&format!("{PREFIX}.{name}.bias"), [width])?,
        })
    }
}

/// The tower over some images.
pub(crate) struct Tower<'a> {
    decoder: &'a Decoder,
    visual: &'a Visual,
    config: &'a VisionConfig,
    adapter: Option<&'a Adapter>,
    /// Slot of its first linear.
    first: usize,
    pixels: Tensor<2>,
    /// Four learned positions of each patch, and their shares `[patches, 4, 1]`.
    places: (Tensor<1, Int>, Tensor<3>),
    rope: Rotations,
    /// Images with equally many patches that follow each other: their number, and patches of each.
    groups: Vec<(usize, usize)>,
}

impl<'a> Tower<'a> {
    /// The tower over `images`, at least one.
    pub(crate) fn new(
        decoder: &'a Decoder,
        adapter: Option<&'a Adapter>,
        images: &[Arc<Patches>],
    ) -> Result<Self, ModelError> {
        let (config, visual) = decoder.visual()?;
        let device = decoder.device();
        let mut pixels = Vec::new();
        let mut places = Places::new(config);
        let mut groups: Vec<(usize, usize)> = Vec::new();
        for image in images {
            decoder.check_image(image)?;
            pixels.extend_from_slice(image.values());
            places.add(image);
            match groups.last_mut() {
                Some((images, patches)) if *patches == image.count() => *images += 1,
                _ => groups.push((1, image.count())),
            }
        }
        let rows = pixels.len() / config.patch_values();
        let tensor = |values: Vec<f32>, shape: [usize; 3]| {
            Tensor::<3>::from_data(TensorData::new(values, shape), device)
        };
        let half = config.hidden / config.heads / 2;
        let pixels = TensorData::new(pixels, [rows, config.patch_values()]);
        Ok(Self {
            decoder,
            visual,
            config,
            adapter,
            first: decoder.config().vision_slot(),
            pixels: from_f32(Tensor::from_data(pixels, device), decoder.dtype()),
            places: (decoder.int(&places.index), tensor(places.shares, [rows, 4, 1])),
            rope: (tensor(places.cos, [rows, 1, half]), tensor(places.sin, [rows, 1, half])),
            groups,
        })
    }

    /// Number of blocks.
    pub(crate) fn depth(&self) -> usize {
        self.config.depth
    }

    /// The merger's output `[ids, decoder's hidden]`.
    pub(crate) fn run(&self) -> Tensor<2> {
        let hidden = (0..self.depth()).fold(self.enter(), |x, i| self.block(i, x));
        self.merge(hidden)
    }

    /// What enters the first block, `[patches, hidden]`.
    pub(crate) fn enter(&self) -> Tensor<2> {
        let proj = &self.visual.patch_embed.proj;
        let weight = proj.weight.val().flatten::<2>(1, 4);
        let x = self.pixels.clone().matmul(weight.transpose()).add(proj.bias.val().unsqueeze());
        let [rows, hidden] = x.dims();
        let learned = to_f32(self.visual.pos_embed.weight.val().select(0, self.places.0.clone()));
        let learned = learned.reshape([rows, 4, hidden]).mul(self.places.1.clone());
        let learned = learned.sum_dim(1).reshape([rows, hidden]);
        x.add(from_f32(learned, self.decoder.dtype()))
    }

    fn project(&self, slot: usize, linear_: &Linear, x: Tensor<2>) -> Tensor<2> {
        linear(x, linear_, self.adapter.and_then(|a| a.lora(self.first + slot)))
    }

    /// Block `index` over `[patches, hidden]`.
    pub(crate) fn block(&self, index: usize, x: Tensor<2>) -> Tensor<2> {
        let Some(block) = self.visual.blocks.get(index) else { return x };
        let slot = index * LINEARS.len();
        let h = layer_norm(x.clone(), &block.norm1);
        let h = self.attention(self.project(slot, &block.attn.qkv, h));
        let x = x.add(self.project(slot + 1, &block.attn.proj, h));
        let h = layer_norm(x.clone(), &block.norm2);
        let h = to_f32(self.project(slot + 2, &block.mlp.linear_fc1, h));
        let h = from_f32(gelu_tanh(h), self.decoder.dtype());
        x.add(self.project(slot + 3, &block.mlp.linear_fc2, h))
    }

    /// `[patches, 3 * hidden]` to `[patches, hidden]`.
    fn attention(&self, qkv: Tensor<2>) -> Tensor<2> {
        let (heads, hidden) = (self.config.heads, self.config.hidden);
        let dim = hidden / heads;
        let rows = qkv.dims()[0];
        let part = |i: usize| {
            let part = qkv.clone().slice([0..rows, i * hidden..(i + 1) * hidden]);
            part.reshape([rows, heads, dim])
        };
        let turned = |x: Tensor<3>| {
            let turned = rotate(to_f32(x), self.rope.0.clone(), self.rope.1.clone());
            from_f32(turned, self.decoder.dtype())
        };
        let (q, k, v) = (turned(part(0)), turned(part(1)), part(2));
        let mut start = 0;
        let mut out = Vec::with_capacity(self.groups.len());
        for &(images, patches) in &self.groups {
            let end = start + images * patches;
            let own = |x: &Tensor<3>| {
                let own = x.clone().slice([start..end, 0..heads, 0..dim]);
                own.reshape([images, patches, heads, dim]).swap_dims(1, 2)
            };
            let (q, k, v) = (own(&q), own(&k), own(&v));
            let step = (SCORES / (images * heads * patches)).clamp(1, patches);
            let lines = (0..patches).step_by(step).map(|from| {
                let to = patches.min(from + step);
                let q = q.clone().slice([0..images, 0..heads, from..to, 0..dim]);
                attend(q, k.clone(), v.clone(), None)
            });
            let lines = Tensor::cat(lines.collect(), 2);
            out.push(lines.swap_dims(1, 2).reshape([images * patches, hidden]));
            start = end;
        }
        Tensor::cat(out, 0)
    }

    /// The last block's output as embeddings `[ids, decoder's hidden]`.
    pub(crate) fn merge(&self, x: Tensor<2>) -> Tensor<2> {
        let merger = &self.visual.merger;
        let slot = self.depth() * LINEARS.len();
        let block = self.config.merge * self.config.merge;
        let rows = x.dims()[0];
        let x = layer_norm(x, &merger.norm).reshape([rows / block, self.config.merged()]);
        let x = to_f32(self.project(slot, &merger.linear_fc1, x));
        let x = from_f32(gelu(x), self.decoder.dtype());
        self.project(slot + 1, &merger.linear_fc2, x)
    }
}

/// Where patches lie, for the learned and for the rotary positions.
struct Places {
    merge: usize,
    side: usize,
    inverse: Vec<f32>,
    index: Vec<u32>,
    shares: Vec<f32>,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Places {
    fn new(config: &VisionConfig) -> Self {
        let half = config.hidden / config.heads / 2;
        let theta = config.theta as f32;
        let inverse = |i: usize| 1.0 / theta.powf((2 * i) as f32 / half as f32);
        Self {
            merge: config.merge,
            side: config.side(),
            inverse: (0..half / 2).map(inverse).collect(),
            index: Vec::new(),
            shares: Vec::new(),
            cos: Vec::new(),
            sin: Vec::new(),
        }
    }

    fn add(&mut self, image: &Patches) {
        let [_, height, width] = image.grid().map(|side| side as usize);
        let (merge, side) = (self.merge, self.side);
        // The two neighbours in the learned grid, and the share of the second.
        let along = |place: usize, length: usize| {
            let at = place as f32 * (side - 1) as f32 / length.saturating_sub(1).max(1) as f32;
            let low = at.floor();
            let first = (low as usize).min(side - 1);
            (first, (first + 1).min(side - 1), at - low)
        };
        for patch in 0..image.count() {
            let (block, inner) = (patch / (merge * merge), patch % (merge * merge));
            let row = block / (width / merge) * merge + inner / merge;
            let column = block % (width / merge) * merge + inner % merge;
            let (top, bottom, down) = along(row, height);
            let (left, right, over) = along(column, width);
            for (y, down) in [(top, 1.0 - down), (bottom, down)] {
                for (x, over) in [(left, 1.0 - over), (right, over)] {
                    self.index.push((y * side + x) as u32);
                    self.shares.push(down * over);
                }
            }
            for place in [row, column] {
                for frequency in &self.inverse {
                    let (sin, cos) = f64::from(place as f32 * frequency).sin_cos();
                    self.cos.push(cos as f32);
                    self.sin.push(sin as f32);
                }
            }
        }
    }
}
