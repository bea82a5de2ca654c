//! Single cases that random programs rarely contain.

use std::time::{Duration, Instant};

use slabwise_kernels::cpu::{Config, Isa, Kernel, Team};
use slabwise_kernels::dtype::{DType, Lane};
use slabwise_kernels::memory::Memory;
use slabwise_kernels::random::uniform;
use slabwise_kernels::scalar::{ScalarOp, Value};
use slabwise_kernels::size::{Env, Size, Symbol};
use slabwise_kernels::spec::{Inst, ReduceOp, Spec};

use crate::builder::Builder;
use crate::reference;
use crate::support::{Bytes, Choices, run_all};

fn le(x: &[i32]) -> Vec<u8> {
    x.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// Reduces `[rows, cols]` along columns or, transposed, along rows.
fn reduce(op: ReduceOp, x: &[f32], rows: i64, cols: i64, transposed: bool) -> Vec<Bytes> {
    let mut b = Builder::new(&[rows, cols], 1);
    let v = b.load(if transposed { &[1, 7] } else { &[7, 1] });
    let y = b.reduce(op, v);
    let finds = matches!(op, ReduceOp::ArgMax | ReduceOp::ArgMin);
    let out = b.typed(if finds { DType::I32 } else { DType::F32 }, &[1, 0]);
    b.store(y, out);
    let mut bytes = Bytes::new();
    bytes.push_f32(x);
    bytes.push_f32(&vec![f32::NAN; rows as usize]);
    let env = Env::default();
    run_all(&b.spec, &env, &env, &bytes)
        .into_iter()
        .map(|(_, run)| run)
        .collect()
}

/// Whether the second of two threads takes chunks of a loop, in the first of some runs in which it
/// is not late: then it writes to its part of the workspace.
fn is_shared(spec: Spec) -> bool {
    let (env, threads) = (Env::default(), 2);
    let config = Config {
        threads,
        isa: Isa::detect(),
    };
    let kernel = Kernel::new(spec, &env, &config).expect("a valid spec");
    let (team, mut memory) = (Team::new(threads), Memory::new());
    let arguments = kernel.spec().arguments();
    let regions = arguments.iter().map(|(operand, dims, _)| {
        let bytes = operand.extent(dims, &env) * 4;
        memory.reserve(bytes).expect("memory")
    });
    let regions: Vec<_> = regions.collect();
    let workspace = memory.reserve(kernel.workspace()).expect("memory");
    let each = workspace.bytes / threads as u64;
    let own = workspace.part(each, each);
    memory.bytes_mut(&own).fill(0xFF);
    let deadline = Instant::now() + Duration::from_secs(20);
    while Instant::now() < deadline {
        let run = kernel.run(&mut memory, &regions, &workspace, &env, &team);
        run.expect("no fault");
        if memory.bytes(&own).iter().any(|&byte| byte != 0xFF) {
            return true;
        }
    }
    false
}

#[test]
fn threads_share_small_loops_over_long_rows() {
    let mut b = Builder::new(&[64, 256], 0);
    // Parts of longer rows, so that the rows do not join to one.
    let x = b.load(&[1024, 1]);
    let y = b.op(ScalarOp::Exp, &[x]);
    let out = b.operand(&[256, 1]);
    b.store(y, out);
    assert!(is_shared(b.spec));
}

#[test]
fn threads_share_small_reductions_of_long_code() {
    let mut b = Builder::new(&[512, 4], 1);
    let x = b.load(&[4, 1]);
    let mut y = x;
    for _ in 0..60 {
        y = b.op(ScalarOp::Mul, &[y, x]);
    }
    let sum = b.reduce(ReduceOp::Sum, y);
    let out = b.operand(&[1, 0]);
    b.store(sum, out);
    assert!(is_shared(b.spec));
}

#[test]
fn workspaces_are_in_proportion_to_small_spaces() {
    let config = Config {
        threads: 2,
        isa: Isa::detect(),
    };
    let softmax = |rows: i64, cols: i64| {
        let mut b = Builder::new(&[rows, cols], 1);
        let x = b.load(&[cols, 1]);
        let top = b.reduce(ReduceOp::Max, x);
        let less = b.op(ScalarOp::Sub, &[x, top]);
        let e = b.op(ScalarOp::Exp, &[less]);
        let sum = b.reduce(ReduceOp::Sum, e);
        let y = b.op(ScalarOp::Div, &[e, sum]);
        let out = b.operand(&[cols, 1]);
        b.store(y, out);
        Kernel::new(b.spec, &Env::default(), &config)
            .expect("a valid spec")
            .workspace()
    };
    let (small, large) = (softmax(4, 3), softmax(64, 64));
    assert!(
        small <= 2 * 8 * 1024 && 3 * small < large,
        "{small} bytes for 12 points, {large} for 4096"
    );
}

#[test]
fn nan_propagates_and_is_found_first() {
    let nan = f32::NAN;
    let inf = f32::INFINITY;
    let x = [
        [1.0, 5.0, nan, 9.0, nan, 0.0, 2.0],
        [3.0, 3.0, -1.0, -1.0, 3.0, 0.0, -1.0],
        [-0.0, 0.0, -0.0, 0.0, 0.0, 0.0, 0.0],
        [-inf; 7],
        [inf, -inf, inf, -inf, 0.0, 1.0, 2.0],
    ];
    for transposed in [false, true] {
        let mut flat = vec![0.0; 49];
        for (r, row) in x.iter().enumerate() {
            for (c, &v) in row.iter().enumerate() {
                flat[if transposed { c * 7 + r } else { r * 7 + c }] = v;
            }
        }
        for run in reduce(ReduceOp::Max, &flat, 5, 7, transposed) {
            let y = run.f32s(1);
            assert!(y[0].is_nan());
            assert_eq!(y[1..], [3.0, 0.0, -inf, inf]);
        }
        for run in reduce(ReduceOp::Min, &flat, 5, 7, transposed) {
            assert!(run.f32s(1)[0].is_nan());
            assert_eq!(run.f32s(1)[1..], [-1.0, 0.0, -inf, -inf]);
        }
        for run in reduce(ReduceOp::ArgMax, &flat, 5, 7, transposed) {
            assert_eq!(run.i32s(1), [2, 0, 0, 0, 0]);
        }
        for run in reduce(ReduceOp::ArgMin, &flat, 5, 7, transposed) {
            assert_eq!(run.i32s(1), [2, 2, 0, 0, 1]);
        }
    }
}

#[test]
fn nothing_folds_to_the_identity() {
    let inf = f32::INFINITY;
    for (op, identity) in [
        (ReduceOp::Sum, 0.0),
        (ReduceOp::Prod, 1.0),
        (ReduceOp::Max, -inf),
        (ReduceOp::Min, inf),
    ] {
        for run in reduce(op, &[], 3, 0, false) {
            assert_eq!(run.f32s(1), [identity; 3]);
        }
    }
    for run in reduce(ReduceOp::ArgMax, &[], 3, 0, false) {
        assert_eq!(run.i32s(1), [0; 3]);
    }
    for (op, identity) in [(ReduceOp::Any, 0u8), (ReduceOp::All, 1)] {
        let mut b = Builder::new(&[2, 0], 1);
        let k = b.typed(DType::Bool, &[0, 1]);
        let v = b.inst(Inst::Load(k));
        let y = b.reduce(op, v);
        let out = b.typed(DType::Bool, &[1, 0]);
        b.store(y, out);
        let mut bytes = Bytes::new();
        bytes.push(&[]);
        bytes.push(&[9, 9]);
        for (_, run) in run_all(&b.spec, &Env::default(), &Env::default(), &bytes) {
            assert_eq!(run.all[run.args[1].0..][..2], [identity; 2]);
        }
    }
}

#[test]
fn products_and_truth_values() {
    let mut b = Builder::new(&[2, 40], 1);
    let v = b.load(&[40, 1]);
    let product = b.reduce(ReduceOp::Prod, v);
    let two = b.number(2.0);
    let large = b.op(ScalarOp::Ge, &[v, two]);
    let any = b.reduce(ReduceOp::Any, large);
    let all = b.reduce(ReduceOp::All, large);
    for (value, dtype) in [
        (product, DType::F32),
        (any, DType::Bool),
        (all, DType::Bool),
    ] {
        let out = b.typed(dtype, &[1, 0]);
        b.store(value, out);
    }
    let mut bytes = Bytes::new();
    bytes.push_f32(
        &[
            [2.0; 40],
            std::array::from_fn(|i| if i == 33 { 3.0 } else { -1.0 }),
        ]
        .concat(),
    );
    bytes.push_f32(&[0.0; 2]);
    bytes.push(&[9; 2]);
    bytes.push(&[9; 2]);
    for (_, run) in run_all(&b.spec, &Env::default(), &Env::default(), &bytes) {
        assert_eq!(run.f32s(1), [2f32.powi(40), -3.0]);
        assert_eq!(run.all[run.args[2].0..][..2], [1, 1]);
        assert_eq!(run.all[run.args[3].0..][..2], [1, 0]);
    }
}

/// Uniform numbers by index, in order and out of order, are those of the generator.
#[test]
fn uniform_is_the_generator() {
    for strides in [[50, 1], [1, 30], [0, 7], [-50, -1]] {
        let mut b = Builder::new(&[30, 50], 0);
        let state = b.typed(DType::I32, &[0, 0]);
        b.spec
            .indices
            .push(strides.map(Size::fixed).into_iter().collect());
        let index = b.inst(Inst::Index(0));
        let u = b.inst(Inst::Uniform {
            state,
            stream: 5,
            index,
        });
        let out = b.operand(&[50, 1]);
        b.store(u, out);
        let mut bytes = Bytes::new();
        bytes.push(&le(&[0x1234_5678, -2, 17]));
        bytes.push_f32(&vec![9.0; 1500]);
        for (_, run) in run_all(&b.spec, &Env::default(), &Env::default(), &bytes) {
            for (i, y) in run.f32s(1).iter().enumerate() {
                let index = (strides[0] * (i as i64 / 50) + strides[1] * (i as i64 % 50)) as u32;
                assert_eq!(*y, uniform(0xFFFF_FFFE_1234_5678, 17, 5, index));
            }
        }
    }
}

/// Two arguments exchanged in place: both are read before either is written.
#[test]
fn exchange_in_place() {
    for n in [16, 1000, 1024, 5000] {
        let mut b = Builder::new(&[n], 0);
        let (x, y) = (b.load(&[1]), b.load(&[1]));
        b.store(x, 1);
        b.store(y, 0);
        let mut bytes = Bytes::new();
        let (a, c): (Vec<f32>, Vec<f32>) = (0..n).map(|i| (i as f32, -(i as f32))).unzip();
        bytes.push_f32(&a);
        bytes.push_f32(&c);
        for (_, run) in run_all(&b.spec, &Env::default(), &Env::default(), &bytes) {
            assert_eq!((run.f32s(0), run.f32s(1)), (c.clone(), a.clone()));
        }
    }
}

/// A value kept between two passes over columns that take many tiles, compared exactly.
#[test]
fn kept_values_of_long_columns() {
    for (outer, len, inner) in [(2, 300, 40), (1, 2000, 17), (3, 70, 300)] {
        let mut b = Builder::new(&[outer, inner, len], 1);
        let strides = [len * inner, 1, inner];
        let v = b.load(&strides);
        let largest = b.reduce(ReduceOp::Max, v);
        let below = b.op(ScalarOp::Sub, &[largest, v]);
        let sum = b.reduce(ReduceOp::Sum, below);
        let y = b.op(ScalarOp::Sub, &[below, sum]);
        let out = b.operand(&strides);
        b.store(y, out);
        let n = (outer * len * inner) as usize;
        let mut bytes = Bytes::new();
        bytes.push_f32(&(0..n).map(|i| ((i * 37) % 101) as f32).collect::<Vec<_>>());
        bytes.push_f32(&vec![0.0; n]);
        let env = Env::default();
        let expected = reference::run(&b.spec, &env, &bytes);
        for (isa, run) in run_all(&b.spec, &env, &env, &bytes) {
            assert!(run.all == expected, "{isa}: {outer} × {len} × {inner}");
        }
    }
}

/// The nearest number with so many significant bits and no smaller step than `least`, halves to
/// even, in double precision.
fn nearest(x: f32, bits: i32, least: f64, most: f64) -> f64 {
    let x = f64::from(x);
    if x == 0.0 || !x.is_finite() {
        return x;
    }
    let exponent = (x.abs().to_bits() >> 52) as i32 - 1023;
    let step = 2f64.powi(exponent - bits + 1).max(least);
    let rounded = (x / step).round_ties_even() * step;
    // Half a step beyond the largest number, rounding goes to infinity.
    if rounded.abs() > most {
        f64::INFINITY.copysign(x)
    } else {
        rounded
    }
}

/// Halves are loaded exactly, all of them, and stored as the nearest there is.
#[test]
fn halves_widen_exactly_and_round_to_nearest() {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    let floats: Vec<f32> = (0..40_000u32)
        .map(|i| f32::from_bits(i.wrapping_mul(107_377)))
        .chain((0..4000).map(|i| (i as f32 - 2000.0) * 2.0f32.powi(-26)))
        .chain([
            65_504.0,
            65_519.9,
            65_520.0,
            1e30,
            f32::INFINITY,
            2049.0,
            2051.0,
            257.0,
            259.0,
        ])
        .filter(|x| !x.is_nan())
        .collect();
    for (dtype, bits, least, most) in [
        (DType::F16, 11, 2f64.powi(-24), 65_504.0),
        (
            DType::BF16,
            8,
            2f64.powi(-133),
            f64::from(f32::from_bits(0x7f7f_0000)),
        ),
    ] {
        let mut b = Builder::new(&[all.len() as i64], 0);
        let k = b.typed(dtype, &[1]);
        let v = b.inst(Inst::Load(k));
        let out = b.typed(DType::F32, &[1]);
        b.store(v, out);
        let mut bytes = Bytes::new();
        bytes.push(&all.iter().flat_map(|h| h.to_le_bytes()).collect::<Vec<_>>());
        bytes.push_f32(&vec![0.5; all.len()]);
        let env = Env::default();
        for (isa, run) in run_all(&b.spec, &env, &env, &bytes) {
            for (h, x) in all.iter().zip(run.f32s(1)) {
                // Sign, exponent and fraction as the formats define them.
                let (fraction_bits, bias) = (bits - 1, if dtype == DType::F16 { 15 } else { 127 });
                let (sign, rest) = (if h >> 15 == 1 { -1.0 } else { 1.0 }, i32::from(h & 0x7fff));
                let (exponent, fraction) = (
                    rest >> fraction_bits,
                    f64::from(rest & ((1 << fraction_bits) - 1)),
                );
                let part = fraction * 2f64.powi(-fraction_bits);
                let expected = match exponent {
                    0 => sign * part * 2f64.powi(1 - bias),
                    e if e == 2 * bias + 1 => {
                        if fraction == 0.0 {
                            sign * f64::INFINITY
                        } else {
                            f64::NAN
                        }
                    }
                    e => sign * (1.0 + part) * 2f64.powi(e - bias),
                };
                assert!(
                    f64::from(x) == expected || (x.is_nan() && expected.is_nan()),
                    "{isa}: {dtype} {h:#06x} is {x}, not {expected}"
                );
            }
        }
        // Rounded in a register, and by a store and a load: the same.
        let mut b = Builder::new(&[floats.len() as i64], 0);
        let x = b.load(&[1]);
        let rounded = b.inst(Inst::Op(dtype.rounding().unwrap(), [x, 0, 0]));
        let kept = b.typed(DType::F32, &[1]);
        let stored = b.typed(dtype, &[1]);
        b.store(rounded, kept);
        b.store(x, stored);
        let mut bytes = Bytes::new();
        bytes.push_f32(&floats);
        bytes.push_f32(&vec![0.5; floats.len()]);
        bytes.push(&vec![0; 2 * floats.len()]);
        for (isa, run) in run_all(&b.spec, &env, &env, &bytes) {
            let halves = &run.all[run.args[2].0..][..2 * floats.len()];
            for ((x, got), half) in floats.iter().zip(run.f32s(1)).zip(halves.chunks_exact(2)) {
                let bits16 = u16::from_le_bytes([half[0], half[1]]);
                let widened = if dtype == DType::F16 {
                    half::f16::from_bits(bits16).to_f32()
                } else {
                    half::bf16::from_bits(bits16).to_f32()
                };
                let expected = nearest(*x, bits, least, most);
                assert!(
                    f64::from(got) == expected,
                    "{isa}: {x:e} rounds to {got:e} in {dtype}, not {expected:e}"
                );
                assert_eq!(got.to_bits(), widened.to_bits(), "{isa}: {x:e} in {dtype}");
            }
        }
    }
}

/// Transposition by loads and by stores, of every stored type.
#[test]
fn transposed_copies() {
    for dtype in DType::ALL {
        for (rows, cols) in [(70, 45), (3, 500), (500, 3), (129, 16)] {
            for by_store in [false, true] {
                let mut b = Builder::new(&[rows, cols], 0);
                let (forth, across) = ([cols, 1], [1, rows]);
                let k = b.typed(dtype, if by_store { &forth } else { &across });
                let v = b.inst(Inst::Load(k));
                let out = b.typed(dtype, if by_store { &across } else { &forth });
                b.store(v, out);
                let n = (rows * cols) as usize;
                let mut bytes = Bytes::new();
                bytes.push(
                    &(0..n * dtype.bytes())
                        .map(|i| {
                            if dtype == DType::Bool {
                                (i * 5 % 7 % 2) as u8
                            } else {
                                (i * 31 % 127) as u8
                            }
                        })
                        .collect::<Vec<_>>(),
                );
                bytes.push(&vec![0; n * dtype.bytes()]);
                let env = Env::default();
                let expected = reference::run(&b.spec, &env, &bytes);
                for (isa, run) in run_all(&b.spec, &env, &env, &bytes) {
                    assert!(run.all == expected, "{isa}: {rows} × {cols} of {dtype}");
                }
            }
        }
    }
}

#[test]
fn stores_saturate_bytes() {
    let mut b = Builder::new(&[6], 0);
    let v = b.load(&[1]);
    let out = b.typed(DType::U8, &[1]);
    b.store(v, out);
    let mut bytes = Bytes::new();
    bytes.push_f32(&[-1.0, 0.9, 255.0, 300.0, f32::NAN, f32::INFINITY]);
    bytes.push(&[7; 6]);
    for (_, run) in run_all(&b.spec, &Env::default(), &Env::default(), &bytes) {
        assert_eq!(run.all[run.args[1].0..][..6], [0, 0, 255, 255, 0, 255]);
    }
}

fn valid() -> Builder {
    let mut b = Builder::new(&[4, 5], 1);
    let x = b.load(&[5, 1]);
    let sum = b.reduce(ReduceOp::Sum, x);
    let out = b.operand(&[1, 0]);
    b.store(sum, out);
    b
}

/// Specs that no lowering makes are errors, not wrong results.
#[test]
fn broken_specs_are_refused() {
    let refused = |name: &str, break_it: &dyn Fn(&mut Spec)| {
        let mut spec = valid().spec;
        break_it(&mut spec);
        let result = Kernel::new(
            spec,
            &Env::default(),
            &Config {
                threads: 1,
                isa: Isa::Portable,
            },
        );
        assert!(result.is_err(), "{name} is accepted");
    };
    assert!(
        Kernel::new(
            valid().spec,
            &Env::default(),
            &Config {
                threads: 1,
                isa: Isa::Portable
            }
        )
        .is_ok()
    );
    refused("a load of no operand", &|s| s.code[0] = Inst::Load(9));
    refused("a later argument", &|s| {
        s.code[0] = Inst::Cast(1, Lane::F32)
    });
    refused("a store of no value", &|s| s.stores[0].value = 7);
    refused("a store to no operand", &|s| s.stores[0].operand = 7);
    refused("two stores to one operand", &|s| s.stores.push(s.stores[0]));
    refused("an anchor's value in a loop", &|s| s.code[0] = Inst::Acc);
    refused("a reduction of nothing", &|s| s.reduced = 0);
    refused("more reduced axes than axes", &|s| s.reduced = 3);
    refused("a truth value of floats", &|s| {
        s.code[1] = Inst::Reduce(ReduceOp::Any, 0)
    });
    refused("mixed lanes", &|s| {
        s.code.push(Inst::Const(Value::I32(1)));
        s.code.push(Inst::Op(ScalarOp::Add, [0, 2, 0]));
    });
    refused("a missing stride", &|s| s.operands[0].strides.truncate(1));
    refused("an index of nothing", &|s| s.code[0] = Inst::Index(0));
    refused("a random number of a float", &|s| {
        s.code[1] = Inst::Uniform {
            state: 0,
            stream: 0,
            index: 0,
        }
    });
    refused("nine axes", &|s| {
        s.dims = std::iter::repeat_n(Size::ONE, 9).collect();
        s.operands
            .iter_mut()
            .for_each(|o| o.strides = s.dims.clone());
    });
}

/// Memory safety does not depend on the caller: arguments that would be written twice in one place,
/// have negative strides or are unaligned panic.
#[test]
fn unsafe_arguments_panic() {
    let run = |change: &dyn Fn(&mut Spec), shift: usize| {
        let mut spec = valid().spec;
        change(&mut spec);
        let kernel = Kernel::new(
            spec,
            &Env::default(),
            &Config {
                threads: 1,
                isa: Isa::Portable,
            },
        )
        .expect("a valid spec");
        let mut bytes = Bytes::new();
        bytes.push_f32(&[1.0; 40]);
        bytes.push_f32(&[1.0; 40]);
        bytes.args[0].0 += shift;
        let team = Team::new(1);
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            bytes.run(&kernel, &Env::default(), &team)
        }))
        .is_err()
    };
    assert!(!run(&|_| (), 0));
    assert!(run(&|s| s.operands[1].strides[0] = Size::ZERO, 0));
    assert!(run(&|s| s.operands[0].strides[1] = Size::fixed(-1), 0));
    assert!(run(&|s| s.operands[0].strides[1] = Size::fixed(100), 0));
    assert!(run(&|_| (), 2));
}

