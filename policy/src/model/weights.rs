//! The decoder's weights as Burn modules. Fields carry Hugging Face's names, so that a parameter's
//! path in the module is the tensor's name in the file, but for what `file_name` renames.

use burn::{
    module::{Module, Param, ParamId},
    tensor::Tensor,
};

use super::{
    config::{Architecture, ModelConfig},
    hybrid::Hybrid,
    tower::{self, Visual},
};

/// An embedding or a head: `[vocab, hidden]`.
#[derive(Module, Debug)]
pub struct Table {
    /// Row `i` belongs to token `i`.
    pub weight: Param<Tensor<2>>,
}

/// The scale of an RMS norm.
#[derive(Module, Debug)]
pub struct Norm {
    /// `[width]`.
    pub weight: Param<Tensor<1>>,
    /// Whether the scale is `1 + weight` and multiplied in f32, as in Qwen3.5.
    #[module(skip)]
    pub zero_centred: bool,
}

/// `y = x Wᵀ + b`.
#[derive(Module, Debug)]
pub struct Linear {
    /// `[out, in]`.
    pub weight: Param<Tensor<2>>,
    /// `[out]`.
    pub bias: Option<Param<Tensor<1>>>,
}

/// Grouped-query attention.
#[derive(Module, Debug)]
pub struct Attention {
    /// `[heads * head_dim, hidden]`; in Qwen3.5 twice as high, each head's gate after its queries.
    pub q_proj: Linear,
    /// `[kv_heads * head_dim, hidden]`.
    pub k_proj: Linear,
    /// `[kv_heads * head_dim, hidden]`.
    pub v_proj: Linear,
    /// `[hidden, heads * head_dim]`.
    pub o_proj: Linear,
    /// `[head_dim]`, not in Llama.
    pub q_norm: Option<Norm>,
    /// `[head_dim]`, not in Llama.
    pub k_norm: Option<Norm>,
    /// Whether `q_proj` gives a gate of the output too.
    #[module(skip)]
    pub gated: bool,
}

/// A depthwise causal convolution.
#[derive(Module, Debug)]
pub struct Convolution {
    /// `[channels, 1, taps]`, the last tap on the newest row.
    pub weight: Param<Tensor<3>>,
}

/// Gated DeltaNet (<https://arxiv.org/abs/2412.06464>).
#[derive(Module, Debug)]
pub struct DeltaNet {
    /// `[2 * keys + values, hidden]`: queries, keys, values.
    pub in_proj_qkv: Linear,
    /// `[values, hidden]`: the gate of the output.
    pub in_proj_z: Linear,
    /// `[value_heads, hidden]`: how much is written.
    pub in_proj_b: Linear,
    /// `[value_heads, hidden]`: how fast is forgotten.
    pub in_proj_a: Linear,
    /// `[hidden, values]`.
    pub out_proj: Linear,
    /// Over queries, keys and values.
    pub conv1d: Convolution,
    /// `[value_heads]`, added to `in_proj_a`'s output.
    pub dt_bias: Param<Tensor<1>>,
    /// `[value_heads]`, the logarithm of the decay's factor.
    pub a_log: Param<Tensor<1>>,
    /// `[value_dim]`, of the output.
    pub norm: Norm,
    /// Its heads.
    #[module(skip)]
    pub shape: Hybrid,
}

/// What lets a layer's rows see each other.
#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant, reason = "one a layer, and modules are not boxed")]
pub enum Mixer {
    /// `self_attn.*`
    SelfAttn(Attention),
    /// `linear_attn.*`
    LinearAttn(DeltaNet),
}

/// The gated feed-forward layer: `down(silu(gate x) ⊙ up x)`.
#[derive(Module, Debug)]
pub struct Mlp {
    /// `[ffn, hidden]`.
    pub gate_proj: Linear,
    /// `[ffn, hidden]`.
    pub up_proj: Linear,
    /// `[hidden, ffn]`.
    pub down_proj: Linear,
}

