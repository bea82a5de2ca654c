//! The compiler: every pass from graph to program, in order.

mod bodies;
mod budget;
mod checked;
mod data_dependent;
mod front;
mod lowered;
mod options;
#[cfg(feature = "cuda")]
mod recorded;
mod segments;

use std::time::Instant;

use slabwise_kernels::cpu::MAX_AXES;
use slabwise_planner::{Buffer, Bytes, Dag};

use self::bodies::Bodies;
use self::checked::Planned;
use self::data_dependent::data_dependent_buffers;
use self::front::{Front, simplified};
use self::segments::segmented;
use crate::backend::{Backend, KernelCache, Target};
use crate::device::Device;
use crate::error::{Error, Mistake, Result};
use crate::graph::{Graph, VariableInfo};
use crate::ir::{self, KernelCall};
pub use crate::memory::MemoryUse;
use crate::ops::Op;
use crate::passes::{DumpOptions, Pipeline, Prepare, count_prologues};
use crate::plan::{BudgetReport, Clock, Persistent, PlanDetails};
use crate::settings;
use crate::shape::elements;

pub use self::checked::CompiledPlan;
pub use self::lowered::lowered;
pub use self::options::{CompileOptions, Measures, Tuning};
#[cfg(feature = "cuda")]
pub use self::recorded::{RecordedKernel, recorded_kernels};

/// The size of the guard kept after each buffer when memory is checked.
const GUARD: u64 = 64;

/// The device that a program is compiled for, and the memory that there is for it.
pub struct Environment<'a> {
    /// The device's name in the plan.
    pub device: Device,
    /// The device in use, which knows the memory that inputs pass through.
    pub backend: &'a dyn Backend,
    /// The target that kernels are prepared for.
    pub target: Target,
    /// The memory that weights and earlier programs take, and the limits of all of it.
    pub memory: MemoryUse,
    /// Where the program is written after each pass.
    pub dump: Option<&'a DumpOptions>,
}

/// Compiles a graph of possible sizes (see [`refuse_absurd_sizes`]), up to a checked plan. Nothing
/// is allocated but the plan itself.
pub fn compile(
    name: &str,
    graph: &Graph,
    options: &CompileOptions,
    environment: &Environment<'_>,
    started: Instant,
) -> Result<CompiledPlan> {
    let mut clock = Clock::since(started);
    let passes = Pipeline::new(name, settings::verify()?, environment.dump)?;
    passes.start(graph)?;
    clock.ended("finish", graph.nodes.len());
    let graph = simplified(graph, options, &environment.target, &passes)?;
    clock.ended("simplify", graph.nodes.len());
    let kernels = KernelCache::default();
    let run = |graph: Graph, clock: Clock| {
        compile_simplified(name, graph, options, environment, &passes, &kernels, clock)
    };
    // Scans that keep fewer carries compute their steps once more, so they are the last resort.
    match run(graph.clone(), clock.clone()) {
        Err(error @ Error::Budget { .. }) => match segmented(&graph) {
            Some(graph) => {
                let graph = passes.run(&options.simplify, &graph)?;
                clock.ended("segments", graph.nodes.len());
                run(graph, clock).map_err(|other| closer(error, other))
            }
            None => Err(error),
        },
        compiled => compiled,
    }
}

/// The error of the program closer to its budget if both are budget errors, else the second.
fn closer(first: Error, second: Error) -> Error {
    match (&first, &second) {
        (Error::Budget { needed: a, .. }, Error::Budget { needed: b, .. }) if a < b => first,
        _ => second,
    }
}

