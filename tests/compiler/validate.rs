//! Programs that budgets have rewritten are valid, and each of many mutations of them is not.

use std::time::Instant;

use slabwise_kernels::cpu::{Config, Isa};
use slabwise_kernels::scalar::{ScalarOp, Value};
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::analysis::live_values;
use slabwise_kernels::spec::{Access, Inst, Spec};
use slabwise_planner::{Bytes, TaskId, Work};

use slabwise::nn::Linear;
use slabwise::{Budget, CompileOptions, DType, Device, Dim, Offload, Params, Trace};
use slabwise_compiler::backend::{self, Target};
use slabwise_compiler::compile::{Environment, MemoryUse, compile};
use slabwise_compiler::graph::Graph;
use slabwise_compiler::ir::{KernelCall, Program, Source};
use slabwise_compiler::memory::budget::Allowance;
use slabwise_compiler::passes::{Mismatch, count_prologues, has_same_sums, validate};
use slabwise_models::Model;

/// A program, and the order of its plan.
type Ordered = (Program, Vec<TaskId>);

/// A program under a budget, and the same program without one.
struct Compiled {
    before: Ordered,
    program: Program,
    order: Vec<TaskId>,
    target: Target,
}

/// The CPU with one thread.
fn target() -> Target {
    let config = Config {
        threads: 1,
        isa: Isa::detect(),
    };
    let backend = backend::open(Device::Cpu).expect("the CPU");
    backend.target(config, None)
}

impl Compiled {
    /// The training step of a model, within a share of the slab that it has without a budget.
    fn new(model: &str, batch: Dim, budget: &str, offload: bool) -> Compiled {
        let model = Model::parse(model).expect("a model");
        let params = Params::seeded(0);
        let network = model.build(&params);
        let trace = Trace::training();
        let loss = network.step(&trace, batch, model.optimizer());
        let graph = trace.finish(&[loss]).expect("a graph");
        Compiled::of(&graph, budget, offload)
    }

    /// A graph, within a share of the slab that it has without a budget.
    fn of(graph: &Graph, budget: &str, offload: bool) -> Compiled {
        let ordered = |budget: Budget, offload: Option<Offload>| -> Ordered {
            let backend = backend::open(Device::Cpu).expect("the CPU");
            let environment = Environment {
                device: Device::Cpu,
                target: target(),
                backend: &*backend,
                memory: MemoryUse {
                    budget: Allowance::new(budget),
                    offload,
                    ..MemoryUse::default()
                },
                dump: None,
            };
            let options = CompileOptions::default();
            let compiled = compile("step", graph, &options, &environment, Instant::now());
            let compiled = compiled.expect("a plan");
            let order = compiled.plan().offsets().order.clone();
            (compiled.into_parts().0, order)
        };
        let budget: Budget = budget.parse().expect("a budget");
        let offload = offload.then(|| Offload::new(Bytes(12 << 30)));
        let (program, order) = ordered(budget, offload);
        Compiled {
            before: ordered(Budget::Unlimited, None),
            target: target(),
            program,
            order,
        }
    }

    fn validate(&self) -> Result<(), Mismatch> {
        let (program, order) = &self.before;
        let bounds = program.graph.symbols.bounds();
        let alike = |a: &Spec, b: &Spec| has_same_sums(&self.target, a, b, &bounds);
        validate((program, order), (&self.program, &self.order), &alike)
    }

    /// The position in the order of every task that runs a kernel, and the index of the call.
    fn launches(&self) -> Vec<(usize, usize)> {
        let work = self.program.work();
        let of = |(at, task): (usize, &TaskId)| match work[task.index()] {
            Work::Run(call) => Some((at, call.index())),
            _ => None,
        };
        self.order.iter().enumerate().filter_map(of).collect()
    }
}

/// A change of one launch, at a position of the order and of one call; whether the launch has the
/// part that it changes.
type Mutation = fn(&mut Compiled, usize, usize) -> bool;

