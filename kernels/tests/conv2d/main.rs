//! Convolutions and both gradients against sums in double precision straight from the definition.

#[path = "../common/mod.rs"]
mod common;
mod depthwise;
mod prologue;
mod winograd;

use common::*;
use depthwise::DEPTHWISE;
use slabwise_kernels::cpu::{Config, Isa, Kernel};
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::{Env, Size, Symbol};
use slabwise_kernels::spec::{Body, Conv2d, ConvKind, Inst, Operand, Spec, Store};

const KINDS: [ConvKind; 3] = [ConvKind::Forward, ConvKind::InputGrad, ConvKind::WeightGrad];

fn conv(spec: &mut Spec) -> &mut Conv2d {
    let Body::Conv2d(conv) = &mut spec.body else {
        unreachable!()
    };
    conv
}

/// The numbers of a convolution.
#[derive(Clone, Copy, Debug)]
struct Shape {
    n: usize,
    ci: usize,
    co: usize,
    hw: [usize; 2],
    k: [usize; 2],
    stride: [usize; 2],
    pad: [usize; 2],
    dilation: [usize; 2],
    groups: usize,
    /// Result rows and columns less than the image would give.
    cut: [usize; 2],
}

impl Shape {
    /// Any shape that gives a result, of so many images at least, with so many channels in each of
    /// several groups.
    fn random(random: &mut Random, images: usize, channels: usize) -> Shape {
        loop {
            let groups = random.of(&[1, 1, 2, 3]);
            let shape = Shape {
                n: random.int(images, 4),
                ci: groups * random.int(if groups > 1 { channels } else { 1 }, 5),
                co: groups * random.of(&[1, 2, 5, 17]),
                hw: [random.int(1, 12), random.int(1, 20)],
                k: [random.int(1, 5), random.int(1, 4)],
                stride: [random.int(1, 3), random.int(1, 3)],
                pad: [random.int(0, 5), random.int(0, 3)],
                dilation: [random.int(1, 2), random.int(1, 3)],
                groups,
                cut: [random.of(&[0, 0, 1]), random.of(&[0, 0, 0, 2])],
            };
            if (0..2).all(|i| shape.hw[i] + 2 * shape.pad[i] > (shape.k[i] - 1) * shape.dilation[i])
            {
                return shape;
            }
        }
    }

    fn simple(n: usize, ci: usize, co: usize, hw: usize, k: usize, pad: usize) -> Shape {
        Shape {
            n,
            ci,
            co,
            hw: [hw; 2],
            k: [k; 2],
            stride: [1; 2],
            pad: [pad; 2],
            dilation: [1; 2],
            groups: 1,
            cut: [0; 2],
        }
    }

    fn out(&self, i: usize) -> usize {
        let span = (self.k[i] - 1) * self.dilation[i] + 1;
        ((self.hw[i] + 2 * self.pad[i] - span) / self.stride[i] + 1)
            .saturating_sub(self.cut[i])
            .max(1)
    }

    fn image(&self) -> [usize; 4] {
        [self.n, self.ci, self.hw[0], self.hw[1]]
    }

    fn weight(&self) -> [usize; 4] {
        [self.co, self.ci / self.groups, self.k[0], self.k[1]]
    }

    fn result(&self) -> [usize; 4] {
        [self.n, self.co, self.out(0), self.out(1)]
    }

    /// The spaces of both operands and the result.
    fn spaces(&self, kind: ConvKind) -> [[usize; 4]; 3] {
        match kind {
            ConvKind::Forward => [self.image(), self.weight(), self.result()],
            ConvKind::InputGrad => [self.result(), self.weight(), self.image()],
            ConvKind::WeightGrad => [self.image(), self.result(), self.weight()],
        }
    }

