//! The kernels of a graph without a plan, so that they can be tested without a device.

use super::CompileOptions;
use super::bodies::Bodies;
use super::front::{Front, FrontOptions, simplified};
use crate::backend::{KernelCache, Target};
use crate::error::Result;
use crate::graph::Graph;
use crate::ir::Program;
use crate::passes::Pipeline;
use crate::settings;

/// The kernels that [`compile`](super::compile) prepares and plans for a graph of possible sizes if no
/// budget asks for others.
///
/// # Errors
/// If a kernel is over more axes than kernels have, or a pass fails.
pub fn lowered(
    name: &str,
    graph: &Graph,
    options: &CompileOptions,
    target: &Target,
) -> Result<Program> {
    let passes = Pipeline::new(name, settings::verify()?, None)?;
    passes.start(graph)?;
    let kernels = KernelCache::default();
    let bodies = Bodies {
        options,
        target,
        verifies: settings::verify()?,
        dump: None,
        kernels: &kernels,
    };
    let graph = bodies.plan(name, simplified(graph, options, target, &passes)?)?;
    let front = Front {
        graph: &graph,
        options,
        target,
        passes: &passes,
        kernels: &kernels,
    };
    let row_padding = options.row_padding;
    let options = FrontOptions {
        row_padding,
        ..FrontOptions::default()
    };
    front.run(options, |_, _| ())
}