/// One pre-norm layer.
#[derive(Module, Debug)]
pub struct Layer {
    /// Before the attention.
    pub input_layernorm: Norm,
    /// The attention.
    pub mixer: Mixer,
    /// Before the feed-forward layer.
    pub post_attention_layernorm: Norm,
    /// The feed-forward layer.
    pub mlp: Mlp,
}

/// Everything but an untied head.
#[derive(Module, Debug)]
pub struct Body {
    /// The embedding, and the head where they are tied.
    pub embed_tokens: Table,
    /// From the embedding up.
    pub layers: Vec<Layer>,
    /// Before the head.
    pub norm: Norm,
}

/// All weights of a decoder.
#[derive(Module, Debug)]
pub struct Weights {
    /// `model.*`
    pub model: Body,
    /// `model.visual.*`, in a vision-language checkpoint.
    pub visual: Option<Visual>,
    /// `lm_head.weight`, absent where it is tied to the embedding.
    pub lm_head: Option<Table>,
}

/// The linears of a layer with attention, in the order of their slots.
pub const LINEARS: [&str; 7] = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
];

/// The linears of a layer with gated DeltaNet, in the order of their slots.
pub(crate) const DELTA_LINEARS: [&str; 8] = [
    "linear_attn.in_proj_qkv",
    "linear_attn.in_proj_z",
    "linear_attn.in_proj_b",
    "linear_attn.in_proj_a",
    "linear_attn.out_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
];

/// The file's name of the parameter at `path`, the modules' field names.
pub(crate) fn file_name(config: &ModelConfig, path: &[String]) -> String {
    let name = path
        .join(".")
        .replace("mixer.SelfAttn", "self_attn")
        .replace("mixer.LinearAttn", "linear_attn")
        .replace(".a_log", ".A_log");
    match name.split_once('.') {
        Some(("model", rest)) => format!("{}.{rest}", config.prefix()),
        Some(("visual", rest)) => format!("{}.{rest}", tower::PREFIX),
        _ => name,
    }
}

/// A linear that an adapter can target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinearInfo {
    /// Its path inside of the base model, as in `model.layers.0.mlp.up_proj`.
    pub path: String,
    /// Elements of its input.
    pub inputs: usize,
    /// Elements of its output.
    pub outputs: usize,
}

impl Layer {
    /// Linear number `index` of [`LINEARS`] or [`DELTA_LINEARS`].
    pub(crate) fn linear(&self, index: usize) -> &Linear {
        match (&self.mixer, index) {
            (Mixer::SelfAttn(it), 0) => &it.q_proj,
            (Mixer::SelfAttn(it), 1) => &it.k_proj,
            (Mixer::SelfAttn(it), 2) => &it.v_proj,
            (Mixer::SelfAttn(it), 3) => &it.o_proj,
            (Mixer::LinearAttn(it), 0) => &it.in_proj_qkv,
            (Mixer::LinearAttn(it), 1) => &it.in_proj_z,
            (Mixer::LinearAttn(it), 2) => &it.in_proj_b,
            (Mixer::LinearAttn(it), 3) => &it.in_proj_a,
            (Mixer::LinearAttn(it), 4) => &it.out_proj,
            (Mixer::SelfAttn(_), 4) | (Mixer::LinearAttn(_), 5) => &self.mlp.gate_proj,
            (Mixer::SelfAttn(_), 5) | (Mixer::LinearAttn(_), 6) => &self.mlp.up_proj,
            _ => &self.mlp.down_proj,
        }
    }
}

