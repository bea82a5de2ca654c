//! Expansion of operations for which a device has no kernel into operations for which it has one:
//! attention becomes products and elementwise operations, quantized weights become elementwise
//! operations or, where products read them as they are, a part of these.
//!
//! The scores of up to [`WHOLE`] queries are one tensor, which the backward pass shares with the
//! forward pass. More queries are taken in tiles, each a segment that the backward pass recomputes.

use std::ops::Range;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{Dims, Quantization, Scores};
use smallvec::SmallVec;

use super::error::PassError;
use super::pipeline::Pass;
use crate::graph::{Graph, Origin, Phase};
use crate::ops::{
    GraphBuilder, NodeId, Op, Operands, attention_of_parts, dequantized, gradients_of_parts, join,
    split_last,
};

/// Most queries whose scores are one tensor, and queries of a tile otherwise.
const WHOLE: usize = 511;
const TILE: usize = 128;

/// Whether a device has a kernel for attention with these scores, or for its gradient. The pairs
/// are each operand's type and number of elements in a row.
pub type HasAttention<'a> = dyn Fn(&Scores, &[(DType, Size)]) -> bool + 'a;

/// The pass.
pub struct Expand<'a> {
    /// The kernels that the device has.
    pub has_attention: &'a HasAttention<'a>,
    /// Whether a device has a kernel for products of up to so many rows with quantized weights of a
    /// format.
    pub has_quantized_matmul: &'a dyn Fn(Quantization, i64) -> bool,
    /// Whether products have sums in their epilogues, which choose [`ScalarOp::Near`].
    pub has_epilogue_sums: bool,
}

impl Expand<'_> {
    /// Whether the graph has an operation that the device has no kernel for.
    pub fn finds(&self, graph: &Graph) -> bool {
        graph.ids().any(|id| self.expands(graph, id))
    }

    /// The format and the operands of the quantized weights whose transposed matrix is the right
    /// factor of a product, if the device has a kernel for it.
    fn quantized_factor<'g>(
        &self,
        graph: &'g Graph,
        id: NodeId,
    ) -> Option<(Quantization, &'g [NodeId])> {
        let node = graph.node(id);
        let (Op::Matmul, &[a, b]) = (&node.op, &node.inputs[..]) else {
            return None;
        };
        let transposed = graph.node(b);
        let Op::Permute(axes) = &transposed.op else {
            return None;
        };
        let weights = graph.node(transposed.inputs[0]);
        let Op::Dequantize(format) = weights.op else {
            return None;
        };
        let fits = axes[..] == [1, 0]
            && graph.node(a).dtype == DType::F32
            && weights.dims[0].as_fixed().is_some();
        let bounds = graph.symbols.bounds();
        let (_, rows) = node.dims.split_last()?;
        let rows = rows
            .iter()
            .fold(1i64, |product, row| product.saturating_mul(row.at(&bounds)));
        (fits && (self.has_quantized_matmul)(format, rows)).then_some((format, &weights.inputs))
    }

    /// The graph with attention for which there are no kernels as products and elementwise operations,
    /// in tiles if there are many queries, and without numbers that nothing chooses.
    pub fn expand(&self, graph: &Graph) -> Graph {
        let expands = |id| self.expands(graph, id);
        let mut out = Graph {
            nodes: Vec::with_capacity(graph.nodes.len()),
            ..graph.clone()
        };
        let mut segments = graph.origins.iter().map(|o| o.segment).max().unwrap_or(0);
        let mut map: Vec<NodeId> = Vec::with_capacity(graph.nodes.len());
        for id in graph.ids() {
            let node = graph.node(id);
            let inputs: SmallVec<[NodeId; 3]> = node.inputs.iter().map(|i| map[i.at()]).collect();
            out.current_origin = node.origin;
            map.push(match &node.op {
                Op::Attention(scores) if expands(id) => {
                    forward(&mut out, scores, &inputs, node.dtype, &mut segments)
                }
                Op::AttentionGrad { scores, in_turns } if expands(id) => {
                    let parts = backward(&mut out, scores, &inputs);
                    join(&mut out, *in_turns, parts)
                }
                Op::Dequantize(format) => dequantized(&mut out, *format, &inputs, &node.dims),
                Op::Matmul if self.quantized_factor(graph, id).is_some() => {
                    let (format, weights) = self.quantized_factor(graph, id).expect("just seen");
                    let weights = weights.iter().map(|i| map[i.at()]);
                    let inputs: SmallVec<[NodeId; 4]> =
                        std::iter::once(inputs[0]).chain(weights).collect();
                    let op = Op::QuantizedMatmul(format);
                    out.emit(op, &inputs, node.dtype, node.dims.clone())
                }
                Op::Scalar(ScalarOp::Near) if expands(id) => out.cast(inputs[0], node.dtype),
                op => out.emit(op.clone(), &inputs, node.dtype, node.dims.clone()),
            });
        }
        for list in [&mut out.kept, &mut out.outputs] {
            list.iter_mut().for_each(|id| *id = map[id.at()]);
        }
        out.current_origin = graph.current_origin;
        out
    }

    fn expands(&self, graph: &Graph, id: NodeId) -> bool {
        match &graph.node(id).op {
            Op::Scalar(ScalarOp::Near) => !self.has_epilogue_sums,
            Op::Dequantize(_) => true,
            _ => is_expanded(graph, id, self.has_attention),
        }
    }
}

