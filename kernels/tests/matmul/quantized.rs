//! Products with quantized weights against double precision, on every instruction set.

use crate::common::*;
use slabwise_kernels::cpu::{Config, Isa, Kernel, Team};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::memory::{Memory, Region};
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::{Env, Size, Symbol};
use slabwise_kernels::spec::{
    Body, Inst, Matmul, Operand, Quantization, QuantizedMatmul, Spec, SpecError, Store,
};

/// How the zero points are stored.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Zeros {
    Middle,
    Floats,
    Packed,
}

/// A matrix of one type in memory: rows of `columns` elements, `row` apart, after `offset` elements.
#[derive(Clone, Copy, Debug)]
struct Layout {
    offset: usize,
    row: usize,
    columns: usize,
}

impl Layout {
    /// Rows with or without gaps.
    fn any(random: &mut Random, columns: usize) -> Layout {
        Layout {
            offset: random.int(0, 3),
            row: columns + random.of(&[0, 0, 3, 16]),
            columns,
        }
    }

    fn operand(&self, dtype: DType) -> Operand {
        Operand {
            dtype,
            offset: Size::fixed(self.offset as i64),
            strides: [self.row as i64, 1].map(Size::fixed).into_iter().collect(),
        }
    }

    /// The elements of a buffer of so many rows, which ends with the last element.
    fn len(&self, rows: usize) -> usize {
        match rows {
            0 => self.offset,
            _ => self.offset + (rows - 1) * self.row + self.columns,
        }
    }

    fn at(&self, row: usize, column: usize) -> usize {
        self.offset + row * self.row + column
    }
}

/// A product with quantized weights and its data.
struct Case {
    sizes: [usize; 3],
    format: Quantization,
    zeros: Zeros,
    in_order: bool,
    a: Layout,
    numbers: Layout,
    scales: Layout,
    points: Layout,
    /// The bytes of `a`, numbers, scales and zero points.
    data: [Vec<u8>; 4],
}

fn bytes_of(floats: Vec<f32>) -> Vec<u8> {
    floats.into_iter().flat_map(f32::to_le_bytes).collect()
}

fn float(bytes: &[u8], at: usize) -> f32 {
    f32::from_le_bytes(bytes[4 * at..][..4].try_into().unwrap())
}

impl Case {
    fn new(random: &mut Random, sizes: [usize; 3], format: Quantization, zeros: Zeros) -> Case {
        let [m, n, k] = sizes;
        let (blocks, per_byte) = (k / format.block as usize, format.per_byte() as usize);
        let a = Layout::any(random, k);
        let numbers = Layout::any(random, k / per_byte);
        let scales = Layout::any(random, blocks);
        let points = match zeros {
            Zeros::Packed => Layout::any(random, blocks.div_ceil(per_byte)),
            _ => Layout::any(random, blocks),
        };
        let mut bytes = |count: usize| (0..count).map(|_| random.next() as u8).collect::<Vec<_>>();
        let (packed, packed_points) = (bytes(numbers.len(n)), bytes(points.len(n)));
        let floats = |random: &mut Random, count| bytes_of(random.floats(count));
        let data = [
            floats(random, a.len(m)),
            packed,
            floats(random, scales.len(n)),
            match zeros {
                Zeros::Packed => packed_points,
                _ => floats(random, points.len(n)),
            },
        ];
        Case {
            sizes,
            format,
            zeros,
            in_order: false,
            a,
            numbers,
            scales,
            points,
            data,
        }
    }

    /// With `bias`, the code adds a number for each column and takes the larger of the sum and 0.
    fn spec(&self, rows: Size, bias: bool) -> Spec {
        let [_, n, k] = self.sizes;
        let zeros = match self.zeros {
            Zeros::Middle => None,
            Zeros::Floats => Some(self.points.operand(DType::F32)),
            Zeros::Packed => Some(self.points.operand(DType::U8)),
        };
        let result = operand(0, &[n as i64, 1]);
        let store = |value, operand| vec![Store { value, operand }];
        Spec {
            body: Body::QuantizedMatmul(Box::new(QuantizedMatmul {
                k: Size::fixed(k as i64),
                a: self.a.operand(DType::F32),
                format: self.format,
                numbers: self.numbers.operand(DType::U8),
                scales: self.scales.operand(DType::F32),
                in_order: self.in_order,
                zeros,
            })),
            dims: [rows, Size::fixed(n as i64)].into_iter().collect(),
            reduced: 0,
            operands: match bias {
                true => vec![operand(0, &[0, 1]), result],
                false => vec![result],
            },
            indices: vec![],
            code: match bias {
                true => vec![
                    Inst::Acc,
                    Inst::Load(0),
                    Inst::Op(ScalarOp::Add, [0, 1, 0]),
                    Inst::Op(ScalarOp::Relu, [2, 0, 0]),
                ],
                false => vec![Inst::Acc],
            },
            stores: match bias {
                true => store(3, 1),
                false => store(0, 0),
            },
        }
    }

