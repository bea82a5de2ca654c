//! The gradient of a scan is a scan in the other direction.
//!
//! With c′, y = f(c, x, w) as the body, the body of the backward pass recomputes f from the carry
//! at the start of each step, which the forward pass keeps, and propagates the gradients of c′ and
//! y to c, x and w. The gradient of c is its carry, and so is that of w, which accumulates over the
//! steps. Only the carries of steps are live until then (backpropagation through time: Werbos 1990;
//! in the form of `jax.lax.scan`).

use rustc_hash::FxHashMap;
use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::{ScalarOp, Value};
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;
use smallvec::SmallVec;

use super::pull_back;
use crate::graph::{BodyBuilder, Feed, Graph};
use crate::ops::{GraphBuilder, NodeId, Op};

/// The gradients of a scan's operands, from those of its results.
pub(super) fn gradient(
    graph: &mut Graph,
    scan: NodeId,
    results: &[(u32, NodeId)],
    wanted: &[bool],
) -> Vec<Option<NodeId>> {
    let operands = graph.node(scan).inputs.clone();
    let mut gradients = vec![None; operands.len()];
    let Op::Scan(at) = graph.node(scan).op else {
        return gradients;
    };
    let body = graph.bodies[at as usize].clone();
    let first = body.first_operands();
    let type_of = |input: usize| {
        let info = &body.graph.inputs[input];
        (info.dtype, info.dims.clone())
    };
    let (steps, last) = (i64::from(body.steps), body.last_time());
    let carries: Vec<usize> = (0..body.feeds.len())
        .filter(|&f| body.feeds[f] == Feed::Carry)
        .collect();
    // The gradients that reach a result: of all steps, and of the last one alone.
    let mut stacked: Vec<Option<NodeId>> = vec![None; body.graph.outputs.len()];
    let mut of_last: Vec<Option<NodeId>> = vec![None; body.graph.outputs.len()];
    for &(result, dy) in results {
        let result = result as usize;
        let alone = (result < carries.len()).then_some(last);
        part_gradients(graph, dy, alone, &mut stacked[result], &mut of_last[result]);
    }
    let mut back = BodyBuilder::within(graph);
    let mut map: FxHashMap<NodeId, NodeId> = FxHashMap::default();
    let input_nodes: Vec<NodeId> = input_nodes(&body.graph);
    // The gradients of the carries, which pass from the last step to the first.
    let mut seeds: Vec<(NodeId, NodeId)> = Vec::new();
    let mut of_carries: Vec<Option<NodeId>> = Vec::new();
    for (result, &feed) in carries.iter().enumerate() {
        let (dtype, dims) = type_of(feed);
        let node = dtype.is_float().then(|| {
            let begin = of_last[result].unwrap_or_else(|| graph.full(0.0, DType::F32, &dims));
            back.input(Feed::Carry, &[begin], "carry gradient", (DType::F32, dims))
        });
        of_carries.push(node);
    }
    // The operands of the forward pass, with the carries that each step found.
    let mut found: Vec<NodeId> = Vec::new();
    for (feed, kind) in body.feeds.iter().enumerate() {
        let own = &operands[first[feed]..][..kind.operands()];
        let name = &body.graph.inputs[feed].name;
        let node = match kind {
            Feed::Carry => {
                let result = carries.iter().filter(|&&c| c < feed).count() as u32;
                let Some(all) = graph.scan_result(scan, result) else {
                    return gradients;
                };
                let later = body.reverse;
                back.input(
                    Feed::Neighbour { later },
                    &[all, own[0]],
                    name,
                    type_of(feed),
                )
            }
            kind => back.input(*kind, own, name, type_of(feed)),
        };
        map.insert(input_nodes[feed], node);
        found.push(node);
    }
    let copied = back.copy(&body.graph, None, &mut map, &body.graph.outputs);
    for (result, &output) in copied.iter().enumerate() {
        let dtype = back.graph.dtype(output);
        if !dtype.is_float() {
            continue;
        }
        let mut sum = of_carries.get(result).copied().flatten();
        if let Some(all) = stacked[result] {
            let dims = back.graph.dims(output).clone();
            let own = back.input(Feed::Step, &[all], "result gradient", (DType::F32, dims));
            sum = Some(sum.map_or(own, |sum| back.graph.add(sum, own)));
        }
        seeds.extend(sum.map(|sum| (output, sum)));
    }
    let is_wanted = |feed: usize| {
        let own = first[feed]..first[feed] + body.feeds[feed].operands();
        type_of(feed).0.is_float() && wanted[own].contains(&true)
    };
    let sources: Vec<usize> = (0..body.feeds.len())
        .filter(|&f| is_wanted(f) || body.feeds[f] == Feed::Carry && type_of(f).0.is_float())
        .collect();
    let wrt: Vec<NodeId> = sources.iter().map(|&f| found[f]).collect();
    let parts: FxHashMap<usize, NodeId> = sources
        .iter()
        .zip(pull_back(&mut back.graph, &seeds, &wrt))
        .filter_map(|(&f, part)| Some((f, part?)))
        .collect();
    // The outputs: the carries' gradients, then sums over the steps, then parts of the steps.
    let mut outputs = Vec::new();
    let mut places: Vec<(usize, usize, bool)> = Vec::new();
    for (carry, &feed) in carries.iter().enumerate() {
        if of_carries[carry].is_some() {
            let zeros = |back: &mut BodyBuilder| {
                let dims = type_of(feed).1;
                back.graph.full(0.0, DType::F32, &dims)
            };
            let next = parts.get(&feed).copied();
            places.push((feed, outputs.len(), true));
            outputs.push(next.unwrap_or_else(|| zeros(&mut back)));
        }
    }
    let sums = sources.iter().filter(|&&f| body.feeds[f] == Feed::Whole);
    for (&feed, part) in sums.filter_map(|f| Some((f, *parts.get(f)?))) {
        let dims = type_of(feed).1;
        let zeros = graph.full(0.0, DType::F32, &dims);
        let sum = back.input(Feed::Carry, &[zeros], "gradient so far", (DType::F32, dims));
        places.push((feed, outputs.len(), true));
        outputs.push(back.graph.add(sum, part));
    }
    for (feed, kind) in body.feeds.iter().enumerate() {
        if let (Feed::Step | Feed::Neighbour { .. }, Some(&part)) = (kind, parts.get(&feed)) {
            places.push((feed, outputs.len(), false));
            outputs.push(part);
        }
    }
    back.graph.outputs = outputs;
    let first_time = if body.reverse { steps - 1 } else { 0 };
    let backward = back.finish(graph, body.steps, !body.reverse);
    for (feed, result, is_last) in places.into_iter().filter(|p| is_wanted(p.0)) {
        let Some(all) = graph.scan_result(backward, result as u32) else {
            continue;
        };
        let at = first[feed];
        match body.feeds[feed] {
            _ if is_last => gradients[at] = Some(graph.part_at(all, first_time)),
            Feed::Neighbour { later } => {
                // Index t of the parts is that of the part before or after it.
                let (outside, from, to) = if later { (steps - 1, 0, 1) } else { (0, 1, 0) };
                gradients[at] = Some(moved(graph, all, from, to, steps));
                gradients[at + 1] = Some(graph.part_at(all, outside));
            }
            _ => gradients[at] = Some(all),
        }
    }
    gradients
}

