//! Linking: a program in the late IR and its checked plan become steps with resolved arguments.

use std::sync::OnceLock;

use rustc_hash::FxHashMap;
use slabwise_kernels::spec::Body;
use slabwise_planner::{self as planner, Lifetime, Space};

use super::transfers::{Moment, place, transfer, transfer_step};
use super::{Binds, Compiled, InputSlot, Need, Planned, PlannedBuffer, Step, Work};
use crate::compile::CompiledPlan;
use crate::error::{Error, Mistake, Result};
use crate::graph::{Graph, InputInfo, Needed, Origin};
use crate::ir::{self, KernelCall, Source, ValueId};
use crate::memory::Tag;
use crate::ops::{Checked, NodeId, Op};
use crate::plan::Plan;

impl Compiled {
    /// Joins prepared kernels with checked offsets: a program runs only as the checkers accepted
    /// it. `variables` says where the session keeps each variable of the graph.
    pub fn link(
        compiled: CompiledPlan,
        variables: &[usize],
        use_gaps: bool,
        session: u64,
    ) -> Result<Self> {
        let (program, plan) = compiled.into_parts();
        let (program, graph) = (&program, &program.graph);
        let buffers = planned_buffers(program, &plan);
        let steps = steps(program, &plan, variables);
        let (inputs, outputs) = (inputs(program), outputs(program)?);
        let mut input_of = vec![None; buffers.len()];
        for (i, input) in inputs.iter().enumerate() {
            input.buffer.into_iter().for_each(|b| input_of[b] = Some(i));
        }
        let has_data_dependent = buffers.iter().any(|b| b.data_dependent);
        // Memory checks fill the bytes that the plan leaves free.
        let lends = use_gaps && has_data_dependent && program.guard == 0;
        let gaps = if lends {
            gaps(&buffers, &steps, &plan)
        } else {
            Vec::new()
        };
        let offsets = plan.offsets();
        let transfers = program.transfers.iter();
        let transfers = transfers.map(|t| transfer(program, t, variables));
        Ok(Compiled {
            tags: tags(program, &steps),
            tag_ids: OnceLock::new(),
            session,
            name: plan.name().into(),
            needed: needs(graph, &steps),
            steps,
            buffers,
            transfers: transfers.collect(),
            inputs,
            input_of,
            outputs,
            symbols: graph.symbols.clone(),
            slab_bytes: offsets.height,
            host_bytes: offsets.host_height,
            prefetch_queue: None,
            plan,
            guard: program.guard,
            has_data_dependent,
            gaps,
            loaded: None,
            rank: [0, 1, 1],
            fingerprint: None,
        })
    }
}

/// The buffers of a program: its planned values, where the plan places them.
fn planned_buffers(program: &ir::Program, plan: &Plan) -> Vec<PlannedBuffer> {
    let placed = plan.dag().buffers.iter().zip(&plan.offsets().offsets);
    let values = program.values.iter().zip(placed);
    let buffer = |(value, (buffer, &offset)): (&ir::Value, (&planner::Buffer, _))| PlannedBuffer {
        place: Planned {
            offset,
            bytes: buffer.bytes.next_multiple_of(planner::ALIGN),
        },
        on_host: value.space == Space::Host,
        used: value.bytes,
        dtype: value.dtype,
        dims: value.dims.clone(),
        stored: value.stored_dims(),
        data_dependent: value.data_dependent,
        origin: value.node.map(|node| program.graph.origin(node).clone()),
    };
    values.map(buffer).collect()
}

/// The steps of a program in the order of its plan.
fn steps(program: &ir::Program, plan: &Plan, variables: &[usize]) -> Vec<Step> {
    let offsets = plan.offsets();
    let (mut begins, mut ends) = (
        vec![Vec::new(); offsets.order.len()],
        vec![Vec::new(); offsets.order.len()],
    );
    for (b, lifetime) in offsets.lifetimes.iter().enumerate() {
        begins
            .get_mut(lifetime.start as usize)
            .into_iter()
            .for_each(|list| list.push(b));
        ends.get_mut(lifetime.end.saturating_sub(1) as usize)
            .into_iter()
            .for_each(|list| list.push(b));
    }
    let work = program.work();
    let step = |(step, task): (usize, &planner::TaskId)| {
        let moment = Moment {
            name: plan.dag().task_name(*task).to_owned(),
            workspace: offsets.workspace_offsets[task.index()],
            begins: std::mem::take(&mut begins[step]),
            ends: std::mem::take(&mut ends[step]),
        };
        match work[task.index()] {
            planner::Work::Run(call) => {
                let call = &program.kernels[call.index()];
                kernel_step(program, call, variables, moment)
            }
            planner::Work::Start(transfer) => {
                transfer_step(program, transfer, Work::Start(transfer as usize), moment)
            }
            planner::Work::Finish(transfer) => {
                transfer_step(program, transfer, Work::Finish(transfer as usize), moment)
            }
        }
    };
    offsets.order.iter().enumerate().map(step).collect()
}

