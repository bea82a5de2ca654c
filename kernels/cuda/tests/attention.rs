//! Attention and its gradients: generated source against the CPU's kernels, which are compared with
//! double precision, over shapes, layouts of rows and pairs that see each other.

mod common;

use common::gpu::Gpu;
use common::layouts::sizes;
use common::{Case, Choices, NO_FAULT, TARGET, available, compile_for_gpu, emulate, float};
use slabwise_cuda::emulator::{Order, gpu_required};
use slabwise_cuda::nvrtc::{self, Program};
use slabwise_cuda::{Description, Function, Lowered, PRELUDE, Target, has_attention, lower};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::{Env, Size, Symbol};
use slabwise_kernels::spec::{Access, Attention, AttentionGrad, Body, Dims, Operand, Scores, Spec};

/// How rows of heads lie in memory, of a space `[batch, heads, rows, width]`.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Layout {
    /// `[batch, heads, rows, width]`.
    Contiguous,
    /// `[batch, rows, heads, width]`, with vectors of 16 bytes aligned.
    Joined,
    /// The same with other elements before and between the rows, so that none is aligned.
    Apart,
    /// `[batch, heads, width, rows]`.
    Transposed,
    /// `[rows, width]`, the same for every head.
    Shared,
}

const LAYOUTS: [Layout; 5] = [
    Layout::Joined,
    Layout::Contiguous,
    Layout::Apart,
    Layout::Transposed,
    Layout::Shared,
];

impl Layout {
    fn operand(self, dtype: DType, [_, h, r, w]: [i64; 4]) -> Operand {
        let (offset, strides) = match self {
            Layout::Contiguous => (0, [h * r * w, r * w, w, 1]),
            Layout::Joined => (8, [r * (h * w + 8), w, h * w + 8, 1]),
            Layout::Apart => (3, [r * (h * w + 5), w, h * w + 5, 1]),
            Layout::Transposed => (0, [h * r * w, r * w, 1, r]),
            Layout::Shared => (1, [0, 0, w, 1]),
        };
        Operand {
            dtype,
            offset: Size::fixed(offset),
            strides: sizes(&strides),
        }
    }
}

/// The sizes of a case.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    batch: i64,
    heads: i64,
    queries: i64,
    keys: i64,
    width: i64,
    columns: i64,
    scores: Scores,
    types: Types,
}

/// The types of operands.
#[derive(Clone, Copy, Debug)]
struct Types {
    queries: DType,
    keys: DType,
    values: DType,
    result: DType,
    dy: DType,
}

impl Types {
    /// All of one type.
    const fn of(dtype: DType) -> Types {
        Types {
            queries: dtype,
            keys: dtype,
            values: dtype,
            result: dtype,
            dy: dtype,
        }
    }
}

fn plain(queries: i64, keys: i64, width: i64) -> Sizes {
    Sizes {
        batch: 1,
        heads: 2,
        queries,
        keys,
        width,
        columns: width,
        scores: Scores {
            scale: 1.0 / (width as f32).sqrt(),
            soft_cap: None,
            causal: true,
            window: None,
            past: 0,
            step: 1,
        },
        types: Types::of(DType::F32),
    }
}

impl Sizes {
    fn with(self, causal: bool, window: Option<u32>, past: i32) -> Sizes {
        Sizes {
            scores: Scores {
                causal,
                window,
                past,
                ..self.scores
            },
            ..self
        }
    }

    fn of(self, types: Types) -> Sizes {
        Sizes { types, ..self }
    }

    /// The type of operands of products.
    fn products(&self) -> DType {
        let Types {
            queries,
            keys,
            values,
            ..
        } = self.types;
        match queries == keys && keys == values {
            true => queries,
            false => DType::F32,
        }
    }

    /// Whether the rows of gradients take turns: those of as many keys as queries do.
    fn in_turns(&self) -> bool {
        self.queries == self.keys
    }