/// The nodes of a graph's inputs; of one without a node a place that no node has.
fn input_nodes(graph: &Graph) -> Vec<NodeId> {
    let mut nodes = vec![NodeId(u32::MAX); graph.inputs.len()];
    for id in graph.ids() {
        if let Op::Input(input) = graph.node(id).op {
            nodes[input as usize] = id;
        }
    }
    nodes
}

/// Divides the gradient of a result into that of the step at `last` alone and the rest. The
/// gradient of a slice is placed on zeros, which need not be made for all steps.
fn part_gradients(
    graph: &mut Graph,
    dy: NodeId,
    last: Option<i64>,
    stacked: &mut Option<NodeId>,
    of_last: &mut Option<NodeId>,
) {
    let mut stack = vec![dy];
    while let Some(part) = stack.pop() {
        let node = graph.node(part).clone();
        let source = node.inputs.first().copied();
        let of_one = |start: &Dims, source: NodeId| {
            let dims = graph.dims(source);
            let rest = node.dims[1..] == dims[1..] && start[1..].iter().all(|s| s.is(0));
            Some(start[0]) == last.map(Size::fixed) && dims[0].is(1) && rest
        };
        match (&node.op, source) {
            (Op::Scalar(ScalarOp::Add), _) if last.is_some() => {
                stack.extend(node.inputs.iter().rev());
            }
            (
                Op::Pad {
                    start,
                    value: Value::F32(0.0),
                    ..
                },
                Some(source),
            ) if of_one(start, source) => {
                let rest = Dims::from_slice(&node.dims[1..]);
                let own = graph.reshape(source, &rest);
                *of_last = Some(of_last.map_or(own, |sum| graph.add(sum, own)));
            }
            _ => *stacked = Some(stacked.map_or(part, |sum| graph.add(sum, part))),
        }
    }
}

/// A tensor of which the places from `from` on along the first axis lie from `to` on, one fewer
/// than there were, and zeros elsewhere.
fn moved(graph: &mut Graph, x: NodeId, from: i64, to: i64, steps: i64) -> NodeId {
    let (dtype, whole) = (graph.dtype(x), graph.dims(x).clone());
    let mut dims = whole.clone();
    dims[0] = Size::fixed(steps - 1);
    let place = |at: i64| {
        let mut start: Dims = SmallVec::from_elem(Size::ZERO, dims.len());
        start[0] = Size::fixed(at);
        start
    };
    let step: SmallVec<[u32; 6]> = SmallVec::from_elem(1, dims.len());
    let slice = Op::Slice {
        start: place(from),
        step: step.clone(),
    };
    let pad = Op::Pad {
        start: place(to),
        step,
        value: Value::F32(0.0),
    };
    let part = graph.emit(slice, &[x], dtype, dims);
    graph.emit(pad, &[part], dtype, whole)
}
