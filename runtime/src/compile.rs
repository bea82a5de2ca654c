//! The compiler: every pass from graph to program, in order.

mod budget;
mod front;

use std::time::Instant;

use slabwise_kernels::cpu::{Isa, MAX_AXES};
use slabwise_kernels::size::Symbol;
use slabwise_planner::{Buffer, Bytes, Dag, Options};

use self::front::{Front, FrontOptions};
use crate::backend::KernelCache;
use crate::error::{Error, Mistake, Result};
use crate::graph::{Graph, VariableInfo};
use crate::ir::{self, KernelCall};
use crate::ops::{NodeId, Op};
use crate::passes::{Fuse, PassError, Pipeline, Prepare, Simplify, count_prologues};
use crate::plan::{Again, Clock, FoundBuffer, Persistent, Plan};
use crate::program::{Compiled, GUARD};
use crate::session::Session;
use crate::settings;
use crate::shape::{Extent, elements};
use crate::shapes::Shapes;

/// How programs are compiled. Every optimisation that changes no result is on by default; results
/// depend on fields only as far as these say: by the rounding of sums, or with `tf32` of operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct CompileOptions {
    /// Which simplifications.
    pub simplify: Simplify,
    /// Which fusions.
    pub fuse: Fuse,
    /// How the plan is made.
    pub planner: Options,
    /// The instruction set kernels use; the best there is if `None`. Results differ in rounding
    /// between sets.
    pub isa: Option<Isa>,
    /// The planning of values without a size at compile time, and the memory that they live in.
    pub shapes: Shapes,
    /// Disables micro-batches: every kernel runs on the whole batch, even if a budget could be kept
    /// by running some on parts of it.
    pub unsliced: bool,
    /// Disables prologue fusion: every convolution input is in memory, even if computing it inside
    /// of the convolution would keep a budget.
    pub stored_images: bool,
    /// Disables smaller workspaces: every kernel has the one that it is fastest with, even if a
    /// budget could be kept with smaller ones.
    pub wide: bool,
    /// Launch every kernel by itself, even where a CUDA device could do several small ones, such as
    /// an optimizer's updates, by one launch without moving a byte of the plan.
    pub ungrouped: bool,
    /// Which products are timed on a CUDA device, to be computed by the fastest kernel. Kernels
    /// round sums differently.
    pub tuning: Tuning,
    /// Let products and convolutions of f32 round their operands to tf32 on a CUDA device, whose
    /// tensor cores multiply those several times faster: 11 significant bits, so each operand is
    /// wrong by up to 2⁻¹¹ of itself (of cuBLASLt's kernels, which may cut digits off, by up to
    /// 2⁻¹⁰). Sums stay in f32. Off by default; the CPU multiplies in f32 in any
    /// case.
    pub tf32: bool,
    /// Fill dead bytes of the slab with NaN, keep guards between buffers, and check both after
    /// every kernel. Slow.
    pub check_memory: bool,
}

/// Which products and convolutions a CUDA device computes by the fastest of a few kernels,
/// cuBLASLt's and cuDNN's among them, which are timed when a program is compiled. The others are
/// computed as a model of the device ranks first, and so are all with `SLABWISE_AUTOTUNE=0`;
/// `SLABWISE_CUDNN=0` leaves cuDNN out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Tuning {
    /// Those that take longer than their launch.
    #[default]
    Worthwhile,
    /// All.
    All,
    /// None: the same sizes give the same kernels on every machine with such a device.
    Off,
}

/// A compiled program without memory.
pub(crate) struct CompiledPlan {
    pub program: ir::Program,
    pub plan: Plan,
    /// The bytes that the budget leaves for the slab, if there is one.
    pub room: Option<u64>,
}

