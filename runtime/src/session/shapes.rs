//! Unbounded dimensions: the lengths that a program is planned for.
//!
//! A plan for a length is valid for every shorter one, as long as no size grows when a length
//! shrinks: offsets stay, and kernels evaluate sizes and strides when they are launched. Therefore
//! one plan serves a range of lengths. It is made at the range's upper end. The independent checker
//! tests it at the lower end and at samples between; if it fails there, each length gets a separate
//! plan.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use slabwise_kernels::size::{Env, MAX_SYMBOLS, Size, Symbol};

use crate::compile::CompiledPlan;
use crate::error::{Error, Result};
use crate::feed::Feed;
use crate::graph::Graph;
use crate::ops::{NodeId, Op};
use crate::program::shapes::{PerShape, at};
use crate::program::{Compiled, Program};
use crate::shape::elements;
use slabwise_compiler::shapes::DynamicShapes;

use super::Session;

/// The length that `compile` plans unbounded dimensions for, because it knows none.
const FIRST: u32 = 64;

/// The graph with the lengths that are planned before the first run.
pub(crate) fn first_lengths(graph: Graph, shapes: &DynamicShapes) -> Graph {
    let (_, first) = shapes.ranges.around(FIRST);
    Graph {
        symbols: graph.symbols.planned_for(&Env([first; MAX_SYMBOLS])),
        ..graph
    }
}

impl Session {
    /// Compiles a graph; one with unbounded dimensions is compiled for the first lengths, and can
    /// be planned for others.
    pub(crate) fn compile_for_shapes<const N: usize>(
        &mut self,
        name: &str,
        graph: &Graph,
    ) -> Result<Program<N>> {
        let shapes = self.options.shapes;
        shapes.check()?;
        let in_no_input = |s: &Symbol| {
            !graph
                .inputs
                .iter()
                .any(|i| i.dims.contains(&Size::symbol(*s)))
        };
        if let Some(s) = graph.symbols.unbounded().find(in_no_input) {
            let free = graph.symbols.name(s);
            return Err(Error::Value(format!(
                "\"{name}\": no input has the unbounded dimension \"{free}\", so no run can say its length"
            )));
        }
        if let Some(s) = graph.symbols.unbounded().next()
            && graph.has_collectives()
        {
            let free = graph.symbols.name(s);
            return Err(Error::Value(format!(
                "\"{name}\": the dimension \"{free}\" is unbounded, and a program that exchanges values between ranks has one plan on all of them; \
                 declare it as Dim::bounded(\"{free}\", …) with the largest length of a rank"
            )));
        }
        let started = Instant::now();
        if graph.symbols.unbounded().next().is_none() {
            let compiled = self.planned(name, graph, started)?;
            return Ok(Program {
                inner: Arc::new(self.link(compiled)?),
                shaped: None,
                debugged: Vec::new(),
                layers: Vec::new(),
            });
        }
        let shaped = PerShape {
            graph: graph.clone(),
            shapes,
            plans: Mutex::default(),
        };
        let inner = shaped.plan(self, name, &Env([FIRST; MAX_SYMBOLS]))?;
        Ok(Program {
            inner,
            shaped: Some(Box::new(shaped)),
            debugged: Vec::new(),
            layers: Vec::new(),
        })
    }

    /// The plan for the lengths of a run, from the cache or new.
    pub(crate) fn planned_for<const N: usize>(
        &mut self,
        program: &Program<N>,
        feed: &dyn Feed,
    ) -> Result<Arc<Compiled>> {
        let Some(shaped) = &program.shaped else {
            return Ok(program.inner.clone());
        };
        self.owns(&program.inner)?;
        let lengths = program.inner.sizes(feed)?;
        if let Some(known) = shaped.known(&lengths) {
            return Ok(known);
        }
        possible(&shaped.graph, &lengths)?;
        let name = &program.inner.name;
        // It exchanges nothing: `compile_for_shapes` has refused a program that does.
        self.compile_with_ranks(name, false, |session| shaped.plan(session, name, &lengths))
    }
}

impl PerShape {
    /// Plans the range around some lengths if one plan serves it, else these lengths alone.
    fn plan(&self, session: &mut Session, name: &str, lengths: &Env) -> Result<Arc<Compiled>> {
        let started = Instant::now();
        let compile_for = |session: &Session, most: &Env| {
            let graph = Graph {
                symbols: self.graph.symbols.planned_for(most),
                ..self.graph.clone()
            };
            session.planned(name, &graph, started)
        };
        let (least, most) = self.around(lengths);
        // There may be memory for one length but not for the whole range.
        let range = if least == most {
            None
        } else {
            compile_for(session, &most)
                .ok()
                .filter(|compiled| holds(compiled, &least, &most))
        };
        let (least, most, compiled) = match range {
            Some(compiled) => (least, most, compiled),
            None => (*lengths, *lengths, compile_for(session, lengths)?),
        };
        log::debug!("{name}: planned for {:?} to {:?}", least.0, most.0);
        let compiled = session.link(compiled)?;
        Ok(self.keep(least, most, compiled))
    }
}