/// Compiles a simplified graph.
fn compile_simplified(
    name: &str,
    graph: Graph,
    options: &CompileOptions,
    environment: &Environment<'_>,
    passes: &Pipeline,
    kernels: &KernelCache,
    mut clock: Clock,
) -> Result<CompiledPlan> {
    let memory = &environment.memory;
    let target = tuned(&environment.target, options.tuning, &graph);
    let bodies = Bodies {
        options,
        target: &target,
        verifies: settings::verify()?,
        dump: environment.dump,
        kernels,
    };
    let graph = bodies.plan(name, graph)?;
    let front = Front {
        graph: &graph,
        options,
        target: &target,
        passes,
        kernels,
    };
    let prepare = Prepare {
        target: &target,
        guard: if options.check_memory { GUARD } else { 0 },
        kernels,
    };
    memory.budget.check()?;
    let beside = memory.persistent.saturating_add(memory.queues);
    let room_for = |planned: &Planned| {
        let (height, dag) = (planned.offsets().height, planned.dag());
        let prefetch = prefetch_bytes(memory.prefetch_slots, &graph, dag);
        let room = memory.budget.room(beside, height.saturating_add(prefetch));
        let slab = room.map(|room| room.saturating_sub(prefetch));
        (height, prefetch, room, slab.filter(|&slab| slab < height))
    };
    let fits = |planned: &Planned| room_for(planned).3.is_none();
    let mut planned = Planned::new((&front, &prepare), fits, |stage, count| {
        clock.ended(stage, count)
    })?;
    let (height, prefetch, room, short) = room_for(&planned);
    let mut budget_report = BudgetReport {
        once: height,
        floor: planned.offsets().lower_bound,
        ..BudgetReport::default()
    };
    if let Some(room) = short {
        (planned, budget_report) = planned.rewrite(passes, &target, |program, offsets| {
            let fitted = budget::fit((program, offsets), room, &front, memory.offload, &target)?;
            Ok((fitted.program, fitted.offsets, fitted.budget_report))
        })?;
        budget_report.prologues = count_prologues(planned.program());
        clock.ended("budget", planned.program().kernels.len());
    }
    let slab_room = room.map_or(0, |room| room.saturating_sub(prefetch));
    planned = planned.overlap(passes, &target, slab_room, &options.planner)?;
    let checked = planned.check()?;
    clock.ended("check", checked.program().kernels.len());
    let staging = staging_within(environment, checked.dag(), room, checked.height(), prefetch);
    let mut persistent = Persistent {
        prefetch,
        staging,
        ..Persistent::default()
    };
    for info in &graph.variables {
        *(if info.is_param {
            &mut persistent.weights
        } else {
            &mut persistent.state
        }) += variable_bytes(&graph, info)?;
    }
    let bounds = graph.symbols.describe();
    let details = PlanDetails {
        name: name.into(),
        device: environment.device,
        bounds,
        persistent,
        budget_report,
        clock,
        data_dependent: data_dependent_buffers(checked.program()),
        padding: checked.program().padding(),
        channels_last: checked.program().channels_last(),
        communication: checked.communication(),
    };
    let compiled = checked.compiled(details, room);
    let plan = compiled.plan();
    passes.finish(compiled.program(), || format!("{:#}\n", plan.to_json()))?;
    match room {
        Some(room) if plan.slab_bytes() > room => {
            Err(plan.over_budget(Bytes(beside.saturating_add(room)), memory))
        }
        _ => match memory.budget.bytes() {
            // The slab of earlier programs does not shrink.
            Some(budget) if plan.bytes_beside(memory) > budget.0 => {
                Err(plan.over_budget(budget, memory))
            }
            _ => Ok(compiled),
        },
    }
}

/// The bytes of inputs that are prefetched into slots beside those that the plan has.
fn prefetch_bytes(prefetch_slots: usize, graph: &Graph, dag: &Dag) -> u64 {
    // Inputs whose lengths differ from shape to shape have no slots.
    let free = graph.symbols.unbounded().next().is_some();
    let inputs = dag
        .buffers
        .iter()
        .filter(|buffer| buffer.live_in && !free)
        .map(Buffer::occupied)
        .sum::<u64>();
    inputs.saturating_mul(prefetch_slots as u64)
}

/// The target that a graph's kernels are prepared for. Products of a graph with unbounded dimensions
/// are not timed, because each range of lengths is another program and timing all of them would take
/// too long.
fn tuned(target: &Target, tuning: Tuning, graph: &Graph) -> Target {
    let target = target.clone();
    match tuning {
        Tuning::Off => target.timed_from(None),
        _ if graph.symbols.unbounded().next().is_some() => target.timed_from(None),
        Tuning::All => target.timed_from(Some(1)),
        Tuning::Worthwhile => target,
    }
}

