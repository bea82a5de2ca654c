//! Convolutions by Winograd's filtering: their error against sums in double precision, on data that
//! a tile of results shares.

use super::common::{Random, contiguous, operand, run_all, teams};
use super::{KINDS, Shape, conv, layout, positions, values};
use slabwise_kernels::cpu::{Config, Isa, Kernel};
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::{Env, Size, Symbol};
use slabwise_kernels::spec::{ConvKind, Inst, Spec};

const PRODUCTS: [ConvKind; 2] = [ConvKind::Forward, ConvKind::InputGrad];

/// Shapes at the limits of the filtering, of 3×3 and 5×5 kernels: the fewest channels and rows, odd
/// results, no and much padding, several panels and blocks, rows longer than a block; of tiles of 4×4
/// results also the fewest, the most channels, and two and three in a row; of many channels of small
/// images a few tiles, several passes, incomplete panels and blocks of channels.
fn shapes() -> Vec<Shape> {
    vec![
        Shape::simple(3, 8, 9, 8, 5, 2),
        Shape::simple(2, 32, 64, 14, 5, 2),
        Shape::simple(2, 17, 30, 13, 5, 0),
        Shape::simple(1, 8, 8, 9, 5, 4),
        Shape {
            hw: [9, 70],
            ..Shape::simple(1, 20, 33, 0, 5, 2)
        },
        Shape {
            hw: [12, 90],
            pad: [0, 3],
            cut: [0, 2],
            ..Shape::simple(1, 9, 20, 0, 5, 0)
        },
        Shape::simple(3, 8, 9, 8, 3, 1),
        Shape::simple(2, 16, 16, 13, 3, 1),
        Shape::simple(2, 17, 30, 11, 3, 0),
        Shape::simple(1, 8, 8, 9, 3, 2),
        Shape {
            hw: [9, 70],
            ..Shape::simple(1, 20, 33, 0, 3, 1)
        },
        Shape {
            hw: [8, 150],
            ..Shape::simple(1, 9, 90, 0, 3, 1)
        },
        Shape::simple(3, 30, 40, 8, 3, 1),
        Shape {
            hw: [12, 9],
            pad: [2, 0],
            cut: [1, 0],
            ..Shape::simple(3, 20, 12, 0, 3, 0)
        },
        Shape::simple(2, 17, 30, 17, 3, 0),
        Shape::simple(1, 8, 9, 16, 3, 2),
        Shape::simple(3, 84, 86, 14, 3, 1),
        Shape {
            hw: [64, 8],
            ..Shape::simple(2, 9, 20, 0, 3, 1)
        },
        Shape {
            hw: [31, 12],
            pad: [2, 1],
            cut: [2, 0],
            ..Shape::simple(2, 16, 8, 0, 3, 0)
        },
        Shape::simple(1, 67, 256, 4, 3, 1),
        Shape::simple(9, 130, 133, 4, 3, 1),
        Shape::simple(3, 136, 124, 7, 3, 1),
        Shape {
            hw: [7, 4],
            cut: [1, 0],
            ..Shape::simple(2, 241, 72, 0, 3, 1)
        },
    ]
}

/// Results of an axis of a tile: 4 for a 3×3 kernel if the results have at least 16 tiles of 4×4, and
/// no more than a third as many as of 2×2, and the transformed weights have at most 2¹⁸ elements.
fn results_of_tile(shape: &Shape, kind: ConvKind) -> usize {
    let [_, _, [_, rows, high, wide]] = shape.spaces(kind);
    let channels = shape.spaces(kind)[0][1];
    let tiles = |m: usize| high.div_ceil(m) * wide.div_ceil(m);
    let is_large = tiles(4) >= 16 && 3 * tiles(4) <= tiles(2);
    if shape.k == [3, 3] && is_large && 36 * rows * channels <= 1 << 18 {
        4
    } else {
        2
    }
}