impl ModelConfig {
    /// What the names of the decoder's modules start with.
    pub(crate) fn prefix(&self) -> &'static str {
        match self.hybrid() {
            Some(hybrid) if hybrid.vision_language => "model.language_model",
            _ => "model",
        }
    }

    /// The shape of a layer's DeltaNet, where it has one.
    pub(crate) fn delta(&self, layer: usize) -> Option<&Hybrid> {
        self.hybrid().filter(|hybrid| hybrid.full.get(layer) == Some(&false))
    }

    /// `[outputs, inputs]` of each of [`LINEARS`].
    pub(crate) fn linear_shapes(&self) -> [[usize; 2]; 7] {
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let (h, f) = (self.hidden, self.ffn);
        let queries = if self.hybrid().is_some() { 2 * q } else { q };
        [[queries, h], [kv, h], [kv, h], [h, q], [f, h], [f, h], [h, f]]
    }

    /// Name and `[outputs, inputs]` of a layer's linears, in the order of their slots.
    pub(crate) fn layer_linears(&self, layer: usize) -> Vec<(&'static str, [usize; 2])> {
        let Some(delta) = self.delta(layer) else {
            return LINEARS.into_iter().zip(self.linear_shapes()).collect();
        };
        let (h, f, heads, values) = (self.hidden, self.ffn, delta.value_heads, delta.values());
        let own = [[delta.channels(), h], [values, h], [heads, h], [heads, h], [h, values]];
        let shapes = own.into_iter().chain([[f, h], [f, h], [h, f]]);
        DELTA_LINEARS.into_iter().zip(shapes).collect()
    }

    /// The slot of a layer's first linear.
    pub(crate) fn first_slot(&self, layer: usize) -> usize {
        let deltas = (0..layer).filter(|&i| self.delta(i).is_some()).count();
        layer * LINEARS.len() + deltas * (DELTA_LINEARS.len() - LINEARS.len())
    }

    /// Whether a layer's linear has a bias, by its name.
    pub(crate) fn biased(&self, name: &str) -> bool {
        match name.split_once('.') {
            Some(("self_attn", _)) => self.attention_bias,
            Some(("mlp", _)) => self.mlp_bias,
            _ => false,
        }
    }

    /// The slot of the vision tower's first linear.
    pub(crate) fn vision_slot(&self) -> usize {
        self.first_slot(self.layers)
    }

    /// Every linear but the head, in the order of its slots: layer by layer, then those of the vision
    /// tower.
    pub fn linears(&self) -> Vec<LinearInfo> {
        let layer = |i: usize| {
            self.layer_linears(i).into_iter().map(move |(name, [outputs, inputs])| LinearInfo {
                path: format!("{}.layers.{i}.{name}", self.prefix()),
                inputs,
                outputs,
            })
        };
        let vision = self.vision().into_iter().flat_map(|vision| vision.linears(self.hidden));
        (0..self.layers).flat_map(layer).chain(vision).collect()
    }
}

/// Makes [`Weights`] by asking for each tensor by its name in the file and its shape.
pub(crate) trait Source {
    type Error;
    fn tensor<const D: usize>(
        &mut self,
        name: &str,
        shape: [usize; D],
    ) -> Result<Tensor<D>, Self::Error>;
}

impl Weights {
    pub(crate) fn build<S: Source>(config: &ModelConfig, source: &mut S) -> Result<Self, S::Error> {
        let prefix = config.prefix();
        let embed = [config.vocab, config.hidden];
        let mut build = Build { config, source };
        Ok(Self {
            model: Body {
                embed_tokens: Table {
                    weight: build.param(&format!("{prefix}.embed_tokens.weight"), embed)?,
                },
                layers: (0..config.layers).map(|i| build.layer(i)).collect::<Result<_, _>>()?,
                norm: build.norm(&format!("{prefix}.norm"), config.hidden)?,
            },
            visual: config.vision().map(|vision| build.visual(vision)).transpose()?,
            lm_head: match config.tied {
                true => None,
                false => Some(Table { weight: build.param("lm_head.weight", embed)? }),
            },
        })
    }

    /// The head's weight `[vocab, hidden]`.
    pub(crate) fn head(&self) -> Tensor<2> {
        self.lm_head.as_ref().unwrap_or(&self.model.embed_tokens).weight.val()
    }
}

pub(super) struct Build<'a, S> {
    pub(super) config: &'a ModelConfig,
    source: &'a mut S,
}

