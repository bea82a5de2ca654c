//! Kernels on slices of a batch: the same bits as on the whole batch, for every partition,
//! instruction set and team.

#[allow(dead_code)]
mod common;

use common::{Random, contiguous, teams};
use slabwise_kernels::cpu::{Config, Isa, Kernel, Team};
use slabwise_kernels::dtype::{DType, Lane};
use slabwise_kernels::memory::{Memory, Region};
use slabwise_kernels::micro_batch::{MicroBatch, MicroBatching};
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::{Env, Size, Symbol};
use slabwise_kernels::spec::{
    Access, Attention, AttentionGrad, Body, BoundsCheck, Conv2d, ConvKind, Gather, Inst, Matmul,
    Operand, Pool2d, PoolKind, ReduceOp, Scores, Spec, Store, Window,
};

const BATCH: Symbol = Symbol(0);

/// One thread without vectors.
const PLAIN: Config = Config {
    threads: 1,
    isa: Isa::Portable,
};

/// Bytes of a guard zone, and its initial contents.
const GUARD: u64 = 1024;
const POISON: i32 = 0x7fde_adbe;

/// A size for each example of the batch.
fn batch(per_example: usize) -> Size {
    Size::symbol(BATCH)
        .checked_mul(Size::fixed(per_example as i64))
        .expect("small")
}

fn fixed(sizes: &[usize]) -> impl Iterator<Item = Size> {
    sizes.iter().map(|&n| Size::fixed(n as i64))
}

fn dims(per_example: usize, rest: &[usize]) -> slabwise_kernels::spec::Dims {
    [batch(per_example)]
        .into_iter()
        .chain(fixed(rest))
        .collect()
}

fn strided(strides: &[i64]) -> Operand {
    common::operand(0, strides)
}

/// Row-major with the batch outermost.
fn rows(rest: &[usize]) -> Operand {
    let with_batch: Vec<usize> = std::iter::once(1).chain(rest.iter().copied()).collect();
    strided(&contiguous(&with_batch))
}

/// A kernel, the examples of its bound, and an example's elements of every argument (or all
/// elements of one they share).
struct Case {
    spec: Spec,
    bound: u32,
}

impl Case {
    fn bound(&self) -> Env {
        let mut env = Env::default();
        env.0[0] = self.bound;
        env
    }