/// A written argument may overlap a read one only if both begin at one byte and have the same
/// strides; the lengths of the regions do not matter.
#[test]
fn parts_are_computed_in_place_where_they_begin_together() {
    let run = |read: (usize, usize), written: (usize, usize), change: &dyn Fn(&mut Spec)| {
        let mut b = Builder::new(&[24], 0);
        let v = b.load(&[1]);
        let double = b.op(ScalarOp::Add, &[v, v]);
        let to = b.operand(&[1]);
        b.store(double, to);
        change(&mut b.spec);
        let mut bytes = Bytes::new();
        bytes.push_f32(&(0..64).map(|i| i as f32).collect::<Vec<_>>());
        bytes.push_same(0);
        let start = bytes.args[0].0;
        (bytes.args[0], bytes.args[1]) = ((start + read.0, read.1), (start + written.0, written.1));
        let kernel = Kernel::new(
            b.spec,
            &Env::default(),
            &Config {
                threads: 1,
                isa: Isa::Portable,
            },
        )
        .expect("a valid spec");
        let team = Team::new(1);
        let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            bytes.run(&kernel, &Env::default(), &team)
        }));
        let all: Vec<f32> = bytes.all[start..start + 256]
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect();
        ran.is_ok().then_some(all)
    };
    let doubled: Vec<f32> = (0..64)
        .map(|i| if i < 24 { 2.0 * i as f32 } else { i as f32 })
        .collect();
    for (read, written) in [
        ((0, 96), (0, 96)),
        ((0, 256), (0, 96)),
        ((0, 96), (0, 256)),
        ((0, 256), (0, 128)),
    ] {
        assert_eq!(
            run(read, written, &|_| ()),
            Some(doubled.clone()),
            "{read:?}, {written:?}"
        );
    }
    // Another first byte, longer than its region, or other strides.
    for (read, written) in [
        ((0, 256), (32, 96)),
        ((32, 96), (0, 256)),
        ((0, 256), (4, 96)),
        ((0, 96), (64, 96)),
        ((0, 256), (0, 92)),
    ] {
        assert_eq!(run(read, written, &|_| ()), None, "{read:?}, {written:?}");
    }
    assert_eq!(
        run((0, 256), (0, 256), &|s| s.operands[0].strides[0] =
            Size::fixed(2)),
        None
    );
    assert_eq!(
        run((0, 256), (0, 256), &|s| s.operands[0].offset =
            Size::fixed(1)),
        None
    );
    assert_eq!(
        run((0, 256), (0, 256), &|s| s.operands[1].strides[0] =
            Size::fixed(2)),
        None
    );
}