/// The roundings of an element besides those of its sum over channels, which are those of the
/// transforms of the image, the weights and the products, and the largest coefficient of a product
/// of an element of the image and a weight in a result, in magnitude: of tiles of so many results and
/// kernels of so many taps.
fn constants(results: usize, taps: usize) -> (usize, f64) {
    match (results, taps) {
        (2, 3) => (14, 4.0),
        _ => (30, 256.0 / 9.0),
    }
}

/// For each result the sum over channels of the magnitudes of its tile's elements times those of
/// the weights.
fn tile_magnitudes(
    shape: &Shape,
    kind: ConvKind,
    a: &dyn Fn([usize; 4]) -> f64,
    b: &dyn Fn([usize; 4]) -> f64,
) -> Vec<f64> {
    let [image, _, [n, rows, high, wide]] = shape.spaces(kind);
    let (taps, results) = (shape.k[0], results_of_tile(shape, kind));
    let points = results + taps - 1;
    let weight = |row: usize, channel: usize, tap: usize| match kind {
        ConvKind::InputGrad => b([channel, row, tap / taps, tap % taps]),
        _ => b([row, channel, tap / taps, tap % taps]),
    };
    // The input gradient reads from its taps before a position and its padding on.
    let pad = shape.pad.map(|pad| match kind {
        ConvKind::InputGrad => taps as isize - 1 - pad as isize,
        _ => pad as isize,
    });
    let sum_of_tile = |n: usize, channel: usize, tile: [usize; 2]| -> f64 {
        let element = |e: usize, axis: usize| {
            usize::try_from((results * tile[axis] + e) as isize - pad[axis])
                .ok()
                .filter(|&at| at < image[2 + axis])
        };
        (0..points * points)
            .filter_map(|e| {
                let at = [n, channel, element(e / points, 0)?, element(e % points, 1)?];
                Some(a(at).abs())
            })
            .sum()
    };
    let tiles = [high, wide].map(|size| size.div_ceil(results));
    let mut all = Vec::new();
    for n in 0..n {
        // Of each tile and channel.
        let sums: Vec<f64> = (0..tiles[0] * tiles[1] * image[1])
            .map(|at| {
                let (tile, channel) = (at / image[1], at % image[1]);
                sum_of_tile(n, channel, [tile / tiles[1], tile % tiles[1]])
            })
            .collect();
        for row in 0..rows {
            let weights: Vec<f64> = (0..image[1])
                .map(|channel| {
                    (0..taps * taps)
                        .map(|tap| weight(row, channel, tap).abs())
                        .sum()
                })
                .collect();
            for (h, w) in (0..high).flat_map(|h| (0..wide).map(move |w| (h, w))) {
                let tile = h / results * tiles[1] + w / results;
                let sums = &sums[tile * image[1]..][..image[1]];
                let terms = weights.iter().zip(sums).map(|(weights, sum)| sum * weights);
                all.push(terms.sum());
            }
        }
    }
    all
}

/// Errors of results.
#[derive(Clone, Copy, Default)]
struct Errors {
    /// The largest relative to the sum of a result's own magnitudes.
    largest: f64,
    /// The sums of the squares of all errors and of all results.
    squares: [f64; 2],
}

impl Errors {
    fn join(self, other: Errors) -> Errors {
        Errors {
            largest: self.largest.max(other.largest),
            squares: [0, 1].map(|i| self.squares[i] + other.squares[i]),
        }
    }

    /// The root mean square error relative to that of the results.
    fn root_mean_square(self) -> f64 {
        (self.squares[0] / self.squares[1]).sqrt()
    }
}