/// The bytes of the staging buffer for a program's large inputs, if the budget has them beside a
/// slab of this height and its prefetch queue; else 0. No value is recomputed to make room for it.
fn staging_within(
    environment: &Environment<'_>,
    dag: &Dag,
    room: Option<u64>,
    height: u64,
    prefetch: u64,
) -> u64 {
    let (backend, memory) = (environment.backend, &environment.memory);
    let inputs = dag.buffers.iter().filter(|buffer| buffer.live_in);
    let wanted = inputs
        .map(|buffer| backend.staging_bytes_for(buffer.occupied()))
        .sum();
    let needed = memory
        .slab
        .max(height)
        .saturating_add(memory.queues)
        .saturating_add(prefetch)
        .saturating_add(backend.staging().0.max(wanted));
    if room.is_some_and(|room| needed > room) {
        0
    } else {
        wanted
    }
}

/// The bytes of a weight or state.
pub fn variable_bytes(graph: &Graph, info: &VariableInfo) -> Result<u64> {
    let elements = info.dims.iter().try_fold(1u64, |n, d| {
        n.checked_mul(u64::try_from(d.as_fixed()?).ok()?)
    });
    let bytes = elements
        .and_then(|n| n.checked_mul(info.dtype.bytes() as u64))
        .filter(|b| *b <= 1 << 60);
    bytes.ok_or_else(|| {
        Error::Value(format!(
            "\"{}\" {}: its byte count overflows",
            info.name,
            graph.symbols.show(&info.dims)
        ))
    })
}

/// The most bytes that a tensor may have: more than any machine.
pub const MOST_BYTES: i64 = 1 << 50;

/// Tensors whose byte count is beyond any machine are mistakes of the model, with a line each.
pub fn refuse_absurd_sizes(graph: &Graph) -> Result<()> {
    let bounds = graph.symbols.bounds();
    let mut mistakes = Vec::new();
    for id in graph.ids() {
        let node = graph.node(id);
        let bytes = elements(&node.dims)
            .and_then(|n| n.checked_at(&bounds))
            .and_then(|n| n.checked_mul(node.dtype.bytes() as i64))
            .filter(|&b| b <= MOST_BYTES);
        if bytes.is_none() && mistakes.len() < 8 {
            let origin = graph.origin(id);
            let message = format!(
                "{} {} {}: its byte count overflows or is beyond any machine's memory",
                node.op.name(),
                node.dtype,
                graph.symbols.show(&node.dims)
            );
            mistakes.push(Mistake {
                location: origin.location,
                layer: origin.layer.to_string(),
                message,
            });
        }
    }
    if mistakes.is_empty() {
        Ok(())
    } else {
        Err(Error::Trace(mistakes))
    }
}

/// Kernels over more axes than a kernel can have are mistakes of the model. Axes that can be
/// iterated as one count as one.
fn refuse_many_axes(program: &ir::Program) -> Result<()> {
    let graph = &program.graph;
    let many = program
        .kernels
        .iter()
        .filter(|call| call.spec.dims.len() > MAX_AXES);
    let mistake = |call: &KernelCall| {
        let (node, origin) = (graph.node(call.node), program.origin(call));
        // A copy that the compiler adds for another operation has no name that a user gave.
        let op = if node.op == Op::Copy {
            "rearranging"
        } else {
            node.op.name()
        };
        let (shape, axes) = (graph.symbols.show(&node.dims), call.spec.dims.len());
        let message = format!(
            "{op} {shape}: it runs over {axes} axes, of which a kernel can have {MAX_AXES}; reshape so that axes that stay together are one"
        );
        Mistake {
            location: origin.location,
            layer: origin.layer.to_string(),
            message,
        }
    };
    let mistakes: Vec<Mistake> = many.take(8).map(mistake).collect();
    if mistakes.is_empty() {
        Ok(())
    } else {
        Err(Error::Trace(mistakes))
    }
}
