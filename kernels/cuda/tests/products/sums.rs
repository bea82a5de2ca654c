//! Sums of a product's epilogue, for each column of its result, against sums in double precision of
//! the result that was stored.

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::{ScalarOp, Value};
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{ConvKind, Inst, Operand, ReduceOp, Spec, Store};

use super::super::common::Case;
use super::convolution::Shape;
use super::{contiguous, numbers, typed};

/// The columns of a product: the channels of images, else the last axis.
fn columns(spec: &Spec) -> usize {
    (0..spec.dims.len())
        .find(|&axis| !spec.is_reduced(axis))
        .expect("an axis is kept")
}

/// The product with a sum of its elements, one of their products with those of another tensor, and
/// their squared deviations, for each column; `which` tells which of the three.
pub fn summed(mut spec: Spec, which: [bool; 3]) -> Spec {
    spec.reduced = spec.dims.len() - 1;
    let kept = columns(&spec);
    let column = |axis: usize| Size::fixed(i64::from(axis == kept));
    let sums = Operand {
        dtype: DType::F32,
        offset: Size::fixed(0),
        strides: (0..spec.dims.len()).map(column).collect(),
    };
    spec.operands.push(Operand {
        dtype: DType::F32,
        ..spec.operands[0].clone()
    });
    spec.code.extend([
        Inst::Load(1),
        Inst::Op(ScalarOp::Mul, [0, 1, 0]),
        Inst::Reduce(ReduceOp::Sum, 0),
        Inst::Reduce(ReduceOp::Sum, 2),
        Inst::Reduce(ReduceOp::SquaredDeviations, 0),
    ]);
    for (value, _) in [3, 4, 5]
        .into_iter()
        .zip(which)
        .filter(|(_, wanted)| *wanted)
    {
        spec.stores.push(Store {
            value,
            operand: spec.operands.len() as u16,
        });
        spec.operands.push(sums.clone());
    }
    spec
}

/// A product with all three sums, and work for each column: its elements have a number of the column
/// added, which then becomes half of itself and the sum of the column; and the squared deviations are
/// multiplied by another number of the column.
pub fn with_columns(spec: Spec) -> Spec {
    let mut spec = summed(spec, [true; 3]);
    let moved = |v: u16| if v == 0 { 2 } else { v + 2 };
    spec.code
        .iter_mut()
        .for_each(|inst| inst.map_arguments(moved));
    spec.stores
        .iter_mut()
        .for_each(|store| store.value = moved(store.value));
    let sums = spec.operands[2].clone();
    let first = spec.operands.len() as u16;
    spec.operands.extend([sums.clone(), sums.clone(), sums]);
    let (state, factor, product) = (first, first + 1, first + 2);
    spec.code.splice(
        1..1,
        [Inst::Load(state), Inst::Op(ScalarOp::Add, [0, 1, 0])],
    );
    let [sum, deviations, next] = [5, 7, spec.code.len() as u16];
    spec.code.extend([
        Inst::Const(Value::F32(0.5)),
        Inst::Op(ScalarOp::Mul, [1, next, 0]),
        Inst::Op(ScalarOp::Add, [next + 1, sum, 0]),
        Inst::Load(factor),
        Inst::Op(ScalarOp::Mul, [deviations, next + 3, 0]),
    ]);
    for (value, operand) in [(next + 2, state), (next + 4, product)] {
        spec.stores.push(Store { value, operand });
    }
    spec
}

/// Fails unless the work for each column of [`with_columns`] follows from the sums that were stored.
pub fn judge_columns(case: &Case, what: &str, got: &[Vec<u8>]) {
    let first = got.len() - case.spec.operands.len();
    let of = |list: &[Vec<u8>], k: usize| numbers(DType::F32, &list[first + k]);
    let [sums, deviations] = [2, 4].map(|k| of(got, k));
    let (before, after) = (of(&case.args, 5), of(got, 5));
    let (factors, products) = (of(&case.args, 6), of(got, 7));
    for column in 0..sums.len() {
        let state = (before[column] as f32 * 0.5 + sums[column] as f32) as f64;
        let product = (deviations[column] as f32 * factors[column] as f32) as f64;
        let (actual, expected) = ([after[column], products[column]], [state, product]);
        assert_eq!(actual, expected, "{what}: column {column}");
    }
}

/// The rows of each column: result and other tensor.
fn rows(case: &Case, result: &[f64], other: &[f64]) -> Vec<Vec<[f64; 2]>> {
    let spec = &case.spec;
    let kept = columns(spec);
    let dims: Vec<usize> = spec.dims.iter().map(|d| d.usize_at(&case.env)).collect();
    let strides: Vec<usize> = spec.operands[0]
        .strides
        .iter()
        .map(|s| s.usize_at(&case.env))
        .collect();
    let mut list = vec![Vec::new(); dims[kept]];
    for flat in 0..dims.iter().product() {
        let (mut rest, mut place, mut column) = (flat, 0, 0);
        for axis in (0..dims.len()).rev() {
            let at = rest % dims[axis];
            rest /= dims[axis];
            place += at * strides[axis];
            column = if axis == kept { at } else { column };
        }
        list[column].push([result[place], other[place]]);
    }
    list
}

/// Fails unless a case's results have the sums of the result that was stored.
pub fn judge(case: &Case, which: [bool; 3], what: &str, got: &[Vec<u8>]) {
    let first = got.len() - case.spec.operands.len();
    let of = |k: usize| numbers(case.spec.operands[k].dtype, &got[first + k]);
    let rows = rows(case, &of(0), &of(1));
    let mut operands = 2..;
    for (kind, _) in (0..3).zip(which).filter(|(_, wanted)| *wanted) {
        let sums = of(operands.next().expect("it has no end"));
        for (column, rows) in rows.iter().enumerate() {
            let count = rows.len() as f64;
            let mean = rows.iter().map(|r| r[0]).sum::<f64>() / count;
            let term = |[x, y]: &[f64; 2]| match kind {
                0 => *x,
                1 => x * y,
                _ => (x - mean) * (x - mean),
            };
            let sum: f64 = rows.iter().map(term).sum();
            let scale: f64 = rows.iter().map(|r| term(r).abs()).sum();
            // Of the deviations, the difference that the mean's rounding makes.
            let own = if kind == 2 { count * mean * mean } else { 0.0 };
            let epsilon = f64::from(f32::EPSILON);
            let bound = (count + 8.0) * epsilon * (scale + own * epsilon) + 1e-30;
            let (actual, expected) = (sums[column], sum);
            assert!(
                (actual - expected).abs() <= bound,
                "{what}: sum {kind} of column {column} is {actual}, not {expected} ± {bound}"
            );
        }
    }
}

/// A convolution whose image and result have their channels innermost, the result in f32.
pub fn innermost(shape: &Shape, kind: ConvKind) -> Spec {
    let image = |space: [usize; 4], dtype| {
        let [_, c, h, w] = space;
        typed(dtype, 0, &[c * h * w, 1, w * c, c])
    };
    let [a, b, out] = shape.spaces(kind);
    let weight = typed(shape.dtype, 0, &contiguous(&b));
    shape.spec(
        kind,
        [image(a, shape.dtype), weight, image(out, DType::F32)],
    )
}