/// Whether a plan made for the largest lengths of a range is valid for all of it, as far as its
/// ends and samples between tell: no buffer is larger than planned, and the checker accepts the
/// offsets.
fn holds(compiled: &CompiledPlan, least: &Env, most: &Env) -> bool {
    let program = compiled.program();
    let symbols = &program.graph.symbols;
    let free: Vec<Symbol> = symbols.unbounded().collect();
    let mut samples = vec![*least, *most];
    for &s in &free {
        let mut corner = *most;
        corner.0[usize::from(s.0)] = at(least, s);
        samples.push(corner);
    }
    for part in 1..4u64 {
        let mut between = *least;
        for &s in &free {
            let (low, high) = (u64::from(at(least, s)), u64::from(at(most, s)));
            between.0[usize::from(s.0)] = (low + (high - low) * part / 4) as u32;
        }
        samples.push(between);
    }
    samples.iter().all(|lengths| {
        let env = symbols.planned_for(lengths).bounds();
        let mut dag = program.to_dag();
        for (buffer, value) in dag.buffers.iter_mut().zip(&program.values) {
            let Some(node) = value.node.filter(|_| !value.data_dependent) else {
                continue;
            };
            let node = program.graph.node(node);
            let padded = (value.row_padding > 0).then(|| value.stored_dims());
            let dims = padded.as_ref().unwrap_or(&node.dims);
            let bytes =
                bytes_at(dims, node.dtype.bytes(), &env).and_then(|b| b.checked_add(program.guard));
            match bytes {
                Some(bytes) if bytes <= buffer.bytes => buffer.bytes = bytes,
                _ => return false,
            }
        }
        slabwise_planner::check_within(&dag, compiled.plan().offsets()).is_ok()
    })
}

/// The bytes of a shape at some lengths; `None` if a length is negative or the number overflows.
fn bytes_at(dims: &[Size], each: usize, env: &Env) -> Option<u64> {
    if dims.iter().any(|d| d.at(env) < 0) {
        return None;
    }
    let count = elements(dims)?.checked_at(env)?;
    u64::try_from(count).ok()?.checked_mul(each as u64)
}

/// Refuses lengths under which a value has a negative length, more bytes than any machine, or
/// positions beyond an i32. The error names an input that has such a length.
fn possible(graph: &Graph, lengths: &Env) -> Result<()> {
    let env = graph.symbols.planned_for(lengths).bounds();
    let live = graph.live();
    for id in graph.ids().filter(|id| live[id.at()]) {
        let node = graph.node(id);
        let why = match bytes_at(&node.dims, node.dtype.bytes(), &env) {
            None => "has a negative length, or its byte count overflows",
            Some(bytes) if bytes > 1 << 50 => "is beyond any machine's memory",
            Some(_) => match &node.op {
                Op::Index(strides)
                    if last_index(&node.dims, strides, &env) > i64::from(i32::MAX) =>
                {
                    "numbers more than an i32 can"
                }
                _ => continue,
            },
        };
        return Err(impossible(graph, id, lengths, why));
    }
    Ok(())
}

/// The largest value of an index.
fn last_index(dims: &[Size], strides: &[Size], env: &Env) -> i64 {
    let along = |(d, s): (&Size, &Size)| (d.at(env) - 1).max(0).saturating_mul(s.at(env));
    dims.iter()
        .zip(strides)
        .map(along)
        .fold(0, i64::saturating_add)
}

fn impossible(graph: &Graph, id: NodeId, lengths: &Env, why: &str) -> Error {
    let symbols = &graph.symbols;
    let node = graph.node(id);
    let taking_part = |s: &Symbol| node.dims.iter().any(|d| d.symbols().any(|t| t == *s));
    let symbol = symbols
        .unbounded()
        .find(taking_part)
        .or_else(|| symbols.unbounded().next());
    let of = |s: Symbol| {
        graph
            .inputs
            .iter()
            .find(|i| i.dims.contains(&Size::symbol(s)))
            .map_or("*", |i| &*i.name)
    };
    let origin = graph.origin(id);
    let said: Vec<String> = symbols
        .unbounded()
        .map(|s| format!("\"{}\" is {}", symbols.name(s), at(lengths, s)))
        .collect();
    let (file, line) = (origin.location.file(), origin.location.line());
    let message = format!(
        "{}, and {} {} of {file}:{line} {why}",
        said.join(", "),
        node.op.name(),
        symbols.show(&node.dims)
    );
    Error::Input {
        name: symbol.map_or("*", of).into(),
        message,
    }
}
