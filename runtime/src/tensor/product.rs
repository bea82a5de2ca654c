//! Matrix products.

use std::panic::Location;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;

use super::elementwise::broadcast_shape;
use super::{Operand, Tensor};
use crate::graph::Graph;
use crate::ops::{GraphBuilder, NodeId, floats};
use crate::shape::elements;

impl<'t> Tensor<'t> {
    /// `[batch…, m, k] × [batch…, k, n] → [batch…, m, n]`, f32; batch dimensions broadcast. An
    /// operand with one axis is a row on the left and a column on the right, and that axis is not
    /// in the result.
    #[track_caller]
    pub fn matmul(self, rhs: impl Operand<'t>) -> Tensor<'t> {
        let at = Location::caller();
        let rhs = rhs.lift(self.trace, DType::F32, at);
        let precision = self.trace.precision();
        self.trace.record(at, &[self, rhs], |g, ids| {
            let [a, b] = [ids[0], ids[1]].map(|id| precision.round(g, id));
            matmul(g, a, b)
        })
    }
}

fn matmul(g: &mut Graph, a: NodeId, b: NodeId) -> Result<NodeId, String> {
    let (da, db) = (g.dims(a).clone(), g.dims(b).clone());
    let say = |g: &Graph, why: String| {
        Err(format!(
            "matmul {} × {}: {why}",
            g.symbols.show(&da),
            g.symbols.show(&db)
        ))
    };
    if da.is_empty() || db.is_empty() {
        return say(g, "both need an axis".into());
    }
    if let Err(why) = floats(g.dtype(a), g.dtype(b)) {
        return say(g, why);
    }
    // One axis becomes two: a row on the left, a column on the right.
    let (mut ma, mut mb) = (da.clone(), db.clone());
    if ma.len() == 1 {
        ma.insert(0, Size::ONE);
    }
    if mb.len() == 1 {
        mb.push(Size::ONE);
    }
    let (ra, rb) = (ma.len(), mb.len());
    let (m, k, l, n) = (ma[ra - 2], ma[ra - 1], mb[rb - 2], mb[rb - 1]);
    if k != l {
        let show = |d: Size| d.show(|s| g.symbols.name(s));
        return say(
            g,
            format!("inner dimensions {} and {} differ", show(k), show(l)),
        );
    }
    let Some(batch) = broadcast_shape(&ma[..ra - 2], &mb[..rb - 2]) else {
        return say(g, "batch dimensions do not broadcast".into());
    };
    // With one matrix on the right, the rows of all batches make one matrix, so that nothing is
    // repeated.
    let rows = elements(&ma[..ra - 1]).filter(|_| rb == 2);
    let (left, right) = match rows {
        Some(rows) => (Dims::from_slice(&[rows, k]), mb),
        None => {
            let with = |r, c| batch.iter().copied().chain([r, c]).collect::<Dims>();
            (with(m, k), with(l, n))
        }
    };
    let a = g.reshape(a, if rows.is_some() { &left } else { &ma });
    let a = g.broadcast(a, &left);
    let b = if db.len() == 1 {
        g.reshape(b, &Dims::from_slice(&[l, n]))
    } else {
        b
    };
    let b = g.broadcast(b, &right);
    let product = g.matmul(a, b);
    let mut dims = batch;
    dims.extend((da.len() > 1).then_some(m));
    dims.extend((db.len() > 1).then_some(n));
    Ok(g.reshape(product, &dims))
}