impl Pass for Expand<'_> {
    const NAME: &'static str = "expand";
    type Input = Graph;
    type Output = Graph;

    fn run(&self, graph: &Graph) -> Result<Graph, PassError> {
        Ok(self.expand(graph))
    }
}

/// Whether a node is attention, or its gradient, that a device has no kernel for.
fn is_expanded(graph: &Graph, id: NodeId, has_attention: &HasAttention) -> bool {
    let node = graph.node(id);
    let (Op::Attention(scores) | Op::AttentionGrad { scores, .. }) = &node.op else {
        return false;
    };
    let operand = |&input: &NodeId| {
        let operand = graph.node(input);
        Some((operand.dtype, *operand.dims.last()?))
    };
    let operands: Option<SmallVec<[_; 7]>> = node.inputs.iter().map(operand).collect();
    operands.is_none_or(|operands| !has_attention(scores, &operands))
}

/// The ranges of the queries of each tile; one for all of an unknown number.
fn tiles(g: &Graph, queries: NodeId) -> Vec<Range<usize>> {
    let dims = g.dims(queries);
    let fixed = dims[dims.len() - 2].as_fixed();
    match fixed.and_then(|all| usize::try_from(all).ok()) {
        Some(all) if all > WHOLE => {
            let tile = |first| first..all.min(first + TILE);
            (0..all).step_by(TILE).map(tile).collect()
        }
        _ => Vec::new(),
    }
}

/// The elements of a range along an axis.
fn slice(g: &mut Graph, x: NodeId, axis: usize, range: &Range<usize>) -> NodeId {
    let (mut dims, dtype) = (g.dims(x).clone(), g.dtype(x));
    let mut start: Dims = SmallVec::from_elem(Size::ZERO, dims.len());
    start[axis] = Size::fixed(range.start as i64);
    dims[axis] = Size::fixed(range.len() as i64);
    let step = SmallVec::from_elem(1, dims.len());
    g.emit(Op::Slice { start, step }, &[x], dtype, dims)
}

fn concat(g: &mut Graph, parts: &[NodeId], axis: usize, length: Size) -> NodeId {
    let (mut dims, dtype) = (g.dims(parts[0]).clone(), g.dtype(parts[0]));
    dims[axis] = length;
    g.emit(Op::Concat { axis }, parts, dtype, dims)
}

