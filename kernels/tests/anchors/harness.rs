//! Random layouts, and runs of one spec on every instruction set and several teams.

use slabwise_kernels::cpu::{Config, Fault, Isa, Kernel, Team};
use slabwise_kernels::dtype::{DType, Lane};
use slabwise_kernels::memory::Memory;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::{Env, Size, Symbol};
use slabwise_kernels::spec::{Body, Dims, Inst, Operand, Spec, Store};

/// SplitMix64 (Steele, Lea, Flood 2014).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in `range`.
    pub fn pick(&mut self, range: std::ops::Range<usize>) -> usize {
        range.start + self.next() as usize % (range.end - range.start)
    }

    pub fn chance(&mut self, one_in: usize) -> bool {
        self.pick(0..one_in) == 0
    }

    /// Values with many ties, some −0, ±∞ and NaN.
    pub fn floats(&mut self, count: usize) -> Vec<f32> {
        let special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0];
        (0..count)
            .map(|_| {
                if self.chance(6) {
                    special[self.pick(0..4)]
                } else {
                    self.pick(0..9) as f32 * 0.75 - 3.0
                }
            })
            .collect()
    }

    /// Finite values whose sums round.
    pub fn finite(&mut self, count: usize) -> Vec<f32> {
        (0..count)
            .map(|_| (self.next() >> 40) as f32 / 8e6 - 1.0)
            .collect()
    }
}

/// A dimension: its size in the spec, and its value in the run.
#[derive(Clone, Copy)]
pub struct Axis {
    pub size: Size,
    pub value: usize,
}

/// A fixed axis.
pub fn fixed(value: usize) -> Axis {
    Axis {
        size: Size::fixed(value as i64),
        value,
    }
}

/// An axis known by its bound, `value` long in the run.
pub fn bounded(value: usize) -> Axis {
    Axis {
        size: Size::symbol(Symbol(0)),
        value,
    }
}

pub fn sizes(axes: &[Axis]) -> Dims {
    axes.iter().map(|axis| axis.size).collect()
}

pub fn points(axes: &[Axis]) -> usize {
    axes.iter().map(|axis| axis.value).product()
}

/// Every coordinate of a space in row-major order.
pub fn coordinates(axes: &[Axis]) -> impl Iterator<Item = Vec<usize>> {
    let sizes: Vec<usize> = axes.iter().map(|axis| axis.value).collect();
    (0..points(axes)).map(move |mut position| {
        let mut at = vec![0; sizes.len()];
        for (c, &n) in at.iter_mut().zip(&sizes).rev() {
            *c = position % n;
            position /= n;
        }
        at
    })
}

/// The row-major position of a coordinate.
pub fn position(at: &[usize], axes: &[Axis]) -> usize {
    at.iter()
        .zip(axes)
        .fold(0, |p, (&c, axis)| p * axis.value + c)
}

/// An operand over `axes`: contiguous, or with its axes permuted, gaps between rows and an offset.
pub fn layout(random: &mut Random, dtype: DType, axes: &[Axis], contiguous: bool) -> Operand {
    if contiguous {
        return Operand::contiguous(dtype, &sizes(axes)).unwrap();
    }
    let mut order: Vec<usize> = (0..axes.len()).collect();
    for i in (1..order.len()).rev() {
        order.swap(i, random.pick(0..i + 1));
    }
    let mut operand = Operand {
        dtype,
        offset: Size::fixed(random.pick(0..5) as i64),
        strides: sizes(axes),
    };
    let mut stride = Size::fixed(random.pick(1..3) as i64);
    for &axis in order.iter().rev() {
        operand.strides[axis] = stride;
        let gap = Size::fixed(random.pick(0..2) as i64);
        stride = stride
            .checked_mul(axes[axis].size.checked_add(gap).unwrap())
            .unwrap();
    }
    operand
}

/// Values of one argument, row-major over its space, as lane bits.
#[derive(Clone, Debug, PartialEq)]
pub struct Values(pub Vec<u32>);

impl Values {
    pub fn f32(values: &[f32]) -> Values {
        Values(values.iter().map(|v| v.to_bits()).collect())
    }

    pub fn i32(values: &[i32]) -> Values {
        Values(values.iter().map(|&v| v as u32).collect())
    }
}

/// A spec whose `code` stores the anchor's value; with `plus`, the value plus another operand
/// (argument before the result).
pub fn storing(body: Body, dims: Dims, out: Operand, plus: Option<Operand>) -> Spec {
    let plain = plus.is_none();
    Spec {
        body,
        dims,
        reduced: 0,
        operands: plus.into_iter().chain([out]).collect(),
        indices: vec![],
        code: if plain {
            vec![Inst::Acc]
        } else {
            vec![Inst::Load(0), Inst::Acc, Inst::Op(ScalarOp::Add, [0, 1, 0])]
        },
        stores: vec![if plain {
            Store {
                value: 0,
                operand: 0,
            }
        } else {
            Store {
                value: 2,
                operand: 1,
            }
        }],
    }
}

const POISON: u8 = 0xa5;
/// The bound of the one symbol that tests use.
pub const BOUND: usize = 5;

