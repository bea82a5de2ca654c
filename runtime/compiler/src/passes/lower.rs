//! Lowering: each kernel of the clusters becomes a call in the late IR, a [`Spec`] with the values
//! that are its arguments.

mod assemble;

use rustc_hash::FxHashMap;
use slabwise_kernels::dtype::{DType, Lane};
use slabwise_kernels::scalar::{ScalarOp, Value};
use slabwise_kernels::size::{Size, Symbol};
use slabwise_kernels::spec::{
    Body, CheckIndex, Compact, Conv2d, ConvKind, Dims, Gather, Inst, Matmul, Operand, Pool2d,
    Pool2dGrad, PoolKind, ReduceOp, ScatterAdd, Sort, Spec, Store, Suppress, ValueId,
};
use smallvec::SmallVec;

use super::error::PassError;
use super::fuse::Clusters;
use super::layout::{AxisMap, Containers, Views, contiguous};
use super::pipeline::Pass;
use super::stages::stages;
use super::update::{Updates, place_updates};
use crate::graph::Graph;
use crate::ir::Program;
use crate::ops::{ConvGeometry, NodeId, Op};
use crate::shape::Extent;

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
pub struct Lower;

impl Pass for Lower {
    const NAME: &'static str = "lower";
    type Input = Clusters;
    type Output = Program;

    fn run(&self, clusters: &Clusters) -> Result<Program, PassError> {
        lower(clusters)
    }
}

