use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{Body, NonMaxSuppression, Nonzero, Operand, Sort, Spec};

use crate::harness::*;

fn spec(body: Body, axes: &[Axis]) -> Spec {
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
fn positions_are_those_of_a_plain_loop() {
    let mut random = Random(21);
    for round in 0..60 {
        // Some masks are longer than a chunk.
        let long = if round % 10 == 0 { 9000 } else { 30 };
        let mut axes = vec![
            bounded(random.pick(0..BOUND + 1)),
            fixed(random.pick(1..4)),
            fixed(random.pick(1..long)),
        ];
        axes.truncate(random.pick(1..4));
        let one_in = random.pick(1..6);
        let mask: Vec<u32> = (0..points(&axes))
            .map(|_| u32::from(random.chance(one_in)))
            .collect();
        let expected: Vec<u32> = (0..mask.len() as u32)
            .filter(|&i| mask[i as usize] != 0)
            .collect();
        // A result may be too short, or too long.
        let (room, contiguous) = (
            (expected.len() + random.pick(0..3)).saturating_sub(1),
            random.chance(2),
        );
        let body = Body::Nonzero(Nonzero {
            space: sizes(&axes),
            mask: layout(&mut random, DType::Bool, &axes, contiguous),
            positions: layout(&mut random, DType::I32, &[fixed(room)], contiguous),
        });
        let found = run(
            &spec(body, &[fixed(room)]),
            axes[0].value,
            &[Some(Values(mask)), None],
        )
        .unwrap();
        let mut expected = expected;
        expected.resize(room, 0);
        assert_eq!(found[1].0, expected, "round {round}");
    }
}

#[test]
fn orders_are_those_of_a_stable_sort() {
    let mut random = Random(22);
    for round in 0..60 {
        let mut axes = vec![
            bounded(random.pick(0..BOUND + 1)),
            fixed(random.pick(1..5)),
            fixed(random.pick(1..40)),
        ];
        let rank = random.pick(1..4);
        axes.drain(..3 - rank);
        let dtype = [DType::F32, DType::I32, DType::U8, DType::F16, DType::BF16][round % 5];
        let (count, len) = (points(&axes), axes[rank - 1].value);
        let (bits, keys): (Vec<u32>, Vec<f64>) = match dtype {
            DType::F32 => random
                .floats(count)
                .iter()
                .map(|v| (v.to_bits(), f64::from(*v)))
                .unzip(),
            DType::F16 | DType::BF16 => {
                // Halves of few digits are the upper bits of floats; for f16 small integers do.
                let half = |v: f32| {
                    if dtype == DType::BF16 {
                        v.to_bits() >> 16
                    } else {
                        u32::from(half::f16::from_f32(v).to_bits())
                    }
                };
                (0..count)
                    .map(|_| random.pick(0..9) as f32 - 4.0)
                    .map(|v| (half(v), f64::from(v)))
                    .unzip()
            }
            _ => (0..count)
                .map(|_| random.pick(0..20) as u32)
                .map(|v| (v, f64::from(v)))
                .unzip(),
        };
        let (descending, contiguous) = (random.chance(2), random.chance(2));
        // All, or the first few.
        let wanted = if random.chance(2) {
            len
        } else {
            random.pick(0..len.max(1))
        };
        let mut results = axes.clone();
        if wanted < len {
            results[rank - 1] = fixed(wanted);
        }
        let mut expected: Vec<u32> = vec![];
        for row in keys.chunks(len) {
            let mut order: Vec<u32> = (0..len as u32).collect();
            let above = |a: f64, b: f64| if a.is_nan() { !b.is_nan() } else { a > b };
            // Selection, one after the other: the first that no other comes before.
            let end = expected.len() + wanted;
            while expected.len() < end {
                let before = |a: u32, b: u32| {
                    let (a, b) = (row[a as usize], row[b as usize]);
                    if descending { above(a, b) } else { above(b, a) }
                };
                let next = (0..order.len())
                    .find(|&k| order.iter().all(|&other| !before(other, order[k])))
                    .unwrap();
                expected.push(order.remove(next));
            }
        }
        let body = Body::Sort(Sort {
            descending,
            len: sizes(&axes)[axes.len() - 1],
            source: layout(&mut random, dtype, &axes, contiguous),
            positions: layout(&mut random, DType::I32, &results, contiguous),
        });
        let found = run(
            &spec(body, &results),
            axes[0].value,
            &[Some(Values(bits)), None],
        )
        .unwrap();
        assert_eq!(found[1].0, expected, "round {round} of {dtype}");
    }
}

#[test]
fn long_rows_are_in_the_order_of_a_stable_sort() {
    let mut random = Random(25);
    let types = [DType::F32, DType::I32, DType::U8, DType::F16, DType::BF16];
    for round in 0..20 {
        let dtype = types[round % 5];
        // One row of several parts, or several of one.
        let len = [20_000, 8192, 13_001, 700][round % 4];
        let axes = [fixed(random.pick(1..4)), fixed(len)];
        let count = points(&axes);
        let values: Vec<f32> = match round % 6 {
            0 | 1 => random.floats(count),
            2 => random.finite(count),
            // Every key is among the first ones so far, or none is.
            3 => (0..count).map(|i| (i / 3) as f32).collect(),
            4 => (0..count).map(|i| -((i / 3) as f32)).collect(),
            _ => vec![1.5; count],
        };
        let (bits, keys): (Vec<u32>, Vec<f64>) = values
            .into_iter()
            .map(|v| match dtype {
                DType::F32 => (v.to_bits(), f64::from(v)),
                DType::I32 => (v as i32 as u32, f64::from(v as i32)),
                DType::U8 => (u32::from(v as u8), f64::from(v as u8)),
                DType::F16 => {
                    let v = half::f16::from_f32(v);
                    (u32::from(v.to_bits()), v.to_f64())
                }
                _ => {
                    let v = half::bf16::from_f32(v);
                    (u32::from(v.to_bits()), v.to_f64())
                }
            })
            .unzip();
        for wanted in [0, 1, 40, len / 2, len - 1, len] {
            let descending = random.chance(2);
            let results = [axes[0], fixed(wanted)];
            let expected: Vec<u32> = keys
                .chunks(len)
                .flat_map(|row| {
                    let mut order: Vec<u32> = (0..len as u32).collect();
                    order.sort_by(|&a, &b| {
                        let (a, b) = (row[a as usize], row[b as usize]);
                        let above = a.is_nan().cmp(&b.is_nan());
                        let order = a.partial_cmp(&b).unwrap_or(above);
                        if descending { order.reverse() } else { order }
                    });
                    order.into_iter().take(wanted)
                })
                .collect();
            let contiguous = random.chance(2);
            let body = Body::Sort(Sort {
                descending,
                len: axes[1].size,
                source: layout(&mut random, dtype, &axes, contiguous),
                positions: layout(&mut random, DType::I32, &results, contiguous),
            });
            let given = [Some(Values(bits.clone())), None];
            let found = run(&spec(body, &results), 1, &given).unwrap();
            let rows = axes[0].value;
            assert!(
                found[1].0 == expected,
                "round {round}: the first {wanted} of {rows} rows of {len} {dtype}"
            );
        }
    }
}

#[test]
fn boxes_stay_as_one_after_the_other_would() {
    let mut random = Random(23);
    for round in 0..40 {
        let count = if round % 8 == 0 {
            random.pick(1000..1400)
        } else {
            random.pick(0..150)
        };
        let axes = [fixed(count)];
        let corners: Vec<[f32; 4]> = (0..count)
            .map(|_| {
                let [x, y, w, h] = [60, 60, 15, 15].map(|n| random.pick(0..n) as f32);
                [x, y, x + w, y + h]
            })
            .collect();
        let threshold = [0.0, 0.3, 0.5, 1.0][random.pick(0..4)];
        let share = |a: &[f32; 4], b: &[f32; 4]| {
            let side = |k: usize| (a[k + 2].min(b[k + 2]) - a[k].max(b[k])).max(0.0);
            let area = |c: &[f32; 4]| (c[2] - c[0]) * (c[3] - c[1]);
            side(0) * side(1) / (area(a) + area(b) - side(0) * side(1))
        };
        let mut kept: Vec<usize> = vec![];
        for i in 0..count {
            if !kept
                .iter()
                .any(|&k| share(&corners[k], &corners[i]) > threshold)
            {
                kept.push(i);
            }
        }
        let expected: Vec<u32> = (0..count).map(|i| u32::from(kept.contains(&i))).collect();
        let contiguous = random.chance(2);
        let body = Body::NonMaxSuppression(NonMaxSuppression {
            threshold,
            boxes: layout(&mut random, DType::F32, &[axes[0], fixed(4)], contiguous),
            keep: layout(&mut random, DType::Bool, &axes, contiguous),
        });
        let given = Values::f32(&corners.concat());
        let found = run(&spec(body, &axes), 1, &[Some(given), None]).unwrap();
        assert_eq!(
            found[1].0, expected,
            "round {round}: {count} boxes, {threshold}"
        );
    }
}

#[test]
fn invalid_selections_are_refused() {
    let kernel = |body: Body, dims: &[usize]| {
        let axes: Vec<Axis> = dims.iter().map(|&n| fixed(n)).collect();
        let (bound, config) = (
            Default::default(),
            slabwise_kernels::cpu::Config {
                threads: 1,
                isa: slabwise_kernels::cpu::Isa::Portable,
            },
        );
        slabwise_kernels::cpu::Kernel::new(spec(body, &axes), &bound, &config)
            .err()
            .expect("refused")
            .to_string()
    };
    let operand = |dtype, rank: usize| Operand::contiguous(dtype, &vec![Size::ONE; rank]).unwrap();
    let compact = |mask, positions| {
        Body::Nonzero(Nonzero {
            space: sizes(&[fixed(3)]),
            mask,
            positions,
        })
    };
    assert!(
        kernel(
            compact(operand(DType::F32, 1), operand(DType::I32, 1)),
            &[3]
        )
        .contains("the mask is f32")
    );
    assert!(
        kernel(
            compact(operand(DType::Bool, 1), operand(DType::F32, 1)),
            &[3]
        )
        .contains("the positions is f32")
    );
    assert!(
        kernel(
            compact(operand(DType::Bool, 1), operand(DType::I32, 1)),
            &[3, 1]
        )
        .contains("one axis, not 2")
    );
    let sort = Body::Sort(Sort {
        descending: false,
        len: Size::fixed(3),
        source: operand(DType::Bool, 1),
        positions: operand(DType::I32, 1),
    });
    assert!(kernel(sort, &[3]).contains("the source is bool"));
    let suppress = Body::NonMaxSuppression(NonMaxSuppression {
        threshold: 0.5,
        boxes: operand(DType::F32, 1),
        keep: operand(DType::Bool, 1),
    });
    assert!(kernel(suppress, &[3]).contains("the boxes has 1 strides for 2 axes"));
}

#[test]
fn nothing_to_choose_from_is_nothing_chosen() {
    let mut random = Random(24);
    let (none, two) = ([fixed(0)], [fixed(2)]);
    let body = Body::Nonzero(Nonzero {
        space: sizes(&none),
        mask: layout(&mut random, DType::Bool, &none, true),
        positions: layout(&mut random, DType::I32, &two, true),
    });
    assert_eq!(
        run(&spec(body, &two), 1, &[Some(Values(vec![])), None]).unwrap()[1].0,
        [0, 0]
    );
    let body = Body::Sort(Sort {
        descending: false,
        len: sizes(&none)[none.len() - 1],
        source: layout(&mut random, DType::F32, &none, true),
        positions: layout(&mut random, DType::I32, &none, true),
    });
    assert_eq!(
        run(&spec(body, &none), 1, &[Some(Values(vec![])), None]).unwrap()[1].0,
        []
    );
    let body = Body::NonMaxSuppression(NonMaxSuppression {
        threshold: 0.5,
        boxes: layout(&mut random, DType::F32, &[none[0], fixed(4)], true),
        keep: layout(&mut random, DType::Bool, &none, true),
    });
    assert_eq!(
        run(&spec(body, &none), 1, &[Some(Values(vec![])), None]).unwrap()[1].0,
        []
    );
}