    /// The row of the gradient of a query (part 0), a key or a value.
    fn row(&self, part: usize, row: usize) -> usize {
        let before = [0, self.queries, self.queries + self.keys].map(|rows| rows as usize);
        match self.in_turns() {
            true => 3 * row + part,
            false => before[part] + row,
        }
    }
}

fn spec(body: Body, dims: Dims) -> Spec {
    Spec {
        body,
        dims,
        reduced: 0,
        operands: vec![],
        indices: vec![],
        code: vec![],
        stores: vec![],
    }
}

/// The specs of attention and of its gradient, with layouts of queries, keys, values, result, its
/// gradient, and the gradient of the operands.
fn specs(s: &Sizes, layouts: [Layout; 6]) -> [Spec; 2] {
    let t = s.types;
    let of =
        |layout: Layout, dtype, rows, width| layout.operand(dtype, [s.batch, s.heads, rows, width]);
    let attention = |columns| Attention {
        scores: s.scores,
        width: Size::fixed(s.width),
        keys: Size::fixed(s.keys),
        q: of(layouts[0], t.queries, s.queries, s.width),
        k: of(layouts[1], t.keys, s.keys, s.width),
        v: of(layouts[2], t.values, s.keys, columns),
        mask: None,
        past: None,
        result: of(layouts[3], t.result, s.queries, columns),
    };
    let rows = s.queries + 2 * s.keys;
    let grad = AttentionGrad {
        of: attention(s.width),
        queries: Size::fixed(s.queries),
        dy: of(layouts[4], t.dy, s.queries, s.width),
        in_turns: s.in_turns(),
        gradients: of(layouts[5], DType::F32, rows, s.width),
    };
    let dims = |rows, width| sizes(&[s.batch, s.heads, rows, width]);
    [
        spec(
            Body::Attention(Box::new(attention(s.columns))),
            dims(s.queries, s.columns),
        ),
        spec(Body::AttentionGrad(Box::new(grad)), dims(rows, s.width)),
    ]
}

fn cases(list: &[Sizes], target: Target) -> Vec<Case> {
    let mut choices = Choices::new(17);
    let mut all = Vec::new();
    for (at, s) in list.iter().enumerate() {
        // Each layout is that of each operand once.
        let input = |i: usize| LAYOUTS[(at + i) % 5];
        let output = |i: usize| LAYOUTS[(at + i) % 4];
        let layouts = [input(0), input(1), input(2), output(3), input(4), output(0)];
        for spec in specs(s, layouts) {
            let name = format!("{s:?} {layouts:?}");
            let mut case = Case::new(name, spec, &mut choices);
            case.target = target;
            all.push(case);
        }
    }
    all
}

/// Lengths around those of tiles, every kind of pair, queries that see no key.
fn list() -> Vec<Sizes> {
    vec![
        plain(70, 70, 32),
        plain(70, 70, 64).with(false, None, 0),
        plain(33, 100, 20).with(true, Some(9), 60),
        plain(200, 150, 8).with(false, Some(20), 3),
        plain(65, 33, 64).with(true, None, 0),
        // (The last queries see no key.)
        plain(90, 40, 16).with(true, Some(4), 0),
        plain(10, 5, 32).with(true, Some(2), 20),
        plain(1, 130, 64).with(true, None, 129),
        Sizes {
            scores: Scores {
                scale: -0.25,
                ..plain(40, 40, 3).scores
            },
            ..plain(40, 40, 3)
        },
        plain(37, 70, 128).with(true, None, 33),
        Sizes {
            columns: 48,
            ..plain(30, 30, 12).with(false, None, 0)
        },
        Sizes {
            batch: 3,
            heads: 1,
            ..plain(130, 130, 64)
        },
        Sizes {
            scores: Scores {
                scale: 1.0,
                ..plain(50, 50, 100).scores
            },
            ..plain(50, 50, 100)
        },
    ]
}

/// The elements of an argument, and the operand.
struct Rows {
    values: Vec<f32>,
    operand: Operand,
}

