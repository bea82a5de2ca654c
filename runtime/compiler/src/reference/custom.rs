//! Kernels of the user, which are their own definition: they compute in the types of memory in both
//! precisions.

use half::{bf16, f16};
use slabwise_kernels::cpu::Team;
use slabwise_kernels::custom::{CustomInput, CustomKernel};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::memory::{Memory, Region};

use super::Array;

pub(super) fn run(kernel: &CustomKernel, args: &[&Array], dims: &[usize]) -> Array {
    let (mut memory, mut own) = (Memory::new(), Memory::new());
    let regions: Vec<Region> = args.iter().map(|arg| stored(&mut memory, arg)).collect();
    let inputs: Vec<CustomInput<'_>> = args
        .iter()
        .zip(&regions)
        .map(|(arg, region)| CustomInput {
            dtype: arg.dtype,
            dims: arg.dims.as_slice().into(),
            bytes: memory.bytes(region),
        })
        .collect();
    let mut result = Array::zeros(kernel.result(), dims);
    let region = stored(&mut own, &result);
    kernel.run(&inputs, own.bytes_mut(&region), dims, &Team::new(1));
    result.values = match result.dtype {
        DType::F32 => values(own.elements::<f32>(&region), |x| x.into()),
        DType::F16 => values(own.elements::<f16>(&region), f16::to_f64),
        DType::BF16 => values(own.elements::<bf16>(&region), bf16::to_f64),
        DType::I32 => values(own.elements::<i32>(&region), |x| x.into()),
        DType::U8 | DType::Bool => values(own.bytes(&region), |x| x.into()),
    };
    result
}

fn values<T: Copy>(elements: &[T], number: impl Fn(T) -> f64) -> Vec<f64> {
    elements.iter().map(|&x| number(x)).collect()
}

/// The elements of an array in memory.
fn stored(memory: &mut Memory, array: &Array) -> Region {
    let bytes = (array.values.len() * array.dtype.bytes()) as u64;
    let region = memory.reserve(bytes).expect("host memory");
    let numbers = array.values.iter();
    match array.dtype {
        DType::F32 => write(memory.elements_mut(&region), numbers.map(|&x| x as f32)),
        DType::F16 => write(
            memory.elements_mut(&region),
            numbers.map(|&x| f16::from_f64(x)),
        ),
        DType::BF16 => write(
            memory.elements_mut(&region),
            numbers.map(|&x| bf16::from_f64(x)),
        ),
        DType::I32 => write(memory.elements_mut(&region), numbers.map(|&x| x as i32)),
        DType::U8 | DType::Bool => write(memory.bytes_mut(&region), numbers.map(|&x| x as u8)),
    }
    region
}

fn write<T>(elements: &mut [T], numbers: impl Iterator<Item = T>) {
    elements.iter_mut().zip(numbers).for_each(|(to, x)| *to = x);
}
