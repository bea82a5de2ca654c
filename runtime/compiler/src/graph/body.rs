//! Bodies of scans: graphs that run once in every step of a loop.

use std::sync::Arc;

use rustc_hash::FxHashMap;
use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{Call, Dims};
use smallvec::SmallVec;

use super::{Graph, InputInfo, Node};
use crate::ops::{GraphBuilder, NodeId, Op};

/// The body of a scan ([`Op::Scan`]): a graph that runs in every step, over carries that pass
/// from step to step and the parts of tensors at the step's index of time.
///
/// Its first outputs are the carries as a step leaves them, in the order of their feeds; the rest
/// are its results. Every output is a result of the scan ([`Op::ScanResult`]), with those of all
/// steps along a first axis, in the order of time.
#[derive(Clone, Debug)]
pub struct Body {
    /// The computation of a step. It reads no variables, and none of its nodes has an effect.
    pub graph: Graph,
    /// The number of steps; at least 1.
    pub steps: u32,
    /// From the last index of time to the first.
    pub reverse: bool,
    /// The kind of each input of the graph.
    pub feeds: Vec<Feed>,
    /// The kernels of a step, once they are planned.
    pub planned: Option<PlannedBody>,
}

/// The kind of an input of a body. The operands of the scan follow the feeds: one for each, but for
/// [`Feed::Neighbour`] two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feed {
    /// A carry; the operand is its initial value.
    Carry,
    /// The part of the operand at the step's index of time.
    Step,
    /// The part of the first operand at the index before that, or after it if `later`; the second
    /// operand where there is none.
    Neighbour {
        /// Whether it is the part after.
        later: bool,
    },
    /// The operand, in every step.
    Whole,
}

/// Which steps' values of a result are needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kept {
    /// None.
    None,
    /// That of the step that runs last: the first axis of the result has one place.
    Last,
    /// Those of all steps.
    All,
}

/// The kernels of a body and where their arguments are.
///
/// The arguments of the loop are the operands of the scan, then the sizes of the run if `sizes`,
/// then the results of which something is kept.
#[derive(Clone, Debug)]
pub struct PlannedBody {
    /// For each result.
    pub kept: Vec<Kept>,
    /// The calls of a step.
    pub calls: Vec<Call>,
    /// Operands and results that may share memory: a step reads each element of the operand before
    /// it writes the result there.
    pub in_place: Vec<(usize, usize)>,
    /// Bytes of the loop's workspace.
    pub scratch: u64,
    /// Whether kernels read the sizes of the run.
    pub sizes: bool,
}

impl Feed {
    /// The operands that it takes.
    pub fn operands(self) -> usize {
        match self {
            Feed::Neighbour { .. } => 2,
            _ => 1,
        }
    }
}

impl Body {
    /// The number of carries.
    pub fn carries(&self) -> usize {
        self.carry_feeds().count()
    }

    /// The feeds that are carries, in order.
    pub fn carry_feeds(&self) -> impl Iterator<Item = usize> {
        (0..self.feeds.len()).filter(|&feed| self.feeds[feed] == Feed::Carry)
    }

    /// The first operand of each feed.
    pub fn first_operands(&self) -> Vec<usize> {
        let mut next = 0;
        let first = |feed: &Feed| {
            next += feed.operands();
            next - feed.operands()
        };
        self.feeds.iter().map(first).collect()
    }

    /// Whether a step reads a part of this operand rather than all of it.
    pub fn reads_parts(&self, operand: usize) -> bool {
        let parts = |(feed, first): (&Feed, usize)| {
            first == operand && matches!(feed, Feed::Step | Feed::Neighbour { .. })
        };
        self.feeds.iter().zip(self.first_operands()).any(parts)
    }

    /// The index of time of the step that runs last.
    pub fn last_time(&self) -> i64 {
        if self.reverse {
            0
        } else {
            i64::from(self.steps) - 1
        }
    }

    /// The type and shape of a result.
    pub fn result(&self, result: u32) -> Option<(DType, Dims)> {
        let node = self.graph.node(*self.graph.outputs.get(result as usize)?);
        let kept = self.planned.as_ref().map(|p| p.kept[result as usize]);
        let steps = match kept {
            Some(Kept::Last) => 1,
            _ => i64::from(self.steps),
        };
        let mut dims = Dims::from_slice(&[Size::fixed(steps)]);
        dims.extend(node.dims.iter().copied());
        Some((node.dtype, dims))
    }

