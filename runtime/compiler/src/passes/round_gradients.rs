//! Gradients of attention in halves, where all their readers round them.
//!
//! In mixed precision a gradient is rounded once all contributions to it are added. If there is no
//! other contribution, the kernel that computes the gradients of attention writes them rounded,
//! instead of leaving the rounding to a kernel that reads them in f32. The numbers are the same.

use slabwise_kernels::dtype::DType;
use smallvec::SmallVec;

use super::error::PassError;
use super::pipeline::Pass;
use crate::graph::Graph;
use crate::ops::{GraphBuilder, NodeId, Op};

/// The pass, for devices whose kernels can write them so.
pub struct RoundGradients;

impl Pass for RoundGradients {
    const NAME: &'static str = "round_gradients";
    type Input = Graph;
    type Output = Option<Graph>;

    fn run(&self, graph: &Graph) -> Result<Option<Graph>, PassError> {
        Ok(round_gradients(graph))
    }
}

/// The graph with gradients of attention in halves, each after a conversion back to f32, which
/// [`super::simplify()`] joins with the conversions of the readers. `None` if there are none.
pub fn round_gradients(graph: &Graph) -> Option<Graph> {
    let is_gradient = |id: &NodeId| matches!(graph.node(*id).op, Op::AttentionGrad { .. });
    graph.ids().find(is_gradient)?;
    let consumers = graph.consumers();
    let mut out = Graph {
        nodes: Vec::with_capacity(graph.nodes.len()),
        ..graph.clone()
    };
    let mut map: Vec<NodeId> = Vec::with_capacity(graph.nodes.len());
    let mut changes = false;
    for id in graph.ids() {
        let node = graph.node(id);
        let inputs: SmallVec<[NodeId; 3]> = node.inputs.iter().map(|i| map[i.at()]).collect();
        out.current_origin = node.origin;
        let half = is_gradient(&id)
            .then(|| narrowed(graph, &consumers, id))
            .flatten();
        changes |= half.is_some();
        let dtype = half.unwrap_or(node.dtype);
        let new = out.emit(node.op.clone(), &inputs, dtype, node.dims.clone());
        map.push(match half {
            Some(_) => out.cast(new, node.dtype),
            None => new,
        });
    }
    for list in [&mut out.kept, &mut out.outputs] {
        list.iter_mut().for_each(|id| *id = map[id.at()]);
    }
    out.current_origin = graph.current_origin;
    changes.then_some(out)
}

/// The type of halves to which all readers of a value, and of views of it, convert it.
fn narrowed(graph: &Graph, consumers: &[SmallVec<[NodeId; 4]>], id: NodeId) -> Option<DType> {
    let (mut open, mut found) = (vec![id], None);
    while let Some(at) = open.pop() {
        if graph.outputs.contains(&at) || graph.kept.contains(&at) {
            return None;
        }
        for &user in &consumers[at.at()] {
            match graph.node(user).op {
                Op::Cast(to) if to.is_half() && found.is_none_or(|known| known == to) => {
                    found = Some(to);
                }
                ref op if op.is_view() => open.push(user),
                _ => return None,
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use slabwise_kernels::size::{Env, Size};
    use slabwise_kernels::spec::{Dims, Scores};

    use super::*;
    use crate::graph::InputInfo;
    use crate::ops::attention;
    use crate::passes::autodiff::gradients;
    use crate::passes::{Simplify, simplify};
    use crate::reference::{Array, Precision, evaluate};

    /// Gradients of attention, each rounded by its reader; that of queries is an output in f32,
    /// too, if `reads_wide`.
    fn graph(reads_wide: bool) -> (Graph, Vec<Array>) {
        let shape = [1, 2, 3, 4];
        let dims: Dims = shape.iter().map(|&n| Size::fixed(n as i64)).collect();
        let mut graph = Graph::default();
        let (mut arrays, mut ids) = (Vec::new(), Vec::new());
        for i in 0..3 {
            graph.inputs.push(InputInfo {
                name: "x".into(),
                dtype: DType::F32,
                dims: dims.clone(),
                donated_to: None,
            });
            ids.push(graph.emit(Op::Input(i), &[], DType::F32, dims.clone()));
            arrays.push(Array::from_fn(DType::F32, &shape, |c| {
                let at = c.iter().fold(i as usize, |at, &c| at * 7 + c);
                (at * 37 % 101) as f64 / 50.0 - 1.0
            }));
        }
        let scores = Scores {
            scale: 0.5,
            soft_cap: None,
            causal: false,
            window: None,
            past: 0,
            step: 1,
        };
        let y = attention(&mut graph, scores, &ids, DType::F32);
        let square = graph.mul(y, y);
        let slopes = gradients(&mut graph, square, &ids);
        let slopes: Vec<NodeId> = slopes.into_iter().flatten().collect();
        for &slope in &slopes {
            let rounded = graph.cast(slope, DType::BF16);
            graph.outputs.push(rounded);
        }
        graph.outputs.extend(reads_wide.then_some(slopes[0]));
        (graph, arrays)
    }

    fn of_gradient(graph: &Graph) -> DType {
        let is_gradient = |id: &NodeId| matches!(graph.node(*id).op, Op::AttentionGrad { .. });
        let id = graph.ids().find(is_gradient).expect("a gradient");
        graph.node(id).dtype
    }

    #[test]
    fn gradients_that_all_readers_round_are_halves() {
        let (before, arrays) = graph(false);
        let rounded = round_gradients(&before).expect("a gradient is rounded");
        assert_eq!(rounded.verify(), Ok(()));
        let after = simplify(&rounded, &Simplify::default());
        assert_eq!(of_gradient(&after), DType::BF16);
        let is_cast = |op: &Op| matches!(op, Op::Cast(_));
        assert!(!after.nodes.iter().any(|node| is_cast(&node.op)), "{after}");
        let outputs = [&before, &after].map(|graph| {
            let run = evaluate(graph, &Env::default(), &arrays, &[], Precision::Single);
            run.expect("a graph of floats").outputs
        });
        for (before, after) in outputs[0].iter().zip(&outputs[1]) {
            assert_eq!(before.dtype, after.dtype);
            for (a, b) in before.values.iter().zip(&after.values) {
                assert!((a - b).abs() <= a.abs() / 256.0, "{b} instead of {a}");
            }
        }
    }

    #[test]
    fn gradients_that_something_reads_in_f32_stay() {
        assert!(round_gradients(&graph(true).0).is_none());
    }
}
