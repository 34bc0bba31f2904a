//! The decoder's weights as Burn modules. Fields carry Hugging Face's names, so that a parameter's
//! path in the module is the tensor's name in the file.

use burn::{
    module::{Module, Param, ParamId},
    tensor::Tensor,
};

use super::config::ModelConfig;

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
    /// `[heads * head_dim, hidden]`.
    pub q_proj: Linear,
    /// `[kv_heads * head_dim, hidden]`.
    pub k_proj: Linear,
    /// `[kv_heads * head_dim, hidden]`.
    pub v_proj: Linear,
    /// `[hidden, heads * head_dim]`.
    pub o_proj: Linear,
    /// `[head_dim]`, Qwen3 only.
    pub q_norm: Option<Norm>,
    /// `[head_dim]`, Qwen3 only.
    pub k_norm: Option<Norm>,
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
    pub self_attn: Attention,
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
    /// `lm_head.weight`, absent where it is tied to the embedding.
    pub lm_head: Option<Table>,
}

/// The linears of a layer, in the order of their slots.
pub const LINEARS: [&str; 7] = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
];

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
    /// Linear number `index` of [`LINEARS`].
    pub(crate) fn linear(&self, index: usize) -> &Linear {
        match index {
            0 => &self.self_attn.q_proj,
            1 => &self.self_attn.k_proj,
            2 => &self.self_attn.v_proj,
            3 => &self.self_attn.o_proj,
            4 => &self.mlp.gate_proj,
            5 => &self.mlp.up_proj,
            _ => &self.mlp.down_proj,
        }
    }
}

impl ModelConfig {
    /// `[outputs, inputs]` of each of [`LINEARS`].
    pub(crate) fn linear_shapes(&self) -> [[usize; 2]; 7] {
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let (h, f) = (self.hidden, self.ffn);
        [[q, h], [kv, h], [kv, h], [h, q], [f, h], [f, h], [h, f]]
    }

    /// Every linear but the head, in the order of its slots: layer by layer, as in [`LINEARS`].
    pub fn linears(&self) -> Vec<LinearInfo> {
        let shapes = self.linear_shapes();
        let layer = |i: usize| {
            LINEARS.iter().zip(shapes).map(move |(name, [outputs, inputs])| LinearInfo {
                path: format!("model.layers.{i}.{name}"),
                inputs,
                outputs,
            })
        };
        (0..self.layers).flat_map(layer).collect()
    }
}

/// Makes [`Weights`] by asking for each tensor by name and shape.
pub(crate) trait Source {
    type Error;
    fn vector(&mut self, name: &str, len: usize) -> Result<Tensor<1>, Self::Error>;
    fn matrix(&mut self, name: &str, shape: [usize; 2]) -> Result<Tensor<2>, Self::Error>;
}

impl Weights {
    pub(crate) fn build<S: Source>(config: &ModelConfig, source: &mut S) -> Result<Self, S::Error> {
        let embed = [config.vocab, config.hidden];
        let table = |source: &mut S, name: &str| -> Result<Table, S::Error> {
            Ok(Table { weight: frozen(source.matrix(name, embed)?) })
        };
        Ok(Self {
            model: Body {
                embed_tokens: table(source, "model.embed_tokens.weight")?,
                layers: (0..config.layers)
                    .map(|i| layer(config, source, i))
                    .collect::<Result<_, _>>()?,
                norm: norm(source, "model.norm", config.hidden)?,
            },
            lm_head: match config.tied {
                true => None,
                false => Some(table(source, "lm_head.weight")?),
            },
        })
    }

    /// The head's weight `[vocab, hidden]`.
    pub(crate) fn head(&self) -> Tensor<2> {
        self.lm_head.as_ref().unwrap_or(&self.model.embed_tokens).weight.val()
    }
}

fn frozen<const D: usize>(tensor: Tensor<D>) -> Param<Tensor<D>> {
    Param::initialized(ParamId::new(), tensor.set_require_grad(false))
}

fn norm<S: Source>(source: &mut S, name: &str, len: usize) -> Result<Norm, S::Error> {
    Ok(Norm { weight: frozen(source.vector(&format!("{name}.weight"), len)?) })
}

fn layer<S: Source>(c: &ModelConfig, source: &mut S, index: usize) -> Result<Layer, S::Error> {
    let prefix = format!("model.layers.{index}");
    let shapes = c.linear_shapes();
    let linear = |source: &mut S, i: usize| -> Result<Linear, S::Error> {
        let name = format!("{prefix}.{}", LINEARS[i]);
        let biased = if i < 4 { c.attention_bias } else { c.mlp_bias };
        let weight = frozen(source.matrix(&format!("{name}.weight"), shapes[i])?);
        let bias = match biased {
            true => Some(frozen(source.vector(&format!("{name}.bias"), shapes[i][0])?)),
            false => None,
        };
        Ok(Linear { weight, bias })
    };
    let head_norm = |source: &mut S, name: &str| match c.architecture {
        super::Architecture::Qwen3 => {
            norm(source, &format!("{prefix}.self_attn.{name}"), c.head_dim).map(Some)
        }
        super::Architecture::Llama => Ok(None),
    };
    Ok(Layer {
        input_layernorm: norm(source, &format!("{prefix}.input_layernorm"), c.hidden)?,
        self_attn: Attention {
            q_proj: linear(source, 0)?,
            k_proj: linear(source, 1)?,
            v_proj: linear(source, 2)?,
            o_proj: linear(source, 3)?,
            q_norm: head_norm(source, "q_norm")?,
            k_norm: head_norm(source, "k_norm")?,
        },
        post_attention_layernorm: norm(
            source,
            &format!("{prefix}.post_attention_layernorm"),
            c.hidden,
        )?,
        mlp: Mlp {
            gate_proj: linear(source, 4)?,
            up_proj: linear(source, 5)?,
            down_proj: linear(source, 6)?,
        },
    })
}
