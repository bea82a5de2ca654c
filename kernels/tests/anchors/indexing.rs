use half::{bf16, f16};
use slabwise_kernels::cpu::Fault;
use slabwise_kernels::dtype::{DType, Lane};
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{Body, BoundsCheck, Gather, Operand, ReduceOp, Scatter, Spec};

use crate::harness::*;

/// A random space of one to four axes; the first may be known by its bound only.
fn space(random: &mut Random) -> Vec<Axis> {
    let rank = random.pick(1..5);
    let batch = random.pick(0..BOUND + 1);
    let large = if random.chance(6) { 3000 } else { 9 };
    let mut axes: Vec<Axis> = (0..rank).map(|_| fixed(random.pick(1..9))).collect();
    axes[rank - 1] = fixed(random.pick(1..large));
    axes[0] = if random.chance(2) {
        bounded(batch)
    } else {
        fixed(random.pick(0..12))
    };
    while points(&axes) > 20_000 {
        let longest = axes.iter().map(|axis| axis.value).max();
        axes.retain(|axis| Some(axis.value) != longest);
        axes.push(fixed(random.pick(1..50)));
    }
    axes
}

/// An index over a space: varying everywhere, or only along some axes (stride 0 along the others).
/// Returns the operand, its values over the whole space, and whether they are valid for `len`.
fn index(random: &mut Random, axes: &[Axis], len: usize, contiguous: bool) -> (Operand, Values) {
    let dtype = if len <= 256 && random.chance(2) {
        DType::U8
    } else {
        DType::I32
    };
    let mut own = axes.to_vec();
    for axis in &mut own {
        if random.chance(2) {
            *axis = fixed(axis.value.min(1));
        }
    }
    let mut operand = layout(random, dtype, &own, contiguous);
    let values: Vec<i32> = (0..points(&own))
        .map(|_| random.pick(0..len.max(1)) as i32)
        .collect();
    for (axis, stride) in own.iter().zip(&mut operand.strides) {
        if axis.size.is(1) {
            *stride = Size::ZERO;
        }
    }
    let repeated = coordinates(axes).map(|at| {
        let at: Vec<usize> = at
            .iter()
            .zip(&own)
            .map(|(&c, axis)| if axis.size.is(1) { 0 } else { c })
            .collect();
        values[position(&at, &own)]
    });
    (operand, Values::i32(&repeated.collect::<Vec<_>>()))
}

#[test]
fn gather_matches_plain_loops() {
    let mut random = Random(3);
    for round in 0..200 {
        let axes = space(&mut random);
        let axis = random.pick(0..axes.len());
        let len = random.pick(1..12);
        let dtype = DType::ALL[random.pick(0..DType::ALL.len())];
        let (lane, stored) = (dtype.lane(), dtype.lane().stored());
        let contiguous = random.chance(2);
        // The source: `axes` with the gathered axis `len` long. Its memory is filled in order of
        // address.
        let mut source_axes = axes.clone();
        source_axes[axis] = fixed(len);
        let mut source = layout(&mut random, dtype, &source_axes, contiguous);
        let axis_stride = std::mem::replace(&mut source.strides[axis], Size::ZERO);
        let (index, indices) = index(&mut random, &axes, len, contiguous);
        let element = |at: &[usize], k: usize| {
            let env = slabwise_kernels::size::Env([axes[0].value as u32; 8]);
            let base = source.offset.usize_at(&env) + k * axis_stride.usize_at(&env);
            base + at
                .iter()
                .zip(&source.strides)
                .map(|(c, s)| c * s.usize_at(&env))
                .sum::<usize>()
        };
        // Elements that the gather may reach, in order of address, as the harness fills them.
        // Values name their address.
        let mut reached: Vec<usize> = coordinates(&axes)
            .flat_map(|at| (0..len).map(move |k| (at.clone(), k)))
            .map(|(at, k)| element(&at, k))
            .collect();
        reached.sort_unstable();
        reached.dedup();
        // The stored value; halves hold the first 256 integers.
        let value = |element: usize| match dtype {
            DType::F32 => (element as f32).to_bits(),
            DType::F16 => f16::from_f32((element % 251) as f32).to_bits().into(),
            DType::BF16 => bf16::from_f32((element % 251) as f32).to_bits().into(),
            DType::I32 => element as u32,
            DType::U8 => (element % 251) as u32,
            DType::Bool => (element * 7 / 3 % 2) as u32,
        };
        let widened = |element: usize| {
            if dtype.is_half() {
                ((element % 251) as f32).to_bits()
            } else {
                value(element)
            }
        };
        let expected: Vec<u32> = coordinates(&axes)
            .zip(&indices.0)
            .map(|(at, &k)| widened(element(&at, k as usize)))
            .collect();
        let body = Body::Gather(Gather {
            source: source.clone(),
            index,
            axis_stride,
            axis_len: Size::fixed(len as i64),
        });
        let out = layout(&mut random, stored, &axes, contiguous);
        let spec = storing(body, sizes(&axes), out, None);
        let given = [
            Some(Values(reached.iter().map(|&e| value(e)).collect())),
            Some(indices),
            None,
        ];
        let got = run(&spec, axes[0].value, &given).unwrap();
        assert_same(
            lane,
            &got[2],
            &expected,
            &format!("round {round}, {spec:?}"),
        );
    }
}

