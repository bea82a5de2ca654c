//! Loop kernels: fused elementwise chains, rows, reductions, an optimizer's update.

use divan::Bencher;
use divan::counter::ItemsCount;
use slabwise_kernels::cpu::{Config, Isa, Kernel, Team};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::memory::{Memory, Region};
use slabwise_kernels::scalar::{ScalarOp, Value};
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{Body, Dims, Inst, Operand, ReduceOp, Spec, Store, ValueId};

fn main() {
    divan::main();
}

const THREADS: [usize; 2] = [1, 2];

/// A loop in the making.
struct Builder {
    spec: Spec,
}

impl Builder {
    fn new(dims: &[i64], reduced: usize) -> Self {
        let dims = dims.iter().map(|&d| Size::fixed(d)).collect();
        Builder { spec: Spec { body: Body::Loop, dims, reduced, operands: vec![], indices: vec![], code: vec![], stores: vec![] } }
    }

    fn operand(&mut self, strides: &[i64]) -> u16 {
        let strides: Dims = strides.iter().map(|&s| Size::fixed(s)).collect();
        self.spec.operands.push(Operand { dtype: DType::F32, offset: Size::ZERO, strides });
        (self.spec.operands.len() - 1) as u16
    }

    fn inst(&mut self, inst: Inst) -> ValueId {
        self.spec.code.push(inst);
        (self.spec.code.len() - 1) as ValueId
    }

    fn load(&mut self, strides: &[i64]) -> ValueId {
        let operand = self.operand(strides);
        self.inst(Inst::Load(operand))
    }

    fn number(&mut self, x: f32) -> ValueId {
        self.inst(Inst::Const(Value::F32(x)))
    }

    fn op(&mut self, op: ScalarOp, args: &[ValueId]) -> ValueId {
        let arg = |k: usize| args.get(k).copied().unwrap_or(0);
        self.inst(Inst::Op(op, [arg(0), arg(1), arg(2)]))
    }

    fn store(&mut self, value: ValueId, operand: u16) {
        self.spec.stores.push(Store { value, operand });
    }

    /// Times the kernel over memory of its own.
    fn bench(self, bencher: Bencher, threads: usize) {
        let env = Env::default();
        let points: i64 = self.spec.dims.iter().map(|d| d.at(&env)).product();
        let kernel = Kernel::new(self.spec, &env, &Config { threads, isa: Isa::detect() }).expect("a valid spec");
        let team = Team::new(threads);
        let mut memory = Memory::new();
        let regions: Vec<Region> = kernel
            .spec()
            .arguments()
            .iter()
            .map(|(operand, dims, _)| {
                let region = memory.reserve(operand.extent(dims, &env) * 4).expect("memory");
                for (i, x) in memory.elements_mut::<f32>(&region).iter_mut().enumerate() {
                    *x = (i % 1009) as f32 / 250.0 - 2.0;
                }
                region
            })
            .collect();
        let workspace = memory.reserve(kernel.workspace()).expect("memory");
        bencher.counter(ItemsCount::new(points as usize)).bench_local(|| kernel.run(&mut memory, &regions, &workspace, &env, &team));
    }
}

const CHAIN: i64 = 1 << 24;

/// y = tanh(1.5 x + 0.25) · sigmoid(x) + x; returns (x, t, s, y).
fn chain(b: &mut Builder) -> [ValueId; 4] {
    let x = b.load(&[1]);
    let (a, c) = (b.number(1.5), b.number(0.25));
    let scaled = b.op(ScalarOp::Mul, &[x, a]);
    let shifted = b.op(ScalarOp::Add, &[scaled, c]);
    let t = b.op(ScalarOp::Tanh, &[shifted]);
    let s = b.op(ScalarOp::Sigmoid, &[x]);
    let product = b.op(ScalarOp::Mul, &[t, s]);
    let y = b.op(ScalarOp::Add, &[product, x]);
    [x, t, s, y]
}

#[divan::bench(args = THREADS)]
fn chain_forward(bencher: Bencher, threads: usize) {
    let mut b = Builder::new(&[CHAIN], 1);
    let [.., y] = chain(&mut b);
    let sum = b.inst(Inst::Reduce(ReduceOp::Sum, y));
    let out = b.operand(&[0]);
    b.store(sum, out);
    b.bench(bencher, threads);
}

