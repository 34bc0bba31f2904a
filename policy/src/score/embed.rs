//! What enters the first layer, and what its gradient means below it: the embeddings of a batch's ids
//! with images in place of theirs. The one place that knows where those rows come from, so that every
//! pass begins with plain numbers.

use burn::tensor::{IndexingUpdateOp, Tensor};

use super::{Gradients, Trainable, layout::Layout};
use crate::model::{Adapter, Decoder, ModelError, Placement, Tower};

/// The embeddings of a batch's ids, images put in.
pub(super) struct Embedding {
    decoder: Decoder,
    adapter: Option<Adapter>,
    ids: Vec<u32>,
    images: Placement,
    rows: Tensor<2>,
    /// Whether the table is trained.
    table: bool,
    tower: Option<Trained>,
}

/// What is kept of a vision tower that is trained.
enum Trained {
    /// Its output, with the whole graph.
    Graph(Box<Tensor<2>>),
    /// The input of each block, and of the merger.
    Inputs(Vec<Tensor<2>>),
}

impl Embedding {
    /// Embeds a layout's ids; `trainable` is what shall get gradients, if anything. A vision tower
    /// that is not trained leaves nothing behind.
    pub(super) fn new(
        decoder: &Decoder,
        adapter: Option<&Adapter>,
        trainable: Option<Trainable>,
        layout: &Layout,
        checkpointing: bool,
    ) -> Result<Self, ModelError> {
        let images = layout.images.clone();
        let table = trainable == Some(Trainable::Base);
        let below = !images.is_empty()
            && match trainable {
                None => false,
                Some(Trainable::Base) => true,
                Some(Trainable::Adapter) => adapter.is_some_and(Adapter::sees),
            };
        let plain = (decoder.untracked(), adapter.map(Adapter::untracked));
        let mut rows = plain.0.embed(&layout.ids);
        let (decoder, adapter) = match (below, trainable) {
            (false, _) => plain,
            (true, Some(Trainable::Adapter)) => (plain.0, plain.1.map(|it| it.tracked())),
            (true, _) => (plain.0.tracked(), plain.1),
        };
        let mut tower = None;
        if !images.is_empty() {
            let merged = if below && checkpointing {
                let plain = (decoder.untracked(), adapter.as_ref().map(Adapter::untracked));
                let own = images.tower(&plain.0, plain.1.as_ref())?;
                let mut inputs = vec![own.enter()];
                for block in 0..own.depth() {
                    let x = inputs[block].clone();
                    inputs.push(own.block(block, x));
                }
                let merged = own.merge(inputs[own.depth()].clone());
                tower = Some(Trained::Inputs(inputs));
                merged
            } else {
                let merged = images.tower(&decoder, adapter.as_ref())?.run();
                tower = below.then(|| Trained::Graph(Box::new(merged.clone())));
                if below { merged.inner() } else { merged }
            };
            rows = images.put(rows, &merged);
        }
        Ok(Self { decoder, adapter, ids: layout.ids.clone(), images, rows, table, tower })
    }

    /// `[ids, hidden]`, outside of any graph.
    pub(super) fn rows(&self) -> Tensor<2> {
        self.rows.clone()
    }

    /// Whether something below the first layer is trained, so that [`Embedding::backward`] is wanted.
    pub(super) fn trained(&self) -> bool {
        self.table || self.tower.is_some()
    }

    /// Adds what the gradient `dx` by [`Embedding::rows`] means for what is trained.
    ///
    /// # Errors
    /// A failing device.
    pub(super) fn backward(
        self,
        dx: Tensor<2>,
        gradients: &mut Gradients,
    ) -> Result<(), ModelError> {
        let Self { decoder, adapter, ids, images, table, tower, .. } = self;
        if let Some(tower) = tower {
            let dmerged = images.take(&dx);
            let mut collect = |graph: &mut burn::tensor::Gradients| match &adapter {
                Some(adapter) if !table => adapter.collect(graph, gradients),
                _ => decoder.collect(graph, gradients),
            };
            match tower {
                Trained::Graph(merged) => {
                    collect(&mut merged.mul(dmerged.autodiff()).sum().backward());
                }
                Trained::Inputs(inputs) => {
                    let tower = images.tower(&decoder, adapter.as_ref())?;
                    backward_by_blocks(&tower, inputs, dmerged, table, &mut collect)?;
                }
            }
        }
        if table {
            let (ids, dx) = if images.is_empty() {
                (ids, dx)
            } else {
                let text = images.others(ids.len());
                let picked = text.iter().filter_map(|&row| ids.get(row as usize)).copied();
                (picked.collect(), dx.select(0, decoder.int(&text)))
            };
            let config = decoder.config();
            let empty = Tensor::<2>::zeros([config.vocab, config.hidden], &dx.device());
            let sums = empty.select_assign(0, decoder.int(&ids), dx, IndexingUpdateOp::Add);
            gradients.insert(decoder.embedding_name(), sums);
        }
        Ok(())
    }
}

/// The tower once more from the kept inputs, its last part first; with `base` down to the pixels.
fn backward_by_blocks(
    tower: &Tower<'_>,
    mut inputs: Vec<Tensor<2>>,
    dmerged: Tensor<2>,
    base: bool,
    collect: &mut dyn FnMut(&mut burn::tensor::Gradients),
) -> Result<(), ModelError> {
    let lost = || ModelError::Device("a vision block gave no gradient for its input".into());
    let mut segment = |input: Tensor<2>, dout: Tensor<2>, f: &dyn Fn(Tensor<2>) -> Tensor<2>| {
        let leaf = input.autodiff().require_grad();
        let mut graph = f(leaf.clone()).mul(dout.autodiff()).sum().backward();
        collect(&mut graph);
        leaf.grad_remove(&mut graph).ok_or_else(lost)
    };
    let input = inputs.pop().ok_or_else(lost)?;
    let mut dx = segment(input, dmerged, &|x| tower.merge(x))?;
    while let Some(input) = inputs.pop() {
        let block = inputs.len();
        dx = segment(input, dx, &|x| tower.block(block, x))?;
    }
    if base {
        collect(&mut tower.enter().mul(dx.autodiff()).sum().backward());
    }
    Ok(())
}
