//! Scatter by every reduction, assignment to a part, and prefix reductions, against plain loops.

use slabwise_kernels::dtype::{DType, Lane};
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{
    Body, Dims, Operand, PrefixOp, PrefixReduce, ReduceOp, Scatter, SliceAssign, Spec,
};

use crate::harness::*;

/// A spec that writes its result itself.
fn own(body: Body, axes: &[Axis]) -> Spec {
    Spec {
        body,
        dims: sizes(axes),
        reduced: 0,
        operands: vec![],
        indices: vec![],
        code: vec![],
        stores: vec![],
    }
}

#[test]
fn scatters_reduce_in_row_major_order() {
    let mut random = Random(41);
    let ops = [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min];
    for round in 0..84 {
        let reduce = ops[round % 4];
        // The result of an outer index in several blocks, with an index for each element.
        let is_large = round >= 80;
        let dtype = if random.chance(2) {
            DType::F32
        } else {
            DType::I32
        };
        let axes = match is_large {
            true => [bounded(random.pick(1..3)), fixed(60), fixed(70)],
            false => [
                bounded(random.pick(0..BOUND + 1)),
                fixed(random.pick(0..40)),
                fixed(random.pick(1..4)),
            ],
        };
        let len = match is_large {
            true => 300,
            false => random.pick(1..12),
        };
        let result = [axes[0], fixed(len), axes[2]];
        let count = points(&axes);
        let indices: Vec<i32> = (0..count).map(|_| random.pick(0..len) as i32).collect();
        let bits: Vec<u32> = match dtype {
            DType::F32 => random.floats(count).iter().map(|v| v.to_bits()).collect(),
            _ => (0..count).map(|_| random.next() as u32).collect(),
        };
        let join = |a: u32, b: u32| -> u32 {
            let (x, y) = (f32::from_bits(a), f32::from_bits(b));
            let (i, j) = (a as i32, b as i32);
            let nan = x.is_nan() || y.is_nan();
            match (dtype, reduce) {
                (DType::F32, ReduceOp::Sum) => (x + y).to_bits(),
                (DType::F32, ReduceOp::Prod) => (x * y).to_bits(),
                (DType::F32, _) if nan => f32::NAN.to_bits(),
                (DType::F32, ReduceOp::Max) => (if y > x { y } else { x }).to_bits(),
                (DType::F32, _) => (if y < x { y } else { x }).to_bits(),
                (_, ReduceOp::Sum) => i.wrapping_add(j) as u32,
                (_, ReduceOp::Prod) => i.wrapping_mul(j) as u32,
                (_, ReduceOp::Max) => i.max(j) as u32,
                _ => i.min(j) as u32,
            }
        };
        let nothing = match (dtype, reduce) {
            (DType::F32, ReduceOp::Sum) | (DType::I32, ReduceOp::Sum) => 0,
            (DType::F32, ReduceOp::Prod) => 1f32.to_bits(),
            (DType::F32, ReduceOp::Max) => f32::NEG_INFINITY.to_bits(),
            (DType::F32, _) => f32::INFINITY.to_bits(),
            (_, ReduceOp::Prod) => 1,
            (_, ReduceOp::Max) => i32::MIN as u32,
            _ => i32::MAX as u32,
        };
        let mut expected = vec![nothing; points(&result)];
        for ((mut at, &v), &k) in coordinates(&axes).zip(&bits).zip(&indices) {
            at[1] = k as usize;
            let to = &mut expected[position(&at, &result)];
            *to = join(*to, v);
        }
        let contiguous = random.chance(2);
        let body = Body::Scatter(Scatter {
            axis: 1,
            reduce,
            space: sizes(&axes),
            value: layout(&mut random, dtype, &axes, contiguous),
            index: layout(&mut random, DType::I32, &axes, contiguous),
        });
        let out = layout(&mut random, dtype, &result, contiguous);
        let spec = storing(body, sizes(&result), out, None);
        let given = [Some(Values(bits)), Some(Values::i32(&indices)), None];
        let got = run(&spec, axes[0].value, &given).unwrap();
        assert_same(
            dtype.lane(),
            &got[2],
            &expected,
            &format!("round {round} by {reduce:?}"),
        );
    }
}