    /// Runs `n` examples, whole or in slices of these sizes over and over, with a workspace limited
    /// to a number of bytes if possible, and returns all arguments afterwards. The workspace and the sums lie
    /// between guard zones.
    fn run(
        &self,
        args: &[Vec<f32>],
        n: u32,
        slices: Option<(&[u32], u64)>,
        isa: Isa,
        team: &Team,
    ) -> Vec<Vec<u32>> {
        let (bound, config) = (
            self.bound(),
            Config {
                threads: team.threads(),
                isa,
            },
        );
        let mut env = bound;
        env.0[0] = n;
        let micro_batching = MicroBatching::of(&self.spec, BATCH).expect("a spec for slices");
        let mut memory = Memory::new();
        let filled = |memory: &mut Memory, values: &[f32]| {
            let region = memory.reserve(values.len() as u64 * 4).expect("memory");
            memory.elements_mut::<f32>(&region).copy_from_slice(values);
            region
        };
        let sliced = |most, room| {
            Kernel::sliced(self.spec.clone(), BATCH, most, &bound, &config, room)
                .expect("a valid spec")
                .expect("slices")
        };
        let slices = slices.map(|(sizes, room)| {
            let most = *sizes.iter().max().expect("a size");
            let unit = sliced(most, room).slice_unit();
            let sizes: Vec<u32> = sizes.iter().map(|s| s.next_multiple_of(unit)).collect();
            (sizes, room)
        });
        let kernel = slices.as_ref().map_or_else(
            || Kernel::new(self.spec.clone(), &bound, &config).expect("a valid spec"),
            |(sizes, room)| sliced(*sizes.iter().max().expect("a size"), *room),
        );
        let mut guarded = |bytes: u64| {
            let arena = memory.reserve(bytes + 2 * GUARD).expect("memory");
            memory.elements_mut::<i32>(&arena).fill(POISON);
            (
                arena.part(GUARD, bytes),
                [arena.part(0, GUARD), arena.part(GUARD + bytes, GUARD)],
            )
        };
        let [(workspace, before), (sums, behind)] =
            [guarded(kernel.workspace()), guarded(kernel.sums())];
        let whole: Vec<Region> = args
            .iter()
            .map(|values| filled(&mut memory, values))
            .collect();
        let Some((sizes, _)) = slices else {
            kernel
                .run(&mut memory, &whole, &workspace, &env, team)
                .expect("no fault");
            return whole
                .iter()
                .map(|r| {
                    memory
                        .elements::<f32>(r)
                        .iter()
                        .map(|x| x.to_bits())
                        .collect()
                })
                .collect();
        };
        let mut results: Vec<Vec<u32>> = args
            .iter()
            .map(|v| v.iter().map(|x| x.to_bits()).collect())
            .collect();
        let mut from = 0;
        for size in sizes.iter().cycle() {
            if from >= self.bound {
                break;
            }
            let slice = MicroBatch {
                from,
                to: (from + size).min(self.bound),
                last: from + size >= self.bound,
            };
            let here = |step: u64| {
                (u64::from(from.min(n)) * step) as usize
                    ..(u64::from(slice.to.min(n)) * step) as usize
            };
            // Arguments that differ between examples lie in arenas of just a slice.
            let mut regions: Vec<Region> = Vec::new();
            for ((values, step), whole) in args.iter().zip(&micro_batching.steps).zip(&whole) {
                regions.push(match step {
                    Some(step) => filled(&mut memory, &values[here(step.at(&env) as u64)]),
                    None => *whole,
                });
            }
            let given = regions
                .iter()
                .copied()
                .chain((kernel.sums() > 0).then_some(sums))
                .collect::<Vec<_>>();
            kernel
                .run_slice(&mut memory, &given, &workspace, &env, team, slice)
                .expect("no fault");
            for ((result, step), region) in
                results.iter_mut().zip(&micro_batching.steps).zip(&regions)
            {
                let at = step.map_or(0..result.len(), |step| here(step.at(&env) as u64));
                result[at]
                    .iter_mut()
                    .zip(memory.elements::<f32>(region))
                    .for_each(|(to, from)| *to = from.to_bits());
            }
            from = slice.to;
        }
        for guard in before.iter().chain(&behind) {
            assert!(
                memory.elements::<i32>(guard).iter().all(|&x| x == POISON),
                "guard zone {guard:?} was written"
            );
        }
        results
    }
}

/// Every way of running a case gives the same bits; at least one result differs from its initial
/// contents.
fn check(case: &Case, random: &mut Random) {
    let lengths = |n: u32| {
        let mut env = case.bound();
        env.0[0] = n;
        case.spec
            .arguments()
            .iter()
            .map(|(operand, space, _)| operand.extent(space, &env) as usize)
            .collect::<Vec<_>>()
    };
    let teams = teams();
    for n in [case.bound, random.int(0, case.bound as usize) as u32] {
        let args: Vec<Vec<f32>> = lengths(n)
            .into_iter()
            .map(|len| random.floats(len))
            .collect();
        for isa in Isa::available() {
            let expected = case.run(&args, n, None, isa, &teams[0]);
            if n > 0 {
                let changed = expected
                    .iter()
                    .flatten()
                    .zip(args.iter().flatten())
                    .filter(|(a, b)| **a != b.to_bits());
                assert!(changed.count() > 0, "nothing is computed");
            }
            for team in &teams {
                let some = random.int(1, case.bound as usize) as u32;
                for (size, room) in [
                    (1, random.of(&[0, u64::MAX])),
                    (some, u64::MAX),
                    (some, random.of(&[0, 30_000, 100_000, 300_000])),
                ] {
                    let got = case.run(&args, n, Some((&[size], room)), isa, team);
                    assert!(
                        got == expected,
                        "{isa}, {} threads: slices of {size} of {n} in {room} bytes give other bits: {:#?}",
                        team.threads(),
                        case.spec
                    );
                }
            }
        }
    }
}

