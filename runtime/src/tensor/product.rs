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
    #[doc(alias = "mm")]
    #[doc(alias = "mv")]
    #[doc(alias = "bmm")]
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

    /// The sum of products over pairs of axes, of this tensor and of `rhs`: the result has the other
    /// axes of this tensor, then those of `rhs`.
    #[track_caller]
    pub fn tensordot(self, rhs: Tensor<'t>, axes: impl AsRef<[(usize, usize)]>) -> Tensor<'t> {
        let (axes, precision) = (axes.as_ref(), self.trace.precision());
        self.trace
            .record(Location::caller(), &[self, rhs], |g, ids| {
                super::einsum::over_pairs(g, ids[0], ids[1], axes, precision)
                    .map_err(|why| format!("tensordot over {axes:?}: {why}"))
            })
    }

    /// Kronecker's product: every element of this tensor times all of `rhs`, in blocks. Lengths
    /// multiply axis by axis, from the last one on.
    #[track_caller]
    pub fn kron(self, rhs: Tensor<'t>) -> Tensor<'t> {
        let at = Location::caller();
        let (mut apart, mut joined) = ([Dims::new(), Dims::new()], Dims::new());
        let x = self.trace.record(at, &[self, rhs], |g, ids| {
            let [a, b] = [ids[0], ids[1]].map(|id| g.dims(id).clone());
            let rank = a.len().max(b.len());
            for axis in 0..rank {
                let length = |dims: &Dims| {
                    let own = (axis + dims.len()).checked_sub(rank);
                    own.map_or(Size::ONE, |own| dims[own])
                };
                let (n, m) = (length(&a), length(&b));
                let product = n.checked_mul(m).ok_or_else(|| {
                    let show = |d: &Dims| g.symbols.show(d).to_string();
                    format!(
                        "kron of {} and {}: a length has no form",
                        show(&a),
                        show(&b)
                    )
                })?;
                apart[0].extend([n, Size::ONE]);
                apart[1].extend([Size::ONE, m]);
                joined.push(product);
            }
            Ok(ids[0])
        });
        if x.is_poisoned() {
            return x;
        }
        let shaped = |x: Tensor<'t>, dims: &Dims| {
            self.trace
                .record(at, &[x], |g, ids| Ok(g.reshape(ids[0], dims)))
        };
        self.trace.on_behalf(at, || {
            let product = shaped(x, &apart[0]) * shaped(rhs, &apart[1]);
            shaped(product, &joined)
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
