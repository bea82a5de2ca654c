//! Matrix products and convolutions, at the shapes of the built-in models: `cargo bench -p
//! slabwise-benches --bench gemm`.

mod common;

use common::*;
use divan::counter::ItemsCount;
use divan::{Bencher, Divan};
use slabwise_kernels::cpu::{Config, Isa, Kernel, Team};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::memory::Memory;
use slabwise_kernels::scalar::{ScalarOp, Value};
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{
    Body, ConvKind, Inst, Matmul, Operand, Quantization, QuantizedMatmul, Spec, Store,
};

fn main() {
    Divan::from_args().main();
}

/// Times a kernel with a workspace of at most `most` bytes, if possible; a counted item is one
/// multiplication and one addition, so 1 Gitem/s is 2 GFLOP/s.
fn time_within(
    room: u64,
    bencher: Bencher,
    spec: Spec,
    sizes: &[usize],
    isa: Isa,
    threads: usize,
    work: usize,
) {
    let team = Team::new(threads);
    let kernel = Kernel::within(spec, &Env::default(), &Config { threads, isa }, room)
        .expect("a valid spec");
    let mut memory = Memory::new();
    let args = filled(&mut memory, sizes);
    let workspace = memory.reserve(kernel.workspace()).expect("memory");
    bencher
        .counter(ItemsCount::new(work))
        .bench_local(|| kernel.run(&mut memory, &args, &workspace, &Env::default(), &team));
}

fn time(bencher: Bencher, spec: Spec, sizes: [usize; 3], isa: Isa, threads: usize, work: usize) {
    time_within(u64::MAX, bencher, spec, &sizes, isa, threads, work);
}

/// A product of `m × k` and `k × n`, either operand stored transposed.
#[derive(Clone, Copy)]
struct Product {
    m: usize,
    n: usize,
    k: usize,
    transposed: [bool; 2],
}

impl std::fmt::Display for Product {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let t = |t: bool| if t { "ᵀ" } else { "" };
        write!(
            f,
            "{}×{}{} · {}×{}{}",
            self.m,
            self.k,
            t(self.transposed[0]),
            self.k,
            self.n,
            t(self.transposed[1])
        )
    }
}

fn product(bencher: Bencher, p: Product, isa: Isa, threads: usize) {
    product_within(u64::MAX, bencher, p, isa, threads);
}

fn product_within(room: u64, bencher: Bencher, p: Product, isa: Isa, threads: usize) {
    let Product {
        m,
        n,
        k,
        transposed,
    } = p;
    let operand = |rows: usize, columns: usize, transposed: bool| {
        let mut operand = contiguous(&if transposed {
            [columns, rows]
        } else {
            [rows, columns]
        });
        if transposed {
            operand.strides.swap(0, 1);
        }
        operand
    };
    let body = Matmul {
        in_order: true,
        k: Size::fixed(k as i64),
        a: operand(m, k, transposed[0]),
        b: operand(k, n, transposed[1]),
    };
    time_within(
        room,
        bencher,
        plain(Body::Matmul(body), &[m, n]),
        &[m * k, k * n, m * n],
        isa,
        threads,
        m * n * k,
    );
}

const fn mm(m: usize, n: usize, k: usize, a: bool, b: bool) -> Product {
    Product {
        m,
        n,
        k,
        transposed: [a, b],
    }
}

/// The products of a 784-512-256-10 perceptron's step at batch 64, and single rows and columns.
const SHAPES: [Product; 12] = [
    mm(64, 512, 784, false, false),
    mm(64, 256, 512, false, false),
    mm(64, 10, 256, false, false),
    mm(256, 10, 64, true, false),
    mm(64, 256, 10, false, true),
    mm(512, 256, 64, true, false),
    mm(64, 512, 256, false, true),
    mm(784, 512, 64, true, false),
    mm(64, 512, 3136, false, false),
    mm(1, 512, 784, false, false),
    mm(1, 512, 784, false, true),
    mm(512, 1, 784, false, false),
];

#[divan::bench(args = SHAPES, consts = [1, 2])]
fn skinny<const THREADS: usize>(bencher: Bencher, p: Product) {
    product(bencher, p, Isa::detect(), THREADS);
}

/// Rows of a layer of a language model: of one token, of a few, and of a prompt.
const ROWS: [usize; 7] = [1, 2, 4, 16, 32, 64, 256];
/// Inputs and outputs of the layer.
const WIDTH: usize = 2048;

