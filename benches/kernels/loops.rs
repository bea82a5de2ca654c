//! Loop kernels: fused elementwise chains, rows, reductions, an optimizer's update.

#[path = "../../kernels/tests/loops/builder.rs"]
mod builder;

use builder::Builder;
use divan::Bencher;
use divan::counter::ItemsCount;
use slabwise_kernels::cpu::{Config, Isa, Kernel, Team};
use slabwise_kernels::dtype::{DType, Lane};
use slabwise_kernels::memory::{Memory, Region};
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{Inst, ReduceOp, ValueId};

fn main() {
    divan::main();
}

const THREADS: [usize; 2] = [1, 2];

/// Times a kernel over freshly allocated memory.
fn bench(b: Builder, bencher: Bencher, threads: usize) {
    let env = Env::default();
    let points: i64 = b.spec.dims.iter().map(|d| d.at(&env)).product();
    let kernel = Kernel::new(
        b.spec,
        &env,
        &Config {
            threads,
            isa: Isa::detect(),
        },
    )
    .expect("a valid spec");
    let team = Team::new(threads);
    let mut memory = Memory::new();
    let regions: Vec<Region> = kernel
        .spec()
        .arguments()
        .iter()
        .map(|(operand, dims, _)| {
            let region = memory
                .reserve(operand.extent(dims, &env) * 4)
                .expect("memory");
            for (i, x) in memory.elements_mut::<f32>(&region).iter_mut().enumerate() {
                *x = (i % 1009) as f32 / 250.0 - 2.0;
            }
            region
        })
        .collect();
    let workspace = memory.reserve(kernel.workspace()).expect("memory");
    bencher
        .counter(ItemsCount::new(points as usize))
        .bench_local(|| kernel.run(&mut memory, &regions, &workspace, &env, &team));
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
    let sum = b.reduce(ReduceOp::Sum, y);
    let out = b.operand(&[0]);
    b.store(sum, out);
    bench(b, bencher, threads);
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
    bench(b, bencher, threads);
}

#[divan::bench(args = [(64, 10), (64, 1000), (4096, 512)])]
fn softmax(bencher: Bencher, (rows, cols): (i64, i64)) {
    let mut b = Builder::new(&[rows, cols], 1);
    let x = b.load(&[cols, 1]);
    let max = b.reduce(ReduceOp::Max, x);
    let shifted = b.op(ScalarOp::Sub, &[x, max]);
    let e = b.op(ScalarOp::Exp, &[shifted]);
    let sum = b.reduce(ReduceOp::Sum, e);
    let y = b.op(ScalarOp::Div, &[e, sum]);
    let out = b.operand(&[cols, 1]);
    b.store(y, out);
    bench(b, bencher, 1);
}

/// Sums of the rows of 2²⁰ elements.
#[divan::bench(args = [2, 3, 4, 7, 8, 10, 16, 1024])]
fn row_sums(bencher: Bencher, cols: i64) {
    let mut b = Builder::new(&[(1 << 20) / cols, cols], 1);
    let x = b.load(&[cols, 1]);
    let sum = b.reduce(ReduceOp::Sum, x);
    let out = b.operand(&[1, 0]);
    b.store(sum, out);
    bench(b, bencher, 1);
}

/// Rows of 2²⁰ elements, divided by their lengths.
#[divan::bench(args = [2, 3, 4, 7, 8, 10, 16, 1024])]
fn normalized_rows(bencher: Bencher, cols: i64) {
    let mut b = Builder::new(&[(1 << 20) / cols, cols], 1);
    let x = b.load(&[cols, 1]);
    let square = b.op(ScalarOp::Mul, &[x, x]);
    let sum = b.reduce(ReduceOp::Sum, square);
    let length = b.op(ScalarOp::Sqrt, &[sum]);
    let y = b.op(ScalarOp::Div, &[x, length]);
    let out = b.operand(&[cols, 1]);
    b.store(y, out);
    bench(b, bencher, 1);
}

/// 1.5 x + 0.25 of numbers of each type.
#[divan::bench(args = [DType::F32, DType::F16, DType::BF16])]
fn stored_halves(bencher: Bencher, dtype: DType) {
    let mut b = Builder::new(&[1 << 20], 0);
    let x = b.typed(dtype, &[1]);
    let x = b.inst(Inst::Load(x));
    let (factor, more) = (b.number(1.5), b.number(0.25));
    let product = b.op(ScalarOp::Mul, &[x, factor]);
    let y = b.op(ScalarOp::Add, &[product, more]);
    let out = b.typed(dtype, &[1]);
    b.store(y, out);
    bench(b, bencher, 1);
}

