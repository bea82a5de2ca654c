//! Kernels that are functions of the user.

use smallvec::SmallVec;

use super::Launch;
use crate::custom::CustomInput;
use crate::size::{Env, Size};
use crate::spec::{Body, Operand, Spec};

/// Runs the function in memory of a launch.
///
/// # Safety
/// The addresses must be as [`Launch`] promises, and the spec's operands contiguous.
pub unsafe fn run(spec: &Spec, launch: &Launch) {
    let Body::Custom(custom) = &spec.body else {
        unreachable!("checked when it was prepared")
    };
    let lengths = |dims: &[Size]| -> SmallVec<[usize; 6]> {
        dims.iter().map(|d| d.usize_at(launch.env)).collect()
    };
    let inputs: SmallVec<[CustomInput<'_>; 4]> = custom
        .inputs
        .iter()
        .zip(launch.args)
        .map(|((operand, space), &address)| {
            let dims = lengths(space);
            let (start, len) = span(operand, &dims, address, launch.env);
            CustomInput {
                dtype: operand.dtype,
                dims,
                // SAFETY: the bytes of a contiguous operand, which nothing writes meanwhile.
                bytes: unsafe { std::slice::from_raw_parts(start, len) },
            }
        })
        .collect();
    let dims = lengths(&spec.dims);
    let (start, len) = span(&custom.result, &dims, launch.args[inputs.len()], launch.env);
    // SAFETY: the bytes of a contiguous operand, which overlap no others; the launch alone accesses
    // them.
    let result = unsafe { std::slice::from_raw_parts_mut(start, len) };
    custom.kernel.run(&inputs, result, &dims, launch.team);
}

/// The first byte of a contiguous operand, and how many there are. No bytes have an address that is
/// aligned to any element.
fn span(operand: &Operand, dims: &[usize], address: *mut u8, env: &Env) -> (*mut u8, usize) {
    let size = operand.dtype.bytes();
    match dims.iter().product::<usize>() * size {
        0 => (std::ptr::without_provenance_mut(64), 0),
        len => (
            address.wrapping_add(operand.offset.usize_at(env) * size),
            len,
        ),
    }
}