/// A layer whose weights have `BITS` bits, in blocks of 32; with 16 or 32 bits those of a float type.
#[divan::bench(args = ROWS, consts = [2, 4, 8, 16, 32])]
fn quantized<const BITS: u32>(bencher: Bencher, m: usize) {
    let (n, k) = (WIDTH, WIDTH);
    let weight = |dtype: DType, columns: usize| Operand {
        dtype,
        ..contiguous(&[n, columns])
    };
    let a = contiguous(&[m, k]);
    let (body, sizes) = match BITS {
        16 | 32 => {
            let dtype = if BITS == 16 { DType::BF16 } else { DType::F32 };
            let mut b = weight(dtype, k);
            b.strides.swap(0, 1);
            let k = Size::fixed(k as i64);
            let words = n * WIDTH * BITS as usize / 32;
            (
                Body::Matmul(Matmul {
                    k,
                    in_order: false,
                    a,
                    b,
                }),
                vec![m * WIDTH, words, m * n],
            )
        }
        bits => {
            let format = Quantization { bits, block: 32 };
            let per_byte = format.per_byte() as usize;
            let words = n * k / per_byte / 4;
            let body = QuantizedMatmul {
                k: Size::fixed(k as i64),
                a,
                format,
                numbers: weight(DType::U8, k / per_byte),
                scales: weight(DType::F32, k / 32),
                in_order: false,
                zeros: Some(weight(DType::U8, (k / 32).div_ceil(per_byte))),
            };
            let points = n * (k / 32).div_ceil(per_byte) / 4;
            let sizes = vec![m * k, words, n * k / 32, points, m * n];
            (Body::QuantizedMatmul(Box::new(body)), sizes)
        }
    };
    let spec = plain(body, &[m, n]);
    time_within(
        u64::MAX,
        bencher,
        spec,
        &sizes,
        Isa::detect(),
        2,
        m * n * WIDTH,
    );
}

/// The products of a step of the perceptron at batch 256 and of a layer of the `gpt` at batch 8.
const MODELS: [Product; 15] = [
    mm(256, 512, 784, false, false),
    mm(256, 256, 512, false, false),
    mm(256, 512, 256, false, true),
    mm(512, 256, 256, true, false),
    mm(784, 512, 256, true, false),
    mm(1024, 768, 256, false, false),
    mm(1024, 256, 256, false, false),
    mm(1024, 1024, 256, false, false),
    mm(1024, 256, 1024, false, false),
    mm(1024, 256, 768, false, true),
    mm(1024, 1024, 256, false, true),
    mm(1024, 256, 1024, false, true),
    mm(256, 768, 1024, true, false),
    mm(256, 1024, 1024, true, false),
    mm(1024, 256, 1024, true, false),
];

#[divan::bench(args = MODELS, consts = [1, 2])]
fn models<const THREADS: usize>(bencher: Bencher, p: Product) {
    product(bencher, p, Isa::detect(), THREADS);
}

#[divan::bench(args = [256, 1024, 2048], consts = [1, 2])]
fn square<const THREADS: usize>(bencher: Bencher, n: usize) {
    product(bencher, mm(n, n, n, false, false), Isa::detect(), THREADS);
}

#[divan::bench(args = Isa::available())]
fn square_512(bencher: Bencher, isa: Isa) {
    product(bencher, mm(512, 512, 512, false, false), isa, 1);
}

/// The convolutions of the built-in CNN, of residual networks, and a depthwise one.
fn convolutions() -> Vec<Convolution> {
    let shapes = [
        (64, 1, 32, 28, 5, 1, 1),
        (64, 32, 64, 14, 5, 1, 1),
        (64, 16, 16, 32, 3, 1, 1),
        (64, 32, 32, 16, 3, 1, 1),
        (64, 64, 64, 8, 3, 1, 1),
        (64, 16, 32, 32, 3, 2, 1),
        (8, 64, 64, 56, 1, 1, 1),
        (16, 64, 64, 32, 3, 1, 64),
    ];
    let kinds = [ConvKind::Forward, ConvKind::InputGrad, ConvKind::WeightGrad];
    let of = |(n, ci, co, hw, k, stride, groups)| {
        kinds.map(|kind| Convolution {
            kind,
            n,
            ci,
            co,
            hw,
            k,
            stride,
            groups,
        })
    };
    shapes.into_iter().flat_map(of).collect()
}

#[divan::bench(args = convolutions(), consts = [1, 2])]
fn convolution<const THREADS: usize>(bencher: Bencher, c: Convolution) {
    let (spec, sizes) = c.spec();
    time(bencher, spec, sizes, Isa::detect(), THREADS, c.work());
}