    fn spec(&self, kind: ConvKind, a: Operand, b: Operand, out: Operand) -> Spec {
        let size = |x: usize| Size::fixed(x as i64);
        Spec {
            body: Body::Conv2d(Conv2d {
                kind,
                n: size(self.n),
                ci: size(self.ci),
                co: size(self.co),
                hw: self.hw.map(size),
                ohw: [size(self.out(0)), size(self.out(1))],
                k: self.k,
                stride: self.stride,
                pad: self.pad,
                dilation: self.dilation,
                groups: self.groups,
                a,
                b,
                prologue: None,
                exact: false,
            }),
            dims: self.spaces(kind)[2].iter().map(|&d| size(d)).collect(),
            reduced: 0,
            operands: vec![out],
            indices: vec![],
            code: vec![Inst::Acc],
            stores: vec![Store {
                value: 0,
                operand: 0,
            }],
        }
    }

    /// The result, the sum of magnitudes and the number of terms at every point, row-major.
    fn oracle(
        &self,
        kind: ConvKind,
        a: &dyn Fn([usize; 4]) -> f64,
        b: &dyn Fn([usize; 4]) -> f64,
    ) -> Vec<(f64, f64, usize)> {
        let space = self.spaces(kind)[2];
        let index = |at: [usize; 4]| at.iter().zip(space).fold(0, |flat, (c, d)| flat * d + c);
        let mut sums = vec![(0.0, 0.0, 0); space.iter().product()];
        let (per_in, per_out) = (self.ci / self.groups, self.co / self.groups);
        for n in 0..self.n {
            for co in 0..self.co {
                for (oh, ow) in (0..self.out(0)).flat_map(|h| (0..self.out(1)).map(move |w| (h, w)))
                {
                    for (c, kh, kw) in (0..per_in).flat_map(|c| {
                        (0..self.k[0]).flat_map(move |h| (0..self.k[1]).map(move |w| (c, h, w)))
                    }) {
                        let h =
                            (oh * self.stride[0] + kh * self.dilation[0]).wrapping_sub(self.pad[0]);
                        let w =
                            (ow * self.stride[1] + kw * self.dilation[1]).wrapping_sub(self.pad[1]);
                        if h >= self.hw[0] || w >= self.hw[1] {
                            continue;
                        }
                        let (x, k, y) = (
                            [n, co / per_out * per_in + c, h, w],
                            [co, c, kh, kw],
                            [n, co, oh, ow],
                        );
                        let (to, term) = match kind {
                            ConvKind::Forward => (y, a(x) * b(k)),
                            ConvKind::InputGrad => (x, a(y) * b(k)),
                            ConvKind::WeightGrad => (k, a(x) * b(y)),
                        };
                        let (sum, scale, terms) = &mut sums[index(to)];
                        (*sum, *scale, *terms) = (*sum + term, *scale + term.abs(), *terms + 1);
                    }
                }
            }
        }
        sums
    }
}

/// Axes in memory order, with gaps now and then.
fn layout(random: &mut Random, space: [usize; 4]) -> (Operand, usize) {
    let order = random.of(&[
        [0, 1, 2, 3],
        [0, 1, 2, 3],
        [0, 2, 3, 1],
        [3, 1, 0, 2],
        [1, 0, 2, 3],
    ]);
    let mut strides = [0; 4];
    let mut stride = if random.int(0, 4) == 0 { 2 } else { 1 };
    for &axis in order.iter().rev() {
        strides[axis] = stride as i64;
        stride = stride * space[axis]
            + if random.int(0, 3) == 0 {
                random.int(1, 3)
            } else {
                0
            };
    }
    let offset = random.int(0, 2);
    (operand(offset as i64, &strides), offset + stride)
}

/// Where the elements of an operand of fixed size lie.
fn positions(operand: &Operand) -> impl Fn([usize; 4]) -> usize + use<> {
    let env = Env::default();
    let offset = operand.offset.at(&env);
    let strides: Vec<i64> = operand.strides.iter().map(|s| s.at(&env)).collect();
    move |at| {
        let steps = at.iter().zip(&strides).map(|(&c, s)| c as i64 * s);
        (offset + steps.sum::<i64>()) as usize
    }
}

/// The elements of an operand.
fn values<'a>(memory: &'a [f32], operand: &Operand) -> impl Fn([usize; 4]) -> f64 + use<'a> {
    let position = positions(operand);
    move |at| f64::from(memory[position(at)])
}

