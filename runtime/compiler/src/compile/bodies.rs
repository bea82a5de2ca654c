//! Bodies of scans: each is compiled once, to the calls that its loop makes in every step.
//!
//! A body goes through the stages of a program of its own: it is simplified, fused, lowered,
//! prepared and planned. Its inputs and outputs are arguments of the loop and have no bytes in its
//! plan; the height of the plan is the workspace of the loop's kernel in the program around it.

use std::sync::Arc;

use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{Access, Call, Place, Scratch, Slot};
use slabwise_planner::ALIGN;

use super::front::{Front, FrontOptions, simplified};
use super::{CompileOptions, refuse_absurd_sizes};
use crate::backend::{KernelCache, Target};
use crate::error::{Error, Result};
use crate::graph::{Body, Feed, Graph, Kept, PlannedBody};
use crate::ir::{CallId, Program, Source, Value, ValueId};
use crate::ops::{NodeId, Op};
use crate::passes::{DumpOptions, PassError, Pipeline, Prepare};

/// The compilation of the bodies of a graph.
pub(super) struct Bodies<'a> {
    pub options: &'a CompileOptions,
    pub target: &'a Target,
    pub verifies: bool,
    pub dump: Option<&'a DumpOptions>,
    pub kernels: &'a KernelCache,
}

/// Where the arguments of a loop are among those of its kernel.
struct Layout<'a> {
    body: &'a Body,
    kept: &'a [Kept],
    /// The first operand of each feed.
    operands: Vec<usize>,
    /// The argument with the sizes of the run.
    sizes: usize,
    /// The argument that is each result, of which something is kept.
    results: Vec<Option<usize>>,
    /// Where each carry lies between steps, if not all of its values are kept.
    slots: Vec<Option<[Slot; 2]>>,
}

impl Bodies<'_> {
    /// The graph with all its bodies planned. Results of which only the last step's value is read
    /// are that value alone.
    pub fn plan(&self, name: &str, mut graph: Graph) -> Result<Graph> {
        if graph.bodies.is_empty() {
            return Ok(graph);
        }
        let kept = kept(&graph);
        for (at, kept) in kept.iter().enumerate() {
            if kept.iter().any(|k| *k != Kept::None) {
                let body = graph.bodies[at].clone();
                let planned = self.plan_body(&format!("{name}.scan{at}"), &graph, &body, kept)?;
                graph.bodies[at] = Arc::new(Body {
                    planned: Some(planned),
                    ..(*body).clone()
                });
            }
        }
        shorten(&mut graph);
        Ok(graph)
    }

    fn plan_body(
        &self,
        name: &str,
        outer: &Graph,
        body: &Body,
        kept: &[Kept],
    ) -> Result<PlannedBody> {
        let carries = body.carries();
        // Carries pass on in any case.
        let results: Vec<usize> = (0..kept.len())
            .filter(|&r| r < carries || kept[r] != Kept::None)
            .collect();
        let graph = Graph {
            symbols: outer.symbols.clone(),
            outputs: results.iter().map(|&r| body.graph.outputs[r]).collect(),
            ..body.graph.clone()
        };
        refuse_absurd_sizes(&graph)?;
        let passes = Pipeline::new(name, self.verifies, self.dump)?;
        passes.start(&graph)?;
        // The loop is lowered as one kernel, from the kernels of its calls that are ranked first. A
        // timed choice of others would have the workspaces of these planned.
        let target = &self.target.clone().timed_from(None);
        let graph = simplified(&graph, self.options, target, &passes)?;
        let graph = self.plan(name, graph)?;
        let front = Front {
            graph: &graph,
            options: self.options,
            target,
            passes: &passes,
            kernels: self.kernels,
        };
        let program = front.run(FrontOptions::default(), |_, _| {})?;
        let prepare = Prepare {
            target,
            guard: 0,
            kernels: self.kernels,
        };
        let program = passes.run(&prepare, &program)?;
        let mut dag = program.to_dag();
        let outside = |value: &Value| value.is_input() || value.output;
        for (buffer, value) in dag.buffers.iter_mut().zip(&program.values) {
            if outside(value) {
                buffer.bytes = 0;
            }
        }
        dag.may_reuse.retain(|reuse| {
            let of = |at: usize| &program.values[at];
            !outside(of(reuse.from.index())) && !outside(of(reuse.to.index()))
        });
        let plan = slabwise_planner::plan(&dag, &self.options.planner).map_err(PassError::from)?;
        let plan = slabwise_planner::check(&dag, plan)
            .map_err(|v| Error::Internal(format!("the plan of a scan is wrong: {v}")))?;
        let mut scratch = plan.height.next_multiple_of(ALIGN);
        let sizes = program.values.iter().any(|v| v.source == Source::Sizes);
        // Without copies to the host, a task is a call.
        let order: Vec<CallId> = plan.order.iter().map(|task| CallId(task.0)).collect();
        let layout = Layout::new(body, kept, sizes, (&program, &order), &mut scratch)?;
        let mut calls = Vec::with_capacity(program.kernels.len());
        for (call, task) in order.iter().zip(&plan.order) {
            let call = program.call(*call);
            let place = |value: &ValueId| {
                let (at, value) = (value.index(), program.value(*value));
                let offset = plan.offsets.get(at).copied();
                layout.place(&program, &results, value, offset.unwrap_or_default())
            };
            let places: Option<Vec<Place>> = call.args.iter().map(place).collect();
            let missing = || Error::Internal(format!("{}: a step has no such value", call.name));
            calls.push(Call {
                spec: call.spec.clone(),
                places: places.ok_or_else(missing)?,
                workspace: plan.workspace_offsets[task.index()],
                workspace_bytes: call.workspace(),
            });
        }
        let in_place = in_place(body, kept, &results, &program, &order);
        passes.finish(&program, || format!("{name}: {scratch} bytes\n"))?;
        Ok(PlannedBody {
            kept: kept.to_vec(),
            calls,
            in_place,
            scratch,
            sizes,
        })
    }
}

