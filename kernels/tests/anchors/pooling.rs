use half::{bf16, f16};
use slabwise_kernels::cpu::{Config, Isa, Kernel};
use slabwise_kernels::dtype::{DType, Lane};
use slabwise_kernels::size::Env;
use slabwise_kernels::spec::{Body, Operand, Pool2d, Pool2dGrad, PoolKind, Spec, Window};

use crate::harness::*;

struct Case {
    window: Window,
    /// n, c, h, w
    image: [Axis; 4],
    /// n, c, oh, ow
    result: [Axis; 4],
}

fn result_size(size: usize, window: &Window, axis: usize) -> usize {
    (size + 2 * window.pad[axis])
        .checked_sub(window.k[axis])
        .map_or(0, |rest| rest / window.stride[axis] + 1)
}

/// A random geometry: half of them 2×2 windows with stride 2, the rest with padding, overlaps and
/// gaps.
fn geometry(random: &mut Random) -> Case {
    let window = if random.chance(2) {
        Window {
            k: [2, 2],
            stride: [2, 2],
            pad: [0, 0],
        }
    } else {
        // A few are wider than those with loops of their own.
        let wide = if random.chance(6) { 12 } else { 5 };
        let k = [random.pick(1..5), random.pick(1..wide)];
        Window {
            k,
            stride: [random.pick(1..4), random.pick(1..4)],
            pad: [random.pick(0..k[0]), random.pick(0..k[1])],
        }
    };
    let batch = random.pick(0..BOUND + 1);
    let wide = [9, 40, 40, 40, 40, 40, 40, 40, 40, 3000][random.pick(0..10)];
    let (h, w) = (
        random.pick(0..if wide > 40 { 4 } else { 12 }),
        random.pick(0..wide),
    );
    let (n, c) = (
        if random.chance(2) {
            bounded(batch)
        } else {
            fixed(batch)
        },
        fixed(random.pick(1..5)),
    );
    // One window more may reach out of the image, or lie outside.
    let (oh, ow) = (
        result_size(h, &window, 0) + random.pick(0..2),
        result_size(w, &window, 1) + random.pick(0..2),
    );
    Case {
        window,
        image: [n, c, fixed(h), fixed(w)],
        result: [n, c, fixed(oh), fixed(ow)],
    }
}

impl Case {
    fn batch(&self) -> usize {
        self.image[0].value
    }

    fn hw(&self) -> [slabwise_kernels::size::Size; 2] {
        [self.image[2].size, self.image[3].size]
    }

    /// The elements (window position, y, x) of window (i, j) that lie inside the image.
    fn window(&self, i: usize, j: usize) -> Vec<(usize, usize, usize)> {
        let w = &self.window;
        let mut list = vec![];
        for r in 0..w.k[0] {
            for s in 0..w.k[1] {
                let (y, x) = (i * w.stride[0] + r, j * w.stride[1] + s);
                if (w.pad[0]..w.pad[0] + self.image[2].value).contains(&y)
                    && (w.pad[1]..w.pad[1] + self.image[3].value).contains(&x)
                {
                    list.push((r * w.k[1] + s, y - w.pad[0], x - w.pad[1]));
                }
            }
        }
        list
    }

    fn divisor(&self, kind: PoolKind, inside: usize) -> f32 {
        let all = self.window.k[0] * self.window.k[1];
        if kind == (PoolKind::Avg { count_pad: true }) {
            all as f32
        } else {
            inside.max(1) as f32
        }
    }
}

/// The first NaN, or else the first of the largest.
fn maximum(values: &[(usize, f64)]) -> Option<(usize, f64)> {
    if let Some(nan) = values.iter().find(|v| v.1.is_nan()) {
        return Some(*nan);
    }
    // `max_by` keeps the last of equals: over the reversed list, the first.
    values
        .iter()
        .rev()
        .max_by(|a, b| a.1.partial_cmp(&b.1).expect("no NaN"))
        .copied()
}