/// Elementwise functions of 2²⁰ numbers.
#[divan::bench(args = float_functions())]
fn functions(bencher: Bencher, op: ScalarOp) {
    let mut b = Builder::new(&[1 << 20], 0);
    let x = b.load(&[1]);
    let y = b.op(op, &[x, x]);
    let out = b.operand(&[1]);
    b.store(y, out);
    bench(b, bencher, 1);
}

/// The functions of one and two numbers of the table.
fn float_functions() -> impl Iterator<Item = ScalarOp> {
    let on_floats =
        |op: &ScalarOp| op.arity() < 3 && op.lane(&[Lane::F32; 3][..op.arity()]) == Some(Lane::F32);
    ScalarOp::ALL.iter().copied().filter(on_floats)
}

/// p, m, v from p, m, v, g, in place.
#[divan::bench(args = THREADS)]
fn adam(bencher: Bencher, threads: usize) {
    let mut b = Builder::new(&[1_600_000], 0);
    let [p, m, v, g] = std::array::from_fn(|_| b.load(&[1]));
    let (beta1, rest1, beta2, rest2) = (
        b.number(0.9),
        b.number(0.1),
        b.number(0.999),
        b.number(0.001),
    );
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
    bench(b, bencher, threads);
}

/// [batch, n] → [n].
#[divan::bench(args = [(64, 512), (64, 10), (16384, 256)])]
fn bias_gradient(bencher: Bencher, (batch, n): (i64, i64)) {
    let mut b = Builder::new(&[n, batch], 1);
    let x = b.load(&[1, n]);
    let sum = b.reduce(ReduceOp::Sum, x);
    let out = b.operand(&[1, 0]);
    b.store(sum, out);
    bench(b, bencher, 2);
}

/// [n, c, h, w] → [c].
#[divan::bench(args = [(64, 32, 784), (64, 64, 49)])]
fn channel_sum(bencher: Bencher, (n, c, hw): (i64, i64, i64)) {
    let mut b = Builder::new(&[c, n, hw], 2);
    let x = b.load(&[hw, c * hw, 1]);
    let sum = b.reduce(ReduceOp::Sum, x);
    let out = b.operand(&[1, 0, 0]);
    b.store(sum, out);
    bench(b, bencher, 2);
}

/// The sums of squares around means, [n, c, h, w] → [c], of the layers of a residual network.
#[divan::bench(args = [(64, 16, 1024), (64, 32, 256), (64, 64, 64)])]
fn channel_variance(bencher: Bencher, (n, c, hw): (i64, i64, i64)) {
    let mut b = Builder::new(&[c, n, hw], 2);
    let (x, mean) = (b.load(&[hw, c * hw, 1]), b.load(&[1, 0, 0]));
    let centred = b.op(ScalarOp::Sub, &[x, mean]);
    let square = b.op(ScalarOp::Mul, &[centred, centred]);
    let sum = b.reduce(ReduceOp::Sum, square);
    let out = b.operand(&[1, 0, 0]);
    b.store(sum, out);
    bench(b, bencher, 2);
}

#[divan::bench(args = THREADS)]
fn transpose(bencher: Bencher, threads: usize) {
    let n = 2048;
    let mut b = Builder::new(&[n, n], 0);
    let x = b.load(&[1, n]);
    let out = b.operand(&[n, 1]);
    b.store(x, out);
    bench(b, bencher, threads);
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
    bench(b, bencher, 1);
}

/// x / 0.9 where a random number is below 0.9, else 0.
#[divan::bench(args = THREADS)]
fn dropout(bencher: Bencher, threads: usize) {
    let mut b = Builder::new(&[1 << 20], 0);
    let x = b.load(&[1]);
    let state = b.typed(DType::I32, &[0]);
    b.spec.indices.push(std::iter::once(Size::ONE).collect());
    let index = b.inst(Inst::Index(0));
    let u = b.inst(Inst::Uniform {
        state,
        stream: 3,
        index,
    });
    let (keep, zero) = (b.number(0.9), b.number(0.0));
    let kept = b.op(ScalarOp::Lt, &[u, keep]);
    let scaled = b.op(ScalarOp::Div, &[x, keep]);
    let y = b.op(ScalarOp::Select, &[kept, scaled, zero]);
    let out = b.operand(&[1]);
    b.store(y, out);
    bench(b, bencher, threads);
}
