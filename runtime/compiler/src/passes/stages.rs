//! Dependency levels of data-dependent lengths.
//!
//! A value that has such a length, or that is computed from one that has, depends on the node that
//! determines it ([`Op::Bind`](crate::ops::Op::Bind)). The graph's edges do not show all of that:
//! ones that are repeated to a length read none of the values that determine it; and a part of a
//! concatenation is written after parts whose lengths are data-dependent. So each node gets a
//! *stage*, the set of data-dependent lengths that it depends on, and a kernel has members of one
//! stage, so that no kernel depends on a length that it helps to compute.

use slabwise_kernels::size::{MAX_SYMBOLS, Size, Symbol};

use crate::graph::{Graph, Node};
use crate::ops::Op;

/// A set of symbols, as bits.
pub(super) type Stage = u16;

/// The stage of every node.
pub(super) fn stages(graph: &Graph) -> Vec<Stage> {
    let mut stages: Vec<Stage> = Vec::with_capacity(graph.nodes.len());
    // A node that depends on a symbol also depends on everything needed to compute that symbol.
    let mut of_symbol = [0; MAX_SYMBOLS];
    for node in &graph.nodes {
        let mut stage = node
            .inputs
            .iter()
            .fold(0, |stage, input| stage | stages[input.at()]);
        for Symbol(s) in sizes(node)
            .flat_map(Size::symbols)
            .filter(|&s| graph.symbols.is_data_dependent(s))
        {
            stage |= of_symbol[usize::from(s)];
        }
        if let Op::Concat { .. } | Op::Pad { .. } = node.op {
            // The place of a part depends on the lengths of the whole, those of other parts
            // included.
            node.inputs
                .iter()
                .for_each(|part| stages[part.at()] |= stage);
        }
        if let Op::Bind { symbol: Symbol(s) } = node.op {
            of_symbol[usize::from(s)] = stage | 1 << s;
        }
        stages.push(stage);
    }
    stages
}

/// The symbols of a stage.
pub(super) fn symbols(stage: Stage) -> impl Iterator<Item = Symbol> {
    (0..MAX_SYMBOLS as u8)
        .filter(move |s| stage >> s & 1 != 0)
        .map(Symbol)
}

/// Every size that a node mentions.
fn sizes(node: &Node) -> impl Iterator<Item = Size> {
    let own: &[Size] = match &node.op {
        Op::Size(size) | Op::BoundsCheck { limit: size, .. } => std::slice::from_ref(size),
        Op::Index(strides) => strides,
        Op::Slice { start, .. } | Op::Pad { start, .. } | Op::SliceAssign { start, .. } => start,
        _ => &[],
    };
    node.dims.iter().chain(own).copied()
}