    /// Fails unless these are operands of the scan.
    pub(super) fn check(&self, operands: &[&Node]) -> Result<(), String> {
        let steps = Size::fixed(i64::from(self.steps));
        let mut rest = operands.iter();
        for (feed, input) in self.feeds.iter().zip(&self.graph.inputs) {
            let mut timed = Dims::from_slice(&[steps]);
            timed.extend(input.dims.iter().copied());
            let wanted: &[&Dims] = match feed {
                Feed::Carry | Feed::Whole => &[&input.dims],
                Feed::Step => &[&timed],
                Feed::Neighbour { .. } => &[&timed, &input.dims],
            };
            for dims in wanted {
                let is = rest.next().map(|node| (node.dtype, &node.dims));
                if is != Some((input.dtype, dims)) {
                    let name = &input.name;
                    return Err(format!("its input {name} takes {} {dims:?}", input.dtype));
                }
            }
        }
        if rest.next().is_some() || self.steps == 0 || self.feeds.len() != self.graph.inputs.len() {
            return Err("it has more operands than its body has inputs, or no steps".into());
        }
        let mut carries = self.feeds.iter().zip(&self.graph.inputs);
        let mut next = || carries.find(|(feed, _)| **feed == Feed::Carry);
        for output in &self.graph.outputs {
            let Some((_, input)) = next() else { break };
            let node = self.graph.node(*output);
            if (node.dtype, &node.dims) != (input.dtype, &input.dims) {
                return Err(format!("its carry {} changes its shape", input.name));
            }
        }
        Ok(())
    }
}

/// A body under construction.
#[derive(Default)]
pub struct BodyBuilder {
    /// Its graph.
    pub graph: Graph,
    /// The kinds of its inputs.
    pub feeds: Vec<Feed>,
    /// The operands of the scan.
    pub operands: Vec<NodeId>,
}

impl BodyBuilder {
    /// A body with the symbols and origins of a graph, without nodes.
    pub fn within(outer: &Graph) -> Self {
        BodyBuilder {
            graph: Graph {
                symbols: outer.symbols.clone(),
                origins: outer.origins.clone(),
                current_origin: outer.current_origin,
                is_training: outer.is_training,
                ..Graph::default()
            },
            ..BodyBuilder::default()
        }
    }

    /// Adds an input.
    pub fn input(
        &mut self,
        feed: Feed,
        operands: &[NodeId],
        name: &str,
        (dtype, dims): (DType, Dims),
    ) -> NodeId {
        self.graph.inputs.push(InputInfo {
            name: name.into(),
            dtype,
            dims: dims.clone(),
            donated_to: None,
        });
        self.feeds.push(feed);
        self.operands.extend_from_slice(operands);
        let input = self.graph.inputs.len() as u32 - 1;
        self.graph.emit(Op::Input(input), &[], dtype, dims)
    }

    /// Copies the nodes of a graph that compute `results`, and returns the copies of the results.
    /// `map` has the nodes that already have copies. With a `start`, only nodes from there on are
    /// copied that depend on those of `map`; the others become operands of the scan, but for
    /// numbers and views, which are copied.
    pub fn copy(
        &mut self,
        outer: &Graph,
        start: Option<usize>,
        map: &mut FxHashMap<NodeId, NodeId>,
        results: &[NodeId],
    ) -> Vec<NodeId> {
        let all = start.is_none();
        let start = start.unwrap_or_default();
        let depends = {
            let mut depends = vec![false; outer.nodes.len() - start];
            for (at, node) in outer.nodes[start..].iter().enumerate() {
                let inside = |i: &NodeId| i.at() >= start && depends[i.at() - start];
                depends[at] = map.contains_key(&NodeId((start + at) as u32))
                    || node.inputs.iter().any(inside);
            }
            depends
        };
        let varies = |id: NodeId| all || id.at() >= start && depends[id.at() - start];
        // The nodes that the results need, in topological order.
        let mut needed: Vec<NodeId> = Vec::new();
        let mut seen = rustc_hash::FxHashSet::default();
        let mut stack: Vec<NodeId> = results.to_vec();
        while let Some(id) = stack.pop() {
            if varies(id) && !map.contains_key(&id) && seen.insert(id) {
                needed.push(id);
                stack.extend(&outer.node(id).inputs);
            }
        }
        needed.sort_unstable();
        for id in needed {
            let node = outer.node(id);
            let inputs: SmallVec<[NodeId; 3]> = node
                .inputs
                .iter()
                .map(|&input| self.fetch(outer, map, input))
                .collect();
            self.graph.current_origin = node.origin;
            let op = match node.op {
                Op::Scan(body) => Op::Scan(self.number_of(&outer.bodies[body as usize])),
                ref op => op.clone(),
            };
            let copied = self.graph.emit(op, &inputs, node.dtype, node.dims.clone());
            map.insert(id, copied);
        }
        results
            .iter()
            .map(|&id| self.fetch(outer, map, id))
            .collect()
    }