impl Rows {
    fn at(&self, head: [usize; 2], row: usize, column: usize) -> f64 {
        let env = Env::default();
        let at = [head[0], head[1], row, column];
        let steps = self.operand.strides.iter().zip(at);
        let steps = steps.map(|(s, c)| s.usize_at(&env) * c).sum::<usize>();
        f64::from(self.values[self.operand.offset.usize_at(&env) + steps])
    }
}

/// Elements of a type as numbers.
fn numbers(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let each = bytes.chunks(dtype.bytes());
    each.map(|x| float(dtype, x)).collect()
}

/// The errors of a kernel's numbers.
#[derive(Clone, Copy)]
struct Errors {
    /// Of a weight or a gradient of a score, relative to itself.
    unit: f64,
    /// Of a factor in single precision, relative to `unit`.
    single: f64,
    /// Of the smallest numbers, which the type of the operands holds as multiples of a number.
    tiny: f64,
}

impl Errors {
    /// Those of products of these operands.
    fn of(products: DType, tf32: bool) -> Errors {
        // Weights and gradients of scores are rounded to tf32 or halves, all else is computed in
        // single precision.
        let (unit, tiny) = match products {
            DType::F16 => (2f64.powi(-11), 2f64.powi(-25)),
            DType::BF16 => (2f64.powi(-8), 0.0),
            _ if tf32 => (2f64.powi(-11), 0.0),
            _ => (2f64.powi(-22), 0.0),
        };
        Errors {
            unit,
            single: 2f64.powi(-22) / unit,
            tiny: tiny / unit,
        }
    }
}

/// The error of a stored number, relative to itself.
fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 2f64.powi(-11),
        DType::BF16 => 2f64.powi(-8),
        _ => 0.0,
    }
}

/// The elements of a result, and the sums of the magnitudes that they are sums of.
type Sums = Vec<Vec<[f64; 2]>>;

/// A result or a gradient of a head in double precision. The magnitudes are those of the terms of
/// the last product, and `single` times those that the errors of its factors, computed in single
/// precision, are relative to: a power has a relative error of its score's error.
fn oracle(s: &Sizes, args: &[Rows], head: [usize; 2], is_grad: bool, errors: Errors) -> Sums {
    let Errors { single, tiny, .. } = errors;
    let [queries, keys, width] = [s.queries, s.keys, s.width].map(|n| n as usize);
    let columns = if is_grad { width } else { s.columns as usize };
    let at = |i: usize, row, column| args[i].at(head, row, column);
    let scale = f64::from(s.scores.scale);
    let rows = if is_grad { queries + 2 * keys } else { queries };
    let mut sums = vec![vec![[0.0; 2]; columns]; rows];
    for query in 0..queries {
        let seen = s.scores.visible(query, keys);
        let score = |key| {
            (0..width)
                .map(|c| at(0, query, c) * at(1, key, c))
                .sum::<f64>()
                * scale
        };
        let magnitude = |key| {
            (0..width)
                .map(|c| (at(0, query, c) * at(1, key, c)).abs())
                .sum::<f64>()
        };
        let powerful = seen.clone().map(magnitude).fold(0.0, f64::max) * scale.abs();
        let single = single * (1.0 + powerful);
        let scores: Vec<f64> = seen.clone().map(score).collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let powers: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
        let sum: f64 = powers.iter().sum();
        let mut add = |row: usize, column: usize, term: f64, magnitude: f64, factor: f64| {
            let [sum, all] = &mut sums[row][column];
            *sum += term;
            *all += term.abs() + single * magnitude + tiny * factor.abs();
        };
        if !is_grad {
            for column in 0..columns {
                if seen.is_empty() {
                    add(query, column, f64::NAN, 0.0, 0.0);
                }
                for (key, power) in seen.clone().zip(&powers) {
                    let (p, v) = (power / sum, at(2, key, column));
                    add(query, column, p * v, (p * v).abs(), v / sum);
                }
            }
            continue;
        }
        let deltas = (0..width).map(|c| at(3, query, c) * at(4, query, c));
        let (delta, all) = deltas.fold((0.0, 0.0), |(a, b), x: f64| (a + x, b + x.abs()));
        for (key, power) in seen.zip(&powers) {
            let p = power / sum;
            let slopes = (0..width).map(|c| at(4, query, c) * at(2, key, c));
            let (slope, more) = slopes.fold((0.0, all), |(a, b), x: f64| (a + x, b + x.abs()));
            let (ds, large) = (p * (slope - delta) * scale, p * more * scale.abs());
            for c in 0..width {
                let (q, k, dy) = (at(0, query, c), at(1, key, c), at(4, query, c));
                // (The gradients of scores are divided by the sum and multiplied by the scale at the
                // end, for queries, or have the sum as a factor before.)
                add(s.row(0, query), c, ds * k, large * k.abs(), scale * k / sum);
                add(s.row(1, key), c, ds * q, large * q.abs(), scale * q);
                add(s.row(2, key), c, p * dy, p * dy.abs(), dy);
            }
        }
    }
    sums
}