#[test]
fn a_part_is_replaced_in_place_or_in_a_copy() {
    let mut random = Random(42);
    for round in 0..120 {
        let dtype = [DType::F32, DType::I32, DType::F16, DType::U8][round % 4];
        let mask = u32::MAX >> (32 - 8 * dtype.bytes());
        let axes = [
            bounded(random.pick(0..BOUND + 1)),
            fixed(random.pick(1..30)),
            fixed(random.pick(1..40)),
        ];
        let (mut start, mut step, mut space) = (vec![0; 3], vec![1; 3], axes.to_vec());
        for a in 1..3 {
            let n = axes[a].value;
            (start[a], step[a]) = (random.pick(0..n), random.pick(1..3));
            space[a] = fixed(random.pick(0..(n - 1 - start[a]) / step[a] + 2));
        }
        // Moved along one of the axes, by one number for each slice or for all.
        let axis = random.pick(1..3);
        let span = (space[axis].value.max(1) - 1) * step[axis];
        let room = axes[axis].value - 1 - start[axis] - span;
        let mut own_places = space.clone();
        own_places[axis] = fixed(1);
        if random.chance(2) {
            own_places = vec![fixed(1); 3];
        }
        let moves = random.chance(2);
        let contiguous = random.chance(2);
        let mut at = layout(&mut random, DType::I32, &own_places, contiguous);
        for (stride, own) in at.strides.iter_mut().zip(&own_places) {
            if own.size.is(1) {
                *stride = Size::ZERO;
            }
        }
        // Places outside of the room are moved into it.
        let places: Vec<i32> = (0..points(&own_places))
            .map(|_| random.pick(0..room + 3) as i32 - 1)
            .collect();
        let base: Vec<u32> = (0..points(&axes))
            .map(|_| random.next() as u32 & mask)
            .collect();
        let value: Vec<u32> = (0..points(&space))
            .map(|_| random.next() as u32 & mask)
            .collect();
        let mut expected = base.clone();
        let mut given_places = Vec::new();
        for (c, &v) in coordinates(&space).zip(&value) {
            let mut to: Vec<usize> = (0..3).map(|a| start[a] + c[a] * step[a]).collect();
            let from: Vec<usize> = c
                .iter()
                .zip(&own_places)
                .map(|(&c, own)| if own.size.is(1) { 0 } else { c })
                .collect();
            let place = places
                .get(position(&from, &own_places))
                .copied()
                .unwrap_or(0);
            given_places.push(place);
            if moves {
                to[axis] += place.clamp(0, room as i32) as usize;
            }
            expected[position(&to, &axes)] = v;
        }
        let result = layout(&mut random, dtype, &axes, contiguous);
        let in_place = random.chance(2);
        let numbers =
            |list: &[usize]| -> Dims { list.iter().map(|&n| Size::fixed(n as i64)).collect() };
        let body = Body::SliceAssign(Box::new(SliceAssign {
            base: (!in_place).then(|| layout(&mut random, dtype, &axes, contiguous)),
            space: sizes(&space),
            value: layout(&mut random, dtype, &space, contiguous),
            start: numbers(&start),
            step: step.iter().map(|&n| n as u32).collect(),
            place: moves.then_some((axis, at)),
            result,
        }));
        let mut given = Vec::new();
        given.extend((!in_place).then(|| Some(Values(base.clone()))));
        given.push(Some(Values(value)));
        given.extend(moves.then_some(Some(Values::i32(&given_places))));
        given.push(in_place.then_some(Values(base)));
        let got = run(&own(body, &axes), axes[0].value, &given).unwrap();
        assert_same(
            Lane::I32,
            got.last().unwrap(),
            &expected,
            &format!("round {round}"),
        );
    }
}