/// Compiles a graph, up to a checked plan. Nothing is allocated but the plan itself.
pub(crate) fn compile(
    session: &Session,
    name: &str,
    graph: &Graph,
    started: Instant,
) -> Result<CompiledPlan> {
    refuse_absurd_sizes(graph)?;
    let options = session.options;
    let mut clock = Clock::since(started);
    let passes = Pipeline::new(name, settings::verify()?, session.dump.as_ref())?;
    passes.start(graph)?;
    clock.ended("finish", graph.nodes.len());
    let graph = passes.run(&options.simplify, graph)?;
    clock.ended("simplify", graph.nodes.len());
    let kernels = KernelCache::default();
    let front = Front {
        graph: &graph,
        session,
        passes: &passes,
        kernels: &kernels,
    };
    let program = front.run(FrontOptions::default(), |stage, count| {
        clock.ended(stage, count)
    })?;
    let target = session.target_of(&program.graph);
    let prepare = Prepare {
        target: &target,
        guard: if options.check_memory { GUARD } else { 0 },
        kernels: &kernels,
    };
    let mut program = passes.run(&prepare, &program)?;
    clock.ended("schedule", program.kernels.len());
    let mut dag = program.to_dag();
    let mut offsets = slabwise_planner::plan(&dag, &options.planner).map_err(PassError::from)?;
    clock.ended("plan", program.kernels.len());
    let mut again = Again {
        once: offsets.height,
        floor: offsets.lower_bound,
        ..Again::default()
    };
    let beside = session.persistent_bytes_with(&graph)?;
    let ahead = bytes_ahead(session, &graph, &dag);
    let room = session
        .budget
        .room(beside, offsets.height.saturating_add(ahead));
    if let Some(room) = room
        .map(|room| room.saturating_sub(ahead))
        .filter(|&room| room < offsets.height)
    {
        let before = passes.remember(&program, &offsets.order);
        let fitted = budget::fit((program, offsets), room, &front)?;
        budget::Candidate {
            program,
            offsets,
            again,
        } = fitted;
        passes.validate(before.as_ref(), (&program, &offsets.order), &target)?;
        again.prologues = count_prologues(&program);
        dag = program.to_dag();
        clock.ended("budget", program.kernels.len());
    }
    let offsets = slabwise_planner::check(&dag, offsets)
        .map_err(|v| Error::Internal(format!("the plan is wrong: {v}")))?;
    clock.ended("check", program.kernels.len());
    let landing = session.landing_within(&dag, room, offsets.height, ahead);
    let mut persistent = Persistent {
        ahead,
        landing,
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
    let found = data_dependent_buffers(&program);
    let plan = Plan::new(
        name,
        session.device,
        bounds,
        dag,
        offsets,
        persistent,
        again,
        clock,
    )
    .finding(found);
    passes.finish(&program, || format!("{:#}\n", plan.to_json()))?;
    match room {
        Some(room) if plan.slab_bytes() > room => {
            Err(plan.over_budget(Bytes(beside.saturating_add(room)), beside))
        }
        _ => Ok(CompiledPlan {
            program,
            plan,
            room,
        }),
    }
}

/// The bytes of inputs that are prefetched into slots beside those that the plan has.
fn bytes_ahead(session: &Session, graph: &Graph, dag: &Dag) -> u64 {
    // Inputs whose lengths differ from shape to shape have no slots.
    let free = graph
        .symbols
        .iter()
        .any(|(_, _, extent)| !matches!(extent, Extent::Bounded(_)));
    let inputs = dag
        .buffers
        .iter()
        .filter(|buffer| buffer.live_in && !free)
        .map(Buffer::occupied)
        .sum::<u64>();
    inputs.saturating_mul(session.slots_ahead() as u64)
}

/// Links a compiled plan for a session, to whose variables the program may add.
pub(crate) fn link(session: &mut Session, compiled: CompiledPlan) -> Result<Compiled> {
    let CompiledPlan {
        program,
        mut plan,
        room,
    } = compiled;
    let variables = session.adopt(&program.graph)?;
    plan.stage_ended("variables");
    session.budget.settle(room);
    let mut compiled = Compiled::link(
        &program,
        &variables,
        plan,
        session.options.shapes.lend,
        session.id,
    )?;
    compiled.plan.stage_ended("link");
    session.load_program(&mut compiled)?;
    session.prepare_landing(&mut compiled, room)?;
    session.prepare_copies(&compiled)?;
    compiled.ring = session.open_slots(&compiled)?;
    compiled.plan.stage_ended("load");
    Ok(compiled)
}

/// The values for which the plan has no place, and the reasons.
fn data_dependent_buffers(program: &ir::Program) -> Vec<FoundBuffer> {
    let (graph, symbols) = (&program.graph, &program.graph.symbols);
    let finders = graph.ids().filter_map(|id| {
        if let Op::Bind { symbol } = graph.node(id).op {
            Some((symbol, id))
        } else {
            None
        }
    });
    let finders: Vec<(Symbol, NodeId)> = finders.collect();
    let finder = |s: Symbol| {
        let location = graph
            .origin(finders.iter().find(|(symbol, _)| *symbol == s)?.1)
            .location;
        Some(format!("{}:{}", location.file(), location.line()))
    };
    let values = program.values.iter().filter(|value| value.data_dependent);
    let found = values.map(|value| {
        let mut lengths: Vec<Symbol> = value
            .dims
            .iter()
            .flat_map(|d| d.symbols())
            .filter(|&s| symbols.is_found(s))
            .collect();
        lengths.sort_unstable();
        lengths.dedup();
        let why = |s: &Symbol| {
            format!(
                "{} is found at {}",
                symbols.name(*s),
                finder(*s).unwrap_or_default()
            )
        };
        let why = lengths.iter().map(why).collect::<Vec<_>>().join(", ");
        FoundBuffer {
            name: value.name.clone(),
            shape: format!("{} {}", value.dtype, symbols.show(&value.dims)),
            why,
        }
    });
    found.collect()
}

/// The bytes of a weight or state.
pub(crate) fn variable_bytes(graph: &Graph, info: &VariableInfo) -> Result<u64> {
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

/// Tensors whose byte count is beyond any machine are mistakes of the model, with a line each.
fn refuse_absurd_sizes(graph: &Graph) -> Result<()> {
    let bounds = graph.symbols.bounds();
    let mut mistakes = Vec::new();
    for id in graph.ids() {
        let node = graph.node(id);
        let bytes = elements(&node.dims)
            .and_then(|n| n.checked_at(&bounds))
            .and_then(|n| n.checked_mul(node.dtype.bytes() as i64))
            .filter(|&b| b <= 1 << 50);
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

#[cfg(test)]
mod tests;