/// A kernel that stores the anchor's value for each point, plus another operand.
fn anchored(body: Body, dims: slabwise_kernels::spec::Dims, plus: Operand, out: Operand) -> Spec {
    let code = vec![Inst::Load(0), Inst::Acc, Inst::Op(ScalarOp::Add, [0, 1, 0])];
    Spec {
        body,
        dims,
        reduced: 0,
        operands: vec![plus, out],
        indices: vec![],
        code,
        stores: vec![Store {
            value: 2,
            operand: 1,
        }],
    }
}

fn conv(random: &mut Random, kind: ConvKind, large: bool) -> Case {
    let groups = random.of(&[1, 1, 2, 6]);
    let [ci, co] = if groups == 6 {
        [6, 6]
    } else {
        [groups * random.int(1, 4), groups * random.int(1, 20)]
    };
    let k = [random.int(1, 3), random.int(1, 3)];
    let (stride, pad) = (
        [random.int(1, 2), random.int(1, 2)],
        [random.int(0, 1), random.int(0, 1)],
    );
    let sides = if large { (28, 40) } else { (4, 17) };
    let hw = [random.int(sides.0, sides.1), random.int(sides.0, sides.1)];
    let bound = random.int(2, 9) as u32;
    convolution(kind, groups, [ci, co], hw, [k, stride, pad], bound)
}

/// A convolution by Winograd's filtering, of parts of one or two images.
fn filtered(random: &mut Random, kind: ConvKind) -> Case {
    let [ci, co] = [random.int(8, 20), random.int(8, 40)];
    let hw = [random.int(16, 23), random.int(16, 23)];
    let bound = random.int(4, 14) as u32;
    convolution(kind, 1, [ci, co], hw, [[3; 2], [1; 2], [1; 2]], bound)
}

fn convolution(
    kind: ConvKind,
    groups: usize,
    [ci, co]: [usize; 2],
    hw: [usize; 2],
    [k, stride, pad]: [[usize; 2]; 3],
    bound: u32,
) -> Case {
    let out = [0, 1].map(|i| (hw[i] + 2 * pad[i] - k[i]) / stride[i] + 1);
    let (image, result, weight) = (
        [ci, hw[0], hw[1]],
        [co, out[0], out[1]],
        [co, ci / groups, k[0], k[1]],
    );
    let size = |n: usize| Size::fixed(n as i64);
    let fixed_weight = strided(&contiguous(&weight));
    let [a, b] = match kind {
        ConvKind::Forward => [rows(&image), fixed_weight.clone()],
        ConvKind::InputGrad => [rows(&result), fixed_weight.clone()],
        ConvKind::WeightGrad => [rows(&image), rows(&result)],
    };
    let (space, target) = match kind {
        ConvKind::Forward => (dims(1, &result), rows(&result)),
        ConvKind::InputGrad => (dims(1, &image), rows(&image)),
        ConvKind::WeightGrad => (fixed(&weight).collect(), fixed_weight),
    };
    let n = batch(1);
    let [hw, ohw] = [hw.map(size), out.map(size)];
    let body = Conv2d {
        kind,
        n,
        ci: size(ci),
        co: size(co),
        hw,
        ohw,
        k,
        stride,
        pad,
        dilation: [1, 1],
        groups,
        a,
        b,
        prologue: None,
        exact: false,
    };
    Case {
        spec: anchored(Body::Conv2d(body), space, target.clone(), target),
        bound,
    }
}