#[test]
fn prefix_reductions_are_those_of_a_plain_loop() {
    let mut random = Random(43);
    let ops = [
        PrefixOp::Sum,
        PrefixOp::Linear,
        PrefixOp::LogSumExp,
        PrefixOp::ArgMax,
        PrefixOp::ArgMin,
    ];
    for round in 0..150 {
        let op = ops[round % 5];
        let finds = matches!(op, PrefixOp::ArgMax | PrefixOp::ArgMin);
        let float = op == PrefixOp::LogSumExp || random.chance(2);
        let dtype = if float { DType::F32 } else { DType::I32 };
        let axes = [
            bounded(random.pick(0..BOUND + 1)),
            fixed(random.pick(1..5)),
            fixed(random.pick(0..30)),
        ];
        let (count, len) = (points(&axes), axes[2].value);
        let mut numbers = |special: bool| -> Vec<u32> {
            match (float, special) {
                (true, true) => random.floats(count),
                (true, false) => random.finite(count),
                _ => vec![],
            }
            .iter()
            .map(|v| v.to_bits())
            .chain(
                (0..if float { 0 } else { count })
                    .map(|at| (at as u32).wrapping_mul(2_654_435_761) >> 29),
            )
            .collect()
        };
        let (x, factor) = (numbers(finds), numbers(false));
        let (reverse, exclusive) = (random.chance(2), !finds && random.chance(2));
        let number = |bits: u32| {
            if float {
                f64::from(f32::from_bits(bits))
            } else {
                f64::from(bits as i32)
            }
        };
        let mut expected = vec![0f64; count];
        for row in 0..count / len.max(1) {
            let (mut state, mut exponentials, mut best) = (0.0, 0.0, None::<usize>);
            for k in 0..len {
                let at = row * len + if reverse { len - 1 - k } else { k };
                let before = if op == PrefixOp::LogSumExp {
                    f64::ln(exponentials)
                } else {
                    state
                };
                let v = number(x[at]);
                state = match op {
                    PrefixOp::Sum => state + v,
                    PrefixOp::Linear => state * number(factor[at]) + v,
                    _ => 0.0,
                };
                // Magnitudes are small: the plain sum does not overflow.
                exponentials += v.exp();
                let beyond = |b: usize| {
                    let b = number(x[b]);
                    let order = if op == PrefixOp::ArgMax {
                        v >= b
                    } else {
                        v <= b
                    };
                    v.is_nan() || (!b.is_nan() && order)
                };
                if best.is_none_or(beyond) {
                    best = Some(at);
                }
                expected[at] = match op {
                    _ if exclusive => before,
                    PrefixOp::LogSumExp => f64::ln(exponentials),
                    PrefixOp::ArgMax | PrefixOp::ArgMin => (best.unwrap() - row * len) as f64,
                    _ => state,
                };
            }
        }
        let contiguous = random.chance(2);
        let result = if finds { DType::I32 } else { dtype };
        let body = Body::PrefixReduce(PrefixReduce {
            op,
            exclusive,
            reverse,
            source: layout(&mut random, dtype, &axes, contiguous),
            factor: (op == PrefixOp::Linear).then(|| layout(&mut random, dtype, &axes, contiguous)),
            result: layout(&mut random, result, &axes, contiguous),
        });
        let mut given = vec![Some(Values(x))];
        given.extend((op == PrefixOp::Linear).then_some(Some(Values(factor))));
        given.push(None);
        let got = run(&own(body, &axes), axes[0].value, &given).unwrap();
        for (at, (&bits, &e)) in got.last().unwrap().0.iter().zip(&expected).enumerate() {
            let (g, close) = if result == DType::F32 {
                let g = f64::from(f32::from_bits(bits));
                (g, g == e || (g - e).abs() <= 1e-6 * e.abs().max(1.0))
            } else {
                let wrapped = if finds { e as i32 } else { e as i64 as i32 };
                (f64::from(bits as i32), bits as i32 == wrapped)
            };
            assert!(
                close,
                "round {round} by {op:?}: element {at} is {g} instead of {e}"
            );
        }
    }
}

#[test]
fn malformed_specs_are_refused() {
    use slabwise_kernels::cpu::{Config, Isa, Kernel};
    use slabwise_kernels::size::Env;
    let axes = [fixed(3)];
    let operand = |dtype| Operand::contiguous(dtype, &sizes(&axes)).unwrap();
    let refused = |body: Body| {
        let config = Config {
            threads: 1,
            isa: Isa::Portable,
        };
        match Kernel::new(own(body, &axes), &Env::default(), &config) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("accepted"),
        }
    };
    let prefix_reduce = |op, factor, exclusive| {
        Body::PrefixReduce(PrefixReduce {
            op,
            exclusive,
            reverse: false,
            source: operand(DType::F32),
            factor,
            result: operand(DType::F32),
        })
    };
    assert!(refused(prefix_reduce(PrefixOp::Linear, None, false)).contains("Linear"));
    assert!(
        refused(prefix_reduce(
            PrefixOp::Sum,
            Some(operand(DType::F32)),
            false
        ))
        .contains("Sum")
    );
    assert!(refused(prefix_reduce(PrefixOp::ArgMax, None, true)).contains("result is f32"));
    let scatter = Body::Scatter(Scatter {
        axis: 0,
        reduce: ReduceOp::ArgMax,
        space: sizes(&axes),
        value: operand(DType::F32),
        index: operand(DType::I32),
    });
    assert!(refused(scatter).contains("a scatter by ArgMax"));
    let mut place = operand(DType::I32);
    let assign = |place| {
        Body::SliceAssign(Box::new(SliceAssign {
            base: None,
            space: sizes(&axes),
            value: operand(DType::F32),
            start: sizes(&[fixed(0)]),
            step: [1].into_iter().collect(),
            place: Some((0, place)),
            result: operand(DType::F32),
        }))
    };
    assert!(refused(assign(place.clone())).contains("a part of"));
    place.strides[0] = Size::ZERO;
    place.dtype = DType::U8;
    assert!(refused(assign(place)).contains("the place is u8"));
}

