//! Running passes: each is timed, its output verified and dumped.
//!
//! Adding a pass takes a file, with the implementation of [`Pass`], and a line in [`PASSES`].

use std::cell::{Cell, RefCell};
use std::time::Instant;

use slabwise_kernels::spec::Spec;
use slabwise_planner::TaskId;

use super::dump::{Dump, DumpOptions};
use super::error::PassError;
use super::fuse::{Clusters, ClustersError};
use super::sums::has_same_sums;
use super::validate::{validate, validate_values};
use crate::backend::Target;
use crate::graph::{Graph, GraphError};
use crate::ir::{IrError, Program};

/// The passes in the order in which they run. The first runs only for graphs with operations that the
/// device has no kernel or no use for, `round_gradients`, `channels_last`, `epilogue_sums`,
/// `share_reads` and `pad` for devices that gain by them. Those after `prepare` run only under a
/// budget, for each candidate of its search; for some of them, those from `remat` on run again before.
/// The last one runs for programs of several ranks.
pub const PASSES: [&str; 20] = [
    super::Expand::NAME,
    super::Simplify::NAME,
    super::RoundGradients::NAME,
    super::FlattenRows::NAME,
    super::Rematerialize::NAME,
    super::Legalize::NAME,
    super::Fuse::NAME,
    super::Lower::NAME,
    super::StoreChannelsLast::NAME,
    super::SumInEpilogues::NAME,
    super::ShareReads::NAME,
    super::PadRows::NAME,
    super::Prepare::NAME,
    super::FusePrologues::NAME,
    super::RecomputeCalls::NAME,
    super::OffloadValues::NAME,
    super::FuseRecomputed::NAME,
    super::GrowWorkspaces::NAME,
    super::SplitBatch::NAME,
    super::OverlapCollectives::NAME,
];

/// A pass of the compiler, with its options.
pub trait Pass {
    /// The name of the pass, as in dumps and statistics.
    const NAME: &'static str;
    /// The form of the program that it reads.
    type Input;
    /// The form of the program that it makes.
    type Output: Form;

    /// Runs the pass.
    ///
    /// # Errors
    /// If the program has no such form.
    fn run(&self, input: &Self::Input) -> Result<Self::Output, PassError>;
}

/// The first broken invariant of the output of a pass.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// An error of a graph.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// An error of fused kernels.
    #[error(transparent)]
    Clusters(#[from] ClustersError),
    /// An error of a program in the late IR.
    #[error(transparent)]
    Program(#[from] IrError),
}

/// A form that a program has between passes.
pub trait Form {
    /// Checks the invariants of the form.
    ///
    /// # Errors
    /// The first that is broken.
    fn verify(&self) -> Result<(), Broken>;
    /// The text of a dump.
    fn text(&self) -> String;
    /// The program in DOT, for Graphviz, if the form has such a picture.
    fn dot(&self) -> Option<String>;
    /// The number of nodes or kernels.
    fn count(&self) -> usize;
}

impl Form for Graph {
    fn verify(&self) -> Result<(), Broken> {
        Ok(Graph::verify(self)?)
    }

    fn text(&self) -> String {
        self.to_string()
    }

    fn dot(&self) -> Option<String> {
        Some(self.to_dot())
    }

    fn count(&self) -> usize {
        self.nodes.len()
    }
}

impl Form for Clusters {
    fn verify(&self) -> Result<(), Broken> {
        Ok(Clusters::verify(self)?)
    }

    fn text(&self) -> String {
        self.to_string()
    }

    fn dot(&self) -> Option<String> {
        None
    }

    fn count(&self) -> usize {
        self.list.len()
    }
}

impl Form for Program {
    fn verify(&self) -> Result<(), Broken> {
        Ok(Program::verify(self)?)
    }

    fn text(&self) -> String {
        self.to_string()
    }

    fn dot(&self) -> Option<String> {
        Some(self.to_dag().to_dot())
    }

    fn count(&self) -> usize {
        self.kernels.len()
    }
}

/// A pass may leave a program as it is.
impl<T: Form> Form for Option<T> {
    fn verify(&self) -> Result<(), Broken> {
        self.as_ref().map_or(Ok(()), Form::verify)
    }

    fn text(&self) -> String {
        self.as_ref().map_or("no change\n".into(), Form::text)
    }

    fn dot(&self) -> Option<String> {
        self.as_ref().and_then(Form::dot)
    }

    fn count(&self) -> usize {
        self.as_ref().map_or(0, Form::count)
    }
}

/// A pass may make more than the program.
impl<T: Form, U> Form for (T, U) {
    fn verify(&self) -> Result<(), Broken> {
        self.0.verify()
    }

    fn text(&self) -> String {
        self.0.text()
    }

    fn dot(&self) -> Option<String> {
        self.0.dot()
    }

    fn count(&self) -> usize {
        self.0.count()
    }
}

/// The run of a pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PassRun {
    /// The pass.
    pub name: &'static str,
    /// Its time.
    pub seconds: f64,
    /// The nodes or kernels of its output; 0 if it changed nothing.
    pub count: usize,
}