#[test]
fn sums_of_known_sizes_take_no_more_room_than_their_parts() {
    for (channels, points, down) in [
        (1, 70_000, false),
        (3, 30_011, false),
        (15, 9_000, true),
        (16, 8_192, false),
        (64, 2_048, true),
    ] {
        let mut b = Builder::new(&[channels, points], 1);
        let strides = if down { [1, channels] } else { [points, 1] };
        let v = b.load(&strides);
        let square = b.op(ScalarOp::Mul, &[v, v]);
        for value in [v, square] {
            let sum = b.reduce(ReduceOp::Sum, value);
            let out = b.typed(DType::F32, &[1, 0]);
            b.store(sum, out);
        }
        let mut bytes = Bytes::new();
        let x: Vec<f32> = (0..channels * points)
            .map(|i| (i * 7919 % 1013) as f32 / 64.0 - 7.0)
            .collect();
        bytes.push_f32(&x);
        bytes.push_f32(&vec![f32::NAN; channels as usize]);
        bytes.push_f32(&vec![f32::NAN; channels as usize]);
        let mut env = Env::default();
        env.0[0] = points as u32;
        let mut named = b.spec.clone();
        named.dims[1] = Size::symbol(Symbol(0));
        let config = Config {
            threads: 2,
            isa: Isa::detect(),
        };
        let workspace = |spec: &Spec| {
            Kernel::new(spec.clone(), &env, &config)
                .expect("a valid spec")
                .workspace()
        };
        assert!(
            workspace(&b.spec) < workspace(&named),
            "{channels} sums of {points}: {} bytes",
            workspace(&b.spec)
        );
        let known = run_all(&b.spec, &env, &env, &bytes);
        for ((isa, known), (_, bounded)) in known.iter().zip(run_all(&named, &env, &env, &bytes)) {
            let bits =
                |run: &Bytes, at| run.f32s(at).iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert!(
                [1, 2]
                    .iter()
                    .all(|&at| bits(known, at) == bits(&bounded, at)),
                "{channels} sums of {points} on {isa}"
            );
        }
    }
}