impl<S: Source> Build<'_, S> {
    /// A frozen parameter.
    pub(super) fn param<const D: usize>(
        &mut self,
        name: &str,
        shape: [usize; D],
    ) -> Result<Param<Tensor<D>>, S::Error> {
        let tensor = self.source.tensor(name, shape)?;
        Ok(Param::initialized(ParamId::new(), tensor.set_require_grad(false)))
    }

    fn norm(&mut self, name: &str, len: usize) -> Result<Norm, S::Error> {
        let zero_centred = self.config.hybrid().is_some();
        Ok(Norm { weight: self.param(&format!("{name}.weight"), [len])?, zero_centred })
    }

    fn linear(
        &mut self,
        layer: &str,
        (name, shape): (&str, [usize; 2]),
    ) -> Result<Linear, S::Error> {
        let path = format!("{layer}.{name}");
        Ok(Linear {
            weight: self.param(&format!("{path}.weight"), shape)?,
            bias: match self.config.biased(name) {
                true => Some(self.param(&format!("{path}.bias"), [shape[0]])?),
                false => None,
            },
        })
    }

    fn head_norm(&mut self, layer: &str, name: &str) -> Result<Option<Norm>, S::Error> {
        match self.config.architecture {
            Architecture::Llama => Ok(None),
            Architecture::Qwen3 | Architecture::Qwen3_5(_) => {
                self.norm(&format!("{layer}.self_attn.{name}"), self.config.head_dim).map(Some)
            }
        }
    }

    fn delta(&mut self, layer: &str, shape: &Hybrid) -> Result<DeltaNet, S::Error> {
        let path = format!("{layer}.linear_attn");
        let Hybrid { kernel, value_heads, value_dim, .. } = *shape;
        let channels = shape.channels();
        let (hidden, values) = (self.config.hidden, shape.values());
        let mut linear = |name: &str, outputs: usize, inputs: usize| {
            self.linear(&path, (name, [outputs, inputs]))
        };
        Ok(DeltaNet {
            in_proj_qkv: linear("in_proj_qkv", channels, hidden)?,
            in_proj_z: linear("in_proj_z", values, hidden)?,
            in_proj_b: linear("in_proj_b", value_heads, hidden)?,
            in_proj_a: linear("in_proj_a", value_heads, hidden)?,
            out_proj: linear("out_proj", hidden, values)?,
            conv1d: Convolution {
                weight: self.param(&format!("{path}.conv1d.weight"), [channels, 1, kernel])?,
            },
            dt_bias: self.param(&format!("{path}.dt_bias"), [value_heads])?,
            a_log: self.param(&format!("{path}.A_log"), [value_heads])?,
            norm: Norm {
                weight: self.param(&format!("{path}.norm.weight"), [value_dim])?,
                zero_centred: false,
            },
            shape: shape.clone(),
        })
    }

    fn layer(&mut self, index: usize) -> Result<Layer, S::Error> {
        let config = self.config;
        let path = format!("{}.layers.{index}", config.prefix());
        let [q, k, v, o, gate, up, down] = config.linear_shapes();
        let mixer = match config.delta(index) {
            Some(shape) => Mixer::LinearAttn(self.delta(&path, shape)?),
            None => Mixer::SelfAttn(Attention {
                q_proj: self.linear(&path, (LINEARS[0], q))?,
                k_proj: self.linear(&path, (LINEARS[1], k))?,
                v_proj: self.linear(&path, (LINEARS[2], v))?,
                o_proj: self.linear(&path, (LINEARS[3], o))?,
                q_norm: self.head_norm(&path, "q_norm")?,
                k_norm: self.head_norm(&path, "k_norm")?,
                gated: config.hybrid().is_some(),
            }),
        };
        Ok(Layer {
            input_layernorm: self.norm(&format!("{path}.input_layernorm"), config.hidden)?,
            mixer,
            post_attention_layernorm: self
                .norm(&format!("{path}.post_attention_layernorm"), config.hidden)?,
            mlp: Mlp {
                gate_proj: self.linear(&path, (LINEARS[4], gate))?,
                up_proj: self.linear(&path, (LINEARS[5], up))?,
                down_proj: self.linear(&path, (LINEARS[6], down))?,
            },
        })
    }
}