impl<'a> Layout<'a> {
    /// Carries that lie between steps get their bytes after `scratch`.
    fn new(
        body: &'a Body,
        kept: &'a [Kept],
        sizes: bool,
        (program, order): (&Program, &[CallId]),
        scratch: &mut u64,
    ) -> Result<Self> {
        let operands = body.feeds.iter().map(|feed| feed.operands()).sum();
        let mut next = operands + usize::from(sizes);
        let results = kept.iter().map(|kept| {
            let has_argument = *kept != Kept::None;
            next += usize::from(has_argument);
            has_argument.then(|| next - 1)
        });
        let results: Vec<Option<usize>> = results.collect();
        let mut slots = Vec::new();
        for (result, kept) in kept.iter().enumerate().take(body.carries()) {
            if *kept == Kept::All {
                slots.push(None);
                continue;
            }
            let output = program.graph.outputs[result];
            let value = program
                .values
                .iter()
                .find(|v| v.output && v.node == Some(output));
            let value = value.ok_or_else(|| Error::Internal("a carry has no value".into()))?;
            let mut place = || {
                let bytes = value.bytes;
                let offset = *scratch;
                *scratch = (offset + bytes).next_multiple_of(ALIGN);
                Slot::Scratch(Scratch { offset, bytes })
            };
            let last = match results[result] {
                Some(argument) => Slot::Argument(argument as u16),
                None => place(),
            };
            // A step may write its carry over the one that it found.
            let found = body.carry_feeds().nth(result);
            let in_place = found.is_some_and(|f| is_in_place(program, order, f, output));
            let other = if in_place { last } else { place() };
            slots.push(Some([last, other]));
        }
        Ok(Layout {
            body,
            kept,
            operands: body.first_operands(),
            sizes: operands,
            results,
            slots,
        })
    }

    /// Where a value of the body's program is.
    fn place(
        &self,
        program: &Program,
        results: &[usize],
        value: &Value,
        offset: u64,
    ) -> Option<Place> {
        let argument = |at: usize| u16::try_from(at).ok();
        match value.source {
            Source::Sizes => Some(Place::Whole(argument(self.sizes)?)),
            Source::Variable(_) => None,
            Source::Input(input) => {
                let input = input as usize;
                let operand = argument(self.operands[input])?;
                Some(match self.body.feeds[input] {
                    Feed::Whole => Place::Whole(operand),
                    Feed::Step => Place::Step(operand),
                    Feed::Neighbour { later } => Place::Neighbour {
                        of: operand,
                        first: operand + 1,
                        later,
                    },
                    Feed::Carry => {
                        let before = self.body.feeds[..input].iter();
                        let carry = before.filter(|feed| **feed == Feed::Carry).count();
                        match self.slots[carry] {
                            Some(slots) => Place::Found {
                                first: operand,
                                slots,
                            },
                            None => Place::Neighbour {
                                of: argument(self.results[carry]?)?,
                                first: operand,
                                later: self.body.reverse,
                            },
                        }
                    }
                })
            }
            Source::Computed if value.output => {
                let outputs = &program.graph.outputs;
                let at = outputs.iter().position(|o| Some(*o) == value.node)?;
                let result = results[at];
                if let Some(Some(slots)) = self.slots.get(result) {
                    return Some(Place::Left(*slots));
                }
                let to = argument(self.results[result]?)?;
                Some(match self.kept[result] {
                    Kept::All => Place::Step(to),
                    _ => Place::Whole(to),
                })
            }
            Source::Computed => Some(Place::Scratch(Scratch {
                offset,
                bytes: value.bytes,
            })),
        }
    }
}