/// The passes of one compilation.
pub struct Pipeline {
    verifies: bool,
    dump: Option<Dump>,
    /// The number of the next dump.
    next: Cell<u32>,
    runs: RefCell<Vec<PassRun>>,
}

impl Pipeline {
    /// A pipeline for a program of this name. `verifies` has the output of every pass checked;
    /// debug builds always do.
    ///
    /// # Errors
    /// If the folder of the dump cannot be made.
    pub fn new(
        program: &str,
        verifies: bool,
        dump: Option<&DumpOptions>,
    ) -> Result<Self, PassError> {
        Ok(Pipeline {
            verifies: verifies || cfg!(debug_assertions),
            dump: dump
                .map(|options| Dump::new(options, program))
                .transpose()?,
            next: Cell::new(0),
            runs: RefCell::default(),
        })
    }

    /// Runs a pass.
    ///
    /// # Errors
    /// If the pass fails, if its output is not well-formed, or if a dump cannot be written.
    pub fn run<P: Pass>(&self, pass: &P, input: &P::Input) -> Result<P::Output, PassError> {
        let started = Instant::now();
        let output = pass.run(input)?;
        self.runs.borrow_mut().push(PassRun {
            name: P::NAME,
            seconds: started.elapsed().as_secs_f64(),
            count: output.count(),
        });
        // The dump comes first, so that it shows a program that is not well-formed.
        self.dump(P::NAME, &output)?;
        self.verify(P::NAME, &output)?;
        Ok(output)
    }

    /// Verifies and dumps a graph that no pass has seen.
    ///
    /// # Errors
    /// If it is not well-formed, or if a dump cannot be written.
    pub fn start(&self, graph: &Graph) -> Result<(), PassError> {
        self.dump("trace", graph)?;
        self.verify("trace", graph)
    }

    /// The runs of passes so far.
    pub fn runs(&self) -> Vec<PassRun> {
        self.runs.borrow().clone()
    }

    /// Checks that a rewritten program, in the order of its plan, computes the values of the
    /// program before, if outputs of passes are verified.
    ///
    /// # Errors
    /// [`PassError::Changed`] with the first difference.
    pub fn validate(
        &self,
        before: Option<&(Program, Vec<TaskId>)>,
        after: (&Program, &[TaskId]),
        target: &Target,
    ) -> Result<(), PassError> {
        before.map_or(Ok(()), |(program, order)| {
            let bounds = program.graph.symbols.bounds();
            let alike = |a: &Spec, b: &Spec| has_same_sums(target, a, b, &bounds);
            Ok(validate((program, order), after, &alike)?)
        })
    }

