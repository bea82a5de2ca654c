//! Scans with bodies of a few operations.

use slabwise::shape::Dims;
use slabwise_compiler::graph::{BodyBuilder, Feed, Graph};
use slabwise_compiler::ops::{GraphBuilder, NodeId};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;

use super::Maker;

impl Maker {
    /// A scan over the first axis of a tensor, with a carry that stays below 1, and one of integers
    /// that counts.
    pub(super) fn scan(&mut self) -> Option<()> {
        let steps = |g: &Graph, id: NodeId| {
            let first = g.dims(id).first()?.as_fixed()?;
            let found = g.symbols.any_data_dependent(g.dims(id));
            u32::try_from(first).ok().filter(|&n| n > 0 && !found)
        };
        let x = self.find(|g, id, _| g.dtype(id).is_float() && steps(g, id).is_some())?;
        let (of_x, steps) = (self.of(x), steps(&self.g, x)?);
        let dims = Dims::from_slice(&self.g.dims(x)[1..]);
        let fits = |g: &Graph, id: NodeId| g.dims(id) == &dims && g.dtype(id).is_float();
        let first = self
            .find(|g, id, _| fits(g, id))
            .map(|id| self.g.cast(id, DType::F32))
            .unwrap_or_else(|| self.g.full(0.5, DType::F32, &dims));
        let beside = self.find(|g, id, _| fits(g, id));
        let count = self.g.constant(1.0, DType::I32);
        let mut body = BodyBuilder::within(&self.g);
        let of_step = (self.g.dtype(x), dims.clone());
        let (number, single) = (DType::I32, DType::F32);
        let c = body.input(Feed::Carry, &[first], "carry", (single, dims.clone()));
        let n = body.input(Feed::Carry, &[count], "count", (number, Dims::new()));
        let part = body.input(Feed::Step, &[x], "part", of_step);
        let beside_type = beside.map(|id| (self.g.dtype(id), dims.clone()));
        let w = beside
            .zip(beside_type)
            .map(|(id, of)| body.input(Feed::Whole, &[id], "beside", of));
        let g = &mut body.graph;
        let part = g.cast(part, single);
        let w = match w {
            Some(w) => g.cast(w, single),
            None => g.full(0.5, single, &dims),
        };
        let product = g.mul(c, w);
        let sum = g.add(product, part);
        let next = g.scalar(ScalarOp::Tanh, &[sum]);
        let one = g.constant(1.0, number);
        let counted = g.add(n, one);
        let times = g.broadcast(counted, &dims);
        let times = g.cast(times, single);
        let result = if self.rng.one_in(2) {
            g.mul(next, part)
        } else {
            g.mul(next, times)
        };
        g.outputs = vec![next, counted, result];
        let scan = body.finish(&mut self.g, steps, self.rng.one_in(2));
        let largest = of_x.bound.max(f64::from(steps) + 1.0);
        for (result, bound) in [(0, 1.0), (1, f64::from(steps) + 1.0), (2, largest)] {
            if let Some(all) = self.g.scan_result(scan, result) {
                self.keep(all, bound, result == 1);
                if self.rng.one_in(2) {
                    let at = self.g.body(scan)?.last_time();
                    let last = self.g.part_at(all, at);
                    self.keep(last, bound, result == 1);
                }
            }
        }
        Some(())
    }
}
