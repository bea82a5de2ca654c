//! Expansion of operations for which a device has no kernel into operations for which it has:
//! attention becomes products and elementwise operations.
//!
//! The scores of up to [`WHOLE`] queries are one tensor, which the backward pass shares with the
//! forward pass. More queries are taken in tiles, each a segment that the backward pass recomputes.

use std::ops::Range;

use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{Dims, Scores};
use smallvec::SmallVec;

use super::error::PassError;
use super::pipeline::Pass;
use crate::graph::{Graph, Origin, Phase};
use crate::ops::{GraphBuilder, NodeId, Op, attention_of_parts, gradients_of_parts, rows_second};

/// Most queries whose scores are one tensor, and queries of a tile otherwise.
const WHOLE: usize = 511;
const TILE: usize = 128;

/// The pass.
pub struct Expand;

impl Pass for Expand {
    const NAME: &'static str = "expand";
    type Input = Graph;
    type Output = Graph;

    fn run(&self, graph: &Graph) -> Result<Graph, PassError> {
        Ok(expand(graph))
    }
}

/// The graph with attention as products and elementwise operations, in tiles if there are many queries.
pub fn expand(graph: &Graph) -> Graph {
    let is_attention = |op: &Op| matches!(op, Op::Attention(_) | Op::AttentionGrad(_));
    if !graph.nodes.iter().any(|node| is_attention(&node.op)) {
        return graph.clone();
    }
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
            Op::Attention(scores) => forward(&mut out, scores, &inputs, &mut segments),
            Op::AttentionGrad(scores) => backward(&mut out, scores, &inputs),
            op => out.emit(op.clone(), &inputs, node.dtype, node.dims.clone()),
        });
    }
    for list in [&mut out.kept, &mut out.outputs] {
        list.iter_mut().for_each(|id| *id = map[id.at()]);
    }
    out.current_origin = graph.current_origin;
    out
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

fn forward(g: &mut Graph, scores: &Scores, inputs: &[NodeId], segments: &mut u32) -> NodeId {
    let [q, k, v] = [inputs[0], inputs[1], inputs[2]];
    let rows = g.dims(q).len() - 2;
    let tiles = tiles(g, q);
    if tiles.is_empty() {
        return attention_of_parts(g, scores, inputs);
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
        let seen = keys.map(|keys| scores.visible_to(tile.clone(), keys));
        let seen = seen.filter(|seen| !seen.is_empty());
        let own = slice(g, q, rows, tile);
        let first = scores.past as usize + tile.start;
        let (from, k, v) = match &seen {
            Some(seen) => (seen.start, slice(g, k, rows, seen), slice(g, v, rows, seen)),
            None => (0, k, v),
        };
        let scores = Scores {
            past: (first - from) as u32,
            ..*scores
        };
        parts.push(attention_of_parts(g, &scores, &[own, k, v]));
    }
    let length = g.dims(q)[rows];
    concat(g, &parts, 1, length)
}

fn backward(g: &mut Graph, scores: &Scores, inputs: &[NodeId]) -> NodeId {
    let [q, k, v, y, dy] = [inputs[0], inputs[1], inputs[2], inputs[3], inputs[4]];
    let (rank, rows) = (g.dims(q).len(), g.dims(q).len() - 2);
    let tiles = tiles(g, q);
    let [dq, dk, dv] = match tiles.is_empty() {
        true => gradients_of_parts(g, *scores, &inputs[..3], y, dy),
        false => {
            let (mut dq, mut sums) = (Vec::new(), None::<[NodeId; 2]>);
            for tile in &tiles {
                let own = [(q, rows), (y, 1), (dy, 1)].map(|(x, axis)| slice(g, x, axis, tile));
                let scores = Scores {
                    past: scores.past + tile.start as u32,
                    ..*scores
                };
                let [of_q, of_k, of_v] =
                    gradients_of_parts(g, scores, &[own[0], k, v], own[1], own[2]);
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
    };
    let length = |x: NodeId| g.dims(x)[rows];
    let sum = length(q)
        .checked_add(length(k))
        .and_then(|sum| sum.checked_add(length(k)));
    let all = concat(
        g,
        &[dq, dk, dv],
        rows,
        sum.expect("the gradient has these rows"),
    );
    g.permute(all, &rows_second(rank))
}

#[cfg(test)]
mod tests {
    use slabwise_kernels::dtype::DType;
    use slabwise_kernels::size::Env;

    use super::*;
    use crate::graph::InputInfo;
    use crate::ops::attention;
    use crate::passes::autodiff::gradients;
    use crate::reference::{Array, Precision, evaluate};

    /// The products of a graph with attention and its gradients, before and after the pass.
    fn check(queries: usize, keys: usize, scores: Scores) {
        let shapes = [[1, 2, queries, 2], [1, 2, keys, 2], [1, 2, keys, 2]];
        let mut graph = Graph::default();
        let (mut arrays, mut ids) = (Vec::new(), Vec::new());
        for (i, shape) in shapes.iter().enumerate() {
            let dims: Dims = shape.iter().map(|&n| Size::fixed(n as i64)).collect();
            graph.inputs.push(InputInfo {
                name: "x".into(),
                dtype: DType::F32,
                dims: dims.clone(),
                donated_to: None,
            });
            ids.push(graph.emit(Op::Input(i as u32), &[], DType::F32, dims));
            arrays.push(Array::from_fn(DType::F32, shape, |c| {
                let at = c.iter().fold(i, |at, &c| at * 7 + c);
                ((at * 37 % 101) as f64 / 50.0) - 1.0
            }));
        }
        let y = attention(&mut graph, scores, ids[0], ids[1], ids[2]);
        let square = graph.mul(y, y);
        graph.outputs = vec![y];
        let slopes = gradients(&mut graph, square, &ids);
        graph.outputs.extend(slopes.into_iter().flatten());
        let expanded = Expand.run(&graph).expect("an infallible pass");
        assert_eq!(expanded.verify(), Ok(()));
        let has = |graph: &Graph, f: fn(&Op) -> bool| graph.nodes.iter().any(|n| f(&n.op));
        let whole = |op: &Op| matches!(op, Op::Attention(_) | Op::AttentionGrad(_));
        assert!(has(&graph, whole) && !has(&expanded, whole));
        let outputs = [&graph, &expanded].map(|graph| {
            let run = evaluate(graph, &Env::default(), &arrays, &[], Precision::Double);
            run.expect("a graph of floats").outputs
        });
        for (before, after) in outputs[0].iter().zip(&outputs[1]) {
            for (a, b) in before.values.iter().zip(&after.values) {
                assert!((a - b).abs() <= 1e-9, "{b} instead of {a}: {scores:?}");
            }
        }
    }

    #[test]
    fn values_and_gradients_stay() {
        let plain = Scores {
            scale: 0.7,
            causal: false,
            window: None,
            past: 0,
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
            // A query that sees no key would have no result.
            let queries = if window.is_some() { 5 } else { 530 };
            check(5, 6, scores);
            check(queries, 6, scores);
        }
        check(
            530,
            540,
            Scores {
                window: Some(2),
                causal: true,
                ..plain
            },
        );
    }
}