fn check(
    random: &mut Random,
    shape: Shape,
    kind: ConvKind,
    contiguous_only: bool,
    teams: &[slabwise_kernels::cpu::Team],
) {
    let spaces = shape.spaces(kind);
    let layouts = spaces.map(|space| {
        if contiguous_only {
            (operand(0, &contiguous(&space)), space.iter().product())
        } else {
            layout(random, space)
        }
    });
    let [(a, a_len), (b, b_len), (out, out_len)] = layouts;
    let args = [
        random.floats(a_len),
        random.floats(b_len),
        vec![f32::NAN; out_len],
    ];
    let expected = shape.oracle(kind, &values(&args[0], &a), &values(&args[1], &b));
    let position = positions(&out);
    let spec = shape.spec(kind, a.clone(), b.clone(), out.clone());
    for (isa, results) in run_all(&spec, &Env::default(), &Env::default(), teams, &args) {
        let [_, d1, d2, d3] = spaces[2];
        for (flat, &(sum, scale, terms)) in expected.iter().enumerate() {
            let point = [
                flat / d3 / d2 / d1,
                flat / d3 / d2 % d1,
                flat / d3 % d2,
                flat % d3,
            ];
            assert_sum(results[2][position(point)], sum, scale, terms, &|| {
                format!("{isa} {kind:?} {shape:?} at {point:?} {spec:?}")
            });
        }
    }
}

#[test]
fn random_geometry_and_strides() {
    let (mut random, teams) = (Random(23), teams());
    let mut shapes = 0;
    while shapes < 120 {
        let shape = Shape::random(&mut random, 1, 1);
        shapes += 1;
        for kind in KINDS {
            check(&mut random, shape, kind, shapes % 2 == 0, &teams);
        }
    }
}

#[test]
fn shapes_that_cross_blocks() {
    let (mut random, teams) = (Random(29), teams());
    let shapes = [
        // Several blocks of channels and rows, images smaller and larger than a block of columns.
        Shape::simple(3, 50, 70, 7, 3, 1),
        Shape::simple(1, 3, 20, 40, 5, 2),
        Shape {
            hw: [3, 700],
            k: [2, 3],
            ..Shape::simple(1, 2, 3, 0, 0, 1)
        },
        Shape::simple(9, 1, 32, 28, 5, 2),
        // A point-wise product with more channels than a k-block has steps.
        Shape::simple(2, 800, 9, 5, 1, 0),
        // A kernel with more elements than a k-block has steps.
        Shape {
            k: [21, 25],
            ..Shape::simple(1, 2, 2, 26, 0, 0)
        },
        // Depthwise.
        Shape {
            groups: 24,
            ..Shape::simple(2, 24, 24, 9, 3, 1)
        },
        Shape {
            groups: 8,
            stride: [2, 2],
            ..Shape::simple(1, 8, 16, 15, 3, 1)
        },
        // Depthwise with phases: several blocks of channels, planes that fill a part of a vector,
        // positions out of any element's reach.
        Shape {
            groups: 70,
            stride: [2, 2],
            ..Shape::simple(5, 70, 70, 7, 3, 1)
        },
        Shape {
            groups: 3,
            stride: [3, 2],
            k: [2, 4],
            dilation: [1, 2],
            hw: [11, 37],
            ..Shape::simple(2, 3, 3, 0, 0, 1)
        },
        Shape {
            groups: 2,
            stride: [4, 3],
            k: [1, 2],
            ..Shape::simple(2, 2, 2, 9, 0, 0)
        },
        // Depthwise, with planes and rows larger than a tile.
        Shape {
            groups: 2,
            hw: [150, 230],
            ..Shape::simple(1, 2, 2, 0, 3, 1)
        },
        Shape {
            groups: 2,
            hw: [1, 17_000],
            k: [1, 3],
            ..Shape::simple(1, 2, 2, 0, 0, 1)
        },
        // Phases of the input gradient: more of them than kernel elements, a dilation that shares a
        // factor with the stride, a stride larger than the image, several blocks of channels and of
        // rows.
        Shape {
            stride: [2, 2],
            ..Shape::simple(3, 20, 30, 8, 1, 0)
        },
        Shape {
            stride: [4, 6],
            dilation: [2, 4],
            hw: [23, 31],
            ..Shape::simple(2, 3, 5, 0, 3, 2)
        },
        Shape {
            stride: [9, 9],
            ..Shape::simple(2, 3, 2, 5, 5, 2)
        },
        Shape {
            stride: [2, 2],
            ..Shape::simple(3, 70, 200, 5, 3, 1)
        },
        Shape {
            stride: [1, 2],
            hw: [3, 1400],
            ..Shape::simple(1, 8, 17, 0, 3, 1)
        },
        // Few rows and whole vectors: right panels in a tile.
        Shape::simple(3, 16, 32, 32, 3, 1),
        Shape::simple(2, 5, 16, 16, 3, 1),
        // Many weights and few positions: left panels in place.
        Shape::simple(3, 200, 180, 2, 3, 1),
        // More padding than image.
        Shape::simple(2, 2, 3, 1, 3, 4),
    ];
    for shape in shapes {
        for kind in KINDS {
            check(&mut random, shape, kind, true, &teams);
        }
    }
}

