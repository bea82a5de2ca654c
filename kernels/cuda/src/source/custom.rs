//! Kernels whose body is the user's.

use std::fmt::Write as _;
use std::sync::Arc;

use slabwise_kernels::custom::CustomKernel;
use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{Custom, Operand, Spec, SpecError};

use super::THREADS;
use super::elementwise::blocks;
use super::params::{Number, Params};
use super::space::Space;
use crate::abi::{Dispatch, Target};
use crate::code::Storage;
use crate::lowered::Lowered;

/// The most characters of the kernel's name in that of the function.
const NAME_MAX: usize = 40;

/// The attribute of names that the user's code need not use.
const UNUSED: &str = "[[maybe_unused]]";

pub fn lower(
    spec: &Spec,
    custom: &Custom,
    bounds: &Env,
    target: &Target,
) -> Result<Lowered, SpecError> {
    let name = custom.kernel.name();
    let Some(code) = custom.kernel.cuda() else {
        return Err(SpecError::unsupported(format!(
            "the custom kernel \"{name}\" has no code for CUDA; add it by with_cuda"
        )));
    };
    let mut params = Params::new(spec, bounds, target);
    let mut body = String::new();
    for (k, (operand, space)) in custom.inputs.iter().enumerate() {
        body += &tensor(&mut params, &format!("in{k}"), "const ", k, operand, space);
    }
    let at = custom.inputs.len();
    body += &tensor(&mut params, "out", "", at, &custom.result, &spec.dims);
    let _ = writeln!(
        body,
        "{UNUSED} const idx thread = idx(blockIdx.x) * {THREADS} + threadIdx.x, threads = idx(gridDim.x) * {THREADS};\n{}",
        numbered(name, code)
    );
    let function = params.function(&function_name(&custom.kernel), THREADS, &body);
    let (space, target) = (Space::over(&spec.dims), *target);
    Ok(Lowered::new(vec![function], 0, move |env| {
        let blocks = blocks(space.points(env), THREADS, &target);
        vec![Dispatch::new(0, blocks, THREADS, params.words(env))]
    }))
}

/// Declares the pointer `name` to a tensor, its lengths and their product.
fn tensor(
    params: &mut Params,
    name: &str,
    access: &str,
    argument: usize,
    operand: &Operand,
    dims: &[Size],
) -> String {
    let ty = match operand.dtype {
        DType::Bool | DType::U8 => "unsigned char",
        dtype => Storage::of(dtype).ty,
    };
    let offset = params.size(operand.offset);
    let base = params.pointer(&format!("{name}_base"), &format!("{access}{ty}"), argument);
    let lengths: Vec<String> = dims.iter().map(|&dim| params.size(dim)).collect();
    let lengths = match lengths.is_empty() {
        true => "1".to_owned(),
        false => lengths.join(", "),
    };
    let space = Space::over(dims);
    let count: Number = Arc::new(move |env| space.points(env));
    format!(
        "{base}{UNUSED} {access}{ty}* const {name} = {name}_base + {offset};\n\
         {UNUSED} const idx {name}_dims[] = {{{lengths}}}, {name}_count = {};\n",
        params.number(&count)
    )
}

/// The user's code, whose lines the compiler counts from 1 and names after the kernel.
fn numbered(name: &str, code: &str) -> String {
    let plain = |c: char| match c {
        '"' | '\\' => '\'',
        c if c.is_control() => ' ',
        c => c,
    };
    let name: String = name.chars().map(plain).collect();
    let mut text = format!("#line 1 \"custom kernel '{name}'\"\n");
    for line in code.lines() {
        // Blank lines of a function are removed.
        let line = if line.trim().is_empty() { "//" } else { line };
        let _ = writeln!(text, "{line}");
    }
    text
}

/// `custom_` and the name of the kernel, as far as it can be a part of an identifier.
fn function_name(kernel: &CustomKernel) -> String {
    let name = kernel.name().chars().take(NAME_MAX);
    let name = name.map(|c| if c.is_ascii_alphanumeric() { c } else { '_' });
    format!("custom_{}", name.collect::<String>())
}
