//! Initial values of variables: a function of the seed and the variable's name alone, so that
//! neither the order of declarations nor the model around a layer changes its weights.

use std::sync::{Arc, Mutex, PoisonError};

use half::{bf16, f16};
use slabwise_kernels::cpu::Team;
use slabwise_kernels::dtype::DType;
use slabwise_kernels::memory::{Element, Memory, Region};
use slabwise_kernels::random::{philox, unit};
use slabwise_kernels::scalar::Value;

use crate::graph::{QuantizedPart, QuantizedRole, VariableInfo};
use crate::params::Init;
use crate::trace::RANDOM;
use crate::weights::{Quantized, quantize};

/// FNV-1a, 64 bits: a stable number for a name.
fn hash(name: &str) -> u64 {
    name.bytes().fold(0xCBF2_9CE4_8422_2325, |h, b| {
        (h ^ u64::from(b)).wrapping_mul(0x100_0000_01B3)
    })
}

/// Four uniform numbers in [0, 1) for block `at` of a variable.
fn block(seed: u64, name: u64, at: usize) -> [f32; 4] {
    let key = [seed as u32, (seed >> 32) as u32];
    philox(
        [
            at as u32,
            (at as u64 >> 32) as u32,
            name as u32,
            (name >> 32) as u32,
        ],
        key,
    )
    .map(unit)
}

/// The elements that a thread initialises at a time, a multiple of the four of a block.
const PART: usize = 1 << 14;

/// Fills a new variable's region, with all threads of a team if it is large.
pub(crate) fn fill(
    info: &VariableInfo,
    seed: u64,
    memory: &mut Memory,
    region: &Region,
    team: &Team,
    last: &mut LastQuantized,
) {
    if let Some(data) = &info.data {
        return memory.bytes_mut(region).copy_from_slice(data);
    }
    if let Some(part) = &info.part {
        return fill_part(part, seed, memory, region, team, last);
    }
    let name = hash(&info.name);
    match (info.init, info.dtype) {
        (Init::RandomState, _) => {
            // Each state has different numbers; those of training depend on the seed alone.
            let seed = if &*info.name == RANDOM {
                seed
            } else {
                seed ^ name
            };
            let state = [seed as u32 as i32, (seed >> 32) as u32 as i32, 0];
            for (slot, value) in memory.elements_mut::<i32>(region).iter_mut().zip(state) {
                *slot = value;
            }
        }
        (Init::Uniform { .. } | Init::Normal { .. }, dtype) if dtype.is_float() => {
            floats(dtype, memory, region, team, |at| {
                four(info.init, seed, name, at)
            });
        }
        (Init::Constant(value), _) => constant(value, info.dtype, memory, region, team),
        // Random initial integers have no use; the declaration refuses them, so this would be zero.
        (Init::Uniform { .. } | Init::Normal { .. }, _) => {
            constant(0.0, info.dtype, memory, region, team)
        }
    }
}

/// The numbers of a variable from the four of number `at` on.
fn four(init: Init, seed: u64, name: u64, at: usize) -> [f32; 4] {
    match init {
        Init::Uniform { low, high } => block(seed, name, at).map(|u| low + (high - low) * u),
        Init::Normal { mean, std } => {
            let u = block(seed, name, at);
            // Box and Muller (1958); 1 − u is in (0, 1], where the logarithm is finite.
            let pair = |a: f32, b: f32| {
                let (r, angle) = (
                    (-2.0 * f64::from(1.0 - a).ln()).sqrt(),
                    std::f64::consts::TAU * f64::from(b),
                );
                [(r * angle.cos()) as f32, (r * angle.sin()) as f32]
            };
            let ([a, b], [c, d]) = (pair(u[0], u[1]), pair(u[2], u[3]));
            [a, b, c, d].map(|z| mean + std * z)
        }
        Init::Constant(value) => [value; 4],
        Init::RandomState => [0.0; 4],
    }
}

/// The weight whose parts were filled last: they follow one another.
pub(crate) type LastQuantized = Option<(Arc<str>, Quantized)>;