    /// The number of a body in this body's graph.
    fn number_of(&mut self, body: &Arc<Body>) -> u32 {
        let bodies = &mut self.graph.bodies;
        let known = bodies.iter().position(|known| Arc::ptr_eq(known, body));
        let at = known.unwrap_or_else(|| {
            bodies.push(body.clone());
            bodies.len() - 1
        });
        at as u32
    }

    /// The node that stands for one of the graph around the body.
    fn fetch(&mut self, outer: &Graph, map: &mut FxHashMap<NodeId, NodeId>, id: NodeId) -> NodeId {
        if let Some(&known) = map.get(&id) {
            return known;
        }
        // A chain of views, from the outside in.
        let mut chain = vec![id];
        let mut base = id;
        while outer.node(base).op.is_view() && !map.contains_key(&base) {
            base = outer.node(base).inputs[0];
            chain.push(base);
        }
        for id in chain.into_iter().rev() {
            if map.contains_key(&id) {
                continue;
            }
            let node = outer.node(id);
            let made = match &node.op {
                op if op.is_view() || matches!(op, Op::Const(_) | Op::Size(_) | Op::Index(_)) => {
                    let inputs: SmallVec<[NodeId; 3]> =
                        node.inputs.iter().map(|i| map[i]).collect();
                    self.graph.current_origin = node.origin;
                    self.graph
                        .emit(op.clone(), &inputs, node.dtype, node.dims.clone())
                }
                _ => self.input(
                    Feed::Whole,
                    &[id],
                    &outer.name(id),
                    (node.dtype, node.dims.clone()),
                ),
            };
            map.insert(id, made);
        }
        map[&id]
    }

    /// Adds the scan to a graph; its node and its operands. The outputs of the body are set.
    pub fn finish(self, outer: &mut Graph, steps: u32, reverse: bool) -> NodeId {
        outer.bodies.push(Arc::new(Body {
            graph: self.graph,
            steps,
            reverse,
            feeds: self.feeds,
            planned: None,
        }));
        let op = Op::Scan(outer.bodies.len() as u32 - 1);
        outer.emit(op, &self.operands, DType::F32, Dims::new())
    }
}

impl Graph {
    /// The body of a scan.
    pub fn body(&self, scan: NodeId) -> Option<&Body> {
        match self.node(scan).op {
            Op::Scan(body) => self.bodies.get(body as usize).map(|body| &**body),
            _ => None,
        }
    }

    /// A result of a scan, of all steps.
    pub fn scan_result(&mut self, scan: NodeId, result: u32) -> Option<NodeId> {
        let (dtype, dims) = self.body(scan)?.result(result)?;
        Some(self.emit(Op::ScanResult(result), &[scan], dtype, dims))
    }

    /// The part of a tensor at an index of its first axis, without that axis.
    pub fn part_at(&mut self, x: NodeId, index: i64) -> NodeId {
        let (dtype, mut dims) = (self.dtype(x), self.dims(x).clone());
        let mut start: Dims = SmallVec::from_elem(Size::ZERO, dims.len());
        start[0] = Size::fixed(index);
        dims[0] = Size::ONE;
        let step = SmallVec::from_elem(1, dims.len());
        let rest = Dims::from_slice(&dims[1..]);
        let part = self.emit(Op::Slice { start, step }, &[x], dtype, dims);
        self.reshape(part, &rest)
    }
}
