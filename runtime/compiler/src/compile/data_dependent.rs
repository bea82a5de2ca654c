//! The values of data-dependent size, as the plan reports them.

use slabwise_kernels::size::Symbol;

use crate::ir::Program;
use crate::ops::{NodeId, Op};
use crate::plan::DataDependentBuffer;

/// The values for which the plan has no place, and the reasons.
pub(super) fn data_dependent_buffers(program: &Program) -> Vec<DataDependentBuffer> {
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
            .filter(|&s| symbols.is_data_dependent(s))
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
        DataDependentBuffer {
            name: value.name.clone(),
            shape: format!("{} {}", value.dtype, symbols.show(&value.dims)),
            why,
        }
    });
    found.collect()
}
