//! Convolutions that make their image in a prologue, against the same work by two kernels: one that
//! computes the image in memory, and one that reads it. Every bit is the same.

use std::panic::{AssertUnwindSafe, catch_unwind};

use half::{bf16, f16};
use slabwise_kernels::cpu::{Config, Isa, Kernel, Team};
use slabwise_kernels::dtype::{DType, Lane};
use slabwise_kernels::memory::Memory;
use slabwise_kernels::micro_batch::MicroBatching;
use slabwise_kernels::scalar::Value;
use slabwise_kernels::spec::{Dims, MAX_ARGUMENTS, PrologueError, ReduceOp, SpecError};

use super::*;

const IMAGE_KINDS: [ConvKind; 2] = [ConvKind::Forward, ConvKind::WeightGrad];

/// A loop over an image that stores its last operand, and the arguments before that one.
struct Prologue {
    spec: Spec,
    args: Vec<Vec<f32>>,
}

/// Bytes as words.
fn packed(bytes: Vec<u8>) -> Vec<f32> {
    let word = |four: &[u8]| {
        f32::from_le_bytes(std::array::from_fn(|i| four.get(i).copied().unwrap_or(0)))
    };
    bytes.chunks(4).map(word).collect()
}

/// `count` elements of a type.
fn elements(random: &mut Random, dtype: DType, count: usize) -> Vec<f32> {
    let floats = random.floats(count);
    match dtype {
        DType::F16 => packed(
            floats
                .iter()
                .flat_map(|&x| f16::from_f32(x).to_le_bytes())
                .collect(),
        ),
        DType::BF16 => packed(
            floats
                .iter()
                .flat_map(|&x| bf16::from_f32(x).to_le_bytes())
                .collect(),
        ),
        DType::U8 => packed((0..count).map(|_| random.next() as u8).collect()),
        DType::Bool => packed((0..count).map(|_| random.next() as u8 & 1).collect()),
        DType::I32 => (0..count)
            .map(|_| f32::from_bits(random.int(0, 9) as u32))
            .collect(),
        DType::F32 => floats,
    }
}

/// The state of a prologue under construction.
struct Writer<'a> {
    random: &'a mut Random,
    space: [usize; 4],
    operands: Vec<Operand>,
    args: Vec<Vec<f32>>,
    indices: Vec<Dims>,
    code: Vec<Inst>,
}

impl Writer<'_> {
    fn push(&mut self, inst: Inst) -> u16 {
        self.code.push(inst);
        self.code.len() as u16 - 1
    }

    fn op(&mut self, op: ScalarOp, args: [u16; 3]) -> u16 {
        self.push(Inst::Op(op, args))
    }

    /// An operand of a type, as a number.
    fn load(&mut self, dtype: DType, operand: Operand, length: usize) -> u16 {
        self.operands.push(Operand { dtype, ..operand });
        let values = elements(self.random, dtype, length);
        self.args.push(values);
        let value = self.push(Inst::Load(self.operands.len() as u16 - 1));
        if dtype.lane() == Lane::F32 {
            value
        } else {
            self.push(Inst::Cast(value, Lane::F32))
        }
    }

    /// An operand as large as the image.
    fn wide(&mut self, dtype: DType) -> u16 {
        let (operand, length) = layout(self.random, self.space);
        self.load(dtype, operand, length)
    }

    /// An operand that repeats along all axes but these.
    fn narrow(&mut self, axes: &[usize]) -> u16 {
        let own: [usize; 4] = std::array::from_fn(|axis| {
            if axes.contains(&axis) {
                self.space[axis]
            } else {
                1
            }
        });
        let mut strides = contiguous(&own);
        (0..4)
            .filter(|axis| !axes.contains(axis))
            .for_each(|axis| strides[axis] = 0);
        self.load(DType::F32, operand(0, &strides), own.iter().product())
    }

    /// A random number for each point, or a number that its place gives.
    fn by_place(&mut self, random: bool) -> u16 {
        self.indices.push(
            contiguous(&self.space)
                .into_iter()
                .map(Size::fixed)
                .collect(),
        );
        let index = self.push(Inst::Index(self.indices.len() as u16 - 1));
        if random {
            self.operands.push(Operand {
                dtype: DType::I32,
                ..operand(0, &[0; 4])
            });
            self.args.push([7u32, 11, 3].map(f32::from_bits).to_vec());
            let state = self.operands.len() as u16 - 1;
            return self.push(Inst::Uniform {
                state,
                stream: 5,
                index,
            });
        }
        let value = self.push(Inst::Cast(index, Lane::F32));
        let scale = self.push(Inst::Const(Value::F32(1.0 / 64.0)));
        self.op(ScalarOp::Mul, [value, scale, 0])
    }

    fn finish(mut self, dims: Dims, value: u16, made: Operand) -> Prologue {
        let stores = vec![Store {
            value,
            operand: self.operands.len() as u16,
        }];
        self.operands.push(made);
        let Writer {
            operands,
            indices,
            code,
            args,
            ..
        } = self;
        Prologue {
            spec: Spec {
                body: Body::Loop,
                dims,
                reduced: 0,
                operands,
                indices,
                code,
                stores,
            },
            args,
        }
    }
}