/// Convolutions of so few positions that no operand is packed: along one axis or two, with padding
/// and without, of several k-blocks, groups, blocks of channels and images.
#[test]
fn few_positions() {
    let (mut random, teams) = (Random(43), teams());
    let line = |n, ci, co, length, k, stride| Shape {
        hw: [1, length],
        k: [1, k],
        stride: [1, stride],
        pad: [0, 0],
        ..Shape::simple(n, ci, co, 0, 0, 0)
    };
    let shapes = [
        line(1, 1, 258, 640, 256, 128),
        line(3, 1, 20, 320, 128, 64),
        Shape {
            pad: [0, 1],
            ..line(1, 129, 128, 4, 3, 1)
        },
        Shape {
            pad: [0, 1],
            ..line(1, 300, 150, 4, 3, 2)
        },
        line(8, 64, 64, 1, 1, 1),
        line(2, 900, 33, 3, 1, 1),
        Shape {
            groups: 3,
            dilation: [2, 1],
            ..Shape::simple(2, 12, 51, 4, 3, 1)
        },
        Shape {
            cut: [1, 1],
            ..Shape::simple(2, 7, 130, 5, 2, 0)
        },
        // More taps than a k-block has steps, with padding.
        Shape {
            k: [21, 25],
            ..Shape::simple(1, 3, 5, 24, 0, 1)
        },
    ];
    for shape in shapes {
        check(&mut random, shape, ConvKind::Forward, true, &teams);
        check(&mut random, shape, ConvKind::Forward, false, &teams);
    }
}

/// Images so small that many products of a weight gradient are with padding, whose panels belong to
/// one kernel element each: several k-blocks, ragged blocks of channels and elements that read
/// padding alone.
#[test]
fn weight_gradients_of_small_images() {
    let (mut random, teams) = (Random(59), teams());
    let shapes = [
        Shape::simple(70, 80, 40, 4, 3, 1),
        Shape::simple(16, 150, 130, 2, 3, 1),
        Shape::simple(3, 31, 70, 9, 5, 2),
        Shape::simple(600, 90, 17, 1, 3, 1),
        Shape {
            hw: [4, 7],
            stride: [2, 2],
            ..Shape::simple(40, 77, 33, 0, 3, 1)
        },
        Shape {
            hw: [5, 3],
            k: [3, 4],
            pad: [2, 1],
            dilation: [2, 1],
            groups: 5,
            ..Shape::simple(9, 70, 50, 0, 0, 0)
        },
        Shape {
            cut: [1, 0],
            stride: [1, 3],
            ..Shape::simple(11, 100, 9, 6, 3, 1)
        },
        DEPTHWISE[0],
        DEPTHWISE[1],
        Shape {
            groups: 9,
            ..Shape::simple(5, 9, 9, 2, 5, 2)
        },
    ];
    for shape in shapes {
        check(&mut random, shape, ConvKind::WeightGrad, true, &teams);
        check(&mut random, shape, ConvKind::WeightGrad, false, &teams);
    }
}

