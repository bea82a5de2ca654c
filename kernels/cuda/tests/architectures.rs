//! The most time-consuming kernels of models: compiled for every architecture, none with spilled
//! registers.

#[path = "../../tests/loops/builder.rs"]
#[allow(dead_code)] // not every test needs all of it
mod builder;
mod common;

use builder::Builder;
use common::compile_for_gpu;
use common::layouts::{contiguous, sizes};
use slabwise_cuda::{Description, Function, lower};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{
    Body, Gather, Inst, NonMaxSuppression, Nonzero, Operand, Pool2d, PoolKind, ReduceOp, Scatter,
    Sort, Spec, Store, Window,
};

fn storing(body: Body, dims: &[i64]) -> Spec {
    Spec {
        body,
        dims: sizes(dims),
        reduced: 0,
        operands: vec![contiguous(DType::F32, dims)],
        indices: vec![],
        code: vec![Inst::Acc],
        stores: vec![Store {
            value: 0,
            operand: 0,
        }],
    }
}

fn softmax(rows: i64, n: i64, dtype: DType) -> Spec {
    let mut b = Builder::new(&[rows, n], 1);
    let x = b.typed(dtype, &[n, 1]);
    let x = b.inst(Inst::Load(x));
    let most = b.reduce(ReduceOp::Max, x);
    let below = b.op(ScalarOp::Sub, &[x, most]);
    let e = b.op(ScalarOp::Exp, &[below]);
    let sum = b.reduce(ReduceOp::Sum, e);
    let y = b.op(ScalarOp::Div, &[e, sum]);
    let out = b.typed(dtype, &[n, 1]);
    b.store(y, out);
    b.spec
}

fn sum(dims: &[i64], reduced: usize, strides: &[i64], to: &[i64]) -> Spec {
    let mut b = Builder::new(dims, reduced);
    let x = b.load(strides);
    let y = b.reduce(ReduceOp::Sum, x);
    let out = b.operand(to);
    b.store(y, out);
    b.spec
}

/// y = gelu(x + bias), the form with tanh.
fn gelu() -> Spec {
    let mut b = Builder::new(&[8192, 3072], 0);
    let (x, bias) = (b.load(&[3072, 1]), b.load(&[0, 1]));
    let x = b.op(ScalarOp::Add, &[x, bias]);
    let (third, scale, half, one) = (
        b.number(0.044_715),
        b.number(0.797_884_6),
        b.number(0.5),
        b.number(1.0),
    );
    let square = b.op(ScalarOp::Mul, &[x, x]);
    let cubic = b.op(ScalarOp::Mul, &[square, third]);
    let factor = b.op(ScalarOp::Add, &[cubic, one]);
    let inner = b.op(ScalarOp::Mul, &[x, factor]);
    let inner = b.op(ScalarOp::Mul, &[inner, scale]);
    let tanh = b.op(ScalarOp::Tanh, &[inner]);
    let above = b.op(ScalarOp::Add, &[tanh, one]);
    let halved = b.op(ScalarOp::Mul, &[x, half]);
    let y = b.op(ScalarOp::Mul, &[halved, above]);
    let out = b.operand(&[3072, 1]);
    b.store(y, out);
    b.spec
}

fn transposed() -> Spec {
    let mut b = Builder::new(&[64, 768, 1024], 0);
    let x = b.load(&[768 * 1024, 1, 768]);
    let out = b.operand(&[768 * 1024, 1024, 1]);
    b.store(x, out);
    b.spec
}

fn embedding(tokens: i64, width: i64, places: i64) -> [Spec; 2] {
    let index = Operand {
        dtype: DType::I32,
        offset: Size::ZERO,
        strides: sizes(&[1, 0]),
    };
    let source = Operand {
        dtype: DType::F32,
        offset: Size::ZERO,
        strides: sizes(&[0, 1]),
    };
    let gather = Gather {
        source,
        index: index.clone(),
        axis_stride: Size::fixed(width),
        axis_len: Size::fixed(places),
    };
    let value = contiguous(DType::F32, &[tokens, width]);
    let scatter = Scatter {
        axis: 0,
        reduce: ReduceOp::Sum,
        space: sizes(&[tokens, width]),
        value,
        index,
    };
    [
        storing(Body::Gather(gather), &[tokens, width]),
        storing(Body::Scatter(scatter), &[places, width]),
    ]
}

/// Compaction, sorting and suppression.
fn choosing() -> [Spec; 4] {
    let own = |body, dims: &[i64]| Spec {
        operands: vec![],
        code: vec![],
        stores: vec![],
        ..storing(body, dims)
    };
    let compact = Nonzero {
        space: sizes(&[1 << 20]),
        mask: contiguous(DType::Bool, &[1 << 20]),
        positions: contiguous(DType::I32, &[9]),
    };
    let sort = |dims: &[i64]| Sort {
        descending: true,
        len: sizes(dims)[dims.len() - 1],
        source: contiguous(DType::F32, dims),
        positions: contiguous(DType::I32, dims),
    };
    let boxes = NonMaxSuppression {
        threshold: 0.5,
        boxes: contiguous(DType::F32, &[5000, 4]),
        keep: contiguous(DType::Bool, &[5000]),
    };
    [
        own(Body::Nonzero(compact), &[9]),
        own(Body::Sort(sort(&[64, 300])), &[64, 300]),
        own(Body::Sort(sort(&[1 << 20])), &[1 << 20]),
        own(Body::NonMaxSuppression(boxes), &[5000]),
    ]
}

fn max_pool() -> Spec {
    let window = Window {
        k: [2, 2],
        stride: [2, 2],
        pad: [0, 0],
    };
    let (x, arg) = (
        contiguous(DType::F32, &[64, 32, 28, 28]),
        Some(contiguous(DType::U8, &[64, 32, 14, 14])),
    );
    let pool = Pool2d {
        kind: PoolKind::Max,
        window,
        hw: [Size::fixed(28); 2],
        x,
        arg,
    };
    storing(Body::Pool2d(pool), &[64, 32, 14, 14])
}

#[test]
fn hot_kernels_spill_nothing() {
    let mut specs = vec![
        gelu(),
        transposed(),
        max_pool(),
        softmax(8192, 64, DType::F32),
        softmax(8192, 1000, DType::F32),
        softmax(8192, 4096, DType::BF16),
        softmax(64, 32_768, DType::F32),
        sum(&[8192, 768], 1, &[768, 1], &[1, 0]),
        sum(&[768, 8192], 1, &[1, 768], &[1, 0]),
        sum(&[1 << 24], 1, &[1], &[0]),
    ];
    specs.extend(embedding(8192, 768, 50_257));
    specs.extend(embedding(16_384, 384, 65));
    specs.extend(choosing());
    for sm in [80, 86, 89, 90, 100, 120] {
        let target = Description::nearest(sm).target();
        let lowered = specs
            .iter()
            .map(|spec| lower(spec, &Env::default(), &target).expect("source"));
        let functions: Vec<Function> = lowered.flat_map(|l| l.functions).collect();
        assert!(functions.len() > specs.len());
        compile_for_gpu(&functions, sm, 0);
    }
}