    /// Whether two programs, each in the order of its plan, compute the same bits: the values are
    /// the same, and the kernels of the device sum in the same order.
    ///
    /// # Errors
    /// [`PassError::Changed`] if values differ by more than the order of sums; that is noticed if
    /// outputs of passes are verified.
    pub fn same_bits<'a>(
        &self,
        before: (&'a Program, &[TaskId]),
        after: (&'a Program, &[TaskId]),
        target: &Target,
    ) -> Result<bool, PassError> {
        // Where the bits of a product depend on its epilogue, both programs need the same products, and
        // as many of each with sums.
        let products = |program: &'a Program| {
            let specs = program.kernels.iter().map(|call| &call.spec);
            specs.filter(|spec| spec.body.is_product())
        };
        let count = |program, spec: &Spec| products(program).filter(|own| *own == spec).count();
        let as_many = |spec: &Spec| match [before.0, after.0].map(|program| count(program, spec)) {
            [before, after] if spec.reduced > 0 => before == after,
            [before, _] => before > 0,
        };
        let summed = products(before.0).filter(|spec| spec.reduced > 0);
        if !target.capabilities().late_epilogues && !products(after.0).chain(summed).all(as_many) {
            return Ok(false);
        }
        let bounds = before.0.graph.symbols.bounds();
        let alike = |a: &Spec, b: &Spec| has_same_sums(target, a, b, &bounds);
        let same = validate(before, after, &alike).is_ok();
        if !same && self.verifies {
            validate_values(before, after)?;
        }
        Ok(same)
    }

    /// A program and its order, to be compared with the rewritten program, if outputs of passes
    /// are verified.
    pub fn remember(&self, program: &Program, order: &[TaskId]) -> Option<(Program, Vec<TaskId>)> {
        self.verifies.then(|| (program.clone(), order.to_vec()))
    }

    /// Verifies the output of a pass, if outputs of passes are verified.
    ///
    /// # Errors
    /// If it is not well-formed.
    pub fn verify(&self, pass: &'static str, form: &impl Form) -> Result<(), PassError> {
        if !self.verifies {
            return Ok(());
        }
        let verified = form.verify();
        verified.map_err(|source| PassError::Broken { pass, source })
    }

    fn dump(&self, name: &str, form: &impl Form) -> Result<(), PassError> {
        self.write(name, "txt", || Some(form.text()))?;
        self.write(name, "dot", || form.dot())?;
        self.next.set(self.next.get() + 1);
        Ok(())
    }

    /// Writes a file of the dump under the number of the next pass, if there is a dump of this
    /// name.
    fn write(
        &self,
        name: &str,
        extension: &str,
        text: impl FnOnce() -> Option<String>,
    ) -> Result<(), PassError> {
        match &self.dump {
            Some(dump) if dump.shows(name) => {
                let file = format!("{:02}-{name}.{extension}", self.next.get());
                text().map_or(Ok(()), |text| dump.write(&file, &text))
            }
            _ => Ok(()),
        }
    }

    /// Dumps the program that was planned, its plan and, on a CUDA device, the source of its
    /// kernels; and the runs of passes.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn finish(
        &self,
        program: &Program,
        plan: impl FnOnce() -> String,
    ) -> Result<(), PassError> {
        self.write("plan", "txt", || Some(program.text()))?;
        self.write("plan", "dot", || program.dot())?;
        self.write("plan", "json", || Some(plan()))?;
        self.write("passes", "txt", || {
            let line = |run: &PassRun| {
                let PassRun {
                    name,
                    seconds,
                    count,
                } = run;
                format!("{:>10.3} ms  {count:>6}  {name}\n", 1e3 * seconds)
            };
            Some(self.runs.borrow().iter().map(line).collect())
        })?;
        if let Some(dump) = self.dump.as_ref().filter(|dump| dump.shows("cuda")) {
            dump.write_sources(program)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::PASSES;

    #[test]
    fn passes_have_different_names() {
        let names: BTreeSet<&str> = PASSES.into_iter().collect();
        assert_eq!(names.len(), PASSES.len());
    }
}