/// A kernel of one element is a matrix: its axes of length 1 may have any stride, and the bits and
/// the workspace, which holds no panel, are the same.
#[test]
fn kernels_of_one_element_have_any_strides() {
    let (mut random, teams) = (Random(53), teams());
    for (n, ci, co) in [(1, 128, 1), (3, 128, 1), (4, 600, 33)] {
        let shape = Shape::simple(n, ci, co, 1, 1, 0);
        let spaces = shape.spaces(ConvKind::Forward);
        let lens = spaces.map(|space| space.iter().product::<usize>());
        let args = [
            random.floats(lens[0]),
            random.floats(lens[1]),
            vec![f32::NAN; lens[2]],
        ];
        let mut before: Option<Vec<Vec<f32>>> = None;
        for steps in [[0, 0], [1, 1], [7, 3]] {
            let [mut a, mut b, out] = spaces.map(|space| contiguous(&space));
            (a[2], a[3], b[2], b[3]) = (steps[0], steps[1], steps[0], steps[1]);
            let [a, b, out] = [a, b, out].map(|strides| operand(0, &strides));
            let spec = shape.spec(ConvKind::Forward, a, b, out);
            let ran = run_all(&spec, &Env::default(), &Env::default(), &teams, &args);
            let results: Vec<Vec<f32>> = ran.iter().map(|(_, args)| args[2].clone()).collect();
            let same = before.get_or_insert_with(|| results.clone());
            assert!(*same == results, "{n} × {ci} → {co}, steps {steps:?}");
            for isa in Isa::available() {
                let config = Config { threads: 1, isa };
                let kernel = Kernel::new(spec.clone(), &Env::default(), &config);
                let workspace = kernel.expect("a valid spec").workspace();
                let most = (8 * n * co.next_multiple_of(16)) as u64 + 2048;
                assert!(workspace <= most, "{isa}: {n} × {ci} → {co}: {workspace}");
            }
        }
    }
}

/// An image has the bits that it has among many, where weights are the left operand.
#[test]
fn few_positions_have_the_bits_of_many() {
    let (mut random, teams) = (Random(47), teams());
    for (ci, co, hw, k, pad) in [(200, 70, 3, 2, 1), (40, 20, 5, 5, 0), (600, 9, 2, 1, 0)] {
        let of = |n| Shape::simple(n, ci, co, hw, k, pad);
        let [image, weight, _] = of(40).spaces(ConvKind::Forward);
        let (images, weights) = (
            random.floats(image.iter().product()),
            random.floats(weight.iter().product()),
        );
        let run = |n: usize| {
            let shape = of(n);
            let spaces = shape.spaces(ConvKind::Forward);
            let [a, b, out] = spaces.map(|space| operand(0, &contiguous(&space)));
            let spec = shape.spec(ConvKind::Forward, a, b, out);
            let [a, _, out] = spaces.map(|space| space.iter().product());
            let args = [images[..a].to_vec(), weights.clone(), vec![f32::NAN; out]];
            run_all(&spec, &Env::default(), &Env::default(), &teams, &args)
        };
        for ((isa, few), (_, many)) in run(1).iter().zip(&run(40)) {
            let few = &few[2];
            assert!(few[..] == many[2][..few.len()], "{isa} {ci} {co} {hw} {k}");
        }
    }
}

