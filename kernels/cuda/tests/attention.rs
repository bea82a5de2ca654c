//! Attention and its gradients: generated source against the CPU's kernels and double precision,
//! over shapes, types, layouts of rows and pairs that see each other; and the code that NVRTC
//! makes of it.

mod attended;
mod common;

use attended::oracle::check;
use attended::{Layout, MaskLayout, Sizes, Types, cases, plain, spec, specs};
use common::machine_code::tensor_instructions;
use common::{Case, Choices, NO_FAULT, TARGET, compile_for_gpu, emulate, float};
use slabwise_cuda::emulator::{Order, gpu_required};
use slabwise_cuda::nvrtc::{self, Program};
use slabwise_cuda::{Description, Function, PRELUDE, Target, has_attention, lower};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::{Env, Size, Symbol};
use slabwise_kernels::spec::{Attention, AttentionGrad, Body, Dims, Operand, Scores};

/// Lengths around those of tiles, every kind of pair, queries that see no key.
fn list() -> Vec<Sizes> {
    vec![
        plain(70, 70, 32),
        plain(70, 70, 64).with(false, None, 0),
        plain(33, 100, 20).with(true, Some(9), 60),
        plain(140, 100, 8).with(false, Some(20), 3),
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
            ..plain(66, 66, 64)
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

/// Of halves, weights and gradients of scores are rounded to their type, by 2⁻¹¹ or 2⁻⁸ of each,
/// and a gradient of f32, which is one of halves here. Other mixtures are computed in f32.
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
        plain(20, 40, 256).with(true, None, 20).of(bf16),
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

/// Half of a chunk of eight elements lies behind such a width, where the gradient of the result is of
/// another type than the tiles.
#[test]
fn nothing_behind_a_row_is_read() {
    let list = [DType::BF16, DType::F16].map(|half| {
        let types = Types {
            dy: DType::F32,
            result: DType::F32,
            ..Types::of(half)
        };
        plain(33, 70, 36).with(false, None, 0).of(types)
    });
    let mut choices = Choices::new(20);
    let mut cases = Vec::new();
    for s in &list {
        for spec in specs(s, [Layout::Contiguous; 6]) {
            cases.push(Case::new(format!("{s:?}"), spec, &mut choices));
        }
    }
    check(&list, cases);
}

/// Gradients that are stored in halves are those in f32, rounded.
#[test]
fn gradients_in_halves_are_those_in_f32_rounded() {
    let list = [DType::BF16, DType::F16].map(|half| plain(70, 70, 32).of(Types::of(half)));
    let mut choices = Choices::new(19);
    let wide: Vec<Case> = (list.iter())
        .map(|s| {
            let [_, gradient] = specs(s, [Layout::Contiguous; 6]);
            Case::new(format!("{s:?}"), gradient, &mut choices)
        })
        .collect();
    let narrow = |(case, s): (&Case, &Sizes)| {
        let mut case = case.clone();
        let Body::AttentionGrad(grad) = &mut case.spec.body else {
            unreachable!("each case is a gradient")
        };
        grad.gradients.dtype = s.types.queries;
        let gradients = case.args.last_mut().expect("the gradients");
        gradients.truncate(gradients.len() / 2);
        case
    };
    let narrow: Vec<Case> = wide.iter().zip(&list).map(narrow).collect();
    let lowered = |case: &Case| lower(&case.spec, &case.bounds, &case.target).expect("source");
    let all: Vec<_> = wide.iter().chain(&narrow).map(lowered).collect();
    let functions: Vec<Function> = all.iter().flat_map(|l| l.functions.clone()).collect();
    let Some(emulator) = emulate(&functions) else {
        return;
    };
    let results: Vec<Vec<u8>> = (wide.iter().chain(&narrow).zip(&all))
        .map(|(case, lowered)| {
            let run = case.emulated(lowered, &emulator, Order::ALL[0], NO_FAULT);
            run.expect("a run").0.pop().expect("the gradients")
        })
        .collect();
    let (wide, narrow) = results.split_at(list.len());
    for ((wide, narrow), s) in wide.iter().zip(narrow).zip(&list) {
        let half = s.types.queries;
        for (wide, narrow) in wide.chunks(4).zip(narrow.chunks(2)) {
            let wide = float(DType::F32, wide);
            let rounded = match half {
                DType::F16 => half::f16::from_f32(wide).to_f32(),
                _ => half::bf16::from_f32(wide).to_f32(),
            };
            assert_eq!(float(half, narrow), rounded, "{half}: {wide}");
        }
    }
}

/// Masks of every type, limits, pasts of the run and queries of one position.
#[test]
fn scores_may_be_masked_and_limited_and_begin_in_a_run() {
    let [f16, bf16] = [DType::F16, DType::BF16].map(Types::of);
    let heads_of_one_position = plain(6, 40, 16).of(bf16).with_past();
    let list = [
        plain(40, 70, 32)
            .with(true, None, 33)
            .masked(DType::F32, MaskLayout::Pairs),
        plain(30, 30, 24)
            .of(bf16)
            .with(false, None, 0)
            .masked(DType::BF16, MaskLayout::OfKeys),
        plain(33, 50, 12)
            .with(true, Some(20), 20)
            .masked(DType::Bool, MaskLayout::Transposed)
            .capped(0.8),
        Sizes {
            batch: 2,
            ..plain(20, 45, 140)
                .of(f16)
                .masked(DType::Bool, MaskLayout::Shared)
                .with_past()
                .capped(2.0)
        },
        plain(70, 35, 64)
            .of(bf16)
            .with(false, Some(30), -5)
            .masked(DType::F16, MaskLayout::Pairs)
            .capped(1.5),
        Sizes {
            heads: 4,
            ..plain(25, 60, 8).with_past()
        },
        Sizes {
            scores: Scores {
                step: 0,
                ..heads_of_one_position.scores
            },
            ..heads_of_one_position
        },
    ];
    check(&list, cases(&list, TARGET));
    let tf32 = Target {
        tf32: true,
        ..TARGET
    };
    let list = [plain(20, 40, 32)
        .with(true, None, 20)
        .masked(DType::F32, MaskLayout::OfKeys)
        .capped(3.0)];
    check(&list, cases(&list, tf32));
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
    // Halves have half the bytes in shared memory.
    let halves = |width: i64| (DType::BF16, Size::fixed(width));
    assert!(!refused(&[halves(256); 3]) && refused(&[halves(257); 3]));
    assert!(!refused(&[
        halves(256),
        halves(256),
        halves(256),
        rows(256),
        rows(256)
    ]));
    assert!(refused(&[
        halves(256),
        halves(256),
        (DType::F16, Size::fixed(256))
    ]));
    // With a mask of any length, and a past of the run.
    let (mask, past) = (rows(1000), (DType::I32, Size::fixed(1000)));
    let [r, wide] = [rows(8), rows(129)];
    assert!(!refused(&[r, r, r, mask]) && !refused(&[r, r, r, past]));
    assert!(!refused(&[r, r, r, mask, past]) && !refused(&[r, r, r, mask, past, r, r]));
    assert!(!refused(&[r, r, r, past, r, r]));
    assert!(refused(&[r, r, r, past, r, wide]) && refused(&[r, r, wide, mask, past]));
    assert!(refused(&[r; 2]) && refused(&[r, r, past]));
    let far = Scores {
        past: i32::MAX,
        ..s.scores
    };
    assert!(!has_attention(&TARGET, &far, &[rows(8); 3]));
    let stepping = Scores {
        step: 2,
        ..s.scores
    };
    assert!(!has_attention(&TARGET, &stepping, &[rows(8); 3]));
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
    for s in [
        plain(4, 4, 129),
        Sizes { scores: far, ..s },
        Sizes {
            scores: stepping,
            ..s
        },
    ] {
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
                let image = nvrtc::compile(&program, None).expect("a cubin").image;
                let on_cores = tensor_instructions(&image, &function.name);
                assert_eq!(on_cores, products, "{}: HMMA", function.name);
            }
        }
    }
}

