//! Parameters in and out of an autodiff graph, and replaced by an optimizer, by name.

use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param},
    tensor::{Gradients as Graph, Tensor},
};

use super::{
    adapter::{Adapter, Lora},
    adapter_bytes::lora_key,
    config::ModelConfig,
    decoder::Decoder,
    weights::{LinearInfo, file_name},
};
use crate::score::Gradients;

/// Makes every parameter a leaf that wants a gradient, or takes it out of the graph.
struct Track(bool);

impl ModuleMapper for Track {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let plain = param.val().inner();
        let value = if self.0 { plain.autodiff().require_grad() } else { plain };
        Param::initialized(param.id, value)
    }
}

struct Collect<'a> {
    config: &'a ModelConfig,
    path: Vec<String>,
    graph: &'a mut Graph,
    into: &'a mut Gradients,
}

impl ModuleVisitor for Collect<'_> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = param.val().grad_remove(self.graph) {
            self.into.insert(file_name(self.config, &self.path), gradient);
        }
    }
}

struct Update<'a> {
    config: &'a ModelConfig,
    path: Vec<String>,
    f: &'a mut dyn FnMut(&str, Tensor<1>) -> Tensor<1>,
}

impl ModuleMapper for Update<'_> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        replace(&param, &file_name(self.config, &self.path), self.f)
    }
}

fn replace<const D: usize>(
    param: &Param<Tensor<D>>,
    name: &str,
    f: &mut dyn FnMut(&str, Tensor<1>) -> Tensor<1>,
) -> Param<Tensor<D>> {
    let value = param.val().inner();
    let shape = value.dims();
    Param::initialized(param.id, f(name, value.flatten(0, D - 1)).reshape(shape))
}

impl Adapter {
    pub(crate) fn tracked(&self) -> Self {
        self.clone().map(&mut Track(true))
    }

    pub(crate) fn untracked(&self) -> Self {
        self.clone().map(&mut Track(false))
    }

    pub(crate) fn collect(&self, graph: &mut Graph, into: &mut Gradients) {
        for (linear, lora) in self.targeted() {
            for (part, param) in [("lora_A", &lora.lora_a), ("lora_B", &lora.lora_b)] {
                if let Some(gradient) = param.val().grad_remove(graph) {
                    into.insert(key(linear, part), gradient);
                }
            }
        }
    }

    pub(crate) fn update_named(&mut self, f: &mut dyn FnMut(&str, Tensor<1>) -> Tensor<1>) {
        for (linear, lora) in self.info.linears.iter().zip(&mut self.loras) {
            if let Some(Lora { lora_a, lora_b }) = lora {
                *lora_a = replace(lora_a, &key(linear, "lora_A"), f);
                *lora_b = replace(lora_b, &key(linear, "lora_B"), f);
            }
        }
    }
}

fn key(linear: &LinearInfo, part: &str) -> String {
    lora_key(&linear.path, part)
}

impl Decoder {
    /// All weights as leaves that want gradients.
    pub(crate) fn tracked(&self) -> Self {
        self.with_weights(self.weights.clone().map(&mut Track(true)))
    }

    pub(crate) fn untracked(&self) -> Self {
        self.with_weights(self.weights.clone().map(&mut Track(false)))
    }

    pub(crate) fn collect(&self, graph: &mut Graph, into: &mut Gradients) {
        let config = self.config();
        self.weights.visit(&mut Collect { config, path: Vec::new(), graph, into });
    }

    pub(crate) fn update_named(&mut self, f: &mut dyn FnMut(&str, Tensor<1>) -> Tensor<1>) {
        let config = self.config();
        let weights = self.weights.clone().map(&mut Update { config, path: Vec::new(), f });
        self.weights = weights;
    }

    /// The head's weight `[vocab, hidden]`.
    pub(crate) fn head(&self) -> Tensor<2> {
        self.weights.head()
    }

    /// The embedding's name in the checkpoint.
    pub(crate) fn embedding_name(&self) -> String {
        format!("{}.embed_tokens.weight", self.config().prefix())
    }

    /// The head's name in the checkpoint: the embedding's where they are tied.
    pub(crate) fn head_name(&self) -> String {
        match self.config().tied {
            true => self.embedding_name(),
            false => "lm_head.weight".into(),
        }
    }
}
