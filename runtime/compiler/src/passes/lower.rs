//! Lowering: each kernel of the clusters becomes a call in the late IR, a [`Spec`] with the values
//! that are its arguments.

mod assemble;
mod body;
mod finish;
mod inline;
mod moves;

use rustc_hash::FxHashMap;
use slabwise_kernels::scalar::Value;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{Body, Dims, Inst, Operand, ReduceOp, Spec, Store, ValueId};
use smallvec::SmallVec;

use super::error::PassError;
use super::fuse::Clusters;
use super::layout::{AxisMap, Containers, Views, contiguous};
use super::pipeline::Pass;
use super::stages::stages;
use super::update::{Updates, place_updates};
use crate::graph::Graph;
use crate::ir::Program;
use crate::ops::{NodeId, Op, rows_last};
use finish::{in_place_pairs, spread};
use moves::{copy_to_variable, fill};

/// The referent of a kernel's argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Arg {
    /// The buffer of a node's value: an input, a stored value, a concatenation.
    Buffer(NodeId),
    /// A weight or state.
    Variable(u32),
    /// The sizes of this run: i32, one per symbol.
    Sizes,
}

/// A lowered kernel, whose arguments are named by their nodes.
#[derive(Debug)]
struct Lowered {
    /// Shown in plans.
    name: String,
    /// The kernel.
    spec: Spec,
    /// Its arguments, in the order of [`Spec::arguments`].
    args: Vec<Arg>,
    /// Control dependencies: kernels that must run before, for reasons other than data.
    after: Vec<usize>,
    /// Pairs (read, written) of buffers that may be one: read and written at the same places.
    in_place: Vec<(NodeId, NodeId)>,
    /// The node it is named after.
    node: NodeId,
}

/// The pass.
#[derive(Clone, Copy, Debug, Default)]
pub struct Lower {
    /// See [`CompileOptions::exact_convolutions`](crate::compile::CompileOptions).
    pub exact_convolutions: bool,
}

impl Pass for Lower {
    const NAME: &'static str = "lower";
    type Input = Clusters;
    type Output = Program;

    fn run(&self, clusters: &Clusters) -> Result<Program, PassError> {
        lower(clusters, self.exact_convolutions)
    }
}

/// The program of the clusters, its calls in an order in which they can run, and its convolutions
/// exact or not.
///
/// # Errors
/// If a kernel has no form; the rules of the graph leave no such kernel.
pub fn lower(clusters: &Clusters, exact_convolutions: bool) -> Result<Program, PassError> {
    let graph = &clusters.graph;
    let views = Views::of(graph);
    let mut updates = place_updates(clusters, &views);
    let deferred = std::mem::take(&mut updates.deferred);
    let mut copied = vec![false; graph.nodes.len()];
    deferred
        .iter()
        .for_each(|deferred| copied[deferred.value.at()] = true);
    let around = Around {
        views,
        containers: Containers::of_all(graph),
        copied,
        in_place: std::mem::take(&mut updates.in_place),
    };
    // The canvas of a padding is filled before the part is placed on it.
    let canvases: Vec<(NodeId, Value)> = graph
        .ids()
        .filter_map(|id| {
            if let Op::Pad { value, .. } = graph.node(id).op {
                Some((id, value))
            } else {
                None
            }
        })
        .collect();
    let first = canvases.len();
    let mut tasks = Vec::new();
    let stages = stages(graph);
    for &(id, value) in &canvases {
        let no_strides = || PassError::NoStrides {
            kernel: graph.name(id),
        };
        let mut task = fill(graph, id, value).ok_or_else(no_strides)?;
        task.after.extend(
            updates
                .finders(stages[id.at()])
                .map(|cluster| cluster + first),
        );
        tasks.push(task);
    }
    for at in 0..clusters.list.len() {
        let mut task = Lowering::new(clusters, &around, at)
            .run(&updates)
            .ok_or_else(|| PassError::NoStrides {
                kernel: clusters.name(at),
            })?;
        if let Body::Conv2d(conv) = &mut task.spec.body {
            conv.exact = exact_convolutions;
        }
        task.after
            .extend(updates.after[at].iter().map(|a| a + first));
        tasks.push(task);
    }
    for deferred in &deferred {
        let after = deferred.after.iter().map(|a| a + first).collect();
        tasks.push(
            copy_to_variable(graph, deferred.value, deferred.variable, after).ok_or_else(|| {
                PassError::NoStrides {
                    kernel: graph.name(deferred.value),
                }
            })?,
        );
    }
    assemble::assemble(graph, tasks)
}