/// The step that runs a call.
fn kernel_step(
    program: &ir::Program,
    call: &KernelCall,
    variables: &[usize],
    moment: Moment,
) -> Step {
    let place = |(at, &value): (usize, &ValueId)| place(program, call, (at, value), variables);
    let op = &program.graph.node(call.node).op;
    let binds = match (op, &call.spec.body) {
        (&Op::Bind { symbol }, Body::BoundsCheck(check)) => Some(Binds {
            symbol,
            offset: check.index.offset,
        }),
        _ => None,
    };
    Step {
        workspace: Planned {
            offset: moment.workspace,
            bytes: call.workspace(),
        },
        work: Work::Run(call.kernel.clone().expect("a planned call is prepared")),
        places: call.args.iter().enumerate().map(place).collect(),
        slice: call.micro_batch,
        name: moment.name,
        origin: program.origin(call).clone(),
        ends: moment.ends,
        begins: moment.begins,
        binds,
        finite: matches!(
            op,
            Op::BoundsCheck {
                of: Checked::Finite,
                ..
            }
        ),
    }
}

/// The inputs of a program, each with its buffer if a call reads it.
fn inputs(program: &ir::Program) -> Vec<InputSlot> {
    let graph = &program.graph;
    let mut buffer_of = vec![None; graph.inputs.len()];
    for (at, value) in program.values.iter().enumerate() {
        if let Source::Input(input) = value.source {
            buffer_of[input as usize] = Some(at);
        }
    }
    let slot = |(info, buffer): (&InputInfo, Option<usize>)| InputSlot {
        name: info.name.clone(),
        dtype: info.dtype,
        dims: info.dims.clone(),
        buffer,
        donated_to: info.donated_to,
    };
    graph.inputs.iter().zip(buffer_of).map(slot).collect()
}

/// The buffers of the outputs of a program.
fn outputs(program: &ir::Program) -> Result<Vec<usize>> {
    let values = program.values.iter().enumerate();
    let returned = values.filter(|(_, value)| value.output);
    let buffer_of: FxHashMap<Option<NodeId>, usize> =
        returned.map(|(at, value)| (value.node, at)).collect();
    let buffer = |output: &NodeId| {
        let buffer = buffer_of.get(&Some(*output)).copied();
        buffer.ok_or_else(|| Error::Internal("an output has no buffer".into()))
    };
    program.graph.outputs.iter().map(buffer).collect()
}

/// For each data-dependent buffer, the ranges of the slab that the plan leaves free while it lives.
fn gaps(buffers: &[PlannedBuffer], steps: &[Step], plan: &Plan) -> Vec<Vec<(u64, u64)>> {
    let lifetimes = &plan.offsets().lifetimes;
    let at_step = |(step, s): (usize, &Step)| {
        let (start, end) = (step as u64, step as u64 + 1);
        (s.workspace, Lifetime { start, end })
    };
    let gaps = |(buffer, &lifetime): (&PlannedBuffer, &Lifetime)| {
        if !buffer.data_dependent {
            return Vec::new();
        }
        let places = buffers.iter().map(|b| b.place);
        let planned = places.zip(lifetimes.iter().copied());
        let workspaces = steps.iter().enumerate().map(at_step);
        super::gaps::gaps(planned.chain(workspaces), lifetime)
    };
    buffers.iter().zip(lifetimes).map(gaps).collect()
}

/// The tags of a program's buffers, then of the workspaces of its steps.
fn tags(program: &ir::Program, steps: &[Step]) -> Vec<Tag> {
    let tag = |name: &str, origin: &Origin| Tag {
        name: name.into(),
        layer: origin.layer.clone(),
        location: Some(origin.location),
    };
    // Those that are planned come first. Sums in epilogues are of no node.
    let values = program.values.iter().take_while(|v| v.is_planned());
    let named = values.map(|v| match v.node {
        Some(node) => tag(&v.name, program.graph.origin(node)),
        None => Tag::named(&v.name),
    });
    let workspaces = steps
        .iter()
        .map(|s| tag(&format!("workspace of {}", s.name), &s.origin));
    named.chain(workspaces).collect()
}

/// The lengths that must not be 0, each with the step after which it is known.
fn needs(graph: &Graph, steps: &[Step]) -> Vec<Need> {
    let need = |needed: &Needed| {
        let binds = |step: &Step| {
            step.binds
                .is_some_and(|b| needed.length.symbols().any(|s| s == b.symbol))
        };
        let origin = &graph.origins[needed.origin as usize];
        let mistake = Mistake {
            location: origin.location,
            layer: origin.layer.to_string(),
            message: needed.why.clone(),
        };
        Need {
            length: needed.length,
            after: steps.iter().rposition(binds),
            mistake,
        }
    };
    graph.needed.iter().map(need).collect()
}