/// Small images, from fewer than a vector to several vectors of them, with steps of their own for
/// each position: padding, strides, gaps, groups, several k-blocks and blocks of channels.
fn small_images() -> Vec<Shape> {
    vec![
        Shape::simple(16, 70, 29, 2, 3, 1),
        Shape::simple(12, 9, 100, 4, 3, 1),
        Shape::simple(31, 4, 180, 3, 2, 1),
        Shape {
            stride: [2, 2],
            ..Shape::simple(17, 60, 20, 4, 3, 1)
        },
        Shape {
            stride: [2, 1],
            cut: [1, 1],
            ..Shape::simple(13, 5, 7, 4, 3, 2)
        },
        Shape {
            groups: 3,
            ..Shape::simple(20, 12, 51, 3, 2, 1)
        },
        Shape {
            stride: [2, 2],
            ..Shape::simple(14, 130, 17, 8, 3, 1)
        },
        Shape {
            k: [3, 2],
            dilation: [2, 1],
            pad: [3, 1],
            hw: [2, 5],
            ..Shape::simple(12, 3, 15, 0, 0, 0)
        },
        // Kernel elements that reach no position.
        Shape::simple(64, 3, 5, 1, 3, 1),
        DEPTHWISE[0],
        DEPTHWISE[1],
        Shape {
            groups: 9,
            ..Shape::simple(5, 9, 9, 2, 3, 1)
        },
        // More padding than the kernel needs, and a last row and column that are left out.
        Shape {
            groups: 3,
            cut: [2, 2],
            ..Shape::simple(6, 3, 3, 6, 3, 2)
        },
    ]
}

#[test]
fn images_along_vectors() {
    let (mut random, teams) = (Random(59), teams());
    for shape in small_images() {
        for kind in [ConvKind::Forward, ConvKind::InputGrad] {
            check(&mut random, shape, kind, true, &teams);
            check(&mut random, shape, kind, false, &teams);
        }
    }
}

/// A small image has the bits that it has alone: leaving out products with padding changes none.
#[test]
fn images_along_vectors_have_the_bits_of_one() {
    let (mut random, teams) = (Random(61), teams());
    for shape in small_images() {
        for kind in [ConvKind::Forward, ConvKind::InputGrad] {
            let lens = shape.spaces(kind).map(|space| space.iter().product());
            let (images, weights) = (random.floats(lens[0]), random.floats(lens[1]));
            let run = |n: usize| {
                let shape = Shape { n, ..shape };
                let spaces = shape.spaces(kind);
                let [a, b, out] = spaces.map(|space| operand(0, &contiguous(&space)));
                let spec = shape.spec(kind, a, b, out);
                let [a, _, out] = spaces.map(|space| space.iter().product());
                let args = [images[..a].to_vec(), weights.clone(), vec![f32::NAN; out]];
                run_all(&spec, &Env::default(), &Env::default(), &teams, &args)
            };
            for ((isa, one), (_, many)) in run(1).iter().zip(&run(shape.n)) {
                let one = &one[2];
                assert!(one[..] == many[2][..one.len()], "{isa} {kind:?} {shape:?}");
            }
        }
    }
}

/// A batch below the bound runs, and gives the bits of a kernel prepared for just that batch.
#[test]
fn batches_below_the_bound() {
    let (mut random, teams) = (Random(31), teams());
    let images = Size::symbol(Symbol(0));
    for kind in KINDS {
        for (groups, ci, co, hw, k) in [
            (1, 3, 5, 9, 3),
            (1, 1, 8, 14, 5),
            (1, 80, 9, 4, 3),
            (1, 20, 30, 2, 3),
            (90, 90, 90, 7, 3),
        ] {
            let shape = Shape {
                groups,
                ..Shape::simple(1, ci, co, hw, k, k / 2)
            };
            let [a, b, out] = shape
                .spaces(kind)
                .map(|space| operand(0, &contiguous(&space)));
            let mut spec = shape.spec(kind, a, b, out);
            let Body::Conv2d(body) = &mut spec.body else {
                unreachable!()
            };
            body.n = images;
            if kind != ConvKind::WeightGrad {
                spec.dims[0] = images;
            }
            let bound = Env([70, 0, 0, 0, 0, 0, 0, 0]);
            for n in [1, 2, 7, 64, 70] {
                let shape = Shape { n, ..shape };
                let env = Env([n as u32, 0, 0, 0, 0, 0, 0, 0]);
                let args = shape
                    .spaces(kind)
                    .map(|space| random.floats(space.iter().product()));
                let at_bound = run_all(&spec, &bound, &env, &teams, &args);
                let exact = run_all(&spec, &env, &env, &teams[..1], &args);
                assert!(at_bound == exact, "{kind:?} {n} images");
                let [a, b, _] = shape
                    .spaces(kind)
                    .map(|space| operand(0, &contiguous(&space)));
                let expected = shape.oracle(kind, &values(&args[0], &a), &values(&args[1], &b));
                for (isa, results) in at_bound {
                    for (actual, &(sum, scale, terms)) in results[2].iter().zip(&expected) {
                        assert_sum(*actual, sum, scale, terms, &|| {
                            format!("{isa} {kind:?} {n} images")
                        });
                    }
                }
            }
        }
    }
}