/// The program of the clusters, its calls in an order in which they can run.
///
/// # Errors
/// If a kernel has no form; the rules of the graph leave no such kernel.
pub fn lower(clusters: &Clusters) -> Result<Program, PassError> {
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

fn fill(graph: &Graph, id: NodeId, value: Value) -> Option<Lowered> {
    let node = graph.node(id);
    let spec = Spec {
        body: Body::Loop,
        dims: node.dims.clone(),
        reduced: 0,
        operands: vec![Operand::contiguous(node.dtype, &node.dims)?],
        indices: vec![],
        code: vec![Inst::Const(value)],
        stores: vec![Store {
            value: 0,
            operand: 0,
        }],
    };
    Some(Lowered {
        name: format!("{}.fill", graph.name(id)),
        spec,
        args: vec![Arg::Buffer(id)],
        after: vec![],
        in_place: vec![],
        node: id,
    })
}

fn copy_to_variable(
    graph: &Graph,
    id: NodeId,
    variable: u32,
    after: Vec<usize>,
) -> Option<Lowered> {
    let node = graph.node(id);
    let operand = Operand::contiguous(node.dtype, &node.dims)?;
    let spec = Spec {
        body: Body::Loop,
        dims: node.dims.clone(),
        reduced: 0,
        operands: vec![operand.clone(), operand],
        indices: vec![],
        code: vec![Inst::Load(0)],
        stores: vec![Store {
            value: 0,
            operand: 1,
        }],
    };
    let args = vec![Arg::Buffer(id), Arg::Variable(variable)];
    Some(Lowered {
        name: format!("{}.update", graph.variables[variable as usize].name),
        spec,
        args,
        after,
        in_place: vec![],
        node: id,
    })
}

/// A value that does not vary along the reduced axes is stored once per point of the kept ones.
/// Where it is to be stored at every point all the same, it is chosen there between itself and
/// itself.
fn spread(spec: &mut Spec) {
    let (folded, kept) = (spec.folded(), spec.dims.len() - spec.reduced);
    for at in 0..spec.stores.len() {
        let Store { value, operand } = spec.stores[at];
        if !folded[usize::from(value)]
            || spec.operands[usize::from(operand)].strides[kept..]
                .iter()
                .all(|s| s.is(0))
        {
            continue;
        }
        let mut along: Dims = SmallVec::from_elem(Size::ZERO, spec.dims.len());
        along[kept..].fill(Size::ONE);
        spec.indices.push(along);
        let first = spec.code.len() as ValueId;
        let index = Inst::Index(spec.indices.len() as u16 - 1);
        let everywhere = Inst::Op(ScalarOp::Eq, [first, first, 0]);
        spec.code.extend([
            index,
            everywhere,
            Inst::Op(ScalarOp::Select, [first + 1, value, value]),
        ]);
        spec.stores[at].value = first + 2;
    }
}

/// Facts about all nodes that lowering needs.
struct Around {
    views: Views,
    containers: Containers,
    /// Which values are copied into a variable by a separate kernel.
    copied: Vec<bool>,
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
                || self.graph.node(id).op.stands_alone()
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

    /// Conversion as a buffer of the type in between would do it: bytes saturate, halves round.
    fn cast(&mut self, value: ValueId, from: DType, to: DType) -> ValueId {
        let mut value = value;
        if from.lane() != to.lane() {
            value = self.push(Inst::Cast(value, to.lane()));
        }
        if let Some(round) = to.rounding().filter(|_| from != to) {
            value = self.push(Inst::Op(round, [value, 0, 0]));
        }
        if to == DType::U8 && from.lane() != Lane::Bool && from != DType::U8 {
            let (low, high) = (
                self.push(Inst::Const(Value::I32(0))),
                self.push(Inst::Const(Value::I32(255))),
            );
            let above = self.push(Inst::Op(ScalarOp::Max, [value, low, 0]));
            value = self.push(Inst::Op(ScalarOp::Min, [above, high, 0]));
        }
        value
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
        let at = self.operand(base(self.graph, v.base), operand);
        Some(self.load(at))
    }

    /// A value that every kernel makes for itself; `axes` are the node's axes in the space.
    fn inline(&mut self, id: NodeId, axes: AxisMap) -> Option<ValueId> {
        if let Some(&value) = self.made.get(&(id, axes.clone())) {
            return Some(value);
        }
        let graph = self.graph;
        let node = graph.node(id);
        let value = match &node.op {
            Op::Const(value) => self.push(Inst::Const(*value)),
            Op::Size(size) => self.size(*size),
            Op::Index(strides) => {
                let mut index: Dims = SmallVec::from_elem(Size::ZERO, self.dims.len());
                for (stride, axis) in strides.iter().zip(&axes) {
                    if let Some(s) = axis {
                        index[self.position[usize::from(*s)]] = *stride;
                    }
                }
                let at = self
                    .indices
                    .iter()
                    .position(|i| *i == index)
                    .unwrap_or_else(|| {
                        self.indices.push(index);
                        self.indices.len() - 1
                    });
                self.push(Inst::Index(at as u16))
            }
            Op::Uniform { stream } => {
                let state = self.variable_operand(self.clusters.edges[id.at()][0].source);
                let index = self.read(id, 1, &axes)?;
                self.push(Inst::Uniform {
                    state,
                    stream: *stream,
                    index,
                })
            }
            Op::Cast(to) => {
                let value = self.read(id, 0, &axes)?;
                self.cast(value, graph.node(node.inputs[0]).dtype, *to)
            }
            Op::Scalar(op) => {
                let mut args = [0; 3];
                for (k, arg) in args[..node.inputs.len()].iter_mut().enumerate() {
                    *arg = self.read(id, k, &axes)?;
                }
                self.push(Inst::Op(*op, args))
            }
            _ => return None,
        };
        self.made.insert((id, axes), value);
        Some(value)
    }

    fn variable_operand(&mut self, variable: NodeId) -> u16 {
        let node = self.graph.node(variable);
        let strides = SmallVec::from_elem(Size::ZERO, self.dims.len());
        self.operand(
            base(self.graph, variable),
            Operand {
                dtype: node.dtype,
                offset: Size::ZERO,
                strides,
            },
        )
    }

    /// A size as a value: `scale · s₁ · s₂ + offset` from the sizes of the run.
    fn size(&mut self, size: Size) -> ValueId {
        let int = |n: i64| Inst::Const(Value::I32(i32::try_from(n).unwrap_or(i32::MAX)));
        if let Some(n) = size.as_fixed() {
            return self.push(int(n));
        }
        let (scale, offset) = size.parts();
        let mut value = self.push(int(scale));
        for Symbol(s) in size.symbols() {
            let strides = SmallVec::from_elem(Size::ZERO, self.dims.len());
            let at = self.operand(
                Arg::Sizes,
                Operand {
                    dtype: DType::I32,
                    offset: Size::fixed(i64::from(s)),
                    strides,
                },
            );
            let factor = self.push(Inst::Load(at));
            value = self.push(Inst::Op(ScalarOp::Mul, [value, factor, 0]));
        }
        let offset = self.push(int(offset));
        self.push(Inst::Op(ScalarOp::Add, [value, offset, 0]))
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

    /// The anchor and its arguments.
    fn body(&self) -> Option<(Body, Vec<Arg>)> {
        let c = &self.clusters.list[self.cluster];
        let Some(anchor) = c.anchor else {
            return Some((Body::Loop, vec![]));
        };
        let node = self.graph.node(anchor);
        let operand = |k: usize| {
            let input = node.inputs[k];
            let v = self.around.views.view(self.graph, input)?;
            Some((
                Operand {
                    dtype: self.graph.node(input).dtype,
                    offset: v.offset,
                    strides: v.strides,
                },
                base(self.graph, v.base),
            ))
        };
        let dims_of = |k: usize| &self.graph.node(node.inputs[k]).dims;
        let (first, first_arg) = operand(0)?;
        let mut args = vec![first_arg];
        let body = match &node.op {
            Op::Matmul => {
                let (b, arg) = operand(1)?;
                args.push(arg);
                Body::Matmul(Matmul {
                    k: *dims_of(0).last()?,
                    a: first,
                    b,
                })
            }
            Op::Conv2d(g) | Op::Conv2dInputGrad(g) | Op::Conv2dWeightGrad(g) => {
                let (b, arg) = operand(1)?;
                args.push(arg);
                let (kind, image, result, weight) = match &node.op {
                    Op::Conv2d(_) => (ConvKind::Forward, dims_of(0), &node.dims, dims_of(1)),
                    Op::Conv2dInputGrad(_) => {
                        (ConvKind::InputGrad, &node.dims, dims_of(0), dims_of(1))
                    }
                    _ => (ConvKind::WeightGrad, dims_of(0), dims_of(1), &node.dims),
                };
                Body::Conv2d(conv(kind, g, image, result, weight, first, b)?)
            }
            Op::Pool2d(kind, window) => {
                let image = dims_of(0);
                let mut arg = None;
                if let Some(positions) = c.positions {
                    arg = Some(Operand::contiguous(
                        self.graph.node(positions).dtype,
                        &self.graph.node(positions).dims,
                    )?);
                    args.push(Arg::Buffer(positions));
                }
                Body::Pool2d(Pool2d {
                    kind: *kind,
                    window: *window,
                    hw: [image[2], image[3]],
                    x: first,
                    arg,
                })
            }
            Op::Pool2dGrad(kind, window) => {
                let result = dims_of(0);
                let mut arg = None;
                if *kind == PoolKind::Max {
                    let (positions, from) = operand(1)?;
                    arg = Some(positions);
                    args.push(from);
                }
                Body::Pool2dGrad(Pool2dGrad {
                    kind: *kind,
                    window: *window,
                    ohw: [result[2], result[3]],
                    dy: first,
                    arg,
                })
            }
            Op::Gather { axis } => {
                let (index, from) = operand(1)?;
                args.push(from);
                let mut source = first;
                let axis_stride = std::mem::replace(&mut source.strides[*axis], Size::ZERO);
                Body::Gather(Gather {
                    source,
                    index,
                    axis_stride,
                    axis_len: dims_of(0)[*axis],
                })
            }
            Op::ScatterAdd { axis } => {
                let (index, from) = operand(1)?;
                args.push(from);
                Body::ScatterAdd(ScatterAdd {
                    axis: *axis,
                    space: dims_of(0).clone(),
                    value: first,
                    index,
                })
            }
            Op::CheckIndex { limit, .. } => Body::CheckIndex(CheckIndex {
                index: first,
                limit: *limit,
            }),
            Op::Bind { symbol } => {
                let Extent::Found(most) = self.graph.symbols.extent(*symbol) else {
                    return None;
                };
                Body::CheckIndex(CheckIndex {
                    index: first,
                    limit: most.checked_add(Size::ONE)?,
                })
            }
            op if op.stands_alone() => {
                let own = Operand::contiguous(node.dtype, &node.dims)?;
                args.push(Arg::Buffer(anchor));
                match op {
                    Op::Compact => Body::Compact(Compact {
                        space: dims_of(0).clone(),
                        mask: first,
                        positions: own,
                    }),
                    Op::Sort { descending } => Body::Sort(Sort {
                        descending: *descending,
                        source: first,
                        positions: own,
                    }),
                    Op::Suppress { threshold } => Body::Suppress(Suppress {
                        threshold: *threshold,
                        boxes: first,
                        keep: own,
                    }),
                    _ => return None,
                }
            }
            _ => return None,
        };
        Some((body, args))
    }
}

fn conv(
    kind: ConvKind,
    g: &ConvGeometry,
    image: &Dims,
    result: &Dims,
    weight: &Dims,
    a: Operand,
    b: Operand,
) -> Option<Conv2d> {
    let fixed = |s: Size| s.as_fixed().and_then(|n| usize::try_from(n).ok());
    Some(Conv2d {
        kind,
        n: image[0],
        ci: image[1],
        co: weight[0],
        hw: [image[2], image[3]],
        ohw: [result[2], result[3]],
        k: [fixed(weight[2])?, fixed(weight[3])?],
        stride: g.stride,
        pad: g.pad,
        dilation: g.dilation,
        groups: g.groups,
        a,
        b,
        prologue: None,
    })
}

/// The argument that is a node's own buffer.
fn base(graph: &Graph, id: NodeId) -> Arg {
    match graph.node(id).op {
        Op::Variable(v) => Arg::Variable(v),
        _ => Arg::Buffer(id),
    }
}

/// Buffers that a kernel reads and writes at the same places, so that the written one may take the
/// read one's bytes.
fn in_place_pairs(spec: &Spec, args: &[Arg]) -> Vec<(NodeId, NodeId)> {
    let anchors = args.len() - spec.operands.len();
    let mut pairs = Vec::new();
    for store in &spec.stores {
        let to = usize::from(store.operand);
        for from in 0..spec.operands.len() {
            let (Arg::Buffer(a), Arg::Buffer(b)) = (args[anchors + from], args[anchors + to])
            else {
                continue;
            };
            let loaded = spec.code.contains(&Inst::Load(from as u16));
            // No other argument may be the same buffer, because it may have other strides.
            let alone = args
                .iter()
                .enumerate()
                .all(|(i, arg)| *arg != args[anchors + from] || i == anchors + from);
            if a != b
                && loaded
                && alone
                && spec.operands[from] == spec.operands[to]
                && spec.operands[to].offset.is(0)
            {
                pairs.push((a, b));
            }
        }
    }
    pairs.dedup();
    pairs
}