#[test]
fn weight_gradients_go_on_where_the_last_slice_ended() {
    let mut random = Random(11);
    for i in 0..14 {
        let case = conv(&mut random, ConvKind::WeightGrad, i % 4 == 0);
        check(&case, &mut random);
    }
    for _ in 0..4 {
        let case = filtered(&mut random, ConvKind::WeightGrad);
        check(&case, &mut random);
    }
    // Panels of one kernel element each, and parts of 32 and of 10 images.
    // Depthwise ones, of images as large as the result.
    for (groups, hw, channels, k) in [
        (1, [4, 4], [80, 20], 3),
        (1, [7, 7], [30, 9], 5),
        (9, [7, 7], [9, 9], 3),
        (70, [2, 5], [70, 70], 5),
    ] {
        let geometry = [[k; 2], [1; 2], [k / 2; 2]];
        let case = convolution(ConvKind::WeightGrad, groups, channels, hw, geometry, 70);
        check(&case, &mut random);
    }
}

#[test]
fn convolutions_and_poolings_are_those_of_their_images() {
    let mut random = Random(12);
    for kind in [ConvKind::Forward, ConvKind::InputGrad] {
        for _ in 0..4 {
            let case = conv(&mut random, kind, false);
            check(&case, &mut random);
        }
        let case = filtered(&mut random, kind);
        check(&case, &mut random);
        // Many small images, whose slices are those of few.
        let geometry = [[3; 2], [1; 2], [1; 2]];
        let case = convolution(kind, 1, [70, 20], [2, 3], geometry, 24);
        check(&case, &mut random);
        let case = convolution(kind, 9, [9, 9], [4, 7], geometry, 24);
        check(&case, &mut random);
    }
    let (channels, side) = (3, 10);
    let window = Window {
        k: [2, 2],
        stride: [2, 2],
        pad: [0, 0],
    };
    let x = rows(&[channels, side, side]);
    let body = Body::Pool2d(Pool2d {
        kind: PoolKind::Max,
        window,
        hw: [Size::fixed(side as i64); 2],
        x,
        arg: None,
    });
    let out = rows(&[channels, side / 2, side / 2]);
    let spec = anchored(
        body,
        dims(1, &[channels, side / 2, side / 2]),
        out.clone(),
        out,
    );
    check(&Case { spec, bound: 7 }, &mut random);
}

/// A head is computed alone, however many there are.
#[test]
fn attention_is_that_of_its_heads() {
    let (queries, keys, width) = (21, 37, 12);
    let heads = |rows: usize| rows_of_heads(2, rows, width);
    let of = Attention {
        scores: Scores {
            scale: 0.3,
            soft_cap: Some(2.0),
            causal: true,
            window: None,
            past: 16,
            step: 1,
        },
        width: Size::fixed(width as i64),
        keys: Size::fixed(keys as i64),
        q: heads(queries),
        k: heads(keys),
        v: heads(keys),
        mask: Some(strided(&[keys as i64, 0, 0, 1])),
        past: None,
        result: heads(queries),
    };
    let grad = AttentionGrad {
        of: of.clone(),
        queries: Size::fixed(queries as i64),
        dy: heads(queries),
        in_turns: false,
        gradients: heads(queries + 2 * keys),
    };
    let mut random = Random(14);
    for (body, rows) in [
        (Body::Attention(Box::new(of)), queries),
        (Body::AttentionGrad(Box::new(grad)), queries + 2 * keys),
    ] {
        let spec = Spec {
            operands: vec![],
            code: vec![],
            stores: vec![],
            ..anchored(body, dims(1, &[2, rows, width]), strided(&[]), strided(&[]))
        };
        check(&Case { spec, bound: 6 }, &mut random);
    }
}

/// Rows of heads, the heads of a row side by side.
fn rows_of_heads(heads: usize, rows: usize, width: usize) -> Operand {
    let [h, r, w] = [heads, rows, width].map(|n| n as i64);
    strided(&[h * r * w, w, h * w, 1])
}