/// Half of the tiles, each on one architecture: registers suffice, shared memory too.
#[test]
fn no_tile_spills() {
    check_tiles(6, 2);
}

/// Every tile on every architecture.
#[test]
#[ignore = "compiles for minutes"]
fn no_tile_spills_on_any_architecture() {
    check_tiles(1, 1);
}

/// Compiles one in `share` tiles on one of each `period` architectures.
fn check_tiles(period: usize, share: usize) {
    // Few and many blocks, and much and little shared memory, choose different tiles.
    let mut names = std::collections::BTreeSet::new();
    for (at, sm) in [80, 86, 89, 90, 100, 120].into_iter().enumerate() {
        let device = Description::nearest(sm).target();
        // (Both types of halves need the same registers.)
        let half = [DType::F16, DType::BF16][at % 2];
        let mut functions: Vec<Function> = Vec::new();
        let products = [(DType::F32, false), (DType::F32, true), (half, false)];
        let widths = [32, 64, 128, 256].into_iter().enumerate();
        // On one architecture with a mask and a limit, too.
        let kinds = widths.flat_map(|(i, w)| {
            let kinds = products
                .into_iter()
                .enumerate()
                .map(move |(j, p)| (i + j, w, p));
            let own = kinds.filter(move |(kind, ..)| kind % period == at % period);
            own.map(move |(kind, w, p)| (w, p, kind % 6 == at))
        });
        for ((width, (dtype, tf32), is_adjusted), heads, length) in
            kinds.flat_map(|kind| [(1, 64), (48, 256), (384, 256)].map(|(h, l)| (kind, h, l)))
        {
            let target = Target { tf32, ..device };
            if width > 128 && dtype == DType::F32 {
                continue;
            }
            let s = Sizes {
                heads,
                ..plain(length, length, width).of(Types::of(dtype))
            };
            let masked = s.masked(DType::Bool, MaskLayout::Pairs);
            let masked = masked.with_past().capped(30.0);
            let all = [Some(s), is_adjusted.then_some(masked)]
                .into_iter()
                .flatten();
            let all = all.map(|s| specs(&s, [Layout::Contiguous; 6]));
            for spec in all.flatten() {
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
        let some: Vec<Function> = functions.into_iter().step_by(share).collect();
        compile_for_gpu(&some, sm, 0);
    }
    assert!(names.len() > 40, "{names:?}");
}