/// Every way to break a program.
const MUTATIONS: [(&str, Mutation); 8] = [
    ("changes a constant", |c, _, call| {
        c.change(call, |inst| match inst {
            Inst::Const(value) => {
                *value = match *value {
                    Value::F32(x) => Value::F32(x + 1.0),
                    Value::I32(x) => Value::I32(x + 1),
                    Value::Bool(x) => Value::Bool(!x),
                };
                true
            }
            _ => false,
        })
    }),
    ("changes an operation", |c, _, call| {
        c.change(call, |inst| match inst {
            Inst::Op(op @ (ScalarOp::Add | ScalarOp::Mul), _) => {
                *op = ScalarOp::Sub;
                true
            }
            _ => false,
        })
    }),
    ("reads the element behind", |c, _, call| {
        let spec = &mut c.program.kernels[call].spec;
        let loaded = spec.code.iter().find_map(|inst| match inst {
            Inst::Load(k) => Some(usize::from(*k)),
            _ => None,
        });
        let Some(k) = loaded else { return false };
        let offset = &mut spec.operands[k].offset;
        *offset = offset.checked_add(Size::ONE).expect("a small offset");
        true
    }),
    ("reads another value", |c, _, call| {
        let call = &mut c.program.kernels[call];
        let arguments = call.spec.arguments();
        let read = |k: &usize| arguments[*k].2 == Access::Read;
        let reads: Vec<usize> = (0..arguments.len()).filter(read).collect();
        let [a, .., b] = reads[..] else {
            return false;
        };
        if call.args[a] == call.args[b] || arguments[a].0 == arguments[b].0 {
            return false;
        }
        call.args.swap(a, b);
        true
    }),
    ("runs first", |c, at, call| {
        let computed = |(value, access)| {
            access == Access::Read && c.program.value(value).source == Source::Computed
        };
        let moved = at > 0 && c.program.kernels[call].accesses().any(computed);
        if moved {
            c.order[..=at].rotate_right(1);
        }
        moved
    }),
    ("does not run", |c, at, _| {
        c.order.remove(at);
        true
    }),
    ("assigns a variable twice", |c, at, call| {
        let assigns = |(value, access)| {
            let source = c.program.value(value).source;
            access == Access::ReadWrite && matches!(source, Source::Variable(_))
        };
        let doubles = c.program.kernels[call].accesses().any(assigns);
        if doubles {
            c.order.insert(at, c.order[at]);
        }
        doubles
    }),
    ("stores another value", |c, at, call| {
        // A value that is recomputed for all its uses may be stored for none.
        let Some(stored) = c.program.kernels[call].stored().next() else {
            return false;
        };
        let work = c.program.work();
        let reads = |task: &TaskId| match work[task.index()] {
            Work::Run(call) => c.program.kernels[call.index()].args.contains(&stored),
            _ => true,
        };
        let is_read = c.order[at + 1..].iter().any(reads) || c.program.value(stored).output;
        let spec = &mut c.program.kernels[call].spec;
        let (lanes, folded) = (spec.lanes().expect("lanes"), spec.per_row());
        // The first operand of the operation that is stored.
        let own = usize::from(spec.stores[0].value);
        let other = match &spec.code[own] {
            Inst::Op(op, args) if op.arity() > 1 => usize::from(args[0]),
            _ => return false,
        };
        let alike = lanes[other] == lanes[own] && folded[other] == folded[own];
        if alike && is_read {
            spec.stores[0].value = other as u16;
        }
        alike && is_read
    }),
];

impl Compiled {
    /// Changes the first live instruction that `mutate` accepts.
    fn change(&mut self, call: usize, mutate: fn(&mut Inst) -> bool) -> bool {
        let spec = &mut self.program.kernels[call].spec;
        let live = live_values(&spec.code, &spec.stores);
        let mut code = spec.code.iter_mut().zip(live);
        code.any(|(inst, live)| live && mutate(inst))
    }
}

