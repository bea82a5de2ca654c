//! Programs as text that reads like code.

use std::fmt;

use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::spec::{
    Access, Body, CollectiveOp, ConvKind, Inst, PrefixOp, ReduceOp, Spec,
};
use slabwise_planner::{Bytes, Space, Work};

use super::{KernelCall, Piece, Program, Recompute, Source, Transfer, ValueId};

/// Most operations in the name of a function.
const NAMED_MAX: usize = 4;

/// A name for the function that a spec is: its anchor and the operations after it.
fn function(spec: &Spec) -> String {
    let anchor = match &spec.body {
        Body::Loop => "",
        Body::Matmul(_) => "matmul",
        Body::QuantizedMatmul(_) => "quantized_matmul",
        Body::Conv2d(conv) => match (conv.kind, conv.prologue.is_some()) {
            (ConvKind::InputGrad, _) => "conv2d_input_grad",
            (ConvKind::WeightGrad, false) => "conv2d_weight_grad",
            (ConvKind::WeightGrad, true) => "prologue_conv2d_weight_grad",
            (_, false) => "conv2d",
            (_, true) => "prologue_conv2d",
        },
        Body::Pool2d(_) => "pool2d",
        Body::Pool2dGrad(_) => "pool2d_grad",
        Body::Gather(_) => "gather",
        Body::Scatter(scatter) => match scatter.reduce {
            ReduceOp::Prod => "scatter_mul",
            ReduceOp::Max => "scatter_max",
            ReduceOp::Min => "scatter_min",
            _ => "scatter_add",
        },
        Body::SliceAssign(_) => "slice_assign",
        Body::PrefixReduce(reduction) => match reduction.op {
            PrefixOp::Sum => "cumsum",
            PrefixOp::Linear => "recurrence",
            PrefixOp::LogSumExp => "logcumsumexp",
            PrefixOp::ArgMax => "cummax",
            PrefixOp::ArgMin => "cummin",
        },
        Body::Attention(_) => "attention",
        Body::AttentionGrad(_) => "attention_grad",
        Body::BoundsCheck(_) => "bounds_check",
        Body::Nonzero(_) => "nonzero",
        Body::Sort(_) => "argsort",
        Body::NonMaxSuppression(_) => "non_max_suppression",
        Body::Custom(custom) => custom.kernel.name(),
        Body::Scan(_) => "scan",
        Body::Collective(collective) => match collective.op {
            CollectiveOp::AllToAll => "all_to_all",
            CollectiveOp::AllGather => "all_gather",
            CollectiveOp::ReduceScatter => "reduce_scatter",
        },
    };
    let mut names: Vec<String> = Vec::new();
    names.extend((!anchor.is_empty()).then(|| anchor.to_owned()));
    let mut more = 0;
    for inst in &spec.code {
        let name = match inst {
            Inst::Op(op, _) => ScalarOp::name(*op).to_owned(),
            Inst::Reduce(op, _) => match op {
                ReduceOp::ArgMax => "argmax".to_owned(),
                ReduceOp::ArgMin => "argmin".to_owned(),
                ReduceOp::SquaredDeviations => "reduce_deviations".to_owned(),
                op => format!("reduce_{op:?}").to_lowercase(),
            },
            Inst::Uniform { .. } => "uniform".to_owned(),
            Inst::Cast(..) => "cast".to_owned(),
            Inst::Load(_) | Inst::Acc | Inst::Const(_) | Inst::Index(_) => continue,
        };
        match () {
            () if names.contains(&name) => {}
            () if names.len() < NAMED_MAX => names.push(name),
            () => more += 1,
        }
    }
    match (names.is_empty(), more) {
        (true, _) if spec.code.iter().any(|i| matches!(i, Inst::Load(_))) => "copy".into(),
        (true, _) => "fill".into(),
        (false, 0) => names.join("_"),
        (false, more) => format!("{}_and_{more}", names.join("_")),
    }
}