#[test]
fn pooling_matches_plain_loops() {
    let mut random = Random(1);
    for round in 0..240 {
        let case = geometry(&mut random);
        let kind = match random.pick(0..5) {
            0 => PoolKind::ArgMax,
            1 => PoolKind::Avg {
                count_pad: random.chance(2),
            },
            _ => PoolKind::Max,
        };
        let is_mean = matches!(kind, PoolKind::Avg { .. });
        let dtype = if is_mean || !random.chance(2) {
            DType::F32
        } else {
            [DType::I32, DType::U8, DType::F16, DType::BF16][random.pick(0..4)]
        };
        let x: Vec<u32> = match dtype {
            DType::F32 => Values::f32(&random.floats(points(&case.image))).0,
            DType::F16 | DType::BF16 => random
                .floats(points(&case.image))
                .into_iter()
                .map(|x| match dtype {
                    DType::F16 => f16::from_f32(x).to_bits().into(),
                    _ => bf16::from_f32(x).to_bits().into(),
                })
                .collect(),
            _ => (0..points(&case.image))
                .map(|_| random.pick(0..6) as u32)
                .collect(),
        };
        let lane = if kind == PoolKind::ArgMax {
            Lane::I32
        } else {
            dtype.lane()
        };
        let arg = (kind == PoolKind::Max && random.chance(2))
            .then(|| [DType::U8, DType::I32][random.pick(0..2)]);
        let contiguous = random.chance(2);
        let pool = Pool2d {
            kind,
            window: case.window,
            hw: case.hw(),
            x: layout(&mut random, dtype, &case.image, contiguous),
            arg: arg.map(|dtype| layout(&mut random, dtype, &case.result, contiguous)),
        };
        let stored = if lane == Lane::F32 {
            DType::F32
        } else {
            DType::I32
        };
        let plain = random.chance(2);
        let out = layout(&mut random, stored, &case.result, contiguous);
        let other = (!plain).then(|| layout(&mut random, stored, &case.result, contiguous));
        let added = Values(Values::f32(&random.finite(points(&case.result))).0);
        let spec = storing(Body::Pool2d(pool), sizes(&case.result), out, other);
        let mut given = vec![Some(Values(x.clone()))];
        given.extend(arg.map(|_| None));
        given.extend((!plain).then(|| Some(added.clone())));
        given.push(None);

        let (mut values, mut positions) = (vec![], vec![]);
        for (at, extra) in coordinates(&case.result).zip(&added.0) {
            let number = |y, x_| {
                let bits = x[position(&[at[0], at[1], y, x_], &case.image)];
                match dtype {
                    DType::F32 => f64::from(f32::from_bits(bits)),
                    DType::F16 => f16::from_bits(bits as u16).to_f64(),
                    DType::BF16 => bf16::from_bits(bits as u16).to_f64(),
                    _ => f64::from(bits),
                }
            };
            let window: Vec<(usize, f64)> = case
                .window(at[2], at[3])
                .into_iter()
                .map(|(p, y, x)| (p, number(y, x)))
                .collect();
            let bits = if is_mean {
                let sum = window.iter().fold(0.0f32, |sum, v| sum + v.1 as f32);
                (sum / case.divisor(kind, window.len())).to_bits()
            } else {
                // Padding is smaller than the window, but behind the last row or column a window
                // may still be empty.
                let lowest = if dtype.lane() == Lane::F32 {
                    f64::NEG_INFINITY
                } else {
                    f64::from(i32::MIN)
                };
                let (first, largest) = maximum(&window).unwrap_or((usize::MAX, lowest));
                positions.push(first);
                match (kind, dtype.lane()) {
                    (PoolKind::ArgMax, _) => first as u32,
                    (_, Lane::F32) => (largest as f32).to_bits(),
                    _ => largest as i32 as u32,
                }
            };
            values.push(if plain {
                bits
            } else {
                plus(lane, bits, *extra)
            });
        }
        let got = run(&spec, case.batch(), &given).unwrap();
        let empty = |p: &usize| *p == usize::MAX;
        if kind != PoolKind::ArgMax || !positions.iter().any(empty) {
            assert_same(
                lane,
                got.last().unwrap(),
                &values,
                &format!("round {round}, {spec:?}"),
            );
        }
        if arg.is_some() {
            for (got, expected) in got[1].0.iter().zip(positions).filter(|(_, p)| !empty(p)) {
                assert_eq!(
                    *got as usize, expected,
                    "a position in round {round}, {spec:?}"
                );
            }
        }
    }
}

