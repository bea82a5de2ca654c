//! From graph to program: every stage in its order.

use std::time::Instant;

use slabwise_kernels::cpu::Isa;
use slabwise_planner::{Dag, Options, plan_within};

use crate::error::{Error, Mistake, Result};
use crate::graph::Graph;
use crate::passes::{Clusters, Fuse, Simplify, fuse, legalise, lower, schedule, simplify};
use crate::plan::{Again, Persistent, Plan};
use crate::program::{Compiled, GUARD};
use crate::session::Session;
use crate::shape::elements;

/// How programs are compiled. Everything is on by default; results do not depend on it, but for the rounding of sums where
/// a field says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct CompileOptions {
    /// Which simplifications.
    pub simplify: Simplify,
    /// Which fusions.
    pub fuse: Fuse,
    /// How the plan is made.
    pub planner: Options,
    /// The instruction set kernels use; the best there is if `None`. Results differ in rounding between sets.
    pub isa: Option<Isa>,
    /// Fill dead bytes of the slab with NaN, keep guards between buffers, and check both after every kernel. Slow.
    pub check_memory: bool,
}

/// Compiles a graph for a session, whose variables it may add to.
pub(crate) fn compile(session: &mut Session, name: &str, graph: &Graph, started: Instant) -> Result<Compiled> {
    let internal = |e: String| Error::Internal(e);
    refuse_absurd_sizes(graph)?;
    debug_verify(graph)?;
    let options = session.options;
    let graph = legalise(&simplify(graph, &options.simplify));
    debug_verify(&graph)?;
    let clusters: Clusters = fuse(&graph, &options.fuse);
    if cfg!(debug_assertions) {
        clusters.verify().map_err(internal)?;
    }
    log::debug!("{name}: graph\n{graph}{name}: kernels\n{clusters}");
    let tasks = lower(&clusters).map_err(internal)?;
    let guard = if options.check_memory { GUARD } else { 0 };
    let mut scheduled = schedule(&graph, tasks, &session.config(), guard).map_err(internal)?;
    let variables = session.adopt(&graph)?;
    let mut offsets = slabwise_planner::plan(&scheduled.dag, &options.planner).map_err(|e| internal(e.to_string()))?;
    let mut again = Again { once: offsets.height, floor: offsets.lower_bound, ..Again::default() };
    if let Some(room) = session.room(offsets.height).filter(|&room| room < offsets.height) {
        let within = plan_within(&scheduled.dag, offsets, room, &options.planner).map_err(|e| internal(e.to_string()))?;
        again.floor = within.floor;
        offsets = within.plan;
        if let Some(repeated) = within.repeated {
            let cost = |dag: &Dag| dag.tasks.iter().map(|task| task.cost as f64).sum::<f64>();
            (again.tasks, again.overhead) = (repeated.again(), cost(&repeated.dag) / cost(&scheduled.dag) - 1.0);
            scheduled = scheduled.repeated(repeated.into_inner());
        }
    }
    let offsets = slabwise_planner::check(&scheduled.dag, offsets).map_err(|v| internal(format!("the plan is wrong: {v}")))?;
    let mut persistent = Persistent::default();
    for &v in &variables {
        let variable = &session.variables[v];
        let sum = if variable.info.is_param { &mut persistent.weights } else { &mut persistent.state };
        *sum += variable.region.bytes;
    }
    let bounds: Vec<String> = graph.symbols.iter().map(|(n, max)| format!("{n} ≤ {max}")).collect();
    let plan = Plan::new(name, session.device, bounds.join(", "), scheduled.dag.clone(), offsets, persistent, again);
    let checked = slabwise_planner::check(&scheduled.dag, (**plan.offsets()).clone()).map_err(|v| internal(v.to_string()))?;
    let mut compiled = Compiled::link(&graph, scheduled, &checked, &variables, plan, guard, session.id)?;
    compiled.plan.set_compile_seconds(started.elapsed().as_secs_f64());
    Ok(compiled)
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
            mistakes.push(Mistake { location: origin.location, layer: origin.layer.to_string(), message });
        }
    }
    if mistakes.is_empty() { Ok(()) } else { Err(Error::Trace(mistakes)) }
}

fn debug_verify(graph: &Graph) -> Result<()> {
    if cfg!(debug_assertions) {
        graph.verify().map_err(|e| Error::Internal(e.to_string()))?;
    }
    Ok(())
}