/// A prologue that the random numbers draw.
fn prologue(random: &mut Random, space: [usize; 4], dims: Dims, made: Operand) -> Prologue {
    let form = random.int(0, 11);
    let mut w = Writer {
        random,
        space,
        operands: vec![],
        args: vec![],
        indices: vec![],
        code: vec![],
    };
    let value = match form {
        // An operand of any type that is stored unchanged.
        0 => w.wide(DType::F32),
        1 => w.wide(DType::BF16),
        2 => w.narrow(&[1]),
        3 => w.narrow(&[]),
        4 => w.by_place(false),
        _ => {
            let dtype = w.random.of(&[
                DType::F32,
                DType::F32,
                DType::F32,
                DType::F16,
                DType::BF16,
                DType::U8,
                DType::Bool,
                DType::I32,
            ]);
            let mut value = w.wide(dtype);
            for _ in 0..w.random.int(1, 5) {
                let op = w
                    .random
                    .of(&[ScalarOp::Add, ScalarOp::Sub, ScalarOp::Mul, ScalarOp::Max]);
                let other = match w.random.int(0, 8) {
                    0 => w.wide(DType::F32),
                    1 => w.wide(DType::F16),
                    2 => w.narrow(&[0]),
                    3 => w.narrow(&[2, 3]),
                    4 => w.narrow(&[]),
                    5 => w.by_place(true),
                    6 => w.by_place(false),
                    _ => w.narrow(&[1]),
                };
                value = w.op(op, [value, other, 0]);
                if w.random.int(0, 2) == 0 {
                    let op = w
                        .random
                        .of(&[ScalarOp::Relu, ScalarOp::Tanh, ScalarOp::Sigmoid]);
                    value = w.op(op, [value, 0, 0]);
                }
            }
            // Padding is zero all the same.
            let one = w.push(Inst::Const(Value::F32(1.0)));
            if w.random.int(0, 1) == 0 {
                w.op(ScalarOp::Add, [value, one, 0])
            } else {
                value
            }
        }
    };
    w.finish(dims, value, made)
}