fn forward(
    g: &mut Graph,
    scores: &Scores,
    inputs: &[NodeId],
    dtype: DType,
    segments: &mut u32,
) -> NodeId {
    let of = Operands::of_nodes(g, inputs);
    let Operands { q, k, v, .. } = of;
    let rows = g.dims(q).len() - 2;
    let tiles = tiles(g, q);
    if tiles.is_empty() {
        return attention_of_parts(g, scores, &of, dtype);
    }
    let origin = g.origins.get(g.current_origin as usize).cloned();
    let keys = g.dims(k)[rows]
        .as_fixed()
        .and_then(|n| usize::try_from(n).ok());
    let mut parts = Vec::new();
    for tile in &tiles {
        // A segment of the user's is recomputed as a whole.
        if let Some(origin) = &origin
            && origin.segment == 0
            && origin.phase == Phase::Forward
        {
            *segments += 1;
            g.set_origin(Origin {
                segment: *segments,
                ..origin.clone()
            });
        }
        // (With a past of the run, any may be seen.)
        let seen = keys.filter(|_| of.past.is_none());
        let seen = seen.map(|keys| scores.visible_to(tile.clone(), keys));
        let seen = seen.filter(|seen| !seen.is_empty());
        let mut part = of_tile(g, &of, tile);
        let mut scores = first_row(scores, tile);
        if let Some(seen) = &seen {
            (part.k, part.v) = (slice(g, k, rows, seen), slice(g, v, rows, seen));
            part.mask = part.mask.map(|mask| slice(g, mask, rows + 1, seen));
            scores = scores.after(-(seen.start as i32));
        }
        parts.push(attention_of_parts(g, &scores, &part, dtype));
    }
    let length = g.dims(q)[rows];
    concat(g, &parts, 1, length)
}

/// The operands of a tile of queries.
fn of_tile(g: &mut Graph, of: &Operands<NodeId>, tile: &Range<usize>) -> Operands<NodeId> {
    let rows = g.dims(of.q).len() - 2;
    Operands {
        q: slice(g, of.q, rows, tile),
        mask: of.mask.map(|mask| slice(g, mask, rows, tile)),
        ..*of
    }
}

/// The scores of a tile of queries.
fn first_row(scores: &Scores, tile: &Range<usize>) -> Scores {
    scores.after((tile.start * scores.step as usize) as i32)
}

fn backward(g: &mut Graph, scores: &Scores, inputs: &[NodeId]) -> [NodeId; 3] {
    let (list, [y, dy]) = split_last(inputs).expect("checked by the rule");
    let of = Operands::of_nodes(g, list);
    let Operands { q, k, v, .. } = of;
    let rows = g.dims(q).len() - 2;
    let tiles = tiles(g, q);
    match tiles.is_empty() {
        true => gradients_of_parts(g, *scores, &of, y, dy),
        false => {
            let (mut dq, mut sums) = (Vec::new(), None::<[NodeId; 2]>);
            for tile in &tiles {
                let [y, dy] = [y, dy].map(|x| slice(g, x, 1, tile));
                let part = of_tile(g, &of, tile);
                let scores = first_row(scores, tile);
                let [of_q, of_k, of_v] = gradients_of_parts(g, scores, &part, y, dy);
                dq.push(of_q);
                sums = Some(match sums {
                    None => [of_k, of_v],
                    Some([dk, dv]) => [g.add(dk, of_k), g.add(dv, of_v)],
                });
            }
            let [dk, dv] = sums.unwrap_or([k, v]);
            let length = g.dims(q)[rows];
            [concat(g, &dq, rows, length), dk, dv]
        }
    }
}

#[cfg(test)]
mod tests {
    use slabwise_kernels::size::Env;

    use super::*;
    use crate::graph::InputInfo;
    use crate::ops::attention;
    use crate::passes::autodiff::gradients;
    use crate::reference::{Array, Precision, evaluate};