#[test]
fn indices_outside_stay_inside_memory() {
    let axes = [fixed(4)];
    let index = Operand::contiguous(DType::I32, &sizes(&axes)).unwrap();
    let source = Operand {
        dtype: DType::F32,
        offset: Size::ZERO,
        strides: [Size::ZERO].into_iter().collect(),
    };
    let indices = Values::i32(&[-1, 0, 3, i32::MAX]);
    let out = Operand::contiguous(DType::F32, &sizes(&axes)).unwrap();
    let gather = |axis_len| {
        Body::Gather(Gather {
            source: source.clone(),
            index: index.clone(),
            axis_stride: Size::ONE,
            axis_len: Size::fixed(axis_len),
        })
    };
    let run = |axis_len: i64, given: &[f32]| {
        let spec = storing(gather(axis_len), sizes(&axes), out.clone(), None);
        run(
            &spec,
            1,
            &[Some(Values::f32(given)), Some(indices.clone()), None],
        )
        .unwrap()[2]
            .clone()
    };
    assert_eq!(run(3, &[5.0, 6.0, 7.0]), Values::f32(&[5.0, 5.0, 7.0, 7.0]));
    assert_eq!(run(0, &[]), Values::f32(&[0.0; 4]));
    let scatter = Body::Scatter(Scatter {
        axis: 0,
        reduce: ReduceOp::Sum,
        space: sizes(&axes),
        value: out.clone(),
        index: index.clone(),
    });
    let result = Operand::contiguous(DType::F32, &[Size::fixed(3)]).unwrap();
    let spec = storing(scatter, sizes(&[fixed(3)]), result, None);
    let got = crate::harness::run(
        &spec,
        1,
        &[
            Some(Values::f32(&[1.0, 2.0, 4.0, 8.0])),
            Some(indices.clone()),
            None,
        ],
    )
    .unwrap();
    assert_eq!(got[2], Values::f32(&[2.0, 0.0, 0.0]));
}

#[test]
fn scatter_adds_in_row_major_order() {
    let mut random = Random(4);
    for round in 0..200 {
        let mut axes = space(&mut random);
        let mut axis = random.pick(0..axes.len());
        if random.chance(20) {
            // One index moves more elements than a block holds.
            (axes, axis) = (vec![fixed(random.pick(1..4)), fixed(20_000)], 0);
        }
        let len = if random.chance(8) && axes.len() != 2 {
            random.pick(10_000..30_000) / points(&axes).clamp(1, 1000) + 1
        } else {
            random.pick(1..20)
        };
        let mut result = axes.clone();
        result[axis] = fixed(len);
        let contiguous = random.chance(2);
        let (index, indices) = index(&mut random, &axes, len, contiguous);
        let value = random.finite(points(&axes));
        let plain = random.chance(2);
        let added = random.finite(points(&result));
        let body = Body::Scatter(Scatter {
            axis,
            reduce: ReduceOp::Sum,
            space: sizes(&axes),
            value: layout(&mut random, DType::F32, &axes, contiguous),
            index,
        });
        let out = layout(&mut random, DType::F32, &result, contiguous);
        let other = (!plain).then(|| layout(&mut random, DType::F32, &result, contiguous));
        let spec = storing(body, sizes(&result), out, other);
        let mut sums = vec![0.0f32; points(&result)];
        for ((mut at, v), &k) in coordinates(&axes).zip(&value).zip(&indices.0) {
            at[axis] = k as usize;
            sums[position(&at, &result)] += v;
        }
        let expected: Vec<u32> = sums
            .iter()
            .zip(&added)
            .map(|(s, a)| {
                if plain {
                    s.to_bits()
                } else {
                    (a + s).to_bits()
                }
            })
            .collect();
        let mut given = vec![Some(Values::f32(&value)), Some(indices)];
        given.extend((!plain).then(|| Some(Values::f32(&added))));
        given.push(None);
        let got = run(&spec, axes[0].value, &given).unwrap();
        assert_same(
            Lane::F32,
            got.last().unwrap(),
            &expected,
            &format!("round {round}, {spec:?}"),
        );
    }
}

