//! What enters the first layer, and what its gradient means below it: the one place that knows where
//! rows come from, so that every pass begins with plain numbers.

use burn::tensor::{IndexingUpdateOp, Tensor};

use super::{Gradients, Trainable, layout::Layout};
use crate::model::Decoder;

/// The embeddings of a batch's ids.
pub(super) struct Embedding {
    decoder: Decoder,
    ids: Vec<u32>,
    rows: Tensor<2>,
    /// Whether the table is trained.
    table: bool,
}

impl Embedding {
    /// Embeds a layout's ids; `trainable` is what shall get gradients, if anything.
    pub(super) fn new(decoder: &Decoder, trainable: Option<Trainable>, layout: &Layout) -> Self {
        let decoder = decoder.untracked();
        let rows = decoder.embed(&layout.ids);
        let table = trainable == Some(Trainable::Base);
        Self { decoder, ids: layout.ids.clone(), rows, table }
    }

    /// `[ids, hidden]`, outside of any graph.
    pub(super) fn rows(&self) -> Tensor<2> {
        self.rows.clone()
    }

    /// Whether something below the first layer is trained, so that [`Embedding::backward`] is wanted.
    pub(super) fn trained(&self) -> bool {
        self.table
    }

    /// Adds what the gradient `dx` by [`Embedding::rows`] means for what is trained.
    pub(super) fn backward(self, dx: Tensor<2>, gradients: &mut Gradients) {
        if self.table {
            let name = self.decoder.embedding_name();
            let [_, hidden] = dx.dims();
            let empty = Tensor::<2>::zeros([self.decoder.config().vocab, hidden], &dx.device());
            let index = self.decoder.int(&self.ids);
            gradients.insert(name, empty.select_assign(0, index, dx, IndexingUpdateOp::Add));
        }
    }
}