/// Fails unless emulated kernels give the results of double precision and of the CPU's kernels within
/// the errors of their products, and the same bits in every order of threads; and a GPU, where there
/// is one.
fn check(list: &[Sizes], mut cases: Vec<Case>) {
    if !available() {
        return;
    }
    let products: Vec<DType> = list.iter().flat_map(|s| [s.products(); 2]).collect();
    for (case, products) in cases.iter_mut().zip(&products) {
        let is_exact = *products == DType::F32 && !case.target.tf32;
        for (bytes, (operand, ..)) in case.args.iter_mut().zip(case.spec.arguments()) {
            if operand.dtype == DType::F32 && !is_exact {
                // Numbers that the operands of products hold exactly.
                let exact = numbers(DType::F32, bytes).into_iter();
                let exact = exact.map(|x| (8.0 * x).round() / 8.0);
                *bytes = exact.flat_map(f32::to_le_bytes).collect();
            }
        }
    }
    let lowered: Vec<Lowered> = cases
        .iter()
        .map(|c| lower(&c.spec, &c.bounds, &c.target).expect("source"))
        .collect();
    for (lowered, (case, products)) in lowered.iter().zip(cases.iter().zip(&products)) {
        let tile = match products {
            DType::F32 if case.target.tf32 => "AttentionMma<float",
            DType::F32 => "AttentionFma<",
            DType::F16 => "AttentionMma<f16",
            _ => "AttentionMma<bf16",
        };
        assert!(lowered.functions.iter().all(|f| f.source.contains(tile)));
    }
    let functions: Vec<Function> = lowered.iter().flat_map(|l| l.functions.clone()).collect();
    let emulator = emulate(&functions);
    let mut gpu = Gpu::load(&lowered.iter().collect::<Vec<_>>());
    for (at, (case, lowered)) in cases.iter().zip(&lowered).enumerate() {
        let errors = Errors::of(products[at], case.target.tf32);
        let emulated: Vec<_> = emulator
            .iter()
            .flat_map(|emulator| {
                Order::ALL.map(|order| case.emulated(lowered, emulator, order, NO_FAULT))
            })
            .map(|got| got.unwrap_or_else(|e| panic!("{}: {e}", case.name)).0)
            .collect();
        for got in emulated.windows(2) {
            assert!(
                got[0] == got[1],
                "{}: other bits in another order",
                case.name
            );
        }
        let on_gpu = gpu.iter_mut().map(|gpu| gpu.run(at, case, lowered));
        let on_gpu = on_gpu.map(|got| got.unwrap_or_else(|e| panic!("{}: {e}", case.name)).0);
        for got in emulated.into_iter().take(1).chain(on_gpu) {
            compare(&list[at / 2], case, &got, errors);
        }
    }
}