/// Runs a spec with every instruction set and one to four threads. `given` holds an argument's
/// values, or `None` for one that is written. Returns the values of every argument; panics if runs
/// differ in a bit, except for those of a NaN, or touch other memory.
pub fn run(spec: &Spec, batch: usize, given: &[Option<Values>]) -> Result<Vec<Values>, Fault> {
    let mut results: Vec<Result<Vec<Values>, Fault>> = vec![];
    for isa in Isa::available() {
        for threads in 1..=4 {
            results.push(run_once(spec, batch, given, &Config { threads, isa }));
        }
    }
    let first = results.swap_remove(0);
    // Of a sum of two NaNs the compiler chooses the order, and the processor the first.
    let arguments = spec.arguments();
    let same = |other: &Result<Vec<Values>, Fault>| match (&first, other) {
        (Ok(first), Ok(other)) => {
            arguments
                .iter()
                .zip(first.iter().zip(other))
                .all(|((operand, ..), (a, b))| {
                    a.0.iter().zip(&b.0).all(|(&a, &b)| {
                        let is_nan = |bits| f32::from_bits(bits).is_nan();
                        a == b || operand.dtype == DType::F32 && is_nan(a) && is_nan(b)
                    })
                })
        }
        (first, other) => first == other,
    };
    assert!(results.iter().all(same), "runs of {spec:?} differ");
    first
}

fn run_once(
    spec: &Spec,
    batch: usize,
    given: &[Option<Values>],
    config: &Config,
) -> Result<Vec<Values>, Fault> {
    // A first axis of fixed size may be longer than the bound; no size depends on the symbol then.
    let (bound, env) = (Env([BOUND as u32; 8]), Env([batch.min(BOUND) as u32; 8]));
    let kernel = Kernel::new(spec.clone(), &bound, config).unwrap();
    let arguments = spec.arguments();
    assert_eq!(arguments.len(), given.len());
    let mut memory = Memory::new();
    let workspace = memory.reserve(kernel.workspace()).unwrap();
    memory.bytes_mut(&workspace).fill(0xff);
    let mut places = vec![];
    let mut regions = vec![];
    for ((operand, dims, _), values) in arguments.iter().zip(given) {
        // The source of a gather has an axis more than its values here name: it is given in memory
        // order.
        let axes: Vec<Axis> = dims
            .iter()
            .map(|d| Axis {
                size: *d,
                value: d.usize_at(&env),
            })
            .collect();
        let width = operand.dtype.bytes();
        let mut elements: Vec<usize> = coordinates(&axes)
            .map(|at| {
                operand.offset.usize_at(&env)
                    + at.iter()
                        .zip(&operand.strides)
                        .map(|(c, s)| c * s.usize_at(&env))
                        .sum::<usize>()
            })
            .collect();
        if matches!(spec.body, Body::Gather(_)) && operand.strides.len() > spec.dims.len() {
            elements.sort_unstable();
            elements.dedup();
        }
        let region = memory
            .reserve(operand.extent(dims, &env) * width as u64)
            .unwrap();
        let bytes = memory.bytes_mut(&region);
        bytes.fill(POISON);
        if let Some(values) = values {
            assert_eq!(values.0.len(), elements.len(), "values of an argument");
            for (&element, bits) in elements.iter().zip(&values.0) {
                bytes[element * width..][..width].copy_from_slice(&bits.to_le_bytes()[..width]);
            }
        }
        regions.push(region);
        places.push(elements);
    }
    kernel.run(
        &mut memory,
        &regions,
        &workspace,
        &env,
        &Team::new(config.threads),
    )?;
    let mut results = vec![];
    for (((operand, _, _), region), elements) in arguments.iter().zip(&regions).zip(&places) {
        let width = operand.dtype.bytes();
        let bytes = memory.bytes(region);
        let mut untouched = vec![true; bytes.len()];
        let values = elements.iter().map(|&element| {
            untouched[element * width..][..width].fill(false);
            let mut bits = [0; 4];
            bits[..width].copy_from_slice(&bytes[element * width..][..width]);
            u32::from_le_bytes(bits)
        });
        results.push(Values(values.collect()));
        assert!(
            bytes
                .iter()
                .zip(untouched)
                .all(|(&b, free)| !free || b == POISON),
            "a gap of an argument was written"
        );
    }
    Ok(results)
}

/// The lane bits of `value + other`, as the epilogue of [`storing`] computes it.
pub fn plus(lane: Lane, value: u32, other: u32) -> u32 {
    match lane {
        Lane::F32 => (f32::from_bits(other) + f32::from_bits(value)).to_bits(),
        _ => value.wrapping_add(other),
    }
}

/// Compares lane bits; any NaN equals any other.
pub fn assert_same(lane: Lane, got: &Values, expected: &[u32], what: &str) {
    assert_eq!(got.0.len(), expected.len(), "{what}");
    for (i, (&g, &e)) in got.0.iter().zip(expected).enumerate() {
        let (fg, fe) = (f32::from_bits(g), f32::from_bits(e));
        let same = g == e || lane == Lane::F32 && fg.is_nan() && fe.is_nan();
        assert!(
            same,
            "{what}: point {i} is {g:#x} ({fg}), expected {e:#x} ({fe})"
        );
    }
}