/// The sum of a short row has the same bits beside any number of other rows.
#[test]
fn short_rows_have_the_same_bits_beside_other_rows() {
    let mut c = Choices::new(71);
    for cols in [2, 3, 4, 5, 6, 7, 8, 10] {
        for (rows, outer) in [(3, 1), (200, 1), (1000, 1), (40, 3), (3, 40)] {
            let all = rows * outer * cols;
            let x: Vec<f32> = (0..all).map(|_| c.unit()).collect();
            let run = |rows: usize, outer: usize, x: &[f32]| {
                let dims = [outer as i64, rows as i64, cols as i64];
                let mut b = Builder::new(&dims, 1);
                let v = b.load(&[dims[1] * dims[2], dims[2], 1]);
                let square = b.op(ScalarOp::Mul, &[v, v]);
                let sum = b.reduce(ReduceOp::Sum, square);
                let y = b.op(ScalarOp::Div, &[v, sum]);
                // Transposed, so that the kept axes are not joined.
                let sums = b.operand(&[1, dims[0], 0]);
                let quotients = b.operand(&[dims[1] * dims[2], dims[2], 1]);
                b.store(sum, sums);
                b.store(y, quotients);
                let mut bytes = Bytes::new();
                bytes.push_f32(x);
                bytes.push_f32(&vec![f32::NAN; rows * outer]);
                bytes.push_f32(&vec![f32::NAN; rows * outer * cols]);
                let env = Env::default();
                let runs = run_all(&b.spec, &env, &env, &bytes);
                runs.into_iter()
                    .map(|(isa, run)| (isa, run.f32s(1), run.f32s(2)))
            };
            let whole: Vec<_> = run(rows, outer, &x).collect();
            for (r, row) in x.chunks(cols).enumerate() {
                // (A few rows of many are enough.)
                if r % 97 != 0 && r + 1 != rows * outer {
                    continue;
                }
                let two = [row, row].concat();
                for ((isa, sums, quotients), (_, sum, quotient)) in
                    whole.iter().zip(run(2, 1, &two))
                {
                    let at = r % rows * outer + r / rows;
                    let label = format!("{isa:?}, row {r} of {rows} × {outer}, {cols} elements");
                    assert_eq!(sums[at].to_bits(), sum[0].to_bits(), "{label}");
                    assert_eq!(quotients[r * cols..][..cols], quotient[..cols], "{label}");
                }
            }
        }
    }
}

/// As [docs/numerics.md](../../../docs/numerics.md) says.
#[test]
fn short_rows_are_added_from_left_to_right() {
    for rows in [1, 3, 200] {
        let mut b = Builder::new(&[rows, 4], 1);
        let x = b.load(&[4, 1]);
        let sum = b.reduce(ReduceOp::Sum, x);
        let sums = b.operand(&[1, 0]);
        b.store(sum, sums);
        let mut bytes = Bytes::new();
        bytes.push_f32(&[1e8, 1.0, -1e8, 1.0].repeat(rows as usize));
        bytes.push_f32(&vec![f32::NAN; rows as usize]);
        let env = Env::default();
        for (isa, run) in run_all(&b.spec, &env, &env, &bytes) {
            assert_eq!(
                run.f32s(1),
                vec![1.0; rows as usize],
                "{isa:?}, {rows} rows"
            );
        }
    }
}