fn compare(s: &Sizes, case: &Case, got: &[Vec<u8>], errors: Errors) {
    let arguments = case.spec.arguments();
    let rows = |(bytes, (operand, ..)): (&Vec<u8>, &(Operand, Dims, Access))| Rows {
        values: numbers(operand.dtype, bytes),
        operand: Operand {
            dtype: operand.dtype,
            offset: Size::fixed(operand.offset.at(&case.env)),
            strides: operand
                .strides
                .iter()
                .map(|s| Size::fixed(s.at(&case.env)))
                .collect(),
        },
    };
    let args: Vec<Rows> = case.args.iter().zip(&arguments).map(rows).collect();
    let result = args.len() - 1;
    assert!(got[..result] == case.args[..result], "{}", case.name);
    let cpu = case.on_cpu().0;
    let [got, cpu] = [&got[result], &cpu[result]].map(|bytes| rows((bytes, &arguments[result])));
    let stored = rounding(got.operand.dtype);
    let is_grad = matches!(case.spec.body, Body::AttentionGrad(_));
    let heads = (0..s.batch as usize).flat_map(|b| (0..s.heads as usize).map(move |h| [b, h]));
    for head in heads {
        for (row, sums) in oracle(s, &args, head, is_grad, errors).iter().enumerate() {
            for (column, [sum, all]) in sums.iter().enumerate() {
                let [x, cpu] = [&got, &cpu].map(|rows| rows.at(head, row, column));
                let unit = errors.unit + errors.unit * stored;
                let off = unit * all + stored * sum.abs();
                // The CPU rounds nothing but its result, to the same type.
                for (of, off) in [(*sum, off), (cpu, off + stored * sum.abs())] {
                    assert!(
                        (x - of).abs() <= off || x.is_nan() && of.is_nan(),
                        "{} {head:?}: {row}, {column} is {x} instead of {of} ± {off}",
                        case.name
                    );
                }
            }
        }
    }
}

#[test]
fn attention_and_its_gradients_match_double_precision() {
    check(&list(), cases(&list(), TARGET));
}

/// On tensor cores, of operands that tf32 holds exactly, only weights and gradients of scores are
/// rounded, by 2⁻¹¹ of each.
#[test]
fn tensor_cores_round_weights_only() {
    let target = Target {
        tf32: true,
        ..TARGET
    };
    check(&list(), cases(&list(), target));
}

/// Of halves, weights and gradients of scores are rounded to their type, by 2⁻¹¹ or 2⁻⁸ of each, and
/// a gradient of f32, which is one of halves here. Other mixtures are computed in f32.
#[test]
fn halves_round_weights_only() {
    let [f16, bf16] = [DType::F16, DType::BF16].map(Types::of);
    // Results and their gradients may have other types.
    let wide = |types: Types| Types {
        dy: DType::F32,
        result: DType::F32,
        ..types
    };
    let all = [
        plain(70, 70, 64).of(bf16),
        plain(33, 100, 20).with(true, Some(9), 60).of(f16),
        plain(100, 75, 8).with(false, Some(20), 3).of(wide(bf16)),
        plain(45, 20, 16).with(true, Some(4), 0).of(wide(f16)),
        plain(37, 70, 128).with(true, None, 33).of(bf16),
        Sizes {
            columns: 48,
            ..plain(30, 30, 12).with(false, None, 0).of(f16)
        },
        plain(1, 40, 32).with(false, None, 0).of(f16),
        plain(20, 35, 24).of(Types {
            queries: DType::F32,
            ..bf16
        }),
        plain(20, 35, 24).of(Types {
            keys: DType::BF16,
            dy: DType::BF16,
            ..f16
        }),
    ];
    let cases = cases(&all, TARGET);
    check(&all, cases);
}

