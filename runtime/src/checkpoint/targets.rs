//! The tensors that a session loads, and the variables that they go to: a variable each, or the parts
//! of a quantized weight.

use std::path::Path;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::spec::Quantization;

use crate::backend::Backend;
use crate::error::Result;
use crate::graph::{QuantizedPart, QuantizedRole};
use crate::session::Variable;
use crate::weights::{Expected, NotFinite, Quantized, WeightsError, check_finite, quantize};

/// Where a tensor goes.
pub(super) enum Target {
    /// The variable of this index.
    Variable(usize),
    /// The variables of these indices, which hold a quantized weight.
    Quantized(Parts),
}

/// The variables of a quantized weight.
pub(super) struct Parts {
    numbers: usize,
    scales: usize,
    zeros: usize,
    columns: usize,
    pub format: Quantization,
}

/// The values of a quantized weight in a file.
pub(super) enum Values {
    /// Floats, which are quantized.
    Floats(Vec<f32>),
    /// Numbers in the format of the weight.
    Numbers(Quantized),
}

impl Target {
    /// The variables that it names.
    pub fn variables(&self) -> impl Iterator<Item = usize> {
        match self {
            Target::Variable(at) => vec![*at],
            Target::Quantized(parts) => vec![parts.numbers, parts.scales, parts.zeros],
        }
        .into_iter()
    }
}

/// The tensors for the variables of these indices. A quantized weight is loaded from one tensor of
/// floats, unless a file `has` its numbers.
pub(super) fn targets(
    variables: &[Variable],
    wanted: impl Iterator<Item = usize>,
    shape: impl Fn(&Variable) -> Vec<u64>,
    has: impl Fn(&str) -> bool,
) -> (Vec<Expected>, Vec<Target>) {
    let part = |of: &QuantizedPart, role: QuantizedRole| {
        variables.iter().position(|v| {
            let own = v.info.part.as_ref();
            own.is_some_and(|own| own.weight == of.weight && own.role == role)
        })
    };
    let numbers = |of: &QuantizedPart| part(of, QuantizedRole::Numbers);
    let target = |at: usize| {
        let variable = &variables[at];
        let whole = variable.info.part.as_ref().filter(|part| {
            let numbers = numbers(part).map(|at| &*variables[at].info.name);
            numbers.is_some_and(|name| !has(name))
        });
        let Some(of) = whole else {
            let expected = Expected {
                name: variable.info.name.to_string(),
                dtype: variable.info.dtype,
                shape: shape(variable),
                is_state: !variable.info.is_param,
            };
            return Some((expected, Target::Variable(at)));
        };
        if of.role != QuantizedRole::Numbers {
            return None;
        }
        let expected = Expected {
            name: of.weight.to_string(),
            dtype: DType::F32,
            shape: of.dims.map(|length| length as u64).to_vec(),
            is_state: false,
        };
        let parts = Parts {
            numbers: at,
            scales: part(of, QuantizedRole::Scales)?,
            zeros: part(of, QuantizedRole::Zeros)?,
            columns: of.dims[1],
            format: of.format,
        };
        Some((expected, Target::Quantized(parts)))
    };
    wanted.filter_map(target).unzip()
}

/// The floats of little-endian bytes.
pub(super) fn floats(bytes: &[u8]) -> Vec<f32> {
    let (chunks, _) = bytes.as_chunks::<4>();
    chunks
        .iter()
        .map(|&chunk| f32::from_le_bytes(chunk))
        .collect()
}

impl Parts {
    /// Fails if one of the values of a weight is not finite.
    pub fn check(&self, values: &Values, name: &str, path: &Path) -> Result<(), WeightsError> {
        let checked = match values {
            Values::Floats(floats) => check_finite(floats, self.columns),
            Values::Numbers(numbers) => numbers.check(self.columns, self.format),
        };
        checked.map_err(
            |NotFinite { row, column, value }| WeightsError::NotQuantized {
                path: path.to_owned(),
                tensor: name.to_owned(),
                at: [row, column],
                value,
            },
        )
    }

    /// Writes a weight of finite values to its variables.
    pub fn write(
        &self,
        values: Values,
        variables: &[Variable],
        backend: &mut dyn Backend,
    ) -> Result<()> {
        let quantized = match values {
            Values::Floats(floats) => quantize(&floats, self.columns, self.format),
            Values::Numbers(numbers) => numbers,
        };
        let scales: Vec<u8> = quantized
            .scales
            .into_iter()
            .flat_map(f32::to_le_bytes)
            .collect();
        for (at, bytes) in [
            (self.numbers, quantized.numbers),
            (self.scales, scales),
            (self.zeros, quantized.zeros),
        ] {
            backend.map_write(&variables[at].region, &mut |memory, region| {
                memory.bytes_mut(region)[..bytes.len()].copy_from_slice(&bytes)
            })?;
        }
        Ok(())
    }
}