/// Many indices, each of a whole row, of which a block of the result has few; some lie outside.
#[test]
fn scatters_of_many_rows_find_those_of_each_block() {
    let mut random = Random(26);
    for (count, width, len) in [
        (1000, 3, 20_000),
        (37, 1, 50_000),
        (500, 70, 700),
        (16, 2, 9),
    ] {
        let (axes, result) = ([fixed(count), fixed(width)], [fixed(len), fixed(width)]);
        let rows: Vec<i32> = (0..count)
            .map(|_| match random.pick(0..9) {
                0 => -1 - random.pick(0..9) as i32,
                1 => (len + random.pick(0..9)) as i32,
                2 => [i32::MIN, i32::MAX, 0, len as i32 - 1][random.pick(0..4)],
                _ => random.pick(0..len) as i32,
            })
            .collect();
        let value = random.finite(points(&axes));
        let index = Operand {
            dtype: DType::I32,
            offset: Size::ZERO,
            strides: [Size::fixed(1), Size::ZERO].into_iter().collect(),
        };
        let body = Body::Scatter(Scatter {
            axis: 0,
            reduce: ReduceOp::Sum,
            space: sizes(&axes),
            value: layout(&mut random, DType::F32, &axes, true),
            index,
        });
        let out = layout(&mut random, DType::F32, &result, true);
        let spec = storing(body, sizes(&result), out, None);
        let mut sums = vec![0.0f32; points(&result)];
        for (at, v) in value.iter().enumerate() {
            let row = usize::try_from(rows[at / width]).ok();
            if let Some(row) = row.filter(|&row| row < len) {
                sums[row * width + at % width] += v;
            }
        }
        let repeated: Vec<i32> = (0..count * width).map(|at| rows[at / width]).collect();
        let given = [
            Some(Values::f32(&value)),
            Some(Values::i32(&repeated)),
            None,
        ];
        let got = run(&spec, 1, &given).unwrap();
        let expected: Vec<u32> = sums.iter().map(|sum| sum.to_bits()).collect();
        let case = format!("{count} rows of {width} into {len}");
        assert_same(Lane::F32, got.last().unwrap(), &expected, &case);
    }
}

fn check(index: Operand, axes: &[Axis], limit: usize) -> Spec {
    Spec {
        body: Body::BoundsCheck(BoundsCheck {
            index,
            limit: Size::fixed(limit as i64),
        }),
        dims: sizes(axes),
        reduced: 0,
        operands: vec![],
        indices: vec![],
        code: vec![],
        stores: vec![],
    }
}

#[test]
fn the_first_bad_index_is_named() {
    let mut random = Random(5);
    for _ in 0..200 {
        let mut axes = space(&mut random);
        if random.chance(10) {
            axes = vec![];
        } else if random.chance(10) {
            axes = vec![bounded(random.pick(1..BOUND)), fixed(20_000)];
        }
        let (count, limit) = (points(&axes), random.pick(1..200));
        let mut values: Vec<i32> = (0..count).map(|_| random.pick(0..limit) as i32).collect();
        let dtype = if random.chance(2) {
            DType::U8
        } else {
            DType::I32
        };
        for _ in 0..random.pick(0..3).min(count) {
            let bad = if dtype == DType::U8 || random.chance(2) {
                limit as i32 + random.pick(0..50) as i32
            } else {
                -1 - random.pick(0..9) as i32
            };
            let at = random.pick(0..count);
            values[at] = bad;
        }
        let contiguous = random.chance(2);
        let spec = check(layout(&mut random, dtype, &axes, contiguous), &axes, limit);
        let batch = axes.first().map_or(1, |axis| axis.value);
        let expected = values
            .iter()
            .position(|v| !(0..limit as i32).contains(v))
            .map(|at| Fault::Index {
                position: at as u64,
                value: i64::from(values[at]),
                limit: limit as u64,
            });
        assert_eq!(
            run(&spec, batch, &[Some(Values::i32(&values))]).err(),
            expected
        );
    }
}