/// Facts about all nodes that lowering needs.
struct Around {
    views: Views,
    containers: Containers,
    /// Which values are copied into a variable by a separate kernel.
    copied: Vec<bool>,
    /// Values that are written into a variable in place, and lie there.
    in_place: FxHashMap<NodeId, u32>,
}

impl Around {
    /// The argument that is a node's own buffer.
    fn base(&self, graph: &Graph, id: NodeId) -> Arg {
        match graph.node(id).op {
            Op::Variable(v) => Arg::Variable(v),
            _ => match self.in_place.get(&id) {
                Some(&v) => Arg::Variable(v),
                None => Arg::Buffer(id),
            },
        }
    }
}

/// The lowering of one kernel.
struct Lowering<'a> {
    clusters: &'a Clusters,
    around: &'a Around,
    graph: &'a Graph,
    cluster: usize,
    /// Axis of the space → axis of the spec: kept ones first, reduced ones last.
    position: SmallVec<[usize; 6]>,
    dims: Dims,
    operands: Vec<Operand>,
    args: Vec<Arg>,
    indices: Vec<Dims>,
    code: Vec<Inst>,
    values: FxHashMap<NodeId, ValueId>,
    made: FxHashMap<(NodeId, AxisMap), ValueId>,
    /// The loads there are, by operand.
    loads: FxHashMap<u16, ValueId>,
}

impl<'a> Lowering<'a> {
    fn new(clusters: &'a Clusters, around: &'a Around, cluster: usize) -> Self {
        let c = &clusters.list[cluster];
        let mut order: SmallVec<[usize; 6]> =
            (0..c.space.len()).filter(|&s| !c.reduced[s]).collect();
        order.extend((0..c.space.len()).filter(|&s| c.reduced[s]));
        let op = c.anchor.map(|anchor| &clusters.graph.node(anchor).op);
        if let Some(Op::Attention(_) | Op::AttentionGrad { .. }) = op {
            order = rows_last(order.len());
        }
        let mut position: SmallVec<[usize; 6]> = SmallVec::from_elem(0, order.len());
        for (at, &s) in order.iter().enumerate() {
            position[s] = at;
        }
        let dims = order.iter().map(|&s| c.space[s]).collect();
        Lowering {
            clusters,
            around,
            graph: &clusters.graph,
            cluster,
            position,
            dims,
            operands: vec![],
            args: vec![],
            indices: vec![],
            code: vec![],
            values: FxHashMap::default(),
            made: FxHashMap::default(),
            loads: FxHashMap::default(),
        }
    }

    fn run(&mut self, updates: &Updates) -> Option<Lowered> {
        let c = &self.clusters.list[self.cluster];
        let mut stores = Vec::new();
        for &id in &c.members {
            if Some(id) == c.positions
                || self.graph.node(id).op.is_check()
                || self.graph.node(id).op.is_opaque()
            {
                continue;
            }
            let value = self.member(id)?;
            self.values.insert(id, value);
            let mut targets: SmallVec<[Arg; 2]> = SmallVec::new();
            if self.clusters.stored[id.at()] || self.around.copied[id.at()] {
                targets.push(Arg::Buffer(id));
            }
            targets.extend(
                updates
                    .direct
                    .get(&id)
                    .into_iter()
                    .flatten()
                    .map(|&v| Arg::Variable(v)),
            );
            for target in targets {
                let (arg, operand) = self.target(id, target)?;
                stores.push(Store {
                    value,
                    operand: self.operand(arg, operand),
                });
            }
        }
        let (body, mut args) = self.body()?;
        args.append(&mut self.args);
        let mut spec = Spec {
            body,
            dims: self.dims.clone(),
            reduced: c.reduced.iter().filter(|r| **r).count(),
            operands: std::mem::take(&mut self.operands),
            indices: std::mem::take(&mut self.indices),
            code: std::mem::take(&mut self.code),
            stores,
        };
        spread(&mut spec);
        let in_place = in_place_pairs(&spec, &args);
        let node = *c.members.last().expect("kernels have members");
        Some(Lowered {
            name: self.clusters.name(self.cluster),
            spec,
            args,
            after: vec![],
            in_place,
            node,
        })
    }

    fn push(&mut self, inst: Inst) -> ValueId {
        self.code.push(inst);
        (self.code.len() - 1) as ValueId
    }

    /// The value of an operand at the points of the kernel, loaded once.
    fn load(&mut self, operand: u16) -> ValueId {
        if let Some(&known) = self.loads.get(&operand) {
            return known;
        }
        let value = self.push(Inst::Load(operand));
        self.loads.insert(operand, value);
        value
    }

