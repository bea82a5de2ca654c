//! Random numbers of a training step over several ranks: each grain of the batch has its own.

use std::collections::HashMap;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Dims;
use smallvec::SmallVec;

use super::Trace;
use super::random::folded;
use crate::graph::{Graph, Node};
use crate::ops::{GraphBuilder, NodeId, Op};
use crate::world::Distribution;

/// The first stream of the draws in parts, and the number of streams of each step in parts.
const STREAMS: u32 = 1 << 16;

impl Trace {
    /// The graph in which the random numbers of a training step depend on the grain of the batch
    /// that they are for: the key of a grain is the session's key with the number of the grain
    /// folded in, and the draws of a part are counted from its beginning. So the numbers of two
    /// ranks differ, and those of a grain are the same whichever rank runs it. A draw outside of
    /// all parts has the key of the first grain of its rank.
    ///
    /// # Errors
    /// If the program has too many symbols.
    pub(crate) fn with_random_numbers_by_grain(
        &self,
        graph: Graph,
        distribution: Distribution,
    ) -> Result<Graph, String> {
        let state = graph.ids().find(|&id| match graph.node(id).op {
            Op::Variable(v) => *graph.variables[v as usize].name == *super::state::RANDOM,
            _ => false,
        });
        let draws = |node: &Node| match node.op {
            Op::Uniform { stream } if Some(node.inputs[0]) == state => Some(stream),
            _ => None,
        };
        let Some(state) = state.filter(|_| graph.nodes.iter().any(|n| draws(n).is_some())) else {
            return Ok(graph);
        };
        let building = self.building.borrow();
        let mut numbering = Numbering::new(&building.parts);
        let mut new = Graph {
            nodes: Vec::with_capacity(graph.nodes.len()),
            outputs: Vec::new(),
            kept: Vec::new(),
            ..graph.clone()
        };
        let mut keys: HashMap<usize, NodeId> = HashMap::new();
        let mut map: Vec<NodeId> = Vec::with_capacity(graph.nodes.len());
        for node in &graph.nodes {
            new.current_origin = node.origin;
            let mut inputs: SmallVec<[NodeId; 3]> =
                node.inputs.iter().map(|i| map[i.at()]).collect();
            let mut op = node.op.clone();
            if let Some(stream) = draws(node) {
                let part = graph.origins[node.origin as usize].part;
                let (grain, stream) = numbering.next(part, stream);
                op = Op::Uniform { stream };
                inputs[0] = match keys.get(&grain) {
                    Some(&key) => key,
                    None => {
                        let number = number_of(&mut new, distribution, grain)?;
                        let key = folded(&mut new, map[state.at()], number);
                        *keys.entry(grain).or_insert(key)
                    }
                };
            }
            map.push(new.emit(op, &inputs, node.dtype, node.dims.clone()));
        }
        new.current_origin = graph.current_origin;
        new.outputs = graph.outputs.iter().map(|id| map[id.at()]).collect();
        new.kept = graph.kept.iter().map(|id| map[id.at()]).collect();
        Ok(new)
    }
}

/// The number of a grain of the batch: of the grains of this rank, that of a part.
fn number_of(g: &mut Graph, distribution: Distribution, part: usize) -> Result<NodeId, String> {
    let each = Size::fixed((distribution.grains / distribution.ranks()) as i64);
    let first = match distribution.ranks() {
        1 => Some(Size::ZERO),
        _ => Size::symbol(g.symbols.rank(distribution.group)?).checked_mul(each),
    };
    let number = first.and_then(|first| first.checked_add(Size::fixed(part as i64)));
    let number = number.ok_or("too many grains")?;
    Ok(g.emit(Op::Size(number), &[], DType::I32, Dims::new()))
}

/// The grain and the stream of each draw, in the order of the graph.
struct Numbering<'a> {
    /// For each part of the graph, its number in its step in parts.
    parts: &'a [Option<usize>],
    /// For each part, the step in parts that it belongs to, from 0.
    steps: Vec<u32>,
    /// The draws of each part so far.
    drawn: Vec<u32>,
}

impl<'a> Numbering<'a> {
    fn new(parts: &'a [Option<usize>]) -> Self {
        let mut begun = 0;
        let steps = parts.iter().map(|part| {
            begun += u32::from(*part == Some(0));
            begun.saturating_sub(1)
        });
        Numbering {
            parts,
            steps: steps.collect(),
            drawn: vec![0; parts.len()],
        }
    }

    fn next(&mut self, part: u32, stream: u32) -> (usize, u32) {
        // The graph begins outside of all parts, as part 0.
        let Some(at) = (part as usize).checked_sub(1) else {
            return (0, stream);
        };
        let Some(&Some(number)) = self.parts.get(at) else {
            return (0, stream);
        };
        let drawn = self.drawn[at];
        self.drawn[at] += 1;
        (number, (1 + self.steps[at]) * STREAMS + drawn)
    }
}