#[test]
fn gradients_match_plain_loops() {
    let mut random = Random(2);
    for round in 0..160 {
        let case = geometry(&mut random);
        let kind = if random.chance(3) {
            PoolKind::Avg {
                count_pad: random.chance(2),
            }
        } else {
            PoolKind::Max
        };
        let dy = if random.chance(2) {
            random.floats(points(&case.result))
        } else {
            random.finite(points(&case.result))
        };
        let all = case.window.k[0] * case.window.k[1];
        let arg: Vec<i32> = (0..points(&case.result))
            .map(|_| random.pick(0..all) as i32)
            .collect();
        let with_arg = (kind == PoolKind::Max).then(|| [DType::U8, DType::I32][random.pick(0..2)]);
        let contiguous = random.chance(2);
        let pool = Pool2dGrad {
            kind,
            window: case.window,
            ohw: [case.result[2].size, case.result[3].size],
            dy: layout(&mut random, DType::F32, &case.result, contiguous),
            arg: with_arg.map(|dtype| layout(&mut random, dtype, &case.result, contiguous)),
        };
        let plain = random.chance(2);
        let out = layout(&mut random, DType::F32, &case.image, contiguous);
        let other = (!plain).then(|| layout(&mut random, DType::F32, &case.image, contiguous));
        let added = random.finite(points(&case.image));
        let spec = storing(Body::Pool2dGrad(pool), sizes(&case.image), out, other);
        let mut given = vec![Some(Values::f32(&dy))];
        given.extend(with_arg.map(|_| Some(Values::i32(&arg))));
        given.extend((!plain).then(|| Some(Values::f32(&added))));
        given.push(None);

        // Windows in row-major order send their gradients.
        let mut dx = vec![0.0f32; points(&case.image)];
        for (k, at) in coordinates(&case.result).enumerate() {
            let window = case.window(at[2], at[3]);
            for &(p, y, x) in &window {
                let to = &mut dx[position(&[at[0], at[1], y, x], &case.image)];
                match kind {
                    PoolKind::Max if arg[k] == p as i32 => *to += dy[k],
                    PoolKind::Max => {}
                    _ => *to += dy[k] / case.divisor(kind, window.len()),
                }
            }
        }
        let expected: Vec<u32> = dx
            .iter()
            .zip(&added)
            .map(|(d, a)| {
                if plain {
                    d.to_bits()
                } else {
                    (a + d).to_bits()
                }
            })
            .collect();
        let got = run(&spec, case.batch(), &given).unwrap();
        assert_same(
            Lane::F32,
            got.last().unwrap(),
            &expected,
            &format!("round {round}, {spec:?}"),
        );
    }
}

#[test]
fn sums_begin_at_positive_zero() {
    // Three windows in a row, then nine: the shapes that the loops for 2×2 windows treat
    // differently.
    for ow in [3, 9] {
        let (image, result) = (
            [fixed(1), fixed(1), fixed(2), fixed(2 * ow)],
            [fixed(1), fixed(1), fixed(1), fixed(ow)],
        );
        let contiguous = |dtype, axes: &[Axis]| Operand::contiguous(dtype, &sizes(axes)).unwrap();
        let pool = Pool2dGrad {
            kind: PoolKind::Max,
            window: Window {
                k: [2, 2],
                stride: [2, 2],
                pad: [0, 0],
            },
            ohw: [result[2].size, result[3].size],
            dy: contiguous(DType::F32, &result),
            arg: Some(contiguous(DType::U8, &result)),
        };
        let spec = storing(
            Body::Pool2dGrad(pool),
            sizes(&image),
            contiguous(DType::F32, &image),
            None,
        );
        let given = [
            Some(Values::f32(&vec![-0.0; ow])),
            Some(Values::i32(&vec![1; ow])),
            None,
        ];
        assert_eq!(
            run(&spec, 1, &given).unwrap()[2],
            Values::f32(&vec![0.0; 4 * ow])
        );
    }
}