    /// A mask or a past of a case.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum More {
        Nothing,
        Mask(DType),
        Past,
    }

    /// The products of a graph with attention and its gradients, before and after the pass.
    fn check(queries: usize, keys: usize, scores: Scores, more: More) {
        let shapes: [&[usize]; 5] = [
            &[1, 2, queries, 2],
            &[1, 2, keys, 2],
            &[1, 2, keys, 2],
            &[1, 2, queries, keys],
            &[1, 2],
        ];
        let types = match more {
            More::Nothing => vec![DType::F32; 3],
            More::Mask(dtype) => vec![DType::F32, DType::F32, DType::F32, dtype],
            More::Past => vec![DType::F32, DType::F32, DType::F32, DType::I32],
        };
        let mut graph = Graph::default();
        let (mut arrays, mut ids) = (Vec::new(), Vec::new());
        for (i, &dtype) in types.iter().enumerate() {
            let shape = if dtype == DType::I32 {
                shapes[4]
            } else {
                shapes[i]
            };
            let dims: Dims = shape.iter().map(|&n| Size::fixed(n as i64)).collect();
            graph.inputs.push(InputInfo {
                name: "x".into(),
                dtype,
                dims: dims.clone(),
                donated_to: None,
            });
            ids.push(graph.emit(Op::Input(i as u32), &[], dtype, dims));
            arrays.push(Array::from_fn(dtype, shape, |c| {
                let at = c.iter().fold(i, |at, &c| at * 7 + c);
                match dtype {
                    DType::I32 => (at % 3) as f64,
                    // The first key is always seen.
                    DType::Bool => f64::from(c[3] == 0 || at % 3 > 0),
                    _ if i == 3 && c[3] > 0 && at % 3 == 0 => f64::NEG_INFINITY,
                    _ => ((at * 37 % 101) as f64 / 50.0) - 1.0,
                }
            }));
        }
        let y = attention(&mut graph, scores, &ids, DType::F32);
        let square = graph.mul(y, y);
        graph.outputs = vec![y];
        let wrt = if more == More::Nothing {
            &ids[..]
        } else {
            &ids[..3]
        };
        let slopes = gradients(&mut graph, square, wrt);
        graph.outputs.extend(slopes.into_iter().flatten());
        let has = |graph: &Graph, f: fn(&Op) -> bool| graph.nodes.iter().any(|n| f(&n.op));
        let whole = |op: &Op| matches!(op, Op::Attention(_) | Op::AttentionGrad { .. });
        let plain = |scores: &Scores, operands: &[_]| {
            scores.soft_cap.is_none() && matches!(operands.len(), 3 | 5)
        };
        let kernels: [&HasAttention; 2] = [&|_, _| false, &plain];
        for (has_some, has_attention) in kernels.into_iter().enumerate() {
            let pass = Expand {
                has_attention,
                has_quantized_matmul: &|_, _| false,
                has_epilogue_sums: false,
            };
            let expanded = pass.run(&graph).expect("an infallible pass");
            assert_eq!(expanded.verify(), Ok(()));
            let stays = has_some == 1 && more == More::Nothing && scores.soft_cap.is_none();
            assert_eq!(pass.finds(&graph), !stays);
            assert!(has(&graph, whole) && has(&expanded, whole) == stays);
            let outputs = [&graph, &expanded].map(|graph| {
                let run = evaluate(graph, &Env::default(), &arrays, &[], Precision::Double);
                run.expect("a graph of floats").outputs
            });
            for (before, after) in outputs[0].iter().zip(&outputs[1]) {
                for (a, b) in before.values.iter().zip(&after.values) {
                    assert!(
                        (a - b).abs() <= 1e-9,
                        "{b} instead of {a}: {scores:?} {more:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn values_and_gradients_stay() {
        let plain = Scores {
            scale: 0.7,
            soft_cap: None,
            causal: false,
            window: None,
            past: 0,
            step: 1,
        };
        for (causal, window, past) in [
            (false, None, 0),
            (true, None, 0),
            (true, Some(3), 2),
            (false, Some(2), 1),
        ] {
            let scores = Scores {
                causal,
                window,
                past,
                ..plain
            };
            let capped = Scores {
                soft_cap: Some(0.8),
                ..scores
            };
            // A query that sees no key would have no result.
            let queries = if window.is_some() { 5 } else { 530 };
            check(5, 6, scores, More::Nothing);
            check(5, 6, capped, More::Nothing);
            check(queries, 6, scores, More::Nothing);
            if window.is_none() {
                check(5, 6, capped, More::Mask(DType::F32));
                check(530, 6, scores, More::Mask(DType::Bool));
                check(530, 6, scores, More::Past);
            }
        }
        check(
            530,
            540,
            Scores {
                window: Some(2),
                causal: true,
                ..plain
            },
            More::Nothing,
        );
    }
}
