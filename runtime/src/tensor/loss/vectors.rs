//! Losses of vectors: by their distances and angles.

use std::panic::Location;

use super::{CrossEntropy, Reduction};
use crate::ops::GraphBuilder;
use crate::tensor::Tensor;
use crate::tensor::arrange::ramp;

impl<'t> Tensor<'t> {
    /// max(0, d(x, positive) − d(x, negative) + `margin`), where d is
    /// [`Tensor::pairwise_distance`] with power `p` and ε = 10⁻⁶ (Schroff et al. 2015): vectors
    /// along the last axis.
    #[track_caller]
    pub fn triplet(
        self,
        positive: Tensor<'t>,
        negative: Tensor<'t>,
        margin: f32,
        p: f32,
        reduction: Reduction,
    ) -> Tensor<'t> {
        let at = Location::caller();
        let (x, positive) = self.beside_target("triplet", positive, at);
        let (x, negative) = x.beside_target("triplet", negative, at);
        let near = x.pairwise_distance(positive, p, 1e-6);
        let far = x.pairwise_distance(negative, p, 1e-6);
        (near - far + margin).relu().reduced("triplet", reduction)
    }

    /// 1 − cos where the target is 1, max(0, cos − `margin`) where it is −1, for the cosine of the
    /// angle between vectors along the last axis; the target is f32 of the shape without it.
    #[track_caller]
    pub fn cosine_embedding(
        self,
        other: Tensor<'t>,
        target: Tensor<'t>,
        margin: f32,
        reduction: Reduction,
    ) -> Tensor<'t> {
        let at = Location::caller();
        let (x, other) = self.beside_target("cosine_embedding", other, at);
        let x = x.require(at, |g, x| match g.dims(x).len() {
            0 => Err("cosine_embedding of scalars: vectors are needed".into()),
            _ => Ok(()),
        });
        if x.is_poisoned() {
            return x;
        }
        let cosine = x.cosine_similarity(other, x.rank() - 1, 1e-8);
        let (cosine, target) = cosine.beside_target("cosine_embedding", target, at);
        target
            .gt(0.0)
            .select(1.0 - cosine, (cosine - margin).relu())
            .reduced("cosine_embedding", reduction)
    }

    /// The contrastive loss of queries `[n, width]` with keys of the same shape (van den Oord et al.
    /// 2018): the cross entropy of the cosines of all pairs, divided by `temperature`, where key i
    /// belongs to query i. Of image and text vectors, the loss of CLIP is the mean of both
    /// directions.
    #[track_caller]
    pub fn info_nce(self, keys: Tensor<'t>, temperature: f32, reduction: Reduction) -> Tensor<'t> {
        let at = Location::caller();
        let (queries, keys) = self.beside_target("info_nce", keys, at);
        let queries = queries.require(at, |g, x| {
            if g.dims(x).len() != 2 {
                let shown = g.symbols.show(g.dims(x));
                return Err(format!("info_nce of {shown}: [n, width] is needed"));
            }
            if !(temperature > 0.0 && temperature.is_finite()) {
                return Err(format!(
                    "info_nce: {temperature} is not a temperature above 0"
                ));
            }
            Ok(())
        });
        if queries.is_poisoned() {
            return queries;
        }
        self.trace.on_behalf(at, || {
            let unit = |x: Tensor<'t>| x / x.norm_keep(1, 2.0).maximum(1e-12);
            let cosines = unit(queries).matmul(unit(keys).t());
            let labels = self.trace.record(at, &[queries], |g, ids| {
                let n = g.dims(ids[0])[0];
                Ok(ramp(g, n))
            });
            let options = CrossEntropy {
                reduction,
                ..CrossEntropy::default()
            };
            (cosines / temperature).cross_entropy_with(labels, options)
        })
    }
}
