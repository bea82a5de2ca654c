//! Scans against central differences.

use slabwise_compiler::graph::{BodyBuilder, Feed};
use slabwise_compiler::ops::GraphBuilder;
use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;

use super::support::{Rng, dims};
use super::{Case, floats};

/// Loops over steps: with one carry or two, forwards and backwards, with a part of the steps' results
/// read and with the last carry alone.
pub fn scans(rng: &mut Rng, cases: &mut Vec<Case>) {
    for (reverse, last) in [(false, false), (true, false), (false, true), (true, true)] {
        let arguments = vec![
            floats(rng, &[3, 2, 2]),
            floats(rng, &[2, 2]),
            floats(rng, &[2, 2]),
        ];
        let name = format!("a scan, reverse {reverse}, of its last carry {last}");
        cases.push(Case::new(name, arguments, move |g, x| {
            let square = dims(&[2, 2]);
            let of = || (DType::F32, square.clone());
            let mut body = BodyBuilder::within(g);
            let h = body.input(Feed::Carry, &[x[1]], "h", of());
            let c = body.input(Feed::Carry, &[x[2]], "c", of());
            let part = body.input(Feed::Step, &[x[0]], "part", of());
            let w = body.input(Feed::Whole, &[x[1]], "w", of());
            let later = Feed::Neighbour { later: !reverse };
            let beside = body.input(later, &[x[0], x[2]], "beside", of());
            let b = &mut body.graph;
            let product = b.matmul(h, w);
            let sum = b.add(product, part);
            let next = b.scalar(ScalarOp::Tanh, &[sum]);
            let gated = b.mul(c, next);
            let next_c = b.add(gated, beside);
            let result = b.mul(next, c);
            b.outputs = vec![next, next_c, result];
            let scan = body.finish(g, 3, reverse);
            let [h, c, y] = [0, 1, 2].map(|k| g.scan_result(scan, k).expect("a result"));
            if last {
                let at = if reverse { 0 } else { 2 };
                let (h, c) = (g.part_at(h, at), g.part_at(c, at));
                return g.mul(h, c);
            }
            let both = g.add(h, c);
            g.mul(both, y)
        }));
    }
}