/// Checks the bound of the documentation, and returns the errors.
fn check(
    random: &mut Random,
    shape: Shape,
    kind: ConvKind,
    exact: bool,
    change: &dyn Fn(usize, f32) -> f32,
    contiguous_only: bool,
) -> Errors {
    let spaces = shape.spaces(kind);
    let layouts = spaces.map(|space| {
        if contiguous_only {
            (operand(0, &contiguous(&space)), space.iter().product())
        } else {
            layout(random, space)
        }
    });
    let [(a, a_len), (b, b_len), (out, out_len)] = layouts;
    let mut args = [
        random.floats(a_len),
        random.floats(b_len),
        vec![f32::NAN; out_len],
    ];
    for (i, x) in args[0].iter_mut().enumerate() {
        *x = change(i, *x);
    }
    let (value_a, value_b) = (values(&args[0], &a), values(&args[1], &b));
    let position = positions(&out);
    let expected = shape.oracle(kind, &value_a, &value_b);
    let magnitudes = tile_magnitudes(&shape, kind, &value_a, &value_b);
    let mut spec = shape.spec(kind, a.clone(), b.clone(), out.clone());
    conv(&mut spec).exact = exact;
    let channels = spaces[0][1];
    let (roundings, coefficient) = constants(results_of_tile(&shape, kind), shape.k[0]);
    let unit = f64::from(f32::EPSILON) / 2.0;
    let mut errors = Errors::default();
    for (isa, results) in run_all(&spec, &Env::default(), &Env::default(), &teams(), &args) {
        let [_, d1, d2, d3] = spaces[2];
        for (flat, (&(sum, scale, _), magnitude)) in expected.iter().zip(&magnitudes).enumerate() {
            let point = [
                flat / d3 / d2 / d1,
                flat / d3 / d2 % d1,
                flat / d3 % d2,
                flat % d3,
            ];
            let actual = results[2][position(point)];
            let error = (f64::from(actual) - sum).abs();
            let bound = (channels + roundings) as f64 * unit * coefficient * magnitude;
            assert!(
                error <= bound,
                "{isa} {kind:?} {shape:?} at {point:?}: {actual} is not {sum} ± {bound}"
            );
            errors = errors.join(Errors {
                largest: if scale > 0.0 { error / scale } else { 0.0 },
                squares: [error * error, sum * sum],
            });
        }
    }
    errors
}

#[test]
fn errors_are_bounded_by_the_tile() {
    let mut random = Random(41);
    for (i, shape) in shapes().into_iter().enumerate() {
        for kind in PRODUCTS {
            check(&mut random, shape, kind, false, &|_, x| x, i % 2 == 0);
            // A large element spoils the results of its tile that do not read it, and no others.
            let spoilt = |i: usize, x: f32| if i % 97 == 5 { 1e6 * x } else { x };
            check(&mut random, shape, kind, false, &spoilt, i % 2 == 1);
        }
    }
}

/// On random data the error is that of a sum term by term, within a small factor; of tiles of 4×4
/// results a larger one, most of all at edges, where a result reads a small part of its tile.
#[test]
fn errors_of_random_data_are_small() {
    let mut random = Random(43);
    // Of tiles of 2×2 and of 4×4 results, filtered and term by term.
    let mut errors = [[Errors::default(); 2]; 2];
    for shape in shapes() {
        for kind in PRODUCTS {
            let of = &mut errors[usize::from(results_of_tile(&shape, kind) == 4)];
            for (exact, errors) in [false, true].into_iter().zip(of) {
                let found = check(&mut random, shape, kind, exact, &|_, x| x, true);
                *errors = errors.join(found);
            }
        }
    }
    for (results, [filtered, exact]) in [2, 4].into_iter().zip(errors) {
        let unit = 2f64.powi(24);
        println!(
            "tiles of {results}×{results} results: largest error in 2⁻²⁴ of the magnitudes {} \
             against {}, root mean square of the results' {} against {}",
            filtered.largest * unit,
            exact.largest * unit,
            filtered.root_mean_square() * unit,
            exact.root_mean_square() * unit
        );
        let most = if results == 4 { -18 } else { -21 };
        assert!(
            filtered.largest <= 2f64.powi(most),
            "{:e}",
            filtered.largest
        );
        assert!(exact.largest <= 2f64.powi(-21), "{:e}", exact.largest);
        assert!(
            results == 2 || filtered.root_mean_square() <= 4.0 * exact.root_mean_square(),
            "{:e}",
            filtered.root_mean_square()
        );
    }
}