#[divan::bench(args = THREADS)]
fn chain_gradient(bencher: Bencher, threads: usize) {
    let mut b = Builder::new(&[CHAIN], 0);
    let [_, t, s, _] = chain(&mut b);
    // dy/dx = 1.5 (1 − t²) s + t s (1 − s) + 1
    let (one, a) = (b.number(1.0), b.number(1.5));
    let tt = b.op(ScalarOp::Mul, &[t, t]);
    let dt = b.op(ScalarOp::Sub, &[one, tt]);
    let dt_s = b.op(ScalarOp::Mul, &[dt, s]);
    let left = b.op(ScalarOp::Mul, &[dt_s, a]);
    let ds = b.op(ScalarOp::Sub, &[one, s]);
    let s_ds = b.op(ScalarOp::Mul, &[s, ds]);
    let right = b.op(ScalarOp::Mul, &[t, s_ds]);
    let sum = b.op(ScalarOp::Add, &[left, right]);
    let grad = b.op(ScalarOp::Add, &[sum, one]);
    let out = b.operand(&[1]);
    b.store(grad, out);
    b.bench(bencher, threads);
}

#[divan::bench(args = [(64, 10), (64, 1000), (4096, 512)])]
fn softmax(bencher: Bencher, (rows, cols): (i64, i64)) {
    let mut b = Builder::new(&[rows, cols], 1);
    let x = b.load(&[cols, 1]);
    let max = b.inst(Inst::Reduce(ReduceOp::Max, x));
    let shifted = b.op(ScalarOp::Sub, &[x, max]);
    let e = b.op(ScalarOp::Exp, &[shifted]);
    let sum = b.inst(Inst::Reduce(ReduceOp::Sum, e));
    let y = b.op(ScalarOp::Div, &[e, sum]);
    let out = b.operand(&[cols, 1]);
    b.store(y, out);
    b.bench(bencher, 1);
}

/// p, m, v from p, m, v, g, in place.
#[divan::bench(args = THREADS)]
fn adam(bencher: Bencher, threads: usize) {
    let mut b = Builder::new(&[1_600_000], 0);
    let [p, m, v, g] = std::array::from_fn(|_| b.load(&[1]));
    let (beta1, rest1, beta2, rest2) = (b.number(0.9), b.number(0.1), b.number(0.999), b.number(0.001));
    let (rate, epsilon) = (b.number(1e-3), b.number(1e-8));
    let old = b.op(ScalarOp::Mul, &[m, beta1]);
    let new = b.op(ScalarOp::Mul, &[g, rest1]);
    let m = b.op(ScalarOp::Add, &[old, new]);
    let square = b.op(ScalarOp::Mul, &[g, g]);
    let old = b.op(ScalarOp::Mul, &[v, beta2]);
    let new = b.op(ScalarOp::Mul, &[square, rest2]);
    let v = b.op(ScalarOp::Add, &[old, new]);
    let absolute = b.op(ScalarOp::Abs, &[v]);
    let root = b.op(ScalarOp::Sqrt, &[absolute]);
    let divisor = b.op(ScalarOp::Add, &[root, epsilon]);
    let step = b.op(ScalarOp::Div, &[m, divisor]);
    let scaled = b.op(ScalarOp::Mul, &[step, rate]);
    let p = b.op(ScalarOp::Sub, &[p, scaled]);
    b.store(p, 0);
    b.store(m, 1);
    b.store(v, 2);
    b.bench(bencher, threads);
}

/// [batch, n] → [n].
#[divan::bench(args = [(64, 512), (64, 10), (16384, 256)])]
fn bias_gradient(bencher: Bencher, (batch, n): (i64, i64)) {
    let mut b = Builder::new(&[n, batch], 1);
    let x = b.load(&[1, n]);
    let sum = b.inst(Inst::Reduce(ReduceOp::Sum, x));
    let out = b.operand(&[1, 0]);
    b.store(sum, out);
    b.bench(bencher, 2);
}

/// [n, c, h, w] → [c].
#[divan::bench(args = [(64, 32, 784), (64, 64, 49)])]
fn channel_sum(bencher: Bencher, (n, c, hw): (i64, i64, i64)) {
    let mut b = Builder::new(&[c, n, hw], 2);
    let x = b.load(&[hw, c * hw, 1]);
    let sum = b.inst(Inst::Reduce(ReduceOp::Sum, x));
    let out = b.operand(&[1, 0, 0]);
    b.store(sum, out);
    b.bench(bencher, 2);
}

#[divan::bench(args = THREADS)]
fn transpose(bencher: Bencher, threads: usize) {
    let n = 2048;
    let mut b = Builder::new(&[n, n], 0);
    let x = b.load(&[1, n]);
    let out = b.operand(&[n, 1]);
    b.store(x, out);
    b.bench(bencher, threads);
}

/// relu(x + bias) over rows.
#[divan::bench(args = [(64, 256), (64, 10)])]
fn bias_relu(bencher: Bencher, (rows, cols): (i64, i64)) {
    let mut b = Builder::new(&[rows, cols], 0);
    let x = b.load(&[cols, 1]);
    let bias = b.load(&[0, 1]);
    let sum = b.op(ScalarOp::Add, &[x, bias]);
    let y = b.op(ScalarOp::Relu, &[sum]);
    let out = b.operand(&[cols, 1]);
    b.store(y, out);
    b.bench(bencher, 1);
}