    /// The number of an operand, which the kernel may have already.
    fn operand(&mut self, arg: Arg, operand: Operand) -> u16 {
        let known = self
            .args
            .iter()
            .zip(&self.operands)
            .position(|(a, o)| *a == arg && *o == operand);
        known.unwrap_or_else(|| {
            self.args.push(arg);
            self.operands.push(operand);
            self.args.len() - 1
        }) as u16
    }

    /// The value of a member, its operands' values made before it.
    fn member(&mut self, id: NodeId) -> Option<ValueId> {
        let graph = self.graph;
        let node = graph.node(id);
        Some(match &node.op {
            Op::Scalar(op) => {
                let mut args = [0; 3];
                for (k, arg) in args[..node.inputs.len()].iter_mut().enumerate() {
                    *arg = self.value(id, k)?;
                }
                self.push(Inst::Op(*op, args))
            }
            Op::Cast(to) => {
                let value = self.value(id, 0)?;
                self.cast(value, graph.node(node.inputs[0]).dtype, *to)
            }
            Op::Copy => self.value(id, 0)?,
            Op::Reduce(op, axes) => {
                let value = self.value(id, 0)?;
                let operand = &graph.node(node.inputs[0]).dims;
                let folds = axes.iter().any(|&a| !operand[a].is(1));
                match op {
                    _ if folds => self.push(Inst::Reduce(*op, value)),
                    // Axes of length 1 leave nothing to reduce, and one position.
                    ReduceOp::ArgMax | ReduceOp::ArgMin => self.push(Inst::Const(Value::I32(0))),
                    _ => value,
                }
            }
            Op::Uniform { stream } => {
                let state = self.variable_operand(self.clusters.edges[id.at()][0].source);
                let index = self.value(id, 1)?;
                self.push(Inst::Uniform {
                    state,
                    stream: *stream,
                    index,
                })
            }
            _ => self.push(Inst::Acc),
        })
    }

    /// Operand `k` of a pointwise member or reduction at the points of this kernel.
    fn value(&mut self, user: NodeId, k: usize) -> Option<ValueId> {
        let place = self.clusters.places[user.at()].as_ref()?;
        self.read(user, k, place.operand_axes.as_ref().unwrap_or(&place.axes))
    }

    /// Operand `k` of a node, made here, kept from before, or loaded; `seen` are the operand's axes
    /// in the space.
    fn read(&mut self, user: NodeId, k: usize, seen: &AxisMap) -> Option<ValueId> {
        let clusters = self.clusters;
        let edge = &clusters.edges[user.at()][k];
        if clusters.inline[edge.source.at()] {
            let axes = edge.axes.as_ref().map(|axes| {
                axes.iter()
                    .map(|a| a.and_then(|a| seen[usize::from(a)]))
                    .collect()
            });
            return self.inline(edge.source, axes.unwrap_or_default());
        }
        if clusters.places[edge.source.at()]
            .as_ref()
            .is_some_and(|p| p.cluster == self.cluster)
        {
            return self.values.get(&edge.source).copied();
        }
        let operand_node = self.graph.node(user).inputs[k];
        let v = self.around.views.view(self.graph, operand_node)?;
        let mut strides: Dims = SmallVec::from_elem(Size::ZERO, self.dims.len());
        for (j, stride) in v.strides.iter().enumerate() {
            if let Some(s) = seen[j] {
                strides[self.position[usize::from(s)]] = *stride;
            }
        }
        let operand = Operand {
            dtype: self.graph.node(operand_node).dtype,
            offset: v.offset,
            strides,
        };
        let at = self.operand(self.around.base(self.graph, v.base), operand);
        Some(self.load(at))
    }

    /// Where a member's value goes, and how it is laid out there.
    fn target(&self, id: NodeId, arg: Arg) -> Option<(Arg, Operand)> {
        let node = self.graph.node(id);
        let place = self.clusters.places[id.at()].as_ref()?;
        let (mut arg, mut offset, mut own) = (arg, Size::ZERO, contiguous(&node.dims)?);
        if let (Arg::Buffer(_), Some((container, start, step))) =
            (arg, self.around.containers.place(self.graph, id))
        {
            let whole = contiguous(&self.graph.node(container).dims)?;
            for i in 0..own.len() {
                offset = offset.checked_add(start[i].checked_mul(whole[i])?)?;
                own[i] = whole[i].checked_mul(Size::from(step[i]))?;
            }
            arg = Arg::Buffer(container);
        }
        let mut strides: Dims = SmallVec::from_elem(Size::ZERO, self.dims.len());
        for (i, axis) in place.axes.iter().enumerate() {
            if let Some(s) = axis {
                strides[self.position[usize::from(*s)]] = own[i];
            }
        }
        Some((
            arg,
            Operand {
                dtype: node.dtype,
                offset,
                strides,
            },
        ))
    }
}