    /// A weight, and its value in double precision.
    fn weight(&self, column: usize, step: usize) -> f64 {
        let (bits, per_byte) = (self.format.bits, self.format.per_byte() as usize);
        let packed = |bytes: &[u8], layout: &Layout, at: usize| {
            let byte = bytes[layout.at(column, at / per_byte)];
            f64::from(u32::from(byte) >> (bits as usize * (at % per_byte)) & self.format.mask())
        };
        let block = step / self.format.block as usize;
        let zero = match self.zeros {
            Zeros::Middle => f64::from(1 << (bits - 1)),
            Zeros::Floats => f64::from(float(&self.data[3], self.points.at(column, block))),
            Zeros::Packed => packed(&self.data[3], &self.points, block),
        };
        let scale = f64::from(float(&self.data[2], self.scales.at(column, block)));
        (packed(&self.data[1], &self.numbers, step) - zero) * scale
    }

    fn run(
        &self,
        spec: &Spec,
        envs: [&Env; 2],
        config: &Config,
        team: &Team,
        most: u64,
        bias: &[f32],
    ) -> Vec<f32> {
        let [m, n, _] = self.sizes;
        let kernel = Kernel::within(spec.clone(), envs[0], config, most).expect("a valid spec");
        let mut memory = Memory::new();
        let mut data: Vec<Vec<u8>> = self.data[..3].to_vec();
        data.extend((self.zeros != Zeros::Middle).then(|| self.data[3].clone()));
        data.extend((!bias.is_empty()).then(|| bytes_of(bias.to_vec())));
        data.push(vec![0xff; 4 * m * n]);
        // Each lies in an arena of its own, whose ends an address sanitizer watches.
        let regions: Vec<Region> = data
            .iter()
            .map(|bytes| {
                let region = memory.reserve(bytes.len() as u64).unwrap();
                memory.bytes_mut(&region).copy_from_slice(bytes);
                region
            })
            .collect();
        let workspace = memory.reserve(kernel.workspace()).unwrap();
        memory.bytes_mut(&workspace).fill(0xff);
        kernel
            .run(&mut memory, &regions, &workspace, envs[1], team)
            .unwrap();
        memory.elements::<f32>(regions.last().unwrap()).to_vec()
    }

    /// On every instruction set, with several teams and workspaces, which give the same bits. Rows
    /// may be fewer than the bound of a symbol.
    fn check(&self, random: &mut Random, teams: &[Team]) {
        let [m, n, k] = self.sizes;
        let bias = match random.int(0, 1) {
            0 => vec![],
            _ => random.floats(n),
        };
        let bounded = random.int(0, 1) == 1;
        let rows = match bounded {
            true => Size::symbol(Symbol(0)),
            false => Size::fixed(m as i64),
        };
        let (mut bound, mut env) = (Env::default(), Env::default());
        (bound.0[0], env.0[0]) = ((m + random.int(0, 6)) as u32, m as u32);
        let spec = self.spec(rows, !bias.is_empty());
        for isa in Isa::available() {
            let run = |threads, team: &Team, most| {
                let config = Config { threads, isa };
                self.run(&spec, [&bound, &env], &config, team, most, &bias)
            };
            let first = run(1, &teams[0], u64::MAX);
            let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            for (threads, team, most) in [
                (2, &teams[1], u64::MAX),
                (3, &teams[2], u64::MAX),
                (5, &teams[0], 0),
                (3, &teams[2], 60_000),
            ] {
                let other = run(threads, team, most);
                assert!(
                    bits(&first) == bits(&other),
                    "{isa}: {threads} threads and {most} bytes give other bits"
                );
            }
            for (at, &result) in first.iter().enumerate() {
                let (row, column) = (at / n, at % n);
                let (sum, magnitude) = (0..k).fold((0.0, 0.0), |(sum, magnitude), step| {
                    let x = f64::from(float(&self.data[0], self.a.at(row, step)));
                    let term = x * self.weight(column, step);
                    (sum + term, magnitude + term.abs())
                });
                let bias = bias.get(column).copied();
                let plus = bias.map_or(sum, |bias| (sum + f64::from(bias)).max(0.0));
                let magnitude = magnitude + f64::from(bias.unwrap_or(0.0).abs());
                // A weight has two roundings, of the difference and of the product.
                assert_sum(result, plus, magnitude, k + 4, &|| {
                    format!(
                        "{isa} {:?} {:?} {:?} at {row}, {column}",
                        self.sizes, self.format, self.zeros
                    )
                });
            }
        }
    }
}