/// Operands whose parts a step reads before it writes those of a result, with the result.
fn in_place(
    body: &Body,
    kept: &[Kept],
    results: &[usize],
    program: &Program,
    order: &[CallId],
) -> Vec<(usize, usize)> {
    let mut pairs = Vec::new();
    let operands = body.first_operands();
    for (&result, &output) in results.iter().zip(&program.graph.outputs) {
        for (feed, kind) in body.feeds.iter().enumerate() {
            let fits = match (kind, kept[result]) {
                (Feed::Step, Kept::All) => true,
                (Feed::Carry, Kept::Last) => body.carry_feeds().nth(result) == Some(feed),
                _ => false,
            };
            let (input, node) = (&program.graph.inputs[feed], program.graph.node(output));
            let same = (input.dtype, &input.dims) == (node.dtype, &node.dims);
            if fits && same && is_in_place(program, order, feed, output) {
                pairs.push((operands[feed], result));
            }
        }
    }
    pairs
}

/// Whether a step reads an input no more when it writes an output, or point by point as it writes
/// it.
fn is_in_place(program: &Program, order: &[CallId], input: usize, output: NodeId) -> bool {
    let of = |value: ValueId| program.value(value);
    let is_read = |value: ValueId| of(value).source == Source::Input(input as u32);
    let is_written = |value: ValueId| of(value).output && of(value).node == Some(output);
    let mut written = false;
    for call in order.iter().map(|&call| program.call(call)) {
        let reads = call.args.iter().any(|&arg| is_read(arg));
        let writes = call
            .accesses()
            .any(|(arg, access)| access != Access::Read && is_written(arg));
        let mut pairs = call.in_place.iter();
        let pointwise = pairs.any(|&(from, to)| is_read(from) && is_written(to));
        if reads && (written || writes && !pointwise) {
            return false;
        }
        written |= writes;
    }
    written
}

/// For each body, the parts of its results that are used.
fn kept(graph: &Graph) -> Vec<Vec<Kept>> {
    let results = graph.bodies.iter().map(|body| body.graph.outputs.len());
    let mut kept: Vec<Vec<Kept>> = results.map(|count| vec![Kept::None; count]).collect();
    let consumers = graph.consumers();
    let mut is_output = vec![false; graph.nodes.len()];
    graph.outputs.iter().for_each(|o| is_output[o.at()] = true);
    for id in graph.ids() {
        let (&Op::ScanResult(result), scan) = (&graph.node(id).op, graph.node(id).inputs.first())
        else {
            continue;
        };
        let Some(Op::Scan(at)) = scan.map(|scan| graph.node(*scan).op.clone()) else {
            continue;
        };
        let last = Size::fixed(graph.bodies[at as usize].last_time());
        let is_last = |user: &NodeId| {
            let node = graph.node(*user);
            matches!(&node.op, Op::Slice { start, .. } if start[0] == last && node.dims[0].is(1))
        };
        let only_last = !is_output[id.at()]
            && !graph.kept.contains(&id)
            && !consumers[id.at()].is_empty()
            && consumers[id.at()].iter().all(is_last);
        let slot = &mut kept[at as usize][result as usize];
        *slot = (*slot).max(if only_last { Kept::Last } else { Kept::All });
    }
    kept
}

/// Shortens the results of which only the last step's value is kept, and moves the slices of them.
fn shorten(graph: &mut Graph) {
    let mut shortened = vec![false; graph.nodes.len()];
    for at in 0..graph.nodes.len() {
        let node = &graph.nodes[at];
        let Some(&input) = node.inputs.first() else {
            continue;
        };
        if let Op::ScanResult(result) = node.op {
            let planned = graph.body(input).and_then(|body| body.planned.as_ref());
            if planned.is_some_and(|p| p.kept[result as usize] == Kept::Last) {
                shortened[at] = true;
                graph.nodes[at].dims[0] = Size::ONE;
            }
        } else if shortened[input.at()]
            && let Op::Slice { start, .. } = &mut graph.nodes[at].op
        {
            start[0] = Size::ZERO;
        }
    }
}