/// Products with few rows split the contracted axis: the number of splits depends on all rows, not
/// on a slice's.
#[test]
fn products_split_as_the_whole_batch_does() {
    let mut random = Random(13);
    for per_example in [1, 3, 200] {
        for (n, k) in [
            (random.int(2, 40), random.int(2, 90)),
            (random.int(1, 130), 5000),
        ] {
            let body = Body::Matmul(Matmul {
                in_order: true,
                k: Size::fixed(k as i64),
                a: rows(&[k]),
                b: strided(&[n as i64, 1]),
            });
            let spec = anchored(body, dims(per_example, &[n]), rows(&[n]), rows(&[n]));
            check(
                &Case {
                    spec,
                    bound: random.int(2, 6) as u32,
                },
                &mut random,
            );
        }
    }
}

/// The weight gradient of a dense layer: the batch is contracted, and slices may end anywhere in
/// it.
#[test]
fn sums_of_products_go_on_where_the_last_slice_ended() {
    let mut random = Random(17);
    // Groups, rows and columns, rows for each example: results of one block and of several, of one
    // column and of one row; long sums that are split, and that are not.
    for ([groups, m, n], per_example, bound) in [
        ([1, 5, 7], 1, 30),
        ([2, 31, 1], 3, 11),
        ([1, 1, 45], 2, 9),
        ([1, 190, 140], 1, 7),
        ([1, 13, 21], 300, 5),
        ([3, 6, 18], 700, 7),
        ([1, 9, 3], 1100, 5),
        ([1, 1, 700], 260, 3),
    ] {
        let k = batch(per_example);
        // Rows of groups, or a group's alone; either may be stored with its columns last or first.
        let operand = |width: usize, contracted_first: bool| {
            let strides = [width as i64, (groups * width) as i64, 1];
            strided(&if contracted_first {
                strides
            } else {
                [strides[0], strides[2], strides[1]]
            })
        };
        let body = Body::Matmul(Matmul {
            in_order: true,
            k,
            a: operand(m, false),
            b: operand(n, true),
        });
        let weight = strided(&contiguous(&[groups, m, n]));
        let spec = anchored(
            body,
            fixed(&[groups, m, n]).collect(),
            weight.clone(),
            weight,
        );
        check(&Case { spec, bound }, &mut random);
    }
}

/// A slice may end an open k-block of one split while it goes on with an open one of another: two
/// workers then hold unfinished sums of the same elements.
#[test]
fn splits_of_a_product_keep_the_sums_of_their_open_k_blocks_apart() {
    let mut random = Random(18);
    // Eight k-blocks of 512 steps in two splits of four. The second slice has the end of the first
    // split and the start of the second one, about as long, and no more.
    let (m, n, steps, slices) = (160, 120, 4096, [1537, 1025, 1534]);
    let weight = strided(&contiguous(&[1, m, n]));
    let body = Body::Matmul(Matmul {
        in_order: true,
        k: batch(1),
        a: strided(&[0, 1, m as i64]),
        b: strided(&[0, n as i64, 1]),
    });
    let spec = anchored(body, fixed(&[1, m, n]).collect(), weight.clone(), weight);
    let case = Case { spec, bound: steps };
    let args: Vec<Vec<f32>> = case
        .spec
        .arguments()
        .iter()
        .map(|(operand, space, _)| operand.extent(space, &case.bound()) as usize)
        .map(|len| random.floats(len))
        .collect();
    let isa = *Isa::available().last().expect("an instruction set");
    let team = Team::new(2);
    let expected = case.run(&args, steps, None, isa, &team);
    for _ in 0..100 {
        let got = case.run(&args, steps, Some((&slices, u64::MAX)), isa, &team);
        assert!(got == expected, "other bits");
    }
}

#[test]
fn results_of_varying_sizes_have_no_sums_between_slices() {
    let body = Body::Matmul(Matmul {
        in_order: true,
        k: batch(1),
        a: strided(&[1, 4]),
        b: strided(&[3, 1]),
    });
    let space = [Size::symbol(Symbol(1)), Size::fixed(3)]
        .into_iter()
        .collect();
    let spec = anchored(body, space, strided(&[3, 1]), strided(&[3, 1]));
    assert!(
        Kernel::sliced(spec, BATCH, 2, &Env([8; 8]), &PLAIN, u64::MAX)
            .expect("a valid spec")
            .is_none()
    );
}

