//! Blocks as anchors use them, against the same sums point by point.

use super::*;
use crate::cpu::{Isa, Team};
use crate::random::philox;
use crate::scalar::ScalarOp;
use crate::size::{Env, Size};
use crate::spec::{Body, Dims, Inst, Matmul, Operand, Store};

fn below(seed: u32, count: &mut u32, n: usize) -> usize {
    *count += 1;
    philox([*count, 0, 0, 0], [seed, 1])[0] as usize % n
}

/// relu(acc + x) + y over a space of up to four axes, with x, y and the result in any layout.
#[test]
fn blocks_match_points() {
    for seed in 0..400 {
        let count = &mut 0;
        let mut pick = |n: usize| below(seed, count, n);
        let axes = 2 + pick(3);
        let dims: Vec<usize> = (0..axes).map(|_| [1, 2, 3, 7, 16, 40][pick(6)]).collect();
        let mut operand = |whole: bool| {
            let mut order: Vec<usize> = (0..axes).collect();
            if pick(3) == 0 {
                order.swap(pick(axes), pick(axes));
            }
            let mut strides: Dims = (0..axes).map(|_| Size::ZERO).collect();
            let mut stride = 1;
            for &axis in order.iter().rev() {
                if whole || pick(3) > 0 {
                    strides[axis] = Size::fixed(stride);
                    stride *= dims[axis] as i64 + i64::from(pick(4) == 0);
                }
            }
            Operand {
                dtype: DType::F32,
                offset: Size::fixed(pick(2) as i64),
                strides,
            }
        };
        let operands = vec![operand(false), operand(false), operand(true)];
        let sizes: Dims = dims.iter().map(|&d| Size::fixed(d as i64)).collect();
        let env = Env::default();
        let empty = Operand {
            dtype: DType::F32,
            offset: Size::ZERO,
            strides: sizes.clone(),
        };
        let spec = Spec {
            body: Body::Matmul(Matmul {
                in_order: true,
                k: Size::ONE,
                a: empty.clone(),
                b: empty,
            }),
            dims: sizes.clone(),
            reduced: 0,
            indices: vec![],
            code: vec![
                Inst::Acc,
                Inst::Load(0),
                Inst::Op(ScalarOp::Add, [0, 1, 0]),
                Inst::Op(ScalarOp::Relu, [2, 0, 0]),
                Inst::Load(1),
                Inst::Op(ScalarOp::Add, [3, 4, 0]),
            ],
            stores: vec![Store {
                value: 5,
                operand: 2,
            }],
            operands,
        };
        let mut data: Vec<Vec<f32>> = spec
            .operands
            .iter()
            .map(|o| vec![0.0; o.extent(&sizes, &env) as usize])
            .collect();
        for (k, array) in data.iter_mut().enumerate() {
            array
                .iter_mut()
                .enumerate()
                .for_each(|(i, x)| *x = ((i * 7 + k * 3) % 13) as f32 - 6.0);
        }
        let row_axis = pick(axes - 1);
        let origin: Vec<usize> = dims.iter().map(|&d| pick(d)).collect();
        let rows = 1 + pick(dims[row_axis] - origin[row_axis]);
        let (after, start) = (row_axis + 1..axes).fold((1, 0), |(n, p), axis| {
            (n * dims[axis], p * dims[axis] + origin[axis])
        });
        let cols = 1 + pick(after - start);
        let at = |o: &Operand, r: usize, c: usize| {
            let mut point = origin.clone();
            point[row_axis] += r;
            let mut rest = start + c;
            for axis in (row_axis + 1..axes).rev() {
                point[axis] = rest % dims[axis];
                rest /= dims[axis];
            }
            let steps = o
                .strides
                .iter()
                .zip(&point)
                .map(|(s, &p)| s.at(&env) as usize * p);
            o.offset.at(&env) as usize + steps.sum::<usize>()
        };
        // The anchor's values are in a separate buffer, or in the result if its rows can hold them.
        let out = &spec.operands[2];
        let in_place =
            cols > 1 && (0..cols).all(|c| at(out, 0, c) == at(out, 0, 0) + c) && pick(2) == 0;
        let stride = if in_place {
            out.strides[row_axis].at(&env) as usize
        } else {
            cols + pick(20)
        };
        let acc_value = |r: usize, c: usize| ((r * 5 + c * 11) % 17) as f32 - 8.0;
        let mut acc = vec![f32::NAN; rows * stride + cols];
        for r in 0..rows {
            for c in 0..cols {
                let to = if in_place {
                    &mut data[2][at(out, r, c)]
                } else {
                    &mut acc[r * stride + c]
                };
                *to = acc_value(r, c);
            }
        }
        let mut expected = data[2].clone();
        for r in 0..rows {
            for c in 0..cols {
                let value = (acc_value(r, c) + data[0][at(&spec.operands[0], r, c)]).max(0.0);
                expected[at(out, r, c)] = value + data[1][at(&spec.operands[1], r, c)];
            }
        }
        for isa in Isa::available() {
            let mut arrays = data.clone();
            let args: Vec<*mut u8> = arrays.iter_mut().map(|a| a.as_mut_ptr().cast()).collect();
            let code = TileCode::new(&spec, &env, &Config { threads: 1, isa }).expect("valid");
            let team = Team::new(1);
            let launch = Launch {
                args: &args,
                workspace: std::ptr::null_mut(),
                env: &env,
                team: &team,
                part: None,
            };
            let mut scratch = vec![[u64::MAX; 8]; code.scratch_bytes() / 64 + 1];
            let scratch = scratch.as_mut_ptr().cast::<u8>();
            let from = if in_place {
                args[2].cast::<u32>().wrapping_add(at(out, 0, 0))
            } else {
                acc.as_mut_ptr().cast()
            };
            // SAFETY: the block lies inside the space, the arrays hold all of it, and the scratch
            // memory was made to measure.
            unsafe {
                let scratch = scratch.add(scratch.align_offset(64));
                code.bind(&spec, &launch)
                    .block(&origin, row_axis, rows, cols, from, stride, scratch);
            }
            assert_eq!(
                arrays[2], expected,
                "seed {seed}, {isa}: {rows} × {cols} at {origin:?}, rows along {row_axis} of {dims:?}\n{spec:#?}"
            );
        }
    }
}
