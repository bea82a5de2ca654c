//! Loops that reduce nothing, against the CPU's kernels.

#[allow(dead_code)]
#[path = "../../tests/loops/builder.rs"]
mod builder;
mod common;

use builder::Builder;
use common::{Case, Choices, check};
use slabwise_cuda::emulator::available;
use slabwise_kernels::dtype::{DType, Lane};
use slabwise_kernels::scalar::{Class, ScalarOp};
use slabwise_kernels::spec::Inst;

/// Numbers of all kinds: special, tiny, huge, and many in between.
fn floats() -> Vec<f32> {
    let special = [0.0, -0.0, 1.0, -1.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, f32::MIN_POSITIVE, 2.5, -2.5, 3e9, -3e9];
    special.into_iter().chain((0..400).map(|i| i as f32 * 0.043 - 8.6)).collect()
}

fn integers() -> Vec<i32> {
    [0, 1, -1, 2, -7, i32::MAX, i32::MIN, i32::MIN + 1, 1 << 20, 255, 256].into_iter().chain(-40..40).collect()
}

/// Every pair of samples, as three arguments of a type.
fn arguments(dtype: DType, which: usize) -> Vec<u8> {
    let n = 420;
    let pick = |i: usize, len: usize| (i * [1, 17, 5][which] + which) % len;
    match dtype {
        DType::F32 => (0..n).flat_map(|i| floats()[pick(i, floats().len())].to_le_bytes()).collect(),
        DType::F16 | DType::BF16 => Choices::new(which as u32).elements(dtype, n),
        DType::I32 => (0..n).flat_map(|i| integers()[pick(i, integers().len())].to_le_bytes()).collect(),
        DType::U8 => (0..n).map(|i| (i * 7 + which) as u8).collect(),
        DType::Bool => (0..n).map(|i| (i >> which & 1) as u8).collect(),
    }
}

/// Every operation on every lane it takes.
#[test]
fn operations() {
    if !available() {
        return;
    }
    let mut cases = Vec::new();
    for &op in ScalarOp::ALL {
        for dtype in [DType::F32, DType::I32, DType::Bool] {
            let types: Vec<DType> =
                (0..op.arity()).map(|k| if op.class() == Class::Select && k == 0 { DType::Bool } else { dtype }).collect();
            let lanes: Vec<Lane> = types.iter().map(|t| t.lane()).collect();
            let Some(lane) = op.lane(&lanes) else { continue };
            let mut b = Builder::new(&[420], 0);
            let values: Vec<u16> = types.iter().map(|&t| b.typed(t, &[1])).collect();
            let values: Vec<u16> = values.into_iter().map(|k| b.inst(Inst::Load(k))).collect();
            let y = b.op(op, &values);
            let out = b.typed(
                if lane == Lane::F32 {
                    DType::F32
                } else if lane == Lane::I32 {
                    DType::I32
                } else {
                    DType::Bool
                },
                &[1],
            );
            b.store(y, out);
            let mut case = Case::new(format!("{} of {dtype}", op.name()), b.spec, &mut Choices::new(1));
            for (k, &t) in types.iter().enumerate() {
                case.args[k] = arguments(t, k);
            }
            cases.push(case);
        }
    }
    assert!(cases.len() > ScalarOp::ALL.len());
    check(&cases, 1e-5);
}