/// A loop whose sums of a batch also go through a length of its own has none: with fewer elements for
/// each example its tiles have other rows, and its sums other places.
#[test]
fn sums_through_another_length_are_not_continued() {
    let length = Size::symbol(Symbol(1));
    let space = fixed(&[64]).chain([batch(1), length]).collect();
    let spec = summed(space, &[1, 64 * 64, 64], &[1, 0, 0], 2);
    let bound = Env([8, 64, 0, 0, 0, 0, 0, 0]);
    assert!(
        Kernel::sliced(spec, BATCH, 2, &bound, &PLAIN, u64::MAX)
            .expect("a valid spec")
            .is_none()
    );
}

/// A slice of a run of more examples than the bound would have more sums than the kernel asks for.
#[test]
#[should_panic(expected = "above the bound")]
fn slices_of_a_run_above_the_bound_are_refused() {
    let spec = summed(
        dims(1, &[4]).into_iter().rev().collect(),
        &[1, 4],
        &[1, 0],
        1,
    );
    let [bound, whole] = [20, 2000].map(|n| Env([n, 0, 0, 0, 0, 0, 0, 0]));
    let kernel = Kernel::sliced(spec.clone(), BATCH, 20, &bound, &PLAIN, u64::MAX)
        .expect("a valid spec")
        .expect("slices");
    let mut memory = Memory::new();
    let mut reserve = |bytes: u64| memory.reserve(bytes).expect("memory");
    let mut args: Vec<Region> = spec.arguments().iter().map(|_| reserve(80 * 4)).collect();
    let workspace = reserve(kernel.workspace());
    args.push(reserve(kernel.sums()));
    let slice = MicroBatch {
        from: 0,
        to: 20,
        last: false,
    };
    let team = Team::new(1);
    let _ = kernel.run_slice(&mut memory, &args, &workspace, &whole, &team, slice);
}

/// Σ x·y along some axes, where it is scaled and added to; every product is stored as well.
fn summed(space: slabwise_kernels::spec::Dims, x: &[i64], sums: &[i64], reduced: usize) -> Spec {
    let product = Inst::Op(ScalarOp::Mul, [0, 1, 0]);
    let code = vec![
        Inst::Load(0),
        Inst::Load(1),
        product,
        Inst::Reduce(ReduceOp::Sum, 2),
        Inst::Reduce(ReduceOp::Max, 0),
        Inst::Load(2),
        Inst::Op(ScalarOp::Mul, [3, 5, 0]),
        Inst::Op(ScalarOp::Add, [6, 4, 0]),
    ];
    let operands = vec![
        strided(x),
        strided(x),
        strided(sums),
        strided(sums),
        strided(x),
    ];
    let stores = vec![
        Store {
            value: 7,
            operand: 3,
        },
        Store {
            value: 2,
            operand: 4,
        },
    ];
    Spec {
        body: Body::Loop,
        dims: space,
        reduced,
        operands,
        indices: vec![],
        code,
        stores,
    }
}

#[test]
fn sums_over_the_batch_go_on_where_the_last_slice_ended() {
    let mut random = Random(14);
    // The gradient of a convolution's bias: channels are kept, examples and pixels are not.
    for (channels, pixels, bound) in [(5, 40, 6), (3, 20_000, 5), (20, 1500, 4), (1, 3000, 3)] {
        let space = fixed(&[channels])
            .chain([batch(1)])
            .chain(fixed(&[pixels]))
            .collect();
        let spec = summed(
            space,
            &[pixels as i64, (channels * pixels) as i64, 1],
            &[1, 0, 0],
            2,
        );
        if channels > 1 {
            check(&Case { spec, bound }, &mut random);
        }
    }
    // That of a dense layer's, with one row or several for each example.
    for (features, per_example, bound) in [(130, 1, 40), (700, 1, 60), (40, 64, 12), (512, 64, 5)] {
        let space = fixed(&[features]).chain([batch(per_example)]).collect();
        let spec = summed(space, &[1, features as i64], &[1, 0], 1);
        check(&Case { spec, bound }, &mut random);
    }
}