#[test]
fn padding_never_wins() {
    // Windows of −∞ alone, in rows of less and of more than a vector.
    for side in [5, 40] {
        let window = Window {
            k: [3, 3],
            stride: [2, 2],
            pad: [1, 1],
        };
        let out = result_size(side, &window, 0);
        let (image, result) = (
            [fixed(1), fixed(2), fixed(side), fixed(side)],
            [fixed(1), fixed(2), fixed(out), fixed(out)],
        );
        let contiguous = |dtype, axes: &[Axis]| Operand::contiguous(dtype, &sizes(axes)).unwrap();
        let pool = Pool2d {
            kind: PoolKind::Max,
            window,
            hw: [image[2].size, image[3].size],
            x: contiguous(DType::F32, &image),
            arg: Some(contiguous(DType::U8, &result)),
        };
        let spec = storing(
            Body::Pool2d(pool),
            sizes(&result),
            contiguous(DType::F32, &result),
            None,
        );
        let lowest = Values::f32(&vec![f32::NEG_INFINITY; points(&image)]);
        let got = run(&spec, 1, &[Some(lowest), None, None]).unwrap();
        let first = coordinates(&result).map(|at| {
            let outside = [at[2] == 0, at[3] == 0].map(i32::from);
            3 * outside[0] + outside[1]
        });
        assert_eq!(got[1], Values::i32(&first.collect::<Vec<_>>()));
        assert_eq!(
            got[2],
            Values::f32(&vec![f32::NEG_INFINITY; points(&result)])
        );
    }
}

#[test]
fn specs_that_cannot_run_are_refused() {
    let axes = [fixed(1), fixed(1), fixed(40), fixed(40)];
    let contiguous = |dtype| Operand::contiguous(dtype, &sizes(&axes)).unwrap();
    let window = Window {
        k: [1, 1],
        stride: [1, 1],
        pad: [0, 0],
    };
    let spec = |kind, window, x: DType, arg: Option<DType>| {
        let pool = Pool2d {
            kind,
            window,
            hw: [axes[2].size, axes[3].size],
            x: contiguous(x),
            arg: arg.map(contiguous),
        };
        storing(
            Body::Pool2d(pool),
            sizes(&axes),
            contiguous(DType::F32),
            None,
        )
    };
    let prepare = |spec: Spec| {
        Kernel::new(
            spec,
            &Env::default(),
            &Config {
                threads: 1,
                isa: Isa::Portable,
            },
        )
        .err()
        .map(|e| e.to_string())
    };
    let f32 = DType::F32;
    assert_eq!(
        prepare(spec(PoolKind::Max, window, f32, Some(DType::U8))),
        None
    );
    let large = Window {
        k: [16, 17],
        ..window
    };
    assert_eq!(
        prepare(spec(PoolKind::Max, large, f32, Some(DType::U8))).unwrap(),
        "invalid kernel: positions in a window of 16×17 do not fit in u8"
    );
    assert_eq!(
        prepare(spec(
            PoolKind::Max,
            Window {
                k: [16, 16],
                ..window
            },
            f32,
            Some(DType::U8)
        )),
        None
    );
    assert_eq!(
        prepare(spec(PoolKind::Max, large, f32, Some(DType::I32))),
        None
    );
    let refused = [
        spec(
            PoolKind::Max,
            Window {
                stride: [0, 1],
                ..window
            },
            f32,
            None,
        ),
        spec(
            PoolKind::Max,
            Window {
                k: [0, 1],
                ..window
            },
            f32,
            None,
        ),
        spec(
            PoolKind::Max,
            Window {
                pad: [usize::MAX, 0],
                ..window
            },
            f32,
            None,
        ),
        spec(PoolKind::Max, window, f32, Some(f32)),
        spec(PoolKind::ArgMax, window, f32, Some(DType::U8)),
        spec(PoolKind::Avg { count_pad: true }, window, DType::I32, None),
        Spec {
            dims: sizes(&axes[1..]),
            ..spec(PoolKind::Max, window, f32, None)
        },
    ];
    for spec in refused {
        let shown = format!("{spec:?}");
        assert!(prepare(spec).is_some(), "{shown}");
    }
}