/// Whether a call on a micro-batch adds to partial sums, which a later one stores.
fn adds_to_sums(call: &KernelCall) -> bool {
    let micro_batching = call
        .kernel
        .as_ref()
        .and_then(|kernel| kernel.micro_batching());
    let partial = call.micro_batch.is_some_and(|slice| !slice.last);
    partial && micro_batching.is_some_and(|micro_batching| micro_batching.folds)
}

#[track_caller]
fn mutations_are_seen(mut compiled: Compiled) {
    if let Err(mismatch) = compiled.validate() {
        panic!("{mismatch}");
    }
    let launches = compiled.launches();
    // Every mutation of a small program, a sample of those of a large one.
    let step = launches.len().div_ceil(40);
    for (name, mutate) in MUTATIONS {
        let mut applied = 0;
        for &(at, call) in &launches {
            // The code behind the sums runs in the launch for the last examples alone.
            let own = &compiled.program.kernels[call];
            if adds_to_sums(own) && name != "does not run" {
                continue;
            }
            let (own, order) = (own.clone(), compiled.order.clone());
            if mutate(&mut compiled, at, call) {
                if applied % step == 0 {
                    let seen = compiled.validate().is_err();
                    assert!(seen, "launch {at}, {}, {name}: not seen", own.name);
                }
                applied += 1;
            }
            (compiled.program.kernels[call], compiled.order) = (own, order);
        }
        assert!(applied > 0, "no launch {name}");
    }
}

#[test]
fn recomputed_programs() {
    let model = "gpt:layers=2,width=32,length=32";
    // As below, the least share that a plan can meet depends on the processor.
    let compiled = ["60%", "55%", "50%", "45%"]
        .into_iter()
        .map(|share| Compiled::new(model, Dim::Fixed(4), share, false))
        .find(|compiled| compiled.program.kernels.len() > compiled.before.0.kernels.len())
        .expect("a program that recomputes");
    mutations_are_seen(compiled);
}

#[test]
fn programs_with_prologues() {
    let compiled = Compiled::new("resnet20", Dim::Fixed(4), "50%", false);
    assert!(count_prologues(&compiled.program) > 0, "no prologue");
    mutations_are_seen(compiled);
}

#[test]
fn programs_in_micro_batches() {
    let compiled = Compiled::new("cnn", Dim::bounded("batch", 64), "40%", false);
    assert!(compiled.program.micro_batches.is_some(), "no micro-batches");
    mutations_are_seen(compiled);
}

#[test]
fn offloaded_programs() {
    let model = "gpt:layers=2,width=32,length=32";
    // Workspaces depend on the processor, and with them the least share that a plan can meet.
    let compiled = ["90%", "85%", "80%", "75%"]
        .into_iter()
        .map(|share| Compiled::new(model, Dim::Fixed(4), share, true))
        .find(|compiled| !compiled.program.transfers.is_empty())
        .expect("a program that offloads");
    mutations_are_seen(compiled);
}

/// A launch that no other reads is missed all the same: it writes examples of an output.
#[test]
fn outputs_in_micro_batches_are_complete() {
    let params = Params::seeded(0);
    let hidden = Linear::new(&params.root() / "hidden", 16, 512);
    let head = Linear::new(&params.root() / "head", 512, 4);
    let trace = Trace::inference();
    let x = trace.input("x", DType::F32, (Dim::bounded("batch", 256), 16));
    let y = x.apply(&hidden).relu().apply(&head);
    let graph = trace.finish(&[y]).expect("a graph");
    let mut compiled = Compiled::of(&graph, "40%", false);
    assert_eq!(compiled.validate(), Ok(()));
    let writes_output = |&(_, call): &(usize, usize)| {
        let mut written = compiled.program.kernels[call].stored();
        written.any(|value| compiled.program.value(value).output)
    };
    let launches: Vec<_> = compiled
        .launches()
        .into_iter()
        .filter(writes_output)
        .collect();
    assert!(launches.len() > 1, "no micro-batches");
    for (at, _) in launches {
        let left_out = compiled.order.remove(at);
        assert!(compiled.validate().is_err(), "launch {at} is not missed");
        compiled.order.insert(at, left_out);
    }
}