/// Gradients of the weight: many terms, of which each element has its share.
#[test]
fn weight_gradients_are_sums() {
    let (mut random, teams) = (Random(59), teams());
    for shape in shapes() {
        for contiguous in [true, false] {
            let kind = ConvKind::WeightGrad;
            super::check(&mut random, shape, kind, contiguous, &teams);
        }
    }
    // Several splits.
    for (k, pad) in [(3, 1), (5, 2)] {
        let shape = Shape::simple(40, 8, 17, 12, k, pad);
        super::check(&mut random, shape, ConvKind::WeightGrad, true, &teams);
    }
}

/// Both algorithms differ, so that the switch is seen to work.
#[test]
fn the_switch_chooses_the_algorithm() {
    let mut random = Random(47);
    for (size, channels, kind) in [(12, 16), (16, 16), (4, 130)]
        .into_iter()
        .flat_map(|(size, channels)| KINDS.map(|kind| (size, channels, kind)))
        .filter(|&(size, _, kind)| size > 4 || kind != ConvKind::WeightGrad)
    {
        let shape = Shape::simple(2, channels, channels, size, 3, 1);
        let [a, b, out] = shape
            .spaces(kind)
            .map(|space| operand(0, &contiguous(&space)));
        let args = shape
            .spaces(kind)
            .map(|space| random.floats(space.iter().product()));
        let mut spec = shape.spec(kind, a, b, out);
        let [filtered, exact] = [false, true].map(|exact| {
            conv(&mut spec).exact = exact;
            run_all(&spec, &Env::default(), &Env::default(), &teams(), &args)
        });
        assert!(filtered != exact, "{kind:?}");
    }
}

/// Workers have no block for results that are only stored.
#[test]
fn stored_results_need_no_block() {
    let shape = Shape::simple(2, 16, 16, 16, 3, 1);
    let results: usize = shape.spaces(ConvKind::Forward)[2].iter().product();
    let [a, b, out] =
        (shape.spaces(ConvKind::Forward)).map(|space| operand(0, &contiguous(&space)));
    let mut spec = shape.spec(ConvKind::Forward, a, b, out);
    for isa in Isa::available() {
        let config = Config { isa, threads: 1 };
        let workspace = |spec: &Spec| {
            let kernel = Kernel::within(spec.clone(), &Env::default(), &config, u64::MAX);
            kernel.expect("a valid spec").workspace()
        };
        (spec.code, spec.stores[0].value) = (vec![Inst::Acc], 0);
        let stored = workspace(&spec);
        spec.code.push(Inst::Op(ScalarOp::Relu, [0; 3]));
        spec.stores[0].value = 1;
        assert!(stored + 4 * results as u64 <= workspace(&spec), "{isa}");
    }
}

/// An image has the same bits in a batch of any size.
#[test]
fn images_do_not_depend_on_the_batch() {
    let mut random = Random(53);
    let images = Size::symbol(Symbol(0));
    for (size, channels, kind) in [(10, [12, 16]), (16, [12, 16]), (4, [120, 140])]
        .into_iter()
        .flat_map(|(size, channels)| PRODUCTS.map(|kind| (size, channels, kind)))
    {
        let shape = Shape::simple(7, channels[0], channels[1], size, 3, 1);
        let spaces = shape.spaces(kind);
        let [a, b, out] = spaces.map(|space| operand(0, &contiguous(&space)));
        let mut spec = shape.spec(kind, a, b, out);
        conv(&mut spec).n = images;
        spec.dims[0] = images;
        let args = spaces.map(|space| random.floats(space.iter().product()));
        let bound = Env([9, 0, 0, 0, 0, 0, 0, 0]);
        let of = |n: u32| {
            let env = Env([n, 0, 0, 0, 0, 0, 0, 0]);
            run_all(&spec, &bound, &env, &teams(), &args)
        };
        let each = spaces[2][1..].iter().product::<usize>();
        for ((isa, all), (_, one)) in of(7).into_iter().zip(of(3)) {
            assert!(all[2][..3 * each] == one[2][..3 * each], "{isa} {kind:?}");
        }
    }
}