/// A part that does not lie in the result.
#[test]
fn parts_outside_of_the_result_are_refused() {
    use slabwise_kernels::cpu::{Config, Isa, Kernel};
    use slabwise_kernels::memory::Memory;
    use slabwise_kernels::size::Env;
    let axes = [fixed(4)];
    for (start, step) in [(100, 1), (3, 1), (-1, 1), (1, 3)] {
        let values = [fixed(2)];
        let operand = |axes: &[Axis]| Operand::contiguous(DType::F32, &sizes(axes)).unwrap();
        let body = Body::SliceAssign(Box::new(SliceAssign {
            base: None,
            space: sizes(&values),
            value: operand(&values),
            start: [Size::fixed(start)].into_iter().collect(),
            step: [step].into_iter().collect(),
            place: None,
            result: operand(&axes),
        }));
        let config = Config {
            threads: 1,
            isa: Isa::Portable,
        };
        let kernel = Kernel::new(own(body, &axes), &Env::default(), &config).expect("a spec");
        let run = std::panic::catch_unwind(|| {
            let mut memory = Memory::new();
            let [value, result] = [8, 16].map(|bytes| memory.reserve(bytes).expect("memory"));
            let workspace = memory.reserve(kernel.workspace()).expect("memory");
            let team = slabwise_kernels::cpu::Team::new(1);
            let _ = kernel.run(
                &mut memory,
                &[value, result],
                &workspace,
                &Env::default(),
                &team,
            );
        });
        let message = run.expect_err("refused");
        let message = message.downcast_ref::<String>().expect("a text");
        assert!(message.contains("outside of the result"), "{message}");
    }
}

/// One region for two results that are written at the same points.
#[test]
#[should_panic(expected = "argument 1 is written and overlaps argument 2")]
fn two_results_in_one_region_are_refused() {
    use slabwise_kernels::cpu::{Config, Isa, Kernel, Team};
    use slabwise_kernels::memory::Memory;
    use slabwise_kernels::scalar::ScalarOp;
    use slabwise_kernels::size::Env;
    use slabwise_kernels::spec::{Inst, Store};
    let axes = [fixed(4)];
    let operand = || Operand::contiguous(DType::F32, &sizes(&axes)).unwrap();
    let spec = Spec {
        operands: vec![operand(), operand(), operand()],
        code: vec![
            Inst::Load(0),
            Inst::Op(ScalarOp::Exp, [0, 0, 0]),
            Inst::Op(ScalarOp::Sin, [1, 0, 0]),
        ],
        stores: vec![
            Store {
                value: 1,
                operand: 1,
            },
            Store {
                value: 2,
                operand: 2,
            },
        ],
        ..own(Body::Loop, &axes)
    };
    let config = Config {
        threads: 1,
        isa: Isa::Portable,
    };
    let kernel = Kernel::new(spec, &Env::default(), &config).expect("a spec");
    let mut memory = Memory::new();
    let [x, y] = [16, 16].map(|bytes| memory.reserve(bytes).expect("memory"));
    let workspace = memory.reserve(kernel.workspace()).expect("memory");
    let args = [x, y, y];
    let _ = kernel.run(
        &mut memory,
        &args,
        &workspace,
        &Env::default(),
        &Team::new(1),
    );
}

/// Sizes that grow as a symbol becomes smaller: workspaces are those of the bound.
#[test]
fn sizes_that_fall_as_a_symbol_grows_are_refused() {
    use slabwise_kernels::cpu::{Config, Isa, Kernel};
    use slabwise_kernels::scalar::ScalarOp;
    use slabwise_kernels::size::{Env, Symbol};
    use slabwise_kernels::spec::{Inst, Store};
    let falls = Size::fixed(1000)
        .checked_sub(Size::symbol(Symbol(0)))
        .expect("small");
    let operand = |dims: &Dims| Operand::contiguous(DType::F32, dims).unwrap();
    let dims: Dims = [falls].into_iter().collect();
    let spec = Spec {
        dims: dims.clone(),
        operands: vec![operand(&dims), operand(&dims)],
        code: vec![Inst::Load(0), Inst::Op(ScalarOp::Exp, [0, 0, 0])],
        stores: vec![Store {
            value: 1,
            operand: 1,
        }],
        ..own(Body::Loop, &[])
    };
    let config = Config {
        threads: 1,
        isa: Isa::Portable,
    };
    let bound = Env([999, 0, 0, 0, 0, 0, 0, 0]);
    let error = Kernel::new(spec, &bound, &config).err().expect("refused");
    assert!(error.to_string().contains("falls"), "{error}");
}