/// Runs a convolution with a prologue and, in its place, two kernels; the results have the same
/// bits. `rest` are the arguments behind the image.
fn compare(
    plain: &Spec,
    prologue: &Prologue,
    image: usize,
    rest: &[Vec<f32>],
    [bound, env]: [&Env; 2],
    teams: &[Team],
) {
    let mut fused = plain.clone();
    conv(&mut fused).prologue = Some(Box::new(prologue.spec.clone()));
    let args: Vec<Vec<f32>> = prologue.args.iter().chain(rest).cloned().collect();
    let all = run_all(&fused, bound, env, teams, &args);
    for (isa, results) in all {
        let (mut made, mut taken) = (prologue.args.clone(), rest.to_vec());
        made.push(vec![f32::NAN; image]);
        taken.insert(
            0,
            run(&prologue.spec, bound, env, isa, &teams[0], &made)
                .pop()
                .expect("an image"),
        );
        let expected = run(plain, bound, env, isa, &teams[0], &taken);
        for (argument, (actual, expected)) in results[prologue.args.len()..]
            .iter()
            .zip(&expected[1..])
            .enumerate()
        {
            let differs = actual
                .iter()
                .zip(expected)
                .position(|(a, b)| a.to_bits() != b.to_bits());
            assert!(
                differs.is_none(),
                "{isa}, argument {argument}, element {differs:?}: {fused:?}"
            );
        }
        assert!(
            results
                .iter()
                .zip(&prologue.args)
                .all(|(after, before)| bits(after) == bits(before)),
            "{isa}: a source was written"
        );
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// A shape with a random prologue and random layouts.
fn check_shape(random: &mut Random, shape: Shape, kind: ConvKind, teams: &[Team]) {
    let spaces = shape.spaces(kind);
    let [(a, image), (b, b_len), (out, out_len)] = spaces.map(|space| layout(random, space));
    let prologue = prologue(
        random,
        spaces[0],
        spaces[0].iter().map(|&d| Size::fixed(d as i64)).collect(),
        a.clone(),
    );
    let rest = [random.floats(b_len), vec![f32::NAN; out_len]];
    compare(
        &shape.spec(kind, a, b, out),
        &prologue,
        image,
        &rest,
        [&Env::default(); 2],
        teams,
    );
}

#[test]
fn random_geometry_and_prologues() {
    let (mut random, teams) = (Random(41), teams());
    for _ in 0..100 {
        // One channel in each of several groups is another kernel.
        let shape = Shape::random(&mut random, 0, 2);
        IMAGE_KINDS
            .iter()
            .for_each(|&kind| check_shape(&mut random, shape, kind, &teams));
    }
}

#[test]
fn images_that_cross_blocks() {
    let (mut random, teams) = (Random(43), teams());
    let shapes = [
        // Planes and rows larger than the prologue's buffer.
        Shape::simple(1, 3, 2, 70, 3, 1),
        Shape {
            hw: [9, 5000],
            ..Shape::simple(1, 2, 3, 0, 3, 1)
        },
        Shape {
            hw: [3, 700],
            k: [2, 3],
            ..Shape::simple(1, 2, 3, 0, 0, 1)
        },
        Shape {
            hw: [40, 300],
            stride: [1, 2],
            ..Shape::simple(2, 5, 3, 0, 5, 2)
        },
        Shape {
            hw: [2, 17_000],
            k: [1, 3],
            ..Shape::simple(1, 2, 2, 0, 0, 1)
        },
        // Several blocks of channels; more of them than are made at a time.
        Shape::simple(3, 150, 20, 9, 3, 1),
        Shape::simple(2, 800, 9, 5, 1, 0),
        Shape {
            groups: 2,
            ..Shape::simple(2, 120, 8, 8, 3, 1)
        },
        // Several images in one block, and few rows in whole vectors.
        Shape::simple(9, 4, 32, 6, 3, 1),
        Shape::simple(3, 16, 32, 32, 3, 1),
        // Filtering of many channels of small images.
        Shape::simple(9, 130, 127, 4, 3, 1),
        // Rows and columns that no element reads, and a kernel larger than the image.
        Shape {
            stride: [4, 3],
            ..Shape::simple(2, 3, 5, 17, 2, 0)
        },
        Shape {
            dilation: [3, 3],
            ..Shape::simple(2, 3, 5, 7, 3, 3)
        },
        Shape::simple(2, 2, 3, 1, 3, 4),
        // Images along vectors.
        Shape::simple(18, 70, 9, 2, 3, 1),
        Shape {
            groups: 2,
            stride: [2, 2],
            ..Shape::simple(12, 6, 8, 4, 3, 1)
        },
    ];
    for shape in shapes {
        for kind in IMAGE_KINDS {
            (0..2).for_each(|_| check_shape(&mut random, shape, kind, &teams));
        }
    }
}

/// Padding is zero even if the prologue's value of zeros is not: an image of ones gives each
/// position the sum of the weights inside the image.
#[test]
fn padding_stays_zero() {
    let shape = Shape::simple(2, 3, 4, 6, 3, 2);
    let [a, b, out] = shape
        .spaces(ConvKind::Forward)
        .map(|space| operand(0, &contiguous(&space)));
    let mut spec = shape.spec(ConvKind::Forward, a.clone(), b, out);
    let mut random = Random(47);
    let writer = Writer {
        random: &mut random,
        space: shape.image(),
        operands: vec![],
        args: vec![],
        indices: vec![],
        code: vec![],
    };
    let dims: Dims = shape
        .image()
        .iter()
        .map(|&d| Size::fixed(d as i64))
        .collect();
    // No operand but the image, so no argument in its place.
    let ones = Prologue {
        spec: Spec {
            code: vec![Inst::Const(Value::F32(1.0))],
            ..writer.finish(dims, 0, a).spec
        },
        args: vec![],
    };
    conv(&mut spec).prologue = Some(Box::new(ones.spec));
    let args = [
        vec![1.0; shape.weight().iter().product()],
        vec![f32::NAN; shape.result().iter().product()],
    ];
    for (isa, results) in run_all(&spec, &Env::default(), &Env::default(), &teams(), &args) {
        let meets = |at: usize| (0..3).filter(|t| (2..8).contains(&(at + t))).count();
        let side = shape.out(0);
        for (flat, &value) in results[1].iter().enumerate() {
            let expected = 3 * meets(flat / side % side) * meets(flat % side);
            assert_eq!(value, expected as f32, "{isa} at {flat}");
        }
    }
}

/// Batches below the bound, with bias and activation behind the sum.
#[test]
fn batches_below_the_bound() {
    let (mut random, teams) = (Random(53), teams());
    let images = Size::symbol(Symbol(0));
    for kind in IMAGE_KINDS {
        for (ci, co, hw, k) in [(3, 5, 9, 3), (17, 8, 14, 5)] {
            let shape = Shape::simple(1, ci, co, hw, k, k / 2);
            let [a, b, out] = shape
                .spaces(kind)
                .map(|space| operand(0, &contiguous(&space)));
            let mut spec = shape.spec(kind, a.clone(), b, out);
            conv(&mut spec).n = images;
            if kind != ConvKind::WeightGrad {
                spec.dims[0] = images;
            }
            let channels = shape.spaces(kind)[2][1];
            spec.operands.push(operand(0, &[0, 1, 0, 0]));
            spec.code = vec![
                Inst::Acc,
                Inst::Load(1),
                Inst::Op(ScalarOp::Add, [0, 1, 0]),
                Inst::Op(ScalarOp::Relu, [2, 0, 0]),
            ];
            spec.stores[0].value = 3;
            let bound = Env([70, 0, 0, 0, 0, 0, 0, 0]);
            for n in [0, 1, 7, 64, 70] {
                let shape = Shape { n, ..shape };
                let env = Env([n as u32, 0, 0, 0, 0, 0, 0, 0]);
                let [image, b, out] = shape
                    .spaces(kind)
                    .map(|space| space.iter().product::<usize>());
                let mut writer = Writer {
                    random: &mut random,
                    space: shape.image(),
                    operands: vec![],
                    args: vec![],
                    indices: vec![],
                    code: vec![],
                };
                writer.operands.push(a.clone());
                writer.args.push(writer.random.floats(image));
                let (x, weight, drawn) = (
                    writer.push(Inst::Load(0)),
                    writer.narrow(&[1]),
                    writer.by_place(true),
                );
                let scaled = writer.op(ScalarOp::Mul, [x, weight, 0]);
                let value = writer.op(ScalarOp::Sub, [drawn, scaled, 0]);
                let mut dims: Dims = shape
                    .image()
                    .iter()
                    .map(|&d| Size::fixed(d as i64))
                    .collect();
                dims[0] = images;
                let prologue = writer.finish(dims, value, a.clone());
                let rest = [
                    random.floats(b),
                    vec![f32::NAN; out],
                    random.floats(channels),
                ];
                compare(&spec, &prologue, image, &rest, [&bound, &env], &teams);
            }
        }
    }
}

/// Images whose height is below its bound, too.
#[test]
fn heights_below_the_bound() {
    let (mut random, teams) = (Random(59), teams());
    let [images, height] = [0, 1].map(|s| Size::symbol(Symbol(s)));
    let fixed = |n: usize| Size::fixed(n as i64);
    for kind in IMAGE_KINDS {
        let (ci, co, width) = (5, 6, 33);
        let image = [images, fixed(ci), height, fixed(width)];
        let result = [images, fixed(co), height, fixed(width)];
        let weight = [co, ci, 3, 3].map(fixed);
        let of = |dims: &[Size]| Operand::contiguous(DType::F32, dims).expect("strides");
        let (b, out) = if kind == ConvKind::Forward {
            (&weight, &result)
        } else {
            (&result, &weight)
        };
        let mut spec = Shape::simple(1, ci, co, width, 3, 1).spec(kind, of(&image), of(b), of(out));
        spec.dims = Dims::from_slice(out);
        let body = conv(&mut spec);
        (body.n, body.hw, body.ohw) = (images, [image[2], image[3]], [result[2], result[3]]);
        let bound = Env([6, 90, 0, 0, 0, 0, 0, 0]);
        for (n, h) in [(6, 90), (2, 41), (6, 1), (1, 2)] {
            let env = Env([n, h, 0, 0, 0, 0, 0, 0]);
            let count = |dims: &[Size]| dims.iter().map(|d| d.usize_at(&env)).product::<usize>();
            let own = image.map(|d| d.usize_at(&env));
            let mut writer = Writer {
                random: &mut random,
                space: own,
                operands: vec![],
                args: vec![],
                indices: vec![],
                code: vec![],
            };
            writer.operands.push(of(&image));
            writer.args.push(writer.random.floats(count(&image)));
            let (x, weight) = (writer.push(Inst::Load(0)), writer.narrow(&[1]));
            let value = writer.op(ScalarOp::Sub, [weight, x, 0]);
            let prologue = writer.finish(Dims::from_slice(&image), value, of(&image));
            let rest = [random.floats(count(b)), vec![f32::NAN; count(out)]];
            compare(
                &spec,
                &prologue,
                count(&image),
                &rest,
                [&bound, &env],
                &teams,
            );
        }
    }
}

/// A convolution with a norm's prologue, of two sources.
fn normed(kind: ConvKind) -> Spec {
    let shape = Shape::simple(2, 4, 6, 8, 3, 1);
    let [a, b, out] = shape
        .spaces(kind)
        .map(|space| operand(0, &contiguous(&space)));
    let mut spec = shape.spec(kind, a.clone(), b, out);
    let (dims, channel) = (
        shape
            .image()
            .iter()
            .map(|&d| Size::fixed(d as i64))
            .collect(),
        operand(0, &[0, 1, 0, 0]),
    );
    let image = if kind == ConvKind::InputGrad {
        operand(0, &contiguous(&shape.image()))
    } else {
        a
    };
    let prologue = Spec {
        body: Body::Loop,
        dims,
        reduced: 0,
        operands: vec![image.clone(), channel, image],
        indices: vec![],
        code: vec![
            Inst::Load(0),
            Inst::Load(1),
            Inst::Op(ScalarOp::Mul, [0, 1, 0]),
        ],
        stores: vec![Store {
            value: 2,
            operand: 2,
        }],
    };
    conv(&mut spec).prologue = Some(Box::new(prologue));
    spec
}

#[test]
fn invalid_prologues_are_refused() {
    let config = Config {
        threads: 1,
        isa: Isa::detect(),
    };
    let prepare = |spec: &Spec| Kernel::new(spec.clone(), &Env::default(), &config);
    let refused = |kind: ConvKind, change: &dyn Fn(&mut Spec)| -> String {
        let mut spec = normed(kind);
        change(conv(&mut spec).prologue.as_mut().expect("a prologue"));
        let Err(error) = prepare(&spec) else {
            panic!("accepted: {spec:?}")
        };
        error.to_string()
    };
    assert!(
        IMAGE_KINDS
            .iter()
            .all(|&kind| prepare(&normed(kind)).is_ok())
    );
    let says = |what: &str, change: &dyn Fn(&mut Spec)| {
        for kind in IMAGE_KINDS {
            let why = refused(kind, change);
            assert!(
                why.starts_with("invalid kernel: a prologue") && why.contains(what),
                "{why}"
            );
        }
    };
    assert!(refused(ConvKind::InputGrad, &|_| ()).contains("input gradient"));
    says("3 axes", &|p| {
        (p.reduced, p.code[2]) = (3, Inst::Reduce(ReduceOp::Sum, 0))
    });
    says("2 stores", &|p| {
        p.stores.push(Store {
            value: 0,
            operand: 1,
        })
    });
    says("0 stores", &|p| p.stores.clear());
    says("0 operands", &|p| p.operands.clear());
    says("operand 1 of 3", &|p| p.stores[0].operand = 1);
    says("operand 9 of 3", &|p| p.stores[0].operand = 9);
    says("reads what it makes", &|p| p.code[0] = Inst::Load(2));
    says("for an image of", &|p| p.dims[1] = Size::fixed(5));
    says("for an image of", &|p| p.dims.push(Size::ONE));
    says("for an image of", &|p| p.dims.clear());
    says("42 arguments", &|p| {
        let more = MAX_ARGUMENTS + 2 - 4;
        p.operands.splice(1..1, vec![p.operands[1].clone(); more]);
        p.code[1] = Inst::Load(1 + more as u16);
        p.stores[0].operand += more as u16;
    });
    for anchored in [
        normed(ConvKind::Forward),
        Shape::simple(2, 4, 6, 8, 3, 1).spec(
            ConvKind::Forward,
            operand(0, &[0; 4]),
            operand(0, &[0; 4]),
            operand(0, &[0; 4]),
        ),
    ] {
        says("an anchor of its own", &|p| p.body = anchored.body.clone());
    }
    // Errors of any loop.
    let fails = |change: &dyn Fn(&mut Spec)| {
        IMAGE_KINDS
            .iter()
            .for_each(|&kind| _ = refused(kind, change))
    };
    fails(&|p| p.operands[2].dtype = DType::F16);
    fails(&|p| p.operands[2].strides.truncate(3));
    fails(&|p| p.operands[0].strides.truncate(2));
    fails(&|p| p.code[0] = Inst::Load(7));
    fails(&|p| p.code[0] = Inst::Acc);
    fails(&|p| p.code[0] = Inst::Reduce(ReduceOp::Sum, 0));
    fails(&|p| p.stores[0].value = 3);
    fails(&|p| p.code[2] = Inst::Op(ScalarOp::Mul, [0, 2, 0]));
    // As many arguments as there may be.
    let mut full = normed(ConvKind::Forward);
    let count = full.arguments().len();
    full.operands
        .extend(vec![operand(0, &[0; 4]); MAX_ARGUMENTS - count]);
    assert!(prepare(&full).is_ok());
    full.operands.push(operand(0, &[0; 4]));
    let too_many = prepare(&full).err();
    let expected = SpecError::Prologue(PrologueError::Arguments(41));
    assert_eq!(too_many, Some(expected));
}

#[test]
fn channels_that_are_groups_of_their_own_have_no_prologue() {
    let shape = Shape {
        groups: 4,
        ..Shape::simple(2, 4, 4, 8, 3, 1)
    };
    for kind in IMAGE_KINDS {
        let [a, b, out] = shape
            .spaces(kind)
            .map(|space| operand(0, &contiguous(&space)));
        let mut spec = shape.spec(kind, a, b, out);
        let config = Config {
            threads: 1,
            isa: Isa::detect(),
        };
        assert!(Kernel::new(spec.clone(), &Env::default(), &config).is_ok());
        conv(&mut spec).prologue = conv(&mut normed(kind)).prologue.take();
        let Err(error) = Kernel::new(spec, &Env::default(), &config) else {
            panic!("accepted")
        };
        let why = error.to_string();
        assert!(why.contains("groups of their own"), "{why}");
    }
}

/// A prologue would have to know the images of the slice.
#[test]
fn nothing_with_a_prologue_runs_in_slices() {
    let (batch, config) = (
        Symbol(0),
        Config {
            threads: 1,
            isa: Isa::detect(),
        },
    );
    for kind in IMAGE_KINDS {
        let mut spec = normed(kind);
        conv(&mut spec).n = Size::symbol(batch);
        conv(&mut spec).prologue.as_mut().expect("a prologue").dims[0] = Size::symbol(batch);
        if kind == ConvKind::Forward {
            spec.dims[0] = Size::symbol(batch);
        }
        let sliced = |spec: &Spec| {
            Kernel::sliced(
                spec.clone(),
                batch,
                2,
                &Env([8, 0, 0, 0, 0, 0, 0, 0]),
                &config,
                u64::MAX,
            )
        };
        assert!(MicroBatching::of(&spec, batch).is_none() && matches!(sliced(&spec), Ok(None)));
        conv(&mut spec).prologue = None;
        assert!(MicroBatching::of(&spec, batch).is_some() && matches!(sliced(&spec), Ok(Some(_))));
    }
}

/// A result may not overlap a source, even with equal strides, because a block is written while
/// others are still read.
#[test]
fn results_overlap_no_source() {
    let mut memory = Memory::new();
    let team = Team::new(1);
    for kind in IMAGE_KINDS {
        let kernel = Kernel::new(
            normed(kind),
            &Env::default(),
            &Config {
                threads: 1,
                isa: Isa::detect(),
            },
        )
        .expect("a valid spec");
        let sizes = kernel
            .spec()
            .arguments()
            .iter()
            .map(|(o, dims, _)| 4 * o.extent(dims, &Env::default()))
            .collect::<Vec<_>>();
        let apart: Vec<_> = sizes
            .iter()
            .map(|&bytes| memory.reserve(bytes).expect("memory"))
            .collect();
        let workspace = memory.reserve(kernel.workspace()).expect("memory");
        assert!(
            kernel
                .run(&mut memory, &apart, &workspace, &Env::default(), &team)
                .is_ok()
        );
        let last = apart.len() - 1;
        for source in 0..last {
            let mut args = apart.clone();
            let both = memory
                .reserve(sizes[source].max(sizes[last]))
                .expect("memory");
            (args[source], args[last]) = (both, both);
            let run = AssertUnwindSafe(|| {
                kernel.run(&mut memory, &args, &workspace, &Env::default(), &team)
            });
            let panic = catch_unwind(run).expect_err("it overlaps");
            let says = panic
                .downcast_ref::<String>()
                .is_some_and(|why| why.contains("is written and overlaps"));
            assert!(says, "{kind:?}: argument {source}");
        }
    }
}