impl Program {
    fn shown(&self, value: ValueId) -> String {
        match self.value(value).source {
            Source::Variable(_) => format!("@{}", self.value(value).name),
            Source::Sizes => "sizes".into(),
            Source::Input(_) | Source::Computed => format!("%{}", value.0),
        }
    }

    fn typed(&self, value: ValueId) -> String {
        let v = self.value(value);
        let mut text = format!(
            "{}: {}{}",
            self.shown(value),
            v.dtype,
            self.graph.symbols.show(&v.dims)
        );
        text += match (v.piece, v.space) {
            (Piece::PartialSums, _) => " partial",
            (_, Space::Host) => " on host",
            _ => "",
        };
        text
    }

    fn list(&self, values: impl Iterator<Item = ValueId>) -> String {
        values.map(|v| self.shown(v)).collect::<Vec<_>>().join(", ")
    }

    fn write_call(&self, f: &mut fmt::Formatter<'_>, at: u32, call: &KernelCall) -> fmt::Result {
        let results: Vec<String> = call
            .accesses()
            .filter(|(_, access)| *access != Access::Read)
            .map(|(value, _)| self.typed(value))
            .collect();
        let operands = call
            .accesses()
            .filter(|(_, access)| *access != Access::Write)
            .map(|(value, _)| value);
        let assigned = if results.is_empty() { "" } else { " = " };
        write!(
            f,
            "{at:>4}  {}{assigned}{}({})  # {}",
            results.join(", "),
            function(&call.spec),
            self.list(operands),
            call.name
        )?;
        for (from, to) in &call.in_place {
            write!(
                f,
                " · {} in place of {}",
                self.shown(*to),
                self.shown(*from)
            )?;
        }
        if !call.after.is_empty() {
            let after: Vec<String> = call.after.iter().map(|a| a.0.to_string()).collect();
            write!(f, " · after {}", after.join(", "))?;
        }
        if let Body::Scan(scan) = &call.spec.body {
            let calls = scan.calls.len();
            write!(f, " · {} steps of {calls} kernels", scan.steps)?;
        }
        if call.workspace() > 0 {
            write!(f, " · workspace {}", Bytes(call.workspace()))?;
        }
        if let Recompute::Clone(clone) = &call.recompute {
            let stored = self.list(clone.stored());
            write!(f, " · recomputes {stored} alone")?;
        }
        writeln!(f)
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = || (0..self.values.len() as u32).map(ValueId);
        let inputs: Vec<String> = all()
            .filter(|v| matches!(self.value(*v).source, Source::Input(_)))
            .map(|v| format!("{} \"{}\"", self.typed(v), self.value(v).name))
            .collect();
        writeln!(f, "program({})", inputs.join(", "))?;
        if let Some(micro) = &self.micro_batches {
            writeln!(
                f,
                "# {} kernels on {} micro-batches of {} examples",
                micro.kernels, micro.count, micro.examples
            )?;
        }
        let mut steps = self.transfer_steps.iter();
        for work in self.work() {
            match work {
                Work::Run(call) => {
                    self.write_call(f, call.0, &self.kernels[call.index()])?;
                }
                Work::Start(transfer) | Work::Finish(transfer) => {
                    let finishes = matches!(work, Work::Finish(_));
                    let verb = if finishes { "finish" } else { "start" };
                    match self.transfers[transfer as usize] {
                        Transfer::Host(copy) => {
                            let Some(step) = steps.next() else { break };
                            let (from, to) = (self.shown(copy.from), self.typed(copy.to));
                            writeln!(f, "      {to} = {verb}_copy({from})  # {}", step.name)?;
                        }
                        Transfer::Ranks(call) if finishes => {
                            let Some(step) = steps.next() else { break };
                            let [_, to] = self.call(call).sides();
                            writeln!(f, "      finish({})  # {}", self.shown(to), step.name)?;
                        }
                        Transfer::Ranks(call) => {
                            self.write_call(f, call.0, self.call(call))?;
                        }
                    }
                }
            }
        }
        writeln!(
            f,
            "return {}",
            self.list(all().filter(|v| self.value(*v).output))
        )
    }
}