/// Lengths that a run decides, below those that the kernels were prepared for.
#[test]
fn lengths_may_be_those_of_a_run() {
    let (bounds, n) = (Env([100; 8]), Size::symbol(Symbol(0)));
    let mut choices = Choices::new(5);
    let (mut list, mut cases) = (Vec::new(), Vec::new());
    for length in [0, 1, 41, 100] {
        let s = plain(length, length, 8);
        list.push(s);
        let times = |k: i64| n.checked_mul(Size::fixed(k)).expect("a size");
        let of = |rows: i64| Operand {
            dtype: DType::F32,
            offset: Size::ZERO,
            strides: Dims::from_slice(&[
                times(16 * rows),
                times(8 * rows),
                Size::fixed(8),
                Size::ONE,
            ]),
        };
        let attention = Attention {
            scores: s.scores,
            width: Size::fixed(8),
            keys: n,
            q: of(1),
            k: of(1),
            v: of(1),
            mask: None,
            past: None,
            result: of(1),
        };
        let grad = AttentionGrad {
            of: attention.clone(),
            queries: n,
            dy: of(1),
            in_turns: true,
            gradients: of(3),
        };
        let dims = |rows| Dims::from_slice(&[Size::ONE, Size::fixed(2), rows, Size::fixed(8)]);
        for spec in [
            spec(Body::Attention(Box::new(attention)), dims(n)),
            spec(Body::AttentionGrad(Box::new(grad)), dims(times(3))),
        ] {
            let name = format!("{length} of a run");
            cases.push(Case::bounded(
                name,
                spec,
                bounds,
                Env([length as u32; 8]),
                &mut choices,
            ));
        }
    }
    check(&list, cases);
}

/// Widths, lengths and pairs without kernels are refused, and said to be.
#[test]
fn other_attention_is_refused() {
    let s = plain(4, 4, 8);
    let rows = |width: i64| (DType::F32, Size::fixed(width));
    let refused = |operands: &[_]| !has_attention(&TARGET, &s.scores, operands);
    assert!(!refused(&[rows(8), rows(8), rows(128)]) && !refused(&[rows(128); 5]));
    assert!(refused(&[rows(129), rows(129), rows(8)]));
    assert!(refused(&[rows(8), rows(8), rows(129)]));
    assert!(refused(&[(DType::F32, Size::symbol(Symbol(0))); 3]));
    assert!(!refused(&[(DType::BF16, Size::fixed(8)); 3]));
    // With a further operand.
    assert!(refused(&[rows(8); 4]) && refused(&[rows(8); 6]));
    let far = Scores {
        past: i32::MAX,
        ..s.scores
    };
    assert!(!has_attention(&TARGET, &far, &[rows(8); 3]));
    let capped = Scores {
        soft_cap: Some(30.0),
        ..s.scores
    };
    assert!(!has_attention(&TARGET, &capped, &[rows(8); 3]));
    for target in [
        Target { sm: 75, ..TARGET },
        Target {
            wave_width: 64,
            ..TARGET
        },
    ] {
        assert!(!has_attention(&target, &s.scores, &[rows(8); 3]));
        for spec in specs(&s, [Layout::Contiguous; 6]) {
            assert!(lower(&spec, &Env::default(), &target).is_err());
        }
    }
    for s in [plain(4, 4, 129), Sizes { scores: far, ..s }] {
        for spec in specs(&s, [Layout::Contiguous; 6]) {
            assert!(lower(&spec, &Env::default(), &TARGET).is_err());
        }
    }
}