/// Fills a part of a quantized weight, whose values are those that it would have as f32.
fn fill_part(
    part: &QuantizedPart,
    seed: u64,
    memory: &mut Memory,
    region: &Region,
    team: &Team,
    last: &mut LastQuantized,
) {
    let known = last.take().filter(|(weight, _)| *weight == part.weight);
    let (_, of) = last.insert(known.unwrap_or_else(|| {
        let of = quantized(part, seed, team);
        (Arc::clone(&part.weight), of)
    }));
    let to = memory.bytes_mut(region);
    match part.role {
        QuantizedRole::Numbers => to.copy_from_slice(&of.numbers),
        QuantizedRole::Scales => {
            for (to, scale) in to.chunks_exact_mut(4).zip(&of.scales) {
                to.copy_from_slice(&scale.to_le_bytes());
            }
        }
        QuantizedRole::Zeros => to.copy_from_slice(&of.zeros),
    }
}

/// The initial value of a quantized weight, with all threads of a team.
fn quantized(part: &QuantizedPart, seed: u64, team: &Team) -> Quantized {
    let ([rows, columns], name) = (part.dims, hash(&part.weight));
    if columns == 0 {
        return Quantized::default();
    }
    let quantized: Vec<Mutex<Option<Quantized>>> = (0..rows).map(|_| Mutex::default()).collect();
    team.run(rows, &|row, _| {
        let (first, end) = (row * columns, (row + 1) * columns);
        let fours = (first / 4..end.div_ceil(4)).flat_map(|at| four(part.init, seed, name, at));
        let floats: Vec<f32> = fours.skip(first % 4).take(columns).collect();
        let mut place = quantized[row]
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *place = Some(quantize(&floats, columns, part.format));
    });
    let mut whole = Quantized::default();
    for row in quantized {
        let row = row.into_inner().unwrap_or_else(PoisonError::into_inner);
        let row = row.unwrap_or_default();
        whole.numbers.extend(row.numbers);
        whole.scales.extend(row.scales);
        whole.zeros.extend(row.zeros);
    }
    whole
}

/// Fills a region of floats with four numbers at a time, by the number of the four; halves are the
/// nearest to those of f32.
fn floats(
    dtype: DType,
    memory: &mut Memory,
    region: &Region,
    team: &Team,
    numbers: impl Fn(usize) -> [f32; 4] + Sync,
) {
    fn all<T: Element + Send>(
        elements: &mut [T],
        team: &Team,
        numbers: impl Fn(usize) -> [f32; 4] + Sync,
        of: fn(f32) -> T,
    ) {
        each_part(elements, team, |first, part| {
            for (at, four) in (first / 4..).zip(part.chunks_mut(4)) {
                for (slot, number) in four.iter_mut().zip(numbers(at)) {
                    *slot = of(number);
                }
            }
        });
    }
    match dtype {
        DType::F16 => all(memory.elements_mut(region), team, numbers, f16::from_f32),
        DType::BF16 => all(memory.elements_mut(region), team, numbers, bf16::from_f32),
        _ => all(memory.elements_mut(region), team, numbers, |number| number),
    }
}

fn constant(value: f32, dtype: DType, memory: &mut Memory, region: &Region, team: &Team) {
    fn all<T: Element + Send + Sync>(elements: &mut [T], team: &Team, value: T) {
        each_part(elements, team, |_, part| part.fill(value));
    }
    match Value::F32(value).cast(dtype.lane()) {
        Value::F32(v) if dtype == DType::F16 => {
            all(memory.elements_mut(region), team, f16::from_f32(v))
        }
        Value::F32(v) if dtype == DType::BF16 => {
            all(memory.elements_mut(region), team, bf16::from_f32(v))
        }
        Value::F32(v) => all(memory.elements_mut(region), team, v),
        Value::I32(v) if dtype == DType::U8 => memory.bytes_mut(region).fill(v.clamp(0, 255) as u8),
        Value::I32(v) => all(memory.elements_mut(region), team, v),
        Value::Bool(v) => memory.bytes_mut(region).fill(u8::from(v)),
    }
}

/// Passes each part of the elements to `work`, with the number of its first element, on the threads
/// of a team.
fn each_part<T: Send>(elements: &mut [T], team: &Team, work: impl Fn(usize, &mut [T]) + Sync) {
    let parts: Vec<Mutex<&mut [T]>> = elements.chunks_mut(PART).map(Mutex::new).collect();
    team.run(parts.len(), &|part, _| {
        let mut elements = parts[part].lock().unwrap_or_else(PoisonError::into_inner);
        work(part * PART, &mut elements);
    });
}