/// No images: nothing to do, except that a weight gradient is zeros.
#[test]
fn an_empty_batch() {
    for kind in KINDS {
        let shape = Shape {
            n: 0,
            ..Shape::simple(0, 2, 3, 5, 3, 1)
        };
        let [a, b, out] = shape
            .spaces(kind)
            .map(|space| operand(0, &contiguous(&space)));
        let spec = shape.spec(kind, a, b, out);
        let args = shape
            .spaces(kind)
            .map(|space| vec![f32::NAN; space.iter().product()]);
        for (_, results) in run_all(&spec, &Env::default(), &Env::default(), &teams(), &args) {
            assert!(results[2].iter().all(|x| x.to_bits() == 0));
        }
    }
}

/// Bias and activation behind the product, and the activation's gradient mask behind the input
/// gradient.
#[test]
fn epilogues() {
    let (mut random, teams) = (Random(37), teams());
    let depthwise = Shape {
        groups: 6,
        ..Shape::simple(5, 6, 6, 11, 3, 1)
    };
    let shapes = [Shape::simple(3, 4, 6, 11, 3, 1), depthwise];
    for (shape, kind) in shapes
        .iter()
        .flat_map(|shape| KINDS.map(|kind| (shape, kind)))
    {
        let spaces = shape.spaces(kind);
        let [a, b, out] = spaces.map(|space| operand(0, &contiguous(&space)));
        let mut spec = shape.spec(kind, a, b, out.clone());
        let [_, channels, rows, columns] = spaces[2];
        spec.operands = vec![out.clone(), operand(0, &[0, 1, 0, 0]), out];
        spec.code = vec![
            Inst::Acc,
            Inst::Load(1),
            Inst::Op(ScalarOp::Add, [0, 1, 0]),
            Inst::Op(ScalarOp::Relu, [2, 0, 0]),
            Inst::Load(2),
            Inst::Op(ScalarOp::Sub, [4, 0, 0]),
        ];
        spec.stores = vec![
            Store {
                value: 3,
                operand: 0,
            },
            Store {
                value: 5,
                operand: 2,
            },
        ];
        let length = spaces[2].iter().product::<usize>();
        let (bias, other) = (random.floats(channels), random.floats(length));
        let args = [
            random.floats(spaces[0].iter().product()),
            random.floats(spaces[1].iter().product()),
            vec![f32::NAN; length],
            bias.clone(),
            other.clone(),
        ];
        let [a, b, _] = spaces.map(|space| operand(0, &contiguous(&space)));
        let expected = shape.oracle(kind, &values(&args[0], &a), &values(&args[1], &b));
        for (isa, results) in run_all(&spec, &Env::default(), &Env::default(), &teams, &args) {
            for (flat, &(sum, scale, terms)) in expected.iter().enumerate() {
                let bias = f64::from(bias[flat / columns / rows % channels]);
                let what = || format!("{isa} {kind:?} at {flat}");
                assert_sum(
                    results[2][flat],
                    (sum + bias).max(0.0),
                    scale + bias.abs(),
                    terms,
                    &what,
                );
                let before = f64::from(other[flat]);
                assert_sum(
                    results[4][flat],
                    before - sum,
                    scale + before.abs(),
                    terms,
                    &what,
                );
            }
        }
    }
}