/// Bytes of workspaces, descending from more than any kernel here needs.
const ROOMS: [u64; 6] = [1 << 30, 256 << 10, 128 << 10, 64 << 10, 32 << 10, 0];

/// The cost of smaller workspaces.
#[divan::bench(args = ROOMS, consts = [0, 1, 2, 3, 4, 5])]
fn workspace<const WHICH: usize>(bencher: Bencher, room: u64) {
    let kinds = [ConvKind::Forward, ConvKind::InputGrad, ConvKind::WeightGrad];
    match WHICH {
        0..3 => {
            let c = Convolution {
                kind: kinds[WHICH],
                n: 16,
                ci: 32,
                co: 64,
                hw: 14,
                k: 5,
                stride: 1,
                groups: 1,
            };
            let (spec, sizes) = c.spec();
            time_within(room, bencher, spec, &sizes, Isa::detect(), 1, c.work());
        }
        _ => {
            let p = [
                mm(64, 512, 784, false, false),
                mm(784, 512, 64, true, false),
                mm(512, 512, 512, false, true),
            ][WHICH - 3];
            product_within(room, bencher, p, Isa::detect(), 1);
        }
    }
}

/// A convolution whose prologue is a norm and an activation of the image in memory, and the
/// elements of the arguments.
fn with_prologue(c: &Convolution) -> (Spec, Vec<usize>) {
    let (mut spec, [a, b, to]) = c.spec();
    let Body::Conv2d(body) = &mut spec.body else {
        unreachable!()
    };
    body.prologue = Some(Box::new(norm(&[c.n, c.ci, c.hw, c.hw])));
    (spec, vec![a, c.ci, c.ci, c.ci, c.ci, b, to])
}

/// A loop with a batch norm and an activation of an image, from its sum, the sum of its square, a
/// weight and a bias.
fn norm(image: &[usize; 4]) -> Spec {
    let mut channel = contiguous(&[image[1]]);
    channel.strides = [0, 1, 0, 0].iter().map(|&s| Size::fixed(s)).collect();
    let operands = vec![
        contiguous(image),
        channel.clone(),
        channel.clone(),
        channel.clone(),
        channel,
        contiguous(image),
    ];
    let op = |op, a, b| Inst::Op(op, [a, b, 0]);
    let code = vec![
        Inst::Load(0),
        Inst::Load(1),
        op(ScalarOp::Sub, 0, 1),
        Inst::Load(2),
        Inst::Const(Value::F32(1e-5)),
        op(ScalarOp::Add, 3, 4),
        op(ScalarOp::Rsqrt, 5, 0),
        Inst::Load(3),
        op(ScalarOp::Mul, 6, 7),
        op(ScalarOp::Mul, 2, 8),
        Inst::Load(4),
        op(ScalarOp::Add, 9, 10),
        op(ScalarOp::Relu, 11, 0),
    ];
    Spec {
        body: Body::Loop,
        dims: dims(image),
        reduced: 0,
        operands,
        indices: vec![],
        code,
        stores: vec![Store {
            value: 12,
            operand: 5,
        }],
    }
}

/// The convolutions of a residual network whose images may be computed in a prologue.
fn behind_norms() -> Vec<Convolution> {
    let shapes = [(16, 32), (32, 16), (64, 8)];
    let of = |(c, hw)| {
        [ConvKind::Forward, ConvKind::WeightGrad].map(|kind| Convolution {
            kind,
            n: 64,
            ci: c,
            co: c,
            hw,
            k: 3,
            stride: 1,
            groups: 1,
        })
    };
    shapes.into_iter().flat_map(of).collect()
}

/// A convolution of an image in memory, and of one computed in a prologue; and the kernel that
/// computes it in memory.
#[divan::bench(args = behind_norms(), consts = [0, 1, 2])]
fn prologue<const WHICH: usize>(bencher: Bencher, c: Convolution) {
    let (isa, work) = (Isa::detect(), c.work());
    let (spec, sizes) = match WHICH {
        0 => (c.spec().0, c.spec().1.to_vec()),
        1 => with_prologue(&c),
        _ => {
            let image = [c.n, c.ci, c.hw, c.hw];
            let elements = image.iter().product();
            (
                norm(&image),
                vec![elements, c.ci, c.ci, c.ci, c.ci, elements],
            )
        }
    };
    time_within(u64::MAX, bencher, spec, &sizes, isa, 2, work);
}

/// The cost of a parallel region of two empty chunks.
#[divan::bench(args = [1, 2])]
fn region(bencher: Bencher, threads: usize) {
    let team = Team::new(threads);
    bencher.bench_local(|| team.run(2, &|chunk, _| divan::black_box_drop(chunk)));
}
