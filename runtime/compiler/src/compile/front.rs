//! The front half of the compiler: from a simplified graph to lowered kernels.
//!
//! It runs once for a program, and under a budget again with other options, because the fastest
//! kernels hold more bytes at once than others.

use super::{CompileOptions, refuse_many_axes};
use crate::backend::{KernelCache, Target};
use crate::error::Result;
use crate::graph::Graph;
use crate::ir::Program;
use crate::passes::{
    ChannelsLast, Expand, FlattenRows, FuseWithin, Legalize, Limits, Lower, PadRows, Pipeline,
    REMAT_MIN_ELEMENTS, Rematerialize, RoundGradients, RowPadding, ShareReads, StoreChannelsLast,
    SumInEpilogues,
};

/// The simplified graph, of operations that a target has kernels for.
pub(super) fn simplified(
    graph: &Graph,
    options: &CompileOptions,
    target: &Target,
    passes: &Pipeline,
) -> Result<Graph> {
    let has_attention = |scores: &_, operands: &[_]| target.has_attention(scores, operands);
    let expand = Expand {
        has_attention: &has_attention,
        has_quantized_matmul: &|format, rows| target.has_quantized_matmul(format, rows),
        has_epilogue_sums: SumInEpilogues::on(target, options.epilogue_sums).is_some(),
    };
    let mut graph = match expand.finds(graph) {
        true => passes.run(&options.simplify, &passes.run(&expand, graph)?)?,
        false => passes.run(&options.simplify, graph)?,
    };
    if target.capabilities().rounds_attention_gradients
        && let Some(rounded) = passes.run(&RoundGradients, &graph)?
    {
        graph = passes.run(&options.simplify, &rounded)?;
    }
    if options.fuse.flatten_rows
        && let Some(flat) = passes.run(&FlattenRows, &graph)?
    {
        graph = passes.run(&options.simplify, &flat)?;
    }
    Ok(graph)
}

/// The choices of the front half, which change bytes and time, and no result if images keep their
/// layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FrontOptions {
    /// Cheap activations that the backward pass reads from memory are recomputed. Without it they
    /// are stored, and the planner decides which of them are recomputed.
    pub rematerialize: bool,
    /// The most bytes that a kernel touches which computes recomputed values beside others; above
    /// that, each has a kernel of its own.
    pub multi_output_bytes: u64,
    /// The layout of images, if another program has decided it: results depend on it.
    pub channels_last: Option<ChannelsLast>,
    /// Which rows are padded.
    pub row_padding: RowPadding,
}

impl Default for FrontOptions {
    fn default() -> Self {
        FrontOptions {
            rematerialize: true,
            multi_output_bytes: u64::MAX,
            channels_last: None,
            row_padding: RowPadding::Off,
        }
    }
}

/// The front half for a simplified graph.
pub(super) struct Front<'a> {
    pub graph: &'a Graph,
    pub options: &'a CompileOptions,
    pub target: &'a Target,
    pub passes: &'a Pipeline,
    pub kernels: &'a KernelCache,
}

impl Front<'_> {
    /// The lowered program; `ended` is called after each stage, with its name and the number of
    /// nodes or kernels.
    pub fn run(
        &self,
        options: FrontOptions,
        mut ended: impl FnMut(&'static str, usize),
    ) -> Result<Program> {
        let passes = self.passes;
        let fuse = self.options.fuse;
        let remat = Rematerialize {
            smallest: fuse.recompute.then_some(REMAT_MIN_ELEMENTS),
            stored: !options.rematerialize,
        };
        let graph = passes.run(&remat, self.graph)?;
        ended("rematerialize", graph.nodes.len());
        let legalize = Legalize {
            half_products: self.target.capabilities().half_products,
        };
        let graph = passes.run(&legalize, &graph)?;
        ended("legalize", graph.nodes.len());
        let fuse = FuseWithin {
            options: fuse,
            limits: Limits {
                bytes: options.multi_output_bytes,
                per_use: !options.rematerialize,
            },
        };
        let clusters = passes.run(&fuse, &graph)?;
        ended("fuse", clusters.list.len());
        let lower = Lower {
            exact_convolutions: self.options.exact_convolutions,
        };
        let program = passes.run(&lower, &clusters)?;
        ended("lower", program.kernels.len());
        refuse_many_axes(&program)?;
        let channels_last = options.channels_last.unwrap_or(self.options.channels_last);
        let sums = self.options.epilogue_sums;
        let program = match StoreChannelsLast::on(self.target, channels_last, sums) {
            Some(pass) => {
                let program = passes.run(&pass, &program)?;
                ended("channels_last", program.kernels.len());
                program
            }
            None => program,
        };
        let program = match SumInEpilogues::on(self.target, sums) {
            Some(pass) => {
                let program = passes.run(&pass, &program)?;
                ended("epilogue_sums", program.kernels.len());
                program
            }
            None => program,
        };
        let siblings = self.options.fuse.siblings;
        let program = match ShareReads::on(self.target).filter(|_| siblings) {
            Some(pass) => {
                let program = passes.run(&pass, &program)?;
                ended("share_reads", program.kernels.len());
                program
            }
            None => program,
        };
        match PadRows::on(self.target, options.row_padding) {
            Some(pass) => {
                let program = passes.run(&pass, &program)?;
                ended("pad", program.kernels.len());
                Ok(program)
            }
            None => Ok(program),
        }
    }
}