/// The products of the kernels for tf32 and halves are those of tensor cores.
#[test]
fn products_are_those_of_tensor_cores() {
    if gpu_required() || nvrtc::version().is_err() {
        return;
    }
    for (dtype, tf32, types) in [
        (DType::F32, false, None),
        (DType::F32, true, Some("m16n8k8.row.col.f32.tf32.tf32.f32")),
        (DType::F16, false, Some("m16n8k16.row.col.f32.f16.f16.f32")),
        (
            DType::BF16,
            false,
            Some("m16n8k16.row.col.f32.bf16.bf16.f32"),
        ),
    ] {
        let target = Target {
            sm: 90,
            tf32,
            ..TARGET
        };
        let s = plain(128, 128, 64).of(Types::of(dtype));
        for (spec, kernels) in specs(&s, [Layout::Joined; 6]).iter().zip([1, 2]) {
            let lowered = lower(spec, &Env::default(), &target).expect("source");
            assert_eq!(lowered.functions.len(), kernels);
            for function in &lowered.functions {
                let program = Program::new(PRELUDE, [function], target.sm);
                let text = nvrtc::ptx(&program).expect("PTX");
                let products = match types {
                    Some(types) => text.matches(&format!("mma.sync.aligned.{types}")).count(),
                    None => 0,
                };
                // Each product of two tiles is unrolled in part.
                assert_eq!(products >= 16, types.is_some(), "{}", function.name);
                let moves = [types.map(|_| "ldmatrix.sync"), Some("griddepcontrol.wait")];
                let moves = moves.into_iter().flatten();
                for instruction in moves.chain(["cp.async.cg.shared.global"]) {
                    let found = text.contains(instruction);
                    assert!(found, "{}: {instruction}", function.name);
                }
                let image = nvrtc::compile(&program).expect("a cubin").image;
                let on_cores = instructions(&image, HMMA);
                assert_eq!(on_cores, products, "{}: HMMA", function.name);
            }
        }
    }
}

/// The lowest 12 bits of the instruction HMMA, a product on tensor cores, from Volta on.
const HMMA: u64 = 0x23c;

/// The instructions of 16 bytes with these lowest bits in the code of an ELF file of 64 bits, little
/// endian.
fn instructions(image: &[u8], bits: u64) -> usize {
    let number = |at: usize, bytes: usize| {
        let all = image[at..at + bytes].iter().rev();
        all.fold(0u64, |n, &byte| n << 8 | u64::from(byte))
    };
    assert!(image.starts_with(b"\x7fELF"), "an ELF file");
    let [first, each, count] = [(0x28, 8), (0x3a, 2), (0x3c, 2)].map(|(at, n)| number(at, n));
    let headers = (0..count).map(|i| (first + i * each) as usize);
    // Sections of a program's bits that are executed.
    let code = headers.filter(|&at| number(at + 4, 4) == 1 && number(at + 8, 8) & 4 != 0);
    let all = code.flat_map(|at| {
        let [start, length] = [number(at + 0x18, 8), number(at + 0x20, 8)].map(|n| n as usize);
        (start..start + length).step_by(16)
    });
    all.filter(|&at| number(at, 8) & 0xfff == bits).count()
}

/// Every tile on every architecture: registers suffice, shared memory too.
#[test]
fn no_tile_spills() {
    // Few and many blocks, and much and little shared memory, choose different tiles.
    let mut names = std::collections::BTreeSet::new();
    for (at, sm) in [80, 86, 89, 90, 100, 120].into_iter().enumerate() {
        let device = Description::nearest(sm).target();
        // (Both types of halves need the same registers.)
        let half = [DType::F16, DType::BF16][at % 2];
        let mut functions: Vec<Function> = Vec::new();
        let products = [(DType::F32, false), (DType::F32, true), (half, false)];
        for (width, (dtype, tf32), heads, length) in [32, 64, 128]
            .into_iter()
            .flat_map(|w| products.map(|p| (w, p)))
            .flat_map(|(w, p)| [(1, 64), (48, 256), (384, 256)].map(|(h, l)| (w, p, h, l)))
        {
            let target = Target { tf32, ..device };
            let s = Sizes {
                heads,
                ..plain(length, length, width).of(Types::of(dtype))
            };
            for spec in specs(&s, [Layout::Contiguous; 6]) {
                let lowered = lower(&spec, &Env::default(), &target).expect("source");
                let launches = lowered.launches(&Env::default());
                assert!(
                    launches
                        .iter()
                        .all(|d| d.shared_bytes <= device.shared_bytes_max)
                );
                functions.extend(lowered.functions);
            }
        }
        functions.sort_by(|a, b| a.name.cmp(&b.name));
        functions.dedup();
        names.extend(functions.iter().map(|f| f.name.clone()));
        compile_for_gpu(&functions, sm, 0);
    }
    assert!(names.len() > 40, "{names:?}");
}