#[test]
fn rows_are_folded_as_in_the_whole_batch() {
    let mut random = Random(15);
    // Sums along the last axis, or along the one before it, of whole batches with few and with many
    // rows.
    for (length, bound) in [(33, 9), (70_000, 3), (300, 40)] {
        let spec = summed(dims(1, &[length]), &[length as i64, 1], &[1, 0], 1);
        check(&Case { spec, bound }, &mut random);
        let space = [batch(1)].into_iter().chain(fixed(&[6, length])).collect();
        let spec = summed(space, &[6 * length as i64, 1, 6], &[6, 1, 0], 1);
        check(&Case { spec, bound }, &mut random);
    }
}

#[test]
fn positions_are_counted_through_the_whole_batch() {
    let mut random = Random(16);
    for per_example in [1, 4] {
        let code = vec![
            Inst::Load(0),
            Inst::Index(0),
            Inst::Cast(1, Lane::F32),
            Inst::Op(ScalarOp::Add, [0, 2, 0]),
            Inst::Uniform {
                state: 1,
                stream: 7,
                index: 1,
            },
            Inst::Op(ScalarOp::Mul, [3, 4, 0]),
        ];
        let state = Operand {
            dtype: DType::I32,
            ..strided(&[0, 0])
        };
        let spec = Spec {
            body: Body::Loop,
            dims: dims(per_example, &[19]),
            reduced: 0,
            operands: vec![rows(&[19]), state, rows(&[19])],
            indices: vec![[Size::fixed(19), Size::ONE].into_iter().collect()],
            code,
            stores: vec![Store {
                value: 5,
                operand: 2,
            }],
        };
        check(&Case { spec, bound: 9 }, &mut random);
    }
}

#[test]
fn kernels_that_mix_examples_have_no_slices() {
    let none = |spec: &Spec| assert_eq!(MicroBatching::of(spec, BATCH), None, "{spec:#?}");
    let index = Operand {
        dtype: DType::I32,
        ..rows(&[])
    };
    let check_index = BoundsCheck {
        index: index.clone(),
        limit: Size::fixed(3),
    };
    let plain = |body: Body| anchored(body, dims(1, &[]), rows(&[]), rows(&[]));
    none(&plain(Body::BoundsCheck(check_index)));
    // An element of any example, by index.
    none(&plain(Body::Gather(Gather {
        source: strided(&[0]),
        index,
        axis_stride: Size::ONE,
        axis_len: batch(1),
    })));
    // Every example with every other.
    let (pairs, both) = ([batch(1), batch(1)].into_iter().collect(), strided(&[1, 0]));
    none(&Spec {
        dims: pairs,
        ..anchored(Body::Loop, dims(1, &[]), both.clone(), strided(&[0, 1]))
    });
    // Examples apart from one another by as many elements as there are examples.
    let far = Operand {
        strides: [Size::ONE, batch(1)].into_iter().collect(),
        ..rows(&[1])
    };
    none(&anchored(Body::Loop, dims(1, &[4]), rows(&[4]), far));
    // A sum whose tiles span both examples and elements.
    let spec = summed(
        [batch(1), Size::fixed(50)].into_iter().collect(),
        &[50, 1],
        &[0, 0],
        2,
    );
    let bound = Env([8; 8]);
    assert!(
        Kernel::sliced(spec, BATCH, 2, &bound, &PLAIN, u64::MAX)
            .expect("a valid spec")
            .is_none()
    );
    // Arguments shared by all examples have no stride per example.
    let micro_batching = MicroBatching::of(&summed(dims(1, &[5]), &[5, 1], &[1, 0], 1), BATCH)
        .expect("rows of examples");
    assert!(!micro_batching.folds && micro_batching.steps.iter().all(Option::is_some));
    let access = summed(dims(1, &[5]), &[5, 1], &[1, 0], 1)
        .arguments()
        .iter()
        .filter(|a| a.2 == Access::Write)
        .count();
    assert_eq!(access, 2);
}