/// Every format with few rows and with many, along a short and a long contracted axis.
#[test]
fn products_of_all_formats() {
    let mut random = Random(0x9a7d);
    let teams = teams();
    let formats = [
        (8, 8),
        (8, 32),
        (4, 16),
        (4, 32),
        (4, 48),
        (4, 128),
        (2, 32),
        (2, 64),
    ];
    for (bits, block) in formats {
        let format = Quantization { bits, block };
        for zeros in [Zeros::Middle, Zeros::Floats, Zeros::Packed] {
            for m in [1, random.int(2, 4), random.int(5, 16), random.int(17, 40)] {
                let blocks = random.int(1, 400 / block as usize + 1);
                let n = random.of(&[1, 2, 3, 5, 31, 40]);
                let sizes = [m, n, blocks * block as usize];
                Case::new(&mut random, sizes, format, zeros).check(&mut random, &teams);
            }
        }
    }
}

/// Sums of several k-blocks, which begin inside blocks of weights, and results that threads share.
#[test]
fn long_products_that_threads_share() {
    let mut random = Random(77);
    let teams = teams();
    for (sizes, block) in [
        ([1, 300, 2048], 32),
        ([3, 70, 4096], 64),
        ([60, 33, 1008], 48),
        ([20, 3, 5120], 128),
        ([180, 90, 640], 32),
    ] {
        let format = Quantization { bits: 4, block };
        Case::new(&mut random, sizes, format, Zeros::Packed).check(&mut random, &teams);
    }
}

#[test]
fn no_rows_and_no_columns() {
    let mut random = Random(5);
    let teams = teams();
    let format = Quantization { bits: 4, block: 32 };
    for sizes in [[0, 3, 64], [2, 0, 64], [30, 0, 64], [2, 3, 0], [20, 3, 0]] {
        Case::new(&mut random, sizes, format, Zeros::Floats).check(&mut random, &teams);
    }
}

/// Formats and shapes that the kernel does not take are errors that say so.
#[test]
fn other_formats_are_refused() {
    let config = Config {
        threads: 1,
        isa: Isa::detect(),
    };
    let case = |block| {
        let format = Quantization { bits: 4, block };
        Case::new(&mut Random(3), [2, 3, 96], format, Zeros::Middle)
    };
    let error = |spec: Spec| Kernel::new(spec, &Env::default(), &config).err().unwrap();
    let rows = Size::fixed(2);
    // Half a vector of bytes.
    assert!(matches!(
        error(case(8).spec(rows, false)),
        SpecError::Unsupported(_)
    ));
    let broken = |change: &dyn Fn(&mut QuantizedMatmul)| {
        let mut spec = case(32).spec(rows, false);
        let Body::QuantizedMatmul(body) = &mut spec.body else {
            unreachable!()
        };
        change(body);
        error(spec)
    };
    for change in [
        &(|body: &mut QuantizedMatmul| body.k = Size::fixed(80)) as &dyn Fn(&mut QuantizedMatmul),
        &|body| body.format.bits = 3,
        &|body| body.format.block = 0,
        &|body| body.numbers.strides[1] = Size::fixed(2),
        &|body| body.k = Size::symbol(Symbol(1)),
    ] {
        assert!(matches!(broken(change), SpecError::Quantized { .. }));
    }
    let wrong_type = broken(&|body| body.scales.dtype = DType::F16);
    assert!(
        matches!(wrong_type, SpecError::OperandType { .. }),
        "{wrong_type}"
    );
}

/// Sums in order have the bits of a product with the decoded weights, with few rows and with many.
#[test]
fn sums_in_order_are_those_of_floats() {
    let mut random = Random(21);
    let teams = teams();
    let format = Quantization { bits: 4, block: 32 };
    for sizes in [[1, 40, 96], [5, 3, 1600], [16, 1, 2048], [50, 70, 352]] {
        let mut case = Case::new(&mut random, sizes, format, Zeros::Packed);
        case.in_order = true;
        case.check(&mut random, &teams);
        let [m, n, k] = sizes;
        let columns = (0..n).flat_map(|column| (0..k).map(move |step| (column, step)));
        // The difference is exact, and the product is rounded once.
        let weights: Vec<f32> = columns
            .map(|(column, step)| case.weight(column, step) as f32)
            .collect();
        let body = Matmul {
            in_order: true,
            k: Size::fixed(k as i64),
            a: case.a.operand(DType::F32),
            b: operand(0, &[1, k as i64]),
        };
        let floats = Spec {
            body: Body::Matmul(body),
            ..case.spec(Size::fixed(m as i64), false)
        };
        let a: Vec<f32> = (0..case.a.len(m))
            .map(|at| float(&case.data[0], at))
            .collect();
        let args = [a, weights, vec![f32::NAN; m * n]];
        let env = Env::default();
        for isa in Isa::available() {
            let config = Config { threads: 2, isa };
            let spec = case.spec(Size::fixed(m as i64), false);
            let own = case.run(&spec, [&env, &env], &config, &teams[1], u64::MAX, &[]);
            let expected = run(&floats, &env, &env, isa, &teams[1], &args).remove(2);
            let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert!(bits(&own) == bits(&expected), "{isa} {sizes:?}");
        }
    }
}
